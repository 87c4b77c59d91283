"""transformers' own `grouped_mm` experts against Moebius in one model, timed: prefill and a training step.

    python examples/transformers_timing.py --hidden 2048 --expert-width 768 --experts 128 --top-k 8 --layers 4 \\
        --tokens 4096 --dtype bfloat16

Both run in the same process on the same weights, and their logits are compared first. The default sizes take seconds on
a CPU. For a published model, replace `from_config` by `from_pretrained`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import moe_torch.transformers


def milliseconds(run: Callable[[], object], times: int) -> float:
    """Median over some runs behind one that compiles what is to be compiled."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    found = []
    for _ in range(times + 1):
        wait()
        began = time.perf_counter()
        run()
        wait()
        found.append(1e3 * (time.perf_counter() - began))
    return sorted(found[1:])[times // 2]


def main() -> None:
    """Print both times and their ratio, for a forward and for a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"hidden": 64, "expert-width": 32, "experts": 8, "top-k": 2, "layers": 2, "tokens": 64, "times": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--dtype", default="float32", help="of weights and computation (default: float32)")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"hidden_size": options.hidden, "moe_intermediate_size": options.expert_width}
    sizes |= {"num_experts": options.experts, "num_experts_per_tok": options.top_k}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": options.hidden // 8}
    config = Qwen3MoeConfig(vocab_size=256, num_hidden_layers=options.layers, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).to(device)
    tokens = torch.randint(256, (1, options.tokens), device=device)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return model(tokens).logits

    def step() -> None:
        model(tokens, labels=tokens).loss.backward()
        model.zero_grad()

    found: dict[str, tuple[torch.Tensor, float, float]] = {}
    for name in ("grouped_mm", "moebius"):
        if name == "moebius":
            moe_torch.transformers.use(model)
        else:
            model.set_experts_implementation(name)
        found[name] = (forward().float(), milliseconds(forward, options.times), milliseconds(step, options.times))
        print(f"{name:10}  forward {found[name][1]:9.2f} ms   step {found[name][2]:9.2f} ms", flush=True)
    theirs, ours = found.values()
    error = float((ours[0] - theirs[0]).norm() / theirs[0].norm())
    # A rounding may send a token to another expert, which changes its logits.
    assert error < (1e-3 if options.dtype == "float32" else 0.2), f"logits differ by {error:.1e}"
    ratios = [theirs[1] / ours[1], theirs[2] / ours[2]]
    print(f"logits differ by {error:.1e}; Moebius is {ratios[0]:.2f} and {ratios[1]:.2f} times as fast on {device}")


if __name__ == "__main__":
    main()
