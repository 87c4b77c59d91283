"""Compare another expert-parallel stack with the NumPy reference: `moe-parity --ranks W --against MODULE`."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_core.base import dtypes
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.moe.reference.backward import moe_backward_stages
from moe_core.parity.case import Case, token_count
from moe_core.parity.compare import stage_row
from moe_core.parity.gradients import gradient_row, gradient_tolerances
from moe_core.parity.reference_engine import reference_stages
from moe_core.parity.report import AGREE, DIFFER, NOT_TESTED, SKIPPED, CaseReport, Report, StageRow
from moe_core.parity.tolerance import stage_tolerances
from moe_core.specs import (
    Activation,
    ExpertWeights,
    MoEOperands,
    MoESpec,
    OutputGradients,
    RouterSpec,
    RouterWeights,
    TopK,
)  # fmt: skip

#: Routings by name.
LOADS = {
    "even": "random experts, equal numbers of tokens",
    "uneven": "each rank has another number of tokens",
    "hot_expert": "every token chooses one expert among others",
    "hot_rank": "experts of one rank only, with experts in order",
    "empty_rank": "no expert of one rank is chosen",
    "no_tokens": "one rank has no token, and takes part",
    "one_token": "one token in all",
    "one_expert": "K = 1",
    "all_experts": "K = E",
    "absent": "a third of the ids is -1, and some tokens have no expert",
    "nan": "one token is NaN, and no other may be; without gradients",
}
#: MODULE may define it: cases that it does not support, and why.
LEFT_OUT = "LEFT_OUT"
BUILD = "build(experts, num_experts)"
_WORKER = "moe_torch.parity.against"
_SECONDS = 300
_D, _F = 64, 96
_GRADIENTS = ("d_x", "d_routing.weights", "d_experts.gate_up", "d_experts.down")


class Problem(NamedTuple):
    """counts: tokens of each rank. The rest: of all tokens, in rank order. x `[T, D]`, ids int32 and weights fp32
    `[T, K]`, gate_up `[E, 2F, D]` (gates first) and down `[E, D, F]`."""

    load: str
    counts: tuple[int, ...]
    arrays: Mapping[str, np.ndarray]

    @property
    def differentiated(self) -> bool:
        return self.load != "nan"

    def of_rank(self, rank: int, name: str) -> np.ndarray:
        first = sum(self.counts[:rank])
        return self.arrays[name][first : first + self.counts[rank]]


class Outcome(NamedTuple):
    """`output` and gradients of each rank, None where the stack has none. error: why the case did not run."""

    device: str
    ranks: Sequence[Mapping[str, np.ndarray | None]]
    error: str = ""


def draw_problem(load: str, ranks: int, dtype: str, seed: int, tokens: int | None) -> Problem:
    """tokens: of each rank, about."""
    random = np.random.default_rng((seed, zlib.crc32(load.encode()), ranks))
    each, E = token_count(tokens, 24), 4 * ranks
    counts = [each] * ranks
    if load == "uneven":
        counts = [max(0, each + 5 * (rank - ranks // 2) + rank % 2) for rank in range(ranks)]
    if load == "no_tokens":
        counts[ranks // 2] = 0
    if load == "one_token":
        counts = [int(rank == ranks - 1) for rank in range(ranks)]
    T, K = sum(counts), {"one_expert": 1, "all_experts": E}.get(load, min(3, E))
    scores, rank = random.random((T, E)), np.arange(E) // 4 == ranks - 1
    scores[:, 1] += 2.0 * (load == "hot_expert")
    scores[:, rank] += {"hot_rank": 2.0, "empty_rank": -2.0}.get(load, 0.0)
    ids = np.argsort(-scores, axis=1)[:, :K].astype(np.int32)
    if load == "absent":
        ids[random.random(ids.shape) < 1 / 3] = -1
        ids[: T // 8] = -1

    def normal(deviation: float, *shape: int) -> np.ndarray:
        return (deviation * random.standard_normal(shape)).astype(dtypes.numpy_dtype(dtype))

    x, d_output = normal(1, T, _D), normal(1, T, _D)
    if load == "nan":
        x[T // 2] = np.nan
    arrays = {"x": x, "ids": ids, "weights": random.random(ids.shape).astype(np.float32) + 0.1, "d_output": d_output}
    arrays |= {"gate_up": normal(_D**-0.5, E, 2 * _F, _D), "down": normal(_F**-0.5, E, _D, _F)}
    return Problem(load, tuple(counts), arrays)


def run_against(
    module: str, ranks: int, problems: Sequence[Problem], progress: Callable[[str], object], run: Any = None
) -> Iterator[CaseReport]:
    """A report for each problem. run: computes outcomes instead of processes."""
    left_out = _left_out(module)
    todo = [problem for problem in problems if problem.load not in left_out]
    outcomes = (run or _in_processes)(module, ranks, todo, progress)
    for problem in problems:
        case = _case(problem)
        if problem.load in left_out:
            report = Report(module, "", (), skipped=left_out[problem.load], against="one device")
        else:
            outcome = next(outcomes)
            report = Report(module, outcome.device, tuple(_rows(problem, case, outcome)), against="one device")
        sizes = case.sizes | {"W": ranks}
        yield CaseReport(problem.load, case.dtype, sizes, LOADS[problem.load], (report,))


def conclude(reports: Sequence[CaseReport]) -> tuple[bool, bool, str]:
    """Return (something differs, something could not be compared, both in words)."""
    every = [(f"{case.case} {case.dtype}", case.reports[0]) for case in reports]
    names = {verdict: [name for name, one in every if one.verdict == verdict] for verdict in
             (AGREE, DIFFER, NOT_TESTED, SKIPPED)}  # fmt: skip
    errors = {row.note for _, one in every for row in one.rows if row.verdict == NOT_TESTED}
    parts = [f"{len(names[AGREE])} of {len(reports)} cases agree with one device"]
    parts += [f"{len(names[DIFFER])} DIFFER: {', '.join(names[DIFFER])}"] if names[DIFFER] else []
    parts += [f"{len(names[SKIPPED])} left out: {', '.join(names[SKIPPED])}"] if names[SKIPPED] else []
    if names[NOT_TESTED]:
        parts.append(f"{len(names[NOT_TESTED])} did not run: {', '.join(names[NOT_TESTED])} ({'; '.join(errors)})")
    return bool(names[DIFFER]), bool(names[NOT_TESTED]) or not names[AGREE], "; ".join(parts)


def load_module(name: str) -> Any:
    """MODULE, a name or a path. Raises InvalidInput unless it has a function `build`."""
    try:
        if name.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(name).stem, name)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(name)
    except (ImportError, FileNotFoundError) as error:
        raise InvalidInput(f"--against must name a module or a .py file, got {name!r}: {error}; name one") from error
    if not callable(getattr(module, "build", None)):
        raise InvalidInput(
            f"--against must name a module with {BUILD} -> forward(x, ids, weights), got {name!r} "
            "without build; write it"
        )
    return module


def _left_out(name: str) -> dict[str, str]:
    left_out = getattr(load_module(name), LEFT_OUT, {})
    if not isinstance(left_out, dict) or not set(left_out) <= set(LOADS) or not all(left_out.values()):
        raise InvalidInput(
            f"{LEFT_OUT} of {name} must map cases of {', '.join(LOADS)} to reasons, got {left_out!r:.200}; correct it"
        )
    return left_out


def _case(problem: Problem) -> Case:
    arrays = problem.arrays
    E, K = len(arrays["down"]), arrays["ids"].shape[1]
    spec = MoESpec(Activation("silu", gate_layout="halves"), RouterSpec(K), "out_in", "out_in")
    experts, router = ExpertWeights(arrays["gate_up"], arrays["down"]), RouterWeights(np.zeros((E, _D), np.float32))
    return Case(problem.load, LOADS[problem.load], arrays["x"], experts, router, spec)


def _rows(problem: Problem, case: Case, outcome: Outcome) -> Iterator[StageRow]:
    if outcome.error:
        yield StageRow("output", NOT_TESTED, note=outcome.error)
        return
    arrays, sizes = problem.arrays, case.sizes
    routing = TopK(arrays["ids"], arrays["weights"])
    stages = reference_stages(case, routing)
    names: dict[str, Any] = {"d_model": sizes["D"], "d_ff": sizes["F"], "top_k": sizes["K"], "num_experts": sizes["E"]}
    limit = stage_tolerances(case.spec, case.dtype, **names, routed_from="ids")["output"]
    found = [rank["output"] for rank in outcome.ranks]
    for rank, (one, count) in enumerate(zip(found, problem.counts, strict=True)):
        if one is None or one.shape != (count, _D) or dtypes.canonical(one.dtype) != case.dtype:
            got = "nothing" if one is None else f"{one.dtype} {list(one.shape)}"
            yield StageRow("output", DIFFER, note=f"rank {rank} must return {case.dtype} [{count}, {_D}], got {got}")
            return
    yield stage_row("output", stages["output"], np.concatenate([one for one in found if one is not None]), limit)
    if not problem.differentiated:
        return
    operands = MoEOperands(case.x, case.experts, routing)
    spec = dataclasses.replace(case.spec, router=None)
    expected = moe_backward_stages(OutputGradients(arrays["d_output"]), operands, spec, stages)
    tolerances = gradient_tolerances(case)
    for name in _GRADIENTS:
        parts = [rank.get(name) for rank in outcome.ranks]
        if all(part is None for part in parts):
            yield StageRow(name, SKIPPED, note="the stack gave no such gradient")
            continue
        if name.startswith("d_experts."):
            # A rank's tensors get gradients of its experts only.
            total = np.sum([part.astype(np.float32) for part in parts if part is not None], axis=0)
            yield gradient_row(name, expected[name], total.astype(expected[name].dtype), tolerances)
            continue
        zeros = [np.zeros_like(problem.of_rank(rank, "x" if name == "d_x" else "weights"))
                 for rank in range(len(parts))]  # fmt: skip
        joined = np.concatenate([zero if part is None else part for part, zero in zip(parts, zeros, strict=True)])
        of = name if name == "d_x" else "d_routing.weight"
        yield gradient_row(name, expected[name], joined, lambda _, of=of: tolerances(of))


def _in_processes(
    module: str, ranks: int, problems: Sequence[Problem], progress: Callable[[str], object]
) -> Iterator[Outcome]:
    """Start torchrun, again after a case that failed."""
    if importlib.util.find_spec("torch") is None:
        raise Unsupported("--against runs torchrun, which needs torch; install moebius with its extra `torch`")
    done = 0
    while done < len(problems):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            (path / "work").write_bytes(pickle.dumps((module, problems[done:])))
            progress(f"{module}: {ranks} ranks, {len(problems) - done} cases")
            said = _torchrun(path, ranks)
            outcomes = list(_outcomes(path, ranks, len(problems) - done, said))
        yield from outcomes
        done += len(outcomes)


def _torchrun(folder: Path, ranks: int) -> str:
    """The end of its messages, or that it took too long."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", _WORKER, str(folder)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | os.environ
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen([sys.executable, *launch], stdout=said, stderr=said, env=environment)
        try:
            process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            return f"it did not end within {_SECONDS} s"
        finally:
            # torchrun ends its ranks, which are not in its session.
            process.terminate()
            process.wait()
        said.seek(0)
        return said.read()[-400:]


def _outcomes(folder: Path, ranks: int, cases: int, said: str) -> Iterator[Outcome]:
    """Of the cases that ran, and the error of the one after them."""
    for number in range(cases):
        files = [folder / f"{number}-{rank}" for rank in range(ranks)]
        if all(file.exists() for file in files):
            results = [pickle.loads(file.read_bytes()) for file in files]
            yield Outcome(f"{ranks} ranks, {results[0][0]}", [arrays for _, arrays in results])
            continue
        errors = sorted(pickle.loads(file.read_bytes()) for file in folder.glob("error-*"))
        yield Outcome("", (), errors[0][1] if errors else f"torchrun failed: {said}")
        return
