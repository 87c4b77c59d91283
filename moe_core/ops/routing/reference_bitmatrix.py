"""NumPy twins of bitmatrices."""

from __future__ import annotations

import numpy as np


def pack_bitmatrix(ids: np.ndarray, *, num_experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    num_tokens, top_k = ids.shape
    valid = (ids >= 0) & (ids < num_experts)
    tokens = np.repeat(np.arange(num_tokens), top_k).reshape(ids.shape)
    chosen = np.zeros((num_tokens, -(-num_experts // 32) * 32), bool)
    chosen[tokens[valid], ids[valid]] = True
    packed = np.packbits(chosen, axis=-1, bitorder="little").view(np.dtype("<u4")).astype(np.uint32)
    duplicates = np.array([valid.sum() - chosen.sum()], np.int32)
    invalid = np.array([(~valid & (ids != -1)).sum()], np.int32)
    return packed, duplicates, invalid


def unpack_bitmatrix(bitmatrix: np.ndarray, *, num_experts: int, top_k: int) -> np.ndarray:
    little = np.ascontiguousarray(bitmatrix).astype(np.dtype("<u4"))
    chosen = np.unpackbits(little.view(np.uint8), axis=-1, bitorder="little")[:, :num_experts].astype(bool)
    position = np.cumsum(chosen, axis=-1) - 1
    tokens, experts = np.nonzero(chosen & (position < top_k))
    ids = np.full((len(bitmatrix), top_k), -1, np.int32)
    ids[tokens, position[tokens, experts]] = experts
    return ids
