"""The command `moebius-choose`: exit status 0 if something fits, 3 if nothing does, 2 for wrong arguments."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

import moe_core
from moe_core.base import command
from moe_core.tools.choose.estimate import Option, choose_parallelism
from moe_core.tools.choose.models import FORMATS, GB, GPUS, MODELS, Gpu, Model, gpu_named, model_named

LAUNCHERS = ("torchrun", "slurm")
_DESCRIPTION = f"""\
Choose the format of the experts' weights and the parallelism of a model on some GPUs: how many share the experts, and
how many copies there are, on one host or on several.

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
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="of one host, or of whole hosts; default: %(default)s"
    )
    parser.add_argument("--tokens", type=int, default=64, help="of a step on all GPUs; default: %(default)s")
    parser.add_argument("--training", action="store_true", help="train with Adam; default: serve")
    parser.add_argument("--format", help=f"only this one of {', '.join(FORMATS)}")
    text = "how the printed command starts on every host: %(choices)s; default: %(default)s"
    parser.add_argument("--launcher", choices=LAUNCHERS, default=LAUNCHERS[0], help=text)
    parser.add_argument("--json", metavar="PATH", help="write the options as JSON, - for stdout")
    parser.add_argument("--version", action="version", version=f"%(prog)s {moe_core.__version__}")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return command.run("moebius-choose", lambda: _choose(options))


def _choose(options: argparse.Namespace) -> int:
    write = command.report_writer(options.json)
    model, gpu = model_named(options.model), gpu_named(options.gpu)
    found = choose_parallelism(
        model, gpu, options.gpus, options.tokens, training=options.training, format=options.format
    )
    if options.json != "-":
        print(report(model, gpu, options.tokens, found, training=options.training, launcher=options.launcher))
    write(json.dumps([dataclasses.asdict(one) for one in found], indent=1))
    return 0 if found[0].why_not is None else 3


def report(
    model: Model, gpu: Gpu, tokens: int, options: Sequence[Option], *, training: bool, launcher: str = LAUNCHERS[0]
) -> str:
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
    lines += [f"assumed: {'; '.join(best.assumed)}"] if best.assumed else []
    lines += [f"run {best.format}, {best.parallel}:"]
    return "\n".join([*lines, *(f"    {one}" for one in commands(model, gpu, best, training, launcher))])


def launch(gpu: Gpu, gpus: int, launcher: str) -> str:
    """The command that starts a process on every GPU."""
    host = gpu.machine.domain
    hosts, each = max(1, gpus // host), min(gpus, host)
    head = {
        "torchrun": "--rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500",
        "slurm": "--rdzv-backend c10d --rdzv-id $SLURM_JOB_ID "
        "--rdzv-endpoint $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1):29500",
    }[launcher]
    nodes = f"--nnodes {hosts} {head} " if hosts > 1 else ""
    line = f"torchrun {nodes}--nproc-per-node {each} SCRIPT"
    return line if launcher == "torchrun" else f"srun --nodes {hosts} --ntasks-per-node 1 --gpus-per-node {each} {line}"


def commands(model: Model, gpu: Gpu, option: Option, training: bool, launcher: str = LAUNCHERS[0]) -> list[str]:
    """Lines that run an option."""
    groups, shared = option.gpus // option.experts, option.experts > 1
    lines = []
    if not training and option.format != model.native:
        lines.append(f"moebius-convert SOURCE DESTINATION --format {option.format}")
    if option.gpus > 1:
        lines.append(launch(gpu, option.gpus, launcher))
    if not shared:
        lines += ["fully_shard(layer)"] if training and option.gpus > 1 else []
        return [*lines, f"moe_torch.transformers.use(model{', recompute=True' if training else ''})"]
    most = ", max_tokens=TOKENS" if option.mode == "peer" else ""
    most += ", gradients='mean'" if training else ""
    sharded = "fully_shard(layer.experts, mesh=mesh['efsdp'])  # then the model over all GPUs"
    return [
        *lines,
        f"mesh = init_device_mesh('cuda', ({groups}, {option.experts}), mesh_dim_names=('efsdp', 'ep'))",
        "MoE.from_block(block, model.config)  # for each block of a model of transformers",
        f"parallelize(layer, ExpertParallel(mesh['ep'], ExchangeSpec('{option.mode}'){most}))  # of each MoE layer",
        *([sharded] if training else []),
    ]
