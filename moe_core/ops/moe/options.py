"""Options of the plans of a whole layer."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.base import ArraySpec, plan_type
from moe_core.specs import LoRAFactors, SharedExpert


@dataclass(frozen=True)
class ForwardOptions:
    """Options and optional operands of `plan_moe`.

    token_mask, expert_map, shared, lora and adapter_ids: as in `MoEOperands`.

    save: also write the inputs of `moe_core.ops.moe.backward.plan_moe_backward`. saved.pre_activation `[T * K, 2F]`
    (ungated F) has layout order and the dtype of x, gate columns before up for gate_layout `separate`, and anything in
    rows of no slot. saved.group_start is `[E + 1]`, saved.slot_of_row and saved.row_of_slot `[T * K]`. A shared expert
    has saved.shared_pre_activation `[T, 2S]` and saved.shared_gate fp32 `[T, 1]`. The output keeps its bits. With
    spec.recompute no pre-activation is saved. lora adds saved.virtual_sizes `[E (S + 1)]` and saved.virtual_start, of
    rows by (expert, adapter + 1), and saved.low1 and saved.low2 `[T * K, R]`, rows times A and the scale.

    results_at int64 `[T * K]`, an input: product 2 stores each slot's row, cast to the output's dtype, to this address,
    a multiple of 16. 0, or a slot of no expert: not stored. Nothing is summed, and output is `[0, D]`.

    multiprocessors: the most that each product fills (`MatmulProblem`), for a plan in two parts. The last
    `launches_behind_hidden` launches may go to another stream.
    """

    token_mask: ArraySpec | None = None
    expert_map: ArraySpec | None = None
    shared: SharedExpert | None = None
    save: bool = False
    results_at: ArraySpec | None = None
    multiprocessors: tuple[int | None, int | None] | None = None
    lora: LoRAFactors | None = None
    adapter_ids: ArraySpec | None = None


#: Only the output.
PLAIN = ForwardOptions()


@plan_type
@dataclass(frozen=True)
class BackwardOptions:
    """Options of `plan_moe_backward`.

    Attributes:
        wanted: gradients to compute, of `gradient_names`.
        accumulate: matrices in wanted with a gradient added in fp32 to `into.<name>`, which may be the output's memory.
        one_layer: gradients of a stack have only the layer used, without the leading axis (else zeros in other layers).
        wide: d_x stays fp32, for a caller that adds to it.
        overwrite: on compiled targets the gradient of the pre-activation replaces `saved.pre_activation`.
        results_at: int64 `[T * K]`, for a TopK: the last product stores as in `ForwardOptions`, and d_x is `[0, D]`.
    """

    wanted: tuple[str, ...]
    accumulate: tuple[str, ...] = ()
    one_layer: bool = False
    wide: bool = False
    overwrite: bool = False
    results_at: ArraySpec | None = None
