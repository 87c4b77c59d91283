"""The `RoutedMoE` of MaxText 0.2.5 on the NNX layer, with its arguments and results. See docs/user/migration.md."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from moe_core.errors import Unsupported
from moe_core.layers import ExpertsSpec, MoELayerSpec
from moe_core.specs import Activation, RouterSpec
from moe_jax.layers import Leaf, LogicalAxes, load_balance_loss
from moe_jax.nnx import CorrectionBias, MoE, ParameterGroup, nnx
from moe_jax.ops import Array

_DEEPSEEK = ("deepseek3", "deepseek4", "kimi-k2")
_SCORINGS = {"sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus", "softmax": "softmax"}
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu_tanh", "sigmoid": "swiglu_oai"}
#: Option -> the values that change nothing here.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "capacity_factor": (-1, -1.0),
    "use_random_routing": (False,),
    "te_moe_block": (False,),
    "use_batch_split_schedule": (False,),
    "padded_base_moe_mlp_dim": (),
    "moe_use_megatron_seq_aux_loss": (False,),
}


class GateLogit(ParameterGroup):
    """The router's parameters. MaxText finds the bias to update by this name."""


class RoutedMoE(MoE):
    """Routed experts as a MaxText config describes them. Returns (output, load balance loss or None, bias updates or
    None).

    With the same `rngs` the first parameters equal MaxText's. Routing is in fp32 whatever `float32_gate_logits` says.
    No token is dropped, and `megablox`, `sparse_matmul` and tile sizes have no effect. quant must be None. Raises
    Unsupported for options that would change numbers, such as a `capacity_factor`.
    """

    def __init__(
        self,
        config: Any,
        num_experts: int,
        num_experts_per_tok: int,
        mesh: jax.sharding.Mesh,
        kernel_init: Any,
        kernel_axes: tuple[str | None, ...],
        rngs: Any,
        intermediate_dim: int = 2048,
        weight_dtype: Any = jnp.float32,
        dtype: Any = jnp.float32,
        quant: Any = None,
        is_hash_routing: bool = False,
        force_dropless: bool = False,
        weight_quant: Any = None,
    ) -> None:
        for name, value in (("quant", quant), ("is_hash_routing", is_hash_routing), ("weight_quant", weight_quant)):
            if value:
                raise Unsupported(
                    f"{name} must be left out for experts of moe_jax, got {value!r}; use MaxText's RoutedMoE"
                )
        spec = spec_of(config, num_experts, num_experts_per_tok, intermediate_dim)
        wi, wo = ("exp", "embed_moe", "mlp_moe"), ("exp", "mlp_moe", "embed_moe")
        if _option(config, "shard_exp_on_fsdp"):
            wi, wo = ("embed_moe", None, "mlp_moe"), ("embed_moe", "mlp_moe", None)
        elif _option(config, "use_2d_fsdp_sharding"):
            wi, wo = ("embed_moe", "mlp_moe", None), ("embed_moe", "mlp_moe", None)
        biases: dict[str, Any] = {"router_bias": spec.router_bias, "correction_bias": spec.correction_bias}
        super().__init__(
            spec.d_model, spec.d_ff, num_experts, spec.top_k, router=spec.router, experts=spec.experts, **biases,
            dtype=dtype, param_dtype=weight_dtype, kernel_init=kernel_init, rngs=rngs,
            logical_axes=LogicalAxes(tuple(kernel_axes), wi, wo),
        )  # fmt: skip
        self.config, self.mesh, gate = config, mesh, self.gate
        self.gate = GateLogit()
        self.gate.kernel = gate.kernel
        if spec.router_bias:
            self.gate.bias = gate.bias
        if spec.correction_bias:
            kind = getattr(sys.modules.get("maxtext.layers.moe"), "MoEBiasVar", CorrectionBias)
            with nnx.use_eager_sharding(False):
                bias: Any = kind(gate.correction_bias.get_value(), out_sharding=(self.logical_axes.router[-1],))
            self.gate.bias = bias

    def _initial(self, leaf: Leaf, key: jax.Array, kernel_init: Any) -> jax.Array:
        if leaf.parameter.role != "weight":
            return jnp.zeros(leaf.shape, self.param_dtype)
        return kernel_init(key, leaf.shape, self.param_dtype, np.arange(1), np.arange(1, 2))

    def _variable_of(self, leaf: Leaf) -> Any:
        return self.gate.bias if leaf.path == ("gate", "correction_bias") else super()._variable_of(leaf)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs: Array,
        input_ids: Array | None = None,
        gate_inputs: Array | None = None,
        out_sharding: Any = None,
        forced_routed_experts: Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """inputs `[B, S, D]`. forced_routed_experts `[B, S, K]`: a token with an id outside the experts visits none."""
        config, mesh = self.config, jax.sharding.get_abstract_mesh()
        chosen = {"gate_inputs": gate_inputs, "expert_ids": forced_routed_experts}
        # MaxText hands the mesh to its layers, and may have made none current.
        is_unknown = mesh.empty and self.mesh.size > 1 and isinstance(inputs, Tracer)
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh) if is_unknown else contextlib.nullcontext():
            y, aux = super().__call__(inputs.astype(self.dtype), **chosen, return_aux=True)
        y = y if out_sharding is None else jax.lax.with_sharding_constraint(y, out_sharding)
        loss, rate = None, _option(config, "routed_bias_update_rate", 0.0)
        if (weight := _option(config, "load_balance_loss_weight", 0.0)) > 0:
            loss = weight * self._loss(*(one.reshape(*y.shape[:2], -1) for one in (aux.logits, aux.ids)))
        if not (_option(config, "routed_bias") and rate > 0):
            return y, loss, None
        counts = aux.tokens_per_expert
        return y, loss, jnp.sign(counts.sum() / self.spec.num_experts - counts) * rate

    def _loss(self, logits: jax.Array, ids: jax.Array) -> jax.Array:
        """The mean over sequences. MaxText takes the softmax of scores, if there are any."""
        scoring = _option(self.config, "routed_score_func", "")
        scores = {
            "sigmoid": jax.nn.sigmoid,
            "sqrtsoftplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
            "softmax": jax.nn.softmax,
        }
        return load_balance_loss(scores[scoring](logits) if scoring else logits, ids, scale=1.0)


def _option(config: Any, name: str, default: Any = False) -> Any:
    value = getattr(config, name, None)
    return default if value is None else value


def spec_of(config: Any, num_experts: int, num_experts_per_tok: int, intermediate_dim: int) -> MoELayerSpec:
    """The layer that a MaxText config describes. Raises Unsupported."""
    block = _option(config, "decoder_block", "")
    block, model = str(getattr(block, "value", block)), _option(config, "model_name", "")
    scoring, names = _option(config, "routed_score_func", ""), list(config.mlp_activations)
    is_deepseek = block.startswith("deepseek")
    wrong: list[tuple[str, Any]] = [
        (name, getattr(config, name, None))
        for name, plain in _PLAIN.items()
        if getattr(config, name, None) not in (None, *plain)
    ]
    attention = _option(config, "attention", "")
    wrong += [("attention", attention)] if attention.startswith("vllm") else []
    wrong += [("decoder_block", block)] if block in ("llama4", "gemma4") else []
    wrong += [("mlp_activations", names)] if names[0] not in _ACTIVATIONS or names[1:] != ["linear"] else []
    wrong += [("routed_score_func", scoring)] if scoring and not (is_deepseek and scoring in _SCORINGS) else []
    fused = _option(config, "prefuse_moe_weights")
    wrong += [("prefuse_moe_weights", True)] if fused and _option(config, "mlp_bias") else []
    if wrong:
        name, value = wrong[0]
        raise Unsupported(
            f"{name} must not be {value!r} for experts of moe_jax, which have no such layer; use MaxText's RoutedMoE"
        )
    corrected = _option(config, "routed_bias") and model.startswith(_DEEPSEEK)
    router = RouterSpec(order="topk_then_softmax")
    if is_deepseek:
        kind, groups = _SCORINGS.get(scoring, "softmax"), _option(config, "n_routing_groups", -1)
        options: dict[str, Any] = {"scoring": kind, "scale": _option(config, "routed_scaling_factor", 1.0)}
        if kind != "softmax":
            options |= {"renormalize": True, "epsilon": 1e-20}
        if groups > 0 and model.startswith(_DEEPSEEK):
            options |= {"num_groups": groups, "topk_group": config.topk_routing_group, "group_score": "pair"}
        router = RouterSpec(**options)
    activation, limit = _ACTIVATIONS[names[0]], _option(config, "mlp_activations_limit", -1.0)
    if (activation == "swiglu_oai") != (block == "gpt_oss"):
        raise Unsupported(f"mlp_activations must not be {names} for decoder_block {block!r}; use MaxText's RoutedMoE")
    bounded = {"limit": limit} if limit > 0 and (is_deepseek or block == "gpt_oss") else {}
    gate_layout = "halves" if fused else "separate"
    experts = ExpertsSpec(Activation(activation, **bounded), bool(_option(config, "mlp_bias")), gate_layout=gate_layout)
    width = _option(config, "moe_expert_input_dim", -1)
    return MoELayerSpec(
        width if width > 0 else config.emb_dim, intermediate_dim, num_experts, num_experts_per_tok, router, experts,
        router_bias=bool(_option(config, "routed_bias")) and not corrected, correction_bias=bool(corrected),
    )  # fmt: skip
