"""LoRA through the injection points of the modular kernel in PyTorch: every expert has adapters on both its products.

    pre = x W1 + s (x A1) B1        hidden = activation(pre)        y = hidden W2 + s (hidden A2) B2

`UnfusedOAITritonExperts` calls `activation` on what W1 gives and `moe_sum` on what W2 gives; a subclass adds to either.
Which expert a row belongs to is the layout's to know: products of adapters run on it as the frozen ones do.
modular_lora_jax.py trains the same adapters on the same numbers, with the same losses but for rounding.
"""

from __future__ import annotations

import numpy as np
import torch

from moe_torch import MatmulOperands, MatmulSpec, matmul_ogs
from moe_torch.modular import FusedMoEModularKernel, MoEPrepareAndFinalizeNoEP, UnfusedOAITritonExperts

TOKENS, D, F, E, TOPK, RANK, SCALE, STEPS, RATE = 96, 64, 48, 8, 2, 4, 2.0, 20, 0.02


def draw() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A frozen problem, its target included, and adapters that change nothing at first; fp32 but for the ids."""
    random = np.random.default_rng(0)

    def rows() -> np.ndarray:
        return random.standard_normal((TOKENS, D)).astype(np.float32)

    def matrices(inputs: int, outputs: int) -> np.ndarray:
        return (random.standard_normal((E, inputs, outputs)) * inputs**-0.5).astype(np.float32)

    frozen = {"x": rows(), "target": rows(), "w1": matrices(D, 2 * F), "w2": matrices(F, D)}
    frozen["ids"] = np.argsort(random.random((TOKENS, E)), axis=1)[:, :TOPK].astype(np.int32)
    frozen["weights"] = random.dirichlet(np.ones(TOPK), TOKENS).astype(np.float32)
    adapters = {"a1": matrices(D, RANK), "b1": np.zeros((E, RANK, 2 * F), np.float32)}
    return frozen, adapters | {"a2": matrices(F, RANK), "b2": np.zeros((E, RANK, D), np.float32)}


class LoRAExperts(UnfusedOAITritonExperts):
    """Experts with adapters a1 `[E, D, r]`, b1 `[E, r, 2F]`, a2 `[E, F, r]`, b2 `[E, r, D]`."""

    def __init__(self, adapters: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.adapters = adapters

    def change(
        self, rows: torch.Tensor, number: int, gather: str, row_weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """s (rows A) B by slot. x A stays in the rows of experts, which is where B takes it from."""
        a, b, layout = self.adapters[f"a{number}"], self.adapters[f"b{number}"], self.context.layout
        low = matmul_ogs(MatmulOperands(rows, a), layout, MatmulSpec("in_out", gather, "row"))
        operands = MatmulOperands(low, b, row_weight=row_weight)
        return SCALE * matmul_ogs(operands, layout, MatmulSpec("in_out", "row", "slot"))

    def activation(self, activation: str, output: torch.Tensor, input: torch.Tensor) -> None:
        super().activation(activation, output, input + self.change(self.context.hidden_states, 1, "token"))

    def moe_sum(self, input: torch.Tensor, output: torch.Tensor) -> None:
        change = self.change(self.context.activated, 2, "slot", self.context.row_weight)
        super().moe_sum(input + change.view_as(input), output)


def train() -> list[float]:
    """The loss of every step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    frozen, adapters = ({name: torch.tensor(array, device=device) for name, array in part.items()} for part in draw())
    before = {name: tensor.clone() for name, tensor in frozen.items()}
    target = frozen["target"]
    arguments = [frozen[name] for name in ("x", "w1", "w2", "weights", "ids")]
    base = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), UnfusedOAITritonExperts())
    kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), LoRAExperts(adapters))
    with torch.no_grad():
        assert torch.equal(kernel(*arguments), base(*arguments)), "with B = 0 the output is the base's, bit by bit"

    trained = [adapter.requires_grad_() for adapter in adapters.values()]
    optimizer, losses = torch.optim.Adam(trained, RATE), []
    for step in range(STEPS):
        loss = (kernel(*arguments) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % 5 == 0 or step == STEPS - 1:
            print(f"step {step:2}: loss {losses[-1]:.6f}", flush=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in frozen.items()), "the base is what it was"
    return losses


def main() -> None:
    losses = train()
    assert losses[-1] < 0.7 * losses[0], "the loss falls"
    print("the frozen weights are bitwise what they were")


if __name__ == "__main__":
    main()
