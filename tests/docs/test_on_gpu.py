"""What only a GPU shows: every command of an example's docstring runs there, at the sizes that it names."""

from __future__ import annotations

import ast
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests.support.pages import commands, skip_without_its_transformers
from tests.support.paths import ROOT

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
