"""Dropout by a counter: the bits of an element follow from seed, row and column alone."""

import triton
import triton.language as tl


@triton.jit
def mixed(bits):
    """The finaliser of MurmurHash3, uint32."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def kept(seed, rows, columns, THRESHOLD: tl.constexpr, SALT: tl.constexpr):
    """Return the elements `[rows, columns]` that remain: those with 32 bits of at least THRESHOLD."""
    start = tl.load(seed).to(tl.uint32, bitcast=True)
    row_bits = mixed(rows.to(tl.uint32) * 0x9E3779B1 + start)
    return mixed(row_bits[:, None] ^ (columns.to(tl.uint32) * 0x85EBCA77 + SALT)[None, :]) >= THRESHOLD
