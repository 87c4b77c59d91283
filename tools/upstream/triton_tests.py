"""Runs the tests of Triton's `triton_kernels` with our compat in the place of what they test."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from tools.upstream.published import ROOT, triton_kernels_files

#: The variable that tells the plugin which generation is tested.
GENERATION = "UPSTREAM_GENERATION"

#: By generation, the files whose names compat has; others test kernels and memory layouts that it does not have.
FILES = {
    "3.5": ("test_routing.py", "test_swiglu.py", "test_mxfp.py", "test_matmul.py"),
    "3.8": ("test_topk.py", "test_swiglu.py", "test_compaction.py", "test_reduce.py", "test_matmul.py"),
}


def run_tests(source: pathlib.Path | None, only: str, generation: str) -> int:
    """Status of pytest, which prints the failures grouped by what they say. Raises Missing without the files."""
    import torch

    folder = triton_kernels_files(source, generation).resolve()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = [sys.executable, "-m", "pytest", "-q", "-rN", "--tb=no", "-p", "tools.upstream.triton_plugin"]
    # Without the settings of this repository, in whose build folder the tests may lie.
    command += ["-c", os.devnull, f"--rootdir={folder}", "-p", "no:cacheprovider", "--device", device]
    command += [*(["-k", only] if only else []), *(f"tests/{name}" for name in FILES[generation])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), GENERATION: generation}
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode
