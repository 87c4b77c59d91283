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
    ("results must be bfN, fpN, fpN or fpN, got torch.floatN:", "no kernel adds up in fp64"),
    ("NVFPN has no kernel", "there is no NVFP4"),
    ("must be eNmN where it is fpN, got eNmN", "no kernel reads e5m2"),
    ("fpN eNmN where it has microscales, got torch.floatN_eNmN", "no kernel reads e5m2"),
    (
        "b must be quantised, or bfN or fpN beside a microscaled a, got torch.floatN",
        "fp16 cannot hold microscaled numbers",
    ),
    ("codes packed along N have no kernel", "mxfp4 is read along K"),
    ("the kernels hold one row of experts per program", "kernels take 4,096 matrices, the reference any number"),
    ("fused_activation 'plus_a' cannot be compiled", "kernels fuse swiglu alone"),
    # Upstream's own does so too since 11 September 2025.
    ("test_mxfp.py:101", "ties of mxfp4 go to the even code"),
    ("test_mxfp.py:24", "ties of mxfp4 go to the even code"),
)
