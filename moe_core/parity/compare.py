"""Compare named stage arrays: the library form of the parity tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_core.base import dtypes
from moe_core.errors import InvalidInput
from moe_core.parity.flips import Flip, RouterScores, find_flips
from moe_core.parity.report import AGREE, DIFFER, MISSING, NOT_TESTED, TIE, Report, StageRow
from moe_core.parity.tolerance import EXACT, UNIT_ROUNDOFF, Tolerance, measure, stage_tolerances
from moe_core.specs import Activation, MoESpec, RouterSpec

#: A large model's layer, for default tolerances.
_NOMINAL: dict[str, Any] = {"d_model": 4096, "d_ff": 4096, "top_k": 8, "num_experts": 128}
_SAME_MEMORY = "candidate and reference are the same memory: nothing was compared"


def as_numpy(name: str, array: Any) -> np.ndarray:
    """A NumPy, torch or JAX array, on any device, as NumPy (ml_dtypes for bfloat16)."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "detach") and hasattr(array, "cpu"):
        array = array.detach().cpu()
        if dtypes.canonical(array.dtype) == "bfloat16":
            # torch gives NumPy no bfloat16.
            return array.float().numpy().astype(dtypes.numpy_dtype("bfloat16"))
        return array.numpy()
    result = np.asarray(array)
    if result.dtype == object:
        raise InvalidInput(f"stage {name!r} must be a NumPy, torch or JAX array, got {type(array).__name__}; pass one")
    return result


def stage_row(
    stage: str, reference: np.ndarray, candidate: np.ndarray, tolerance: Tolerance, note: str = "", scale: Any = None
) -> StageRow:
    """Compare one stage. scale: see `measure`. Arrays that share memory are `not tested`."""
    if candidate.size and np.shares_memory(candidate, reference):
        return StageRow(stage, NOT_TESTED, note=_SAME_MEMORY)
    difference = measure(candidate, reference, scale)
    verdict = AGREE if difference.complaint(tolerance) is None else DIFFER
    remarks = [remark for remark in (difference.mismatch, note) if remark]
    return StageRow(stage, verdict, difference, tolerance, "; ".join(remarks))


def ids_row(reference: np.ndarray, candidate: np.ndarray, flips: tuple[Flip, ...]) -> StageRow:
    """The row of ids `[T, K]`: agree, ties within tolerance only, or differ."""
    if candidate.size and np.shares_memory(candidate, reference):
        return StageRow("ids", NOT_TESTED, note=_SAME_MEMORY)
    failed = sum(not flip.is_tie for flip in flips)
    note = f"{len(flips)} of {len(reference)} tokens flipped, {failed} of them beyond a tie" if flips else ""
    verdict = DIFFER if failed else TIE if flips else AGREE
    return StageRow("ids", verdict, measure(candidate, reference), EXACT, note)


def logit_tolerance(logits: np.ndarray, tolerance: Tolerance) -> np.ndarray:
    """Of a token's logit, `[T]`."""
    with np.errstate(invalid="ignore"):
        return tolerance.worst * np.max(np.abs(logits.astype(np.float64)), axis=1, initial=0.0)


def default_tolerance(stage: str, *arrays: np.ndarray) -> Tolerance:
    if all(array.dtype.kind in "iub" for array in arrays):
        return EXACT
    known = {dtypes.canonical(array.dtype) for array in arrays} & set(UNIT_ROUNDOFF)
    coarsest = max(known or ["float32"], key=lambda name: UNIT_ROUNDOFF[name])
    spec = MoESpec(Activation("silu"), RouterSpec(_NOMINAL["top_k"]))
    table = stage_tolerances(spec, coarsest, **_NOMINAL)
    chosen = table.get(stage, table["output"])
    # The caller's layer may round a stage that is fp32 in ours.
    return table["matmul1"] if stage in ("logits", "weights") and coarsest != "float32" else chosen


def compare(
    reference: Mapping[str, Any], candidate: Mapping[str, Any], *, tolerances: Mapping[str, Tolerance] | None = None
) -> Report:
    """Compare the stages of two layers, in the reference's order.

    Integer `ids` `[T, K]` are compared by token. With `logits` `[T, E]` among the stages, a token is a tie, which does
    not fail, if its experts differ by at most the tolerance of the logits. Later stages of T rows, or T * K in slot
    order, leave out tokens with other experts. Tokens with the same experts in other slots are compared slot by slot in
    the reference's order (`weights` `[T, K]`, `[T * K, ...]` and `[T, K, ...]` arrays) or as they are (one row per
    token). The same array on both sides, and a stage without a remaining token, are `not tested` and fail.

    Args:
        reference, candidate: arrays by stage name: NumPy, torch (any device) or JAX.
        tolerances: by stage. None: the table's, for the coarsest dtype of the stage in a layer of nominal size.
            Integers and booleans must be equal, unknown names count as `output`.

    Raises InvalidInput for an unknown tolerance or no stages.
    """
    if not reference:
        raise InvalidInput("reference must hold at least one stage, got none; pass arrays by stage name")
    unknown = sorted(set(tolerances or {}) - set(reference))
    if unknown:
        raise InvalidInput(f"tolerances must be of stages of the reference, got {', '.join(unknown)}; correct the name")
    wanted = {name: as_numpy(name, array) for name, array in reference.items()}
    named = {name: as_numpy(name, array) for name, array in candidate.items()}
    rows: list[StageRow] = []
    flips, slots = (), np.zeros((0, 0), np.intp)
    for stage, expected in wanted.items():
        if stage not in named:
            rows.append(StageRow(stage, MISSING, note="the candidate has no such stage"))
            continue
        actual = named[stage]
        tolerance = (tolerances or {}).get(stage) or default_tolerance(stage, expected, actual)
        if stage == "ids" and expected.ndim == 2 and expected.shape == actual.shape:
            flips, slots = _flips(wanted, named, tolerances), _matching_slots(expected, actual)
            rows.append(ids_row(expected, actual, flips))
        elif flips and stage != "logits":
            rows.append(_row_behind_flips(stage, expected, actual, tolerance, slots))
        else:
            rows.append(stage_row(stage, expected, actual, tolerance))
    rows += [StageRow(stage, MISSING, note="the reference has no such stage") for stage in named if stage not in wanted]
    return Report("candidate", "", tuple(rows), flips)


def assert_parity(
    reference: Mapping[str, Any],
    candidate: Mapping[str, Any],
    *,
    tolerances: Mapping[str, Tolerance] | None = None,
    label: str = "parity",
) -> Report:
    """Return the report of `compare`. Raises AssertionError with the report unless every stage agrees."""
    report = compare(reference, candidate, tolerances=tolerances)
    if not report.agrees:
        raise AssertionError(f"{label}: {report.conclusion()}\n{report}")
    return report


def _flips(
    wanted: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], tolerances: Mapping[str, Tolerance] | None
) -> tuple[Flip, ...]:
    ids, logits = (wanted["ids"], found["ids"]), wanted.get("logits")
    if logits is None or "logits" not in found or logits.ndim != 2 or len(logits) != len(ids[0]):
        return find_flips(*ids, None, np.zeros(len(ids[0])))
    tolerance = (tolerances or {}).get("logits") or default_tolerance("logits", logits, found["logits"])
    return find_flips(*ids, RouterScores.of(logits), logit_tolerance(logits, tolerance))


def _matching_slots(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """The candidate's slot for every slot of the reference `[T, K]`; -1 in tokens with other experts."""
    wanted, actual = (np.argsort(ids, axis=1, kind="stable") for ids in (reference, candidate))
    same = np.take_along_axis(reference, wanted, axis=1) == np.take_along_axis(candidate, actual, axis=1)
    slots = np.empty_like(wanted)
    np.put_along_axis(slots, wanted, actual, axis=1)
    return np.where(same.all(axis=1, keepdims=True), slots, -1)


def _row_behind_flips(
    stage: str, expected: np.ndarray, actual: np.ndarray, tolerance: Tolerance, slots: np.ndarray
) -> StageRow:
    num_tokens, top_k = slots.shape
    rows_per_token = {num_tokens: 1, num_tokens * top_k: top_k}.get(expected.shape[0] if expected.ndim else -1)
    if rows_per_token is None or expected.shape != actual.shape or np.shares_memory(expected, actual):
        return stage_row(stage, expected, actual, tolerance)
    other_experts = slots[:, 0] < 0
    if other_experts.all():
        note = f"all {num_tokens} tokens have other experts, so none can be compared; give both sides the same ids"
        return StageRow(stage, NOT_TESTED, note=note)
    notes = [f"without {other_experts.sum()} tokens that have other experts"] if other_experts.any() else []
    # [T, K] is ambiguous: an output may be K wide.
    has_slot_axis = expected.shape[:2] == slots.shape and (stage == "weights" or expected.ndim > 2)
    if rows_per_token == top_k or has_slot_axis:
        by_slot = actual.reshape(num_tokens, top_k, -1)
        actual = np.take_along_axis(by_slot, np.maximum(slots, 0)[:, :, None], axis=1).reshape(actual.shape)
        moved = (slots != np.arange(top_k)).any(axis=1) & ~other_experts
        notes += [f"slots of {moved.sum()} tokens in the reference's order"] if moved.any() else []
    # Equal values keep the other indices.
    left_out = np.repeat(other_experts, rows_per_token).reshape(-1, *([1] * (actual.ndim - 1)))
    kept = np.where(left_out, expected.astype(np.float64), actual.astype(np.float64))
    return stage_row(stage, expected, kept, tolerance, "; ".join(notes))
