"""gpt-oss fine-tuned with PEFT inside transformers' Trainer, on Moebius's experts, then merged and published.

    python examples/finetune_gpt_oss.py                                # a tiny random model, in seconds on a CPU
    python examples/finetune_gpt_oss.py --model openai/gpt-oss-20b     # its weights in bf16, on a GPU

`use(model)` behind `get_peft_model` is the only line for Moebius: adapters of the experts' 3-D parameters run as
products of their factors, without a copy of the weights in every step. Files stay PEFT's and transformers'.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile
from typing import Any

import peft
import torch
import transformers
from transformers.utils.quantization_config import Mxfp4Config

from moe_torch.transformers import use

TINY: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=64, num_local_experts=8, num_experts_per_tok=2, num_hidden_layers=1
)
TINY |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=128)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def load(name: str | None) -> Any:
    if name is None:
        torch.manual_seed(0)
        return transformers.GptOssForCausalLM(transformers.GptOssConfig(**TINY, pad_token_id=0))
    options: Any = {"quantization_config": Mxfp4Config(dequantize=True), "device_map": "auto"}
    return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, **options)


def main() -> None:
    """Train, save the adapter, merge it, and read both back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a gpt-oss of the hub or a folder (default: a tiny random one)")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the adapter and the merged model")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    folder = options.output or pathlib.Path(tempfile.mkdtemp())

    base = load(options.model)
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], target_parameters=EXPERTS)
    model: Any = peft.get_peft_model(base, config)
    print(use(model))
    model.print_trainable_parameters()

    # Sentences that count upwards; put your tokens here.
    starts = torch.arange(1, 65)[:, None]
    data = [{"input_ids": one, "labels": one} for one in (starts + torch.arange(16)) % 96 + 1]
    rates: Any = {"max_steps": options.steps, "per_device_train_batch_size": 8, "learning_rate": 1e-2}
    silent: Any = {"report_to": [], "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(folder / "run"), **rates, **silent, use_cpu=options.model is None)
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert float(losses[-1]) < 0.9 * float(losses[0]), "the loss falls"

    tokens = data[0]["input_ids"][None].to(model.device)
    model.eval()
    with torch.no_grad():
        wanted = model(tokens).logits
    model.save_pretrained(folder / "adapter")
    model.merge_and_unload().save_pretrained(folder / "merged")
    merged: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=wanted.dtype).eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens.cpu()).logits, wanted.cpu(), rtol=2e-2, atol=2e-2)
    print(f"adapter and merged model are in {folder}; push_to_hub publishes either")


if __name__ == "__main__":
    main()
