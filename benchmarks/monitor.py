"""The cost of a monitor: steps of a training with and without it, in turn.

    python -m benchmarks.monitor --output build/monitor.json

Blocks of `--every` steps alternate. On a GPU their time is that of the wall, behind a wait for the device; on a CPU it
is the process's own time, in one thread for torch. `share` is the median of the blocks' differences over a block
without. `inside` is the share of the time that torch spends in the monitor's own functions, which other processes
disturb less.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.record import command, write_record
from moe_core.layers import MoELayerSpec
from moe_core.specs import RouterSpec

Block = Callable[[bool], None]


class Inside:
    """Seconds within functions."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.seconds = clock, 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            began = self.clock()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += self.clock() - began

        return run


def torch_block(spec: MoELayerSpec, layers: int, tokens: int, every: int, inside: Inside) -> tuple[Block, str]:
    """A function that trains `every` steps, with a monitor or without, and the device."""
    import torch

    from moe_torch import MoE
    from moe_torch.monitor import Monitor
    from moe_torch.operators.watched import Watch

    for owner, name in ((Watch, "add"), (Monitor, "step")):
        setattr(owner, name, inside.timed(getattr(owner, name)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[MoE.from_spec(spec, device=device, dtype=dtype) for _ in range(layers)])
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, foreach=True)
    x = torch.randn(tokens, spec.d_model, device=device, dtype=dtype)

    def block(watched: bool) -> None:
        monitor = Monitor(model, lambda values, step: None, every=every) if watched else None
        for _ in range(every):
            model(x).square().mean().backward()
            optimizer.step()
            if monitor is not None:
                monitor.step()
            optimizer.zero_grad()
        if monitor is not None:
            monitor.close()
        if device == "cuda":
            torch.cuda.synchronize()

    return block, torch.cuda.get_device_name() if device == "cuda" else device


def jax_block(spec: MoELayerSpec, layers: int, tokens: int, every: int, inside: Inside) -> tuple[Block, str]:
    """The same in JAX."""
    import jax
    import jax.numpy as jnp

    from moe_jax import layers as functions
    from moe_jax.monitor import Monitor, gradient_norms, observe

    device = jax.devices()[0]
    dtype = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    keys = jax.random.split(jax.random.key(0), layers)
    model = {str(i): functions.initialize(spec, key, param_dtype=dtype) for i, key in enumerate(keys)}
    x = jax.random.normal(jax.random.key(1), (tokens, spec.d_model), dtype)

    def loss(model: Any, x: Any) -> Any:
        for i in range(layers):
            x = functions.forward(model[str(i)], x, spec)
        return jnp.square(x.astype(jnp.float32)).mean()

    def updated(model: Any, gradients: Any) -> Any:
        return jax.tree.map(lambda array, gradient: array - 1e-4 * gradient.astype(array.dtype), model, gradients)

    @jax.jit
    def plain(model: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(model, x)
        return updated(model, gradients), value

    @functools.partial(jax.jit, static_argnames="due")
    def observed(model: Any, x: Any, due: bool) -> Any:
        (_, seen), gradients = jax.value_and_grad(observe(loss), has_aux=True)(model, x)
        return updated(model, gradients), (seen, gradient_norms(gradients, due))

    def block(watched: bool) -> None:
        current, monitor = model, Monitor(lambda values, step: None, every=every)
        for _ in range(every):
            if watched:
                current, seen = observed(current, x, monitor.due)
                monitor.step(*seen)
            else:
                current, _ = plain(current, x)
        jax.block_until_ready(current)

    return block, device.device_kind


def measure(block: Block, repeats: int, inside: Inside) -> dict[str, float]:
    """Milliseconds of a block of each kind, and the monitor's share."""
    clock = inside.clock
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(-1, repeats):
        inside.seconds = 0.0 if turn == 0 else inside.seconds
        for watched in (False, True):
            began = clock()
            block(watched)
            if turn >= 0:
                times[watched].append(1e3 * (clock() - began))
    plain, watched = (statistics.median(times[kind]) for kind in (False, True))
    pairs = [one / other - 1 for one, other in zip(times[True], times[False], strict=True)]
    return {
        "plain_ms": plain, "watched_ms": watched, "share": statistics.median(pairs),
        "inside": 1e3 * inside.seconds / sum(times[True]),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both frameworks."""
    sizes = {"d_model": 256, "d_ff": 256, "experts": 16, "top_k": 4, "layers": 4, "tokens": 1024}
    parser = command(__doc__, **sizes, every=10, repeats=7, frameworks="torch,jax")
    options = parser.parse_args(arguments)
    spec = MoELayerSpec(options.d_model, options.d_ff, options.experts, options.top_k, RouterSpec(renormalize=True))
    results: dict[str, Any] = {}
    for name in options.frameworks.split(","):
        make = {"torch": torch_block, "jax": jax_block}[name]
        inside = Inside(time.perf_counter)
        block, device = make(spec, options.layers, options.tokens, options.every, inside)
        inside.clock = time.process_time if device == "cpu" else time.perf_counter
        results[name] = measure(block, options.repeats, inside)
        shares = [100 * results[name][kind] for kind in ("share", "inside")]
        print(f"{name} on {device}: {shares[0]:.2f} % of a step more, {shares[1]:.2f} % inside of the monitor")
        results[name]["device"] = device
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    write_record(options.output, {"settings": settings, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
