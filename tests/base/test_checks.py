"""Checks of single options, sizes of tiles, and the engine that a CPU has."""

from __future__ import annotations

import enum
import math

import numpy as np
import pytest

from moe_core.base import checks
from moe_core.base.sizes import elementwise_tile, first_holding, padded
from moe_core.base.target import Target, cpu_engine, cpu_target
from moe_core.errors import InvalidInput
from moe_core.parity.devices import has_triton
from moe_core.specs.routing import RouterSpec


class Kind(enum.IntEnum):
    THREE = 3


def test_values_are_shown_by_type_where_they_have_many_numbers() -> None:
    assert checks.shown(np.zeros(3)) == "an array (ndarray)"
    assert checks.shown(np.float32(0.5)) == "np.float32(0.5)" and checks.shown("a") == "'a'"


@pytest.mark.parametrize("wanted", [(), ("d_x", "d_z"), ("d_x", "d_x")])
def test_wanted_gradients_are_some_of_those_there_are(wanted: tuple[str, ...]) -> None:
    checks.require_wanted(("d_x",), ("d_x", "d_weight"))
    with pytest.raises(InvalidInput, match="wanted must name at least one of d_x, d_weight, each once, got"):
        checks.require_wanted(wanted, ("d_x", "d_weight"))


def test_integers() -> None:
    found = [checks.as_integer("n", value, 2, 5) for value in (2, np.int8(4), Kind.THREE)]
    assert found == [2, 4, 3] and {type(value) for value in found} == {int}
    for value, message in ((1, "at least 2, got 1"), (5, "below 5, got 5"), (True, "got True"), (2.0, r"got 2\.0")):
        with pytest.raises(InvalidInput, match=f"n must be .*{message}"):
            checks.as_integer("n", value, 2, 5)


def test_finite_numbers() -> None:
    largest = float(np.finfo(np.float32).max)
    found = [checks.finite_float("a", value) for value in (-0.0, 3, np.float64(-largest), largest)]
    assert (
        found == [0.0, 3.0, -largest, largest]
        and math.copysign(1, found[0]) == 1
        and {type(one) for one in found} == {float}
    )
    for value in (math.inf, -math.inf, math.nan, 1j, "1", None, True, [1.0], np.ones(1)):
        with pytest.raises(InvalidInput, match="a must be finite, got"):
            checks.finite_float("a", value)
    for value in (largest * 1.001, -largest * 1.001):
        with pytest.raises(InvalidInput, match=r"a must be finite in float32, got .*; pass a number up to 3\.403e\+38"):
            checks.finite_float("a", value)


def test_kinds_are_named_with_their_article_and_module() -> None:
    checks.require_kind("router", None, RouterSpec, optional=True)
    with pytest.raises(
        InvalidInput, match=r"router must be a RouterSpec or None, got int; build one from moe_core\.sp"
    ):
        checks.require_kind("router", 3, RouterSpec, optional=True)
    with pytest.raises(InvalidInput, match="router must be a RouterSpec, got NoneType"):
        checks.require_kind("router", None, RouterSpec)

    class Derived(RouterSpec):
        pass

    with pytest.raises(InvalidInput, match="got Derived"):
        checks.require_kind("router", Derived(2), RouterSpec)
    assert checks.is_derived(Kind.THREE, (int,)) and not checks.is_derived(Derived(2), (RouterSpec, int))


def test_tiles_are_powers_of_two_that_hold_what_there_is() -> None:
    sizes = (0, 1, 2, 3, 16, 17, 32, 33, 1024, 1025)
    assert [padded(size, 1) for size in sizes] == [1, 1, 2, 4, 16, 32, 32, 64, 1024, 2048]
    assert [padded(size) for size in sizes] == [16, 16, 16, 16, 16, 32, 32, 64, 1024, 2048]
    gpu, interpreter = Target("cuda", 90, 132), Target("interpreter")
    assert [elementwise_tile(size, gpu) for size in (1, 16, 17, 1024, 5000)] == [
        *((128, 16), (128, 16), (64, 32), (2, 1024), (2, 1024))
    ]
    assert [elementwise_tile(size, interpreter) for size in (1, 5000)] == [(1024, 16), (16, 1024)]
    assert [first_holding((8, 16, 64), count) for count in (1, 8, 9, 64, 65)] == [8, 8, 16, 64, 64]


def test_the_engine_of_a_cpu_follows_the_block_and_else_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    values = (
        None, "", "0", "1", " 1", "01", "2", "true", "True", "TRUE", "t", "yes", "Yes", "on", "oN", "y", "Y", "off",
        "no",
    )  # fmt: skip
    for value in values:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        if value is not None:
            monkeypatch.setenv("TRITON_INTERPRET", value)
        engine = "interpreter" if (value or "").lower() in ("1", "true", "yes", "on", "y") else "reference"
        if has_triton():
            import triton

            assert triton.knobs.runtime.interpret == (engine == "interpreter"), value
        assert cpu_target() == Target(engine)
        with cpu_engine("interpreter"):
            with cpu_engine("reference"):
                assert cpu_target() == Target("reference")
            assert cpu_target() == Target("interpreter")
        assert cpu_target() == Target(engine)
    with pytest.raises(InvalidInput, match="cpu_engine kind must be 'interpreter' or 'reference', got 'cuda'"):
        cpu_engine("cuda").__enter__()
