"""The ways rows travel, and what every framework's calls over them are compared with."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from moe_core.parallel import ExchangeSpec
from moe_core.parallel.placement import gather_experts
from tests.support.parallel.twin import arithmetic
from tests.support.parallel.twin.ranks import moe as twin
from tests.support.parallel.twin.ranks import moe_backward as twin_backward
from tests.support.parallel.twins import Problem

_way = functools.partial(ExchangeSpec, on_overflow="nan")
WAYS = (
    _way("all_to_all", "slots"),
    _way("all_to_all"),
    _way("all_gather"),
    _way("padded", "slots"),
    _way("padded"),
)
#: Those of stores to peers' memory, which torch alone has.
PEER = (_way("peer", "slots"), _way("peer"))
TORCH_WAYS = (*WAYS, *PEER)
#: Where rows of tokens have a bound, and so are counted.
COUNTED = _way("peer", receive=64)
#: Those with a bound.
BOUNDED = tuple(way for way in WAYS if way.mode != "all_gather")
#: Those that a CUDA graph may hold.
STATIC = WAYS[2:]


def over(ways: tuple[ExchangeSpec, ...]) -> pytest.MarkDecorator:
    """The marker of a test that takes `way`."""
    return pytest.mark.parametrize("way", ways, ids=lambda way: f"{way.mode}-{way.rows}")


every_way = over(WAYS)
every_torch_way = over(TORCH_WAYS)


def sizes_of(way: ExchangeSpec) -> tuple[int, int]:
    """D and F of hard problems: stores of results take rows of whole 16 bytes."""
    return (16 if way.mode == "peer" or way == ExchangeSpec(on_overflow=way.on_overflow) else 12), 8


def require_same(found: np.ndarray, expected: np.ndarray, label: str) -> None:
    """Equal numbers, NaN where NaN is expected, of one dtype."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), label
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32), label)


def require_one_device(found: dict[str, Any], problem: Problem, alone: dict[str, Any] | None, label: str) -> None:
    """Raise unless every result of a group is the one of all tokens and experts on one device.

    alone: output and gradients of one device by the names of the twins, None = those of the twins.
    """
    stages = problem.alone()
    require_same(found["output"], (alone or stages)["output"], f"output, {label}")
    assert found["overflow"].tolist() == [0], label
    counts = found["tokens_per_expert"].reshape(-1, problem.placement.num_experts).sum(axis=0)
    np.testing.assert_array_equal(counts, stages["tokens_per_expert"], label)
    assert found["invalid_ids"].sum() == stages["invalid_ids"][0], label
    held, received = problem.placement.tables.expert_of_place, found["received_per_expert"]
    by_expert = np.bincount(held[held >= 0], received[held >= 0], problem.placement.num_experts)
    np.testing.assert_array_equal(by_expert, stages["tokens_per_expert"], label)
    if "d_x" not in found:
        return
    expected = alone or problem.alone_backward(stages)
    assert "d_x" in expected
    for name in expected:
        if name in ("d_x", "d_routing.weights", "d_routing.logits") or name.startswith("d_experts."):
            require_same(found[name], expected[name], f"{name}, {label}")
        elif name.startswith(("d_routing.", "d_shared.")):
            # Sums over ranks, in another order than one device's.
            scale = np.abs(expected[name].astype(np.float32)).max() + 1e-3
            slack = (2e-6 if problem.x.dtype == np.float32 else 2e-2) * len(problem.x) * scale
            np.testing.assert_allclose(
                found[name].astype(np.float32), expected[name].astype(np.float32), 0, slack, err_msg=f"{name}, {label}"
            )


def require_twin(found: dict[str, Any], problem: Problem, exchange: ExchangeSpec, label: str) -> int:
    """Raise unless a forward is the twin's, NaN and all; returns the overflow."""
    expected = twin(problem.ranks(), problem.spec, problem.placement, exchange)
    require_same(found["output"], np.concatenate([own.output for own in expected.outputs]), f"output, {label}")
    assert found["overflow"].tolist() == expected.overflow.tolist(), label
    return int(found["overflow"][0])


def require_dropped(found: dict[str, Any], problem: Problem, exchange: ExchangeSpec, label: str) -> None:
    """Raise unless output and gradients are the twin's where slots are dropped, and those of one device whose routing
    lacks these slots. Routing is given."""
    ranks, placement = problem.ranks(), problem.placement
    forward = twin(ranks, problem.spec, placement, exchange)
    backward = twin_backward(problem.gradients(), ranks, problem.spec, forward)
    lost = np.concatenate(forward.routes.lost)
    assert lost.any() and found["overflow"].tolist() == forward.overflow.tolist(), label
    without = dataclasses.replace(problem.routing, ids=np.where(lost, -1, problem.routing.ids))
    alone = dataclasses.replace(problem, routing=without)
    stages = alone.alone()
    require_same(found["output"], stages["output"], f"output, {label}")
    expected = alone.alone_backward(stages)
    wanted = {"d_x", "d_routing.weights", "d_experts.gate_up", "d_experts.down"}
    assert wanted <= found.keys(), label
    for name in wanted:
        parts = [own[name] for own in backward]
        whole = gather_experts(parts, placement) if name.startswith("d_experts.") else np.concatenate(parts)
        require_same(found[name], whole, f"{name} of the twin, {label}")
        require_same(found[name], expected[name], f"{name} of one device, {label}")
    assert not found["d_routing.weights"][lost].any(), label


def most_received(problem: Problem, way: ExchangeSpec) -> int:
    """The least bound at which nothing overflows, counted slot by slot."""
    count, each = problem.placement.num_ranks, problem.placement.per_rank
    mask = problem.token_mask
    owners = arithmetic.physical_ids(problem.routing.ids, problem.placement, token_mask=mask).places // each
    rows = np.zeros((count, count), int)
    for token, own in enumerate(owners):
        for owner in own if way.rows == "slots" else set(own):
            rows[token // problem.tokens[0], owner] += owner >= 0
    return int(rows.sum(axis=0).max()) if way.mode in ("all_to_all", "peer") else count * int(rows.max())
