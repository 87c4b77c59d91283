"""The ops on torch tensors: functional, traceable, most of them differentiable.

They run on the tensors' device and current stream, and synchronise only for `checked=True`. On a CPU the NumPy
reference runs, or under TRITON_INTERPRET=1 the real kernels in Triton's interpreter.

- Programs: `torch.compile(fullgraph=True)`, `torch.export` and CUDA graphs. Run a function once before you capture it,
  to compile and load kernels. A changing number of tokens recompiles nothing.
- Gradients: `moe`, `router`, `rms_norm`, `route`, `route_rounded`, `matmul_ogs`, `gather_rows`, `activation`, `reduce`
  and `grouped_mm` have them (docs/user/training.md). Forward mode raises Unsupported.
- Errors: InvalidInput for a wrong type, rank, shape, dtype, layout, stride or device, for misaligned weights (other
  tensors may start anywhere), and for contradictory options. Unsupported: no kernels for the device, or no gradient.

Letters: T tokens, K top-k, E experts, D d_model, F d_ff per expert (after gating), N output width. Slot `s = t*K + k`.
"""

from __future__ import annotations

import torch

from moe_core.base.checks import as_integer, require_choice
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, Scheme, Tiling, format_named, scheme_named
from moe_core.ops.moe.backward import explain_training
from moe_core.ops.routing.checks import require_distinct_ids, require_known_ids
from moe_core.plan import Explanation
from moe_core.specs.matmul import Activation, MatmulSpec
from moe_core.specs.moe import MoESpec
from moe_core.specs.norm import NormSpec
from moe_core.specs.operands import (
    ExpertWeights,
    LoRAFactors,
    MatmulOperands,
    MoEOutput,
    RaggedLayout,
    RoundedRouting,
    RouterLogits,
    RouterWeights,
    Routing,
    SharedExpert,
    TopK,
)
from moe_core.specs.routing import LayoutSpec, LogitsSpec, RouterSpec, TokenRounding
from moe_core.specs.tile import TileConfig
from moe_core.specs.tile_table import TileTable
from moe_core.specs.tuning import MatmulTuning, Tuning
from moe_torch.bridge.arrays import target_of_device
from moe_torch.bridge.operator import call
from moe_torch.bridge.options import dtype_name, layout_spec, require_instance
from moe_torch.grouped import grouped_mm, scaled_grouped_mm
from moe_torch.operators import stages
from moe_torch.operators.beyond import ARRAYS, run_beyond_experts
from moe_torch.operators.kinds import as_int32
from moe_torch.operators.requests import layout_sizes, matmul_request, moe_request, require_checkable, training_plans
from moe_torch.quantize import dequantize, prepack_weights, quantize, quantize_rows, restore_weights
from moe_torch.rows import gather_rows, layout_of_runs, scale_rows

__all__ = [
    "Activation", "ExpertWeights", "Format", "LayoutSpec", "LoRAFactors", "LogitsSpec", "MatmulOperands", "MatmulSpec",
    "MatmulTuning", "MoEOutput", "MoESpec", "NormSpec", "QuantizedSpec", "QuantizedTensor", "RaggedLayout",
    "RoundedRouting", "RouterLogits", "RouterSpec", "RouterWeights", "Routing", "Scheme", "SharedExpert", "TileConfig",
    "TileTable", "Tiling", "TokenRounding", "TopK", "Tuning", "activation", "dequantize", "explain_moe", "format_named",
    "gather_rows", "grouped_mm", "layout_of_runs", "make_layout", "matmul_ogs", "moe", "pack_bitmatrix",
    "prepack_weights", "quantize", "quantize_rows", "reduce", "restore_weights", "rms_norm", "route", "route_rounded",
    "router", "scale_rows", "scaled_grouped_mm", "scheme_named", "unpack_bitmatrix",
]  # fmt: skip

_DEFAULT_LOGITS, _DEFAULT_NORM = LogitsSpec(), NormSpec()


def router(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    spec: LogitsSpec = _DEFAULT_LOGITS,
    wide: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the router's logits fp32 `[T, E]`, accumulated in fp32.

    Args:
        x: bf16, fp16 or fp32 `[T, D]`.
        weight: bf16, fp16 or fp32 `[D, E]`, or `[E, D]` if `spec.weight_layout` is `out_in`.
        bias: bf16, fp16 or fp32 `[E]`.
        spec: weight layout and precision. fp32 products are IEEE unless `spec.allow_tf32`.
        wide: `x.float()`. See `gather_rows`.
    """
    require_instance("spec", spec, LogitsSpec)
    x = x if wide is None else x.detach()
    return stages.ROUTER.call(x=x, weight=weight, bias=bias, wide=wide, spec=spec)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, spec: NormSpec = _DEFAULT_NORM) -> torch.Tensor:
    """Normalise rows by their root mean square in fp32, with one cast to the dtype of x.

    Args:
        x: bf16, fp16 or fp32 `[R, D]`. Rows may be strided.
        weight: bf16, fp16 or fp32 `[D]`. It multiplies the columns.
        spec: epsilon, and a constant factor.
    """
    require_instance("spec", spec, NormSpec)
    return stages.RMS_NORM.call(x=x, weight=weight, spec=spec)


def route(
    logits: torch.Tensor,
    spec: RouterSpec,
    *,
    correction_bias: torch.Tensor | None = None,
    token_mask: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> Routing:
    """Choose each token's experts, ids int32 `[T, K]`, and their weights, fp32 `[T, K]`, from logits.

    Args:
        logits: fp32 `[T, E]`.
        spec: the rules of the choice.
        correction_bias: fp32 `[E]`, or `[T, E]` of each token, added to the scores for the selection only.
        token_mask: bool `[T]`. False tokens get ids -1 and weights 0.
        ids: integers `[T, K]`, distinct experts chosen elsewhere. The weights follow this order, and their logits get
            the gradient. A token with an id outside [0, E) gets ids -1 and weights 0.

    Raises:
        InvalidInput: K > E, groups that do not fit E, or ids with a correction bias.
    """
    require_instance("spec", spec, RouterSpec)
    route, ids = stages.ROUTE.call, None if ids is None else as_int32(ids)
    return Routing(*route(logits=logits, correction_bias=correction_bias, token_mask=token_mask, given=ids, spec=spec))


def route_rounded(
    logits: torch.Tensor,
    spec: RouterSpec,
    rounding: TokenRounding,
    *,
    correction_bias: torch.Tensor | None = None,
    token_mask: torch.Tensor | None = None,
) -> RoundedRouting:
    """Route, then round the number of tokens of each expert, see `TokenRounding`. For training only
    (docs/user/routing.md).

    A chosen expert keeps its weight from `route`. An added expert's weight is its score times `spec.scale`, not
    renormalised.

    Args:
        logits: fp32 `[T, E]`. T is 0 or at least `rounding.tile`.
        spec: the rules of the top-K choice, with slot_order `score` and a scale above 0.
        rounding: tile, mode and candidates.
        correction_bias: fp32 `[E]`, added to the scores for the selection only.
        token_mask: bool `[T]`. False tokens get ids -1 and weights 0, and are never added.

    Returns:
        ids int32 and weights fp32 `[T, W]`, W = `rounding.width(K, E)`: a token's W best experts in order, with -1 and
            0 for those not visited. tokens_per_expert int32 `[E]`, before rounding.

    Raises:
        InvalidInput: K > E, fewer tokens than a tile, or candidates outside [K, E].
        Unsupported: slot_order `expert`, or topk_then_softmax with groups.
    """
    require_instance("spec", spec, RouterSpec)
    require_instance("rounding", rounding, TokenRounding)
    results = stages.ROUTE_ROUNDED.call(
        logits=logits, correction_bias=correction_bias, token_mask=token_mask, spec=spec, rounding=rounding
    )
    return RoundedRouting(*results[:3])


def make_layout(
    ids: torch.Tensor,
    num_experts: int,
    *,
    expert_map: torch.Tensor | None = None,
    token_mask: torch.Tensor | None = None,
    alignment: int = 1,
    max_rows: int | None = None,
    rows: int | None = None,
    checked: bool = False,
) -> RaggedLayout:
    """Group the slots of ids by expert. An expert's rows are in slot order.

    Args:
        ids: integers `[T, K]`. -1 means no expert and no row.
        num_experts: E, the local experts.
        expert_map: int32 `[E_global]`. Maps global ids to local experts, or to -1.
        token_mask: bool `[T]`. False tokens have no rows.
        alignment: each expert's rows start at a multiple of it.
        max_rows: rows of every expert. Later ones are dropped. None: no limit.
        rows: limit for all experts together. `overflow` int32 `[1]` counts the slots beyond it.
        checked: raise InvalidInput if `invalid_ids` is not 0. Waits, so a traced or captured program raises
            Unsupported.

    Returns:
        the layout. An id outside [-1, E), or [-1, E_global) with expert_map, acts as -1 and counts in `invalid_ids`.
    """
    require_checkable(checked)
    num_experts, alignment = as_integer("num_experts", num_experts, 1), as_integer("alignment", alignment, 1)
    max_rows = None if max_rows is None else as_integer("max_rows", max_rows, 1)
    if rows is None:
        arrays = stages.MAKE_LAYOUT.call(
            ids=ids, expert_map=expert_map, token_mask=token_mask, num_experts=num_experts, alignment=alignment,
            max_rows=max_rows,
        )  # fmt: skip
    else:
        rows = as_integer("rows", rows, 0)
        arrays = stages.MAKE_BOUNDED_LAYOUT.call(
            ids=ids, expert_map=expert_map, token_mask=token_mask, num_experts=num_experts, alignment=alignment,
            max_rows=max_rows, rows=rows,
        )  # fmt: skip
    layout = layout_spec(ids.shape[0], ids.shape[1], num_experts, alignment, max_rows, rows)
    if checked:
        require_known_ids(int(arrays[4]), num_experts if expert_map is None else expert_map.shape[0])
    return RaggedLayout(layout, *arrays)


def pack_bitmatrix(ids: torch.Tensor, num_experts: int, *, checked: bool = False) -> torch.Tensor:
    """Pack ids into one bit per token and expert. Returns a bitmatrix uint32 `[T, ceil(E / 32)]`.

    Expert e sets bit `e % 32` of word `e // 32`. -1 and ids outside [0, E) set nothing.

    Args:
        ids: integers `[T, K]`.
        num_experts: E.
        checked: raise InvalidInput for a repeated id, or one outside [-1, E). Waits, as in `make_layout`.
    """
    require_checkable(checked)
    num_experts = as_integer("num_experts", num_experts, 1)
    bitmatrix, duplicates, invalid_ids = stages.PACK_BITMATRIX.call(ids=as_int32(ids), num_experts=num_experts)
    if checked:
        require_known_ids(int(invalid_ids), num_experts)
        require_distinct_ids(int(duplicates))
    return bitmatrix


def unpack_bitmatrix(bitmatrix: torch.Tensor, num_experts: int, top_k: int) -> torch.Tensor:
    """Unpack a bitmatrix into ids int32 `[T, K]`, ascending, then -1.

    Args:
        bitmatrix: uint32 `[T, ceil(E / 32)]`.
        num_experts: E.
        top_k: K. A token with more bits keeps its K lowest ids.
    """
    num_experts, top_k = as_integer("num_experts", num_experts, 1), as_integer("top_k", top_k, 1)
    return stages.UNPACK_BITMATRIX.call(bitmatrix=bitmatrix, num_experts=num_experts, top_k=top_k)


def matmul_ogs(operands: MatmulOperands, layout: RaggedLayout | None, spec: MatmulSpec) -> torch.Tensor:
    """Multiply the rows of each expert with its weight: a ragged grouped matmul.

    `y[row] = cast(act(x[source of row] @ weight[expert of row] + bias) * row_weight)`, in fp32 up to the cast.
    Gradients go through quantised weights, which are frozen. With a quantised x nothing has a gradient.

    Args:
        operands: x is bf16, fp16 or fp32, with rows that may be strided. weight with up, and x with them, may be
            quantised.
        layout: the rows' experts. None: one dense product of x `[T, D]` and weight `[D, N]` or `[N, D]`.
        spec: gather, scatter, fused activation, weight layout, dtypes.

    Returns:
        y `[capacity, N]` (scatter `row`), `[T * K, N]` (`slot`) or `[T, N]` (dense), in `spec.out_dtype`, N after
            gating. Rows without an expert are exact zeros.
    """
    return call(*matmul_request(operands, layout, spec))


def activation(
    x: torch.Tensor,
    activation: Activation,
    *,
    up: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
) -> torch.Tensor:
    """Apply an activation in fp32, with one cast at the end. Returns y `[R, F]`.

    Args:
        x: `[R, 2F]` (gated, one buffer), or `[R, F]` (ungated, or the gate if `up` is passed). Rows may be strided.
        activation: its name, gating and gate layout.
        up: `[R, F]`, the second buffer of gate_layout `separate`.
        out_dtype: None: the dtype of x.
    """
    require_instance("activation", activation, Activation)
    return stages.ACTIVATION.call(x=x, up=up, activation=activation, out_dtype=dtype_name("out_dtype", out_dtype))


def reduce(
    y: torch.Tensor,
    layout: RaggedLayout,
    *,
    order: str = "slot",
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
) -> torch.Tensor:
    """Sum the rows of each token's slots, in fp32 in the order k = 0..K-1, with one cast at the end. Returns `[T, D]`.

    Args:
        y: `[T * K, D]` (order `slot`) or `[capacity, D]` (order `row`). Slots without a row add nothing.
        layout: maps slots to rows.
        order: order of the rows of y, `slot` or `row`.
        shared: `[T, D]`, added last.
        shared_gate: fp32 `[T, 1]`. Its sigmoid scales shared.
        out_dtype: None: the dtype of y.
    """
    require_instance("layout", layout, RaggedLayout)
    require_choice("order", order, ("slot", "row"))
    return stages.REDUCE.call(
        y=y, row_of_slot=layout.row_of_slot, shared=shared, shared_gate=shared_gate, sizes=layout_sizes(layout),
        order=order, out_dtype=dtype_name("out_dtype", out_dtype),
    )  # fmt: skip


def moe(
    x: torch.Tensor,
    experts: ExpertWeights,
    routing: RouterWeights | RouterLogits | TopK,
    spec: MoESpec,
    *,
    token_mask: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    shared: SharedExpert | None = None,
    lora: LoRAFactors | None = None,
    adapter_ids: torch.Tensor | None = None,
    checked: bool = False,
) -> MoEOutput:
    """Run one whole MoE forward as one operator and one plan.

    Logits and weights are fp32. Both products accumulate in fp32 and are cast once to the dtype of x, after bias,
    activation and router weight. The sum over k is fp32 in the order k = 0..K-1, plus shared, cast once.

    First-order gradients: for x, weights and biases of experts, router and shared, and passed logits or weights, from
    output and from weights and logits computed here (docs/user/training.md). They go through quantised matrices, which
    are frozen. With `spec.activations` nothing has a gradient.

    Args:
        x: bf16, fp16 or fp32 `[T, D]`.
        experts: the local ones. Matrices may be `QuantizedTensor`s (docs/user/quantization.md).
        routing: RouterWeights (routes from x), RouterLogits (routes from logits) or TopK (ids and weights).
        spec: options. `spec.activations` is the quantised format of x and the hidden rows.
        token_mask: bool `[T]`. A False token has no expert: its row is zero (plus shared), and no statistic counts it.
        expert_map: int32 `[E_global]`. Maps global ids to local experts, or to -1.
        shared: a dense expert that every token visits.
        lora: adapters' factors, differentiable (docs/user/lora.md). adapter_ids: int32 `[T]`, each token's, -1 = none.
        checked: raise InvalidInput for an id outside [-1, E_global), or of no adapter. Waits, as in `make_layout`.

    Returns:
        a MoEOutput. Passed ids and weights are returned unchanged.

    Raises:
        Unsupported: also for second derivatives, and a gradient that does not exist.
    """
    if checked is not False:
        require_checkable(checked)
    if isinstance(lora, LoRAFactors) and lora.beyond_experts:
        more = {"token_mask": token_mask, "expert_map": expert_map, "shared": shared, "checked": checked}
        return run_beyond_experts(ARRAYS, (x, experts, routing), spec, lora, more | {"adapter_ids": adapter_ids})
    results = call(*moe_request(
        x, experts, routing, spec, token_mask=token_mask, expert_map=expert_map, shared=shared, lora=lora,
        adapter_ids=adapter_ids,
    ))  # fmt: skip
    output, tokens_per_expert, invalid_ids = results[:3]
    if isinstance(routing, TopK):
        ids, weights, logits = routing.ids, routing.weights, None
    elif isinstance(routing, RouterLogits):
        (ids, weights), logits = results[3:], routing.logits
    else:
        ids, weights, logits = results[3:]
    if checked:
        num_ids = tokens_per_expert.shape[0] if expert_map is None else expert_map.shape[0]
        require_known_ids(int(invalid_ids), num_ids, adapters=lora is not None)
    return MoEOutput(output, ids, weights, logits, tokens_per_expert, invalid_ids)


def explain_moe(
    x: torch.Tensor,
    experts: ExpertWeights,
    routing: RouterWeights | RouterLogits | TopK,
    spec: MoESpec,
    *,
    token_mask: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    shared: SharedExpert | None = None,
    lora: LoRAFactors | None = None,
    adapter_ids: torch.Tensor | None = None,
    training: bool = False,
) -> Explanation:
    """Describe what `moe` would run for these arguments: buffers, kernels, decisions and summation orders. Runs
    nothing.

    Args:
        training: explain the forward of a training step, then its backward with every gradient.
    """
    operator, arguments = moe_request(
        x, experts, routing, spec, token_mask=token_mask, expert_map=expert_map, shared=shared, lora=lora,
        adapter_ids=adapter_ids,
    )  # fmt: skip
    target = target_of_device(operator.device_of(arguments[:-1]))
    if training:
        return explain_training(training_plans(operator, arguments, target))
    return Explanation.of(operator.plan(arguments, target))
