"""Layers under x64: what keeps its dtype, and what is refused; traced alone, test_higher_derivatives.py runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from moe_core.layers import LatentSpec, MoELayerSpec, OutputSpec, SharedExpertsSpec
from moe_jax import InvalidInput, LoRA, NormSpec, layers
from tests.support.jax import running_on

T, D, F, E, K = 3, 4, 3, 6, 2


@pytest.fixture(autouse=True)
def x64() -> Iterator[None]:
    with jax.enable_x64(True), running_on("reference"):
        yield


@pytest.mark.parametrize(("of_x", "of_layer"), [(jnp.float64, jnp.float32), (jnp.float32, jnp.float64)])
def test_float64_is_never_promoted(of_x: Any, of_layer: Any) -> None:
    nnx = pytest.importorskip("flax.nnx")
    from moe_jax.nnx import MoE

    def dtype_of(**options: Any) -> Any:
        call = lambda x: MoE(D, F, E, K, param_dtype=of_layer, rngs=nnx.Rngs(0), **options)(x)  # noqa: E731
        return jax.eval_shape(call, jax.ShapeDtypeStruct((T, D), of_x)).dtype

    with pytest.raises(InvalidInput, match=f"x must be {of_layer.__name__} like the experts, got {of_x.__name__}"):
        dtype_of()
    for lora in (None, LoRA(rank=2)):
        assert dtype_of(dtype=jnp.float64, lora=lora) == jnp.float64


@pytest.mark.parametrize(
    "options",
    [
        {"capacity_factor": 1.0, "correction_bias": True, "shared_experts": SharedExpertsSpec(2, gate=True)},
        {"router_norm": NormSpec(), "expert_scale": True, "latent": LatentSpec(3, NormSpec())},
        {"output": OutputSpec(NormSpec(), of="experts", scale=0.5, bias=True)},
        {"sparse_mixer": 0.01},
    ],
    ids=lambda options: next(iter(options)),
)
def test_x64_promotes_nothing_of_a_float32_layer(options: Any) -> None:
    spec = MoELayerSpec(D, F, E, K, **options)
    parameters = jax.eval_shape(lambda: layers.initialize(spec, jax.random.key(0)))

    def loss(parameters: Any, x: jax.Array) -> Any:
        y, aux = layers.forward(parameters, x, spec, return_aux=True)
        return jnp.square(y).sum() + aux.load_balance_loss + aux.z_loss, (y, aux)

    step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    made = jax.eval_shape(step, parameters, jax.ShapeDtypeStruct((T, D), jnp.float32))
    wide = {jnp.dtype(jnp.float64), jnp.dtype(jnp.int64)}
    assert not [path for path, one in jax.tree_util.tree_leaves_with_path((parameters, made)) if one.dtype in wide]
