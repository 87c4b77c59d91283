"""The arguments of an operator: as its schema lists them, as plans call them, and as bundles for its planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_core.formats import QuantizedSpec, QuantizedTensor
from moe_core.specs.operands import array_fields

#: What a quantised matrix has beside its values.
_PARTS = ("scales", "zero_points")


def fields_of(kind: type, bundle: str = "", *, without: Sequence[str] = (), optional: bool = False) -> tuple[str, ...]:
    """The arrays of a bundle's class in the notation of `Signature`: `experts.gate_up`, `experts.up?`, ...

    bundle: what stands before the dot, if anything. without: shown names to leave out. optional: all may be None.
    """
    dot = "." if bundle else ""
    fields = [(f"{bundle}{dot}{name}", required and not optional) for name, required in array_fields(kind)]
    return tuple(name if required else f"{name}?" for name, required in fields if name not in without)


class Signature:
    """The tensors of an operator in order, and the values in its options string.

    tensors: as plans call them (`x`, `experts.down`), with `?` behind one that may be None, and `!` behind one that may
    be None and else is written to. options: names of the values. bundles: the class that `experts` in `experts.down`
    stands for. matrices: tensors that may be `QuantizedTensor`s. Scales and zero points follow each in the schema, and
    the options end with `formats`, the QuantizedSpec of each matrix, None for a plain one.
    """

    def __init__(
        self,
        tensors: Sequence[str],
        options: tuple[str, ...] = (),
        bundles: Mapping[str, type] | None = None,
        matrices: Sequence[str] = (),
    ) -> None:
        self._arrays = tuple(tensor.rstrip("?!") for tensor in tensors)
        self._matrices, self._bundles = frozenset(matrices), bundles or {}
        self._required = {tensor.partition(".")[0] for tensor in tensors if tensor[-1] not in "?!"}
        self.options = (*options, "formats") if matrices else options
        listed: list[str] = []
        for tensor, name in zip(tensors, self._arrays, strict=True):
            listed.append(tensor)
            listed += [f"{name}.{part}?" for part in _PARTS] if name in self._matrices else []
        #: What plans and messages call the tensors; the values of a quantised one have its own name.
        self.names = tuple(tensor.rstrip("?!") for tensor in listed)
        letters = iter("abcdefghijklmnopqrstuvwxyz")
        kinds = {"?": lambda: "Tensor?", "!": lambda: f"Tensor({next(letters)}!)?"}
        schema = [kinds.get(tensor[-1], lambda: "Tensor")() for tensor in listed]
        pairs = zip(schema, self.names, strict=True)
        self.schema = ", ".join((*[f"{kind} {name.replace('.', '_')}" for kind, name in pairs], "str options"))

    def tensors(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The operator's tensors for arrays in the order of `tensors` above, of which matrices may be quantised."""
        if not self._matrices:
            return arrays
        flat: list[Any] = []
        for name, array in zip(self._arrays, arrays, strict=True):
            if isinstance(array, QuantizedTensor) and name in self._matrices:
                flat += [array.values, array.scales, array.zero_points]
            else:
                flat += [array, None, None] if name in self._matrices else [array]
        return flat

    def formats(self, arrays: Sequence[Any]) -> tuple[QuantizedSpec | None, ...]:
        """The last of the options for such arrays."""
        matrices = [array for name, array in zip(self._arrays, arrays, strict=True) if name in self._matrices]
        return tuple([array.spec if isinstance(array, QuantizedTensor) else None for array in matrices])

    def keywords(
        self, tensors: Sequence[Any], options: Sequence[Any], build: Callable[..., QuantizedTensor] = QuantizedTensor
    ) -> dict[str, Any]:
        """Tensors and options by name, fields of bundles as bundles. One that may be absent is None where it is.

        build: `QuantizedTensor.unchecked` for tensors of transformations or of symbolic shape, which a check would fix.
        """
        found = dict(zip(self.options, options, strict=True))
        formats, given, bundles = iter(found.pop("formats", ())), iter(tensors), {}
        for name in self._arrays:
            array = next(given)
            if name in self._matrices:
                scales, zero_points, format = next(given), next(given), next(formats)
                array = array if format is None else build(format, array, scales, zero_points)
            bundle, _, field = name.partition(".")
            if field:
                bundles.setdefault(bundle, {})[field] = array
            else:
                found[name] = array
        for bundle, fields in bundles.items():
            is_there = bundle in self._required or any(array is not None for array in fields.values())
            found[bundle] = self._bundles.get(bundle, dict)(**fields) if is_there else None
        return found

    def shapes(self, tensors: Sequence[Any], options: Sequence[Any]) -> dict[str, Any]:
        """`keywords` for what reads shapes: values stand for their matrices, unless they are tiled.

        No format packs the axes that shapes are read from.
        """
        if self._matrices:
            *options, formats = options
            tiled = [None if format is None or format.tiling is None else format for format in formats]
            options = [*options, tiled]
        return self.keywords(tensors, options, QuantizedTensor.unchecked)
