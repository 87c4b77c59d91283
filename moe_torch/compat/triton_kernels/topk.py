"""The K largest columns of every row, in ascending order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.specs.routing import RouterSpec
from moe_torch import ops
from moe_torch.compat.triton_kernels.tensor import Bitmatrix, Tensor

_WORD_BITS = 32


class Choice(NamedTuple):
    """ids int32 `[T, K]`, values fp32 `[T, K]`. complete: no id can be -1."""

    ids: torch.Tensor
    values: torch.Tensor
    complete: bool


def topk(
    x: Tensor | torch.Tensor,
    k: int,
    apply_softmax: bool = True,
    dim: int = 1,
    return_bitmatrix: bool = True,
    y_indx: torch.Tensor | None = None,
    n_rows: int | torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Bitmatrix]:
    """Return (values fp32 `[T, K]`, indices int32 `[T, K]`, Bitmatrix `[T, E]`) of x `[T, E]`, K up to E.

    Indices ascend. Ties go to the lower one. y_indx: `[T, K]`, chosen indices, kept in their order, -1 if outside [0,
    E). apply_softmax: values are the softmax over a row's chosen numbers. n_rows: an integer, or a tensor of one.
    Further rows have indices -1 and values 0. Raises Unsupported for another dim or no bitmatrix.
    """
    if dim not in (1, -1):
        raise Unsupported(f"dim must be 1, the columns, got {dim}: experts are columns here; transpose x")
    if not return_bitmatrix:
        raise Unsupported("return_bitmatrix must be True, got False: there are always three results; drop the last one")
    if isinstance(x, Tensor):
        n_rows = x.shape[0] if n_rows is None else n_rows
        x = x.data
    ids, values, _ = choose(x, k, "chosen" if apply_softmax else "none", y_indx, n_rows)
    bits = ops.pack_bitmatrix(ids, x.shape[1])
    shape = [x.shape[0] if n_rows is None else n_rows, _WORD_BITS * bits.shape[1]]
    return values, ids, Bitmatrix(bits, shape, [bits.shape[0], None])


def choose(
    logits: torch.Tensor,
    k: int,
    softmax: str,
    given: torch.Tensor | None,
    n_rows: int | torch.Tensor | None,
    slot_order: str = "expert",
) -> Choice:
    """Choose k columns of logits `[T, E]`, or take ids. softmax: over a token's `chosen` logits, `all`, or `none`."""
    if logits.ndim != 2:
        raise InvalidInput(f"logits must be [T, E], got {list(logits.shape)}; flatten the leading axes first")
    logits = logits.to(torch.float32).contiguous()
    num_tokens, num_experts = logits.shape
    mask: Any = None if n_rows is None else torch.arange(num_tokens, device=logits.device) < n_rows
    if given is None:
        order = "softmax_then_topk" if softmax == "all" else "topk_then_softmax"
        ids, values = ops.route(logits, RouterSpec(k, order=order, slot_order=slot_order), token_mask=mask)
        if softmax != "none":
            return Choice(ids, values, mask is None)
        inside = ids >= 0
    else:
        if tuple(given.shape) != (num_tokens, k):
            raise InvalidInput(f"expt_indx must be {[num_tokens, k]}, got {list(given.shape)}; pass one row per token")
        ids = given.to(torch.int32)
        inside = (ids >= 0) & (ids < num_experts)
        inside = inside if mask is None else inside & mask[:, None]
        ids = torch.where(inside, ids, -1)
    scores = logits.softmax(-1) if softmax == "all" else logits
    values = scores.gather(1, ids.clamp(min=0).long())
    if softmax == "chosen":
        values = torch.where(inside, values, -torch.inf).softmax(-1)
    return Choice(ids, torch.where(inside, values, 0.0), False)
