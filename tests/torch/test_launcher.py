"""`prepare_moe`: the bits and the errors of `moe`, with the weights bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile

import moe_torch
from moe_core.base.recent import Recent
from moe_torch import RouterLogits, RouterSpec, TopK, prepare_moe
from moe_torch.bridge import eager
from moe_torch.operators import table as operators
from tests.support.torch import (
    D_FF,
    D_MODEL,
    REAL_KERNELS,
    full_layer,
    on_engines,
    require_equal,
    running_on,
    to_torch,
    torch_layer,
)

_LAYER: Any = torch_layer()
X, EXPERTS, ROUTING, SPEC = _LAYER

pytestmark = pytest.mark.usefixtures("fresh_reference_engine_of_torch")


def misaligned(tensor: Any) -> Any:
    """The same values one element behind the start of an allocation."""
    storage = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return storage[1:].view(tensor.shape).copy_(tensor)


@on_engines
def test_every_number_of_tokens(engine: str) -> None:
    with running_on(engine) as device:
        layer: Any = torch_layer(device)
        launcher = prepare_moe(layer.experts, layer.routing, layer.spec)
        for tokens in (9, 1, 0, 5, 9):
            x = torch_layer(device, num_tokens=tokens, seed=tokens).x
            mask = torch.arange(tokens, device=device) % 3 > 0
            require_equal(launcher(x), moe_torch.moe(x, *layer[1:]).output, f"{tokens} tokens")
            expected = moe_torch.moe(x, *layer[1:], token_mask=mask).output
            require_equal(launcher(x, token_mask=mask), expected, f"{tokens} tokens, masked")


@on_engines
def test_routing_brought_by_each_call(engine: str) -> None:
    with running_on(engine) as device:
        layer: Any = torch_layer(device)
        expected = moe_torch.moe(*layer)
        from_logits = prepare_moe(layer.experts, RouterLogits, layer.spec)
        by_choice = prepare_moe(layer.experts, TopK, dataclasses.replace(layer.spec, router=None))
        mask = torch.arange(9, device=device) < 4
        for _ in range(2):
            require_equal(from_logits(layer.x, RouterLogits(expected.logits)), expected.output, "logits")
            require_equal(by_choice(layer.x, TopK(expected.ids, expected.weights)), expected.output, "ids")
        masked = by_choice(layer.x, TopK(expected.ids, expected.weights), token_mask=mask)
        require_equal(masked, moe_torch.moe(*layer, token_mask=mask).output, "ids and a mask")
        bias = torch.tensor([0.0, 3.0, 0.0, -3.0, 0.0], device=device)
        biased = RouterLogits(expected.logits, bias)
        expected = moe_torch.moe(layer.x, layer.experts, biased, layer.spec).output
        require_equal(from_logits(layer.x, biased), expected, "logits and a correction bias")


@on_engines
def test_everything_bound(engine: str) -> None:
    layer, options = full_layer()
    with running_on(engine) as device:
        x, experts, routing = to_torch(tuple(layer[:3]), device)
        options = {name: to_torch(value, device) for name, value in options.items()}
        mask = options.pop("token_mask")
        launcher = prepare_moe(experts, routing, layer.spec, **options)
        expected = moe_torch.moe(x, experts, routing, layer.spec, token_mask=mask, **options).output
        for _ in range(2):
            require_equal(launcher(x, token_mask=mask), expected, "everything")


def test_views_of_other_strides_have_plans_of_their_own() -> None:
    launcher = prepare_moe(EXPERTS, ROUTING, SPEC)
    wide = torch.zeros(9, D_MODEL + 16)
    wide[:, 4 : 4 + D_MODEL] = X
    for x in (X, wide[:, 4 : 4 + D_MODEL], X):
        require_equal(launcher(x), moe_torch.moe(X, EXPERTS, ROUTING, SPEC).output, "view")


def test_the_engine_can_change_between_calls() -> None:
    """In a process with compiled kernels there is no interpreter: then the launcher refuses, as the op does."""
    launcher = prepare_moe(EXPERTS, ROUTING, SPEC)
    for engine in ("reference", "interpreter", "reference"):
        with moe_torch.cpu_engine(engine):
            if engine == "interpreter" and REAL_KERNELS == "cuda":
                for call in (launcher, lambda x: moe_torch.moe(x, EXPERTS, ROUTING, SPEC)):
                    with pytest.raises(moe_torch.Unsupported, match="the interpreter engine needs TRITON_INTERPRET=1"):
                        call(X)
            else:
                require_equal(launcher(X), moe_torch.moe(X, EXPERTS, ROUTING, SPEC).output, engine)


def test_outputs_are_fresh() -> None:
    launcher = prepare_moe(EXPERTS, ROUTING, SPEC)
    first, second = launcher(X), launcher(2 * X)
    require_equal(first, launcher(X), "kept")
    assert first.data_ptr() != second.data_ptr() and not first._is_view()


def test_weights_may_change_in_place() -> None:
    experts = dataclasses.replace(EXPERTS, down=EXPERTS.down.clone())
    launcher = prepare_moe(experts, ROUTING, SPEC)
    launcher(X)
    experts.down.mul_(-2)
    require_equal(launcher(X), moe_torch.moe(X, experts, ROUTING, SPEC).output, "in place")


def test_replaced_memory_is_refused() -> None:
    down = torch.nn.Parameter(EXPERTS.down.clone(), requires_grad=False)
    experts = dataclasses.replace(EXPERTS, down=down)
    launcher = prepare_moe(experts, ROUTING, SPEC)
    expected, address = launcher(X), down.data_ptr()
    old, down.data = down.data, down.data.clone()
    pattern = (
        rf"experts\.down must keep the memory it was bound with, at {address:#x}, got 0x\w+; call prepare_moe again"
    )
    with pytest.raises(moe_torch.InvalidInput, match=pattern):
        launcher(X)
    down.data = old
    require_equal(launcher(X), expected, "put back")
    # As sharding does with what it does not need.
    down.untyped_storage().resize_(0)
    with pytest.raises(
        moe_torch.InvalidInput, match=r"experts\.down must keep the memory.*, got 0x0; call prepare_moe"
    ):
        launcher(X)


def test_other_shapes_strides_and_dtypes_of_the_same_memory_are_refused() -> None:
    experts = dataclasses.replace(EXPERTS, down=EXPERTS.down.clone())
    launcher = prepare_moe(experts, ROUTING, SPEC)
    expected, old = launcher(X), experts.down.data
    for other in (old.transpose(1, 2), old[:2], old.view(torch.int32)):
        experts.down.data = other
        with pytest.raises(
            moe_torch.InvalidInput, match=r"experts\.down must keep the shape, strides and dtype.*; call prepare_moe"
        ):
            launcher(X)
    experts.down.data = old
    require_equal(launcher(X), expected, "put back")


def test_bound_memory_outlives_its_tensors() -> None:
    launcher = prepare_moe(
        dataclasses.replace(EXPERTS, down=EXPERTS.down.clone()), moe_torch.RouterWeights(ROUTING.weight.clone()), SPEC
    )
    noise = [torch.full_like(EXPERTS.down, float("nan")) for _ in range(8)]
    require_equal(launcher(X), moe_torch.moe(X, EXPERTS, ROUTING, SPEC).output, f"after {len(noise)} allocations")


def test_plain_calls_leave_the_operator_out(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = prepare_moe(EXPERTS, ROUTING, SPEC)
    expected = launcher(X)
    with profile(acc_events=True) as seen:
        require_equal(launcher(X), expected, "profiled")
    assert "moebius::moe" in {event.name for event in seen.events() or ()}
    monkeypatch.setattr(operators.Operator, "first", None)
    require_equal(launcher(X), expected, "plain")
    monkeypatch.setattr(eager, "plain_thread", lambda: False)
    with pytest.raises(TypeError):
        launcher(X)


def test_compiled_programs_contain_the_operator() -> None:
    launcher = prepare_moe(EXPERTS, ROUTING, SPEC)
    compiled = torch.compile(lambda x: launcher(x) + 1, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (9, 5, 7):
        x = torch_layer(num_tokens=tokens, seed=tokens).x
        require_equal(compiled(x), launcher(x) + 1, f"{tokens} tokens")


def test_functional_transforms() -> None:
    launcher = prepare_moe(EXPERTS, ROUTING, SPEC)
    batch = torch.stack([X, X + 1])
    require_equal(torch.func.vmap(launcher)(batch), torch.stack([launcher(X), launcher(X + 1)]), "vmap")


def test_gradients_are_those_of_moe() -> None:
    x, down = X.clone().requires_grad_(), torch.nn.Parameter(EXPERTS.down)
    experts = dataclasses.replace(EXPERTS, down=down)
    launcher, trained = prepare_moe(EXPERTS, ROUTING, SPEC), prepare_moe(experts, ROUTING, SPEC)
    wanted = torch.autograd.grad(moe_torch.moe(x, experts, ROUTING, SPEC).output.sum(), (x, down))
    require_equal(torch.autograd.grad(trained(x).sum(), (x, down)), wanted, "x and what is bound")
    require_equal(torch.autograd.grad(trained(X).sum(), (down,)), wanted[1:], "what is bound alone")
    with torch.no_grad():
        require_equal(trained(x), launcher(X), "no_grad")
    down.requires_grad_(False)
    require_equal(trained(X), launcher(X), "frozen")


def bind(**changes: Any) -> Any:
    arguments = {"experts": EXPERTS, "routing": ROUTING, "spec": SPEC} | changes
    return prepare_moe(**arguments)


def weights(**changes: Any) -> Any:
    return dataclasses.replace(EXPERTS, **changes)


#: (call, pattern): refused when weights are bound.
INVALID: dict[str, tuple[Callable[[], Any], str]] = {
    "no experts": (lambda: bind(experts=X), r"experts must be a ExpertWeights, got Tensor; build one"),
    "no routing": (lambda: bind(routing=X),
        r"routing must be a RouterWeights, or the class .*, got a Tensor; bind the"),
    "routing of each call": (lambda: bind(routing=RouterLogits(X)),
        r"routing must be a RouterWeights, or the class RouterLogits or TopK, got a RouterLogits; bind the router, "),
    "class of the routing": (lambda: bind(routing=moe_torch.RouterWeights),
        r"routing must be a RouterWeights, or the class RouterLogits or TopK, got RouterWeights; bind the router"),
    "no spec": (lambda: bind(spec=None), r"spec must be a MoESpec, got NoneType; build one"),
    "no tensor": (lambda: bind(experts=weights(down=EXPERTS.down.numpy())),
        r"experts\.down must be a torch\.Tensor, got ndarray; convert it"),
    "device": (lambda: bind(experts=weights(down=EXPERTS.down.to("meta"))),
        r"experts\.down must be on cpu like experts\.gate_up, got meta; call to_empty"),
    "misaligned": (lambda: bind(experts=weights(down=misaligned(EXPERTS.down))),
        r"experts\.down must start at a multiple of 16 bytes, got address .*; clone\(\) it"),
    "shape of x": (lambda: bind()(X[None]), r"x must be \[num_tokens, d_model\], got \(1, 9, 48\); flatten"),
    "width of x": (lambda: bind()(X[:, :32]), r"x must be \[num_tokens, 48\] for the weights .*, got \(9, 32\)"),
    "dtype of x": (lambda: bind()(X.half()), r"x must be float32 like the weights that are bound, got float16; cast"),
    "x of another device": (lambda: bind()(X.to("meta")), r"experts\.gate_up must be on meta like x, got cpu; move it"),
    "no x": (lambda: bind()(X.numpy()), r"x must be a torch\.Tensor, got ndarray; convert it"),
    "shape of down": (lambda: bind(experts=weights(down=EXPERTS.down[:, :16].contiguous()))(X),
        rf"experts\.down must be \[5, {D_FF}, {D_MODEL}\], got \(5, 16, {D_MODEL}\); pass an array of that shape"),
    "bound routing": (lambda: bind()(X, RouterLogits(X)),
        r"routing must be None where RouterWeights are bound, got a RouterLogits; leave it out"),
    "missing routing": (lambda: bind(routing=RouterLogits)(X),
        r"routing must be a RouterLogits, got NoneType; build one"),
    "two routings": (lambda: bind(routing=TopK)(X, TopK(torch.zeros(9, 2, dtype=torch.int32), torch.zeros(9, 2))),
        r"spec\.router must be None when ids and weights are given; remove one"),
    "K above E": (lambda: bind(spec=dataclasses.replace(SPEC, router=RouterSpec(9)))(X),
        r"top_k must be at most num_experts = 5, got 9; lower top_k"),
    "token mask": (lambda: bind()(X, token_mask=torch.ones(9)),
        r"token_mask must be bool, got float32; cast it to bool"),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_invalid_input(name: str) -> None:
    call, pattern = INVALID[name]
    for _ in range(2):
        with pytest.raises(moe_torch.InvalidInput, match=pattern) as caught:
            call()
        assert type(caught.value) is moe_torch.InvalidInput


def test_a_refused_call_leaves_the_launcher_usable() -> None:
    launcher = prepare_moe(EXPERTS, ROUTING, SPEC)
    expected = launcher(X)
    with pytest.raises(moe_torch.InvalidInput):
        launcher(X[:, :32])
    require_equal(launcher(misaligned(X)), expected, "misaligned")
    require_equal(launcher(X), expected, "afterwards")


def test_tensors_that_cannot_be_bound() -> None:
    class Named(torch.Tensor):
        pass

    for down in (EXPERTS.down.as_subclass(Named), torch._neg_view(EXPERTS.down)):
        with pytest.raises(moe_torch.Unsupported, match=r"experts\.down must be an ordinary CPU or CUDA tensor to be"):
            prepare_moe(weights(down=down), ROUTING, SPEC)
    with FakeTensorMode(), pytest.raises(moe_torch.Unsupported, match="must be an ordinary CPU or CUDA tensor"):
        fake = weights(gate_up=torch.empty(5, D_MODEL, 2 * D_FF), down=torch.empty(5, D_FF, D_MODEL))
        prepare_moe(fake, RouterLogits, SPEC)
    meta = weights(gate_up=EXPERTS.gate_up.to("meta"), down=EXPERTS.down.to("meta"))
    with pytest.raises(moe_torch.InvalidInput, match="arrays must have memory, got tensors on meta"):
        prepare_moe(meta, RouterLogits, SPEC)


def test_plans_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = prepare_moe(EXPERTS, ROUTING, SPEC)
    monkeypatch.setattr(launcher, "_ready", Recent(3))
    for tokens in (1, 2, 3, 4, 5, 1, 6, 7, 8, 9):
        x = torch_layer(num_tokens=tokens).x
        require_equal(launcher(x), moe_torch.moe(x, EXPERTS, ROUTING, SPEC).output, f"{tokens} tokens")
        assert len(launcher._ready) <= 6


@pytest.mark.gpu
def test_cuda_graphs_capture_and_replay() -> None:
    layer: Any = torch_layer("cuda", dtype="bfloat16")
    launcher = prepare_moe(layer.experts, layer.routing, layer.spec)
    x = layer.x.clone()
    launcher(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launcher(x)
    for seed in range(3):
        values = torch_layer("cuda", dtype="bfloat16", seed=seed + 10).x
        x.copy_(values)
        captured.fill_(float("nan"))
        graph.replay()
        require_equal(captured, launcher(values), f"replay {seed}")


@pytest.mark.gpu
def test_launches_follow_the_current_stream_and_the_tensors_device() -> None:
    for index in range(torch.cuda.device_count()):
        layer: Any = torch_layer(f"cuda:{index}")
        launcher = prepare_moe(layer.experts, layer.routing, layer.spec)
        expected = moe_torch.moe(*layer).output
        with torch.cuda.device(0):
            require_equal(launcher(layer.x), expected, f"device {index}")
        with torch.cuda.device(index):
            side, noise = torch.cuda.Stream(), torch.empty(64 << 20, device=layer.x.device)
            x = torch.zeros_like(layer.x)
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                for _ in range(50):
                    noise.fill_(1.0)
                x.copy_(layer.x)
                result = launcher(x)
            side.synchronize()
            require_equal(result, expected, f"side stream of device {index}")
