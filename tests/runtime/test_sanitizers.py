"""NVIDIA's checkers find faults planted in Triton kernels on torch's memory, which `make memcheck` relies on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKER = shutil.which("compute-sanitizer")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(CHECKER is None, reason="compute-sanitizer is not on PATH")]

PROGRAM = """
import sys
import torch, triton
import triton.language as tl

@triton.jit
def copy(source, target, OFFSET: tl.constexpr):
    places = tl.arange(0, 256)
    tl.store(target + places, tl.load(source + OFFSET + places))

fault = sys.argv[1]
source = torch.empty(256, device="cuda")
if fault != "unwritten":
    source.zero_()
copy[(1,)](source, torch.zeros(256, device="cuda"), OFFSET=1 << 20 if fault == "outside" else 0)
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
"""


@pytest.mark.parametrize(
    ("tool", "fault", "message"),
    [
        ("memcheck", "outside", "Invalid __global__ read"),
        ("memcheck", "none", None),
        ("initcheck", "unwritten", "Uninitialized __global__ memory read"),
        ("initcheck", "none", None),
    ],
)
def test_a_checker_finds_a_fault(tool: str, fault: str, message: str | None, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [str(CHECKER), "--target-processes", "all", "--tool", tool, sys.executable, str(program), fault]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert "ERROR SUMMARY: 0 errors" in done.stdout if message is None else message in done.stdout, done.stdout
