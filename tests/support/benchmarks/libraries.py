"""Stand-ins on a CPU for libraries that benchmarks time as peers: what these are asked for, by torch's operations."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch


def _module(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(names)
    return module


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


class _Applied:
    """A stand-in for an autograd function: torch differentiates what it does."""

    def __init__(self, function: Any) -> None:
        self.apply = function


def _route(logits: torch.Tensor, experts: int, top_k: int, over_top_k: bool, renormalize: bool) -> Any:
    assert logits.shape[1] == experts and over_top_k and not renormalize
    values, ids = logits.topk(top_k, dim=1)
    return values.softmax(dim=1), ids.int()


def _sort(ids: torch.Tensor, experts: int, counts: Any, ends: Any, gather: Any, scatter: Any, back: Any) -> None:
    flat = ids.flatten().long()
    counts.copy_(flat.bincount(minlength=experts))
    ends[0], ends[1:] = 0, counts.cumsum(0)
    order = flat.sort(stable=True).indices
    scatter.copy_(order)
    gather.copy_(order // ids.shape[1])
    back[order] = torch.arange(len(flat), dtype=torch.int32)


def _up(x: Any, w1: Any, bias: Any, ends: Any, slots: int, top_k: int, gather: Any, *others: Any) -> Any:
    assert bias is None and w1.stride(1) == 1 and len(gather) == slots
    rows = x.index_select(0, gather)
    wide = torch.cat([rows[ends[e] : ends[e + 1]] @ w1[:, :, e].T for e in range(w1.shape[2])])
    return _swiglu(wide[:, ::2], wide[:, 1::2]), wide


def _down(a: Any, wide: Any, w2: Any, bias: Any, weights: Any, ends: Any, tokens: int, top_k: int, *others: Any) -> Any:
    back = others[2]
    out = torch.cat([a[ends[e] : ends[e + 1]] @ w2[:, :, e].T for e in range(w2.shape[2])])
    slots = out.index_select(0, back).view(tokens, top_k, -1)
    return (slots.float() * weights[:, :, None]).sum(dim=1).to(a.dtype)


def _fused(x: Any, ids: Any, weights: Any, w1: Any, w2: Any, *, num_experts: int, top_k: int, moe_output: Any) -> Any:
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32 and ids.shape[1] == top_k
    assert w1.is_contiguous() and w2.is_contiguous() and len(w1) == num_experts
    up, gate = w1.unflatten(1, (-1, 2, 32)).unbind(2)
    result = torch.zeros(x.shape)
    for token in range(len(x)):
        for choice in range(top_k):
            e, row = int(ids[token, choice]), x[token].float()
            hidden = _swiglu(gate[e].flatten(0, 1).float() @ row, up[e].flatten(0, 1).float() @ row)
            result[token] += weights[token, choice] * (w2[e].float() @ hidden.to(x.dtype).float())
    return moe_output.copy_(result)


def _grouped(rows: torch.Tensor, matrices: torch.Tensor, result: torch.Tensor, owner: torch.Tensor) -> None:
    assert len(rows) % 128 == 0 and owner.dtype == torch.int32
    for block in range(0, len(rows), 128):
        experts = {int(one) for one in owner[block : block + 128]} - {-1}
        assert len(experts) <= 1, "a block of rows has one expert"
        for expert in experts:
            result[block : block + 128] = rows[block : block + 128] @ matrices[expert].T


@contextlib.contextmanager
def _autotune(tune: bool, tuning_buckets: tuple[int, ...]) -> Iterator[None]:
    assert tune and len(tuning_buckets) == 1
    yield


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put stand-ins for sonicmoe, flashinfer and deep_gemm where they are imported from."""
    swiglu = types.SimpleNamespace(SWIGLU="swiglu")
    functional = {"TC_Softmax_Topk_Router_Function": _Applied(_route), "TC_topk_router_metadata_triton": _sort}
    functional |= {"_UpProjection": _Applied(_up), "_DownProjection": _Applied(_down)}
    modules = [
        _module("sonicmoe"),
        _module("sonicmoe.functional", **functional),
        _module("sonicmoe.enums", ActivationType=swiglu),
        _module("flashinfer", autotune=_autotune),
        _module("flashinfer.fused_moe", cute_dsl_fused_moe_bf16=_fused),
        _module("deep_gemm", m_grouped_bf16_gemm_nt_contiguous=_grouped),
        _module("deep_gemm.utils"),
        _module("deep_gemm.utils.layout", get_mk_alignment_for_contiguous_layout=lambda: 128),
    ]
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
