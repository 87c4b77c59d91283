"""Two operands of one type cannot be mistaken for each other: every call names its arguments."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_torch.bridge import operator as bridge
from moe_torch.bridge.operator import Operator
from moe_torch.bridge.options import decode
from moe_torch.operators import exchange, grouped, pushed, requests, routes, stages, table


def operators() -> dict[str, Operator]:
    """Every operator that is called by name, not by the names of a backward's tensors."""
    values: list[Any] = []
    for module in (table, stages, exchange, grouped, pushed, routes):
        for value in vars(module).values():
            values += value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
    found = {one.name: one for one in values if isinstance(one, Operator) and hasattr(one, "call")}
    return found


OPERATORS = operators()


def test_every_operator_is_called_by_name_or_from_a_backward() -> None:
    namespace = {
        schema.name.removeprefix("moebius::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("moebius::")
    }
    called = {name.partition(".")[0] for name in OPERATORS}
    assert {name for name in namespace - called} == {
        name
        for name in namespace
        # `routed` keeps a routing for a trace, and `watched` counts for a monitor. Neither returns numbers of a layer.
        # Those of ranks take arrays with their names.
        if name in ("routed", "watched")
        or name.startswith(
            (
                "across_ranks",
                "moe_backward",
                "moe_quantized_backward",
                "moe_lora_backward",
                "experts_push_backward",
                "experts_push_quantized_backward",
            )
        )
    }


@pytest.mark.parametrize("name", OPERATORS)
def test_a_call_with_two_operands_swapped_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = OPERATORS[name]
    monkeypatch.setattr(Operator, "run", lambda *_: pytest.fail("the operator ran"))
    names = list(inspect.signature(operator.call).parameters)
    assert all(one.kind is one.KEYWORD_ONLY for one in inspect.signature(operator.call).parameters.values())
    values = [torch.ones(2) for _ in names]
    for first, second in itertools.combinations(range(len(names)), 2):
        swapped = list(values)
        swapped[first], swapped[second] = swapped[second], swapped[first]
        with pytest.raises(TypeError, match="positional argument"):
            operator.call(*swapped)
        with pytest.raises(TypeError, match="positional argument"):
            operator.call(*swapped[: second + 1], **dict(zip(names[second + 1 :], values[second + 1 :], strict=True)))
    with pytest.raises(TypeError, match="missing"):
        operator.call(**dict(zip(names[1:], values[1:], strict=True)))


@pytest.mark.parametrize("name", [name for name, one in OPERATORS.items() if not any("." in own for own in one.names)])
def test_arguments_are_in_the_order_of_the_schema_however_they_are_written(name: str) -> None:
    operator = OPERATORS[name]
    names = list(inspect.signature(operator.arguments).parameters)
    quantised = "quantized" in name
    for order in (names, names[::-1]):
        *tensors, text = operator.arguments(**{each: f"the {each}" for each in order})
        present = [tensor for tensor in tensors if tensor is not None]
        assert present == [f"the {each}" for each in names if each in operator.names]
        options = [f"the {each}" for each in names if each not in operator.names]
        assert list(decode(text))[: len(options)] == options
        assert len(decode(text)) == len(options) + quantised


def test_requests_name_what_could_be_swapped() -> None:
    x = torch.ones(2, 4)
    experts, routing = moe_torch.ExpertWeights(torch.ones(2, 4, 4), torch.ones(2, 2, 4)), moe_torch.TopK(x, x)
    spec = moe_torch.MoESpec(moe_torch.Activation("silu"))
    with pytest.raises(TypeError, match="positional argument"):
        requests.moe_request(x, experts, routing, spec, x, x)  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional argument"):
        bridge.call(stages.ROUTER, x, x, None, None)  # type: ignore[call-arg]
    with pytest.raises(moe_torch.InvalidInput, match="operands must be a MatmulOperands, got Tensor"):
        requests.matmul_request(x, None, None)  # type: ignore[arg-type]
    others: list[Any] = [None] * (len(stages.ROUTER.names) - 2)
    with pytest.raises(moe_torch.Unsupported, match="takes ordinary CPU and CUDA tensors, got Tensor"):
        stages.ROUTER._refuse_backend(x, None, *others, "")
    with pytest.raises(moe_torch.InvalidInput, match=r"x must be a torch\.Tensor, got None"):
        stages.ROUTER._refuse_backend(None, x, *others, "")
    for wrong in ((experts, x, routing), (routing, experts, x), (x, routing, experts)):
        with pytest.raises(moe_torch.InvalidInput, match="must be a"):
            requests.moe_request(*wrong, spec)
