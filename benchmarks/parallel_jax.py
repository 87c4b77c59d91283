"""JAX layers on all GPUs of a host beside one: any mesh, vmap, experts without jit, and decoding few tokens.

    python -m benchmarks.parallel_jax --output record.json
    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m benchmarks.parallel_jax --device cpu

Every row says whether the output has the bits of one device, and how far it is from it. Times are medians of calls with
the host's part, until the output is there. benchmarks/README.md describes the record.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.options import chosen_names
from benchmarks.provenance import provenance
from benchmarks.record import reason_of
from benchmarks.shapes import ALL_SHAPES
from moe_core.layers import MoELayerSpec
from moe_jax import layers
from moe_jax.parallel import ExchangeSpec, ExpertAxis

#: How far an output may be from one device's, of its norm.
_NEAR = 1e-2
Row = dict[str, Any]


class Jax:
    """A layer on one device, and its devices."""

    def __init__(self, options: Any) -> None:
        self.options, self.devices = options, jax.devices(options.device)[:4]
        shape = ALL_SHAPES[options.shape]
        sizes = (shape.d_model, shape.d_ff, shape.num_experts, shape.top_k)
        self.spec, self.tokens = MoELayerSpec(*(sizes if options.device == "cuda" else (64, 32, 8, 2))), options.tokens
        with jax.default_device(self.devices[0]):
            self.parameters = layers.initialize(self.spec, jax.random.key(0), param_dtype=jnp.bfloat16)

    def x(self, *shape: int) -> jax.Array:
        with jax.default_device(self.devices[0]):
            return jax.random.normal(jax.random.key(1), (*shape, self.spec.d_model), jnp.bfloat16)

    def mesh(self, kind: AxisType = AxisType.Auto, **axes: int) -> Any:
        devices = self.devices[: int(np.prod(list(axes.values())))]
        return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=devices)

    def forward(self, **options: Any) -> Callable[..., jax.Array]:
        return lambda parameters, x: layers.forward(parameters, x, self.spec, **options)

    def on_mesh(self, mesh: Any, experts: bool = False) -> Any:
        if experts:
            return jax.device_put(self.parameters, layers.expert_sharding(self.spec, mesh))
        return jax.device_put(self.parameters, NamedSharding(mesh, P()))

    def us(self, call: Callable[..., Any], *arguments: Any) -> float:
        jax.block_until_ready(call(*arguments))
        times = []
        for _ in range(self.options.repeats):
            start = time.perf_counter()
            jax.block_until_ready(call(*arguments))
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)

    def row(self, name: str, mesh: Any, given: Any, here: Any, call: Any = None, alone: Any = None) -> Row:
        """call: on the mesh with `given`. alone: on one device with `here`."""
        plain = jax.jit(self.forward())
        call, alone = call or plain, alone or plain
        with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
            y = np.asarray(call(*given), np.float32)
            us = self.us(call, *given)
        wanted = np.asarray(alone(*here), np.float32)
        error = float(np.linalg.norm(y - wanted) / np.linalg.norm(wanted))
        found = {"case": name, "axes": dict(mesh.shape) if mesh is not None else {}, "tokens": wanted[..., 0].size}
        found |= {"equal": bool(np.array_equal(y, wanted)), "error": error, "us": us, "alone_us": self.us(alone, *here)}
        return found | ({} if error <= _NEAR else {"red": f"{error:.1e} from one device"})


def meshes(of: Jax) -> list[Callable[[], Row]]:
    """A plain layer, its batch split over meshes of one and two axes, with Auto and Explicit axes."""
    found: list[Callable[[], Row]] = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        for axes, split in (
            ({"data": 4}, P("data")),
            ({"data": 2, "model": 2}, P(("data", "model"))),
            ({"data": 1}, P()),
        ):

            def row(kind: AxisType = kind, axes: dict[str, int] = axes, split: P = split) -> Row:
                mesh, x = of.mesh(kind, **axes), of.x(4 * of.tokens)
                given = of.on_mesh(mesh), jax.device_put(x, NamedSharding(mesh, split))
                return of.row(f"a batch split, {kind.name}", mesh, given, (of.parameters, x))

            found.append(row)
    return found


def vmap(of: Jax) -> list[Callable[[], Row]]:
    """vmap over sequences, on a mesh that splits them, and on one device."""

    def row() -> Row:
        mesh, x = of.mesh(data=4), of.x(4, of.tokens)
        call = jax.jit(jax.vmap(of.forward(), (None, 0)))
        given = of.on_mesh(mesh), jax.device_put(x, NamedSharding(mesh, P(None, "data")))
        return of.row("vmap", mesh, given, (of.parameters, x), call, call)

    return [row]


def experts(of: Jax) -> list[Callable[[], Row]]:
    """Experts on all devices, in jit and without, beside a data axis too."""
    found: list[Callable[[], Row]] = []
    for mode in ("padded", "all_to_all", "all_gather"):
        for eager in (False, True):

            def row(mode: str = mode, eager: bool = eager) -> Row:
                tokens = 64 if mode == "all_gather" else of.tokens
                mesh, x = of.mesh(ep=4), of.x(4 * tokens)
                call = of.forward(expert_axis=ExpertAxis("ep", ExchangeSpec(mode)))
                given = of.on_mesh(mesh, True), jax.device_put(x, NamedSharding(mesh, P("ep")))
                name = f"experts, {mode}, {'without jit' if eager else 'jit'}"
                return of.row(name, mesh, given, (of.parameters, x), call if eager else jax.jit(call))

            found.append(row)
    return found


def decode(of: Jax) -> list[Callable[[], Row]]:
    """Fewer tokens than devices."""
    found: list[Callable[[], Row]] = []
    for tokens in (1, 2, 4):

        def row(tokens: int = tokens) -> Row:
            mesh, x = of.mesh(ep=4), of.x(tokens)
            call = jax.jit(of.forward(expert_axis=ExpertAxis("ep", ExchangeSpec("all_gather"))))
            given = of.on_mesh(mesh, True), jax.device_put(x, NamedSharding(mesh, P()))
            return of.row("decode", mesh, given, (of.parameters, x), call)

        found.append(row)
    return found


CASES = {one.__name__: one for one in (meshes, vmap, experts, decode)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print. Returns 1 if an output is far from one device's or a case fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="(default: %(default)s)")
    parser.add_argument("--shape", default="qwen3", choices=list(ALL_SHAPES), help="on GPUs (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=4096, help="of a device (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--output", type=Path, help="write the record here, after every row")
    options = parser.parse_args(arguments)
    cases = chosen_names(parser, "--cases", options.cases, list(CASES))
    of, rows = Jax(options), []
    record = {"schema": 1, "provenance": provenance("benchmarks.parallel_jax"), "devices": len(of.devices)}
    for name in cases:
        for case in CASES[name](of):
            try:
                rows.append(case())
            except Exception as error:
                rows.append({"case": name, "red": reason_of(error)})
            print(json.dumps(rows[-1]), flush=True)
            if options.output is not None:
                options.output.write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n")
    return int(any("red" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
