"""Grouped matmuls with the signatures of `jax.lax.ragged_dot`, `jax.lax.ragged_dot_general` and megablox's `gmm`."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import DotAlgorithmPreset, Precision

from moe_core.base.checks import require_choice, require_flag
from moe_core.base.dtypes import MATMUL_DTYPES
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.matmul.grouped import require_grouped
from moe_core.specs.matmul import MatmulSpec
from moe_jax.autodiff.stages import run_contraction, run_grouped_mm
from moe_jax.bridge.calls import Array, dtype_name, require_array
from moe_jax.bridge.mesh import over_rows

#: True: fp32 products may round their operands to TF32.
_PRECISIONS = {
    **dict.fromkeys((None, Precision.DEFAULT, Precision.HIGHEST, DotAlgorithmPreset.F32_F32_F32), False),
    **dict.fromkeys(("default", "highest", "float32"), False),
    **dict.fromkeys((Precision.HIGH, DotAlgorithmPreset.TF32_TF32_F32, "high", "tensorfloat32"), True),
}


def ragged_dot(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Array | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Multiply consecutive groups of rows with their matrices, to `[M, N]`: `jax.lax.ragged_dot`.

    lhs and rhs have reverse-mode gradients of any order. Sums are fp32 with one cast. Rows outside of the groups are
    zeros.

    Args:
        lhs: bf16, fp16 or fp32 `[M, K]`.
        rhs: `[G, K, N]` in the dtype of lhs.
        group_sizes: integers `[G]`, or with group_offset at least as long. Groups are cut at the last row.
        precision: for fp32. `HIGH` and `TF32_TF32_F32` allow TF32. None, `DEFAULT`, `HIGHEST` and `F32_F32_F32` are
            IEEE.
        preferred_element_type: dtype of the result, bf16, fp16 or fp32. None: that of lhs.
        group_offset: int32 `[1]`, the group that the first matrix of rhs belongs to.
        out_sharding: None. On a mesh the rows of lhs are split over its axes, with whole rhs, as in `moe`.

    Raises:
        Unsupported: for other precisions, and an out_sharding.
    """
    _refuse_sharding(out_sharding)
    return _product(lhs, rhs, (group_sizes, group_offset), precision, preferred_element_type, transposed=False)


def ragged_dot_general(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Array | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Multiply groups of rows, or contract over them: `jax.lax.ragged_dot_general` without batch dimensions.

    | ragged dimension of lhs | lhs | rhs | result |
    |---|---|---|---|
    | not contracted | `[M, K]` | `[G, K, N]` or `[G, N, K]` | `[M, N]` |
    | contracted, as in gradients of weights | `[M, K]` | `[M, N]` | `[G, K, N]`, zeros for empty groups |

    Axes of lhs, and of rhs in the second form, may be swapped, which transposes the array first.

    ragged_dot_dimension_numbers choose the form. Other arguments, gradients and errors are as in `ragged_dot`.
    """
    _refuse_sharding(out_sharding)
    numbers = ragged_dot_dimension_numbers
    ((lhs_contracted, rhs_contracted), batch), ragged = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    sizes = tuple(map(len, (lhs_contracted, rhs_contracted, *batch, ragged)))
    for name, value in (("lhs", lhs), ("rhs", rhs)):
        require_array(name, value)
    if sizes != (1, 1, 0, 0, 1) or lhs.ndim != 2:
        raise Unsupported(
            f"ragged_dot_dimension_numbers must have one contracted and one ragged dimension and no batch, with lhs of "
            f"two axes, got {numbers} and lhs {lhs.shape}; vmap over batches"
        )
    contracted, of_rhs, rows = lhs_contracted[0] % 2, rhs_contracted[0] % rhs.ndim, ragged[0] % 2
    groups = (group_sizes, group_offset)
    if contracted == rows:
        if rhs.ndim != 2 or numbers.rhs_group_dimensions:
            raise InvalidInput(
                f"rhs must have two axes and no group dimension if the ragged dimension is contracted, got {rhs.shape} "
                f"and {numbers.rhs_group_dimensions}; pass [m, n]"
            )
        left, right = lhs if rows == 0 else lhs.T, rhs if of_rhs == 0 else rhs.T
        _check(left.T, right, *groups, form="[m, n]")
        out_dtype = _out_dtype(preferred_element_type, lhs)
        return _contracted(left, right, *groups, allow_tf32=_tf32(precision), out_dtype=out_dtype)
    if tuple(axis % 3 for axis in numbers.rhs_group_dimensions) != (0,) or of_rhs not in (1, 2) or rhs.ndim != 3:
        raise Unsupported(
            f"rhs must be [g, k, n] or [g, n, k] with group dimension 0, got {rhs.shape} and {numbers}; transpose it"
        )
    left = lhs if rows == 0 else lhs.T
    return _product(left, rhs, groups, precision, preferred_element_type, transposed=of_rhs == 2)


def gmm(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    preferred_element_type: Any = jnp.float32,
    tiling: Any = (128, 128, 128),
    group_offset: Array | None = None,
    existing_out: Array | None = None,
    transpose_rhs: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Multiply consecutive groups of rows with their matrices: megablox's `gmm`, see `ragged_dot`.

    Args:
        rhs: `[G, K, N]`, or `[G, N, K]` with transpose_rhs.
        tiling: a hint for another kernel, without effect. The plan chooses the tile.
        existing_out: None. Rows outside of the groups are zeros, so add the results.
        interpret: False. `moe_jax.cpu_engine("interpreter")` chooses Triton's interpreter.
    """
    if existing_out is not None:
        raise Unsupported("existing_out must be None, got an array; add it to the result, whose other rows are zeros")
    if interpret:
        raise Unsupported("interpret must be False, got True; use moe_jax.cpu_engine('interpreter')")
    require_flag("transpose_rhs", transpose_rhs)
    return _product(lhs, rhs, (group_sizes, group_offset), None, preferred_element_type, transposed=transpose_rhs)


def _product(
    lhs: Array, rhs: Array, groups: tuple[Array, Array | None], precision: Any, dtype: Any, *, transposed: bool
) -> jax.Array:
    require_array("rhs", rhs)
    in_out = jax.ShapeDtypeStruct((*rhs.shape[:-2], *rhs.shape[:-3:-1]), rhs.dtype) if transposed else rhs
    _check(lhs, in_out, *groups, form="[groups, k, n]")
    layout, out_dtype = "out_in" if transposed else "in_out", _out_dtype(dtype, lhs)
    spec = MatmulSpec(layout, out_dtype=out_dtype, allow_tf32=_tf32(precision))
    return _multiplied(lhs, rhs, *groups, spec)


@over_rows("lhs", sizes="group_sizes")
def _multiplied(lhs: Array, rhs: Array, group_sizes: Array, group_offset: Array | None, spec: MatmulSpec) -> jax.Array:
    return run_grouped_mm(lhs, rhs, (group_sizes, group_offset), spec)


@over_rows("lhs", "rhs", sizes="group_sizes", total="over")
def _contracted(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    group_offset: Array | None,
    *,
    allow_tf32: bool,
    out_dtype: str | None,
    over: tuple[str, ...] = (),
) -> jax.Array:
    """over: mesh axes of the rows, whose fp32 sums are added before the one cast."""
    wide = "float32" if over and lhs.dtype in (jnp.bfloat16, jnp.float16) else out_dtype
    result = run_contraction(lhs, rhs, (group_sizes, group_offset), allow_tf32=allow_tf32, out_dtype=wide)
    return jax.lax.psum(result, over).astype(out_dtype or lhs.dtype) if over else result


def _out_dtype(dtype: Any, lhs: Array) -> str | None:
    name = dtype_name("preferred_element_type", dtype)
    if name is None or name == dtype_name("lhs", lhs.dtype):
        return None
    require_choice("preferred_element_type", name, MATMUL_DTYPES)
    return name


def _refuse_sharding(out_sharding: Any) -> None:
    if out_sharding is not None:
        raise Unsupported(f"out_sharding must be None, got {out_sharding}; leave it out: rows stay where they are")


def _check(lhs: Any, rhs: Any, sizes: Any, offset: Any, *, form: str) -> None:
    for name, value in (("lhs", lhs), ("group_sizes", sizes)):
        require_array(name, value)
    if lhs.ndim != 2 or rhs.ndim != form.count(",") + 1:
        raise InvalidInput(f"lhs and rhs must be [m, k] and {form}, got {lhs.shape} and {rhs.shape}; reshape them")
    require_grouped(("lhs", "rhs", "group_sizes"), lhs, rhs, sizes, more=offset is not None)
    if offset is not None:
        require_array("group_offset", offset)
        if offset.shape != (1,) or offset.dtype != jnp.int32:
            raise InvalidInput(f"group_offset must be int32 [1], got {offset.dtype} {offset.shape}; convert it")


def _tf32(precision: Any) -> bool:
    both = precision if isinstance(precision, (tuple, list)) else (precision,)
    answers = {_PRECISIONS.get(one) if isinstance(one, Hashable) else None for one in both}
    if len(answers) != 1 or None in answers:
        raise Unsupported(
            f"precision must be None, DEFAULT, HIGH or HIGHEST of jax.lax.Precision, F32_F32_F32 or TF32_TF32_F32, got "
            f"{precision}; leave it out"
        )
    return bool(answers.pop())
