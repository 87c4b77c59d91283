"""Engines that run their own files on `moe_torch.compat`, and the table of what ran in docs/user/migration.md."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

from tools.upstream import published
from tools.upstream.refusals import VLLM
from tools.upstream.running import Case, Result, run_cases

#: Modules with the cases of each engine.
ENGINES = {
    "vllm": ("vllm_cases", "object_cases", "recipe_cases", "adapt_cases", "oracle_cases"),
    "sglang": ("sglang_cases",),
    "transformers": ("transformers_cases",),
    "tensorrt-llm": ("tensorrt_llm_cases",),
}
PAGE = published.ROOT / "docs" / "user" / "migration.md"
BEGIN, END = "<!-- begin: python -m tools.upstream engines --write -->", "<!-- end -->"
Row = tuple[str, ...]


def run(arguments: argparse.Namespace) -> list[Result]:
    """The cases of `arguments.what` on one engine, of one release."""
    options: dict[str, Any] = {}
    name = arguments.what
    if name == "tensorrt-llm":
        files = published.tensorrt_llm_files(arguments.source)
    else:
        files = published.engine_files(name, arguments.release, arguments.wheel)
    if name == "transformers":
        sys.path.insert(0, str(files))
        os.environ["HF_HUB_OFFLINE"] = "1"
        assert str(files) in str(importlib.import_module("transformers").__file__), "another transformers is imported"
    modules = case_modules(name)
    if name != "vllm":
        options = {"names": getattr(modules[0], "STAND_INS", {}), "served": getattr(modules[0], "SERVED", ())}
    first, step = map(int, arguments.share.split("/"))
    chosen = [case for module in modules for case in module.cases() if arguments.only in case.name][first::step]
    results = run_cases(chosen, arguments.engine, files, VLLM if name == "vllm" else {}, **options)
    if arguments.record is not None:
        with arguments.record.open("a", encoding="utf-8") as file:
            for row in rows(name, arguments.release or published.TENSORRT_LLM, zip(chosen, results, strict=True)):
                file.write(json.dumps(row) + "\n")
    return results


def case_modules(name: str) -> list[Any]:
    return [importlib.import_module(f"tools.upstream.{module}") for module in ENGINES[name]]


def rows(engine: str, release: str, ran: Iterable[tuple[Case, Result]]) -> list[Row]:
    """(engine, release, entry point, generation, cases, agreement) for each entry point on `triton_kernels`."""
    held: dict[tuple[str, str], list[Result]] = {}
    for case, result in ran:
        if engine != "vllm" or (case.name.startswith("a ") and "Naive" not in case.name):
            entry = case.name.removeprefix("a ").partition(",")[0]
            held.setdefault((entry, case.generation or "3.5"), []).append(result)
    found = []
    for (entry, generation), results in held.items():
        agree, bound = sum(not result.failed for result in results), max(result.bound for result in results)
        entry = f"`{entry}`" if " " not in entry else entry
        within = "bitwise" if bound == 0 else f"within {bound}"
        found.append((engine, release, entry, generation, f"{agree} of {len(results)}", within))
    return found


def render(table: list[Row]) -> str:
    heading = ("engine", "release", "entry point", "interface of Triton", "cases", "agreement")
    merged: dict[Row, list[str]] = {}
    for engine, release, *rest in table:
        merged.setdefault((engine, *rest), []).append(release)
    lines = [(engine, ", ".join(dict.fromkeys(names)), *rest) for (engine, *rest), names in merged.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in (heading, ("---",) * len(heading), *lines))


def write(text: str) -> None:
    """Rows of TensorRT-LLM stay where its files are absent."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    mark = "| tensorrt-llm "
    if mark not in text:
        text = "\n".join([text, *(line for line in rest.partition(END)[0].splitlines() if line.startswith(mark))])
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", "utf-8")


def recorded(path: pathlib.Path) -> list[Row]:
    return [tuple(json.loads(line)) for line in path.read_text("utf-8").splitlines()]
