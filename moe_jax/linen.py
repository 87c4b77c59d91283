"""The Mixture-of-Experts layer for Flax Linen. Names, shapes and casts: `moe_jax.layers`.

    layer = MoE(d_model=512, d_ff=1024, num_experts=8, top_k=2)
    variables = layer.init(jax.random.key(0), x)    # x [..., 512]
    y = layer.apply(variables, x)
    y, aux = layer.apply(variables, x, return_aux=True)

Parameters are in the collection `params`, boxed with logical axes (`nn.meta.unbox` removes the boxes). The correction
bias is in `router_state`, without a gradient. With `mutable=["intermediates"]` every call also sows its MoEAux as
`moe_aux`.

Quantised experts: `MoE(..., experts=ExpertsSpec(scheme=scheme_named("mxfp4_w4a16")))`, or a checkpoint's, `layer =
MoE.from_spec(weights.layer_spec())` and `layer.load_weights(weights)`. Their collection is `quantized`:
`quantized/wi_0/values` and so on.

Adapters: `MoE(..., lora=LoRA(rank=8))` has their factors in the collection `lora`, and scales and ranks, without a
gradient, in `lora_state`. `init_lora`, `load_lora`, `evict_lora` and `export_lora` make and change slots.

For a scan over layers, make one MoE with num_layers=L and pass each call its layer. Weights in the compute dtype are
then read in place:

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            stack = MoE(512, 1024, 8, 2, num_layers=24, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
            step = nn.scan(
                lambda stack, x, index: (x + stack(x, layer_index=index), None),
                variable_broadcast=("params", "router_state", "quantized"),
                variable_axes={"intermediates": 0},
                split_rngs={"params": False},
            )
            return step(stack, x, jnp.arange(24))[0]

On several devices a call opens its own `jax.shard_map`, see `moe_jax.layers.forward`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_core.base.dtypes import canonical
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Scheme
from moe_core.layers import MAXTEXT, LayerCost, layer_cost
from moe_core.layers.weights import warn_left_out
from moe_core.plan import Explanation
from moe_core.runtime.warmup import WarmupReport
from moe_jax import layers
from moe_jax.layers import DEFAULT_KERNEL_INIT, Initializer, Leaf, description, qwix
from moe_jax.layers import lora as slots
from moe_jax.layers.description import *  # noqa: F403 - its `__all__`
from moe_jax.ops import Array
from moe_jax.parallel.axis import ExpertAxis

try:
    import flax.linen as nn
    from flax.linen.spmd import logical_to_mesh_axes
except ModuleNotFoundError as error:
    raise Unsupported(
        f"moe_jax.linen needs flax, and {error.name} is not installed; install moebius with its extra `flax`: "
        "pip install 'moebius[flax]'"
    ) from error

__all__ = ["LORA", "LORA_STATE", "QUANTIZED", "STATE", "MoE"]
__all__ += description.__all__

STATE = "router_state"
QUANTIZED = "quantized"
LORA = "lora"
LORA_STATE = "lora_state"
_Places = tuple[tuple[tuple[str, ...], Leaf], ...]


class MoE(nn.Module):
    """A routed mixture of experts, y `[..., D]` of x `[..., D]`; see the module's docstring.

    The other fields are those of `MoELayerSpec`. token_rounding is for training: evaluate
    `layer.clone(token_rounding=None)`, with the same variables. Raises InvalidInput, also in calls inside
    `nn.logical_axis_rules` without these names.

    Attributes:
        dtype: of the computation and of y. None: the promotion of x and the parameters. param_dtype: of new parameters.
        num_layers: None, or L for a stack `[L, ...]`.
        lora: adapters of the experts. With a dropout, calls need an rng `dropout`: evaluate
            `layer.clone(lora=dataclasses.replace(layer.lora, dropout=0))`.
        logical_axes: names of the parameters' axes.
        expert_axis, token_axes: mesh axes of experts and tokens, see `moe_jax.layers.forward`. None: those of the
            shardings and of logical rules.
    """

    d_model: int
    d_ff: int
    num_experts: int
    top_k: int
    _: dataclasses.KW_ONLY
    router: layers.RouterSpec = layers.RouterSpec()
    experts: layers.ExpertsSpec = layers.ExpertsSpec()
    shared_experts: layers.SharedExpertsSpec | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = DEFAULT_KERNEL_INIT
    num_layers: int | None = None
    lora: layers.LoRA | None = None
    logical_axes: layers.LogicalAxes = layers.LogicalAxes()
    expert_axis: Any = None
    token_axes: tuple[str, ...] | None = None
    router_bias: bool = False
    correction_bias: bool = False
    apply_router_weight_on_input: bool = False
    logits_dtype: str = "float32"
    capacity_factor: float | None = None
    allow_tf32: bool = False
    tuning: layers.Tuning | None = None
    recompute: bool = False
    main_grad: bool = False
    fast_accumulate: bool = False
    router_norm: layers.NormSpec | None = None
    expert_scale: bool = False
    output: layers.OutputSpec | None = None
    latent: layers.LatentSpec | None = None
    token_table: int = 0
    sparse_mixer: float | None = None
    token_rounding: layers.TokenRounding | None = None

    def __post_init__(self) -> None:
        # Wrong fields raise here, not in the first call.
        layers.leaves(self.spec, self.num_layers)
        layers.require_axis(ExpertAxis.of(self.expert_axis))
        if self.lora is not None:
            slots.require_lora(self.lora, self.spec, self.num_layers)
        super().__post_init__()

    @classmethod
    def from_spec(cls, spec: layers.MoELayerSpec, **options: Any) -> MoE:
        """The layer of a spec. options: dtype, param_dtype, kernel_init, num_layers, expert_axis, token_axes, name."""
        return cls(**{field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}, **options)

    @property
    def spec(self) -> layers.MoELayerSpec:
        names = [field.name for field in dataclasses.fields(layers.MoELayerSpec)]
        return layers.MoELayerSpec(**{name: getattr(self, name) for name in names})

    @nn.compact
    def __call__(
        self,
        x: Array,
        *,
        token_mask: Array | None = None,
        layer_index: Array | int | None = None,
        gate_inputs: Array | None = None,
        expert_ids: Array | None = None,
        input_ids: Array | None = None,
        adapter_ids: Array | None = None,
        return_aux: bool = False,
    ) -> Any:
        """y `[..., D]`, or (y, MoEAux). Arguments: see `moe_jax.layers.forward` and `moe_jax.layers.RoutedBy`.

        adapter_ids: int32 `[...]` with `lora`, the slot of each token's adapter, -1 = none. None: slot 0 of one.
        """
        spec = self.spec
        rule = layers.current_rule()
        scheme = None if rule is None or spec.experts.scheme is not None else layers.scheme_of_rule(rule)
        if scheme is not None and not layers.is_training(rule):
            raise Unsupported(
                "Qwix cannot quantise the experts of a Linen MoE in a call, as quantised ones are another collection; "
                "build the model with experts=ExpertsSpec(scheme=moe_jax.layers.scheme_of_rule(rule)) and quantise the "
                "weights with `layer, variables = layer.quantize_experts(variables, scheme)`, or give the rule a "
                "module_path that leaves this layer out"
            )
        prepacked = layers.is_prepacked(self.variables.get(QUANTIZED, {}))
        every, axis = layers.leaves(spec, self.num_layers, prepacked), ExpertAxis.of(self.expert_axis)
        if axis is not None and axis.is_manual:
            every = tuple(layers.local_leaf(leaf, axis) for leaf in every)
        places = tuple((leaf.path, leaf) for leaf in every)
        sows = self.is_mutable_collection("intermediates") and not self.is_initializing()
        options = {"token_mask": token_mask, "layer_index": layer_index, "return_aux": return_aux or sows}
        if not self.is_initializing():
            options |= self._on_mesh(np.shape(x), every)
        options["adapters"] = self._adapters(adapter_ids, rule)
        options["routed_by"] = layers.RoutedBy(gate_inputs, expert_ids, input_ids)
        for _, leaf in places:
            layers.require_rules(leaf, self.logical_axes, nn.get_logical_axis_rules())
        arrays = _declare(self, places, self.param_dtype, self.kernel_init, self.logical_axes)
        if scheme is not None:
            arrays = layers.fake_quantized(arrays, spec, scheme)
        result = layers.forward(arrays, x, spec, dtype=self.dtype, **options)
        if sows:
            self.sow("intermediates", "moe_aux", result[1])
        return result[0] if sows and not return_aux else result

    @nn.nowrap
    def _adapters(self, ids: Any, rule: Any) -> layers.Adapters | None:
        lora, spec = self.lora, self.spec
        if lora is not None:
            qwix.require_same_lora(lora, rule)
        elif (lora := qwix.lora_of_rule(rule)) is None:
            return slots.adapters_of(None, None, ids, None)
        else:
            slots.require_lora(lora, spec, self.num_layers)
        made: dict[str, Any] = {}
        names = (*lora.shapes(spec), *slots.LORA_STATE)
        if self.is_initializing():
            made = slots.initial_adapters(lora, spec, self.make_rng("params"), self.param_dtype)
            if qwix.lora_of_rule(rule) is not None:
                factors = qwix.factors_of_rule(rule, spec, lambda: self.make_rng("params"), self.param_dtype)
                made = slots.load_adapter(made, lora, spec, 0, factors)
        elif missing := [name for name in names if not self.has_variable(_lora_collection(name), name)]:
            raise InvalidInput(
                f"variables must hold the collections {LORA} and {LORA_STATE} of the layer's adapters, got none of "
                f"{', '.join(missing)}; make them by init, or add those of `layer.init_lora(key)`"
            )
        arrays = {
            name: self.variable(_lora_collection(name), name, lambda name=name: made[name]).value for name in names
        }
        key = self.make_rng("dropout") if lora.dropout and not self.is_initializing() else None
        return slots.adapters_of(arrays, lora, ids, key)

    @nn.nowrap
    def init_lora(self, key: jax.Array) -> dict[str, Any]:
        """The collections of new slots, see `LoRA`: `variables | layer.init_lora(key)`."""
        return _lora_collections(slots.initial_adapters(self._lora(), self.spec, key, self.param_dtype))

    @nn.nowrap
    def reset_lora(self, variables: Any, slot: int, key: jax.Array, rank: int | None = None) -> dict[str, Any]:
        """Variables with a new adapter in a slot, which adds nothing yet. rank: None: that of the options."""
        return {**variables, **_lora_collections(slots.new_adapter(_slots(variables), self._lora(), slot, key, rank))}

    @nn.nowrap
    def load_lora(self, variables: Any, slot: int, factors: slots.LoRAFactors | slots.ExpertAdapter) -> dict[str, Any]:
        """Variables with an adapter in a slot. factors: see `moe_jax.nnx.AdapterSlots.load`."""
        return {
            **variables,
            **_lora_collections(slots.load_adapter(_slots(variables), self._lora(), self.spec, slot, factors)),
        }

    @nn.nowrap
    def evict_lora(self, variables: Any, slot: int) -> dict[str, Any]:
        """Variables with an empty slot. Tokens with its id have no adapter, and count in invalid_ids."""
        return {**variables, **_lora_collections(slots.evict_adapter(_slots(variables), self._lora(), slot))}

    @nn.nowrap
    def export_lora(self, variables: Any, slot: int = 0) -> slots.LoRAFactors:
        """An adapter's factors, as `load_lora` takes them. Waits for the device, which holds the rank."""
        return slots.export_adapter(_slots(variables), self._lora(), slot)

    @nn.nowrap
    def _lora(self) -> layers.LoRA:
        if self.lora is None:
            raise InvalidInput("the layer must have lora=LoRA(...), got None; make it with adapters")
        return self.lora

    @nn.nowrap
    def _on_mesh(self, shape: tuple[int, ...], every: Sequence[Leaf]) -> dict[str, Any]:
        rules = nn.get_logical_axis_rules()
        known = layers.known_specs(every, self.logical_axes, shape, logical_to_mesh_axes, rules)
        named = {"expert_axis": self.expert_axis, "token_axes": self.token_axes}
        return known | {name: value for name, value in named.items() if value is not None}

    @nn.nowrap
    def explain(self, tokens: int | tuple[int, ...], variables: Any = None, *, training: bool = False) -> Explanation:
        """See `moe_jax.layers.explain`; with variables (None: of `init`) also `moe_jax.layers.explain_mesh`."""
        options = self._planned_for(variables)
        plan, parameters = layers.explain(self.spec, tokens, **options, training=training), options["parameters"]
        if parameters is None:
            return plan
        shape = (tokens, self.d_model) if isinstance(tokens, int) else tokens
        every = layers.leaves(self.spec, self.num_layers, layers.is_prepacked(parameters))
        mesh = layers.explain_mesh(self.spec, shape, parameters, dtype=self.dtype, **self._on_mesh(shape, every))
        return plan.after(mesh) if mesh else plan

    @nn.nowrap
    def cost(self, tokens: int | Sequence[int], *, training: bool = False) -> LayerCost:
        """See `moe_core.layers.layer_cost`. tokens: a number, or x's shape. XLA's `cost_analysis` omits it."""
        slots.refuse_cost(self.lora)
        return layer_cost(self.spec, MAXTEXT, tokens, canonical(self.param_dtype), training=training)

    @nn.nowrap
    def warmup(self, tokens: Sequence[int], variables: Any = None, *, training: bool = False) -> WarmupReport:
        """See `moe_jax.layers.warmup`. variables: as for `explain`."""
        return layers.warmup(self.spec, tokens, **self._planned_for(variables), training=training)

    @nn.nowrap
    def _planned_for(self, variables: Any) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in ("dtype", "param_dtype", "num_layers", "lora")}
        return options | {"parameters": None if variables is None else self._parameters(variables)}

    @nn.nowrap
    def load_weights(self, weights: layers.LayerWeights | Iterable[layers.LayerWeights]) -> dict[str, Any]:
        """Variables (unboxed) with the weights; see `moe_jax.layers.load_weights`."""
        arrays = layers.load_weights(weights, self.spec, param_dtype=self.param_dtype, num_layers=self.num_layers)
        return self._variables(jax.tree.map(jnp.array, arrays))

    @nn.nowrap
    def quantize_experts(self, variables: Any, scheme: Scheme) -> tuple[MoE, dict[str, Any]]:
        """(the layer with quantised experts, its variables, unboxed); see `moe_jax.layers.quantize_experts`."""
        arrays, spec = layers.quantize_experts(self._parameters(variables), self.spec, scheme, self.num_layers)
        layer = self.clone(experts=spec.experts)
        return layer, layer._variables(arrays)

    @nn.nowrap
    def prepack_weights(self, variables: Any) -> dict[str, Any]:
        """Unboxed variables of `moe_jax.layers.prepack_weights`, without other modules' collections."""
        return self._variables(layers.prepack_weights(self._parameters(variables), self.spec, self.num_layers))

    @nn.nowrap
    def restore_weights(self, variables: Any) -> dict[str, Any]:
        """Undo `prepack_weights`."""
        return self._variables(layers.restore_weights(self._parameters(variables), self.spec, self.num_layers))

    @nn.nowrap
    def _variables(self, arrays: dict[str, Any]) -> dict[str, Any]:
        every = layers.leaves(self.spec, self.num_layers, layers.is_prepacked(arrays))
        names = dict.fromkeys(_collection(leaf) for leaf in every)
        placed = [(_collection(leaf), leaf.path, layers.find(arrays, leaf.path)) for leaf in every]
        return {name: layers.nested((path, array) for of, path, array in placed if of == name) for name in names}

    @nn.nowrap
    def export_weights(self, variables: Any) -> layers.LayerWeights | list[layers.LayerWeights]:
        """The weights (for a stack, of each layer) in `variables` in the canonical form."""
        warn_left_out(lora=LORA in variables)
        return layers.export_weights(self._parameters(variables), self.spec, self.num_layers)

    @nn.nowrap
    def _parameters(self, variables: Any) -> dict[str, Any]:
        variables = nn.meta.unbox(variables)
        every = layers.leaves(self.spec, self.num_layers, layers.is_prepacked(variables.get(QUANTIZED, {})))
        held = [(leaf.path, variables.get(_collection(leaf), {})) for leaf in every]
        return layers.nested((path, layers.find(collection, path)) for path, collection in held)


class ParameterGroup(nn.Module):
    places: _Places
    param_dtype: Any
    kernel_init: Initializer
    logical_axes: layers.LogicalAxes

    @nn.compact
    def __call__(self) -> dict[str, Any]:
        return _declare(self, self.places, self.param_dtype, self.kernel_init, self.logical_axes)


def _declare(
    module: nn.Module, places: _Places, param_dtype: Any, kernel_init: Initializer, axes: layers.LogicalAxes
) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path, _ in places):
        below = tuple((path[1:], leaf) for path, leaf in places if path[0] == name)
        rest, leaf = below[0]
        initial, collection = nn.with_logical_partitioning(leaf.initial, axes.of(leaf)), _collection(leaf)
        if rest:
            arrays[name] = ParameterGroup(below, param_dtype, kernel_init, axes, name=name)()
        elif collection == "params":
            arrays[name] = module.param(name, initial, param_dtype, kernel_init)
        else:
            arrays[name] = module.variable(collection, name, initial, None, param_dtype, kernel_init).value
    return arrays


def _collection(leaf: Leaf) -> str:
    return QUANTIZED if leaf.is_quantized else STATE if leaf.is_state else "params"


def _lora_collection(name: str) -> str:
    return LORA_STATE if name in slots.LORA_STATE else LORA


def _lora_collections(arrays: slots.Slots) -> dict[str, Any]:
    return {of: {n: one for n, one in arrays.items() if _lora_collection(n) == of} for of in (LORA, LORA_STATE)}


def _slots(variables: Any) -> slots.Slots:
    return {**variables[LORA], **variables[LORA_STATE]}
