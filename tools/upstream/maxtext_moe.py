"""MaxText's own sparse layer on our grouped matmul: its file with the name `jax.lax.ragged_dot` replaced."""

from __future__ import annotations

import importlib
import logging
import pathlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import yaml
from flax import nnx

import moe_jax
from tools.upstream import imports

#: Modules that are the wheel's own files, unmodified.
SERVED = (
    *("maxtext.layers.moe", "maxtext.layers.linears", "maxtext.layers.initializers"),
    *("maxtext.common.common_types", "maxtext.utils.sharding"),
)
#: The most difference from results with sums in another order, relative to the norm: roundings of the dtype.
BOUNDS = {"float32": 2.0**-20, "bfloat16": 2.0**-7}
#: Grouped products of a layer's forward.
PRODUCTS = 3
B, L, D, F, E, K = 2, 24, 32, 48, 8, 2
CONFIG = {
    **{"emb_dim": D, "num_experts": E, "num_experts_per_tok": K, "base_moe_mlp_dim": F, "megablox": False},
    **{"sparse_matmul": True, "use_tokamax_gmm": False, "mlp_activations": ["silu", "linear"], "model_name": "mixtral"},
    **{"model_call_mode": "", "enable_dp_attention": False, "decoder_block": "mixtral", "shard_mode": "auto"},
}


def _pad(x: jax.Array, tile: int) -> tuple[jax.Array, int]:
    """`max_utils.maybe_pad` in our own words: rows up to a multiple of the tile."""
    amount = -x.shape[0] % tile
    return jnp.pad(x, ((0, amount), (0, 0))), amount


class _Config(SimpleNamespace):
    """base.yml and ours. Options that MaxText derives are absent: None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


STAND_INS: dict[str, imports.Names] = {
    "aqt.jax.v2": {},
    "qwix.pallas": {"get_current_rule": lambda name: None},
    "tokamax": {"RaggedDotGroupSizes": lambda sizes, rows: None},
    "maxtext.layers.quantizations": {
        "in_serve_mode": lambda quant: False,
        "dequantize_weight": lambda weight, scale, dtype: weight.astype(dtype),
    },
    "maxtext.utils.max_utils": {"maybe_pad": _pad, "is_eval": lambda config: False},
    "maxtext.utils.max_logging": {"log": logging.getLogger(__name__).info},
}


def _run(layer: Any, x: jax.Array) -> dict[str, jax.Array]:
    """The result and all gradients of a compiled step."""
    graph, weights, rest = nnx.split(layer, nnx.Param, ...)
    factors = jax.random.normal(jax.random.key(2), x.shape, x.dtype)

    def loss(weights: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        output = nnx.merge(graph, weights, rest)(x)[0]
        return (output * factors).sum(dtype=jnp.float32), output

    (_, output), (d_weights, d_x) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(weights, x)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(d_weights)}
    return {"output": output, "d_x": d_x, **named}


def check_layer(package: pathlib.Path) -> list[str]:
    """Results of the layer that differ from its own. Prints a line for each dtype."""
    problems = []
    config = _Config(**(yaml.safe_load((package / "configs" / "base.yml").read_text()) | CONFIG))
    rules = tuple((name, tuple(on) if isinstance(on, list) else on) for name, on in config.logical_axis_rules)
    axes = tuple(config.mesh_axes)
    types, devices = (jax.sharding.AxisType.Auto,) * len(axes), jax.devices()[:1]
    mesh = jax.make_mesh((1,) * len(axes), axes, axis_types=types, devices=devices)
    with (
        imports.world(package.parent, STAND_INS, {}, SERVED),
        jax.set_mesh(mesh),
        nn.logical_axis_rules(rules),
    ):
        moe = importlib.import_module("maxtext.layers.moe")
        init = importlib.import_module("maxtext.layers.initializers").nd_dense_init(1.0, "fan_in", "truncated_normal")
        for dtype, bound in BOUNDS.items():
            config.dtype = dtype
            layer = moe.RoutedMoE(
                config, E, K, mesh, init, ("embed", None), nnx.Rngs(0), intermediate_dim=F, dtype=jnp.dtype(dtype)
            )
            x = jax.random.normal(jax.random.key(1), (B, L, D), jnp.dtype(dtype))
            calls = []

            def ours(*arguments: Any, **named: Any) -> jax.Array:
                calls.append(named)  # noqa: B023
                return moe_jax.ragged_dot(*arguments, **named)

            wanted = _run(layer, x)
            with mock.patch.object(jax.lax, "ragged_dot", ours):
                found = _run(layer, x)
            if len(calls) != PRODUCTS:
                problems.append(f"{dtype}: {len(calls)} products ran on ours, not {PRODUCTS}")
            errors = {}
            for name, value in wanted.items():
                exact, got = (one.astype(jnp.float32) for one in (value, found[name]))
                errors[name] = float(jnp.linalg.norm(got - exact) / jnp.linalg.norm(exact))
                if not errors[name] <= bound:
                    problems.append(f"{dtype}: {name} differs by {errors[name]:.1e} of its norm, at most {bound:.1e}")
            print(f"RoutedMoE, {dtype}: {len(errors)} results, which differ by at most {max(errors.values()):.1e}")
    return problems
