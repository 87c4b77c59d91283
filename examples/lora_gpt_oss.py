"""LoRA on the frozen mxfp4 experts of a gpt-oss layer, with the memory it takes and its tokens per second.

    python examples/lora_gpt_oss.py --real                      # gpt-oss-20b's sizes, for a GPU; 120b: --experts 128
    python examples/lora_gpt_oss.py --real --tokens 16384 --rank 16

Every expert has adapters on both products. The experts keep their 4.25 bits per weight, and gradients go through them
to the adapters and to x. Weights are random, so this shows cost and not quality; those of a checkpoint come by
`open_checkpoint(path).layer(n)`. The default sizes take seconds on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import torch

from moe_torch import LoRA, MoE, layer_spec_from_config, scheme_named

#: What config.json of gpt-oss-20b says, apart from the sizes.
CONFIG = {"model_type": "gpt_oss", "num_hidden_layers": 1, "swiglu_limit": 7.0, "experts_per_token": 4}


def frozen_layer(d_model: int, d_ff: int, experts: int, dtype: torch.dtype, device: str) -> MoE:
    """A gpt-oss layer of random mxfp4 experts; nothing of it is trained."""
    config = CONFIG | {"hidden_size": d_model, "intermediate_size": d_ff, "num_local_experts": experts}
    config["num_experts_per_tok"] = config["experts_per_token"]
    spec = layer_spec_from_config(config)
    experts_spec = dataclasses.replace(spec.experts, scheme=scheme_named("mxfp4_w4a16"))
    layer = MoE.from_spec(dataclasses.replace(spec, experts=experts_spec), dtype=dtype, device=device).requires_grad_(
        False
    )
    for matrix in (layer.experts.gate_up, layer.experts.down):
        matrix.values.random_(0, 256)
        matrix.scales.fill_(120)  # 2^-7: codes up to 6 become weights up to 0.05
    return layer


def main() -> None:
    """Train for some steps; print losses, memory and tokens per second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="2880 wide, bf16, 4096 tokens, as gpt-oss is")
    parser.add_argument("--experts", type=int, help="default: 32 with --real, else 8")
    parser.add_argument("--tokens", type=int, help="per step (default: 4096 with --real, else 64)")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (default: 8)")
    parser.add_argument("--steps", type=int, default=10, help="default: 10")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, dtype = (2880, torch.bfloat16) if options.real else (64, torch.float32)
    experts = options.experts or (32 if options.real else 8)
    tokens = options.tokens or (4096 if options.real else 64)
    torch.manual_seed(0)

    layer = frozen_layer(width, width, experts, dtype, device)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    with torch.no_grad():
        plain = layer(x)
        layer.add_lora(LoRA(options.rank, alpha=2 * options.rank))
        assert torch.equal(layer(x), plain), "a new adapter changes nothing"
        target = plain + 0.5 * torch.randn_like(plain[:1])  # a shift that adapters can learn

    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    frozen = sum(tensor.nbytes for tensor in before.values())
    print(f"{layer.spec.experts.scheme}, {experts} experts of {width} x {width}, {tokens} tokens on {device}")
    print(
        f"{frozen / 2**20:.1f} MiB are frozen, {sum(map(torch.numel, trained)) / 1e6:.3f} million numbers are trained"
    )
    optimizer, losses, began = torch.optim.Adam(trained, 1e-2 if not options.real else 1e-3), [], 0.0
    for step in range(options.steps):
        if step == 1:  # kernels were compiled in the first step
            began = time.perf_counter()
        loss = (layer(x).float() - target.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        print(f"step {step:2}: loss {losses[-1]:.5f}", flush=True)
    seconds = (time.perf_counter() - began) / max(1, options.steps - 1)
    print(f"{tokens / seconds:.0f} tokens/s, {1e3 * seconds:.1f} ms a step")
    if device == "cuda":
        print(
            f"{torch.cuda.max_memory_allocated() / 2**20:.1f} MiB of the GPU at the peak, the check's copies included"
        )
    assert losses[-1] < losses[0], "the loss falls"
    after = layer.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items()), "frozen"
    print("the frozen weights are bitwise what they were")


if __name__ == "__main__":
    main()
