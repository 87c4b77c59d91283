"""What Triton's interpreter gets wrong by itself: one kernel per fact, with the right answer.

`python -m tests.support.runtime.interpreter_faults` runs every kernel in the interpreter as Triton ships it and prints,
as JSON, whether the answer was right. tests/runtime/test_interpreter.py runs the same kernels in the corrected
interpreter.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import triton
import triton.language as tl

BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn


@triton.jit
def dot_kernel(output, a, b, PRECISION: tl.constexpr):
    offsets = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(output + offsets, tl.dot(tl.load(a + offsets), tl.load(b + offsets), input_precision=PRECISION))


@triton.jit
def sum_kernel(output, a):
    offsets = tl.arange(0, 64)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(output + tl.arange(0, 4), tl.sum(tl.load(a + offsets), axis=0))


@triton.jit
def arithmetic_kernel(output, a, b):
    offsets = tl.arange(0, 8)
    x = tl.load(a + offsets)
    y = tl.load(b + offsets)
    tl.store(output + offsets, tl.where(x < y, x * y + x, x - y))


@triton.jit
def cast_kernel(output, a, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(output + offsets, tl.load(a + offsets).to(output.dtype.element_ty))


@triton.jit
def truncate_kernel(output, a, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(output + offsets, tl.load(a + offsets).to(tl.bfloat16, fp_downcast_rounding="rtz"))


@triton.jit
def loop_kernel(output, start, count):
    total = 0
    for step in range(start, count):
        total += step
    tl.store(output, total)


@triton.jit
def constant_kernel(output):
    tl.store(output + tl.arange(0, 4), tl.full((4,), 1.5, output.dtype.element_ty))


@triton.jit
def minimum_kernel(output, a, b):
    offsets = tl.arange(0, 4)
    x = tl.load(a + offsets)
    y = tl.load(b + offsets)
    tl.store(output + offsets, tl.minimum(x, y))
    tl.store(output + 4 + offsets, tl.maximum(x, y))
    tl.store(output + 8 + offsets, tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def clamp_kernel(output, a):
    offsets = tl.arange(0, 4)
    tl.store(output + offsets, tl.clamp(tl.load(a + offsets), -1.0, 1.0))


@triton.jit
def fma_kernel(output, a, b, c):
    offsets = tl.arange(0, 4)
    tl.store(output + offsets, tl.fma(tl.load(a + offsets), tl.load(b + offsets), tl.load(c + offsets)))


@triton.jit
def histogram_kernel(output, a):
    tl.store(output + tl.arange(0, 4), tl.histogram(tl.load(a + tl.arange(0, 8)), 4))


@triton.jit
def shift_kernel(output, a, b):
    offsets = tl.arange(0, 4)
    count = tl.load(b + offsets)
    shifted = tl.load(a + offsets) >> count
    tl.store(output + offsets, tl.where(count < 32, shifted.to(tl.float32), count.to(tl.float32)))


@triton.jit
def boolean_kernel(output, a, b):
    offsets = tl.arange(0, 4)
    x = tl.load(a + offsets) > 0
    y = tl.load(b + offsets) > 0
    tl.store(output + offsets, (x + y).to(tl.int32))


@triton.jit
def invert_kernel(output, a):
    offsets = tl.arange(0, 4)
    tl.store(output + offsets, ~tl.load(a + offsets))


@triton.jit
def argmax_kernel(values, positions, a):
    offsets = tl.arange(0, 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    best, where = tl.max(tl.load(a + offsets), axis=1, return_indices=True)
    tl.store(values + tl.arange(0, 4), best)
    tl.store(positions + tl.arange(0, 4), where)


@triton.jit
def maximum_kernel(output, a):
    offsets = tl.arange(0, 2)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(output + tl.arange(0, 2), tl.max(tl.load(a + offsets), axis=1))


@triton.jit
def overflow_kernel(output, a):
    offsets = tl.arange(0, 4)
    x = tl.load(a + offsets)
    tl.store(output + offsets, 1.0 / (1.0 + tl.exp(x)) + x / 0.0)


@triton.jit
def atomic_kernel(output, a):
    offsets = tl.arange(0, 4)
    tl.atomic_add(output + offsets // 2, tl.load(a + offsets), mask=offsets < 3)


@triton.jit
def dot_scaled_kernel(output, a, a_scale, b, b_scale):
    rows = tl.arange(0, 16)
    x = tl.load(a + rows[:, None] * 32 + tl.arange(0, 32)[None, :])
    y = tl.load(b + tl.arange(0, 64)[:, None] * 16 + rows[None, :])
    scales = rows[:, None] * 2 + tl.arange(0, 2)[None, :]
    product = tl.dot_scaled(x, tl.load(a_scale + scales), "e2m1", y, tl.load(b_scale + scales), "e4m3")
    tl.store(output + rows[:, None] * 16 + rows[None, :], product)


@triton.jit
def masked_kernel(output, a):
    offsets = tl.arange(0, 4)
    tl.store(output + offsets, tl.load(a + offsets, mask=offsets < 2))


@triton.jit
def multiply_high_kernel(output, a, b):
    offsets = tl.arange(0, 4)
    tl.store(output + offsets, tl.umulhi(tl.load(a + offsets), tl.load(b + offsets)))


@dataclass(frozen=True)
class Fault:
    """A kernel, what it is given and the right outputs.

    right_from: the first Triton version that is right by itself. initial: what outputs hold before the launch (else
    0xFF bytes).
    """

    kernel: Any
    outputs: Mapping[str, np.ndarray]
    inputs: Mapping[str, np.ndarray | int] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    right_from: tuple[int, int] = (3, 10)
    initial: Mapping[str, np.ndarray] = field(default_factory=dict)

    def fresh_outputs(self) -> dict[str, np.ndarray]:
        """Output arrays as they are before a launch."""
        fresh = {name: np.full(array.nbytes, 0xFF, np.uint8).view(array.dtype) for name, array in self.outputs.items()}
        return fresh | {name: array.copy() for name, array in self.initial.items()}

    def is_right(self, outputs: Mapping[str, np.ndarray]) -> bool:
        """Whether the outputs are the expected ones, bit for bit except NaN payloads."""
        pairs = [(outputs[name], expected.reshape(-1)) for name, expected in self.outputs.items()]
        return all(
            np.array_equal(got.astype(np.float64), want.astype(np.float64), equal_nan=True) for got, want in pairs
        )


def _small(*shape: int, seed: int = 0) -> np.ndarray:
    """Small integers, exact in every dtype and in every order of summation."""
    return np.random.default_rng(seed).integers(-3, 4, shape)


_NAN = np.float32(np.nan)
_X: Any = np.array([1, 2.5, -3, 0.5, 7, -0.25, 100, 3], BF16)
_Y: Any = np.array([2, 1.5, 4, 0.25, 8, -0.5, 3, 100], BF16)
_FLOATS = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1.999, -1.0039063, 3e38, 1e-39, np.inf, np.nan], np.float32)
_FOR_FP8 = np.array([1.97, 0.98, 15.9, -248.5, 0.0049, 1000, -np.inf, np.nan], np.float32)
_FP8 = np.array([2, 1, 16, -256, 0.005859375, 448, -448, np.nan], np.float32).astype(E4M3)
_ALL_FP8 = np.arange(256, dtype=np.uint8).view(E4M3)
_WITH_NAN = np.array([[1, _NAN, 3, 2], [_NAN, _NAN, _NAN, _NAN], [-np.inf, _NAN, 0, 0], [5, 5, 1, 5]], np.float32)
_TF32_A, _TF32_B = np.eye(16, dtype=np.float32) * np.float32(1 + 2.0**-12), np.full((16, 16), 1 + 2.0**-9, np.float32)
_CANCEL = np.full(4, 1 + 2.0**-12, np.float32)
_NIBBLES = np.random.default_rng(1).integers(0, 256, (16, 32), np.uint8)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_UNPACKED = _E2M1[np.stack([_NIBBLES & 15, _NIBBLES >> 4], -1).reshape(16, 64)]
_SCALES = np.random.default_rng(2).integers(126, 130, (2, 16, 2)).astype(np.uint8)
_FACTORS = np.repeat(np.exp2(_SCALES.astype(np.float32) - 127), 32, axis=-1)
_WORDS = np.array([2**31 - 1, -1, -(2**31), 3], np.int32)

FAULTS = {
    "bfloat16 dot": Fault(dot_kernel, {"output": (_small(16, 16) @ _small(16, 16, seed=1)).astype(np.float32)},
        {"a": _small(16, 16).astype(BF16), "b": _small(16, 16, seed=1).astype(BF16)}, {"PRECISION": "ieee"}),
    "tf32 dot rounds its operands": Fault(dot_kernel, {"output": np.full((16, 16), 1 + 2.0**-9, np.float32)},
        {"a": _TF32_A, "b": _TF32_B}, {"PRECISION": "tf32"}),
    "bfloat16 sum": Fault(sum_kernel, {"output": _small(64, 4).sum(0).astype(BF16)}, {"a": _small(64, 4).astype(BF16)}),
    "bfloat16 arithmetic": Fault(arithmetic_kernel, {"output": np.where(_X < _Y, _X * _Y + _X, _X - _Y)},
        {"a": _X, "b": _Y}),
    "float32 to bfloat16 rounds": Fault(cast_kernel, {"output": _FLOATS.astype(BF16)}, {"a": _FLOATS}, {"N": 8}),
    "float32 to bfloat16 towards zero": Fault(truncate_kernel,
        {"output": (_FLOATS.view(np.uint32) >> 16).astype(np.uint16).view(BF16)}, {"a": _FLOATS}, {"N": 8}),
    "float32 to fp8 carries and saturates": Fault(cast_kernel, {"output": _FP8}, {"a": _FOR_FP8}, {"N": 8}),
    "fp8 to float32": Fault(cast_kernel, {"output": _ALL_FP8.astype(np.float32)}, {"a": _ALL_FP8}, {"N": 256}),
    "loops over run-time bounds": Fault(loop_kernel, {"output": np.array([9], np.int32)}, {"start": 2, "count": 5},
        right_from=(3, 7)),
    "bfloat16 constants": Fault(constant_kernel, {"output": np.full(4, 1.5, BF16)}, right_from=(3, 9)),
    "minimum and maximum drop NaN unless told": Fault(minimum_kernel, {"output": np.array([1, 1, _NAN, -2, 1, 2, _NAN,
        -1, _NAN, 2, _NAN, -1], np.float32)}, {"a": np.array([1, 2, _NAN, -2], np.float32), "b": np.array([_NAN, 1,
        _NAN, -1], np.float32)}, right_from=(3, 8)),
    "clamp drops NaN": Fault(clamp_kernel, {"output": np.array([-1, 0.5, 1, -1], np.float32)},
        {"a": np.array([-2, 0.5, 3, _NAN], np.float32)}, right_from=(3, 8)),
    "fma rounds once": Fault(fma_kernel, {"output": np.full(4, 2.0**-24, np.float32)},
        {"a": _CANCEL, "b": _CANCEL, "c": np.full(4, -(1 + 2.0**-11), np.float32)}, right_from=(3, 9)),
    "histogram drops values out of range": Fault(histogram_kernel, {"output": np.array([2, 1, 0, 1], np.int32)},
        {"a": np.array([0, 0, 1, 3, 4, 4, -1, 9], np.int32)}, right_from=(3, 9)),
    "shifts leave their operands alone": Fault(shift_kernel, {"output": np.array([8, 4, 0, 2**31], np.float32)},
        {"a": np.array([8, 8, 1, 7], np.int32), "b": np.array([0, 1, 2, 2**31], np.uint32)}, right_from=(3, 8)),
    "booleans wrap around": Fault(boolean_kernel, {"output": np.array([0, 1, 1, 0], np.int32)},
        {"a": np.array([1, 1, 0, 0], np.int32), "b": np.array([1, 0, 1, 0], np.int32)}, right_from=(3, 9)),
    "unsigned complement": Fault(invert_kernel, {"output": ~np.array([0, 1, 2**31, 2**32 - 1], np.uint32)},
        {"a": np.array([0, 1, 2**31, 2**32 - 1], np.uint32)}, right_from=(3, 9)),
    "argmax with NaN": Fault(argmax_kernel,
        {"values": np.array([3, _NAN, 0, 5], np.float32), "positions": np.array([2, 0, 2, 0], np.int32)},
        {"a": _WITH_NAN}),
    "max of NaN alone does not warn": Fault(maximum_kernel, {"output": np.array([3, _NAN], np.float32)},
        {"a": _WITH_NAN[:2]}),
    "infinities do not warn": Fault(overflow_kernel,
        {"output": np.array([np.inf, -np.inf, np.nan, np.inf], np.float32)},
        {"a": np.array([1000, -1, 0, 1], np.float32)}),
    "bfloat16 atomics": Fault(atomic_kernel, {"output": np.array([4, 6], BF16)}, {"a": np.array([1, 2, 4, 8], BF16)},
        initial={"output": np.array([1, 2], BF16)}),
    "scaled dot": Fault(dot_scaled_kernel, {"output": (_UNPACKED * _FACTORS[0]) @ (_small(64,
        16).astype(np.float32) * _FACTORS[1].T)}, {"a": _NIBBLES, "a_scale": _SCALES[0], "b": _small(64,
        16).astype(E4M3), "b_scale": _SCALES[1]}, right_from=(3, 8)),
    "masked lanes without a value are poison": Fault(masked_kernel,
        {"output": np.array([1, 2, _NAN, _NAN], np.float32)}, {"a": np.arange(1, 5, dtype=np.float32)}),
    "high half of an unsigned product": Fault(multiply_high_kernel,
        {"output": ((_WORDS.view(np.uint32).astype(np.uint64) ** 2) >> 32).astype(np.uint32).view(np.int32)},
        {"a": _WORDS, "b": _WORDS}, right_from=(3, 9)),
}  # fmt: skip


def _run_as_shipped(fault: Fault) -> bool:
    """Run a fault's kernel as Triton does, without copying arguments (which would need torch)."""
    from triton.runtime import interpreter

    from moe_core.runtime.interpreter import patches

    outputs = fault.fresh_outputs()
    scope = interpreter._patch_lang(fault.kernel.fn)
    try:
        builder = interpreter.interpreter_builder
        builder.set_grid_dim(1, 1, 1)
        builder.set_grid_idx(0, 0, 0)
        values = {name: patches.pointer(array.ctypes.data, array.dtype.name) for name, array in outputs.items()}
        for name, value in fault.inputs.items():
            is_array = isinstance(value, np.ndarray)
            values[name] = (
                patches.pointer(value.ctypes.data, value.dtype.name) if is_array else patches.scalar(value, "int32")
            )
        fault.kernel.rewrite()(**values, **fault.constants)
    finally:
        scope.restore()
    return fault.is_right(outputs)


def main() -> None:
    """Print {fault: whether the shipped interpreter is right}, warnings counting as wrong."""
    warnings.simplefilter("error")
    right = {}
    for name, fault in FAULTS.items():
        try:
            right[name] = _run_as_shipped(fault)
        except Exception as error:
            right[name] = False
            print(f"{name}: {error!r}"[:300], flush=True)
    print(json.dumps(right))


if __name__ == "__main__":
    main()
