"""A training step of a model with AdamW: Qwen3-30B-A3B with some of its layers, tokens per second and model FLOPs.

    python -m benchmarks.models.training --output build/model-training.json
    python -m benchmarks.models.training --layers 2 --tokens 4096

transformers builds the model with random weights in bf16. A step is forward with loss, backward, and a fused AdamW
step; the experts are ours or `grouped_mm`, by turns in one process on the same parameters. The first losses must agree.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

import moe_torch.transformers
from benchmarks.draws import SEED
from benchmarks.models.blocks import default_dtype
from benchmarks.options import chosen_names
from benchmarks.provenance import provenance
from benchmarks.record import command, reason_of, table, write_record
from benchmarks.timing import EagerTimer, medians, paired_ratio, paired_spread

SCHEMA = 1
IMPLEMENTATIONS = ("moebius", "grouped_mm")
#: Dense bf16 products of an H100 or H200 SXM, by their datasheet.
PEAK_FLOPS = 989.4e12
#: Of the losses before the first step, which both find from the same parameters.
TOLERANCE = 1e-2
SIZES: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}
COLUMNS = {
    "implementation": "experts", "step_us": "step", "forward_backward_us": "forward and backward",
    "optimizer_us": "AdamW", "tokens_per_s": "tokens/s", "mfu": "MFU", "over": "moebius / it", "spread": "spread",
    "peak_bytes": "peak bytes", "loss": "first loss",
}  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options from the command line; exits with a message that names the fix where they make no sense."""
    sizes = {"layers": 4, "tokens": 8192, "length": 4096}
    parser = command(__doc__, **sizes, implementations=IMPLEMENTATIONS, seconds=6.0, seed=SEED)
    found = parser.parse_args(arguments)
    if found.layers < 1 or found.length < 1 or found.tokens < 1 or found.tokens % found.length:
        parser.error(f"--tokens must be a multiple of --length, got {found.tokens} and {found.length}")
    names = chosen_names(parser, "--implementations", found.implementations, IMPLEMENTATIONS)
    if "moebius" not in names:
        parser.error("--implementations must have moebius, which the other is compared with")
    found.implementations = [name for name in IMPLEMENTATIONS if name in names]
    return found


def flops_per_token(model: torch.nn.Module, length: int) -> float:
    """Of a training step: 6 per parameter that a token is multiplied by, and 6 L S H of the causal attention.

    A token is multiplied by every matrix but the embedding, and by K of the E experts. Attention multiplies queries of
    H = heads * head_dim by half of S keys and then the values, L layers, forward and twice that backward.
    """
    config: Any = model.config
    active = 0.0
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name or parameter.dim() < 2:
            continue
        share = config.num_experts_per_tok / config.num_experts if parameter.dim() == 3 else 1.0
        active += parameter.numel() * share
    width = config.num_attention_heads * config.head_dim
    return 6 * active + 6 * config.num_hidden_layers * length * width


def build(options: argparse.Namespace, device: Any) -> torch.nn.Module:
    """The model with random bf16 parameters."""
    configuration = importlib.import_module("transformers.models.qwen3_moe.configuration_qwen3_moe")
    modeling = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    moe_torch.transformers.register()
    config = configuration.Qwen3MoeConfig(**SIZES, num_hidden_layers=options.layers, use_cache=False)
    torch.manual_seed(options.seed)
    with torch.device(device), default_dtype(torch.bfloat16):
        return modeling.Qwen3MoeForCausalLM(config).train()


class Steps:
    """Training steps of one model under any experts implementation, with its own tokens and optimizer."""

    def __init__(self, model: torch.nn.Module, options: argparse.Namespace) -> None:
        self._model: Any = model
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(options.seed)
        size = (options.tokens // options.length, options.length)
        vocabulary = self._model.config.vocab_size
        self._ids = torch.randint(0, vocabulary, size, generator=generator, device=device)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def loss(self, name: str) -> torch.Tensor:
        """The loss of the present parameters, experts computed by `name`."""
        self._model.set_experts_implementation(name)
        return self._model(input_ids=self._ids, labels=self._ids).loss

    def forward_backward(self, name: str) -> None:
        """Gradients of the loss, in place of those of the step before."""
        self._optimizer.zero_grad(set_to_none=True)
        self.loss(name).backward()

    def optimize(self) -> None:
        self._optimizer.step()

    def step(self, name: str) -> None:
        self.forward_backward(name)
        self.optimize()


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most that torch's allocator holds during a call, everything included; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def run(options: argparse.Namespace, timer: Any, device: str) -> dict[str, Any]:
    """The record of a run, written where an output is named."""
    model = build(options, device)
    flops = flops_per_token(model, options.length)
    record: dict[str, Any] = {"schema": SCHEMA, "provenance": provenance("benchmarks.models.training")}
    record |= {"seed": options.seed, "layers": options.layers, "tokens": options.tokens, "length": options.length}
    record |= {"parameters": sum(one.numel() for one in model.parameters())}
    record |= {"flops_per_token": flops, "peak_flops": PEAK_FLOPS, "rows": []}
    steps = Steps(model, options)
    with torch.no_grad():
        losses = {name: float(steps.loss(name)) for name in options.implementations}
    wanted = losses["moebius"]
    usable: dict[str, Callable[[], None]] = {}
    for name, loss in losses.items():
        row: dict[str, Any] = {"implementation": name, "loss": loss}
        record["rows"].append(row)
        if not abs(loss - wanted) < TOLERANCE * abs(wanted):
            row["not_timed"] = f"parity is red: loss {loss:.4g}, ours {wanted:.4g}; at most {TOLERANCE:g} is allowed"
            continue
        try:
            row["peak_bytes"] = peak_bytes(functools.partial(steps.step, name))
        except Exception as error:  # the reason that it has no figure
            row["not_timed"] = reason_of(error)
            continue
        usable[name] = functools.partial(steps.step, name)
    rounds = timer.rounds(usable, seconds=options.seconds)
    parts: dict[str, Callable[[], None]] = {name: functools.partial(steps.forward_backward, name) for name in usable}
    parts["AdamW"] = steps.optimize
    part_times = medians(timer.rounds(parts, seconds=options.seconds / 2))
    for row in record["rows"]:
        name = row["implementation"]
        if name not in usable:
            continue
        microseconds = medians(rounds)[name]
        speed = options.tokens / microseconds * 1e6
        row |= {"step_us": microseconds, "tokens_per_s": speed, "mfu": flops * speed / PEAK_FLOPS}
        row |= {"forward_backward_us": part_times[name], "optimizer_us": part_times["AdamW"]}
        row["over"] = paired_ratio(rounds, "moebius", name)
        row["spread"] = paired_spread(rounds, "moebius", name)
    write_record(options.output, record)
    return record


def show(record: dict[str, Any]) -> str:
    """The table, and what has no figure."""
    lines = [f"{record['layers']} layers, {record['parameters']:.3g} parameters, {record['tokens']} tokens a step, "
             f"{record['flops_per_token']:.3g} FLOPs a token, peak {record['peak_flops']:.4g} FLOP/s"]  # fmt: skip
    lines.append(table([row for row in record["rows"] if "step_us" in row], COLUMNS))
    lines += [f"{row['implementation']}: {row['not_timed']}" for row in record["rows"] if "not_timed" in row]
    return "\n\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 1 where an implementation has no figure."""
    record = run(parse(arguments), EagerTimer(), "cuda")
    print(show(record))
    return 1 if any("not_timed" in row for row in record["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
