"""Other people's imports, changed: `vllm` from the files of its wheel and stand-ins, `triton_kernels` = our compat.

A module of `vllm` is the wheel's file where `SERVED` names it, a stand-in of ours, or else a placeholder, whose names
may be imported and annotated with, and raise when they are used. Another world has its own list.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

MOE = "vllm.model_executor.layers.fused_moe"
QUANTIZATION = "vllm.model_executor.layers.quantization.utils"
#: Modules that are the wheel's own files, unmodified.
SERVED = (
    *(f"{MOE}.{name}" for name in ("activation", "config", "modular_kernel", "moe_output")),
    *(f"{MOE}.{name}" for name in ("topk_weight_and_reduce", "utils")),
    *(f"{MOE}.prepare_finalize.{name}" for name in ("batched", "no_dp_ep")),
    *(f"{MOE}.experts.{name}" for name in ("fused_batched_moe", "gpt_oss_triton_kernels_moe")),
    *(f"{MOE}.experts.{name}" for name in ("lora_context", "lora_experts_mixin")),
    *(f"{MOE}.oracle.{name}" for name in ("base", "fp8", "int8", "mxfp8", "unquantized")),
    *(f"{QUANTIZATION}.{name}" for name in ("fp8_utils", "mxfp4_utils", "ocp_mx_utils", "quant_utils")),
    "vllm.scalar_type",
    "vllm.utils.math_utils",
)
#: Names of a module that are others than the wheel's.
Names = Mapping[str, Any]


class _Unused(type):
    """Classes that stand for what the cases do not use: false, and an error when they are called or looked into."""

    def __bool__(cls) -> bool:
        return False

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{cls.__module__}.{cls.__name__} is no part of this harness")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unused(f"{cls.__module__}.{cls.__name__}", name)


def _unused(module: str, name: str) -> type:
    return _Unused(name, (), {"__module__": module})


class _Placeholder(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if any(isinstance(finder, _Finder) and finder.knows(full) for finder in sys.meta_path):
            return importlib.import_module(full)
        return _unused(self.__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the packages that served and stand_ins name. served: modules that are the wheel's files.
    replaced: names that take the place of a module's, by module."""

    def __init__(
        self,
        files: pathlib.Path,
        stand_ins: Mapping[str, Names],
        replaced: Mapping[str, Names],
        served: Sequence[str] = SERVED,
    ) -> None:
        self.files, self.stand_ins, self.replaced, self.served = files, stand_ins, replaced, served
        self.packages = {name.partition(".")[0] for name in (*served, *stand_ins)}

    def knows(self, name: str) -> bool:
        """Whether a module is more than a placeholder, or holds one that is."""
        known = (*self.served, *self.stand_ins, *self.replaced)
        return any(one == name or one.startswith(f"{name}.") for one in known)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages:
            return None
        if fullname in self.served:
            folder = self.files / fullname.replace(".", "/")
            file, inside = (
                (folder / "__init__.py", [str(folder)]) if folder.is_dir() else (folder.with_suffix(".py"), None)
            )
            loader = _File(fullname, str(file), self)
            return importlib.util.spec_from_file_location(
                fullname, file, loader=loader, submodule_search_locations=inside
            )
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.stand_ins.get(module.__name__, {}))
        vars(module).update(self.replaced.get(module.__name__, {}))


class _File(importlib.machinery.SourceFileLoader):
    """A file of the wheel; names that are replaced are so after it has run."""

    def __init__(self, fullname: str, path: str, finder: _Finder) -> None:
        super().__init__(fullname, path)
        self._finder = finder

    def exec_module(self, module: ModuleType) -> None:
        names = self._finder.replaced.get(module.__name__, {})
        # A module that is ours altogether does not run the file.
        if WHOLE not in names:
            super().exec_module(module)
        vars(module).update(names)


#: Beside names that replace a whole module, whose file then does not run.
WHOLE = "__whole__"


@contextlib.contextmanager
def world(
    files: pathlib.Path,
    stand_ins: Mapping[str, Names],
    replaced: Mapping[str, Names],
    served: Sequence[str] = SERVED,
    generation: str | None = None,
) -> Iterator[None]:
    """Inside, `vllm` and `triton_kernels` (or what served names) are importable; afterwards what was imported of them
    is forgotten. generation: of `triton_kernels`, None: vLLM's files get 3.5, others none."""
    generation = "3.5" if generation is None and served is SERVED else generation
    finder = _Finder(files, stand_ins, replaced, served)
    sys.meta_path.insert(0, finder)
    try:
        if generation is None:
            yield
        else:
            with importlib.import_module("moe_torch.compat").install(generation):
                yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in finder.packages]:
            del sys.modules[name]


@contextlib.contextmanager
def original_triton_kernels() -> Iterator[None]:
    """Inside a world, `triton_kernels` and its modules are upstream's own of release 3.5.1, which vLLM's wheel has."""
    folder = next(str(found.files) for found in sys.meta_path if isinstance(found, _Finder)) + "/vllm/third_party"

    def loaded() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "triton_kernels"}

    before = loaded()
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(before)
