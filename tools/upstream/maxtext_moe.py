"""MaxText's own sparse layer on our grouped matmul, with the name `jax.lax.ragged_dot` replaced, and our RoutedMoE."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import math
import pathlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
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


class Config(SimpleNamespace):
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


#: A model's config -> options that differ here, beside small sizes.
MODELS: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {"load_balance_loss_weight": 0.01},
    "gpt-oss-20b": {"load_balance_loss_weight": 0.02, "prefuse_moe_weights": False},
    "deepseek3-671b": {"routed_bias_update_rate": 0.001, "load_balance_loss_weight": 0.01, "prefuse_moe_weights": True},
}
STEPS = 4
#: Of norms, after AdamW, whose first steps enlarge roundings of small gradients.
MODEL_BOUND = 2.0**-10


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


def read(package: pathlib.Path, *names: str) -> dict[str, Any]:
    configs = (yaml.safe_load((package / "configs" / f"{name}.yml").read_text()) for name in names)
    return functools.reduce(lambda one, other: one | other, configs)


@contextlib.contextmanager
def opened(package: pathlib.Path, **split: int) -> Iterator[tuple[Any, Any, Any]]:
    """(its module `moe`, its initialiser, a mesh with these axes split), under its rules."""
    config = read(package, "base")
    rules = tuple((name, tuple(on) if isinstance(on, list) else on) for name, on in config["logical_axis_rules"])
    axes = tuple(config["mesh_axes"])
    sizes = tuple(split.get(axis, 1) for axis in axes)
    types, devices = (jax.sharding.AxisType.Auto,) * len(axes), jax.devices()[: math.prod(sizes)]
    mesh = jax.make_mesh(sizes, axes, axis_types=types, devices=devices)
    with imports.world(package.parent, STAND_INS, {}, SERVED), jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        moe = importlib.import_module("maxtext.layers.moe")
        init = importlib.import_module("maxtext.layers.initializers").nd_dense_init(1.0, "fan_in", "truncated_normal")
        yield moe, init, mesh


def _train(layer: Any, x: jax.Array, bias: type) -> dict[str, Any]:
    """Results, losses, bias updates and gradients of the first step, and all weights after the last."""
    graph, weights, biases, rest = nnx.split(layer, nnx.Param, bias, ...)
    optimizer = optax.adamw(1e-2)

    def loss(weights: Any, biases: Any, x: jax.Array) -> Any:
        y, balance, updates = nnx.merge(graph, weights, biases, rest)(x)
        return jnp.square(y - 1).mean() + (0 if balance is None else balance), (y, balance, updates)

    @jax.jit
    def step(weights: Any, biases: Any, state: Any, x: jax.Array) -> Any:
        (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(weights, biases, x)
        updates, state = optimizer.update(gradients, state, weights)
        biases = jax.tree.map(lambda bias: bias + aux[2], biases)
        return optax.apply_updates(weights, updates), biases, state, (value, aux, nnx.to_pure_dict(gradients))

    made, state = [], optimizer.init(weights)
    for _ in range(STEPS):
        weights, biases, state, results = step(weights, biases, state, x)
        made.append(results)
    after = nnx.to_pure_dict(weights), nnx.to_pure_dict(biases)
    return {"first": made[0], "losses": [one[0] for one in made], "after": after}


def _config_of(package: pathlib.Path, name: str) -> dict[str, Any]:
    """A model's own config with small sizes."""
    model = read(package, f"models/{name}")
    own = {key: value for key, value in model.items() if key not in ("base_emb_dim", "base_moe_mlp_dim")}
    config = read(package, "base") | CONFIG | own | MODELS[name]
    config |= {"num_experts": 16, "num_experts_per_tok": 4, "dtype": "float32", "weight_dtype": "float32"}
    config |= {"n_routing_groups": 4, "topk_routing_group": 2} if config["n_routing_groups"] > 0 else {}
    return config | {"model_name": name, "emb_dim": D, "float32_gate_logits": True, "matmul_precision": "highest"}


def check_models(package: pathlib.Path, **split: int) -> list[str]:
    """Differences between MaxText's RoutedMoE and ours, made from its models' configs with the same keys and trained
    with AdamW. split: mesh axes with several devices for ours."""
    problems = []
    for name in MODELS:
        results = []
        for is_ours in (False, True):
            with opened(package, **(split if is_ours else {})) as (moe, init, mesh):
                config = Config(**_config_of(package, name))
                config.decoder_block = moe.ctypes.DecoderBlockType(config.decoder_block)
                kind = importlib.import_module("moe_jax.maxtext").RoutedMoE if is_ours else moe.RoutedMoE
                sizes = config.num_experts, config.num_experts_per_tok
                layer = kind(config, *sizes, mesh, init, ("embed", None), nnx.Rngs(params=7), intermediate_dim=F)
                state = nnx.to_pure_dict(nnx.state(layer, nnx.Any(nnx.Param, moe.MoEBiasVar)))
                x = jax.random.normal(jax.random.key(1), (4, L, D))
                results.append(jax.device_get({"parameters": state} | _train(layer, x, moe.MoEBiasVar)))
        flat, again = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in results)
        missing = {*map(jax.tree_util.keystr, flat)} ^ {*map(jax.tree_util.keystr, again)}
        problems += [f"{name}: only one of the two has {path}" for path in sorted(missing)]
        worst = 0.0
        for path, value in flat.items():
            if missing:
                break
            error = float(np.linalg.norm(again[path] - value) / max(float(np.linalg.norm(value)), 1e-30))
            worst, bound = max(worst, error), 0.0 if path[0].key == "parameters" else MODEL_BOUND
            if not error <= bound:
                problems.append(f"{name}: {jax.tree_util.keystr(path)} differs by {error:.1e} of its norm")
        print(f"RoutedMoE of {name} {split or 'on one device'}: {STEPS} steps differ by at most {worst:.1e}")
    return problems


def check_layer(package: pathlib.Path) -> list[str]:
    """Results of the layer that differ from its own. Prints a line for each dtype."""
    problems = []
    config = Config(**(read(package, "base") | CONFIG))
    with opened(package) as (moe, init, mesh):
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
