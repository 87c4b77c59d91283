"""The interpreter's reductions and scans, correct for bfloat16 and NaN, in a few calls on whole slices."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.language import standard
from triton.runtime.interpreter import ReduceOps, ScanOps, TensorHandle

from moe_core.runtime.interpreter.builder import numpy_dtype


def _tensor(data: np.ndarray, dtype: Any) -> Any:
    """Without axes a scalar, kept as one element."""
    if data.ndim == 0:
        return tl.core.tensor(TensorHandle(data.reshape(1), dtype.scalar), dtype.scalar)
    return tl.core.tensor(TensorHandle(data, dtype.scalar), tl.block_type(dtype.scalar, list(data.shape)))


def _combine(function: Any, left: list[Any], right: list[Any], like: tuple[Any, ...]) -> list[np.ndarray]:
    kinds = [tensor.dtype for tensor in like]
    tensors = [_tensor(data, kind) for data, kind in zip([*left, *right], kinds * 2, strict=True)]
    results = function(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    outputs = []
    for result, data in zip(results, left, strict=True):
        value = result.handle.data if isinstance(result, tl.core.tensor) else getattr(result, "value", result)
        outputs.append(np.broadcast_to(np.asarray(value).astype(data.dtype), data.shape))
    return outputs


def _accumulator(data: np.ndarray) -> np.dtype | None:
    """float32 for floats of at most 16 bits, rounded once. None: NumPy's choice."""
    return np.dtype(np.float32) if data.dtype.itemsize <= 2 and data.dtype.kind not in "iub" else None


def _pack(data: Any, kind: Any) -> Any:
    return _tensor(np.asarray(data).astype(numpy_dtype(kind)), kind)


def _replace_nan(data: np.ndarray, value: float) -> np.ndarray:
    return data if data.dtype.kind in "iub" else np.where(np.isnan(data), data.dtype.type(value), data)


class Reduction(ReduceOps):
    def apply_impl(self, input: tuple[Any, ...]) -> Any:
        function, data, kind = self.combine_fn, input[0].handle.data, input[0].dtype
        options = {"axis": self.axis, "keepdims": self.keep_dims}
        if function is standard._sum_combine:
            return _pack(np.sum(data, dtype=_accumulator(data), **options), kind)
        if function is standard._elementwise_max:
            return _pack(np.fmax.reduce(data, **options), kind)
        if function is standard._elementwise_min:
            return _pack(np.fmin.reduce(data, **options), kind)
        if function is standard._xor_combine:
            return _pack(np.bitwise_xor.reduce(data, **options), kind)
        # NaN ranks last, so that there is always a position.
        if function in (standard._argmax_combine_tie_break_left, standard._argmax_combine_tie_break_fast):
            position = np.argmax(_replace_nan(data, -np.inf), **options)
            return _pack(np.fmax.reduce(data, **options), kind), _pack(position, tl.int32)
        if function in (standard._argmin_combine_tie_break_left, standard._argmin_combine_tie_break_fast):
            position = np.argmin(_replace_nan(data, np.inf), **options)
            return _pack(np.fmin.reduce(data, **options), kind), _pack(position, tl.int32)
        return self._tree(input)

    def _tree(self, input: tuple[Any, ...]) -> tuple[Any, ...]:
        """Combine neighbours repeatedly: keeps the order in log2(size) calls."""
        arrays = [tensor.handle.data for tensor in input]
        slices = [data.reshape(-1) if self.axis is None else np.moveaxis(data, self.axis, 0) for data in arrays]
        while len(slices[0]) > 1:
            left, right = [data[0::2] for data in slices], [data[1::2] for data in slices]
            slices = _combine(self.combine_fn, left, right, input)
        outputs = [data[0] for data in slices]
        if self.keep_dims:
            axes = tuple(range(arrays[0].ndim)) if self.axis is None else self.axis
            outputs = [np.expand_dims(data, axes) for data in outputs]
        return tuple(_pack(data, tensor.dtype) for data, tensor in zip(outputs, input, strict=True))


class Scan(ScanOps):
    def apply_impl(self, input: tuple[Any, ...]) -> list[Any]:
        arrays = [np.flip(tensor.handle.data, self.axis) if self.reverse else tensor.handle.data for tensor in input]
        if self.combine_fn is standard._sum_combine:
            outputs = [np.cumsum(arrays[0], axis=self.axis, dtype=_accumulator(arrays[0]))]
        elif self.combine_fn is standard._prod_combine:
            outputs = [np.cumprod(arrays[0], axis=self.axis, dtype=_accumulator(arrays[0]))]
        else:
            outputs = self._double(input, arrays)
        if self.reverse:
            outputs = [np.flip(data, self.axis) for data in outputs]
        return [_pack(np.ascontiguousarray(data), tensor.dtype) for data, tensor in zip(outputs, input, strict=True)]

    def _double(self, input: tuple[Any, ...], arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Hillis and Steele's scan: after step s an element combines the 2 ** s before it."""
        slices = [np.moveaxis(data, self.axis, 0) for data in arrays]
        size, distance = len(slices[0]), 1
        while distance < size:
            earlier = [np.concatenate([data[:distance], data[:-distance]]) for data in slices]
            combined = _combine(self.combine_fn, earlier, slices, input)
            slices = [
                np.concatenate([data[:distance], result[distance:]])
                for data, result in zip(slices, combined, strict=True)
            ]
            distance *= 2
        return [np.moveaxis(data, 0, self.axis) for data in slices]
