"""Layers on a CPU: forward and training step beside transformers' `grouped_mm` and JAX's `ragged_dot` and dense einsum.

    python -m benchmarks.cpu [--shapes small,middle,large] [--tokens 64,512,2048] [--threads N] [--seconds 2]
    taskset -c 0 python -m benchmarks.cpu --threads 1 --clock process --loads idle --dtypes float32,bfloat16

Every cell is measured on an idle machine and on a loaded one, where as many processes as there are cores compute
without end. All contestants of a cell take turns; the figures are medians in milliseconds, and `ratio` is ours over the
peer's. `--clock process` takes the least CPU time of the process instead, which other processes of a shared machine
disturb little; use one thread. Before its timing a cell's outputs and gradients are compared in fp32, where all
implementations round alike, and torch's with JAX's bitwise in its dtype. `--output` writes the record.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import moe_jax.nnx
import moe_torch
from benchmarks.provenance import provenance
from benchmarks.record import command, write_record
from moe_core.base.threads import blas_kernels
from moe_core.layers import MoELayerSpec
from moe_core.specs import RouterSpec

#: D, F, E, K. mixtral and qwen3 have an eighth and a quarter of the widths.
SHAPES = {
    "tiny": (64, 128, 8, 2),
    "small": (256, 512, 8, 2),
    "middle": (512, 1024, 16, 4),
    "large": (1024, 1536, 32, 4),
    "mixtral": (512, 1792, 8, 2),
    "qwen3": (512, 192, 128, 8),
}
_FEWEST_ROUNDS = 5


class Contestant(NamedTuple):
    """forward(): the output. step(): output, gradients of x and of the down matrix."""

    forward: Callable[[], Any]
    step: Callable[[], Any]


def contestants(
    shape: tuple[int, int, int, int], tokens: int, dtype: str = "float32", packages: Sequence[str] = ("torch", "jax")
) -> dict[str, Contestant]:
    """The same layer, weights and tokens in every implementation of these packages."""
    d_model, d_ff, num_experts, top_k = shape
    torch.manual_seed(0)
    spec = MoELayerSpec(d_model, d_ff, num_experts, top_k, RouterSpec(renormalize=True))
    ours = moe_torch.MoE.from_spec(spec).to(getattr(torch, dtype))
    x = torch.randn(1, tokens, d_model).to(getattr(torch, dtype))
    made = {}
    if "torch" in packages:
        made["torch"] = _of_torch(ours, x, ours.experts.down)
        made["grouped_mm"] = _of_torch(*_transformers_block(ours, x))
    return made | (_of_jax(ours, x) if "jax" in packages else {})


def _of_torch(layer: torch.nn.Module, x: torch.Tensor, down: torch.nn.Parameter) -> Contestant:
    leaf = x.clone().requires_grad_()

    def step() -> tuple[Any, ...]:
        layer.zero_grad()
        leaf.grad = None
        output = layer(leaf)
        output.backward(torch.ones_like(output))
        return output.detach(), leaf.grad, down.grad

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return layer(x)

    return Contestant(forward, step)


def _transformers_block(ours: moe_torch.MoE, x: torch.Tensor) -> tuple[Any, torch.Tensor, torch.nn.Parameter]:
    spec = ours.spec
    config = MixtralConfig(
        hidden_size=spec.d_model,
        intermediate_size=spec.d_ff,
        num_local_experts=spec.num_experts,
        num_experts_per_tok=spec.top_k,
    )
    config._experts_implementation = "grouped_mm"
    block: Any = MixtralSparseMoeBlock(config).to(x.dtype)
    values = {
        "gate.weight": ours.router.weight,
        "experts.gate_up_proj": ours.experts.gate_up,
        "experts.down_proj": ours.experts.down,
    }
    block.load_state_dict({name: tensor.detach().clone() for name, tensor in values.items()})
    return block, x, block.experts.down_proj


def _numpy(array: Any) -> np.ndarray:
    return array.detach().float().numpy() if isinstance(array, torch.Tensor) else np.asarray(array, np.float32)


def _of_jax(ours: moe_torch.MoE, x: torch.Tensor) -> dict[str, Contestant]:
    layer = moe_jax.nnx.MoE.from_weights(ours.export_weights())
    graph, state = nnx.split(layer)
    tensors = ours.router.weight.mT, ours.experts.gate_up.mT, ours.experts.down.mT, x
    router, gate_up, down, rows = (jnp.asarray(_numpy(one), str(x.dtype).removeprefix("torch.")) for one in tensors)
    weights = {
        "router": router,
        "gate": gate_up[..., : ours.spec.d_ff],
        "up": gate_up[..., ours.spec.d_ff :],
        "down": down,
    }

    def route(weights: dict[str, jax.Array], rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores, ids = jax.lax.top_k(jax.nn.softmax(rows @ weights["router"]), ours.spec.top_k)
        return scores / scores.sum(-1, keepdims=True), ids

    def ragged_dot(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        scores, ids = route(weights, x[0])
        order = jnp.argsort(ids.reshape(-1), stable=True)
        sizes = jnp.bincount(ids.reshape(-1), length=ours.spec.num_experts)
        rows = x[0][order // ids.shape[1]]
        hidden = jax.nn.silu(jax.lax.ragged_dot(rows, weights["gate"], sizes))
        hidden = hidden * jax.lax.ragged_dot(rows, weights["up"], sizes)
        slots = jax.lax.ragged_dot(hidden, weights["down"], sizes)[jnp.argsort(order)]
        return (slots.reshape(*ids.shape, -1) * scores[..., None]).sum(1)[None]

    def einsum(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        scores, ids = route(weights, x[0])
        dense = (jax.nn.one_hot(ids, ours.spec.num_experts) * scores[..., None]).sum(1)
        hidden = jax.nn.silu(jnp.einsum("td,edf->etf", x[0], weights["gate"]))
        hidden = hidden * jnp.einsum("td,edf->etf", x[0], weights["up"])
        return jnp.einsum("etf,efd,te->td", hidden, weights["down"], dense)[None]

    def contestant(apply: Callable[..., jax.Array], parameters: Any, down: Callable[[Any], Any]) -> Contestant:
        forward = jax.jit(apply)

        @jax.jit
        def step(parameters: Any, rows: jax.Array) -> tuple[Any, ...]:
            def loss(parameters: Any, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
                output = apply(parameters, rows)
                return output.sum(), output

            (_, output), (of_parameters, of_rows) = jax.value_and_grad(loss, (0, 1), has_aux=True)(parameters, rows)
            return output, of_rows, of_parameters

        def whole_step() -> tuple[Any, ...]:
            output, of_rows, of_parameters = jax.block_until_ready(step(parameters, rows))
            return output, of_rows, jnp.swapaxes(down(of_parameters), 1, 2)

        return Contestant(lambda: jax.block_until_ready(forward(parameters, rows)), whole_step)

    def layer_forward(state: Any, rows: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(rows)

    # The ported layer keeps torch's storage [E, D, F], the others have [E, F, D].
    ported = contestant(layer_forward, state, lambda state: jnp.swapaxes(state["wo"].get_value(), 1, 2))
    peers = {"ragged_dot": ragged_dot, "einsum": einsum}
    made = {name: contestant(apply, weights, lambda found: found["down"]) for name, apply in peers.items()}
    return {"jax": ported, **made}


def check(found: dict[str, Contestant]) -> None:
    """Raise AssertionError where outputs or gradients differ; torch and jax must be bitwise equal."""
    wanted = [_numpy(array) for array in found[next(iter(found))].step()]
    for name, contestant in found.items():
        for array, reference in zip(map(_numpy, contestant.step()), wanted, strict=True):
            if name == "jax":
                np.testing.assert_array_equal(array, reference)
            np.testing.assert_allclose(array, reference, rtol=1e-2, atol=1e-3 * np.abs(reference).max())


def _burn() -> None:
    while True:
        sum(range(10_000))


@contextlib.contextmanager
def load(busy: int) -> Iterator[None]:
    """So many processes that compute without end inside the block."""
    processes = [multiprocessing.get_context("spawn").Process(target=_burn, daemon=True) for _ in range(busy)]
    for process in processes:
        process.start()
    if processes:
        time.sleep(5)  # until they have imported what this module imports
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def measure(calls: dict[str, Callable[[], Any]], seconds: float, clock: str = "wall") -> dict[str, float]:
    """Milliseconds of each call, by turns: the median, or with clock `process` the least CPU time of the process."""
    for call in calls.values():
        call()
        call()
    now, statistic = _CLOCKS[clock]
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or len(times[next(iter(times))]) < _FEWEST_ROUNDS:
        for name, call in calls.items():
            start = now()
            call()
            times[name].append((now() - start) * 1e3)
    return {name: statistic(values) for name, values in times.items()}


_CLOCKS = {"wall": (time.perf_counter, statistics.median), "process": (time.process_time, min)}
_PEERS = {"torch": ("grouped_mm",), "jax": ("ragged_dot", "einsum")}


def main() -> None:
    texts = {"tokens": "64,512,2048", "loads": "idle,loaded", "dtypes": "float32", "packages": "torch,jax"}
    parser = command(__doc__, shapes=SHAPES, **texts, seconds=2.0)
    parser.add_argument("--clock", default="wall", choices=_CLOCKS)
    parser.add_argument("--threads", type=int, help="of torch (default: its own choice)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    cores = len(os.sched_getaffinity(0))
    record: dict[str, Any] = {**provenance("benchmarks.cpu"), "cores": cores, "threads": torch.get_num_threads()}
    record |= {"clock": options.clock, "blas_kernels": blas_kernels(), "cells": (cells := [])}
    shapes, dtypes, packages = (getattr(options, name).split(",") for name in ("shapes", "dtypes", "packages"))
    tokens_of_cells = list(map(int, options.tokens.split(",")))
    for loaded in options.loads.split(","):
        with load(cores if loaded == "loaded" else 0):
            for shape, tokens, dtype in itertools.product(shapes, tokens_of_cells, dtypes):
                check(contestants(SHAPES[shape], tokens, packages=packages))
                found = contestants(SHAPES[shape], tokens, dtype, packages)
                check({name: found[name] for name in packages})
                for kind in ("forward", "step"):
                    calls = {name: getattr(contestant, kind) for name, contestant in found.items()}
                    times = measure(calls, options.seconds, options.clock)
                    ratios = {f"{one}/{peer}": times[one] / times[peer] for one in packages for peer in _PEERS[one]}
                    cell = {"load": loaded, "shape": shape, "tokens": tokens, "dtype": dtype, "kind": kind}
                    cells.append({**cell, "ms": times, "ratio": ratios})
                    line = [f"{name} {ms:.2f}" for name, ms in times.items()]
                    line += [f"{name} {ratio:.2f}" for name, ratio in ratios.items()]
                    print(*cell.values(), "|", *line, flush=True)
    write_record(options.output, record)


if __name__ == "__main__":
    main()
