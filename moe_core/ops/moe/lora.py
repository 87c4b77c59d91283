"""Stages of adapters in the plans of a whole layer. Equations: docs/user/lora.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_core.base import ArraySpec, Target, dtypes, require_spec
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.lora.adapters import Adapters, Dropout
from moe_core.ops.lora.beyond import refuse_beyond_experts
from moe_core.ops.lora.factors import Rows, plan_factor_gradient, plan_shrink
from moe_core.ops.lora.layout import add_virtual_schedule, plan_adapter_layout
from moe_core.ops.lora.tail import Tail
from moe_core.plan import PlanBuilder, Role
from moe_core.specs import LayoutSpec, MoESpec, TopK, named_arrays
from moe_core.specs.operands import ExpertWeights, LoRAFactors

#: The mask of the input of each pair's A.
_MASKED = {1: "token", 2: "slot"}


def check_lora(
    lora: LoRAFactors, adapter_ids: ArraySpec | None, x: ArraySpec, experts: ExpertWeights, spec: MoESpec
) -> None:
    """Raise InvalidInput or Unsupported unless these factors fit the experts."""
    refuse_beyond_experts(lora)
    refused = {
        "experts.layer_index": experts.layer_index,
        "spec.activations": spec.activations,
        "spec.row_limit": spec.row_limit,
        "spec.rows_in_order": spec.rows_in_order or None,
    }
    for name, value in refused.items():
        if value is not None:
            raise Unsupported(
                f"{name} must be None with lora, got {value}: adapters have no such product; leave it out"
            )
    num_experts, in_out = experts.down.shape[0], spec.weight_layout == "in_out"
    width = experts.down.shape[1 if in_out else 2]
    columns = experts.gate_up.shape[2 if in_out else 1] * (1 if experts.up is None else 2)
    if lora.scale is None or lora.ranks is None or adapter_ids is None:
        names = ("lora.scale", "lora.ranks", "adapter_ids")
        missing = [name for name, one in zip(names, (lora.scale, lora.ranks, adapter_ids), strict=True) if one is None]
        raise InvalidInput(f"{missing[0]} must be an array with lora, got None; pass it")
    slots = require_spec("lora.scale", lora.scale, ("slots", num_experts), "float32").shape[0]
    require_spec("lora.ranks", lora.ranks, (slots, num_experts), "int32")
    require_spec("adapter_ids", adapter_ids, (x.shape[0],), "int32")
    if slots == 0:
        raise InvalidInput("lora.scale must have at least one slot, got none; leave lora out")
    if lora.a1 is None and lora.a2 is None:
        raise InvalidInput("lora must have the factors a1 and b1, or a2 and b2, got neither; leave lora out")
    for number, inside, outside in ((1, x.shape[1], columns), (2, width, x.shape[1])):
        a, b = getattr(lora, f"a{number}"), getattr(lora, f"b{number}")
        if (a is None) != (b is None):
            raise InvalidInput(f"lora.a{number} and lora.b{number} must both be arrays or None, got one; pass both")
        if a is None:
            continue
        rank = a.shape[-1] if a.rank else 0
        for name, array, sides in ((f"lora.a{number}", a, (inside, rank)), (f"lora.b{number}", b, (rank, outside))):
            shared = 1 if array.rank == 4 and array.shape[1] == 1 else num_experts
            require_spec(name, array, (slots, shared, *sides), dtypes.MATMUL_DTYPES, contiguous=False)
        if rank < 16 or rank % 16:
            raise InvalidInput(f"lora.a{number} must have a multiple of 16 ranks, got {rank}; pad with zeros")
    if (lora.seed is None) == (spec.lora_dropout > 0):
        raise InvalidInput(
            f"lora.seed must be given exactly if spec.lora_dropout is above 0, got {lora.seed} with "
            f"{spec.lora_dropout}; set both or neither"
        )
    if lora.seed is not None:
        require_spec("lora.seed", lora.seed, (1,), "int32")


@dataclass(frozen=True)
class LoRAStages:
    """Adds the stages of adapters. prefix: of the buffers virtual_sizes, virtual_start, low1 and low2."""

    builder: PlanBuilder
    lora: LoRAFactors
    layout: LayoutSpec
    spec: MoESpec
    prefix: str = ""

    @property
    def target(self) -> Target:
        return self.builder.target

    def has(self, number: int) -> bool:
        return getattr(self.lora, f"a{number}") is not None

    def adapters(self, number: int = 1, *, transposed: bool = False, masked: bool = False) -> Adapters:
        """masked: what the product reads or adds is the input of A."""
        spec, dropout = self.spec, Dropout(self.spec.lora_dropout, _MASKED[number] if masked else None)
        slots = self.lora.scale.shape[0]
        return Adapters(self.layout, slots, transposed, dropout, spec.allow_tf32, spec.batch_invariant)

    def declare(self, declare: Callable[[str, ArraySpec], str]) -> None:
        """Declare the buffers that backwards read. declare: `builder.output` or `builder.scratch`."""
        groups = self.adapters().virtual.num_experts
        declare(f"{self.prefix}virtual_sizes", ArraySpec((groups,), "int32"))
        declare(f"{self.prefix}virtual_start", ArraySpec((groups + 1,), "int32"))
        for number in (1, 2):
            if self.has(number):
                rank = getattr(self.lora, f"a{number}").shape[-1]
                declare(self.low(number), ArraySpec((self.layout.capacity, rank), self.builder.spec("x").dtype))

    def low(self, number: int) -> str:
        return f"{self.prefix}low{number}"

    def add_layout(
        self,
        ids: str,
        given: str | None,
        bindings: dict[str, str],
        options: dict[str, Any],
        block_ms: tuple[int, ...],
    ) -> None:
        """given: the weights that become fp32. bindings: of the layout's outputs. options: of `plan_adapter_layout`."""
        builder = self.builder
        routing = TopK(builder.spec(ids), builder.spec_of(given))
        plan = plan_adapter_layout(routing, self.adapters(), self.target, block_ms=block_ms, **options)
        bindings |= {"ids": ids, "ranks": "lora.ranks"} | ({} if given is None else {"given_weights": given})
        bindings |= {name: self.prefix + name for name in ("virtual_sizes", "virtual_start")}
        names = [f"schedule_{block_m}" for block_m in block_ms]
        names += ["virtual_schedule"] if self.target.compiled else []
        names += ["tile_counters"] if options["tile_counters"] else []
        for name in names:
            bindings[name] = builder.scratch(name, plan.spec(name))
        builder.call(plan, "adapter layout", bindings)

    def _shrink(self, label: str, x: tuple[str, str], factor: str, adapters: Adapters, low: str, role: Role) -> None:
        builder = self.builder
        plan = plan_shrink(builder.spec(x[0]), builder.spec(factor), adapters, x[1], self.target)
        bindings = {"x": x[0], "factor": factor, "scale": "lora.scale", "ranks": "lora.ranks", "low": low}
        bindings |= {"virtual_start": f"{self.prefix}virtual_start"}
        if self.prefix:
            bindings |= {"slot_of_row": f"{self.prefix}slot_of_row"}
        roles = {"x": role, "low": Role.D_LOW} if role == Role.D_ROWS else {}
        builder.call(plan, label, bindings, roles)

    def shrink(self, number: int, x: str, gather: str) -> None:
        """Add low = scale (x A), masked by the dropout."""
        self._shrink(
            f"lora a{number}",
            (x, gather),
            f"lora.a{number}",
            self.adapters(number, masked=True),
            self.low(number),
            Role.ROWS,
        )

    def pull_back(self, number: int, d_y: str, gather: str) -> str:
        """Add t = scale (d_y B^T). Returns its buffer."""
        adapters, rank = self.adapters(number, transposed=True), getattr(self.lora, f"a{number}").shape[-1]
        low = self.builder.scratch(
            f"d_low{number}", ArraySpec((self.layout.capacity, rank), self.builder.spec(d_y).dtype), Role.D_LOW
        )
        self._shrink(f"lora input gradient of b{number}", (d_y, gather), f"lora.b{number}", adapters, low, Role.D_ROWS)
        return low

    def tail(self, number: int, low: str | None = None) -> Tail:
        """Of product `number`, or with low (of `pull_back`) of its input's gradient."""
        name = self.low(number) if low is None else low
        factor = f"lora.{'b' if low is None else 'a'}{number}"
        adapters = self.adapters(number, transposed=low is not None, masked=low is not None)
        if low is None:
            adapters = dataclasses.replace(adapters, dropout=Dropout())
        return Tail(self.builder.spec(name), self.builder.spec(factor), adapters)

    def tail_bindings(self, number: int, low: str | None = None) -> dict[str, str]:
        factor = f"lora.{'b' if low is None else 'a'}{number}"
        names = {"low": self.low(number) if low is None else low, "factor": factor, "ranks": "lora.ranks"}
        names |= {"virtual_start": f"{self.prefix}virtual_start", "seed": "lora.seed"}
        present = {f"tail.{name}": buffer for name, buffer in names.items()}
        if low is None or not self.spec.lora_dropout:
            del present["tail.seed"]
        return present

    def add_virtual_schedule(self) -> None:
        add_virtual_schedule(self.builder, self.adapters(), f"{self.prefix}virtual_sizes", self.builder.scratch)

    def gradient(
        self,
        name: str,
        left: tuple[str, str],
        right: tuple[str, str],
        *,
        roles: dict[str, Role],
        row_weight: str | None = None,
    ) -> None:
        """Add the gradient of a factor, if wanted: left^T right over its rows (buffer, gather)."""
        builder, result = self.builder, f"d_lora.{name}"
        if not builder.has(result):
            return
        number, masked = int(name[1]), name[0] == "a"
        sides = [Rows(builder.spec(buffer), gather) for buffer, gather in (left, right)]
        adapters = self.adapters(number, masked=masked)
        if not masked:
            adapters = dataclasses.replace(adapters, dropout=Dropout())
        plan = plan_factor_gradient(
            *sides, builder.spec(result), adapters, self.target, weighted=row_weight is not None
        )
        bindings = {"left": left[0], "right": right[0], "d_factor": result}
        bindings |= {"virtual_start": f"{self.prefix}virtual_start", "slot_of_row": f"{self.prefix}slot_of_row"}
        bindings |= {} if row_weight is None else {"row_weight": row_weight}
        builder.call(plan, f"lora gradient of {name}", bindings, roles)


def lora_arrays(lora: LoRAFactors | None, adapter_ids: ArraySpec | None) -> dict[str, ArraySpec | None]:
    if lora is None:
        if adapter_ids is not None:
            raise InvalidInput("adapter_ids must be None without lora, got an array; pass lora too")
        return {}
    return dict(named_arrays(lora, "lora.")) | {"adapter_ids": adapter_ids}
