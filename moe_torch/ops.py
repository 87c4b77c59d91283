"""The ops of Moebius on torch tensors: functional, traceable; the composed one differentiable.

Every function runs on the tensors' device and current stream and never synchronises, except with `checked=True`. On a
CPU the NumPy reference runs, or the real kernels in Triton's interpreter under TRITON_INTERPRET=1. All of them work
under `torch.compile(fullgraph=True)`, in `torch.export` and in CUDA graphs (run once before capturing: kernels are
compiled and loaded then), and a changing number of tokens recompiles nothing. `moe`, `router`, `route`, `matmul_ogs`,
`activation` and `reduce` have gradients (docs/training.md); to `scale_rows` a tensor that requires one is refused in
grad mode.

Errors, for every function: InvalidInput for an argument with the wrong type, rank, shape, dtype, layout, strides,
device or alignment, or for options that contradict each other; Unsupported for a device without kernels, and for a
required gradient where there is none.

Letters: T tokens, K top-k, E experts, D d_model, F d_ff per expert (after gating), N output width. Slot `s = t*K + k`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, Scheme, Tiling, format_named, scheme_named
from moe_core.moe_backward import explain_training, plan_training
from moe_core.operands import (
    ExpertWeights,
    MatmulOperands,
    MoEOutput,
    RaggedLayout,
    RouterLogits,
    RouterWeights,
    Routing,
    SharedExpert,
    TopK,
)
from moe_core.plan import LaunchPlan
from moe_core.specs import Activation, LayoutSpec, LogitsSpec, MatmulSpec, MatmulTuning, MoESpec, RouterSpec, Tuning
from moe_core.target import Target
from moe_core.tile_table import TileTable
from moe_core.tuning import TileConfig
from moe_torch import operators
from moe_torch.dispatch import Operator, array_spec, call, require_one_device, target_of_device
from moe_torch.matmul_request import is_quantized, matmul_request
from moe_torch.options import decode, dtype_name, encode, layout_spec, require_instance
from moe_torch.prepared import prepare_weights, restore_weights
from moe_torch.quantization import dequantize, quantize, quantize_rows
from moe_torch.quantized_operators import MOE_QUANTIZED, QuantizedOperator

__all__ = [
    "Activation",
    "ExpertWeights",
    "Format",
    "LayoutSpec",
    "LogitsSpec",
    "MatmulOperands",
    "MatmulSpec",
    "MatmulTuning",
    "MoEOutput",
    "MoESpec",
    "QuantizedSpec",
    "QuantizedTensor",
    "RaggedLayout",
    "RouterLogits",
    "RouterSpec",
    "RouterWeights",
    "Routing",
    "Scheme",
    "SharedExpert",
    "TileConfig",
    "TileTable",
    "Tiling",
    "TopK",
    "Tuning",
    "activation",
    "dequantize",
    "explain_moe",
    "format_named",
    "make_layout",
    "matmul_ogs",
    "moe",
    "pack_bitmatrix",
    "prepare_weights",
    "quantize",
    "quantize_rows",
    "reduce",
    "restore_weights",
    "route",
    "router",
    "scale_rows",
    "scheme_named",
    "unpack_bitmatrix",
]

_DEFAULT_LOGITS = LogitsSpec()


def _expert_arrays(experts: ExpertWeights) -> tuple[Any, ...]:
    """The arrays of a bundle in the order of the operators' arguments, as those below."""
    return (
        experts.gate_up,
        experts.down,
        experts.up,
        experts.gate_up_bias,
        experts.up_bias,
        experts.down_bias,
        experts.layer,
        experts.gate_up_input_scale,
        experts.down_input_scale,
    )


def routing_arrays(routing: RouterWeights | RouterLogits | TopK) -> tuple[Any, ...]:
    if isinstance(routing, RouterWeights):
        return routing.weight, routing.bias, routing.correction_bias
    if isinstance(routing, RouterLogits):
        return routing.logits, routing.correction_bias
    return routing.ids, routing.weights


def _shared_arrays(shared: SharedExpert | None) -> tuple[Any, ...]:
    if shared is None:
        return None, None, None, None
    require_instance("shared", shared, SharedExpert)
    return shared.gate_up, shared.down, shared.up, shared.gate


def router(
    x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None, spec: LogitsSpec = _DEFAULT_LOGITS
) -> torch.Tensor:
    """logits fp32 `[T, E]` = x `[T, D]` @ weight (+ bias `[E]`), accumulated in fp32.

    weight: `[D, E]`, or `[E, D]` for `spec.weight_layout` `out_in`. x, weight and bias: bf16, fp16 or fp32 each; fp32
    products are IEEE unless spec.allow_tf32.
    """
    require_instance("spec", spec, LogitsSpec)
    return call(operators.ROUTER, x, weight, bias, encode(spec))


def route(
    logits: torch.Tensor,
    spec: RouterSpec,
    *,
    correction_bias: torch.Tensor | None = None,
    token_mask: torch.Tensor | None = None,
) -> Routing:
    """ids int32 `[T, K]` and weights fp32 `[T, K]` of logits fp32 `[T, E]`; the rules are RouterSpec's.

    correction_bias fp32 `[E]` is added to the scores for the selection only. token_mask bool `[T]`: a token that is
    False gets ids -1 and weights 0.
    """
    require_instance("spec", spec, RouterSpec)
    return Routing(*call(operators.ROUTE, logits, correction_bias, token_mask, encode(spec)))


def make_layout(
    ids: torch.Tensor,
    num_experts: int,
    *,
    expert_map: torch.Tensor | None = None,
    token_mask: torch.Tensor | None = None,
    alignment: int = 1,
    max_rows: int | None = None,
    checked: bool = False,
) -> RaggedLayout:
    """Group the slots of ids int32 `[T, K]` by expert, stably; -1 = no expert.

    num_experts: local experts E. expert_map int32 `[E_global]` maps ids to local experts or -1. token_mask bool `[T]`
    leaves out tokens that are False. alignment: each expert's rows start at a multiple of it. max_rows: each expert
    owns that many rows, later ones are dropped. An id outside [-1, E_global) acts as -1 and counts in `invalid_ids`.
    checked: raise InvalidInput if there is one; this waits for the device.
    """
    _require_checkable(checked)
    text = encode(num_experts, alignment, max_rows)
    arrays = call(operators.MAKE_LAYOUT, ids, expert_map, token_mask, text)
    layout = layout_spec(ids.shape[0], ids.shape[1], num_experts, alignment, max_rows)
    if checked:
        _refuse_invalid_ids(arrays[-1], num_experts, expert_map)
    return RaggedLayout(layout, *arrays)


def pack_bitmatrix(ids: torch.Tensor, num_experts: int, *, checked: bool = False) -> torch.Tensor:
    """bitmatrix uint32 `[T, ceil(E / 32)]` of ids int32 `[T, K]`: bit `e % 32` of word `e // 32` says e was chosen.

    -1 and ids outside [0, E) set nothing; a duplicate within a token is held once. checked: raise InvalidInput if there
    is a duplicate or an id outside [-1, E); this waits for the device.
    """
    _require_checkable(checked)
    bitmatrix, duplicates, invalid_ids = call(operators.PACK_BITMATRIX, ids, encode(num_experts))
    if checked:
        _refuse_invalid_ids(invalid_ids, num_experts, None)
        repeated = int(duplicates)
        if repeated:
            raise InvalidInput(
                f"ids must not repeat within a token, which a bitmatrix cannot hold, got {repeated} repeated ids; "
                "use make_layout, where each slot counts"
            )
    return bitmatrix


def unpack_bitmatrix(bitmatrix: torch.Tensor, num_experts: int, top_k: int) -> torch.Tensor:
    """ids int32 `[T, K]` of bitmatrix uint32 `[T, ceil(E / 32)]`: ascending, then -1; of more than K the lowest."""
    return call(operators.UNPACK_BITMATRIX, bitmatrix, encode(num_experts, top_k))


def matmul_ogs(operands: MatmulOperands, layout: RaggedLayout | None, spec: MatmulSpec) -> torch.Tensor:
    """Ragged grouped matmul: `y[row] = cast(act(x[row] @ w[expert of row] + bias) * row_weight)`, fp32 inside.

    operands: see MatmulOperands (x bf16, fp16 or fp32; rows may be strided). spec: gather, scatter, fused activation,
    weight layout. y: `[capacity, N]` (scatter `row`) or `[T * K, N]` (`slot`), N after gating; rows without an expert
    are exact zeros. layout None: dense, x `[T, D]`, weight `[D, N]` or `[N, D]`, y `[T, N]`. weight with up, and x with
    them, may be `QuantizedTensor`s (docs/quantization.md). Gradients go through quantised weights, which have none
    themselves; with a quantised x there are none.
    """
    operator, arrays, text = matmul_request(operands, layout, spec)
    return call(operator, *arrays, text)


def activation(
    x: torch.Tensor,
    activation: Activation,
    *,
    up: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
) -> torch.Tensor:
    """y `[R, F]` = activation of x in fp32, one cast to out_dtype (None = the dtype of x).

    x: `[R, 2F]` (gated, one buffer) or `[R, F]` (ungated, or the gate beside `up` `[R, F]`); rows may be strided.
    """
    require_instance("activation", activation, Activation)
    return call(operators.ACTIVATION, x, up, encode(activation, dtype_name("out_dtype", out_dtype)))


def reduce(
    y: torch.Tensor,
    layout: RaggedLayout,
    *,
    order: str = "slot",
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
) -> torch.Tensor:
    """out `[T, D]`: the rows of y of a token's slots added in fp32 in the order k = 0..K-1, one cast.

    y: `[T * K, D]` (order `slot`) or `[capacity, D]` (order `row`). shared `[T, D]` is added last, times
    sigmoid(shared_gate fp32 `[T, 1]`) if given. out_dtype: None = the dtype of y.
    """
    require_instance("layout", layout, RaggedLayout)
    text = encode(layout.spec.top_k, order, dtype_name("out_dtype", out_dtype))
    return call(operators.REDUCE, y, layout.row_of_slot, shared, shared_gate, text)


def scale_rows(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """y `[T, D]` = x `[T, D]` * weights fp32 `[T, 1]`, in fp32, cast to the dtype of x."""
    return call(operators.SCALE_ROWS, x, weights, encode())


def moe(
    x: torch.Tensor,
    experts: ExpertWeights,
    routing: RouterWeights | RouterLogits | TopK,
    spec: MoESpec,
    *,
    token_mask: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    shared: SharedExpert | None = None,
    checked: bool = False,
) -> MoEOutput:
    """One whole MoE forward of x `[T, D]` as one operator and one plan.

    routing: RouterWeights (from x), RouterLogits (from logits) or TopK (ids and weights decided; returned as given).
    token_mask bool `[T]`: tokens that are False get a zero row (plus shared) and no statistic. expert_map int32
    `[E_global]` maps ids to local experts or -1. shared: a dense expert for every token. checked: raise InvalidInput if
    an id is outside [-1, E_global); this waits for the device.

    Rounding: logits and weights fp32; both products accumulate in fp32 and are cast once to the dtype of x, after bias,
    activation and router weight; the sum over k is fp32 in the order k = 0..K-1, plus shared, cast once.

    Gradients, of those tensors alone that require them: x, every weight and bias of experts, router and shared, or the
    given logits or weights. Into them flow those of output, and of weights and logits where they are computed here. The
    rest (ids, masks, correction_bias, layer) has none. The forward then keeps what docs/training.md lists. Second
    derivatives and forward mode raise Unsupported.

    The matrices of experts may be `QuantizedTensor`s (docs/quantization.md). They are frozen: gradients go through
    them, and one of their tensors that requires one raises Unsupported. With `spec.activations`, which quantises x and
    the hidden rows, nothing has a gradient, and whatever requires one raises Unsupported.
    """
    _require_checkable(checked)
    operator, arrays, text = moe_request(x, experts, routing, spec, token_mask, expert_map, shared)
    results = call(operator, *arrays, text)
    output, tokens_per_expert, invalid_ids = results[:3]
    if isinstance(routing, TopK):
        ids, weights, logits = routing.ids, routing.weights, None
    elif isinstance(routing, RouterLogits):
        (ids, weights), logits = results[3:], routing.logits
    else:
        ids, weights, logits = results[3:]
    if checked:
        _refuse_invalid_ids(invalid_ids, tokens_per_expert.shape[0], expert_map)
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
    training: bool = False,
) -> str:
    """What `moe` would run for these arguments: every buffer, kernel, decision and summation order. Runs nothing.

    training: the forward of a training step, then its backward with every gradient.
    """
    operator, arrays, text = moe_request(x, experts, routing, spec, token_mask, expert_map, shared)
    present = [(name, array) for name, array in zip(operator.names, arrays, strict=True) if array is not None]
    target = target_of_device(require_one_device(present))
    if training:
        return explain_training(training_plans(operator, type(routing), arrays, text, target))
    return operator.plan(arrays, text, target).explain()


def training_plans(
    operator: Operator, kind: type, tensors: Sequence[Any], options: str, target: Target
) -> tuple[LaunchPlan, ...]:
    """The plans of a training step for the tensors of a moe operator (None where absent) and its options."""
    # Checks what a call checks.
    operator.plan(tensors, options, target)
    arrays: list[Any] = [
        None if tensor is None else array_spec(name, tensor)
        for name, tensor in zip(operator.names, tensors, strict=True)
    ]
    (spec, *formats), input_scales = decode(options), []
    if isinstance(operator, QuantizedOperator):
        arrays, input_scales = operator.joined(arrays, *formats)
    return plan_training(operators.moe_operands(kind, arrays, input_scales), spec, target)


def moe_request(
    x: Any, experts: Any, routing: Any, spec: Any, token_mask: Any, expert_map: Any, shared: Any
) -> tuple[Operator, list[Any], str]:
    """The moe operator for such routing and experts, its tensors in order (None where absent) and its options."""
    require_instance("experts", experts, ExpertWeights)
    require_instance("routing", routing, (RouterWeights, RouterLogits, TopK))
    require_instance("spec", spec, MoESpec)
    *own, scale_1, scale_2 = _expert_arrays(experts)
    arrays = [x, *own, *routing_arrays(routing), token_mask, expert_map, *_shared_arrays(shared)]
    # Scales beside plain experts are refused by the planner, which that operator reaches with them.
    if scale_1 is not None or scale_2 is not None or is_quantized(experts.gate_up, experts.down, experts.up):
        operator = MOE_QUANTIZED[type(routing)]
        return operator, operator.arguments(arrays, (scale_1, scale_2)), encode(spec, operator.formats(arrays))
    return operators.MOE[type(routing)], arrays, encode(spec)


def moe_arguments(*request: Any) -> tuple[Operator, list[Any]]:
    """The operator and the tensors of `moe_request`."""
    return moe_request(*request)[:2]


def _require_checkable(checked: bool) -> None:
    """Refuse `checked` where the host cannot read the device: in a traced graph or while a CUDA graph is captured."""
    if not checked:
        return
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        raise Unsupported(
            "checked=True reads a counter on the host, which a compiled, exported or captured graph cannot do; "
            "leave it out there and test invalid_ids afterwards"
        )


def _refuse_invalid_ids(invalid_ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None) -> None:
    count = int(invalid_ids)
    if count:
        bound = num_experts if expert_map is None else expert_map.shape[0]
        raise InvalidInput(
            f"ids must be in [-1, {bound}), got {count} outside; correct them, or leave checked out to treat them as -1"
        )
