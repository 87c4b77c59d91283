"""Operators of the torch front-end without a gradient refuse to be asked for one; none answers with zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_torch.operators import stages
from tests.support.torch import NUM_EXPERTS, torch_layer

#: torch's forward-mode differentiation scripts its own decompositions when first used.
forward_mode_warns = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
REFUSED = r"x requires a gradient, and scale_rows defines none.*activation and reduce do;.*no_grad\(\) or pass x.detach"
FORWARD_MODE = r"x has a tangent, and moe_torch defines no forward-mode derivatives; use reverse mode"

pytestmark = pytest.mark.usefixtures("fresh_reference_engine_of_torch")


LAYER = torch_layer()


def product(x: Any) -> Any:
    return moe_torch.scale_rows(x, x.new_ones(len(x), 1))


def whole(x: Any) -> Any:
    return moe_torch.moe(x, LAYER.experts, LAYER.routing, LAYER.spec).output


def test_tensors_that_require_gradients_are_refused() -> None:
    x = torch_layer().x.requires_grad_()
    with pytest.raises(moe_torch.Unsupported, match=REFUSED):
        product(x)
    with pytest.raises(moe_torch.Unsupported, match=REFUSED):
        product(torch_layer().x * torch.ones(1, requires_grad=True))


def test_the_fixes_work() -> None:
    x = torch_layer().x.requires_grad_()
    expected = product(torch_layer().x)
    with torch.no_grad():
        assert torch.equal(product(x), expected)
    with torch.inference_mode():
        assert torch.equal(product(x), expected)
    detached = product(x.detach())
    assert torch.equal(detached, expected) and not detached.requires_grad


def test_parameters_are_refused_by_name() -> None:
    x, weights = torch_layer().x, torch.nn.Parameter(torch.ones(9, 1))
    refused = r"weights requires a gradient, and scale_rows defines none.*pass weights\.detach\(\)"
    with pytest.raises(moe_torch.Unsupported, match=refused):
        moe_torch.scale_rows(x, weights)
    with torch.no_grad():
        moe_torch.scale_rows(x, weights)


def test_operators_called_directly_refuse_too() -> None:
    x = torch_layer().x.requires_grad_()
    text = moe_torch.bridge.options.encode()
    with pytest.raises(moe_torch.Unsupported, match="x requires a gradient, and scale_rows defines none"):
        torch.ops.moebius.scale_rows(x, torch.ones(9, 1), text)
    with torch.no_grad():
        torch.ops.moebius.scale_rows(x, torch.ones(9, 1), text)


@forward_mode_warns
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_functional_transforms_are_refused(transform: Callable[..., Any]) -> None:
    with pytest.raises(moe_torch.Unsupported, match="requires a gradient"):
        transform(lambda x: product(x).sum())(torch_layer().x)


@forward_mode_warns
@pytest.mark.parametrize("program", [product, whole])
def test_forward_mode_is_refused(program: Callable[[Any], Any]) -> None:
    x = torch_layer().x
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(moe_torch.Unsupported, match=FORWARD_MODE):
            program(dual)
        assert torch.equal(program(x), program(x.clone()))
    with pytest.raises(moe_torch.Unsupported, match=FORWARD_MODE):
        torch.func.jacfwd(lambda x: program(x).sum())(x)


def test_compiled_programs_refuse() -> None:
    x = torch_layer().x.requires_grad_()
    with pytest.raises(Exception, match="x requires a gradient"):
        torch.compile(product, fullgraph=True, backend="aot_eager")(x)
    with torch.no_grad():
        torch.compile(product, fullgraph=True, backend="aot_eager")(x)


@pytest.mark.parametrize("program", [product, whole])
def test_compiled_transforms_are_refused(program: Callable[[Any], Any]) -> None:
    gradient = torch.func.grad(lambda x: program(x).sum())
    with pytest.raises(Exception, match=r"x requires a gradient|no gradient inside of .* a compiled transform"):
        torch.compile(gradient, fullgraph=True, backend="aot_eager")(torch_layer().x)


def test_integer_operators_do_not_mind_grad_mode() -> None:
    ids = torch.zeros(3, 2, dtype=torch.int32)
    assert torch.is_grad_enabled()
    moe_torch.make_layout(ids, NUM_EXPERTS)
    assert stages.MAKE_LAYOUT.overload is torch.ops.moebius.make_layout.default


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_batched_gradients_are_refused_with_the_reason() -> None:
    layer, x = moe_torch.MoE(16, 24, 4, 2), torch.randn(5, 16, requires_grad=True)
    calls = (
        lambda: torch.autograd.grad(layer(x), x, torch.randn(3, 5, 16), is_grads_batched=True),
        lambda: torch.autograd.grad(layer.router(x), x, torch.randn(3, 5, 4), is_grads_batched=True),
        lambda: torch.autograd.functional.jacobian(layer, x, vectorize=True),
    )
    for call in calls:
        with pytest.raises(moe_torch.Unsupported, match="takes one gradient of its result at a time, got a batch"):
            call()
    with pytest.raises(moe_torch.Unsupported, match="has no forward mode, as"):
        torch.func.hessian(lambda x: layer(x).sum())(x.detach())


def test_mutation_of_saved_tensors_may_be_allowed() -> None:
    layer, x = moe_torch.MoE(16, 24, 4, 2), torch.randn(5, 16, requires_grad=True)
    parameters = [x, *layer.parameters()]
    wanted = torch.autograd.grad(layer(x).square().sum(), parameters)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        loss = layer(x).square().sum()
        with torch.no_grad():
            layer.experts.down.mul_(2)
        found = torch.autograd.grad(loss, parameters)
    for new, old in zip(found, wanted, strict=True):
        torch.testing.assert_close(new, old)
