"""A Hugging Face model whose experts run on Moebius, and its routing recorded, saved and played back.

The model is small and random so that this runs anywhere. For a published one, give its name to
`AutoModelForCausalLM.from_pretrained(name)`.
"""

from __future__ import annotations

import pathlib
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import moe_torch.transformers
from moe_torch.trace import RoutingTrace, capture, replay


def main() -> None:
    """Compare logits and generated tokens with the model's own experts, then record and replay."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=256,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=4,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(device).eval()
    print(moe_torch.transformers.use(model))
    tokens = torch.randint(1, 256, (1, 12), device=device)

    with torch.no_grad():
        logits = model(tokens).logits
        written = model.generate(tokens, max_new_tokens=8, do_sample=False)
        model.set_experts_implementation("eager")
        torch.testing.assert_close(logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(written, model.generate(tokens, max_new_tokens=8, do_sample=False))
        model.set_experts_implementation("moebius")
        print("logits and generated tokens are those of the model's own experts:", written[0, 12:].tolist())

        with capture() as recording:
            model(tokens)
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory) / "routing.safetensors"
            recording.trace().save(path)
            trace = RoutingTrace.load(path)
        with replay(trace):
            assert torch.equal(model(tokens).logits, logits)
        print(f"replayed {len(trace)} layers; experts of the last token in the first:", trace[0].ids[-1].tolist())


if __name__ == "__main__":
    main()
