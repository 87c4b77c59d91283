"""Gradients of `moe_jax.moe` against jax.grad of a plain loop in float32, and under every JAX transformation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import RouterWeights, TopK
from moe_core.trace import LayerRouting
from moe_jax import SAVED_NAMES
from moe_jax.bridge import ffi
from moe_jax.trace import replay
from tests.support.jax import (
    ENGINES,
    REAL_KERNELS,
    on_engines,
    program_text,
    run_stack,
    running_on,
    small_layer,
    stacked_weights,
    to_jax,
    weight_copies,
)
from tests.support.training.jax import (
    CASES,
    SOFTMAX,
    E,
    Problem,
    compile_quickly,
    gradients_in,
    loss_of,
    make,
    op_loss,
    plain,
    plans_in,
    require_equal,
    run,
    split,
)

on_cases = pytest.mark.parametrize(("spec", "kind", "options"), [pytest.param(*one[1:], id=one[0]) for one in CASES])


@functools.cache
def plainly(spec: MoESpec, kind: type, **options: Any) -> Callable[..., Any]:
    """(arrays, ids) -> (gradients, weights) of the loop."""
    problem = make(spec, kind, **options)
    _, put = split(problem)

    def value(arrays: dict[str, Any], ids: jax.Array) -> Any:
        results = plain(put(arrays), ids, spec)
        return loss_of(results, problem), results[1]

    return compile_quickly(jax.grad(value, has_aux=True))


def require_close(ours: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert set(ours) == set(wanted)
    for name, gradient in ours.items():
        expected = np.asarray(wanted[name])
        assert gradient.shape == expected.shape and np.isfinite(expected).all()
        scale = max(float(np.abs(expected).max()), 1e-3)
        np.testing.assert_allclose(np.asarray(gradient), expected, rtol=2e-5, atol=2e-5 * scale, err_msg=name)


@pytest.mark.parametrize(
    ("engine", "spec", "kind", "options"),
    [pytest.param(engine, *case[1:], id=f"{case[0]}-{engine}") for engine in ENGINES for case in
        (CASES if engine != "interpreter" else CASES[:3])],
)  # fmt: skip
def test_gradients_are_those_of_a_plain_loop(engine: str, spec: MoESpec, kind: type, options: dict[str, Any]) -> None:
    with running_on(engine):
        problem = to_jax(make(spec, kind, **options))
        arrays, put = split(problem)

        def value(arrays: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
            result = run(put(arrays), spec)
            return loss_of((result.output, result.weights, result.logits), problem), result.ids

        ours, ids = jax.jit(jax.grad(value, has_aux=True))(arrays)
        require_close(ours, plainly(spec, kind, **options)(arrays, ids)[0])


@on_cases
def test_eager_and_jitted_twice_are_equal_bits(spec: MoESpec, kind: type, options: dict[str, Any]) -> None:
    with running_on("reference"):
        problem = to_jax(make(spec, kind, **options))
        arrays, put = split(problem)

        def step(arrays: dict[str, Any]) -> Any:
            return jax.value_and_grad(lambda arrays: op_loss(put(arrays), spec))(arrays)

        value, eager = step(arrays)
        jitted = jax.jit(step)
        first, second = jitted(arrays), jitted(arrays)
        require_equal(first, second)
        require_equal(first[1], eager)
        assert np.isclose(value, first[0])


@on_engines
def test_one_call_forward_and_one_backward(engine: str) -> None:
    with running_on(engine):
        problem = to_jax(make(SOFTMAX))
        arrays, put = split(problem)
        lowered = jax.jit(jax.grad(lambda arrays: op_loss(put(arrays), SOFTMAX))).lower(arrays)
        assert [plan.name for plan in plans_in(lowered)] == ["moe", "moe_backward"]
        calls = [line for line in program_text(lowered).splitlines() if " custom-call(" in line]
        assert len(calls) == 2, calls


@on_engines
def test_undifferentiated_nothing_is_kept(engine: str) -> None:
    with running_on(engine):
        problem = to_jax(make(SOFTMAX))
        for arrays in (problem, jax.lax.stop_gradient(problem)):
            (plan,) = plans_in(jax.jit(lambda problem: op_loss(problem, SOFTMAX)).lower(arrays))
            assert [buffer.name for buffer in plan.outputs] == [
                "output",
                "tokens_per_expert",
                "invalid_ids",
                "ids",
                "weights",
                "logits",
            ]
        scale = jax.grad(lambda scale, problem: scale * op_loss(problem, SOFTMAX))
        (plan,) = plans_in(jax.jit(scale).lower(2.0, problem))
        assert not [buffer for buffer in plan.outputs if buffer.name.startswith("saved.")]


@pytest.mark.parametrize(
    "asked",
    [("x",), ("experts.down",), ("routing.weight",), ("shared.gate",), ("x", "experts.gate_up_bias", "routing.bias")],
)
def test_what_is_not_differentiated_is_not_computed(asked: tuple[str, ...]) -> None:
    _, spec, kind, options = CASES[2]
    with running_on("reference"):
        problem = to_jax(make(spec, kind, **options))
        arrays, put = split(problem)
        every = jax.grad(lambda arrays: op_loss(put(arrays), spec))(arrays)
        some = {name: arrays[name] for name in asked}
        step = jax.jit(jax.grad(lambda some: op_loss(put(some), spec)))
        *_, plan = plans_in(step.lower(some))
        assert gradients_in(plan) == tuple(f"d_{name}" for name in asked)
        require_equal(step(some), {name: every[name] for name in asked})


def test_arguments_differentiated_in_turn() -> None:
    """JAX uses again what it traced for one set of arguments, after another: each set gets its own gradients."""
    with running_on("reference"):
        problem = to_jax(make(SOFTMAX))
        arrays, put = split(problem)
        gradient = jax.grad(lambda arrays: op_loss(put(arrays), SOFTMAX))
        wanted = gradient(arrays)
        for names in (("x",), tuple(arrays), ("experts.down", "routing.weight"), ("x",), tuple(arrays)):
            some = {name: arrays[name] for name in names}
            require_equal(gradient(some), {name: wanted[name] for name in names})
            require_equal(jax.jit(gradient)(some), {name: wanted[name] for name in names})
            assert all(np.asarray(one).any() for one in wanted.values())


def test_correction_bias_and_integers_have_no_gradient() -> None:
    _, spec, kind, options = CASES[2]
    with running_on("reference"):
        problem = to_jax(make(spec, kind, **options))

        def loss(correction: jax.Array, problem: Problem) -> jax.Array:
            routing = dataclasses.replace(problem.routing, correction_bias=correction)
            return op_loss(problem._replace(routing=routing), spec)

        correction = problem.routing.correction_bias
        assert not np.asarray(jax.jit(jax.grad(loss))(correction, problem)).any()
        (plan,) = plans_in(jax.jit(jax.value_and_grad(loss)).lower(correction, problem))
        assert plan.name == "moe" and not any(buffer.name.startswith("saved.") for buffer in plan.outputs)
        layer = to_jax(make(CASES[5][1], TopK, expert_map=True))
        ids = jax.grad(lambda routing: run(layer._replace(routing=routing), CASES[5][1]).output.sum(), allow_int=True)(
            layer.routing
        ).ids
        assert ids.dtype == jax.dtypes.float0
        output, pull = jax.vjp(lambda x: run(problem._replace(x=x), spec), problem.x)
        zeros = jax.tree.map(
            lambda one: np.zeros(one.shape, jax.dtypes.float0) if one.dtype == jnp.int32 else jnp.zeros_like(one),
            output,
        )
        (gradient,) = pull(zeros)
        assert not np.asarray(gradient).any()


def test_losses_alone_flow_into_the_router() -> None:
    with running_on("reference"):
        problem = to_jax(make(SOFTMAX))

        def loss(routing: RouterWeights, of: Callable[[Any], Any]) -> jax.Array:
            return (of(problem._replace(routing=routing)) ** 2).sum()

        ours = jax.grad(loss)(problem.routing, lambda problem: run(problem, SOFTMAX).logits)
        wanted = jax.grad(loss)(problem.routing, lambda problem: problem.x @ problem.routing.weight)
        np.testing.assert_allclose(np.asarray(ours.weight), np.asarray(wanted.weight), rtol=1e-4, atol=1e-5)


@on_engines
def test_scan_over_stacked_layers(engine: str) -> None:
    """Gradients of the stack equal those of a loop over its layers; no weight and no stack of gradients is copied."""
    with running_on(engine):
        (x, _, routing), spec = to_jax(small_layer()[:3]), small_layer().spec
        stacked = stacked_weights()

        def scanned(x: jax.Array, stacked: Any, routing: RouterWeights, recompute: bool = False) -> jax.Array:
            return (run_stack(x, stacked, routing, dataclasses.replace(spec, recompute=recompute)) ** 2).sum()

        def looped(x: jax.Array, stacked: moe_jax.ExpertWeights, routing: RouterWeights) -> jax.Array:
            for number in range(stacked.down.shape[0]):
                experts = jax.tree.map(lambda array: array[number], stacked)  # noqa: B023
                x = x + moe_jax.moe(x, experts, routing, spec).output
            return (x**2).sum()

        step = jax.jit(jax.grad(scanned, argnums=(0, 1, 2)))
        found = step(x, stacked, routing)
        require_equal(found[:2], jax.jit(jax.grad(looped, argnums=(0, 1, 2)))(x, stacked, routing)[:2])
        again = functools.partial(scanned, recompute=True)
        require_equal(jax.jit(jax.grad(again, argnums=(0, 1, 2)))(x, stacked, routing), found)
        lowered = step.lower(x, stacked, routing)
        assert [plan.name for plan in plans_in(lowered)] == ["moe", "moe_backward"]
        compiled = program_text(lowered)
        # Of such size are the sums: begun at zero before the loop, then one layer's gradient added in place.
        adding = ("add_dynamic_update_slice", "dynamic_update_slice", "dynamic_slice", "add", "broadcast")
        for line in weight_copies(compiled, stacked):
            operation = line.removeprefix("ROOT ").lstrip("%").split(" ")[0].split(".")[0].replace("-", "_")
            assert operation.removeprefix("wrapped_").removeprefix("loop_").startswith(adding), line


SAVING = [((), 2), (SAVED_NAMES[:1], 2), (SAVED_NAMES[1:], 2), (SAVED_NAMES, 1)]
#: Of MaxText's policies: `minimal`, `custom` with its names for experts alone, and `save_dot_except_mlpwi`.
MAXTEXT = [(("mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo"), 1), (("moe_mlpwi_0",), 1), (("moe_mlpwi_1",), 1), (("mlpwo",), 2)]


@pytest.mark.parametrize(("saved", "forwards"), SAVING + MAXTEXT)
def test_remat_saves_by_name(saved: tuple[str, ...], forwards: int) -> None:
    """With all that a backward reads saved it runs alone; otherwise after the forward, again; to the same bits."""
    with running_on("reference"):
        problem = to_jax(make(SOFTMAX))
        policy = jax.checkpoint_policies.save_only_these_names(*saved)

        def loss(problem: Problem, remat: bool) -> jax.Array:
            block: Callable[[Problem], jax.Array] = lambda problem: problem.x + run(problem, SOFTMAX).output  # noqa: E731
            return jnp.sin(jax.checkpoint(block, policy=policy)(problem) if remat else block(problem)).sum()

        step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
        require_equal(step(problem, True), step(problem, False))
        # Before XLA, which on a CPU merges equal calls in spite of the barriers between them.
        names = [plan.name for plan in plans_in(step.lower(problem, True))]
        assert names == ["moe"] * forwards + ["moe_backward"]


def test_more_names_of_a_policy_save_nothing_twice() -> None:
    with running_on("reference"):
        problem = to_jax(make(SOFTMAX))

        def saved(*names: str) -> list[str]:
            policy = jax.checkpoint_policies.save_only_these_names(*names)
            block = jax.checkpoint(lambda problem: run(problem, SOFTMAX).output.sum(), policy=policy)
            return sorted(
                str(array) for array in jax.tree.leaves(jax.eval_shape(lambda p: jax.vjp(block, p)[1], problem))
            )

        assert saved(*SAVED_NAMES) == saved("mlpwi_0", "mlpwi_1", "moe_mlpwi_0", "moe_mlpwi_1") != saved()


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_shard_map_data_parallel(check_vma: bool, inside: bool) -> None:
    """The sum over devices of the gradients of their tokens is that of all tokens, taken inside or around shard_map."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])
    layer = small_layer(num_tokens=8)
    with running_on("reference"):
        x, *weights = to_jax(layer[:3])

        def loss(weights: list[Any], x: jax.Array) -> jax.Array:
            return (moe_jax.moe(x, *weights, layer.spec).output ** 2).sum()

        def part(weights: list[Any], x: jax.Array) -> Any:
            if not inside:
                return jax.lax.psum(loss(weights, x), "data")
            found = jax.grad(loss)(weights, x)
            # With check_vma JAX knows that the weights are the same everywhere, and has summed already.
            return found if check_vma else jax.lax.psum(found, "data")

        mapped = jax.shard_map(part, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
        found = jax.jit(mapped if inside else jax.grad(mapped))(weights, x)
        wanted = jax.jit(jax.grad(loss))(weights, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, wanted)


@on_cases
def test_a_replayed_layer_trains_its_router(spec: MoESpec, kind: type, options: dict[str, Any]) -> None:
    """Weights are the trace's; the gradient is that of the weights that the router gives the trace's experts."""
    with running_on("cuda" if REAL_KERNELS == "cuda" else "reference"):
        problem = to_jax(make(spec, kind, **options))
        arrays, put = split(problem)
        num_experts = E + 2 if options.get("expert_map") else E
        own = run(to_jax(make(spec, kind, seed=5, **options)), spec)
        wanted, weights = plainly(spec, kind, **options)(arrays, own.ids)
        chosen = LayerRouting(own.ids, problem.routing.weights if weights is None else weights, num_experts)
        ours = jax.jit(jax.grad(lambda arrays: replay(lambda: op_loss(put(arrays), spec))(chosen)))(arrays)
        require_close(ours, wanted)
        if kind is not TopK:
            router = "routing.weight" if kind is RouterWeights else "routing.logits"
            assert np.abs(np.asarray(ours[router])).max() > 0


@pytest.mark.gpu
def test_no_python_in_training_once_buffers_recur() -> None:
    """XLA replays the launches of eight layers, forward and backward, without entering Python."""
    with running_on("cuda"):
        layer = small_layer("bfloat16", num_tokens=32)
        x, experts, routing = to_jax(layer[:3])

        @jax.jit
        @jax.grad
        def step(experts: moe_jax.ExpertWeights) -> jax.Array:
            y = x
            for _ in range(8):
                y = moe_jax.moe(y, experts, routing, layer.spec).output
            return y.astype(jnp.float32).sum()

        def run() -> None:
            for gradient in jax.tree.leaves(step(experts)):
                gradient.block_until_ready()
                gradient.delete()

        expected = jax.tree.map(np.asarray, step(experts))
        for _ in range(10):
            run()
        before = ffi.callback_count()
        for _ in range(20):
            run()
        assert ffi.callback_count() == before
        require_equal(step(experts), expected)
