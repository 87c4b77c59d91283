"""Problems on ranks of two axes, experts and tensor, and what they are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_core.parallel import ExchangeSpec
from moe_core.parallel import tensor as slices
from moe_core.parallel.placement import gather_experts, shard_experts
from moe_core.specs.operands import MoEOperands, OutputGradients
from tests.support.parallel.twin import grid as grid_twin
from tests.support.parallel.twins import Problem
from tests.support.parallel.ways import require_same


def join_arrays(parts: list[np.ndarray], cut: slices.Cut | None) -> np.ndarray:
    """The arrays of all ranks of the axis joined, without a cut the first."""
    if cut is None:
        return parts[0]
    split = [np.split(one, cut.parts, cut.axis) for one in parts]
    return np.concatenate([part[number] for number in range(cut.parts) for part in split], cut.axis)


@dataclass(frozen=True)
class Grid:
    """A problem on W x size ranks. With `split` tokens, problem.tokens are of every rank, row by row; with `replicated`
    ones, of every row."""

    problem: Problem
    size: int
    tokens: str = "split"

    def number(self, row: int, index: int) -> int:
        """Which of problem.tokens a rank has."""
        return row * self.size + index if self.tokens == "split" else row

    def layouts(self) -> tuple[str, str | None]:
        """weight_layout and gate_layout of the slices."""
        activation = self.problem.spec.activation
        return self.problem.spec.weight_layout, activation.gate_layout if activation.gated else None

    def ranks(self) -> list[list[MoEOperands]]:
        """The operands of every rank."""
        problem, found = self.problem, []
        for row, experts in enumerate(shard_experts(problem.experts, problem.placement)):
            own = slices.split_experts(experts, self.size, *self.layouts())
            found.append([self.operands(self.number(row, index), one) for index, one in enumerate(own)])
        return found

    def operands(self, number: int, experts: Any) -> MoEOperands:
        problem = self.problem

        def part(array: Any) -> Any:
            return None if array is None else problem.of_rank(number, array)

        routing = problem.routing
        if hasattr(routing, "ids"):
            routing = type(routing)(part(routing.ids), part(routing.weights))
        elif hasattr(routing, "logits"):
            routing = type(routing)(part(routing.logits), routing.correction_bias)
        return MoEOperands(part(problem.x), experts, routing, part(problem.token_mask), None, problem.shared)

    def gradients(self) -> list[list[OutputGradients]]:
        rows = range(self.problem.placement.num_ranks)
        part = [
            [self.problem.of_rank(self.number(row, index), self.problem.d_output) for index in range(self.size)]
            for row in rows
        ]
        return [[OutputGradients(one) for one in row] for row in part]

    def twin(self, way: ExchangeSpec, backward: bool = True) -> list[dict[str, np.ndarray]]:
        """Every result and gradient of every rank, row by row, in NumPy."""
        spec, ranks = self.problem.spec, self.ranks()
        forward = grid_twin.moe(ranks, spec, self.problem.placement, way, tokens=self.tokens)
        found = []
        for row, outputs in enumerate(forward.outputs):
            for index, own in enumerate(outputs):
                group = forward.groups[index]
                mine = {name: one for name, one in own._asdict().items() if one is not None}
                mine |= {"received_per_expert": group.received_per_expert[row], "overflow": group.overflow}
                found.append(mine)
        if not backward:
            return found
        gradients = grid_twin.moe_backward(self.gradients(), ranks, spec, forward)
        return [one | own for one, own in zip(found, [own for row in gradients for own in row], strict=True)]

    def whole(self, ranks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Of all ranks together: by token, or summed over those with other tokens; experts are whole again."""
        found, width = {}, self.size
        rows = self.problem.placement.num_ranks
        heads = ranks if self.tokens == "split" else ranks[::width]
        for name in ranks[0]:
            if name.startswith("d_experts."):
                cut = slices.cut_of(name.removeprefix("d_experts."), *self.layouts())
                own = [[ranks[row * width + index][name] for index in range(width)] for row in range(rows)]
                found[name] = gather_experts([join_arrays(row, cut) for row in own], self.problem.placement)
            elif name.startswith(("d_routing.weight", "d_routing.bias", "d_shared.")) and name != "d_routing.weights":
                found[name] = np.sum([one[name].astype(np.float32) for one in heads], axis=0)
            elif name in ("output", "d_x", "d_routing.weights", "d_routing.logits"):
                found[name] = np.concatenate([one[name] for one in heads])
        return found


def require_grid_twin(found: list[dict[str, Any]], grid: Grid, way: ExchangeSpec, label: str) -> None:
    """Raise unless every result of every rank has the bits of the twin."""
    expected = grid.twin(way, "d_x" in found[0])
    for number, (own, wanted) in enumerate(zip(found, expected, strict=True)):
        # Calls with a router give masked tokens other logits.
        names = [name for name in wanted if name != "logits" and (name in own or not name.startswith("d_"))]
        assert {"output", "overflow"} <= set(names)
        for name in names:
            require_same(own[name], wanted[name], f"{name} of rank {number}, {label}")


def magnitudes(grid: Grid) -> dict[str, np.ndarray]:
    """Sums of absolute values fp64, by token: what is added up to output, d_x and d_routing.weights, of a silu layer
    with ids, weights and halves. The error of these sums in another order is a share of it."""
    problem = grid.problem
    x, dy, weights = (one.astype(np.float64) for one in (problem.x, problem.d_output, problem.routing.weights))
    gate_up, down = (one.astype(np.float64) for one in (problem.experts.gate_up, problem.experts.down))
    found = {"output": np.zeros(x.shape), "d_x": np.zeros(x.shape), "d_routing.weights": np.zeros(weights.shape)}
    width = down.shape[1]
    for (token, k), expert in np.ndenumerate(problem.routing.ids):
        masked = problem.token_mask is not None and not problem.token_mask[token]
        if masked or not 0 <= expert < len(down):
            continue
        gate, up = np.split(x[token] @ gate_up[expert], [width])
        sigmoid = 1 / (1 + np.exp(-gate))
        hidden, flowing = gate * sigmoid * up, np.abs(down[expert]) @ np.abs(dy[token])
        found["output"][token] += weights[token, k] * np.abs(hidden) @ np.abs(down[expert])
        found["d_routing.weights"][token, k] = np.abs(hidden) @ flowing
        d_gate = np.abs(flowing * up * (sigmoid + gate * sigmoid * (1 - sigmoid)))
        d_pre = weights[token, k] * np.concatenate([d_gate, np.abs(flowing * gate * sigmoid)])
        found["d_x"][token] += d_pre @ np.abs(gate_up[expert]).T
    return found


def require_close(found: dict[str, np.ndarray], grid: Grid, alone: dict[str, np.ndarray], label: str) -> None:
    """Raise unless results are those of one device, but for the order of F's sum and one rounding of every part.

    A slot of one device and every part are rounded to the dtype of rows, and so is the sum: two units of the dtype of
    what is added up, and of the result. Sums of fp32 have an error of a unit for each number at most.
    """
    problem, sums = grid.problem, magnitudes(grid)
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-9}[problem.x.dtype.name]
    numbers = sum(problem.experts.gate_up.shape[1:]) + problem.routing.ids.shape[1] + grid.size
    for name, expected in alone.items():
        if name not in found:
            continue
        wanted, got = expected.astype(np.float64), found[name].astype(np.float64)
        if name in sums:
            stored = 2.0**-24 if name == "d_routing.weights" else unit
            slack = (2 * stored + numbers * 2.0**-23) * sums[name] + 2 * stored * np.abs(wanted)
        else:
            # Of slices, these are sums over tokens of equal numbers, but for the order of BLAS.
            most = np.abs(wanted).max(initial=0)
            slack = 2 * unit * np.abs(wanted) + (numbers + len(problem.x)) * 2.0**-23 * most
        worst = np.max(np.abs(got - wanted) - slack, initial=-np.inf)
        assert worst <= 0, f"{name} is off by {worst} beyond its bound, {label}"
