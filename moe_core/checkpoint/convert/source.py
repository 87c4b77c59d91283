"""Read a checkpoint's experts one by one, and its other tensors piece by piece, in plain or quantised storage."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from moe_core.base import dtypes
from moe_core.base.files import TensorFile
from moe_core.checkpoint.convert.nvfp4 import Nvfp4
from moe_core.checkpoint.convert.stream import BITS, HEADERS, Made, TensorPlan, Unit
from moe_core.checkpoint.layer import Checkpoint
from moe_core.checkpoint.layouts import NVFP4
from moe_core.checkpoint.packing import Packing
from moe_core.checkpoint.quantized import ARRAYS
from moe_core.checkpoint.resolve import Resolver, plain_part, scale_check, tensors_of
from moe_core.checkpoint.stacks import LayerNames, written_names
from moe_core.checkpoint.storage import FLOATING, NUMPY_DTYPES, Part, Stack, StackReader, turn
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor
from moe_core.layers.convert import gate_place
from moe_core.ops.common.rounding import round_to, to_float32
from moe_core.ops.quantize.reference import dequantize

#: Fields of an expert's matrices `[N, D]`. Ungated experts have no gate.
MATRICES = ("gate", "up", "down")
_FUSED = ("experts.gate_up", "experts.down")
#: A multiple of every group and word.
_PROBE = 2**12
_PIECE_BYTES = 4 * 2**20
#: Numbers whose temporary arrays fit in a core's cache.
_AT_ONCE = 2**16
#: Bytes of memory to make a number: as stored, in fp32 and as written. The second: of formats without a kernel.
_WORK = 16, 32
#: Bits that only NaN and infinities have all of. NumPy knows bfloat16 by a slow loop.
_EXPONENTS: Mapping[str, Any] = {
    "bfloat16": np.uint16(0x7F80), "float16": np.uint16(0x7C00), "float8_e4m3fn": np.uint8(0x7F),
    "float8_e5m2": np.uint8(0x7C),
}  # fmt: skip

Matrix = np.ndarray | QuantizedTensor


class Storage(NamedTuple):
    """Of a quantised matrix: its format, and the dtype of its scales in the files."""

    format: Format
    scale_dtype: str


class LayerSource:
    """The experts of one MoE layer."""

    def __init__(self, checkpoint: Checkpoint, reader: StackReader, layer: int) -> None:
        self._reader = reader
        self.layer, self.names = layer, checkpoint.names(layer)
        if self.names.gguf:
            self.names = written_names(checkpoint.architecture, layer, None, checkpoint.nested)
        layout = checkpoint.layout(layer)
        self._packings = layout.packings
        self._stacks = {name: stack for name, stack in layout.stacks.items() if name.startswith("experts.")}
        self._dtypes = reader.check(self._stacks)
        #: All that the experts have in the files.
        self.tensors = {part.tensor for stack in self._stacks.values() for part in stack.parts}
        for name in _FUSED:
            for part, _ in layout.matrices[name]:
                self.tensors |= set(tensors_of(part.tensor, checkpoint.index).values())
        self._stored_as = {part.tensor: packing for name in _FUSED for part, packing in layout.matrices[name]}
        #: Bytes of memory that making one number takes.
        self.work = _WORK[
            any(packing is not None and packing.plain is not None for packing in self._stored_as.values())
        ]
        spec = layout.architecture.spec
        self._gated = spec.activation.gated
        self._gate_layout = spec.activation.gate_layout or "halves"
        weights = {name: dtype for name, dtype in self._dtypes.items() if not name.endswith((*ARRAYS, "_bias"))}
        self._turned = spec.weight_layout == "in_out" and len(weights) > 0
        #: Of experts that are plain in the files.
        plain = [dtype for name, dtype in weights.items() if not any(part.others for part in self._stacks[name].parts)]
        self.dtype = next(iter(plain), None)
        # Dequantised numbers are rounded only when they are written.
        self._dtypes |= dict.fromkeys(weights.keys() - set(plain) if not plain else (), "float32")
        self._decoded: tuple[str, np.ndarray] | None = None
        self._lock = threading.Lock()
        self._parts: dict[tuple[str, int | None], list[Part]] = {}
        for name, stack in self._stacks.items():
            for part in stack.parts:
                expert = part.place[0] if part.place and isinstance(part.place[0], int) else None
                self._parts.setdefault((name, expert), []).append(part)

    @property
    def block(self) -> str:
        return self.names.block

    def storage(self, field: str) -> Storage | None:
        """Of the matrices of a field of MATRICES; None for plain ones."""
        name = "experts." + (field if f"experts.{field}.values" in self._stacks else "gate_up")
        if name not in self._packings:
            return None
        format, rows = self._packings[name].format, self._stacks[f"{name}.values"].shape[-2]
        if field != "down" and self._is_joined and not _splits(format, self._gate_layout, rows):
            return None
        stored = self._reader.stored_dtype(self._stacks[f"{name}.scales"].parts[0].tensor)
        # GGUF has scales inside of its blocks, others e8m0 in any integers.
        made = self._dtypes[f"{name}.scales"]
        return Storage(format, FLOATING.get(stored, made if made in FLOATING.values() else format.scale_dtypes[0]))

    def nvfp4(self, expert: int, fields: tuple[str, ...]) -> dict[str, Nvfp4] | None:
        """The stored matrices of an expert, if all are nvfp4."""
        result = {}
        for field, module in zip(MATRICES[-len(self.names.modules or MATRICES) :], self.names.modules, strict=False):
            name = f"{self.block}experts.{expert}.{module}"
            packing = self._stored_as.get(f"{name}.weight")
            if field in fields and packing is not None and packing.label == NVFP4.name:
                tensors = [packing.tensor_name(name, one, False) for one in packing.components]
                values, scales, whole = (self._reader.tensor(tensor)[:] for tensor in tensors)
                whole = 1 / whole if tensors[-1].endswith("_scale_2") else whole
                result[field] = Nvfp4(values, scales, whole.astype(np.float32).reshape(1))
        return result if len(result) == len(fields) else None

    @property
    def _is_joined(self) -> bool:
        return self._gated and not any(name.startswith("experts.up") for name in self._stacks)

    def biases(self, expert: int | None) -> dict[str, np.ndarray]:
        """Biases `[N]` of an expert, by MATRICES. None: of any, not read."""
        names = {field: f"experts.{field}_bias" for field in ("gate_up", "up", "down")}
        stored = {field: name for field, name in names.items() if name in self._stacks}
        if expert is None:
            empty = {
                field: np.empty(self._stacks[name].shape[1:], self._dtypes[name]) for field, name in stored.items()
            }
            return self._apart(empty)
        return self._apart({field: self._array(name, expert) for field, name in stored.items()})

    def matrices(self, expert: int, fields: tuple[str, ...] = MATRICES) -> dict[str, Matrix]:
        """The matrices `[N, D]` of an expert, by MATRICES: QuantizedTensors where the groups of the files allow it."""
        halves = {"gate": "gate_up", "up": "gate_up" if self._is_joined or not self._gated else "up", "down": "down"}
        stored = {
            name: self._matrix(f"experts.{name}", expert) for name in dict.fromkeys(halves[one] for one in fields)
        }
        return {name: matrix for name, matrix in self._apart(stored).items() if name in fields}

    def _matrix(self, name: str, expert: int) -> Matrix:
        if name in self._stacks:
            array = self._array(name, expert)
            return turn(array) if self._turned else array
        arrays = (self._array(name + end, expert) if name + end in self._stacks else None for end in ARRAYS)
        return QuantizedTensor(QuantizedSpec(self._packings[name].format), *arrays)

    def _apart(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        result = dict(stored)
        if "gate_up" not in result:
            return result
        both = result.pop("gate_up")
        if not self._gated:
            return {"up": both} | result
        if not self._is_joined:
            return {"gate": both} | result
        halves = {name: _rows(both, self._gate_layout, name == "up") for name in ("gate", "up")}
        return halves | result

    def _array(self, name: str, expert: int) -> np.ndarray:
        stack = self._stacks[name]
        array = np.empty(stack.shape[1:], dtypes.numpy_dtype(self._dtypes[name]))
        for part in (*self._parts.get((name, expert), ()), *self._parts.get((name, None), ())):
            target, fused = array[part.place[1:]], not part.place or not isinstance(part.place[0], int)
            values = self._of_all(part, stack, expert) if fused else _decode(self._reader, part)
            target[...] = values[tuple(slice(size) for size in target.shape)]
        return array

    def _of_all(self, part: Part, stack: Stack, expert: int) -> np.ndarray:
        """One expert's share of a tensor of all."""
        if part.shape[0] != stack.shape[0]:
            # All experts' rows are one matrix, which stands for `[F, D]` each.
            rows = part.shape[0] // stack.shape[0]
            values = self._reader.tensor(part.tensor)[expert * rows : (expert + 1) * rows]
            return turn(values) if part.encode is turn else values
        if not part.others:
            return _decode(self._reader, part, slice(expert, expert + 1))[0]
        with self._lock:
            if self._decoded is None or self._decoded[0] != part.tensor:
                self._decoded = part.tensor, _decode(self._reader, part)
            return self._decoded[1][expert]


def _decode(reader: StackReader, part: Part, rows: slice = slice(None)) -> np.ndarray:
    arrays = []
    for one in (part, *part.others):
        arrays.append(reader.tensor(one.tensor)[rows if one is part else slice(None)])
        if one.check is not None:
            one.check(one.tensor, arrays[-1])
    return arrays[0] if part.decode is None else part.decode(*arrays)


def _splits(format: Format, gate_layout: str, rows: int) -> bool:
    """True if no group holds rows of both gate and up. rows: of both together."""
    if format.group_rows == 1 and not format.zero_points:
        return True
    return gate_layout == "halves" and format.splits_rows(rows // 2)


def _rows(matrix: Any, gate_layout: str, is_up: bool) -> Any:
    """The gate's or the up's rows of a matrix or bias. Numbers of groups that hold rows of both are decoded."""
    if not isinstance(matrix, QuantizedTensor):
        return np.ascontiguousarray(matrix[gate_place(gate_layout, is_up, len(matrix) // 2)])
    rows = gate_place(gate_layout, is_up, matrix.shape[0] // 2)
    if not _splits(matrix.format, gate_layout, matrix.shape[0]):
        return np.ascontiguousarray(dequantize(matrix)[rows])
    arrays: dict[str, Any] = {}
    for field in ("values", "scales", "zero_points"):
        array = getattr(matrix, field)
        if array is None:
            continue
        if len(array) == matrix.shape[0]:
            arrays[field] = np.ascontiguousarray(array[rows])
        else:
            half = len(array) // 2
            arrays[field] = np.ascontiguousarray(array[half:] if is_up else array[:half])
    return dataclasses.replace(matrix, **arrays)


class DenseModules:
    """Tensors outside of the experts (`held`). companions: tensors of quantised matrices, except for their values."""

    def __init__(self, checkpoint: Checkpoint, reader: StackReader, names: LayerNames, held: set[str]) -> None:
        self._index, self._reader, self._quantization = checkpoint.index, reader, checkpoint.quantization
        self._resolver = Resolver(names, self._quantization, self._index, reader)
        self._names = [name for name in checkpoint.index.files if name not in held]
        #: Values of a quantised matrix -> its weight in plain files, and its packing.
        self._matrices: dict[str, tuple[Part, Packing]] = {}
        rules = () if self._quantization is None else self._quantization.rules
        suffixes = {one.suffix for rule in rules for packing in rule.packings() for one in packing.components}
        suffixes -= {".weight"}
        found = {name.removesuffix(end): None for name in self._names for end in suffixes if name.endswith(end)}
        for module in found:
            self._find(module)
        self.companions = self._resolver.consumed - self._matrices.keys()

    def _find(self, module: str) -> None:
        assert self._quantization is not None
        tensors = tensors_of(f"{module}.weight", self._index)
        for packing in self._quantization.packings((module,)):
            if all(one.optional or one.suffix in tensors for one in packing.components):
                part = Part(f"{module}.weight", self._shape(packing, tensors))
                chosen = self._resolver.packing(part)
                if chosen is not None:
                    self._matrices[tensors[chosen.components[0].suffix]] = part, chosen
                return

    def _shape(self, packing: Packing, tensors: Mapping[str, str]) -> tuple[int, ...]:
        """[N, D] of a matrix."""
        for suffix in (".weight_shape", ".shape"):
            if suffix in tensors:
                return tuple(map(int, self._reader.tensor(tensors[suffix])[:].reshape(-1)))
        values, stored = packing.components[0], self._reader.stored_shape(tensors[packing.components[0].suffix])
        if values.file_shape is None:
            state = next(name for suffix, name in tensors.items() if ".quant_state." in suffix)
            return tuple(json.loads(self._reader.tensor(state)[:].tobytes())["shape"])
        # Sizes of files are multiples of the matrix's, along one axis each.
        one, more = values.file_shape(_PROBE, _PROBE), values.file_shape(2 * _PROBE, _PROBE)
        axis = next(axis for axis, (size, other) in enumerate(zip(one, more, strict=True)) if size != other)
        rows = stored[axis] * _PROBE // one[axis]
        columns = math.prod(stored) // stored[axis] * _PROBE // (math.prod(one) // one[axis])
        return rows, columns

    def unit(self, name: str, dtype: str) -> Unit | None:
        """The plain weight in place of a quantised matrix, whose values are the tensor `name`."""
        if name not in self._matrices:
            return None
        part, packing = self._matrices[name]
        stored = plain_part(part, packing, self._resolver, scale_check(packing, self._index))

        def read() -> Made:
            return Made([round_to(_decode(self._reader, stored), dtype)])

        return Unit(
            (TensorPlan(part.tensor, HEADERS[dtype], part.shape),), lambda: [read], _WORK[1] * math.prod(part.shape)
        )

    def plain_modules(self) -> list[str]:
        """Modules with a plain matrix in the destination."""
        quantized = [part.tensor for part, _ in self._matrices.values()]
        plain = [name for name in self._names if name.endswith(".weight") and name not in self._matrices]
        matrices = [name for name in plain if name not in self.companions and len(self._reader.stored_shape(name)) == 2]
        return [name.removesuffix(".weight") for name in (*matrices, *quantized)]


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    """The same array if it has the dtype. Through fp32, which NumPy casts fast and which is exact."""
    return array if array.dtype == dtypes.numpy_dtype(dtype) else round_to(to_float32(array), dtype)


def count_not_finite(array: np.ndarray) -> int:
    """The number of elements that are NaN or infinite."""
    if array.dtype.kind in "iub" or array.dtype == ml_dtypes.float8_e8m0fnu:
        return 0
    exponent, rows, count = _EXPONENTS.get(array.dtype.name), max(1, len(array) * _AT_ONCE // max(1, array.size)), 0
    for start in range(0, len(array), rows):
        piece = array[start : start + rows]
        if exponent is None:
            count += int((~np.isfinite(piece)).sum())
        else:
            count += int(np.count_nonzero(piece.view(exponent.dtype) & exponent == exponent))
    return count


def pieces(file: TensorFile, name: str, plan: TensorPlan, made: Callable[[np.ndarray], Made]) -> Unit:
    """A tensor of any dtype, as `made` returns each piece of its numbers."""
    dtype, _, start = file.entry(name)
    stored = math.prod(plan.shape) * BITS[dtype] // 8

    def read(first: int) -> Made:
        piece = np.empty(min(_PIECE_BYTES, stored - first), np.uint8)
        file.read_into(start + first, piece)
        return made(piece.view(NUMPY_DTYPES.get(dtype, np.uint8)))

    return Unit(
        (plan,), lambda: [partial(read, first) for first in range(0, max(1, stored), _PIECE_BYTES)], 4 * _PIECE_BYTES
    )
