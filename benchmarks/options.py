"""The command line of benchmarks.forward."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from benchmarks.draws import ROUTINGS, SEED
from benchmarks.peers import PEERS, why_not_importable
from benchmarks.shapes import ALL_SHAPES, ALL_TOKENS, SHAPES, TOKENS
from benchmarks.traces import is_trace, traced_layer
from moe_core.errors import InvalidInput, Unsupported

DTYPES = ("bfloat16", "float16")


def parse(arguments: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Options from the command line; exits with a message that names the fix where they make no sense."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = f"of {', '.join(ALL_SHAPES)}; `all` or `none` of them (default: %(default)s)"
    parser.add_argument("--shapes", default=",".join(SHAPES), help=names)
    numbers = f"numbers of tokens; `all` for {','.join(map(str, ALL_TOKENS))} (default: %(default)s)"
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help=numbers)
    parser.add_argument("--dtype", default=DTYPES[0], choices=DTYPES, help="of x and weights (default: %(default)s)")
    layouts = ("in_out", "out_in")
    parser.add_argument("--weight-layout", choices=layouts, help="of all shapes (default: as checkpoints store them)")
    routings = f"of {', '.join(ROUTINGS)}, trace:FILE, trace:FILE@LAYER (default: %(default)s)"
    parser.add_argument("--routing", default="balanced", help=routings)
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}; `none` for none")
    parser.add_argument("--everywhere", action="store_true", help="time costly peers at every number of tokens")
    parser.add_argument("--cell-seconds", type=float, default=6.0, help="time per cell (default: %(default)s)")
    parser.add_argument("--batch-invariant", action="store_true", help="time ours under batch_invariant, too")
    parser.add_argument("--breakdown", action="store_true", help="device time by kernel, ours and triton_kernels'")
    parser.add_argument("--large", action="store_true", help="check one forward over 2**31 elements, too")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--output", type=Path, help="write the record here, after every cell")
    parser.add_argument("--partial", action="store_true", help="let a record lack required peers, and say so in it")
    options = parser.parse_args(arguments)

    chosen = functools.partial(chosen_names, parser)
    options.tokens = ALL_TOKENS if options.tokens == "all" else numbers_of_tokens(parser, options.tokens)
    shapes = ",".join(ALL_SHAPES) if options.shapes == "all" else options.shapes
    if not options.cell_seconds > 0:
        parser.error(f"--cell-seconds must be positive, got {options.cell_seconds}")
    traces = [name for name in options.routing.split(",") if is_trace(name)]
    for name in traces:
        try:
            traced_layer(name)
        except (InvalidInput, Unsupported) as error:
            parser.error(str(error))
    routings = chosen("--routing", options.routing, [*ROUTINGS, *traces])
    known = [ALL_SHAPES[name] for name in chosen("--shapes", shapes, list(ALL_SHAPES))]
    layout = options.weight_layout
    options.shapes = tuple(dataclasses.replace(shape, weight_layout=layout or shape.weight_layout) for shape in known)
    # Balanced first: the others are compared with it.
    options.routings = tuple(routing for routing in (*ROUTINGS, *traces) if routing in routings)
    options.peers = tuple(PEERS[name] for name in chosen("--peers", options.peers, list(PEERS)))
    if not (options.shapes and options.routings) and not options.large:
        parser.error("there is nothing to run; name --shapes and --routing, or give --large")
    if options.output is not None and not options.partial:
        lacking = what_a_record_lacks(options)
        if lacking:
            parser.error(f"a record must have every required peer: {lacking}; or give --partial")
    return options


def chosen_names(parser: argparse.ArgumentParser, option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """The names between the commas of an option's text, none for `none`; exits where one is not known."""
    names = () if text == "none" else tuple(text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"{option} must be of {', '.join(known)}, got {', '.join(unknown)}")
    return names


def numbers_of_tokens(parser: argparse.ArgumentParser, text: str, option: str = "--tokens") -> tuple[int, ...]:
    """The numbers between the commas of an option's text; exits where one is not positive."""
    tokens = text.split(",")
    if not all(one.isdecimal() and int(one) > 0 for one in tokens):
        parser.error(f"{option} must be positive numbers with commas between them, got {text!r}")
    return tuple(map(int, tokens))


def what_a_record_lacks(options: argparse.Namespace) -> str:
    """Required peers that were not asked for or cannot be imported, and how to get them; "" where there are none."""
    if not options.shapes:
        return ""
    chosen = {peer.name for peer in options.peers}
    lacking = []
    for peer in PEERS.values():
        if not peer.required:
            continue
        reason = why_not_importable(peer) if peer.name in chosen else f"add {peer.name} to --peers"
        if reason is not None:
            lacking.append(reason)
    return "; ".join(lacking)
