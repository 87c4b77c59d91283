"""Safetensors files: find the shard of a tensor, and read tensors into stacked arrays of our own, aligned memory."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from moe_core.base import dtypes
from moe_core.base.files import TensorFile, open_file
from moe_core.checkpoint.config import inside, read_json, require_relative
from moe_core.checkpoint.gguf import gguf_files, open_gguf
from moe_core.errors import InvalidInput, Unsupported

FLOATING = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
#: Of headers. The package gives NumPy no 8-bit floats.
NUMPY_DTYPES: Mapping[str, Any] = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64, "U8": np.uint8, "I8": np.int8,
    "U16": np.uint16, "I16": np.int16, "U32": np.uint32, "I32": np.int32, "U64": np.uint64, "I64": np.int64,
    "BOOL": np.bool_, "C64": np.complex64,
}  # fmt: skip
_PIECE_BYTES = 16 * 2**20
#: XLA copies memory that is aligned to less.
_ALIGNMENT = 64


class RawTensor:
    """A tensor of an open file, like safetensors' lazy slices, whose dtype needs no conversion."""

    def __init__(self, file: TensorFile, name: str) -> None:
        self._file, self._entry = file, file.entry(name)

    def get_shape(self) -> list[int]:
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        return self._entry.dtype

    def __getitem__(self, rows: slice) -> np.ndarray:
        stored_shape = self._entry.shape
        shape = (len(range(*rows.indices(stored_shape[0]))), *stored_shape[1:]) if stored_shape else ()
        # The blocks of GGUF's types are bytes.
        target = np.empty(shape, NUMPY_DTYPES.get(self._entry.dtype, np.uint8))
        self.read_into(rows, target)
        return target

    def read_into(self, rows: slice, target: np.ndarray) -> None:
        shape = self._entry.shape
        first = rows.indices(shape[0])[0] if shape else 0
        offset = first * math.prod(shape[1:]) * target.itemsize
        self._file.read_into(self._entry.start + offset, target.reshape(-1).view(np.uint8))


class ReadProgress(NamedTuple):
    """tensor: the current tensor's name. Bytes are of the whole layer."""

    tensor: str
    bytes_read: int
    bytes_total: int


def turn(array: np.ndarray) -> np.ndarray:
    """Exchange the last two axes; its own inverse."""
    return array.swapaxes(-1, -2)


def rows_apart(array: np.ndarray) -> np.ndarray:
    """Move the gate's rows, the even ones of `[..., 2F, D]`, to the front."""
    return np.concatenate([array[..., ::2, :], array[..., 1::2, :]], axis=-2)


def rows_in_turn(array: np.ndarray) -> np.ndarray:
    """The inverse of `rows_apart`."""
    half = array.shape[-2] // 2
    return np.stack([array[..., :half, :], array[..., half:, :]], axis=-2).reshape(array.shape)


@dataclass(frozen=True)
class Part:
    """One file tensor and its position in an array: `array[place]`, () for all of it.

    decode: converts the tensor, or a range of a stack's first axis, to the array's form. encode: the inverse. None:
    only the shape changes. accepts: as in `Stack`, for this tensor. others: further tensors that decode takes, whole.
    check: called with the name and the array that was read.
    """

    tensor: str
    shape: tuple[int, ...]
    place: tuple[int | slice, ...] = ()
    decode: Callable[..., np.ndarray] | None = None
    encode: Callable[[np.ndarray], np.ndarray] | None = None
    accepts: tuple[str, ...] | None = None
    others: tuple[Part, ...] = ()
    check: Callable[[str, np.ndarray], None] | None = None

    @property
    def is_turned(self) -> bool:
        """True if the tensor is the transpose of its place."""
        return self.decode is turn


@dataclass(frozen=True)
class Stack:
    """An array of parts. dtype None: as stored, all alike. accepts: header dtypes."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    dtype: str | None = None
    accepts: tuple[str, ...] = tuple(FLOATING)

    @classmethod
    def whole(cls, tensor: str, shape: tuple[int, ...], dtype: str | None = None) -> Stack:
        return cls(shape, (Part(tensor, shape),), dtype)


@dataclass(frozen=True)
class TensorIndex:
    """The tensors of a checkpoint: name -> file in `directory`."""

    directory: Path
    files: Mapping[str, str]

    def path_of(self, tensor: str) -> Path:
        """Raises InvalidInput if no file holds it."""
        if tensor not in self.files:
            raise InvalidInput(
                f"{self.directory} must hold the tensor {tensor}, got {self.summary()} without it; "
                "download the checkpoint again or correct its config.json"
            )
        return inside(self.directory, self.files[tensor])

    def opened(self, names: Iterable[str]) -> Iterator[tuple[str, TensorFile]]:
        """(name, open file) of tensors, file by file."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        for file, held in sorted(by_file.items()):
            with open_tensors(inside(self.directory, file)) as tensors:
                for name in held:
                    yield name, tensors

    @property
    def is_gguf(self) -> bool:
        return any(name.endswith(".gguf") for name in self.files.values())

    @functools.cached_property
    def _sorted(self) -> list[str]:
        return sorted(self.files)

    def below(self, prefix: str) -> list[str]:
        first = bisect.bisect_left(self._sorted, prefix)
        names = (self._sorted[position] for position in range(first, len(self._sorted)))
        return list(itertools.takewhile(lambda name: name.startswith(prefix), names))

    def router_roots(self, tails: Iterable[str]) -> dict[str, None]:
        """The prefixes of tensors with one of these endings."""
        tails = tuple(tails)
        ends = [(name, tail) for name in self._sorted if name.endswith(tails) for tail in tails if name.endswith(tail)]
        return {name.removesuffix(tail): None for name, tail in ends if name == tail or name[-len(tail) - 1] == "."}

    def summary(self) -> str:
        """`2 files with 52 tensors (model-00001-of-00002.safetensors, ...)`."""
        names = sorted(set(self.files.values()))
        listed = names[0] + (", ..." if len(names) > 1 else "") if names else "none"
        return f"{len(names)} file(s) with {len(self.files)} tensors ({listed})"


def read_tensor(file: TensorFile, name: str) -> np.ndarray:
    return RawTensor(file, name)[:] if file.entry(name).dtype in NUMPY_DTYPES else file.get_tensor(name)


def find_tensors(directory: Path, only: str | None = None) -> TensorIndex:
    """Index model.safetensors, or the shards of its index, opened only when read. only: see `gguf_files`."""
    single = inside(directory, "model.safetensors")
    if single.exists() and only is None:
        with open_file(single) as file:
            return TensorIndex(directory, dict.fromkeys(file.entries, single.name))
    index = inside(directory, "model.safetensors.index.json")
    ggufs = [] if index.exists() and only is None else gguf_files(directory, only)
    if ggufs:
        names: dict[str, str] = {}
        for name in ggufs:
            with open_gguf(inside(directory, name)) as file:
                if twice := names.keys() & file.entries.keys():
                    raise InvalidInput(
                        f"{directory} must hold the GGUF files of one model, got {sorted(twice)[0]} in {name} and "
                        f"{names[sorted(twice)[0]]}; pass the path of one file, or keep one model in a directory"
                    )
                names |= dict.fromkeys(file.entries, name)
        return TensorIndex(directory, names)
    if not index.exists():
        present = sorted(path.name for path in directory.iterdir())
        raise InvalidInput(
            f"{directory} must hold model.safetensors or model.safetensors.index.json, got "
            f"{', '.join(present[:8]) + (', ...' if len(present) > 8 else '')}; save the model as safetensors first"
        )
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise InvalidInput(
            f"weight_map in {index} must map tensor names to file names, got {type(files).__name__}; download it again"
        )
    for name in set(files.values()):
        require_relative(name, index)
    return TensorIndex(directory, files)


def open_tensors(path: Path) -> contextlib.AbstractContextManager[TensorFile]:
    return open_gguf(path) if path.suffix == ".gguf" else open_file(path)


class StackReader(contextlib.ExitStack):
    """Open each needed shard once."""

    def __init__(self, index: TensorIndex) -> None:
        super().__init__()
        self._index = index
        self._files: dict[str, TensorFile] = {}

    def tensor(self, name: str) -> RawTensor:
        """Shape and dtype come from the header. Indexing reads data."""
        return RawTensor(self.file_of(name), name)

    def file_of(self, name: str) -> TensorFile:
        file = self._index.files.get(name, "")
        if file not in self._files:
            self._files[file] = self.enter_context(open_tensors(self._index.path_of(name)))
        return self._files[file]

    def stored_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensor(name).get_shape())

    def stored_dtype(self, name: str) -> str:
        """As in the header: `BF16`, `F8_E4M3`."""
        return self.tensor(name).get_dtype()

    def check(self, stacks: Mapping[str, Stack]) -> dict[str, str]:
        """Check every part's presence, dtype and shape, and return the dtype of each array."""
        return {name: self._dtype_of(stack) for name, stack in stacks.items()}

    def _dtype_of(self, stack: Stack) -> str:
        by_dtype: dict[str, str] = {}
        for part in stack.parts:
            dtype = self._checked(part, part.accepts or stack.accepts)
            for other in part.others:
                self._checked(other, other.accepts or stack.accepts)
            by_dtype.setdefault(dtype, part.tensor)
        if stack.dtype is not None:
            return stack.dtype
        by_dtype = {FLOATING[dtype]: name for dtype, name in by_dtype.items()}
        if len(by_dtype) > 1:
            listed = " and ".join(f"{dtype} ({tensor})" for dtype, tensor in by_dtype.items())
            raise InvalidInput(f"tensors stacked together must have one dtype, got {listed}; cast them alike")
        return next(iter(by_dtype))

    def _checked(self, part: Part, accepts: tuple[str, ...]) -> str:
        tensor = self.tensor(part.tensor)
        where = f"{part.tensor} in {self._index.path_of(part.tensor).name}"
        if tensor.get_dtype() not in accepts:
            if accepts == tuple(FLOATING):
                raise Unsupported(
                    f"{where} must be bfloat16, float16 or float32, got {tensor.get_dtype()}; quantised and wider "
                    "tensors cannot be read: dequantise or cast to bfloat16 first"
                )
            raise Unsupported(
                f"{where} must be {' or '.join(accepts)} by config.json, got "
                f"{tensor.get_dtype()}; use the config.json that belongs to the weights"
            )
        if tuple(tensor.get_shape()) != part.shape:
            raise InvalidInput(
                f"{where} must be {list(part.shape)} by config.json, got {list(tensor.get_shape())}; "
                "use the config.json that belongs to the weights"
            )
        return tensor.get_dtype()

    def read(
        self,
        stacks: Mapping[str, Stack],
        stored: Mapping[str, str],
        progress: Callable[[ReadProgress], object] | None = None,
    ) -> dict[str, np.ndarray]:
        """Read row-major, writable, owned arrays. stored: dtypes from `check`. progress is called after every piece."""
        total = sum(math.prod(stack.shape) * dtypes.itemsize(stored[name]) for name, stack in stacks.items())
        done = 0
        arrays: dict[str, np.ndarray] = {}
        for name, stack in stacks.items():
            array = arrays[name] = _empty(stack.shape, dtypes.numpy_dtype(stored[name]))
            for part in stack.parts:
                source, target = self.tensor(part.tensor), array[part.place]
                # Tensors with another number of axes are read at once.
                whole = len(part.shape) != target.ndim or bool(part.others)
                others = [self.tensor(other.tensor)[:] for other in part.others]
                for piece in [slice(0, len(target))] if whole else _pieces(target):
                    if part.decode is None:
                        same = NUMPY_DTYPES.get(source.get_dtype()) == target.dtype
                        if same and target.flags.c_contiguous and target.ndim:
                            source.read_into(piece, target[piece])
                        else:
                            target[piece] = source[piece]
                    else:
                        # A matrix is one piece, because the tensor may pack its rows. Words may have padding at the
                        # end.
                        decoded = part.decode(source[slice(None) if whole or target.ndim < 3 else piece], *others)
                        target[piece] = decoded[tuple(slice(size) for size in target[piece].shape)]
                    if part.check is not None:
                        part.check(part.tensor, target[piece])
                    done += target[piece].nbytes
                    if progress is not None:
                        progress(ReadProgress(part.tensor, done, total))
        return arrays


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A new row-major array that starts at a multiple of _ALIGNMENT bytes."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _pieces(target: np.ndarray) -> Iterator[slice]:
    """Ranges along the first axis: several for large stacks of matrices."""
    rows = max(1, len(target) if target.ndim < 3 else _PIECE_BYTES // max(1, target[:1].nbytes))
    for start in range(0, len(target), rows):
        yield slice(start, min(start + rows, len(target)))
