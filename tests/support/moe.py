"""Whole layers for tests of plans: drawn layers, their plans, and their runs."""

from __future__ import annotations

import ast
import dataclasses
import re

import numpy as np
from hypothesis import strategies as st

from moe_core.base import dtypes
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import ForwardOptions
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import Activation, MoESpec, RouterSpec, TileConfig, Tuning
from moe_core.specs.operands import ExpertWeights, RouterLogits, RouterWeights, SharedExpert, TopK, named_arrays
from tests.support.harness import H200, engine_target, run_plan, spec_of
from tests.support.strategies import ID_KINDS, draw_ids

T, D, F, E, K = 512, 256, 128, 16, 4


def layer_plan(
    tuning: Tuning | None,
    num_tokens: int = T,
    target: Target = H200,
    dtype: str = "bfloat16",
    *,
    activation: str = "silu",
    save: bool = False,
) -> LaunchPlan:
    """A whole forward with everything that sums: router, experts, gated shared expert."""
    experts = ExpertWeights(ArraySpec((E, D, 2 * F), dtype), ArraySpec((E, F, D), dtype))
    shared = SharedExpert(ArraySpec((D, 2 * F), dtype), ArraySpec((F, D), dtype), gate=ArraySpec((D, 1), dtype))
    spec = MoESpec(Activation(activation), RouterSpec(K, renormalize=True), tuning=tuning)
    router = RouterWeights(ArraySpec((D, E), dtype))
    return plan_moe(
        ArraySpec((num_tokens, D), dtype), experts, router, spec, target,
        options=ForwardOptions(shared=shared, save=save),
    )  # fmt: skip


def tiles(plan: LaunchPlan) -> list[TileConfig]:
    """The configurations of a plan's grouped matmuls, in order, as it states them."""
    stated = [re.search(r"TileConfig\((.*?)\)", note) for note in plan.notes]
    found = []
    for match in stated:
        if match is not None:
            fields = dict(pair.split("=") for pair in match[1].split(", "))
            found.append(TileConfig(**{name: ast.literal_eval(value) for name, value in fields.items()}))
    return found


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


def plan_of(layer: Layer, target: Target):
    extras = {name: spec_of(value) for name, value in layer.extras.items()}
    return plan_moe(
        spec_of(layer.x), spec_of(layer.experts), spec_of(layer.routing), layer.spec, target,
        options=ForwardOptions(**extras),
    )  # fmt: skip


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
        layer_index=np.array([1], np.int32) if stacked else None,
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
        kind = draw(st.sampled_from(ID_KINDS))
        ids = draw_ids(kind, num_tokens, router.require_top_k(), num_global, draw(st.integers(0, 9)))
        kinds = draw(st.sampled_from(dtypes.ID_DTYPES)), draw(st.sampled_from(dtypes.ROUTER_WEIGHT_DTYPES))
        given = ids, random.random(ids.shape, np.float32)
        routing = TopK(*(one.astype(dtypes.numpy_dtype(kind)) for one, kind in zip(given, kinds, strict=True)))
    shared = None
    if draw(st.booleans()):
        gate = matrix(d_model, 1) if draw(st.booleans()) else None
        shared = SharedExpert(
            matrix(d_model, width), matrix(d_ff, d_model), matrix(d_model, d_ff) if separate else None, gate
        )
        other = Activation("gelu_tanh", activation.gated, activation.gate_layout)
        spec = dataclasses.replace(spec, shared_activation=draw(st.sampled_from((None, other))))
    return Layer(
        array(num_tokens, d_model),
        experts,
        routing,
        spec,
        token_mask=random.random(num_tokens) < 0.7 if draw(st.booleans()) else None,
        expert_map=np.array([2, -1, 0, -1, 1, -1], np.int32) if mapped else None,
        shared=shared,
    )


def simple_layer(num_tokens: int = 9, dtype: str = "float32", d_model: int = 32) -> Layer:
    random = np.random.default_rng(1)

    def array(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape, np.float32) * 0.3).astype(dtypes.numpy_dtype(dtype))

    experts = ExpertWeights(array(4, d_model, 48), array(4, 24, d_model))
    logits = random.standard_normal((num_tokens, 4), np.float32)
    return Layer(array(num_tokens, d_model), experts, RouterLogits(logits), MoESpec(Activation("silu"), RouterSpec(2)))
