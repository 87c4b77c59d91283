"""The tolerance table: how far two right results may lie apart, from dtypes and reduction lengths alone.

Both sides round at the same points (fp32 accumulator, fp32 epilogue, one cast); they differ in the order of their sums
and in the last bits of exp. u is the unit roundoff: 2^-24 (fp32), 2^-11 (fp16), 2^-8 (bf16); u32 is fp32's.

Sums. The error of a sum of n rounded terms grows like sqrt(n) u, not n u, with near certainty (N. J. Higham and T.
Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41(5), 2019). Measured against the
rms of the results, one side's is about sqrt(n / 12) u32 for terms added one after the other (same authors, Sharper
probabilistic backward error analysis for basic linear algebra kernels with random data, SIAM J. Sci. Comput. 42(5),
2020): 0.41 sqrt(n) u32 between two sides. The table takes sqrt(n) u32. Tensor cores (fp16 and bf16 inputs) truncate
their fp32 sums: a drift of u32 for every 16 terms (M. Fasi, N. J. Higham, M. Mikaitis and S. Pranesh, Numerical
behavior of NVIDIA tensor cores, PeerJ Comput. Sci. 7:e330, 2021). TF32 keeps 10 bits behind the point: 2^-10 for
truncated inputs.

Casts. Two values that differ by a share f of their size, f far below u, round alike except where a rounding boundary
lies between them: then they differ by at most 2u. That happens to a share f / 2u of the elements, so the Frobenius
error after the cast is sqrt(2u f), never more than u on top of f; the worst element gains 2u. So one rounding too many
(0.4 u) is caught.

Quantised operands. Both sides dequantise to the same bits, so products with plain rows are as above. Codes of quantised
rows and their products are exact in bf16: as bf16 inputs. int8 sums are exact, only groups are added up in fp32. Hopper
adds fp8 products up with 13 bits behind the point (DeepSeek-V3 Technical Report, section 3.3.2, arXiv 2412.19437;
SageAttention2, section 3.3, arXiv 2411.10958): 2^-13 for every instruction of 32 columns, over 128 columns or, with
fast_accumulate, over all. Rows known to a share f of their size get another code where a rounding boundary lies
between: a share 2f / step, which makes sqrt(2f step).

Worst elements are allowed six standard deviations: 2e-9 for one element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from moe_core.base import dtypes, require_at_least, require_choice
from moe_core.errors import InvalidInput
from moe_core.formats import Format
from moe_core.specs import Activation, MatmulSpec, MoESpec

#: Half the distance from 1 to the next number.
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
FP32 = UNIT_ROUNDOFF["float32"]
_TF32_TRUNCATION = 2.0**-10
DEVIATIONS = 6.0
#: Of bias, row weight and dequantisation scale, on both sides.
_EPILOGUE_ROUNDINGS = 4
#: Slope of an activation over the ratio of its rms to its input's. Worst: if one gated factor is near zero, the other's
#: size multiplies the error.
_ACTIVATION_GAIN, _ACTIVATION_WORST_GAIN = 4.0, 8.0
#: Worst: exp(x) loses |x| u, and |x| of 20 still counts.
_ACTIVATION_ROUNDINGS, _ACTIVATION_WORST_ROUNDINGS = 8, 32
#: An absolute error of a logit is a relative error of its weight: logits up to this many times their rms.
_LOGIT_GAIN = 16.0
#: Columns of fp8 products before partial sums are added in fp32, and an instruction's truncation.
_PROMOTED, _FP8_TRUNCATION = 128, 2.0**-13
#: The distance of two codes over an element's scale: usually, and at worst. int8: a row's amax is 4, at worst 16 times
#: its rms. e2m1: half of the element, or an eighth of its group's amax, at worst 8 times the rms.
_STEPS = {"e4m3": (2.0**-3, 2.0**-3), "int8": (2.0**-5, 2.0**-3), "e2m1": (2.0**-1, 1.0)}
#: Rows of at least this width have a reliable rms.
_WIDE_ROW = 16
#: Elements of a small array that may be at their worst at once.
_ELEMENTS_AT_WORST = 8
#: Smaller numbers are remains of underflow.
_SMALLEST_SCALE = 2.0**-100


@dataclass(frozen=True)
class Tolerance:
    """relative_frobenius: bound of |a - e| / |e|. worst: bound of every element's error over its scale."""

    relative_frobenius: float
    worst: float

    def __post_init__(self) -> None:
        for name, value in (("relative_frobenius", self.relative_frobenius), ("worst", self.worst)):
            if not 0 <= value < math.inf:
                raise InvalidInput(
                    f"{name} must be finite and at least 0, got {value}; take it from the table's functions"
                )

    def __add__(self, other: Tolerance) -> Tolerance:
        return Tolerance(self.relative_frobenius + other.relative_frobenius, self.worst + other.worst)


#: Bitwise agreement except for the sign of zero: ids, counts, layouts.
EXACT = Tolerance(0.0, 0.0)


def rounded(before: Tolerance, dtype: str) -> Tolerance:
    """The tolerance after one cast of both sides."""
    unit = UNIT_ROUNDOFF[dtype]
    flips = math.sqrt(2 * unit * min(before.relative_frobenius, unit / 2))
    return before + Tolerance(flips, 2 * unit)


def product_tolerance(source: Tolerance, in_dtype: str, length: int, allow_tf32: bool) -> Tolerance:
    """A fp32 product over `length` terms with a left operand of tolerance `source`."""
    sums = (math.sqrt(length) + _EPILOGUE_ROUNDINGS) * FP32
    if in_dtype != "float32":
        sums += length / 16 * FP32
    elif allow_tf32:
        sums += _TF32_TRUNCATION
    return _carried(source, length, sums)


def _quantized_product(
    source: Tolerance, dtype: str, length: int, weights: Format, spec: MatmulSpec | MoESpec, rows: Format | None
) -> Tolerance:
    """`product_tolerance` with quantised weights. dtype: of plain rows."""
    if rows is None:
        return product_tolerance(source, dtype, length, spec.allow_tf32)
    if rows.element == "int8":
        groups = 1 if weights.group_columns is None else -(-length // weights.group_columns)
        return _carried(source, length, (math.sqrt(groups) + _EPILOGUE_ROUNDINGS) * FP32)
    product = product_tolerance(source, "bfloat16", length, False)
    microscaled = rows.has_e8m0_scales and weights.has_e8m0_scales
    if (rows.element, weights.element) != ("e4m3", "e4m3") or microscaled:
        return product
    unpromoted = length if spec.fast_accumulate else min(length, _PROMOTED)
    truncation = unpromoted / 32 * _FP8_TRUNCATION
    return product + Tolerance(truncation, DEVIATIONS * truncation)


def _carried(source: Tolerance, length: int, sums: float) -> Tolerance:
    """Sums of error `sums` over left factors of tolerance `source`."""
    # One row of a short operand may hold more than its share of elements at their worst.
    row = source.relative_frobenius + source.worst * math.sqrt(min(1.0, _ELEMENTS_AT_WORST / max(length, 1)))
    return Tolerance(source.relative_frobenius + sums, DEVIATIONS * (row + sums))


def activated(before: Tolerance) -> Tolerance:
    """The tolerance after an activation in fp32."""
    return Tolerance(
        _ACTIVATION_GAIN * before.relative_frobenius + _ACTIVATION_ROUNDINGS * FP32,
        _ACTIVATION_WORST_GAIN * before.worst + _ACTIVATION_WORST_ROUNDINGS * FP32,
    )


def _check(in_dtype: str, out_dtype: str) -> None:
    require_choice("in_dtype", in_dtype, dtypes.MATMUL_DTYPES)
    require_choice("out_dtype", out_dtype, dtypes.MATMUL_DTYPES)


def matmul_tolerance(
    in_dtype: str,
    out_dtype: str,
    reduction_length: int,
    *,
    activation: Activation | None = None,
    allow_tf32: bool = False,
) -> Tolerance:
    """A matmul over reduction_length terms with its epilogue (bias, fused `activation`, row weight, one cast)."""
    _check(in_dtype, out_dtype)
    require_at_least("reduction_length", reduction_length, 0)
    before = product_tolerance(EXACT, in_dtype, reduction_length, allow_tf32)
    return rounded(before if activation is None else activated(before), out_dtype)


def quantized_matmul_tolerance(
    dtype: str, reduction_length: int, weights: Format, spec: MatmulSpec, *, rows: Format | None = None
) -> Tolerance:
    """Like `matmul_tolerance` with quantised weights and maybe rows. dtype: of plain rows, and of such results."""
    out_dtype = spec.out_dtype or dtype
    _check(dtype, out_dtype)
    require_at_least("reduction_length", reduction_length, 0)
    before = _quantized_product(EXACT, dtype, reduction_length, weights, spec, rows)
    return rounded(before if spec.activation is None else activated(before), out_dtype)


def router_tolerance(reduction_length: int, logits_dtype: str = "float32") -> Tolerance:
    """Router logits: IEEE fp32 whatever the input dtypes, rounded to logits_dtype."""
    return matmul_tolerance("float32", logits_dtype, reduction_length)


def routing_weights_tolerance(num_experts: int, logits: Tolerance = EXACT) -> Tolerance:
    """Router weights for equal ids: exp, a sum over experts, divisions."""
    rounding = (_ACTIVATION_ROUNDINGS + math.sqrt(num_experts)) * FP32
    worst = (_ACTIVATION_WORST_ROUNDINGS + math.sqrt(num_experts)) * FP32
    before = Tolerance(_LOGIT_GAIN * logits.relative_frobenius + rounding, _LOGIT_GAIN * logits.worst + worst)
    return rounded(before, "float32")


def activation_tolerance(out_dtype: str) -> Tolerance:
    _check("float32", out_dtype)
    return rounded(activated(EXACT), out_dtype)


def stage_tolerances(
    spec: MoESpec,
    dtype: str,
    *,
    d_model: int,
    d_ff: int,
    top_k: int,
    num_experts: int,
    routed_from: str = "x",
    weights_format: Format | None = None,
) -> dict[str, Tolerance]:
    """Tolerances of `moe_stages` after equal ids. routed_from: what both sides got, `x`, `logits` or `ids`."""
    _check(dtype, spec.out_dtype or dtype)
    require_choice("routed_from", routed_from, ("x", "logits", "ids"))
    logits = router_tolerance(d_model, spec.logits_dtype) if routed_from == "x" else EXACT
    weights = EXACT if routed_from == "ids" else routing_weights_tolerance(num_experts, logits)
    source, slot_weights = EXACT, weights
    if spec.apply_router_weight_on_input:
        source, slot_weights = rounded(weights, dtype) if weights != EXACT else EXACT, EXACT

    def product(source: Tolerance, length: int) -> Tolerance:
        if weights_format is None:
            return product_tolerance(source, dtype, length, spec.allow_tf32)
        if spec.activations is not None and source != EXACT:
            step, worst_step = _STEPS[spec.activations.element]
            flips = math.sqrt(step * min(2 * source.relative_frobenius, step))
            source = Tolerance(2 * source.relative_frobenius + flips, 2 * source.worst + worst_step)
        return _quantized_product(source, dtype, length, weights_format, spec, spec.activations)

    first = product(source, d_model)
    hidden = rounded(activated(first), dtype)
    second = product(hidden, d_ff)
    slots = rounded(second + slot_weights, dtype)
    sums = math.sqrt(top_k) * FP32
    # A token's slots add up like sqrt(K), their errors at worst like K.
    summed = Tolerance(slots.relative_frobenius + sums, math.sqrt(top_k) * slots.worst + DEVIATIONS * sums)
    return {
        "logits": logits,
        "ids": EXACT,
        "weights": weights,
        "matmul1": rounded(first, dtype),
        "activation": hidden,
        "matmul2": slots,
        "output": rounded(summed, spec.out_dtype or dtype),
        "tokens_per_expert": EXACT,
        "invalid_ids": EXACT,
    }


@dataclass(frozen=True)
class Difference:
    """Results of `measure`. relative_frobenius, worst: over finite elements. size: their number.

    where: index of the worst element (None for an empty array), with values `actual` and `expected`. mismatch: None, or
    the reason the arrays cannot be compared by element (shape, NaN or infinity in only one of them).
    """

    relative_frobenius: float
    worst: float
    size: int
    where: tuple[int, ...] | None
    actual: float
    expected: float
    mismatch: str | None = None

    def frobenius_limit(self, tolerance: Tolerance) -> float:
        """tolerance.relative_frobenius plus the share of a few elements at their worst."""
        few = math.sqrt(min(1.0, _ELEMENTS_AT_WORST / max(self.size, 1)))
        return tolerance.relative_frobenius + tolerance.worst * few

    def complaint(self, tolerance: Tolerance) -> str | None:
        """The fault and its place, or None within the tolerance."""
        if self.mismatch is not None:
            return self.mismatch
        limit = self.frobenius_limit(tolerance)
        if self.worst <= tolerance.worst and self.relative_frobenius <= limit:
            return None
        return (
            f"worst element at {self.where}: got {self.actual!r}, expected {self.expected!r}, "
            f"error {self.worst:.3g} of its scale (tolerance {tolerance.worst:.3g}); "
            f"relative Frobenius error {self.relative_frobenius:.3g} (tolerance {limit:.3g})"
        )


def _scale(expected: np.ndarray, dtype: Any, scale: np.ndarray | None) -> np.ndarray:
    size = np.abs(expected)
    if scale is not None:
        floor = np.broadcast_to(np.abs(np.asarray(scale, np.float64)), expected.shape)
    else:
        axis = -1 if expected.ndim and expected.shape[-1] >= _WIDE_ROW else None
        floor = np.sqrt(np.mean(np.square(expected), axis=axis, keepdims=True))
    smallest = _SMALLEST_SCALE
    if not np.issubdtype(dtype, np.integer) and dtype != np.bool_:
        smallest = max(smallest, float(ml_dtypes.finfo(dtype).smallest_normal))
    # A row of exact zeros must match exactly.
    return np.maximum(size, np.where(floor == 0, 0.0, np.maximum(floor, smallest)))


def measure(actual: np.ndarray, expected: np.ndarray, scale: np.ndarray | None = None) -> Difference:
    """The errors of `actual` against `expected` in float64, for any float, integer or boolean dtypes and equal shapes.

    An element's error is measured against the larger of its own size and `scale`: by default the rms of its row (the
    last axis), or of the whole array if rows have fewer than 16 elements. For an array too small for a reliable rms,
    pass the rms of its terms with random signs: `sqrt(x**2 @ w**2)` for a product. NaN equals NaN and an infinity
    itself. The Frobenius error is relative to the norm of `expected`, or of `scale` if given.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        mismatch = f"shape {actual.shape}, expected {expected.shape}"
        return Difference(math.inf, math.inf, 0, None, math.nan, math.nan, mismatch)
    if not expected.size:
        return Difference(0.0, 0.0, 0, None, math.nan, math.nan)
    dtype = expected.dtype
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(expected)
    same = (np.isnan(actual) & np.isnan(expected)) | (actual == expected)
    wrong = ~same & ~(np.isfinite(actual) & finite)
    if wrong.any():
        where = tuple(int(index) for index in np.argwhere(wrong)[0])
        got, want = float(actual[where]), float(expected[where])
        text = f"{int(wrong.sum())} elements differ in NaN or infinity, the first at {where}: "
        text += f"got {got!r}, expected {want!r}"
        return Difference(math.inf, math.inf, int(expected.size), where, got, want, text)
    got, want = np.where(finite, actual, 0.0), np.where(finite, expected, 0.0)
    with np.errstate(all="ignore"):
        error = np.abs(got - want)
        scales = _scale(want, dtype, scale)
        relative = np.where(error == 0, 0.0, error / scales)
        norm, total = float(np.linalg.norm(want if scale is None else scales)), float(np.linalg.norm(error))
    where = tuple(int(index) for index in np.unravel_index(int(np.argmax(relative)), relative.shape))
    frobenius = 0.0 if total == 0 else (total / norm if norm else math.inf)
    count = int(finite.sum())
    return Difference(frobenius, float(relative[where]), count, where, float(actual[where]), float(expected[where]))


def assert_close(
    actual: np.ndarray, expected: np.ndarray, tolerance: Tolerance, label: str, scale: np.ndarray | None = None
) -> None:
    """Raise AssertionError, naming `label`, the worst element, errors and tolerance."""
    complaint = measure(actual, expected, scale).complaint(tolerance)
    if complaint is not None:
        raise AssertionError(f"{label}: {complaint}")
