"""The language model of train_flax.py with its experts on four devices, and the losses of one device beside.

    python examples/train_flax_parallel.py                  # one process with all GPUs, or four devices of the CPU
    python examples/train_flax_parallel.py --processes 2    # jax.distributed: two processes with two of these each

Devices of a CPU are parts of the host. Every device has the whole model but the experts, of which it has a part,
and a part of the batch. Losses differ from those of one device by rounding: sums over devices have another order.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import socket
import subprocess
import sys
import time

import jax
import language_model
import numpy as np
import train_flax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from language_model import Settings

DEVICES = 4
#: How far losses may be apart: Adam makes whole steps of differences in the last bit.
TOLERANCE = 1e-3


def parallel_model(settings: Settings, mesh: Mesh) -> train_flax.LanguageModel:
    """The model with the experts of every layer over the axis `ep`, and all else on every device."""
    model = train_flax.LanguageModel(settings)
    for block in model.blocks:
        block.moe.parallelize(mesh)
    whole = NamedSharding(mesh, P())
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Variable) and len(variable.get_value().sharding.device_set) < mesh.size:
            variable.set_value(jax.device_put(np.asarray(variable.get_value()), whole))
    return model


def run(settings: Settings) -> None:
    """Train on all devices, and in the first process on one of them too; print both."""
    began = time.perf_counter()
    mesh = jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(AxisType.Auto,))
    model, place = (
        parallel_model(settings, mesh),
        functools.partial(jax.device_put, device=NamedSharding(mesh, P("ep"))),
    )
    with jax.set_mesh(mesh):
        # Every step is waited for: XLA on CPUs has no more than a few programs with collectives at a time.
        losses = []
        for step, loss in enumerate(train_flax.steps(settings, model, place)):
            losses.append(float(loss))
            if jax.process_index() == 0:
                language_model.show(step, losses[-1], settings)
    if jax.process_index() != 0:
        return
    print(f"{jax.process_count()} processes, {mesh.size} devices, {time.perf_counter() - began:.1f} s with compilation")
    print("the same on one device:")
    with jax.default_device(jax.local_devices()[0]):
        expected, _ = train_flax.train(settings)
    apart = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
    print(f"losses of one device: at most {apart:.1e} apart")
    assert apart <= TOLERANCE * max(expected) and losses[-1] < losses[0]


def start(processes: int) -> None:
    """Start so many processes with the same arguments on the CPU, and wait for them."""
    with contextlib.closing(socket.socket()) as free:
        free.bind(("localhost", 0))
        place = f"localhost:{free.getsockname()[1]}"
    own = [sys.executable, *sys.argv, "--coordinator", place, "--process"]
    on_cpu = os.environ | {"JAX_PLATFORMS": "cpu"}
    children = [subprocess.Popen([*own, str(number)], env=on_cpu) for number in range(processes)]
    failed = [child.args for child in children if child.wait() != 0]
    assert not failed, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    language_model.add_options(parser)
    parser.add_argument("--processes", type=int, default=1, help="default: 1")
    parser.add_argument("--coordinator", help="where process 0 is; set by the program itself")
    parser.add_argument("--process", type=int, help="the number of this process; set by the program itself")
    options = parser.parse_args()
    if options.processes > 1 and options.process is None:
        start(options.processes)
        return
    # A CPU counts as one device unless told otherwise, before the first use of JAX.
    jax.config.update("jax_num_cpu_devices", DEVICES // options.processes)
    if options.process is not None:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    run(language_model.settings_from(options))


if __name__ == "__main__":
    main()
