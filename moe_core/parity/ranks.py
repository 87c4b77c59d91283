"""Compare ranks of gloo in torch, and host devices in JAX, with one device, bit by bit: `moe-parity --ranks`."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedTensor
from moe_core.parallel import Placement
from moe_core.parallel.placement import gather_experts, shard_experts
from moe_core.parity.case import Case
from moe_core.parity.compare import stage_row
from moe_core.parity.gradients import differentiated, gradient_row, gradient_tolerances, upstream
from moe_core.parity.report import CaseReport, Report, StageRow
from moe_core.parity.tolerance import EXACT

#: Front-end -> its module with `run_ranks(parts, whole)`.
FRONT_ENDS = {"torch": "moe_torch.parity.ranks", "jax": "moe_jax.parity_ranks"}
_BY_TOKEN = ("ids", "weights", "output", "d_x")


class Part(NamedTuple):
    """One rank's case and its output gradient. For one device placement is None."""

    case: Case
    d_output: np.ndarray
    placement: Placement | None = None


class RanksRun(NamedTuple):
    """Results of one device (alone) and of every rank (ranks), by name: `ids`, `weights`, `output`,
    `tokens_per_expert`, `received_per_expert` (ranks only) and gradients `d_...`."""

    device: str
    alone: Mapping[str, np.ndarray]
    ranks: Sequence[Mapping[str, np.ndarray]]


def why_not_across_ranks(case: Case) -> str | None:
    """The reason a case cannot run across ranks, or None."""
    if case.spec.apply_router_weight_on_input:
        return "apply_router_weight_on_input cannot be had across ranks"
    if isinstance(case.experts.gate_up, QuantizedTensor):
        return "the comparison of ranks takes plain experts only"
    return None


def parts_of(case: Case, num_ranks: int) -> tuple[Part, list[Part]]:
    """An even share of tokens, and each rank's case."""
    tokens = len(case.x) // num_ranks * num_ranks
    if not tokens:
        raise InvalidInput(f"tokens must be at least one for each of {num_ranks} ranks, got {len(case.x)}; pass more")

    def cut(rows: slice, **others: Any) -> Case:
        mask = None if case.token_mask is None else case.token_mask[rows]
        return dataclasses.replace(case, x=case.x[rows], token_mask=mask, **others)

    whole = cut(slice(0, tokens))
    d_output, placement = upstream(whole)["output"], Placement.linear(case.num_experts, num_ranks)
    parts, each = [], tokens // num_ranks
    for rank, experts in enumerate(shard_experts(case.experts, placement)):
        rows = slice(rank * each, (rank + 1) * each)
        parts.append(Part(cut(rows, experts=experts), d_output[rows], placement))
    return Part(whole, d_output), parts


def run_ranks(
    case: Case, num_ranks: int, names: Sequence[str], progress: Callable[[str], object], run: Any = None
) -> CaseReport:
    """Compare a case on `num_ranks` ranks with one device, in every front-end."""
    whole, parts = parts_of(case, num_ranks)
    reports, reason = [], why_not_across_ranks(case)
    for name in names:
        if name not in FRONT_ENDS:
            raise InvalidInput(f"engines must be of {', '.join(FRONT_ENDS)} with --ranks, got {name!r}; leave it out")
        if reason is not None:
            reports.append(Report(name, "", (), skipped=reason, against="one device"))
            continue
        progress(f"{name}: {num_ranks} ranks and one device")
        outcome = (run or _in_new_processes)(name, whole, parts)
        rows = tuple(_rows(whole, parts, outcome))
        reports.append(Report(name, f"{num_ranks} ranks, {outcome.device}", rows, against="one device"))
    sizes = whole.case.sizes | {"W": num_ranks}
    return CaseReport(f"{case.name} on {num_ranks} ranks", case.dtype, sizes, case.description, tuple(reports))


def _rows(whole: Part, parts: Sequence[Part], run: RanksRun) -> Iterator[StageRow]:
    alone, placement = run.alone, parts[0].placement
    assert placement is not None
    tolerances = gradient_tolerances(whole.case)

    def joined(name: str) -> np.ndarray:
        return np.concatenate([rank[name] for rank in run.ranks])

    def same(name: str, expected: np.ndarray, found: np.ndarray, note: str = "") -> StageRow:
        # fp32 holds every smaller float, and NaN.
        return stage_row(name, np.asarray(expected, np.float32), np.asarray(found, np.float32), EXACT, note)

    for name in ("ids", "weights"):
        yield same(name, alone[name], joined(name))
    counts = alone["tokens_per_expert"]
    yield same("tokens per expert", counts, np.sum([rank["tokens_per_expert"] for rank in run.ranks], axis=0))
    received = [int(rank["received_per_expert"].sum()) for rank in run.ranks]
    held = placement.tables.expert_of_place
    wanted = np.where(held < 0, 0, counts[np.maximum(held, 0)])
    yield same("received rows", wanted, joined("received_per_expert"), f"by rank: {', '.join(map(str, received))}")
    yield same("output", alone["output"], joined("output"))
    for name in (f"d_{name}" for name in differentiated(whole.case)):
        if name in _BY_TOKEN:
            yield same(name, alone[name], joined(name))
        elif name.startswith("d_experts."):
            yield same(name, alone[name], gather_experts([rank[name] for rank in run.ranks], placement))
        else:
            # The sum over ranks has another order than on one device.
            total = np.sum([rank[name].astype(np.float32) for rank in run.ranks], axis=0)
            yield gradient_row(name, alone[name], total.astype(alone[name].dtype), tolerances)


def _in_new_processes(name: str, whole: Part, parts: Sequence[Part]) -> RanksRun:
    variables = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={len(parts)}"}
    variables |= {"TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET", "1"), "OPENBLAS_NUM_THREADS": "1"}
    if platform.machine() in ("x86_64", "AMD64"):
        # The interpreter's products are NumPy's. OpenBLAS for newer processors adds up a row in an order that depends
        # on its position in the tile.
        variables["OPENBLAS_CORETYPE"] = "Sandybridge"
    context = multiprocessing.get_context("spawn")
    with _environment(variables), ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_run, name, whole, parts).result()


def _run(name: str, whole: Part, parts: Sequence[Part]) -> RanksRun:
    try:
        module = importlib.import_module(FRONT_ENDS[name])
    except ImportError as error:
        raise Unsupported(f"{name} cannot run on ranks: {error}; install it, or leave it out of --engines") from error
    return module.run_ranks(whole, parts)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def leaves_of(case: Case, put: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    return {name: put(array) for name, array in differentiated(case).items()}
