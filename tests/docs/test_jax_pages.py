"""Pages on several devices of JAX, and examples on a GPU."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests.support.pages import commands, skip_without_its_transformers
from tests.support.paths import ROOT

FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Words of a recipe -> (kinds of axes, the error that the pages announce for it in a program for several devices).
REFUSED = {
    "capture(lambda model": (["Auto", "Explicit"], "function must call its MoE layers outside of jit"),
}
#: Errors of JAX's functions beside ours.
OF_JAX = "Explicit sharding inference for ragged_dot_general is not currently implemented"
#: Recipes of devices outside of JAX's meshes.
ELSEWHERE = ("torch", "jax.experimental.topologies")
_DRIVER = """
import contextlib, functools, json, sys, traceback
import jax
from jax.sharding import AxisType

kind, recipes, refused, of_jax = json.loads(sys.stdin.read())
kind = AxisType[kind]
make_mesh = jax.make_mesh
def of_kind(sizes, names, axis_types=None, **more):
    return make_mesh(sizes, names, axis_types=axis_types or (kind,) * len(sizes), **more)
jax.make_mesh = of_kind
failed = []
for place, source in recipes:
    around = contextlib.nullcontext()
    if "make_mesh" not in source:
        around = jax.set_mesh(of_kind((jax.device_count(),), ("data",)))
    known = [error for words, (kinds, error) in refused.items() if words in source and kind.name in kinds]
    wanted = known if jax.device_count() > 1 else []
    try:
        with around:
            exec(compile(source, place, "exec", dont_inherit=True), {"__name__": "__main__"})
        failed += [f"{place} must raise {one}" for one in wanted]
    except BaseException as error:
        if not any(one in str(error) for one in (*wanted, of_jax)):
            failed.append(f"{place}: {traceback.format_exc(limit=-3)}")
print("FAILED" + json.dumps(failed))
"""


def recipes() -> list[tuple[str, str]]:
    """(page:line, source)"""
    found = []
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/user/*.md"))):
        text = page.read_text()
        for fence in FENCE.finditer(text):
            line, source = text.count("\n", 0, fence.start()) + 2, fence[1]
            if re.search(r"\bimport (moe_)?jax\b|from moe_jax", source) and not any(one in source for one in ELSEWHERE):
                found.append((f"{page.relative_to(ROOT)}:{line}", source))
    return found


def test_recipes_are_found() -> None:
    places = [place for place, _ in recipes()]
    assert len(places) > 15 and sum("parallel-jax" in place for place in places) >= 5


EVERY = os.environ.get("MOEBIUS_RECIPES") == "all"
MESHES = [(devices, kind) for devices in (1, 4, 8) for kind in ("Auto", "Explicit")] if EVERY else [(4, "Explicit")]


@pytest.mark.parametrize(("devices", "kind"), MESHES)
def test_recipes_run_on_meshes(devices: int, kind: str, tmp_path: pathlib.Path) -> None:
    chosen = [recipe for recipe in recipes() if EVERY or "make_mesh" in recipe[1]]
    hidden = ("TRITON_INTERPRET", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER],
        cwd=tmp_path, env=environment, input=json.dumps([kind, chosen, REFUSED, OF_JAX]),
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    _, _, failed = done.stdout.rpartition("FAILED")
    assert done.returncode == 0, done.stderr
    assert not json.loads(failed), "\n\n".join(json.loads(failed))


EXAMPLES = sorted(ROOT.glob("examples/*.py"))
COMMANDS = [
    command
    for path in EXAMPLES
    for command in commands(ast.get_docstring(ast.parse(path.read_text()), clean=False) or "")
    if "examples/" in command
]


def test_examples_document_commands() -> None:
    named = {pathlib.Path(word).name for command in COMMANDS for word in command.split() if word.endswith(".py")}
    assert {"decode_loop.py", "lora_gpt_oss.py", "transformers_timing.py", "train_torch_parallel.py"} <= named
    assert all(re.match("(python|torchrun) ", command) for command in COMMANDS)


@pytest.mark.gpu
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, tmp_path: pathlib.Path) -> None:
    """In a folder of its own, so that what it writes goes with it."""
    import torch

    (example,) = re.findall(r"examples/\w+\.py", command)
    skip_without_its_transformers((ROOT / example).read_text())
    program, *words = [str(ROOT / word) if word.startswith("examples/") else word for word in shlex.split(command)]
    if program == "torchrun":
        ranks = int(words[words.index("--nproc-per-node") + 1])
        if torch.cuda.device_count() < ranks:
            pytest.skip(f"needs {ranks} GPUs")
        words = ["-m", "torch.distributed.run", "--standalone", *words]
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "XLA_FLAGS")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    print(done.stdout)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
    assert done.stdout.strip() and "no CUDA device" not in done.stdout
