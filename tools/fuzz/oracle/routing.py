"""Routing from docs/user/routing.md: which ids are right, their weights, the losses, and the gradients of logits.

The oracle does not choose ids and compare: it judges the ids that an engine chose. Where scores are known exactly there
is one right choice, ties included; where two rounded scores may change places, both are right.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from tools.fuzz.oracle.real import Real, Tensor


@dataclass(frozen=True)
class Choice:
    """The rules of one routing, as docs/user/routing.md names them."""

    top_k: int
    scoring: str = "softmax"
    order: str = "softmax_then_topk"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    topk_group: int = 1
    slot_order: str = "score"
    epsilon: float = 0.0
    logit_scale: float = 1.0
    softcap: float = 0.0
    bias_on: str = "scores"
    group_score: str = ""

    def pairs(self, biased: bool) -> bool:
        """Whether a group's score is the sum of its two best."""
        return self.group_score == "pair" or (biased and not self.group_score)

    @property
    def among_chosen(self) -> bool:
        """Whether the weights are shares of a softmax over the chosen experts alone."""
        return self.scoring == "softmax" and (self.order == "topk_then_softmax" or self.renormalize)


@dataclass(frozen=True)
class _Keys:
    """What the top-k compares. rank: 2 a number, 1 NaN, 0 left out. label: equal ones are exactly tied, [T, E, n]."""

    rank: Tensor
    value: Tensor
    error: Tensor
    label: Tensor

    def surely_before(self, first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> Tensor:
        """Whether `first` must come before `second`; each (rank, value, error, label, position), to broadcast."""
        rank, value, error, label, place = first
        rank2, value2, error2, label2, place2 = second
        tied = (label == label2).all(-1) | ((value == value2) & (error == 0) & (error2 == 0))
        above = (value - error > value2 + error2) & ~tied
        number = (rank == 2) & (rank2 == 2) & (above | (tied & (place < place2)))
        return (rank > rank2) | number | ((rank == rank2) & (rank < 2) & (place < place2))

    def at(self, index: Tensor) -> tuple[Tensor, ...]:
        """The key of one expert for each token; index [T, n]."""
        wide = index.unsqueeze(-1).expand(*index.shape, self.label.shape[-1])
        found = (torch.gather(part, 1, index) for part in (self.rank, self.value, self.error))
        return (*found, torch.gather(self.label, 1, wide), index)

    def every(self) -> tuple[Tensor, ...]:
        place = torch.arange(self.rank.shape[1], device=self.rank.device).expand(self.rank.shape)
        return self.rank, self.value, self.error, self.label, place


def scored(logits: Real, choice: Choice) -> Real:
    """The logits that are scored: scaled and capped."""
    if choice.logit_scale != 1.0:
        logits = logits.scaled(choice.logit_scale)
    if choice.softcap:
        value = choice.softcap * torch.tanh(logits.value / choice.softcap)
        # tanh is exact to u of 1, whatever is left of it.
        error = logits.error + 8 * logits.unit * choice.softcap * ~torch.isnan(value)
        logits = logits.own(value, error, 4)
    return logits


def _unscored(d_logits: Real, logits: Real, choice: Choice) -> Real:
    """The gradient of the logits themselves from that of those that are scored."""
    if choice.softcap:
        slope = 1 - torch.tanh(logits.value * choice.logit_scale / choice.softcap) ** 2
        nothing = (d_logits.value == 0) & (d_logits.error == 0)
        d_logits = (d_logits * logits.own(slope, 16 * logits.unit * torch.ones_like(slope))).where(~nothing)
    return d_logits if choice.logit_scale == 1.0 else d_logits.scaled(choice.logit_scale)


def scores(logits: Real, choice: Choice) -> Real:
    """Every expert's score [T, E]; logits: those that are scored."""
    if choice.scoring == "softmax":
        top = torch.nan_to_num(logits.value, nan=-math.inf, posinf=math.inf, neginf=-math.inf).amax(-1, True)
        top = torch.where(torch.isinf(top), 0.0, top)
        # +inf: inf / inf is NaN, and so is every share of a sum that holds it.
        power = logits.of(logits.value - top, logits.error * 1.0).exp()
        total = power.sum(-1, True)
        result = power / total
        broken = torch.isnan(logits.value).any(-1, True) | (logits.value == math.inf).any(-1, True)
        broken = broken | (logits.value == -math.inf).all(-1, True)
        nan = torch.full_like(result.value, math.nan)
        return result.of(torch.where(broken, nan, result.value), torch.where(broken, 0.0, result.error))
    if choice.scoring == "sigmoid":
        value = torch.sigmoid(logits.value)
        error = value * torch.expm1(logits.error)
    else:
        value = torch.sqrt(torch.nn.functional.softplus(logits.value, threshold=600.0))
        value = torch.where(logits.value == -math.inf, 0.0, value)
        error = torch.where(logits.error == 0, 0.0, value * torch.expm1(logits.error))
        # exp(x) may have become 0, or a number with few bits, before its root is taken.
        smallest = 2.0 ** (-63 if logits.unit > 2.0**-30 else -511)
        error = torch.where(value < 2 * smallest, value + smallest, error)
    size = torch.nan_to_num(logits.value.abs(), nan=0.0, posinf=0.0)
    result = logits.own(value, error, 8 + 2 * size.clamp(max=100.0))
    return result.of(result.value, torch.where(torch.isinf(logits.value), 0.0, result.error))


def complaints(ids: Tensor, logits: Real, choice: Choice, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    """bool [T]: tokens whose ids [T, K] no right engine may choose. logits: those that the engine chose from."""
    T, E = logits.value.shape
    wrong = torch.zeros(T, dtype=torch.bool, device=ids.device)
    if T == 0:
        return wrong
    active = torch.ones_like(wrong) if mask is None else mask
    wrong |= ~active & (ids != -1).any(1)
    outside = ((ids < 0) | (ids >= E)).any(1)
    repeated = torch.sort(ids, 1)[0].diff(dim=1).eq(0).any(1)
    wrong |= active & (outside | repeated)
    sound = ids.clamp(0, E - 1)
    keys = _keys(logits, choice, bias)
    kept = torch.ones_like(keys.rank, dtype=torch.bool)
    unclear = torch.zeros_like(wrong)
    if choice.num_groups > 1:
        kept, unclear = _kept_groups(keys, choice, choice.pairs(bias is not None))
    wrong |= active & ~unclear & _misplaced(sound, keys, kept, choice)
    some = unclear & active & ~wrong
    if bool(some.any()):
        rows = _Keys(keys.rank[some], keys.value[some], keys.error[some], keys.label[some])
        wrong[some] = ~_some_groups_fit(sound[some], rows, choice, choice.pairs(bias is not None))
    return wrong


def _keys(logits: Real, choice: Choice, bias: Tensor | None) -> _Keys:
    """Without a bias and pairs the logits are compared, else score + bias or logit + bias."""
    grouped = choice.num_groups > 1 and choice.pairs(bias is not None)
    label = logits.value.unsqueeze(-1)
    if bias is None and not grouped:
        key = logits
    else:
        key = scored(logits, choice)
        by_logits = choice.order == "topk_then_softmax" and choice.scoring == "softmax"
        by_logits = by_logits or (bias is not None and choice.bias_on == "logits")
        key = key if by_logits else scores(key, choice)
    if bias is not None:
        key = key + Real.exact(bias.expand_as(logits.value), logits.unit)
        label = torch.stack((logits.value, bias.expand_as(logits.value)), -1)
    nan = torch.isnan(key.value)
    label = torch.where((logits.error == 0).unsqueeze(-1), label, math.nan)  # NaN equals nothing
    rank = torch.where(nan, 1, 2)
    return _Keys(rank, torch.where(nan, 0.0, key.value), torch.where(nan, 0.0, key.error), label)


def _misplaced(ids: Tensor, keys: _Keys, kept: Tensor, choice: Choice) -> Tensor:
    """bool [T]: an expert of a group that was left out, or one that another must come before."""
    keys = _Keys(torch.where(kept, keys.rank, 0), keys.value, keys.error, keys.label)
    wrong = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    taken = torch.zeros_like(kept)
    if choice.slot_order == "expert":
        wrong |= (ids.diff(dim=1) <= 0).any(1)
        taken.scatter_(1, ids, True)
    for k in range(ids.shape[1]):
        mine = keys.at(ids[:, k : k + 1])
        if choice.slot_order == "score":
            taken.scatter_(1, ids[:, k : k + 1], True)
        wrong |= (keys.surely_before(keys.every(), mine) & ~taken).any(1)
    return wrong


def _group_keys(keys: _Keys, choice: Choice, pairs: bool) -> _Keys:
    """Each group's best score, or the sum of its two best (pairs)."""
    T, E = keys.rank.shape
    grouped = (T, choice.num_groups, E // choice.num_groups)
    rank, value, error = (part.reshape(grouped) for part in (keys.rank, keys.value, keys.error))
    value = torch.where(rank == 2, value, -math.inf)
    number, error = (rank == 2).sum(-1), torch.where(rank == 2, error, 0.0)
    best, where = value.sort(-1, descending=True)
    # Which of two close scores is the best matters less than the larger error of the group.
    blur = error.amax(-1)
    if not pairs:
        label = torch.full((*grouped[:2], 1), math.nan, device=rank.device)
        exact = torch.where(number > 0, best[..., 0], 0.0)
        return _Keys(torch.where(number > 0, 2, 1), exact, torch.where(number > 0, blur, 0.0), label)
    total = best[..., 0] + best[..., 1]
    fine = number > 1
    total_error = 2 * blur + 2.0**-24 * torch.nan_to_num(total.abs(), posinf=0.0)
    labels = keys.label.reshape(*grouped, keys.label.shape[-1])
    pair = torch.cat([torch.gather(labels, 2, where[..., :2, None].expand(-1, -1, -1, labels.shape[-1]))], -1)
    rank = torch.where(fine & ~torch.isnan(total), 2, 1)
    usable = rank == 2
    return _Keys(rank, torch.where(usable, total, 0.0), torch.where(usable, total_error, 0.0), pair.flatten(2))


def _kept_groups(keys: _Keys, choice: Choice, pairs: bool) -> tuple[Tensor, Tensor]:
    """(experts of kept groups [T, E], tokens for which more than one choice of groups is right [T])."""
    groups = _group_keys(keys, choice, pairs)
    mine = tuple(part.unsqueeze(2) for part in groups.every())
    other = tuple(part.unsqueeze(1) for part in groups.every())
    before = groups.surely_before(other, mine)  # [T, mine, other]
    after = groups.surely_before(mine, other)
    surely_out = before.sum(2) >= choice.topk_group
    surely_in = after.sum(2) >= choice.num_groups - choice.topk_group
    kept = surely_in.repeat_interleave(keys.rank.shape[1] // choice.num_groups, 1)
    return kept, ~(surely_out | surely_in).all(1) | (surely_in.sum(1) != choice.topk_group)


def _some_groups_fit(ids: Tensor, keys: _Keys, choice: Choice, pairs: bool) -> Tensor:
    """bool [T]: whether some right choice of groups makes these ids right."""
    groups = _group_keys(keys, choice, pairs)
    mine = tuple(part.unsqueeze(2) for part in groups.every())
    other = tuple(part.unsqueeze(1) for part in groups.every())
    before = groups.surely_before(other, mine)  # [T, mine, other]
    found = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    for chosen in itertools.combinations(range(choice.num_groups), choice.topk_group):
        inside = torch.zeros(choice.num_groups, dtype=torch.bool, device=ids.device)
        inside[list(chosen)] = True
        kept = inside.repeat_interleave(keys.rank.shape[1] // choice.num_groups).expand_as(keys.rank)
        found |= ~before[:, inside][:, :, ~inside].any((1, 2)) & ~_misplaced(ids, keys, kept, choice)
    return found


def weights(logits: Real, ids: Tensor, choice: Choice) -> Real:
    """The weights [T, K] of ids, 0 where they are -1."""
    present = (ids >= 0).all(1, True).expand_as(ids)
    index = ids.clamp(min=0)
    logits = scored(logits, choice)

    def pick(real: Real) -> Real:
        return real.map(lambda part: torch.gather(part, 1, index))

    if choice.among_chosen:
        # A softmax over the chosen: renormalising the shares of all experts is the same number.
        result = scores(pick(logits), Choice(choice.top_k))
        if choice.order != "topk_then_softmax":
            result = _as_shares_of_all(result, pick(scores(logits, choice)))
    else:
        result = pick(scores(logits, choice))
        if choice.renormalize:
            total = result.sum(1, True)
            if choice.epsilon:
                total = total + Real.exact(torch.full_like(total.value, choice.epsilon), total.unit)
            share = result / total.map(lambda part: part.expand_as(ids))
            nothing = ((result.value == 0) & (result.error == 0)).all(1, True)
            result = share.where(~nothing.expand_as(ids))
    return result.scaled(choice.scale).where(present)


def _as_shares_of_all(result: Real, share: Real) -> Real:
    """NaN where a share of all experts is NaN; unknown where it may underflow."""
    nan = torch.isnan(share.value)
    value = torch.where(nan, math.nan, result.value)
    faint = (share.value.sum(1, True) < 2.0**-100) & ~nan
    error = torch.where(nan, 0.0, torch.where(faint, math.inf, result.error))
    return result.of(value, error)


@dataclass(frozen=True)
class LossInputs:
    """logits [T, E], tokens per expert [E], mask [T] or None."""

    logits: Real
    counts: Tensor
    mask: Tensor | None

    @property
    def active(self) -> Tensor:
        T = self.logits.value.shape[0]
        return torch.ones(T, dtype=torch.bool, device=self.counts.device) if self.mask is None else self.mask


def losses(given: LossInputs, choice: Choice) -> tuple[Real, Real]:
    """(load balance loss, z-loss), scalars."""
    chosen = given.logits.map(lambda part: part[given.active])
    chosen, (T, E) = scored(chosen, choice), chosen.value.shape
    if T == 0:
        zero = torch.zeros((), dtype=torch.float64, device=given.counts.device)
        return Real.exact(zero, chosen.unit), Real.exact(zero, chosen.unit)
    share = shares(chosen, choice).sum(0).scaled(1 / T)
    fraction = Real.exact(given.counts / max(1.0, float(T * choice.top_k)), chosen.unit)
    lse = _logsumexp(chosen)
    return (fraction * share).sum(0).scaled(E), (lse * lse).sum(0).scaled(1 / T)


def shares(logits: Real, choice: Choice) -> Real:
    """Scores divided by their sum over experts."""
    score = scores(logits, choice)
    if choice.scoring == "softmax":
        return score
    nothing = ((score.value == 0) & (score.error == 0)).all(1, True).expand_as(score.value)
    return (score / score.sum(1, True).map(lambda part: part.expand_as(score.value))).where(~nothing)


def _logsumexp(logits: Real) -> Real:
    value = torch.logsumexp(logits.value, 1)
    error = logits.error.amax(1) + 8 * logits.unit * (1 + value.abs() + logits.value.abs().amax(1))
    return logits.own(value, error, 4 + logits.value.shape[1] ** 0.5)


def log_slope(logits: Real, choice: Choice) -> Real:
    """d log(score) / d logit of the scores that act by expert."""
    if choice.scoring == "sigmoid":
        value = torch.sigmoid(-logits.value)
    else:
        softplus = torch.nn.functional.softplus(logits.value, threshold=600.0)
        value = torch.sigmoid(logits.value) / (2 * softplus)
        value = torch.where(logits.value < -700, 0.5, value)
    size = torch.nan_to_num(logits.value.abs(), nan=0.0, posinf=0.0)
    return logits.own(value, value * torch.expm1(logits.error), 16 + 4 * size.clamp(max=100.0))


def logits_gradient(logits: Real, ids: Tensor, choice: Choice, d_weights: Real) -> Real:
    """d_logits [T, E] from d_weights [T, K], the table of docs/user/training.md; rows without ids are zero."""
    present = (ids >= 0).all(1, True).expand_as(ids)
    index = ids.clamp(min=0)
    raw, logits = logits, scored(logits, choice)
    picked = logits.map(lambda part: torch.gather(part, 1, index))
    d = d_weights.scaled(choice.scale).where(present)
    masked = ~present[:, :1].expand_as(raw.value)

    def unscored(d_scored: Real) -> Real:
        return _unscored(d_scored.where(~masked), raw, choice).where(~masked)

    def spread(at_chosen: Real) -> Real:
        empty = torch.zeros_like(logits.value)
        return at_chosen.where(present).map(lambda part: empty.scatter_add(1, index, part))

    among = choice.renormalize or choice.among_chosen
    plain = Choice(choice.top_k, choice.scoring, choice.order, among, epsilon=choice.epsilon)
    if choice.scoring == "softmax" and not choice.among_chosen:
        p = scores(logits, choice)
        inner = (p.map(lambda part: torch.gather(part, 1, index)) * d).sum(1, True)
        result = p * (spread(d) - inner.map(lambda part: part.expand_as(p.value)))
        return unscored(result)
    if not plain.renormalize:
        return unscored(spread(log_slope(picked, choice) * scores(picked, choice) * d))
    q = weights(logits, ids, plain)
    inner = (q * d).sum(1, True).map(lambda part: part.expand_as(ids))
    result = q * (d - inner)
    return unscored(spread(result if choice.scoring == "softmax" else log_slope(picked, choice) * result))


def losses_gradient(given: LossInputs, choice: Choice, d_balance: float, d_z: float) -> Real:
    """d_logits [T, E] of both losses; masked tokens have none."""
    raw, active = given.logits, given.active
    logits = scored(raw, choice)
    T, E = int(active.sum()), logits.value.shape[1]
    zero = Real.exact(torch.zeros_like(logits.value), logits.unit)
    if T == 0:
        return zero
    v = Real.exact((d_balance * E / (T * choice.top_k) / T * given.counts).expand_as(logits.value), logits.unit)
    v = v.own(v.value, v.error, 4)
    P = shares(logits, choice)
    inner = (v * P).sum(1, True).map(lambda part: part.expand_as(P.value))
    result = P * (v - inner)
    if choice.scoring != "softmax":
        result = log_slope(logits, choice) * result
    softmax = scores(logits, Choice(choice.top_k))
    lse = _logsumexp(logits).map(lambda part: part.unsqueeze(1).expand_as(P.value))
    # Frameworks take exp(logit - lse), which has the errors of both.
    exponent = lse.error + 2 * logits.unit * (lse.value.abs() + logits.value.abs())
    exponent = exponent.masked_fill(softmax.value == 0, 0)
    softmax = softmax.own(softmax.value, softmax.error + softmax.value * exponent, 4)
    result = result + (softmax * lse).scaled(2 * d_z / T)
    return _unscored(result, raw, choice).where(active.unsqueeze(1).expand_as(P.value))
