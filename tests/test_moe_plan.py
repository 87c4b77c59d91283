"""The composed forward against the reference's stages: every entrance, map, mask, shared expert and layout."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import InvalidInput, dtypes
from moe_core.arrays import ArraySpec
from moe_core.moe import plan_moe
from moe_core.operands import (
    ExpertWeights,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
    map_arrays,
    named_arrays,
)
from moe_core.parity.tolerance import assert_close, stage_tolerances
from moe_core.plan import KernelLaunch
from moe_core.reference.moe import moe_stages
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.target import Target
from tests.harness import engine_target, run_plan
from tests.routing_cases import KINDS, draw_ids


@dataclasses.dataclass(frozen=True)
class Layer:
    """Arrays of one layer and its options."""

    x: np.ndarray
    experts: ExpertWeights
    routing: RouterWeights | RouterLogits | TopK
    spec: MoESpec
    token_mask: np.ndarray | None = None
    expert_map: np.ndarray | None = None
    shared: SharedExpert | None = None

    @property
    def extras(self) -> dict:
        return {"token_mask": self.token_mask, "expert_map": self.expert_map, "shared": self.shared}


def spec_of(value):
    """ArraySpecs in the place of arrays."""
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        return ArraySpec(value.shape, value.dtype.name)
    return map_arrays(value, spec_of)


def plan_of(layer: Layer, target: Target):
    extras = {name: spec_of(value) for name, value in layer.extras.items()}
    return plan_moe(spec_of(layer.x), spec_of(layer.experts), spec_of(layer.routing), layer.spec, target, **extras)


def run_layer(layer: Layer, target: Target | None = None) -> dict[str, np.ndarray]:
    arrays = {
        "x": layer.x,
        **dict(named_arrays(layer.experts, "experts.")),
        **dict(named_arrays(layer.routing, "routing.")),
    }
    for name in ("token_mask", "expert_map"):
        if getattr(layer, name) is not None:
            arrays[name] = getattr(layer, name)
    if layer.shared is not None:
        arrays |= dict(named_arrays(layer.shared, "shared."))
    return run_plan(plan_of(layer, target or engine_target()), arrays)


def check(layer: Layer, target: Target | None = None) -> None:
    """Run, compare every output with the reference; ids must agree exactly (draws have no near ties)."""
    actual = run_layer(layer, target)
    expected = moe_stages(layer.x, layer.experts, layer.routing, layer.spec, **layer.extras)
    source = {RouterWeights: "x", RouterLogits: "logits", TopK: "ids"}[type(layer.routing)]
    num_experts, top_k = layer.experts.down.shape[-3], expected["ids"].shape[1]
    d_ff = layer.experts.down.shape[-2 if layer.spec.weight_layout == "in_out" else -1]
    tolerances = stage_tolerances(
        layer.spec,
        dtypes.canonical(layer.x.dtype),
        d_model=layer.x.shape[1],
        d_ff=d_ff,
        top_k=top_k,
        num_experts=num_experts,
        routed_from=source,
    )
    assert set(actual) <= set(expected)
    for name, value in actual.items():
        assert_close(value, expected[name], tolerances[name], label=name)


ROUTERS = (
    RouterSpec(2),
    RouterSpec(2, order="topk_then_softmax"),
    RouterSpec(3, renormalize=True, scale=2.5),
    RouterSpec(2, scoring="sigmoid", num_groups=2, topk_group=1, renormalize=True),
    RouterSpec(1, scoring="sqrt_softplus"),
    RouterSpec(6),
)
ACTIVATIONS = (
    Activation("silu"),
    Activation("swiglu_oai", gate_layout="interleaved"),
    Activation("gelu", gate_layout="separate"),
    Activation("relu2", gated=False),
)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    random = np.random.default_rng(draw(st.integers(0, 99)))
    num_tokens, d_model, d_ff = draw(st.sampled_from([0, 1, 7, 33])), draw(st.sampled_from([32, 40])), 24
    dtype = draw(st.sampled_from(dtypes.MATMUL_DTYPES))
    activation = draw(st.sampled_from(ACTIVATIONS))
    layout = draw(st.sampled_from(["in_out", "out_in"]))
    router = draw(st.sampled_from(ROUTERS))
    source = draw(st.sampled_from(["x", "logits", "ids"]))
    mapped, stacked = draw(st.booleans()), draw(st.booleans())
    biased = draw(st.booleans())
    num_global = 6
    num_local = 3 if mapped else num_global

    def array(*shape: int, kind: str = dtype, scale: float = 1.0) -> np.ndarray:
        return (scale * random.standard_normal(shape, np.float32)).astype(dtypes.numpy_dtype(kind))

    def matrix(inside: int, outside: int, *lead: int) -> np.ndarray:
        shape = (inside, outside) if layout == "in_out" else (outside, inside)
        return array(*lead, *shape, scale=inside**-0.5)

    lead = (2, num_local) if stacked else (num_local,)
    width = activation.input_width(d_ff) if activation.gate_layout != "separate" else d_ff
    separate = activation.gate_layout == "separate"
    experts = ExpertWeights(
        matrix(d_model, width, *lead),
        matrix(d_ff, d_model, *lead),
        up=matrix(d_model, d_ff, *lead) if separate else None,
        gate_up_bias=array(*lead, width, kind="float32") if biased else None,
        up_bias=array(*lead, d_ff, kind="float32") if biased and separate else None,
        down_bias=array(*lead, d_model) if biased else None,
        layer=np.array([1], np.int32) if stacked else None,
    )
    on_input = router.top_k == 1 and draw(st.booleans())
    spec = MoESpec(
        activation,
        router=None if source == "ids" else router,
        weight_layout=layout,
        router_weight_layout=layout,
        apply_router_weight_on_input=on_input,
        out_dtype=draw(st.sampled_from([None, "float32"])),
    )
    correction = array(num_global, kind="float32") if draw(st.booleans()) and source != "ids" else None
    if source == "x":
        routing = RouterWeights(matrix(d_model, num_global), array(num_global, kind="float32"), correction)
    elif source == "logits":
        routing = RouterLogits(array(num_tokens, num_global, kind="float32"), correction)
    else:
        kind = draw(st.sampled_from(KINDS))
        ids = draw_ids(kind, num_tokens, router.require_top_k(), num_global, draw(st.integers(0, 9)))
        routing = TopK(ids, random.random(ids.shape, np.float32))
    shared = None
    if draw(st.booleans()):
        gate = matrix(d_model, 1) if draw(st.booleans()) else None
        shared = SharedExpert(
            matrix(d_model, width), matrix(d_ff, d_model), matrix(d_model, d_ff) if separate else None, gate
        )
    return Layer(
        array(num_tokens, d_model),
        experts,
        routing,
        spec,
        token_mask=random.random(num_tokens) < 0.7 if draw(st.booleans()) else None,
        expert_map=np.array([2, -1, 0, -1, 1, -1], np.int32) if mapped else None,
        shared=shared,
    )


@given(layers())
def test_matches_the_reference(layer: Layer) -> None:
    check(layer)


@given(layers())
def test_reference_engine_matches_too(layer: Layer) -> None:
    check(layer, Target("reference"))


def simple_layer(num_tokens: int = 9, dtype: str = "float32") -> Layer:
    random = np.random.default_rng(1)

    def array(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape, np.float32) * 0.3).astype(dtypes.numpy_dtype(dtype))

    experts = ExpertWeights(array(4, 32, 48), array(4, 24, 32))
    logits = random.standard_normal((num_tokens, 4), np.float32)
    return Layer(array(num_tokens, 32), experts, RouterLogits(logits), MoESpec(Activation("silu"), RouterSpec(2)))


def test_invalid_ids_are_counted_and_contribute_nothing() -> None:
    layer = simple_layer()
    ids = np.array([[0, 1], [4, 1], [-2, 2], [-1, -1], [2**31 - 1, -(2**31)], [0, 0], [1, 2], [3, 3], [0, 3]], np.int32)
    weights = np.ones(ids.shape, np.float32)
    spec = dataclasses.replace(layer.spec, router=None)
    actual = run_layer(dataclasses.replace(layer, routing=TopK(ids, weights), spec=spec))
    assert actual["invalid_ids"].tolist() == [4]
    clean = np.where((ids >= 0) & (ids < 4), ids, -1).astype(np.int32)
    same = run_layer(dataclasses.replace(layer, routing=TopK(clean, weights), spec=spec))
    assert actual["output"].tobytes() == same["output"].tobytes()
    assert not actual["output"][3:5].any()


def test_a_masked_token_with_nan_leaks_nowhere() -> None:
    layer = simple_layer()
    mask = np.ones(9, bool)
    mask[4] = False
    clean = run_layer(dataclasses.replace(layer, token_mask=mask))
    x, logits = layer.x.copy(), layer.routing.logits.copy()
    x[4], logits[4] = np.nan, np.nan
    dirty = run_layer(dataclasses.replace(layer, x=x, routing=RouterLogits(logits), token_mask=mask))
    for name, value in clean.items():
        assert value.tobytes() == dirty[name].tobytes(), name
    assert clean["ids"][4].tolist() == [-1, -1] and not clean["output"][4].any()
    assert clean["tokens_per_expert"].sum() == 16


def test_composed_plan_is_made_of_few_launches() -> None:
    layer = simple_layer()
    plan = plan_of(layer, Target("cuda", 90, 132))
    kernels = [step.kernel for step in plan.steps if isinstance(step, KernelLaunch)]
    assert kernels == ["route_and_layout:route_and_layout", "chained:chained"], kernels
    assert "matmul 1" in plan.explain() and "sums" in plan.explain()


def test_changing_the_tokens_changes_no_compiled_constant() -> None:
    """Two batches of the same regime must share their kernels."""

    def constants(num_tokens: int):
        plan = plan_of(simple_layer(num_tokens), Target("cuda", 90, 132))
        return [(s.kernel, [(n, a) for n, a in s.arguments if type(a).__name__ == "Constant"]) for s in plan.steps]

    assert constants(4100) == constants(4200)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((9, 31), np.float32)}, r"experts.gate_up must be \[num_experts, 31, width\]"),
        ({"x": np.zeros((9, 4, 8), np.float32)}, r"x must be \[num_tokens, d_model\], got \(9, 4, 8\); flatten"),
        ({"routing": RouterLogits(np.zeros((8, 4), np.float32))}, "logits must be"),
        ({"routing": RouterLogits(np.zeros((9, 5), np.float32))}, "must score the 4 experts .*got 5; pass expert_map"),
        ({"routing": RouterLogits(np.zeros((9, 4), np.float16))}, "logits must be float32, got float16"),
        ({"routing": TopK(np.zeros((9, 2), np.int32), np.zeros((9, 2), np.float32))}, "spec.router must be None"),
        ({"expert_map": np.zeros(5, np.int32)}, r"expert_map must be \[4\], got \(5,\)"),
        ({"token_mask": np.zeros(8, bool)}, r"token_mask must be \[9\], got \(8,\)"),
        ({"spec": MoESpec(Activation("silu"))}, "spec.router must be a RouterSpec"),
        ({"spec": MoESpec(Activation("silu"), RouterSpec(5))}, "top_k must be at most num_experts = 4, got 5"),
        ({"spec": MoESpec(Activation("silu", gate_layout="separate"), RouterSpec(2))}, "up must be"),
    ],
)
def test_bad_input(change: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        plan_of(dataclasses.replace(simple_layer(), **change), Target("interpreter"))


def test_wrong_down_shape() -> None:
    layer = simple_layer()
    experts = dataclasses.replace(layer.experts, down=np.zeros((4, 25, 32), np.float32))
    with pytest.raises(InvalidInput, match=r"experts.down must be \[4, 24, 32\], got \(4, 25, 32\)"):
        plan_of(dataclasses.replace(layer, experts=experts), Target("interpreter"))


def test_router_weight_on_input_needs_one_expert_per_token() -> None:
    with pytest.raises(InvalidInput, match="top_k must be 1 with apply_router_weight_on_input, got 2"):
        MoESpec(Activation("silu"), RouterSpec(2), apply_router_weight_on_input=True)
    layer = simple_layer()
    topk = TopK(np.zeros((9, 2), np.int32), np.zeros((9, 2), np.float32))
    spec = MoESpec(Activation("silu"), apply_router_weight_on_input=True)
    with pytest.raises(InvalidInput, match="top_k must be 1 with apply_router_weight_on_input, got 2"):
        plan_of(dataclasses.replace(layer, routing=topk, spec=spec), Target("interpreter"))
