"""The command line of benchmarks.forward."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.draws import ROUTINGS, SEED
from benchmarks.peers import PEERS, Peer, why_not_importable
from benchmarks.shapes import ALL_SHAPES, ALL_TOKENS, SHAPES, TOKENS, Shape
from benchmarks.traces import is_trace, traced_layer
from moe_core.errors import InvalidInput, Unsupported

DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Options:
    """What to run. partial: a record may lack required peers. everywhere: peers that are timed at few numbers of tokens
    are timed at all. cell_seconds: the time of one cell, on average within its shape. batch_invariant: ours is timed
    with one summation order for every number of tokens, too."""

    shapes: tuple[Shape, ...]
    tokens: tuple[int, ...]
    routings: tuple[str, ...]
    peers: tuple[Peer, ...]
    output: Path | None
    seed: int
    dtype: str
    cell_seconds: float
    everywhere: bool
    batch_invariant: bool
    breakdown: bool
    large: bool
    partial: bool


def parse(arguments: Sequence[str] | None, description: str | None) -> Options:
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
    found = parser.parse_args(arguments)

    chosen = functools.partial(chosen_names, parser)
    tokens = ALL_TOKENS if found.tokens == "all" else numbers_of_tokens(parser, found.tokens)
    shapes = ",".join(ALL_SHAPES) if found.shapes == "all" else found.shapes
    if not found.cell_seconds > 0:
        parser.error(f"--cell-seconds must be positive, got {found.cell_seconds}")
    traces = [name for name in found.routing.split(",") if is_trace(name)]
    for name in traces:
        try:
            traced_layer(name)
        except (InvalidInput, Unsupported) as error:
            parser.error(str(error))
    routings = chosen("--routing", found.routing, [*ROUTINGS, *traces])
    known = [ALL_SHAPES[name] for name in chosen("--shapes", shapes, list(ALL_SHAPES))]
    layout = found.weight_layout
    options = Options(
        shapes=tuple(dataclasses.replace(shape, weight_layout=layout or shape.weight_layout) for shape in known),
        tokens=tokens,
        # Balanced first: the others are compared with it.
        routings=tuple(routing for routing in (*ROUTINGS, *traces) if routing in routings),
        peers=tuple(PEERS[name] for name in chosen("--peers", found.peers, list(PEERS))),
        output=found.output,
        seed=found.seed,
        dtype=found.dtype,
        cell_seconds=found.cell_seconds,
        everywhere=found.everywhere,
        batch_invariant=found.batch_invariant,
        breakdown=found.breakdown,
        large=found.large,
        partial=found.partial,
    )
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


def what_a_record_lacks(options: Options) -> str:
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
