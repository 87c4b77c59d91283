"""The command `moebius-view`: exit status 0 when the page was written, 2 when it could not be."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import moe_core
from moe_core.base import command
from moe_core.errors import InvalidInput
from moe_core.view.page import view_page, write_page
from moe_core.view.reading import read_json

_DESCRIPTION = """\
Write one self-contained HTML page of a routing trace, of a report of moe-parity --json, or of plans
(layer.explain(...).save). Two files of one kind stand beside each other, with what differs.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("moebius-view", description=_DESCRIPTION)
    parser.add_argument("files", metavar="FILE", nargs="+", help="one file, or two of one kind")
    parser.add_argument("--output", metavar="PATH", default="moebius-view.html", help="default: %(default)s")
    parser.add_argument("--layers", type=int, metavar="N", help="MoE layers of the model, for a trace of many forwards")
    parser.add_argument("--text", metavar="FILE", help="JSON list with the text of each token of the trace")
    parser.add_argument("--sizes", metavar="D,F", help="d_model and d_ff, for bytes and times of placements of experts")
    parser.add_argument("--machine", metavar="FILE", help="a record of moebius-tune --links; default: an H200")
    parser.add_argument("--profile", metavar="FILE", help="a trace of torch.profiler, for measured times of launches")
    parser.add_argument("--version", action="version", version=f"%(prog)s {moe_core.__version__}")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return command.run("moebius-view", lambda: _view(options))


def _view(options: argparse.Namespace) -> int:
    command.require_writable("--output", options.output)
    page = view_page(
        options.files, layers_per_step=options.layers, text=_text(options.text), sizes=_sizes(options.sizes),
        machine=options.machine, profile=options.profile,
    )  # fmt: skip
    write_page(options.output, page)
    print(f"moebius-view: {options.output}, {len(page.encode()) / 1e6:.1f} MB; open it in a browser")
    return 0


def _text(path: str | None) -> list[str] | None:
    if path is None:
        return None
    text = read_json(path, "a JSON list of strings")
    if not isinstance(text, list) or not all(isinstance(one, str) for one in text):
        raise InvalidInput(
            f"--text must be a JSON list of strings, got another in {path!r}; write one string per token"
        )
    return text


def _sizes(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise InvalidInput(f"--sizes must be d_model,d_ff, such as 2048,768, got {text!r}; correct it")
    return int(parts[0]), int(parts[1])


if __name__ == "__main__":
    sys.exit(main())
