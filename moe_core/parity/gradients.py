"""The comparison of a case's gradients, for engines with `gradients(case, progress) -> GradientRun`. The reference's
backward follows the engine's own routing, so that a router flip appears only in the forward's report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_core.base import dtypes, require_choice
from moe_core.formats import QuantizedTensor
from moe_core.ops.common.rounding import round_to
from moe_core.ops.moe.backward import gradient_names
from moe_core.ops.moe.checks import why_no_moe_gradient
from moe_core.ops.moe.reference.backward import moe_backward_stages
from moe_core.parity import tolerance
from moe_core.parity.case import Case
from moe_core.parity.compare import stage_row
from moe_core.parity.reference_engine import reference_stages
from moe_core.parity.report import DIFFER, CaseReport, Report, StageRow
from moe_core.parity.run import compare_bits, reference_ran
from moe_core.parity.tolerance import Tolerance
from moe_core.specs import MoEOperands, OutputGradients, TopK, map_arrays, named_fields

_SEED = 0x60AD


@dataclass(frozen=True)
class GradientRun:
    """forward: NumPy `ids`, `weights`, `logits`. gradients: by name, `d_x` and so on. The rest: as in `EngineRun`."""

    engine: str
    device: str
    forward: Mapping[str, np.ndarray]
    gradients: Mapping[str, np.ndarray]
    is_reference: bool = False
    family: str | None = None

    @property
    def arrays(self) -> Mapping[str, np.ndarray]:
        return self.gradients


def differentiated(case: Case) -> dict[str, np.ndarray]:
    """The plain arrays of `x`, `experts.*`, `routing.*`, `shared.*`, by name."""
    arrays = {"x": case.x} | dict(named_fields(case.experts, "experts.")) | dict(named_fields(case.routing, "routing."))
    arrays |= {} if case.shared is None else dict(named_fields(case.shared, "shared."))
    names = gradient_names(MoEOperands(case.x, case.experts, case.routing, shared=case.shared))
    return {name.removeprefix("d_"): arrays[name.removeprefix("d_")] for name in names}


def upstream(case: Case) -> dict[str, np.ndarray]:
    """Drawn gradients of the forward's results: `output` `[T, D]`, `logits` fp32 `[T, E]`, zero for masked tokens."""
    random = np.random.default_rng(_SEED)
    output = random.standard_normal(case.x.shape, dtype=np.float32)
    logits = random.standard_normal((case.x.shape[0], case.num_experts), dtype=np.float32)
    if case.token_mask is not None:
        logits *= case.token_mask[:, None]
    return {"output": round_to(output, case.spec.out_dtype or case.dtype), "logits": logits / 4}


def run_gradients(case: Case, engines: Sequence[Any], progress: Callable[[str], object]) -> CaseReport:
    """The report `... backward` of every engine."""
    reports, runs = [], []
    for engine in engines:
        compute = getattr(engine, "gradients", None)
        reason = why_no_moe_gradient(case.experts, case.spec, ()) or engine.why_unsupported(case)
        if compute is None or reason:
            reports.append(Report(engine.name, "", (), skipped=reason or "it computes no gradients"))
            continue
        run = compute(case, lambda stage, name=engine.name: progress(f"{name}: {stage}"))
        runs.append(run)
        reports.append(compare_gradients(case, run))
    name, rows = f"{case.name} backward", compare_bits(runs, "gradients")
    return CaseReport(name, case.dtype, case.sizes, case.description, tuple(reports), rows, case.scheme)


def compare_gradients(case: Case, run: GradientRun) -> Report:
    if run.is_reference:
        return reference_ran(run)
    forward = run.forward
    stages = dict(reference_stages(case, TopK(forward["ids"], forward["weights"])))
    stages |= {name: forward[name] for name in ("logits", "ids", "weights")}
    incoming = upstream(case)
    gradients = OutputGradients(incoming["output"], logits=incoming["logits"])
    operands = MoEOperands(case.x, case.experts, case.routing, case.token_mask, shared=case.shared)
    expected = moe_backward_stages(gradients, operands, case.spec, stages)
    tolerances = gradient_tolerances(case)
    names = [f"d_{name}" for name in differentiated(case)]
    rows = tuple(gradient_row(name, expected[name], run.gradients.get(name), tolerances) for name in names)
    return Report(run.engine, run.device, rows)


def gradient_row(
    name: str, expected: np.ndarray, found: np.ndarray | None, tolerances: Callable[[str], Tolerance]
) -> StageRow:
    if found is None:
        return StageRow(name, DIFFER, note="the engine has no such gradient")
    if found.dtype != expected.dtype and found.shape == expected.shape:
        return StageRow(name, DIFFER, note=f"dtype {found.dtype}, expected {expected.dtype}")
    # Sums grow with an expert's number of tokens.
    axes = tuple(range(1 if name.startswith("d_experts.") else 0, expected.ndim))
    with np.errstate(all="ignore"):
        scale = np.sqrt(np.square(expected.astype(np.float64)).mean(axis=axes, keepdims=True))
    return stage_row(name, expected, found, tolerances(name), scale=np.broadcast_to(scale, expected.shape))


def arguments_of(
    case: Case, leaves: Mapping[str, Any], put: Callable[[np.ndarray], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, keyword) arguments of `moe`: leaves replace `differentiated`, the rest goes through `put`."""

    def constant(value: Any) -> Any:
        return map_arrays(value, put) if isinstance(value, QuantizedTensor) else put(value)

    def bundle(prefix: str, arrays: Any) -> Any:
        named = dict(named_fields(arrays))
        kept = {name: leaves[prefix + name] if prefix + name in leaves else constant(named[name]) for name in named}
        return type(arrays)(**kept)

    mask = None if case.token_mask is None else put(case.token_mask)
    shared = None if case.shared is None else bundle("shared.", case.shared)
    positional = (leaves["x"], bundle("experts.", case.experts), bundle("routing.", case.routing), case.spec)
    return positional, {"token_mask": mask, "shared": shared}


def gradient_tolerances(case: Case) -> Callable[[str], Tolerance]:
    """The tolerance of every gradient by its name, `d_x` or `d_experts.down`, after equal ids, weights and logits.

    docs/user/training.md has the rounding points. z is stored in dtype on one side and in fp32 on the other: one
    rounding. An expert may have one row, where an error is not averaged. A last bit may decide about a clamp, which no
    tolerance covers.
    """
    spec, dtype, num_tokens, d_ff, top_k = case.spec, case.dtype, case.x.shape[0], case.d_ff, case.top_k
    require_choice("dtype", dtype, dtypes.MATMUL_DTYPES)
    one_side = 0.0 if dtype == "float32" else tolerance.UNIT_ROUNDOFF[dtype]
    sizes: dict[str, Any] = {"d_model": case.d_model, "d_ff": d_ff, "top_k": top_k, "num_experts": 1}
    pre = tolerance.stage_tolerances(spec, dtype, **sizes, routed_from="ids")["matmul1"]

    def product(source: Tolerance, *lengths: int) -> Tolerance:
        every = [tolerance.product_tolerance(source, dtype, length, spec.allow_tf32) for length in lengths]
        return Tolerance(max(one.relative_frobenius for one in every), max(one.worst for one in every))

    z, hidden = product(tolerance.EXACT, case.d_model) + Tolerance(one_side, one_side), tolerance.activated(pre)
    # The derivative of the activation is as steep as the activation.
    d_pre = tolerance.rounded(hidden + z, dtype)
    slots = tolerance.rounded(product(d_pre, spec.activation.input_width(d_ff)), dtype)
    sums = math.sqrt(top_k + 1) * tolerance.FP32
    d_x = Tolerance(slots.relative_frobenius + sums, math.sqrt(top_k + 1) * slots.worst + tolerance.DEVIATIONS * sums)
    # d_w is a sum over F of products of either sign, and a logit's gradient a difference of two such sums.
    d_weight = product(z, d_ff) + product(hidden, d_ff)
    d_logits = d_weight + d_weight
    table = {
        "x": tolerance.rounded(d_x + d_logits, dtype),
        "down": product(tolerance.rounded(hidden, dtype), 1, num_tokens),
        "down_bias": product(tolerance.EXACT, 1, num_tokens),
        **dict.fromkeys(("weight", "bias", "gate"), product(d_logits, 1, num_tokens)),
    }
    of_pre = product(d_pre, 1, num_tokens)
    return lambda name: tolerance.rounded(table.get(name.removeprefix("d_").rpartition(".")[2], of_pre), dtype)
