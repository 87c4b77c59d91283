"""Commands: each says its version, `python -m moe_core` lists them, and CI's scripts explain themselves."""

from __future__ import annotations

import pkgutil
import subprocess
import tomllib

import pytest

import moe_core
from moe_core.__main__ import COMMANDS, main
from tests.support.paths import ROOT
from tests.support.runtime.isolation import run_blocked

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_command_says_its_version(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        pkgutil.resolve_name(SCRIPTS[name])(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"{name} {moe_core.__version__}\n"


def test_the_core_lists_versions_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(COMMANDS) == set(SCRIPTS)
    assert main([]) == 0
    text = capsys.readouterr().out
    assert f"\nmoebius         {moe_core.__version__}\n" in text and "\nnumpy           " in text
    assert all(f"\n  {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("script", [".ci/run", ".ci/daily"])
def test_scripts_of_ci_explain_instead_of_starting(script: str) -> None:
    helped, wrong = (
        subprocess.run([ROOT / script, option], capture_output=True, text=True, timeout=20)
        for option in ("--help", "--nonesuch")
    )
    assert (helped.returncode, wrong.returncode) == (0, 2)
    assert "usage: PYTHON=" in helped.stdout and "  torch without jax\n" in helped.stdout


def test_a_machine_without_triton_is_told_what_is_missing() -> None:
    """As on macOS: layers run, and the tools say why no kernel does."""
    run_blocked(
        ("triton", "jax"),
        """
import contextlib, io
import torch
from moe_core.parity.cli import main
from moe_core.tools.doctor.cli import diagnose
from moe_torch import MoE

assert MoE(32, 32, 4, 2)(torch.ones(3, 32)).shape == (3, 32)
said = io.StringIO()
with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
    assert main(["--case", "llama4", "--dtype", "float32", "--tokens", "5"]) == 1
assert "no kernel can run here, because Triton is not installed" in said.getvalue(), said.getvalue()
assert "left out: jax, which needs jax" in said.getvalue(), said.getvalue()
untrusted = list(diagnose(lambda line: None).untrusted())
assert any("Triton is not installed" in line for line in untrusted), untrusted
""",
    )
