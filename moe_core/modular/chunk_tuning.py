"""What keeps the summation order of a whole batch in every chunk of it."""

from __future__ import annotations

import dataclasses

from moe_core.arrays import ArraySpec
from moe_core.formats import Format, QuantizedSpec, quantized_specs
from moe_core.matmul_ogs import product_tile
from moe_core.modular.problem_size import ProblemSize
from moe_core.operands import ExpertWeights, MatmulOperands
from moe_core.specs import LayoutSpec, MatmulSpec, Tuning
from moe_core.target import Target


def tuning_of_whole(
    x: ArraySpec,
    experts: ExpertWeights,
    size: ProblemSize,
    products: tuple[MatmulSpec, MatmulSpec],
    target: Target,
    activations: Format | None = None,
) -> Tuning | None:
    """The tuning with which chunks of a batch add up as both products of the whole do; None = what they have is enough.

    x `[M, K]` and experts: ArraySpecs; products: the specs of both for the whole batch, their tuning included;
    activations: the format that rows are quantised to. A tile configuration decides the order of a sum, and is chosen
    by the number of rows unless it is given or batch invariant: here it is chosen once, for size.M tokens. The
    reference engine has no tiles, and its order depends on the rows: None.
    """
    if not target.compiled:
        return None
    layout, (first, second) = LayoutSpec(size.M, size.topk, size.E), products
    if any(product.tuning is not None and product.tuning.batch_invariant for product in products):
        return None
    width = experts.down.shape[-2 if second.weight_layout == "in_out" else -1]
    # Without a fused activation the first product is N wide.
    columns = size.N if first.activation is None else width

    def rows(array: ArraySpec) -> object:
        return array if activations is None else quantized_specs(QuantizedSpec(activations), array.shape)

    hidden = ArraySpec((size.M * size.topk, width), x.dtype)
    operands_1 = MatmulOperands(rows(x), experts.gate_up, bias=experts.gate_up_bias)
    operands_2 = MatmulOperands(rows(hidden), experts.down, bias=experts.down_bias)
    if activations is not None:
        first, second = (dataclasses.replace(product, out_dtype=x.dtype) for product in products)
    chosen = [
        product_tile(operands_1, columns, layout, first, target, name="tuning.matmul_1"),
        product_tile(operands_2, size.K, layout, second, target, name="tuning.matmul_2"),
    ]
    configs = [choice.config for choice in chosen if choice is not None]
    assert len(configs) == 2, "a compiled target has tiles"
    return Tuning(*configs, table=None if first.tuning is None else first.tuning.table)
