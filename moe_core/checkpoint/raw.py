"""8-bit floats of a safetensors file as ml_dtypes arrays, read from the bytes the header points at.

The safetensors package opens and validates the file, but hands NumPy only dtypes that NumPy itself names.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

#: dtype names of safetensors headers -> the arrays they are read as.
RAW_DTYPES = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}
#: A file begins with the length of its JSON header, a little-endian uint64.
_LENGTH_BYTES = 8


@functools.lru_cache(maxsize=8)
def _header(path: Path, modified: int) -> tuple[int, dict[str, Any]]:
    """(offset of the data, header) of a file; `modified` keeps a rewritten file from being taken for the old one."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        return _LENGTH_BYTES + header_bytes, json.loads(file.read(header_bytes))


class RawTensor:
    """One tensor of a file that the safetensors package has validated; has the methods of its lazy slices."""

    def __init__(self, path: Path, name: str) -> None:
        data, header = _header(path, path.stat().st_mtime_ns)
        entry = header[name]
        self._path, self._offset = path, data + entry["data_offsets"][0]
        self._shape, self._dtype = tuple(entry["shape"]), entry["dtype"]

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, rows: slice) -> np.ndarray:
        """The rows of a slice of the first axis, copied from the file; all of a tensor without axes."""
        dtype = RAW_DTYPES[self._dtype]
        if 0 in self._shape:
            return np.empty(self._shape, dtype)[rows]
        # A tensor without axes is mapped as one element.
        mapped = np.memmap(self._path, np.uint8, "r", self._offset, self._shape or (1,))
        copied = np.array(mapped[rows]).view(dtype)
        return copied if self._shape else copied.reshape(())
