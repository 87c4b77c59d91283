"""Faults planted in copies of the kernels of quantised operands; `tests.backward_faults` runs the tests on each."""

from __future__ import annotations

from tests.faulty_kernels import OpFault

#: By file of tests, which must fail: kernel files and their faults. None reads or writes outside of its arrays.
FAULTS: dict[str, tuple[tuple[str, OpFault], ...]] = {
    "tests/test_matmul_quantized.py": (
        ("matmul_quantized", OpFault("return column + side * N", "return column")),
        ("matmul_quantized", OpFault("tl.where(side == 0, factor,", "tl.where(side == 1, factor,")),
        ("matmul_quantized", OpFault("ordered(tile, ORDER), mask", "ordered(tile, None), mask")),
        ("dequantize", OpFault("(wide == 0) | (wide == 255)", "wide == 255")),
        ("dequantize", OpFault("pair & 0x81C081C0", "pair & 0x01C081C0")),
        ("dequantize", OpFault("(n & 1) * 4", "(n & 1) * 0")),
    ),
    "tests/test_quantized_backward.py": (
        (
            "matmul_quantized_transposed",
            OpFault("total = tl.where(layer_exists, total,", "total = tl.where(True, total,"),
        ),
        (
            "matmul_quantized_transposed",
            OpFault("x_rows + D, exists, values, up_scales", "x_rows + D, exists, values, scales"),
        ),
        ("matmul_quantized_transposed", OpFault("x + slots // TOP_K * X_STRIDE", "x + slots * 0 * X_STRIDE")),
    ),
    "tests/test_quantize_rows.py": (
        ("quantize_rows", OpFault("0x7FFFF + ((size >> 20) & 1)", "0x80000")),
        ("quantize_rows", OpFault("- TOP_EXPONENT", "- TOP_EXPONENT + 1")),
        ("quantize_rows", OpFault("low | (high << 4)", "high | (low << 4)")),
        ("quantize_rows", OpFault("return last >= 0", "return exists")),
    ),
}
