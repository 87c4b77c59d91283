"""Arrays more than 2**31 elements long, of which few hold anything, and their specs."""

from __future__ import annotations

import numpy as np

from moe_core.base import dtypes
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from tests.support.runtime.memory import sparse

HERE = Target("interpreter")
#: Rows of WIDTH elements, the last of which begin past 2**31; of a last block LAST are there, whatever its height. The
#: second of two experts begins with row SECOND.
LAST, WIDTH = 5, 1040
ROWS, SECOND = 2**21 + LAST, 2**20
assert (ROWS - LAST) * WIDTH > 2**31


def half(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "bfloat16")


def single(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "float32")


def integers(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "int32")


def draw(spec: ArraySpec, seed: int = 0) -> np.ndarray:
    random, kind = np.random.default_rng([seed, spec.size]), dtypes.numpy_dtype(spec.dtype)
    if spec.dtype in ("int8", "uint8"):
        return random.integers(0, 120, spec.shape).astype(kind)
    return random.standard_normal(spec.shape, np.float32).astype(kind)


def far(spec: ArraySpec, last: np.ndarray) -> np.ndarray:
    """An array of zeros that ends in `last`."""
    array = sparse(spec.shape, spec.dtype)
    array[len(array) - len(last) :] = last
    return array


def agree(actual: np.ndarray, expected: np.ndarray) -> None:
    found, wanted = (np.asarray(one, np.float32) for one in (actual, expected))
    assert np.any(wanted), "the test sees nothing"
    np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=1e-3)
