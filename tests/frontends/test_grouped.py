"""Drop-in grouped matmuls: torch's and JAX's beside float64, and the same bits where both have a form."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import numpy as np
import pytest

from moe_core.parity.tolerance import assert_close, matmul_tolerance
from tests.support.frontends import FRONTENDS, Frontend
from tests.support.frontends.small import ENGINES, on_engines
from tests.support.strategies import draw_array

#: Sizes of groups and rows: one group, a tail, empty groups, nothing at all.
HARD = (([9], 9), ([4, 0, 9, 2], 24), ([0, 0, 3], 3), ([0, 0], 5), ([0, 0], 0))


def groups_of(frontend: Frontend, sizes: Any) -> Any:
    """What a front-end's drop-in takes: ends or sizes."""
    return frontend.arrays((np.cumsum(sizes) if frontend.name == "torch" else np.array(sizes)).astype(np.int32))


def grouped(frontend: Frontend, x: Any, weight: Any, groups: Any, *, out_in: bool = False) -> Any:
    """The drop-in of a front-end. out_in: weight is `[G, N, K]`."""
    if frontend.name == "torch":
        return frontend.ops.grouped_mm(x, weight.mT if out_in else weight, groups)
    return frontend.ops.gmm(x, weight, groups, x.dtype, transpose_rhs=out_in)


def contraction(frontend: Frontend, left: Any, right: Any, groups: Any) -> Any:
    if frontend.name == "torch":
        return frontend.ops.grouped_mm(left.mT, right, groups)
    lax = importlib.import_module("jax").lax
    numbers = lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
    return frontend.ops.ragged_dot_general(left, right, groups, numbers)


def expected_of(leaves: dict[str, np.ndarray], factors: np.ndarray, sizes: Any, out_in: bool) -> dict[str, np.ndarray]:
    """y and both gradients in float64."""
    x, weight = (leaves[name].astype(np.float64) for name in ("x", "weight"))
    weight = weight.swapaxes(1, 2) if out_in else weight
    y, d_x, d_weight = np.zeros((len(x), weight.shape[2])), np.zeros(x.shape), np.zeros(weight.shape)
    for group, (first, last) in enumerate(itertools.pairwise(np.cumsum([0, *sizes]))):
        rows = slice(first, last)
        y[rows], d_x[rows] = x[rows] @ weight[group], factors[rows] @ weight[group].T
        d_weight[group] = x[rows].T @ factors[rows]
    return {"y": y, "d_x": d_x, "d_weight": d_weight.swapaxes(1, 2) if out_in else d_weight}


def check(frontend: Frontend, sizes: Any, num_rows: int, widths: tuple[int, int], dtype: str, out_in: bool) -> Any:
    random, (d, n), groups = np.random.default_rng(num_rows), widths, groups_of(frontend, sizes)
    shape = (len(sizes), n, d) if out_in else (len(sizes), d, n)
    leaves = {"x": draw_array(random, (num_rows, d), dtype), "weight": draw_array(random, shape, dtype)}

    def function(leaves: dict[str, Any]) -> Any:
        return grouped(frontend, leaves["x"], leaves["weight"], groups, out_in=out_in)

    found = frontend.pull(function, frontend.arrays(leaves))
    factors = np.random.default_rng(0).standard_normal((num_rows, n), np.float32).astype(found["y"].dtype)
    expected = expected_of(leaves, factors.astype(np.float64), sizes, out_in)
    for name, length in (("y", d), ("d_x", n), ("d_weight", max(num_rows, 1))):
        wanted = expected[name].astype(found[name].dtype)
        assert_close(found[name], wanted, matmul_tolerance(dtype, dtype, length), label=name)
    assert not found["y"][sum(sizes) :].astype(np.float32).any(), "the tail"
    assert not found["d_x"][sum(sizes) :].astype(np.float32).any(), "the tail's gradient"
    return found


@on_engines
@pytest.mark.parametrize(("sizes", "num_rows"), HARD)
def test_results_and_gradients(frontend: Frontend, engine: str, sizes: list[int], num_rows: int) -> None:
    with frontend.running_on(engine):
        for out_in in (False, True):
            check(frontend, sizes, num_rows, (17, 24), "float32", out_in)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_odd_widths_of_every_dtype(frontend: Frontend, dtype: str) -> None:
    with frontend.running_on("reference"):
        for widths in ((1, 20), (130, 1), (48, 65)):
            check(frontend, [7, 0, 33, 1], 45, widths, dtype, out_in=widths[0] == 48)


def test_programs_are_bitwise_equal_to_calls(frontend: Frontend) -> None:
    """Used twice in a function: with the same rows, and on its own result."""
    random = np.random.default_rng(0)
    with frontend.running_on("reference"):
        groups = groups_of(frontend, [3, 0, 6, 2])
        leaves = {"x": draw_array(random, (13, 16), "bfloat16"), "weight": draw_array(random, (4, 16, 16), "bfloat16")}
        leaves = frontend.arrays(leaves)

        def loss(leaves: dict[str, Any]) -> Any:
            once = grouped(frontend, leaves["x"], leaves["weight"], groups)
            return grouped(frontend, once * once, leaves["weight"], groups, out_in=True).sum()

        wanted = frontend.numpy(frontend.gradients(loss, leaves))
        for label, program in frontend.programs(loss).items():
            for name, found in frontend.numpy(program(leaves)).items():
                assert (found == wanted[name]).all(), f"{label}: {name}"


@on_engines
def test_contraction(frontend: Frontend, engine: str) -> None:
    random, sizes = np.random.default_rng(0), np.array([3, 0, 6, 2], np.int32)
    leaves = {"left": draw_array(random, (14, 9), "bfloat16"), "right": draw_array(random, (14, 20), "bfloat16")}
    with frontend.running_on(engine):
        groups = groups_of(frontend, sizes)
        found = frontend.pull(
            lambda leaves: contraction(frontend, leaves["left"], leaves["right"], groups), frontend.arrays(leaves)
        )
    factors = np.random.default_rng(0).standard_normal((4, 9, 20), np.float32).astype(found["y"].dtype)
    wide = {name: leaf.astype(np.float64) for name, leaf in leaves.items()} | {"factors": factors.astype(np.float64)}
    bounds, tolerance = np.cumsum([0, *sizes]), matmul_tolerance("bfloat16", "bfloat16", 20)
    expected = {"y": np.zeros((4, 9, 20)), "d_left": np.zeros((14, 9)), "d_right": np.zeros((14, 20))}
    for group, (first, last) in enumerate(itertools.pairwise(bounds)):
        rows = slice(first, last)
        expected["y"][group] = wide["left"][rows].T @ wide["right"][rows]
        expected["d_left"][rows] = wide["right"][rows] @ wide["factors"][group].T
        expected["d_right"][rows] = wide["left"][rows] @ wide["factors"][group]
    for name, wanted in expected.items():
        assert_close(found[name], wanted.astype(found[name].dtype), tolerance, label=name)


def test_float64_gradients_of_first_and_second_order(frontend: Frontend) -> None:
    """Of a function of gradients, beside differences of these."""
    random = np.random.default_rng(1)
    arrays = {"x": random.standard_normal((6, 3)), "weight": random.standard_normal((3, 3, 2))}
    with frontend.x64(True), frontend.running_on("reference"):
        groups = groups_of(frontend, [2, 0, 3])

        def function(x: Any, weight: Any) -> Any:
            return grouped(frontend, x, weight, groups)

        frontend.check_gradients(function, arrays)
        if frontend.name == "torch":
            leaves = [tensor.requires_grad_() for tensor in frontend.arrays(arrays).values()]
            assert frontend.names.autograd.gradgradcheck(function, leaves)
        else:
            jax = importlib.import_module("jax")
            grad = jax.grad(lambda *both: (function(*both) ** 3).sum(), argnums=(0, 1))
            frontend.check_gradients(lambda x, weight: grad(x, weight)[0], arrays)
            frontend.check_gradients(lambda x, weight: grad(x, weight)[1], arrays)


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "jax")), reason="compares both frameworks"
)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_frameworks_have_the_same_bits(engine: str, dtype: str) -> None:
    results = []
    for name in FRONTENDS:
        frontend = FRONTENDS[name](name)
        with frontend.running_on(engine):
            results.append(check(frontend, [5, 0, 17, 2], 27, (32, 24), dtype, out_in=False))
    for name, found in results[0].items():
        assert found.tobytes() == results[1][name].tobytes(), name
