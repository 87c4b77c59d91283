"""The ops on JAX arrays, eagerly and in jit, scan, cond, checkpoint, vmap, shard_map and jax.export.

Tracing, or the first eager call for given shapes, plans an op and compiles its kernels for every local CUDA device. A
program holds one custom call per op. vmap over tokens with shared weights is one call of `moe` and of ops on rows, and
their gradients are one more. vmap over plain experts is one call of `moe` with all of them, behind each element's
router. Other vmaps run one call per element, in order.

- CPU engine: chosen while tracing. `moe_jax.cpu_engine(kind)` makes jitted functions trace again.
- Several devices: ops open a `jax.shard_map` over the rows of their first argument, with whole weights. Rows that would
  have to move raise Unsupported (docs/user/parallel-jax.md).
- Derivatives: `moe`, `router`, `rms_norm`, `route`, `route_rounded`, `matmul_ogs`, `gather_rows`, `activation`,
  `reduce`, `ragged_dot`, `ragged_dot_general` and `gmm` (docs/user/training.md). Other ops raise Unsupported, and so do
  forward mode and second derivatives with quantised weights.
- Outputs are new arrays. Donate arguments in the `jax.jit` around the op.
- Errors: InvalidInput for wrong types, shapes and dtypes, arrays of several devices, and contradictory options,
  Unsupported for platforms without kernels.

The ops take, return and raise the same as in `moe_torch.ops`, with arrays of JAX. Its docstrings say it in full.

Letters: T tokens, K top-k, E experts (local), D d_model, F d_ff per expert, N output width. Slot `s = t * K + k`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_core.base.arrays import require_spec
from moe_core.base.checks import as_integer, require_choice, require_flag
from moe_core.base.dtypes import ID_DTYPES
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, Scheme, Tiling, format_named, scheme_named
from moe_core.ops.activation.forward import plan_activation
from moe_core.ops.lora.adapters import Dropout
from moe_core.ops.lora.beyond import dropout_mask, run_beyond_experts
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.moe.backward import explain_training
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import ForwardOptions
from moe_core.ops.norm.forward import plan_rms_norm
from moe_core.ops.reduction.reduce import plan_reduce
from moe_core.ops.router.forward import plan_router
from moe_core.ops.routing.bitmatrix import plan_pack_bitmatrix, plan_unpack_bitmatrix
from moe_core.ops.routing.checks import require_distinct_ids, require_known_ids
from moe_core.ops.routing.layout import plan_layout
from moe_core.ops.routing.rounding import plan_route_rounded
from moe_core.ops.routing.topk import plan_routing
from moe_core.plan import Explanation
from moe_core.specs.matmul import Activation, MatmulSpec
from moe_core.specs.moe import MoESpec
from moe_core.specs.norm import NormSpec
from moe_core.specs.operands import (
    ExpertWeights,
    LayoutArrays,
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
    array_fields,
    require_layout,
)
from moe_core.specs.routing import LayoutSpec, LogitsSpec, RouterSpec, TokenRounding
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
    int32_ids,
    moe_request,
    on_host,
    require_type,
    training_plans,
)
from moe_jax.bridge.layouts import on_every_device, over_slots, way_of_product, way_of_sum
from moe_jax.bridge.mesh import over_rows
from moe_jax.grouped import gmm, ragged_dot, ragged_dot_general
from moe_jax.quantize import dequantize, prepack_weights, quantize, quantize_rows, restore_weights
from moe_jax.rows import gather_rows, layout_of_runs, scale_rows
from moe_jax.trace import asked, noted, watched

__all__ = [
    "Activation", "ExpertWeights", "Format", "LayoutSpec", "LoRAFactors", "LogitsSpec", "MatmulOperands", "MatmulSpec",
    "MatmulTuning", "MoEOutput", "MoESpec", "NormSpec", "QuantizedSpec", "QuantizedTensor", "RaggedLayout",
    "RoundedRouting", "RouterLogits", "RouterSpec", "RouterWeights", "Routing", "Scheme", "SharedExpert", "TileConfig",
    "TileTable", "Tiling", "TokenRounding", "TopK", "Tuning", "activation", "dequantize", "explain_moe", "format_named",
    "gather_rows", "gmm", "layout_of_runs", "make_layout", "matmul_ogs", "moe", "pack_bitmatrix", "prepack_weights",
    "quantize", "quantize_rows", "ragged_dot", "ragged_dot_general", "reduce", "restore_weights", "rms_norm", "route",
    "route_rounded", "router", "scale_rows", "scheme_named", "unpack_bitmatrix",
]  # fmt: skip

_PLAIN_LOGITS, _PLAIN_NORM = LogitsSpec(), NormSpec()


@over_rows("x", "wide")
def router(
    x: Array, weight: Array, *, bias: Array | None = None, spec: LogitsSpec = _PLAIN_LOGITS, wide: Array | None = None
) -> jax.Array:
    """Compute the router's logits fp32 `[T, E]` of x `[T, D]`, as `moe_torch.router`.

    wide: `x.astype(float32)`, see `gather_rows`.
    """
    call = OpCall("router")
    require_type("spec", spec, LogitsSpec)
    x = x if wide is None else jax.lax.stop_gradient(x)
    arrays = (call.array("x", x), call.array("weight", weight), call.optional("bias", bias))
    return run_stage(call, plan_router, *arrays, spec, wide=call.optional("wide", wide))[0]


@over_rows("x")
def rms_norm(x: Array, weight: Array, spec: NormSpec = _PLAIN_NORM) -> jax.Array:
    """Divide rows of x `[R, D]` by their root mean square in fp32, as `moe_torch.rms_norm`."""
    call = OpCall("rms_norm")
    require_type("spec", spec, NormSpec)
    return run_stage(call, plan_rms_norm, call.array("x", x), call.array("weight", weight), spec)[0]


@over_rows("logits", "token_mask", "ids")
@asked
def route(
    logits: Array,
    spec: RouterSpec,
    *,
    correction_bias: Array | None = None,
    token_mask: Array | None = None,
    ids: Array | None = None,
) -> Routing:
    """Choose ids int32 `[T, K]` and weights fp32 `[T, K]` from logits fp32 `[T, E]`, as `moe_torch.route`."""
    call = OpCall("route")
    require_type("spec", spec, RouterSpec)
    array = call.array("logits", logits)
    bias, mask = call.optional("correction_bias", correction_bias), call.optional("token_mask", token_mask)
    options = {"correction_bias": bias, "token_mask": mask, "given": call.optional("given", int32_ids(ids))}
    return Routing(*run_stage(call, plan_routing, array, spec, **options))


@on_every_device("reshard them, or round each device's tokens inside a jax.shard_map of your own", "token_mask")
@noted
def route_rounded(
    logits: Array,
    spec: RouterSpec,
    rounding: TokenRounding,
    *,
    correction_bias: Array | None = None,
    token_mask: Array | None = None,
) -> RoundedRouting:
    """Route logits fp32 `[T, E]`, then round each expert's number of tokens, as `moe_torch.route_rounded`."""
    call = OpCall("route_rounded")
    require_type("spec", spec, RouterSpec)
    require_type("rounding", rounding, TokenRounding)
    array = call.array("logits", logits)
    bias, mask = call.optional("correction_bias", correction_bias), call.optional("token_mask", token_mask)
    options = {"correction_bias": bias, "token_mask": mask}
    return RoundedRouting(*run_stage(call, plan_route_rounded, array, spec, rounding, **options)[:3])


def make_layout(
    ids: Array,
    num_experts: int,
    *,
    expert_map: Array | None = None,
    token_mask: Array | None = None,
    alignment: int = 1,
    max_rows: int | None = None,
    rows: int | None = None,
    checked: bool = False,
) -> RaggedLayout:
    """Group the slots of ids, integers `[T, K]`, by expert, as `moe_torch.make_layout`."""
    require_flag("checked", checked)
    sizes = (alignment, max_rows, rows)
    result = _layout(ids, num_experts, expert_map=expert_map, token_mask=token_mask, sizes=sizes)
    if checked:
        num_ids = num_experts if expert_map is None else expert_map.shape[0]
        require_known_ids(on_host("make_layout", result.invalid_ids), num_ids)
    return result


@on_every_device("reshard it", "ids", "expert_map", "token_mask")
def _layout(
    ids: Array, num_experts: int, *, expert_map: Array | None, token_mask: Array | None, sizes: tuple[Any, ...]
) -> RaggedLayout:
    call = OpCall("make_layout")
    shape = require_spec("ids", call.array("ids", int32_ids(ids)), ("num_tokens", "top_k"), ID_DTYPES)
    layout = LayoutSpec(shape.shape[0], shape.shape[1], num_experts, *sizes)
    map_spec, mask = call.optional("expert_map", expert_map), call.optional("token_mask", token_mask)
    return RaggedLayout(layout, *call.run(plan_layout, shape, layout, expert_map=map_spec, token_mask=mask))


@over_rows("ids")
def pack_bitmatrix(ids: Array, num_experts: int, *, checked: bool = False) -> jax.Array:
    """Pack ids, integers `[T, K]`, into a bitmatrix uint32 `[T, ceil(E / 32)]`, as `moe_torch.pack_bitmatrix`."""
    call = OpCall("pack_bitmatrix")
    require_flag("checked", checked)
    num_experts = as_integer("num_experts", num_experts, 1)
    bitmatrix, duplicates, invalid_ids = call.run(plan_pack_bitmatrix, call.array("ids", int32_ids(ids)), num_experts)
    if checked:
        require_known_ids(on_host("pack_bitmatrix", invalid_ids), num_experts)
        require_distinct_ids(on_host("pack_bitmatrix", duplicates))
    return bitmatrix


@over_rows("bitmatrix")
def unpack_bitmatrix(bitmatrix: Array, num_experts: int, top_k: int) -> jax.Array:
    """Unpack a bitmatrix uint32 `[T, ceil(E / 32)]` into ids int32 `[T, K]`, as `moe_torch.unpack_bitmatrix`."""
    call = OpCall("unpack_bitmatrix")
    num_experts, top_k = as_integer("num_experts", num_experts, 1), as_integer("top_k", top_k, 1)
    (ids,) = call.run(plan_unpack_bitmatrix, call.array("bitmatrix", bitmatrix), num_experts, top_k)
    return ids


@over_slots(way_of_product, "gather by token or slot and scatter by slot, which moves none, or reshard it")
def matmul_ogs(operands: MatmulOperands, layout: RaggedLayout | None, spec: MatmulSpec) -> jax.Array:
    """Multiply the rows of each expert with its weight: a ragged grouped matmul, as `moe_torch.matmul_ogs`."""
    call = OpCall("matmul_ogs")
    require_type("operands", operands, MatmulOperands)
    require_type("spec", spec, MatmulSpec)
    shapes = call.bundle("operands", operands)
    if layout is not None:
        require_type("layout", layout, RaggedLayout)
        require_type("layout.spec", layout.spec, LayoutSpec)
        # The target decides which of them a plan reads.
        fields = array_fields(LayoutArrays)
        arrays = {name: call.array(name, getattr(layout, name), f"layout.{name}") for name, _ in fields}
        require_layout(layout.spec, LayoutArrays(**arrays))
    return run_stage(call, plan_matmul_ogs, shapes, None if layout is None else layout.spec, spec)[0]


@over_rows("x", "up")
def activation(x: Array, activation: Activation, *, up: Array | None = None, out_dtype: Any = None) -> jax.Array:
    """Apply an activation to x `[R, 2F]` or `[R, F]`, as `moe_torch.activation`. Returns y `[R, F]`."""
    call = OpCall("activation")
    require_type("activation", activation, Activation)
    rows, other = call.array("x", x), call.optional("up", up)
    dtype = dtype_name("out_dtype", out_dtype)
    return run_stage(call, plan_activation, rows, activation, up=other, out_dtype=dtype)[0]


@over_slots(way_of_sum, "sum rows by slot, which moves none, or reshard it")
def reduce(
    y: Array,
    layout: RaggedLayout,
    *,
    order: str = "slot",
    shared: Array | None = None,
    shared_gate: Array | None = None,
    out_dtype: Any = None,
) -> jax.Array:
    """Sum y `[T * K, D]` or `[capacity, D]` by token to `[T, D]`, as `moe_torch.reduce`."""
    call = OpCall("reduce")
    require_type("layout", layout, RaggedLayout)
    require_type("layout.spec", layout.spec, LayoutSpec)
    rows = call.array("y", y)
    slots = call.array("row_of_slot", layout.row_of_slot, "layout.row_of_slot")
    require_choice("order", order, ("slot", "row"))
    options: dict[str, Any] = {"order": order, "out_dtype": dtype_name("out_dtype", out_dtype)}
    options |= {"shared": call.optional("shared", shared), "shared_gate": call.optional("shared_gate", shared_gate)}
    return run_stage(call, plan_reduce, rows, slots, layout.spec, **options)[0]


def _weigh(x: Array, routing: Any, spec: MoESpec, token_mask: Array | None, ids: Array) -> jax.Array:
    assert spec.router is not None
    if isinstance(routing, RouterLogits):
        logits = routing.logits
    else:
        logits = router(x, routing.weight, bias=routing.bias, spec=spec.logits_spec())
    return route(logits, spec.router, token_mask=token_mask, ids=ids).weights


class _Arrays:
    """JAX's part of `moe_core.ops.lora.beyond`."""

    where, sigmoid = staticmethod(jnp.where), staticmethod(jax.nn.sigmoid)

    @property
    def ops(self) -> Any:
        return sys.modules[__name__]

    def like(self, array: Array, other: Array) -> jax.Array:
        cast = jnp.asarray(array, other.dtype)
        # On GPUs XLA leaves out a rounding between two casts (`xla_allow_excess_precision`), in gradients too.
        return jax.lax.optimization_barrier(cast) if cast.dtype.itemsize < array.dtype.itemsize else cast

    def index(self, ids: Array) -> Array:
        return ids

    def arange(self, count: int, like: Array) -> jax.Array:
        return jnp.arange(count, dtype=like.dtype)

    def kept(self, shape: tuple[int, int], seed: Array, dropout: Dropout) -> jax.Array:
        rows, columns = (jnp.arange(count, dtype=jnp.uint32) for count in shape)
        word = jax.lax.bitcast_convert_type(seed, jnp.uint32)
        return dropout_mask(rows, columns, word, dropout, np.uint32)

    def rounded(self, logits: jax.Array, dtype: str) -> jax.Array:
        """Rounded to the dtype named, with the gradient as it comes."""
        change = jax.lax.stop_gradient(self.like(logits, np.empty(0, jnp.dtype(dtype))).astype(logits.dtype) - logits)
        return logits if dtype == "float32" else logits + jnp.nan_to_num(change, nan=0, posinf=jnp.inf, neginf=-jnp.inf)


ARRAYS = _Arrays()


def _with_adapters_beyond_experts(moe: Callable[..., MoEOutput]) -> Callable[..., MoEOutput]:
    @functools.wraps(moe)
    def adapted(x: Any, experts: Any, routing: Any, spec: Any, **more: Any) -> MoEOutput:
        lora = more.get("lora")
        if not isinstance(lora, LoRAFactors) or not lora.beyond_experts:
            return moe(x, experts, routing, spec, **more)
        more = {"token_mask": None, "shared": None, "checked": False, "adapter_ids": None} | more
        return run_beyond_experts(ARRAYS, (x, experts, routing), spec, more.pop("lora"), more)

    return adapted


@_with_adapters_beyond_experts
@over_rows("x", "token_mask", "adapter_ids", summed=("tokens_per_expert", "invalid_ids"))
@watched(run_moe, _weigh)
def moe(
    x: Array,
    experts: ExpertWeights,
    routing: RouterWeights | RouterLogits | TopK,
    spec: MoESpec,
    *,
    token_mask: Array | None = None,
    expert_map: Array | None = None,
    shared: SharedExpert | None = None,
    lora: LoRAFactors | None = None,
    adapter_ids: Array | None = None,
    checked: bool = False,
) -> MoEOutput:
    """`moe_jax.moe` with whole experts."""
    arrays = {"token_mask": token_mask, "expert_map": expert_map, "shared": shared}
    return run_moe(x, experts, routing, spec, checked=checked, **arrays, lora=lora, adapter_ids=adapter_ids)


def explain_moe(
    x: Array,
    experts: ExpertWeights,
    routing: RouterWeights | RouterLogits | TopK,
    spec: MoESpec,
    *,
    token_mask: Array | None = None,
    expert_map: Array | None = None,
    shared: SharedExpert | None = None,
    lora: LoRAFactors | None = None,
    adapter_ids: Array | None = None,
    training: bool = False,
) -> Explanation:
    """Describe what `moe` would run for these arguments: every buffer, kernel, decision and summation order.

    Runs nothing. Takes the arguments of `moe`, or `jax.ShapeDtypeStruct`s for the default device, or the target of
    `moe_jax.export_target(...)`.

    Args:
        training: explain the forward of a training step, then its backward with every gradient.
    """
    arrays = {"token_mask": token_mask, "expert_map": expert_map, "shared": shared}
    call, arguments, keywords = moe_request(x, experts, routing, spec, **arrays, lora=lora, adapter_ids=adapter_ids)
    if training:
        return explain_training(training_plans(call, arguments, keywords))
    return Explanation.of(call.plan(plan_moe, *arguments, options=ForwardOptions(**keywords)))
