"""The driver of each kind of device: a module like `moe_core.runtime.cuda` and an entry in `BACKENDS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from moe_core.base import Target, cpu_target
from moe_core.errors import Unsupported
from moe_core.runtime.cuda import CudaPrepared, cuda_target
from moe_core.runtime.prepared import HostPrepared, Prepared


class Backend(NamedTuple):
    """target: the plan target of a device index. prepared: the class of its plans."""

    target: Callable[[int], Target]
    prepared: type[Prepared]


BACKENDS = {"cpu": Backend(lambda _: cpu_target(), HostPrepared), "cuda": Backend(cuda_target, CudaPrepared)}


def target_of(device: tuple[str, int]) -> Target:
    """The target of a device, `("cpu", 0)` or `("cuda", index)`. Other kinds raise Unsupported."""
    kind, index = device
    if kind not in BACKENDS:
        raise Unsupported(f"arrays must be on a CPU or a CUDA device, got {kind!r}; move them there")
    return BACKENDS[kind].target(index)


def prepared_class(target: Target) -> type[Prepared]:
    if target.device_kind not in BACKENDS:
        raise Unsupported(
            f"plans for {target} can be made and compiled, but no driver runs them; run on one of {', '.join(BACKENDS)}"
        )
    return BACKENDS[target.device_kind].prepared
