"""Runs cases: draws arrays, calls both front-ends on an engine, judges, and shrinks what fails."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from tools.fuzz import exchange, run_jax, run_torch
from tools.fuzz.case import Case
from tools.fuzz.data import Arrays, draw
from tools.fuzz.draw import Drawn
from tools.fuzz.engines import Results, call_arrays, device_of
from tools.fuzz.judge import FRAMEWORKS_OWN, Verdict, judge, same_bits
from tools.fuzz.shrink import shrink

FRONT_ENDS = {"torch": run_torch.run, "jax": run_jax.run}
#: Seconds between two lines of progress.
PROGRESS = 20.0
#: Scales of experts are drawn around 1, and none is larger.
_MOST_SCALE = 8.0


def examine(case: Case, engine: str) -> Verdict:
    """What is wrong with one case on one engine. What a call raises is wrong: every case is legal."""
    if case.kind == "exchange":
        return exchange.examine(case, engine)
    arrays = draw(case, device_of(engine))
    given, verdict = call_arrays(arrays), Verdict()
    results: dict[str, Results] = {}
    front_ends = {name: run for name, run in FRONT_ENDS.items() if name == "torch" or not case.main_grad}
    for name, run in front_ends.items():
        try:
            results[name] = run(case, given, engine)
        except Exception as error:
            verdict.complaints.append(f"{name} raised {type(error).__name__}: {error}"[:600])
    if len(results) == 2:
        complaints = differences(case, arrays, results)
        verdict.complaints += complaints
        if not complaints and case.kind != "layer":  # what holds for one holds for the other
            results.pop("jax")
    for name, own in results.items():
        found = judge(case, arrays, own, engine)
        found.complaints = [f"{name}, {complaint}" for complaint in found.complaints]
        verdict.add(found)
    return verdict


def differences(case: Case, arrays: Arrays, results: dict[str, Results]) -> list[str]:
    """Complaints about bits that both front-ends must share."""
    first, second = (dict(own) for own in results.values())
    if case.kind == "layer" or case.beyond:
        left_out = _left_out(case, first, second)
        for own in (first, second):
            for name in left_out & own.keys():
                own.pop(name)
            if case.masked and "logits" in own:  # the logits of masked tokens are anything
                own["logits"] = own["logits"][arrays.plain["token_mask"].to(own["logits"].device)]
    # XLA makes subnormal numbers 0 where a framework adds or scales: a factor, too, whose product would be none. Of
    # stages it adds up the gradients of x, and a subnormal one counts in sums up to their last bit.
    for own in (first, second):
        for name, part in own.items():
            if name == "d x" and (case.kind == "stages" or case.beyond):
                kind = torch.finfo(part.dtype)
                least = 8 * min(kind.smallest_normal, torch.finfo(torch.float32).smallest_normal) / kind.eps
                own[name] = torch.where(part.abs() < least, 0.0, part)
            elif part.is_floating_point() and case.kind == "layer":
                scales = case.expert_scale and name == "weights"
                own[name] = torch.where(_is_subnormal(part, _MOST_SCALE if scales else 1), 0.0, part)
    return same_bits(first, second, ("torch", "jax"))


def _is_subnormal(part: torch.Tensor, scale: float = 1) -> torch.Tensor:
    """scale: of what may have been subnormal before."""
    return part.abs() < scale * torch.finfo(part.dtype).smallest_normal


def _left_out(case: Case, first: Results, second: Results) -> set[str]:
    """The results of a layer whose bits each framework may have for itself."""
    found: set[str] = {*FRAMEWORKS_OWN}
    gradients = {name for name in first if name.startswith("d ")}
    if case.out_bias and case.out_scale not in (1.0, 2.0) and case.dtype in ("float32", "float64"):
        found.add("output")  # XLA may multiply and add in one rounding
    # The gradients of losses are each framework's own, and so is what weighs results with a norm of each.
    if case.balance or case.z or case.out_norm == "experts":
        found |= gradients
    if case.apart and case.shared_gate:  # each framework has its own sigmoid
        found |= {"output", *gradients}
    # A weight that is subnormal before or after it is scaled is 0 in XLA, and so is all that it multiplies.
    if case.expert_scale and any(
        bool((_is_subnormal(w, _MOST_SCALE) & (w != 0)).any()) for w in (first["weights"], second["weights"])
    ):
        found |= {"output", *gradients}
    return found


@dataclass
class Failure:
    case: Case
    engine: str
    complaints: list[str]
    smallest: Case

    def __str__(self) -> str:
        lines = [f"FAILED on {self.engine}:", *(f"  {text}" for text in self.complaints[:4])]
        lines.append(f"  drawn:    {self.case}")
        lines.append(f'  minimal:  python -m tools.fuzz --engines {self.engine} --case "{self.smallest}"')
        return "\n".join(lines)


@dataclass
class Report:
    """cases: problems without and with gradients, packed ones counted one by one."""

    cases: Counter[str] = field(default_factory=Counter)
    elements: int = 0
    undetermined: int = 0
    tightness: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Verdict | Report) -> None:
        self.elements += other.elements
        self.undetermined += other.undetermined
        self.tightness = max(self.tightness, other.tightness)
        if isinstance(other, Report):
            self.cases += other.cases
            self.failures += other.failures

    def count(self, gradient: bool, packed: bool = False) -> int:
        """How many cases without or with gradients; packed: of packed ones alone."""
        chosen = (name for name in self.cases if ("gradient" in name) == gradient and ("packed" in name or not packed))
        return sum(self.cases[name] for name in chosen)

    @property
    def counts(self) -> str:
        return f"{self.count(False)} forward and {self.count(True)} gradient cases, {len(self.failures)} failures"

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(self.cases.items()))
        return (
            f"{self.counts}\n  {kinds}\n  {self.elements} numbers compared, {self.undetermined} of them where anything "
            f"is right; largest error {self.tightness:.2f} of its bound"
        )


def examine_set(drawn: Drawn, engine: str, deadline: float | None = None, minimise: bool = True) -> Report:
    """Examine cases of one set until one fails: its others would fail alike."""
    torch.set_num_threads(1)  # arrays are small: threads cost more than they give
    report = Report()
    for case in drawn.cases():
        verdict = examine(case, engine)
        report.add(verdict)
        name = f"{case.kind}{' packed' if case.packs > 1 else ''}{' gradient' if case.gradient else ''}"
        report.cases[name] += case.packs
        if verdict.complaints:
            smallest = shrink(case, lambda one: bool(examine(one, engine).complaints)) if minimise else case
            report.failures.append(Failure(case, engine, verdict.complaints, smallest))
            break
        if deadline is not None and time.monotonic() > deadline:
            break
    return report


def fuzz(
    sets: Iterable[Drawn],
    engine: str,
    seconds: float | None = None,
    jobs: int = 1,
    minimise: bool = True,
    most_failures: int = 5,
) -> Report:
    """Examine sets until they end, the seconds are over or too many fail; jobs: processes at work."""
    begin = time.monotonic()
    deadline = None if seconds is None else begin + seconds
    report, shown = Report(), begin
    given = (sets, engine, deadline, minimise)
    for part in _one_by_one(*given) if jobs == 1 else _side_by_side(*given, jobs):
        report.add(part)
        for failure in part.failures:
            print(failure, flush=True)
        now = time.monotonic()
        if now - shown > PROGRESS:
            shown = now
            print(f"{engine}, {now - begin:.0f} s: {report.counts}", flush=True)
        if len(report.failures) >= most_failures or (deadline is not None and now > deadline):
            break
    print(f"{engine}, {time.monotonic() - begin:.0f} s in all: {report}", flush=True)
    return report


def _one_by_one(sets: Iterable[Drawn], engine: str, deadline: float | None, minimise: bool) -> Iterator[Report]:
    for drawn in sets:
        yield examine_set(drawn, engine, deadline, minimise)


def _side_by_side(
    sets: Iterable[Drawn], engine: str, deadline: float | None, minimise: bool, jobs: int
) -> Iterator[Report]:
    """Reports as they come, of fresh processes: forked ones cannot use a GPU."""
    left = iter(sets)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        try:
            busy: dict[Future[Report], Drawn] = {}
            while True:
                for drawn in itertools.islice(left, jobs + 1 - len(busy)):
                    busy[pool.submit(examine_set, drawn, engine, deadline, minimise)] = drawn
                if not busy:
                    return
                for one in wait(busy, return_when=FIRST_COMPLETED).done:
                    case = busy.pop(one).static
                    error = one.exception()
                    died = [f"a process ended in this or another set: {error!r}"]
                    yield one.result() if error is None else Report(failures=[Failure(case, engine, died, case)])
                    if error is not None:
                        left = iter(())  # of a pool that lost a process
        finally:  # whoever reads the reports has enough of them
            pool.shutdown(wait=True, cancel_futures=True)
