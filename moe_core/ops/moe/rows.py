"""Rows of a forward's products and their quantisation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from moe_core.base import ArraySpec
from moe_core.formats import QuantizedTensor
from moe_core.ops.matmul.forward import plan_product
from moe_core.ops.matmul.problem import MAXIMA, MatmulProblem
from moe_core.ops.matmul.tile_choice import TileChoice
from moe_core.ops.quantize.rows import chooses_one_scale, plan_quantize_rows
from moe_core.ops.reduction.rowwise import plan_order_rows
from moe_core.plan import Held, PlanBuilder, Role
from moe_core.specs import LayoutArrays, named_arrays

_HIDDEN_SCALE, _HIDDEN_MAXIMA = "experts.down_input_scale", "hidden.maxima"


@dataclass(frozen=True)
class Product:
    """One of the experts' products. tile: None without tiles."""

    problem: MatmulProblem
    tile: TileChoice | None

    def add(self, builder: PlanBuilder, stage: int, names: dict[str, str]) -> None:
        builder.call(plan_product(self.problem, self.tile, stage), f"matmul {stage + 1}", names)


def with_scales(builder: PlanBuilder, product: Product, rows: ArraySpec | QuantizedTensor) -> Product:
    """Product 1, which may quantise its result for product 2, or find the largest magnitudes for one scale."""
    if product.tile is None or not isinstance(rows, QuantizedTensor):
        return product
    scale = builder.spec(_HIDDEN_SCALE) if builder.has(_HIDDEN_SCALE) else None
    problem, family = product.problem, product.tile.family
    quantising = dataclasses.replace(problem, out_format=rows.format, out_scale=scale)
    if family.why_not_out_format(quantising) is None:
        return Product(quantising, product.tile)
    if not chooses_one_scale(rows.format, scale is not None):
        return product
    if not family.finds_maxima:
        builder.note(f"the largest magnitudes of hidden rows are found by a launch: {family.name} products do not")
        return product
    return Product(dataclasses.replace(problem, finds_maxima=True), product.tile)


def in_order(builder: PlanBuilder, product: Product, row_of_slot: str, source: str) -> tuple[Product, str]:
    """(product 1 of rows in layout order, their buffer), which is written here from those of `source` by token."""
    problem = product.problem
    assert problem.layout is not None
    plan = plan_order_rows(builder.spec(source), problem.layout, builder.target)
    rows = builder.scratch("ordered_x", plan.spec("y"), Role.ROWS)
    builder.call(plan, "rows in order", {"x": source, "row_of_slot": row_of_slot, "y": rows})
    operands = dataclasses.replace(problem.operands, x=plan.spec("y"))
    problem = dataclasses.replace(problem, operands=operands, spec=dataclasses.replace(problem.spec, gather="row"))
    return Product(problem, product.tile), rows


@dataclass(frozen=True)
class RowStages:
    """Adds the stages that quantise rows. arrays: the layout's buffers. product: of `with_scales`."""

    builder: PlanBuilder
    arrays: LayoutArrays
    product: Product

    def quantized_x(self, source: str, rows: ArraySpec | QuantizedTensor) -> str:
        """The prefix of product 1's x. source: x, or x times the weights."""
        if not isinstance(rows, QuantizedTensor):
            return source
        return self._quantize("x", source, rows, "experts.gate_up_input_scale", "row_of_slot")

    def hidden_rows(self, names: dict[str, str], hidden: ArraySpec, rows: ArraySpec | QuantizedTensor) -> str:
        """Add product 1 and the quantisation of its result. Returns the prefix of product 2's rows."""
        builder, product = self.builder, self.product
        if product.problem.out_format is not None:
            name = "quantized_hidden"
            for part, array in named_arrays(rows, f"{name}."):
                builder.scratch(part, array, Held(Role.ROWS, part.rpartition(".")[2]))
            product.add(builder, 0, names | {"y": name, "static_scale": _HIDDEN_SCALE})
            return name
        name = builder.scratch("hidden", hidden, Role.ROWS)
        product.add(builder, 0, names | {"y": name, "maxima": _HIDDEN_MAXIMA})
        if isinstance(rows, QuantizedTensor):
            return self._quantize("hidden", name, rows, _HIDDEN_SCALE, "slot_of_row")
        return name

    def _quantize(self, name: str, source: str, rows: QuantizedTensor, scale: str, users: str) -> str:
        """Returns the prefix of the arrays. users: the layout's array of the slots that read a row."""
        builder, quantized = self.builder, f"quantized_{name}"
        bindings = {"static_scale": scale} if builder.has(scale) else {}
        if users == "slot_of_row" or chooses_one_scale(rows.format, bool(bindings)):
            # Rows of no slot are unwritten, and masked tokens may hold anything: a common scale must ignore both.
            bindings |= {"used_by": getattr(self.arrays, users)}
        made = {p: builder.scratch(f"{quantized}.{p}", array, Held(Role.ROWS, p)) for p, array in named_arrays(rows)}
        zeros = 0
        if self.product.problem.finds_maxima and name == "x":
            # This launch precedes product 1, so none is added for a few zeros.
            zeros, made["zeros"] = MAXIMA, builder.scratch(_HIDDEN_MAXIMA, ArraySpec((MAXIMA,), "int32"))
        elif self.product.problem.finds_maxima:
            bindings |= {"maxima": _HIDDEN_MAXIMA}
        scales, used_by, maxima = (builder.spec_of(bindings.get(key)) for key in ("static_scale", "used_by", "maxima"))
        plan = plan_quantize_rows(
            builder.spec(source),
            rows.format,
            builder.target,
            scales=scales,
            used_by=used_by,
            zeros=zeros,
            maxima=maxima,
        )
        roles = {"used_by": Role(users)} if "used_by" in bindings else None
        builder.call(plan, f"quantize {name}", {"x": source} | bindings | made, roles)
        return quantized
