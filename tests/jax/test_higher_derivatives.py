"""Forward mode and second derivatives in float64: tangents against reverse mode, second derivatives against differences
of two gradients, and a layer's Hessian against a dense one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_core.layers import ExpertsSpec, LatentSpec, MoELayerSpec, OutputSpec, SharedExpertsSpec
from moe_core.trace import LayerRouting
from moe_jax import (
    Activation,
    MatmulOperands,
    MatmulSpec,
    NormSpec,
    RouterSpec,
    RouterWeights,
    TokenRounding,
    Unsupported,
    layers,
)
from moe_jax.parallel import ExchangeSpec, ExpertAxis
from moe_jax.trace import replay
from tests.support.jax import running_on
from tests.support.training.jax import CASES, E, K, Problem, T, compile_quickly, make, run

STEP = 1e-5


@pytest.fixture(autouse=True)
def x64() -> Iterator[None]:
    with jax.enable_x64(True), running_on("reference"):
        yield


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([*shape, seed]).standard_normal(shape)


def is_float(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def wide(tree: Any) -> Any:
    return jax.tree.map(lambda one: one.astype(np.float64) if is_float(one) else one, tree)


def check(function: Callable[..., Any], *arguments: Any) -> None:
    """function: of trees of arrays to one of arrays, differentiated by all that are floating."""
    flat, structure = jax.tree.flatten(arguments)
    places = [number for number, one in enumerate(flat) if is_float(one)]

    def of(given: list[jax.Array]) -> list[jax.Array]:
        every = list(flat)
        for number, one in zip(places, given, strict=True):
            every[number] = one
        return [one for one in jax.tree.leaves(function(*jax.tree.unflatten(structure, every))) if is_float(one)]

    point = [np.asarray(flat[number]) for number in places]
    along = [draw(*one.shape, seed=number) for number, one in enumerate(point)]

    def dot(first: Any, second: Any) -> Any:
        return sum(jnp.vdot(one, other) for one, other in zip(first, second, strict=True))

    def value(given: list[jax.Array]) -> jax.Array:
        return sum(jnp.vdot(jnp.sin(one), draw(*one.shape, seed=99)) for one in of(given))

    @compile_quickly
    def every(point: Any, along: Any) -> Any:
        _, moved = jax.jvp(value, (point,), (along,))
        slope, curved = jax.jvp(jax.grad(value), (point,), (along,))
        twice = jax.vjp(jax.grad(value), point)[1](along)[0]
        return moved, dot(slope, along), slope, curved, twice

    forward, back, _, curved, twice = jax.tree.map(np.asarray, every(point, along))
    np.testing.assert_allclose(forward, back, rtol=1e-11, atol=1e-12)
    ends = [[one + sign * STEP * step for one, step in zip(point, along, strict=True)] for sign in (1, -1)]
    near = [jax.tree.map(np.asarray, every(end, along)[2]) for end in ends]
    for number, (one, other) in enumerate(zip(curved, twice, strict=True)):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)
        difference = (near[0][number] - near[1][number]) / (2 * STEP)
        np.testing.assert_allclose(one, difference, rtol=2e-5, atol=2e-6, err_msg=f"argument {number}")


@pytest.mark.parametrize(("spec", "kind", "options"), [pytest.param(*case[1:], id=case[0]) for case in CASES[1:]])
def test_moe(spec: Any, kind: type, options: dict[str, Any]) -> None:
    problem = wide(make(spec, kind, **options))
    arrays, masks = (problem.x, problem.experts, problem.routing, problem.shared), problem[4:]
    check(lambda *given: run(Problem(*given, *masks), spec)[:4], *arrays)


def test_moe_with_a_stack_recomputed_and_replayed() -> None:
    spec = dataclasses.replace(CASES[0][1], recompute=True)
    problem = wide(make(spec, seed=3))
    experts = jax.tree.map(lambda one: jnp.stack([one, -one]), problem.experts)
    experts = dataclasses.replace(experts, layer_index=jnp.ones(1, jnp.int32))
    check(lambda x, e, r: moe_jax.moe(x, e, r, spec).output, problem.x, experts, problem.routing)
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(E, dtype=np.int32), (T, 1)), axis=1)[:, :K]
    problem, trace = make(spec), LayerRouting(ids, np.full((T, K), 0.5, np.float32), E)
    call = lambda weight: replay(lambda: run(problem._replace(routing=RouterWeights(weight)), spec).output)(trace)  # noqa: E731
    weight = jnp.asarray(problem.routing.weight)
    (value, moved), pull = jax.jvp(call, (weight,), (weight,)), jax.vjp(call, weight)[1]
    np.testing.assert_allclose(jnp.vdot(moved, value), jnp.vdot(pull(value)[0], weight), rtol=1e-4)


def ids(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(-1, E, shape), jnp.int32)


def product(gather: str, scatter: str, **options: Any) -> tuple[Callable[..., Any], Any]:
    table = ids(5, 2)
    layout = moe_jax.make_layout(table, E, alignment=options.pop("alignment", 1))
    rows = {"row": layout.spec.capacity, "slot": 10, "token": 5}[gather]
    operands = MatmulOperands(draw(rows, 4), draw(E, 3, 4), **options)
    spec = MatmulSpec("out_in", gather, scatter)
    # Rows without a slot hold anything.
    kept = layout.slot_of_row >= 0 if scatter == "row" else jnp.ones(10, bool)
    kept_x = kept if gather == "row" else jnp.ones(rows, bool)

    def of(operands: MatmulOperands) -> jax.Array:
        operands = dataclasses.replace(operands, x=jnp.where(kept_x[:, None], operands.x, 0))
        return jnp.where(kept[:, None], moe_jax.matmul_ogs(operands, layout, spec), 0)

    return of, operands


def _layout(**options: Any) -> Any:
    return moe_jax.make_layout(ids(4, 2), E, **options)


def _activated(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: (lambda x: moe_jax.activation(x, Activation(name, **options)), draw(4, 6))


_BOUNDED = RouterSpec(2, scoring="sigmoid", renormalize=True, epsilon=0.1, logit_scale=0.5, softcap=2.0)
_ROUNDED = RouterSpec(2, scoring="sigmoid", scale=2.0), TokenRounding(16)
_DENSE = MatmulSpec("in_out")
_GATED = ("silu", "gelu_tanh", "swiglu_oai", "clamped_silu", "softcapped_silu")
#: Made under x64.
STAGES: dict[str, Callable[[], Any]] = {
    "router": lambda: (lambda x, w, b: moe_jax.router(x, w, bias=b), draw(4, 3), draw(3, E), draw(E)),
    "router, wide": lambda: (lambda x, w: moe_jax.router(x, w, wide=x), draw(4, 3), draw(3, E)),
    "norm": lambda: (lambda x, w: moe_jax.rms_norm(x, w, NormSpec(scale=2.0, centred=True)), draw(4, 3), draw(3)),
    "norm first": lambda: (lambda x, w: moe_jax.rms_norm(x, w, NormSpec(weight_first=True)), draw(4, 3), draw(3)),
    "route": lambda: (lambda x: moe_jax.route(x, _BOUNDED).weights, draw(4, E)),
    "route_rounded": lambda: (lambda x: moe_jax.route_rounded(x, *_ROUNDED).weights, draw(32, E)),
    "gather_rows": lambda: (lambda x: moe_jax.gather_rows(x, _layout(alignment=4)), draw(4, 3)),
    "reduce": lambda: (lambda y, s: moe_jax.reduce(y, _layout(), shared=s), draw(8, 3), draw(4, 3)),
    "reduce rows": lambda: (lambda y: moe_jax.reduce(y, _layout(), order="row"), draw(8, 3)),
    "dense": lambda: (lambda x, w: moe_jax.matmul_ogs(MatmulOperands(x, w), None, _DENSE), draw(4, 3), draw(3, 5)),
    "token to slot": lambda: product("token", "slot", bias=draw(E, 3), row_weight=draw(5, 2)),
    "slot to row": lambda: product("slot", "row", alignment=4),
    "row to slot": lambda: product("row", "slot"),
    "gelu": _activated("gelu", gated=False),
    "relu2": _activated("relu2", gated=False),
} | {name: _activated(name, limit=0.7, gate_layout="interleaved") for name in _GATED}


@pytest.mark.parametrize("name", STAGES)
def test_stage(name: str) -> None:
    check(*STAGES[name]())


def layer(**options: Any) -> tuple[MoELayerSpec, Any]:
    spec = MoELayerSpec(4, 3, 5, 2, **{"router": RouterSpec(renormalize=True), **options})
    shapes = jax.eval_shape(functools.partial(layers.initialize, spec), jax.random.key(0))
    return spec, jax.tree.map(lambda one: draw(*one.shape) / 2, shapes)


@pytest.mark.parametrize(
    "options",
    [
        {"capacity_factor": 1.0, "shared_experts": SharedExpertsSpec(2, gate=True), "router_bias": True},
        {
            "router_norm": NormSpec(),
            "expert_scale": True,
            "latent": LatentSpec(3, NormSpec()),
            "output": OutputSpec(NormSpec(centred=True, weight_first=True), of="experts"),
        },
    ],
    ids=lambda options: next(iter(options)),
)
def test_layer(options: dict[str, Any]) -> None:
    spec, parameters = layer(**options)

    def outputs(parameters: Any, x: Any) -> Any:
        y, aux = layers.forward(parameters, x, spec, return_aux=True)
        return y, aux.load_balance_loss, aux.z_loss

    check(outputs, parameters, draw(6, 4))


def dense(parameters: Any, x: jax.Array) -> jax.Array:
    """The layer of `layer()` without a choice of rows."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ parameters["gate"]["kernel"]), 2)
    weights = (
        jnp.zeros((len(x), 5)).at[jnp.arange(len(x))[:, None], chosen].set(weights / weights.sum(-1, keepdims=True))
    )
    hidden = jax.nn.silu(jnp.einsum("td,edf->tef", x, parameters["wi_0"])) * jnp.einsum(
        "td,edf->tef", x, parameters["wi_1"]
    )
    return jnp.einsum("tef,efd,te->td", hidden, parameters["wo"], weights)


@functools.cache
def hessian_of(call: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def of(x: jax.Array, parameters: Any) -> jax.Array:
        return jnp.square(call(parameters, x)).sum(dtype=jnp.promote_types(x.dtype, jnp.float32))

    return compile_quickly(jax.hessian(of))


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float64, 1e-13), (jnp.float32, 2e-6), (jnp.bfloat16, 0.03)])
def test_hessian_of_a_small_layer(dtype: Any, bound: float) -> None:
    """jax.hessian is forward mode over reverse mode, each inside vmap."""
    spec, parameters = layer()
    x = draw(2, 4)
    parameters, x = jax.tree.map(lambda one: one.astype(dtype).astype(np.float64), (parameters, x))
    exact = hessian_of(dense)(x, parameters)
    narrow = jax.tree.map(lambda one: one.astype(dtype), (x, parameters))
    hessian = hessian_of(functools.partial(layers.forward, spec=spec))(*narrow)
    error = np.linalg.norm(np.asarray(hessian, np.float64) - exact) / np.linalg.norm(exact)
    assert error < bound, error


def test_transformations_of_forward_mode() -> None:
    spec, parameters = layer()
    call = lambda x: layers.forward(parameters, x, spec)  # noqa: E731
    weights = np.stack([parameters["wo"], 2 * parameters["wo"]])

    def scanned(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda _, row: (None, jax.checkpoint(call)(row)), None, x)[1]

    def several(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda wo: layers.forward(parameters | {"wo": wo}, x, spec))(weights).sum()

    @compile_quickly
    def every(x: jax.Array, along: jax.Array) -> Any:
        moved = [jax.jvp(function, (x,), (along,))[1] for function in (call, scanned)]
        each = jax.vmap(lambda row, step: jax.jvp(call, (row,), (step,))[1])(x, along)
        wanted = jax.jvp(lambda x: dense(parameters, x.reshape(6, 4)).reshape(x.shape), (x,), (along,))[1]
        slopes = jax.grad(several)(x), 3 * jax.grad(lambda x: call(x).sum())(x)
        return wanted, [jax.linearize(jax.vmap(call), x)[1](along), *moved, each], slopes

    wanted, found, slopes = every(draw(3, 2, 4), draw(3, 2, 4, seed=1))
    for one in found:
        np.testing.assert_allclose(one, wanted, atol=1e-12)
    np.testing.assert_allclose(*slopes, atol=1e-12)


def test_quantised_weights_have_first_gradients_alone() -> None:
    with jax.enable_x64(False):
        spec = MoELayerSpec(32, 32, 4, 2)
        parameters = layers.initialize(spec, jax.random.key(0))
        parameters, spec = layers.quantize_experts(parameters, spec, moe_jax.scheme_named("mxfp4_w4a16"))
        call = lambda x: layers.forward(parameters, x, spec)  # noqa: E731
        x = jnp.ones((2, 32))
        assert jax.grad(lambda x: call(x).sum())(x).any()
        for derive in (lambda: jax.jvp(call, (x,), (x,)), lambda: jax.hessian(lambda x: call(x).sum())(x)):
            with pytest.raises(Unsupported, match="moe with quantised weights has reverse-mode gradients alone"):
                derive()


MESHED = MoELayerSpec(4, 3, 4, 2, shared_experts=SharedExpertsSpec(2, gate=True), experts=ExpertsSpec(bias=True))


def derivatives(axis: Any, point: Any, along: Any) -> Any:
    def loss(point: Any) -> jax.Array:
        y, aux = layers.forward(point[0], point[1], MESHED, expert_axis=axis, return_aux=True)
        return jnp.sin(y).sum() + aux.load_balance_loss

    return jax.jvp(loss, (point,), (along,))[1], jax.jvp(jax.grad(loss), (point,), (along,))[1]


@functools.cache
def on_one_device() -> tuple[Any, Any, Any]:
    """Parameters and x, a direction, and the derivatives there. Made under x64."""
    parameters = jax.eval_shape(functools.partial(layers.initialize, MESHED), jax.random.key(0))
    point = jax.tree.map(lambda one: draw(*one.shape).astype(jnp.float32), (parameters, draw(8, 4)))
    along = jax.tree.map(lambda one: draw(*one.shape, seed=1).astype(jnp.float32), point)
    return point, along, compile_quickly(functools.partial(derivatives, None))(point, along)


@pytest.mark.parametrize(("mode", "rows", "axes", "kind"), [
    ("all_to_all", "tokens", {"ep": 4}, AxisType.Explicit), ("padded", "slots", {"data": 2, "ep": 2}, AxisType.Auto),
    ("all_gather", "tokens", {"ep": 2}, AxisType.Explicit), (None, "", {"data": 4}, AxisType.Auto),
])  # fmt: skip
def test_layers_on_a_mesh(mode: str | None, rows: str, axes: dict[str, int], kind: AxisType) -> None:
    (parameters, x), along, wanted = on_one_device()
    axis = None if mode is None else ExpertAxis("ep", ExchangeSpec(mode, rows))
    devices = jax.devices("cpu")[: int(np.prod(list(axes.values())))]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=devices)
    with jax.set_mesh(mesh):
        specs = (
            layers.expert_sharding(MESHED, mesh)
            if axis
            else jax.tree.map(lambda _: NamedSharding(mesh, P()), parameters)
        )
        point, along = (
            jax.device_put(tree, (specs, NamedSharding(mesh, P(next(iter(axes)))))) for tree in ((parameters, x), along)
        )
        found = compile_quickly(functools.partial(derivatives, axis))(point, along)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, wanted)
