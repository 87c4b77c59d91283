"""Read GGUF files, beside a model's config.json or alone.

The header is parsed here, with limits; the package gguf (`pip install 'moebius[gguf]'`) knows types and decodes blocks.
Q4_0, Q8_0 and MXFP4 keep their bits in formats that kernels take. Every other type becomes plain weights.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_core.base.files import MOST_HEADER_BYTES, MOST_TENSORS, Entry, TensorFile, open_regular
from moe_core.checkpoint.packing import Component, Packing
from moe_core.checkpoint.rules import Quantization, one_rule
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import MXFP4, Format, Scheme, int4_grouped, int8_grouped

_TRANSFORMERS = "moe_torch.transformers.gguf"
#: Plain types, by the names of safetensors too.
PLAIN = ("F32", "F16", "BF16")
_MAGIC, _VERSIONS, _ALIGNMENT, _MOST_AXES = b"GGUF", (2, 3), 32, 4
#: Bytes of the scalar types of metadata, by number. 8 is a string, 9 an array.
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _UINT32, _MOST_LEVELS = 8, 9, 4, 4


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise Unsupported(
            "reading .gguf files needs the package gguf, which is not installed; pip install 'moebius[gguf]'"
        ) from error
    return gguf


class _Header:
    """A cursor in the first bytes of a file. Raises ValueError beyond their end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.position = data, 0

    def take(self, size: int) -> bytes:
        self.position += size
        if not 0 <= size <= self.position <= len(self.data):
            raise ValueError(f"a header that ends beyond its first {len(self.data)} bytes")
        return self.data[self.position - size : self.position]

    def number(self, kind: str) -> int:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(kind)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def skip(self, kind: int, level: int = 0) -> None:
        """Pass over a value of metadata."""
        if kind in _SCALARS:
            self.take(_SCALARS[kind])
        elif kind == _STRING:
            self.take(self.number("Q"))
        elif kind == _ARRAY and level < _MOST_LEVELS:
            inner, count = self.number("I"), self.number("Q")
            if inner in _SCALARS:
                self.take(_SCALARS[inner] * count)
            else:
                for _ in range(count):
                    self.skip(inner, level + 1)
        else:
            raise ValueError(f"metadata of type {kind}")


def _entries(header: _Header, size: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """(tensors, the file's strings `general.*`)."""
    library = _library()
    if header.take(4) != _MAGIC or header.number("I") not in _VERSIONS:
        raise ValueError(f"no GGUF of version {' or '.join(map(str, _VERSIONS))}, little-endian")
    tensors, pairs = header.number("Q"), header.number("Q")
    if max(tensors, pairs) > MOST_TENSORS:
        raise ValueError(f"{max(tensors, pairs)} tensors or settings, where {MOST_TENSORS} are the most")
    alignment, strings = _ALIGNMENT, {}
    for _ in range(pairs):
        key, kind = header.text(), header.number("I")
        if key == "general.alignment" and kind == _UINT32:
            alignment = header.number("I")
        elif key.startswith("general.") and kind == _STRING:
            strings[key] = header.text()
        else:
            header.skip(kind)
    if not alignment or alignment & alignment - 1:
        raise ValueError(f"an alignment of {alignment}")
    listed = []
    for _ in range(tensors):
        name, axes = header.text(), header.number("I")
        if not 0 < axes <= _MOST_AXES:
            raise ValueError(f"{axes} axes of {name!r:.80}")
        shape = [header.number("Q") for _ in range(axes)][::-1]
        listed.append((name, shape, library.GGMLQuantizationType(header.number("I")), header.number("Q")))
    start = -(-header.position // alignment) * alignment
    entries: dict[str, Entry] = {}
    for name, shape, kind, offset in listed:
        elements, size_of_block = library.GGML_QUANT_SIZES[kind]
        plain = kind.name in PLAIN
        if shape[-1] % elements or name in entries:
            raise ValueError(f"{name!r:.80} twice, or with rows of {shape[-1]} elements in {kind.name}")
        stored = (*shape[:-1], shape[-1] if plain else shape[-1] // elements * size_of_block)
        itemsize = size_of_block if plain else 1
        count = itemsize
        for axis in stored:
            count *= axis
        if start + offset + count > size:
            raise ValueError(f"{name!r:.80} beyond the end of the file")
        entries[name] = Entry(kind.name, stored, start + offset)
    return entries, strings


class _Metadata:
    def __init__(self, strings: Mapping[str, str]) -> None:
        self._strings = strings

    def metadata(self) -> Mapping[str, str]:
        return self._strings

    def get_tensor(self, name: str) -> Any:
        raise TypeError("a type of GGUF")


@contextlib.contextmanager
def open_gguf(path: Path) -> Iterator[TensorFile]:
    """Open a GGUF file. Raises InvalidInput for a header that is malformed, and Unsupported without gguf."""
    with open_regular(path, "GGUF file") as raw:
        size = os.fstat(raw.fileno()).st_size
        try:
            entries, strings = _entries(_Header(os.pread(raw.fileno(), min(size, MOST_HEADER_BYTES), 0)), size)
        except (ValueError, KeyError, OverflowError, struct.error) as error:
            raise InvalidInput(
                f"{path} must be a readable GGUF file, got: {error!s:.400}; download it again"
            ) from error
        yield TensorFile(path, _Metadata(strings), raw, entries)


def gguf_files(directory: Path, only: str | None = None) -> list[str]:
    """The names of a directory's GGUF files. only: of this file and the other splits of its model."""
    names = sorted(path.name for path in directory.glob("*.gguf"))
    split = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}[.]gguf)", only or "")
    same = f"{re.escape(split[1])}\\d{{5}}{re.escape(split[2])}" if split else re.escape(only or "")
    return names if only is None else [name for name in names if re.fullmatch(same, name)]


def with_transformers(path: Path) -> Any:
    """The half of GGUF's conversion that needs torch. Raises Unsupported without it."""
    missing = [name for name in ("gguf", "torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise Unsupported(
            f"{path} needs {' and '.join(missing)} to become a Hugging Face checkpoint, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed; pip install 'moebius[gguf,transformers]'"
        )
    return importlib.import_module(_TRANSFORMERS)


def tensor_names(architecture: str, num_layers: int) -> Any:
    """gguf's table of the names of an architecture of llama.cpp."""
    library = _library()
    number = next(number for number, name in library.MODEL_ARCH_NAMES.items() if name == architecture)
    return library.get_tensor_name_map(number, num_layers)


def shape_of(entry: Entry) -> tuple[int, ...]:
    """A tensor's shape in numbers."""
    if entry.dtype in PLAIN:
        return entry.shape
    elements, size = _library().GGML_QUANT_SIZES[_library().GGMLQuantizationType[entry.dtype]]
    return *entry.shape[:-1], entry.shape[-1] // size * elements


def numbers_of(stored: np.ndarray, dtype: str) -> np.ndarray:
    """Rows of a tensor that is not plain, in fp32."""
    library = _library()
    rows = library.quants.dequantize(stored.reshape(-1, stored.shape[-1]), library.GGMLQuantizationType[dtype])
    return rows.reshape(*stored.shape[:-1], -1)


def _blocks(raw: np.ndarray, size: int) -> np.ndarray:
    return raw.reshape(*raw.shape[:-1], -1, size)


def _halves(codes: np.ndarray) -> np.ndarray:
    """Our pairs of bytes `[..., 16]` whose element j is in a low nibble, and element j + 16 in the high one."""
    both = np.concatenate([codes & 15, codes >> 4], -1)
    return both[..., ::2] | both[..., 1::2] << 4


def _kept(format: Format, name: str, size: int, codes: Callable[[np.ndarray], np.ndarray], settings: Any) -> Packing:
    """A type with blocks of 32: a scale, then codes."""
    scale_bytes = 1 if format.has_e8m0_scales else 2

    def values(raw: np.ndarray) -> np.ndarray:
        decoded = codes(_blocks(raw, size)[..., scale_bytes:])
        return decoded.reshape(*raw.shape[:-1], -1)

    def scales(raw: np.ndarray) -> np.ndarray:
        first = np.ascontiguousarray(_blocks(raw, size)[..., :scale_bytes])
        return (first if scale_bytes == 1 else first.view(np.float16))[..., 0]

    def shape(rows: int, columns: int) -> tuple[int, ...]:
        return rows, columns // 32 * size

    decoders = (("values", values), ("scales", scales))
    dtype = "uint8" if format.has_e8m0_scales else "float16"
    components = tuple(
        Component(field, ".weight", (name,), shape, decode, dtype=dtype if field == "scales" else None)
        for field, decode in decoders
    )
    return Packing(Scheme(f"{format.name}_weights", format), components, settings, label=f"gguf {name}")


def gguf_quantization() -> Quantization:
    """A rule for tensors of every type that gguf decodes."""
    library, settings = _library(), {"quant_method": "gguf"}

    def plain(kind: Any) -> Packing:
        elements, size = library.GGML_QUANT_SIZES[kind]

        def decode(arrays: Mapping[str, np.ndarray], rows: int, columns: int) -> np.ndarray:
            return numbers_of(arrays["values"], kind.name)

        shape = lambda rows, columns: (rows, columns // elements * size)  # noqa: E731
        component = Component("values", ".weight", (kind.name,), shape)
        return Packing(None, (component,), settings, plain=decode, label=f"gguf {kind.name}")

    kept = {
        "Q4_0": _kept(int4_grouped(32), "Q4_0", 18, _halves, settings),
        "Q8_0": _kept(int8_grouped(32), "Q8_0", 34, lambda codes: codes ^ 128, settings),
        "MXFP4": _kept(MXFP4, "MXFP4", 17, _halves, settings),
    }
    kinds = [kind for kind in library.GGMLQuantizationType if kind.name not in PLAIN]
    return one_rule(settings, *(kept.get(kind.name) or plain(kind) for kind in kinds))
