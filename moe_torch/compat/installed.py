"""Put an interface of `triton_kernels` where `import triton_kernels` finds it."""

from __future__ import annotations

import importlib
import importlib.machinery
import pkgutil
import sys
from types import ModuleType, TracebackType

from moe_core.base.checks import require_choice
from moe_core.errors import InvalidInput

_NAME, _OLD, _NEW = "triton_kernels", "moe_torch.compat.triton_kernels", "moe_torch.compat.triton_kernels_38"
_SAME = ("compaction", "numerics", "swiglu")
#: Paths of Triton 3.8, and the module of each.
_PATHS = {
    **{path: f"{_OLD}.{path}" for path in _SAME},
    "matmul_details.opt_flags": f"{_OLD}.matmul_ogs_details.opt_flags",
    **{path: f"{_NEW}.{path}" for path in ("matmul", "reduce", "tensor", "topk")},
    **{f"tensor_details.{path}": f"{_NEW}.tensor" for path in ("bitmatrix", "dtype", "ragged_tensor")},
    **{path: f"{_NEW}.layout" for path in ("tensor_details.layout", "tensor_details.layout_details.strided")},
    "numerics_details.mxfp": f"{_NEW}.mxfp",
    "specialize": f"{_NEW}.options",
}
_installed: dict[str, ModuleType] = {}


class Installed:
    """The result of `install`, to leave as a context or `uninstall`. package: what `import triton_kernels` finds."""

    def __init__(self, package: ModuleType) -> None:
        self.package = package

    def __enter__(self) -> ModuleType:
        return self.package

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        uninstall()


def install(generation: str = "3.8") -> Installed:
    """Serve `import triton_kernels` and its modules with our ops, for code that imports them from now on.

    generation: `3.5` or `3.8`. The same one may be installed again. Raises InvalidInput if another `triton_kernels`, or
    another generation, is imported already: code that holds its names would keep them.
    """
    require_choice("generation", generation, ("3.5", "3.8"))
    present = sys.modules.get(_NAME)
    if present is not None and present is not _installed.get(_NAME):
        raise InvalidInput(
            f"triton_kernels must not be imported before install, got that of {getattr(present, '__file__', present)}; "
            "call install before the code that imports it"
        )
    if present is not None:
        if present.__doc__ == generation:
            return Installed(present)
        raise InvalidInput(f"generation must be the installed {present.__doc__}, got {generation}; uninstall first")
    for path, module in paths(generation).items():
        parent = _package("", generation)
        *packages, leaf = path.split(".")
        for depth in range(len(packages)):
            parent = _package(".".join(packages[: depth + 1]), generation)
        _installed[f"{_NAME}.{path}"] = importlib.import_module(module)
        setattr(parent, leaf, _installed[f"{_NAME}.{path}"])
    sys.modules.update(_installed)
    return Installed(_installed[_NAME])


def uninstall() -> None:
    """Let `import triton_kernels` find what it found before. Without an installation it does nothing."""
    for name, module in _installed.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    _installed.clear()


def paths(generation: str) -> dict[str, str]:
    """The published paths of a generation, and the module of each."""
    if generation == "3.8":
        return _PATHS
    base = importlib.import_module(_OLD)
    found = (module.name for module in pkgutil.walk_packages(base.__path__, f"{_OLD}.") if not module.ispkg)
    return {name.removeprefix(f"{_OLD}."): name for name in found}


def _package(path: str, generation: str) -> ModuleType:
    """The package of a path, made at first. Its docstring is the generation."""
    name = f"{_NAME}.{path}".rstrip(".")
    if name not in _installed:
        made = _installed[name] = ModuleType(name, generation)
        made.__path__, made.__file__ = [], __file__
        made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(_installed[parent], leaf, made)
    return _installed[name]
