"""A soak: threads call layers for minutes; every result must have the first one's bits, and memory must stay flat.

    python -m tools.soak [--seconds 480] [--state build/soak.json] [--device cuda]

Threads run side by side on streams of their own: eager forwards and training steps in torch, replays of CUDA graphs (on
a GPU), and compiled JAX programs. The layers are of three kinds (plain; grouped routing with shared experts; mxfp4
experts with biases), and every call has another number of tokens. A piece starts with one call of every case. The state
file holds a digest of each case's bits from the first piece on, so later pieces, in other processes and on other days,
are held to the same bits. Both frameworks and the graphs share the digests of `y` and of the gradient of x.

A piece fails, with exit status 1, where a digest differs, where a call raises, or where the memory of the process or
of the device grows between the second and the last quarter.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import torch

import moe_jax.layers
import moe_jax.nnx
import moe_torch
from benchmarks.provenance import provenance
from moe_core.formats import scheme_named
from moe_core.layers import ExpertsSpec, MoELayerSpec, SharedExpertsSpec
from moe_core.specs import Activation, RouterSpec

SIZES = D, *_ = 256, 128, 16, 4
_GROUPED = RouterSpec(scoring="sigmoid", num_groups=4, topk_group=2, renormalize=True, scale=2.5)
_MXFP4 = ExpertsSpec(Activation("swiglu_oai"), bias=True, scheme=scheme_named("mxfp4_w4a16"))
_SHARED = SharedExpertsSpec(d_ff=64, gate=True)
SPECS = {
    "plain": MoELayerSpec(*SIZES, RouterSpec(renormalize=True)),
    "grouped": MoELayerSpec(*SIZES, _GROUPED, shared_experts=_SHARED, correction_bias=True),
    "mxfp4": MoELayerSpec(*SIZES, RouterSpec(order="topk_then_softmax"), _MXFP4),
}
#: Tokens of a call: few, many, and numbers that fit no tile.
TOKENS = (0, 1, 2, 3, 7, 16, 33, 64, 100, 129, 256, 391, 512, 777, 1024)
#: What memory may grow by in a piece: bytes of the process and of the device.
RESIDENT, DEVICE = 48 << 20, 64 << 20
_SAMPLE_SECONDS = 2.0
#: Elements of a row of a long tensor, whose digest is that of its rows' digests.
_WIDTH = 1 << 20


class Case(NamedTuple):
    """layer: a key of SPECS. step: with gradients."""

    layer: str
    tokens: int
    step: bool


class Digests:
    """The first digest of every case, and what differed from it later."""

    def __init__(self, known: dict[str, int]) -> None:
        self.known, self.calls, self.failures = known, Counter[str](), list[str]()
        self._lock = threading.Lock()

    def compare(self, kind: str, found: dict[str, int]) -> None:
        """kind: of the thread. found: digests by case."""
        with self._lock:
            self.calls[kind] += 1
            for name, digest in found.items():
                first = self.known.setdefault(name, digest)
                if first != digest:
                    self.failures.append(f"{kind}: {name} has the digest {digest:x}, the first call had {first:x}")

    def fail(self, text: str) -> None:
        """Something else than bits went wrong."""
        with self._lock:
            self.failures.append(text)


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """int64 `[_WIDTH]`: a number for every place."""
    return torch.arange(_WIDTH, device=device, dtype=torch.int64) * 0x9E3779B97F4A7C + 1


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """int64 `[]`: a sum, modulo 2^64, of the tensor's bits times a number of their place."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return _weighted(tensor.detach().contiguous().view(bits).flatten().to(torch.int64))


def _weighted(flat: torch.Tensor) -> torch.Tensor:
    factors = _factors(flat.device)
    if flat.numel() <= _WIDTH:
        return (flat * factors[: flat.numel()]).sum()
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % _WIDTH)).view(-1, _WIDTH)
    return _weighted((rows * factors).sum(1))


class Soak:
    """Layers of both frameworks with the same weights, and the calls of them."""

    def __init__(self, device: str, tokens: tuple[int, ...]) -> None:
        self.device, self.tokens = torch.device(device), tokens
        self.torch_layers, self.jax_layers = {}, {}
        self._graphs: dict[Case, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        place = jax.devices("gpu" if self.device.type == "cuda" else "cpu")[0]
        for name, spec in SPECS.items():
            torch.manual_seed(0)
            layer = moe_torch.MoE.from_spec(spec, dtype=dtype)
            _fill_codes(layer)
            with jax.default_device(place):
                ours = moe_jax.nnx.MoE.from_weights(layer.export_weights())
                self.jax_layers[name] = ours.parameters(), ours.spec
            self.torch_layers[name] = layer.to(self.device)
        self._xs = {
            (name, count): torch.randn(count, D, generator=torch.Generator().manual_seed(count)).to(self.device, dtype)
            for name in SPECS
            for count in tokens
        }

    def cases(self) -> list[Case]:
        """All of them: quantised experts have no step."""
        return [
            Case(name, count, step)
            for name in SPECS
            for count in self.tokens
            for step in (False, True)
            if not (step and name == "mxfp4")
        ]

    def eager(self, case: Case) -> dict[str, int]:
        """torch, and the digests of the results by name."""
        layer, x = self.torch_layers[case.layer], self._xs[case.layer, case.tokens]
        if not case.step:
            with torch.no_grad():
                return _read({_name(case, "y"): layer(x)})
        leaf = x.clone().requires_grad_()
        parameters = {name: p for name, p in layer.named_parameters() if p.requires_grad}
        y = layer(leaf)
        gradients = torch.autograd.grad(
            (y.float() ** 2).sum(), [leaf, *parameters.values()], allow_unused=case.tokens == 0
        )
        named = zip(("dx", *(f"torch.{name}" for name in parameters)), gradients, strict=True)
        return _read({_name(case, "y"): y} | {_name(case, name): g for name, g in named if g is not None})

    def compiled(self, case: Case) -> dict[str, int]:
        """JAX, jitted."""
        parameters, spec = self.jax_layers[case.layer]
        x = jnp.from_dlpack(self._xs[case.layer, case.tokens])
        if not case.step:
            return _read({_name(case, "y"): torch.from_dlpack(_forward(parameters, x, spec))})
        y, of_parameters, of_x = _step(parameters, x, spec)
        leaves = jax.tree_util.tree_leaves_with_path(of_parameters)
        named = {_name(case, f"jax.{jax.tree_util.keystr(path)}"): torch.from_dlpack(leaf) for path, leaf in leaves}
        return _read({_name(case, "y"): torch.from_dlpack(y), _name(case, "dx"): torch.from_dlpack(of_x)} | named)

    def capture(self) -> None:
        """Graphs of every forward; while there are no threads: torch waits for the device, and XLA captures too."""
        for case in self.cases():
            if not case.step:
                graph, layer = torch.cuda.CUDAGraph(), self.torch_layers[case.layer]
                given = self._xs[case.layer, case.tokens].clone()
                with torch.no_grad(), torch.cuda.graph(graph):
                    y = layer(given)
                self._graphs[case] = graph, given, y

    def replayed(self, case: Case) -> dict[str, int]:
        """A captured forward: of one thread, as its memory is shared."""
        case = case._replace(step=False)
        graph, given, y = self._graphs[case]
        given.copy_(self._xs[case.layer, case.tokens])
        y.fill_(float("nan"))
        graph.replay()
        return _read({_name(case, "y"): y})


def _fill_codes(layer: moe_torch.MoE) -> None:
    """Quantised experts start as zeros: give them codes, and scales near one."""
    for name, buffer in layer.named_buffers():
        if name.endswith(".values"):
            buffer.random_(0, 256)
        elif name.endswith(".scales"):
            buffer.random_(121, 125)


@functools.partial(jax.jit, static_argnums=2)
def _forward(parameters: Any, x: jax.Array, spec: MoELayerSpec) -> jax.Array:
    return moe_jax.layers.forward(parameters, x, spec)


@functools.partial(jax.jit, static_argnums=2)
def _step(parameters: Any, x: jax.Array, spec: MoELayerSpec) -> tuple[Any, ...]:
    def loss(parameters: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = moe_jax.layers.forward(parameters, x, spec)
        return (y.astype(jnp.float32) ** 2).sum(), y

    gradients, y = jax.grad(loss, argnums=(0, 1), has_aux=True)(parameters, x)
    return y, *gradients


def _name(case: Case, array: str) -> str:
    # Without a gradient another plan may run: its y is a case of its own.
    return f"{case.layer}/{case.tokens}/{'step' if case.step else 'forward'}/{array}"


def _read(arrays: dict[str, torch.Tensor]) -> dict[str, int]:
    digests = torch.stack([digest(array) for array in arrays.values()]).tolist()
    return dict(zip(arrays, digests, strict=True))


def _used(device: torch.device) -> tuple[int, int]:
    """Bytes that the process holds, and that are taken on the device."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if device.type != "cuda":
        return resident, 0
    free, total = torch.cuda.mem_get_info(device)
    return resident, total - free


@contextlib.contextmanager
def _stream(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield


def run(soak: Soak, digests: Digests, seconds: float, seed: int) -> list[tuple[int, int]]:
    """One piece; returns samples of memory."""
    for case in soak.cases():
        digests.compare("first", soak.eager(case))
    kinds = [("torch", soak.eager), ("torch", soak.eager), ("jax", soak.compiled), ("jax", soak.compiled)]
    if soak.device.type == "cuda":
        soak.capture()
        kinds.append(("graph", soak.replayed))
    for case in soak.cases():
        digests.compare("first", soak.compiled(case))
    until, cases = time.monotonic() + seconds, soak.cases()

    def work(kind: str, call: Callable[[Case], dict[str, int]], number: int) -> None:
        draws = random.Random(f"{seed} {number}")
        try:
            with _stream(soak.device):
                while time.monotonic() < until and not digests.failures:
                    digests.compare(kind, call(draws.choice(cases)))
        except Exception:
            digests.fail(f"{kind}: {traceback.format_exc()}")

    threads = [threading.Thread(target=work, args=(*kind, number)) for number, kind in enumerate(kinds)]
    for thread in threads:
        thread.start()
    samples = [_used(soak.device)]
    while any(thread.is_alive() for thread in threads):
        time.sleep(min(_SAMPLE_SECONDS, seconds / 16))
        samples.append(_used(soak.device))
    for thread in threads:
        thread.join()
    return samples


def growth(samples: list[tuple[int, int]]) -> tuple[int, int]:
    """Bytes of process and device: the median of the last quarter less that of the second."""
    quarter = max(1, len(samples) // 4)
    early, late = samples[quarter : 2 * quarter] or samples, samples[-quarter:]
    process, device = (int(median(s[i] for s in late) - median(s[i] for s in early)) for i in (0, 1))
    return process, device


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--state", type=Path, default=Path("build/soak.json"), help="read if it is there, and written")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", help="numbers divided by commas")
    options = parser.parse_args(arguments)
    state = json.loads(options.state.read_text()) if options.state.exists() else {"digests": {}, "pieces": []}
    tokens = tuple(int(count) for count in options.tokens.split(",")) if options.tokens else TOKENS
    digests = Digests(state["digests"])
    samples = run(Soak(options.device, tokens), digests, options.seconds, seed=len(state["pieces"]))
    process, device = growth(samples)
    if process > RESIDENT or device > DEVICE:
        digests.fail(f"memory grew by {process >> 20} MiB in the process and by {device >> 20} MiB on the device")
    piece = {
        "provenance": provenance("tools.soak"),
        "calls": dict(digests.calls),
        "growth_bytes": {"process": process, "device": device},
        "failures": digests.failures,
    }
    print(json.dumps(piece, indent=1))
    state["pieces"].append(piece)
    options.state.parent.mkdir(parents=True, exist_ok=True)
    whole = options.state.with_suffix(".new")
    whole.write_text(json.dumps(state, indent=1))
    whole.replace(options.state)
    return 1 if digests.failures else 0


if __name__ == "__main__":
    sys.exit(main())
