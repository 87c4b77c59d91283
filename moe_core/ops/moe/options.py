"""What the plans of a whole layer do beyond their leading arguments."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.base.arrays import ArraySpec
from moe_core.base.codec import plan_type
from moe_core.specs.operands import SharedExpert


@dataclass(frozen=True)
class ForwardOptions:
    """What a forward has beside its experts and its routing, and what it does beside its output.

    token_mask bool `[T]`, expert_map int32 `[E_global]` and shared: as in `MoEOperands`.

    save: write too what `moe_core.ops.moe.backward.plan_moe_backward` reads: saved.pre_activation `[T * K, 2F]`
    (ungated F), in layout order and the dtype of x, gate_layout `separate` as gate columns, then up; rows of no slot
    hold anything; saved.group_start `[E + 1]`, saved.slot_of_row and saved.row_of_slot `[T * K]`; of a shared expert
    saved.shared_pre_activation `[T, 2S]` and saved.shared_gate fp32 `[T, 1]`. The output keeps its bits. With
    spec.recompute no pre-activation is saved.

    results_at int64 `[T * K]`, an input: product 2 stores the row of each slot, cast to the dtype of the output, to the
    address there, a multiple of 16, 0 = nowhere; slots of no expert go nowhere. Nothing is summed, and output has no
    rows: `[0, D]`.

    multiprocessors: the most that each product fills, as in MatmulProblem, for a plan in two parts: product 2 and what
    follows it, the last `launches_behind_hidden` launches, may go to another stream. No bit depends on it.
    """

    token_mask: ArraySpec | None = None
    expert_map: ArraySpec | None = None
    shared: SharedExpert | None = None
    save: bool = False
    results_at: ArraySpec | None = None
    multiprocessors: tuple[int | None, int | None] | None = None


#: A forward of the output alone.
PLAIN = ForwardOptions()


@plan_type
@dataclass(frozen=True)
class BackwardOptions:
    """What a backward computes.

    wanted: those of gradient_names to compute; nothing is done for the rest.
    accumulate: matrices among them whose gradient is added, in fp32, to the fp32 array `into.<name>`; the output, fp32
    too, may lie in the same memory.
    one_layer: gradients of a stack are those of the layer used, without the leading axis, instead of zeros for all
    others.
    wide: d_x is fp32, without its cast, for a caller that adds to it.
    overwrite: on compiled targets the memory of `saved.pre_activation` is written to; it holds the pre-activation's
    gradient in the end.
    results_at int64 `[T * K]`, an input where routing is a TopK: the last product stores the row of each slot that has
    an expert to the address there, a multiple of 16, 0 = nowhere. Nothing is summed, and d_x has no rows: `[0, D]`.
    """

    wanted: tuple[str, ...]
    accumulate: tuple[str, ...] = ()
    one_layer: bool = False
    wide: bool = False
    overwrite: bool = False
    results_at: ArraySpec | None = None
