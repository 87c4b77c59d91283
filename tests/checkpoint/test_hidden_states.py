"""Hidden states from .npy and .safetensors files."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_core.checkpoint import load_hidden_states
from moe_core.errors import InvalidInput, Unsupported


def states(dtype: Any = np.float32, shape: tuple[int, ...] = (5, 8)) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.dtype(dtype))


@pytest.mark.parametrize("d_model", [None, 8])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_npy(tmp_path, dtype, d_model):
    np.save(tmp_path / "x.npy", np.asfortranarray(states(dtype)))
    loaded = load_hidden_states(tmp_path / "x.npy", d_model)
    assert loaded.dtype == dtype and loaded.flags.c_contiguous and loaded.flags.writeable
    np.testing.assert_array_equal(loaded, states(dtype))


@pytest.mark.parametrize("shape", [(5, 8), (0, 8)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_safetensors(tmp_path, dtype, shape):
    save_file({"hidden": states(dtype, shape)}, tmp_path / "x.safetensors")
    loaded = load_hidden_states(str(tmp_path / "x.safetensors"), d_model=8)
    assert loaded.dtype == dtype and loaded.shape == shape and loaded.flags.writeable
    assert loaded.tobytes() == states(dtype, shape).tobytes()


@pytest.mark.parametrize("suffix", ["npy", "safetensors"])
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 5, 8), "must be [num_tokens, 8], got (2, 5, 8); flatten the batch axes first"),
        ((8,), "must be [num_tokens, 8], got (8,); reshape them"),
        ((), "must be [num_tokens, 8], got (); reshape them"),
        ((5, 6), "must be [num_tokens, 8], got (5, 6); take them from the same model"),
    ],
)
def test_wrong_shapes(tmp_path, suffix, shape, message):
    file = tmp_path / f"x.{suffix}"
    if suffix == "npy":
        np.save(file, states(shape=shape))
    else:
        save_file({"x": states(shape=shape)}, file)
    with pytest.raises(InvalidInput, match=re.escape(message)):
        load_hidden_states(file, d_model=8)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (np.float64, "got float64; cast them to float32"),
        (np.int32, "got int32; cast them to float32"),
        (ml_dtypes.bfloat16, "in a .safetensors file, bfloat16, got |V2; save them as .safetensors"),
    ],
)
def test_npy_dtypes_that_cannot_be_read(tmp_path, dtype, message):
    np.save(tmp_path / "x.npy", states(dtype))
    with pytest.raises(InvalidInput, match=re.escape(message)):
        load_hidden_states(tmp_path / "x.npy")


def test_safetensors_dtypes_that_cannot_be_read(tmp_path):
    save_file({"x": states(np.float64)}, tmp_path / "x.safetensors")
    with pytest.raises(Unsupported, match=r"x in x.safetensors must be bfloat16, float16 or float32, got F64"):
        load_hidden_states(tmp_path / "x.safetensors")


@pytest.mark.parametrize("names", [(), ("a", "b")])
def test_not_exactly_one_tensor(tmp_path, names):
    save_file({name: states() for name in names}, tmp_path / "x.safetensors")
    message = rf"x.safetensors must hold exactly one tensor, got {len(names)}: {', '.join(names)}; save"
    with pytest.raises(InvalidInput, match=message):
        load_hidden_states(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.npy", "must be an existing .npy or .safetensors file, got"),
        ("x.txt", "must be a .npy or .safetensors file, got"),
        ("x.npy", "x.npy must be a readable .npy file, got: "),
        ("x.safetensors", "x.safetensors must be a readable safetensors file, got: "),
    ],
)
def test_unreadable_files(tmp_path, name, message):
    for present in ("x.txt", "x.npy", "x.safetensors"):
        (tmp_path / present).write_bytes(b"nothing")
    with pytest.raises(InvalidInput, match=re.escape(message)):
        load_hidden_states(tmp_path / name)


def test_a_file_that_was_cut_off(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((3, 4), np.float32))
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(whole[:-4])
    with pytest.raises(InvalidInput, match=r"x.npy must hold 48 bytes of data, got 44; save it"):
        load_hidden_states(tmp_path / "x.npy")


def test_objects_are_never_unpickled(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidInput, match=r"x.npy must be a readable .npy file"):
        load_hidden_states(tmp_path / "x.npy")
