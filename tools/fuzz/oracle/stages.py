"""The gradients of a layer made of stage ops: matmul_ogs, activation, matmul_ogs with a row weight, reduce.

Their equations are in docs/user/training.md, under "Stage ops and LoRA": each op casts what it returns.
"""

from __future__ import annotations

import torch

from tools.fuzz.oracle.activations import activate, differentiate
from tools.fuzz.oracle.backward import Backward, outer_sum, row_sum, transposed
from tools.fuzz.oracle.layer import expert_of, pre_activation, product, rule_of
from tools.fuzz.oracle.real import Real, Tensor


class StageBackward(Backward):
    """`Backward` with the rounding points of ops that run one by one."""

    def experts(self) -> None:
        case, slots, machine = self.case, self.slots, self.machine
        expert = expert_of(case, self.given, "experts.", machine, case.dtype if case.weights else "")
        index = slots.expert
        rows = self.x.map(lambda part: part[slots.token])
        gate, up = pre_activation(rows, expert, index, machine, machine.kind())
        gate, up = gate.cast(case.dtype), None if up is None else up.cast(case.dtype)
        bad = ~torch.isfinite(gate.value + (0.0 if up is None else up.value)).all(1, True)
        bad = bad | ~torch.isfinite(rows.value).all(1, True)

        def sound(real: Real) -> Real:
            return real.unknown(bad.expand_as(real.value))

        hidden = sound(activate(rule_of(case), gate, up).cast(case.dtype))
        made = product(hidden, expert.down, expert.down_bias, index, machine, machine.kind())
        g, d_w = self.behind(made)
        g, d_w = sound(g), sound(d_w)
        d_hidden = transposed(g, expert.down, index, machine).cast(case.dtype)
        by_gate, by_up = differentiate(rule_of(case), gate, up)
        d_gate = sound((by_gate * d_hidden).cast(case.dtype))
        d_up = None if by_up is None else sound((by_up * d_hidden).cast(case.dtype))
        rows, count, kind = sound(rows), expert.gate.shape[0], machine.kind()
        found = {"down": outer_sum(hidden, g, index, count, kind), "gate": outer_sum(rows, d_gate, index, count, kind)}
        found |= {"down_bias": row_sum(g, index, count), "gate_bias": row_sum(d_gate, index, count)}
        if d_up is not None:
            found |= {"up": outer_sum(rows, d_up, index, count, kind), "up_bias": row_sum(d_up, index, count)}
        self.keep("experts.", found)
        T, D = self.x.value.shape
        place = (slots.token, slots.k)

        def by_slot(part: Tensor, width: int) -> Tensor:
            return part.new_zeros(T, case.K, width).index_put(place, part)

        self.found["weights"] = d_w.map(lambda part: by_slot(part, 1).squeeze(2))
        one = transposed(d_gate, expert.gate, index, machine)
        products = [one]
        if d_up is not None and expert.up is not None:
            other = transposed(d_up, expert.up, index, machine)
            products = [one, other] if case.gate_layout == "separate" else [one + other]
        for d_rows in products:  # one for each call of matmul_ogs
            total = d_rows.cast(case.dtype).map(lambda part: by_slot(part, D)).sum(1)
            self.parts.append(total.cast(case.dtype))

    def behind(self, made: Real) -> tuple[Real, Real]:
        """(the gradient of what product 2 makes, with the weight in it, that of the weight [R, 1]) of its fp32 rows."""
        slots, dtype = self.slots, self.case.dtype
        c = self.d_out.map(lambda part: part[slots.token])
        w = self.weights.map(lambda part: part[slots.token, slots.k].unsqueeze(1))
        weighted = (c * w.map(lambda part: part.expand_as(c.value))).cast(dtype)
        return weighted, (c * made).sum(1, True, "truncated")
