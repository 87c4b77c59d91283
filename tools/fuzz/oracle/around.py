"""What layers have around their experts: docs/user/layers.md, and the gradients from docs/user/training.md.

Projections are dense products and norms are `rms_norm`, so each casts what it returns. Beside a latent width or a norm
of each expert's result, experts and shared experts are apart; the norm also takes the experts apart into stages.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from tools.fuzz.oracle.activations import activate, differentiate
from tools.fuzz.oracle.adapters import Pair, pair_of
from tools.fuzz.oracle.backward import Backward, Ends, join_gate, joined_storage, outer_sum, transposed
from tools.fuzz.oracle.layer import (
    Expert,
    Given,
    Machine,
    Slots,
    expert_of,
    forward,
    pre_activation,
    product,
    rule_of,
    shared_gate,
    sigmoid,
    split_gate,
)
from tools.fuzz.oracle.norm import norm_of, rms_norm, rms_norm_gradient
from tools.fuzz.oracle.real import Real, Tensor, rounded
from tools.fuzz.oracle.stages import StageBackward


def _apart(case: Any) -> Any:
    """The case of the routed experts alone."""
    return dataclasses.replace(case, shared=0, shared_gate=False, shared_activation="")


def _projection(case: Any, given: Given, name: str) -> Tensor:
    """From inputs to outputs."""
    weight = given[f"{name}.weight"]
    return weight if case.weight_layout == "in_out" else weight.transpose(0, 1)


def _by_slot(part: Tensor, case: Any, slots: Slots, num_tokens: int) -> Tensor:
    return part.new_zeros(num_tokens, case.K, part.shape[1]).index_put((slots.token, slots.k), part)


@dataclass(frozen=True)
class Around:
    """A layer's forward, its parts by name: x of tokens with an expert, projected and normalised rows, what the experts
    give, the sum with shared experts, and y."""

    x: Real
    projected: Real
    rows: Real
    given_back: Real
    total: Real
    y: Real


def run_around(case: Any, given: Given, slots: Slots, weights: Real, machine: Machine) -> Around:
    x = machine.exact(given["x"])
    if not case.apart:
        total = forward(case, given, slots, weights, machine)
        return Around(x, x, x, total, total, _finished(case, given, total, machine))
    visits = torch.zeros(len(given["x"]), 1, dtype=torch.bool, device=given["x"].device)
    visits[slots.token] = True
    used = x.where(visits.expand_as(x.value))  # rows of other tokens are never read
    projected = rows = used
    if case.latent:
        projected = used.matmul(machine.exact(_projection(case, given, "before")), machine.kind()).cast(case.dtype)
        rows = rms_norm(projected, norm_of(case, given["before.norm"])) if case.latent_norm else projected
    if case.out_norm == "experts":
        given_back = _normalised(case, given, slots, weights, machine, rows)
    else:
        given_back = forward(_apart(case), given, slots, weights, machine, rows)
    total = given_back
    if case.latent:
        total = total.matmul(machine.exact(_projection(case, given, "after")), machine.kind()).cast(case.dtype)
    if case.shared:
        total = (total + _shared(case, given, x, machine)).cast(case.out_dtype or case.dtype)
    return Around(used, projected, rows, given_back, total, _finished(case, given, total, machine))


def _normalised(case: Any, given: Given, slots: Slots, weights: Real, machine: Machine, rows: Real) -> Real:
    decoded = case.dtype if case.weights and not case.weights.startswith("mx") else ""
    expert, kind = expert_of(case, given, "experts.", machine, decoded), machine.kind()
    gate, up = pre_activation(rows.map(lambda part: part[slots.token]), expert, slots.expert, machine, kind)
    hidden = activate(rule_of(case), *_cast(case, gate, up)).cast(case.dtype)
    made = product(hidden, expert.down, expert.down_bias, slots.expert, machine, kind).cast(case.dtype)
    normed = rms_norm(made, norm_of(case, given["output.norm"]))
    weighted = normed * weights.map(lambda part: part[slots.token, slots.k].unsqueeze(1).expand_as(normed.value))
    return weighted.map(lambda part: _by_slot(part, case, slots, len(rows.value))).sum(1).cast(case.dtype)


def _cast(case: Any, gate: Real, up: Real | None) -> tuple[Real, Real | None]:
    return gate.cast(case.dtype), None if up is None else up.cast(case.dtype)


def _shared_pre(case: Any, given: Given, x: Real, expert: Expert, machine: Machine) -> tuple[Real, Real | None]:
    """(gate, up) of the shared expert, which adapters change before the cast."""
    index = torch.zeros(len(x.value), dtype=torch.long, device=x.value.device)
    gate, up = pre_activation(x, expert, index, machine, machine.kind())
    if (pair := pair_of(case, given, "shared_gate_up", machine)) is not None:
        change = pair.change(x)
        values, errors = (split_gate(one, joined_storage(case)) for one in (change.value, change.error))
        gate = gate + Real(values[0], errors[0], x.unit)
        if up is not None and values[1] is not None and errors[1] is not None:
            up = up + Real(values[1], errors[1], x.unit)
    return _cast(case, gate, up)


def _shared_down(case: Any, given: Given, hidden: Real, expert: Expert, machine: Machine) -> Real:
    made = product(hidden, expert.down, None, torch.zeros(0), machine, machine.kind())
    pair = pair_of(case, given, "shared_down", machine)
    return (made if pair is None else made + pair.change(hidden)).cast(case.dtype)


def _shared(case: Any, given: Given, x: Real, machine: Machine) -> Real:
    expert = expert_of(case, given, "shared.", machine)
    hidden = activate(rule_of(case, True), *_shared_pre(case, given, x, expert, machine)).cast(case.dtype)
    made = _shared_down(case, given, hidden, expert, machine)
    if not case.shared_gate:
        return made
    scale = sigmoid(shared_gate(case, given, x, machine))
    return (made * scale.map(lambda part: part.expand_as(made.value))).cast(case.dtype)


def _finished(case: Any, given: Given, total: Real, machine: Machine) -> Real:
    if case.out_norm == "sum":
        total = rms_norm(total, norm_of(case, given["output.norm"]))
    if case.out_scale != 1:
        total = total.scaled(case.out_scale).cast(case.dtype)
    if case.out_bias:
        total = (total + machine.exact(given["output.bias"].expand_as(total.value))).cast(case.dtype)
    return total


def backward_around(case: Any, given: Given, slots: Slots, weights: Real, machine: Machine) -> Backward:
    """The gradients of a layer but for its router's."""
    made, d = run_around(case, given, slots, weights, machine), machine.exact(rounded(given["d_output"], case.dtype))
    found: dict[str, Real] = {}
    if case.out_bias:
        found["output.bias"] = d.sum(0, kind="truncated").cast(case.dtype)
    if case.out_scale != 1:
        d = d.scaled(case.out_scale).cast(case.dtype)
    if case.out_norm == "sum":
        d, found["output.norm"] = _through_norm(case, given["output.norm"], d, made.total)
    if not case.apart:
        backward = Backward(case, given, slots, weights, machine, Ends(made.x, d))
        backward.found |= found
        return backward
    d_sum = d
    if case.latent:
        after = machine.exact(_projection(case, given, "after").transpose(0, 1))
        found["after.weight"] = _weight_gradient(case, made.given_back, d, machine)
        d = d.matmul(after, machine.kind()).cast(case.dtype)
    kind = NormedBackward if case.out_norm == "experts" else Backward
    backward = kind(_apart(case), given, slots, weights, machine, Ends(made.rows, d))
    if case.latent:
        d, *others = backward.parts
        for part in others:
            d = d + part
        d = d.cast(case.dtype)
        if case.latent_norm:
            d, found["before.norm"] = _through_norm(case, given["before.norm"], d, made.projected)
        found["before.weight"] = _weight_gradient(case, made.x, d, machine)
        before = machine.exact(_projection(case, given, "before").transpose(0, 1))
        d = d.matmul(before, machine.kind()).cast(case.dtype)
        visited = torch.zeros_like(d.value, dtype=torch.bool)
        visited[slots.token] = True
        backward.parts = [d.where(visited)]
    backward.case, backward.x, backward.d_out = case, machine.exact(given["x"]), d_sum
    if case.shared:
        _add_shared(backward)
    backward.found |= found
    return backward


def _through_norm(case: Any, weight: Tensor, d: Real, rows: Real) -> tuple[Real, Real]:
    """(d_rows, d_weight), cast; what flows through rows that are not finite is anything."""
    bad = ~torch.isfinite(rows.value + rows.error).all(1, True)
    bad = bad | ~torch.isfinite(rows.value).all(1, True)
    sound = rows.where(~bad.expand_as(rows.value))
    d_rows, d_weight = rms_norm_gradient(d, sound, norm_of(case, weight))
    d_weight = d_weight.unknown(bad.any().expand_as(d_weight.value))
    return d_rows.cast(case.dtype).unknown(bad.expand_as(d_rows.value)), d_weight.cast(case.dtype)


def _weight_gradient(case: Any, rows: Real, d: Real, machine: Machine) -> Real:
    """That of a projection, as it is stored."""
    bad = ~torch.isfinite(rows.value).all(1, True).expand_as(rows.value)
    rows = rows.where(~bad).unknown(bad)
    result = rows.map(lambda part: part.transpose(0, 1)).matmul(d, machine.kind()).cast(case.dtype)
    return result if case.weight_layout == "in_out" else result.map(lambda part: part.transpose(0, 1))


class NormedBackward(StageBackward):
    """Stages with a norm between the second product and the router's weight."""

    def behind(self, made: Real) -> tuple[Real, Real]:
        case, slots = self.case, self.slots
        made = made.cast(case.dtype)
        bad = ~torch.isfinite(made.value).all(1, True).expand_as(made.value)
        norm = norm_of(case, self.given["output.norm"])
        d_weighted = self.d_out.map(lambda part: part[slots.token])
        w = self.weights.map(lambda part: part[slots.token, slots.k].unsqueeze(1).expand_as(made.value))
        d_normed = (d_weighted * w).cast(case.dtype)
        d_made, d_norm = rms_norm_gradient(d_normed, made.where(~bad), norm)
        self.found["output.norm"] = d_norm.unknown(bad.any().expand_as(d_norm.value)).cast(case.dtype)
        normed = rms_norm(made, norm)
        return d_made.cast(case.dtype).unknown(bad), (d_weighted * normed).unknown(bad).sum(1, True, "truncated")


def _add_pair_of_gate(backward: Backward, pair: Pair, rows: Real, d_gate: Real, d_up: Real | None) -> None:
    """Gate and up in two buffers are two products, each with its columns of B."""
    case, found = backward.case, backward.found
    if d_up is None or case.gate_layout != "separate":
        backward.parts.append(backward.add_pair(pair, rows, join_gate(d_gate, d_up, case)))
        return
    sides, half = [], d_gate.value.shape[1]
    for columns, d in ((slice(half), d_gate), (slice(half, None), d_up)):
        backward.parts.append(backward.add_pair(pair.columns(columns), rows, d))
        sides.append((found["lora.a1_shared"], found["lora.b1_shared"]))
    (a, b), (other_a, other_b) = sides
    found["lora.a1_shared"] = (a + other_a).cast(case.dtype)
    value, error = (torch.cat(parts, -1) for parts in ((b.value, other_b.value), (b.error, other_b.error)))
    found["lora.b1_shared"] = Real(value, error, b.unit)


def _add_shared(backward: Backward) -> None:
    """The shared expert's part, of dense products that run one by one."""
    case, given, machine, x = backward.case, backward.given, backward.machine, backward.x
    expert, index = expert_of(case, given, "shared.", machine), torch.zeros(len(x.value), dtype=torch.long)
    index = index.to(x.value.device)
    bad = ~torch.isfinite(x.value).all(1, True)
    gate, up = _shared_pre(case, given, x, expert, machine)
    bad = bad | ~torch.isfinite(gate.value + (0.0 if up is None else up.value)).all(1, True)

    def sound(real: Real) -> Real:
        return real.unknown(bad.expand_as(real.value))

    rule, kind = rule_of(case, shared=True), machine.kind()
    hidden, g = sound(activate(rule, gate, up).cast(case.dtype)), backward.d_out
    scale: Real | None = None
    if case.shared_gate:
        logit = shared_gate(case, given, x, machine)
        scale = sigmoid(logit)
        made = _shared_down(case, given, hidden, expert, machine)
        d_scale = (g * made).sum(1, True, "truncated")
        d_logit = sound(d_scale * scale * sigmoid(Real(-logit.value, logit.error, logit.unit)))
        g = (g * scale.map(lambda part: part.expand_as(made.value))).cast(case.dtype)
    d_hidden = transposed(g, expert.down, index, machine).cast(case.dtype)
    if (pair := pair_of(case, given, "shared_down", machine)) is not None:
        d_hidden = (d_hidden + backward.add_pair(pair, hidden, g)).cast(case.dtype)
    by_gate, by_up = differentiate(rule, gate, up)
    d_gate = sound((by_gate * d_hidden).cast(case.dtype))
    d_up = None if by_up is None else sound((by_up * d_hidden).cast(case.dtype))
    rows = sound(x)
    if (pair := pair_of(case, given, "shared_gate_up", machine)) is not None:
        _add_pair_of_gate(backward, pair, rows, d_gate, d_up)
    found = {"down": outer_sum(hidden, g, index, 1, kind), "gate": outer_sum(rows, d_gate, index, 1, kind)}
    products = [transposed(d_gate, expert.gate, index, machine)]
    if d_up is not None and expert.up is not None:
        found["up"] = outer_sum(rows, d_up, index, 1, kind)
        other = transposed(d_up, expert.up, index, machine)
        products = [*products, other] if case.gate_layout == "separate" else [products[0] + other]
    backward.keep("shared.", found)
    backward.parts += [one.cast(case.dtype) for one in products]
    if scale is not None:
        backward.add_shared_gate(d_logit, rows)
