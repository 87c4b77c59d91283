"""Experts on Triton kernels."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any, TypeVar

import torch

from moe_core.base.checks import require_at_least
from moe_core.base.recent import Recent
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format
from moe_core.modular.schemes import activation_quantization
from moe_core.modular.types import FusedMoEActivationFormat, ProblemSize, number_of_ids
from moe_core.modular.weights import rows_are_alone, tuning_of_whole
from moe_core.specs.matmul import Activation, MatmulSpec
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import TopK, map_arrays
from moe_core.specs.tuning import tunings_of
from moe_torch import ops
from moe_torch.bridge import eager
from moe_torch.bridge.arrays import array_spec, target_of_device
from moe_torch.modular.calls import ExpertsCall
from moe_torch.modular.experts import WorkspaceShapes
from moe_torch.modular.generations.tokens import ExpertTokensMetadata
from moe_torch.modular.into import KnownRun, known_run, write_into
from moe_torch.modular.newest.lora import LoRAExpertsMixin
from moe_torch.modular.stages import Stages, batched_layout
from moe_torch.modular.standard_experts import StandardExperts
from moe_torch.modular.weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceDelegate

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_known: Recent[KnownRun] = Recent()
Self = TypeVar("Self", bound="GroupedExperts")


def view_as(workspace: torch.Tensor, *shape: int) -> torch.Tensor:
    """The start of a workspace as a dense tensor. Raises InvalidInput if it is too small."""
    rows, columns = shape
    if torch.compiler.is_compiling():
        return workspace.reshape(-1)[: rows * columns].view(rows, columns)
    if workspace.shape == shape:
        return workspace
    if workspace.numel() < rows * columns:
        raise InvalidInput(
            f"the workspace must have {rows * columns} elements, got {list(workspace.shape)}; allocate what "
            "workspace_shapes says"
        )
    return workspace.view(-1)[: rows * columns].view(rows, columns)


#: The text of a spec is cached by object.
_known_moe_spec = functools.lru_cache(maxsize=1024)(MoESpec)


class GroupedExperts(LoRAExpertsMixin, StandardExperts):
    #: Gather and scatter of both products.
    places = (("token", "row"), ("row", "slot"))

    def supports_chunking(self) -> bool:
        return True

    def require_input(self, call: ExpertsCall) -> None:
        hidden_states, w1, a2_scale = call.hidden_states, call.w1, call.a2_scale
        if call.a1q_scale is not None:
            raise InvalidInput(
                "a1q_scale must be None, as these experts quantise activations themselves, got a tensor; pass "
                "hidden states in bf16, fp16 or fp32"
            )
        if a2_scale is not None and a2_scale is not self.quant_config.a2_scale:
            raise InvalidInput("a2_scale must be that of quant_config, got another tensor; put it there")
        if hidden_states.dtype not in _DTYPES:
            raise InvalidInput(f"hidden_states must be bf16, fp16 or fp32, got {hidden_states.dtype}; cast them")
        if self.quant_config.scheme is None and hidden_states.dtype != w1.dtype:
            raise InvalidInput(
                f"hidden_states must have the dtype of w1, {w1.dtype}, got {hidden_states.dtype}; cast one of them, or "
                "pass a quant_config that says how w1 is quantised"
            )

    def require_experts(self, call: ExpertsCall) -> None:
        local, expert_map, global_num_experts = call.w1.shape[0], call.expert_map, call.global_num_experts
        if expert_map is not None:
            # Other kernels pass the local number for -1.
            number_of_ids(-1 if global_num_experts == local else global_num_experts, local, expert_map)
        elif global_num_experts not in (-1, local):
            raise InvalidInput(
                f"global_num_experts must be {local}, the experts of w1, or -1 without an expert_map, got "
                f"{global_num_experts}; pass expert_map"
            )

    def run_composed(self, call: ExpertsCall, slots: torch.Tensor | None = None) -> None:
        """Run one composed plan from ids to output `[M, K]`. workspace2 holds `[M * topk, F]` after the activation.
        slots, or new memory, holds `[M * topk, K]` before the sum."""
        config, hidden, on_input = self.quant_config, call.workspace2, call.apply_router_weight_on_input
        places = (call.output, hidden) if slots is None else (call.output, hidden, slots)
        tensors = (call.hidden_states, call.w1, call.w2, call.topk_weights, call.topk_ids, call.expert_map)
        tensors += config.arrays
        choices = (call.activation, call.global_num_experts, on_input, self.weight_layout, self.tuning)
        key = None
        # It may return other tensors at any time.
        own_weights = "weights" in self.__dict__ or type(self).weights is not GroupedExperts.weights
        if not own_weights and self._lora_context is None and not torch.compiler.is_compiling():
            key = eager.plain_key((*places, *tensors, (type(self), *choices, *config.choices)))
        known = None if key is None else (_known.get(key) or _known.find(key))
        if known is not None and known.run(tensors, places):
            return
        self.require_experts(call)
        _, M, N, K, topk = self.size_of(call)
        F = self.adjust_N_for_activation(N, call.activation)
        memory = {"output": call.output, "hidden": view_as(hidden, M * topk, F)}
        if slots is not None:
            memory["slots"] = view_as(slots, M * topk, K)
        routing, weights = TopK(call.topk_ids, weights_left(call)), self.weights(call.w1, call.w2)
        make = MoESpec if torch.compiler.is_compiling() else _known_moe_spec
        activation = self.activation_of(call.activation)
        spec = make(activation, weight_layout=self.weight_layout, tuning=self.tuning, activations=self.activations)
        adapters = self.adapters_of(call, M, activation.gate_layout)
        operator, arguments = ops.moe_request(
            call.hidden_states, weights, routing, spec, expert_map=call.expert_map, **adapters
        )
        write_into(operator, memory, arguments)
        ready = None if key is None else known_run(operator, memory, arguments, tensors)
        if ready is not None:
            _known.put(key, ready)

    def size_of(self, call: ExpertsCall) -> ProblemSize:
        return self.moe_problem_size(call.hidden_states, call.w1, call.w2, call.topk_ids)

    @property
    def activations(self) -> Format | None:
        return activation_quantization(self.quant_config)

    def products(self, activation: str | Activation) -> tuple[MatmulSpec, MatmulSpec]:
        fused = self.activation_of(activation) if "activation" not in self.calls else None
        tunings = tunings_of(self.tuning)
        first = MatmulSpec(self.weight_layout, *self.places[0], fused, tuning=tunings[0])
        return first, MatmulSpec(self.weight_layout, *self.places[1], tuning=tunings[1])

    def stages(self, weights: ops.ExpertWeights) -> Stages:
        return Stages(weights, self.weight_layout, tunings_of(self.tuning), self.activations)

    def chunked_as_whole(
        self: Self, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, size: ProblemSize, activation: str | Activation
    ) -> Self:
        specs = map_arrays(self.weights(w1, w2), lambda array: array_spec("weights", array))
        rows, target = array_spec("hidden_states", x), target_of_device(x.device)
        tuning = tuning_of_whole(rows, specs, size, self.products(activation), target, self.activations)
        if tuning is None:
            return self
        changed = copy.copy(self)
        changed.tuning = tuning
        return changed

    def with_common_scales(self, x, weights, topk_ids, options, chunk_size):
        """One scale of all rows is found in a first pass over the chunks, which computes the first product."""
        config, format = self.quant_config, self.activations
        if rows_are_alone(config):
            return self
        assert format is not None
        activation, expert_map, experts = options[0], options[2], weights[0].shape[0]

        def scale_of(rows: torch.Tensor, used_by: torch.Tensor) -> torch.Tensor:
            return ops.quantize_rows(rows, format, used_by=used_by).scales.reshape(1)

        a1_scale, a2_scale = config.a1_scale, config.a2_scale
        if a1_scale is None:
            a1_scale = scale_of(x, ops.make_layout(topk_ids, experts, expert_map=expert_map).row_of_slot)
        scaled = self.with_quant_config(dataclasses.replace(config, a1_scale=a1_scale))
        if a2_scale is None:
            stages = scaled.stages(scaled.weights(*weights))
            for rows, ids in zip(x.split(chunk_size), topk_ids.split(chunk_size), strict=True):
                layout = ops.make_layout(ids, experts, expert_map=expert_map)
                scale = scale_of(*scaled.hidden_rows(stages, rows, layout, activation))
                a2_scale = scale if a2_scale is None else torch.maximum(a2_scale, scale)
        return scaled.with_quant_config(dataclasses.replace(scaled.quant_config, a2_scale=a2_scale))

    def hidden_rows(
        self, stages: Stages, x: torch.Tensor, layout: ops.RaggedLayout, activation: str | Activation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(input of the second product, the index that marks its used rows)."""
        rows = stages.product(1, {}, x, layout, ("token", "row"), self.activation_of(activation))
        return rows, layout.slot_of_row


def weights_left(call: ExpertsCall) -> torch.Tensor:
    """Ones if the input is weighted already."""
    return torch.ones_like(call.topk_weights) if call.apply_router_weight_on_input else call.topk_weights


class TritonExperts(GroupedExperts):
    """Experts with w1 `[E, N, K]` and w2 `[E, K, F]` (`out_in`): one composed plan from ids to reduced tokens. The
    input of the activation is never rounded or stored."""

    default_weight_layout = "out_in"

    def shapes(self, size: ProblemSize, F: int) -> WorkspaceShapes:
        slots = size.M * size.topk
        return (slots, size.K), (slots, F), (size.M, size.K)

    def run(self, call: ExpertsCall) -> None:
        self.require_input(call)
        self.run_composed(call, slots=call.workspace13)


class BatchedExperts(GroupedExperts):
    """Experts with hidden_states and output `[E, max_num_tokens * num_dispatchers, K]`, w1 `[E, N, K]`, w2 `[E, K, F]`.

    Counts are `expert_tokens_meta.expert_num_tokens` on the device. Rows past them are never read and come out as
    zeros. `finalize` weights and reduces.
    """

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.BatchedExperts

    def __init__(self, max_num_tokens: int, num_dispatchers: int = 1, *arguments: Any, **options: Any) -> None:
        if arguments and not isinstance(max_num_tokens, int):  # the newest order
            configs = (max_num_tokens, num_dispatchers)
            max_num_tokens, num_dispatchers = (*arguments, 1)[:2]
            arguments = (*configs, *arguments[2:])
        super().__init__(*arguments, max_num_tokens=max_num_tokens, num_dispatchers=num_dispatchers, **options)
        require_at_least("max_num_tokens", max_num_tokens, 1)
        require_at_least("num_dispatchers", num_dispatchers, 1)
        self.max_num_tokens: int
        self.num_dispatchers: int

    def supports_chunking(self) -> bool:
        return False

    def supports_expert_map(self) -> bool:
        return False

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

    def workspace_dtype(self, activation_dtype: torch.dtype) -> torch.dtype:
        """fp32 for fp16: rows beyond 65,504 come back into range with their router weights, in `finalize`."""
        dtype = super().workspace_dtype(activation_dtype)
        return torch.float32 if dtype == torch.float16 else dtype

    def rows_in(self, workspace: torch.Tensor, call: ExpertsCall, columns: int) -> torch.Tensor:
        """Rows between the products, in their dtype."""
        if call.hidden_states.dtype == torch.float16 != workspace.dtype:
            workspace = workspace.view(torch.float16)
        E, rows, _ = call.hidden_states.shape
        return view_as(workspace, E * rows, columns)

    def shapes(self, size: ProblemSize, F: int) -> WorkspaceShapes:
        rows = self.max_num_tokens * self.num_dispatchers
        return (0, 0), (size.E, rows, F), (size.E, rows, size.K)

    def require_blocks(self, call: ExpertsCall) -> tuple[ProblemSize, ExpertTokensMetadata]:
        size, rows = self.size_of(call), self.max_num_tokens * self.num_dispatchers
        if call.hidden_states.dim() != 3 or rows != size.M:
            raise InvalidInput(
                f"hidden_states must be [{size.E}, {rows}, {size.K}], got {list(call.hidden_states.shape)}; prepare "
                "them with the same max_num_tokens"
            )
        if call.expert_map is not None:
            raise InvalidInput("expert_map must be None in the batched format, got a tensor; prepare applies it")
        if call.expert_tokens_meta is None:
            raise InvalidInput("expert_tokens_meta must say how many rows of each expert are used, got None; pass it")
        return size, call.expert_tokens_meta


class BatchedTritonExperts(BatchedExperts):
    """`BatchedExperts` on this library's kernels, with the activation fused into the first product."""

    default_weight_layout = "out_in"

    def run(self, call: ExpertsCall) -> None:
        self.require_input(call)
        (E, rows, N, K, _), meta = self.require_blocks(call)
        weights, layout = self.weights(call.w1, call.w2), batched_layout(E, rows, meta.expert_num_tokens)
        stages, x = self.stages(weights), call.hidden_states.reshape(E * rows, K)
        if adapters := self.adapters_of(call, E * rows, self.activation_of(call.activation).gate_layout):
            self._run_adapted(call, layout, weights, adapters)
            return
        memory = {"y": self.rows_in(call.workspace2, call, self.adjust_N_for_activation(N, call.activation))}
        hidden = stages.product(1, memory, x, layout, ("row", "row"), self.activation_of(call.activation))
        places = {"y": call.output.view(E * rows, K)}
        product = stages.product(2, places, hidden, layout, ("row", "row"))
        if product is not places["y"]:
            call.output.copy_(product.view_as(call.output))

    def _run_adapted(
        self, call: ExpertsCall, layout: ops.RaggedLayout, weights: ops.ExpertWeights, adapters: dict[str, Any]
    ) -> None:
        """Every row as a token with one expert."""
        if call.output.dtype != call.hidden_states.dtype:
            raise Unsupported(
                "hidden_states must not be fp16 with adapters in the batched format, where rows leave its range, got "
                "fp16; pass bf16 or fp32"
            )
        E, rows, _ = call.hidden_states.shape
        experts = torch.arange(E, dtype=torch.int32, device=call.hidden_states.device).repeat_interleave(rows)
        ids = torch.where(layout.slot_of_row >= 0, experts, -1)[:, None]
        spec = _known_moe_spec(
            self.activation_of(call.activation), weight_layout=self.weight_layout, tuning=self.tuning
        )
        routing = TopK(ids, torch.ones_like(ids, dtype=torch.float32))
        x = call.hidden_states.reshape(E * rows, -1)
        operator, arguments = ops.moe_request(x, weights, routing, spec, **adapters)
        write_into(operator, {"output": call.output.view(E * rows, -1)}, arguments)
