"""The command `moebius-choose`: exit status 0 if something fits, 1 if nothing does, 2 for wrong arguments."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

import moe_core
from moe_core.base import command
from moe_core.tools.choose.estimate import Option, choose
from moe_core.tools.choose.models import FORMATS, GB, GPUS, MODELS, Gpu, Model, gpu_named, model_named

_DESCRIPTION = f"""\
Choose the format of the experts' weights and the parallelism of a model on some GPUs of one host.

Times are of MoE layers alone: measured, between two records, a bound of the GPU, or predicted by the cost model. So
tokens per second are an upper bound of the whole model's.

models: {", ".join(MODELS)}
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "moebius-choose", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="such as qwen3-30b-a3b")
    parser.add_argument("--gpu", default="h200", help=f"one of {', '.join(GPUS)}; default: %(default)s")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="of one host; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=64, help="of a step on all GPUs; default: %(default)s")
    parser.add_argument("--training", action="store_true", help="train with Adam; default: serve")
    parser.add_argument("--format", help=f"only this one of {', '.join(FORMATS)}")
    parser.add_argument("--json", metavar="PATH", help="write the options as JSON, - for stdout")
    parser.add_argument("--version", action="version", version=f"%(prog)s {moe_core.__version__}")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return command.run("moebius-choose", lambda: _choose(options))


def _choose(options: argparse.Namespace) -> int:
    write = command.report_writer(options.json)
    model, gpu = model_named(options.model), gpu_named(options.gpu)
    found = choose(model, gpu, options.gpus, options.tokens, training=options.training, format=options.format)
    if options.json != "-":
        print(report(model, gpu, options.tokens, found, training=options.training))
    write(json.dumps([dataclasses.asdict(one) for one in found], indent=1))
    return 0 if found[0].why_not is None else 1


def report(model: Model, gpu: Gpu, tokens: int, options: Sequence[Option], *, training: bool) -> str:
    """The options as a table, and how to run the first."""
    work = "training" if training else "serving"
    lines = [f"{model.name} on {options[0].gpus} x {gpu.name}, {work}, {tokens} tokens a step"]
    rows = [("format", "parallelism", "GB/GPU", "us a layer", "tokens/s", "from")]
    for one in options:
        if one.time is None:
            rows.append((one.format, one.parallel, "", "", "", one.why_not or ""))
            continue
        source = one.time.source if one.why_not is None else f"{one.time.source}; {one.why_not}"
        numbers = f"{one.spent / GB:.1f}", f"{one.time.us:.0f}", f"{one.tokens_per_second:.0f}"
        rows.append((one.format, one.parallel, *numbers, source))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        texts = [
            text.ljust(width) if i < 2 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row[:5], widths, strict=True))
        ]
        lines.append("  ".join(["", *texts, row[5]]).rstrip())
    best = options[0]
    if best.why_not is not None:
        return "\n".join([*lines, "nothing fits: take more GPUs, or GPUs with more memory"])
    return "\n".join(
        [*lines, f"run {best.format}, {best.parallel}:", *(f"    {one}" for one in commands(model, best, training))]
    )


def commands(model: Model, option: Option, training: bool) -> list[str]:
    """Lines that run an option."""
    lines = []
    if not training and option.format != model.native:
        lines.append(f"moebius-convert SOURCE DESTINATION --format {option.format}")
    if option.parallel.startswith("experts over"):
        lines += [
            f"torchrun --nproc-per-node {option.gpus} SCRIPT",
            "parallelize(layer, ExpertParallel(mesh, ExchangeSpec('peer'), max_tokens=TOKENS))  # of each MoE layer",
        ]
    elif option.gpus > 1:
        lines += [f"torchrun --nproc-per-node {option.gpus} SCRIPT"] + (["fully_shard(layer)"] if training else [])
    lines.append(f"moe_torch.transformers.use(model{', recompute=True' if training else ''})")
    if option.parallel.startswith("experts over"):
        lines[-1] = "MoE.from_block(block, model.config)  # first, for each block of a model of transformers"
        lines[-1:], lines[-2:-1] = lines[-2:-1], lines[-1:]
    return lines
