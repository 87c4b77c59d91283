"""Faults planted in copies of the kernels of quantised operands, and of what routers give in other dtypes;
`tests.support.faults.op_tests` runs the tests on each."""

from __future__ import annotations

from tests.support.faults.kernel_copies import OpFault

#: By file of tests, which must fail: kernel files and their faults. None reads or writes outside of its arrays.
FAULTS: dict[str, tuple[tuple[str, OpFault], ...]] = {
    "tests/ops/matmul/quantized/test_matmul.py": (
        ("matmul.quantized.kernel", OpFault("return column + side * N", "return column")),
        ("matmul.quantized.kernel", OpFault("tl.where(side == 0, factor,", "tl.where(side == 1, factor,")),
        ("matmul.quantized.kernel", OpFault("ordered(tile, ORDER), mask", "ordered(tile, None), mask")),
        ("quantize.kernels.decode", OpFault("(wide == 0) | (wide == 255)", "wide == 255")),
        ("quantize.kernels.decode", OpFault("pair & 0x81C081C0", "pair & 0x01C081C0")),
        ("quantize.kernels.decode", OpFault("(n & 1) * 4", "(n & 1) * 0")),
    ),
    "tests/ops/matmul/quantized/test_backward.py": (
        ("matmul.quantized.transposed_kernel",
            OpFault("total = tl.where(layer_exists, total,", "total = tl.where(True, total,")),
        ("matmul.quantized.transposed_kernel",
            OpFault("up, up_scales, up_zero_points, D", "up, scales, up_zero_points, D")),
        ("matmul.quantized.transposed_kernel",
            OpFault("source_rows(rows, slots, GATHER", "source_rows(rows, slots * 0, GATHER")),
        ("common.kernels.layer", OpFault("tl.where(exists, wanted, 0)", "tl.where(exists, 0 * wanted, 0)")),
        ("common.kernels.layer", OpFault("(wanted < NUM_LAYERS)", "(wanted < NUM_LAYERS - 1)")),
    ),
    "tests/ops/quantize/test_rows.py": (
        ("quantize.kernels.rows", OpFault("0x7FFFF + ((size >> 20) & 1)", "0x80000")),
        ("quantize.kernels.rows", OpFault("- TOP_EXPONENT", "- TOP_EXPONENT + 1")),
        ("quantize.kernels.rows", OpFault("low | (high << 4)", "high | (low << 4)")),
        ("quantize.kernels.rows", OpFault("return last >= 0", "return exists")),
    ),
    "tests/ops/routing/test_given.py": (
        ("routing.kernels.layout", OpFault("tl.minimum(tl.maximum(experts, -2), NUM_GLOBAL)", "experts.to(tl.int32)")),
        ("routing.kernels.layout", OpFault("tl.maximum(experts, -2)", "tl.maximum(experts, -1)")),
        ("routing.kernels.layout", OpFault("weights.to(tl.float32)", "weights.to(tl.float32) * 1.001")),
    ),
    "tests/ops/moe/test_hidden_maxima.py": (
        ("matmul.quantized.kernel", OpFault("tl.where(mask, magnitude", "tl.where(exists[None, :], magnitude")),
        ("matmul.quantized.kernel", OpFault("tl.where(mask, magnitude", "tl.where((columns < N)[:, None], magnitude")),
        (
            "matmul.quantized.kernel",
            OpFault("    result = result.to(pointers.dtype.element_ty)\n    tl.store(pointers, result, mask",
                "    tl.store(pointers, result.to(pointers.dtype.element_ty), mask"),
        ),
        ("quantize.kernels.rows", OpFault("if tl.program_id(0) == 0:", "if tl.program_id(0) < 0:")),
    ),
}  # fmt: skip
