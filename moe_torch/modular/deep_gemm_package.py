"""The grouped products of the `deep_gemm` package, where somebody asks for them: never before they agree with ours."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from moe_core.errors import Unsupported
from moe_core.formats import FP8_BLOCK, FP8_GROUP
from moe_core.parity.tolerance import Tolerance, measure, quantized_matmul_tolerance
from moe_core.specs.matmul import MatmulSpec
from moe_torch.bridge.operator import target_of_device
from moe_torch.modular.deep_gemm import Quantized, m_grouped_fp8_gemm_nt_contiguous, m_grouped_fp8_gemm_nt_masked

PACKAGE = "deep_gemm"
#: The names a product has had in the package, the newest first.
_NAMES = {
    "contiguous": ("m_grouped_fp8_gemm_nt_contiguous",),
    "masked": ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked"),
}
#: Rows, spread over all that are used, of which results are compared.
_COMPARED_ROWS = 2048


def why_not_installed() -> str | None:
    """The reason the package cannot be used, None if it can be found."""
    if importlib.util.find_spec(PACKAGE) is not None:
        return None
    return (
        f"the package {PACKAGE} is not installed; install it from github.com/deepseek-ai/DeepGEMM, or leave "
        "use_deep_gemm_package out: the same contract then runs on the kernels of this library"
    )


def why_not_on(device: torch.device, dtype: torch.dtype, e8m0: bool) -> str | None:
    """The reason the package's kernels do not run on a device for results of a dtype, None if they do."""
    target = target_of_device(device)
    if not (target.is_sm90 or target.is_sm100):
        return f"{PACKAGE} has kernels for sm_90 and sm_100, got {target}"
    if dtype != torch.bfloat16:
        return f"{PACKAGE} writes bf16, got {dtype}"
    if target.is_sm100 and not e8m0:
        return f"{PACKAGE} takes power-of-two scales alone on {target}; pass e8m0=True and such scales of the weights"
    return None


class DeepGemmPackage:
    """Grouped products of the package. The first one of each kind and size is computed by ours too, and compared.

    Raises Unsupported, with the reason and the way out, where the package is not installed, has no such product or does
    not run on the device, where results differ by more than both may be off, and for a first product inside a compiled
    program or while a CUDA graph is captured, where nothing can be compared.
    """

    def __init__(self, e8m0: bool) -> None:
        reason = why_not_installed()
        if reason is not None:
            raise Unsupported(reason)
        self._e8m0 = e8m0
        self._compared: set[tuple[Any, ...]] = set()

    def contiguous(self, a: Quantized, b: Quantized, d: torch.Tensor, m_indices: torch.Tensor) -> None:
        """`m_grouped_fp8_gemm_nt_contiguous`; rows of d without a group hold anything."""
        used = m_indices >= 0
        self._run("contiguous", (a, b), d, (m_indices,), used, m_grouped_fp8_gemm_nt_contiguous)

    def masked(self, a: Quantized, b: Quantized, d: torch.Tensor, masked_m: torch.Tensor, expected_m: int) -> None:
        """`m_grouped_fp8_gemm_nt_masked`; rows of d past masked_m hold anything."""
        used = torch.arange(d.shape[1], device=d.device) < masked_m[:, None]
        self._run("masked", (a, b), d, (masked_m, expected_m), used, m_grouped_fp8_gemm_nt_masked)

    def _run(
        self,
        kind: str,
        sides: tuple[Quantized, Quantized],
        d: torch.Tensor,
        grouping: tuple[Any, ...],
        used: torch.Tensor,
        ours: Callable[..., None],
    ) -> None:
        if torch.compiler.is_compiling():
            raise Unsupported(f"{PACKAGE} is not traced by torch.compile; leave use_deep_gemm_package out there")
        reason = why_not_on(d.device, d.dtype, self._e8m0)
        if reason is not None:
            raise Unsupported(f"{reason}; leave use_deep_gemm_package out there")
        theirs, key = _product_named(kind), (kind, d.device, tuple(sides[1][0].shape))
        first = key not in self._compared
        if first and d.is_cuda and torch.cuda.is_current_stream_capturing():
            raise Unsupported(
                f"the first {kind} product of {PACKAGE} is compared with ours, which a CUDA graph cannot capture; run "
                "once before capturing"
            )
        theirs(*sides, d, *grouping)
        if first:
            expected = torch.empty_like(d)
            ours(*sides, expected, *grouping)
            _require_agreement(kind, d[used], expected[used], sides[0][0].shape[-1])
            self._compared.add(key)


def _product_named(kind: str) -> Callable[..., None]:
    """The package's product, imported when it is used."""
    try:
        package = importlib.import_module(PACKAGE)
    except Exception as error:
        # The package looks for a compiler when it is imported, and asserts what it needs.
        raise Unsupported(
            f"{PACKAGE} cannot be imported: {error!r}; repair it, or leave use_deep_gemm_package out"
        ) from error
    for name in _NAMES[kind]:
        if hasattr(package, name):
            return getattr(package, name)
    raise Unsupported(f"{PACKAGE} must have {_NAMES[kind][0]}, and it has not; install version 2.0 or newer")


def _require_agreement(kind: str, theirs: torch.Tensor, ours: torch.Tensor, length: int) -> None:
    """Raise Unsupported unless two products `[R, N]` over `length` columns are as near as both must be to the exact
    one."""
    step = max(1, -(-theirs.shape[0] // _COMPARED_ROWS))
    spec = MatmulSpec("out_in", out_dtype="bfloat16")
    one = quantized_matmul_tolerance("bfloat16", length, FP8_BLOCK, spec, rows=FP8_GROUP)
    # Either side may be off by the tolerance, in its own direction.
    both = Tolerance(2 * one.relative_frobenius, 2 * one.worst)
    pair = (rows[::step].float().cpu().numpy() for rows in (theirs, ours))
    complaint = measure(*pair).complaint(both)
    if complaint is not None:
        raise Unsupported(
            f"the {kind} product of {PACKAGE} differs from ours: {complaint}; check the versions and, on Blackwell, "
            "that scales are powers of two, or leave use_deep_gemm_package out"
        )
