"""Router flips: tokens with other experts than the reference's. Ties score closer than two logits may move."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from moe_core.ops.activation.reference import sigmoid
from moe_core.specs import RouterSpec

#: Softmax: 2 p (1 - p), all logits moving. Sigmoid: p (1 - p). sqrt(softplus): 0.319 at most.
_SLOPE = {"softmax": 0.5, "sigmoid": 0.25, "sqrt_softplus": 0.32}
#: fp32 roundings between a logit and its score: a few in each of exp, sum, division and bias.
_SCORE_ROUNDINGS = 8


@dataclass(frozen=True)
class Flip:
    """One token with different experts. reference, candidate: its ids by slot.

    kind: `set` (other experts), `group` (other expert groups), `order` (the same experts, other slots). margin: how
    much better the reference's choice scores, in selection scores, or None. allowed: the largest margin that the
    logits' tolerance explains. own_choice: the rule's choice on the candidate's own logits, if the candidate chose
    otherwise.
    """

    token: int
    reference: tuple[int, ...]
    candidate: tuple[int, ...]
    kind: str
    margin: float | None
    allowed: float
    own_choice: tuple[int, ...] | None = None

    @property
    def is_tie(self) -> bool:
        return self.own_choice is None and self.margin is not None and self.margin <= self.allowed

    @property
    def verdict(self) -> str:
        return "flip (tie within tolerance)" if self.is_tie else "differ"

    def __str__(self) -> str:
        margin = "margin not known" if self.margin is None else f"margin {self.margin:.3g}"
        choice = "" if self.own_choice is None else f", its own logits say {list(self.own_choice)}"
        return (
            f"token {self.token}: {list(self.reference)} -> {list(self.candidate)} ({self.kind}), {margin}, "
            f"allowed {self.allowed:.3g}{choice}: {self.verdict}"
        )


def topk_scores(
    logits: np.ndarray, router: RouterSpec | None = None, correction_bias: np.ndarray | None = None
) -> np.ndarray:
    logits = np.asarray(logits, np.float32)
    if router is None or correction_bias is None:
        return logits
    with np.errstate(all="ignore"):
        if router.order == "topk_then_softmax":
            scores = logits
        elif router.scoring == "softmax":
            scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
            scores = scores / scores.sum(axis=-1, keepdims=True)
        elif router.scoring == "sigmoid":
            scores = sigmoid(logits)
        else:
            scores = np.sqrt(np.logaddexp(np.float32(0), logits))
        return scores + np.asarray(correction_bias, np.float32)


@dataclass(frozen=True)
class RouterScores:
    """The reference's selection scores `[T, E]`, and their movement per unit of logit tolerance."""

    scores: np.ndarray
    slope: float = 1.0
    roundings: int = 0
    num_groups: int = 1
    topk_group: int = 1
    has_bias: bool = False

    @classmethod
    def of(
        cls, logits: np.ndarray, router: RouterSpec | None = None, correction_bias: np.ndarray | None = None
    ) -> RouterScores:
        """router None: the logits rank the experts."""
        scores = topk_scores(logits, router, correction_bias)
        if router is None:
            return cls(scores)
        scored = correction_bias is not None and router.order != "topk_then_softmax"
        return cls(
            scores,
            slope=_SLOPE[router.scoring] if scored else 1.0,
            roundings=_SCORE_ROUNDINGS if correction_bias is not None else 0,
            num_groups=router.num_groups,
            topk_group=router.topk_group,
            has_bias=correction_bias is not None,
        )

    def allowed(self, token: int, logit_tolerance: float) -> float:
        """The largest score margin lost when each logit moves by logit_tolerance."""
        largest = float(np.max(np.abs(self.scores[token]), initial=0.0))
        rounding = self.roundings * float(np.finfo(np.float32).eps) * largest
        # It adds two scores, so it moves twice as far.
        terms = 2 if self.num_groups > 1 and self.has_bias else 1
        return terms * (2 * self.slope * logit_tolerance + rounding)

    def group_scores(self, token: int) -> np.ndarray:
        """The sum of a group's two best scores with a bias, else the best."""
        groups = np.sort(self.scores[token].reshape(self.num_groups, -1), axis=1)
        return groups[:, -2:].sum(axis=1) if self.has_bias else groups[:, -1]


def find_flips(
    reference_ids: np.ndarray, candidate_ids: np.ndarray, scores: RouterScores | None, logit_tolerance: np.ndarray
) -> tuple[Flip, ...]:
    """Every token with different ids `[T, K]`. logit_tolerance `[T]`: the allowed error of the token's logits."""
    flips = []
    for token in np.flatnonzero((reference_ids != candidate_ids).any(axis=1)):
        wanted, chosen = (tuple(int(e) for e in ids[token]) for ids in (reference_ids, candidate_ids))
        kind, margin, allowed = _classify(wanted, chosen, scores, int(token), float(logit_tolerance[token]))
        flips.append(Flip(int(token), wanted, chosen, kind, margin, allowed))
    return tuple(flips)


def blame_routing(
    flips: tuple[Flip, ...], rule_ids: np.ndarray, candidate_ids: np.ndarray, own: RouterScores
) -> tuple[Flip, ...]:
    """Set `own_choice` where not the candidate's logits are at fault: rule_ids and scores `own` are of these."""
    by_token = {flip.token: flip for flip in flips}
    for flip in find_flips(rule_ids, candidate_ids, own, np.zeros(len(rule_ids))):
        if not own.has_bias or not flip.is_tie:
            by_token[flip.token] = dataclasses.replace(by_token.get(flip.token, flip), own_choice=flip.reference)
    return tuple(by_token[token] for token in sorted(by_token))


def _classify(
    wanted: tuple[int, ...], found: tuple[int, ...], scores: RouterScores | None, token: int, tolerance: float
) -> tuple[str, float | None, float]:
    """(kind, margin, allowed) of one token. margin None: nothing can explain the difference."""
    removed, added = set(wanted) - set(found), set(found) - set(wanted)
    kind = "set" if removed or added else "order"
    if scores is None:
        return kind, None, 0.0
    allowed = scores.allowed(token, tolerance)
    token_scores = scores.scores[token]
    legal = all(0 <= expert < len(token_scores) for expert in (*wanted, *found)) and len(set(found)) == len(found)
    if not legal:
        return kind, None, allowed
    if kind == "order":
        inverted = [
            token_scores[first] - token_scores[second]
            for position, second in enumerate(found)
            for first in found[position + 1 :]
            if wanted.index(first) < wanted.index(second)
        ]
        return kind, float(max(inverted)), allowed
    if scores.num_groups > 1:
        group_of = len(token_scores) // scores.num_groups
        groups = scores.group_scores(token)
        kept = set(np.argsort(-groups, kind="stable")[: scores.topk_group].tolist())
        strangers = {expert // group_of for expert in added} - kept
        if strangers:
            worst_saved = min(groups[group] for group in kept)
            return "group", float(worst_saved - min(groups[group] for group in strangers)), allowed
    return kind, float(max(token_scores[list(removed)]) - min(token_scores[list(added)])), allowed
