"""Run cases through engines and compare every stage with the reference.

A router flip changes all later stages, so the reference runs again on a flipping engine's own ids and weights. Stages
without a counterpart in the reference's forward (bitmatrix, layout, the activation op, quantised rows) are compared
with the NumPy twins on the engine's inputs. So is the second product of quantised hidden rows: drift may give a hidden
row another code, a far larger step than any fault worth finding.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moe_core.ops.activation.reference import activation
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.ops.routing.reference import pack_bitmatrix, route, unpack_bitmatrix
from moe_core.parity.case import Case
from moe_core.parity.compare import ids_row, logit_tolerance, stage_row
from moe_core.parity.engines import Engine, EngineRun
from moe_core.parity.flips import Flip, RouterScores, blame_routing, find_flips
from moe_core.parity.quantized_rows import QUANTIZED_HIDDEN, QUANTIZED_X, OwnRows
from moe_core.parity.reference_engine import reference_stages
from moe_core.parity.report import DIFFER, GIVEN, MISSING, NOT_TESTED, BitwiseRow, CaseReport, Report, StageRow
from moe_core.parity.tolerance import EXACT, Tolerance, activation_tolerance, stage_tolerances
from moe_core.specs import LayoutSpec, TopK

REQUIRED = ("logits", "ids", "weights", "matmul1", "activation", "matmul2", "output")
ORDER = (
    *("logits", "ids", "weights", "bitmatrix", "layout", QUANTIZED_X, "matmul1", "activation", "activation_op"),
    *(QUANTIZED_HIDDEN, "matmul2", "output"),
)
_ROUTING = ("logits", "ids", "weights")
COMPOSED_STAGE = "moe (composed)"


class Yardstick:
    """The reference on one case, run at most once per slot order."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.stages = functools.cache(lambda slot_order: reference_stages(self.ordered(slot_order)))

    def ordered(self, slot_order: str) -> Case:
        if slot_order == self.case.router.slot_order:
            return self.case
        rule = dataclasses.replace(self.case.router, slot_order=slot_order)
        return dataclasses.replace(self.case, spec=dataclasses.replace(self.case.spec, router=rule))

    def tolerances(self, routed_from: str) -> dict[str, Tolerance]:
        case = self.case
        sizes = {"d_model": case.d_model, "d_ff": case.d_ff, "top_k": case.top_k, "num_experts": case.num_experts}
        weights_format = None if case.scheme is None else case.scheme.weights
        return stage_tolerances(case.spec, case.dtype, **sizes, routed_from=routed_from, weights_format=weights_format)


def run_case(case: Case, engines: Sequence[Engine], progress: Callable[[str], object]) -> CaseReport:
    """Compare every engine on a case. progress gets `"torch: matmul1"` at each start."""
    progress("reference")
    yardstick = Yardstick(case)
    yardstick.stages(case.router.slot_order)
    reports, runs = [], []
    for engine in engines:
        reason = engine.why_unsupported(case)
        if reason is not None:
            reports.append(Report(engine.name, "", (), skipped=reason))
            continue
        run = engine.run(case, lambda stage, name=engine.name: progress(f"{name}: {stage}"))
        runs.append(run)
        reports.append(compare_run(yardstick, run))
    bits = compare_bits(runs)
    return CaseReport(case.name, case.dtype, case.sizes, case.description, tuple(reports), bits, case.scheme)


def reference_ran(run: Any) -> Report:
    note = "the NumPy reference ran, so a comparison would test nothing"
    return Report(run.engine, run.device, (StageRow("all", NOT_TESTED, note=note),))


def compare_run(yardstick: Yardstick, run: EngineRun) -> Report:
    if run.is_reference:
        return reference_ran(run)
    quantized = (QUANTIZED_X, QUANTIZED_HIDDEN) if yardstick.case.spec.activations is not None else ()
    required = (*REQUIRED, *quantized)
    if missing := [stage for stage in required if stage not in run.stages]:
        rows = (StageRow(stage, MISSING, note="the engine has no such stage") for stage in missing)
        return Report(run.engine, run.device, tuple(rows))
    comparison = _Comparison(yardstick, run)
    return Report(run.engine, run.device, comparison.rows(), comparison.flips)


class _Comparison:
    """The reference follows the engine's router flips."""

    def __init__(self, yardstick: Yardstick, run: EngineRun) -> None:
        self._yardstick, self._run = yardstick, run
        self._case = yardstick.ordered(run.slot_order)
        self._reference = yardstick.stages(run.slot_order)
        self.flips = self._find_flips()
        self._behind = self._reference
        self._tolerances = yardstick.tolerances("logits" if "logits" in run.given else "x")
        if self.flips:
            self._behind = reference_stages(yardstick.case, TopK(run.stages["ids"], run.stages["weights"]))
            table = yardstick.tolerances("ids")
            self._tolerances |= {stage: table[stage] for stage in ("matmul1", "activation", "matmul2", "output")}

    def rows(self) -> tuple[StageRow, ...]:
        if not self._routed_alike():
            # A routing with other shapes has no comparable stages.
            return tuple(self._row(stage) for stage in _ROUTING)
        rows = [self._row(stage) for stage in ORDER if stage in self._run.stages]
        if self._run.composed is not None:
            rows.append(self._composed_row(self._run.composed))
        return tuple(rows)

    def _routed_alike(self) -> bool:
        return all(self._run.stages[stage].shape == self._reference[stage].shape for stage in _ROUTING)

    def _rule(self) -> tuple[np.ndarray, ...]:
        bias, mask = self._case.routing.correction_bias, self._case.token_mask
        return route(self._run.stages["logits"], bias, mask, spec=self._case.router)

    def _find_flips(self) -> tuple[Flip, ...]:
        if not self._routed_alike():
            return ()
        ids, logits = self._run.stages["ids"], self._reference["logits"]
        router, bias = self._case.router, self._case.routing.correction_bias
        tolerance = logit_tolerance(logits, self._yardstick.tolerances("x")["logits"])
        flips = find_flips(self._reference["ids"], ids, RouterScores.of(logits, router, bias), tolerance)
        scores = RouterScores.of(self._run.stages["logits"], router, bias)
        return blame_routing(flips, self._rule()[0], ids, scores)

    def _row(self, stage: str) -> StageRow:
        actual, note = self._run.stages[stage], self._run.notes.get(stage, "")
        if stage in self._run.given:
            return StageRow(stage, GIVEN, note=note or "taken from the reference")
        expected, tolerance = self._expected(stage)
        if actual.dtype != expected.dtype and actual.shape == expected.shape:
            return StageRow(stage, DIFFER, note=f"dtype {actual.dtype}, expected {expected.dtype}")
        if stage == "ids" and actual.shape == expected.shape:
            return ids_row(expected, actual, self.flips)
        if stage == "weights" and self.flips:
            return self._weights_row(expected, actual, tolerance)
        return stage_row(stage, expected, actual, tolerance, note)

    def _expected(self, stage: str) -> tuple[np.ndarray, Tolerance]:
        run, case = self._run, self._case
        if stage == "bitmatrix":
            packed, _, _ = pack_bitmatrix(run.stages["ids"], num_experts=case.num_experts)
            unpacked = unpack_bitmatrix(packed, num_experts=case.num_experts, top_k=case.top_k)
            return _joined(packed, unpacked), EXACT
        if stage == "layout":
            num_tokens, top_k = run.stages["ids"].shape
            spec = LayoutSpec(num_tokens, top_k, case.num_experts)
            return _joined(*make_layout(run.stages["ids"], None, case.token_mask, layout=spec)[:4]), EXACT
        if stage == "activation_op":
            before, rule = run.stages["matmul1"], case.spec.activation
            parts = np.split(before, 2, axis=1) if rule.gate_layout == "separate" else (before,)
            return activation(*parts, activation=rule), activation_tolerance(case.dtype)
        if stage in (QUANTIZED_X, QUANTIZED_HIDDEN):
            return self._own_rows.expected(stage), EXACT
        if stage == "matmul2" and case.spec.activations is not None:
            return self._own_rows.second_product()
        source = self._reference if stage in _ROUTING else self._behind
        return source[stage], self._tolerances[stage]

    @functools.cached_property
    def _own_rows(self) -> OwnRows:
        return OwnRows(self._case, self._run.stages)

    def _weights_row(self, expected: np.ndarray, found: np.ndarray, tolerance: Tolerance) -> StageRow:
        """Flipped ties against the rule on the engine's own logits, other flips left out."""
        tied = [flip.token for flip in self.flips if flip.is_tie]
        wrong = [flip.token for flip in self.flips if not flip.is_tie]
        if len(wrong) == len(expected):
            return StageRow("weights", NOT_TESTED, note=f"all {len(wrong)} tokens have other experts")
        expected, found = expected.copy(), found.copy()
        expected[tied] = self._rule()[1][tied]
        found[wrong] = expected[wrong]
        note = f"without {len(wrong)} tokens that have other experts" if wrong else ""
        return stage_row("weights", expected, found, tolerance, note)

    def _composed_row(self, composed: Mapping[str, Any]) -> StageRow:
        row = stage_row(COMPOSED_STAGE, self._behind["output"], composed["output"], self._tolerances["output"])
        ids, weights = self._run.stages["ids"], self._run.stages["weights"]
        counts = np.bincount(ids[(ids >= 0) & (ids < self._case.num_experts)], minlength=self._case.num_experts)
        checks = {
            f"dtype {composed['output'].dtype}": composed["output"].dtype == self._behind["output"].dtype,
            "other ids than its stages": np.array_equal(composed["ids"], ids),
            "other weights than its stages": same_bits(composed["weights"], weights),
            "wrong tokens_per_expert": np.array_equal(composed["tokens_per_expert"], counts),
        }
        complaints = [text for text, right in checks.items() if not right]
        if not complaints:
            return row
        return dataclasses.replace(row, verdict=DIFFER, note="; ".join(filter(None, (row.note, *complaints))))


def _joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate([part.astype(np.int64).reshape(-1) for part in parts])


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Return True if two arrays have equal shapes, dtypes and bytes."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()


def compare_bits(runs: Sequence[Any], kind: str = "arrays") -> tuple[BitwiseRow, ...]:
    """Compare every pair of engines of one family. kind: of the arrays, for messages."""
    pairs = itertools.combinations(runs, 2)
    return tuple(_bitwise_row(*pair, kind) for pair in pairs if pair[0].family == pair[1].family is not None)


def _bitwise_row(first: Any, second: Any, kind: str) -> BitwiseRow:
    names, left, right = (first.engine, second.engine), first.arrays, second.arrays
    if first.device != second.device:
        return BitwiseRow(names, "", None, f"devices differ: {first.device} and {second.device}")
    if first.is_reference:
        return BitwiseRow(names, first.device, None, "both ran the NumPy reference")
    wrong = next((name for name in left if name not in right or not same_bits(left[name], right[name])), None)
    note = f"first difference in {wrong}" if wrong else f"{len(left)} {kind} on {first.device}"
    return BitwiseRow(names, first.device, not wrong, note)
