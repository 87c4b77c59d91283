"""Named bundles of a framework's arrays, shared by both front-ends (any array type with shape and dtype).

Weights, and the rows of a matmul, may be `QuantizedTensor`s, which are bundles inside the bundle.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from moe_core.formats.tensor import QuantizedTensor
from moe_core.specs import LayoutSpec


def named_fields(bundle: Any, prefix: str = "") -> tuple[tuple[str, Any], ...]:
    """(name, value) of every array field that is not None, in field order; a quantised tensor is one value."""
    return tuple(
        (prefix + field.name, getattr(bundle, field.name))
        for field in dataclasses.fields(bundle)
        if field.name != "spec" and getattr(bundle, field.name) is not None
    )


def named_arrays(bundle: Any, prefix: str = "") -> tuple[tuple[str, Any], ...]:
    """(name, array) of every array of a bundle, in field order; the order of a plan's inputs.

    `named_arrays(ExpertWeights(a, b), "experts.")` -> `(("experts.gate_up", a), ("experts.down", b))`; of a quantised
    b instead of `experts.down`: `experts.down.values`, `experts.down.scales`[, `experts.down.zero_points`].
    """
    arrays: list[tuple[str, Any]] = []
    for name, value in named_fields(bundle, prefix):
        arrays += named_fields(value, f"{name}.") if isinstance(value, QuantizedTensor) else [(name, value)]
    return tuple(arrays)


def map_arrays(bundle: Any, function: Any) -> Any:
    """The same bundle with `function` applied to every array, those of quantised tensors one by one."""
    changed = {
        name: map_arrays(value, function) if isinstance(value, QuantizedTensor) else function(value)
        for name, value in named_fields(bundle)
    }
    return dataclasses.replace(bundle, **changed)


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of E experts; `in_out` shapes shown, `out_in` swaps the last two axes.

    gate_up: `[E, D, 2F]` (gated, halves or interleaved), `[E, D, F]` (ungated, or the gate alone when `up` is given).
    up: `[E, D, F]` for gate_layout `separate`. down: `[E, F, D]`. Biases `[E, 2F]` or `[E, F]`, `[E, F]`, `[E, D]`.
    layer: int32 `[1]` on the device: every weight and bias then has a leading layer axis and layer picks one.
    gate_up (with up, in its format) and down may be `QuantizedTensor`s. gate_up_input_scale, down_input_scale: fp32
    `[1]` on the device, the scales of x and of the hidden rows where `MoESpec.activations` has one per tensor; None =
    found from the rows.
    """

    gate_up: Any
    down: Any
    up: Any = None
    gate_up_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None
    layer: Any = None
    gate_up_input_scale: Any = None
    down_input_scale: Any = None


@dataclass(frozen=True)
class MatmulOperands:
    """What one grouped matmul reads; `in_out` shapes shown, `out_in` swaps the last two axes.

    x: `[T, D]` (gather `token`), `[T * K, D]` (`slot`) or `[capacity, D]` (`row`). weight `[E, D, N]`, N = 2F when a
    gated activation with one buffer is fused. up: `[E, D, N]`, the second buffer of gate_layout `separate`.
    bias `[E, N]` and up_bias `[E, N]`: fp32 or the dtype of x. row_weight: fp32 `[T * K]` or `[T, K]`, by slot, applied
    after the activation. layer: int32 `[1]`: weights and biases then have a leading layer axis.

    weight and up may be `QuantizedTensor`s of one format, whose layout is the spec's weight_layout; x too where they
    are: `out_in`, groups of one row or of all, no zero points, and along D the weight's groups or all of it.
    """

    x: Any
    weight: Any
    up: Any = None
    bias: Any = None
    up_bias: Any = None
    row_weight: Any = None
    layer: Any = None


@dataclass(frozen=True)
class RouterWeights:
    """Route from x. weight `[D, E]` (`in_out`) or `[E, D]` (`out_in`), bias `[E]`, correction_bias fp32 `[E]`."""

    weight: Any
    bias: Any = None
    correction_bias: Any = None


@dataclass(frozen=True)
class RouterLogits:
    """Route from logits fp32 `[T, E]`; correction_bias fp32 `[E]`."""

    logits: Any
    correction_bias: Any = None


@dataclass(frozen=True)
class TopK:
    """Routing already decided. ids int32 `[T, K]` (-1 = no expert), weights fp32 `[T, K]`."""

    ids: Any
    weights: Any


@dataclass(frozen=True)
class SharedExpert:
    """A dense expert every token visits. gate_up `[D, 2F]`, down `[F, D]` (up `[D, F]` for `separate`), as `in_out`.

    gate: None, or `[D, 1]` (`in_out`) / `[1, D]` (`out_in`): its sigmoid scales the shared output per token.
    Beside experts with a layer index gate_up, up and down may have the same leading layer axis: `[L, D, 2F]`, ...
    """

    gate_up: Any
    down: Any
    up: Any = None
    gate: Any = None


@dataclass(frozen=True)
class MoEOperands:
    """Everything one MoE reads: the arguments of `moe_core.moe.plan_moe`, without its options.

    x `[T, D]`; routing: RouterWeights, RouterLogits or TopK; token_mask bool `[T]`; expert_map int32 `[E_global]`.
    """

    x: Any
    experts: ExpertWeights
    routing: Any
    token_mask: Any = None
    expert_map: Any = None
    shared: SharedExpert | None = None


@dataclass(frozen=True)
class OutputGradients:
    """What flows back into one MoE. output `[T, D]`: bf16, fp16 or fp32; None = nothing for the rest.

    weights fp32 `[T, K]` and logits fp32 `[T, E]`: gradients of these outputs of the forward, added to those that come
    through the experts. load_balance and z: fp32 `[1]`, of the losses of `moe_core.reference.auxiliary.router_losses`.
    """

    output: Any
    weights: Any = None
    logits: Any = None
    load_balance: Any = None
    z: Any = None


@dataclass(frozen=True)
class RoutingGradients:
    """What flows back into the logits of one routing; None = nothing, and at least one is given.

    weights fp32 `[T, K]`: of the routing's weights. logits fp32 `[T, E]`: added as they are. load_balance and z: fp32
    `[1]`, of the router losses; load_balance needs tokens_per_expert int32 `[E]`, the slots every expert got from the
    unmasked tokens.
    """

    weights: Any = None
    logits: Any = None
    load_balance: Any = None
    z: Any = None
    tokens_per_expert: Any = None


@dataclass(frozen=True)
class ExpertActivationOperands:
    """What the backward between the two matmuls reads; R rows, in layout order or by slot.

    d_hidden `[R, F]`: the gradient of matmul 2's result pulled back through its weight, before the row weight; bf16,
    fp16 or fp32. pre `[R, 2F]` (ungated `[R, F]`): the stored pre-activation. row_weight fp32 `[T * K]` or `[T, K]` and
    bias_product fp32 `[T * K]` by slot. row_of_slot int32 `[T * K]`, -1 = no row (None: every row is a slot's).
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


@dataclass(frozen=True)
class RaggedLayout:
    """Rows grouped by expert, on the device, int32.

    group_sizes `[E]`, group_start `[E + 1]`, slot_of_row `[capacity]` (-1 = padding), row_of_slot `[T * K]` (-1 =
    dropped or not local), invalid_ids `[1]` (ids outside [-1, E)). Worked example, T = 2, K = 2, E = 3, ids [[2, 0],
    [0, -1]]: group_sizes [2, 0, 1], group_start [0, 2, 2, 3], slot_of_row [1, 2, 0, -1], row_of_slot [2, 0, 1, -1].
    """

    spec: LayoutSpec
    group_sizes: Any
    group_start: Any
    slot_of_row: Any
    row_of_slot: Any
    invalid_ids: Any


class MoEOutput(NamedTuple):
    """output `[T, D]`; ids and weights `[T, K]`; logits fp32 `[T, E]` or None; tokens_per_expert int32 `[E]` (local
    experts); invalid_ids int32 `[1]`."""

    output: Any
    ids: Any
    weights: Any
    logits: Any
    tokens_per_expert: Any
    invalid_ids: Any
