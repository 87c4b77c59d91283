"""Commands: each says its version, `python -m moe_core` lists them, and CI's scripts explain themselves."""

from __future__ import annotations

import pathlib
import pkgutil
import subprocess
import tomllib

import pytest

import moe_core
from moe_core.__main__ import COMMANDS, main
from moe_core.checkpoint import ConversionReport
from moe_core.errors import InvalidInput
from moe_core.formats import format_named
from tests.support.paths import ROOT

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


@pytest.mark.parametrize("output", ["nowhere/x.json", "."])
@pytest.mark.parametrize("command", [
    "moe-parity --json", "moebius-choose olmoe-7b --json", "moe-parity --html", "moebius-view no --output",
    "moebius-convert no no --format int8_channel --json", "moebius-tune --preset mixtral-8x7b --output",
    "moebius-tune --links --output",
])  # fmt: skip
def test_outputs_open_before_the_work(
    command: str, output: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = command.split()
    assert pkgutil.resolve_name(SCRIPTS[name])([*arguments, str(tmp_path / output)]) == 2
    said = capsys.readouterr()
    assert f"{name}: could not run: {arguments[-1]} must be a path to write to, got {tmp_path / output}" in said.err
    assert said.out == "" and "Traceback" not in said.err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "worker", "arguments"),
    [
        ("moe-parity", "moe_core.parity.cli._listing", ["--list"]),
        ("moebius-convert", "moe_core.tools.convert_cli.convert_checkpoint", ["a", "b", "--format", "int8_channel"]),
        ("moebius-doctor", "moe_core.tools.doctor.cli.diagnose", []),
        ("moebius-view", "moe_core.view.cli.view_page", ["trace"]),
        ("moebius-choose", "moe_core.tools.choose.cli.choose_parallelism", ["olmoe-7b"]),
        ("moebius-tune", "moe_core.tools.tune.cli._products", ["--preset", "mixtral-8x7b"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("error", [OSError("full"), RuntimeError("broken"), InvalidInput("x must be y")], ids=repr)
def test_only_differences_exit_with_1(
    name: str, worker: str, arguments: list[str], error: Exception,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(worker, fail)
    assert pkgutil.resolve_name(SCRIPTS[name])(arguments) == 2
    said = capsys.readouterr().err
    assert str(error) in said and ("Traceback" in said) == isinstance(error, RuntimeError)


def test_a_report_that_cannot_be_written_at_the_end(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def convert(source: str, destination: str, *arguments: object, **options: object) -> ConversionReport:
        (tmp_path / "full").rmdir()
        return ConversionReport(format_named("int8_channel"), (), 1, 1)

    monkeypatch.setattr("moe_core.tools.convert_cli.convert_checkpoint", convert)
    (tmp_path / "full").mkdir()
    arguments = ["a", str(tmp_path / "b"), "--format", "int8_channel", "--json", str(tmp_path / "full" / "x.json")]
    assert pkgutil.resolve_name(SCRIPTS["moebius-convert"])(arguments) == 2
    said = capsys.readouterr()
    assert "int8_channel: experts" in said.out and f"{tmp_path / 'b'} is written, its report is not: " in said.err


@pytest.mark.parametrize("script", [".ci/run", ".ci/daily"])
def test_scripts_of_ci_explain_instead_of_starting(script: str) -> None:
    helped, wrong = (
        subprocess.run([ROOT / script, option], capture_output=True, text=True, timeout=20)
        for option in ("--help", "--nonesuch")
    )
    assert (helped.returncode, wrong.returncode) == (0, 2)
    assert "usage: PYTHON=" in helped.stdout and "  torch without jax\n" in helped.stdout
