"""LoRA through the injection points of the modular experts in JAX: every expert has adapters on both its products.

    pre = x W1 + s (x A1) B1        hidden = activation(pre)        y = hidden W2 + s (hidden A2) B2

`unfused_experts` takes the functions that it calls on what W1 gives and on what W2 gives; these here add to either.
Which expert a row belongs to is the layout's to know: products of adapters run on it as the frozen ones do.
modular_lora_torch.py trains the same adapters on the same numbers, with the same losses but for rounding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moe_jax import MatmulOperands, MatmulSpec, matmul_ogs
from moe_jax.modular import SlotContext, activate, moe_sum, unfused_experts

TOKENS, D, F, E, TOPK, RANK, SCALE, STEPS, RATE = 96, 64, 48, 8, 2, 4, 2.0, 20, 0.02
Arrays = dict[str, jax.Array]


def draw() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A frozen problem, its target included, and adapters that change nothing at first; fp32 but for the ids."""
    random = np.random.default_rng(0)

    def rows() -> np.ndarray:
        return random.standard_normal((TOKENS, D)).astype(np.float32)

    def matrices(inputs: int, outputs: int) -> np.ndarray:
        return (random.standard_normal((E, inputs, outputs)) * inputs**-0.5).astype(np.float32)

    frozen = {"x": rows(), "target": rows(), "w1": matrices(D, 2 * F), "w2": matrices(F, D)}
    frozen["ids"] = np.argsort(random.random((TOKENS, E)), axis=1)[:, :TOPK].astype(np.int32)
    frozen["weights"] = random.dirichlet(np.ones(TOPK), TOKENS).astype(np.float32)
    adapters = {"a1": matrices(D, RANK), "b1": np.zeros((E, RANK, 2 * F), np.float32)}
    return frozen, adapters | {"a2": matrices(F, RANK), "b2": np.zeros((E, RANK, D), np.float32)}


def base(frozen: Arrays, **functions: Any) -> jax.Array:
    """y `[T, D]` of the frozen experts, with other functions between their stages if given."""
    x, w1, w2, weights, ids = (frozen[name] for name in ("x", "w1", "w2", "weights", "ids"))
    return unfused_experts(x, w1, w2, weights, ids, **functions)


def lora(adapters: Arrays, frozen: Arrays) -> jax.Array:
    """y `[T, D]` with adapters a1 `[E, D, r]`, b1 `[E, r, 2F]`, a2 `[E, F, r]`, b2 `[E, r, D]`."""

    def change(rows: jax.Array, number: int, gather: str, context: SlotContext, row_weight: Any = None) -> jax.Array:
        """s (rows A) B by slot. x A stays in the rows of experts, which is where B takes it from."""
        a, b, layout = adapters[f"a{number}"], adapters[f"b{number}"], context.layout
        low = matmul_ogs(MatmulOperands(rows, a), layout, MatmulSpec("in_out", gather, "row"))
        operands = MatmulOperands(low, b, row_weight=row_weight)
        return SCALE * matmul_ogs(operands, layout, MatmulSpec("in_out", "row", "slot"))

    def activation_function(activation: str, input: jax.Array, context: SlotContext) -> jax.Array:
        return activate(activation, input + change(context.hidden_states, 1, "token", context), context)

    def sum_function(input: jax.Array, context: SlotContext) -> jax.Array:
        added = change(context.activated, 2, "slot", context, context.row_weight)
        return moe_sum(input + added.reshape(input.shape), context)

    return base(frozen, activation_function=activation_function, moe_sum=sum_function)


def train() -> list[float]:
    """The loss of every step."""
    frozen, adapters = (jax.tree.map(jnp.asarray, part) for part in draw())
    before = jax.tree.map(np.array, frozen)
    same = np.array_equal(jax.jit(lora)(adapters, frozen), jax.jit(base)(frozen))
    assert same, "with B = 0 the output is the base's, bit by bit"
    optimizer = optax.adam(RATE)

    @jax.jit
    def update(adapters: Arrays, moments: Any, frozen: Arrays) -> tuple[Any, Any, jax.Array]:
        def loss(adapters: Arrays) -> jax.Array:
            return jnp.square(lora(adapters, frozen) - frozen["target"]).mean()

        value, gradients = jax.value_and_grad(loss)(adapters)
        updates, moments = optimizer.update(gradients, moments)
        return optax.apply_updates(adapters, updates), moments, value

    moments, losses = optimizer.init(adapters), []
    for step in range(STEPS):
        adapters, moments, loss = update(adapters, moments, frozen)
        losses.append(float(loss))
        if step % 5 == 0 or step == STEPS - 1:
            print(f"step {step:2}: loss {losses[-1]:.6f}", flush=True)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, frozen)), "the base is what it was"
    return losses


def main() -> None:
    losses = train()
    assert losses[-1] < 0.7 * losses[0], "the loss falls"
    print("the frozen weights are bitwise what they were")


if __name__ == "__main__":
    main()
