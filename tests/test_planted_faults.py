"""Tests of the tests: a fault planted in any kernel turns the parity tool red, at the right stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backward_faults import FAULTS as BACKWARD_FAULTS
from tests.faulty_kernels import KERNELS, plant
from tests.hopper_faults import FAULTS as HOPPER_FAULTS
from tests.hopper_faults import MIXED_TALL_FAULTS, TALL_FAULTS
from tests.overlap_faults import FAULTS as OVERLAP_FAULTS
from tests.planted_faults import FAULTS, Fault
from tests.quantized_faults import FAULTS as QUANTIZED_FAULTS

ROOT = Path(__file__).parents[1]
#: Kernel files whose faults share a process, since importing the frameworks takes longer than finding a fault.
GROUPS = (
    ("router", "topk"),
    ("layout", "schedule", "route_and_layout", "bitmatrix", "chained", "one_token"),
    ("matmul_ogs", "activation", "reduction", "matmul_quantized", "quantize_rows"),
)


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
        [sys.executable, "-m", "tests.planted_faults", json.dumps(plan)], cwd=ROOT, env=environment, check=True
    )


def test_every_kernel_file_has_faults() -> None:
    files = {path.stem for path in KERNELS.glob("*.py")} - {"__init__"}
    # Gluon has no interpreter: tests/test_hopper.py, test_hopper_tall.py and test_hopper_mixed_tall.py run the Hopper
    # kernels' faults on a GPU.
    # Waiting shows in what is compiled alone: tests/test_overlap.py runs the faults of launches that overlap.
    planted = (HOPPER_FAULTS, TALL_FAULTS, MIXED_TALL_FAULTS, OVERLAP_FAULTS)
    compiled = {name for products in planted for found in products.values() for name in found}
    quantized = {name for found in QUANTIZED_FAULTS.values() for name, _ in found}
    assert set(FAULTS) | set(BACKWARD_FAULTS) | quantized | compiled == files
    assert set(FAULTS) == {name for group in GROUPS for name in group}


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
