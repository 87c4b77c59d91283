"""`moe_jax.tunix.MoELayer` without Tunix: parameters and results. `make maxtext` trains Tunix's Qwen3 with both."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType

from moe_jax.tunix import MoELayer
from tests.support.jax import running_on

D, F, E, K = 8, 12, 4, 2
AXES = SimpleNamespace(exp_weight_edf=("fsdp", None, "tp"), exp_weight_efd=("fsdp", "tp", None))
CONFIG = SimpleNamespace(
    **{"embed_dim": D, "hidden_dim": F, "num_experts": E, "num_experts_per_tok": K, "shd_config": AXES},
    **{"dtype": jnp.float32, "param_dtype": jnp.float32},
)


def test_parameters_and_results() -> None:
    """Names and shapes of checkpoints, the sum over the chosen experts, and the same on devices that share them."""
    with running_on("reference"):
        layer, x = MoELayer(CONFIG, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (4, 3, D))
        state = nnx.to_pure_dict(nnx.state(layer))
        shapes = {"gate_proj": (E, D, F), "up_proj": (E, D, F), "down_proj": (E, F, D)}
        assert jax.tree.map(jnp.shape, state) == shapes | {"router": {"kernel": (D, E)}}
        weights, ids = jax.lax.top_k(jax.nn.softmax(x @ state["router"]["kernel"]), K)
        hidden = jnp.einsum("btd,edf->btef", x, state["gate_proj"])
        hidden = jax.nn.silu(hidden) * jnp.einsum("btd,edf->btef", x, state["up_proj"])
        every = jnp.einsum("btef,efd->bted", hidden, state["down_proj"])
        chosen = jnp.take_along_axis(every, ids[..., None], axis=2)
        wanted = (chosen * (weights / weights.sum(-1, keepdims=True))[..., None]).sum(2)
        y = layer(x, use_megablox=False)
        np.testing.assert_allclose(y, wanted, rtol=1e-3, atol=1e-9)
        mesh = jax.make_mesh((2, 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:2])
        with jax.set_mesh(mesh):
            text = jax.jit(lambda layer, x: layer(x)).lower(layer, x).as_text()
            np.testing.assert_array_equal(jax.jit(lambda layer, x: layer(x))(layer, x), y)
        split = text.partition("in_shardings=")[2].partition("out_shardings=")[0]
        assert split.count('"fsdp"') == 4, "x and three matrices"
