"""Grouped matmuls with the signatures of `torch._grouped_mm` and `torch.nn.functional`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import ScalingType, SwizzleType

from moe_core.base.checks import require_choice, require_flag
from moe_core.base.dtypes import MATMUL_DTYPES
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedSpec, QuantizedTensor, format_named
from moe_core.ops.matmul.grouped import require_grouped
from moe_core.specs.matmul import MatmulSpec
from moe_torch.bridge.options import dtype_name
from moe_torch.operators.grouped import GROUPED_CONTRACTION, GROUPED_MM, GROUPED_MM_QUANTIZED

_NAMES = ("mat_a", "mat_b", "offs")
_PER_ROW = QuantizedSpec(format_named("fp8_token")), QuantizedSpec(format_named("fp8_channel"))
#: Made once, because every call encodes one: by weight layout, out_dtype and fast accumulation.
_SPECS = {
    (layout, dtype, fast): MatmulSpec(layout, out_dtype=dtype, fast_accumulate=fast)
    for layout in ("in_out", "out_in")
    for dtype in (None, *MATMUL_DTYPES)
    for fast in (False, True)
}


def grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply groups of rows with their matrices: `torch._grouped_mm` and `torch.nn.functional.grouped_mm`.

    All arguments but offs have gradients, of any order. `offs[g]` is the end of group g on the ragged axis:

    | mat_a | mat_b | ragged axis | result |
    |---|---|---|---|
    | `[M, K]` | `[G, K, N]` | M | `[M, N]`, zeros from `offs[-1]` on |
    | `[G, M, K]` | `[K, N]` | N | `[M, N]`, a transposed view, zeros from `offs[-1]` on |
    | `[M, K]` | `[K, N]` | K | `[G, M, N]`, zeros for empty groups |
    | `[G, M, K]` | `[G, K, N]` | none | `[G, M, N]` |

    Args:
        mat_a: bf16, fp16 or fp32. A 2D operand may be a view with rows or columns in one piece. It is
            copied if its rows (along a ragged K its columns) are not in one piece.
        mat_b: like mat_a. 3D operands are row-major or column-major.
        offs: integers `[G]`. An entry below an earlier one, or past the end, makes an empty or a shorter group.
        bias: `[G, N]` in fp32 or the dtype of mat_a, for 3D mat_b.
        out_dtype: None: the dtype of mat_a.

    Raises:
        InvalidInput: also for 3D operands of other strides, since every call would copy them.
    """
    _check_forms(mat_a, mat_b, offs, bias)
    dtype = _dtype("out_dtype", out_dtype, mat_a.dtype)
    if mat_a.ndim == mat_b.ndim == 2:
        assert offs is not None
        return GROUPED_CONTRACTION.call(left=_rows(mat_a.mT), right=_rows(mat_b), offs=offs, out_dtype=dtype)

    def multiply(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, name: str) -> torch.Tensor:
        layout, weight = _layout(name, weight)
        spec = _SPECS[layout, dtype, False]
        return GROUPED_MM.call(x=_rows(x), weight=weight, bias=bias, offs=ends, spec=spec)

    return _by_form(multiply, mat_a, mat_b, offs)


def scaled_grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: torch.Tensor | list[torch.Tensor],
    scale_recipe_a: ScalingType | list[ScalingType],
    scale_b: torch.Tensor | list[torch.Tensor],
    scale_recipe_b: ScalingType | list[ScalingType],
    swizzle_a: SwizzleType | list[SwizzleType] | None = None,
    swizzle_b: SwizzleType | list[SwizzleType] | None = None,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Multiply groups of fp8 rows with their fp8 matrices: `torch.nn.functional.scaled_grouped_mm`.

    Forms and offs are as in `grouped_mm`. Sums of codes are fp32, multiplied with both scales and cast once. Nothing
    has a gradient.

    Args:
        mat_a: e4m3, row-major.
        mat_b: e4m3, column-major.
        scale_a: fp32 `[M]`, or `[G, M]` for a 3D mat_a, or `[G * M]` if K is ragged.
        scale_recipe_a: `ScalingType.RowWise`, with scale_recipe_b.
        scale_b: fp32 `[G, N]`, or `[N]` for a 2D mat_b, or `[G * N]` if K is ragged.
        swizzle_a: None or `SwizzleType.NO_SWIZZLE`, as swizzle_b.
        output_dtype: None: bf16.
        use_fast_accum: leave sums in the tensor cores over more than 128 columns.

    Raises:
        Unsupported: for other recipes, swizzled scales and a contraction_dim.
    """
    (scale_a, scale_b) = (_only(*one) for one in (("scale_a", scale_a), ("scale_b", scale_b)))
    for name, value, wanted in (
        ("scale_recipe_a", scale_recipe_a, ScalingType.RowWise),
        ("scale_recipe_b", scale_recipe_b, ScalingType.RowWise),
        ("swizzle_a", swizzle_a, SwizzleType.NO_SWIZZLE),
        ("swizzle_b", swizzle_b, SwizzleType.NO_SWIZZLE),
    ):
        if value is not None and _only(name, value) != wanted:
            raise Unsupported(f"{name} must be {wanted.name}, got {value}; moe_torch.matmul_ogs takes blocks of scales")
    if contraction_dim not in ((), []):
        raise Unsupported(f"contraction_dim must be (), got {contraction_dim}; pass [.., K] and [.., K, N] operands")
    require_flag("use_fast_accum", use_fast_accum)
    _check_forms(mat_a, mat_b, offs, bias, allowed=("float8_e4m3fn",))
    for name, one in {"mat_a": mat_a, "mat_b": mat_b, "scale_a": scale_a, "scale_b": scale_b, "bias": bias}.items():
        if torch.is_grad_enabled() and getattr(one, "requires_grad", False):
            raise Unsupported(f"{name} must need no gradient, as scaled_grouped_mm has none; detach it")
    dtype = _dtype("output_dtype", output_dtype, None) or "bfloat16"
    if mat_a.ndim == mat_b.ndim == 2:
        # e4m3 and its products are exact in bf16 and fp32.
        left, right = (one.to(torch.bfloat16, memory_format=torch.contiguous_format) for one in (mat_a.mT, mat_b))
        assert offs is not None
        sums = GROUPED_CONTRACTION.call(left=left, right=right, offs=offs, out_dtype="float32")
        rows, columns = _scales("scale_a", scale_a, sums.shape[:2]), _scales("scale_b", scale_b, sums.shape[::2])
        return (sums * (rows[:, :, None] * columns[:, None, :])).to(getattr(torch, dtype))
    scales = {"mat_a": _scales("scale_a", scale_a, mat_a.shape[:-1])}
    scales["mat_b"] = _scales("scale_b", scale_b, (*mat_b.shape[:-2], mat_b.shape[-1]))

    def multiply(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, name: str) -> torch.Tensor:
        layout, weight = _layout(name, weight)
        if layout != "out_in":
            raise InvalidInput(f"{name} must be {_MAJOR[name]}-major, got strides {weight.stride()}; copy it so")
        tokens, channels = (scales[one] for one in ("mat_a", "mat_b")[:: 1 if name == "mat_b" else -1])
        rows = QuantizedTensor(_PER_ROW[0], _rows(x), tokens.reshape(-1, 1))
        matrices = QuantizedTensor(_PER_ROW[1], weight, channels[:, :, None])
        spec = _SPECS[layout, dtype, use_fast_accum]
        return GROUPED_MM_QUANTIZED.call(x=rows, weight=matrices, bias=bias, offs=ends, spec=spec)

    return _by_form(multiply, mat_a, mat_b, offs)


_MAJOR = {"mat_a": "row", "mat_b": "column"}


def _by_form(multiply: Any, mat_a: torch.Tensor, mat_b: torch.Tensor, offs: Any) -> torch.Tensor:
    """Call `multiply` with rows, matrices `[G, K, N]`, the ends of groups and the name of the matrices."""
    if mat_b.ndim == 2:
        return multiply(mat_b.mT, mat_a.mT, offs, "mat_a").mT
    if mat_a.ndim == 2:
        return multiply(mat_a, mat_b, offs, "mat_b")
    groups, rows, _ = mat_a.shape
    ends = rows * torch.arange(1, groups + 1, dtype=torch.int32, device=mat_a.device)
    return multiply(mat_a.flatten(0, 1), mat_b, ends, "mat_b").view(groups, rows, mat_b.shape[-1])


def _check_forms(
    mat_a: torch.Tensor, mat_b: torch.Tensor, offs: torch.Tensor | None, bias: Any, **allowed: Any
) -> None:
    for name, one in zip(_NAMES, (mat_a, mat_b), strict=False):
        if not isinstance(one, torch.Tensor) or one.ndim not in (2, 3):
            got = tuple(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__
            raise InvalidInput(f"{name} must be a tensor with 2 or 3 axes, got {got}; reshape it")
    forms = mat_a.ndim, mat_b.ndim
    if not (offs is None or isinstance(offs, torch.Tensor)):
        raise InvalidInput(f"offs must be an integer tensor, got {type(offs).__name__}; pass torch.tensor(offs)")
    if forms == (3, 3):
        if offs is not None:
            raise InvalidInput("offs must be None if mat_a and mat_b are 3D, got a tensor; leave it out")
        if mat_a.shape[0] != mat_b.shape[0]:
            raise InvalidInput(f"mat_b must have {mat_a.shape[0]} groups like mat_a, got {mat_b.shape[0]}; pass both")
        ends = torch.empty(len(mat_a), dtype=torch.int32, device="meta")
        rows = mat_a.new_empty(mat_a.shape[1:], device="meta")
        require_grouped(_NAMES, rows, mat_b, ends, **allowed)
    elif forms == (3, 2):
        names = ("mat_b (transposed)", "mat_a (transposed)", "offs")
        require_grouped(names, mat_b.mT, mat_a.mT, offs, **allowed)
    else:
        require_grouped(_NAMES, mat_a, mat_b, offs, **allowed)
    if bias is not None and mat_b.ndim == 2:
        raise Unsupported("bias must be None with a 2D mat_b, got a tensor; add it to the result")


def _dtype(name: str, dtype: Any, default: torch.dtype | None) -> str | None:
    chosen = None if dtype == default else dtype_name(name, dtype)
    if chosen is not None:
        require_choice(name, chosen, MATMUL_DTYPES)
    return chosen


def _layout(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    """The layout of `[G, K, N]`, and the contiguous array."""
    if weight.mT.is_contiguous():
        return "out_in", weight.mT
    if weight.is_contiguous():
        return "in_out", weight
    raise InvalidInput(
        f"{name} must be row-major or column-major without gaps, got strides {weight.stride()}; call .contiguous()"
    )


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def _only(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        if len(value) != 1:
            raise Unsupported(f"{name} must be one value, got {len(value)}; scales of two levels have no kernel")
        return value[0]
    return value


def _scales(name: str, scales: Any, shape: Sequence[int]) -> torch.Tensor:
    """The scales as an array of this shape, which may be given flat."""
    known = isinstance(scales, torch.Tensor) and tuple(scales.shape) in (tuple(shape), (math.prod(shape),))
    if not known or scales.dtype != torch.float32:
        got = f"{scales.dtype} {list(scales.shape)}" if isinstance(scales, torch.Tensor) else type(scales).__name__
        raise InvalidInput(f"{name} must be torch.float32 {list(shape)}, got {got}; pass one for each row or column")
    return scales.contiguous().view(tuple(shape))
