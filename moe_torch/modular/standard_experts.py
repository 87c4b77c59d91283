"""Our experts' base class."""

from __future__ import annotations

import abc
import copy
import functools
from typing import Any

from moe_core.modular.types import FusedMoEActivationFormat, ProblemSize
from moe_torch.modular.calls import ExpertsCall
from moe_torch.modular.experts import FusedMoEPermuteExpertsUnpermute, WorkspaceShapes
from moe_torch.modular.stages import as_ids, as_weights
from moe_torch.modular.stored import as_stored, is_plain
from moe_torch.modular.weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceNoOP


class StandardExperts(FusedMoEPermuteExpertsUnpermute):
    """The base of this library's experts: `run` takes the arguments of `apply` as one record.

    By default Standard format, weighted and reduced inside.
    """

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ) -> WorkspaceShapes:
        return self.shapes(ProblemSize(local_num_experts, M, N, K, topk), self.adjust_N_for_activation(N, activation))

    @abc.abstractmethod
    def shapes(self, size: ProblemSize, F: int) -> WorkspaceShapes:
        """`workspace_shapes` with F columns after the activation."""

    def apply(self, *arguments: Any, **named: Any) -> None:
        call = ExpertsCall(*arguments, **named)
        ids = as_ids(call.topk_ids)
        weights = as_weights(call.topk_weights, ids)
        if ids is not call.topk_ids or weights is not call.topk_weights:
            call = call._replace(topk_ids=ids, topk_weights=weights)
        experts, w1, w2 = self.as_stored(call.w1, call.w2)
        experts.run(call if experts is self else call._replace(w1=w1, w2=w2))

    # The interface's method is abstract.
    functools.update_wrapper(apply, FusedMoEPermuteExpertsUnpermute.apply, updated=())

    def as_stored(self, w1: Any, w2: Any) -> tuple[StandardExperts, Any, Any]:
        if is_plain(w1, w2, self.quant_config):
            return self, w1, w2
        stored = as_stored(w1, w2, self.quant_config, self.weight_layout)
        if stored.w1 is w1 and stored.config is self.quant_config:
            return self, w1, w2
        experts = self.with_quant_config(stored.config)
        experts = copy.copy(self) if experts is self else experts
        experts.weight_layout = stored.weight_layout
        return experts, stored.w1, stored.w2

    @abc.abstractmethod
    def run(self, call: ExpertsCall) -> None:
        pass
