"""The tensor axis: each rank has a slice of every expert, columns of gate and up and rows of down; results are sums."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moe_core.base import plan_type, require_choice, set_integer
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedTensor
from moe_core.specs import ExpertWeights, map_arrays, named_fields
from moe_core.specs.operands import LoRAFactors

TOKENS = ("split", "replicated")
_MOST_RANKS = 2**13
_LISTED = 6


@plan_type
@dataclass(frozen=True)
class TensorSplit:
    """A rank on the tensor axis.

    Args:
        size: ranks of the axis, 1: experts are whole.
        index: this rank.
        tokens: `split`: each rank has its own tokens, as with sequence parallelism. They are gathered before the
            experts, and results return to their rank. `replicated`: all have the same.
    """

    size: int = 1
    index: int = 0
    tokens: str = "split"

    def __post_init__(self) -> None:
        set_integer(self, "size", 1, _MOST_RANKS)
        set_integer(self, "index", 0, self.size)
        require_choice("tokens", self.tokens, TOKENS)

    @property
    def token_ranks(self) -> int:
        """Ranks of the axis with different tokens."""
        return self.size if self.tokens == "split" else 1

    @property
    def digest(self) -> int:
        """All three in 27 bits, for headers."""
        return self.index << 14 | self.size << 1 | TOKENS.index(self.tokens)


WHOLE = TensorSplit()


class Cut(NamedTuple):
    """How one array is split. axis: from the end. parts: equal parts of it, such as gate and up, each split."""

    axis: int
    parts: int = 1

    def slices(self, length: int, split: TensorSplit) -> tuple[slice, ...]:
        """A rank's slices of an axis of this length, one of each part."""
        part, width = length // self.parts, length // self.parts // split.size
        first = split.index * width
        return tuple(slice(start + first, start + first + width) for start in range(0, length, part))

    def index(self, taken: slice) -> tuple[Any, ...]:
        return (..., taken, *[slice(None)] * (-1 - self.axis))


def cut_of(name: str, weight_layout: str, gate_layout: str | None) -> Cut | None:
    """The cut of a field, such as `gate_up`, `up.scales` or `b1`. None: it is whole. gate_layout None: ungated."""
    field = name.partition(".")[0]
    if field in ("a1", "b2", "scale", "ranks", "seed", "down_bias", "layer_index", "gate_up_input_scale",
                 "down_input_scale"):  # fmt: skip
        return None
    if field in ("b1", "a2"):
        return Cut(-2) if field == "a2" else Cut(-1, 1 if gate_layout in (None, "interleaved") else 2)
    if field == "down":
        return Cut(-2 if weight_layout == "in_out" else -1)
    halves = gate_layout == "halves" and field.startswith("gate_up")
    columns = -1 if field.endswith("_bias") or weight_layout == "in_out" else -2
    return Cut(columns, 2 if halves else 1)


def require_splittable(d_ff: int, matrices: dict[str, Any], split: TensorSplit) -> None:
    """Raise unless the axis divides F, and slices cut no group of a format. matrices: specs by experts' fields."""
    if split.size == 1:
        return
    if d_ff % split.size:
        raise InvalidInput(
            f"tensor must have a number of ranks that divides d_ff = {d_ff}, got {split.size}; {_sizes(d_ff, 1)}"
        )
    for name, spec in matrices.items():
        format, per_byte = spec.format, spec.format.own_element.per_byte
        if name == "down":
            unit = format.group_columns or per_byte
        else:
            unit = math.lcm(format.group_rows or 1, per_byte if format.zero_points else 1)
        columns = d_ff // split.size
        if columns % unit:
            raise Unsupported(
                f"tensor must leave whole groups of {unit} of {format.name} in experts.{name} on every rank, got "
                f"d_ff / ranks = {d_ff} / {split.size} = {columns} = {columns / unit:g} groups; {_sizes(d_ff, unit)}"
            )
        if spec.tiling is not None:
            raise Unsupported(f"experts.{name} must not be prepacked to be split; restore it, and prepack the slices")


def _sizes(d_ff: int, unit: int) -> str:
    fits = [size for size in range(2, d_ff // unit + 1) if d_ff % size == 0 and d_ff // size % unit == 0]
    return f"use {', '.join(map(str, fits[:_LISTED]))} ranks" if fits else "leave tensor out"


def split_experts(
    experts: ExpertWeights, size: int, weight_layout: str, gate_layout: str | None
) -> tuple[ExpertWeights, ...]:
    """Return the slices of every rank of the axis, of experts `[L, ...]` in NumPy; `down_bias` is whole on each.

    gate_layout: None: ungated. Raises InvalidInput and Unsupported.
    """
    fields = dict(named_fields(experts))
    down = fields["down"]
    whole = down.shape if isinstance(down, QuantizedTensor) else np.shape(down)
    quantized = {name: one.spec for name, one in fields.items() if isinstance(one, QuantizedTensor)}
    require_splittable(whole[-2 if weight_layout == "in_out" else -1], quantized, TensorSplit(size))
    slices = []
    for index in range(size):
        split, arrays = TensorSplit(size, index), {}
        for name, one in fields.items():
            take = functools.partial(_cut_array, cut=cut_of(name, weight_layout, gate_layout), split=split)
            arrays[name] = map_arrays(one, take) if isinstance(one, QuantizedTensor) else take(one)
        slices.append(dataclasses.replace(experts, **arrays))
    return tuple(slices)


def split_factors(lora: LoRAFactors, size: int, gate_layout: str | None) -> tuple[LoRAFactors, ...]:
    """Return the slices of every rank of the axis: columns of b1 and rows of a2. a1 and b2 are whole on each."""
    fields, splits = named_fields(lora), [TensorSplit(size, index) for index in range(size)]
    parts = [{n: _cut_array(one, cut_of(n, "in_out", gate_layout), split) for n, one in fields} for split in splits]
    return tuple(dataclasses.replace(lora, **part) for part in parts)


def _cut_array(array: np.ndarray, cut: Cut | None, split: TensorSplit) -> np.ndarray:
    if cut is None or array.shape[cut.axis] == 1:
        # One entry for all of F, such as a scale per channel.
        return array
    taken = [array[cut.index(part)] for part in cut.slices(array.shape[cut.axis], split)]
    return np.concatenate(taken, cut.axis)
