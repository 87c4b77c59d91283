"""The ops on JAX arrays. They work eagerly and in jit, scan, cond, checkpoint, vmap, shard_map and jax.export.

Every op is planned while it is traced (or on its first eager call for given shapes): wrong arguments raise InvalidInput
there, and kernels are compiled there, for every local CUDA device. A program holds one custom call per op.

- CPU engine: chosen while tracing. `moe_jax.cpu_engine(kind)` makes jitted functions trace again.
- Several devices: call the ops inside `jax.shard_map`, on local parts. Elsewhere XLA gathers a sharded operand on every
  device. Where that can be seen (eager arrays, explicit mesh axes) it raises Unsupported; under `jit` with automatic
  mesh axes it cannot be seen.
- vmap runs one call per element, in order.
- Derivatives: `moe`, `router`, `route`, `matmul_ogs`, `activation` and `reduce` have gradients (reverse mode; `jax.jvp`
  raises JAX's TypeError, a second derivative Unsupported). Differentiating another op raises Unsupported.
- Outputs are new arrays. Arguments are not donated here: donate in the `jax.jit` around the op.

Letters: T tokens, K top-k, E experts (local), D d_model, F d_ff per expert. Slot `s = t * K + k`.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from moe_core.activation import plan_activation
from moe_core.arrays import ArraySpec, require_spec
from moe_core.dtypes import MATMUL_DTYPES, canonical
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, Scheme, Tiling, format_named, scheme_named
from moe_core.matmul_ogs import LAYOUT_INPUTS, plan_matmul_ogs
from moe_core.moe import plan_moe
from moe_core.moe_backward import explain_training
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
from moe_core.reduction import plan_reduce, plan_scale_rows
from moe_core.routing import plan_layout, plan_pack_bitmatrix, plan_unpack_bitmatrix
from moe_core.specs import Activation, LayoutSpec, LogitsSpec, MatmulSpec, MatmulTuning, MoESpec, RouterSpec, Tuning
from moe_core.tile_table import TileTable
from moe_core.tuning import TileConfig
from moe_jax import pytrees as pytrees
from moe_jax.calls import Array, OpCall, require_type
from moe_jax.composed import moe_call, run_moe, training_plans
from moe_jax.prepared import prepare_weights, restore_weights
from moe_jax.quantize import dequantize, quantize, quantize_rows
from moe_jax.routing import run_route, run_router
from moe_jax.stage_gradients import run_stage
from moe_jax.trace import watched

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

_PLAIN_LOGITS = LogitsSpec()


def router(x: Array, weight: Array, *, bias: Array | None = None, spec: LogitsSpec = _PLAIN_LOGITS) -> jax.Array:
    """logits fp32 `[T, E]` = x `[T, D]` @ weight (+ bias `[E]`), accumulated in fp32.

    weight: `[D, E]` or `[E, D]`, as `spec.weight_layout` says. Each array bf16, fp16 or fp32.
    Raises InvalidInput for other shapes or dtypes.
    """
    call = OpCall("router")
    require_type("spec", spec, LogitsSpec)
    return run_router(call, call.array("x", x), call.array("weight", weight), call.optional("bias", bias), spec)


def route(
    logits: Array,
    spec: RouterSpec,
    *,
    correction_bias: Array | None = None,
    token_mask: Array | None = None,
) -> Routing:
    """ids int32 `[T, K]` and weights fp32 `[T, K]` from logits fp32 `[T, E]`, by the rules of `spec`.

    correction_bias: fp32 `[E]`, added for the selection only. token_mask: bool `[T]`; a masked (False) token gets ids
    -1 and weights 0. Raises InvalidInput for K > E and for groups that do not fit E.
    """
    call = OpCall("route")
    require_type("spec", spec, RouterSpec)
    ids, weights = run_route(
        call,
        call.array("logits", logits),
        call.optional("correction_bias", correction_bias),
        call.optional("token_mask", token_mask),
        spec,
    )
    return Routing(ids, weights)


def make_layout(
    ids: Array,
    num_experts: int,
    *,
    expert_map: Array | None = None,
    token_mask: Array | None = None,
    alignment: int = 1,
    max_rows: int | None = None,
    checked: bool = False,
) -> RaggedLayout:
    """Rows grouped by expert from ids int32 `[T, K]`; an expert's rows are in slot order.

    num_experts: E, the local experts. expert_map: int32 `[E_global]`, global id -> local id or -1. token_mask: bool
    `[T]`. alignment, max_rows: see LayoutSpec. Ids of -1 have no row. Ids outside [-1, E), or [-1, E_global) with an
    expert_map, have none either and count in `invalid_ids`. checked: raise InvalidInput where that count is not 0,
    which waits for the result and so works eagerly only (Unsupported while tracing).
    """
    call = OpCall("make_layout")
    shape = require_spec("ids", call.array("ids", ids), ("num_tokens", "top_k"), "int32")
    num_tokens, top_k = shape.shape
    layout = LayoutSpec(num_tokens, top_k, num_experts, alignment, max_rows)
    outputs = call.run(
        plan_layout,
        shape,
        layout,
        expert_map=call.optional("expert_map", expert_map),
        token_mask=call.optional("token_mask", token_mask),
    )
    result = RaggedLayout(layout, *outputs)
    if checked:
        _require_valid("make_layout", result.invalid_ids, num_experts, expert_map)
    return result


def pack_bitmatrix(ids: Array, num_experts: int, *, checked: bool = False) -> jax.Array:
    """bitmatrix uint32 `[T, ceil(E / 32)]` of ids int32 `[T, K]`: bit e % 32 of word e // 32 says that e was chosen.

    -1 sets nothing, and neither does an id outside [-1, E). A repeated id sets its bit once. checked: raise
    InvalidInput for repeated or outside ids, which waits for the result and so works eagerly only (Unsupported while
    tracing).
    """
    call = OpCall("pack_bitmatrix")
    bitmatrix, duplicates, invalid_ids = call.run(plan_pack_bitmatrix, call.array("ids", ids), num_experts)
    if checked:
        _require_valid("pack_bitmatrix", invalid_ids, num_experts, None)
        repeated = int(np.asarray(duplicates)[0])
        if repeated:
            raise InvalidInput(
                f"ids must not repeat within a token, which a bitmatrix cannot hold, got {repeated} repeated ids; "
                "use make_layout, where each slot counts"
            )
    return bitmatrix


def unpack_bitmatrix(bitmatrix: Array, num_experts: int, top_k: int) -> jax.Array:
    """ids int32 `[T, K]`, ascending and padded with -1, of bitmatrix uint32 `[T, ceil(E / 32)]`.

    A token with more than K bits set keeps its K lowest ids.
    """
    call = OpCall("unpack_bitmatrix")
    (ids,) = call.run(plan_unpack_bitmatrix, call.array("bitmatrix", bitmatrix), num_experts, top_k)
    return ids


def matmul_ogs(operands: MatmulOperands, layout: RaggedLayout | None, spec: MatmulSpec) -> jax.Array:
    """Ragged grouped matmul: row r of an expert's group is `epilogue(x[source of r] @ weight[expert])`.

    layout None: one dense product, x `[T, D]` and weight `[D, N]`. Result: `[capacity, N]` (`spec.scatter` row) or
    `[T * K, N]` (slot), in `spec.out_dtype`; rows without an expert are zeros. weight with up, and x with them, may be
    `QuantizedTensor`s (docs/quantization.md). Raises InvalidInput, Unsupported.
    """
    call = OpCall("matmul_ogs")
    require_type("operands", operands, MatmulOperands)
    require_type("spec", spec, MatmulSpec)
    shapes = call.bundle("operands", operands)
    if layout is not None:
        require_type("layout", layout, RaggedLayout)
        # Which of them a plan reads depends on its target.
        for name in (*LAYOUT_INPUTS, "row_of_slot"):
            _require_layout_array(name, call.array(name, getattr(layout, name)), layout.spec)
    request = call.request(plan_matmul_ogs, shapes, None if layout is None else layout.spec, spec)
    return run_stage(request, call.placed().values())


def activation(x: Array, activation: Activation, *, up: Array | None = None, out_dtype: Any = None) -> jax.Array:
    """y `[R, F]` = the activation of x, in fp32, cast once to out_dtype (None = the dtype of x).

    x: `[R, 2F]` (gated, one buffer) or `[R, F]` (ungated, or the gate beside up `[R, F]` for gate_layout `separate`).
    """
    call = OpCall("activation")
    require_type("activation", activation, Activation)
    request = call.request(
        plan_activation,
        call.array("x", x),
        activation,
        up=call.optional("up", up),
        out_dtype=_dtype_name("out_dtype", out_dtype),
    )
    return run_stage(request, call.placed().values())


def reduce(
    y: Array,
    layout: RaggedLayout,
    *,
    order: str = "slot",
    shared: Array | None = None,
    shared_gate: Array | None = None,
    out_dtype: Any = None,
) -> jax.Array:
    """out `[T, D]`: the sum over a token's slots in fp32, in slot order, cast once to out_dtype (None = y's).

    y: `[T * K, D]` by slot (order `slot`) or `[capacity, D]` by layout row (`row`). Slots without a row add nothing.
    shared `[T, D]` is added in fp32, times sigmoid(shared_gate fp32 `[T, 1]`) if given.
    """
    call = OpCall("reduce")
    require_type("layout", layout, RaggedLayout)
    rows = call.array("y", y)
    slots = call.array("row_of_slot", layout.row_of_slot)
    _require_layout_array("row_of_slot", slots, layout.spec)
    if order == "row":
        require_spec("y", rows, (layout.spec.capacity, "d_model"), MATMUL_DTYPES)
    request = call.request(
        plan_reduce,
        rows,
        slots,
        layout.spec.top_k,
        order=order,
        shared=call.optional("shared", shared),
        shared_gate=call.optional("shared_gate", shared_gate),
        out_dtype=_dtype_name("out_dtype", out_dtype),
    )
    return run_stage(request, call.placed().values())


def scale_rows(x: Array, weights: Array) -> jax.Array:
    """y `[T, D]` = x `[T, D]` * weights fp32 `[T, 1]`, in fp32, cast to the dtype of x."""
    call = OpCall("scale_rows")
    (y,) = call.run(plan_scale_rows, call.array("x", x), call.array("weights", weights))
    return y


def _moe(
    x: Any, experts: Any, routing: Any, spec: Any, *, checked: bool = False, replayed: Any = None, **options: Any
) -> MoEOutput:
    """`moe`; replayed: None, or the Routing of a trace, which takes the place of the call's own."""
    result = run_moe(x, experts, routing, spec, replayed=replayed, **options)
    if checked:
        expert_map = options.get("expert_map")
        _require_valid("moe", result.invalid_ids, result.tokens_per_expert.shape[0], expert_map)
    return result


@watched(_moe)
def moe(
    x: Array,
    experts: ExpertWeights,
    routing: RouterWeights | RouterLogits | TopK,
    spec: MoESpec,
    *,
    token_mask: Array | None = None,
    expert_map: Array | None = None,
    shared: SharedExpert | None = None,
    checked: bool = False,
) -> MoEOutput:
    """One whole Mixture-of-Experts on x `[T, D]`: one custom call, and one more for its gradients.

    routing: from x (RouterWeights), from logits (RouterLogits) or decided (TopK; ids and weights come back as given).
    token_mask: bool `[T]`, False = the token has no expert. expert_map: int32 `[E_global]`, global id -> local or -1.
    shared: a dense expert for every token. Result: see MoEOutput; its logits are None for TopK. The matrices of experts
    may be `QuantizedTensor`s, and `spec.activations` a format for what they are multiplied with (docs/quantization.md).
    checked: raise InvalidInput where ids lie outside [-1, E), which waits for the result and so works eagerly only
    (Unsupported while tracing). Raises InvalidInput, Unsupported.

    Gradients (reverse mode, once): of x, every weight and bias, the logits or weights given; not of correction_bias.
    They flow in through output, weights and logits; ids and counts have none, and neither have quantised weights, which
    they flow through, or a forward with spec.activations. Arrays that are not differentiated cost
    nothing: no weight gradient is computed for a frozen weight. docs/training.md has the equations.
    """
    options = {"token_mask": token_mask, "expert_map": expert_map, "shared": shared, "checked": checked}
    return _moe(x, experts, routing, spec, **options)


def explain_moe(
    x: Array,
    experts: ExpertWeights,
    routing: RouterWeights | RouterLogits | TopK,
    spec: MoESpec,
    *,
    token_mask: Array | None = None,
    expert_map: Array | None = None,
    shared: SharedExpert | None = None,
    training: bool = False,
) -> str:
    """What `moe` would run for these arguments where they are: kernels, scratch, summation order.

    training: the forward of a training step, then its backward with every gradient.

    Arrays may be `jax.ShapeDtypeStruct`s: then the default device counts. Inside `moe_jax.export_target(...)` it
    explains that target's plan.
    """
    call, arguments, keywords = moe_call(x, experts, routing, spec, token_mask, expert_map, shared)
    if training:
        return explain_training(training_plans(call, arguments, keywords))
    return call.explain(plan_moe, *arguments, **keywords)


def _require_layout_array(name: str, array: ArraySpec, layout: LayoutSpec) -> None:
    """A layout made under vmap or by hand may not be what its spec says."""
    sizes = {
        "group_sizes": layout.num_experts,
        "group_start": layout.num_experts + 1,
        "slot_of_row": layout.capacity,
        "row_of_slot": layout.num_slots,
    }
    require_spec(f"layout.{name}", array, (sizes[name],), "int32")


def _dtype_name(name: str, dtype: Any) -> str | None:
    if dtype is None:
        return None
    try:
        return canonical(dtype)
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from error


def _require_valid(op: str, invalid_ids: Array, num_experts: int, expert_map: Array | None) -> None:
    """Wait for the count of ids outside [-1, E) and raise InvalidInput unless it is 0; Unsupported while tracing."""
    if isinstance(invalid_ids, Tracer):
        raise Unsupported(
            f"checked=True of {op} looks at the result on the host, got a call inside jit or another transformation; "
            "return invalid_ids and check it outside, or pass `invalid_ids[0] == 0` to jax.experimental.checkify.check"
        )
    count = int(np.asarray(invalid_ids)[0])
    if count:
        bound = num_experts if expert_map is None else expert_map.shape[0]
        raise InvalidInput(
            f"ids must be in [-1, {bound}), got {count} outside; correct them, or leave checked out to treat them as -1"
        )
