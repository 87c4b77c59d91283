"""Single grouped matmuls and their gradients beside `torch._grouped_mm` and `jax.lax.ragged_dot`, on a GPU or a CPU.

    python -m benchmarks.grouped [--rows 64,512,4096] [--experts 8,128] [--shape 2048,768] [--output RECORD]

Rows of random groups are multiplied `[R, D] x [G, D, N]`. Both contestants take turns, and agree before they are timed.
On a GPU, torch is timed by CUDA-graph replay with a flushed L2 (`graph`) and as eager calls (`eager`), and JAX as eager
calls of jitted functions, whose device time a chain of calls gives (`chain`, forward only). On a CPU all are `eager`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import moe_jax
import moe_torch
from benchmarks.options import numbers_of_tokens
from benchmarks.provenance import provenance
from benchmarks.record import command, reason_of, table, write_record
from benchmarks.timing import EagerTimer, GraphTimer, medians, paired_ratio

#: Relative Frobenius error between both contestants: bf16 roundings.
TOLERANCE = 1e-2
#: XLA's product multiplies every row by every expert; on a CPU it is timed up to so many operations.
_MOST_FLOPS_ON_A_CPU = 2e11
_CHAIN = 20
_FIELDS = ("framework", "rows", "experts", "kind", "mode", "ours_us", "peer_us", "ratio", "equal_bits", "reason")
COLUMNS = {name: name for name in _FIELDS}


def contestants_of_torch(x: torch.Tensor, weight: torch.Tensor, sizes: torch.Tensor) -> dict[str, dict[str, Any]]:
    """kind -> name -> a call. weight `[G, N, D]` is passed transposed, as torchtitan does."""
    ends, matrices = sizes.cumsum(0, dtype=torch.int32), weight.mT
    x, matrices = x.requires_grad_(), matrices.detach().requires_grad_()
    calls: dict[str, dict[str, Any]] = {"forward": {}, "step": {}}
    for name, product in (("ours", moe_torch.grouped_mm), ("peer", torch.nn.functional.grouped_mm)):

        def forward(product: Callable[..., torch.Tensor] = product) -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                return (product(x, matrices, offs=ends),)

        def step(product: Callable[..., torch.Tensor] = product) -> tuple[torch.Tensor, ...]:
            y = product(x, matrices, offs=ends)
            return y.detach(), *torch.autograd.grad(y, (x, matrices), y.detach())

        calls["forward"][name], calls["step"][name] = forward, step
    return calls


def contestants_of_jax(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> dict[str, dict[str, Any]]:
    """kind -> name -> a call. weight `[G, D, N]`."""
    calls: dict[str, dict[str, Any]] = {"forward": {}, "step": {}}
    for name, product in (("ours", moe_jax.ragged_dot), ("peer", jax.lax.ragged_dot)):

        def step(x: jax.Array, weight: jax.Array, product: Callable[..., jax.Array] = product) -> tuple[Any, ...]:
            y, pull = jax.vjp(lambda x, weight: product(x, weight, sizes), x, weight)
            return y, *pull(y)

        def forward(x: jax.Array, weight: jax.Array, product: Callable[..., jax.Array] = product) -> tuple[Any, ...]:
            return (product(x, weight, sizes),)

        for kind, function in (("forward", forward), ("step", step)):
            compiled = jax.jit(function)
            calls[kind][name] = lambda compiled=compiled: jax.block_until_ready(compiled(x, weight))
    return calls


def compared(calls: Mapping[str, Callable[[], Any]]) -> float:
    """The share of elements with equal values. Raises SystemExit where the contestants differ."""

    def wide(array: Any) -> np.ndarray:
        return np.asarray(array.astype(jnp.float32)) if isinstance(array, jax.Array) else array.float().cpu().numpy()

    equal, size = 0, 0
    for ours, peer in zip(calls["ours"](), calls["peer"](), strict=True):
        one, other = wide(ours), wide(peer)
        error = float(np.linalg.norm(one - other) / max(float(np.linalg.norm(other)), 1e-30))
        if not error <= TOLERANCE:
            raise SystemExit(f"parity is red: ours and the peer differ by {error:.1e} of the norm")
        equal, size = equal + int((one == other).sum()), size + one.size
    return equal / size


def measure(
    calls: Mapping[str, Mapping[str, Any]], timers: Mapping[str, Any], cell: dict[str, Any]
) -> list[dict[str, Any]]:
    """A row for each kind and timer. cell: what all rows hold."""
    rows = []
    for kind, both in calls.items():
        equal_bits = compared(both)
        for mode, timer in timers.items():
            rounds = timer.rounds(both)
            times = medians(rounds)
            ratio = paired_ratio(rounds, "ours", "peer")
            found = {"ours_us": times["ours"], "peer_us": times["peer"], "ratio": ratio, "equal_bits": equal_bits}
            rows.append({**cell, "kind": kind, "mode": mode, **found})
    return rows


def run(options: argparse.Namespace, device: str, timers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """timers: mode -> timer of torch; JAX has the mode `eager`."""
    rows, (d_model, width) = [], options.shape
    for experts in options.experts:
        for number in options.rows:
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(experts, (number,), generator=generator)
            sizes = torch.bincount(ids, minlength=experts).to(torch.int32)
            dtype = getattr(torch, options.dtype)
            x = torch.randn(number, d_model, generator=generator).to(dtype)
            weight = (torch.randn(experts, width, d_model, generator=generator) * d_model**-0.5).to(dtype)
            cell = {"rows": number, "experts": experts}
            on_device = [one.to(device) for one in (x, weight, sizes)]
            rows += measure(contestants_of_torch(*on_device), timers, {"framework": "torch"} | cell)
            if device == "cpu" and 2 * number * d_model * width * experts > _MOST_FLOPS_ON_A_CPU:
                rows.append({"framework": "jax", **cell, "reason": "XLA multiplies every row by every expert"})
                continue
            tensors = on_device[0].detach(), on_device[1].mT.contiguous(), on_device[2]
            arrays = [moe_jax.from_dlpack(one) for one in tensors]
            jax_cell = {"framework": "jax"} | cell
            try:
                rows += measure(contestants_of_jax(*arrays), {"eager": timers["eager"]}, jax_cell)
                if "graph" in timers:
                    rows.append({**jax_cell, "kind": "forward", "mode": "chain", **_chain(timers["graph"], arrays)})
            except Exception as error:  # XLA's product needs more memory than there is.
                rows.append({**jax_cell, "reason": reason_of(error)})
    return rows


def _chain(timer: Any, arrays: list[jax.Array]) -> dict[str, float]:
    """Device microseconds of a forward: each product's sum feeds the next one, so that calls are dependent."""
    x, weight, sizes = arrays
    times = {}
    for name, product in (("ours", moe_jax.ragged_dot), ("peer", jax.lax.ragged_dot)):

        def following(x: jax.Array, weight: jax.Array, sizes: jax.Array, product: Any = product) -> jax.Array:
            y = product(x, weight, sizes)
            return x.at[0, 0].set(y[0, 0])

        times[f"{name}_us"] = timer.device_time_of_jax_chain(following, x, (weight, sizes), _CHAIN).us
    return {**times, "ratio": times["ours_us"] / times["peer_us"]}


def show(rows: list[dict[str, Any]]) -> str:
    return table(rows, COLUMNS)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command(__doc__, rows="64,512,4096", experts="8,128", shape="2048,768")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    for name in ("rows", "experts", "shape"):
        setattr(options, name, numbers_of_tokens(parser, getattr(options, name), f"--{name}"))
    if len(options.shape) != 2:
        parser.error(f"--shape must be two numbers D,N, got {options.shape}")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    timers: dict[str, Any] = {"eager": EagerTimer()}
    if options.device == "cuda":
        timers["graph"] = GraphTimer()
    rows = run(options, options.device, timers)
    print(show(rows))
    if options.output:
        made = {"shape": list(options.shape), "dtype": options.dtype, "rows": rows}
        write_record(options.output, provenance("benchmarks.grouped") | made)


if __name__ == "__main__":
    main()
