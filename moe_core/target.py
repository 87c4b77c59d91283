"""Where a plan runs: a CUDA architecture, Triton's interpreter on a CPU, or the NumPy reference on a CPU."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from dataclasses import dataclass

from moe_core.codec import plan_type
from moe_core.errors import InvalidInput

KINDS = ("cuda", "interpreter", "reference")
#: The first architecture with e4m3.
_FP8_ARCH = 89
_cpu_engine: contextvars.ContextVar[str | None] = contextvars.ContextVar("moe_core_cpu_engine", default=None)


@plan_type
@dataclass(frozen=True)
class Target:
    """What a plan is made for.

    kind: `cuda` (compiled Triton kernels), `interpreter` (the same kernels in Triton's interpreter on a CPU) or
    `reference` (the NumPy twins on a CPU). arch: compute capability, major * 10 + minor (90 = Hopper); num_sms:
    multiprocessors of the device. Both are 0 off the GPU.
    """

    kind: str
    arch: int = 0
    num_sms: int = 0

    @property
    def has_fp8(self) -> bool:
        """Whether it is a GPU whose tensor cores multiply e4m3 and whose instructions convert to it."""
        return self.kind == "cuda" and self.arch >= _FP8_ARCH

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidInput(f"target kind must be one of {', '.join(KINDS)}, got {self.kind!r}; name one of these")
        if self.kind == "cuda" and (self.arch < 80 or self.num_sms < 1):
            raise InvalidInput(
                f"a cuda target needs arch >= 80 and num_sms >= 1, got arch={self.arch}, num_sms={self.num_sms}; "
                "for example Target('cuda', 90, 132) for an H200"
            )

    @property
    def compiled(self) -> bool:
        """Whether steps are Triton kernels (compiled or interpreted) rather than reference calls."""
        return self.kind != "reference"

    def __str__(self) -> str:
        return f"cuda sm_{self.arch} ({self.num_sms} SMs)" if self.kind == "cuda" else self.kind


def cpu_target() -> Target:
    """The target for arrays on a CPU: `interpreter` under TRITON_INTERPRET=1, else `reference`; see `cpu_engine`."""
    chosen = _cpu_engine.get()
    if chosen is None:
        chosen = "interpreter" if os.environ.get("TRITON_INTERPRET", "0") == "1" else "reference"
    return Target(chosen)


@contextlib.contextmanager
def cpu_engine(kind: str) -> Iterator[None]:
    """Choose the CPU engine inside a `with` block: `interpreter` or `reference`."""
    if kind not in ("interpreter", "reference"):
        raise InvalidInput(f"cpu_engine kind must be 'interpreter' or 'reference', got {kind!r}; name one of these")
    token = _cpu_engine.set(kind)
    try:
        yield
    finally:
        _cpu_engine.reset(token)
