"""`recompute` in torch and JAX: the gradients' bits, and no pre-activation kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_core.specs.moe import MoESpec


def recomputing(spec: Any) -> Any:
    return dataclasses.replace(spec, recompute=True)


@pytest.mark.parametrize("engine", ["reference", "real kernels"])
@pytest.mark.parametrize("routed_from", ["x", "logits", "ids"])
def test_torch(engine: str, routed_from: str) -> None:
    pytest.importorskip("torch")
    from tests.support.strategies import hard_routing
    from tests.support.torch import REAL_KERNELS, require_equal, running_on
    from tests.support.training.loop import draw_problem
    from tests.support.training.torch import SILU, Seen, Step, routed_problem

    if routed_from == "ids":
        problem = draw_problem(hard_routing("missing_ids"), MoESpec(SILU), poison=False)
    else:
        problem = routed_problem(from_logits=routed_from == "logits")
    with running_on(REAL_KERNELS if engine != "reference" else engine) as device:
        wanted = Step(problem, device).gradients()
        with Seen() as seen:
            found = Step(problem.replace(spec=recomputing(problem.spec)), device).gradients()
    for name, gradient in wanted.items():
        require_equal(found[name], gradient, name)
    arguments, _ = seen.backward()
    assert arguments["saved_pre_activation"] is None and arguments["saved_shared_pre_activation"] is None


@pytest.mark.parametrize("engine", ["reference", "real kernels"])
@pytest.mark.parametrize("case", [0, 2, 5, 6])
def test_jax(engine: str, case: int) -> None:
    jax = pytest.importorskip("jax")
    pytest.importorskip("jax_tvm_ffi")
    from tests.support.jax import REAL_KERNELS, running_on, to_jax
    from tests.support.training.jax import CASES, make, op_loss, plans_in, require_equal, split

    _, spec, kind, options = CASES[case]
    again = recomputing(spec)
    with running_on(REAL_KERNELS if engine != "reference" else engine):
        arrays, put = split(to_jax(make(spec, kind, **options)))
        wanted = jax.jit(jax.grad(lambda arrays: op_loss(put(arrays), spec)))(arrays)
        step = jax.jit(jax.grad(lambda arrays: op_loss(put(arrays), again)))
        require_equal(step(arrays), wanted)
        rerun = jax.grad(jax.checkpoint(lambda arrays: op_loss(put(arrays), again)))
        require_equal(jax.jit(rerun)(arrays), wanted)
        kept = [buffer.name for plan in plans_in(step.lower(arrays)) for buffer in plan.outputs]
    assert "saved.row_of_slot" in kept and not [name for name in kept if name.endswith("pre_activation")]


def test_main_grad_is_refused_in_jax() -> None:
    pytest.importorskip("jax_tvm_ffi")
    from moe_jax import Unsupported
    from tests.support.jax import running_on, to_jax
    from tests.support.training.jax import SOFTMAX, make, run

    with running_on("reference"), pytest.raises(Unsupported, match=r"spec\.main_grad must be False in JAX"):
        run(to_jax(make(SOFTMAX)), dataclasses.replace(SOFTMAX, main_grad=True))
