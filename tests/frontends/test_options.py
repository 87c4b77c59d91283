"""Options of both front-ends: stages that wait, biases by token, token rounding, quantised weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from moe_core.base.target import Target
from moe_core.errors import InvalidInput
from moe_core.formats import format_named
from moe_core.ops.quantize import reference
from moe_core.ops.routing.rounding import plan_route_rounded, plan_route_rounded_backward
from moe_core.specs.operands import ExpertWeights, RouterWeights, TopK
from moe_core.specs.routing import RouterSpec, TokenRounding
from tests.support.frontends import Frontend, require_equal
from tests.support.frontends.small import NUM_EXPERTS, on_engines, small_layer
from tests.support.harness import engine_target, run_plan, spec_of
from tests.support.modular.problems import E as EXPERTS
from tests.support.modular.problems import as_in_out, draw_problem

Leaves = dict[str, Any]


def leaves_of(frontend: Frontend, dtype: str) -> tuple[Leaves, Any]:
    layer = small_layer(dtype, num_tokens=19)
    leaves = {"x": layer.x, "gate_up": layer.experts.gate_up, "down": layer.experts.down}
    return frontend.arrays(leaves | {"router": layer.routing.weight}), layer.spec


def composed(frontend: Frontend, leaves: Leaves, spec: Any) -> Any:
    experts = ExpertWeights(leaves["gate_up"], leaves["down"])
    return frontend.ops.moe(leaves["x"], experts, RouterWeights(leaves["router"]), spec).output


def staged(frontend: Frontend, leaves: Leaves, spec: Any, wide: bool = True) -> Any:
    """What expert parallelism does: route, send rows to the experts, which see a slot each, and add up at home."""
    x, ops = leaves["x"], frontend.ops
    sums = {"wide": frontend.cast(x, "float32")} if wide else {}
    logits = ops.router(x, leaves["router"], spec=spec.logits_spec(), **sums)
    ids, weights = ops.route(logits, spec.router)
    layout = ops.make_layout(ids, NUM_EXPERTS)
    rows, slots = ops.gather_rows(x, layout, **sums), layout.slot_of_row
    experts = ExpertWeights(leaves["gate_up"], leaves["down"])
    routing = TopK(ids.reshape(-1)[slots][:, None], weights.reshape(-1)[slots][:, None])
    alone = dataclasses.replace(spec, router=None)
    return ops.reduce(ops.moe(rows, experts, routing, alone).output, layout, order="row")


@on_engines
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stages_have_the_gradients_of_the_composed_op(frontend: Frontend, engine: str, dtype: str) -> None:
    with frontend.running_on(engine):
        leaves, spec = leaves_of(frontend, dtype)
        expected = frontend.pull(lambda leaves: composed(frontend, leaves, spec), leaves)
        require_equal(frontend.pull(lambda leaves: staged(frontend, leaves, spec), leaves), expected)
        twice = frontend.pull(lambda leaves: staged(frontend, leaves, spec, wide=False), leaves)
        assert dtype == "float32" or not np.array_equal(twice["d_x"], expected["d_x"]), "two casts are one"


ROUTERS = (
    RouterSpec(2),
    RouterSpec(2, order="topk_then_softmax"),
    RouterSpec(2, "sigmoid", renormalize=True, scale=2.5),
    RouterSpec(2, "sqrt_softplus"),
)


@on_engines
@pytest.mark.parametrize("rule", ROUTERS, ids=str)
def test_router_and_route_have_gradients(frontend: Frontend, engine: str, rule: RouterSpec) -> None:
    """Those of the whole op, of what flows into its output and its logits; with a bias and masked tokens."""
    ops, concatenate, where = frontend.ops, frontend.names.concatenate, frontend.names.where
    with frontend.running_on(engine):
        leaves, spec = leaves_of(frontend, "float32")
        leaves |= frontend.arrays({"bias": np.random.default_rng(1).standard_normal(NUM_EXPERTS, np.float32)})
        mask, spec = frontend.arrays(np.arange(19) != 3), dataclasses.replace(spec, router=rule)

        def results(leaves: Leaves, stages: bool) -> Any:
            experts = ExpertWeights(leaves["gate_up"], leaves["down"])
            if stages:
                logits = ops.router(leaves["x"], leaves["router"], bias=leaves["bias"])
                routing = TopK(*ops.route(logits, rule, token_mask=mask))
                output = ops.moe(leaves["x"], experts, routing, dataclasses.replace(spec, router=None)).output
            else:
                routing = RouterWeights(leaves["router"], leaves["bias"])
                found = ops.moe(leaves["x"], experts, routing, spec, token_mask=mask)
                output, logits = found.output, found.logits
            return concatenate([output, where(mask[:, None], logits, 0.0)], 1)

        whole, staged = (frontend.pull(lambda leaves: results(leaves, one), leaves) for one in (False, True))  # noqa: B023
    for name, wanted in whole.items():
        np.testing.assert_allclose(staged[name], wanted, 2e-5, 2e-5 * float(np.abs(wanted).max()), err_msg=name)


def test_programs(frontend: Frontend) -> None:
    with frontend.running_on("reference"):
        leaves, spec = leaves_of(frontend, "bfloat16")

        def loss(leaves: Leaves) -> Any:
            return (frontend.cast(staged(frontend, leaves, spec), "float32") ** 2).sum()

        wanted = frontend.numpy(frontend.gradients(loss, leaves))
        for name, derive in frontend.programs(loss).items():
            require_equal(frontend.numpy(derive(leaves)), wanted, name)


def test_what_wide_must_be(frontend: Frontend) -> None:
    layer = small_layer()
    with frontend.running_on("reference"):
        x, weight, ids = frontend.arrays((layer.x, layer.routing.weight, np.zeros((9, 1), np.int32)))
        layout = frontend.ops.make_layout(ids, 1)
        with pytest.raises(InvalidInput, match="wide must be float32, got float16; cast it"):
            frontend.ops.gather_rows(x, layout, wide=frontend.cast(x, "float16"))
        with pytest.raises(InvalidInput, match=r"wide must be \[9, 48\], got \(8, 48\)"):
            frontend.ops.router(x, weight, wide=x[:8])


#: Such that tokens of both kinds choose other experts.
BIASES = np.array([[1, 0, 0, 0.5, -1], [-1, 0.5, 1, 0, 0]], np.float32)


def results(frontend: Any, arrays: Any, bias: Any, spec: Any) -> list[np.ndarray]:
    x, w1, w2, logits = arrays
    experts = frontend.ExpertWeights(w1, w2)
    output = frontend.moe(x, experts, frontend.RouterLogits(logits, bias), spec)
    arrays = (output.output, output.ids, output.weights)
    return [np.asarray(one.cpu() if hasattr(one, "cpu") else one) for one in arrays]


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_moe_routes_each_token_by_its_bias(tokens: int) -> None:
    """In every launch that can route: alone, with the layout, and with the first product of one token."""
    torch = pytest.importorskip("torch")
    import moe_torch
    from tests.support import torch as torch_support

    problem = as_in_out(draw_problem(tokens=tokens))
    logits = np.random.default_rng(6).standard_normal((tokens, EXPERTS)).astype(np.float32)
    table, found = np.arange(tokens) % 2, {}
    drawn = (problem.hidden_states, problem.w1, problem.w2, logits)
    router = moe_torch.RouterSpec(2, "sigmoid", renormalize=True)
    spec = moe_torch.MoESpec(moe_torch.Activation("silu"), router)
    for engine in ("reference", torch_support.REAL_KERNELS):
        with torch_support.running_on(engine) as device, torch.no_grad():
            arrays = torch_support.to_torch(drawn, device)
            found[engine] = results(moe_torch, arrays, torch_support.to_torch(BIASES[table], device), spec)
            for index in (0, 1):
                alone = results(moe_torch, arrays, torch_support.to_torch(BIASES[index], device), spec)
                for together, one in zip(found[engine][1:], alone[1:], strict=True):
                    np.testing.assert_array_equal(together[table == index], one[table == index])
    np.testing.assert_array_equal(found["reference"][1], found[torch_support.REAL_KERNELS][1])
    pytest.importorskip("jax")
    import moe_jax
    from tests.support import jax as jax_support

    with jax_support.running_on(jax_support.REAL_KERNELS):
        ours = results(moe_jax, jax_support.to_jax(drawn), jax_support.to_jax(BIASES[table]), spec)
    for array, expected in zip(ours, found[torch_support.REAL_KERNELS], strict=True):
        np.testing.assert_array_equal(array, expected)


T, K, E = 48, 2, 6
RULE, ROUNDING = RouterSpec(K, renormalize=True), TokenRounding(16)


@on_engines
def test_results_and_gradient_are_those_of_the_plans(frontend: Frontend, engine: str) -> None:
    """Bit by bit, in programs too."""
    arrays = {"logits": np.random.default_rng(0).standard_normal((T, E), np.float32)}
    arrays |= {"token_mask": np.arange(T) % 5 != 1}
    d_weights = np.random.default_rng(3).standard_normal((T, 2 * K), np.float32)
    target = Target("reference") if engine == "reference" else engine_target()
    specs = {name: spec_of(array) for name, array in arrays.items()}
    plan = plan_route_rounded(specs["logits"], RULE, ROUNDING, target, token_mask=specs["token_mask"])
    expected = run_plan(plan, arrays)
    saved = {"d_weights": d_weights, "logits": arrays["logits"], "ids": expected["ids"]}
    saved |= {"candidates": expected["candidates"]}
    backward = plan_route_rounded_backward(*(spec_of(array) for array in saved.values()), RULE, ROUNDING, target)
    with frontend.running_on(engine):
        logits, mask, factors = frontend.arrays((arrays["logits"], arrays["token_mask"], d_weights))

        def route(logits: Any) -> Any:
            return frontend.ops.route_rounded(logits, RULE, ROUNDING, token_mask=mask)

        found = frontend.call(route, logits)
        for name in found._fields:
            np.testing.assert_array_equal(frontend.numpy(getattr(found, name)), expected[name], err_msg=name)
        layout = frontend.ops.make_layout(found.ids, E)
        assert not (layout.group_sizes % 16).any() and (found.tokens_per_expert % 16).any()
        gradients = frontend.gradients(
            lambda leaves: (route(leaves["logits"]).weights * factors).sum(), {"logits": logits}
        )
        require_equal(frontend.numpy(gradients["logits"]), run_plan(backward, saved)["d_logits"])


def test_no_tokens_and_too_few(frontend: Frontend) -> None:
    with frontend.running_on("reference"):
        none, one = frontend.arrays((np.zeros((0, E), np.float32), np.zeros((1, E), np.float32)))
        found = frontend.ops.route_rounded(none, RULE, TokenRounding())
        assert found.ids.shape == (0, 4) and found.tokens_per_expert.tolist() == [0] * E
        with pytest.raises(InvalidInput, match="tile must be at most num_tokens = 1, got 128: no expert could keep"):
            frontend.ops.route_rounded(one, RULE, TokenRounding())
        with pytest.raises(InvalidInput, match=r"rounding must be (a )?TokenRounding, got (int|128)"):
            frontend.ops.route_rounded(one, RULE, 128)


FORMATS = ("fp8_block", "fp8_channel_pow2", "int8_channel", "int8_g32_zp", "int4_g32_zp", "mxfp4", "mxfp8_ceil")


def require_same(found: Any, expected: Any, label: str) -> None:
    """Equal bits; any NaN is any other."""
    assert found.dtype == expected.dtype, label
    if found.dtype.name in ("float32", "bfloat16", "float16"):
        np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32), label)
    else:
        np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8), label)


def require_same_tensor(found: Any, expected: Any) -> None:
    assert found.spec == expected.spec
    for field in ("values", "scales", "zero_points"):
        want, got = getattr(expected, field), getattr(found, field)
        assert (want is None) == (got is None)
        if want is not None:
            require_same(got, want, field)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_quantised_as_by_the_reference(frontend: Frontend, name: str) -> None:
    """Denormals, infinities, NaN, zeros of both signs, ties, cut groups, stacks, both layouts."""
    format = format_named(name)
    random = np.random.default_rng(0)
    shape = (2, 37, 200) if format.allows_partial_groups else (2, 37, 64)
    weight = (random.standard_normal(shape) * np.exp(random.uniform(-30, 20, shape))).astype(np.float32)
    weight[0, 3], weight[0, 4, 5], weight[1, 7, 9] = 0, np.nan, np.inf
    weight[1, 8] *= 1e-38
    weight[1, 9], weight[0, 20:30] = 3e38, random.standard_normal((10, shape[-1]))
    weight[0, 30], weight[0, 31, ::2] = np.float32(1e-45), -0.0
    weight[0, 32] = np.round(random.standard_normal(shape[-1]) * 4) / 2
    for layout, dtype in (("out_in", np.float32), ("in_out", ml_dtypes.bfloat16)):
        with np.errstate(all="ignore"):
            given = (weight if layout == "out_in" else weight.swapaxes(1, 2)).astype(dtype)
        expected = reference.quantize(given, format, layout=layout)
        with frontend.running_on("reference"):
            found = frontend.ops.quantize(frontend.arrays(given), format, layout=layout)
            require_same_tensor(frontend.numpy(found), expected)
            for target in ("float32", "bfloat16", "float16"):
                got = frontend.numpy(frontend.ops.dequantize(found, frontend.dtype(target)))
                require_same(got, reference.dequantize(expected, target), target)


@on_engines
@pytest.mark.parametrize("name", ["fp8_token", "fp8_group", "fp8_tensor", "int8_token", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_rows_are_quantised_as_by_the_reference(frontend: Frontend, engine: str, name: str, dtype: Any) -> None:
    format, x = format_named(name), np.random.default_rng(2).standard_normal((6, 128)).astype(dtype)
    given = np.array([0.01], np.float32)
    with frontend.running_on(engine):
        rows, scale = frontend.arrays((x, given))
        found = frontend.call(lambda rows: frontend.ops.quantize_rows(rows, format), rows)
        assert tuple(found.shape) == x.shape
        require_same_tensor(frontend.numpy(found), reference.quantize(x, format))
        if name == "fp8_tensor":
            found = frontend.numpy(frontend.ops.quantize_rows(rows, format, scales=scale))
            for got, want in zip(
                (found.values, found.scales), reference.quantize_rows(x, given, format=format), strict=True
            ):
                require_same(got, want, "given scales")
