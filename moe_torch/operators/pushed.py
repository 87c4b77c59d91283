"""Operators of a forward whose last product stores its rows at peers' addresses: `moe` with given ids and weights,
and `results_at`. Their output has no rows.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from moe_core.ops.moe.forward import launches_behind_hidden
from moe_core.ops.moe.names import result_names
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, MoEOutput, TopK
from moe_torch.bridge.operator import Operator, Outputs
from moe_torch.bridge.ready import Begun
from moe_torch.bridge.signature import Signature
from moe_torch.operators import table
from moe_torch.operators.kinds import BackwardOperator, TrainingOperator
from moe_torch.operators.requests import reads_formats
from moe_torch.operators.shapes import wide_gradients

_BUNDLES, _RESULTS = table.moe_bundles(TopK), len(result_names(TopK))


def _without_rows(shapes: Any, given: Any) -> Outputs:
    (rows, dtype), *others = shapes(given)
    return [((0, *rows[1:]), dtype), *others]


def _pushed(packet: str, *matrices: str) -> tuple[Operator, Operator]:
    """The forward, and the one that saves for its backward, which is that of `moe`."""
    tensors = (*table.moe_tensors(TopK, matrices), "results_at", "gradients_at?", "memory!")
    declare = functools.partial(
        Signature, tensors, ("spec",), _BUNDLES, matrices=matrices, unplanned=("gradients_at", "memory")
    )
    forward, training = (functools.partial(_without_rows, one) for one in (table.moe_shapes, table.training_shapes))
    save = functools.partial(table.plan_forward, save=True)
    return (
        Operator(packet, declare(returns=_RESULTS), table.plan_forward, forward),
        TrainingOperator(f"{packet}_training", declare(returns=None), save, training),
    )


def _in_two_parts(packet: str, *matrices: str) -> Operator:
    """The forward with product 2 on another stream. results_at is optional."""
    tensors = (*table.moe_tensors(TopK, matrices), "results_at?", "memory!")
    options = ("spec", "multiprocessors")
    signature = Signature(tensors, options, _BUNDLES, matrices=matrices, returns=_RESULTS, unplanned=("memory",))

    def shapes(given: Any) -> Outputs:
        return table.moe_shapes(given) if given.results_at is None else _without_rows(table.moe_shapes, given)

    return Operator(packet, signature, table.plan_forward, shapes)


def _gradients(given: Any) -> Outputs:
    """d_x has no rows."""
    given.x = given.x[:0]
    return wide_gradients(given)


def _backward(packet: str, *matrices: str) -> Operator:
    """The backward of `moe`, which stores rows of d_x at addresses."""
    into = packet.endswith("_into")
    tensors = table.backward_tensors(TopK, ("results_at", "memory!"), into=into)
    options = ("spec", "wanted")
    signature = Signature(tensors, options, _BUNDLES, matrices=matrices, returns=None, unplanned=("memory",))
    planner = functools.partial(table.plan_backward, overwrite=into)
    return BackwardOperator(packet, signature, planner, _gradients)


EXPERTS_PUSH, EXPERTS_PUSH_TRAINING = _pushed("experts_push")
EXPERTS_PUSH_QUANTIZED, EXPERTS_PUSH_QUANTIZED_TRAINING = _pushed("experts_push_quantized", *table.EXPERT_MATRICES)
EXPERTS_IN_PARTS = _in_two_parts("experts_in_parts")
EXPERTS_IN_PARTS_QUANTIZED = _in_two_parts("experts_in_parts_quantized", *table.EXPERT_MATRICES)
#: Into their own memory, and with tensors that take the sum of what they hold and a gradient.
BACKWARDS = _backward("experts_push_backward"), _backward("experts_push_backward_into")
QUANTIZED_BACKWARDS = (
    _backward("experts_push_quantized_backward", *table.EXPERT_MATRICES),
    _backward("experts_push_quantized_backward_into", *table.EXPERT_MATRICES),
)


def experts_push(
    x: torch.Tensor,
    experts: ExpertWeights,
    routing: TopK,
    spec: MoESpec,
    results_at: torch.Tensor,
    *,
    gradients_at: torch.Tensor | None = None,
    memory: torch.Tensor | None = None,
) -> MoEOutput:
    """Run `moe`, whose last product stores the row of every slot at its address while it computes the others.

    Results have the bits of `moe` with K = 1 and `combine_push`, without an array of rows here. Gradients are those of
    `moe`: the gradient of the output is that of each token's sum.

    Args:
        x, experts, routing, spec: as for `moe_torch.moe`. A row has a multiple of 16 bytes.
        results_at: int64 `[T * K]`, the address of each slot's row, a multiple of 16, 0: nowhere; for example of
            `result_addresses`. Slots of no expert go nowhere.
        gradients_at: int64 `[T * K]`, addresses of each slot's row of the gradient of x, which then has no memory
            either.
            None: an array, the sum of a token's rows.
        memory: see `moe_torch.parallel.peer_ops`.

    Returns:
        a MoEOutput. Its output has no rows, `[0, D]`, or `[T, D]` without memory if a gradient is asked for.

    Raises:
        InvalidInput: as `moe`, and a spec with out_dtype.
    """
    operator = EXPERTS_PUSH_QUANTIZED if reads_formats(experts, routing, spec) else EXPERTS_PUSH
    output, tokens_per_expert, invalid_ids = operator.call(
        x=x, experts=experts, routing=routing, token_mask=None, expert_map=None, shared=None, results_at=results_at,
        gradients_at=gradients_at, memory=memory, spec=spec,
    )  # fmt: skip
    return MoEOutput(output, routing.ids, routing.weights, None, tokens_per_expert, invalid_ids)


class BegunExperts(NamedTuple):
    """Experts whose product 1 is under way. What it holds must live until `finish` has run on the device."""

    routing: TopK
    begun: Begun

    def finish(self) -> MoEOutput:
        """Run product 2 and what follows on the current stream, which waits for product 1. Returns the MoEOutput."""
        output, tokens_per_expert, invalid_ids = self.begun.finish()
        routing = self.routing
        return MoEOutput(output, routing.ids, routing.weights, None, tokens_per_expert, invalid_ids)


def experts_begin(
    x: torch.Tensor,
    experts: ExpertWeights,
    routing: TopK,
    spec: MoESpec,
    results_at: torch.Tensor | None,
    *,
    multiprocessors: tuple[int | None, int | None],
) -> BegunExperts:
    """Run the layout and product 1 of `experts_push`, without gradients. results_at: None: rows are summed, as by
    `moe`.

    multiprocessors: the most for product 1 and product 2. None: all. No bit depends on it. Raises as `experts_push`.
    """
    operator = EXPERTS_IN_PARTS_QUANTIZED if reads_formats(experts, routing, spec) else EXPERTS_IN_PARTS
    arguments = operator.arguments(
        x=x, experts=experts, routing=routing, token_mask=None, expert_map=None, shared=None, results_at=results_at,
        memory=None, spec=spec, multiprocessors=multiprocessors,
    )  # fmt: skip
    return BegunExperts(routing, operator.begin(arguments, launches_behind_hidden(results_at)))
