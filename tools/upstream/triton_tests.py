"""Runs the tests of Triton's `triton_kernels` with our compat in the place of what they test."""

from __future__ import annotations

import os
import pathlib
import sys
from typing import NoReturn

from tools.upstream.published import ROOT, triton_kernels_files

#: Variables for the plugin: the generation that is tested.
GENERATION = "UPSTREAM_GENERATION"
#: I/N: the tests of this process.
SHARE = "UPSTREAM_SHARE"

#: By generation, the files whose names compat has; others test kernels and memory layouts that it does not have.
FILES = {
    "3.5": ("test_routing.py", "test_swiglu.py", "test_mxfp.py", "test_matmul.py"),
    "3.8": ("test_topk.py", "test_swiglu.py", "test_compaction.py", "test_reduce.py", "test_matmul.py"),
}


def run_tests(source: pathlib.Path | None, only: str, generation: str, share: str) -> NoReturn:
    """Becomes pytest, which prints the failures grouped by what they say. Raises Missing without the files."""
    import torch

    folder = triton_kernels_files(source, generation).resolve()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = [sys.executable, "-m", "pytest", "-q", "-rN", "--tb=no", "-p", "tools.upstream.triton_plugin"]
    # Without the settings of this repository, in whose build folder the tests may lie.
    command += ["-c", os.devnull, f"--rootdir={folder}", "-p", "no:cacheprovider", "--device", device]
    command += [*(["-k", only] if only else []), *(f"tests/{name}" for name in FILES[generation])]
    path = os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, GENERATION: generation, SHARE: share}
    os.chdir(folder)
    os.execve(sys.executable, command, environment)
