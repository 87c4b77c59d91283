"""Open untrusted files safely, and write our own files whole.

A stranger's file may be a pipe, or declare JSON of any depth or a header of any length. Reading it raises InvalidInput,
soon and in little memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_core.errors import InvalidInput, Unsupported

#: The most bytes of a JSON file: an index of 200,000 names has 25 MB. Beyond the second number it must be flat, with at
#: most this many containers and commas: 60 MB of `[],` would take 1.8 GB and 8 seconds.
MOST_JSON_BYTES, _MOST_NESTED_BYTES, _MOST_CONTAINERS, _MOST_COMMAS = 40 * 2**20, 4 * 2**20, 1000, 400_000
#: The most bytes and tensors of a safetensors header: int4 weights of 30 B parameters are 74,000 tensors.
MOST_HEADER_BYTES, MOST_TENSORS = 16 * 2**20, 80_000
_MOST_LEVELS, _MOST_INTEGER = 64, 2**63
#: A little-endian uint64, the length of the JSON header.
_LENGTH_BYTES = 8


def path_of(path: Any, name: str = "path") -> Path:
    """Raises InvalidInput for bytes, numbers and others that are no path."""
    try:
        return Path(path)
    except TypeError as error:
        raise InvalidInput(f"{name} must be a str or pathlib.Path, got {type(path).__name__}; pass one") from error


def require_new(name: str, directory: Path) -> None:
    """Raise InvalidInput unless the directory does not exist yet, or is empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        what = "has content" if directory.is_dir() else "is a file"
        raise InvalidInput(f"{name} must be a new or empty directory, got {directory}, which {what}; name another")


@contextlib.contextmanager
def open_regular(path: str | os.PathLike[str], what: str = "file") -> Iterator[Any]:
    """Open a file for unbuffered reading. Raises InvalidInput for pipes, devices, directories and unreadable files."""
    path = path_of(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path!s:.400} must be a readable {what}, got: {error!s:.400}; correct the path") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidInput(f"{path} must be a readable {what}, got a directory, pipe or device; download it again")
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        yield file


def load_json(path: str | os.PathLike[str], most_bytes: int = MOST_JSON_BYTES) -> Any:
    """The content of a JSON file. Raises InvalidInput if it is too large, too deep, or has integers beyond 64 bits."""
    with open_regular(path, "JSON file") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise InvalidInput(f"{path} must have at most {most_bytes} bytes, got {size}; download it again")
        data = file.readall()
    if len(data) > _MOST_NESTED_BYTES:
        is_flat = data.count(b"[") + data.count(b"{") <= _MOST_CONTAINERS and data.count(b",") <= _MOST_COMMAS
        if not is_flat or not data.isascii():
            raise InvalidInput(
                f"{path} must map ASCII names to names, as an index of {_MOST_COMMAS} tensors at most, to have "
                f"{len(data)} bytes, got other JSON; download it again"
            )
    try:
        text = data.decode("utf-8")
        del data
        content = json.loads(text)
        _require_plain(content)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} must be a readable JSON file, got: {error!s:.400}; download it again") from error
    return content


def _require_plain(content: Any) -> None:
    level, contents = 0, [content]
    while contents:
        below: list[Any] = []
        for value in contents:
            if isinstance(value, dict):
                below += value
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str):
                if not value.isascii():
                    value.encode()
            elif isinstance(value, int) and abs(value) >= _MOST_INTEGER:
                raise ValueError("an integer beyond 64 bits")
        level, contents = level + 1, below
        if level > _MOST_LEVELS:
            raise ValueError(f"more than {_MOST_LEVELS} levels")


class Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """An open safetensors file. Each read checks that the file is unchanged."""

    def __init__(self, path: Path, handle: Any, raw: Any, entries: Mapping[str, Entry]) -> None:
        self.path, self.entries, self._handle, self._raw = path, entries, handle, raw
        self._state = _state(os.fstat(raw.fileno()))

    def metadata(self) -> Mapping[str, str]:
        return self._handle.metadata() or {}

    def entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise InvalidInput(f"{self.path} must hold the tensor {name}, got a file without it; download it again")
        return self.entries[name]

    def get_tensor(self, name: str) -> np.ndarray:
        dtype = self.entry(name).dtype
        try:
            return self._handle.get_tensor(name)
        except Exception as error:  # safetensors raises AttributeError, TypeError and more for dtypes
            raise Unsupported(f"{name} in {self.path} has the dtype {dtype}, which cannot be read: {error}") from error

    def read_into(self, start: int, target: np.ndarray) -> None:
        left = target
        # A system call reads less than 2 GiB.
        while len(left):
            count = os.preadv(self._raw.fileno(), [left], start)  # pyright: ignore[reportArgumentType]
            if not count:
                raise InvalidInput(
                    f"{self.path} must be complete, got an end {len(left)} bytes early; download it again"
                )
            left, start = left[count:], start + count
        self.require_same()

    def require_same(self) -> None:
        if _state(os.fstat(self._raw.fileno())) != self._state:
            raise InvalidInput(f"{self.path} must stay as it is while it is read, got a change; read it again")


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[TensorFile]:
    """Open a safetensors file. Explains a missing package, file or header."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise _missing("reading .safetensors files") from error
    with open_regular(path, "safetensors file") as raw:
        state = os.fstat(raw.fileno())
        length = int.from_bytes(raw.read(_LENGTH_BYTES), "little")
        if length > min(MOST_HEADER_BYTES, state.st_size - _LENGTH_BYTES):
            raise InvalidInput(
                f"{path} must be a readable safetensors file, got: a header of {length} bytes in a file of "
                f"{state.st_size}, where {MOST_HEADER_BYTES} are the most; download it again"
            )
        header = raw.read(length)
        if header.count(b"{") > MOST_TENSORS:
            raise InvalidInput(f"{path} must have the header of {MOST_TENSORS} tensors at most, got more; split it")
        with contextlib.ExitStack() as opened:
            try:
                handle = opened.enter_context(safe_open(path, framework="np"))
                entries = _entries(header.decode(), _LENGTH_BYTES + length)
            except (SafetensorError, OSError, ValueError, RecursionError) as error:
                raise InvalidInput(
                    f"{path} must be a readable safetensors file, got: {error!s:.400}; download it again"
                ) from error
            file = TensorFile(path, handle, raw, entries)
            if _state(os.stat(path)) != _state(state):
                raise InvalidInput(f"{path} must stay as it is while it is opened, got a change; read it again")
            yield file


def _state(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns, found.st_mtime_ns


def _entries(header: str, data: int) -> dict[str, Entry]:
    """The tensors of a header that safetensors accepted. Raises ValueError for a duplicate name."""

    def pairs(found: list[tuple[str, Any]]) -> Any:
        fields = dict(found)
        if len(fields) != len(found):
            raise ValueError("a name given twice in the header")
        if fields.keys() >= {"dtype", "shape", "data_offsets"} and isinstance(fields["shape"], list):
            return Entry(fields["dtype"], tuple(fields["shape"]), data + fields["data_offsets"][0])
        return fields

    return {
        name: entry for name, entry in json.loads(header, object_pairs_hook=pairs).items() if name != "__metadata__"
    }


def file_writer(what: str) -> Callable[..., None]:
    """Like safetensors' `save_file` for NumPy, but writes a file whole or not at all. what: named by errors."""
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file
    except ImportError as error:
        raise _missing(f"writing {what}") from error

    def write(tensors: dict[str, np.ndarray], path: str | os.PathLike[str], metadata: dict[str, str]) -> None:
        with whole_file(path) as partial:
            try:
                save_file(tensors, partial, metadata)
            except SafetensorError as error:
                raise OSError(f"{os.fspath(path)} could not be written: {error}") from error

    return write


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary name to write a file under, renamed when all is on the disk. A device or pipe is written itself."""
    target = path_of(path)
    if target.exists() and not target.is_file() and not target.is_dir():
        yield target
        return
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(target)
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _missing(what: str) -> Unsupported:
    return Unsupported(
        f"{what} needs the package safetensors, which is not installed; pip install 'moebius[checkpoint]'"
    )
