"""Named bundles of a framework's arrays, or `QuantizedTensor`s of them, shared by both front-ends."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from moe_core.base import ArraySpec, require_spec
from moe_core.formats import QuantizedTensor
from moe_core.specs.norm import NormSpec
from moe_core.specs.routing import LayoutSpec

_OPTIONS = ("spec", "sparse_mixer")
_names: dict[type, tuple[str, ...]] = {}


def named_fields(bundle: Any, prefix: str = "") -> tuple[tuple[str, Any], ...]:
    """(name, value) of every array field that is not None. A quantised tensor is one value."""
    kind = type(bundle)
    names = _names.get(kind)
    if names is None:
        names = _names[kind] = tuple(field.name for field in dataclasses.fields(kind) if field.name not in _OPTIONS)
    return tuple([(prefix + name, value) for name in names if (value := getattr(bundle, name)) is not None])


def named_arrays(bundle: Any, prefix: str = "") -> tuple[tuple[str, Any], ...]:
    """(name, array) of every array of a bundle, in the order of a plan's inputs.

    `named_arrays(ExpertWeights(a, b), "experts.")` -> `(("experts.gate_up", a), ("experts.down", b))`. A quantised b
    gives `experts.down.values`, `experts.down.scales`[, `experts.down.zero_points`].
    """
    arrays: list[tuple[str, Any]] = []
    for name, value in named_fields(bundle, prefix):
        arrays += named_fields(value, f"{name}.") if isinstance(value, QuantizedTensor) else [(name, value)]
    return tuple(arrays)


def array_fields(kind: type) -> tuple[tuple[str, bool], ...]:
    fields = (field for field in dataclasses.fields(kind) if field.name not in _OPTIONS)
    return tuple((field.name, field.default is dataclasses.MISSING) for field in fields)


def map_arrays(bundle: Any, function: Any) -> Any:
    """The same bundle with `function` applied to every array."""
    changed = {
        name: map_arrays(value, function) if isinstance(value, QuantizedTensor) else function(value)
        for name, value in named_fields(bundle)
    }
    return dataclasses.replace(bundle, **changed)


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of E experts. Shapes are `in_out`; `out_in` swaps the last two axes.

    Args:
        gate_up: `[E, D, 2F]` (gated, halves or interleaved) or `[E, D, F]` (ungated, or the gate if `up` is given).
        up: `[E, D, F]` for gate_layout `separate`.
        down: `[E, F, D]`. gate_up (with up, in one format) and down may be `QuantizedTensor`s.
        gate_up_bias: `[E, 2F]` or `[E, F]`, with up_bias `[E, F]`.
        down_bias: `[E, D]`.
        layer_index: int32 `[1]` on the device. Every weight and bias then has a leading layer axis, and it picks one.
        gate_up_input_scale, down_input_scale: fp32 `[1]` on the device, scales of x and of the hidden rows where
            `MoESpec.activations` has one per tensor. None: computed from the rows.
    """

    gate_up: Any
    down: Any
    up: Any = None
    gate_up_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None
    layer_index: Any = None
    gate_up_input_scale: Any = None
    down_input_scale: Any = None


@dataclass(frozen=True)
class MatmulOperands:
    """The operands of one grouped matmul. Shapes are `in_out`; `out_in` swaps the last two axes.

    Args:
        x: `[T, D]` (gather `token`), `[T * K, D]` (`slot`) or `[capacity, D]` (`row`).
        weight: `[E, D, N]`, N = 2F when a gated activation with one buffer is fused.
        up: `[E, D, N]`, the second buffer of gate_layout `separate`.
        bias, up_bias: `[E, N]`, fp32 or the dtype of x.
        row_weight: fp32 `[T * K]` or `[T, K]`, by slot, applied after the activation.
        layer_index: int32 `[1]`. Weights and biases then have a leading layer axis.

    weight and up may be `QuantizedTensor`s of one format in the spec's weight_layout. Then x may be quantised too:
    `out_in`, groups of one row or of all, no zero points, and along D the weight's groups or all of it.
    """

    x: Any
    weight: Any
    up: Any = None
    bias: Any = None
    up_bias: Any = None
    row_weight: Any = None
    layer_index: Any = None


@dataclass(frozen=True)
class RouterWeights:
    """Route from x. weight `[D, E]` (`in_out`) or `[E, D]`, bias `[E]`, correction_bias fp32 `[E]` or `[T, E]`."""

    weight: Any
    bias: Any = None
    correction_bias: Any = None


@dataclass(frozen=True)
class LayerRouter(RouterWeights):
    """The router of a layer.

    norm `[D]`: factors of x, which the router scores normalised as `spec` says. table int32 `[V, K]`: the experts of
    each token id. expert_scale `[E]`: multiplies an expert's weights last. sparse_mixer: see `MoELayerSpec`.
    """

    norm: Any = None
    table: Any = None
    expert_scale: Any = None
    spec: NormSpec | None = None
    sparse_mixer: float | None = None


@dataclass(frozen=True)
class RouterLogits:
    """Route from logits fp32 `[T, E]`; correction_bias fp32 `[E]`, or `[T, E]` of each token."""

    logits: Any
    correction_bias: Any = None


@dataclass(frozen=True)
class TopK:
    """Routing already decided.

    ids: integers of any width `[T, K]`, -1 = no expert. Other ids outside the experts count as invalid. weights: fp32,
    bf16 or fp16 `[T, K]`, multiplied in fp32; gradients have their dtype.
    """

    ids: Any
    weights: Any


@dataclass(frozen=True)
class SharedExpert:
    """A dense expert every token visits. gate_up `[D, 2F]`, down `[F, D]` (up `[D, F]` for `separate`), as `in_out`.

    gate: None, or `[D, 1]` (`in_out`) / `[1, D]` (`out_in`): its sigmoid scales the shared output per token. If the
    experts have a layer index, gate_up, up and down may have its leading axis.
    """

    gate_up: Any
    down: Any
    up: Any = None
    gate: Any = None


@dataclass(frozen=True)
class LoRAFactors:
    """Low-rank factors of S adapters. Equations: docs/user/lora.md.

    Args:
        a1: `[S, E, D, R]` and b1 `[S, E, R, N]`, both or neither: added to matmul 1. N and its order are those of
            gate_up, with `up` gate columns, then up. An axis E of 1: shared by all experts.
        a2: `[S, E, F, Q]` and b2 `[S, E, Q, D]`: added to matmul 2. R and Q are multiples of 16. Any matmul dtypes;
            cast to the dtype of x.
        scale: fp32 `[S, E]`, such as alpha / rank.
        ranks: int32 `[S, E]`, the columns in use, at most the larger of R and Q. 0: no adapter. Others count as zeros.
        seed: int32 `[1]` on the device, for `MoESpec.lora_dropout`.
        a_router: `[S, 1, D, R]` and b_router `[S, 1, R, E]`: added to the logits. a1_shared, b1_shared, a2_shared,
            b2_shared: `[S, 1, ...]`, of the shared expert, as a1 to b2. Their scale is `scale[:, 0]`, their rank the
            largest of a slot's.
    """

    a1: Any = None
    b1: Any = None
    a2: Any = None
    b2: Any = None
    scale: Any = None
    ranks: Any = None
    seed: Any = None
    a_router: Any = None
    b_router: Any = None
    a1_shared: Any = None
    b1_shared: Any = None
    a2_shared: Any = None
    b2_shared: Any = None

    @property
    def beyond_experts(self) -> bool:
        """True with factors of the router or the shared expert."""
        return any(getattr(self, name) is not None for name in BEYOND_EXPERTS)

    def of_experts(self) -> LoRAFactors | None:
        if self.a1 is None and self.a2 is None:
            return None
        return dataclasses.replace(self, **dict.fromkeys(BEYOND_EXPERTS))


#: Factors of a layer's router and shared expert.
BEYOND_EXPERTS = ("a_router", "b_router", "a1_shared", "b1_shared", "a2_shared", "b2_shared")


#: Arguments of ops, and so pytrees.
BUNDLES = (ExpertWeights, LoRAFactors, MatmulOperands, RouterLogits, RouterWeights, SharedExpert, TopK)


@dataclass(frozen=True)
class MoEOperands:
    """The arrays of one MoE: x `[T, D]`; routing: RouterWeights, RouterLogits, TopK; token_mask bool `[T]`; expert_map
    int32 `[E_global]`; adapter_ids int32 `[T]`, with lora: each token's adapter, -1 = none.
    """

    x: Any
    experts: ExpertWeights
    routing: Any
    token_mask: Any = None
    expert_map: Any = None
    shared: SharedExpert | None = None
    lora: LoRAFactors | None = None
    adapter_ids: Any = None


@dataclass(frozen=True)
class OutputGradients:
    """Gradients of one MoE's results, or None: output `[T, D]`; in fp32 weights `[T, K]` and logits `[T, E]`, added to
    the gradients through the experts, load_balance `[1]` and z `[1]` of the router losses.
    """

    output: Any
    weights: Any = None
    logits: Any = None
    load_balance: Any = None
    z: Any = None


@dataclass(frozen=True)
class RoutingGradients:
    """Gradients of one routing, at least one, fp32: weights `[T, K]`, logits `[T, E]`, added as they are, load_balance
    `[1]` (needs tokens_per_expert int32 `[E]`, slots of unmasked tokens) and z `[1]` of the router losses.
    """

    weights: Any = None
    logits: Any = None
    load_balance: Any = None
    z: Any = None
    tokens_per_expert: Any = None


@dataclass(frozen=True)
class ExpertActivationOperands:
    """The operands of the backward between the two matmuls; R rows, in layout order or by slot.

    d_hidden `[R, F]` in bf16, fp16 or fp32: the gradient of matmul 2's result pulled back through its weight, before
    the row weight. pre `[R, 2F]` (ungated `[R, F]`): the stored pre-activation. row_weight fp32 `[T * K]` or `[T, K]`
    and bias_product fp32 `[T * K]`, by slot. row_of_slot int32 `[T * K]`, -1 = no row. None: every row is a slot's.
    """

    d_hidden: Any
    pre: Any
    row_of_slot: Any = None
    row_weight: Any = None
    bias_product: Any = None


class Routing(NamedTuple):
    """ids int32 `[T, K]`, weights fp32 `[T, K]`."""

    ids: Any
    weights: Any


class RoundedRouting(NamedTuple):
    """ids int32 and weights fp32 `[T, W]`, -1 and 0 where left out. tokens_per_expert int32 `[E]`: before rounding."""

    ids: Any
    weights: Any
    tokens_per_expert: Any


@dataclass(frozen=True)
class RaggedLayout:
    """Rows grouped by expert, on the device, int32.

    group_sizes `[E]`, group_start `[E + 1]`, slot_of_row `[capacity]` (-1 = padding), row_of_slot `[T * K]` (-1 =
    dropped or not local), invalid_ids `[1]` (ids outside [-1, E)) or None without ids, overflow `[1]` with spec.rows:
    slots without a row because there are too few. Worked example, T = 2, K = 2, E = 3, ids [[2, 0], [0, -1]]:
    group_sizes [2, 0, 1], group_start [0, 2, 2, 3], slot_of_row [1, 2, 0, -1], row_of_slot [2, 0, 1, -1].
    """

    spec: LayoutSpec
    group_sizes: Any
    group_start: Any
    slot_of_row: Any
    row_of_slot: Any
    invalid_ids: Any
    overflow: Any = None


@dataclass(frozen=True)
class LayoutArrays:
    """The arrays of a `RaggedLayout` that other ops read, or their specs, or names of buffers."""

    group_sizes: Any = None
    group_start: Any = None
    slot_of_row: Any = None
    row_of_slot: Any = None

    @classmethod
    def specs(cls, layout: LayoutSpec) -> LayoutArrays:
        sizes = (layout.num_experts, layout.num_experts + 1, layout.capacity, layout.num_slots)
        return cls(*(ArraySpec((size,), "int32") for size in sizes))


def require_layout(layout: LayoutSpec, arrays: LayoutArrays) -> None:
    """Raise InvalidInput unless these ArraySpecs, possibly put together by hand, are of this layout."""
    expected = LayoutArrays.specs(layout)
    for name, array in named_fields(arrays):
        require_spec(f"layout.{name}", array, getattr(expected, name).shape, "int32")


LAYOUT_INPUTS = ("group_sizes", "group_start", "slot_of_row")


class MoEOutput(NamedTuple):
    """output `[T, D]`; ids and weights `[T, K]`; logits fp32 `[T, E]` or None; tokens_per_expert int32 `[E]` (local
    experts); invalid_ids int32 `[1]`."""

    output: Any
    ids: Any
    weights: Any
    logits: Any
    tokens_per_expert: Any
    invalid_ids: Any


@dataclass(frozen=True)
class WeightGradientOperands:
    """The operands of one gradient of weights; R rows.

    Args:
        left: `[*, M]`, the product's input for `in_out` weights, the gradient of its output for `out_in`. Rows may be
            strided.
        right: `[*, N]`, the other of the two.
        row_weight: fp32 `[T * K]` or `[T, K]` by slot, for the column sums only.
        row_mask: bool `[R]` (dense), the rows to read.
        layer_index: int32 `[1]`. The result then has a leading layer axis.
        into: fp32, of the result's shape, added to the product.
    """

    left: Any
    right: Any
    row_weight: Any = None
    row_mask: Any = None
    layer_index: Any = None
    into: Any = None
