"""Adapters of experts in a modular kernel, under vLLM's names. Equations: docs/user/lora.md."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.specs.matmul import MatmulSpec
from moe_core.specs.operands import LoRAFactors, MatmulOperands
from moe_torch import ops
from moe_torch.modular.calls import ExpertsCall
from moe_torch.modular.stages import as_ids, local_ids

#: Fields of vLLM's kernels alone, and the values that ask for nothing.
_REFUSED = {"fully_sharded": False, "use_tuned_config": False, "aux_stream": None, "events": None}
_TOKENS, _LOW, _SLOTS = (
    MatmulSpec("out_in", "token", "row"),
    MatmulSpec("out_in", "slot", "row"),
    MatmulSpec("out_in", "row", "slot"),
)


@dataclasses.dataclass(eq=False)
class MoELoRAContext:
    """Adapters in S slots, with the fields of vLLM 0.33. Scales are in the factors B. Slots may change in place.

    Args:
        w13_lora_a_stacked: `[S, E or 1, R, K]`, one for gate and up together, or one for each.
        w13_lora_b_stacked: `[S, E or 1, N, R]` in the order of w1, or one for each `[S, E or 1, F, R]`.
        w2_lora_a_stacked: one `[S, E or 1, R, F]`.
        w2_lora_b_stacked: one `[S, E or 1, K, R]`.
        adapter_enabled: int32 `[S + 1]`, 0: the slot is empty. The last one is not read.
        max_loras: S.
        top_k: of the layer.
        w13_num_slices: 1 or 2, the number of tensors in w13_lora_a_stacked.
        fully_sharded, use_tuned_config, aux_stream, events: must ask for nothing.
        tp_rank, tp_size: of a layer with a split F: factors are this rank's, and the caller sums over ranks.
        local_num_experts: E.
        punica_wrapper: vLLM's, for the slots of tokens. None with local_token_lora_mapping.
        enable_moe_shared_loras: an axis E may be 1.
        local_token_lora_mapping: int32 `[M]`, each token's slot, -1 = none.
        original_hidden_states: of a running call, for experts with their own `apply`.
    """

    w13_lora_a_stacked: tuple[torch.Tensor, ...]
    w13_lora_b_stacked: tuple[torch.Tensor, ...]
    w2_lora_a_stacked: tuple[torch.Tensor, ...]
    w2_lora_b_stacked: tuple[torch.Tensor, ...]
    adapter_enabled: torch.Tensor
    max_loras: int
    top_k: int
    w13_num_slices: int
    fully_sharded: bool
    tp_rank: int
    tp_size: int
    local_num_experts: int
    punica_wrapper: Any = None
    use_tuned_config: bool = False
    enable_moe_shared_loras: bool = False
    aux_stream: Any = None
    events: Any = None
    local_token_lora_mapping: torch.Tensor | None = None
    original_hidden_states: torch.Tensor | None = None


def require_context(ctx: Any) -> None:
    """Raise InvalidInput or Unsupported for a context, ours or vLLM's, that experts here cannot read."""
    for name, nothing in _REFUSED.items():
        if getattr(ctx, name) != nothing:
            raise Unsupported(
                f"lora_context.{name} must be {nothing}, as adapters run inside this library's products, got "
                f"{getattr(ctx, name)!r}; leave it out"
            )
    slots, experts, slices = ctx.max_loras, ctx.local_num_experts, ctx.w13_num_slices
    sides = {"w13_lora_a_stacked": slices, "w13_lora_b_stacked": slices, "w2_lora_a_stacked": 1, "w2_lora_b_stacked": 1}
    for name, count in sides.items():
        arrays = getattr(ctx, name)
        axis = (1, experts) if ctx.enable_moe_shared_loras else (experts,)
        shapes = [list(one.shape) for one in arrays]
        if len(arrays) != count or any(len(one) != 4 or one[0] != slots or one[1] not in axis for one in shapes):
            raise InvalidInput(
                f"lora_context.{name} must be {count} of shape [{slots}, {experts}, ..] (max_loras, local_num_experts)"
                f", got {shapes}; pass the stacked factors of this layer"
            )


def tokens_of(ctx: Any, count: int) -> torch.Tensor | None:
    """int32 `[count]`, the slot of each token's adapter. None: no token has one."""
    ids = ctx.local_token_lora_mapping
    if ids is None:
        if ctx.punica_wrapper is None:
            raise InvalidInput(
                "lora_context.local_token_lora_mapping must have each token's slot where there is no punica_wrapper, "
                "got None; pass int32 ids"
            )
        meta = ctx.punica_wrapper.token_mapping_meta
        if bool(meta.no_lora_flag_cpu):  # vLLM leaves the last mapping in place
            return None
        ids = meta.token_lora_mapping[:count]
    if ids.shape != (count,) or ids.dtype != torch.int32:
        raise InvalidInput(
            f"lora_context.local_token_lora_mapping must be int32 [{count}], one for each row of hidden_states, got "
            f"{ids.dtype} {list(ids.shape)}; pass one id per token"
        )
    return ids


def ids_to_move(ctx: Any, a1: torch.Tensor) -> torch.Tensor | None:
    """int32 `[M]`, what `prepare` moves with the rows of a1. None without a context."""
    if ctx is None:
        return None
    ids = tokens_of(ctx, len(a1))
    return torch.full((len(a1),), -1, dtype=torch.int32, device=a1.device) if ids is None else ids


def _columns(slices: int, width: int, gate_layout: str | None) -> list[slice]:
    """The columns of w1's output that each slice adds to."""
    if slices == 1:
        return [slice(None)]
    if gate_layout == "interleaved":
        return [slice(0, None, 2), slice(1, None, 2)]
    return [slice(0, width // 2), slice(width // 2, None)]


def _joined(arrays: tuple[Any, Any], gate_layout: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """One A and B of gate's and up's: ranks behind one another, B with zeros elsewhere."""
    a, b = torch.cat(arrays[0], dim=2), arrays[1]
    slots, experts, half, rank = b[0].shape
    whole = b[0].new_zeros(slots, experts, 2 * half, 2 * rank)
    for number, columns in enumerate(_columns(2, 2 * half, gate_layout)):
        whole[:, :, columns, number * rank : (number + 1) * rank] = b[number]
    return a, whole


def factors_of(ctx: Any, gate_layout: str | None) -> LoRAFactors:
    """The op's factors: views of the stacked ones, copies where gate and up are apart or ranks no multiple of 16."""
    w13: tuple[Any, Any] = ctx.w13_lora_a_stacked, ctx.w13_lora_b_stacked
    first = _joined(w13, gate_layout) if ctx.w13_num_slices == 2 else (w13[0][0], w13[1][0])
    arrays = {"1": first, "2": (ctx.w2_lora_a_stacked[0], ctx.w2_lora_b_stacked[0])}
    made, enabled = {}, ctx.adapter_enabled[: ctx.max_loras]
    most = max(a.shape[2] for a, _ in arrays.values())
    for number, (a, b) in arrays.items():
        more = -a.shape[2] % 16
        if more:
            a, b = torch.nn.functional.pad(a, (0, 0, 0, more)), torch.nn.functional.pad(b, (0, more))
        made |= {f"a{number}": a.transpose(2, 3), f"b{number}": b.transpose(2, 3)}
    ranks = torch.where(enabled != 0, most, 0).to(torch.int32)[:, None].repeat(1, ctx.local_num_experts)
    return LoRAFactors(**made, scale=torch.ones_like(ranks, dtype=torch.float32), ranks=ranks)


class LoRAExpertsMixin:
    """Experts with adapters: `set_lora_context`, then calls of the kernel.

    One operator adds adapters inside both products. `apply_w13_lora` and `apply_w2_lora` add them between the products,
    for experts with their own `apply`.
    """

    _lora_context: Any = None

    @staticmethod
    def supports_lora() -> bool:
        return True

    def set_lora_context(self, ctx: Any) -> None:
        """ctx: MoELoRAContext, ours or vLLM's. None: no adapters."""
        if ctx is not None:
            require_context(ctx)
            if getattr(self, "activations", None) is not None:
                raise Unsupported(
                    "lora_context must be None for experts that quantise activations, as adapters have no such product"
                    ", got one; pass None"
                )
        self._lora_context = ctx

    def context_of(self, call: ExpertsCall) -> Any:
        """The context of these weights, or None."""
        ctx = self._lora_context
        if ctx is not None and call.w1.shape[0] != ctx.local_num_experts:
            raise InvalidInput(
                f"lora_context.local_num_experts must be the {call.w1.shape[0]} experts of w1, got "
                f"{ctx.local_num_experts}; set the context of this layer"
            )
        return ctx

    def adapters_of(self, call: ExpertsCall, rows: int, gate_layout: str | None) -> dict[str, Any]:
        """Arguments of the op for the adapters of these rows."""
        ctx = self.context_of(call)
        ids = None if ctx is None else tokens_of(ctx, rows)
        if ids is None:
            return {}
        return {"lora": factors_of(ctx, gate_layout), "adapter_ids": ids.contiguous()}

    def apply_w13_lora(
        self,
        lora_context: Any,
        *,
        y: torch.Tensor,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None,
        w1: torch.Tensor,
        w2: torch.Tensor,
        num_tokens: int,
        top_k_num: int,
        add_inputs: bool = True,
        swap_w13_slices: bool = False,
        gate_layout: str | None = None,
    ) -> tuple[Any, None, None, torch.Tensor | None]:
        """Add the adapters' products of x `[M, K]` to y `[M, topk, N]`, slots of w1's output.

        add_inputs: False: write over y. swap_w13_slices: up comes first. gate_layout: of y, `interleaved` or `halves`.
        None: of the activation of moe_config.
        Returns (the layout for `apply_w2_lora`, None, None, the tokens' slots). Others are published and not read.
        """
        ctx, ids = lora_context, tokens_of(lora_context, num_tokens)
        y = y.view(num_tokens * top_k_num, y.shape[-1])
        if not add_inputs:
            y.zero_()
        if ids is None:
            return None, None, None, None
        layout = _pairs(ctx, as_ids(topk_ids), ids, expert_map)
        columns = _columns(ctx.w13_num_slices, y.shape[1], gate_layout or self._gate_layout(ctx))
        sides = zip(ctx.w13_lora_a_stacked, ctx.w13_lora_b_stacked, strict=True)
        for of, (a, b) in zip(columns[::-1] if swap_w13_slices else columns, sides, strict=True):
            y[:, of] += _product(ctx, x, (a, b), layout, _TOKENS, None)
        return layout, None, None, ids

    def _gate_layout(self, ctx: Any) -> str | None:
        """Of w1's columns, where a context needs it."""
        experts: Any = self
        activation = getattr(experts.moe_config, "activation", None)
        if activation is None and ctx.w13_num_slices == 2:
            raise InvalidInput(
                "gate_layout must be given for factors of gate and up apart where moe_config has no activation, got "
                "None; pass 'halves' or 'interleaved'"
            )
        return "halves" if activation is None else experts.activation_of(activation).gate_layout

    def apply_w2_lora(
        self,
        lora_context: Any,
        *,
        y: torch.Tensor,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        sorted_token_ids_lora: Any,
        expert_ids_lora: None,
        num_tokens_post_padded_lora: None,
        token_lora_mapping: torch.Tensor | None,
        num_tokens: int,
        w1: torch.Tensor,
        w2: torch.Tensor,
        top_k_num: int,
        add_inputs: bool = True,
    ) -> None:
        """Add the adapters' weighted products of x `[M * topk, F]` to y `[M, topk, K]`, slots of w2's output.

        sorted_token_ids_lora: the layout of `apply_w13_lora`. topk_weights: fp32 `[M, topk]`.
        """
        y = y.view(num_tokens * top_k_num, y.shape[-1])
        if not add_inputs:
            y.zero_()
        if sorted_token_ids_lora is not None:
            sides, weight = (lora_context.w2_lora_a_stacked[0], lora_context.w2_lora_b_stacked[0]), topk_weights
            y += _product(lora_context, x, sides, sorted_token_ids_lora, _LOW, weight.reshape(-1))


def _pairs(ctx: Any, topk_ids: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor | None) -> ops.RaggedLayout:
    """The layout of slots by adapter and expert, without the slots of other tokens."""
    local, experts = local_ids(topk_ids, expert_map), ctx.local_num_experts
    named = (ids >= 0) & (ids < ctx.max_loras)
    slot = torch.where(named, ids, 0)
    named &= ctx.adapter_enabled[: ctx.max_loras][slot.long()] != 0
    here = named[:, None] & (local >= 0) & (local < experts)
    return ops.make_layout(torch.where(here, slot[:, None] * experts + local, -1).int(), ctx.max_loras * experts)


def _product(
    ctx: Any, x: torch.Tensor, sides: tuple[Any, Any], layout: ops.RaggedLayout, spec: MatmulSpec, weight: Any
) -> torch.Tensor:
    a, b = (one.expand(-1, ctx.local_num_experts, -1, -1).flatten(0, 1).to(x.dtype) for one in sides)
    low = ops.matmul_ogs(MatmulOperands(x, a), layout, spec)
    return ops.matmul_ogs(MatmulOperands(low, b, row_weight=weight), layout, _SLOTS)
