"""Calls that are like one seen before skip the key of their plan, and no others do."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import BaseTorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

import moe_torch
from moe_core.base.recent import forget_plans
from moe_core.runtime.prepared import HostPrepared
from moe_torch.bridge import eager, seen
from moe_torch.operators import table as operators
from moe_torch.operators.requests import moe_request
from tests.support.torch import D_MODEL, NUM_EXPERTS, on_engines, require_equal, running_on, torch_layer

_LAYER: Any = torch_layer()
X, EXPERTS, ROUTING, SPEC = _LAYER
MASK = torch.arange(len(X)) % 3 > 0


@pytest.fixture(autouse=True)
def reference_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing has been seen when a test begins."""
    forget_plans()
    with running_on("reference"):
        yield


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What keys are asked for, as they come."""
    asked: list[Any] = []
    make = eager.plain_key
    monkeypatch.setattr(eager, "plain_key", lambda arguments: asked.append(len(arguments)) or make(arguments))
    return asked


def make_layer() -> Any:
    torch.manual_seed(0)
    return moe_torch.MoE(D_MODEL, 32, NUM_EXPERTS, 2).requires_grad_(False)


def callers() -> dict[str, Callable[..., Any]]:
    """name -> the output for an x."""
    launcher = moe_torch.prepare_moe(EXPERTS, ROUTING, SPEC)
    return {
        "moe": lambda x, **options: moe_torch.moe(x, EXPERTS, ROUTING, SPEC, **options).output,
        "layer": make_layer(),
        "launcher": launcher,
    }


@pytest.mark.parametrize("name", ["moe", "layer", "launcher"])
def test_a_call_seen_before_needs_no_key_and_reads_new_values(name: str, keys: list[Any]) -> None:
    call = callers()[name]
    call(X)
    call(X)
    keys.clear()
    results = [call(scale * X) for scale in (1.0, 2.0, 1.0)]
    assert keys == [], "no key is asked for"
    fresh = [callers()[name](torch.cat([scale * X, X])[: len(X)]) for scale in (1.0, 2.0, 1.0)]
    for number, (found, expected) in enumerate(zip(results, fresh, strict=True)):
        require_equal(found, expected, f"{name} {number}")
    assert not torch.equal(results[0], results[1])
    assert len({result.data_ptr() for result in results}) == 3


@pytest.mark.parametrize("name", ["moe", "layer", "launcher"])
def test_a_mask_makes_another_call(name: str) -> None:
    call = callers()[name]
    for _ in range(3):
        whole, masked = call(X), call(X, token_mask=MASK)
        assert not whole[~MASK].eq(0).all() and masked[~MASK].eq(0).all()
        torch.testing.assert_close(masked[MASK], whole[MASK], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(9, 1), (1, 9), (3, 3), (1, 1, 9), ()], ids=str)
def test_layers_see_x_of_any_rank(shape: tuple[int, ...], keys: list[Any]) -> None:
    layer = make_layer()
    x = X.view(*shape, D_MODEL) if shape else X[0]
    expected = layer(x)
    layer(x)
    keys.clear()
    found = layer(2 * x)
    assert keys == [] and found.shape == x.shape and found.is_contiguous() and not found._is_view()
    require_equal(layer(x), expected, "seen")
    require_equal(found, layer((2 * x).view(-1, D_MODEL)).view_as(x), "other values")


def test_rows_that_are_copied_are_copied_at_each_call() -> None:
    layer, wide = make_layer(), torch.cat([X, X], 1)
    columns = torch.empty(D_MODEL, len(X)).t()
    for number in (1.0, 2.0, 3.0, 4.0):
        columns.copy_(number * X)
        require_equal(layer(columns), layer(number * X), "columns")
        wide.copy_(torch.cat([number * X, X], 1))
        require_equal(layer(wide[:, :D_MODEL]), layer(number * X), "rows that lie apart")


class Passing(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Unguarded(Passing):
    """Compiled programs run inside of it, so that their guards do not see it."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


#: In these something watches or changes operators.
WATCHED: dict[str, Callable[[], Any]] = {
    "dispatch mode": Passing,
    "dispatch mode without guards": Unguarded,
    "function mode": BaseTorchFunctionMode,
    "profiler": lambda: profile(acc_events=True),
    "forward-mode level": torch.autograd.forward_ad.dual_level,
}
#: Functions that call another as transforms and tracers do, with an x.
TRANSFORMED: dict[str, Callable[..., Any]] = {
    "vmap": lambda call: torch.func.vmap(call)(X[None])[0],
    "functionalize": lambda call: torch.func.functionalize(lambda x: call(x))(X),
    "make_fx": lambda call: make_fx(call)(X)(X),
    "jit trace": lambda call: torch.jit.trace(lambda x: call(x), X, check_trace=False)(X),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("context", [*WATCHED, *TRANSFORMED])
@pytest.mark.parametrize("name", ["moe", "layer", "launcher"])
def test_watched_calls_are_not_like_those_seen(name: str, context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = callers()[name]
    for _ in range(3):
        expected = call(X)
    runs: list[Any] = []
    run = seen._Seen.run
    monkeypatch.setattr(seen._Seen, "run", lambda self, arguments: note(run(self, arguments)))

    def note(outputs: Any) -> Any:
        runs.append(outputs is not None)
        return outputs

    if context in WATCHED:
        with WATCHED[context]():
            found = call(X)
    else:
        found = TRANSFORMED[context](call)
    assert True not in runs, "no call was taken for one seen"
    require_equal(found, expected, context)
    require_equal(call(X), expected, "afterwards")
    assert runs[-1]


def test_calls_of_many_shapes_are_all_seen(keys: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the last shape are recognised first, the others by theirs."""
    layer, shapes = make_layer(), (9, 1, 5)
    expected = {count: layer(X[:count].clone()) for count in shapes}
    keys.clear()
    compared: list[Any] = []
    run = seen._Seen.run
    monkeypatch.setattr(seen._Seen, "run", lambda self, given: compared.append(len(given[0])) or run(self, given))
    for count in (5, 9, 9, 1, 5, 5, 5):
        require_equal(layer(X[:count].clone()), expected[count], f"{count} tokens")
    assert keys == [] and compared == [5, 9, 9, 9, 1, 1, 5, 5, 5, 5]


def test_threads_with_other_shapes_do_not_disturb_each_other() -> None:
    layer = make_layer()
    counts = [1, 2, 4, 9]
    expected = {count: layer(X[:count].clone()) for count in counts}

    def work(count: int) -> bool:
        x = X[:count].clone()
        return all([torch.equal(layer(x), expected[count]) for _ in range(50)])

    # The engine is a context's.
    contexts = [contextvars.copy_context() for _ in counts]
    with ThreadPoolExecutor(len(counts)) as threads:
        assert all(threads.map(lambda context, count: context.run(work, count), contexts, counts))


def odd(kind: str, tensor: Any) -> Any:
    """Another tensor of the same shape."""
    if kind == "another dtype":
        return tensor.to(torch.bfloat16)
    if kind == "other strides":
        return tensor.t().contiguous().t()
    if kind == "lazily negated":
        return torch._neg_view(-tensor)
    if kind == "a parameter":
        return torch.nn.Parameter(tensor, requires_grad=False)
    if kind == "asking for a gradient":
        return tensor.clone().requires_grad_()
    assert kind == "misaligned"
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


@pytest.mark.parametrize(
    "kind",
    ["another dtype", "other strides", "lazily negated", "a parameter", "asking for a gradient", "misaligned"],
)
@pytest.mark.parametrize("place", [0, 1], ids=["x", "weight"])
def test_tensors_with_other_metadata_are_other_calls(kind: str, place: int) -> None:
    """Each is given between calls with ordinary ones, which stay what they were."""
    tensors = [X, torch.randn(D_MODEL, D_MODEL)]
    expected = moe_torch.router(*tensors)
    for _ in range(3):
        moe_torch.router(*tensors)
        given = list(tensors)
        given[place] = odd(kind, given[place])
        refused = kind == "other strides" or (kind == "misaligned" and place == 1)
        with pytest.raises(moe_torch.InvalidInput) if refused else contextlib.nullcontext():
            found = moe_torch.router(*given)
            error = (found - expected).abs().max()
            assert 0 < error < 0.1 if kind == "another dtype" else error < 1e-5
            assert found.requires_grad == (kind == "asking for a gradient")
        require_equal(moe_torch.router(*tensors), expected, "ordinary tensors")


def test_metadata_changed_in_place_is_another_call() -> None:
    """The same tensor, at the same address."""
    x, weight = X.clone(), torch.randn(D_MODEL, D_MODEL)
    for _ in range(3):
        expected = moe_torch.router(x, weight)
    before = weight.data_ptr()
    weight.t_()
    assert weight.data_ptr() == before
    with pytest.raises(moe_torch.InvalidInput, match="weight must be row-major"):
        moe_torch.router(x, weight)
    weight.t_()
    require_equal(moe_torch.router(x, weight), expected, "as it was")
    weight.data = weight.data[:, :5].contiguous()
    assert moe_torch.router(x, weight).shape == (len(X), 5)
    weight.data = weight.data.view(torch.int32)
    with pytest.raises(moe_torch.InvalidInput, match=r"weight must be .*, got int32"):
        moe_torch.router(x, weight)


def test_gradients_are_asked_for_by_mode() -> None:
    """The same weights, in and out of no_grad."""
    layer = make_layer().requires_grad_()
    for _ in range(3):
        with torch.no_grad():
            expected = layer(X)
            assert not expected.requires_grad
        found = layer(X)
        assert found.requires_grad
        require_equal(found.detach(), expected, "values")
        with torch.inference_mode():
            assert layer(X).is_inference()
        assert not make_layer()(X).is_inference()


def test_autocast_casts_after_calls_that_it_did_not_cast() -> None:
    layer = make_layer()
    for _ in range(3):
        assert layer(X).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(X).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.float16):
            assert layer(X).dtype == torch.float16


def test_autocast_casts_what_another_autocast_left_alone() -> None:
    layer, x = make_layer().bfloat16(), X.bfloat16()
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.float16):
            assert layer(x).dtype == torch.float16


def test_hooks_are_called_after_calls_without() -> None:
    layer, seen_by = make_layer(), []
    for _ in range(3):
        layer(X)
    handle = layer.experts.register_forward_hook(lambda *_: seen_by.append(1))
    layer(X)
    handle.remove()
    layer(X)
    assert seen_by == [1]


@on_engines
def test_the_engine_changes_between_calls(engine: str) -> None:
    layer: Any = torch_layer(num_tokens=5)
    expected = [moe_torch.moe(*layer).output for _ in range(3)]
    with running_on(engine) as device:
        there: Any = torch_layer(device, num_tokens=5)
        results = [moe_torch.moe(*there).output for _ in range(3)]
    for found in results[1:]:
        require_equal(found, results[0], engine)
    for found in expected[1:]:
        require_equal(found, expected[0], "reference")
    require_equal(moe_torch.moe(*layer).output, expected[0], "back again")


def test_replaced_parameters_are_read() -> None:
    """Layers look parameters up at every call, whatever calls were seen."""
    layer = make_layer()
    for _ in range(3):
        layer(X)
    other = make_layer()
    other.experts.down.mul_(3)
    layer.experts.down = torch.nn.Parameter(other.experts.down.clone(), requires_grad=False)
    require_equal(layer(X), other(X), "a new parameter")
    layer.experts.down.data = make_layer().experts.down.clone()
    require_equal(layer(X), make_layer()(X), "new memory")


def test_calls_that_take_turns_are_all_seen_sooner_or_later(keys: list[Any]) -> None:
    """Two calls with one key: the one remembered is replaced by the other after some misses, not at each."""
    operator, arguments = moe_request(X, EXPERTS, ROUTING, SPEC)
    masked = moe_request(X, EXPERTS, ROUTING, SPEC, token_mask=MASK).arguments
    for _ in range(2):
        operator.first(arguments)
    keys.clear()
    for _ in range(seen._MISSES - 1):
        operator.first(masked)
        operator.first(arguments)
    assert len(keys) == seen._MISSES - 1
    for _ in range(2):
        operator.first(masked)
    keys.clear()
    operator.first(masked)
    assert keys == []


def test_one_tensor_in_two_places_and_tensors_that_a_plan_does_not_read() -> None:
    """Such calls are never seen, or always alike."""
    square = torch.randn(D_MODEL, D_MODEL)
    expected = moe_torch.router(square, square.clone())
    for _ in range(4):
        require_equal(moe_torch.router(square, square), expected, "twice the same")


def test_a_refused_call_is_refused_again_with_its_name() -> None:
    layer = make_layer()
    for _ in range(3):
        layer(X)
    layer.experts.down.untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(moe_torch.InvalidInput, match=r"experts\.down must have memory"):
            layer(X)


def test_training_forwards_and_backwards_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do more than run their plan."""
    layer = make_layer().requires_grad_()
    for _ in range(3):
        layer.zero_grad()
        layer(X).square().sum().backward()
    runs: list[Any] = []
    monkeypatch.setattr(HostPrepared, "_run", lambda self, *_: runs.append(self.plan.name))
    layer(X)
    assert len(runs) == 1
    for kind in (*operators.TRAINING.values(), *operators.BACKWARD.values()):
        assert not kind._runs_plan_alone
