"""First calls and host time of small calls, of both frameworks in one table.

    python -m benchmarks.first_calls [--turns 200] [--tokens 16] [--output RECORD]

Each row runs in a process of its own with an empty Triton cache. `import`: seconds to import the framework and the
front-end. `first`: from the first call until its result is there, with planning, tracing and compiling. `call`: the
median of later calls until they return, in microseconds: on a GPU the host time, on a CPU the whole call. Nothing else
should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.provenance import provenance
from benchmarks.record import command, write_record

NUM_EXPERTS, TOP_K, D, F = 8, 2, 256, 128
ROWS = ("torch moe", "torch prepare_moe", "torch layer", "jax moe", "jax jit(moe)", "jax jit(layer)")


def _arrays(tokens: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    shapes = (tokens, D), (NUM_EXPERTS, D, 2 * F), (NUM_EXPERTS, F, D), (D, NUM_EXPERTS)
    return [(random.standard_normal(shape) / D**0.5).astype(np.float32) for shape in shapes]


def _torch_call(row: str, tokens: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import torch

    import moe_torch

    torch.set_grad_enabled(False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, gate_up, down, router = (torch.tensor(one, device=device, dtype=torch.bfloat16) for one in _arrays(tokens))
    experts, routing = moe_torch.ExpertWeights(gate_up, down), moe_torch.RouterWeights(router)
    spec = moe_torch.MoESpec(moe_torch.Activation("silu"), moe_torch.RouterSpec(TOP_K))
    layer = moe_torch.MoE(D, F, NUM_EXPERTS, TOP_K, device=device, dtype=torch.bfloat16)
    if row == "torch prepare_moe":
        launch = moe_torch.prepare_moe(experts, routing, spec)
        call: Callable[[], Any] = lambda: launch(x)  # noqa: E731
    else:
        call = (lambda: moe_torch.moe(x, experts, routing, spec)) if row == "torch moe" else lambda: layer(x)
    return call, torch.cuda.synchronize if device == "cuda" else lambda: None


def _jax_call(row: str, tokens: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import moe_jax
    from moe_jax.nnx import MoE

    x, gate_up, down, router = (jnp.asarray(one, jnp.bfloat16) for one in _arrays(tokens))
    experts, routing = moe_jax.ExpertWeights(gate_up, down), moe_jax.RouterWeights(router)
    spec = moe_jax.MoESpec(moe_jax.Activation("silu"), moe_jax.RouterSpec(TOP_K))
    arguments: tuple[Any, ...] = (x, experts, routing)

    def run(x: Any, experts: Any, routing: Any) -> Any:
        return moe_jax.moe(x, experts, routing, spec).output

    if row == "jax jit(layer)":
        layer = MoE(D, F, NUM_EXPERTS, TOP_K, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        call, arguments = jax.jit(lambda layer, x: layer(x)), (layer, x)
    else:
        call = run if row == "jax moe" else jax.jit(run)
    last: list[Any] = []

    def once() -> None:
        last[:] = [call(*arguments)]

    return once, lambda: jax.block_until_ready(last)


def _measure(row: str, tokens: int, turns: int) -> dict[str, float]:
    began = time.perf_counter()
    call, wait = (_torch_call if row.startswith("torch") else _jax_call)(row, tokens)
    imported = time.perf_counter() - began
    began = time.perf_counter()
    call()
    wait()
    first, seconds = time.perf_counter() - began, []
    for _ in range(turns):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
        wait()
    return {"import": imported, "first": first, "call": statistics.median(seconds) * 1e6}


def main() -> None:
    parser = command(__doc__, turns=200, tokens=16)
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(_measure(options.row, options.tokens, options.turns)))
        return
    print("| | import, s | first call, s | later call, us |\n|---|---|---|---|")
    rows = []
    for row in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, "-m", "benchmarks.first_calls", "--row", row, "--tokens", str(options.tokens)]
            done = subprocess.run(
                [*words, "--turns", str(options.turns)],
                env=os.environ | {"TRITON_CACHE_DIR": folder}, check=True, capture_output=True, text=True,
            )  # fmt: skip
        made = json.loads(done.stdout.splitlines()[-1])
        rows.append({"row": row, "tokens": options.tokens} | made)
        print(f"| {row} | {made['import']:.1f} | {made['first']:.2f} | {made['call']:.0f} |", flush=True)
    if options.output:
        write_record(options.output, {"provenance": provenance("benchmarks.first_calls"), "rows": rows})


if __name__ == "__main__":
    main()
