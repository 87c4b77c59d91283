"""The self-test: every public op of every front-end against the NumPy reference."""

from __future__ import annotations

import abc
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from moe_core.errors import Unsupported
from moe_core.parity.builtin_cases import Draw, built_in_case
from moe_core.parity.case import Case
from moe_core.parity.devices import INTERPRETER
from moe_core.parity.engines import Engine
from moe_core.parity.gradients import compare_gradients, differentiated
from moe_core.parity.report import NOT_TESTED, StageRow
from moe_core.parity.run import COMPOSED_STAGE, Yardstick, compare_bits, compare_run
from moe_core.tools.doctor.poison import Poisoned, poisoned

PASS, FAIL, UNTESTED = "pass", "FAIL", "not tested"
FRONT_ENDS = {"torch": "moe_torch.parity.torch:TorchEngine", "jax": "moe_jax.parity:JaxEngine"}
#: Public op -> stages that test it.
OPS: dict[str, tuple[str, ...]] = {
    "router": ("logits",),
    "route": ("ids", "weights"),
    "pack_bitmatrix": ("bitmatrix",),
    "unpack_bitmatrix": ("bitmatrix",),
    "make_layout": ("layout",),
    "matmul_ogs": ("matmul1", "activation", "matmul2"),
    "activation": ("activation_op",),
    "scale_rows": ("matmul1",),
    "reduce": ("output",),
    "moe": (COMPOSED_STAGE,),
}


@dataclass(frozen=True)
class Result:
    """One op in one case. device: where it really ran, or ""."""

    direction: str
    front_end: str
    device: str
    case: str
    op: str
    verdict: str
    note: str = ""


@dataclass(frozen=True)
class EqualBits:
    """equal: None: unknown, for the reason in note."""

    direction: str
    case: str
    equal: bool | None
    note: str


Judged = tuple[str, list[StageRow], tuple[StageRow, ...]]


class SelfTest(abc.ABC):
    """One direction of the computation. CASES: built-in case, dtype, tokens. KIND: of the arrays of a run."""

    direction: str
    CASES: tuple[tuple[str, str, int], ...]
    KIND: str

    def __init__(self) -> None:
        self.runs: list[tuple[str, Any]] = []

    def run(self, name: str, engine: Engine, progress: Callable[[str], object]) -> Iterator[Result]:
        """Raises the front-end's errors."""
        for case_name, dtype, tokens in self.CASES:
            case = built_in_case(case_name, Draw(dtype=dtype, num_tokens=tokens))
            progress(f"{name} {self.direction}, {case}")
            run, judged = self.tested(case, engine)
            self.runs.append((case_name, run))
            for op, rows, every in judged:
                yield Result(self.direction, name, run.device, case_name, op, *_judge(rows, every))

    @abc.abstractmethod
    def tested(self, case: Case, engine: Any) -> tuple[Any, Iterable[Judged]]:
        """Judge each op of a case."""

    def bitwise(self) -> Iterator[EqualBits]:
        for case_name, _, _ in self.CASES:
            for row in compare_bits([run for name, run in self.runs if name == case_name], self.KIND):
                yield EqualBits(self.direction, case_name, row.equal, row.note)


class ForwardTest(SelfTest):
    """Small layers that cover every op, dtype and gate layout."""

    direction, KIND = "forward", "arrays"
    # Only llama4 scales rows.
    CASES = (("gpt_oss", "bfloat16", 6), ("deepseek_v3", "bfloat16", 6), ("llama4", "float32", 9))

    def tested(self, case: Case, engine: Any) -> tuple[Any, Iterable[Judged]]:
        run = engine.run(case, lambda stage: None)
        every = compare_run(Yardstick(case), run).rows
        rows, weighted = {row.stage: row for row in every}, case.spec.apply_router_weight_on_input
        return run, [
            (op, [rows[stage] for stage in stages if stage in rows], every)
            for op, stages in OPS.items()
            if op != "scale_rows" or weighted
        ]


class BackwardTest(SelfTest):
    direction, KIND = "backward", "gradients"
    CASES = (("gpt_oss", "bfloat16", 6),)

    def tested(self, case: Case, engine: Any) -> tuple[Any, Iterable[Judged]]:
        run = engine.gradients(case, lambda stage: None)
        every = compare_gradients(case, run).rows
        rows = {row.stage: row for row in every}
        names = [f"d_{array}" for array in differentiated(case)]
        return run, [(name, [rows[name]] if name in rows else [], every) for name in names]


def _judge(rows: list[StageRow], every: tuple[StageRow, ...]) -> tuple[str, str]:
    """(verdict, note) of an op. A report that stops early says nothing about later ops."""
    wrong = [row for row in rows if not row.passes and row.verdict != NOT_TESTED]
    if wrong:
        return FAIL, "; ".join(f"{row.stage}: {' '.join(filter(None, row.cells()[1:]))}" for row in wrong)
    untested = [row for row in rows or every if row.verdict == NOT_TESTED]
    if untested:
        return UNTESTED, untested[0].note
    if not rows:
        return UNTESTED, "an earlier stage has another shape than the reference"
    return PASS, ""


@dataclass(frozen=True)
class Outcome:
    """absent: front-end -> why it could not start."""

    results: tuple[Result, ...]
    absent: dict[str, str]
    bitwise: tuple[EqualBits, ...]
    poisoned: Poisoned

    @property
    def failures(self) -> list[Result]:
        return [result for result in self.results if result.verdict == FAIL]

    @property
    def tested(self) -> bool:
        return any(result.verdict != UNTESTED for result in self.results)

    @property
    def healthy(self) -> bool:
        return not self.failures and all(row.equal is not False for row in self.bitwise)

    def interpreted(self) -> bool:
        return {result.device for result in self.results if result.verdict != UNTESTED} <= {INTERPRETER}


def self_tests() -> tuple[SelfTest, ...]:
    return ForwardTest(), BackwardTest()


def run_self_tests(progress: Callable[[str], object]) -> Outcome:
    """Run every direction of every front-end that starts. An exception counts as its failure."""
    tests, absent = self_tests(), {}
    results: list[Result] = []
    per_front_end = sum(len(test.CASES) for test in tests)
    total, number = len(FRONT_ENDS) * per_front_end, 0

    def tell(what: str) -> None:
        nonlocal number
        number += 1
        progress(f"[{number}/{total}] {what}")

    with poisoned() as poison:
        for index, (name, path) in enumerate(FRONT_ENDS.items()):
            number = index * per_front_end
            progress(f"importing the {name} front-end")
            try:
                engine = pkgutil.resolve_name(path)()
            except (ImportError, Unsupported) as error:
                absent[name] = str(error)
                continue
            except Exception as error:
                results.append(Result("import", name, "", "", "import", FAIL, f"{type(error).__name__}: {error}"))
                continue
            for test in tests:
                try:
                    # Keeps results from before an exception.
                    for result in test.run(name, engine, tell):
                        results.append(result)
                except Exception as error:
                    note = f"{type(error).__name__}: {error}"
                    results.append(Result(test.direction, name, "", "", "run", FAIL, note))
    bitwise = tuple(row for test in tests for row in test.bitwise())
    return Outcome(tuple(results), absent, bitwise, poison)
