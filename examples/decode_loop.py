"""A decoding loop over Mixture-of-Experts layers: tokens per second of eager calls, launchers and a CUDA graph.

    python examples/decode_loop.py --layers 24 --d-model 2880 --d-ff 2880 --experts 32 --top-k 4 --tokens 1 --steps 200

`warmup` compiles every kernel first, so that no step waits for a compiler. `prepare_moe` checks the weights once. A
CUDA graph records a whole step and launches it at once. All three give the same bits. The default sizes take seconds on
a CPU, where there are no graphs. Attention and the vocabulary are left out: a step is the experts' part of a model's,
with the norm in front of each layer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from moe_torch import (
    Activation,
    ExpertWeights,
    MoESpec,
    RouterSpec,
    RouterWeights,
    moe,
    prepare_moe,
    warmup,
)


def seconds_of(step: Callable[[], object], steps: int) -> float:
    """Seconds that a step takes, on average over `steps` behind one that is not timed."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    step()
    wait()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - began) / steps


def main() -> None:
    """Print tokens per second of every way that this machine has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 4, "d-model": 64, "d-ff": 64, "experts": 8, "top-k": 2, "tokens": 4, "steps": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    options = parser.parse_args()
    D, F, E = options.d_model, options.d_ff, options.experts
    on_gpu = torch.cuda.is_available()
    torch.set_default_device("cuda" if on_gpu else "cpu")
    torch.set_default_dtype(torch.bfloat16 if on_gpu else torch.float32)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)

    spec = MoESpec(Activation("silu"), RouterSpec(options.top_k, renormalize=True))
    layers = [
        (
            ExpertWeights(torch.randn(E, D, 2 * F) * D**-0.5, torch.randn(E, F, D) * F**-0.5),
            RouterWeights(torch.randn(D, E) * D**-0.5),
        )
        for _ in range(options.layers)
    ]
    first = torch.randn(options.tokens, D)
    kernels = warmup(first, *layers[0], spec, tokens=[options.tokens])
    print(f"{torch.get_default_device()}: {kernels}")

    launchers = [prepare_moe(experts, router, spec) for experts, router in layers]
    x, y = first.clone(), first.clone()

    def norm(rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(rows, (D,))

    def eager() -> torch.Tensor:
        rows = x
        for experts, router in layers:
            rows = rows + moe(norm(rows), experts, router, spec).output
        return y.copy_(rows)

    def prepared() -> torch.Tensor:
        rows = x
        for launch in launchers:
            rows = rows + launch(norm(rows))
        return y.copy_(rows)

    ways: dict[str, Callable[[], object]] = {"eager moe": eager, "prepare_moe": prepared}
    if on_gpu:
        prepared()  # compiled and loaded before the graph is recorded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            prepared()
        ways["CUDA graph"] = graph.replay
    else:
        print("no CUDA device: no CUDA graph")

    wanted = eager().clone()
    assert wanted.isfinite().all(), "a model's numbers are finite"
    for name, step in ways.items():
        y.zero_()
        seconds = seconds_of(step, options.steps)
        assert torch.equal(y, wanted), f"{name} must give the bits of the eager call"
        print(f"{name:12} {1e3 * seconds:8.3f} ms a step, {options.tokens / seconds:10.0f} tokens/s")


if __name__ == "__main__":
    main()
