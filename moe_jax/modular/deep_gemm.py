"""The grouped products of DeepGEMM's contract, under its names, as pure functions on the kernels of this library."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from moe_core import dtypes
from moe_core.checks import require_at_least, require_choice
from moe_core.errors import InvalidInput
from moe_core.formats import FP8_BLOCK, FP8_GROUP
from moe_core.modular.deep_gemm import Pair, check_products, has_e8m0_mode, matmul_side, plan_masked
from moe_core.operands import MatmulOperands, RaggedLayout
from moe_core.specs import LayoutSpec, MatmulSpec
from moe_jax import ops, platforms
from moe_jax.calls import OpCall

#: Values e4m3 and their scales fp32.
Quantized = tuple[Any, Any]


def m_grouped_fp8_gemm_nt_contiguous(
    a: Quantized, b: Quantized, m_indices: jax.Array, *, out_dtype: Any = jnp.bfloat16
) -> jax.Array:
    """d `[M, N]` with `d[row] = a[row] @ b[m_indices[row]].T` for every row: the contiguous layout.

    a: e4m3 `[M, K]` and scales fp32 `[M, K / 128]`. b: e4m3 `[G, N, K]` and scales fp32 `[G, N / 128, K / 128]`. K and
    N are multiples of 128. m_indices int32 `[M]`: the group of each row, -1 = padding, which is not read and whose rows
    of d are zeros; numbers of no group count as -1. Groups may begin anywhere and come in any order, so that rows
    padded to 128 are as good as others. out_dtype: bf16, fp16 or fp32. No gradient. Raises InvalidInput, Unsupported.
    """
    name = _out_dtype(out_dtype)
    rows, _ = check_products(pair_of("a", a), pair_of("b", b))
    _require_indices("m_indices", m_indices, rows)
    layout = ops.make_layout(m_indices.reshape(-1, 1), b[0].shape[0])
    operands = MatmulOperands(matmul_side(FP8_GROUP, *a), matmul_side(FP8_BLOCK, *b))
    return ops.matmul_ogs(operands, layout, MatmulSpec("out_in", "token", "slot", out_dtype=name))


def m_grouped_fp8_gemm_nt_masked(
    a: Quantized, b: Quantized, masked_m: jax.Array, expected_m: int, *, out_dtype: Any = jnp.bfloat16
) -> jax.Array:
    """d `[G, M, N]` with `d[g, :masked_m[g]] = a[g, :masked_m[g]] @ b[g].T` for every group: the masked layout.

    a: e4m3 `[G, M, K]` and scales fp32 `[G, M, K / 128]`. masked_m int32 `[G]`: rows past it are not read, and are
    zeros in d. expected_m, static: about how many rows of a group are used; tiles are chosen for it, and what is
    computed does not depend on its being right. Everything else as in `m_grouped_fp8_gemm_nt_contiguous`.
    """
    name = _out_dtype(out_dtype)
    require_at_least("expected_m", expected_m, 1)
    groups, rows, n = check_products(pair_of("a", a), pair_of("b", b), masked=True)
    _require_indices("masked_m", masked_m, groups)
    layout = blocks_layout(groups, rows, jnp.clip(masked_m, 0, rows))
    flat = (a[0].reshape(groups * rows, -1), a[1].reshape(groups * rows, -1))
    operands = MatmulOperands(matmul_side(FP8_GROUP, *flat), matmul_side(FP8_BLOCK, *b))
    call = OpCall("m_grouped_fp8_gemm_nt_masked")
    shapes = call.bundle("operands", operands)
    for field in ("group_sizes", "group_start", "slot_of_row"):
        call.array(field, getattr(layout, field))
    spec = MatmulSpec("out_in", out_dtype=name)
    (d,) = call.run(plan_masked, shapes, layout.spec, spec, min(expected_m, max(rows, 1)))
    return d.reshape(groups, rows, n)


def is_blackwell_deep_gemm_e8m0_used() -> bool:
    """Whether the chip that programs are traced for is one on which DeepGEMM takes power-of-two scales alone:
    Blackwell, sm_100 to sm_109."""
    target = platforms.cuda_target()
    return target is not None and has_e8m0_mode(target)


def blocks_layout(groups: int, rows: int, sizes: jax.Array) -> RaggedLayout:
    """The layout of `[groups, rows, D]` whose first sizes int32 `[groups]` rows are used; every row is its own slot."""
    total = groups * rows
    places = jnp.arange(total, dtype=jnp.int32)
    starts = jnp.arange(groups + 1, dtype=jnp.int32) * rows
    used = places.reshape(groups, rows) - starts[:-1, None] < sizes[:, None]
    slots = jnp.where(used.reshape(-1), places, -1)
    spec = LayoutSpec(total, 1, groups, max_rows=rows)
    return RaggedLayout(spec, sizes, starts, slots, slots, jnp.zeros(1, jnp.int32))


def pair_of(name: str, pair: Quantized) -> Pair:
    """Shapes and dtypes of values and scales; InvalidInput for what is no pair."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise InvalidInput(f"{name} must be (values, scales), got {type(pair).__name__}; pass both arrays")
    values, scales = pair
    return Pair(values.shape, values.dtype.name, scales.shape, scales.dtype.name)


def _out_dtype(out_dtype: Any) -> str:
    name = dtypes.canonical(out_dtype)
    require_choice("out_dtype", name, dtypes.MATMUL_DTYPES)
    return name


def _require_indices(name: str, indices: Any, count: int) -> None:
    if indices.dtype.name != "int32" or indices.shape != (count,):
        raise InvalidInput(f"{name} must be int32 [{count}], got {indices.dtype} {indices.shape}; cast or cut it")
