"""The first pages: their snippets say what they need, shell is shell, and figures are those of the records."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterable

import pytest

from tests.support.pages import commands, shell_blocks
from tests.support.paths import ROOT
from tools.snippets import PAGES as FIRST_PAGES
from tools.snippets import labelled

FILES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in FILES}
README = PAGES["README.md"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
#: Extra -> what a block that needs it may import of the packages that are not always there.
OFFERS = {
    "torch": {"torch", "moe_torch"},
    "jax": {"jax", "moe_jax"},
    "flax": {"jax", "flax", "moe_jax"},
    "transformers": {"torch", "transformers", "moe_torch"},
}
OFFERS["all"] = set().union(*OFFERS.values())
OPTIONS = {"--index-url": 1, "--quiet": 0}


def wrong_arguments(command: str) -> list[str]:
    """The arguments of a `pip install` that are neither the project with known extras nor what it depends on."""
    known = {re.split(r"[\[<>=;]", requirement)[0] for group in EXTRAS.values() for requirement in group}
    words = shlex.split(command)
    words, wrong = words[words.index("install") + 1 :], []
    while words:
        word = words.pop(0)
        if word in OPTIONS:
            del words[: OPTIONS[word]]
            continue
        name, extras = re.fullmatch(r"([^\[]*)(?:\[(.*)\])?", word).groups()  # type: ignore[union-attr]
        own = name in (".", "moebius")
        if own and set((extras or "torch").split(",")) <= set(EXTRAS):
            continue
        if own or name not in known - {"moebius"}:
            wrong.append(word)
    return wrong


def faults_of_shell(block: str) -> list[str]:
    """Why a reader could not paste a block: it does not parse, or words that explain are no comments."""
    done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, timeout=20)
    gaps = [f"no comment: {line}" for line in block.splitlines() if re.search(r"\S {2,}(?!#)\S", line.split(" #")[0])]
    return [done.stderr] * (done.returncode != 0) + gaps


@pytest.mark.parametrize("page", PAGES)
def test_shell_is_shell(page: str) -> None:
    faults = [fault for block in shell_blocks(PAGES[page]) for fault in faults_of_shell(block)]
    installs = [command for command in commands(PAGES[page]) if re.search(r"\bpip3? install\b", command)]
    assert not faults and not [word for command in installs for word in wrong_arguments(command)]
    assert installs or page != "README.md"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("pip install '.[torch]'     torch alone", "no comment"),
        ("pip install .[jax] (JAX alone)", "syntax error"),
        ("make 'parity", "unexpected EOF"),
    ],
)
def test_explanations_that_are_no_comments_are_found(line: str, fault: str) -> None:
    (block,) = shell_blocks(f"Text\n\n    {line}\n\nText\n")
    assert any(fault in found for found in faults_of_shell(block))


def test_foreign_arguments_of_pip_are_found() -> None:
    assert wrong_arguments("pip install '.[torch]' torch --index-url https://x 'jax[cuda12]' moebius[all]") == []
    assert wrong_arguments("pip install '.[torch]' torch alone '.[nonesuch]'") == ["alone", ".[nonesuch]"]


def test_every_snippet_says_what_it_needs() -> None:
    blocks = [(page, *block) for page in FIRST_PAGES for block in labelled(PAGES[page])]
    assert {label for _, label, _, _ in blocks} == set(OFFERS) <= set(EXTRAS)
    for page, label, line, source in blocks:
        imported = set(re.findall(r"^\s*(?:import|from) (\w+)", source, re.MULTILINE))
        imported |= set(re.findall(r", (\w+)", " ".join(re.findall(r"^import .*", source, re.MULTILINE))))
        needed = imported & OFFERS["all"]
        assert needed <= OFFERS[str(label)], f"{page}:{line} needs {needed}"
        smaller = [name for name, offered in OFFERS.items() if needed <= offered < OFFERS[str(label)]]
        assert not smaller, f"{page}:{line} needs only {smaller}"


def test_the_readme_is_a_screen() -> None:
    """Depth is behind its links."""
    assert len(README.splitlines()) <= 90


def test_ci_makes_every_documented_environment() -> None:
    script = (ROOT / ".ci/run").read_text()
    made = re.search(r"^for extra in ((?:\w+ ?)+); do$", script, re.MULTILINE)
    assert made and set(made[1].split()) == set(OFFERS)


def between(values: Iterable[float]) -> str:
    found = sorted(values)
    return f"{found[0]:.2f} to {found[-1]:.2f}"


def column(page: str, heading: str) -> list[float]:
    """The numbers below a heading in the first table of a page that has it."""
    lines = PAGES[page].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else [] for line in lines]
    index = next(
        number
        for number, row in enumerate(rows)
        if heading in row and set("|-") <= set(lines[number + 1]) <= set("|- :")
    )
    below = [row[rows[index].index(heading)] for row in itertools.takewhile(len, rows[index + 1 :])]
    return [float(cell) for cell in below if re.fullmatch(r"\d+(\.\d+)?", cell)]


def test_figures_beside_peers_are_those_of_the_records() -> None:
    forward = "docs/user/performance.md"
    beside = PAGES[forward].split("## Beside other implementations\n")[1].split("\n## ")[0]
    rows = {line.split("|")[1].strip(" *`[").split("]")[0]: line for line in beside.splitlines() if line[:1] == "|"}
    shown = {line.split("|")[1].strip(" *`[").split("]")[0] for line in README.splitlines() if line[:1] == "|"}
    assert rows.keys() <= shown
    assert f"takes {between(column(forward, 'over triton_kernels'))} of its time" in rows["triton_kernels"]
    assert f"takes {between(column(forward, 'over grouped_mm'))} of its time" in rows["torch's `grouped_mm"]
    recorded = json.loads((ROOT / "benchmarks/libraries/recorded_h200.json").read_text())["microseconds"]

    def longer(mode: str, peer: str) -> str:
        return between(1 / cell["over"] for cells in recorded[mode][peer].values() for cell in cells.values())

    assert f"steps took {longer('step', 'sonicmoe')} times" in rows["SonicMoE"]
    assert f"forwards {longer('forward', 'sonicmoe')} times" in rows["SonicMoE"]
    assert f"it took {longer('forward', 'flashinfer')} times" in rows["FlashInfer"]
    theirs = json.loads((ROOT / "benchmarks/vllm_h200.json").read_text())["microseconds"]
    ratios = []
    for row in json.loads((ROOT / "benchmarks/results/forward-h200.json").read_text())["rows"]:
        cell = theirs.get(row["shape"], {}).get(str(row["tokens"]), {"active": None})
        if row["routing"] == "balanced" and cell["active"] == row["active_experts"]:
            ratios.append(row["torch_us"] / cell["us"])
    assert f"takes {between(ratios)} of its experts alone" in rows["vLLM"]
    kept = [other / ours for ours, other in zip(column("docs/user/training.md", "Moebius"), SCATTERMOE, strict=True)]
    assert f"{min(kept):.1f} to {max(kept):.1f} times as many bytes" in rows["ScatterMoE"]


SCATTERMOE = column("docs/user/training.md", "ScatterMoE")


def test_kept_bytes_are_those_of_the_formulas() -> None:
    sizes = ((2048, 768, 128, 8), (2880, 2880, 128, 4), (4096, 14336, 8, 2))
    routing = [4 * e + 16 * k for _, _, e, k in sizes]
    x, pre = [2 * d for d, *_ in sizes], [4 * k * f for _, f, _, k in sizes]
    columns = {"its routing": routing, "with `recompute`": [sum(kept) for kept in zip(x, routing, strict=True)]}
    columns["Moebius"] = [sum(kept) for kept in zip(x, pre, routing, strict=True)]
    columns["SonicMoE"] = [sum(kept) for kept in zip(x, pre, strict=True)]
    columns["ScatterMoE"] = [2 * d + 8 * k * f + 2 * k * d for d, f, _, k in sizes]
    for heading, kept in columns.items():
        assert column("docs/user/training.md", heading) == kept, heading
