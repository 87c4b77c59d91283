"""Gradients through torch and through JAX are equal bits: the same plans, on whatever device real kernels run here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs both frameworks")
torch = pytest.importorskip("torch", reason="needs both frameworks")

import moe_torch
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import RouterLogits, RouterWeights, TopK, map_arrays
from tests.support import jax as jax_support
from tests.support import torch as torch_support
from tests.support.training.jax import CASES, Problem, make, run, split

#: bf16 and fp16 on the cases whose bundles differ most.
DTYPES = [*((case, "float32") for case in CASES), (CASES[1], "bfloat16"), (CASES[2], "float16"), (CASES[4], "bfloat16")]
on_cases = pytest.mark.parametrize(
    ("spec", "kind", "options", "dtype"),
    [pytest.param(*case[1:], dtype, id=f"{case[0]} {dtype}") for case, dtype in DTYPES],
)


def flowing(result: Any, kind: type) -> dict[str, np.ndarray]:
    """What flows into the outputs of a forward, by name: the same numbers for both frameworks, in float32."""
    names = {TopK: ("output",), RouterLogits: ("output", "weights"), RouterWeights: ("output", "weights", "logits")}
    random = np.random.default_rng(11)
    return {name: random.standard_normal(getattr(result, name).shape).astype(np.float32) for name in names[kind]}


def through_jax(problem: Problem, spec: MoESpec) -> dict[str, np.ndarray]:
    problem = jax_support.to_jax(problem)
    arrays, put = split(problem)
    names = flowing(run(problem, spec), type(problem.routing))

    def outputs(arrays: dict[str, Any]) -> dict[str, Any]:
        result = run(put(arrays), spec)
        return {name: getattr(result, name) for name in names}

    results, pull = jax.vjp(jax.jit(outputs), arrays)
    (found,) = pull({name: jax.numpy.asarray(one, results[name].dtype) for name, one in names.items()})
    return jax_support.to_numpy(found)


def through_torch(problem: Problem, spec: MoESpec, device: Any) -> dict[str, np.ndarray]:
    arrays, put = split(problem)
    leaves = {name: torch_support.to_torch(array, device).requires_grad_() for name, array in arrays.items()}

    def on_device(value: Any) -> Any:
        if isinstance(value, torch.Tensor) or value is None:
            return value
        return torch_support.to_torch(value, device) if isinstance(value, np.ndarray) else map_arrays(value, on_device)

    result = run(Problem(*map(on_device, put(leaves))), spec, moe_torch)
    outputs = flowing(result, type(problem.routing))
    gradients = [torch.tensor(one, device=device).to(getattr(result, name).dtype) for name, one in outputs.items()]
    found = torch.autograd.grad([getattr(result, name) for name in outputs], list(leaves.values()), gradients)
    return {name: torch_support.to_numpy(one) for name, one in zip(leaves, found, strict=True)}


@pytest.mark.parametrize("engine", jax_support.ENGINES)
@on_cases
def test_gradients_are_equal_bits(engine: str, spec: MoESpec, kind: type, options: dict[str, Any], dtype: str) -> None:
    problem = make(spec, kind, dtype, **options)
    with jax_support.running_on(engine):
        theirs = through_jax(problem, spec)
    with torch_support.running_on(engine) as device:
        ours = through_torch(problem, spec, device)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert gradient.dtype == theirs[name].dtype and gradient.any(), name
        assert gradient.tobytes() == theirs[name].tobytes(), f"{name}: {np.sum(gradient != theirs[name])} differ"
