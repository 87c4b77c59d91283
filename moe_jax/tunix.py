"""The Qwen3 `MoELayer` of Tunix 0.1.7 on our layer, with its arguments and results. See docs/user/migration.md."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from moe_core.errors import Unsupported
from moe_core.layers import ExpertsSpec, MoELayerSpec
from moe_core.specs import Activation, RouterSpec
from moe_jax import layers
from moe_jax.nnx import nnx
from moe_jax.ops import Array
from moe_jax.variables import AdaptedLayer


class MoELayer(AdaptedLayer):
    """Routed experts of a Tunix `ModelConfig`, y `[B, T, D]` of x `[B, T, D]`. No token is dropped.

    With the same `rngs` the first parameters equal Tunix's. `config.shd_config` names the mesh axes of experts. Rules
    of `qwix.LoraProvider` and `QtProvider` for its path hold for the experts.
    """

    gate_proj: nnx.Param
    up_proj: nnx.Param
    down_proj: nnx.Param

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        self.shd_config, self.dtype, self.param_dtype = config.shd_config, config.dtype, config.param_dtype
        self.num_experts, self.experts_per_tok = config.num_experts, config.num_experts_per_tok
        self.deterministic, self.num_layers, experts = False, None, ExpertsSpec(Activation("silu"))
        self.spec = MoELayerSpec(
            config.embed_dim, config.hidden_dim, self.num_experts, self.experts_per_tok, _ROUTER, experts
        )
        self.router = nnx.Linear(
            config.embed_dim, config.num_experts, use_bias=False, rngs=rngs, dtype=config.dtype,
            param_dtype=config.param_dtype,
        )  # fmt: skip
        up, down = (config.embed_dim, config.hidden_dim), (config.hidden_dim, config.embed_dim)
        matrices = (("gate_proj", up), ("up_proj", up), ("down_proj", down))
        for name, shape in matrices:
            drawn = nnx.initializers.normal(dtype=config.param_dtype)(rngs.params(), (config.num_experts, *shape))
            axes = self.shd_config.exp_weight_efd if name == "down_proj" else self.shd_config.exp_weight_edf
            # As in Tunix, whose loaders place the parameters.
            with nnx.use_eager_sharding(False):
                setattr(self, name, nnx.Param(drawn, out_sharding=axes))

    def __call__(self, x: Array, use_megablox: bool = True) -> jax.Array:
        """use_megablox: without effect."""
        del use_megablox
        names = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
        parameters: dict[str, Any] = {ours: getattr(self, theirs).get_value() for ours, theirs in names.items()}
        parameters["gate"] = {"kernel": self.router.kernel.get_value()}
        edf, efd = P(*self.shd_config.exp_weight_edf), P(*self.shd_config.exp_weight_efd)
        specs = {"gate": {"kernel": P()}, "wi_0": edf, "wi_1": edf, "wo": efd}
        rule = layers.current_rule()
        if (scheme := None if rule is None else layers.scheme_of_rule(rule)) is not None:
            if not layers.is_training(rule):
                raise Unsupported(
                    f"Qwix cannot quantise the parameters of Tunix's MoELayer, got {scheme}; use moe_jax.nnx.MoE, or "
                    "give the rule a module_path that leaves this layer out"
                )
            parameters = layers.fake_quantized(parameters, self.spec, scheme)
        self._follow(rule)
        options = {"dtype": self.dtype, "parameter_specs": specs, "adapters": self._adapters(None)}
        return layers.forward(parameters, x, self.spec, **options)


_ROUTER = RouterSpec(renormalize=True)
