"""Tile configurations of the grouped matmul. `moe_core.ops.matmul.families` chooses."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.base import plan_type, require_kind, set_integer

#: By compute capability (CUDA programming guide, technical specifications).
_SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 87: 163 * 1024, 88: 99 * 1024, 89: 99 * 1024}
_SHARED_BYTES |= dict.fromkeys((120, 121), 99 * 1024)
#: AMD (CDNA instruction set guides, local data share).
_SHARED_BYTES |= {942: 64 * 1024, 950: 160 * 1024}
_SHARED_BYTES_DEFAULT = 227 * 1024


@plan_type
@dataclass(frozen=True)
class TileConfig:
    """One configuration.

    block_m, block_n, block_k: tile sides in elements; block_n counts output columns. group_m: row blocks that share a
    column tile before the next.

    family: `portable` runs everywhere; `sm90` is warp-specialised with TMA for sm_90: block_m 128, 192 or 160 (swapped
    operands), block_k 64, block_n 256 accumulator columns (128 of a gated product), num_warps per consumer. For
    quantised weights, `quantized` replaces `portable`, and `mixed_input` and `few_rows` take tiled weights on sm_90.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    group_m: int = 8
    family: str = "portable"

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k", "num_warps", "num_stages", "group_m"):
            set_integer(self, name, 0)  # which of them are legal is the families' business
        require_kind("family", self.family, str)


def shared_limit(arch: int) -> int:
    return _SHARED_BYTES.get(arch, _SHARED_BYTES_DEFAULT)
