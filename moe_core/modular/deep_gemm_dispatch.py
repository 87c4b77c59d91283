"""The choice between Triton's experts and DeepGEMM's: one rule, for both front-ends, that says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe_core.modular.deep_gemm import ALIGNMENT, deep_gemm_block_shape

TRITON, DEEP_GEMM = "triton_expert", "deep_gemm_expert"
#: Columns of the second product's input up to which DeepGEMM is not worth it.
_LEAST_WIDTH = 512
_E4M3 = "float8_e4m3fn"


@dataclass(frozen=True)
class ExpertsChoice:
    """Which member of `TritonOrDeepGemmExperts` runs, `triton_expert` or `deep_gemm_expert`, and why."""

    member: str
    reason: str

    def __str__(self) -> str:
        return f"{self.member}: {self.reason}"


def why_not_allowed(allow_deep_gemm: bool, use_fp8_w8a8: bool, block_shape: Sequence[int] | None) -> str | None:
    """The reason DeepGEMM is not allowed, whatever the sizes; None if it is."""
    if not allow_deep_gemm:
        return "allow_deep_gemm is False"
    if not use_fp8_w8a8:
        return "use_fp8_w8a8 is False"
    if block_shape is None or list(block_shape) != deep_gemm_block_shape():
        return f"block_shape is not {deep_gemm_block_shape()}"
    return None


def why_not_valid_shape(M: Any, N: Any, K: Any) -> str | None:
    """The reason DeepGEMM is not for these sizes, None if it is. N: columns, of w1 for memory, of w2's input to choose.

    Without numbers: under `torch.compile` M may be symbolic.
    """
    if M < ALIGNMENT:
        return f"there are fewer than {ALIGNMENT} tokens"
    if N % ALIGNMENT or K % ALIGNMENT:
        return f"N or K is no multiple of {ALIGNMENT}"
    if N <= _LEAST_WIDTH:
        return f"N is at most {_LEAST_WIDTH}"
    return None


@dataclass(frozen=True)
class DispatchCase:
    """What the choice depends on. M tokens; w2: its shape `[E, K, N]`; dtypes: of w1 and w2, by their canonical names;
    strided: names of arrays that are not contiguous; e8m0_used: whether the chip's mode of scales is in use."""

    M: Any
    w2: Sequence[int]
    dtypes: tuple[str, str]
    strided: tuple[str, ...] = ()
    e8m0_used: bool = False


def choose_experts(not_allowed: str | None, case: DispatchCase) -> ExpertsChoice:
    """DeepGEMM where it is allowed, and the case is valid for it or the chip's mode of scales is in use."""
    if not_allowed is not None:
        return ExpertsChoice(TRITON, not_allowed)
    if case.e8m0_used:
        return ExpertsChoice(DEEP_GEMM, "the chip's mode of power-of-two scales is in use")
    _, k, n = case.w2
    reason = why_not_valid_shape(case.M, n, k)
    if reason is None and case.dtypes != (_E4M3, _E4M3):
        reason = f"w1 and w2 are {' and '.join(case.dtypes)}, not both {_E4M3}"
    if reason is None and case.strided:
        reason = f"{case.strided[0]} is not contiguous"
    if reason is not None:
        return ExpertsChoice(TRITON, reason)
    return ExpertsChoice(DEEP_GEMM, "it is allowed, and sizes, dtypes and strides are valid for it")


def explain_choice(not_allowed: str | None, case: DispatchCase) -> str:
    """`choose_experts` with the numbers, one line."""
    _, k, n = case.w2
    choice = choose_experts(not_allowed, case)
    return f"{choice} (M = {case.M}, N = {n}, K = {k}; w1 and w2 {' and '.join(case.dtypes)})"
