"""What is refused, or differs, by choice, and why."""

from __future__ import annotations

#: By case of vLLM: a part of the message, and the reason.
VLLM: dict[str, tuple[str, str]] = {}
#: Of tests of triton_kernels: a part of what they say, numbers written as N, and the reason.
TRITON_KERNELS: tuple[tuple[str, str], ...] = (
    ("out_dtype must be bfN, fpN or fpN", "results are bf16, fp16 or fp32"),
    ("out_quant_type must be torch.uintN", "there is no fp8 e5m2"),
    ("DEQUANT_SCALE_ROUNDING_MODE must be ROUND_UP", "scales are not rounded down"),
    ("the input axis must be a multiple of N for mxfp", "axes in mxfp4 and mxfp8 are multiples of 32"),
    # Upstream's own does so too since 11 September 2025.
    ("test_mxfp.py:101", "ties of mxfp4 go to the even code"),
)
