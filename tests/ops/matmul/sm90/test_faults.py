"""Faults planted into kernels of sm_90 change a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.faults.kernel_copies import NO_FAULT, run_on_faulty_copies
from tests.support.faults.low_rank import LOW_RANK_FAULTS
from tests.support.faults.sm90 import (
    FAULTS,
    MIXED_INPUT_TALL_FAULTS,
    RESULT_DIFFERS,
    SWAPPED_FAULTS,
    TALL_FAULTS,
)
from tests.support.matmul.sm90 import needs_sm_90

on_families = pytest.mark.parametrize(
    "faults",
    [FAULTS, TALL_FAULTS, SWAPPED_FAULTS, MIXED_INPUT_TALL_FAULTS, LOW_RANK_FAULTS],
    ids=["sm90", "tall", "swapped", "mixed", "low_rank"],
)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@on_families
def test_faults_are_found(tmp_path: Path, faults: Any) -> None:
    """The unchanged copy is the control: what fails the others is the fault, not the copying."""
    needs_sm_90()
    for folder, fault in run_on_faulty_copies("sm90", tmp_path, faults, "run").items():
        wanted = 0 if fault is NO_FAULT else RESULT_DIFFERS
        assert (folder / "status").read_text() == str(wanted), f"{fault}\n{(folder / 'log').read_text()}"
