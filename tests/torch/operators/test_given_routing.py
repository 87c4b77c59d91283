"""ids and weights as routers give them: results, gradients and traces of casting them first, in fewer operations."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_core.specs.operands import TopK
from moe_torch import trace
from tests.support.torch import NUM_EXPERTS, on_engines, require_equal, running_on, torch_layer

FAR = [2**32 + 3, -(2**40), 2**31, -1, NUM_EXPERTS]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
on_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _compile_anew() -> None:
    torch._dynamo.reset()


def given(device: Any, dtype: Any, tokens: int = 9, top_k: int = 2) -> tuple[Any, Any, Any, TopK, TopK]:
    """x, experts, spec, then int64 ids and weights in a dtype, then the same cast by torch, far ids to -2."""
    layer = torch_layer(device, num_tokens=tokens, top_k=top_k)
    torch.manual_seed(0)
    ids = torch.stack([torch.randperm(NUM_EXPERTS)[:top_k] for _ in range(tokens)]) if tokens else torch.zeros(0, top_k)
    ids = ids.long().to(device)
    if tokens > 1:
        ids.view(-1)[: len(FAR)] = torch.tensor(FAR, device=device)
    weights = torch.rand(tokens, top_k, device=device).to(dtype)
    plain = TopK(ids.clamp(-2, NUM_EXPERTS).int(), weights.float())
    spec = moe_torch.MoESpec(layer.spec.activation)
    return layer.x, layer.experts, spec, TopK(ids, weights), plain


@on_engines
@on_dtypes
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (1, 1), (9, 2), (9, NUM_EXPERTS)])
def test_results_are_those_of_casting_first(engine: str, dtype: Any, tokens: int, top_k: int) -> None:
    with running_on(engine) as device:
        x, experts, spec, own, plain = given(device, dtype, tokens, top_k)
        found, wanted = (moe_torch.moe(x, experts, one, spec) for one in (own, plain))
        launched = moe_torch.prepare_moe(experts, TopK, spec)(x, own)
        layouts = [moe_torch.make_layout(one.ids, NUM_EXPERTS) for one in (own, plain)]
    require_equal(found.output, wanted.output, "output")
    require_equal(launched, wanted.output, "launcher")
    require_equal(found.tokens_per_expert, wanted.tokens_per_expert, "tokens_per_expert")
    require_equal(found.invalid_ids, wanted.invalid_ids, "invalid_ids")
    assert found.ids is own.ids and found.weights is own.weights
    assert int(wanted.invalid_ids) == (4 if tokens > 1 else 0)
    for name in ("group_sizes", "group_start", "slot_of_row", "row_of_slot", "invalid_ids"):
        require_equal(getattr(layouts[0], name), getattr(layouts[1], name), name)


def loss(x: Any, experts: Any, spec: Any, ids: Any, weights: Any) -> Any:
    output = moe_torch.moe(x, experts, TopK(ids, weights), spec).output
    return (output * torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output)).sum()


@on_engines
@on_dtypes
@pytest.mark.parametrize("way", ["eager", "func", "compiled"])
def test_gradients_are_those_of_casting_first(engine: str, dtype: Any, way: str) -> None:
    with running_on(engine) as device:
        x, experts, spec, own, plain = given(device, dtype)

        def gradients(function: Any, ids: Any, cast: Any) -> Any:
            def of(x: Any, weights: Any) -> Any:
                return function(x, experts, spec, ids, cast(weights))

            if way == "func":
                return torch.func.grad(of, (0, 1))(x, own.weights)
            leaves = [tensor.clone().requires_grad_() for tensor in (x, own.weights)]
            return torch.autograd.grad(of(*leaves), leaves)

        function = torch.compile(loss, fullgraph=True, backend="aot_eager") if way == "compiled" else loss
        found = gradients(function, own.ids, lambda weights: weights)
        wanted = gradients(loss, plain.ids, lambda weights: weights.float())
    assert found[1].dtype == dtype and found[1].abs().sum() > 0
    for name, one, other in zip(("x", "weights"), found, wanted, strict=True):
        require_equal(one, other, name)


@pytest.mark.parametrize("tokens", [1, 9])
def test_compiled_programs_cast_nothing(tokens: int) -> None:
    calls: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        calls.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    with running_on("reference"), torch.no_grad():
        x, experts, spec, own, plain = given("cpu", torch.bfloat16, tokens)
        compiled = torch.compile(lambda x, routing: moe_torch.moe(x, experts, routing, spec).output, backend=backend)
        require_equal(compiled(x, own), moe_torch.moe(x, experts, plain, spec).output, "output")
    assert [name for name in calls if "getitem" not in name] == ["moebius.moe.top_k"]


@pytest.mark.parametrize("training", [False, True])
def test_traces_hold_int32_and_fp32(training: bool) -> None:
    with running_on("reference"):
        x, experts, spec, own, _ = given("cpu", torch.bfloat16)
        own = TopK(own.ids.clamp(-1, NUM_EXPERTS - 1), own.weights.requires_grad_(training))
        with trace.capture() as recording:
            wanted = moe_torch.moe(x, experts, own, spec).output
        (layer,) = recording.trace()
        assert (layer.ids.dtype, layer.weights.dtype) == ("int32", "float32")
        with trace.replay(recording.trace()):
            other = TopK(torch.zeros_like(own.ids), torch.zeros_like(own.weights).requires_grad_(training))
            found = moe_torch.moe(x, experts, other, spec).output
        require_equal(found.detach(), wanted.detach(), "replayed")
        if training:
            ((gradient,), (expected,)) = (
                torch.autograd.grad(output.sum(), weights)
                for output, weights in ((found, other.weights), (wanted, own.weights))
            )
            require_equal(gradient, expected, "gradient")


def test_other_dtypes_are_refused() -> None:
    with running_on("reference"):
        x, experts, spec, own, _ = given("cpu", torch.bfloat16)
        for routing, message in (
            (TopK(own.ids.byte(), own.weights), "ids must be int32 or int64, got uint8; cast it to int32"),
            (TopK(own.ids, own.ids), "weights must be float32 or bfloat16 or float16, got int64; cast it to float32"),
        ):
            with pytest.raises(moe_torch.InvalidInput, match=rf"routing\.{message}"):
                moe_torch.moe(x, experts, routing, spec)
