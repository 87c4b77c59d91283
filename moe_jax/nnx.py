"""The Mixture-of-Experts layer for Flax NNX. Names, shapes and casts: `moe_jax.layers`.

Compile with `jax.jit`, or `nnx.jit(graph_updates=False)`: plain `nnx.jit` copies every parameter in each call.

For a scan over layers, make one MoE with num_layers=L and pass each call its layer (examples/flax_layer.py). Weights in
the compute dtype are then read in place. In `nnx.scan` layers that are scanned as usual have axis 0, the stack None.

Quantised experts: `MoE(..., experts=ExpertsSpec(scheme=scheme_named("mxfp4_w4a16")))`, or a checkpoint's,
`MoE.from_weights(LayerWeights.from_checkpoint(layer))`. Their arrays are `QuantizedArray`s, no nnx.Params.

On several devices a call opens its own `jax.shard_map`, see `moe_jax.layers.forward`.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from moe_core.base.dtypes import canonical
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Scheme
from moe_core.layers import MAXTEXT, LayerCost, layer_cost
from moe_core.layers.weights import warn_left_out
from moe_core.plan import Explanation
from moe_core.runtime.warmup import WarmupReport
from moe_jax import layers
from moe_jax.layers import DEFAULT_KERNEL_INIT, Initializer, Leaf, description
from moe_jax.layers import lora as slots
from moe_jax.layers.description import *  # noqa: F403 - its `__all__`
from moe_jax.ops import Array
from moe_jax.parallel.axis import ExpertAxis

try:
    from flax import nnx
    from flax.linen import get_logical_axis_rules
    from flax.linen.spmd import logical_to_mesh_axes
except ModuleNotFoundError as error:
    raise Unsupported(
        f"moe_jax.nnx needs flax, and {error.name} is not installed; install moebius with its extra `flax`: "
        "pip install 'moebius[flax]'"
    ) from error

from moe_jax.variables import (
    AdaptedLayer,
    AdapterSlots,
    CorrectionBias,
    LoRAState,
    ParameterGroup,
    QuantizedArray,
    TokenTable,
)

__all__ = ["AdapterSlots", "CorrectionBias", "LoRAState", "MoE", "QuantizedArray", "TokenTable"]
__all__ += description.__all__


_PLAIN_ROUTER = layers.RouterSpec()
_PLAIN_EXPERTS = layers.ExpertsSpec()
_MAXTEXT_AXES = layers.LogicalAxes()


class MoE(AdaptedLayer):
    """A routed mixture of experts, y `[..., D]` of x `[..., D]`; see the module's docstring.

    The other keywords are those of `MoELayerSpec`. `model.eval()` leaves out token_rounding, which is for training.
    Raises InvalidInput, also for rules without these names.

    Args:
        dtype: of the computation and of y. None: the promotion of x and the parameters. param_dtype: of new parameters.
        num_layers: None, or L for a stack `[L, ...]`.
        lora: adapters of the experts, see `add_lora`.
        logical_axes: names of the parameters' axes (`out_sharding`). Under a mesh with `nnx.logical_axis_rules` for
            them, parameters are made sharded.
        expert_axis, token_axes: mesh axes of experts and tokens, see `moe_jax.layers.forward`. None: those of the
            shardings and of logical rules, under which `logical_axes` also names the parameters.
    """

    gate: ParameterGroup
    # nnx.Param, or ParameterGroup of quantised experts.
    wi: Any
    wi_0: Any
    wi_1: Any
    wo: Any
    wi_bias: nnx.Param
    wi_0_bias: nnx.Param
    wi_1_bias: nnx.Param
    wo_bias: nnx.Param
    shared_experts: ParameterGroup
    before: ParameterGroup
    after: ParameterGroup
    output: ParameterGroup

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        top_k: int,
        *,
        router: layers.RouterSpec = _PLAIN_ROUTER,
        experts: layers.ExpertsSpec = _PLAIN_EXPERTS,
        shared_experts: layers.SharedExpertsSpec | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = DEFAULT_KERNEL_INIT,
        num_layers: int | None = None,
        lora: layers.LoRA | None = None,
        logical_axes: layers.LogicalAxes = _MAXTEXT_AXES,
        expert_axis: str | ExpertAxis | None = None,
        token_axes: Sequence[str] | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        known = sorted(field.name for field in dataclasses.fields(layers.MoELayerSpec))
        for name in [name for name in options if name not in known]:
            raise InvalidInput(f"{name} is no option of a layer; MoELayerSpec has {', '.join(known)}")
        self.spec = layers.MoELayerSpec(d_model, d_ff, num_experts, top_k, router, experts, shared_experts, **options)
        self.dtype, self.param_dtype, self.num_layers = dtype, param_dtype, num_layers
        self.logical_axes, self.deterministic = logical_axes, False
        self.expert_axis: str | ExpertAxis | None = ExpertAxis.of(expert_axis)
        self.token_axes = None if token_axes is None else tuple(token_axes)
        layers.require_axis(self.expert_axis)
        # Under automatic axes jit hides how parameters are split.
        self._made_by = _rules_of_parameters()
        for leaf in layers.leaves(self.spec, num_layers):
            group = self
            for key in leaf.path[:-1]:
                if not hasattr(group, key):
                    setattr(group, key, ParameterGroup())
                group = getattr(group, key)
            initial = self._initial(leaf, rngs.params(), kernel_init)
            setattr(group, leaf.path[-1], _variable(leaf, self.logical_axes, initial))
        if lora is not None:
            self.add_lora(lora, rngs=rngs)

    @classmethod
    def from_spec(cls, spec: layers.MoELayerSpec, *, rngs: nnx.Rngs, **options: Any) -> MoE:
        """The layer of a spec. options: dtype, param_dtype, kernel_init, num_layers, lora, expert_axis, ..."""
        described = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        return cls(**described, rngs=rngs, **options)

    @classmethod
    def from_weights(
        cls, weights: layers.LayerWeights, *, dtype: Any = None, param_dtype: Any = None, copy: bool = True
    ) -> MoE:
        """A layer with these weights, in their storage, without drawing any first.

        param_dtype: None: that of the weights. Quantised experts stay as they are. copy=False: on a CPU the layer
        shares the arrays, which must not change any more. For more options make an abstract layer,
        `nnx.eval_shape(lambda: MoE.from_spec(..., rngs=nnx.Rngs(0)))`, and call load_weights. main_grad, which only
        torch has, is left out with a UserWarning.
        """
        if not isinstance(weights, layers.LayerWeights):
            raise InvalidInput(f"weights must be LayerWeights, got {type(weights).__name__}; pass those of one layer")
        spec = weights.layer_spec()
        if spec.main_grad:
            spec = dataclasses.replace(spec, main_grad=False)
            warnings.warn(
                "main_grad=True is left out, as JAX adds to no array in place: the layer returns all its gradients",
                stacklevel=2,
            )
        options = {"dtype": dtype, "param_dtype": param_dtype or jnp.dtype(weights.dtype)}
        mesh = jax.sharding.get_abstract_mesh()
        if not get_logical_axis_rules():
            # Flax would look for logical axes among the mesh's.
            mesh = jax.sharding.AbstractMesh((), ())
        with jax.sharding.use_abstract_mesh(mesh):
            layer: MoE = nnx.eval_shape(lambda: cls.from_spec(spec, rngs=nnx.Rngs(0), **options))
        layer._load(weights, copy)
        return layer

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
        rule = layers.current_rule()
        scheme = None if rule is None or self.spec.experts.scheme is not None else layers.scheme_of_rule(rule)
        is_trained = scheme is not None and layers.is_training(rule)
        if scheme is not None and not is_trained:
            self.quantize_experts(scheme)
        self._follow(rule)
        parameters = self.parameters()
        if scheme is not None and is_trained:
            parameters = layers.fake_quantized(parameters, self.spec, scheme)
        options = {"token_mask": token_mask, "layer_index": layer_index, "return_aux": return_aux}
        options |= self._on_mesh(np.shape(x))
        options["adapters"] = self._adapters(adapter_ids)
        options["routed_by"] = layers.RoutedBy(gate_inputs, expert_ids, input_ids)
        spec = dataclasses.replace(self.spec, token_rounding=None) if self.deterministic else self.spec
        return layers.forward(parameters, x, spec, dtype=self.dtype, **options)

    def _initial(self, leaf: Leaf, key: jax.Array, kernel_init: Initializer) -> jax.Array:
        return leaf.initial(key, self.param_dtype, kernel_init)

    def parameters(self) -> dict[str, Any]:
        """Every array as nested dicts, for the functions of `moe_jax.layers`."""
        return layers.nested((leaf.path, self._variable_of(leaf).get_value()) for leaf in self._leaves())

    def _on_mesh(self, shape: tuple[int, ...]) -> dict[str, Any]:
        rules = get_logical_axis_rules() or self._made_by
        known = layers.known_specs(self._leaves(), self.logical_axes, shape, logical_to_mesh_axes, rules)
        named = {"expert_axis": self.expert_axis, "token_axes": self.token_axes}
        return known | {name: value for name, value in named.items() if value is not None}

    def explain(self, tokens: int | tuple[int, ...], *, training: bool = False) -> Explanation:
        """See `moe_jax.layers.explain`, and `moe_jax.layers.explain_mesh` for several devices."""
        plan = layers.explain(self.spec, tokens, **self._planned_for(), training=training)
        shape = (tokens, self.spec.d_model) if isinstance(tokens, int) else tokens
        mesh = layers.explain_mesh(self.spec, shape, self.parameters(), dtype=self.dtype, **self._on_mesh(shape))
        return plan.after(mesh) if mesh else plan

    def cost(self, tokens: int | Sequence[int], *, training: bool = False) -> LayerCost:
        """See `moe_core.layers.layer_cost`. tokens: a number, or x's shape. XLA's `cost_analysis` omits it."""
        slots.refuse_cost(self.lora)
        return layer_cost(self.spec, MAXTEXT, tokens, canonical(self.param_dtype), training=training)

    def warmup(self, tokens: Sequence[int], *, training: bool = False) -> WarmupReport:
        """See `moe_jax.layers.warmup`."""
        return layers.warmup(self.spec, tokens, **self._planned_for(), training=training)

    def _planned_for(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in ("dtype", "param_dtype", "num_layers")}
        return options | {"parameters": self.parameters(), "lora": self.lora and self.lora.options}

    def load_weights(self, weights: layers.LayerWeights | Iterable[layers.LayerWeights]) -> None:
        """Take the weights of a checkpoint or another layer (of each layer, for a stack), in this layer's layouts.

        Arrays go to the devices of those they replace, and share no memory with `weights`. After `nnx.eval_shape` they
        go where logical rules say. A prepacked layer stays prepacked. See `moe_jax.layers.load_weights`.
        """
        if self.is_prepacked:
            self.restore_weights()
            try:
                self.load_weights(weights)
            finally:
                self.prepack_weights()
            return
        self._load(weights, True)

    def _load(self, weights: layers.LayerWeights | Iterable[layers.LayerWeights], copy: bool) -> None:
        arrays = layers.load_weights(weights, self.spec, param_dtype=self.param_dtype, num_layers=self.num_layers)
        for leaf in layers.leaves(self.spec, self.num_layers):
            variable, value = self._variable_of(leaf), layers.find(arrays, leaf.path)
            sharding = _sharding_of(variable.get_value())
            placed = jax.device_put(value, sharding)
            if copy and any(device.platform == "cpu" for device in placed.devices()):
                # On a CPU device_put may share the caller's memory, which JAX takes for immutable.
                placed = jax.device_put(np.array(value), sharding)
            variable.set_value(placed)

    def export_weights(self) -> layers.LayerWeights | list[layers.LayerWeights]:
        """The weights (for a stack, of each layer) in the canonical form and this storage."""
        warn_left_out(lora=self.lora is not None)
        return layers.export_weights(self.parameters(), self.spec, self.num_layers)

    def quantize_experts(self, scheme: Scheme) -> None:
        """Make `wi_0`, `wi_1` and `wo` `QuantizedArray`s. See `moe_jax.layers.quantize_experts`.

        `qwix.quantize_model(model, qwix.PtqProvider(rules), x)` does this to layers that a rule names. A
        `qwix.QtProvider` instead trains plain matrices through the values that they would have. A `qwix.LoraProvider`
        adds adapters, as `add_lora` does.
        """
        parameters, spec = layers.quantize_experts(self.parameters(), self.spec, scheme, self.num_layers)
        for leaf in self._leaves():
            if leaf.parameter.name.startswith("experts.") and leaf.parameter.role == "weight":
                setattr(self, leaf.path[0], ParameterGroup())
        self.spec = spec
        self._hold(parameters, ())

    @property
    def is_prepacked(self) -> bool:
        """True after `prepack_weights`."""
        groups = [(name, getattr(self, name, None)) for name in ("wi", "wo")]
        return layers.is_prepacked({name: vars(group) for name, group in groups if isinstance(group, ParameterGroup)})

    def prepack_weights(self) -> None:
        """Run `moe_jax.layers.prepack_weights` in place: `wi.values` becomes `wi.tiled_values`, and so on."""
        self._hold(layers.prepack_weights(self.parameters(), self.spec, self.num_layers), self._leaves())

    def restore_weights(self) -> None:
        """Undo `prepack_weights`, in place. Other layers stay as they are."""
        self._hold(layers.restore_weights(self.parameters(), self.spec, self.num_layers), self._leaves())

    def parallelize(self, mesh: Mesh, expert_axis: str | ExpertAxis | None = "ep") -> None:
        """Split the experts over an axis of the mesh, in place. All else goes whole to its devices.

        A layer made by `nnx.eval_shape` gets shardings for `load_weights`.
        """
        axis = ExpertAxis.of(expert_axis)
        if axis is None:
            raise InvalidInput("expert_axis must name an axis of the mesh, got None; pass 'ep', for example")
        options = {"num_layers": self.num_layers, "prepacked": self.is_prepacked}
        shardings = layers.expert_sharding(self.spec, mesh, axis.name, **options)
        for leaf in self._leaves():
            variable, sharding = self._variable_of(leaf), layers.find(shardings, leaf.path)
            value = variable.get_value()
            if isinstance(value, jax.ShapeDtypeStruct):
                variable.set_value(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))
            else:
                variable.set_value(jax.device_put(value, sharding))
        self.expert_axis = axis

    def _hold(self, parameters: dict[str, Any], before: Sequence[Leaf]) -> None:
        after = layers.leaves(self.spec, self.num_layers, layers.is_prepacked(parameters))
        for leaf in filter(lambda leaf: leaf.is_quantized, before):
            delattr(self._group_of(leaf), leaf.path[-1])
        for leaf in filter(lambda leaf: leaf.is_quantized, after):
            variable = _variable(leaf, self.logical_axes, layers.find(parameters, leaf.path))
            setattr(self._group_of(leaf), leaf.path[-1], variable)

    def _leaves(self) -> tuple[Leaf, ...]:
        return layers.leaves(self.spec, self.num_layers, self.is_prepacked)

    def _group_of(self, leaf: Leaf) -> Any:
        return functools.reduce(getattr, leaf.path[:-1], self)

    def _variable_of(self, leaf: Leaf) -> nnx.Variable:
        return getattr(self._group_of(leaf), leaf.path[-1])


def _sharding_of(value: Any) -> Any:
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding) or isinstance(sharding.mesh, Mesh):
        return sharding
    mesh = jax.sharding.get_mesh()
    if mesh.shape != sharding.mesh.shape:
        raise InvalidInput(
            f"the layer was made abstract under a mesh of {dict(sharding.mesh.shape)}, got weights to load under "
            f"{dict(mesh.shape) or 'none'}; load them inside `with jax.set_mesh(mesh)` of that mesh"
        )
    return NamedSharding(mesh, sharding.spec)


def _rules_of_parameters() -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    return get_logical_axis_rules() if nnx.using_eager_sharding() and not mesh.empty else ()


def _variable(leaf: Leaf, axes: layers.LogicalAxes, value: jax.Array) -> nnx.Variable:
    kinds = {"quantized": QuantizedArray, "buffer": CorrectionBias, "table": TokenTable}
    kind = kinds.get(leaf.parameter.role, nnx.Param)
    names, mesh = axes.of(leaf), jax.sharding.get_abstract_mesh()
    if rules := _rules_of_parameters():
        layers.require_rules(leaf, axes, rules)
        # Flax takes the last of several rules for a name, and one mesh axis twice. MaxText needs Linen's order.
        spec = logical_to_mesh_axes(names, rules)
        constrain = jax.sharding.reshard if mesh.are_all_axes_explicit else jax.lax.with_sharding_constraint
        value = constrain(value, spec)
    with nnx.use_eager_sharding(False):
        return kind(value, out_sharding=names)
