"""What is refused, or differs, by choice, and why."""

from __future__ import annotations

#: By case of vLLM: a part of the message, and the reason.
VLLM: dict[str, tuple[str, str]] = {}
#: Of tests of triton_kernels: a part of what they say, numbers written as N, and the reason.
TRITON_KERNELS: tuple[tuple[str, str], ...] = ()
