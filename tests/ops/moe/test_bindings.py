"""Bindings of composed plans: no two buffers that a stage reads or writes can be swapped.

Every `PlanBuilder.call` made while whole layers, and ops with a backward, are planned is repeated with each pair of its
buffers swapped, as if all were of one shape and dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import QuantizedSpec, quantized_specs, scheme_named
from moe_core.ops.matmul.backward import plan_matmul_ogs_backward
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.moe.backward import gradient_names, plan_moe_backward
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import BackwardOptions, ForwardOptions
from moe_core.ops.router.backward import plan_router_backward
from moe_core.plan import builder as building
from moe_core.plan.builder import PlanBuilder
from moe_core.plan.steps import Buffer, LaunchPlan
from moe_core.specs import Activation, LayoutSpec, LogitsSpec, MatmulSpec, MoESpec, RouterSpec
from moe_core.specs.operands import (
    ExpertWeights,
    LoRAFactors,
    MatmulOperands,
    MoEOperands,
    OutputGradients,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
)

TARGETS = (Target("cuda", 80, 108), Target("cuda", 90, 132), Target("interpreter"), Target("reference"))
#: Tokens, width, hidden width and experts: all the same, so that many shapes are.
SIDE = 128
GATED, UNGATED = Activation("silu"), Activation("gelu_tanh", gated=False)
SEPARATE = Activation("silu", gate_layout="separate")
#: Every plan that is inlined.
STAGES = {
    *("adapter_layout", "factor_gradient", "routing", "shrink"),
    *("add", "bias_product", "cast_rows", "expert_activation_backward", "gate_gradient", "gate_weight", "layout"),
    *("matmul_ogs", "matmul_quantized_transposed", "quantize_rows", "reduce", "route_and_layout", "router"),
    *("routing_backward", "scale_rows", "schedule", "weight_gradient", "weighted_input"),
}
#: (stage, its two inputs): a swap of these changes nothing, since a sum of two numbers has no order.
SYMMETRIC = ("add", "first", "second")


@dataclass
class Swaps:
    """What became of the swaps. stages: the plans inlined; same_shape: swaps that shapes and dtypes would allow."""

    refused: int = 0
    same_shape: int = 0
    symmetric: int = 0
    accepted: set[tuple[str, ...]] = field(default_factory=set)
    stages: set[str] = field(default_factory=set)


@pytest.fixture
def swaps(monkeypatch: pytest.MonkeyPatch) -> Swaps:
    """Every call is repeated with every swap; shapes and dtypes are not looked at then."""
    found, bind, same_memory = Swaps(), PlanBuilder._bind, building._same_memory

    def bind_and_swap(
        self: PlanBuilder, plan: LaunchPlan, prefix: str, bindings: Mapping[str, str], roles: Mapping[str, Any]
    ) -> dict[str, str]:
        names = bind(self, plan, prefix, bindings, roles)
        found.stages.add(plan.name)
        monkeypatch.setattr(building, "_same_memory", lambda array, other: True)
        assert bind(self, plan, prefix, names, roles) == names
        for first, second in itertools.combinations(names, 2):
            one, other = names[first], names[second]
            if one == other:
                continue
            try:
                bind(self, plan, prefix, names | {first: other, second: one}, roles)
            except AssertionError as error:
                assert "takes" in str(error), error
                found.refused += 1
                found.same_shape += same_memory(self.spec(one), self.spec(other))
            else:
                swap = (plan.name, first, second)
                found.symmetric += swap == SYMMETRIC
                found.accepted |= {(prefix, *swap, one, other)} if swap != SYMMETRIC else set()
        monkeypatch.setattr(building, "_same_memory", same_memory)
        return names

    monkeypatch.setattr(PlanBuilder, "_bind", bind_and_swap)
    return found


@dataclass(frozen=True)
class Layer:
    """A layer to plan. routing: from `x`, `logits` or `given` ids; scheme: of quantised experts."""

    name: str
    activation: Activation = GATED
    routing: str = "x"
    top_k: int = 2
    dtype: str = "bfloat16"
    biased: bool = False
    layers: int | None = None
    shared: str = ""
    mask: bool = False
    expert_map: bool = False
    scheme: str = ""
    static: bool = False
    layout: str = "in_out"
    tokens: int = SIDE
    experts: int = SIDE
    losses: bool = False
    accumulate: bool = False
    one_layer: bool = False
    adapters: int = 0
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def spec(self) -> MoESpec:
        router = None if self.routing == "given" else RouterSpec(self.top_k)
        activations = scheme_named(self.scheme).activations if self.scheme else None
        given = {"weight_layout": self.layout, "router_weight_layout": self.layout, "activations": activations}
        return MoESpec(self.activation, router, **given, **dict(self.options))

    def weight(self, inputs: int, outputs: int, *lead: int, quantized: bool = True) -> Any:
        lead = (*(() if self.layers is None else (self.layers,)), *lead)
        shape = (*lead, inputs, outputs) if self.layout == "in_out" else (*lead, outputs, inputs)
        if not self.scheme or not quantized:
            return ArraySpec(shape, self.dtype)
        return quantized_specs(QuantizedSpec(scheme_named(self.scheme).weights, self.layout), shape)

    def operands(self) -> MoEOperands:
        lead, experts, tokens = () if self.layers is None else (self.layers,), self.experts, self.tokens
        separate = self.activation.gate_layout == "separate"
        width = SIDE * (2 if self.activation.gated and not separate else 1)
        bias = ArraySpec((*lead, experts, width), self.dtype) if self.biased else None
        scale = ArraySpec((1,), "float32") if self.static else None
        weights = ExpertWeights(
            self.weight(SIDE, width, experts),
            self.weight(SIDE, SIDE, experts),
            up=self.weight(SIDE, SIDE, experts) if separate else None,
            gate_up_bias=bias,
            up_bias=bias if separate else None,
            down_bias=ArraySpec((*lead, experts, SIDE), self.dtype) if self.biased else None,
            layer_index=None if self.layers is None else ArraySpec((1,), "int32"),
            gate_up_input_scale=scale,
            down_input_scale=scale,
        )
        correction = ArraySpec((experts,), "float32") if self.biased else None
        routers = {
            "x": RouterWeights(ArraySpec((SIDE, experts) if self.layout == "in_out" else (experts, SIDE), self.dtype),
                ArraySpec((experts,), self.dtype) if self.biased else None, correction),
            "logits": RouterLogits(ArraySpec((tokens, experts), "float32"), correction),
            "given": TopK(ArraySpec((tokens, self.top_k), "int32"), ArraySpec((tokens, self.top_k), "float32")),
        }  # fmt: skip
        shared = None
        if self.shared:
            shared = SharedExpert(
                self.weight(SIDE, width, quantized=False),
                self.weight(SIDE, SIDE, quantized=False),
                self.weight(SIDE, SIDE, quantized=False) if separate else None,
                ArraySpec((SIDE, 1) if self.layout == "in_out" else (1, SIDE), self.dtype)
                if self.shared == "gated"
                else None,
            )
        mask = ArraySpec((tokens,), "bool") if self.mask else None
        local = ArraySpec((experts,), "int32") if self.expert_map else None
        lora, slots = None, (self.adapters, experts)
        if self.adapters:
            factors = [(SIDE, 16), (16, 2 * SIDE), (SIDE, 16), (16, SIDE)]
            by_expert = ArraySpec(slots, "float32"), ArraySpec(slots, "int32")
            seed = ArraySpec((1,), "int32") if dict(self.options).get("lora_dropout") else None
            lora = LoRAFactors(*(ArraySpec((*slots, *sides), self.dtype) for sides in factors), *by_expert, seed)
        adapter_ids = None if lora is None else ArraySpec((tokens,), "int32")
        x = ArraySpec((tokens, SIDE), self.dtype)
        return MoEOperands(x, weights, routers[self.routing], mask, local, shared, lora, adapter_ids)


ON_INPUT = (("apply_router_weight_on_input", True),)
LAYERS = (
    Layer("plain"),
    Layer("ungated", UNGATED, "logits"),
    Layer("separate, biases", SEPARATE, biased=True, mask=True),
    Layer("out_in, fp32", UNGATED, dtype="float32", layout="out_in", biased=True, shared="gated", losses=True),
    Layer("fp32", UNGATED, dtype="float32", biased=True, shared="gated", losses=True, mask=True, expert_map=True),
    Layer("ids given", SEPARATE, "given", mask=True, expert_map=True, biased=True),
    Layer("shared, separate", SEPARATE, shared="gated", accumulate=True),
    Layer("shared, no gate", UNGATED, "logits", shared="plain", layout="out_in"),
    Layer("stack", SEPARATE, layers=2, shared="gated", biased=True, accumulate=True),
    Layer("one layer", UNGATED, layers=2, shared="plain", biased=True, one_layer=True),
    Layer("expert_map, losses", routing="logits", mask=True, expert_map=True, losses=True, biased=True),
    Layer("on input", UNGATED, top_k=1, options=ON_INPUT, shared="gated", biased=True),
    Layer("on input, fp32", UNGATED, "given", top_k=1, dtype="float32", options=ON_INPUT, biased=True),
    Layer("on input, recomputed", SEPARATE, top_k=1, options=(*ON_INPUT, ("recompute", True)), biased=True),
    Layer("recomputed", biased=True, shared="gated", options=(("recompute", True),)),
    Layer("K = 1", UNGATED, top_k=1, dtype="float32", biased=True, shared="gated"),
    Layer("many rows", tokens=4096, experts=8, biased=True, shared="gated"),
    Layer("many rows, separate", SEPARATE, tokens=4096, experts=8, mask=True, layers=2),
    Layer("one token", tokens=1, experts=8),
    Layer("mxfp4", scheme="mxfp4_w4a16", layout="out_in", biased=True),
    Layer("mxfp4, separate", SEPARATE, scheme="mxfp4_w4a16", layout="out_in", layers=2),
    Layer("int4", SEPARATE, scheme="int4_w4a16", layout="out_in", biased=True, shared="gated"),
    Layer("fp8 rows", scheme="fp8_block", layout="out_in", mask=True),
    Layer("fp8 rows, many", scheme="fp8_block", layout="out_in", tokens=4096, experts=8),
    Layer("fp8 rows, one scale", UNGATED, scheme="fp8_tensor", layout="out_in"),
    Layer("fp8 rows, one scale, given", scheme="fp8_tensor", layout="out_in", static=True, tokens=4096, experts=8),
    Layer("fp8 rows on input", SEPARATE, scheme="fp8_tensor", layout="out_in", top_k=1, options=ON_INPUT),
    Layer("adapters", SEPARATE, "given", mask=True, expert_map=True, biased=True, experts=8, adapters=3),
    Layer("adapters, dropout", experts=16, shared="gated", adapters=1, options=(("lora_dropout", 0.5),)),
    Layer("adapters, codes", scheme="mxfp4_w4a16", layout="out_in", experts=8, adapters=2),
    Layer("int8 rows", scheme="int8_w8a8", layout="out_in", biased=True),
)


def gradients_of(layer: Layer, operands: MoEOperands) -> Iterator[OutputGradients]:
    """Gradients of the output alone, in the dtype of x and in another; with losses, of every output."""
    tokens, scalar = layer.tokens, ArraySpec((1,), "float32")
    for dtype in {layer.dtype, "float32"}:
        yield OutputGradients(ArraySpec((tokens, SIDE), dtype))
    if layer.losses:
        weights, logits = (ArraySpec((tokens, width), "float32") for width in (layer.top_k, layer.experts))
        yield OutputGradients(ArraySpec((tokens, SIDE), layer.dtype), weights, logits, scalar, scalar)


def plan_layer(layer: Layer, target: Target) -> None:
    """Its forward, and where it can be trained its backwards: of all gradients, of the biases and of the rest."""
    operands, spec = layer.operands(), layer.spec
    options = {"token_mask": operands.token_mask, "expert_map": operands.expert_map, "shared": operands.shared}
    options |= {"lora": operands.lora, "adapter_ids": operands.adapter_ids}
    request = (operands.x, operands.experts, operands.routing, spec, target)
    plan_moe.__wrapped__(*request, options=ForwardOptions(**options))
    if spec.activations is not None:
        return
    plan_moe.__wrapped__(*request, options=ForwardOptions(**options, save=True))
    names = gradient_names(operands)
    biases = tuple(name for name in names if name.endswith("bias"))
    for gradients in gradients_of(layer, operands):
        for wanted in filter(None, (names, biases, tuple(set(names) - set(biases)))):
            summed = [name for name in wanted if name.endswith((".gate_up", ".up", ".down", ".weight"))]
            accumulate = tuple(summed) if layer.accumulate else ()
            training = {"wanted": wanted, "accumulate": accumulate, "one_layer": layer.one_layer}
            plan_moe_backward.__wrapped__(gradients, operands, spec, target, options=BackwardOptions(**training))


def plan_stages(target: Target) -> None:
    """The ops that are composed plans themselves."""
    tokens, layout = 2 * SIDE, LayoutSpec(SIDE, 2, SIDE)
    for dtype, transposed, stacked in itertools.product(("bfloat16", "float32"), (False, True), (False, True)):
        lead = (2,) if stacked else ()
        operands = MatmulOperands(
            ArraySpec((tokens, SIDE), dtype),
            ArraySpec((*lead, SIDE, SIDE, SIDE), dtype),
            bias=ArraySpec((*lead, SIDE, SIDE), dtype),
            row_weight=ArraySpec((tokens,), "float32"),
            layer_index=ArraySpec((1,), "int32") if stacked else None,
        )
        spec = MatmulSpec("out_in" if transposed else "in_out", "slot", "slot")
        by_token = (replace(operands, x=ArraySpec((SIDE, SIDE), dtype)), replace(spec, gather="token"))
        for given, options in ((operands, spec), by_token):
            plan_matmul_ogs.__wrapped__(given, layout, options, target)
            for wanted in (("d_x", "d_weight", "d_bias", "d_row_weight"), ("d_bias",)):
                d_y = ArraySpec((tokens, SIDE), "float32")
                plan_matmul_ogs_backward.__wrapped__(d_y, given, layout, options, target, wanted=wanted)
        x, square = ArraySpec((SIDE, SIDE), dtype), ArraySpec((SIDE, SIDE), dtype)
        logits = ArraySpec((SIDE, SIDE), "float32")
        for wanted in (("d_x", "d_weight", "d_bias"), ("d_bias",)):
            bias = ArraySpec((SIDE,), dtype)
            plan_router_backward.__wrapped__(
                logits, x, square, bias, LogitsSpec(spec.weight_layout), target, wanted=wanted
            )


def test_no_two_buffers_can_be_swapped(swaps: Swaps) -> None:
    for target, layer in itertools.product(TARGETS, LAYERS):
        plan_layer(layer, target)
        assert not swaps.accepted, f"{layer.name} on {target}"
    for target in TARGETS:
        plan_stages(target)
        assert not swaps.accepted, f"ops on {target}"
    assert swaps.stages == STAGES
    assert swaps.same_shape > 10_000 and swaps.refused > 90_000, swaps


class AnyRole(str):
    """Equal to every role."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


@pytest.fixture
def roles_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: a buffer that is bound has whatever role is wanted."""
    add = PlanBuilder._add

    def without_role(self: PlanBuilder, into: list[Buffer], buffer: Buffer) -> str:
        name = add(self, into, buffer)
        self._buffers[name] = replace(buffer, role=AnyRole())
        return name

    monkeypatch.setattr(PlanBuilder, "_add", without_role)


def test_swaps_are_accepted_where_roles_are_not_compared(roles_not_compared: None, swaps: Swaps) -> None:
    plan_layer(next(layer for layer in LAYERS if layer.name == "separate, biases"), TARGETS[0])
    accepted = {swap[1:4] for swap in swaps.accepted}
    expected = {
        ("route_and_layout", "slot_of_row", "row_of_slot"),
        ("matmul_ogs", "weight", "up"),
        ("matmul_ogs", "group_sizes", "slot_of_row"),
        ("weight_gradient", "left", "right"),
    }
    assert expected <= accepted, accepted
    assert not {("matmul_ogs", "x", "y"), ("reduce", "y", "out")} & accepted
