"""The forward of one layer, and its plans."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from moe_core.base import dtypes
from moe_core.base.target import Target
from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedTensor
from moe_core.layers import MAXTEXT, LayerPart, LoRA, MoEAux, MoELayerSpec
from moe_core.layers.plans import explain_layer, layer_plans
from moe_core.layers.weights import layer_parts, layer_router
from moe_core.plan import Explanation, LaunchPlan
from moe_core.runtime.warmup import WarmupReport, token_counts
from moe_core.specs.operands import LoRAFactors, MoEOperands
from moe_jax.bridge.calls import moe_request, require_kept
from moe_jax.layers.few import of_more_tokens, tokens_to_add
from moe_jax.layers.lora import Adapters, initial_adapters
from moe_jax.layers.losses import router_losses
from moe_jax.layers.observed import current
from moe_jax.layers.parameters import Leaf, Parameters, find, is_gate, is_prepacked, is_quantized, leaves, nested
from moe_jax.layers.sharded import Ranks, divide, hidden_splits, over_mesh, own_experts, ranks_of, require_layer
from moe_jax.layers.stages import RoutedBy, of_rows, run_layer
from moe_jax.layers.weights import matrix_specs
from moe_jax.ops import Array, ExpertWeights, RouterWeights, SharedExpert
from moe_jax.parallel.axis import ExpertAxis
from moe_jax.warmup import make_ready

#: For MaxText's remat policies: the output of a layer.
CHECKPOINT_NAMES = ("mlpwo", "moe_mlpwo")


_BY_X = RoutedBy()


def forward(
    parameters: Parameters,
    x: Array,
    spec: MoELayerSpec,
    *,
    dtype: Any = None,
    token_mask: Array | None = None,
    layer_index: Array | int | None = None,
    routed_by: RoutedBy = _BY_X,
    expert_axis: str | ExpertAxis | None = None,
    token_axes: Sequence[str] | jax.sharding.PartitionSpec | None = None,
    parameter_specs: Any = None,
    adapters: Adapters | None = None,
    return_aux: bool = False,
) -> Any:
    """Return y `[..., D]` of x `[..., D]`, or (y, MoEAux) with return_aux.

    The op runs in stages with a capacity limit, which drops later slots, a router norm, expert scales, or routed_by.

    Args:
        parameters: of the layer, or of a stack.
        dtype: of the computation and of y. None: the promotion of x and the experts, as in Flax (quantised experts: of
            x and the shared experts, if any). float64 is promoted from no other dtype.
        token_mask: bool `[...]`. False tokens get zeros, plus shared experts, and count in no statistic.
        layer_index: the layer of a stack, an int32 scalar on the device or an int. Only matrices in another than the
            compute dtype are copied. A known index outside the stack raises. A traced one gives NaN, or raises on the
            CPU reference without copies.
        expert_axis: the mesh axis that splits the experts. Inside a `jax.shard_map` over it, x, parameters and MoEAux
            are local parts, except that the losses' mean over ranks is the loss of all tokens. Outside, the layer opens
            a shard_map over every axis of the mesh that is not manual, if there is a mesh. None: the axis that visibly
            splits the experts, if any.
        token_axes: mesh axes that split the batch axes of x, or their PartitionSpec. None: those that visibly split x,
            and every automatic axis.
        parameter_specs: PartitionSpecs in the structure of parameters. jit hides the splits over automatic axes.
            Splits that it lacks are gathered by XLA.
        adapters: of a layer without layer_index. Inside a `jax.shard_map`, factors are of all experts or of this
            rank's, and scale and ranks of all.
    """
    observer = current()
    if observer is not None:
        options = {"dtype": dtype, "token_mask": token_mask, "layer_index": layer_index, "routed_by": routed_by}
        options |= {"expert_axis": expert_axis, "token_axes": token_axes, "parameter_specs": parameter_specs}
        options |= {"adapters": adapters}
        with observer.paused():
            y, aux = forward(parameters, x, spec, return_aux=True, **options)
        observer.note(spec, aux)
        return (y, aux) if return_aux else y
    axis, by_token = ExpertAxis.of(expert_axis), {"x": x, "token_mask": token_mask} | vars(routed_by)
    ranks = ranks_of(axis, (x, *jax.tree.leaves(parameters)))
    options: dict[str, Any] = {"spec": spec, "dtype": dtype, "return_aux": return_aux}
    _check_x(x, spec)
    if adapters is not None:
        adapters = adapters.of(x, layer_index)
    if ranks is None or isinstance(ranks, Ranks):
        return _local(parameters, layer_index, by_token, ranks, adapters=adapters, **options)
    if axis is not None and (more := tokens_to_add(x, spec, axis, ranks)):
        given: Any = {"expert_axis": axis, "parameter_specs": parameter_specs, "layer_index": layer_index}
        if adapters is not None:
            longer = jnp.pad(adapters.ids.reshape(-1), (0, more), constant_values=-1)
            given["adapters"] = dataclasses.replace(adapters, ids=longer)
        call = functools.partial(forward, parameters, **given, **options)
        return of_more_tokens(call, by_token, more, return_aux)
    division = divide(spec, ranks, parameters, x, axis, token_axes, parameter_specs)
    if layer_index is not None:
        require_layer(layer_index, find(parameters, division.parts[0].leaf.path).shape[0])
    return over_mesh(_local, division, (parameters, layer_index, adapters), by_token, options)


def _local(
    parameters: Parameters,
    layer_index: Any,
    by_token: dict[str, Any],
    ranks: Ranks | None,
    *,
    spec: MoELayerSpec,
    dtype: Any,
    return_aux: bool,
    adapters: Adapters | None = None,
) -> Any:
    """The forward of one device."""
    of_x = dict(by_token)
    x, token_mask = of_x.pop("x"), of_x.pop("token_mask", None)
    if ranks is not None and ranks.axis is not None and spec.num_experts % jax.lax.axis_size(ranks.axis.name):
        parameters = own_experts(parameters, spec, ranks.axis)
    operands, around, layer_exists = _prepare(parameters, x, spec, dtype, token_mask, layer_index)
    by, dropout = of_rows(RoutedBy(**of_x), x, operands, spec), 0.0
    if adapters is not None:
        operands, dropout = adapters.added_to(operands), adapters.dropout
    result, tokens_per_expert = run_layer(operands, around, spec, by, ranks, dropout)
    y = result.output.reshape(x.shape)
    if layer_exists is not None:
        y = jnp.where(layer_exists, y, jnp.nan)
    for name in CHECKPOINT_NAMES:
        y = checkpoint_name(y, name)
    if not return_aux:
        return y
    over = () if ranks is None else ranks.over
    losses = router_losses(result.logits, tokens_per_expert, operands.token_mask, spec=spec.router, over=over)
    of_tokens = result.ids, result.weights, result.invalid_ids, result.logits
    return y, MoEAux(*losses, tokens_per_expert, *of_tokens, getattr(result, "overflow", None))


def explain_mesh(
    spec: MoELayerSpec,
    shape: tuple[int, ...],
    parameters: Parameters,
    *,
    dtype: Any = None,
    expert_axis: str | ExpertAxis | None = None,
    token_axes: Sequence[str] | jax.sharding.PartitionSpec | None = None,
    parameter_specs: Any = None,
) -> str:
    """Explain how `forward` for x of this shape `[..., D]` is divided over the mesh, and what moves.

    The mesh: `jax.set_mesh`'s, else that of the parameters, arrays or ShapeDtypeStructs. Empty on one device.
    """
    axis, x = ExpertAxis.of(expert_axis), jax.ShapeDtypeStruct(shape, dtype or jnp.float32)
    mesh = ranks_of(axis, jax.tree.leaves(parameters), eager=False)
    if not isinstance(mesh, jax.sharding.AbstractMesh):
        return ""
    division = divide(spec, mesh, parameters, x, axis, token_axes, parameter_specs)
    return division.explain(parameters) + hidden_splits(division, axis, parameter_specs)


def explain(
    spec: MoELayerSpec,
    tokens: int | tuple[int, ...],
    *,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    num_layers: int | None = None,
    parameters: Parameters | None = None,
    lora: LoRA | None = None,
    training: bool = False,
) -> Explanation:
    """Explain the plan of `forward` for x of shape `tokens` (`[..., D]`, or a number of tokens) on the default device.

    training: forward, then backward with the gradients of x and every parameter. parameters: arrays or
    ShapeDtypeStructs with the dtypes. None: param_dtype. lora: adapters, without their dropout. x has `dtype`, else
    that of the experts (param_dtype if quantised). Computes nothing. Raises InvalidInput, Unsupported.
    """
    shape = (tokens, spec.d_model) if isinstance(tokens, int) else tuple(tokens)
    operands, target = _planned_for(spec, shape, (dtype, param_dtype), num_layers, parameters, lora)
    return explain_layer(operands, spec, MAXTEXT, target, training)


def warmup(
    spec: MoELayerSpec,
    tokens: Sequence[int],
    *,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    num_layers: int | None = None,
    parameters: Parameters | None = None,
    lora: LoRA | None = None,
    training: bool = False,
) -> WarmupReport:
    """Compile and load the kernels of `forward` for numbers of tokens, without computing.

    tokens: the expected numbers, or a few from small to large. Other arguments: see `explain`. Returns the kernels with
    the seconds each took, none on a CPU. Raises InvalidInput, Unsupported.
    """
    plans: list[LaunchPlan] = []
    for count in token_counts(tokens):
        shape = (count, spec.d_model)
        operands, target = _planned_for(spec, shape, (dtype, param_dtype), num_layers, parameters, lora)
        plans += itertools.chain(*layer_plans(operands, spec, MAXTEXT, target, training))
    return make_ready(plans)


def _planned_for(
    spec: MoELayerSpec,
    shape: tuple[int, ...],
    dtypes: tuple[Any, Any],
    num_layers: int | None,
    parameters: Parameters | None,
    lora: LoRA | None,
) -> tuple[MoEOperands, Target]:
    dtype, param_dtype = dtypes

    def dtype_of(leaf: Leaf) -> Any:
        if parameters is not None:
            return find(parameters, leaf.path).dtype
        return leaf.parameter.dtype or (jnp.float32 if leaf.is_state else param_dtype)

    every = leaves(spec, num_layers, parameters is not None and is_prepacked(parameters))
    arrays = nested((leaf.path, jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf))) for leaf in every)
    planned: list[tuple[MoEOperands, Target]] = []

    def trace(parameters: Parameters, x: jax.Array) -> jax.Array:
        operands, _, _ = _prepare(parameters, x, spec, dtype, None, None if num_layers is None else 0)
        moe_spec = spec.moe_spec(MAXTEXT)
        router = operands.routing
        plain = RouterWeights(router.weight, router.bias, router.correction_bias)
        if lora is not None:
            slots = initial_adapters(lora, spec, jax.random.key(0), param_dtype)
            operands = Adapters(LoRAFactors(**slots), jnp.zeros(x.shape[:-1], jnp.int32)).added_to(operands)
        optional = {"shared": operands.shared, "lora": operands.lora, "adapter_ids": operands.adapter_ids}
        call, (x_spec, experts, routing, _), more = moe_request(
            operands.x, operands.experts, plain, moe_spec, **optional
        )
        planned.append((MoEOperands(x_spec, experts, routing, **more), call.target()))
        return x

    if dtype is None:
        dtype = param_dtype if spec.experts.scheme is not None else arrays["wo"].dtype
    jax.eval_shape(trace, arrays, jax.ShapeDtypeStruct(shape, dtype))
    return planned[0]


def update_correction_bias(correction_bias: jax.Array, tokens_per_expert: jax.Array, rate: float) -> jax.Array:
    """The correction bias fp32 `[E]` after a step: bias + rate * sign(mean - count).

    Source: DeepSeek-V3 technical report, section 2.1.2. tokens_per_expert: int32 `[E]`, of the whole batch, summed over
    devices. For stacks both are `[L, E]`. rate: 0.001 in DeepSeek-V3.
    """
    counts = tokens_per_expert
    if counts.shape != correction_bias.shape or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise InvalidInput(
            f"tokens_per_expert must be int32{list(correction_bias.shape)} like correction_bias, got "
            f"{counts.dtype}{list(counts.shape)}; pass MoEAux.tokens_per_expert"
        )
    # Integers: an expert at the mean gets no step.
    total, num_experts = counts.sum(axis=-1, keepdims=True), counts.shape[-1]
    floor, is_whole = total // num_experts, total % num_experts == 0
    step = jnp.where(counts > floor, -1.0, jnp.where((counts == floor) & is_whole, 0.0, 1.0))
    return correction_bias + rate * step


def _check_x(x: Any, spec: MoELayerSpec) -> None:
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise InvalidInput(f"x must be a jax.Array, got {type(x).__name__}; convert it with jax.numpy.asarray")
    if x.ndim < 1 or x.shape[-1] != spec.d_model:
        raise InvalidInput(f"x must be [..., {spec.d_model}] (d_model), got {x.shape}; pass hidden states that wide")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise InvalidInput(f"x must be {' or '.join(dtypes.MATMUL_DTYPES)}, got {x.dtype}; pass hidden states")


def _prepare(
    parameters: Parameters, x: Any, spec: MoELayerSpec, dtype: Any, token_mask: Any, layer_index: Any
) -> tuple[MoEOperands, dict[str, LayerPart], jax.Array | None]:
    """Returns operands, the parts around them, and a traced check that the layer exists."""
    _check_x(x, spec)
    if token_mask is not None:
        if not isinstance(token_mask, (jax.Array, np.ndarray)):
            raise InvalidInput(f"token_mask must be a bool array, got {type(token_mask).__name__}; convert it")
        if token_mask.shape != x.shape[:-1] or token_mask.dtype != bool:
            raise InvalidInput(
                f"token_mask must be bool{list(x.shape[:-1])}, one for each token of x, got "
                f"{token_mask.dtype}{list(token_mask.shape)}; compare it with 0 and give it that shape"
            )
        token_mask = token_mask.reshape(-1)
    prepacked = is_prepacked(parameters)
    arrays = {leaf.parameter.name: find(parameters, leaf.path) for leaf in leaves(spec, prepacked=prepacked)}
    for name, array in ({"x": x} | arrays).items():
        require_kept(name, array)
    if dtype is None:
        matrix = next((arrays[name] for name in ("experts.down", "shared_experts.down") if name in arrays), x)
        if (x.dtype == jnp.float64) != (matrix.dtype == jnp.float64):
            raise InvalidInput(
                f"x must be {matrix.dtype} like the experts, got {x.dtype}, and float64 mixes with no other dtype; "
                "convert x, or make the layer with the dtype to compute in"
            )
        dtype = jnp.result_type(x.dtype, matrix.dtype)
    arrays, index, layer_exists = _one_layer(arrays, jnp.dtype(dtype), layer_index, 4 if prepacked else 3)
    arrays = {name: array.astype(_used_dtype(name, array, dtype)) for name, array in arrays.items()}
    arrays = _assembled(arrays, spec, prepacked)

    def bundle(kind: type, prefix: str, **more: Any) -> Any:
        fields = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        return kind(**fields, **more)

    operands = MoEOperands(
        jnp.asarray(x).reshape(-1, spec.d_model).astype(dtype),
        bundle(ExpertWeights, "experts.", layer_index=index),
        layer_router(bundle(dict, "router."), spec.router_norm, spec.sparse_mixer),
        token_mask,
        shared=None if spec.shared_experts is None else bundle(SharedExpert, "shared_experts."),
    )
    return operands, layer_parts(arrays, spec), layer_exists


def _assembled(arrays: dict[str, Any], spec: MoELayerSpec, prepacked: bool) -> dict[str, Any]:
    if spec.experts.scheme is None:
        return arrays
    whole: dict[str, Any] = {name: array for name, array in arrays.items() if not is_quantized(name)}
    specs = matrix_specs(spec, prepacked)
    parts = [name.rpartition(".") for name in arrays if is_quantized(name)]
    for matrix in dict.fromkeys(matrix for matrix, _, _ in parts):
        fields = {field: arrays[f"{matrix}.{field}"] for of, _, field in parts if of == matrix}
        whole[matrix] = QuantizedTensor.unchecked(specs[matrix], **fields)
    return whole


def _used_dtype(name: str, array: Any, dtype: Any) -> Any:
    as_stored = is_gate(name) or is_quantized(name) or (name.endswith("_bias") and array.dtype == jnp.float32)
    if dtype == jnp.float64:  # which never mixes with other floats
        as_stored = is_quantized(name) or name == "router.table"
    return array.dtype if as_stored else dtype


def _one_layer(
    arrays: dict[str, Any], dtype: Any, layer_index: Array | int | None, axes: int
) -> tuple[dict[str, Any], jax.Array | None, jax.Array | None]:
    """(arrays of one layer, the index of stacked ones or None, a traced check that the layer exists or None). axes: of
    one layer's down. Small gates are always cut out, matrices only to be cast, quantised ones never."""
    down = arrays["experts.down" if "experts.down" in arrays else "experts.down.values"]
    if down.ndim == axes and layer_index is None:
        return arrays, None, None
    if down.ndim != axes + 1 or layer_index is None:
        kind = "a stack of layers" if down.ndim == axes + 1 else f"one layer (wo {down.shape})"
        raise InvalidInput(
            f"layer_index must be given with a stack of layers and only then, got {layer_index!r} with {kind}"
            "; pass both or neither"
        )
    layer = (
        np.asarray(layer_index) if isinstance(layer_index, (int, np.generic, np.ndarray)) else jnp.asarray(layer_index)
    )
    if layer.size != 1 or not jnp.issubdtype(layer.dtype, jnp.integer):
        raise InvalidInput(
            f"layer_index must be one integer, got {layer.dtype}{list(layer.shape)}; pass an int32 scalar"
        )
    layer, num_layers = layer.reshape(()), down.shape[0]
    is_traced = isinstance(layer, Tracer)
    require_layer(layer, num_layers)
    index = jnp.asarray(layer, jnp.int32).reshape(1)
    cast = {name for name, array in arrays.items() if array.dtype != _used_dtype(name, array, dtype)}
    # Biases are small, and a stack's are cast as a stack.
    in_place = not any(name.startswith("experts.") and not name.endswith("_bias") for name in cast)
    shared_in_place = in_place and not any(name.startswith("shared_experts.") for name in cast)
    cut = {
        name: jax.lax.dynamic_index_in_dim(array, index[0], keepdims=False)
        for name, array in arrays.items()
        if is_gate(name)
        or name.startswith(("before.", "after."))
        or not (shared_in_place if name.startswith("shared_experts.") else in_place)
    }
    if in_place:
        return arrays | cut, index, None
    return arrays | cut, None, (layer >= 0) & (layer < num_layers) if is_traced else None
