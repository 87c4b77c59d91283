"""No operator of the torch front-end defines a gradient: asking for one is refused, never answered with zeros."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_torch import operators
from tests.torch_support import NUM_EXPERTS, running_on, torch_layer

#: torch's forward-mode differentiation scripts its own decompositions when first used.
forward_mode_warns = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
REFUSED = r"x requires a gradient.*none; call them under torch.no_grad\(\) or pass x.detach\(\)"


@pytest.fixture(autouse=True)
def reference_engine() -> Iterator[None]:
    torch._dynamo.reset()
    with running_on("reference"):
        yield


LAYER = torch_layer()


def product(x: Any) -> Any:
    return moe_torch.router(x, LAYER.routing.weight)


def whole(x: Any) -> Any:
    return moe_torch.moe(x, LAYER.experts, LAYER.routing, LAYER.spec).output


PROGRAMS = {"router": product, "moe": whole}
on_programs = pytest.mark.parametrize("program", list(PROGRAMS.values()), ids=list(PROGRAMS))


@on_programs
def test_tensors_that_require_gradients_are_refused(program: Callable[[Any], Any]) -> None:
    x = torch_layer().x.requires_grad_()
    with pytest.raises(moe_torch.Unsupported, match=REFUSED):
        program(x)
    with pytest.raises(moe_torch.Unsupported, match=REFUSED):
        program(torch_layer().x * torch.ones(1, requires_grad=True))


@on_programs
def test_the_fixes_work(program: Callable[[Any], Any]) -> None:
    x = torch_layer().x.requires_grad_()
    expected = program(torch_layer().x)
    with torch.no_grad():
        assert torch.equal(program(x), expected)
    with torch.inference_mode():
        assert torch.equal(program(x), expected)
    detached = program(x.detach())
    assert torch.equal(detached, expected) and not detached.requires_grad


def test_parameters_are_refused_by_name() -> None:
    layer = torch_layer()
    experts = dataclasses.replace(layer.experts, down=torch.nn.Parameter(layer.experts.down))
    with pytest.raises(moe_torch.Unsupported, match=r"experts\.down requires a gradient.*experts\.down\.detach\(\)"):
        moe_torch.moe(layer.x, experts, *layer[2:])
    with torch.no_grad():
        moe_torch.moe(layer.x, experts, *layer[2:])


def test_operators_called_directly_refuse_too() -> None:
    x = torch_layer().x.requires_grad_()
    text = moe_torch.options.encode()
    with pytest.raises(moe_torch.Unsupported, match=REFUSED):
        torch.ops.moebius.scale_rows(x, torch.ones(9, 1), text)
    with torch.no_grad():
        torch.ops.moebius.scale_rows(x, torch.ones(9, 1), text)


@forward_mode_warns
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd])
def test_functional_transforms_are_refused(transform: Callable[..., Any]) -> None:
    with pytest.raises(moe_torch.Unsupported, match="requires a gradient"):
        transform(lambda x: whole(x).sum())(torch_layer().x)


@forward_mode_warns
def test_forward_mode_is_refused() -> None:
    x = torch_layer().x
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(moe_torch.Unsupported, match=REFUSED):
            product(dual)
        assert torch.equal(product(x), product(x.clone()))


@on_programs
def test_compiled_programs_refuse(program: Callable[[Any], Any]) -> None:
    x = torch_layer().x.requires_grad_()
    with pytest.raises(Exception, match="x requires a gradient"):
        torch.compile(program, fullgraph=True, backend="aot_eager")(x)
    with torch.no_grad():
        torch.compile(program, fullgraph=True, backend="aot_eager")(x)


def test_compiled_transforms_are_refused() -> None:
    gradient = torch.func.grad(lambda x: product(x).sum())
    with pytest.raises(Exception, match="x requires a gradient"):
        torch.compile(gradient, backend="aot_eager")(torch_layer().x)


def test_integer_operators_do_not_mind_grad_mode() -> None:
    ids = torch.zeros(3, 2, dtype=torch.int32)
    assert torch.is_grad_enabled()
    moe_torch.make_layout(ids, NUM_EXPERTS)
    assert operators.MAKE_LAYOUT.overload is torch.ops.moebius.make_layout.default
