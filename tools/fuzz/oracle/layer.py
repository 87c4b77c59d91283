"""The forward of ops and layers in float64, from docs/user/layers.md, routing.md and quantization.md.

`given` maps the names of the ops' arguments to float64 (or integer, or boolean) tensors. `case` is read by attribute
only. Ids and logits are the engine's own: they are judged apart, and what follows is computed from them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from tools.fuzz.oracle.activations import DEFAULTS, Rule, activate
from tools.fuzz.oracle.adapters import Factors, factors_of, one_sum, pair_of, rows_matmul
from tools.fuzz.oracle.formats import clamped, requantized
from tools.fuzz.oracle.norm import norm_of, rms_norm
from tools.fuzz.oracle.real import UNIT, Real, Tensor, rounded, share
from tools.fuzz.oracle.routing import Choice

Given = Mapping[str, Tensor]


@dataclass(frozen=True)
class Machine:
    """How an engine adds up. truncated: tensor cores (16-bit products on a GPU). tf32: their factors may be TF32."""

    dtype: str
    truncated: bool = False
    tf32: bool = False

    @property
    def unit(self) -> float:
        return UNIT["float64" if self.dtype == "float64" else "float32"]

    def kind(self, activations: str = "") -> str:
        if self.tf32:
            return "tf32"
        if not self.truncated:
            return "rounded"
        if activations.startswith(("fp8", "mxfp8")):
            return "fp8"
        return "half" if self.dtype == "float16" else "truncated"

    def biased(self, sums: Real, bias: Tensor, length: int) -> Real:
        """Sums of so many terms plus a bias, with which a tensor core may begin."""
        begun = share(length + 1, self.unit, "truncated") * bias.abs() if self.truncated else 0.0
        return sums.own(sums.value + bias, sums.error + begun)

    def exact(self, value: Tensor) -> Real:
        return Real.exact(value, self.unit)


def choice_of(case: Any) -> Choice:
    names = (field.name for field in dataclasses.fields(Choice) if field.name not in ("top_k", "order"))
    return Choice(case.K, order=case.order or "softmax_then_topk", **{name: getattr(case, name) for name in names})


def rule_of(case: Any, shared: bool = False) -> Rule:
    """The activation of the experts, or of the shared expert."""
    if shared and case.shared_activation:
        return Rule(case.shared_activation, case.gated, *DEFAULTS.get(case.shared_activation, (None, None)))
    alpha, limit = DEFAULTS.get(case.activation, (None, None))
    return Rule(case.activation, case.gated, case.alpha or alpha, case.limit or limit)


def router_rows(case: Any, given: Given, machine: Machine) -> Real:
    """What the router scores: x, or x normalised."""
    x = machine.exact(given.get("gate_inputs", given["x"]))
    return rms_norm(x, norm_of(case, given["routing.norm"], case.router_norm)) if case.router_norm else x


def expert_scales(given: Given, ids: Tensor, machine: Machine) -> Real:
    """The scale [T, K] of each id, 1 where there is none."""
    scale = given.get("routing.expert_scale")
    wide = torch.ones(ids.shape, dtype=torch.float64, device=ids.device)
    return machine.exact(wide if scale is None else torch.where(ids >= 0, scale[ids.long().clamp(min=0)], wide))


def router_logits(case: Any, given: Given, machine: Machine) -> Real:
    """[T, E], fp32 whatever the dtypes, then rounded to logits_dtype."""
    weight = given["routing.weight"]
    weight = weight if case.router_layout == "in_out" else weight.transpose(0, 1)
    logits = router_rows(case, given, machine).matmul(machine.exact(weight), machine.kind())
    if "routing.bias" in given:
        logits = machine.biased(logits, given["routing.bias"].expand_as(logits.value), case.D)
    if (pair := pair_of(case, given, "router", machine)) is not None:
        logits = logits + pair.change(router_rows(case, given, machine))
    single = "float64" if case.dtype == "float64" else "float32"
    return logits.cast(single).cast(case.logits_dtype if single == "float32" else single)


@dataclass(frozen=True)
class Expert:
    """Weights from inputs to outputs: gate, up [E, D, F], down [E, F, D] and their biases; None where there is none."""

    gate: Tensor
    up: Tensor | None
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def split_gate(array: Tensor, case: Any) -> tuple[Tensor, Tensor | None]:
    """(gate, up) columns of the last axis."""
    if not case.gated or case.gate_layout == "separate":
        return array, None
    if case.gate_layout == "interleaved":
        return array[..., 0::2], array[..., 1::2]
    half = array.shape[-1] // 2
    return array[..., :half], array[..., half:]


def expert_of(case: Any, given: Given, prefix: str, machine: Machine, decoded_to: str = "") -> Expert:
    """The canonical weights of `experts.` or, as one expert, of `shared.`; decoded_to: a dtype to round matrices to."""

    def matrix(name: str) -> Tensor | None:
        array = given.get(f"{prefix}{name}")
        if array is None:
            return None
        if prefix == "shared.":
            array = array.unsqueeze(0)
        elif "experts.layer_index" in given:
            array = array[int(given["experts.layer_index"])]
        if decoded_to:
            array = rounded(array, decoded_to)
        return array if case.weight_layout == "in_out" else array.transpose(-1, -2)

    def bias(name: str) -> Tensor | None:
        array = given.get(f"{prefix}{name}")
        return (
            array if array is None or "experts.layer_index" not in given else array[int(given["experts.layer_index"])]
        )

    gate_up, down = matrix("gate_up"), matrix("down")
    assert gate_up is not None and down is not None
    gate, up = split_gate(gate_up, case)
    gate_up_bias = bias("gate_up_bias")
    biases = (None, None) if gate_up_bias is None else split_gate(gate_up_bias, case)
    if case.gated and case.gate_layout == "separate":
        up, biases = matrix("up"), (biases[0], bias("up_bias"))
    return Expert(gate, up, down, *biases, bias("down_bias"))


def table_ids(case: Any, given: Given) -> Tensor:
    """int32 [T, K]: what the layer's table has for the tokens; of tokens outside of it ids that no expert has."""
    tokens, table = given["input_ids"].long(), given["routing.table"]
    inside = (tokens >= 0) & (tokens < case.table)
    return torch.where(inside[:, None], table[tokens.where(inside, 0)], case.E).int()


@dataclass(frozen=True)
class Slots:
    """The slots that have an expert here. token, k, expert: int64 [R], in slot order."""

    token: Tensor
    k: Tensor
    expert: Tensor
    counts: Tensor
    invalid: int


def slots_of(case: Any, ids: Tensor, given: Given) -> Slots:
    """ids int32 [T, K] as the op gets them: global where there is a map."""
    ids = ids.long()
    active = torch.ones_like(ids, dtype=torch.bool)
    if "token_mask" in given:
        active = given["token_mask"].bool()[:, None].expand_as(ids)
    known = (ids >= 0) & (ids < case.num_ids)
    invalid = int((active & ~known & (ids != -1)).sum())
    local = ids.clamp(0, case.num_ids - 1)
    if "expert_map" in given:
        local = given["expert_map"].long()[local]
    here = active & known & (local >= 0)
    token, k = torch.nonzero(here, as_tuple=True)
    expert = local[here]
    counts = torch.bincount(expert, minlength=case.E * case.packs)
    return Slots(token, k, expert, counts, invalid)


def within_capacity(ids: Tensor, case: Any) -> Tensor:
    """ids with -1 past an expert's first max_rows, or ceil(factor T K / E), slots; the factor is the decimal that was
    written."""
    if not case.capacity and not case.max_rows:
        return ids
    limit = case.max_rows or math.ceil(Fraction(str(case.capacity)) * ids.shape[0] * case.K / case.E)
    flat = ids.reshape(-1).long()
    chosen = torch.nn.functional.one_hot(flat.clamp(min=0), case.E) * (flat >= 0)[:, None]
    place = (chosen.cumsum(0) * chosen).sum(1)
    return torch.where((flat >= 0) & (place <= limit), flat, -1).reshape(ids.shape).to(ids.dtype)


Tail = tuple[Real, Tensor]


def product(
    rows: Real,
    weight: Tensor,
    bias: Tensor | None,
    expert: Tensor,
    machine: Machine,
    kind: str,
    tail: Tail | None = None,
) -> Real:
    """tail: what adapters add to the sum."""
    if tail is not None:
        result = one_sum(rows, weight[expert], *tail, kind)
    elif weight.shape[0] == 1:
        result = rows.matmul(machine.exact(weight[0]), kind)
    else:
        result = rows_matmul(rows, machine.exact(weight[expert]), kind)
    return result if bias is None else machine.biased(result, bias[expert], weight.shape[1])


def pre_activation(
    rows: Real, expert: Expert, index: Tensor, machine: Machine, kind: str, factors: Factors | None = None
) -> tuple[Real, Real | None]:
    """(gate, up) [R, F] in the working precision."""
    tails: list[Tail | None] = [None, None]
    if factors is not None and factors.a1 is not None:
        low = factors.low(rows, factors.a1)
        tails = [None if one is None else (low, one) for one in (factors.gate, factors.up)]
    gate = product(rows, expert.gate, expert.gate_bias, index, machine, kind, tails[0])
    return gate, None if expert.up is None else product(rows, expert.up, expert.up_bias, index, machine, kind, tails[1])


def sigmoid(real: Real) -> Real:
    value = torch.sigmoid(real.value)
    size = torch.nan_to_num(real.value.abs(), posinf=0.0).clamp(max=90.0)
    return real.own(value, value * torch.expm1(real.error), 8 + 2 * size)


def weighted_input(case: Any, x: Real, weights: Real, slots: Slots) -> Real:
    """x times the router weight, cast: rows of tokens that have an expert."""
    w = weights.map(lambda part: part[slots.token, slots.k].unsqueeze(1).expand(-1, x.value.shape[1]))
    return (x.map(lambda part: part[slots.token]) * w).cast(case.dtype)


def _quantized(case: Any, rows: Real, scale: Tensor | None) -> Real:
    return requantized(rows, case.activations) if scale is None else clamped(rows, scale)


def forward(case: Any, given: Given, slots: Slots, weights: Real, machine: Machine, x: Real | None = None) -> Real:
    """The experts' and the shared expert's part [T, D], for ids that `slots` describes. x: other rows than given."""
    x = machine.exact(given["x"]) if x is None else x
    kind = machine.kind(case.activations)
    decoded = case.dtype if case.weights and not case.activations and not case.weights.startswith("mx") else ""
    experts = expert_of(case, given, "experts.", machine, decoded)
    if case.on_input:
        rows = weighted_input(case, x, weights, slots)
    else:
        rows = x.map(lambda part: part[slots.token])
    if case.activations:
        rows = _quantized(case, rows, given.get("experts.gate_up_input_scale"))
    factors = factors_of(case, given, slots, machine)
    gate, up = pre_activation(rows, experts, slots.expert, machine, kind, factors)
    if case.kind == "stages":
        gate, up = gate.cast(case.dtype), None if up is None else up.cast(case.dtype)
    hidden = activate(rule_of(case), gate, up).cast(case.dtype)
    if case.activations:
        hidden = _quantized(case, hidden, given.get("experts.down_input_scale"))
    tail = None
    if factors is not None and factors.a2 is not None and factors.b2 is not None:
        tail = factors.low(hidden, factors.a2), factors.b2
    made = product(hidden, experts.down, experts.down_bias, slots.expert, machine, kind, tail)
    if not case.on_input:
        made = made * weights.map(lambda part: part[slots.token, slots.k].unsqueeze(1).expand_as(made.value))
    made = made.cast(case.dtype)
    T, D = x.value.shape
    by_slot = made.map(lambda part: part.new_zeros(T, case.choices, D).index_put((slots.token, slots.k), part))
    total = by_slot.sum(1)
    if case.shared:
        total = total + shared_part(case, given, x, machine)
    return total.cast(case.out_dtype or case.dtype)


def shared_gate(case: Any, given: Given, x: Real, machine: Machine) -> Real:
    """The gate's logit [T, 1]."""
    vector = given["shared.gate"].reshape(-1, 1)
    return x.matmul(machine.exact(vector), machine.kind())


def shared_part(case: Any, given: Given, x: Real, machine: Machine) -> Real:
    expert = expert_of(case, given, "shared.", machine)
    index = torch.zeros(len(x.value), dtype=torch.long, device=x.value.device)
    gate, up = pre_activation(x, expert, index, machine, machine.kind())
    hidden = activate(rule_of(case, shared=True), gate, up).cast(case.dtype)
    made = product(hidden, expert.down, None, index, machine, machine.kind())  # stays fp32
    if not case.shared_gate:
        return made
    scale = sigmoid(shared_gate(case, given, x, machine))
    return made * scale.map(lambda part: part.expand_as(made.value))
