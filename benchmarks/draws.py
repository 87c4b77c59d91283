"""Routing draws: the logits a benchmark routes by, equal on every machine for equal seeds.

Each routing is a popularity per expert. A token's K experts are the K largest of log(popularity) + Gumbel noise, which
is a draw of K different experts in proportion to their popularity.

- `balanced`: every expert is as popular as the next.
- `zipf`: the expert of rank r has popularity r**-1.2; which expert has which rank is drawn.
- `single_hot`: one expert is the first choice of every token; the other K - 1 are drawn balanced.

`python -m benchmarks.draws` prints the loads of every shape.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from benchmarks.shapes import SHAPES, TOKENS, Shape

ROUTINGS = ("balanced", "zipf", "single_hot")
#: `zipf`: popularity = rank**-exponent.
ZIPF_EXPONENT = 1.2
#: The seed of every published figure.
SEED = 0


class Load(NamedTuple):
    """active: experts that have tokens. busiest: the tokens of the expert that has most."""

    active: int
    busiest: int


def draw_logits(routing: str, num_tokens: int, num_experts: int, seed: int = SEED) -> np.ndarray:
    """Logits fp32 `[T, E]` of one of ROUTINGS; a draw depends on its arguments alone."""
    random = np.random.default_rng([seed, num_tokens, num_experts])
    # A zero would have no finite logarithm.
    uniform = np.maximum(random.random((num_tokens, num_experts)), np.finfo(np.float64).tiny)
    logits = -np.log(-np.log(uniform))
    if routing == "zipf":
        logits -= ZIPF_EXPONENT * np.log1p(random.permutation(num_experts))
    elif routing == "single_hot":
        logits[:, random.integers(num_experts)] = logits.max(axis=1) + 1
    elif routing != "balanced":
        raise ValueError(f"routing must be one of {', '.join(ROUTINGS)}, got {routing!r}")
    return logits.astype(np.float32)


def load_of(tokens_per_expert: np.ndarray) -> Load:
    """The load that counts `[E]` describe."""
    return Load(int((tokens_per_expert > 0).sum()), int(tokens_per_expert.max()))


def drawn_load(logits: np.ndarray, top_k: int) -> Load:
    """The load of top-k routing by logits `[T, E]`."""
    ids = np.argpartition(-logits, top_k - 1, axis=1)[:, :top_k]
    return load_of(np.bincount(ids.ravel(), minlength=logits.shape[1]))


def load_row(shape: Shape, num_tokens: int, seed: int = SEED) -> str:
    """One line of the table of loads: `active / busiest` for each of ROUTINGS."""
    loads = [drawn_load(draw_logits(name, num_tokens, shape.num_experts, seed), shape.top_k) for name in ROUTINGS]
    cells = (shape.name, str(num_tokens), *[f"{load.active} / {load.busiest}" for load in loads])
    return f"| {' | '.join(cells)} |"


def load_table(seed: int = SEED) -> str:
    """The loads of every shape and number of tokens as a Markdown table."""
    lines = [f"| shape | tokens | {' | '.join(ROUTINGS)} |", "| --- | --- |" + " --- |" * len(ROUTINGS)]
    lines += [load_row(shape, tokens, seed) for shape in SHAPES.values() for tokens in TOKENS]
    return "\n".join(lines)


if __name__ == "__main__":
    print(load_table())
