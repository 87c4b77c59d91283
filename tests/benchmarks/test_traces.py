"""Routing of recorded traces in place of a draw."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("safetensors")

from benchmarks import options
from benchmarks.options import parse
from benchmarks.problem import draw_problem
from benchmarks.traces import traced_logits
from benchmarks.weights import draw_weights
from moe_core.errors import InvalidInput
from moe_core.trace import LayerRouting, RoutingTrace
from tests.support.benchmarks import TINY


def layer(tokens: int, experts: int, seed: int) -> LayerRouting:
    """Two experts of every token in any order, weights that add up to 1."""
    random = np.random.default_rng(seed)
    ids = np.argsort(random.random((tokens, experts)), axis=1)[:, :2].astype(np.int32)
    first = random.uniform(0.01, 0.99, (tokens, 1))
    return LayerRouting(ids, np.concatenate([first, 1 - first], axis=1).astype(np.float32), experts)


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "trace.safetensors"
    RoutingTrace((layer(40, 4, 0), layer(24, 4, 1), layer(24, 8, 2))).save(path)
    return path


@pytest.mark.parametrize(("suffix", "number", "tokens"), [("", 0, 40), ("@1", 1, 16)])
def test_a_problem_is_routed_as_the_trace_was(file: pathlib.Path, suffix: str, number: int, tokens: int) -> None:
    weights = draw_weights(TINY["qwen3"], torch.Generator("cpu").manual_seed(0))
    problem = draw_problem(TINY["qwen3"], f"trace:{file}{suffix}", tokens, weights)
    ids, found = problem.top_k
    traced = RoutingTrace.load(file)[number]
    order = np.argsort(-traced.weights[:tokens], axis=1)
    np.testing.assert_array_equal(ids.numpy(), np.take_along_axis(traced.ids[:tokens], order, axis=1))
    np.testing.assert_allclose(found.numpy(), np.take_along_axis(traced.weights[:tokens], order, axis=1), rtol=1e-5)
    assert problem.routing == f"trace:{file}{suffix}"


def test_what_a_trace_cannot_route_is_named(file: pathlib.Path) -> None:
    with pytest.raises(InvalidInput, match=r"must have 4 experts and top_k 2, got 8 and 2; choose the shape"):
        traced_logits(f"trace:{file}@2", 16, 4, 2)
    with pytest.raises(InvalidInput, match=r"must have 41 tokens, got 40; give smaller --tokens"):
        traced_logits(f"trace:{file}", 41, 4, 2)
    masked = layer(5, 4, 3)
    masked.ids[3, 1] = -1
    RoutingTrace((masked,)).save(file)
    with pytest.raises(InvalidInput, match=r"got none for token 3; take a trace without masked tokens"):
        traced_logits(f"trace:{file}", 5, 4, 2)


def test_options(file: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(options, "SHAPES", TINY)
    monkeypatch.setattr(options, "ALL_SHAPES", TINY)
    assert parse(["--routing", f"trace:{file}@1,balanced"], "").routings == ("balanced", f"trace:{file}@1")
    for routing, message in ((f"trace:{file}@3", "must name a layer below 3, got 3; leave out @3"), ("trace:no", "no")):
        with pytest.raises(SystemExit):
            parse(["--routing", routing], "")
        assert message in capsys.readouterr().err
