"""Compiled programs take ids and weights as routers give them, without casts."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_core.specs.operands import TopK
from tests.support.torch import NUM_EXPERTS, require_equal, running_on, torch_layer


@pytest.mark.parametrize("tokens", [1, 9])
def test_compiled_programs_cast_nothing(tokens: int) -> None:
    calls: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        calls.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    with running_on("reference"), torch.no_grad():
        x, experts, _, spec = torch_layer(num_tokens=tokens)
        spec = moe_torch.MoESpec(spec.activation)
        ids = torch.arange(2 * tokens).view(tokens, 2) % NUM_EXPERTS
        own = TopK(ids, torch.rand(tokens, 2).bfloat16())
        compiled = torch.compile(lambda x, routing: moe_torch.moe(x, experts, routing, spec).output, backend=backend)
        plain = TopK(ids.int(), own.weights.float())
        require_equal(compiled(x, own), moe_torch.moe(x, experts, plain, spec).output, "output")
    assert [name for name in calls if "getitem" not in name] == ["moebius.moe.top_k"]
