"""Tests of the tests: a fault planted in any kernel turns the parity tool red at the right stage, or its op's tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults.backward import FAULTS as BACKWARD_FAULTS
from tests.support.faults.forward import FAULTS, Fault
from tests.support.faults.kernel_copies import OpFault, kernel_files, plant
from tests.support.faults.low_rank import LOW_RANK_FAULTS
from tests.support.faults.op_tests import FINDERS, PACKAGES, faults_of, finder_in, run_tests_on_copies
from tests.support.faults.pdl import FAULTS as PDL_FAULTS
from tests.support.faults.quantized import FAULTS as QUANTIZED_FAULTS
from tests.support.faults.sm90 import FAULTS as SM90_FAULTS
from tests.support.faults.sm90 import MIXED_INPUT_TALL_FAULTS, SWAPPED_FAULTS, TALL_FAULTS
from tests.support.paths import ROOT

#: Kernel files whose faults share a process, since importing the frameworks takes longer than finding a fault.
GROUPS = (
    ("routing.kernels.layout", "routing.kernels.schedule", "routing.kernels.route_and_layout",
        "routing.kernels.bitmatrix", "moe.kernels.chained", "moe.kernels.one_token"),
    ("router.kernels.router", "routing.kernels.topk", "common.kernels.rows", "matmul.portable.kernel",
        "activation.kernels.formulas", "activation.kernels.forward", "reduction.kernels.reduce",
        "common.kernels.zero_rows", "matmul.quantized.kernel", "quantize.kernels.rows"),
)  # fmt: skip


def run_parity_on(folders: dict[Path, Fault]) -> None:
    """Run the parity tool once per folder of kernels, each on its fault's case, through Triton's interpreter."""
    plan = [
        [
            str(folder),
            [
                *("--engines", "reference,torch", "--case", fault.case, "--dtype", "float32"),
                *("--tokens", str(fault.tokens), "--json", str(folder / "report.json")),
            ],
        ]
        for folder, fault in folders.items()
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run(
        [sys.executable, "-m", "tests.support.faults.forward", json.dumps(plan)], cwd=ROOT, env=environment, check=True
    )


def test_every_kernel_file_has_faults() -> None:
    # Aggregates compute nothing.
    files = set(kernel_files()) - {"common.kernels.aggregates"}
    # Gluon has no interpreter: tests/ops/matmul/sm90/test_faults.py runs the Hopper kernels' faults on a GPU.
    # Waiting shows in what is compiled alone: tests/ops/moe/test_pdl.py runs the faults of launches that overlap.
    planted = (SM90_FAULTS, TALL_FAULTS, SWAPPED_FAULTS, MIXED_INPUT_TALL_FAULTS, LOW_RANK_FAULTS, PDL_FAULTS)
    compiled = {name for products in planted for found in products.values() for name in found}
    # Faults in the order of its stages: tests/ops/matmul/test_hopper_order.py.
    compiled.add("matmul.sm90.kernels.tail")
    assert set(FAULTS) | {name for _, _, name, _ in chain(*map(faults_of, PACKAGES))} | compiled == files
    assert set(FAULTS) == {name for group in GROUPS for name in group}


def number_of(faults: Any) -> int:
    """The faults in dictionaries and tuples of them."""
    if isinstance(faults, dict):
        return sum(map(number_of, faults.values()))
    return sum(map(number_of, faults)) if isinstance(faults, tuple) else isinstance(faults, OpFault | Fault)


def test_no_fault_was_lost() -> None:
    """Fewer than these are a decision, to be written down here."""
    known = ((FAULTS, 42), (BACKWARD_FAULTS, 58), (QUANTIZED_FAULTS, 15), (SM90_FAULTS, 41), (PDL_FAULTS, 17))
    for faults, least in (*known, (TALL_FAULTS, 9), (MIXED_INPUT_TALL_FAULTS, 5), (LOW_RANK_FAULTS, 17)):
        assert number_of(faults) >= least, next(iter(faults))


def test_every_fault_has_its_place() -> None:
    """The line that each replaces stands in its kernel file, and no other has a test of an op."""
    compiled = (SM90_FAULTS, TALL_FAULTS, SWAPPED_FAULTS, MIXED_INPUT_TALL_FAULTS, LOW_RANK_FAULTS, PDL_FAULTS)
    of_ops = {name: (kernel_file, (fault,)) for name, _, kernel_file, fault in chain(*map(faults_of, PACKAGES))}
    assert set(json.loads(FINDERS.read_text())) == set(of_ops)
    planted = [*FAULTS.items(), *of_ops.values()]
    planted += [item for products in compiled for files in products.values() for item in files.items()]
    files = kernel_files()
    lost = [
        (name, fault.old) for name, faults in planted for fault in faults if fault.old not in files[name].read_text()
    ]
    assert not lost, lost


def test_unchanged_kernels_pass(tmp_path: Path) -> None:
    """The control: what turns the others red is the fault, not the copying."""
    cases = {fault.case for faults in FAULTS.values() for fault in faults}
    folders = {tmp_path / case: Fault("", "", case, "") for case in sorted(cases)}
    for folder, fault in folders.items():
        plant("", fault, folder)
    run_parity_on(folders)
    for folder in folders:
        assert (folder / "status").read_text() == "0", (folder / "log").read_text()


@pytest.mark.parametrize("kernel_files", GROUPS)
def test_faults_are_found_at_their_stage(kernel_files: tuple[str, ...], tmp_path: Path) -> None:
    folders = {
        tmp_path / f"{kernel_file}-{number}": fault
        for kernel_file in kernel_files
        for number, fault in enumerate(FAULTS[kernel_file])
    }
    for folder, fault in folders.items():
        plant(folder.name.partition("-")[0], fault, folder)
    run_parity_on(folders)
    for folder, fault in folders.items():
        log = (folder / "log").read_text()
        assert (folder / "status").read_text() == "1", f"{folder.name}: {fault} did not turn parity red\n{log}"
        (case,) = json.loads((folder / "report.json").read_text())["cases"]
        (engine,) = case["engines"]
        assert engine["first_divergent_stage"] == fault.stage, f"{folder.name}: {fault}\n{log}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("packages", PACKAGES)
def test_faults_are_found_by_the_tests_of_ops(packages: tuple[str, ...], tmp_path: Path) -> None:
    """The control is unchanged: what fails the others is the fault, not the copying, since the tests that fail there
    pass here."""
    finders = json.loads(FINDERS.read_text())
    folders = run_tests_on_copies(packages, tmp_path, finders)
    for name, folder in folders.items():
        log = (folder / "log").read_text()
        wanted = pytest.ExitCode.OK if name == "control" else pytest.ExitCode.TESTS_FAILED
        assert (folder / "status").read_text() == str(int(wanted)), f"{name}\n{log}"
        assert name == "control" or "AssertionError" in log, f"{name} broke the kernel instead of its numbers\n{log}"
    found = {name: finder_in(folder) for name, folder in folders.items() if name != "control"}
    others = {name: test for name, test in found.items() if test != finders.get(name)}
    assert not others, f"{others} are not in {FINDERS.name}; run `python -m tests.support.faults.op_tests --record`"
