"""A problem of experts with adapters in stacked slots, as vLLM holds them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from moe_torch import modular

M, E, K, F, TOPK, S, R = 9, 4, 32, 24, 2, 3, 16
_STACKED = ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked")


@dataclasses.dataclass
class Case:
    """w1 `[E, 2F, K]`, w2 `[E, K, F]`. Slot 1 of 3 is empty, and expert 3 has no rows."""

    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    context: modular.MoELoRAContext
    activation: str

    @classmethod
    def drawn(cls, slices: int, activation: str) -> Case:
        torch.manual_seed(slices)

        def factors(*shapes: tuple[int, ...]) -> Any:
            return tuple(torch.randn(S, E, *shape) / 6 for shape in shapes)

        ids = torch.randint(-1, E - 1, (M, TOPK), dtype=torch.int32)
        mapping = torch.tensor([0, -1, 2, 1, 0, 2, S, -1, 2], dtype=torch.int32)
        stacked = [factors(*((R, K),) * slices), factors(*((2 * F // slices, R),) * slices)]
        stacked += [factors((R, F)), factors((K, R))]
        context = modular.MoELoRAContext(
            *stacked, torch.tensor([1, 0, 1, 0], dtype=torch.int32), S, TOPK, slices, False, 0, 1, E,
            local_token_lora_mapping=mapping,
        )  # fmt: skip
        w1, w2 = torch.randn(E, 2 * F, K) / K**0.5, torch.randn(E, K, F) / F**0.5
        return cls(torch.randn(M, K), w1, w2, torch.rand(M, TOPK), ids, context, activation)

    def arguments(self, weight_layout: str = "out_in") -> tuple[torch.Tensor, ...]:
        w1, w2 = self.w1, self.w2
        if weight_layout == "in_out":
            w1, w2 = w1.mT.contiguous(), w2.mT.contiguous()
        return self.x, w1, w2, self.weights, self.ids

    def of_experts(self, own: slice) -> modular.MoELoRAContext:
        parts = {name: tuple(one[:, own] for one in getattr(self.context, name)) for name in _STACKED}
        return dataclasses.replace(self.context, **parts, local_num_experts=len(range(E)[own]))


def kernel_of(name: str) -> Any:
    part: Any = modular.MoEPrepareAndFinalizeNoEP()
    if name == "BatchedTritonExperts":
        part, experts = modular.BatchedPrepareAndFinalize(M, E), modular.BatchedTritonExperts(M)
    else:
        experts = getattr(modular, name)(weight_layout="out_in")
    return modular.FusedMoEModularKernel(part, experts)


def of_float64(case: Case) -> np.ndarray:
    """With materialised weights, row by row."""
    ctx, out = case.context, np.zeros((M, K))
    interleaved = case.activation == "swiglu_oai"
    arrays = {name: [one.double().numpy() for one in getattr(ctx, name)] for name in _STACKED}
    for token, slot in np.ndindex(M, TOPK):
        expert, adapter = int(case.ids[token, slot]), int(ctx.local_token_lora_mapping[token])
        if expert < 0:
            continue
        w1, w2 = case.w1[expert].double().numpy().copy(), case.w2[expert].double().numpy().copy()
        if 0 <= adapter < S and ctx.adapter_enabled[adapter]:
            at = adapter, expert
            changes = [b[at] @ a[at] for a, b in zip(*(arrays[name] for name in _STACKED[:2]), strict=True)]
            if len(changes) == 2 and interleaved:
                changes = [np.stack(changes, axis=1).reshape(2 * F, K)]
            w1 += np.concatenate(changes)
            w2 += arrays[_STACKED[3]][0][at] @ arrays[_STACKED[2]][0][at]
        pre = w1 @ case.x[token].double().numpy()
        gate, up = (pre[::2], pre[1::2]) if interleaved else (pre[:F], pre[F:])
        if interleaved:
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7) + 1
            hidden = up * gate / (1 + np.exp(-1.702 * gate))
        else:
            hidden = up * gate / (1 + np.exp(-gate))
        out[token] += float(case.weights[token, slot]) * (w2 @ hidden)
    return out
