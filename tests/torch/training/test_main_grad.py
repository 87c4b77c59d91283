"""Gradients added in fp32 to `weight.main_grad`, beside gradients in `.grad`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint

import moe_torch
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.common.rounding import round_to
from moe_core.ops.moe.backward import plan_training
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, MoEOperands, RouterWeights
from moe_torch import MoE
from moe_torch.operators.kinds import MATRICES
from moe_torch.operators.table import BACKWARD_INTO
from tests.support.layers import EVERYTHING, SPECS, draw_x
from tests.support.torch import on_engines, require_equal, running_on, to_numpy, to_torch
from tests.support.training.torch import Seen, Step, routed_problem
from tests.support.training.torch_layers import layer_name, objective, trainable


def main_grad_step(device: Any = "cpu", dtype: str = "float32", **changes: Any) -> Step:
    """A step whose matrices hold a main_grad full of ones."""
    problem = routed_problem(dtype=dtype)
    spec = dataclasses.replace(problem.spec, main_grad=True, **changes)
    step = Step(problem.replace(spec=spec), device)
    for name in MATRICES:
        if name in step.leaves:
            step.leaves[name].main_grad = torch.ones(step.leaves[name].shape, device=device)
    return step


@on_engines
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_added_in_float32(engine: str, dtype: str) -> None:
    """Twice over: the buffer holds ones and both gradients, which were rounded to nothing below fp32."""
    with running_on(engine) as device:
        wanted = Step(routed_problem(dtype=dtype), device).gradients()
        step = main_grad_step(device, dtype, recompute=True)
        buffers = {name: leaf.main_grad for name, leaf in step.leaves.items() if name in MATRICES}
        versions = {name: buffer._version for name, buffer in buffers.items()}
        for _ in range(2):
            step.value().backward()
    assert buffers.keys() == {"experts.gate_up", "experts.down", "shared.gate_up", "shared.down"}
    for name, leaf in step.leaves.items():
        if name not in MATRICES:
            require_equal(leaf.grad, wanted[name] + wanted[name], name)
            continue
        assert leaf.grad is None and leaf.main_grad is buffers[name], name
        assert buffers[name]._version == versions[name] + 2
        gradient, expected = (to_numpy(buffers[name]) - 1) / 2, to_numpy(wanted[name]).astype(np.float32)
        steps = 2.0**-8 if dtype == "bfloat16" else 0.0
        scale = np.abs(expected).max() + 1
        np.testing.assert_allclose(gradient, expected, rtol=steps, atol=4 * 2.0**-23 * scale, err_msg=name)
    if dtype == "bfloat16":
        assert (gradient != round_to(gradient, "bfloat16").astype(np.float32)).any(), "nothing was rounded to bf16"


def test_a_backward_for_others_adds_nothing() -> None:
    """autograd.grad and backward(inputs=...) leave alone what they were not asked for, and return what they were."""
    with running_on("reference"):
        step = main_grad_step()
        wanted, value = Step(routed_problem()).gradients(), step.value()
        weight = step.leaves["experts.down"]
        (d_x,) = torch.autograd.grad(value, step.leaves["x"], retain_graph=True)
        require_equal(d_x, wanted["x"], "x")
        value.backward(inputs=[step.leaves["x"]], retain_graph=True)
        (returned,) = torch.autograd.grad(value, weight, retain_graph=True)
        require_equal(returned, wanted["experts.down"], "experts.down")
        for name in ("experts.gate_up", "experts.down"):
            assert (step.leaves[name].main_grad == 1).all(), name
        value.backward()
    np.testing.assert_allclose(to_numpy(weight.main_grad) - 1, to_numpy(wanted["experts.down"]), rtol=1e-4, atol=1e-5)


def test_only_what_holds_a_main_grad_is_kept_alive() -> None:
    with running_on("reference"):
        step = main_grad_step()
        node = step.forward().output.grad_fn
    assert set(node.holders) == {"experts.gate_up", "experts.down", "shared.gate_up", "shared.down"}


def test_plans_made_ahead_add_too() -> None:
    """What `warmup` compiles and `explain` shows is what a step runs."""
    experts = ExpertWeights(ArraySpec((4, 16, 32), "bfloat16"), ArraySpec((4, 16, 16), "bfloat16"))
    routing = RouterWeights(ArraySpec((16, 4), "bfloat16"))
    operands = MoEOperands(ArraySpec((8, 16), "bfloat16"), experts, routing)
    spec = MoESpec(Activation("silu"), RouterSpec(2), main_grad=True)
    _, *backwards = plan_training(operands, spec, Target("cuda", 90, 132))
    for plan in backwards:
        assert {buffer.name for buffer in plan.inputs if buffer.name.startswith("into.")} == {
            "into.experts.gate_up", "into.experts.down",
        }  # fmt: skip


def test_frozen_matrices_and_layers_get_nothing() -> None:
    x = to_torch(draw_x((5,)))
    with running_on("reference"):
        plain = trainable(EVERYTHING)
        layer = MoE.from_spec(dataclasses.replace(EVERYTHING, main_grad=True))
        layer.load_state_dict(plain.state_dict())
        layer.experts.down.requires_grad_(False)
        matrices = {layer_name(name) for name in MATRICES} - {"experts.down"}
        for name, parameter in layer.named_parameters():
            if name in matrices:
                parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
        objective(plain, x).backward()
        with Seen() as seen:
            objective(
                lambda *arguments, **options: checkpoint(layer, *arguments, **options, use_reentrant=False), x
            ).backward()
    assert [name for name, _, _ in seen.calls][-1] == "moe_backward_into"
    wanted = dict(plain.named_parameters())
    for name, parameter in layer.named_parameters():
        if name == "experts.down":
            assert parameter.grad is None
        elif name in matrices:
            assert parameter.grad is None
            require_equal(parameter.main_grad, wanted[name].grad, name)
        else:
            require_equal(parameter.grad, wanted[name].grad, name)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (None, r"experts\.gate_up must have the attribute main_grad, torch\.float32 \(.*\) on cpu.*got None"),
        (
            torch.zeros(3),
            r"experts\.gate_up\.main_grad must be torch\.float32 \(.*\) on cpu, got torch\.float32 \(3,\)",
        ),
        ("bfloat16", r"experts\.gate_up\.main_grad must be torch\.float32 .*, got torch\.bfloat16"),
        ("meta", r"experts\.gate_up\.main_grad must be torch\.float32 .*, got torch\.float32 .* on meta"),
        ("transposed", r"experts\.gate_up\.main_grad must be contiguous"),
        ("gradient", r"experts\.gate_up\.main_grad must be contiguous.*requires_grad=True"),
    ],
)
def test_wrong_buffers(buffer: Any, message: str) -> None:
    step = main_grad_step()
    leaf = step.leaves["experts.gate_up"]
    made = {
        "bfloat16": torch.zeros_like(leaf, dtype=torch.bfloat16),
        "meta": torch.zeros_like(leaf, device="meta"),
        "transposed": torch.zeros_like(leaf.mT.contiguous()).mT,
        "gradient": torch.zeros_like(leaf, requires_grad=True),
    }
    leaf.main_grad = made.get(buffer) if isinstance(buffer, str) else buffer
    with running_on("reference"):
        with pytest.raises(moe_torch.InvalidInput, match=message):
            step.forward()
        with torch.no_grad():
            step.forward()


def test_compiled_and_transformed_steps_are_refused() -> None:
    x = to_torch(draw_x((4,)))
    with running_on("reference"):
        layer = MoE.from_spec(dataclasses.replace(SPECS["mixtral"], main_grad=True))
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match="main_grad=True adds to buffers in place"):
            compiled(x)
        parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
        with pytest.raises(moe_torch.Unsupported, match=r"a tensor of torch\.func; train in eager code"):
            torch.func.grad(lambda one: torch.func.functional_call(layer, one, (x,)).sum())(parameters)
        with torch.no_grad():
            require_equal(compiled(x), layer(x), "compiled inference")


def test_opcheck() -> None:
    """The schema says what is written to."""
    step = main_grad_step()
    with running_on("reference"):
        with Seen() as seen:
            step.value().backward()
        arguments, _ = next((one, results) for name, one, results in seen.calls if name == "moe_backward_into")
        tensors = [value.detach() if isinstance(value, torch.Tensor) else value for value in arguments.values()]
        operator = BACKWARD_INTO[type(step.problem.routing)]
        utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
        results = torch.library.opcheck(operator.overload, tuple(tensors), test_utils=utilities)
    assert set(results.values()) == {"SUCCESS"}, results
