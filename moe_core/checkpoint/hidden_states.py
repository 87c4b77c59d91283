"""Hidden states `[T, D]` from a file."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np

from moe_core.base import dtypes
from moe_core.base.files import open_file, open_regular, path_of
from moe_core.checkpoint.storage import Stack, StackReader, TensorIndex
from moe_core.errors import InvalidInput


def load_hidden_states(path: str | os.PathLike[str], d_model: int | None = None) -> np.ndarray:
    """Load `[num_tokens, d_model]` in bfloat16, float16 or float32 from a .npy file or a .safetensors file.

    A .safetensors file must hold exactly one tensor. bfloat16 needs .safetensors: .npy has no name for it. d_model: the
    expected width, or None for any. The array is row-major and owned. Raises InvalidInput for a missing or unreadable
    file, a wrong rank, width or dtype; Unsupported without safetensors and for quantised tensors.
    """
    file = path_of(path)
    if not file.is_file():
        raise InvalidInput(f"hidden states must be an existing .npy or .safetensors file, got {file}; correct the path")
    if file.suffix not in (".npy", ".safetensors"):
        raise InvalidInput(f"hidden states must be a .npy or .safetensors file, got {file}; save them as one of these")
    return (_load_npy if file.suffix == ".npy" else _load_safetensors)(file, d_model)


def _require_shape(file: Path, shape: tuple[int, ...], d_model: int | None) -> None:
    width = "d_model" if d_model is None else d_model
    if len(shape) != 2:
        fix = "flatten the batch axes first" if len(shape) > 2 else "reshape them"
        raise InvalidInput(f"hidden states in {file} must be [num_tokens, {width}], got {shape}; {fix}")
    if d_model is not None and shape[1] != d_model:
        raise InvalidInput(
            f"hidden states in {file} must be [num_tokens, {d_model}], got {shape}; take them from the same model"
        )


def _load_npy(file: Path, d_model: int | None) -> np.ndarray:
    with open_regular(file, ".npy file") as opened:
        try:
            version = np.lib.format.read_magic(opened)
            named = "read_array_header_1_0" if version[0] == 1 else "read_array_header_2_0"
            shape, is_turned, dtype = getattr(np.lib.format, named)(opened)
            if dtype.hasobject or bool in map(type, shape):
                raise ValueError("no array of numbers")
        except Exception as error:  # NumPy evaluates the header as Python, which may fail in any way
            raise InvalidInput(
                f"{file} must be a readable .npy file, got: {error!s:.400}; save it with numpy.save"
            ) from error
        _require_shape(file, shape, d_model)
        if dtype.name not in dtypes.MATMUL_DTYPES:
            # NumPy writes bfloat16 as nameless two-byte records.
            fix = "save them as .safetensors" if dtype.kind == "V" else "cast them to float32"
            raise InvalidInput(
                f"hidden states in {file} must be float32, float16 or, in a .safetensors file, bfloat16, got "
                f"{dtype}; {fix}"
            )
        size, left = math.prod(shape) * dtype.itemsize, os.fstat(opened.fileno()).st_size - opened.tell()
        if min(shape) < 0 or size > left:
            raise InvalidInput(f"{file} must hold {size} bytes of data, got {left}; save it with numpy.save")
        array = np.fromfile(opened, dtype, math.prod(shape)).reshape(shape, order="F" if is_turned else "C")
    return np.ascontiguousarray(array, dtype.newbyteorder("="))


def _load_safetensors(file: Path, d_model: int | None) -> np.ndarray:
    with open_file(file) as tensors:
        names = sorted(tensors.entries)
        if len(names) != 1:
            raise InvalidInput(
                f"{file} must hold exactly one tensor, got {len(names)}: {', '.join(names[:8])}; "
                "save the hidden states alone"
            )
        (name,) = names
        shape = tensors.entry(name).shape
    _require_shape(file, shape, d_model)
    stacks = {"hidden_states": Stack.whole(name, shape)}
    # The caller names the file, so it may be a link to anywhere.
    file = file.resolve()
    with StackReader(TensorIndex(file.parent, {name: file.name})) as reader:
        return reader.read(stacks, reader.check(stacks))["hidden_states"]
