"""Plain eager calls leave torch's dispatcher out, all others pass it, and nobody can tell from the results."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

import moe_torch
from moe_core.specs.operands import ExpertWeights, SharedExpert
from moe_core.specs.routing import LogitsSpec
from moe_core.tools.doctor.poison import poisoned
from moe_torch.bridge import eager, private
from moe_torch.bridge.options import encode
from moe_torch.operators import stages
from moe_torch.operators import table as operators
from tests.support.torch import D_MODEL, NUM_EXPERTS, REAL_KERNELS, on_engines, require_equal, running_on, torch_layer

_LAYER: Any = torch_layer()
X, EXPERTS, ROUTING, SPEC = _LAYER

pytestmark = pytest.mark.usefixtures("fresh_reference_engine_of_torch")


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operators that eager code called through the dispatcher, as they come."""
    calls: list[str] = []
    for operator in (stages.ROUTER, *operators.MOE.values()):

        def note(*arguments: Any, overload: Any = operator.overload, name: str = operator.name) -> Any:
            calls.append(name)
            return overload(*arguments)

        monkeypatch.setattr(operator, "overload", note)
    return calls


def product(x: Any = X, weight: Any = None) -> Any:
    return moe_torch.router(x, ROUTING.weight if weight is None else weight)


class SeeOperators(TorchDispatchMode):
    """Counts calls of our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "moebius":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class SeeFunctions(TorchFunctionMode):
    """Counts what passes `__torch_function__`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Named(torch.Tensor):
    """A subclass that torch's functions keep."""


#: Nothing in these changes what a call is.
PLAIN: dict[str, Callable[[], Any]] = {
    "grad mode": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
}
#: In these something watches, records or changes operators.
WATCHED: dict[str, Callable[[], Any]] = {
    "dispatch mode": SeeOperators,
    "function mode": SeeFunctions,
    "default device": lambda: torch.device("cpu"),
    "profiler": lambda: profile(acc_events=True),
    "forward-mode level": torch.autograd.forward_ad.dual_level,
}


@pytest.mark.parametrize("context", PLAIN)
def test_plain_calls_leave_the_dispatcher_out(context: str, dispatched: list[str]) -> None:
    with PLAIN[context]():
        assert eager.plain_thread()
        logits = product()
        whole = moe_torch.moe(X, EXPERTS, ROUTING, SPEC)
    assert dispatched == []
    require_equal(logits, torch.ops.moebius.router(X, ROUTING.weight, None, None, encode(LogitsSpec())), "logits")
    require_equal(whole.logits, logits.clone(), "logits of the whole")


@pytest.mark.parametrize("context", WATCHED)
def test_watched_calls_pass_it(context: str, dispatched: list[str]) -> None:
    expected = product()
    assert dispatched == []
    with WATCHED[context]() as watcher:
        assert not eager.plain_thread()
        result = product()
    assert "router" in dispatched
    require_equal(result, expected, context)
    if context == "dispatch mode":
        assert watcher.names == ["moebius.router.default"]
    if context == "function mode":
        assert "moebius.router.default" in watcher.names
    if context == "profiler":
        assert "moebius::router" in {event.name for event in watcher.events()}
    assert eager.plain_thread()


def test_a_mode_on_another_thread_changes_nothing_here(dispatched: list[str]) -> None:
    entered, leave = threading.Event(), threading.Event()

    def watch() -> None:
        with SeeOperators():
            entered.set()
            assert leave.wait(30)

    thread = threading.Thread(target=watch)
    thread.start()
    assert entered.wait(30)
    product()
    leave.set()
    thread.join(30)
    assert not thread.is_alive() and dispatched == []


def negated(tensor: Any) -> Any:
    """The same values, negated when they are read."""
    view = torch._neg_view(-tensor)
    assert view.is_neg()
    return view


#: Tensors that are not what they look like. Plain ones with their shape, strides and dtype were seen before.
ODD: dict[str, Callable[[Any], Any]] = {
    "lazily negated": negated,
    "zeros without memory": lambda tensor: torch._efficientzerotensor(tensor.shape),
    "functional": torch._to_functional_tensor,
    "a subclass": lambda tensor: tensor.as_subclass(Named),
    "asking for a gradient": lambda tensor: tensor.clone().requires_grad_(),
    "fake": lambda tensor: FakeTensorMode(allow_non_fake_inputs=True).from_tensor(tensor),
    "sparse": lambda tensor: tensor.to_sparse(),
    "nested": lambda tensor: torch.nested.as_nested_tensor([tensor]),
    "on meta": lambda tensor: tensor.to("meta"),
    "no tensor": lambda tensor: tensor.numpy(),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("place", [0, 1], ids=["x", "weight"])
def test_odd_tensors_pass_it(kind: str, place: int, dispatched: list[str]) -> None:
    tensors = [torch.ones(D_MODEL, D_MODEL), torch.ones(D_MODEL, D_MODEL)]
    moe_torch.router(*tensors)
    assert dispatched == []
    tensors[place] = ODD[kind](tensors[place])
    with contextlib.suppress(moe_torch.InvalidInput, moe_torch.Unsupported, RuntimeError):
        moe_torch.router(*tensors)
    assert "router" in dispatched


def test_odd_tensors_have_their_values_read() -> None:
    expected = product()
    require_equal(product(negated(X)), expected, "negated")
    functional = product(torch._to_functional_tensor(X))
    require_equal(torch._from_functional_tensor(functional), expected, "functional")
    kept = product(X.as_subclass(Named))
    assert type(kept) is Named
    require_equal(kept.as_subclass(torch.Tensor), expected, "subclass")


def test_transforms_see_the_operator(dispatched: list[str]) -> None:
    batch = torch.stack([X, 2 * X, X - 1])
    expected = torch.stack([product(item) for item in batch])
    assert dispatched == []
    require_equal(torch.func.vmap(product)(batch), expected, "vmap")
    assert "router" in dispatched
    functional = torch.func.functionalize(lambda x: product(x + 1))(X)
    require_equal(functional, product(X + 1), "functionalize")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced_programs_contain_the_operator() -> None:
    def program(x: Any) -> Any:
        return product(x)

    assert "moebius::router" in str(torch.jit.trace(program, X).graph)
    graph = make_fx(program)(X)
    assert torch.ops.moebius.router.default in {node.target for node in graph.graph.nodes}


@on_engines
@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_without_aux_gives_the_same_output(engine: str, masked: bool) -> None:
    """Its other outputs then lie in the scratch memory."""
    with running_on(engine) as device, torch.no_grad():
        layer = moe_torch.MoE(D_MODEL, 32, NUM_EXPERTS, 2, device=device)
        x = torch_layer(device).x
        options = {"token_mask": torch.arange(9, device=device) % 3 > 0} if masked else {}
        output, aux = layer(x, return_aux=True, **options)
        require_equal(layer(x, **options), output, "plain")
        with SeeOperators() as seen:
            require_equal(layer(x, **options), output, "watched")
        assert seen.names == ["moebius.moe.router_weights"]
        assert int(aux.tokens_per_expert.sum()) == (12 if masked else 18)


def test_what_is_not_wanted_is_not_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    allocator = private.allocator

    def noted(device: Any) -> Any:
        allocate = allocator(device)
        return lambda *request: made.append(request[0]) or allocate(*request)

    layer = moe_torch.MoE(D_MODEL, 32, NUM_EXPERTS, 2).requires_grad_(False)
    layer(X)
    monkeypatch.setattr(private, "allocator", noted)
    layer(X)
    assert len(made) == 2 and made[0] == X.shape
    moe_torch.moe(X, EXPERTS, ROUTING, SPEC)
    assert len(made) == 2 + 7


@pytest.mark.skipif(REAL_KERNELS == "cuda", reason="the doctor's poison is for a process of one's own on a GPU")
@pytest.mark.parametrize("engine", ["reference", "interpreter"])
def test_unwanted_outputs_are_written_before_they_are_read(engine: str) -> None:
    layer = moe_torch.MoE(D_MODEL, 32, NUM_EXPERTS, 2).requires_grad_(False)
    with running_on(engine):
        expected = layer(X)
        with poisoned() as found:
            require_equal(layer(X), expected, "poisoned")
        assert (found.outputs, found.workspaces) == (1, 1)


def test_allocation_follows_torch() -> None:
    """Shape, strides and dtype; inference tensors in inference mode; filled where deterministic mode asks for it."""
    device = torch.device("cpu")
    request = ((3, 5), (5, 1), torch.bfloat16)
    made = private.allocator(device)(*request)
    assert (made.shape, made.stride(), made.dtype, made.device) == (torch.Size((3, 5)), (5, 1), torch.bfloat16, device)
    assert private.allocator(device)((0, 5), (5, 1), torch.int32).shape == (0, 5)
    with torch.inference_mode():
        assert private.allocator(device)(*request).is_inference()
    torch.use_deterministic_algorithms(True)
    try:
        assert private.allocator(device)(*request).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_outputs_have_the_strides_of_dispatched_ones() -> None:
    for tokens in (0, 1, 9):
        x = torch_layer(num_tokens=tokens).x
        plain = moe_torch.moe(x, EXPERTS, ROUTING, SPEC)
        with SeeOperators():
            watched = moe_torch.moe(x, EXPERTS, ROUTING, SPEC)
        assert [item.stride() for item in plain] == [item.stride() for item in watched]
        assert not any(item.requires_grad or item._is_view() for item in plain)


def test_metadata_changed_in_place_is_seen() -> None:
    """Keys are made of what tensors are at the call, whatever they were before."""
    x = X.clone()
    require_equal(product(x), product(), "before")
    x.data = X[:4].clone()
    require_equal(product(x), product()[:4], "fewer rows")
    weight = ROUTING.weight.clone()
    weight.resize_(D_MODEL, 3)
    with pytest.raises(moe_torch.InvalidInput, match=r"bias must be \[3\], got \(5,\)"):
        moe_torch.router(x, weight, bias=torch.zeros(NUM_EXPERTS))


@pytest.mark.parametrize("shared", [None, SharedExpert("shared.gate_up", "shared.down", "shared.up", "shared.gate")])
@pytest.mark.parametrize("kind", operators.MOE)
def test_bundles_are_taken_apart_by_name(kind: type, shared: SharedExpert | None) -> None:
    experts = ExpertWeights(*[f"experts.{field.name}" for field in dataclasses.fields(ExpertWeights)][:7])
    routing = kind(*[f"routing.{field.name}" for field in dataclasses.fields(kind)])
    for operator in (operators.MOE[kind], operators.MOE_QUANTIZED[kind]):
        *tensors, text = operator.arguments(
            x="x", experts=experts, routing=routing, token_mask="token_mask", expert_map="expert_map", shared=shared,
            spec=SPEC,
        )  # fmt: skip
        absent = () if shared else tuple(name for name in operator.names if name.startswith("shared."))
        parts = ("scales", "zero_points", "input_scale")
        wanted = [None if name.endswith(parts) or name in absent else name for name in operator.names]
        assert tensors == wanted
        assert text == encode(SPEC, *([(None, None, None)] if operator is operators.MOE_QUANTIZED[kind] else []))


def test_texts_of_specs_are_kept_by_identity_and_mean_the_value() -> None:
    specs = [moe_torch.RouterSpec(k) for k in range(1, 600)]
    texts = [encode(spec) for spec in specs]
    assert len(set(texts)) == len(specs)
    for spec, text in zip(specs, texts, strict=True):
        assert encode(spec) == encode(dataclasses.replace(spec)) == text
    assert encode(1) != encode(True)
    # Where one spec is freed, the next may get its place in memory.
    for top_k in (1, 2, 3, 1, 2, 3):
        assert encode(moe_torch.RouterSpec(top_k)) == texts[top_k - 1]


@pytest.mark.gpu
def test_tensors_of_every_gpu_are_plain(dispatched: list[str]) -> None:
    """Whichever device is current, outputs are made where the tensors are."""
    for index in range(torch.cuda.device_count()):
        layer: Any = torch_layer(f"cuda:{index}")
        for current in range(torch.cuda.device_count()):
            with torch.cuda.device(current):
                result = moe_torch.moe(*layer)
                assert {item.device for item in result if item is not None} == {torch.device("cuda", index)}
                with torch.inference_mode():
                    assert moe_torch.moe(*layer).output.is_inference()
    assert dispatched == []


@pytest.mark.gpu
def test_allocation_follows_torch_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    request = ((3, 5), (5, 1), torch.bfloat16)
    for current in {0, device.index}:
        with torch.cuda.device(current):
            made = private.allocator(device)(*request)
            assert (made.shape, made.stride(), made.dtype, made.device) == (*request, device)
    torch.use_deterministic_algorithms(True)
    try:
        assert private.allocator(device)(*request).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
