"""What is refused, or differs, by choice, and why."""

from __future__ import annotations

_CAPTURING = ("no attribute 'is_capturing'", "vLLM's file asks torch.Stream.is_capturing, which older torch has not")
#: By case of vLLM: a part of the message, and the reason.
VLLM: dict[str, tuple[str, str]] = {
    "a NaiveBatchedExperts, bf16, vLLM's kernel": _CAPTURING,
    "a NaiveBatchedExperts, bf16, our kernel": _CAPTURING,
    "b Batched, bf16, our kernel, NaiveBatchedExperts": _CAPTURING,
}
#: Of tests of triton_kernels: a part of what they say, numbers written as N, and the reason.
TRITON_KERNELS: tuple[tuple[str, str], ...] = (
    ("out_dtype must be bfN, fpN or fpN", "results are bf16, fp16 or fp32"),
    # Upstream's own does so too since 11 September 2025.
    ("test_mxfp.py:101", "ties of mxfp4 go to the even code"),
    ("test_mxfp.py:24", "ties of mxfp4 go to the even code"),
)
