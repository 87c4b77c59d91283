"""Planning of grouped matmuls of rows in the order of groups, as `torch._grouped_mm` and `jax.lax.ragged_dot` have."""

from __future__ import annotations

from typing import Any

from moe_core.base import ArraySpec, Target, dtypes, keep_plans, require_spec, row_stride
from moe_core.errors import InvalidInput
from moe_core.ops.matmul.forward import add_notes, declare_outputs
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.tile_choice import choose_tile
from moe_core.ops.matmul.weight_gradient import plan_weight_gradient
from moe_core.ops.routing.groups import Groups, add_row_groups
from moe_core.plan import LaunchPlan, PlanBuilder
from moe_core.specs import LayoutSpec, MatmulSpec, WeightGradientSpec
from moe_core.specs.operands import MatmulOperands, WeightGradientOperands, named_arrays


@keep_plans
def plan_grouped_mm(operands: MatmulOperands, groups: Groups, spec: MatmulSpec, target: Target) -> LaunchPlan:
    """y `[R, N]`: `plan_matmul_ogs` of rows x `[R, D]` in the order of groups; rows outside of them are zeros."""
    weight = operands.weight
    if len(operands.x.shape) != 2 or len(weight.shape) != 3:
        raise InvalidInput(
            f"x must be [rows, d] and weight [groups, d, n], got {operands.x.shape} and {weight.shape}; reshape them"
        )
    count, num_rows = weight.shape[0], operands.x.shape[0]
    groups = groups.checked(count)
    problem = MatmulProblem(operands, LayoutSpec(num_rows, 1, count), spec, target)
    tile = choose_tile(problem)
    builder = PlanBuilder("grouped_mm", target)
    inputs = builder.inputs(dict(named_arrays(operands)) | groups.arrays())
    declare_outputs(builder, problem)
    if tile is None:
        tensors = tuple((name, tensor.spec) for name, tensor in problem.quantized.items())
        constants: dict[str, Any] = {"spec": spec, "ends": groups.ends, "tensors": tensors}
        builder.sums("reference: float32 BLAS over the whole reduction axis")
        from moe_core.ops.matmul.reference import grouped as twins

        return builder.reference(twins.grouped_mm_plan, inputs, constants, ("y",))
    height, counts = tile.config.block_m, tile.family.counts_tiles
    add_row_groups(builder, groups, num_rows, block_m=height, counts_tiles=counts)
    tile.family.launch(builder, problem, tile.config, 0)
    add_notes(builder, problem, tile)
    return builder.build()


@keep_plans
def plan_grouped_contraction(
    left: ArraySpec,
    right: ArraySpec,
    groups: Groups,
    target: Target,
    *,
    out_dtype: str | None = None,
    allow_tf32: bool = False,
) -> LaunchPlan:
    """d_weight `[count, M, N]` = left^T right over each group's rows of left `[R, M]` and right `[R, N]`.

    Empty groups are zeros. Rows may be strided. out_dtype None: left's.
    """
    for name, shape, dtype in (
        ("left", ("num_rows", "m"), dtypes.MATMUL_DTYPES),
        ("right", (left.shape[0], "n"), left.dtype),
    ):
        array = require_spec(name, left if name == "left" else right, shape, dtype, contiguous=False)
        row_stride(name, array)
    groups = groups.checked(groups.count)
    options = WeightGradientSpec(out_dtype or left.dtype, allow_tf32=allow_tf32)
    operands = WeightGradientOperands(left, right)
    builder = PlanBuilder("grouped_contraction", target)
    inputs = builder.inputs({"left": left, "right": right} | groups.arrays())
    shape = (groups.count or 0, left.shape[1], right.shape[1])
    builder.output("d_weight", ArraySpec(shape, out_dtype or left.dtype))
    if not target.compiled:
        builder.sums("products and sums: the order of NumPy, fp32")
        constants = {"ends": groups.ends}
        from moe_core.ops.matmul.reference import grouped as twins

        return builder.reference(twins.grouped_contraction_plan, inputs, constants, ("d_weight",))
    layout = add_row_groups(builder, groups, left.shape[0])
    plan = plan_weight_gradient(operands, layout, options, target)
    builder.call(plan, "contraction", {"left": "left", "right": "right", "d_weight": "d_weight"})
    return builder.build()


def require_grouped(
    names: tuple[str, str, str],
    a: Any,
    b: Any,
    groups: Any,
    *,
    allowed: tuple[str, ...] = (*dtypes.MATMUL_DTYPES, "float64"),
    more: bool = False,
) -> None:
    """Check a `[R, K]` and b `[G, K, N]`, or for a contraction a `[M, K]` and b `[K, N]`, and groups `[G]`: arrays with
    shape and dtype. names: of the arguments. allowed: dtypes of a and b. more: there may be groups without a matrix.
    Raises InvalidInput."""
    first, second, third = names
    if (len(a.shape), len(b.shape)) not in ((2, 3), (2, 2)):
        raise InvalidInput(
            f"{first} and {second} must be [rows, k] and [groups, k, n], or [m, k] and [k, n], got {tuple(a.shape)} "
            f"and {tuple(b.shape)}; reshape them"
        )
    if a.shape[1] != b.shape[-2]:
        raise InvalidInput(
            f"{second} must have {a.shape[1]} as its axis k, like {first}, got {tuple(b.shape)}; transpose it or pass "
            "the other weight"
        )
    if str(a.dtype).rpartition(".")[2] not in allowed:
        raise InvalidInput(f"{first} must be {' or '.join(allowed)}, got {a.dtype}; convert it")
    if a.dtype != b.dtype:
        raise InvalidInput(f"{second} must be {a.dtype} like {first}, got {b.dtype}; cast one of them")
    if len(b.shape) == 3 and 0 in b.shape:
        raise InvalidInput(f"{second} must have no empty axis, got {tuple(b.shape)}; leave the call out")
    least = b.shape[0] if len(b.shape) == 3 else 1
    shape = None if groups is None else tuple(groups.shape)
    exact = len(b.shape) == 3 and not more
    if shape is None or len(shape) != 1 or shape[0] < max(least, 1) or (exact and shape[0] != least):
        number = str(least) if exact and least else f"at least {max(least, 1)}"
        raise InvalidInput(f"{third} must be one axis of {number}, got {shape}; pass an entry for every group")
    assert groups is not None
    if str(groups.dtype).rpartition(".")[2] not in dtypes.ID_DTYPES:
        raise InvalidInput(f"{third} must be integers, got {groups.dtype}; cast it to int32")
