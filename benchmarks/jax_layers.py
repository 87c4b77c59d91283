"""JAX layers under `vmap`, and with experts on several devices: without `jit`, and for a batch smaller than the mesh.

    python -m benchmarks.jax_layers [--parts vmap,mesh,split] [--output RECORD]

`us`: a call with the host, the median over rounds of calls one after another. `first_s`: the first call, with its
compiler. `vmap` compares a batch of 8 with a call per element and one call of all tokens, and 8 layers' weights with a
call per layer. `mesh` compares experts on all devices with the first device, and `split` whole layers on meshes of one
and two axes, with a batch that they split. Results must agree, or the exit status is 1.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.provenance import provenance
from benchmarks.record import command, table, write_record
from moe_jax import layers
from moe_jax.bridge.ffi import callback_count
from moe_jax.parallel import ExchangeSpec, ExpertAxis

#: d_model, d_ff, experts, top_k: qwen3-30b-a3b's, and of `--tiny`.
SIZES, TINY = (2048, 768, 128, 8), (64, 48, 8, 2)
BATCH, LENGTH = 8, 64
#: Of the norm: bf16 sums in another order.
TOLERANCE = 2e-2
COLUMNS = {"part": "part", "way": "way", "devices": "devices", "tokens": "tokens", "kind": "kind"}
COLUMNS |= {"first_s": "first, s", "us": "us", "callbacks": "calls into Python", "equal_bits": "equal bits"}


def median_us(function: Callable[..., Any], arguments: tuple[Any, ...], calls: int = 10, rounds: int = 5) -> float:
    """Microseconds of one of `calls` calls of a compiled function, one after another until the last is done. Calls of
    more than 50 ms have fewer of them."""

    def one_round(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        return (time.perf_counter() - began) / calls * 1e6

    first = one_round(1)
    fewer = max(1, min(calls, int(5e5 / first)))
    return statistics.median(one_round(fewer) for _ in range(rounds if first < 1e6 else 1))


def _timed(function: Callable[..., Any], arguments: tuple[Any, ...], calls: int) -> tuple[Any, dict[str, Any]]:
    began = time.perf_counter()
    result = jax.block_until_ready(function(*arguments))
    row: dict[str, Any] = {"first_s": time.perf_counter() - began}
    row["us"] = median_us(function, arguments, calls)
    before = callback_count()
    jax.block_until_ready(function(*arguments))
    return result, row | {"callbacks": callback_count() - before}


def _compared(result: Any, wanted: Any) -> dict[str, Any]:
    """The largest difference of an array, relative to its norm, and whether all bits are equal."""
    worst, equal = 0.0, True
    for pair in zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True):
        one, other = (np.asarray(jax.device_get(array), np.float32).ravel() for array in pair)
        equal &= np.array_equal(one, other)
        worst = max(worst, float(np.linalg.norm(one - other) / max(float(np.linalg.norm(other)), 1e-30)))
    return {"difference": worst, "equal_bits": bool(equal)}


def _gradients(forward: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda p, x: jnp.square(forward(p, x).astype(jnp.float32)).sum(), argnums=(0, 1))


def vmap(sizes: tuple[int, int, int, int], calls: int) -> list[dict[str, Any]]:
    d_model, d_ff, experts, _ = sizes
    spec, small = layers.MoELayerSpec(*sizes), layers.MoELayerSpec(d_model // 4, d_ff // 4, max(8, experts // 16), 2)
    shared = layers.initialize(spec, jax.random.key(0), param_dtype=jnp.bfloat16)
    keys = jax.random.split(jax.random.key(2), BATCH)
    stack = jax.vmap(lambda key: layers.initialize(small, key, param_dtype=jnp.bfloat16))(keys)
    x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, d_model), jnp.bfloat16)
    narrow = x[..., : small.d_model]

    def one(p: Any, x: jax.Array) -> jax.Array:
        return layers.forward(p, x, spec)

    def few(p: Any, x: jax.Array) -> jax.Array:
        return layers.forward(p, x, small)

    # The first way of each group is the one that the others are compared with.
    groups: tuple[dict[str, tuple[Any, ...]], ...] = (
        {
            "one call of all tokens": (one, shared, x),
            "vmap, shared weights": (jax.vmap(one, (None, 0)), shared, x),
            "a call per element": (lambda p, x: jax.lax.map(lambda x: one(p, x), x), shared, x),
        },
        {
            "a call per layer": (lambda p, x: jax.lax.map(lambda both: few(*both), (p, x)), stack, narrow),
            "vmap, weights of 8 layers": (jax.vmap(few), stack, narrow),
        },
    )
    rows = []
    for ways in groups:
        for kind, wrap in (("forward", lambda call: call), ("gradients", _gradients)):
            wanted = None
            for way, (call, parameters, tokens) in ways.items():
                result, row = _timed(jax.jit(wrap(call)), (parameters, tokens), calls)
                wanted = result if wanted is None else wanted
                row |= {"devices": 1, "tokens": BATCH * LENGTH, "kind": kind, "way": way, "part": "vmap"}
                rows.append(row | _compared(result, wanted))
    return rows


def mesh(sizes: tuple[int, int, int, int], calls: int) -> list[dict[str, Any]]:
    spec, devices = layers.MoELayerSpec(*sizes), len(jax.devices())
    alone = layers.initialize(spec, jax.random.key(0), param_dtype=jnp.bfloat16)
    over = jax.make_mesh((devices,), ("ep",))
    rows = []
    for tokens, mode in ((BATCH * LENGTH, "all_to_all"), (BATCH * LENGTH, "padded"), (1, "all_gather")):
        axis = ExpertAxis("ep", ExchangeSpec(mode))
        x = jax.random.normal(jax.random.key(1), (tokens, spec.d_model), jnp.bfloat16)

        def call(p: Any, x: jax.Array, axis: ExpertAxis | None = None) -> jax.Array:
            return layers.forward(p, x, spec, expert_axis=axis)

        # Each program has its own compilation, with and without jit.
        wanted, of_one = _timed(jax.jit(call), (alone, x), calls)
        row = {"part": "mesh", "tokens": tokens, "kind": "forward"}
        rows.append(row | of_one | {"devices": 1, "way": "jit", "difference": 0.0, "equal_bits": True})
        with jax.set_mesh(over):
            parameters = jax.device_put(alone, layers.expert_sharding(spec, over))
            whole = tokens % devices != 0
            x = jax.device_put(x, NamedSharding(over, PartitionSpec(None if whole else "ep")))
            for way in ("jit", "without jit"):
                function = jax.jit(call, static_argnums=2) if way == "jit" else call
                result, of_way = _timed(function, (parameters, x, axis), calls)
                of_way |= _compared(result, wanted)
                rows.append(row | of_way | {"devices": devices, "way": f"{way}, {mode}"})
    return rows


def split(sizes: tuple[int, int, int, int], calls: int) -> list[dict[str, Any]]:
    spec, devices = layers.MoELayerSpec(*sizes), len(jax.devices())
    alone = layers.initialize(spec, jax.random.key(0), param_dtype=jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, spec.d_model), jnp.bfloat16)

    def call(p: Any, x: jax.Array) -> jax.Array:
        return layers.forward(p, x, spec)

    mapped = jax.vmap(call, (None, 0))
    ways: list[tuple[str, AxisType, dict[str, int], Any, PartitionSpec]] = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        ways.append(("layer", kind, {"data": devices}, call, PartitionSpec("data")))
        ways.append(("layer", kind, {"data": devices // 2, "model": 2}, call, PartitionSpec(("data", "model"))))
    ways.append(("vmap", AxisType.Auto, {"data": devices}, mapped, PartitionSpec(None, "data")))
    wanted, of_one = _timed(jax.jit(call), (alone, x), calls)
    row = {"part": "split", "tokens": BATCH * LENGTH, "kind": "forward"}
    rows = [row | of_one | {"devices": 1, "way": "jit", "difference": 0.0, "equal_bits": True}]
    for name, kind, axes, function, held in ways:
        over = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))
        with jax.set_mesh(over):
            parameters = jax.device_put(alone, NamedSharding(over, PartitionSpec()))
            result, of_way = _timed(
                jax.jit(function), (parameters, jax.device_put(x, NamedSharding(over, held))), calls
            )
        way = f"{name}, {kind.name}, " + " x ".join(f"{axis} {size}" for axis, size in axes.items())
        rows.append(row | of_way | _compared(result, wanted) | {"devices": devices, "way": way})
    return rows


PARTS = {"vmap": vmap, "mesh": mesh, "split": split}


def main() -> int:
    parser = command(__doc__, calls=10)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help="vmap, mesh, split")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    options = parser.parse_args()
    sizes, rows = TINY if options.tiny else SIZES, []
    for part in options.parts:
        rows += PARTS[part](sizes, options.calls)
    record = {"provenance": provenance("benchmarks.jax_layers"), "sizes": sizes, "rows": rows}
    write_record(options.output, record)
    print(table(rows, COLUMNS), flush=True)
    wrong = [row for row in rows if not row["difference"] <= TOLERANCE]
    print(*(f"differs by {row['difference']:.1e} of the norm: {row['way']}" for row in wrong), sep="\n", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
