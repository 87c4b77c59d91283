"""Training by the real accelerate: transformers' Trainer on a small model with our experts, and a plain loop."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_torch import MoE, SharedExpertsSpec

accelerate = pytest.importorskip("accelerate", reason="needs accelerate (pip install 'moebius[recipes]')")

D = 16


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(D, D)
        self.moe = MoE(D, 24, 4, 2, shared_experts=SharedExpertsSpec(8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.moe(self.inner(x), return_aux=True)


def test_plain_loop(tmp_path: Path) -> None:
    """prepare, accumulate, backward, clip and save_state, as accelerate's users write them."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = torch.utils.data.TensorDataset(torch.randn(32, D), torch.randn(32, D))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(6):
        total = 0.0
        for x, target in loader:
            with accelerator.accumulate(model):
                y, aux = model(x)
                loss = (y - target).square().mean() + 1e-2 * aux.load_balance_loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += float(loss.detach())
        losses.append(total)
    assert losses[-1] < 0.98 * losses[0]
    accelerator.save_state(str(tmp_path))
    y = model(data.tensors[0])[0].detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path))
    assert torch.equal(model(data.tensors[0])[0], y)


def test_offloaded_weights() -> None:
    """accelerate keeps weights elsewhere and brings those of the module that runs: parts are called for them."""
    model, x = Model().requires_grad_(False), torch.randn(5, D)
    y = model(x)[0]
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.moe.experts.gate_up.is_meta
    torch.testing.assert_close(model(x)[0], y)


def test_trainer(tmp_path: Path) -> None:
    """transformers' Trainer trains a small model with our experts, to the losses of transformers' own."""
    transformers = pytest.importorskip("transformers")
    importlib.import_module("moe_torch.transformers").register()

    sizes: Any = {"hidden_size": D, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"vocab_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    tokens = torch.randint(0, 32, (16, 9), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    losses = {}
    for implementation in ("moebius", "eager"):
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(**sizes, experts_implementation=implementation)
        model = transformers.Qwen3MoeForCausalLM(config)
        arguments = transformers.TrainingArguments(
            str(tmp_path / implementation), per_device_train_batch_size=4, num_train_epochs=3, learning_rate=1e-2,
            logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer.train()
        losses[implementation] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    ours, theirs = losses["moebius"], losses["eager"]
    assert len(ours) == 12 and ours[-1] < 0.95 * ours[0]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=2e-3, atol=1e-3)
