"""Training of torch layers: every parameter and loss, programs, autocast, and routing that a trace decides."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from hypothesis import given
from torch._dynamo.testing import CompileCounterWithBackend

import moe_torch
from moe_core.layers import MoELayerSpec
from moe_core.ops.moe.reference.backward import moe_backward_stages
from moe_core.parity.tolerance import assert_close
from moe_core.specs.operands import MoEOperands, OutputGradients, TopK
from moe_torch import MoE, trace
from tests.support.layers import EVERYTHING, SPECS, D, draw_weights, draw_x, layer_cases
from tests.support.torch import REAL_KERNELS, require_equal, running_on, to_numpy, to_torch
from tests.support.torch_layers import stages, tensor
from tests.support.training.loop import Loop
from tests.support.training.tolerances import FP32
from tests.support.training.torch_layers import (
    gradients,
    layer_name,
    objective,
    other_routing,
    problem_of,
    trainable,
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def check_layer(name: str, engine: str) -> None:
    """Every gradient against autograd of a plain loop over tokens."""
    spec, x = SPECS[name], draw_x((6,))
    with running_on(engine) as device:
        layer = trainable(spec, device)
        found = gradients(layer, to_torch(x, device))
        with torch.no_grad():
            y, aux = layer(to_torch(x, device), return_aux=True)
    wanted = Loop(problem_of(spec, x, 2 * to_numpy(y)), to_numpy(aux.ids)).autograd(torch.float64)
    assert {layer_name(key) for key in wanted} == found.keys()
    for key, expected in wanted.items():
        rms = np.sqrt(np.square(expected).mean())
        assert_close(to_numpy(found[layer_name(key)]), expected, FP32, f"d_{key}", scale=rms)


@pytest.mark.parametrize("name", SPECS)
def test_every_preset(name: str) -> None:
    check_layer(name, "reference")


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_presets_on_real_kernels(name: str) -> None:
    check_layer(name, REAL_KERNELS)


@given(layer_cases())
def test_any_layer_has_the_gradients_of_the_reference(
    case: tuple[MoELayerSpec, tuple[int, ...], np.ndarray | None, int],
) -> None:
    """Any spec, shape and mask: the bits of the reference for the output's gradient, exact zeros included."""
    spec, shape, mask, seed = case
    weights, x = draw_weights(spec, seed), draw_x(shape, seed, d_model=spec.d_model)
    forward, rows = stages(weights, x, mask), x.reshape(-1, spec.d_model)
    upstream = draw_x(rows.shape[:1], seed + 1, d_model=spec.d_model)
    flat = None if mask is None else mask.reshape(-1)
    operands = MoEOperands(rows, weights.experts, weights.router, flat, shared=weights.shared)
    wanted = moe_backward_stages(OutputGradients(upstream), operands, weights.spec, forward)
    with running_on("reference"):
        layer, tokens = MoE.from_weights(weights), tensor(x).requires_grad_()
        layer(tokens, tensor(mask)).backward(tensor(upstream).view(tokens.shape))
    np.testing.assert_array_equal(to_numpy(tokens.grad).reshape(rows.shape), wanted["d_x"])
    for name, gradient in wanted.items():
        if name.startswith(("d_experts.", "d_shared.", "d_routing.")):
            own = layer.get_parameter(layer_name(name.removeprefix("d_"))).grad
            np.testing.assert_array_equal(to_numpy(own), gradient, err_msg=name)


def test_frozen_parts_get_nothing() -> None:
    x = to_torch(draw_x((5,)))
    with running_on("reference"):
        layer = trainable(EVERYTHING)
        everything = gradients(layer, x)
        layer.experts.requires_grad_(False)
        objective(layer, x.clone().requires_grad_()).backward()
    for name, parameter in layer.named_parameters():
        if name.startswith("experts."):
            assert parameter.grad is None, name
        else:
            require_equal(parameter.grad, everything[name], name)


def test_a_compiled_step_with_an_optimizer() -> None:
    """Forward, losses and backward in one graph for every number of tokens; the updates follow those of eager code."""
    counter = CompileCounterWithBackend("aot_eager")
    with running_on("reference"):
        eager = trainable(EVERYTHING)
        layer = copy.deepcopy(eager)
        step = torch.compile(objective, fullgraph=True, backend=counter)
        optimizers = [torch.optim.SGD(one.parameters(), 1e-3) for one in (eager, layer)]
        for number, num_tokens in enumerate((5, 9, 6, 33)):
            x = to_torch(draw_x((num_tokens,), number))
            mask = torch.arange(num_tokens) != 2
            for tensor_ in (x, mask):
                torch._dynamo.mark_dynamic(tensor_, 0)
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                step(layer, x, mask).backward()
            objective(eager, x, mask).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert counter.frame_count == 1
    for (name, one), (_, other) in zip(eager.named_parameters(), layer.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)


def test_weights_given_by_the_caller_learn_from_a_replayed_routing() -> None:
    """As in models whose router is their own: slot k of the caller gets the gradient of slot k of the trace."""
    weights, x = draw_weights(SPECS["mixtral"]), to_torch(draw_x((6,)))
    top_k, spec = SPECS["mixtral"].top_k, dataclasses.replace(weights.spec, router=None)
    routing, own = other_routing(6, top_k), other_routing(6, top_k)
    experts = to_torch(weights.experts)
    with running_on("reference"):

        def gradient(ids: np.ndarray, given: np.ndarray, *replayed: trace.LayerRouting) -> Any:
            weights_, ids_ = to_torch(given).requires_grad_(), to_torch(ids)
            if not replayed:
                output = moe_torch.moe(x, experts, TopK(ids_, weights_), spec).output
            else:
                with trace.replay(replayed):
                    output = moe_torch.moe(x, experts, TopK(ids_, weights_), spec).output
            return torch.autograd.grad(output.square().sum(), weights_)[0]

        found = gradient(own.ids[:, ::-1].copy(), own.weights + 1, routing)
        require_equal(found, gradient(routing.ids, routing.weights), "gradient of given weights")
    assert found.any() and x.shape[1] == D
