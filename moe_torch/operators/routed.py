"""The operator that shows traces the routing of experts that run stage by stage, or on several ranks."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from moe_torch.bridge.operator import LIBRARY

LIBRARY.define(
    "routed(Tensor ids, Tensor weights, int num_experts) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,)
)
ROUTED = torch.ops.moebius.routed.default


def _copied(ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    # No operator returns an alias.
    return ids.clone(), weights.clone()


LIBRARY.impl("routed", _copied, "CPU")
LIBRARY.impl("routed", _copied, "CUDA")
torch.library.register_fake("moebius::routed", _copied, lib=LIBRARY)
with contextlib.suppress(AttributeError):  # torch lacks a private name: the gradient passes as for any operator
    torch.library.register_autograd(
        "moebius::routed",
        lambda ctx, ids, weights: (None, weights, None),
        setup_context=lambda ctx, inputs, output: None,
        lib=LIBRARY,
    )


class _Watch(threading.local):
    """traces: captures and replays of this thread. hidden: blocks whose operators they do not see."""

    traces = 0
    hidden = 0


WATCH = _Watch()


class _Hidden:
    def __enter__(self) -> None:
        WATCH.hidden += 1

    def __exit__(self, *error: object) -> None:
        WATCH.hidden -= 1


_HIDDEN = _Hidden()


def hidden() -> contextlib.AbstractContextManager[None]:
    """Hide a layer's operators from traces, which see its `routed`."""
    return _HIDDEN


def routed(ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> tuple[Any, Any]:
    """Return ids and weights `[T, K]` of a layer with so many experts, from the trace under a replay."""
    return ROUTED(ids, weights, num_experts) if torch.compiler.is_compiling() or WATCH.traces else (ids, weights)
