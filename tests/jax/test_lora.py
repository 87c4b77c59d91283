"""`moe_jax.moe` with adapters: the bits of the plans, gradients in float64, and every transformation."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_core.base.target import Target
from moe_core.ops.lora.adapters import Dropout
from moe_core.ops.lora.reference import kept
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import BUNDLES, ExpertWeights, LoRAFactors, RouterWeights, SharedExpert
from moe_jax import ops
from moe_jax.trace import capture, replay
from tests.support.harness import engine_target
from tests.support.jax import REAL_KERNELS, cpu_mesh, running_on, to_jax
from tests.support.training.jax import compile_quickly, gradients_in, plans_in
from tests.support.training.lora import PAIRS, Problem, draw, oracle

OAI = Activation("swiglu_oai", gate_layout="interleaved")
SEPARATE = Activation("silu", gate_layout="separate")
#: Options of `draw`.
CASES: dict[str, dict[str, Any]] = {
    "several ranks and an empty slot": {"ranks": (1, 0, 16, 7)},
    "no token": {"tokens": 0},
    "shared by experts": {"shared": True, "ranks": (3, 16)},
    "down alone": {"pairs": ("a2", "b2")},
    "float32 factors": {"dtype": "bfloat16", "factor_dtype": "float32"},
    "mxfp4": {"scheme": "mxfp4_w4a16", "sizes": (64, 64, 3, 2), "dtype": "bfloat16"},
    "separate mxfp4": {"scheme": "mxfp4_w4a16", "sizes": (64, 64, 3, 2), "dtype": "bfloat16"},
}


def on_device(problem: Problem) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """Arguments of `moe`, and those of them that are trained."""
    names = ("x", "experts", "routing", "lora", "adapter_ids", "token_mask", "expert_map")
    arguments = {name: to_jax(getattr(problem, name)) for name in names}
    factors = {name: one for name in PAIRS if (one := getattr(arguments["lora"], name)) is not None}
    return arguments, {"x": arguments["x"], "weights": arguments["routing"].weights} | factors


def output_of(trained: dict[str, jax.Array], arguments: dict[str, Any], spec: MoESpec) -> moe_jax.MoEOutput:
    factors = {name: one for name, one in trained.items() if name in PAIRS}
    given = arguments | {"x": trained["x"], "lora": dataclasses.replace(arguments["lora"], **factors)}
    if "weights" in trained:
        given["routing"] = dataclasses.replace(arguments["routing"], weights=trained["weights"])
    return moe_jax.moe(**given, spec=spec)


def gradients(problem: Problem, wrap: Any = lambda function: function) -> dict[str, jax.Array]:
    arguments, trained = on_device(problem)

    def loss(trained: dict[str, jax.Array], arguments: dict[str, Any]) -> jax.Array:
        output = wrap(lambda trained: output_of(trained, arguments, problem.spec).output)(trained)
        return jnp.vdot(output, jnp.asarray(problem.d_output, output.dtype))

    return jax.jit(jax.grad(loss))(trained, arguments)


def plan_names(problem: Problem) -> dict[str, str]:
    named = {"x": "d_x", "weights": "d_routing.weights"}
    return named | {name: f"d_lora.{name}" for name in PAIRS if getattr(problem.lora, name) is not None}


@pytest.mark.parametrize(
    ("case", "engine"), [*((case, "reference") for case in CASES), (next(iter(CASES)), REAL_KERNELS)], ids=str
)
def test_bits_are_those_of_the_plans(case: str, engine: str) -> None:
    problem = draw(MoESpec(SEPARATE if "separate" in case else OAI), **CASES[case])
    target, names = Target("reference") if engine == "reference" else engine_target(), plan_names(problem)
    with running_on(engine):
        arguments, trained = on_device(problem)
        result = jax.jit(lambda trained, given: output_of(trained, given, problem.spec))(trained, arguments)
        made = gradients(problem)
    wanted = problem.forward(target)
    for name in ("output", "tokens_per_expert", "invalid_ids"):
        np.testing.assert_array_equal(getattr(result, name), wanted[name], err_msg=name)
    wanted = problem.backward(target, tuple(names.values()))
    for name, buffer in names.items():
        assert made[name].dtype == wanted[buffer].dtype
        np.testing.assert_array_equal(made[name], wanted[buffer], err_msg=name)


@pytest.mark.parametrize("activation", [OAI, SEPARATE], ids=str)
def test_gradients_in_float64(activation: Activation) -> None:
    with jax.enable_x64(True), running_on("reference"):
        problem = draw(MoESpec(activation), ranks=(3, 0, 16), tokens=12)
        wide = dataclasses.replace(problem, **{
            name: jax.tree.map(lambda one: one.astype(np.float64) if one.dtype.kind == "f" else one, part)
            for name in ("x", "experts", "routing", "lora", "d_output")
            for part in (getattr(problem, name),)
        })  # fmt: skip
        arguments, trained = on_device(wide)
        output, made, wanted = output_of(trained, arguments, wide.spec).output, gradients(wide), oracle(wide)
    np.testing.assert_allclose(output, wanted["output"], rtol=1e-12, atol=1e-12)
    for name, buffer in plan_names(wide).items():
        np.testing.assert_allclose(made[name], wanted[buffer], rtol=1e-11, atol=1e-11, err_msg=name)


def test_frozen_experts_cost_no_gradient_and_can_be_trained_too() -> None:
    problem = draw(MoESpec(OAI))
    with running_on("reference"):
        arguments, trained = on_device(problem)

        def loss(trained: dict[str, Any], experts: Any) -> jax.Array:
            return output_of(trained, arguments | {"experts": experts}, problem.spec).output.sum()

        factors = {name: trained[name] for name in PAIRS}
        rest = {"x": trained["x"]}
        lowered = jax.jit(jax.grad(lambda factors: loss(factors | rest, arguments["experts"]))).lower(factors)
        *_, backward = plans_in(lowered)
        assert gradients_in(backward) == tuple(f"d_lora.{name}" for name in PAIRS)
        every = jax.grad(loss, argnums=(0, 1))(trained, arguments["experts"])
        wanted = dataclasses.replace(problem, d_output=np.ones_like(problem.d_output)).backward(
            Target("reference"), ("d_lora.a1", "d_experts.gate_up")
        )
    np.testing.assert_array_equal(every[0]["a1"], wanted["d_lora.a1"])
    np.testing.assert_array_equal(every[1].gate_up, wanted["d_experts.gate_up"])


def test_remat_keeps_the_bits() -> None:
    problem = draw(MoESpec(OAI))
    policy = jax.checkpoint_policies.save_only_these_names(*moe_jax.SAVED_NAMES)
    with running_on("reference"):
        plainly = gradients(problem)
        for wrap in (jax.checkpoint, lambda function: jax.checkpoint(function, policy=policy)):
            jax.tree.map(np.testing.assert_array_equal, gradients(problem, wrap), plainly)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_vmap_over_tokens(dropout: float) -> None:
    problem = draw(MoESpec(OAI, lora_dropout=dropout), tokens=12, ranks=(3, 0, 16))
    problem = dataclasses.replace(problem, token_mask=np.arange(12) != 3)
    problem.adapter_ids[:5] = 7, 1, -2, 7, -1  # Outside, empty, outside, masked, none.
    with running_on("reference"):
        arguments, _ = on_device(problem)
        names = ("x", "routing", "adapter_ids", "token_mask")

        def run(given: dict[str, Any]) -> moe_jax.MoEOutput:
            return moe_jax.moe(**(arguments | given), spec=problem.spec)

        parts = jax.tree.map(lambda one: one.reshape(3, 4, *one.shape[1:]), {name: arguments[name] for name in names})
        lowered = jax.jit(jax.vmap(run)).lower(parts)
        many = lowered.compile()(parts)
        for number in range(3):
            one = run(jax.tree.map(operator.itemgetter(number), parts))
            for got, wanted in zip(jax.tree.map(operator.itemgetter(number), many), one, strict=True):
                if got is not None:
                    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
        assert many.invalid_ids[0].tolist() == [3]
        assert len(plans_in(lowered)) == 1 and ("stablehlo.while" in lowered.as_text()) == (dropout > 0)


def test_tokens_of_a_mesh() -> None:
    problem = draw(MoESpec(OAI, lora_dropout=0.5), tokens=8, ranks=(16, 16))
    with running_on("reference"):
        arguments, trained = on_device(problem)
        dropped = output_of(trained, arguments, problem.spec).output
        spec = MoESpec(OAI)
        arguments["lora"] = dataclasses.replace(arguments["lora"], seed=None)
        alone = output_of(trained, arguments, spec)
        mesh = cpu_mesh()
        split = jax.device_put(trained | {"x": trained["x"]}, NamedSharding(mesh, P()))
        split["x"] = jax.device_put(trained["x"], NamedSharding(mesh, P("data")))
        arguments = jax.device_put(arguments, NamedSharding(mesh, P()))

        def run(trained: dict[str, Any], arguments: dict[str, Any]) -> tuple[Any, moe_jax.MoEOutput]:
            result = output_of(trained, arguments, spec)
            return jnp.square(result.output).sum(), result

        made, on_mesh = jax.jit(jax.grad(run, has_aux=True))(split, arguments)
        wanted, _ = jax.grad(run, has_aux=True)(trained, to_jax(jax.tree.map(np.asarray, arguments)))
        for name, one in made.items():
            np.testing.assert_allclose(one, wanted[name], rtol=1e-4, atol=1e-3, err_msg=name)
        np.testing.assert_array_equal(on_mesh.invalid_ids, alone.invalid_ids)
        np.testing.assert_allclose(on_mesh.output, alone.output, rtol=1e-5, atol=1e-5)
    assert np.abs(dropped - alone.output).max() > 0.1


def test_devices_drop_by_seeds_of_their_numbers() -> None:
    """Equal rows, so that only masks differ."""
    problem = draw(MoESpec(OAI, lora_dropout=0.5), tokens=4, ranks=(16,))
    problem.adapter_ids[:] = 0
    for one in (problem.x, problem.routing.ids, problem.routing.weights):
        one[:] = one[:1]
    with running_on("reference"):
        arguments, trained = on_device(problem)
        mesh = cpu_mesh()
        arguments = jax.device_put(arguments, NamedSharding(mesh, P()))
        trained = jax.device_put(trained, NamedSharding(mesh, P()))
        trained["x"] = jax.device_put(trained["x"], NamedSharding(mesh, P("data")))
        output = np.asarray(output_of(trained, arguments, problem.spec).output)
    assert len({row.tobytes() for row in output}) == 4


def test_traces_plans_and_checks() -> None:
    problem = draw(MoESpec(OAI, RouterSpec(2)), ranks=(3, 0), tokens=6)
    problem.adapter_ids[:] = 0, 0, 0, 1, -1, 0
    with running_on("reference"):
        arguments, _ = on_device(problem)
        arguments["routing"] = RouterWeights(jnp.asarray(np.random.default_rng(1).random((32, 3), np.float32)))
        result, layers = capture(lambda: moe_jax.moe(**arguments, spec=problem.spec))()
        again = replay(lambda: moe_jax.moe(**arguments, spec=problem.spec))(layers)
        np.testing.assert_array_equal(again.output, result.output)
        for training, text in ((False, "lora.a1"), (True, "d_lora.b2")):
            assert text in str(moe_jax.explain_moe(**arguments, spec=problem.spec, training=training))
        moe_jax.warmup(**arguments, spec=problem.spec, tokens=[1, 6], training=True)
        with pytest.raises(moe_jax.InvalidInput, match="1 outside"):
            moe_jax.moe(**arguments, spec=problem.spec, checked=True)
        with pytest.raises(TypeError, match="got adapters"):
            moe_jax.warmup(**arguments, spec=problem.spec, tokens=[1], adapters=1)  # type: ignore[call-arg]


def test_refusals() -> None:
    assert moe_jax.LoRAFactors in BUNDLES
    problem = draw(MoESpec(OAI))
    with running_on("reference"):
        arguments, trained = on_device(problem)

        def run(**changed: Any) -> jax.Array:
            return moe_jax.moe(**(arguments | changed), spec=problem.spec).output

        def by_scale(scale: jax.Array) -> jax.Array:
            return run(lora=dataclasses.replace(arguments["lora"], scale=scale)).sum()

        def by_x(x: jax.Array) -> jax.Array:
            return run(x=x).sum()

        x = trained["x"]
        for call, message in (
            (lambda: jax.grad(by_scale)(arguments["lora"].scale), "no gradient of lora.scale"),
            (lambda: jax.jvp(by_x, (x,), (x,)), "neither forward mode nor second derivatives"),
            (lambda: jax.grad(lambda x: jax.grad(by_x)(x).sum())(x), "neither forward mode nor second derivatives"),
            (lambda: run(adapter_ids=None), "adapter_ids must be an array"),
            (lambda: run(lora=None), "adapter_ids must be None"),
            (lambda: run(lora=arguments["experts"]), "lora must be LoRAFactors"),
            (lambda: run(adapter_ids=x[:, 0]), "adapter_ids"),
        ):
            with pytest.raises((moe_jax.Unsupported, moe_jax.InvalidInput), match=message):
                call()


def test_a_router_and_a_shared_expert() -> None:
    """Outputs and gradients of tokens with each adapter are those of the op with merged weights."""
    random, (d, f, e, slots, rank) = np.random.default_rng(0), (16, 8, 4, 2, 16)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32) / 3)

    shapes = {"a_router": (d, rank), "b_router": (rank, e), "a2_shared": (f, rank), "b2_shared": (rank, d)}
    trained = {name: drawn(slots, 1, *sides) for name, sides in shapes.items()}
    scale, ranks = jnp.full((slots, e), 0.5), jnp.full((slots, e), 5, jnp.int32)
    x, ids, weights = drawn(13, d), jnp.arange(13, dtype=jnp.int32) % 4 - 1, (drawn(d, e), drawn(d, 2 * f), drawn(f, d))
    experts, spec = ExpertWeights(drawn(e, d, 2 * f), drawn(e, f, d)), MoESpec(Activation("silu"), RouterSpec(2))

    def run(trained: dict[str, jax.Array]) -> moe_jax.MoEOutput:
        router, *shared = weights
        lora = LoRAFactors(**trained, scale=scale, ranks=ranks)
        more: Any = {"shared": SharedExpert(*shared), "lora": lora, "adapter_ids": ids}
        return moe_jax.moe(x, experts, RouterWeights(router), spec, **more)

    def merged(trained: dict[str, jax.Array]) -> jax.Array:
        made, router, up, down = jnp.zeros_like(x), *weights
        for slot in (-1, 0, 1, 2):
            of = {n: one[slot, 0, :, :5] if n[0] == "a" else one[slot, 0, :5] for n, one in trained.items()}
            add = {n: 0.5 * of[f"a{n}"] @ of[f"b{n}"] * (slot in (0, 1)) for n in ("_router", "2_shared")}
            routing, shared = RouterWeights(router + add["_router"]), SharedExpert(up, down + add["2_shared"])
            made = jnp.where((ids == slot)[:, None], moe_jax.moe(x, experts, routing, spec, shared=shared).output, made)
        return made

    with running_on("reference"):
        found = run(trained)
        value, wanted = compile_quickly(lambda one, x: (merged(one), jax.vjp(merged, one)[1](x)[0]))(trained, x)
        assert int(found.invalid_ids[0]) == 3
        np.testing.assert_allclose(found.output, value, rtol=1e-4, atol=1e-5)
        gradient = jax.jit(lambda one, x: jax.vjp(lambda one: run(one).output, one)[1](x)[0])(trained, x)
        for name, one in wanted.items():
            np.testing.assert_allclose(gradient[name], one, rtol=1e-3, atol=1e-5, err_msg=name)


def test_a_rounding_between_two_casts_stays() -> None:
    """XLA leaves it out on GPUs, in the forward and in gradients, unless a barrier holds it."""
    x, half = jnp.ones(3), jnp.ones(3, jnp.bfloat16)
    program = jax.jit(jax.value_and_grad(lambda x: ops.ARRAYS.like(x * 1.1, half).astype(jnp.float32).sum()))
    assert program.lower(x).as_text().count("optimization_barrier %") == 2
    assert "optimization_barrier" not in jax.jit(ops.ARRAYS.like).lower(half, x).as_text()


def test_dropout_masks_beyond_experts() -> None:
    seed, one = np.array([2**31 - 1], np.int32), Dropout(0.25, "token")
    mask = ops.ARRAYS.kept((23, 16), jnp.asarray(seed), one)
    np.testing.assert_array_equal(mask, kept(seed, np.arange(23), 16, one))
