"""Codes of elements and scales, and their numbers. Rounding is half to even."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

from moe_core.errors import InvalidInput

#: Magnitudes of codes 0..7; bit 3 is the sign.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
MANTISSA_BITS = 23
E8M0_ONE, E8M0_NAN = 127, 255


def pack_nibbles(codes: np.ndarray, axis: int = -1) -> np.ndarray:
    """uint8 codes below 16 (else InvalidInput), two per byte along `axis`, even index low, padded with 0."""
    codes = np.asarray(codes)
    if codes.dtype != np.uint8 or (codes.size and codes.max() > 15):
        raise InvalidInput(f"codes must be uint8 below 16, got {codes.dtype}; mask them with 15")
    if axis == -1 and codes.flags.c_contiguous and codes.size and codes.shape[-1] % 2 == 0:
        pairs = codes.view("<u2")
        return (pairs | pairs >> 4).astype(np.uint8)
    moved = np.moveaxis(codes, axis, -1)
    low, high = moved[..., 0::2], moved[..., 1::2]
    packed = low.copy()
    packed[..., : high.shape[-1]] |= high << np.uint8(4)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis))


def unpack_nibbles(packed: np.ndarray, axis: int = -1, length: int | None = None) -> np.ndarray:
    """The inverse of `pack_nibbles`. length: number of codes along `axis`, None: two per byte."""
    packed = np.asarray(packed)
    if packed.dtype != np.uint8:
        raise InvalidInput(f"packed must be uint8, got {packed.dtype}; view it as bytes")
    moved = np.moveaxis(packed, axis, -1)
    total = 2 * moved.shape[-1] if length is None else length
    if not 2 * moved.shape[-1] - 1 <= total <= 2 * moved.shape[-1]:
        raise InvalidInput(f"length must be what {moved.shape[-1]} bytes hold, got {length}; pass the unpacked length")
    codes = np.empty((*moved.shape[:-1], 2 * moved.shape[-1]), np.uint8)
    codes[..., 0::2] = moved & np.uint8(15)
    codes[..., 1::2] = moved >> np.uint8(4)
    return np.ascontiguousarray(np.moveaxis(codes[..., :total], -1, axis))


def e2m1_to_float32(codes: np.ndarray) -> np.ndarray:
    """fp32 values of e2m1 codes 0..15: 0 .5 1 1.5 2 3 4 6 and, with bit 3 set, their negatives."""
    return np.concatenate([_E2M1, -_E2M1])[codes]


def float32_to_e2m1(values: np.ndarray) -> np.ndarray:
    """e2m1 codes of fp32 values without NaN: half to even, saturating at 6, the sign of zero kept."""
    return _small_codes(values, mantissa=1, bias=1, bits=3, largest=6)


def float32_to_e4m3(values: np.ndarray) -> np.ndarray:
    """fp32 values as e4m3: half to even, saturating at 448. NaN stays."""
    return _small_codes(values, mantissa=3, bias=7, bits=7, largest=448).view(ml_dtypes.float8_e4m3fn)


def _small_codes(values: np.ndarray, *, mantissa: int, bias: int, bits: int, largest: float) -> np.ndarray:
    """Several times as fast as a cast. bits: without the sign. NaN becomes the last code."""
    values = np.ascontiguousarray(values, np.float32)
    # NumPy is slow with minimum of a scalar, but not with clip.
    magnitude = np.clip(values, np.float32(-largest), np.float32(largest))
    np.abs(magnitude, out=magnitude)
    shift = np.uint32(MANTISSA_BITS - mantissa)
    words = magnitude.view(np.uint32)
    codes = words >> shift
    codes &= np.uint32(1)
    codes += words
    codes += (np.uint32(1) << (shift - np.uint32(1))) - np.uint32(1)
    codes >>= shift
    codes = codes.view(np.int32)
    codes -= np.int32((E8M0_ONE - bias) << mantissa)
    # Below the least normal number codes are spaced evenly. Only there are they above the codes of bits.
    with np.errstate(invalid="ignore"):
        even = np.clip(magnitude, np.float32(0), np.float32(2.0 ** (1 - bias)))
        even *= np.float32(2.0 ** (bias - 1 + mantissa))
        np.maximum(codes, np.rint(even, out=even).astype(np.int32), out=codes)
    np.clip(codes, 0, (1 << bits) - 1, out=codes)
    signs = values.view(np.int32) >> np.int32(31)
    signs &= np.int32(1 << bits)
    codes |= signs
    return codes.astype(np.uint8)


def e8m0_to_float32(scales: np.ndarray) -> np.ndarray:
    """fp32 2^(b - 127) of uint8 b. 255 is NaN (OCP MX 1.0, section 5.4.1)."""
    bits = scales.astype(np.uint32) << np.uint32(MANTISSA_BITS)
    bits[scales == 0] = 1 << (MANTISSA_BITS - 1)
    values = bits.view(np.float32)
    values[scales == E8M0_NAN] = np.nan
    return values


@functools.cache
def numbers_of_bytes(element: str, zero: int) -> np.ndarray:
    """The fp32 number of each byte of stored values, or the two as one word: several times as fast as a cast."""
    every = np.arange(256, dtype=np.uint8)
    if element == "e4m3":
        return every.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes = unpack_nibbles(every[:, None])
    numbers = e2m1_to_float32(codes) if element == "e2m1" else codes.astype(np.float32) - np.float32(zero)
    return numbers.view(np.uint64)[:, 0]
