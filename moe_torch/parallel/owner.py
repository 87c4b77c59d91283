"""The experts of a rank, applied to arriving rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from moe_core.parallel.placement import Placement
from moe_core.specs import MoESpec, Tuning
from moe_core.specs.operands import ExpertWeights, LoRAFactors, MoEOutput, TopK
from moe_torch import ops
from moe_torch.bridge.ready import Begun
from moe_torch.operators.pushed import push_request
from moe_torch.operators.requests import moe_request
from moe_torch.operators.routed import hidden
from moe_torch.parallel import peer_ops
from moe_torch.parallel.calls.known import Step, Steps

Multiprocessors = tuple[int | None, int | None]


@dataclasses.dataclass
class Owner:
    """This rank's experts. top_k: of tokens at home. stores_gradients: of rows, by address. lora: adapters.
    steps: see `ExchangeCall`. tensors: of the call, experts' included."""

    experts: ExpertWeights
    spec: MoESpec
    placement: Placement
    top_k: int
    stores_gradients: bool
    lora: LoRAFactors | None = None
    steps: Steps | None = None
    tensors: Sequence[torch.Tensor] = ()
    _expected: tuple[Any, Step, Begun] | None = None
    _done: tuple[Any, list[torch.Tensor]] | None = None

    def expect(self, num_rows: int, group_tokens: int) -> None:
        """Prepare the products of a call that has the numbers of an earlier one."""
        key, steps = ("owner", num_rows, group_tokens), self.steps
        if steps is not None and self.lora is None and (step := steps.get(key)) is not None:
            self._expected = key, step, step.ready.begin(step.pointers(self.tensors))

    def compute(self, *addresses: int) -> None:
        """Launch products that `expect` prepared, of rows, ids, weights and results_at; `__call__` then returns."""
        if self._expected is not None:
            key, step, begun = self._expected
            step.change(begun.pointers, *addresses)
            self._done = key, begun.run()

    def __call__(
        self,
        rows: torch.Tensor,
        routing: TopK,
        group_tokens: int,
        results_at: torch.Tensor | None = None,
        adapter_ids: torch.Tensor | None = None,
        gradients_at: torch.Tensor | None = None,
    ) -> MoEOutput:
        """Compute rows of slots, or of tokens with all their ids. results_at: to store results, not return them.
        gradients_at: to store gradients, None: at results_at."""
        key, steps = ("owner", len(rows), group_tokens), self.steps
        if self._done is not None:
            (done, (output, *counts)), self._done = self._done, None
            assert done == key, "only expected rows are computed ahead"
            return MoEOutput(output, routing.ids, routing.weights, None, *counts)
        if steps is not None and (step := steps.get(key) or steps.find(key)):
            passed = [rows, routing.ids, routing.weights, *([] if results_at is None else [results_at])]
            passed += [] if self.lora is None else [adapter_ids, self.lora.scale, self.lora.ranks]
            output, *counts = step.run(self.tensors, *[one.data_ptr() for one in passed])
            return MoEOutput(output, routing.ids, routing.weights, None, *counts)
        spec = self._spec(routing, group_tokens)
        if results_at is None:
            with hidden():
                result = ops.moe(rows, self.experts, routing, spec, lora=self.lora, adapter_ids=adapter_ids)
        else:
            gradients_at = results_at if self.stores_gradients and gradients_at is None else gradients_at
            result = peer_ops.experts_push(rows, self.experts, routing, spec, results_at, gradients_at=gradients_at)
        if steps is not None:
            adapters = {} if self.lora is None else {"lora": self.lora, "adapter_ids": adapter_ids}
            request = moe_request(rows, self.experts, routing, spec, **adapters)
            names: tuple[str, ...] = "x", "routing.ids", "routing.weights"
            names += ("adapter_ids", "lora.scale", "lora.ranks") if adapters else ()
            if results_at is not None:
                request = push_request(rows, self.experts, routing, spec, results_at=results_at)
                names += ("results_at",)
            if (step := Step.of(*request, names, self.tensors)) is not None:
                steps.put(key, step)
        return result

    def begin(
        self,
        rows: torch.Tensor,
        routing: TopK,
        group_tokens: int,
        results_at: torch.Tensor | None,
        multiprocessors: Multiprocessors,
    ) -> peer_ops.BegunExperts:
        """Run product 1 of such a call, without gradients. The result's `finish` runs product 2."""
        spec = self._spec(routing, group_tokens)
        return peer_ops.experts_begin(rows, self.experts, routing, spec, results_at, multiprocessors=multiprocessors)

    def _spec(self, routing: TopK, group_tokens: int) -> MoESpec:
        expected = None if self.spec.tuning is None else self.spec.tuning.expected_tokens
        rows_per_token = self.top_k // routing.ids.shape[1]
        return owner_spec(self.spec, (expected or group_tokens) * rows_per_token, self.placement)


@functools.lru_cache(maxsize=256)
def owner_spec(spec: MoESpec, group_rows: int, placement: Placement) -> MoESpec:
    """Options of an owner's op, with tiles and sums for all ranks' rows."""
    tuning = Tuning() if spec.tuning is None else spec.tuning
    expected: dict[str, Any] = {"expected_tokens": max(1, group_rows), "expected_experts": placement.num_experts}
    tuning = dataclasses.replace(tuning, **expected)
    return dataclasses.replace(spec, router=None, out_dtype=None, shared_activation=None, tuning=tuning)


class Results(NamedTuple):
    """Results of one call at home.

    output `[T, D]`. int32 counts: received `[L]`, rows of experts here; overflow `[1]`, rows of all ranks that did not
    fit; tokens_per_expert `[E]` and invalid_ids `[1]`, of this rank's tokens.
    """

    output: torch.Tensor
    received: torch.Tensor
    overflow: torch.Tensor
    tokens_per_expert: torch.Tensor
    invalid_ids: torch.Tensor
