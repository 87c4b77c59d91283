"""Trains the same language model in PyTorch and in Flax, and says by how much they differ and where that begins.

    python examples/compare_training.py --output record.json
    python -m benchmarks.figures curves record.json --output curves.svg

First the ops of one forward, in order. On its own input an op is fed by the framework's own ops before it, and the
first one that gives other bits is where the frameworks part. On the same input it is fed with the bits that Flax
computed: there the Mixture-of-Experts layers must give the same bits, outputs and gradients. Then the losses of both,
step by step. The second command draws the losses and needs matplotlib.
"""

from __future__ import annotations

import os

# Torch and JAX share the GPU here: JAX must not take most of its memory for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import language_model
import numpy as np
import torch
import train_flax
import train_torch
from language_model import Settings

EXPERTS = "mixture of experts"
#: How far losses may be apart, relative to a loss above 1. A difference of one float32 bit may become one of the last
#: bit that experts compute with, where that are 8 or 11 bits, or another expert for a token that is between two: among
#: many choices of experts some are, whatever the dtype, and Adam makes whole steps of small differences.
TOLERANCE, TOLERANCE_AMONG_MANY = 1e-3, 3e-2
MANY_CHOICES = 25_000  # tokens times layers times steps


class Difference(NamedTuple):
    """Largest absolute differences of one op between the frameworks; 0 means equal bits.

    own_input: of the outputs in the two forwards; same_input: of the outputs for equal inputs; gradient: of the
    input's gradients (for the experts also the weights'), for equal inputs and equal gradients of the output.
    """

    op: str
    own_input: float
    same_input: float
    gradient: float


class Call(NamedTuple):
    """One op of a forward: its name, the module and the method that compute it, what it was given, what came out."""

    op: str
    module: Any
    method: str
    arguments: tuple[Any, ...]
    result: Any


def ops(model: Any, inputs: Any, targets: Any, run: Callable[..., Any]) -> list[Call]:
    """The ops of a forward, in order; the model may be either framework's, since they name their parts alike."""
    calls: list[Call] = []

    def call(op: str, module: Any, method: str, *arguments: Any) -> Any:
        calls.append(Call(op, module, method, arguments, run(method, module, *arguments)))
        return calls[-1].result

    x = call("embedding", model, "embed", inputs)
    for index, block in enumerate(model.blocks):
        normed = call(f"block {index}: norm before attention", block.attention_norm, "__call__", x)
        x = x + call(f"block {index}: attention", block.attention, "__call__", normed)
        normed = call(f"block {index}: norm before experts", block.moe_norm, "__call__", x)
        x = x + call(f"block {index}: {EXPERTS}", block, "experts", normed)
    x = call("norm before the head", model.norm, "__call__", x)
    call("cross entropy", model, "cross_entropy", x, targets)
    return calls


def run_in_torch(method: str, module: Any, *arguments: Any) -> torch.Tensor:
    """The op's output; experts also return their losses, which are left out here."""
    result = getattr(module, method)(*arguments)
    return result[0] if isinstance(result, tuple) else result


@functools.partial(jax.jit, static_argnums=0)
def run_in_flax(method: str, module: Any, *arguments: Any) -> jax.Array:
    """The same in one compiled program."""
    result = getattr(module, method)(*arguments)
    return result[0] if isinstance(result, tuple) else result


def gradients_in_torch(call: Call, x: Any, upstream: np.ndarray) -> dict[str, np.ndarray]:
    """Of the op's first argument x and, for experts, of every weight of their block (zeros outside of the experts)."""
    leaf = to_torch(x).requires_grad_()
    y = run_in_torch(call.method, call.module, leaf, *call.arguments[1:])
    weights = dict(call.module.named_parameters()) if call.method == "experts" else {}
    found = torch.autograd.grad(y, [leaf, *weights.values()], to_torch(upstream), materialize_grads=True)
    return {name: to_numpy(gradient) for name, gradient in zip(("x", *weights), found, strict=True)}


def gradients_in_flax(call: Call, upstream: np.ndarray) -> dict[str, np.ndarray]:
    """The same, by the same names."""
    of_module, of_x = pull_in_flax(call.method, call.module, jnp.asarray(upstream), *call.arguments)
    weights = of_module.weights() if call.method == "experts" else {}
    return {"x": to_numpy(of_x), **weights}


@functools.partial(jax.jit, static_argnums=0)
def pull_in_flax(method: str, module: Any, upstream: jax.Array, x: jax.Array, *others: Any) -> tuple[Any, jax.Array]:
    """(a module that holds gradients in the place of weights, the gradient of x)."""
    return jax.vjp(lambda module, x: run_in_flax(method, module, x, *others), module, x)[1](upstream)


def distance(ours: Any, theirs: Any) -> float:
    """The largest absolute difference; NaN counts as infinitely far from everything."""
    one, other = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    if one.tobytes() == other.tobytes():
        return 0.0
    # Numbers that compare equal, as both zeros do, may still be different bits.
    return float(np.nan_to_num(np.abs(one - other), nan=np.inf).max()) or float(np.finfo(np.float32).tiny)


def to_numpy(array: Any) -> np.ndarray:
    return array.detach().cpu().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)


def to_torch(array: Any) -> torch.Tensor:
    array = np.array(to_numpy(array))
    return torch.from_numpy(array.astype(np.int64) if array.dtype == np.int32 else array).to(train_torch.device())


def compare_ops(settings: Settings) -> list[Difference]:
    """One row for each op of the first step's forward."""
    in_torch, in_flax = train_torch.LanguageModel(settings).to(train_torch.device()), train_flax.LanguageModel(settings)
    inputs, targets = next(language_model.batches(settings))
    tokens = train_torch.on_device(inputs), train_torch.on_device(targets)
    pairs = zip(
        ops(in_torch, *tokens, run_in_torch),
        ops(in_flax, jnp.asarray(inputs), jnp.asarray(targets), run_in_flax),
        strict=True,
    )
    rows, random = [], np.random.default_rng(2)
    for ours, theirs in pairs:
        x, result = theirs.arguments[0], to_numpy(theirs.result)
        same = run_in_torch(ours.method, ours.module, to_torch(x), *ours.arguments[1:])
        gradient = 0.0
        if ours.op != "embedding":  # tokens have no gradient
            upstream = random.standard_normal(result.shape).astype(np.float32)
            found, wanted = gradients_in_torch(ours, x, upstream), gradients_in_flax(theirs, upstream)
            gradient = max(distance(found[name], wanted[name]) for name in found)
        rows.append(
            Difference(ours.op, distance(to_numpy(ours.result), result), distance(to_numpy(same), result), gradient)
        )
    return rows


def show_ops(rows: Sequence[Difference]) -> None:
    """Print the table of ops."""
    print(f"{'op':36}{'own input':>12}{'same input':>12}{'gradient':>12}")
    for row in rows:
        values = "".join(f"{value:12.1e}" if value else f"{'equal':>12}" for value in row[1:])
        print(f"{row.op:36}{values}")
    first = next((row.op for row in rows if row.own_input), None)
    print("every op of the forward: equal bits" if first is None else f"first op that gives other bits: {first}")


def show_losses(ours: Sequence[float], theirs: Sequence[float]) -> None:
    """Print both losses and their difference, at most twenty steps and the last one."""
    every = -(-len(ours) // 20)
    print(f"{'step':>4}{'torch':>14}{'flax':>14}{'difference':>14}")
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if step % every == 0 or step == len(ours) - 1:
            print(f"{step:4}{one:14.8f}{other:14.8f}{abs(one - other):14.1e}")


def require_alike(rows: Sequence[Difference], ours: Sequence[float], theirs: Sequence[float], tolerance: float) -> None:
    """Raise AssertionError unless experts are bitwise equal on equal inputs, both losses fell, and they coincide."""
    experts = [row for row in rows if EXPERTS in row.op]
    apart = [row.op for row in experts if row.same_input or row.gradient]
    assert experts and not apart, f"other bits for equal inputs: {apart}"
    assert ours[-1] < ours[0] and theirs[-1] < theirs[0], "a loss did not fall"
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert abs(one - other) <= tolerance * max(1.0, abs(one)), (
            f"step {step}: losses {one} and {other} differ too much"
        )


def tolerance_of(settings: Settings) -> float:
    """How far the losses of such a training may be apart; see TOLERANCE."""
    choices = settings.batch * settings.length * settings.layers * settings.steps
    return TOLERANCE if settings.dtype == "float32" and choices <= MANY_CHOICES else TOLERANCE_AMONG_MANY


def make_record(
    settings: Settings, rows: Sequence[Difference], losses: dict[str, list[float]], weights: float
) -> dict[str, Any]:
    """Everything measured, as JSON holds it. weights: the largest difference after the last step."""
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else "CPU, Moebius' NumPy reference",
        "jax_platform": jax.default_backend(),
        "versions": {name: metadata.version(name) for name in ("torch", "jax", "flax", "optax", *["triton"] * gpu)},
        "settings": dataclasses.asdict(settings) | {"text": settings.text.name},
        "ops": [row._asdict() for row in rows],
        "first_divergent_op": next((row.op for row in rows if row.own_input), None),
        "losses": losses,
        "max_weight_difference": weights,
    }


def main() -> None:
    """Compare, print, write what was asked for, and fail where they are not alike."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    language_model.add_options(parser)
    parser.add_argument("--output", type=pathlib.Path, help="write the record to this JSON file")
    options = parser.parse_args()
    settings = language_model.settings_from(options)
    rows = compare_ops(settings)
    show_ops(rows)
    print("training in torch")
    ours, our_weights = train_torch.train(settings)
    print("training in Flax")
    theirs, their_weights = train_flax.train(settings)
    show_losses(ours, theirs)
    weights = max(distance(our_weights[name], array) for name, array in their_weights.items())
    furthest = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
    equal = sum(one == other for one, other in zip(ours, theirs, strict=True))
    print(f"losses: at most {furthest:.1e} apart, equal in {equal} of {len(ours)} steps")
    print(f"weights after the last step: at most {weights:.1e} apart")
    record = make_record(settings, rows, {"torch": ours, "flax": theirs}, weights)
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    require_alike(rows, ours, theirs, tolerance_of(settings))


if __name__ == "__main__":
    main()
