"""The K largest columns of every row, in descending order."""

from __future__ import annotations

from typing import Any

import torch

from moe_core.errors import Unsupported
from moe_torch import ops
from moe_torch.compat.triton_kernels.tensor import Tensor
from moe_torch.compat.triton_kernels.topk import choose
from moe_torch.compat.triton_kernels_38.tensor import BIT, SparseMatrix, wrap_torch_tensor

_WORD_BITS = 32


def topk(
    x: Tensor | torch.Tensor,
    k: int,
    apply_softmax: bool = True,
    dim: int = 1,
    y_indx: torch.Tensor | None = None,
    n_rows: int | torch.Tensor | None = None,
    all_gather: bool = False,
    symm_mem_pool: Any = None,
) -> SparseMatrix:
    """Choose columns of x `[T, E]`: indx int32 and vals fp32 `[T, K]`, by descending value, and mask `[T, E]`.

    See Triton 3.5's function for the options. Raises Unsupported for another dim, and for an exchange between GPUs.
    """
    if dim not in (1, -1):
        raise Unsupported(f"dim must be 1, the columns, got {dim}: experts are columns here; transpose x")
    if all_gather or symm_mem_pool is not None:
        raise Unsupported(
            f"all_gather must be False and symm_mem_pool None, got {all_gather} and {symm_mem_pool!r}: rows are chosen "
            "on one GPU; gather the logits first"
        )
    if isinstance(x, Tensor):
        n_rows = x.shape[0] if n_rows is None else n_rows
        x = x.data
    ids, values, _ = choose(x, k, "chosen" if apply_softmax else "none", y_indx, n_rows, slot_order="score")
    count, num_columns = x.shape
    bits = ops.pack_bitmatrix(ids, num_columns)
    # Upstream keeps the words of a column together, in memory for whole blocks of 32 rows.
    words = bits.view(torch.int32).new_zeros(bits.shape[1], -(-count // _WORD_BITS) * _WORD_BITS)
    words[:, :count] = bits.view(torch.int32).T
    shape = [count if n_rows is None else n_rows, num_columns]
    mask = wrap_torch_tensor(words.T[:count].view(torch.uint32), BIT, shape, [count, None])
    return SparseMatrix(ids, values, mask)
