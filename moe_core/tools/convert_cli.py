"""The command `moebius-convert`. Exit status: 0 written, 1 verifying found a difference, 2 not written."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import sys
from collections.abc import Sequence

import moe_core
from moe_core.base import command, require_at_least
from moe_core.checkpoint.convert import LOADERS, ConversionProgress, convert_checkpoint
from moe_core.checkpoint.convert.verify import fits, verify_conversion
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import format_names

CONVERTED, NOT_VERIFIED, COULD_NOT_CONVERT = 0, 1, command.COULD_NOT_RUN

_DESCRIPTION = """\
Translate the routed experts of a Hugging Face checkpoint, plain or quantised, into a format or a dtype, and report the
relative Frobenius error of every layer. Other plain tensors are copied, quantised ones become plain. After an
interruption, the same command goes on.
"""
#: Formats that `convert_checkpoint` takes by name.
_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "nvfp4": "nvfp4"}
_NEAREST = 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("moebius-convert", description=_DESCRIPTION)
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint directory, or a GGUF file")
    parser.add_argument("destination", metavar="DESTINATION", help="a new, an empty or an interrupted one's directory")
    names = ", ".join((*format_names(), *_NAMES))
    parser.add_argument("--format", required=True, metavar="NAME", help=f"one of {names}")
    parser.add_argument(
        "--loader",
        choices=LOADERS,
        default=LOADERS[0],
        help="transformers refuses what it would load wrong; moebius writes what this library reads, in "
        "llm-compressor's names; default %(default)s",
    )
    parser.add_argument("--shard-mib", type=int, default=1024, metavar="N", help="size of a file; default %(default)s")
    parser.add_argument("--json", metavar="PATH", help="also write the report as JSON; - writes it to stdout alone")
    parser.add_argument(
        "--allow-not-finite", action="store_true", help="convert weights with NaN or infinities, and name them"
    )
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        help="read the result again, also with transformers, and compare it; default: if memory has room for it",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {moe_core.__version__}")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return command.run("moebius-convert", lambda: _convert(options))


def _convert(options: argparse.Namespace) -> int:
    require_at_least("--shard-mib", options.shard_mib, 1)
    write = command.report_writer(options.json, options.destination)
    try:
        report = convert_checkpoint(
            options.source,
            options.destination,
            _format(options.format),
            loader=options.loader,
            allow_not_finite=options.allow_not_finite,
            shard_bytes=options.shard_mib * 2**20,
            progress=_print_progress,
        )
    except (InvalidInput, Unsupported, OSError) as problem:
        print(f"moebius-convert: could not convert: {problem}", file=sys.stderr)
        return COULD_NOT_CONVERT
    if options.json != "-":
        print(report)
    try:
        write(json.dumps(report.as_dict(), indent=1, allow_nan=False))
    except OSError as problem:
        print(f"moebius-convert: {options.destination} is written, its report is not: {problem}", file=sys.stderr)
        return COULD_NOT_CONVERT
    if options.verify or (options.verify is None and fits(options.destination)):
        largest = max((max(error.gate_up, error.down) for error in report.layers), default=0.0)
        try:
            verification = verify_conversion(
                options.source,
                options.destination,
                math.inf if report.not_finite else largest,
                transformers=options.loader == "transformers",
            )
        except (InvalidInput, Unsupported) as problem:
            print(f"moebius-convert: {options.destination} is written and not verified: {problem}", file=sys.stderr)
            return NOT_VERIFIED
        if options.json != "-":
            print(verification)
    return CONVERTED


def _format(name: str) -> str:
    known = tuple(dict.fromkeys((*format_names(), *_NAMES, *_NAMES.values())))
    if name not in known:
        near = difflib.get_close_matches(name, known, _NEAREST, cutoff=0)
        raise InvalidInput(f"--format must be a known name, got {name!r}; the nearest are {', '.join(near)}")
    return _NAMES.get(name, name)


def _print_progress(progress: ConversionProgress) -> None:
    end = "\n" if progress.tensors == progress.tensors_total else "\r"
    share = progress.tensors / progress.tensors_total
    print(f"moebius-convert: {share:4.0%} of {progress.tensors_total} tensors", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
