"""Makes a failing case smaller for as long as it fails."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

from tools.fuzz.case import Case
from tools.fuzz.legal import why_illegal

_SIZES = ("packs", "T", "E", "K", "D", "F", "mapped", "stack", "shared", "latent", "table", "num_groups", "topk_group")
_SIZES += ("ranks", "spare")


def _simpler(case: Case) -> Iterator[Case]:
    """Cases with one choice less, or one size smaller, the largest steps first."""
    defaults = {field.name: field.default for field in dataclasses.fields(Case)}
    for name, default in defaults.items():
        value = getattr(case, name)
        if name not in ("kind", "seed") and value != default:
            yield dataclasses.replace(case, **{name: default})
    # Choices that make sense only together.
    yield dataclasses.replace(case, shared=0, shared_gate=False, shared_activation="")
    yield dataclasses.replace(case, num_groups=1, topk_group=1, group_score="")
    yield dataclasses.replace(case, weights="", activations="")
    yield dataclasses.replace(case, gradient=False, recompute=False, balance=0.0, z=0.0)
    yield dataclasses.replace(case, correction_bias=False, bias_on="scores")
    yield dataclasses.replace(case, renormalize=False, epsilon=0.0)
    yield dataclasses.replace(case, scoring="softmax", order="", epsilon=0.0)
    plain_norms = {"norm_epsilon": 1e-6, "centred": False, "weight_first": False}
    yield dataclasses.replace(case, latent=0, latent_norm=False, out_norm="", **plain_norms)
    yield dataclasses.replace(case, latent_norm=False, **plain_norms)
    yield dataclasses.replace(case, out_norm="", **plain_norms)
    yield dataclasses.replace(case, adapters=0, targets=Case.targets, shared_factors=False)
    for target in case.targeted:
        left = [name for name in case.targeted if name != target]
        yield dataclasses.replace(case, targets=",".join(left), shared_factors=False)
    for name in _SIZES:
        value = getattr(case, name)
        for smaller in sorted({value // 4, value // 2, value - 1}):
            for seed in (
                (case.seed, *range(6)) if 0 < smaller < value else ()
            ):  # other values may fail where these do not
                yield dataclasses.replace(case, **{name: smaller}, seed=seed)
    for seed in range(2):
        if case.seed > seed:
            yield dataclasses.replace(case, seed=seed)


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 60.0) -> Case:
    """The smallest case found that still fails, within so much time."""
    deadline, progress = time.monotonic() + seconds, True
    while progress:
        legal = (one for one in _simpler(case) if one != case and why_illegal(one) is None)
        progress = False
        for smaller in legal:
            if time.monotonic() > deadline:
                break
            if fails(smaller):
                case, progress = smaller, True
                break
    return case
