"""The operators of a forward that stores its last rows at peers' addresses: `moe` with TopK and `results_at`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from moe_core.ops.moe.forward import launches_behind_hidden
from moe_core.ops.moe.names import result_names
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, MoEOutput, TopK
from moe_torch.bridge.operator import Operator, Outputs, call
from moe_torch.bridge.ready import Begun
from moe_torch.bridge.signature import Signature
from moe_torch.operators import table
from moe_torch.operators.kinds import TrainingOperator
from moe_torch.operators.requests import Request, reads_formats
from moe_torch.operators.shapes import wide_gradients

_BUNDLES, _RESULTS = table.moe_bundles(TopK), len(result_names(TopK))


def _without_rows(shapes: Any, call: Any) -> Outputs:
    (rows, dtype), *others = shapes(call)
    return [((0, *rows[1:]), dtype), *others]


def _pushed(name: str, *matrices: str) -> tuple[Operator, Operator]:
    """The forward, and the one that saves tensors for its backward."""
    tensors = (*table.moe_tensors(TopK, matrices), "results_at", "gradients_at?", "memory!")
    unplanned = ("gradients_at", "memory")

    def declared(name: str, returns: int | None) -> Signature:
        return Signature(name, tensors, ("spec",), _BUNDLES, matrices=matrices, returns=returns, unplanned=unplanned)

    forward, training = (functools.partial(_without_rows, one) for one in (table.moe_shapes, table.training_shapes))
    save = functools.partial(table.plan_forward, save=True)
    return (
        Operator(declared(name, _RESULTS), table.plan_forward, forward),
        TrainingOperator(declared(f"{name}_training", None), save, training),
    )


def _in_two_parts(name: str, *matrices: str) -> Operator:
    tensors = (*table.moe_tensors(TopK, matrices), "results_at?", "memory!")
    options = ("spec", "multiprocessors")
    signature = Signature(name, tensors, options, _BUNDLES, matrices=matrices, returns=_RESULTS, unplanned=("memory",))

    def shapes(call: Any) -> Outputs:
        return table.moe_shapes(call) if call.results_at is None else _without_rows(table.moe_shapes, call)

    return Operator(signature, table.plan_forward, shapes)


def _gradients(call: Any) -> Outputs:
    """The shapes of gradients, without rows of d_x."""
    call.x = call.x[:0]
    return wide_gradients(call)


#: The backward of `moe` that stores the rows of d_x at addresses.
_backward = functools.partial(table.backward, TopK, more=("results_at", "memory!"), shapes=_gradients)
EXPERTS_PUSH, EXPERTS_PUSH_TRAINING = _pushed("experts_push")
EXPERTS_PUSH_QUANTIZED, EXPERTS_PUSH_QUANTIZED_TRAINING = _pushed("experts_push_quantized", *table.EXPERT_MATRICES)
EXPERTS_IN_PARTS = _in_two_parts("experts_in_parts")
EXPERTS_IN_PARTS_QUANTIZED = _in_two_parts("experts_in_parts_quantized", *table.EXPERT_MATRICES)
BACKWARDS = _backward("experts_push_backward"), _backward("experts_push_backward_into")
QUANTIZED_BACKWARDS = (
    _backward("experts_push_quantized_backward", *table.EXPERT_MATRICES),
    _backward("experts_push_quantized_backward_into", *table.EXPERT_MATRICES),
)


def push_request(
    x: Any, experts: Any, routing: Any, spec: Any, *, results_at: Any, gradients_at: Any = None, memory: Any = None
) -> Request:
    operator = EXPERTS_PUSH_QUANTIZED if reads_formats(experts, routing, spec) else EXPERTS_PUSH
    arguments = operator.arguments(
        x=x, experts=experts, routing=routing, token_mask=None, expert_map=None, shared=None, results_at=results_at,
        gradients_at=gradients_at, memory=memory, spec=spec,
    )  # fmt: skip
    return Request(operator, arguments)


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
    """Run `moe` and store the result row of every slot at its destination while other rows are computed.

    The result has the bits of `moe` with K = 1 followed by `combine_push`, without an array of rows here. Gradients
    are as `moe` computes them for each token's sum.

    Args:
        x, experts, routing, spec: as for `moe_torch.moe`. A row has a multiple of 16 bytes.
        results_at: int64 `[T * K]`, the destination address of each slot's row: a multiple of 16, or 0 for none. Slots
            without an expert are not stored.
        gradients_at: int64 `[T * K]`, where the backward stores each slot's row of the gradient of x,
            which then has no memory here. None: the gradient is an array, the sum of a token's rows.
        memory: the symmetric tensor of this rank, see `moe_torch.parallel.peer_ops`.

    Returns:
        a MoEOutput without rows of output: its shape is `[0, D]`, or `[T, D]` without memory if a gradient is required.

    Raises:
        InvalidInput: as `moe`, and for a spec with out_dtype.
    """
    arrays: Any = {"results_at": results_at, "gradients_at": gradients_at, "memory": memory}
    output, tokens_per_expert, invalid_ids = call(*push_request(x, experts, routing, spec, **arrays))
    return MoEOutput(output, routing.ids, routing.weights, None, tokens_per_expert, invalid_ids)


class BegunExperts(NamedTuple):
    """Experts with product 1 under way. Keep it until `finish` has run on the device."""

    routing: TopK
    begun: Begun
    behind: int

    def finish(self) -> MoEOutput:
        """Run the rest on the current stream, which waits for product 1."""
        output, tokens_per_expert, invalid_ids = self.begun.run(slice(-self.behind, None))
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
    """Run the layout and product 1 of `experts_push`, without gradients.

    Args:
        x, experts, routing, spec: as for `experts_push`, with its errors.
        results_at: as for `experts_push`. None: rows are summed as in `moe`.
        multiprocessors: the most that product 1 and product 2 fill, None: all. They change no bit.
    """
    operator = EXPERTS_IN_PARTS_QUANTIZED if reads_formats(experts, routing, spec) else EXPERTS_IN_PARTS
    arguments = operator.arguments(
        x=x, experts=experts, routing=routing, token_mask=None, expert_map=None, shared=None, results_at=results_at,
        memory=None, spec=spec, multiprocessors=multiprocessors,
    )  # fmt: skip
    behind = launches_behind_hidden(results_at)
    return BegunExperts(routing, operator.begin(arguments, behind), behind)
