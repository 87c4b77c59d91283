"""Quantised formats from docs/user/quantization.md: codes, scales, and the numbers that they mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tools.fuzz.oracle.real import Real, Tensor, power_of_two, rounded

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST = {"e4m3": 448.0, "e2m1": 6.0, "int8": 127.0, "uint8": 127.0, "uint4": 7.0}
_TOP = {"e4m3": 8, "e2m1": 2}
_ZERO_POINT = {"uint8": 128.0, "uint4": 8.0}
_MAX_CODE = {"uint8": 255.0, "uint4": 15.0}


@dataclass(frozen=True)
class Rule:
    """rows, columns: of the group that shares a scale, 0 = the whole axis. scale: amax, pow2, floor or ceil."""

    element: str
    rows: int
    columns: int
    scale: str = "amax"
    zero_points: bool = False

    @property
    def packed(self) -> bool:
        return self.element in ("e2m1", "uint4")

    @property
    def e8m0(self) -> bool:
        return self.scale in ("floor", "ceil")


def rule(name: str) -> Rule:
    """The table of docs/user/quantization.md, by name."""
    if name.startswith("fp8"):
        groups = {"tensor": (0, 0), "channel": (1, 0), "token": (1, 0), "block": (128, 128), "group": (1, 128)}
        return Rule("e4m3", *groups[name.split("_")[1]], "pow2" if name.endswith("pow2") else "amax")
    if name in ("int8_channel", "int8_token"):
        return Rule("int8", 1, 0)
    if name.startswith("int"):
        size = name.split("_")[1]
        element = "uint8" if name.startswith("int8") else "uint4"
        return Rule(element, 1, 0 if size == "row" else int(size[1:]), zero_points=name.endswith("_zp"))
    return Rule("e2m1" if name.startswith("mxfp4") else "e4m3", 1, 32, "ceil" if name.endswith("ceil") else "floor")


class Quantized(NamedTuple):
    """Arrays as a format stores them: values, scales, and zero points or None."""

    values: Tensor
    scales: Tensor
    zero_points: Tensor | None


def _groups(matrix: Tensor, rule: Rule) -> Tensor:
    """[..., N, D] as [..., N groups, rows, D groups, columns]; missing elements count as zero."""
    N, D = matrix.shape[-2:]
    rows, columns = rule.rows or max(N, 1), rule.columns or max(D, 1)
    padded = torch.nn.functional.pad(matrix, (0, -D % columns, 0, -N % rows))
    N, D = padded.shape[-2:]
    return padded.reshape(*matrix.shape[:-2], N // rows, rows, D // columns, columns)


def _ungroup(groups: Tensor, shape: torch.Size) -> Tensor:
    N, D = shape[-2:]
    lead, (n, rows, d, columns) = groups.shape[:-4], groups.shape[-4:]
    return groups.reshape(*lead, n * rows, d * columns)[..., :N, :D]


def _scales(groups: Tensor, rule: Rule) -> tuple[Tensor, Tensor | None]:
    """(scales as float32 numbers, zero points or None), with the axes of a group kept at 1."""
    broken = ~torch.isfinite(groups).all(-1, True).all(-3, True)
    groups = torch.where(broken, 0.0, groups)
    largest = _LARGEST[rule.element]
    points = None
    if rule.zero_points:
        high = groups.amax((-3, -1), True).clamp(min=0)
        low = groups.amin((-3, -1), True).clamp(max=0)
        # Rounded once, at its end; the bound is the float32 number.
        least = float(torch.tensor(1e-10))
        scale = _over((high.double() - low.double()).clamp(min=least), _MAX_CODE[rule.element]).float()
        points = torch.round(-low / scale)
    else:
        amax = groups.abs().amax((-3, -1), True)
        if rule.scale in ("amax", "pow2"):
            scale = _over(amax.clamp(min=1e-10), largest)
            if rule.scale == "pow2":
                mantissa, exponent = torch.frexp(scale)
                scale = power_of_two(exponent - (mantissa == 0.5).int()).float()
        else:
            exponent = _exponent(amax, rule)
            scale = power_of_two(exponent).float()
    return torch.where(broken, math.nan, scale), points


def _over(values: Tensor, number: float) -> Tensor:
    """The quotient, rounded once: torch on a GPU multiplies with the reciprocal of a Python number."""
    return values / torch.full_like(values, number)


def _exponent(amax: Tensor, rule: Rule) -> Tensor:
    """e of the scale 2^e of an e8m0 group."""
    if rule.scale == "floor":
        exponent = torch.frexp(amax.double())[1] - 1 - _TOP[rule.element]
    else:
        quotient = _over(amax, _LARGEST[rule.element])
        mantissa, exponent = torch.frexp(quotient.double())
        exponent = exponent - (mantissa == 0.5).int()
        exponent = torch.where(quotient < 2.0**-126, -126, exponent)
    return torch.where(amax == 0, 0, exponent.clamp(-127, 127))


def _codes(groups: Tensor, scale: Tensor, points: Tensor | None, rule: Rule) -> Tensor:
    """What the elements become, as numbers: e4m3 and e2m1 values, or integer codes."""
    groups = torch.where(torch.isfinite(scale), groups, 0.0)
    quotient = torch.where(torch.isfinite(scale), groups / scale, 0.0).double()
    largest = _LARGEST[rule.element]
    if points is not None:
        return (torch.round(quotient) + points).clamp(0, _MAX_CODE[rule.element])
    quotient = quotient.clamp(-largest, largest)
    if rule.element in ("e4m3", "e2m1"):
        return rounded(quotient, rule.element)
    return torch.round(quotient) + _ZERO_POINT.get(rule.element, 0.0)


def _meaning(codes: Tensor, scale: Tensor, points: Tensor | None, rule: Rule) -> Tensor:
    zero = _ZERO_POINT.get(rule.element, 0.0) if points is None else points.double()
    return rounded((codes - zero) * scale.double(), "float32")


def quantize(weight: Tensor, name: str, layout: str) -> tuple[Quantized, Tensor]:
    """(the stored arrays, the float64 numbers they mean, laid out as weight is)."""
    own = rule(name)
    matrix = (weight if layout == "out_in" else weight.transpose(-1, -2)).float()
    groups = _groups(matrix, own)
    scale, points = _scales(groups, own)
    codes = _codes(groups, scale, points, own)
    meaning = _ungroup(_meaning(codes, scale, points, own), matrix.shape)
    flat = _ungroup(codes, matrix.shape)
    scales = scale.squeeze(-1).squeeze(-2)
    zero_points = None if points is None else points.squeeze(-1).squeeze(-2)
    stored = Quantized(_stored(flat, own), _stored_scales(scales, own), _stored_points(zero_points, own))
    if layout == "in_out":
        points = None if stored.zero_points is None else stored.zero_points.transpose(-1, -2).contiguous()
        turned = (part.transpose(-1, -2).contiguous() for part in stored[:2])
        stored = Quantized(*turned, points)  # pyright: ignore[reportCallIssue]
        meaning = meaning.transpose(-1, -2)
    return stored, meaning


def _stored(codes: Tensor, rule: Rule) -> Tensor:
    if rule.element == "e4m3":
        return codes.float().to(torch.float8_e4m3fn)
    if rule.element == "int8":
        return codes.to(torch.int8)
    if rule.element == "uint8":
        return codes.to(torch.uint8)
    if rule.element == "e2m1":
        table = torch.tensor(_E2M1, dtype=torch.float64, device=codes.device)
        magnitude = torch.searchsorted(table, codes.abs().contiguous())
        codes = magnitude + 8 * (torch.signbit(codes)).long()
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _stored_scales(scales: Tensor, rule: Rule) -> Tensor:
    if not rule.e8m0:
        return scales
    exponent = torch.frexp(torch.nan_to_num(scales, nan=1.0).double())[1] - 1 + 127
    return torch.where(torch.isnan(scales), 255, exponent).to(torch.uint8)


def _stored_points(points: Tensor | None, rule: Rule) -> Tensor | None:
    if points is None or not rule.packed:
        return None if points is None else points.to(torch.uint8)
    N = points.shape[-2]
    codes = torch.nn.functional.pad(points.to(torch.uint8), (0, 0, 0, N % 2))
    return codes[..., 0::2, :] | (codes[..., 1::2, :] << 4)


def requantized(rows: Real, name: str) -> Real:
    """Rows [R, D] after quantising and dequantising them; exact where the rows are."""
    own = rule(name)
    if rows.value.shape[0] == 0:
        return rows

    def decode(value: Tensor, scale: Tensor) -> Tensor:
        codes = _codes(_groups(value.float(), own), scale, None, own)
        return _ungroup(_meaning(codes, scale, None, own), value.shape)

    scale = _scales(_groups(rows.value.float(), own), own)[0]
    value = decode(rows.value, scale)
    if not bool((rows.error > 0).any()):
        return Real.exact(value, rows.unit)
    size = rows.value.abs()
    low = _scales(_groups((size - rows.error).clamp(min=0).float(), own), own)[0]
    high = _scales(_groups((size + rows.error).float(), own), own)[0]
    ends = [decode(rows.value + sign * rows.error, scale) for sign in (-1, 1)]
    error = torch.maximum((ends[0] - value).abs(), (ends[1] - value).abs())
    # Where the scale itself may differ, a code moves by up to a step of the coarser scale, and its scale with it.
    moves = (low != high).expand_as(_groups(rows.value, own))
    step = {"e4m3": 2.0**-3, "e2m1": 0.5, "int8": 0.0}[own.element]
    coarse = _ungroup(high.double().expand_as(moves), rows.value.shape)
    ratio = _ungroup((high / low).double().nan_to_num(1.0, 1.0, 1.0).expand_as(moves), rows.value.shape)
    width = coarse * (1.0 if own.element == "int8" else 0.5 if own.element == "e2m1" else 2.0**-6)
    moved = _ungroup(moves, rows.value.shape)
    # A group that may be all zeros has the scale 1, above that of its largest numbers.
    growth = torch.where(ratio < 1, 1.0, ratio - 1)
    extra = torch.where(moved, (step + growth) * (size + rows.error) + 2 * width, 0.0)
    return rows.of(value, error + extra)


def clamped(rows: Real, scale: Tensor) -> Real:
    """Rows after quantising them to e4m3 with a given scale [1]: each element by itself, a NaN stays in its own."""
    divisor = scale.double()

    def decode(value: Tensor) -> Tensor:
        quotient = rounded(value / divisor, "float32").clamp(-_LARGEST["e4m3"], _LARGEST["e4m3"])
        return rounded(rounded(quotient, "e4m3") * divisor, "float32")

    value = decode(rows.value)
    ends = [decode(rows.value + sign * rows.error) for sign in (-1, 1)]
    return rows.of(value, torch.maximum((ends[0] - value).abs(), (ends[1] - value).abs()).nan_to_num(0.0))
