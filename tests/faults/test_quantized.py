"""Tests of the tests: a fault planted in a kernel of quantised operands makes its op's tests fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.faults.kernel_copies import NO_FAULT, OpFault, plant
from tests.support.faults.quantized import FAULTS
from tests.support.paths import ROOT


@pytest.mark.parametrize("tests", list(FAULTS))
def test_faults_are_found(tests: str, tmp_path: Path) -> None:
    """The first copy is unchanged, as a control: what fails the others is the fault, not the copying, since the tests
    that fail there pass here."""
    folders: dict[Path, OpFault] = {}
    for number, (kernel_file, fault) in enumerate((("", NO_FAULT), *FAULTS[tests])):
        folders[tmp_path / str(number)] = fault
        plant(kernel_file, fault, tmp_path / str(number))
    command = [sys.executable, "-m", "tests.support.faults.backward", tests, *map(str, folders)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    for folder, fault in folders.items():
        log = (folder / "log").read_text()
        wanted = pytest.ExitCode.OK if fault is NO_FAULT else pytest.ExitCode.TESTS_FAILED
        assert (folder / "status").read_text() == str(int(wanted)), f"{fault}\n{log}"
        assert fault is NO_FAULT or "AssertionError" in log, f"{fault} broke the kernel instead of its numbers\n{log}"
