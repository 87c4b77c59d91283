"""Convert objects of triton_kernels, of any release, to ours and back, also in tuples, lists and mappings."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from moe_core.base.checks import shown
from moe_core.errors import InvalidInput, Unsupported
from moe_torch.compat.triton_kernels import matmul_ogs, numerics, routing, swiglu, tensor

_INSTALL = (
    "put python/triton_kernels of the Triton repository (github.com/triton-lang/triton, tag v3.5.1) on PYTHONPATH; the "
    "distribution named triton-kernels on the package index is an unrelated project"
)
_MODULES = {
    "routing": (routing, "RoutingData GatherIndx ScatterIndx ExptData"),
    "matmul_ogs": (matmul_ogs, "FnSpecs FusedActivation Epilogue FlexCtx PrecisionConfig"),
    "swiglu": (swiglu, "FlexCtx PrecisionConfig"),
    "numerics": (numerics, "InFlexData OutFlexData"),
    "tensor": (tensor, "Storage IntegerType FloatType Tensor Bitmatrix"),
}
_CLASSES: dict[tuple[str, str], type] = {
    (module, name): getattr(ours, name) for module, (ours, names) in _MODULES.items() for name in names.split()
}
_NAMES = {ours: name for name, ours in _CLASSES.items()}
_PLAIN_TYPES = (torch.dtype, bool, int, float, str, tuple, type(None))
_PLAIN = (torch.Tensor, torch.dtype, bool, int, float, str, type(None))
_Convert = Callable[[Any], Any]


def from_upstream(value: Any) -> Any:
    """Convert an object of triton_kernels: `from_upstream(routing(logits, 4))` returns our three objects.

    Swizzled memory is copied to plain memory, K contiguous. Raises InvalidInput for an unknown class, and Unsupported
    for a fused function that our kernels lack.
    """
    if isinstance(value, _PLAIN):
        return value
    elements = _elements(value, from_upstream)
    if elements is not None:
        return elements
    kind = type(value)
    ours = kind if kind in _NAMES else _CLASSES.get((kind.__module__.rpartition(".")[2], kind.__name__))
    if ours is None:
        raise InvalidInput(
            f"value must be an object of {', '.join(sorted({kind for _, kind in _CLASSES}))}, or of these, got "
            f"{type(value).__module__}.{type(value).__name__}; convert its parts"
        )
    if ours is tensor.Storage:
        return tensor.Storage(_plain_memory(value))
    if ours is matmul_ogs.FnSpecs:
        bare = _rebuilt(dataclasses.replace(value, fn=None), ours, from_upstream)
        return dataclasses.replace(bare, fn=_our_function(value.fn))
    return _rebuilt(value, ours, from_upstream)


def to_upstream(value: Any, package: str = "triton_kernels") -> Any:
    """Convert our object to one of triton_kernels, or of a similar package.

    A RoutingData gets the tiles that kernels there read. Raises InvalidInput for objects that are not ours, and
    Unsupported if the package is missing or cannot hold a value.
    """

    def convert(value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return value
        elements = _elements(value, convert)
        if elements is not None:
            return elements
        if type(value) not in _NAMES:
            raise InvalidInput(
                f"value must be of moe_torch.compat.triton_kernels, got {type(value).__module__}."
                f"{type(value).__name__}; convert its parts"
            )
        if isinstance(value, routing.RoutingData):
            value = routing.filled(value)
        target = _upstream_class(package, *_NAMES[type(value)])
        if isinstance(value, tensor.Storage):
            return target(value.data)
        if isinstance(value, matmul_ogs.FnSpecs):
            if value.fn not in (None, swiglu.swiglu_fn):
                raise Unsupported(
                    f"{value.name!r} has no counterpart in {package}, which has that of swiglu_fn; pass swiglu_fn"
                )
            fn = None if value.fn is None else _upstream_class(package, "swiglu", "swiglu_fn")
            return dataclasses.replace(_rebuilt(dataclasses.replace(value, fn=None), target, convert), fn=fn)
        return _rebuilt(value, target, convert)

    return convert(value)


def _elements(value: Any, convert: _Convert) -> Any:
    if isinstance(value, Mapping):
        return {key: convert(element) for key, element in value.items()}
    if type(value) in (tuple, list):
        return type(value)(convert(element) for element in value)
    return None


def _rebuilt(value: Any, target: type, convert: _Convert) -> Any:
    """Fields that the target lacks must be at their defaults."""
    names, known = _fields(type(value)), _fields(target)
    for name, default in names.items():
        held = getattr(value, name)
        if name not in known and not (held is default or (isinstance(held, _PLAIN_TYPES) and held == default)):
            raise Unsupported(
                f"{type(value).__name__}.{name} has no counterpart in {target.__module__}, got {shown(held)}; leave it "
                "out"
            )
    return target(**{name: convert(getattr(value, name)) for name in names if name in known})


def _fields(kind: type) -> dict[str, Any]:
    if kind.__name__ == "Bitmatrix":
        # Unlike its base it has the element type itself.
        return dict.fromkeys(("storage", "shape", "shape_max", "scratchpad"))
    return {field.name: field.default for field in dataclasses.fields(kind) if field.init}


def _our_function(fn: Any) -> Any:
    if fn is None:
        return None
    if str(getattr(fn, "__name__", "")).strip("_") == "swiglu_fn":
        return swiglu.swiglu_fn
    raise Unsupported(f"fused function {fn!r} is none that our kernels have; they have swiglu_fn")


def _plain_memory(storage: Any) -> torch.Tensor:
    """Swizzled memory is copied without padding."""
    layout = storage.layout
    if layout is None or getattr(layout, "name", None) is None:
        return storage.data
    data = layout.unswizzle_data(storage.data)
    padded = tuple(data.shape)
    shape = tuple(getattr(layout, "initial_shape", padded))
    if padded[:-2] != shape[:-2] or any(held < size for held, size in zip(padded[-2:], shape[-2:], strict=True)):
        raise InvalidInput(
            f"storage must hold the initial_shape of its layout, {list(shape)}, or that with its last two axes padded, "
            f"got {list(padded)} in {type(layout).__name__}; convert the layout of the tensor it was made of"
        )
    return data[..., : shape[-2], : shape[-1]].mT.contiguous().mT


def _upstream_class(package: str, module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"{package}.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"{package} cannot be used ({error}); {_INSTALL}") from error
