"""What pages hold: blocks of shell, for the tests of several of them."""

from __future__ import annotations

import importlib.metadata
import re

import pytest

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:\A|^\n)((?:^ {4}.*\n)+)", re.MULTILINE)
#: How a block set apart by four spaces begins if it is shell; the others are formulas and what programs print.
_COMMAND = re.compile(
    r"(?:\w+=\S* )*(?:\.ci/\w+|git|export|make|pip|pytest|python|torchrun|moe-\w+|moebius-\w+)(?: |$)"
)


def shell_blocks(text: str) -> list[str]:
    """Every block of shell: fenced and called so, or set apart by four spaces and beginning with a command."""
    fenced = [fence[2] for fence in _FENCE.finditer(text) if fence[1] in ("sh", "bash", "shell", "console")]
    indented = [re.sub("^ {4}", "", block, flags=re.MULTILINE) for block in _INDENTED.findall(_FENCE.sub("", text))]
    return fenced + [block for block in indented if _COMMAND.match(block)]


def commands(text: str) -> list[str]:
    """The lines of every block of shell, without comments."""
    lines = [line for block in shell_blocks(text) for line in block.replace("\\\n", " ").splitlines()]
    bare = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    return [line for line in bare if line]


def skip_without_its_transformers(source: str) -> None:
    """Skip a test of a script that needs a newer transformers than is installed, or accelerate beside it."""
    if "serve_transformers" in source:
        pytest.importorskip("accelerate", reason="transformers loads mxfp4 with accelerate")
    needed = (5, 23)
    if "moe_torch.transformers.parallel" in source:
        installed = tuple(map(int, importlib.metadata.version("transformers").split(".")[:2]))
        if installed < needed:
            pytest.skip(f"needs transformers {'.'.join(map(str, needed))}")
