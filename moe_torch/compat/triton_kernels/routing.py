"""Rows sorted by expert: which experts a token goes to, and the way of its rows there and back.

Slot `t * n_expts_act + k` is choice k of token t; rows are slots sorted by expert, stably. -1 = none. Fields may be
assigned to, as ported code does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from moe_core.base.checks import require_at_least, require_flag
from moe_core.errors import InvalidInput
from moe_torch import ops
from moe_torch.bridge.options import require_instance
from moe_torch.compat.triton_kernels.tensor import Bitmatrix
from moe_torch.compat.triton_kernels.topk import choose

#: Heights of the tiles that `ExptData` counts; the smallest bounds their number.
_BLOCK_MS = (16, 32, 64, 128)


@dataclass(eq=False)
class GatherIndx:
    """`Y = X[src_indx]`. int32: src_indx, the slot of each row; dst_indx, the row of each slot."""

    src_indx: torch.Tensor
    dst_indx: torch.Tensor


@dataclass(eq=False)
class ScatterIndx:
    """`Y[dst_indx] = X`. int32: src_indx, the row of each slot; dst_indx, the slot of each row."""

    src_indx: torch.Tensor
    dst_indx: torch.Tensor


@dataclass(eq=False)
class ExptData:
    """int32: hist `[E]`, rows of each expert; token_offs_raw `[E + 1]`, where they start; by tile height (16 to 128),
    token_offs_pad `[E + 1]`, tiles before each expert, and block_pid_map, what each tile is: `expert + (tile of the
    expert << 16)`, -1 = idle. hist [20, 0, 3], height 16: token_offs_pad [0, 2, 2, 3], tiles [0, 1 << 16, 2, -1, ...].

    Our kernels need neither of the last two: `routing` gives mappings that compute what is looked up.
    """

    hist: torch.Tensor | None
    token_offs_raw: torch.Tensor | None
    token_offs_pad: Mapping[int, torch.Tensor] | None
    block_pid_map: Mapping[int, torch.Tensor] | None


@dataclass(eq=False)
class RoutingData:
    """gate_scal fp32 `[T * n_expts_act]`: the weight of each row. expt_hist int32 `[n_expts_tot]`: rows of each expert.

    expected_tokens_per_expt names profiles in the original; nothing here depends on it.
    """

    gate_scal: torch.Tensor | None
    expt_hist: torch.Tensor | None
    n_expts_tot: int
    n_expts_act: int
    expt_data: ExptData | None = None
    expected_tokens_per_expt: int | None = None

    def n_blocks(self, n_rows: int, block_m: int) -> int:
        """Tiles of height block_m that n_rows rows may need."""
        if n_rows <= self.n_expts_tot:
            return n_rows
        return -(-(n_rows - self.n_expts_tot + 1) // block_m) + self.n_expts_tot - 1


class _ByHeight(Mapping[int, torch.Tensor]):
    """What a function of a tile's height gives, computed once where it is looked up."""

    def __init__(self, compute: Callable[[int], torch.Tensor]) -> None:
        self._compute = compute
        self._known: dict[int, torch.Tensor] = {}

    def __getitem__(self, block_m: int) -> torch.Tensor:
        if block_m not in _BLOCK_MS:
            raise KeyError(block_m)
        if block_m not in self._known:
            self._known[block_m] = self._compute(block_m)
        return self._known[block_m]

    def __iter__(self) -> Iterator[int]:
        return iter(_BLOCK_MS)

    def __len__(self) -> int:
        return len(_BLOCK_MS)


def starts(sizes: torch.Tensor) -> torch.Tensor:
    """int32 `[E + 1]`: 0, then the running sum of sizes `[E]`."""
    return torch.nn.functional.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0))


def compute_expt_data(expt_hist: torch.Tensor | None, n_expts_tot: int, n_gates: int) -> ExptData:
    """The ExptData of a histogram int32 `[n_expts_tot]` whose sum is at most n_gates; None of None."""
    if expt_hist is None:
        return ExptData(None, None, None, None)
    return _expert_data(expt_hist, starts(expt_hist), n_gates)


def _expert_data(hist: torch.Tensor, group_start: torch.Tensor, n_gates: int) -> ExptData:
    num_experts = hist.shape[0]
    if n_gates <= num_experts:
        most = n_gates
    else:
        most = num_experts - 1 - (num_experts - n_gates - 1) // min(_BLOCK_MS)

    def tile_starts(block_m: int) -> torch.Tensor:
        return starts((hist + block_m - 1) // block_m)

    def tiles(block_m: int) -> torch.Tensor:
        first, tile = tile_starts(block_m), torch.arange(most, dtype=torch.int32, device=hist.device)
        expert = torch.searchsorted(first[1:], tile, right=True, out_int32=True).clamp(max=num_experts - 1)
        return torch.where(tile < first[-1], ((tile - first[expert]) << 16) + expert, -1)

    return ExptData(hist, group_start, _ByHeight(tile_starts), _ByHeight(tiles))


def routing(
    logits: torch.Tensor,
    n_expts_act: int,
    sm_first: bool = False,
    expt_indx: torch.Tensor | None = None,
    simulated_ep: int = 1,
    n_rows: int | torch.Tensor | None = None,
) -> tuple[RoutingData, GatherIndx, ScatterIndx]:
    """Route logits `[T, E]` to n_expts_act experts each, a token's in ascending order; any number up to E.

    sm_first: softmax over all experts, then the choice; else over the chosen. expt_indx `[T, n_expts_act]`: ids that
    are decided, in their order. simulated_ep: only the first `E / simulated_ep` experts are kept, with the weights that
    all of them have. n_rows: an integer, or a tensor of one; later tokens go nowhere. Rows without an expert come last;
    their gate_scal is 0. Logits count as fp32 and gate_scal is fp32. Raises InvalidInput.
    """
    require_flag("sm_first", sm_first)
    require_at_least("simulated_ep", simulated_ep, 1)
    num_experts = logits.shape[-1]
    if num_experts % simulated_ep:
        raise InvalidInput(f"simulated_ep must divide {num_experts} experts, got {simulated_ep}; choose a divisor")
    ids, values, complete = choose(logits, n_expts_act, "all" if sm_first else "chosen", expt_indx, n_rows)
    if simulated_ep > 1:
        num_experts //= simulated_ep
        kept = (ids >= 0) & (ids < num_experts)
        # Those kept come first.
        order = (~kept).to(torch.int32).argsort(dim=1, stable=True)
        ids, values = torch.where(kept, ids, -1).gather(1, order), torch.where(kept, values, 0.0).gather(1, order)
        complete = False
    return _sorted_by_expert(ids, values, num_experts, complete)


def routing_from_bitmatrix(
    bitmatrix: Bitmatrix, expt_scal: torch.Tensor, expt_indx: torch.Tensor, n_expts_tot: int, n_expts_act: int
) -> tuple[RoutingData, GatherIndx, ScatterIndx]:
    """Route ids expt_indx and weights expt_scal, both `[T, n_expts_act]`, in their order.

    A slot has a row where its id is in [0, n_expts_tot), its bit is set and its token is within bitmatrix.shape[0].
    Raises InvalidInput.
    """
    require_instance("bitmatrix", bitmatrix, Bitmatrix)
    wanted = (bitmatrix.data.shape[0], n_expts_act)
    for name, array in (("expt_scal", expt_scal), ("expt_indx", expt_indx)):
        if tuple(array.shape) != wanted:
            raise InvalidInput(f"{name} must be {list(wanted)}, got {list(array.shape)}; pass one row per token")
    columns = min(n_expts_tot, 32 * bitmatrix.data.shape[1])
    ids = expt_indx.to(torch.int32)
    exists = (ids >= 0) & (ids < columns)
    exists &= bitmatrix.holds(ids.clamp(0, columns - 1))
    exists &= (torch.arange(wanted[0], device=ids.device) < bitmatrix.shape[0])[:, None]
    return _sorted_by_expert(torch.where(exists, ids, -1), expt_scal.to(torch.float32), n_expts_tot, False)


def _sorted_by_expert(
    ids: torch.Tensor, weights: torch.Tensor, num_experts: int, complete: bool
) -> tuple[RoutingData, GatherIndx, ScatterIndx]:
    """complete: every slot has an expert."""
    layout = ops.make_layout(ids, num_experts)
    slots = layout.slot_of_row
    # -1 is an index too: of the last weight, which another row has.
    gate_scal = weights.reshape(-1)[slots]
    if not complete:
        gate_scal = torch.where(slots >= 0, gate_scal, 0.0)
    data = _expert_data(layout.group_sizes, layout.group_start, slots.shape[0])
    routing_data = RoutingData(gate_scal, layout.group_sizes, num_experts, ids.shape[1], data)
    return (routing_data, GatherIndx(slots, layout.row_of_slot), ScatterIndx(layout.row_of_slot, slots))


def filled(routing_data: RoutingData) -> RoutingData:
    """The same with its ExptData, made of the histogram where it is missing. Raises InvalidInput where nothing says how
    many rows there are."""
    if routing_data.expt_data is not None or routing_data.expt_hist is None:
        return routing_data
    if routing_data.gate_scal is None:
        raise InvalidInput(
            "expt_data must be given where gate_scal is None, as tiles depend on the number of rows, got neither; pass "
            "that of compute_expt_data"
        )
    data = compute_expt_data(routing_data.expt_hist, routing_data.n_expts_tot, routing_data.gate_scal.shape[0])
    return dataclasses.replace(routing_data, expt_data=data)
