"""The layer in both Flax flavours: the same weights, the same bits; a stack of layers in a scan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax import linen
from moe_jax.nnx import Activation, ExpertsSpec, MoE, RouterSpec, SharedExpertsSpec

LAYERS, D, F, E, K = 3, 128, 64, 16, 4
ROUTER = RouterSpec(order="topk_then_softmax")
EXPERTS = ExpertsSpec(Activation("gelu_tanh"))
SHARED = SharedExpertsSpec(d_ff=96, gate=True)


def main() -> None:
    """One layer as NNX and as Linen, then a stack."""
    x = jax.random.normal(jax.random.key(0), (2, 24, D))
    layer = MoE(D, F, E, K, router=ROUTER, experts=EXPERTS, shared_experts=SHARED, rngs=nnx.Rngs(0))
    y, aux = jax.jit(lambda layer, x: layer(x, return_aux=True))(layer, x)
    for path, variable in nnx.state(layer).flat_state():
        print(f"{'/'.join(map(str, path)):28} {list(variable.get_value().shape)}")
    print(f"load balance {float(aux.load_balance_loss):.4f}, tokens per expert {aux.tokens_per_expert}")

    module = linen.MoE.from_spec(layer.spec)
    variables = module.load_weights(layer.export_weights())
    y_linen, sown = jax.jit(lambda variables, x: module.apply(variables, x, mutable=["intermediates"]))(variables, x)
    assert np.array_equal(y, y_linen)
    assert np.array_equal(aux.ids, sown["intermediates"]["moe_aux"][0].ids)
    print("NNX and Linen: equal to the last bit")

    # Parameters [L, ...] that each step reads in place: nothing is sliced out of them.
    bfloat16 = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    stack = MoE(D, F, E, K, router=ROUTER, num_layers=LAYERS, rngs=nnx.Rngs(1), **bfloat16)

    @jax.jit
    def forward(stack: MoE, x: jax.Array) -> jax.Array:
        def step(x: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
            return x + stack(x, layer_index=index), None

        return jax.lax.scan(step, x, jnp.arange(LAYERS))[0]

    y = forward(stack, x.astype(jnp.bfloat16))
    assert y.shape == x.shape and bool(jnp.isfinite(y).all())
    print(f"{LAYERS} layers in a scan, wi_0 {list(stack.wi_0.get_value().shape)}: y {y.dtype}{list(y.shape)}")


if __name__ == "__main__":
    main()
