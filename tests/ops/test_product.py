"""Products of few rows by OpenBLAS's small kernels are those of all others."""

from __future__ import annotations

import numpy as np
import pytest

from moe_core.ops.common import product as module


@pytest.mark.parametrize("kernels", ["SkylakeX", "Haswell", ""])
@pytest.mark.parametrize("weight_layout", ["out_in", "in_out"])
@pytest.mark.parametrize(
    ("rows", "depth", "width"), [(2, 32, 4), (7, 33, 40), (16, 31, 8), (48, 65, 64), (130, 2048, 8), (9, 700, 144)]
)
def test_parts_make_the_product(monkeypatch, kernels, weight_layout, rows, depth, width):
    monkeypatch.setattr(module, "blas_kernels", lambda: kernels)
    draw = np.random.default_rng(0)
    x, wide = draw.standard_normal((rows, depth), "f"), np.zeros((rows, width + 3), "f")
    weight = draw.standard_normal((2 * width, depth), "f")[:width]
    if weight_layout == "in_out":
        weight = draw.standard_normal((depth, width + 5), "f")[:, :width]
    wanted = x.astype(float) @ (weight if weight_layout == "in_out" else weight.T).astype(float)
    new = module.product(x, weight, weight_layout, False)
    out = wide[:, :width]
    assert module.product(x, weight, weight_layout, False, out) is out and not wide[:, width:].any()
    np.testing.assert_array_equal(out, new)
    np.testing.assert_allclose(new, wanted, atol=1e-4)


@pytest.mark.parametrize("kernels", ["SkylakeX", "Haswell"])
@pytest.mark.parametrize(("rows", "left_width", "width"), [(1, 32, 4), (2, 16, 40), (33, 160, 7), (48, 640, 512)])
def test_parts_make_the_gradient_of_a_matrix(monkeypatch, kernels, rows, left_width, width):
    monkeypatch.setattr(module, "blas_kernels", lambda: kernels)
    draw = np.random.default_rng(0)
    left, right = (draw.standard_normal((rows, size + 3), "f")[:, :size] for size in (left_width, width))
    out = np.full((left_width, width), np.nan, "f")
    np.matmul(*module.inner_operands(left, right, out))
    np.testing.assert_allclose(out, left.astype(float).T @ right.astype(float), atol=1e-4)


@pytest.mark.parametrize(
    ("said", "rows"), [("vendor_id\t: AuthenticAMD\n", 300), ("vendor_id\t: GenuineIntel\n", 48), (None, 48)]
)
def test_more_rows_are_few_for_transposed_matrices_on_amd(monkeypatch, tmp_path, said, rows):
    if said is not None:
        (tmp_path / "cpuinfo").write_text(said)
    monkeypatch.setattr(module.pathlib, "Path", lambda path: tmp_path / path.removeprefix("/proc/"))
    assert module._transposed_rows.__wrapped__() == rows


def test_few_rows_are_multiplied_in_parts_where_the_kernels_are(monkeypatch):
    monkeypatch.setattr(module, "_transposed_rows", lambda: 48)
    monkeypatch.setattr(module, "blas_kernels", lambda: "SkylakeX")

    def part(rows: int, depth: int, width: int, transposed: bool, dtype: str = "f") -> int:
        return module._part(np.zeros((rows, depth), dtype), width, transposed)

    assert [part(rows, 256, 8, True) for rows in (1, 2, 48, 49)] == [0, 4, 4, 0]
    one = np.zeros((8, 256), "f")
    assert [module.narrow_columns(one, one, layout) for layout in ("out_in", "in_out")] == [True, False]
    assert (part(8, 31, 8, True), part(8, 32, 6, True), part(48, 8192, 8, True)) == (0, 0, 0)
    assert [part(rows, 256, 512, False) for rows in (1, 8, 16, 48, 49)] == [0, 256, 128, 64, 0]
    assert (part(8, 256, 24, False), part(48, 2048, 64, False), part(8, 256, 512, False, "d")) == (0, 0, 0)
    monkeypatch.setattr(module, "blas_kernels", lambda: "Haswell")
    assert part(8, 256, 512, False) == part(8, 256, 512, True) == 0
