"""Token rounding: what is wrong with ids, weights and a gradient, by the rule of docs/user/routing.md in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from tools.fuzz.oracle.real import Real, Tensor
from tools.fuzz.oracle.routing import Choice, logits_gradient
from tools.fuzz.oracle.routing import weights as weights_of


@dataclasses.dataclass(frozen=True)
class Rounded:
    """What a routing with token rounding is held to. candidates `[T, W]`, weights `[T, W]` of all of them, counts `[E]`
    before rounding, rows `[E]` after it."""

    candidates: Tensor
    weights: Real
    counts: Tensor
    rows: Tensor


def rules(case: Any, choice: Choice) -> tuple[Choice, Choice]:
    """Those of the chosen, and of the other candidates, which are not renormalised."""
    plain = dataclasses.replace(choice, order="softmax_then_topk", renormalize=False, epsilon=0.0)
    return choice, dataclasses.replace(plain, top_k=case.choices)


def wide(case: Any, choice: Choice) -> Choice:
    """The rule of the W candidates: their order, not their weights."""
    last = choice.order == "topk_then_softmax" and choice.scoring == "softmax"
    return dataclasses.replace(rules(case, choice)[1], bias_on="logits" if last else choice.bias_on)


def candidates_of(case: Any, logits: Real, mask: Tensor | None) -> Tensor:
    """The W largest logits, NaN last, ties to the lower expert; a cap changes no order here."""
    # NaN lies behind minus infinity, and minus zero ties with zero.
    number = torch.nan_to_num(logits.value, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0
    first = torch.argsort(-number, dim=1, stable=True)
    behind = torch.gather(torch.isnan(logits.value).to(torch.int8), 1, first)
    order = torch.gather(first, 1, torch.argsort(behind, dim=1, stable=True))
    candidates = order[:, : case.choices]
    return candidates if mask is None else torch.where(mask[:, None], candidates, -1)


def expected(case: Any, logits: Real, choice: Choice, candidates: Tensor) -> Rounded:
    """candidates `[T, W]`: the W best experts of each token, -1 for masked ones."""
    own, others = rules(case, choice)
    chosen = weights_of(logits, candidates[:, : case.K], own)
    scores = weights_of(logits, candidates, others)
    value = torch.cat([chosen.value, scores.value[:, case.K :]], 1)
    weights = Real(value, torch.cat([chosen.error, scores.error[:, case.K :]], 1), chosen.unit)
    experts = torch.arange(case.E, device=candidates.device)
    counts = (candidates[:, : case.K, None] == experts).sum((0, 1))
    found = (candidates[..., None] == experts).sum((0, 1))
    whole, rest = counts // case.tile, counts % case.tile
    odd_half = (2 * rest == case.tile) & (whole % 2 == 1)
    more = {"up": rest > 0, "down": rest < 0, "nearest": (2 * rest > case.tile) | odd_half}[case.rounding]
    rows = (whole + more.long()) * case.tile
    return Rounded(candidates, weights, counts, torch.where(rows > found, whole * case.tile, rows))


def complaints(case: Any, wanted: Rounded, ids: Tensor) -> list[str]:
    """What is wrong with the ids; a weight that may be either side of another by rounding may be on either."""
    ids, wrong = ids.long(), []
    kept = ids >= 0
    if bool((kept & (ids != wanted.candidates)).any()):
        return [f"ids: a column holds {ids[kept & (ids != wanted.candidates)][0]}, not its candidate"]
    column = torch.arange(case.choices, device=ids.device).expand_as(ids)
    extra = column >= case.K
    for expert in range(case.E):
        own = wanted.candidates == expert
        rows, count = int((kept & own).sum()), int(wanted.counts[expert])
        if rows != int(wanted.rows[expert]):
            wrong.append(f"ids: expert {expert} keeps {rows} of {count} tokens, not {int(wanted.rows[expert])}")
            continue
        chosen_dropped, extra_kept = bool((own & ~extra & ~kept).any()), bool((own & extra & kept).any())
        if extra_kept and chosen_dropped:
            wrong.append(f"ids: expert {expert} adds a token while it drops one that chose it")
        for part in (own & extra, own & ~extra):
            inside, outside = part & kept, part & ~kept
            value, error = wanted.weights.value, wanted.weights.error
            if not bool(inside.any()) or not bool(outside.any()):
                continue
            sure = ~torch.isnan(value) & torch.isfinite(error)
            if bool((inside & torch.isnan(value)).any()) and bool((outside & sure).any()):
                wrong.append(f"ids: expert {expert} keeps a NaN and drops a number")
            lowest = (value + error)[inside & sure]
            highest = (value - error)[outside & sure]
            if len(lowest) and len(highest) and bool(highest.max() > lowest.min()):
                wrong.append(f"ids: expert {expert} drops {float(highest.max())} and keeps {float(lowest.min())}")
    return wrong


def gradient(case: Any, logits: Real, choice: Choice, wanted: Rounded, given: Mapping[str, Any]) -> Real:
    """d_logits of d_weights, of slots that were not kept zero. given: d_weights, a Real, and ids."""
    own, others = rules(case, choice)
    flowing = given["d_weights"].where(given["ids"] >= 0)
    result = logits_gradient(logits, wanted.candidates[:, : case.K], own, flowing.map(lambda part: part[:, : case.K]))
    if case.choices == case.K:
        return result
    rest = dataclasses.replace(others, top_k=case.choices - case.K)
    extra = flowing.map(lambda part: part[:, case.K :])
    return result + logits_gradient(logits, wanted.candidates[:, case.K :], rest, extra)
