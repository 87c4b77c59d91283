"""Expert parallelism under JAX's transformations, calls that are refused, and planted faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel import ExchangeSpec, Placement, plan_exchange
from moe_core.specs import MoESpec, RouterSpec, Tuning
from moe_core.specs.operands import RouterLogits, TopK
from moe_jax import parallel
from moe_jax.parallel import exchange as arithmetic
from moe_jax.parallel import forward, function, routes
from moe_jax.parallel.forward import Group
from tests.support.jax import running_on, to_jax
from tests.support.parallel.jax import RANKS, by_place, compare_with_one_device, ep_mesh, group_step, run_group
from tests.support.parallel.twins import PLAIN, Problem, draw_problem

PLACEMENT = Placement.linear(6, 2)
PADDED = ExchangeSpec("padded", "slots")


def problem_of(**options: Any) -> Problem:
    return draw_problem(1, PLACEMENT, (4, 4), 2, "random", "float32", PLAIN, **options)


def arrays_of(problem: Problem) -> tuple[Any, ...]:
    return to_jax((problem.x, by_place(problem.experts, PLACEMENT), problem.routing.ids, problem.routing.weights))


def rank_forward(x: Any, experts: Any, ids: Any, weights: Any, **options: Any) -> Any:
    options = {"placement": PLACEMENT, "exchange": PADDED} | options
    return parallel.moe(x, experts, TopK(ids, weights), PLAIN, **options)


def shard(call: Callable[..., Any], mesh: Any = None, tokens: Any = RANKS, **options: Any) -> Any:
    specs = {"in_specs": (tokens, RANKS, tokens, tokens), "out_specs": tokens}
    return jax.shard_map(call, mesh=ep_mesh(2) if mesh is None else mesh, **(specs | options))


def test_a_layer_in_scan_and_checkpoint_beside_data_parallelism() -> None:
    """Two groups of two ranks, with residual layers in a scan: the experts' gradients are summed over the groups."""
    problem = problem_of()
    x, experts, ids, weights = arrays_of(problem)
    mesh = jax.make_mesh((2, 2), ("data", "ep"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:4])

    def loss(x: Any, experts: Any, call: Callable[..., Any]) -> Any:
        def layer(x: Any, _: Any) -> Any:
            return x + call(x, experts), None

        return jnp.sin(jax.lax.scan(jax.checkpoint(layer), x, None, length=2)[0]).sum()

    both = P(("data", "ep"))
    step = shard(lambda *given: rank_forward(*given).output, mesh, both)
    with running_on("reference"):
        twice = [jnp.concatenate([array, array]) for array in (x, ids, weights)]
        together = jax.jit(jax.grad(lambda x, e: loss(x, e, lambda x, e: step(x, e, *twice[1:])), argnums=(0, 1)))(
            twice[0], experts
        )
        one = jax.jit(
            jax.grad(
                lambda x, e: loss(x, e, lambda x, e: moe_jax.moe(x, e, TopK(ids, weights), PLAIN).output),
                argnums=(0, 1),
            )
        )(x, to_jax(problem.experts))
    np.testing.assert_array_equal(together[0], np.concatenate([one[0], one[0]]))
    jax.tree.map(lambda ours, other: np.testing.assert_array_equal(ours, 2 * np.asarray(other)), together[1], one[1])


def test_second_derivatives_are_those_of_one_device() -> None:
    problem = problem_of()
    x, experts, ids, weights = arrays_of(problem)
    call = shard(lambda *given: rank_forward(*given).output)
    whole = to_jax(problem.experts)
    outputs = (
        lambda x, weights: call(x, experts, ids, weights),
        lambda x, weights: moe_jax.moe(x, whole, TopK(ids, weights), PLAIN).output,
    )
    with running_on("reference"):
        found = []
        for output in outputs:
            slope = jax.grad(lambda *given, output=output: jnp.sin(output(*given)).sum(), (0, 1))
            found.append(jax.jit(lambda *moves, slope=slope: jax.jvp(slope, (x, weights), moves)[1])(x + 1, ids + 0.5))
    jax.tree.map(lambda ours, other: np.testing.assert_allclose(ours, other, 1e-5, 1e-4), *found)


@pytest.mark.parametrize("mode", ["all_to_all", "padded"])
def test_programs_for_gpus_hold_the_collectives_that_the_mode_names(mode: str) -> None:
    problem = problem_of()
    with running_on("reference"), moe_jax.export_target(moe_jax.Target("cuda", 90, 132)):
        call = jax.jit(shard(lambda *given: rank_forward(*given, exchange=ExchangeSpec(mode)).output))
        structs = [
            jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), given) for given in arrays_of(problem)
        ]
        checks = [export.DisabledSafetyCheck.custom_call("moebius_plan"),
                  export.DisabledSafetyCheck.custom_call("ragged_all_to_all")]  # fmt: skip
        text = export.export(call, platforms=["cuda"], disabled_checks=checks)(*structs).mlir_module()
    # Rows, ids beside weights, results. Counts, and where their rows begin.
    assert text.count("@ragged_all_to_all") == (3 if mode == "all_to_all" else 0)
    assert text.count("stablehlo.all_to_all") == (2 if mode == "all_to_all" else 3)
    assert "stablehlo.all_gather" not in text


def test_tokens_that_every_rank_has_and_ranks_without_tokens() -> None:
    """x that does not differ between ranks is every rank's own; T = 0 gives an empty output."""
    problem = problem_of()
    x, experts, ids, weights = arrays_of(problem)
    every = jax.jit(shard(lambda *given: rank_forward(*given).output, tokens=P(), out_specs=RANKS))
    empty = jax.jit(shard(lambda *given: rank_forward(*given).output, out_specs=RANKS))
    with running_on("reference"):
        alike = every(x, experts, ids, weights)
        twice = [jnp.concatenate([array, array]) for array in (x, ids, weights)]
        alone = moe_jax.moe(twice[0], to_jax(problem.experts), TopK(*twice[1:]), PLAIN).output
        assert empty(x[:0], experts, ids[:0], weights[:0]).shape == (0, 12)
    np.testing.assert_array_equal(alike, alone)


REFUSED: dict[str, tuple[type[Exception], dict[str, Any], str]] = {
    "axis": (InvalidInput, {"axis_name": "model"}, r"axis_name must be a mesh axis that is manual here, got 'model'"),
    "ranks": (InvalidInput, {"placement": Placement.linear(6, 3)}, "placement must be of the 2 ranks of the axis 'ep'"),
    "places": (InvalidInput, {"placement": Placement.linear(9, 2)}, "experts must be the 5 places of this rank, got"),
    "peer": (Unsupported, {"exchange": ExchangeSpec("peer")}, "exchange.mode must not be 'peer' in moe_jax.parallel"),
    "chunks": (Unsupported, {"exchange": ExchangeSpec(chunks=2)}, "exchange.chunks must not be 2 .*pass 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_calls_are_refused(name: str) -> None:
    error, options, message = REFUSED[name]
    call = shard(lambda *given: rank_forward(*given, **options))
    with running_on("reference"), pytest.raises(error, match=message):
        jax.eval_shape(call, *arrays_of(problem_of()))


def test_calls_outside_shard_map_and_of_wrong_arrays_are_refused() -> None:
    x, experts, ids, weights = arrays_of(problem_of())
    with running_on("reference"), pytest.raises(InvalidInput, match=r"call this inside jax.shard_map over that axis"):
        rank_forward(x, experts, ids, weights)
    call = shard(lambda x, *given: rank_forward(x[None], *given))
    with (
        running_on("reference"),
        pytest.raises(InvalidInput, match=r"x must be bf16, fp16 or fp32 \[T, D\], got float32"),
    ):
        jax.eval_shape(call, x, experts, ids, weights)
    call = shard(
        lambda x, experts, *given: rank_forward(x, dataclasses.replace(experts, down=experts.down[..., 0]), *given)
    )
    with running_on("reference"), pytest.raises(InvalidInput, match=r"experts must be the 3 places .*, got down \[3, "):
        jax.eval_shape(call, x, experts, ids, weights)


WRONG: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "ids": (lambda ids, weights: TopK(weights, weights), r"routing\.ids must be int32 or .*, got float32"),
    "weights": (lambda ids, weights: TopK(ids, ids),
        r"routing\.weights must be float32 or bfloat16 or float16, got int32"),
    "columns": (lambda ids, weights: TopK(ids, weights[:, 1:]), r"routing\.weights must be \[4, 2\], got \(4, 1\)"),
    "tokens": (lambda ids, weights: TopK(ids[1:], weights[1:]), r"routing\.ids must be \[4, top_k\], got \(3, 2\)"),
    "logits": (lambda ids, weights: RouterLogits(jnp.zeros((4, 7), jnp.float32)),
        r"routing must score the tokens of x for all experts of placement, \[4, 6\], got \[4, 7\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_routings_are_refused(name: str) -> None:
    make, message = WRONG[name]
    spec = MoESpec(PLAIN.activation, RouterSpec(2)) if name == "logits" else PLAIN

    def call(x: Any, experts: Any, *given: Any) -> Any:
        return parallel.moe(x, experts, make(*given), spec, placement=PLACEMENT, exchange=PADDED)

    with running_on("reference"), pytest.raises(InvalidInput, match=message):
        jax.eval_shape(shard(call), *arrays_of(problem_of()))


@pytest.mark.parametrize("x64", [False, True])
def test_int64_ids_and_weights_of_16_bits(x64: bool) -> None:
    """Results and gradients are those of casting both first."""
    with jax.enable_x64(x64), running_on("reference"):
        x, experts, ids, weights = arrays_of(problem_of())
        weights = weights.astype(jnp.bfloat16)
        own, cast = (ids, ids)
        if x64:
            own, cast = ids.astype(jnp.int64).at[0, 0].set(2**32 + 1), ids.at[0, 0].set(99)

        def step(ids: Any, convert: Callable[[Any], Any]) -> Any:
            def loss(x: Any, weights: Any) -> Any:
                found = shard(rank_forward)(x, experts, ids, convert(weights))
                return jnp.sin(found.output).sum(), found

            return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(x, weights)

        (gradients, found), (wanted, plain) = (
            step(own, lambda weights: weights),
            step(cast, lambda weights: weights.astype(jnp.float32)),
        )
    assert gradients[1].dtype == jnp.bfloat16 and int(plain.invalid_ids.sum()) == x64
    results = ((*gradients, found.output, found.invalid_ids), (*wanted, plain.output, plain.invalid_ids))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_replicas_are_not_trained() -> None:
    placement = Placement.balanced([5, 1, 1, 1], 2, 3)
    problem = draw_problem(0, placement, (3, 3), 2, "random", "float32", PLAIN)
    with pytest.raises(Unsupported, match="experts must lie on one rank each where they are trained"):
        run_group(problem, PADDED)


def test_owners_have_the_tiles_of_all_ranks() -> None:
    """Whatever travels, their rows are slots: as where a plan sends slots."""
    plan = plan_exchange(4, 2, 12, "float32", PLACEMENT, PADDED)
    spec = MoESpec(PLAIN.activation, RouterSpec(2), tuning=Tuning(batch_invariant=True))
    found = Group("ep", PLACEMENT, ExchangeSpec()).owner(spec, 4 * 2)
    assert found.router is None and found.tuning == Tuning(
        batch_invariant=True, expected_tokens=plan.expected_tokens, expected_experts=plan.expected_experts
    )


def wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    real = routes.make_routes

    def misplaced(*given: Any) -> Any:
        found = real(*given)
        return found._replace(row_of_slot=jnp.roll(found.row_of_slot, 1))

    monkeypatch.setattr("moe_jax.parallel.forward.make_routes", misplaced)


def counts_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, fitting = arithmetic.pair_counts, arithmetic.fitting
    monkeypatch.setattr(arithmetic, "pair_counts", lambda *given: jnp.maximum(counts(*given) - 1, 0))
    monkeypatch.setattr(arithmetic, "fitting", lambda *given: jnp.maximum(fitting(*given) - 1, 0))


def permuted_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    real = routes.make_routes
    monkeypatch.setattr(
        "moe_jax.parallel.forward.make_routes", lambda sizes, places, weights: real(sizes, places, jnp.flip(weights, 0))
    )


def gradients_of_other_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    real = function.pull
    monkeypatch.setattr(function, "pull", lambda *given: jnp.roll(real(*given), 1, axis=0))


@pytest.mark.parametrize("fault", [wrong_place, counts_off_by_one, permuted_weights, gradients_of_other_slots])
@pytest.mark.parametrize("exchange", [PADDED, ExchangeSpec()], ids=lambda exchange: exchange.mode)
def test_planted_faults_are_found(fault: Any, exchange: ExchangeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    group_step.cache_clear()
    jax.clear_caches()
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        compare_with_one_device(problem_of(), exchange, "with a fault")
    group_step.cache_clear()
    jax.clear_caches()


def test_room_for_every_routing_is_bounded_by_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_memory", lambda: 80 * 10**9)
    placement = Placement.linear(256, 64)
    sizes = 4096, 8, 7168, "bfloat16", placement
    with pytest.raises(
        InvalidInput, match=r"receive must bound .* takes 30\.\d of 80.0 GB; pass receive=65536, twice the"
    ):
        forward.require_memory(plan_exchange(*sizes, ExchangeSpec()))
    forward.require_memory(plan_exchange(*sizes, ExchangeSpec(receive=65536)))
    monkeypatch.setattr(forward, "_memory", lambda: None)
    forward.require_memory(plan_exchange(*sizes, ExchangeSpec()))
