"""Our experts' base class."""

from __future__ import annotations

import abc
import copy
import functools
from typing import Any, ClassVar

from moe_core.errors import InvalidInput, Unsupported
from moe_core.modular.types import FusedMoEActivationFormat, ProblemSize
from moe_torch.modular.calls import NEWEST, ExpertsCall
from moe_torch.modular.experts import FusedMoEPermuteExpertsUnpermute, WorkspaceShapes
from moe_torch.modular.generations.tokens import ExpertTokensMetadata
from moe_torch.modular.quant_config import FLAGS, config_of_flags
from moe_torch.modular.stages import as_ids, as_weights
from moe_torch.modular.stored import as_stored, is_plain
from moe_torch.modular.weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceNoOP

_NOOP = TopKWeightAndReduceNoOP()


class StandardExperts(FusedMoEPermuteExpertsUnpermute):
    """This library's experts, Standard by default, weighted and reduced inside. `run` takes one record."""

    def __init__(self, *configs: Any, **options: Any) -> None:
        """options: as in the base, or in place of quant_config the flags of `FusedMoEQuantConfig.make`."""
        flags = {name: options.pop(name) for name in FLAGS if name in options}
        if flags:
            if configs or options.get("quant_config") is not None:
                raise InvalidInput(
                    f"{' and '.join(flags)} must be left out beside a quant_config, which has them, got both; keep one"
                )
            options["quant_config"] = config_of_flags(**self.scheme_of_flags, **flags)
        super().__init__(*configs, **options)

    #: Flags that the class's name implies.
    scheme_of_flags: ClassVar[dict[str, bool]] = {}

    @property
    def expects_unquantized_inputs(self) -> bool:
        return self.quant_config.quantizes_activations

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return _NOOP

    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ) -> WorkspaceShapes:
        return self.shapes(ProblemSize(local_num_experts, M, N, K, topk), self.adjust_N_for_activation(N, activation))

    @abc.abstractmethod
    def shapes(self, size: ProblemSize, F: int) -> WorkspaceShapes:
        """`workspace_shapes` with F columns after the activation."""

    def apply(self, *arguments: Any, **named: Any) -> Any:
        call = ExpertsCall(*arguments, **named)
        ids = as_ids(call.topk_ids)
        weights = as_weights(call.topk_weights, ids)
        if ids is not call.topk_ids or weights is not call.topk_weights:
            call = call._replace(topk_ids=ids, topk_weights=weights)
        if len(arguments) + len(named) > NEWEST or call.expert_tokens_meta is not None:
            self, call = self._of_newest(call)
        experts, w1, w2 = self.as_stored(call.w1, call.w2)
        return experts.run(call if experts is self else call._replace(w1=w1, w2=w2))

    def _of_newest(self, call: ExpertsCall) -> tuple[StandardExperts, ExpertsCall]:
        """The call of an older kernel, with scales and counts where the newest has them."""
        meta, arrays = call.expert_tokens_meta, dict(zip(call._fields[NEWEST:], call[NEWEST:-2], strict=False))
        if (
            getattr(meta, "rank_expert_offset", None) is not None
            or getattr(meta, "psum_recv_per_rank", None) is not None
        ):
            raise Unsupported(
                "expert_tokens_meta must have no rank_expert_offset and psum_recv_per_rank, which these experts do not "
                "read, got one; let prepare return local ids"
            )
        if call.extra_expert_args is not None:
            raise InvalidInput("extra_expert_args must be None, as these experts take none, got some; leave them out")
        if meta is None and call.expert_num_tokens is not None:
            call = call._replace(expert_tokens_meta=ExpertTokensMetadata(call.expert_num_tokens))
        experts, config = self, self.quant_config
        if any(arrays[name] is not None and arrays[name] is not getattr(config, name) for name in arrays):
            experts = self.with_quant_config(config.with_arrays(a2_scale=call.a2_scale, **arrays))
        return experts, call

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
    def run(self, call: ExpertsCall) -> Any:
        pass
