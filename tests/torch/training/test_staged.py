"""A layer out of ops has the gradients of the composed op, to the bit, where `wide` adds up what flows into x."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import moe_torch
from tests.support.torch import D_MODEL, NUM_EXPERTS, on_engines, require_equal, running_on, torch_layer

Leaves = dict[str, Any]


def leaves_of(device: Any, dtype: str) -> tuple[Leaves, Any]:
    layer = torch_layer(device, dtype=dtype, num_tokens=19)
    leaves = {"x": layer.x, "gate_up": layer.experts.gate_up, "down": layer.experts.down}
    leaves["router"] = layer.routing.weight
    return {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}, layer.spec


def composed(leaves: Leaves, spec: Any) -> Any:
    experts = moe_torch.ExpertWeights(leaves["gate_up"], leaves["down"])
    return moe_torch.moe(leaves["x"], experts, moe_torch.RouterWeights(leaves["router"]), spec).output


def staged(leaves: Leaves, spec: Any, wide: bool) -> Any:
    """What expert parallelism does: route, send rows to the experts, which see a slot each, and add up at home."""
    x = leaves["x"]
    given = {"wide": x.float()} if wide else {}
    logits = moe_torch.router(x, leaves["router"], spec=spec.logits_spec(), **given)
    ids, weights = moe_torch.route(logits, spec.router)
    layout = moe_torch.make_layout(ids, NUM_EXPERTS)
    rows = moe_torch.gather_rows(x, layout, **given)
    slots = layout.slot_of_row.long()
    experts = moe_torch.ExpertWeights(leaves["gate_up"], leaves["down"])
    routing = moe_torch.TopK(ids.view(-1)[slots][:, None], weights.view(-1)[slots][:, None])
    alone = dataclasses.replace(spec, router=None)
    return moe_torch.reduce(moe_torch.moe(rows, experts, routing, alone).output, layout, order="row")


def gradients(layer: Any, device: Any, dtype: str) -> Leaves:
    leaves, spec = leaves_of(device, dtype)
    y = layer(leaves, spec)
    generator = torch.Generator().manual_seed(0)
    y.backward(torch.randn(19, D_MODEL, generator=generator).to(y))
    return {"y": y.detach()} | {f"d_{name}": leaf.grad for name, leaf in leaves.items()}


@on_engines
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stages_have_the_gradients_of_the_composed_op(engine: str, dtype: str) -> None:
    with running_on(engine) as device:
        expected = gradients(composed, device, dtype)
        found = gradients(lambda leaves, spec: staged(leaves, spec, True), device, dtype)
        for name, value in expected.items():
            require_equal(found[name], value, name)
        twice = gradients(lambda leaves, spec: staged(leaves, spec, False), device, dtype)
        assert dtype == "float32" or not torch.equal(twice["d_x"], expected["d_x"]), "two casts are one"


def test_programs() -> None:
    """Compiled, a changing number of tokens too, and as a functional transform."""
    with running_on("reference") as device:
        leaves, spec = leaves_of(device, "bfloat16")
        wanted = torch.autograd.grad(staged(leaves, spec, True).float().square().sum(), list(leaves.values()))
        torch._dynamo.reset()
        compiled = torch.compile(lambda leaves: staged(leaves, spec, True), fullgraph=True, backend="aot_eager")
        found = torch.autograd.grad(compiled(leaves).float().square().sum(), list(leaves.values()))
        pulled = torch.func.grad(lambda leaves: staged(leaves, spec, True).float().square().sum())(
            {name: leaf.detach() for name, leaf in leaves.items()}
        )
        for name, want, got in zip(leaves, wanted, found, strict=True):
            require_equal(got, want, f"compiled {name}")
            require_equal(pulled[name], want, f"torch.func.grad of {name}")


def test_what_wide_must_be() -> None:
    layer = torch_layer()
    with running_on("reference"):
        layout = moe_torch.make_layout(torch.zeros(9, 1, dtype=torch.int32), 1)
        with pytest.raises(moe_torch.InvalidInput, match="wide must be float32, got float16; cast it"):
            moe_torch.gather_rows(layer.x, layout, wide=layer.x.half())
        with pytest.raises(moe_torch.InvalidInput, match=r"wide must be \[9, 48\], got \(8, 48\)"):
            moe_torch.router(layer.x, layer.routing.weight, wide=layer.x[:8])
