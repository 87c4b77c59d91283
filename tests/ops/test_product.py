"""Products of few rows by OpenBLAS's small kernels are those of all others."""

from __future__ import annotations

import numpy as np
import pytest

from moe_core.ops.common import product as module


@pytest.mark.parametrize("kernels", ["SkylakeX", "Haswell", ""])
@pytest.mark.parametrize(
    ("rows", "depth", "width"), [(2, 32, 4), (7, 33, 40), (16, 31, 8), (301, 64, 12), (130, 2048, 8)]
)
def test_parts_of_rows_and_columns_make_the_product(monkeypatch, kernels, rows, depth, width):
    monkeypatch.setattr(module, "blas_kernels", lambda: kernels)
    draw = np.random.default_rng(0)
    x, wide = draw.standard_normal((rows, depth), "f"), np.zeros((rows, width + 3), "f")
    weight = draw.standard_normal((2 * width, depth), "f")[:width]
    wanted = x.astype(float) @ weight.T.astype(float)
    new = module.product(x, weight, "out_in", False)
    out = wide[:, :width]
    assert module.product(x, weight, "out_in", False, out) is out and not wide[:, width:].any()
    np.testing.assert_array_equal(out, new)
    np.testing.assert_allclose(new, wanted, atol=1e-4)


def test_small_products_are_used_up_to_two_parts(monkeypatch):
    monkeypatch.setattr(module, "blas_kernels", lambda: "SkylakeX")
    parts = {(256, 256): 256, (256, 1024): 128, (256, 2048): 0, (1, 256): 0, (64, 16): 0}
    for (rows, depth), wanted in parts.items():
        assert module._rows_of_small(np.zeros((rows, depth), "f"), 8) == wanted
    assert module._rows_of_small(np.zeros((8, 64), "d"), np.zeros((8, 64), "d")) == 0
