"""The gradient of the composed torch operator: its values, what it computes and keeps, and where it works."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_core.ops.moe.names import result_names, saved_names
from moe_core.parity.tolerance import assert_close
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, OutputGradients, RouterWeights
from moe_torch.bridge.options import decode
from moe_torch.operators.kinds import MATRICES
from tests.support.strategies import HARD_ROUTINGS, hard_routing
from tests.support.torch import REAL_KERNELS, full_layer, on_engines, require_equal, running_on, to_numpy
from tests.support.training.loop import ROUTERS, Loop, Problem, draw_problem
from tests.support.training.tolerances import BF16_LOOP, FP32
from tests.support.training.torch import SILU, Seen, Step, routed_problem


def check(problem: Problem, engine: str = "reference", tolerance: Any = FP32) -> dict[str, Any]:
    """Compare every gradient with autograd of a plain loop over tokens."""
    with running_on(engine) as device:
        step = Step(problem, device)
        found, ids = step.gradients(), to_numpy(step.forward().ids)
    wanted = Loop(problem, ids).autograd(torch.float64)
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        leaf = step.leaves[name]
        assert (found[name].dtype, found[name].shape) == (leaf.dtype, leaf.shape), name
        rms = np.sqrt(np.square(expected).sum() / max(expected.size, 1))
        assert_close(to_numpy(found[name]), expected, tolerance, f"d_{name}", scale=rms)
    return found


@pytest.mark.parametrize("name", HARD_ROUTINGS)
def test_given_ids(name: str) -> None:
    found = check(draw_problem(hard_routing(name), MoESpec(Activation("swiglu_oai", limit=1.0))))
    for key, gradient in found.items():
        assert torch.isfinite(gradient).all(), key


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_routers(router: RouterSpec, from_logits: bool) -> None:
    check(routed_problem(router, from_logits=from_logits))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_kernels(dtype: str) -> None:
    check(routed_problem(dtype=dtype), REAL_KERNELS, FP32 if dtype == "float32" else BF16_LOOP)


def test_two_buffers_and_every_optional_array() -> None:
    layer, options = full_layer()
    output = np.random.default_rng(0).standard_normal(layer.x.shape).astype(np.float32)
    check(Problem(*layer, OutputGradients(output), **options))


@pytest.mark.parametrize("changes", [{"apply_router_weight_on_input": True}, {"out_dtype": "float16"}], ids=str)
def test_options(changes: dict[str, Any]) -> None:
    spec = MoESpec(SILU, **changes)
    problem = draw_problem(hard_routing("top_1"), spec, d_model=8, d_ff=8)
    rounded = problem.gradients.output.astype(np.float16).astype(np.float32)
    check(problem.replace(gradients=OutputGradients(rounded)))


def test_no_tokens() -> None:
    step = Step(draw_problem(hard_routing("no_tokens"), MoESpec(SILU)))
    with running_on("reference"):
        assert all(not gradient.any() for gradient in step.gradients().values())


@pytest.mark.parametrize("live", ["x", "experts.down", "experts.gate_up_bias", "routing.bias", "shared.gate"])
def test_only_what_is_asked_for_is_computed(live: str) -> None:
    """The plan of the backward writes the gradient of the one live tensor, with the bits it has among all."""
    problem = routed_problem()
    with running_on("reference"):
        everything = Step(problem).gradients()
        names = tuple(name for name in everything if name != live)
        step = Step(problem, frozen=names)
        with Seen() as seen:
            found = step.gradients()
        arguments, results = seen.backward()
    assert decode(arguments["options"])[1] == (f"d_{live}",) and len(results) == 1
    require_equal(found[live], everything[live], live)


def test_constants_ask_for_nothing() -> None:
    """A correction bias that requires a gradient gets none, and is no reason to keep anything."""
    step = Step(routed_problem())
    for leaf in step.leaves.values():
        leaf.requires_grad_(False)
    bias = step.tensors["routing.correction_bias"].requires_grad_()
    with running_on("reference"):
        with Seen() as seen:
            assert not step.forward().output.requires_grad
        assert [name for name, _, _ in seen.calls] == ["moe"]
        step.tensors["x"].requires_grad_()
        step.value().backward()
    assert bias.grad is None


def test_no_grad_runs_what_it_ran() -> None:
    """Without gradients the forward keeps nothing and gives the bits that training gives."""
    step = Step(routed_problem())
    with running_on("reference"):
        trained = step.forward()
        assert trained.output.requires_grad and trained.weights.requires_grad and trained.logits.requires_grad
        assert not (trained.ids.requires_grad or trained.tokens_per_expert.requires_grad)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context, Seen() as seen:
                plain = step.forward()
            assert [name for name, _, _ in seen.calls] == ["moe"]
            require_equal(tuple(item.detach() for item in trained), tuple(plain), str(context))


def test_what_is_kept() -> None:
    """Bytes per token as docs/user/training.md states them; parameters are saved where they lie."""
    spec = MoESpec(SILU, RouterSpec(4))
    T, D, F, E, K = 64, 32, 16, 8, 4
    x, logits = (torch.randn(T, D, dtype=torch.bfloat16, requires_grad=True), torch.randn(D, E, requires_grad=True))
    experts = ExpertWeights(torch.randn(E, D, 2 * F).bfloat16(), torch.randn(E, F, D).bfloat16())
    kept: dict[int, int] = {}
    own = {tensor.data_ptr() for tensor in (logits, experts.gate_up, experts.down)}

    def pack(tensor: Any) -> Any:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with running_on("reference"), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        moe_torch.moe(x, experts, RouterWeights(logits), spec)
    by_expert = (4 * E) + 4 * (E + 1) + 4
    assert sum(kept.values()) == T * (2 * D + 4 * K * F + 4 * E + 16 * K) + by_expert


def test_given_weights_may_change_after_the_forward() -> None:
    """The backward reads what the forward read: a copy of the ids and weights that were given."""
    step = Step(draw_problem(hard_routing("missing_ids"), MoESpec(SILU), poison=False), frozen=("routing.weights",))
    with running_on("reference"):
        wanted = step.gradients()
        value = step.value()
        step.tensors["routing.weights"].zero_()
        step.tensors["routing.ids"].fill_(-1)
        found = torch.autograd.grad(value, list(step.leaves.values()))
    require_equal(found, tuple(wanted.values()), "after a change in place")


@on_engines
def test_two_runs_are_bitwise_equal(engine: str) -> None:
    with running_on(engine) as device:
        step = Step(routed_problem(dtype="bfloat16"), device)
        require_equal(tuple(step.gradients().values()), tuple(step.gradients().values()), "second run")
        value = step.value()
        first, second = (torch.autograd.grad(value, list(step.leaves.values()), retain_graph=True) for _ in range(2))
        require_equal(first, second, "second backward of one forward")


@pytest.mark.parametrize("main_grad", [False, True])
def test_the_last_backward_overwrites_the_pre_activation(main_grad: bool) -> None:
    """And no other: those that keep the graph leave what was saved as it was."""
    with running_on(REAL_KERNELS) as device:
        problem = routed_problem()
        step = Step(dataclasses.replace(problem, spec=dataclasses.replace(problem.spec, main_grad=main_grad)), device)
        names = [*result_names(type(problem.routing)), *saved_names(step.problem.spec, None)]
        sums = {name: torch.zeros_like(step.leaves[name]) for name in MATRICES if name in step.leaves and main_grad}
        for name, total in sums.items():
            step.leaves[name].main_grad = total
        with Seen() as seen:
            value = step.value()
        (saved,) = [results[names.index("saved.pre_activation")] for name, _, results in seen.calls if "train" in name]
        before, version, found = saved.view(torch.int32).clone(), saved._version, []
        for kept in (True, True, False):
            for total in sums.values():
                total.zero_()
            value.backward(retain_graph=kept)
            gradients = [leaf.grad for name, leaf in step.leaves.items() if name not in sums]
            found.append([one.clone() for one in (*gradients, *sums.values())])
            for leaf in step.leaves.values():
                leaf.grad = None
            assert torch.equal(saved.view(torch.int32), before) == kept and (saved._version == version) == kept
        require_equal(tuple(found[1]), tuple(found[0]), "again")
        require_equal(tuple(found[2]), tuple(found[0]), "overwriting")


def test_gradients_accumulate() -> None:
    step = Step(routed_problem())
    with running_on("reference"):
        once = step.gradients()
        for _ in range(3):
            step.value().backward()
    for name, leaf in step.leaves.items():
        require_equal(leaf.grad, once[name] + once[name] + once[name], name)


@pytest.mark.parametrize("form", ["expanded", "transposed", "misaligned", "apart"])
def test_gradients_of_any_strides(form: str) -> None:
    """What flows back may be a view of anything."""
    step = Step(routed_problem())
    with running_on("reference"):
        output = step.forward().output
        wanted = step.given["output"]
        if form == "expanded":
            wanted = wanted[:1, :1].expand(output.shape)
            view = wanted
        elif form == "transposed":
            view = wanted.T.contiguous().T
        elif form == "misaligned":
            view = torch.cat([wanted.new_zeros(1), wanted.flatten()])[1:].view(output.shape)
        else:
            view = torch.stack([wanted, wanted], dim=2)[..., 0]
        leaves = [leaf for name, leaf in step.leaves.items() if name != "routing.bias"]
        first = torch.autograd.grad(output, leaves, wanted.contiguous().clone(), retain_graph=True)
        require_equal(torch.autograd.grad(output, leaves, view), first, form)


@pytest.mark.parametrize("only", ["weights", "logits"])
def test_losses_of_the_routing_alone(only: str) -> None:
    """Without a use of the output nothing reaches the experts."""
    step = Step(routed_problem())
    with running_on("reference"):
        getattr(step.forward(), only).square().sum().backward()
    for name, leaf in step.leaves.items():
        assert bool(leaf.grad.any()) == (name in ("x", "routing.weight", "routing.bias")), name


def test_functional_transforms() -> None:
    step = Step(routed_problem())
    with running_on("reference"):
        wanted = step.gradients()
        leaves = {name: leaf.detach() for name, leaf in step.leaves.items()}
        found = torch.func.grad(step.value)(leaves)
        value, pull = torch.func.vjp(lambda leaves: step.forward(leaves).output, leaves)
        output = step.forward().output
        only_output = torch.autograd.grad(output, list(step.leaves.values()), step.given["output"], allow_unused=True)
        pulled = pull(step.given["output"])[0]
    require_equal(value, output.detach(), "value of torch.func.vjp")
    for name, alone in zip(step.leaves, only_output, strict=True):
        require_equal(found[name], wanted[name], f"torch.func.grad of {name}")
        require_equal(pulled[name], alone, f"torch.func.vjp of {name}")


def test_second_derivatives_are_refused() -> None:
    """And both of what the message says instead works: constants, and a difference of two gradients."""
    step = Step(routed_problem())
    x = step.leaves["x"]

    def gradient(x: Any, **options: Any) -> Any:
        return torch.autograd.grad(step.forward({"x": x}).output.square().sum(), x, **options)[0]

    with running_on("reference"):
        with pytest.raises(moe_torch.Unsupported, match=r"has no second derivative; .*without create_graph=True"):
            gradient(x, create_graph=True).sum().backward()
        (gradient(x).square().sum() + step.forward().output.sum()).backward()
        assert x.grad is not None and x.grad.any()
        with pytest.raises(moe_torch.Unsupported, match=r"in torch.func, detach\(\) them"):
            torch.func.grad(lambda x: torch.func.grad(lambda x: step.forward({"x": x}).output.sum())(x).sum())(x)

        def loss(x: Any) -> Any:
            slope = torch.func.grad(lambda x: step.forward({"x": x}).output.sum())(x).detach()
            return (slope * x).sum()

        require_equal(torch.func.grad(loss)(x.detach()), gradient_of_sum(step, x), "detached gradients")
        v, h = torch.ones_like(x), 1e-3
        along = (gradient((x + h * v).detach().requires_grad_()) - gradient((x - h * v).detach().requires_grad_())) / (
            2 * h
        )
        assert torch.isfinite(along).all() and along.any()


def gradient_of_sum(step: Step, x: Any) -> Any:
    return torch.autograd.grad(step.forward({"x": x}).output.sum(), x)[0]


def test_transforms_over_gradients_are_refused() -> None:
    step = Step(routed_problem())
    x = step.leaves["x"].detach()
    with running_on("reference"), pytest.raises(moe_torch.Unsupported, match=r"inside of torch\.func\.vmap"):
        torch.func.vmap(torch.func.grad(lambda x: step.forward({"x": x}).output.sum()))(torch.stack([x, x]))
