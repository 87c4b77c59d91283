"""Routing captured in one framework and replayed in the other, and what refuses to be captured or replayed.

The replaying layers have routers of their own that choose otherwise, so that nothing but the trace makes them agree.
"""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import moe_jax
import moe_torch
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import MoELayerSpec, OutputSpec
from moe_core.specs import Activation, MoESpec, NormSpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, RouterLogits, RouterWeights, TopK
from moe_core.trace import LayerRouting, RoutingTrace
from moe_jax import trace as jax_trace
from moe_torch import trace as torch_trace
from tests.support import jax as jax_support
from tests.support import torch as torch_support
from tests.support.flax import linen_layer, nnx_layer
from tests.support.jax import ENGINES
from tests.support.layers import SPECS, draw_weights, draw_x
from tests.support.torch_layers import make

T = 7
on_engines = pytest.mark.parametrize("engine", ENGINES)


def stored_alike(spec: MoELayerSpec) -> MoELayerSpec:
    """The layer with one storage in both frameworks: equal plans give equal bits."""
    return dataclasses.replace(
        spec, experts=dataclasses.replace(spec.experts, weight_layout="in_out", gate_layout="halves")
    )


#: Softmax with another top-k, then groups, correction bias, scale and shared experts.
MODEL: tuple[MoELayerSpec, ...] = (
    stored_alike(dataclasses.replace(SPECS["mixtral"], top_k=2, router=RouterSpec(renormalize=True))),
    stored_alike(SPECS["deepseek_v3"]),
)


def weights_of(seed: int, router_seed: int) -> list[Any]:
    """Every layer's weights; of models of one seed and different router seeds only the routers differ."""
    own = [draw_weights(spec, seed + number) for number, spec in enumerate(MODEL)]
    routers = [draw_weights(spec, router_seed + number).router for number, spec in enumerate(MODEL)]
    return [dataclasses.replace(one, router=router) for one, router in zip(own, routers, strict=True)]


def torch_model(router_seed: int, device: Any) -> Any:
    layers = [make(weights, device) for weights in weights_of(0, router_seed)]

    def model(x: Any) -> Any:
        for layer in layers:
            x = x + layer(x)
        return x

    return model


def jax_model(router_seed: int, flavour: str) -> Any:
    pairs = list(zip(weights_of(0, router_seed), MODEL, strict=True))
    if flavour == "nnx":
        calls = [nnx_layer(*pair) for pair in pairs]
    else:
        bound = [linen_layer(*pair) for pair in pairs]
        calls = [lambda x, layer=layer, variables=variables: layer.apply(variables, x) for layer, variables in bound]

    def model(x: Any) -> Any:
        for call in calls:
            x = x + call(x)
        return x

    return model


def require_same_routing(first: Any, second: Any) -> None:
    first, second = RoutingTrace(tuple(first)), RoutingTrace(tuple(second))
    assert len(first) == len(second) == len(MODEL)
    for one, other in zip(first, second, strict=True):
        assert one.num_experts == other.num_experts
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.weights, other.weights)


@on_engines
@pytest.mark.parametrize("flavour", ["nnx", "linen"])
def test_torch_to_jax(engine: str, flavour: str, tmp_path: pathlib.Path) -> None:
    x = draw_x((T,))
    with torch_support.running_on(engine) as device, torch_trace.capture() as recording:
        wanted = torch_support.to_numpy(torch_model(10, device)(torch_support.to_torch(x, device)))
    recording.trace().save(tmp_path / "routing.safetensors")
    trace = RoutingTrace.load(tmp_path / "routing.safetensors")
    with jax_support.running_on(engine):
        model = jax_model(20, flavour)
        own, chosen = jax_trace.capture(model)(jnp.asarray(x))
        assert not np.array_equal(chosen[0].ids, trace[0].ids) and not np.array_equal(np.asarray(own), wanted)
        eager, played = jax_trace.capture(lambda x: jax_trace.replay(model)(trace, x))(jnp.asarray(x))
        jitted = jax.jit(jax_trace.replay(model))(trace.layers, jnp.asarray(x))
        compiled_own, compiled_chosen = jax.jit(jax_trace.capture(model))(jnp.asarray(x))
    require_same_routing(played, trace)
    require_same_routing(compiled_chosen, chosen)
    np.testing.assert_array_equal(np.asarray(eager), wanted)
    np.testing.assert_array_equal(np.asarray(jitted), wanted)
    np.testing.assert_array_equal(np.asarray(compiled_own), np.asarray(own))


@on_engines
def test_jax_to_torch(engine: str, tmp_path: pathlib.Path) -> None:
    x = draw_x((T,))
    with jax_support.running_on(engine):
        wanted, layers = jax.jit(jax_trace.capture(jax_model(10, "nnx")))(jnp.asarray(x))
    RoutingTrace(layers).save(tmp_path / "routing.safetensors")
    trace = RoutingTrace.load(tmp_path / "routing.safetensors")
    with torch_support.running_on(engine) as device:
        model, tokens = torch_model(20, device), torch_support.to_torch(x, device)
        own = model(tokens)
        with torch_trace.capture() as recording, torch_trace.replay(trace):
            played = model(tokens)
        again = model(tokens)
        with torch_trace.replay(recording.layers):
            from_tensors = model(tokens)
    np.testing.assert_array_equal(torch_support.to_numpy(played), np.asarray(wanted))
    require_same_routing(recording.trace(), trace)
    torch_support.require_equal(from_tensors, played, "replayed from the recording itself")
    torch_support.require_equal(again, own, "after the replay")
    assert not torch.equal(own, played)


ROUTED = MoESpec(Activation("silu"), RouterSpec(2))
DECIDED = MoESpec(Activation("silu"))


def op_calls(front_end: Any, to_array: Any) -> list[tuple[str, Any]]:
    """(name, call) of the op for each kind of routing, with a map of 8 experts onto 4 local ones."""
    random = np.random.default_rng(3)
    draw = lambda *shape: to_array((random.standard_normal(shape) * 0.3).astype(np.float32))  # noqa: E731
    x, experts = draw(T, 16), ExpertWeights(draw(4, 16, 16), draw(4, 8, 16))
    from_x, from_logits = RouterWeights(draw(16, 8)), RouterLogits(draw(T, 8))
    expert_map = to_array(np.array([0, -1, 1, -1, 2, -1, 3, -1], np.int32))
    mask = to_array(np.arange(T) != 2)
    decided = TopK(
        to_array(random.integers(0, 8, (T, 2)).astype(np.int32)), to_array(random.random((T, 2), np.float32))
    )
    options = {"expert_map": expert_map, "token_mask": mask}
    return [
        ("weights", lambda: front_end.moe(x, experts, from_x, ROUTED, **options)),
        ("logits", lambda: front_end.moe(x, experts, from_logits, ROUTED, **options)),
        ("top_k", lambda: front_end.moe(x, experts, decided, DECIDED, **options)),
        ("expected", lambda ids, weights: front_end.moe(x, experts, TopK(ids, weights), DECIDED, **options)),
    ]


@on_engines
def test_every_kind_of_routing_is_replaced(engine: str) -> None:
    """The op gives what it gives for the trace's ids and weights, and logits of its own router. Its mask holds."""
    random = np.random.default_rng(4)
    layer = LayerRouting(random.integers(-1, 8, (T, 2)).astype(np.int32), random.random((T, 2), np.float32), 8)
    ids = np.where(np.arange(T)[:, None] != 2, layer.ids, -1)
    with torch_support.running_on(engine) as device:
        *calls, (_, expected) = op_calls(moe_torch, lambda array: torch_support.to_torch(array, device))
        wanted = expected(*(torch_support.to_torch(array, device) for array in (layer.ids, layer.weights)))
        for name, call in calls:
            plain = call()
            with torch_trace.capture() as recording, torch_trace.replay(layer):
                result = call()
            with torch_trace.capture() as own:
                call()
            assert recording.layers[0].num_experts == own.layers[0].num_experts == 8, name
            torch_support.require_equal(own.layers[0].ids, plain.ids, name)
            torch_support.require_equal(result.output, wanted.output, name)
            torch_support.require_equal(result.tokens_per_expert, wanted.tokens_per_expert, name)
            assert (result.logits is None) == (name == "top_k") == (plain.logits is None)
            if name != "top_k":
                np.testing.assert_array_equal(torch_support.to_numpy(result.ids), ids, name)
    with jax_support.running_on(engine):
        *calls, (_, expected) = op_calls(moe_jax, jnp.asarray)
        also_wanted = expected(jnp.asarray(layer.ids), jnp.asarray(layer.weights))
        np.testing.assert_array_equal(np.asarray(also_wanted.output), torch_support.to_numpy(wanted.output))
        for name, call in calls:
            result = jax_trace.replay(call)(layer)
            np.testing.assert_array_equal(np.asarray(result.output), np.asarray(also_wanted.output), name)
            np.testing.assert_array_equal(np.asarray(result.ids), ids, name)
            assert (result.logits is None) == (name == "top_k")


def test_compiled_models_are_seen() -> None:
    """Compiled before or inside the blocks, once, and the same afterwards."""
    x = torch_support.to_torch(draw_x((T,)))
    with torch_support.running_on("reference"):
        model = torch_model(10, "cpu")
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        with torch_trace.capture() as cold:
            first = compiled(x)
        with torch_trace.capture() as warm:
            second = compiled(x)
        require_same_routing(cold.trace(), warm.trace())
        other = [LayerRouting(layer.ids.flip(1), layer.weights * 2, layer.num_experts) for layer in cold.layers]
        with torch_trace.replay(other):
            played = compiled(x)
        with torch_trace.replay(other):
            torch_support.require_equal(played, model(x), "compiled and eager replay")
        torch_support.require_equal(second, first, "second run")
        torch_support.require_equal(compiled(x), first, "after the replay")
    assert counter.frame_count == 1
    assert not torch.equal(played, first)


def test_scans_are_captured_and_replayed_in_their_bodies() -> None:
    x = jnp.asarray(draw_x((T,)))
    with jax_support.running_on("reference"):
        one = nnx_layer(weights_of(0, 10)[0], MODEL[0])
        other = nnx_layer(weights_of(0, 20)[0], MODEL[0])
        body = lambda x, scale: x + one(x) * scale  # noqa: E731
        scales = jnp.asarray([1.0, 0.5, 2.0])
        _, stacks = jax.jit(lambda x: jax.lax.scan(jax_trace.capture(body), x, scales))(x)
        trace = RoutingTrace.from_scan(stacks)
        assert len(trace) == 3 and trace[2].ids.shape == (T, 2)

        def play(x: Any, step: Any) -> Any:
            layers, scale = step
            return jax_trace.replay(lambda x: x + other(x) * scale)(layers, x), None

        scanned, _ = jax.lax.scan(play, x, (trace.for_scan(), scales))
        loop = x
        for layer, scale in zip(trace, scales, strict=True):
            loop = jax_trace.replay(lambda x, scale=scale: x + other(x) * scale)(layer, loop)
        np.testing.assert_allclose(np.asarray(scanned), np.asarray(loop), rtol=1e-5, atol=1e-5)


def test_jax_layers_inside_further_transformations_are_refused() -> None:
    x = jnp.asarray(draw_x((T,)))
    with jax_support.running_on("reference"):
        layer = nnx_layer(weights_of(0, 10)[0], MODEL[0])
        model = lambda x: x + layer(x)  # noqa: E731
        _, layers = jax_trace.capture(model)(x)
        jitted = jax.jit(model)
        jitted(x)  # now its program exists, and running it runs no Python
        inside = {
            "jit": jitted,
            "remat": jax.checkpoint(model),
            "vmap": lambda x: jax.vmap(model)(x[None]),
            "scan": lambda x: jax.lax.scan(lambda x, _: (model(x), None), x, length=2),
        }
        for name, function in inside.items():
            for call in (lambda f=function: jax_trace.capture(f)(x), lambda f=function: jax_trace.replay(f)(layers, x)):
                with pytest.raises(InvalidInput, match="outside of jit, scan and other transformations"):
                    call()
            assert name and jnp.isfinite(jax.tree.leaves(function(x))[0]).all()


def test_models_that_do_not_fit_are_refused() -> None:
    x = draw_x((T,))
    with torch_support.running_on("reference"), torch_trace.capture() as recording:
        torch_model(10, "cpu")(torch_support.to_torch(x))
    first, second = recording.trace()
    fewer_experts = LayerRouting(first.ids, first.weights, first.num_experts - 1)
    cases = {
        "all 3 layers of the trace must be used, got 2": ((first, second, second), T),
        "must hold every MoE layer that runs, got 1": ((first,), T),
        "layer 0 of the trace must have ids and weights": ((second, first), T),
        r"= \(4, 2\), got \(7, 2\)": ((first, second), 4),
        "must choose among 8 experts, got 7": ((fewer_experts, second), T),
        "trace must be a RoutingTrace or a sequence of LayerRouting, got dict": ({}, T),
    }
    for message, (layers, num_tokens) in cases.items():
        with torch_support.running_on("reference"):
            model = torch_model(10, "cpu")
            with pytest.raises(InvalidInput, match=message), torch_trace.replay(layers):
                model(torch_support.to_torch(x[:num_tokens]))
        with jax_support.running_on("reference"), pytest.raises(InvalidInput, match=message):
            jax_trace.replay(jax_model(10, "nnx"))(layers, jnp.asarray(x[:num_tokens]))


def test_layers_with_a_norm_of_each_experts_result() -> None:
    """They run stage by stage, and a trace without one of them is refused by name."""
    norm = dataclasses.replace(MODEL[0], output=OutputSpec(NormSpec(1e-6), "experts"))
    weights, x = draw_weights(norm, 0), draw_x((T,), norm.d_model)
    with torch_support.running_on("reference"):
        second = make(weights)
        with torch_trace.capture() as recording:
            second(torch_support.to_torch(x))
        trace = recording.trace()
        net = torch.nn.Sequential(make(draw_weights(MODEL[0], 0)), second)
        missing = pytest.raises(InvalidInput, match=r"got 1, and layer 1 \(top-k 2 .* is missing; .* \(at 1.experts")
        with missing, torch_trace.replay(trace):
            net(torch_support.to_torch(x))
    with jax_support.running_on("reference"):
        other = nnx_layer(weights, norm)
        with pytest.raises(InvalidInput, match="must hold every MoE layer that runs, got 1, and layer 1"):
            jax_trace.replay(lambda x: other(other(x)))(trace, jnp.asarray(x))


def test_functions_without_layers_are_refused() -> None:
    with pytest.raises(InvalidInput, match="got none that ran"), torch_trace.capture():
        torch.zeros(2)
    with pytest.raises(InvalidInput, match="got one that ran none"):
        jax_trace.capture(lambda x: x + 1)(jnp.zeros(2))


def test_an_error_in_the_block_stays_the_error() -> None:
    with pytest.raises(ZeroDivisionError), torch_trace.capture():
        _ = 1 // 0
    layer = LayerRouting(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32), 1)
    with pytest.raises(ZeroDivisionError), torch_trace.replay(layer):
        _ = 1 // 0


def test_torch_programs_that_run_later_are_refused() -> None:
    with torch_support.running_on("reference"):
        *calls, _ = op_calls(moe_torch, torch.from_numpy)
        with torch_trace.capture():
            calls[0][1]()
            with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(Unsupported, match="exported or captured"):
                op_calls(moe_torch, lambda array: torch.empty(array.shape, dtype=torch.from_numpy(array).dtype))[0][1]()


@pytest.mark.gpu
def test_cuda_graphs_are_refused_while_they_are_captured() -> None:
    *calls, _ = op_calls(moe_torch, lambda array: torch_support.to_torch(array, "cuda"))
    _, call = calls[2]
    call()
    counter = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch_trace.capture():
        call()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            counter.add_(1)  # an empty graph would be warned about
            with pytest.raises(Unsupported, match="captured into a CUDA graph"):
                call()


def test_threads_record_their_own() -> None:
    x = torch_support.to_torch(draw_x((T,)))
    with torch_support.running_on("reference"):
        model = torch_model(10, "cpu")
        with torch_trace.capture() as recording:
            thread = threading.Thread(target=model, args=(x,))
            thread.start()
            thread.join()
            model(x)
    assert len(recording.layers) == len(MODEL)
