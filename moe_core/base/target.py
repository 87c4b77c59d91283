"""Targets of plans. Planners read a target's facts (`is_sm90`, `has_pdl`, `on_gpu`) and never its kind."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from moe_core.base.checks import require_choice, set_integer
from moe_core.base.codec import plan_type
from moe_core.errors import InvalidInput


class _Gpus(NamedTuple):
    """architecture: its name, given its number. first_arch: the first supported one."""

    vendor: str
    architecture: str
    first_arch: int
    example: str


_GPUS = {
    "cuda": _Gpus("nvidia", "sm_{}", 80, "Target('cuda', 90, 132) for an H200"),
    "hip": _Gpus("amd", "gfx{}", 942, "Target('hip', 942, 304) for an MI300X"),
}
KINDS = (*_GPUS, "interpreter", "reference")
_cpu_engine: contextvars.ContextVar[str | None] = contextvars.ContextVar("moe_core_cpu_engine", default=None)


@plan_type
@dataclass(frozen=True)
class Target:
    """The target of a plan.

    Args:
        kind: `cuda` or `hip` (compiled Triton kernels), `interpreter` (the same kernels in Triton's interpreter on a
            CPU) or `reference` (NumPy twins on a CPU).
        arch: on `cuda` the compute capability, major * 10 + minor (90 = Hopper); on `hip` the number of the
            architecture (942 = gfx942); else 0.
        num_sms: multiprocessors (AMD: compute units) of the device; off the GPU 0.
    """

    kind: str
    arch: int = 0
    num_sms: int = 0

    def __post_init__(self) -> None:
        require_choice("target kind", self.kind, KINDS)
        set_integer(self, "arch", 0)
        set_integer(self, "num_sms", 0)
        gpus = _GPUS.get(self.kind)
        if gpus is not None and (self.arch < gpus.first_arch or self.num_sms < 1):
            raise InvalidInput(
                f"a {self.kind} target needs arch >= {gpus.first_arch} and num_sms >= 1, got arch={self.arch}, "
                f"num_sms={self.num_sms}; for example {gpus.example}"
            )

    @property
    def vendor(self) -> str:
        return _GPUS[self.kind].vendor if self.on_gpu else ""

    @property
    def architecture(self) -> str:
        """Such as `sm_90` or `gfx942`; empty off the GPU."""
        return _GPUS[self.kind].architecture.format(self.arch) if self.on_gpu else ""

    @property
    def on_gpu(self) -> bool:
        return self.kind in _GPUS

    @property
    def interpreted(self) -> bool:
        return self.kind == "interpreter"

    @property
    def compiled(self) -> bool:
        return self.kind != "reference"

    @property
    def engine(self) -> str:
        """`gpu`, `interpreter` or `reference`: a key of tables."""
        return "gpu" if self.on_gpu else self.kind

    @property
    def device_kind(self) -> str:
        return self.kind if self.on_gpu else "cpu"

    @property
    def warp_threads(self) -> int:
        """Threads of a warp: 64 on AMD's gfx9, 32 elsewhere."""
        return 64 if self.vendor == "amd" and self.arch < 1000 else 32

    @property
    def has_fp8(self) -> bool:
        """True for a GPU with e4m3 tensor cores and conversions."""
        return self.vendor == "nvidia" and self.arch >= 89

    @property
    def is_sm90(self) -> bool:
        """True for Hopper: wgmma and TMA."""
        return self.vendor == "nvidia" and self.arch == 90

    @property
    def is_sm100(self) -> bool:
        """True for a data-centre Blackwell GPU, sm_100 or sm_103."""
        return self.vendor == "nvidia" and self.arch // 10 == 10

    @property
    def has_pdl(self) -> bool:
        return self.vendor == "nvidia" and self.arch >= 90

    def __str__(self) -> str:
        return f"{self.kind} {self.architecture} ({self.num_sms} SMs)" if self.on_gpu else self.kind


_CPU_TARGETS = {kind: Target(kind) for kind in ("interpreter", "reference")}


def interprets() -> bool:
    """Return True if TRITON_INTERPRET says 1, true, yes, on or y in any case: what Triton takes as true."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def cpu_target() -> Target:
    """`interpreter` under TRITON_INTERPRET=1 or `cpu_engine`, else `reference`."""
    chosen = _cpu_engine.get()
    if chosen is None:
        chosen = "interpreter" if interprets() else "reference"
    return _CPU_TARGETS[chosen]


@contextlib.contextmanager
def cpu_engine(kind: str) -> Iterator[None]:
    if kind not in tuple(_CPU_TARGETS):
        raise InvalidInput(f"cpu_engine kind must be 'interpreter' or 'reference', got {kind!r}; name one of these")
    token = _cpu_engine.set(kind)
    try:
        yield
    finally:
        _cpu_engine.reset(token)
