"""`moe-parity --ranks`: runs that agree, and every kind of fault that it must report."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("jax", reason="needs JAX")

from moe_core.errors import InvalidInput
from moe_core.parallel.placement import shard_experts
from moe_core.parity import cli
from moe_core.parity.builtin_cases import Draw, built_in_case
from moe_core.parity.ranks import RanksRun, run_ranks
from moe_core.specs.operands import ExpertWeights
from moe_torch.parity.ranks import _compute
from tests.support.paths import ROOT
from tests.support.torch import running_on

CASE = built_in_case("qwen3_moe", Draw("float32", num_tokens=9))


def quiet(text: str) -> None:
    """No progress."""


@pytest.fixture(scope="module")
def sound() -> Callable[..., RanksRun]:
    """What two ranks without a fault give: parts of one device's results."""
    with running_on("reference"):
        found: dict[int, Any] = {}

        def run(name: str, whole: Any, parts: Any) -> RanksRun:
            if not found:
                found[0] = _compute(whole)[1]
            alone, ranks = found[0], []
            placement = parts[0].placement
            experts = ExpertWeights(alone["d_experts.gate_up"], alone["d_experts.down"])
            shards = shard_experts(experts, placement)
            for rank, part in enumerate(parts):
                rows = slice(rank * len(part.case.x), (rank + 1) * len(part.case.x))
                own = {key: alone[key][rows].copy() for key in ("ids", "weights", "output", "d_x")}
                counts = np.bincount(own["ids"].ravel(), minlength=whole.case.num_experts)
                own["tokens_per_expert"] = counts
                own["received_per_expert"] = alone["tokens_per_expert"][list(placement.owners[rank])].copy()
                own["d_experts.gate_up"], own["d_experts.down"] = shards[rank].gate_up, shards[rank].down
                own["d_routing.weight"] = alone["d_routing.weight"] / len(parts)
                ranks.append(own)
            return RanksRun("numpy", alone, ranks)

        yield run  # pyright: ignore[reportReturnType]


def test_ranks_without_a_fault_agree(sound: Any) -> None:
    report = run_ranks(CASE, 2, ["torch"], quiet, sound)
    assert report.agrees and report.sizes["T"] == 8 and report.sizes["W"] == 2
    assert "received rows" in str(report) and "agrees with one device" in str(report)


FAULTS = {
    "ids": "ids",
    "weights": "weights",
    "tokens_per_expert": "tokens per expert",
    "received_per_expert": "received rows",
    "output": "output",
    "d_x": "d_x",
    "d_experts.down": "d_experts.down",
    "d_routing.weight": "d_routing.weight",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_reported(sound: Any, name: str) -> None:
    """One number of one rank, by its last bit where numbers are floats; of a sum over ranks, by more."""

    def run(*arguments: Any) -> RanksRun:
        found = sound(*arguments)
        array = found.ranks[1][name] = found.ranks[1][name].copy()
        first = array.reshape(-1)
        if array.dtype.kind == "i":
            first[0] += 1
        else:
            first[:1] = 2 * first[:1] + 100 if "routing" in name else np.nextafter(first[:1], np.float32(9))
        return found

    report = run_ranks(CASE, 2, ["torch"], quiet, run)
    assert report.differs and report.reports[0].first_divergent == FAULTS[name]


def test_what_cannot_run_is_said() -> None:
    with pytest.raises(InvalidInput, match="tokens must be at least one for each of 16 ranks, got 9"):
        run_ranks(CASE, 16, ["torch"], quiet)
    with pytest.raises(InvalidInput, match="engines must be of torch, jax with --ranks, got 'triton_kernels'"):
        run_ranks(CASE, 2, ["triton_kernels"], quiet)
    quantized = run_ranks(built_in_case("qwen3_moe_int4", Draw(num_tokens=4)), 2, ["torch"], quiet)
    assert quantized.reports[0].skipped == "the comparison of ranks takes plain experts only"


def test_a_skipped_case_does_not_count_as_agreeing(sound: Any) -> None:
    quantized = built_in_case("qwen3_moe_int4", Draw(num_tokens=4))
    report, skipped = run_ranks(CASE, 2, ["torch"], quiet, sound), run_ranks(quantized, 2, ["torch"], quiet)
    agree = "agrees with one device: torch (2 ranks, numpy)"
    left_out = "skipped: qwen3_moe_int4 on 2 ranks bfloat16"
    assert cli._conclude([report, skipped]) == (cli.AGREE, f"1 case {agree}; 1 {left_out}")
    assert cli._conclude([report, report]) == (cli.AGREE, f"all 2 cases {agree.replace('agrees', 'agree')}")
    assert cli._conclude([report, skipped, report])[1] == f"2 cases {agree.replace('agrees', 'agree')}; 1 {left_out}"
    assert cli._conclude([skipped])[0] == cli.COULD_NOT_RUN


def test_the_command_compares_ranks_of_both_front_ends() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "moe_core.parity", "--ranks", "2", "--case", "qwen3_moe", "--dtype", "float32"]
    done = subprocess.run(
        [*command, "--tokens", "8", "--verbose"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert "torch on 2 ranks, numpy" in done.stdout and "jax on 2 ranks, numpy" in done.stdout
    assert "1 case agrees with one device" in done.stdout
