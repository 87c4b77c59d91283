"""Numbers with a bound of their error: what a float32 (or float64) computation of a formula may give.

`Real.value` is the formula in float64, rounded only where the documents cast. `Real.error` bounds, element by element,
how far a right engine may be from it. This is the only place that derives a tolerance:

- One operation of unit roundoff u adds u |result| (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd
  edition, chapters 2 and 3); what the operands carry is propagated to first order, products of errors included.
- A sum of n terms adds share(n) * sum |terms|. Rounded sums: min(n + 1, 6 sqrt(n) + 2) u, the certain bound or the
  probabilistic one at six deviations (N. J. Higham and T. Mary, SIAM J. Sci. Comput. 41(5), 2019). Tensor cores
  truncate every addend to the largest one: (n + 2) 2u (M. Fasi, N. J. Higham, M. Mikaitis and S. Pranesh, PeerJ Comput.
  Sci. 7:e330, 2021). They align products by the exponents of their factors, and that of a subnormal float16 is 2^-14,
  as an H100 shows: there "half" takes smaller factors for 2^-14. A compiler may begin a sum with the bias. Products of
  fp8 with fp8 on Hopper keep 13 bits (DeepSeek-V3 technical report, section 3.3.2): "fp8", n 2^-13 of the largest
  addend, which is a product in the first 32 columns and may be a partial sum behind them. TF32 keeps 10 bits behind
  the leading one, and may cut off the others (PTX ISA, section 9.7.14): "tf32", 2^-10 of each factor more.
- A cast rounds value - error, value and value + error: where no rounding boundary lies between them, the result is
  certain to the bit. So an additional or a missing rounding shows.

An error of infinity means that anything is right, for example beyond a kink that the value may lie on either side of.
A value that is NaN or infinite is met exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
#: name -> (bits of the significand, smallest normal exponent, largest number).
_FORMATS = {
    "float64": (53, -1022, 1.7976931348623157e308),
    "float32": (24, -126, 3.4028234663852886e38),
    "float16": (11, -14, 65504.0),
    "bfloat16": (8, -126, 3.3895313892515355e38),
    "e4m3": (4, -6, 448.0),
    "e2m1": (2, 0, 6.0),
}
TINY = {2.0**-24: 2.0**-126, 2.0**-53: 2.0**-1022}


def power_of_two(exponent: Tensor) -> Tensor:
    """float64 2^exponent, exact on every device."""
    return ((exponent.long().clamp(-1022, 1023) + 1023) << 52).view(torch.float64)


def rounded(value: Tensor, dtype: str) -> Tensor:
    """float64 numbers rounded once to dtype, half to even; beyond its largest number they become infinite."""
    if dtype == "float64":
        return value
    bits, smallest, largest = _FORMATS[dtype]
    exponent = torch.frexp(value)[1] - 1
    step = power_of_two(torch.clamp(exponent, min=smallest) - (bits - 1))
    result = torch.where(torch.isfinite(value), torch.round(value / step) * step, value)
    return torch.where(result.abs() > largest, torch.copysign(torch.full_like(result, math.inf), result), result)


def share(length: int, unit: float, kind: str = "rounded") -> float:
    """How much of the sum of |terms| a sum of `length` terms may be wrong; kind: rounded, or what tensor cores do."""
    if kind != "rounded":
        return (length + 2) * 2 * unit
    return min(length + 1.0, 6 * math.sqrt(length) + 2) * unit


def cut_off(kind: str) -> float:
    """How much of a product's size is lost with its factors' bits before they are multiplied."""
    return 2 * 2.0**-10 + 2.0**-20 if kind == "tf32" else 0.0


@dataclass(frozen=True)
class Real:
    """value and error, float64 tensors of one shape; unit: the roundoff of what computes with it."""

    value: Tensor
    error: Tensor
    unit: float = UNIT["float32"]

    @classmethod
    def exact(cls, value: Tensor, unit: float = UNIT["float32"]) -> Real:
        value = value.to(torch.float64)
        return cls(value, torch.zeros_like(value), unit)

    def of(self, value: Tensor, error: Tensor) -> Real:
        """A result in the working precision: what overflows there is infinite."""
        limit = _FORMATS["float32"][2] if self.unit == UNIT["float32"] else math.inf
        value = torch.where(value.abs() > limit, torch.copysign(torch.full_like(value, math.inf), value), value)
        return Real(value, torch.nan_to_num(error, nan=math.inf, posinf=math.inf), self.unit)

    def own(self, value: Tensor, error: Tensor, roundings: float | Tensor = 1.0) -> Real:
        """`of` with the roundings of the operation itself."""
        return self.of(value, error + roundings * self.unit * _finite(value) + TINY[self.unit])

    def __add__(self, other: Real) -> Real:
        return self.own(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Real) -> Real:
        return self.own(self.value - other.value, self.error + other.error)

    def __mul__(self, other: Real) -> Real:
        error = _finite(self.value) * other.error + self.error * _finite(other.value) + self.error * other.error
        return self.own(self.value * other.value, error)

    def __truediv__(self, other: Real) -> Real:
        value = self.value / other.value
        room = _finite(other.value) - other.error
        error = torch.where(room > 0, (self.error + _finite(value) * other.error) / room, math.inf)
        return self.own(value, torch.where(self.error + other.error == 0, 0.0, error))

    def scaled(self, factor: float) -> Real:
        return self.own(self.value * factor, self.error * abs(factor))

    def sum(self, dim: int, keepdim: bool = False, kind: str = "rounded") -> Real:
        size = _finite(self.value).sum(dim, keepdim)
        error = self.error.sum(dim, keepdim) + share(self.value.shape[dim], self.unit, kind) * size
        return self.of(self.value.sum(dim, keepdim), error)

    def matmul(self, other: Real, kind: str = "rounded") -> Real:
        """self [..., M, n] @ other [..., n, N]."""
        first, second = _finite(self.value), _finite(other.value)
        length = self.value.shape[-1]
        size = first @ second
        wide = size if kind != "half" else first.clamp(min=2.0**-14) @ second.clamp(min=2.0**-14)
        error = (share(length, self.unit, kind) + cut_off(kind)) * wide + length * TINY[self.unit]
        if kind == "fp8" and length:
            product = first.amax(-1, True) * second.amax(-2, True)
            error = error + length * 2.0**-13 * (torch.minimum(product, size) if length <= 32 else size)
        if bool((self.error != 0).any()) or bool((other.error != 0).any()):
            error = error + first @ other.error + self.error @ (second + other.error)
        return self.of(self.value @ other.value, error)

    def cast(self, dtype: str) -> Real:
        """Rounded once to dtype."""
        value = rounded(self.value, dtype)
        low, high = rounded(self.value - self.error, dtype), rounded(self.value + self.error, dtype)
        error = torch.maximum(high - value, value - low)
        certain = ((low == value) & (high == value)) | torch.isnan(value)
        return self.of(value, torch.where(certain & torch.isfinite(self.error), 0.0, error))

    def either(self, dtype: str) -> Real:
        """Rounded to dtype or not: where the documents leave it to the engine."""
        return self if UNIT[dtype] <= self.unit else self.own(self.value, self.error, UNIT[dtype] / self.unit)

    def map(self, function: Callable[[Tensor], Tensor]) -> Real:
        """A permutation, selection or reshape of the elements."""
        return Real(function(self.value), function(self.error), self.unit)

    def where(self, keep: Tensor, other: float = 0.0) -> Real:
        """An exact constant where keep is False."""
        return Real(torch.where(keep, self.value, other), torch.where(keep, self.error, 0.0), self.unit)

    def unknown(self, where: Tensor) -> Real:
        """Anything is right where `where` is True."""
        return Real(torch.where(where, 0.0, self.value), torch.where(where, math.inf, self.error), self.unit)

    def exp(self) -> Real:
        """An exponential loses 2 |x| u in the reduction of its argument and 2 u itself."""
        value = torch.exp(self.value)
        return self.own(value, _finite(value) * torch.expm1(self.error), 2 + 2 * _finite(self.value))


def _finite(value: Tensor) -> Tensor:
    """|value|, 0 where it is NaN or infinite, whose results are met exactly."""
    return torch.nan_to_num(value.abs(), nan=0.0, posinf=0.0, neginf=0.0)
