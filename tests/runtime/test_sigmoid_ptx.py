"""`sigmoid_ptx` has the bits of `sigmoid` for every fp32 number."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl

from moe_core.ops.activation.kernels.formulas import sigmoid, sigmoid_ptx


@triton.jit
def count_unequal(count, first, BLOCK: tl.constexpr):
    bits = (first + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)).to(tl.int32)
    x = bits.to(tl.float32, bitcast=True)
    plain, lean = sigmoid(x), sigmoid_ptx(x)
    equal = plain.to(tl.int32, bitcast=True) == lean.to(tl.int32, bitcast=True)
    unequal = tl.where(equal | ((plain != plain) & (lean != lean)), 0, 1)
    tl.atomic_add(count, tl.sum(unequal))


@pytest.mark.gpu
def test_every_number() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PTX needs an NVIDIA GPU")
    count = torch.zeros(1, dtype=torch.int64, device="cuda")
    for first in range(0, 2**32, 2**28):
        count_unequal[(2**28 // 2048,)](count, first, BLOCK=2048)
    assert count.item() == 0
