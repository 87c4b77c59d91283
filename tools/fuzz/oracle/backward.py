"""The gradients of ops and layers in float64, in closed form: the equations of docs/user/training.md.

A test holds them, in float64 and so without rounding, to differences of the oracle's own forward.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from tools.fuzz.oracle.activations import activate, differentiate
from tools.fuzz.oracle.adapters import Factors, Pair, factors_of, one_sum, pair_of, rows_matmul
from tools.fuzz.oracle.layer import (
    Expert,
    Given,
    Machine,
    Slots,
    expert_of,
    expert_scales,
    pre_activation,
    router_rows,
    rule_of,
    shared_gate,
    sigmoid,
    weighted_input,
)
from tools.fuzz.oracle.norm import norm_of, rms_norm_gradient
from tools.fuzz.oracle.real import UNIT, Real, Tensor, cut_off, rounded, share


def outer_sum(left: Real, right: Real, index: Tensor, count: int, kind: str) -> Real:
    """sum over the rows of each expert of left [R, A]^T right [R, B]: [count, A, B]."""
    shape = (count, left.value.shape[1], right.value.shape[1])

    def summed(first: Tensor, second: Tensor) -> Tensor:
        return first.new_zeros(shape).index_add(0, index, first.unsqueeze(2) * second.unsqueeze(1))

    a, b = torch.nan_to_num(left.value.abs(), posinf=0.0), torch.nan_to_num(right.value.abs(), posinf=0.0)
    longest = int(torch.bincount(index, minlength=1).max()) if index.numel() else 0
    least = 2.0**-14 if kind == "half" else 0.0
    error = (share(longest, left.unit, kind) + cut_off(kind)) * summed(a.clamp(min=least), b.clamp(min=least))
    error = error + summed(a, right.error) + summed(left.error, b + right.error)
    return left.of(summed(left.value, right.value), error)


def row_sum(rows: Real, index: Tensor, count: int) -> Real:
    """sum over the rows of each expert: [count, N]."""
    longest = int(torch.bincount(index, minlength=1).max()) if index.numel() else 0
    size = torch.nan_to_num(rows.value.abs(), posinf=0.0)

    def summed(part: Tensor) -> Tensor:
        return part.new_zeros(count, part.shape[1]).index_add(0, index, part)

    error = summed(rows.error) + share(longest, rows.unit, "truncated") * summed(size)
    return rows.of(summed(rows.value), error)


def transposed(rows: Real, weight: Tensor, index: Tensor, machine: Machine) -> Real:
    """rows [R, N] by weight[index]^T, weight [E, D, N]."""
    return rows_matmul(rows, machine.exact(weight[index].transpose(1, 2)), machine.kind())


def join_gate(gate: Real, up: Real | None, case: Any) -> Real:
    """Gate and up columns as the last axis stores them."""
    if up is None or case.gate_layout == "separate":
        return gate

    def joined(first: Tensor, second: Tensor) -> Tensor:
        if case.gate_layout == "interleaved":
            return torch.stack((first, second), -1).flatten(-2)
        return torch.cat((first, second), -1)

    return Real(joined(gate.value, up.value), joined(gate.error, up.error), gate.unit)


def joined_storage(case: Any) -> Any:
    """Gate and up in one array, as factors have them: gate columns first where weights are two buffers."""
    return dataclasses.replace(case, gate_layout="halves") if case.gate_layout == "separate" else case


def _stored(matrix: Real, layout: str) -> Real:
    return matrix if layout == "in_out" else matrix.map(lambda part: part.transpose(-1, -2))


class Ends(NamedTuple):
    x: Real
    d_out: Real


class Backward:
    """Gradients of one call by the names of its arguments, and `weights` [T, K]; sum of parts of x in `finish`.

    ends: (x, the gradient of the output) of experts that take other rows than x, or whose output is changed.
    """

    def __init__(
        self, case: Any, given: Given, slots: Slots, weights: Real, machine: Machine, ends: Ends | None = None
    ) -> None:
        self.case, self.given, self.slots, self.weights, self.machine = case, given, slots, weights, machine
        self.found: dict[str, Real] = {}
        plain = Ends(machine.exact(given["x"]), machine.exact(rounded(given["d_output"], case.dtype)))
        self.x, self.d_out = plain if ends is None else ends
        self.parts: list[Real] = []
        self.experts()
        if case.shared:
            self._shared()

    def _mlp(
        self,
        rows: Real,
        expert: Expert,
        index: Tensor,
        token: Tensor,
        w: Real,
        shared: bool,
        factors: Factors | None = None,
    ) -> dict[str, Real]:
        """The equations of slots: rows of x, their experts, tokens and weights [R, 1]."""
        case, machine = self.case, self.machine
        gate, up = pre_activation(rows, expert, index, machine, machine.kind(), factors)
        rule = rule_of(case, shared)
        made = activate(rule, gate, up).cast(case.dtype)  # by the forward, whose activation takes sums
        gate, up = gate.cast(case.dtype), None if up is None else up.cast(case.dtype)
        h = activate(rule, gate, up)
        d_out = self.d_out.map(lambda part: part[token])
        t1 = t2 = None
        if factors is None or factors.a2 is None or factors.b2 is None:
            z = transposed(d_out, expert.down, index, machine).either(case.dtype)
        else:
            t2, down = factors.low(d_out, factors.b2.transpose(1, 2)), expert.down[index].transpose(1, 2)
            z = one_sum(d_out, down, t2, factors.a2.transpose(1, 2), machine.kind()).either(case.dtype)
        d_w = (z * h).sum(1, True, "truncated")
        if expert.down_bias is not None:
            d_w = d_w + (d_out * machine.exact(expert.down_bias[index])).sum(1, True, "truncated")
        # What flows back from a number that is not finite is not defined; only that it flows nowhere else.
        bad = ~torch.isfinite(gate.value + (0.0 if up is None else up.value) + w.value).all(1, True)
        bad = bad | ~torch.isfinite(rows.value).all(1, True)
        rows, h, d_w = (one.unknown(bad.expand_as(one.value)) for one in (rows, h, d_w))
        wide = w.map(lambda part: part.expand_as(z.value))
        by_gate, by_up = (
            None if one is None else one.unknown(bad.expand_as(one.value)) for one in differentiate(rule, gate, up)
        )
        assert by_gate is not None
        wz = wide * z
        d_gate = (by_gate * wz).cast(case.dtype)
        d_up = None if by_up is None else (by_up * wz).cast(case.dtype)
        d_slot = self._to_inputs(d_gate, d_up, expert, index)
        if factors is not None and factors.a1 is not None:
            t1 = factors.t1(d_gate, d_up)
            d_slot = d_slot + rows_matmul(t1, machine.exact(factors.a1.transpose(1, 2)), machine.kind())
        hidden = (wide * h).cast(case.dtype)
        found = {"d_w": d_w, "d_slot": d_slot.cast(case.dtype)}
        count, kind = expert.gate.shape[0], machine.kind()
        found["down"] = outer_sum(hidden, d_out, index, count, kind)
        found["gate"] = outer_sum(rows, d_gate, index, count, kind)
        found["gate_bias"] = row_sum(d_gate, index, count)
        weighted = (d_out * w.map(lambda part: part.expand_as(d_out.value))).unknown(bad.expand_as(d_out.value))
        found["down_bias"] = row_sum(weighted, index, count)
        if d_up is not None:
            found["up"] = outer_sum(rows, d_up, index, count, kind)
            found["up_bias"] = row_sum(d_up, index, count)
        if factors is not None:
            sides: dict[str, tuple[Real, Real]] = {}
            if t1 is not None and factors.a1 is not None:
                d_pre = join_gate(d_gate, d_up, joined_storage(case))
                sides = {"a1": (rows, t1), "b1": (factors.low(rows, factors.a1), d_pre)}
            if t2 is not None and factors.a2 is not None:
                sides |= {"a2": (hidden, t2), "b2": (factors.weighted(factors.low(made, factors.a2), w), d_out)}
            for name, (left, right) in sides.items():
                shape = self.given[f"lora.{name}"].shape
                of_groups = outer_sum(left, right, factors.group, shape[0] * shape[1] + 1, kind).cast(case.dtype)
                self.found[f"lora.{name}"] = of_groups.map(lambda part, shape=shape: part[:-1].reshape(shape))
        return found

    def _to_inputs(self, d_gate: Real, d_up: Real | None, expert: Expert, index: Tensor) -> Real:
        result = transposed(d_gate, expert.gate, index, self.machine)
        if d_up is None or expert.up is None:
            return result
        return result + transposed(d_up, expert.up, index, self.machine)

    def keep(self, prefix: str, found: dict[str, Real]) -> None:
        """Gradients of the weights in their own storage and dtype."""
        case, given, layout = self.case, self.given, self.case.weight_layout
        up = found.get("up")
        matrices = {"gate_up": join_gate(found["gate"], up, case), "down": found["down"]}
        biases: dict[str, Real] = {}
        if "gate_bias" in found:
            biases["gate_up_bias"] = join_gate(found["gate_bias"], found.get("up_bias"), case)
            biases["down_bias"] = found["down_bias"]
        if up is not None and case.gate_layout == "separate":
            matrices["up"] = up
            if "up_bias" in found:
                biases["up_bias"] = found["up_bias"]
        for name, matrix in matrices.items():
            result = _stored(matrix, layout)
            result = result if case.main_grad else result.cast(case.dtype)  # which is added to before any rounding
            if prefix == "shared.":
                result = result.map(lambda part: part[0])
            self.found[prefix + name] = self._in_stack(result) if prefix == "experts." else result
        for name, bias in biases.items():
            if prefix + name in given:
                self.found[prefix + name] = self._in_stack(bias.cast(case.dtype))

    def _in_stack(self, part: Real) -> Real:
        if not self.case.stack:
            return part
        index = self.given["experts.layer_index"].long()
        return part.map(lambda one: one.new_zeros(self.case.stack, *one.shape).index_put((index,), one[None]))

    def experts(self) -> None:
        case, slots, machine = self.case, self.slots, self.machine
        expert = expert_of(case, self.given, "experts.", machine, case.dtype if case.weights else "")
        w = self.weights.map(lambda part: part[slots.token, slots.k].unsqueeze(1))
        factors = factors_of(case, self.given, slots, machine)
        rows = self.x.map(lambda part: part[slots.token])
        if case.on_input:
            rows = weighted_input(case, self.x, self.weights, slots)
            one = machine.exact(torch.ones_like(w.value))
            found = self._mlp(rows, expert, slots.expert, slots.token, one, False, factors)
            found["d_w"] = (found["d_slot"] * self.x.map(lambda part: part[slots.token])).sum(1, True, "truncated")
            d_rows = found["d_slot"] * w.map(lambda part: part.expand_as(rows.value))
        else:
            found = self._mlp(rows, expert, slots.expert, slots.token, w, False, factors)
            d_rows = found["d_slot"]
        self.keep("experts.", found)
        T, D = self.x.value.shape
        place = (slots.token, slots.k)
        self.found["weights"] = found["d_w"].map(
            lambda part: part.new_zeros(T, case.choices).index_put(place, part.squeeze(1))
        )
        by_slot = d_rows.map(lambda part: part.new_zeros(T, case.choices, D).index_put(place, part))
        self.parts.append(by_slot.sum(1))

    def _shared(self) -> None:
        case, given, machine, T = self.case, self.given, self.machine, len(self.x.value)
        expert = expert_of(case, given, "shared.", machine)
        token = torch.arange(T, device=self.x.value.device)
        index = torch.zeros_like(token)
        w = machine.exact(torch.ones(T, 1, dtype=torch.float64, device=token.device))
        gate = None
        if case.shared_gate:
            gate = shared_gate(case, given, self.x, machine)
            w = sigmoid(gate)
        found = self._mlp(self.x, expert, index, token, w, True)
        self.keep("shared.", found)
        self.parts.append(found["d_slot"].either(case.dtype))
        if gate is not None:
            self.add_shared_gate(found["d_w"] * w * sigmoid(Real(-gate.value, gate.error, gate.unit)), self.x)

    def add_shared_gate(self, d_gate: Real, rows: Real) -> None:
        """The gate's part, from the gradient [T, 1] of its logit."""
        given, dtype = self.given, self.case.dtype
        vector = self.machine.exact(given["shared.gate"].reshape(1, -1))
        self.parts.append(d_gate.matmul(vector, "truncated").either(dtype))
        d_vector = d_gate.map(lambda part: part.transpose(0, 1)).matmul(rows, "truncated").cast(dtype)
        self.found["shared.gate"] = d_vector.map(lambda part: part.reshape(given["shared.gate"].shape))

    def add_expert_scale(self, d_weights: Real, ids: Tensor, unscaled: Real) -> Real:
        """The gradient of the scales, from that of the scaled weights [T, K]; returns that of the unscaled ones."""
        case, given, machine = self.case, self.given, self.machine
        if not case.expert_scale:
            return d_weights
        place, chosen = ids.long().clamp(min=0).reshape(-1), (ids >= 0).reshape(-1, 1)
        products = (d_weights * unscaled).map(lambda part: part.reshape(-1, 1)).where(chosen)
        total = row_sum(products, place, case.num_ids)
        self.found["routing.expert_scale"] = total.cast(case.dtype).map(lambda part: part.reshape(-1))
        return d_weights * expert_scales(given, ids, machine)

    def add_pair(self, pair: Pair, rows: Real, d: Real) -> Real:
        """The factors' part, from the gradient of what they are added to; returns that of the rows."""
        t, used, shape = pair.t(d), pair.used, (len(pair.used), 1)
        for side, left, right, columns in (("a", rows, t, used[:, None]), ("b", pair.low(rows), d, used[:, :, None])):
            made = outer_sum(left, right, pair.slot, len(used) + 1, pair.kind).map(lambda part: part[:-1])
            made = made.where(columns.expand_as(made.value)).cast(pair.dtype)
            self.found[f"lora.{side}{pair.name}"] = made.map(lambda part: part.reshape(*shape, *part.shape[1:]))
        a = self.machine.exact(pair.a.transpose(1, 2))
        return pair.adapted(rows_matmul(t, a, pair.kind)).cast(pair.dtype)

    def add_router(self, d_logits: Real) -> None:
        """The router's part, from d_logits [T, E]. Rows of masked tokens take no part."""
        case, given, machine, found = self.case, self.given, self.machine, self.found
        used = torch.ones_like(d_logits.value[:, :1], dtype=torch.bool)
        if "token_mask" in given and case.kind != "stages":  # the op alone multiplies every row
            used = given["token_mask"].unsqueeze(1)
        source = "gate_inputs" if case.gate_inputs else "x"
        x = machine.exact(torch.where(used, given[source], 0.0))
        bad = used & ~torch.isfinite(x.value).all(1, True)
        x = machine.exact(torch.where(bad, 0.0, x.value))
        rows = router_rows(case, {**given, source: x.value}, machine).unknown(bad.expand_as(x.value))
        d_weight = rows.map(lambda part: part.transpose(0, 1)).matmul(d_logits, "truncated")
        found["routing.weight"] = _stored(d_weight, case.router_layout).cast(case.dtype)
        if "routing.bias" in given:
            found["routing.bias"] = d_logits.sum(0, kind="truncated").cast(case.dtype)
        weight = given["routing.weight"]
        weight = weight if case.router_layout == "in_out" else weight.transpose(0, 1)
        part = d_logits.matmul(machine.exact(weight.transpose(0, 1)), "truncated")
        if (pair := pair_of(case, given, "router", machine)) is not None:
            part = part.either(case.dtype) + self.add_pair(pair, rows, d_logits)
        if case.router_norm:
            part = part.cast(case.dtype).where(used.expand_as(x.value))
            part, d_norm = rms_norm_gradient(part, x, norm_of(case, given["routing.norm"], case.router_norm))
            unknown = bad.any().expand_as(d_norm.value)
            found["routing.norm"] = d_norm.unknown(unknown).cast(case.dtype)
            part = part.unknown(bad.expand_as(part.value))
        part = part.where(used.expand_as(part.value))
        if case.gate_inputs:
            found["gate_inputs"] = part.cast(case.dtype)
        else:
            self.parts.append(part.either(case.dtype))

    def finish(self) -> dict[str, Real]:
        total, unit = self.parts[0], UNIT[self.case.dtype]
        for part in self.parts[1:]:
            # Parts may be added one after the other, each sum stored in the dtype of x.
            total = (total + part).either(self.case.dtype)
        if len(self.parts) > 2 and unit > total.unit:  # in any order, so that a sum of two may be larger than all
            size = sum((torch.nan_to_num(part.value.abs(), posinf=0.0) for part in self.parts), torch.zeros(()))
            total = total.of(total.value, total.error + (len(self.parts) - 2) * unit * size)
        self.found["x"] = total.cast(self.case.dtype)
        for name in [name for name in self.found if f"main_grad.{name}" in self.given]:
            self.found[name] = self.found[name] + self.machine.exact(self.given[f"main_grad.{name}"])
        return self.found
