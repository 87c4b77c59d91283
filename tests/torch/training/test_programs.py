"""Training steps of the composed torch operator in compiled programs, checkpoints and CUDA graphs."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import moe_torch
from moe_core.specs import MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, RouterWeights
from moe_torch.operators.table import BACKWARD, TRAINING
from tests.support.strategies import hard_routing
from tests.support.torch import REAL_KERNELS, TOKEN_COUNTS, require_equal, running_on
from tests.support.training.loop import draw_problem
from tests.support.training.torch import SILU, Seen, Step, flow, routed_problem


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    step = Step(routed_problem())
    leaves = step.leaves
    with running_on("reference"):
        wanted = step.gradients()

        def forward(*values: Any) -> Any:
            return tuple(step.forward(dict(zip(leaves, values, strict=True))))[:4]

        with Seen() as seen:
            output, _, weights, logits = checkpoint(forward, *leaves.values(), use_reentrant=reentrant)
            total = flow(output, step.given["output"]) + flow(weights, step.given["weights"])
            (total + flow(logits, step.given["logits"])).backward()
        names = [name for name, _, _ in seen.calls]
    assert names == (["moe"] if reentrant else ["moe_training"]) + ["moe_training", "moe_backward"]
    for name in ("experts.down", "shared.gate", "experts.gate_up"):
        require_equal(leaves[name].grad, wanted[name], name)


def test_selective_checkpoint() -> None:
    """A policy can keep what the operator keeps and recompute the rest."""
    step, kept = Step(routed_problem()), [torch.ops.moebius.moe_training.router_weights]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    with running_on("reference"), Seen() as seen:
        x, down = step.leaves["x"], step.leaves["experts.down"]
        wanted = torch.autograd.grad(step.forward().output, (x, down), step.given["output"])
        seen.calls.clear()
        output = checkpoint(lambda x: step.forward({"x": x}).output, x, use_reentrant=False, context_fn=contexts)
        require_equal(torch.autograd.grad(output, (x, down), step.given["output"]), wanted, "selective checkpoint")
    assert [name for name, _, _ in seen.calls] == ["moe_training", "moe_backward"]


def test_kept_tensors_may_travel() -> None:
    """What is saved may be moved away and back, as offloading does."""
    step = Step(routed_problem())
    with running_on("reference"):
        wanted = step.gradients()
        with torch.autograd.graph.save_on_cpu():
            value = step.value()
        found = torch.autograd.grad(value, list(step.leaves.values()))
    require_equal(found, tuple(wanted.values()), "offloaded")


def compiled_step(backend: Any, engine: str, counts: tuple[int, ...]) -> None:
    spec = MoESpec(SILU, RouterSpec(2, renormalize=True))
    with running_on(engine) as device:
        random = torch.Generator().manual_seed(0)
        weights = [torch.randn(*shape, generator=random) for shape in ((5, 48, 64), (5, 32, 48), (48, 5))]
        gate_up, down, router = (weight.to(device).requires_grad_() for weight in weights)

        def step(x: Any) -> Any:
            found = moe_torch.moe(x, ExpertWeights(gate_up, down), RouterWeights(router), spec)
            return found.output.square().mean() + found.logits.square().mean() + found.weights[:, 0].sum()

        compiled = torch.compile(step, fullgraph=True, backend=backend)
        for number, num_tokens in enumerate(counts):
            x = torch.randn(num_tokens, 48, generator=random).to(device).requires_grad_()
            torch._dynamo.mark_dynamic(x, 0)
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                found = torch.autograd.grad(compiled(x), (x, gate_up, down, router))
            wanted = torch.autograd.grad(step(x), (x, gate_up, down, router))
            for name, one, other in zip(("x", "gate_up", "down", "router"), found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=f"{name}, {num_tokens} tokens")


def test_a_compiled_step_takes_any_number_of_tokens() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled_step(counter, "reference", TOKEN_COUNTS)
    assert counter.frame_count == 1


def test_a_compiled_step_on_real_kernels() -> None:
    compiled_step("aot_eager", REAL_KERNELS, (5, 8))


@pytest.mark.skipif(
    shutil.which("c++") is None, reason="inductor compiles for a CPU with c++, and this machine has none"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own imports
def test_a_step_compiled_by_inductor() -> None:
    compiled_step("inductor", "reference", (5, 9))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own imports
def test_a_step_compiled_by_inductor_on_a_gpu() -> None:
    compiled_step("inductor", "cuda", (5, 9, 300))


@pytest.mark.gpu
def test_a_captured_step_replays() -> None:
    """Forward and backward in one CUDA graph, which no synchronisation survives."""
    with running_on("cuda") as device:
        step = Step(routed_problem(dtype="bfloat16"), device)
        wanted = step.gradients()  # compiles and loads the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step.gradients()
        for gradient in found.values():
            gradient.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        require_equal(tuple(found.values()), tuple(wanted.values()), "replayed step")


def samples(device: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Operators of training with arguments, for every kind of routing."""
    problem = routed_problem()
    by_logits = routed_problem(from_logits=True)
    given = draw_problem(hard_routing("missing_ids"), MoESpec(SILU), poison=False)
    for one in (problem, by_logits, given):
        kind = type(one.routing)
        step = Step(one, device)
        with running_on("reference"), Seen() as seen:
            step.gradients()
        arguments, _ = seen.backward()
        forward = next(arguments for name, arguments, _ in seen.calls if name == "moe_training")
        for operator, found in ((TRAINING[kind], forward), (BACKWARD[kind], arguments)):
            # What compiled programs hold takes the first of the arguments that eager code's has.
            given = [found[argument.name] for argument in operator.overload._schema.arguments]
            tensors = [value.detach() if isinstance(value, torch.Tensor) else value for value in given]
            yield operator, tuple(tensors)


def test_opcheck() -> None:
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    with running_on("reference"):
        for operator, arguments in samples("cpu"):
            results = torch.library.opcheck(operator.overload, arguments, test_utils=utilities)
            assert set(results.values()) == {"SUCCESS"}, f"{operator.name}: {results}"
