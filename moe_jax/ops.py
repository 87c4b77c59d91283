"""The ops on JAX arrays. They work eagerly and in jit, scan, cond, checkpoint, vmap, shard_map and jax.export.

Every op is planned while it is traced, or on its first eager call for given shapes. Kernels are compiled there, for
every local CUDA device. A program holds one custom call per op.

- CPU engine: chosen while tracing. `moe_jax.cpu_engine(kind)` makes jitted functions trace again.
- Several devices: call the ops inside `jax.shard_map`, on local parts. Elsewhere XLA gathers a sharded operand on every
  device. Where that can be seen (eager arrays, explicit mesh axes) it raises Unsupported. Under `jit` with automatic
  mesh axes it cannot be seen.
- vmap runs one call per element, in order.
- Gradients: `moe`, `router`, `route`, `matmul_ogs`, `activation` and `reduce` have them, in reverse mode
  (docs/user/training.md). `jax.jvp` raises JAX's TypeError, a second derivative Unsupported. Differentiating another op
  raises Unsupported.
- Outputs are new arrays. Arguments are not donated here: donate in the `jax.jit` around the op.
- Errors: every function raises InvalidInput for an argument with the wrong type, shape or dtype, for arrays of several
  devices, and for options that contradict each other. It raises Unsupported for a platform without kernels.

Letters: T tokens, K top-k, E experts (local), D d_model, F d_ff per expert, N output width. Slot `s = t * K + k`.
"""

from __future__ import annotations

from typing import Any

import jax

from moe_core.base.arrays import require_spec
from moe_core.base.dtypes import MATMUL_DTYPES
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, Scheme, Tiling, format_named, scheme_named
from moe_core.ops.activation.forward import plan_activation
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.moe.backward import explain_training
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.reduction.reduce import plan_reduce, plan_scale_rows
from moe_core.ops.router.forward import plan_router
from moe_core.ops.routing.bitmatrix import plan_pack_bitmatrix, plan_unpack_bitmatrix
from moe_core.ops.routing.checks import require_distinct_ids, require_known_ids
from moe_core.ops.routing.layout import plan_layout
from moe_core.ops.routing.topk import plan_routing
from moe_core.specs.descriptions import described
from moe_core.specs.matmul import Activation, MatmulSpec
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import (
    LAYOUT_INPUTS,
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
from moe_core.specs.routing import LayoutSpec, LogitsSpec, RouterSpec
from moe_core.specs.tile import TileConfig
from moe_core.specs.tile_table import TileTable
from moe_core.specs.tuning import MatmulTuning, Tuning
from moe_jax.autodiff.moe import run_moe
from moe_jax.autodiff.stages import run_stage
from moe_jax.bridge import pytrees as pytrees
from moe_jax.bridge.calls import (
    Array,
    OpCall,
    dtype_name,
    moe_request,
    on_host,
    require_layout_array,
    require_type,
    training_plans,
)
from moe_jax.quantize import dequantize, prepack_weights, quantize, quantize_rows, restore_weights
from moe_jax.trace import watched

__all__ = [
    "Activation", "ExpertWeights", "Format", "LayoutSpec", "LogitsSpec", "MatmulOperands", "MatmulSpec", "MatmulTuning",
    "MoEOutput", "MoESpec", "QuantizedSpec", "QuantizedTensor", "RaggedLayout", "RouterLogits", "RouterSpec",
    "RouterWeights", "Routing", "Scheme", "SharedExpert", "TileConfig", "TileTable", "Tiling", "TopK", "Tuning",
    "activation", "dequantize", "explain_moe", "format_named", "make_layout", "matmul_ogs", "moe", "pack_bitmatrix",
    "prepack_weights", "quantize", "quantize_rows", "reduce", "restore_weights", "route", "router", "scale_rows",
    "scheme_named", "unpack_bitmatrix",
]  # fmt: skip

_PLAIN_LOGITS = LogitsSpec()


@described
def router(x: Array, weight: Array, *, bias: Array | None = None, spec: LogitsSpec = _PLAIN_LOGITS) -> jax.Array:
    """Compute the router's logits, accumulated in fp32."""
    call = OpCall("router")
    require_type("spec", spec, LogitsSpec)
    arrays = (call.array("x", x), call.array("weight", weight), call.optional("bias", bias))
    return run_stage(call, plan_router, *arrays, spec)[0]


@described
def route(
    logits: Array,
    spec: RouterSpec,
    *,
    correction_bias: Array | None = None,
    token_mask: Array | None = None,
) -> Routing:
    """Choose each token's experts and their weights from logits."""
    call = OpCall("route")
    require_type("spec", spec, RouterSpec)
    array = call.array("logits", logits)
    bias, mask = call.optional("correction_bias", correction_bias), call.optional("token_mask", token_mask)
    return Routing(*run_stage(call, plan_routing, array, spec, correction_bias=bias, token_mask=mask))


@described
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
    """Group the slots of ids by expert. An expert's rows are in slot order."""
    call = OpCall("make_layout")
    shape = require_spec("ids", call.array("ids", ids), ("num_tokens", "top_k"), "int32")
    num_tokens, top_k = shape.shape
    layout = LayoutSpec(num_tokens, top_k, num_experts, alignment, max_rows)
    given = {"expert_map": call.optional("expert_map", expert_map)}
    given["token_mask"] = call.optional("token_mask", token_mask)
    result = RaggedLayout(layout, *call.run(plan_layout, shape, layout, **given))
    if checked:
        num_ids = num_experts if expert_map is None else expert_map.shape[0]
        require_known_ids(on_host("make_layout", result.invalid_ids), num_ids)
    return result


@described
def pack_bitmatrix(ids: Array, num_experts: int, *, checked: bool = False) -> jax.Array:
    """Pack ids into one bit per token and expert."""
    call = OpCall("pack_bitmatrix")
    bitmatrix, duplicates, invalid_ids = call.run(plan_pack_bitmatrix, call.array("ids", ids), num_experts)
    if checked:
        require_known_ids(on_host("pack_bitmatrix", invalid_ids), num_experts)
        require_distinct_ids(on_host("pack_bitmatrix", duplicates))
    return bitmatrix


@described
def unpack_bitmatrix(bitmatrix: Array, num_experts: int, top_k: int) -> jax.Array:
    """Unpack a bitmatrix into ids."""
    call = OpCall("unpack_bitmatrix")
    (ids,) = call.run(plan_unpack_bitmatrix, call.array("bitmatrix", bitmatrix), num_experts, top_k)
    return ids


@described
def matmul_ogs(operands: MatmulOperands, layout: RaggedLayout | None, spec: MatmulSpec) -> jax.Array:
    """Multiply the rows of each expert with its weight: a ragged grouped matmul."""
    call = OpCall("matmul_ogs")
    require_type("operands", operands, MatmulOperands)
    require_type("spec", spec, MatmulSpec)
    shapes = call.bundle("operands", operands)
    if layout is not None:
        require_type("layout", layout, RaggedLayout)
        # Which of them a plan reads depends on its target.
        for name in (*LAYOUT_INPUTS, "row_of_slot"):
            require_layout_array(name, call.array(name, getattr(layout, name)), layout.spec)
    return run_stage(call, plan_matmul_ogs, shapes, None if layout is None else layout.spec, spec)[0]


@described
def activation(x: Array, activation: Activation, *, up: Array | None = None, out_dtype: Any = None) -> jax.Array:
    """Apply an activation in fp32, with one cast at the end."""
    call = OpCall("activation")
    require_type("activation", activation, Activation)
    rows, other = call.array("x", x), call.optional("up", up)
    dtype = dtype_name("out_dtype", out_dtype)
    return run_stage(call, plan_activation, rows, activation, up=other, out_dtype=dtype)[0]


@described
def reduce(
    y: Array,
    layout: RaggedLayout,
    *,
    order: str = "slot",
    shared: Array | None = None,
    shared_gate: Array | None = None,
    out_dtype: Any = None,
) -> jax.Array:
    """Sum the rows of each token's slots, in fp32 in the order k = 0..K-1, with one cast at the end."""
    call = OpCall("reduce")
    require_type("layout", layout, RaggedLayout)
    rows = call.array("y", y)
    slots = call.array("row_of_slot", layout.row_of_slot)
    require_layout_array("row_of_slot", slots, layout.spec)
    if order == "row":
        require_spec("y", rows, (layout.spec.capacity, "d_model"), MATMUL_DTYPES)
    options: dict[str, Any] = {"order": order, "out_dtype": dtype_name("out_dtype", out_dtype)}
    options |= {"shared": call.optional("shared", shared), "shared_gate": call.optional("shared_gate", shared_gate)}
    return run_stage(call, plan_reduce, rows, slots, layout.spec.top_k, **options)[0]


@described
def scale_rows(x: Array, weights: Array) -> jax.Array:
    """Multiply each row with its weight in fp32, with one cast at the end."""
    call = OpCall("scale_rows")
    (y,) = call.run(plan_scale_rows, call.array("x", x), call.array("weights", weights))
    return y


@watched(run_moe)
@described
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
    """Run one whole MoE forward as one custom call; its gradients are one more."""
    options = {"token_mask": token_mask, "expert_map": expert_map, "shared": shared, "checked": checked}
    return run_moe(x, experts, routing, spec, **options)


@described
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
    """Describe what `moe` would run for these arguments."""
    call, arguments, keywords = moe_request(x, experts, routing, spec, token_mask, expert_map, shared)
    if training:
        return explain_training(training_plans(call, arguments, keywords))
    return call.plan(plan_moe, *arguments, **keywords).explain()
