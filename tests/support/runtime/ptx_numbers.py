"""The PTX of decoders, carried out on NumPy's words: what is between the braces of an inline assembly, one line of
arithmetic after the other, as the PTX ISA defines it. No branches, no memory."""

from __future__ import annotations

import re

import numpy as np

#: Bits of a significand, and the exponent of the last bit of the smallest number.
_BFLOAT16, _FLOAT32 = (8, -133), (24, -149)


def rounded(values: np.ndarray, kind: tuple[int, int]) -> np.ndarray:
    """float64 numbers rounded once, half to even, to so many bits."""
    bits, least = kind
    with np.errstate(all="ignore"):
        exponent = np.where(np.isfinite(values) & (values != 0), np.frexp(values)[1], 0)
        unit = np.ldexp(1.0, np.maximum(exponent - bits, least))
        found = np.where(np.isfinite(values), np.rint(values / unit) * unit, values)
        return np.where(np.abs(found) >= 2.0**128, np.copysign(np.inf, found), found)


def _halves(words: np.ndarray) -> np.ndarray:
    """Both bfloat16 of every word, the lower one first, as float64."""
    return np.stack([words << np.uint32(16), words & np.uint32(0xFFFF0000)]).view(np.float32).astype(np.float64)


def _numbers(words: np.ndarray) -> np.ndarray:
    return words.view(np.float32).astype(np.float64)


def _pair(values: np.ndarray) -> np.ndarray:
    """A word of two float64 numbers, rounded to bfloat16."""
    low, high = rounded(values, _BFLOAT16).astype(np.float32).view(np.uint32) >> np.uint32(16)
    return low | (high << np.uint32(16))


def _word(values: np.ndarray) -> np.ndarray:
    return rounded(values, _FLOAT32).astype(np.float32).view(np.uint32)


def _permuted(first: np.ndarray, second: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = [(source >> np.uint32(8 * byte)) & np.uint32(255) for source in (first, second) for byte in range(4)]
    chosen = [both[(int(selector.flat[0]) >> (4 * place)) & 7] for place in range(4)]
    return sum((byte << np.uint32(8 * place) for place, byte in enumerate(chosen)), np.zeros_like(first))


def _either(first: np.ndarray, second: np.ndarray, third: np.ndarray, table: np.ndarray) -> np.ndarray:
    assert int(table.flat[0]) == 0xEA
    return (first & second) | third


_OPERATIONS = {
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "lop3.b32": _either,
    "prmt.b32": _permuted,
    "sub.rn.bf16x2": lambda a, b: _pair(_halves(a) - _halves(b)),
    "mul.rn.bf16x2": lambda a, b: _pair(_halves(a) * _halves(b)),
    "fma.rn.bf16x2": lambda a, b, c: _pair(_halves(a) * _halves(b) + _halves(c)),
    "sub.rn.f32": lambda a, b: _word(_numbers(a) - _numbers(b)),
    "mul.rn.f32": lambda a, b: _word(_numbers(a) * _numbers(b)),
    "cvt.rn.bf16x2.f32": lambda high, low: _pair(np.stack([_numbers(low), _numbers(high)])),
}


def run(text: str, operands: dict[int, np.ndarray], results: int) -> list[np.ndarray]:
    """Words $0 .. $(results - 1) after `text`; operands: uint32 words by number, all of one shape."""
    shape = next(iter(operands.values())).shape
    registers = {f"${number}": words for number, words in operands.items()}

    def value(name: str) -> np.ndarray:
        if name in registers:
            return registers[name]
        return np.full(shape, int(name, 0), np.uint32)

    body = text.strip().removeprefix("{").removesuffix("}")
    with np.errstate(all="ignore"):
        for line in filter(None, (part.strip() for part in body.split(";"))):
            if line.startswith(".reg"):
                continue
            name, rest = line.split(None, 1)
            if name == "mov.b32":
                target, source = (side.strip() for side in re.split(r",(?![^{]*})", rest))
                if target.startswith("{"):
                    lower, upper = (part.strip() for part in target.strip("{}").split(","))
                    words = value(source)
                    registers[lower], registers[upper] = words & np.uint32(0xFFFF), words >> np.uint32(16)
                elif source.startswith("{"):
                    lower, upper = (value(part.strip()) for part in source.strip("{}").split(","))
                    registers[target] = lower | (upper << np.uint32(16))
                else:
                    registers[target] = value(source)
                continue
            target, *sources = (part.strip() for part in rest.split(","))
            registers[target] = _OPERATIONS[name](*(value(source) for source in sources))
    return [registers[f"${number}"] for number in range(results)]
