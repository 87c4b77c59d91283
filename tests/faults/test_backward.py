"""Tests of the tests: a fault planted in any kernel of the backward makes its op's tests fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.faults.backward import FAULTS, TESTS
from tests.support.faults.kernel_copies import NO_FAULT, plant
from tests.support.paths import ROOT


@pytest.mark.parametrize("kernel_file", list(FAULTS))
def test_faults_are_found(kernel_file: str, tmp_path: Path) -> None:
    """The first copy is unchanged, as a control: what fails the others is the fault, not the copying, since the tests
    that fail there pass here."""
    folders = {tmp_path / str(number): fault for number, fault in enumerate((NO_FAULT, *FAULTS[kernel_file]))}
    for folder, fault in folders.items():
        plant("" if fault is NO_FAULT else kernel_file, fault, folder)
    command = [sys.executable, "-m", "tests.support.faults.backward", TESTS[kernel_file], *map(str, folders)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    for folder, fault in folders.items():
        log = (folder / "log").read_text()
        wanted = pytest.ExitCode.OK if fault is NO_FAULT else pytest.ExitCode.TESTS_FAILED
        assert (folder / "status").read_text() == str(int(wanted)), f"{fault}\n{log}"
        assert fault is NO_FAULT or "AssertionError" in log, f"{fault} broke the kernel instead of its numbers\n{log}"
