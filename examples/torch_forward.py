"""A whole MoE forward on torch, then the same layer stage by stage with the public ops, which give the same result."""

from __future__ import annotations

import torch

from moe_torch import (
    Activation,
    ExpertWeights,
    MatmulOperands,
    MatmulSpec,
    MoESpec,
    RouterSpec,
    RouterWeights,
    explain_moe,
    make_layout,
    matmul_ogs,
    moe,
    reduce,
    route,
    router,
)

T, D, F, E, K = 96, 128, 64, 16, 4


def main() -> None:
    """Run both ways and compare."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x = torch.randn(T, D, device=device, dtype=torch.bfloat16)
    router_weight = torch.randn(D, E, device=device, dtype=torch.bfloat16) / D**0.5
    gate_up = torch.randn(E, D, 2 * F, device=device, dtype=torch.bfloat16) / D**0.5
    down = torch.randn(E, F, D, device=device, dtype=torch.bfloat16) / F**0.5
    silu, routing = Activation("silu"), RouterSpec(top_k=K, renormalize=True)

    arguments = (x, ExpertWeights(gate_up, down), RouterWeights(router_weight), MoESpec(silu, routing))
    print(explain_moe(*arguments))
    whole = moe(*arguments)
    print("tokens per expert:", whole.tokens_per_expert.tolist())

    # The same stages one by one, where LoRA or communication would go in between.
    ids, weights = route(router(x, router_weight), routing)
    layout = make_layout(ids, E)
    hidden = matmul_ogs(MatmulOperands(x, gate_up), layout, MatmulSpec("in_out", gather="token", activation=silu))
    operands = MatmulOperands(hidden, down, row_weight=weights.flatten())
    output = reduce(matmul_ogs(operands, layout, MatmulSpec("in_out", scatter="slot")), layout)
    assert torch.equal(output, whole.output)
    print("stage by stage: equal to the last bit")


if __name__ == "__main__":
    main()
