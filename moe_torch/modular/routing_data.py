"""Routing as gpt-oss experts and `triton_kernels` take it: slots `m * n_expts_act + k`, sorted stably by expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from moe_core.base.checks import require_at_least
from moe_core.errors import InvalidInput
from moe_torch import ops
from moe_torch.bridge.options import layout_spec
from moe_torch.modular.into import Launchable, write_into
from moe_torch.modular.stages import as_ids, as_weights, weight_of_row
from moe_torch.operators.stages import PACK_BITMATRIX

_WORD_BITS = 32
#: Tile heights in `ExptData`. The smallest bounds the number of tiles.
BLOCK_MS = (16, 32, 64, 128)


def most_tiles(num_groups: int, num_rows: int, block_m: int) -> int:
    """The most tiles of height block_m that groups with num_rows rows in all can need."""
    return num_rows if num_rows <= num_groups else -(-(num_rows - num_groups + 1) // block_m) + num_groups - 1


@dataclass(eq=False)
class GatherIndx:
    """`Y = X[src_indx]`. int32: src_indx is the slot of each row, dst_indx the row of each slot."""

    src_indx: torch.Tensor
    dst_indx: torch.Tensor


@dataclass(eq=False)
class ScatterIndx:
    """`Y[dst_indx] = X`. int32: src_indx is the row of each slot, dst_indx the slot of each row."""

    src_indx: torch.Tensor
    dst_indx: torch.Tensor


@dataclass(eq=False)
class ExptData:
    """hist int32 `[E]`: rows of each expert. token_offs_raw int32 `[E + 1]`: starts of experts.

    By tile height (16 to 128), computed on access: token_offs_pad `[E + 1]`, tiles before each expert, and
    block_pid_map, `expert + (tile of the expert << 16)` for each tile, -1 = idle. hist [20, 0, 3], height 16:
    token_offs_pad [0, 2, 2, 3], tiles [0, 1 << 16, 2, -1, ...].
    """

    hist: torch.Tensor | None
    token_offs_raw: torch.Tensor | None
    token_offs_pad: Mapping[int, torch.Tensor] | None
    block_pid_map: Mapping[int, torch.Tensor] | None


@dataclass(eq=False)
class RoutingData:
    """gate_scal fp32 `[M * n_expts_act]`: the weight of each row, rows without an expert last. expt_hist int32
    `[n_expts_tot]`: rows of each expert. expected_tokens_per_expt has no effect."""

    gate_scal: torch.Tensor | None
    expt_hist: torch.Tensor | None
    n_expts_tot: int
    n_expts_act: int
    expt_data: ExptData | None = None
    expected_tokens_per_expt: int | None = None

    def n_blocks(self, n_rows: int, block_m: int) -> int:
        """The most tiles of height block_m that n_rows rows can need."""
        return most_tiles(self.n_expts_tot, n_rows, block_m)


class _ByHeight(Mapping[int, torch.Tensor]):
    def __init__(self, compute: Callable[[int], torch.Tensor]) -> None:
        self._compute = compute
        self._known: dict[int, torch.Tensor] = {}

    def __getitem__(self, block_m: int) -> torch.Tensor:
        if block_m not in BLOCK_MS:
            raise KeyError(block_m)
        if block_m not in self._known:
            self._known[block_m] = self._compute(block_m)
        return self._known[block_m]

    def __iter__(self) -> Iterator[int]:
        return iter(BLOCK_MS)

    def __len__(self) -> int:
        return len(BLOCK_MS)


def starts(sizes: torch.Tensor) -> torch.Tensor:
    """int32 `[E + 1]`: 0, then the running sum of sizes `[E]`."""
    return torch.nn.functional.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0))


def expert_data(hist: torch.Tensor, group_start: torch.Tensor, n_gates: int) -> ExptData:
    num_experts = hist.shape[0]
    most = most_tiles(num_experts, n_gates, min(BLOCK_MS))

    def tile_starts(block_m: int) -> torch.Tensor:
        return starts((hist + block_m - 1) // block_m)

    def tiles(block_m: int) -> torch.Tensor:
        first, tile = tile_starts(block_m), torch.arange(most, dtype=torch.int32, device=hist.device)
        expert = torch.searchsorted(first[1:], tile, right=True, out_int32=True).clamp(max=num_experts - 1)
        return torch.where(tile < first[-1], ((tile - first[expert]) << 16) + expert, -1)

    return ExptData(hist, group_start, _ByHeight(tile_starts), _ByHeight(tiles))


def sorted_by_expert(
    ids: torch.Tensor, weights: torch.Tensor, num_experts: int, absent: float | None
) -> tuple[RoutingData, GatherIndx, ScatterIndx]:
    """Sort ids int32 and weights fp32 `[M, topk]` into rows. absent: the weight of rows without an expert."""
    layout = ops.make_layout(ids, num_experts)
    slots = layout.slot_of_row
    gate_scal = weights.reshape(-1)[slots] if absent is None else weight_of_row(weights, slots, absent)
    data = expert_data(layout.group_sizes, layout.group_start, slots.shape[0])
    routing_data = RoutingData(gate_scal, layout.group_sizes, num_experts, ids.shape[1], data)
    return routing_data, GatherIndx(slots, layout.row_of_slot), ScatterIndx(layout.row_of_slot, slots)


def make_routing_data(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_local_experts: int
) -> tuple[RoutingData, GatherIndx, ScatterIndx]:
    """Sort ids and weights `[M, topk]` into rows by expert, in slot order within an expert.

    An id of -1, or outside [0, num_local_experts), has no row and the weight -1 in gate_scal. ids are kept as int32 and
    weights as fp32. Apply an expert_map before.
    """
    ids = as_ids(topk_ids)
    return sorted_by_expert(ids, as_weights(topk_weights, ids), num_local_experts, absent=-1.0)


def group_starts(routing_data: RoutingData) -> torch.Tensor:
    """int32 `[E + 1]`: the first row of each expert. Raises InvalidInput if unknown."""
    if routing_data.expt_hist is None:
        raise InvalidInput("expt_hist of routing_data must be a tensor, got None; pass the rows of each expert")
    data = routing_data.expt_data
    return starts(routing_data.expt_hist) if data is None or data.token_offs_raw is None else data.token_offs_raw


def layout_of(
    routing_data: RoutingData, slot_of_row: torch.Tensor, row_of_slot: torch.Tensor, top_k: int
) -> ops.RaggedLayout:
    """The layout of a routing and its indices int32 `[M * top_k]`."""
    group_start, count = group_starts(routing_data), slot_of_row.shape[0]
    if row_of_slot.shape[0] != count or count % routing_data.n_expts_act:
        raise InvalidInput(
            f"src_indx and dst_indx must have as many elements as each other, a multiple of n_expts_act = "
            f"{routing_data.n_expts_act}, got {count} and {row_of_slot.shape[0]}; pass those of routing"
        )
    spec = layout_spec(count // top_k, top_k, routing_data.n_expts_tot, 1, None)
    absent = torch.zeros(1, dtype=torch.int32, device=slot_of_row.device)
    return ops.RaggedLayout(spec, routing_data.expt_hist, group_start, slot_of_row, row_of_slot, absent)


def layout_and_weights(
    routing_data: RoutingData, gather_indx: GatherIndx, scatter_indx: ScatterIndx
) -> tuple[ops.RaggedLayout, torch.Tensor]:
    """The layout, and weights by slot fp32 `[M * topk]` (0 without a row)."""
    if routing_data.gate_scal is None:
        raise InvalidInput("gate_scal of routing_data must be a tensor, got None; pass the weight of each row")
    slots, rows = gather_indx.src_indx, scatter_indx.src_indx
    return layout_of(routing_data, slots, rows, routing_data.n_expts_act), weight_of_row(routing_data.gate_scal, rows)


@Launchable
def pack_bitmatrix(
    bitmatrix: torch.Tensor,
    topk_ids: torch.Tensor,
    n_rows: int,
    bm_cols: int,
    n_expts_act: int,
    BLOCK_SIZE_M: int = 512,
    BLOCK_SIZE_K: int = 32,
) -> None:
    """Write bitmatrix uint32 `[n_rows, bm_cols]`: bit `e % 32` of word `e // 32` is set if e is among the row's ids.

    topk_ids `[n_rows, n_expts_act]`. -1 and ids past the words set nothing. Without effect: BLOCK_SIZE_M, BLOCK_SIZE_K,
    and the grid of `pack_bitmatrix[grid](...)`.
    """
    for name, value in (("BLOCK_SIZE_M", BLOCK_SIZE_M), ("BLOCK_SIZE_K", BLOCK_SIZE_K), ("bm_cols", bm_cols)):
        require_at_least(name, value, 1)
    ids = as_ids(topk_ids)
    for name, array, shape in (("bitmatrix", bitmatrix, (n_rows, bm_cols)), ("topk_ids", ids, (n_rows, n_expts_act))):
        if tuple(array.shape) != shape:
            raise InvalidInput(f"{name} must be {list(shape)}, got {list(array.shape)}; pass the sizes it has")
    if bitmatrix.dtype != torch.uint32:
        raise InvalidInput(f"bitmatrix must be torch.uint32, got {bitmatrix.dtype}; allocate it so")
    arguments = PACK_BITMATRIX.arguments(ids=ids, num_experts=_WORD_BITS * bm_cols)
    write_into(PACK_BITMATRIX, {"bitmatrix": bitmatrix}, arguments)
