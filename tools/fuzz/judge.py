"""Holds what an engine returned to the oracle, and the front-ends to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tools.fuzz.case import Case
from tools.fuzz.data import Arrays, offset_ids, one_layer
from tools.fuzz.engines import is_trained
from tools.fuzz.oracle import rounding, routing
from tools.fuzz.oracle.adapters import invalid_adapters
from tools.fuzz.oracle.around import backward_around, run_around
from tools.fuzz.oracle.backward import Backward
from tools.fuzz.oracle.layer import (
    Machine,
    choice_of,
    expert_scales,
    forward,
    router_logits,
    slots_of,
    table_ids,
    within_capacity,
)
from tools.fuzz.oracle.layout import layout_of
from tools.fuzz.oracle.mixer import mixed_gradient, mixed_weights
from tools.fuzz.oracle.norm import norm_of, rms_norm, rms_norm_gradient
from tools.fuzz.oracle.real import Real
from tools.fuzz.oracle.stages import StageBackward

Results = Mapping[str, torch.Tensor]


@dataclass
class Verdict:
    """complaints: what is wrong, in words. elements: compared; undetermined: of those, where anything is right."""

    complaints: list[str] = field(default_factory=list)
    elements: int = 0
    undetermined: int = 0
    #: Error over bound, the largest one.
    tightness: float = 0.0

    def compare(self, name: str, found: torch.Tensor, expected: Real) -> None:
        if tuple(found.shape) != tuple(expected.value.shape):
            self.complaints.append(f"{name}: shape {tuple(found.shape)}, expected {tuple(expected.value.shape)}")
            return
        actual = found.detach().to(torch.float64)
        value, error = expected.value, expected.error
        distance = (actual - value).abs()
        same = (torch.isnan(actual) & torch.isnan(value)) | (actual == value)
        fine = same | torch.isinf(error) | (distance <= error)
        self.elements += actual.numel()
        self.undetermined += int(torch.isinf(error).sum())
        if bool(fine.all()):
            ratio = torch.where((error > 0) & torch.isfinite(error) & ~same, distance / error, 0.0)
            self.tightness = max(self.tightness, float(ratio.max()) if ratio.numel() else 0.0)
            return
        wrong = torch.nonzero(~fine)
        where = tuple(wrong[0].tolist())
        self.complaints.append(
            f"{name}: {len(wrong)} of {actual.numel()} elements, the first at {where}: got {float(actual[where])!r}, "
            f"expected {float(value[where])!r} within {float(error[where]):.3g}"
        )

    def equal(self, name: str, found: torch.Tensor, expected: Any) -> None:
        """Integers."""
        expected = torch.as_tensor(expected, device=found.device)
        self.elements += found.numel()
        if tuple(found.shape) != tuple(expected.shape) or not bool((found.long() == expected.long()).all()):
            self.complaints.append(f"{name}: got {found.tolist()}, expected {expected.tolist()}"[:400])

    def bits(self, name: str, found: torch.Tensor, expected: torch.Tensor, any_nan: bool = False) -> None:
        """Every bit, with any_nan whatever a NaN looks like."""
        self.elements += found.numel()
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            kinds = [f"{one.dtype} {tuple(one.shape)}" for one in (found, expected)]
            self.complaints.append(f"{name}: got {kinds[0]}, expected {kinds[1]}")
        elif any_nan and torch.equal(_bytes(found), _bytes(expected)):
            return
        elif not torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)):
            self.complaints.append(f"{name}: got {found.tolist()}, expected {expected.tolist()}"[:400])

    def add(self, other: Verdict) -> None:
        self.complaints += other.complaints
        self.elements += other.elements
        self.undetermined += other.undetermined
        self.tightness = max(self.tightness, other.tightness)


def same_bits(first: Results, second: Results, names: tuple[str, str]) -> list[str]:
    """Complaints about two front-ends whose results are not equal bit by bit."""
    found = [f"{names} return {sorted(first)} and {sorted(second)}"] if sorted(first) != sorted(second) else []
    for name in first.keys() & second.keys():
        one, other = first[name], second[name].to(first[name].device)
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            found.append(f"{name}: {names[0]} {one.dtype} {tuple(one.shape)}, {names[1]} {other.dtype} {other.shape}")
        elif not torch.equal(_bytes(one), _bytes(other)):
            different = int((one != other).sum())
            found.append(f"{name}: {names[0]} and {names[1]} differ in {different} of {one.numel()} elements")
    return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor; all NaNs count as one, whose sign and payload additions of each framework choose."""
    if tensor.is_floating_point():
        tensor = torch.where(torch.isnan(tensor), torch.full_like(tensor, torch.nan), tensor)
    return tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


_MATRICES = ("experts.gate_up", "experts.up", "experts.down")
#: What each framework computes with operations of its own, so that bits may differ (docs/user/training.md).
FRAMEWORKS_OWN = ("load_balance_loss", "z_loss")


def judge(case: Case, arrays: Arrays, results: Results, engine: str) -> Verdict:
    """What is wrong with the results of one case on one engine."""
    # NumPy multiplies all bits; the interpreter cuts off what TF32 has not.
    machine, verdict = Machine(case.dtype, engine == "cuda", case.tf32 and engine != "reference"), Verdict()
    given = arrays.numbers()
    if case.kind == "layer":
        case, given = one_layer(case, given)
    if case.table:
        given["ids"] = table_ids(case, given)
    if case.kind == "layout":
        for name, expected in layout_of(case, given).items():
            verdict.equal(name, results[name], expected)
        return verdict
    _Judge(case, given, results, machine, verdict).run()
    return verdict


class _Judge:
    def __init__(
        self, case: Case, given: dict[str, torch.Tensor], results: Results, machine: Machine, verdict: Verdict
    ) -> None:
        self.case, self.given, self.results, self.machine, self.verdict = case, given, results, machine, verdict
        self.choice = choice_of(case)
        self.mask = given.get("token_mask")
        self.logits: Real | None = None
        #: The weights before the scales of experts.
        self.unscaled: Real | None = None
        self.rounded: rounding.Rounded | None = None

    def run(self) -> None:
        case, given, verdict, results = self.case, self.given, self.verdict, self.results
        if case.kind == "norm":
            self._norm()
            return
        if case.tile and case.kind == "route":
            self._rounded()
            return
        ids, weights = self._routed()
        if case.kind == "route":
            if case.gradient:
                self._route_gradient(ids)
            return
        kept = within_capacity(ids, case)
        if case.kind == "layer":
            verdict.equal("ids", results["ids"], kept)
        masked = given if case.kind == "moe" else {name: own for name, own in given.items() if name != "token_mask"}
        used = offset_ids(kept, case) if case.packs > 1 and case.source == "logits" else kept
        if case.packs > 1 and case.source == "logits":
            masked = {name: own for name, own in given.items() if name != "token_mask"}
        slots = slots_of(case, used, masked)
        counts = slots.counts if case.kind != "layer" else slots_of(case, ids, masked).counts
        counts = counts if self.rounded is None else self.rounded.counts
        if case.kind != "stages":
            verdict.equal("tokens_per_expert", results["tokens_per_expert"], counts)
            known = case.given_ids or case.table
            invalid = slots_of(case, given["ids"], given).invalid if known else slots.invalid
            verdict.equal("invalid_ids", results["invalid_ids"], [invalid + invalid_adapters(given, case.num_tokens)])
        if case.kind == "layer" or case.apart:
            output = run_around(case, given, slots, weights, self.machine).y
        else:
            output = forward(case, given, slots, weights, self.machine)
        verdict.compare("output", results["output"], output)
        if case.kind == "layer":
            self._losses(counts)
        if case.gradient:
            self._gradients(slots, weights, ids, counts)

    def _routed(self) -> tuple[torch.Tensor, Real]:
        """(ids as the router chose them, their weights), both held to the oracle where the engine computed them."""
        case, given, results, verdict = self.case, self.given, self.results, self.verdict
        if case.source == "ids" and case.kind == "moe":
            return given["ids"], self.machine.exact(given["weights"])
        if case.source == "x":
            expected = router_logits(case, given, self.machine)
            active = torch.ones(case.num_tokens, dtype=torch.bool) if self.mask is None else self.mask
            active = active.to(expected.value.device)
            verdict.compare("logits", results["logits"][active], expected.map(lambda part: part[active]))
            self.logits = self.machine.exact(results["logits"].to(torch.float64))
        else:
            self.logits = self.machine.exact(given["logits"])
        if case.given_ids or case.table or (case.kind == "route" and case.source == "ids"):
            ids = self._known(given["ids"])
            if case.kind == "route":
                verdict.equal("ids", results["ids"], ids)
        else:
            ids = self._chosen()
        if case.tile:
            weights, ids = self._rounded_weights(ids), results["ids"]
        elif case.mixer:
            weights = mixed_weights(self.logits, ids, case.mixer)
        else:
            weights = routing.weights(self.logits, ids.long(), self.choice)
        if case.expert_scale:
            self.unscaled = weights
            weights = weights * expert_scales(given, ids, self.machine)
        verdict.compare("weights", results["weights"], weights)
        # What follows uses the engine's own weights, which are right.
        return ids, self.machine.exact(results["weights"].to(torch.float64))

    def _known(self, ids: torch.Tensor) -> torch.Tensor:
        """Given ids: a token with one outside [0, E), or a masked one, has none."""
        fine = ((ids >= 0) & (ids < self.case.num_ids)).all(1, True)
        if self.mask is not None:
            fine = fine & self.mask[:, None]
        return torch.where(fine, ids, -1)

    def _chosen(self) -> torch.Tensor:
        case, results = self.case, self.results
        assert self.logits is not None
        # What a layer with a capacity returns lacks the slots that were dropped.
        ids = results["routed_ids" if case.capacity or case.tile else "ids"].long()
        choice = rounding.wide(case, self.choice) if case.tile else self.choice
        wrong = routing.complaints(ids, self.logits, choice, self.given.get("correction_bias"), self.mask)
        if case.mixer:  # which looks at differences of logits, that infinities do not have
            wrong = wrong & torch.isfinite(self.logits.value).all(1)
        self.verdict.elements += ids.numel()
        if bool(wrong.any()):
            token = int(torch.nonzero(wrong)[0])
            self.verdict.complaints.append(
                f"ids: {int(wrong.sum())} of {len(wrong)} tokens, the first {token}: got {ids[token].tolist()} for "
                f"logits {self.logits.value[token].tolist()}"[:600]
            )
            ids = ids.clamp(-1, case.num_ids - 1)
        return ids.to(torch.int32)

    def _rounded_weights(self, candidates: torch.Tensor) -> Real:
        """Of a layer's ids, which the rule of token rounding keeps of the candidates."""
        assert self.logits is not None
        self.rounded = rounding.expected(self.case, self.logits, self.choice, candidates.long())
        ids = self.results["ids"]
        self.verdict.complaints += rounding.complaints(self.case, self.rounded, ids)
        return self.rounded.weights.where(ids >= 0)

    def _rounded(self) -> None:
        """Token rounding: the engine's own ids, which are right, say which weights remain."""
        case, results, logits = self.case, self.results, self.machine.exact(self.given["logits"])
        candidates, ids = rounding.candidates_of(case, logits, self.mask), results["ids"]
        wanted = rounding.expected(case, logits, self.choice, candidates)
        self.verdict.complaints += rounding.complaints(case, wanted, ids)
        self.verdict.equal("tokens_per_expert", results["tokens_per_expert"], wanted.counts)
        self.verdict.compare("weights", results["weights"], wanted.weights.where(ids >= 0))
        if case.gradient:
            given = {"d_weights": self.machine.exact(self.given["d_weights"]), "ids": ids}
            expected = rounding.gradient(case, logits, self.choice, wanted, given)
            bad = ~torch.isfinite(logits.value).all(1, True)
            self.verdict.compare("d logits", results["d logits"], expected.unknown(bad.expand_as(expected.value)))

    def _norm(self) -> None:
        case, given, verdict, results = self.case, self.given, self.verdict, self.results
        x, norm = self.machine.exact(given["x"]), norm_of(case, given["weight"], case.router_norm)
        verdict.compare("output", results["output"], rms_norm(x, norm))
        if case.gradient:
            bad = ~torch.isfinite(x.value).all(1, True)
            d_x, d_weight = rms_norm_gradient(self.machine.exact(given["d_output"]), x, norm)
            verdict.compare("d x", results["d x"], d_x.cast(case.dtype).unknown(bad.expand_as(d_x.value)))
            unknown = bad.any().expand_as(d_weight.value)
            verdict.compare("d weight", results["d weight"], d_weight.cast(case.dtype).unknown(unknown))

    def _losses(self, counts: torch.Tensor) -> None:
        assert self.logits is not None
        given = routing.LossInputs(self.logits, counts.double(), self.mask)
        for name, expected in zip(("load_balance_loss", "z_loss"), routing.losses(given, self.choice), strict=True):
            # Means over tokens whose logits are not finite are each framework's own.
            bad = ~torch.isfinite(given.logits.value[given.active]).all()
            self.verdict.compare(name, self.results[name], expected.unknown(bad))

    def _route_gradient(self, ids: torch.Tensor) -> None:
        assert self.logits is not None
        d_weights = self.machine.exact(self.given["d_weights"])
        expected = routing.logits_gradient(self.logits, ids.long(), self.choice, d_weights)
        bad = ~torch.isfinite(self.logits.value).all(1, True) & (ids >= 0).any(1, True)
        self.verdict.compare("d logits", self.results["d logits"], expected.unknown(bad.expand_as(expected.value)))

    def _gradients(self, slots: Any, weights: Real, ids: torch.Tensor, counts: torch.Tensor) -> None:
        case, given = self.case, self.given
        kinds: dict[str, Any] = {"stages": StageBackward, "layer": backward_around}
        kind = backward_around if case.apart else kinds.get(case.kind, Backward)
        backward = kind(case, given, slots, weights, self.machine)
        d_weights = backward.found.pop("weights")
        if self.logits is not None:
            d_weights = d_weights + self.machine.exact(given["d_weights"])
            if self.unscaled is not None:
                d_weights = backward.add_expert_scale(d_weights, ids, self.unscaled)
            if case.mixer:
                d_logits = mixed_gradient(self.logits, ids, case.mixer, d_weights)
            elif self.rounded is not None:
                flowing = {"d_weights": d_weights, "ids": ids}
                d_logits = rounding.gradient(case, self.logits, self.choice, self.rounded, flowing)
            else:
                d_logits = routing.logits_gradient(self.logits, ids.long(), self.choice, d_weights)
            bad = ~torch.isfinite(self.logits.value).all(1, True) & (ids >= 0).any(1, True)
            d_logits = d_logits.unknown(bad.expand_as(d_logits.value))
            if case.balance or case.z:
                inputs = routing.LossInputs(self.logits, counts.double(), self.mask)
                d_logits = d_logits + routing.losses_gradient(inputs, self.choice, case.balance, case.z)
            if case.source == "logits":
                backward.found["logits"] = d_logits
            else:
                backward.add_router(d_logits)
        else:
            narrow = case.router_weight_dtype != "float32"
            backward.found["weights"] = d_weights.cast(case.router_weight_dtype) if narrow else d_weights
        for name, expected in backward.finish().items():
            if f"d {name}" in self.results:
                self.verdict.compare(f"d {name}", self.results[f"d {name}"], expected)
            elif is_trained(case, name) and not (case.weights and name in _MATRICES):
                self.verdict.complaints.append(f"d {name}: missing")
