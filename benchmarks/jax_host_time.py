"""Host time of the JAX front-end per op, for stable, donated and changing buffers; prints one JSON record.

    python -m benchmarks.jax_host_time [--runs 200]

Each program is a jitted chain of small ops, so that the host, not the device, is what takes time. `call_us`: from the
call to its return, per op; `total_us`: until the result is there, per op; both medians over the runs. `callbacks`:
calls into Python per op: 0 where XLA replays a captured graph. Buffers: `stable` (the result is freed before the next
call, so that every address recurs), `donated` (the result becomes the next argument, in place), `changing` (inputs take
turns and results are kept, so that every call meets new addresses). `xla_add`: XLA's own addition in the same chain.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import moe_jax
from benchmarks.provenance import provenance
from benchmarks.record import command, write_record
from moe_jax.bridge import ffi

WARM_UP = 20
LANES = 8


def chains(length: int) -> dict[str, tuple[int, Callable[[jax.Array], jax.Array], jax.Array]]:
    """name -> (ops in the chain, the chain, its argument)."""
    random = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape) / shape[-2] ** 0.5, jnp.bfloat16)

    tokens, num_experts, d_model, d_ff, layers = 16, 8, 256, 128, 8
    experts = moe_jax.ExpertWeights(draw(num_experts, d_model, 2 * d_ff), draw(num_experts, d_ff, d_model))
    routing = moe_jax.RouterWeights(draw(d_model, num_experts))
    spec = moe_jax.MoESpec(moe_jax.Activation("silu"), moe_jax.RouterSpec(2))
    x, weights = draw(tokens, d_model), jnp.ones((tokens, 1))

    def add(x: jax.Array) -> jax.Array:
        for _ in range(length):
            x = jax.lax.optimization_barrier(x + 1)
        return x

    def scale_rows(x: jax.Array) -> jax.Array:
        for _ in range(length):
            x = moe_jax.scale_rows(x, weights)
        return x

    def moe(x: jax.Array) -> jax.Array:
        for _ in range(layers):
            x = moe_jax.moe(x, experts, routing, spec).output
        return x

    return {"xla_add": (length, add, x), "scale_rows": (length, scale_rows, x), "moe": (layers, moe, x)}


def measure(function: Callable[[jax.Array], jax.Array], x: jax.Array, buffers: str, runs: int) -> dict[str, float]:
    """Medians of one chain with one way to treat its buffers, per call."""
    jitted = jax.jit(function, donate_argnums=0 if buffers == "donated" else ())
    inputs = [jnp.array(x) for _ in range(LANES if buffers == "changing" else 1)]
    kept: list[jax.Array] = []
    call_times, total_times = [], []
    before = 0
    for number in range(WARM_UP + runs):
        if number == WARM_UP:
            before = ffi.callback_count()
        argument = inputs[number % len(inputs)]
        start = time.perf_counter_ns()
        result = jitted(argument)
        called = time.perf_counter_ns()
        result.block_until_ready()
        done = time.perf_counter_ns()
        if buffers == "donated":
            inputs[0] = result
        elif buffers == "stable":
            result.delete()
        else:
            kept = [*kept[-2 * LANES :], result]
        if number >= WARM_UP:
            call_times.append(called - start)
            total_times.append(done - start)
    return {
        "call_us": statistics.median(call_times) / 1e3,
        "total_us": statistics.median(total_times) / 1e3,
        "callbacks": (ffi.callback_count() - before) / runs,
    }


def main() -> None:
    parser = command(__doc__, runs=200, length=50)
    options = parser.parse_args()
    results = {}
    for name, (length, function, x) in chains(options.length).items():
        for buffers in ("stable", "donated", "changing"):
            figures = measure(function, x, buffers, options.runs)
            results[f"{name}/{buffers}"] = {key: round(value / length, 3) for key, value in figures.items()}
    record = {"provenance": provenance("benchmarks.jax_host_time"), "per_op": results}
    print(json.dumps(record, indent=1))
    write_record(options.output, record)


if __name__ == "__main__":
    main()
