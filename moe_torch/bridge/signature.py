"""The arguments of an operator, declared once.

A declaration is a function without a body, or for operators of bundles a `Signature`. The schema in order, the options
string, the typed call and the planner's keywords follow from it. Calls name all arguments, so that no two can be
swapped.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch

from moe_core.formats import QuantizedSpec, QuantizedTensor
from moe_core.specs.operands import array_fields
from moe_torch.bridge.options import encode

_PARTS = ("scales", "zero_points")

# Annotations of tensors. Parameters with others are options.
Tensor = torch.Tensor
MaybeTensor = torch.Tensor | None
Written = Annotated[torch.Tensor | None, "!"]
#: Symmetric memory of this rank. `!`: traced programs keep the order of stores, barriers and loads.
Memory = Annotated[torch.Tensor | None, "!", "not planned"]
_RETURNS: dict[Any, int | None] = {torch.Tensor: 1, type(None): 0, list[torch.Tensor]: None}


def fields_of(kind: type, bundle: str = "", *, without: Sequence[str] = (), optional: bool = False) -> tuple[str, ...]:
    """List the arrays of a bundle's class as `Signature` names them: `experts.gate_up`, `experts.up?`, ..."""
    dot = "." if bundle else ""
    fields = [(f"{bundle}{dot}{name}", required and not optional) for name, required in array_fields(kind)]
    return tuple(name if required else f"{name}?" for name, required in fields if name not in without)


class Signature:
    """The tensors of an operator in order, and the values in its options string.

    Args:
        name: of the operator, with its overload, as `moe.top_k`.
        tensors: names in plans (`x`, `experts.down`), followed by `?` if it may be None, or by `!` if it may be None
            and is written to otherwise.
        options: names of the values.
        bundles: the class of `experts` in `experts.down`.
        matrices: tensors that may be `QuantizedTensor`s. The schema has scales and zero points after each. The options
            end with `formats`: the QuantizedSpec of each matrix, None for a plain one.
        returns: number of returned tensors, None: a list.
        unplanned: tensors that planners do not take.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[str],
        options: tuple[str, ...] = (),
        bundles: Mapping[str, type] | None = None,
        *,
        matrices: Sequence[str] = (),
        returns: int | None = 1,
        unplanned: Sequence[str] = (),
    ) -> None:
        self.name, self._arrays = name, tuple(tensor.rstrip("?!") for tensor in tensors)
        self._matrices, self._bundles, self._unplanned = frozenset(matrices), bundles or {}, frozenset(unplanned)
        self._required = {tensor.partition(".")[0] for tensor in tensors if tensor[-1] not in "?!"}
        self._values, self.returns = options, returns
        self._options = (*options, "formats") if matrices else options
        listed: list[str] = []
        for tensor, name in zip(tensors, self._arrays, strict=True):
            listed.append(tensor)
            listed += [f"{name}.{part}?" for part in _PARTS] if name in self._matrices else []
        #: The values of a quantised tensor have the tensor's name.
        self.names = tuple(tensor.rstrip("?!") for tensor in listed)
        letters = iter("abcdefghijklmnopqrstuvwxyz")
        kinds = {"?": lambda: "Tensor?", "!": lambda: f"Tensor({next(letters)}!)?"}
        schema = [kinds.get(tensor[-1], lambda: "Tensor")() for tensor in listed]
        pairs = zip(schema, self.names, strict=True)
        inputs = ", ".join((*[f"{kind} {name.replace('.', '_')}" for kind, name in pairs], "str options"))
        several = "Tensor[]" if returns is None else f"({', '.join(['Tensor'] * returns)})"
        self.schema = f"({inputs}) -> {'Tensor' if returns == 1 else several}"

    @classmethod
    def of(cls, declaration: Callable[..., Any]) -> Signature:
        """Read a function `_name(*, tensors, options) -> results`."""
        hints = typing.get_type_hints(declaration, include_extras=True)
        result = hints.pop("return")
        tensors, options, bundles, unplanned = [], [], {}, []
        for name, hint in hints.items():
            marks = getattr(hint, "__metadata__", ())
            if marks and isinstance(marks[0], tuple):  # Some arrays of a bundle.
                tensors += [f"{name}.{field}" for field in marks[0]]
                bundles[name] = typing.get_args(hint)[0]
            elif hint in (Tensor, MaybeTensor, Written, Memory):
                tensors.append(name + (marks[0] if marks else "?" if hint == MaybeTensor else ""))
                unplanned += [name] if hint == Memory else []
            else:
                options.append(name)
        returns = _RETURNS[result] if result in _RETURNS else len(typing.get_args(result))
        operator = declaration.__name__.removeprefix("_")
        return cls(operator, tensors, tuple(options), bundles, returns=returns, unplanned=unplanned)

    @property
    def is_called(self) -> bool:
        """False if the operator is called by names of tensors."""
        return all("." not in name or name.partition(".")[0] in self._bundles for name in self._arrays)

    def typed(self, run: Callable[[tuple[Any, ...]], Any]) -> Callable[..., Any]:
        """Return a function of named tensors, bundles and options that calls `run` with the arguments in order."""
        bundles = [name.partition(".")[0] for name in self._arrays]
        arrays = []
        for bundle, name in zip(bundles, self._arrays, strict=True):
            absent = "." in name and bundle not in self._required
            arrays.append(f"(None if {bundle} is None else {name})" if absent else name)
        flat, options = f"({', '.join(arrays)},)", ", ".join(self._values)
        body = f"finish({flat}, {options})" if self._matrices else f"({flat[1:-1]} encode({options}))"
        source = (
            f"lambda run, encode, finish: lambda *, {', '.join((*dict.fromkeys(bundles), *self._values))}: run({body})"
        )
        return eval(source)(run, encode, self._quantized)

    def _quantized(self, arrays: Sequence[Any], *options: Any) -> tuple[Any, ...]:
        """Return the operator's arguments, splitting quantised matrices."""
        flat, formats = [], []
        for name, array in zip(self._arrays, arrays, strict=True):
            if name not in self._matrices:
                flat.append(array)
            elif isinstance(array, QuantizedTensor):
                flat += [array.values, array.scales, array.zero_points]
                formats.append(array.spec)
            else:
                flat += [array, None, None]
                formats.append(None)
        return (*flat, encode(*options, tuple(formats)))

    def keywords(
        self, tensors: Sequence[Any], options: Sequence[Any], build: Callable[..., QuantizedTensor] = QuantizedTensor
    ) -> dict[str, Any]:
        """Tensors and options by name, bundles built. build: `QuantizedTensor.unchecked` for what no check may see."""
        values: dict[str, Any] = dict(zip(self._options, options, strict=True))
        formats: Any = iter(values.pop("formats", ()))
        flat, bundles = iter(tensors), {}
        for name in self._arrays:
            array = next(flat)
            if name in self._matrices:
                scales, zero_points, format = next(flat), next(flat), next(formats)
                array = array if format is None else build(format, array, scales, zero_points)
            bundle, _, field = name.partition(".")
            if field:
                bundles.setdefault(bundle, {})[field] = array
            elif name not in self._unplanned:
                values[name] = array
        for bundle, fields in bundles.items():
            is_there = bundle in self._required or any(array is not None for array in fields.values())
            values[bundle] = self._bundles.get(bundle, dict)(**fields) if is_there else None
        return values

    def shapes(self, tensors: Sequence[Any], options: Sequence[Any]) -> dict[str, Any]:
        """Return `keywords` for functions that read shapes, with values for matrices unless these are tiled."""
        if self._matrices:
            *options, formats = options
            tiled: list[QuantizedSpec | None] = [
                None if format is None or format.tiling is None else format for format in formats
            ]
            options = [*options, tiled]
        return self.keywords(tensors, options, QuantizedTensor.unchecked)
