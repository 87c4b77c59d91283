"""Numbers and classes of options that Python would take and a plan cannot, in both front-ends alike."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.errors import InvalidInput
from tests.support.bad_arguments.case import E, K, T, array, ids
from tests.support.bad_arguments.relations import front_end

both = pytest.mark.parametrize("package", ["moe_torch", "moe_jax"])


class Count(enum.IntEnum):
    EXPERTS = E


@both
@pytest.mark.parametrize("number", [np.int64(E), np.uint8(E), np.array([E], np.int32)[0], Count.EXPERTS], ids=repr)
def test_integers_of_every_kind(package: str, number: Any) -> None:
    module, make = front_end(package)
    with module.cpu_engine("reference"):
        layout = module.make_layout(make(ids()), number, alignment=np.int64(2))
        assert layout.spec == module.LayoutSpec(T, K, E, 2)
        assert type(layout.spec.num_experts) is int
        packed = module.pack_bitmatrix(make(ids()), number)
        assert module.unpack_bitmatrix(packed, number, np.int16(K)).shape == (T, K)
        assert module.route(make(array(T, E)), module.RouterSpec(np.int64(K))).ids.shape == (T, K)


def _calls(module: Any, make: Callable[[ArraySpec], Any]) -> dict[str, tuple[Callable[[Any], Any], list[Any]]]:
    """Option -> (call with a value, wrong values)."""
    numbers = [[E], (E,), "4", 4.0, None, True, np.array([4, 4]), 0, -1, 2**31, 2**40]
    reals = [1e300, -1e39, 1j, "1", None, [1.0], True, float("nan"), np.array([1.0, 2.0]), object(), 10**400]
    words = [["slot"], 1, None, "Slot", np.array(["slot", "row"]), b"slot"]
    y = make(array(T * K, 8))

    def layout() -> Any:
        return module.make_layout(make(ids()), E)

    return {
        "num_experts": (lambda value: module.make_layout(make(ids()), value), numbers),
        "alignment": (lambda value: module.make_layout(make(ids()), E, alignment=value), numbers),
        "max_rows": (lambda value: module.make_layout(make(ids()), E, max_rows=value), numbers[:4] + numbers[5:]),
        "rows": (
            lambda value: module.make_layout(make(ids()), E, rows=value),
            [one for one in numbers[:4] + numbers[5:] if not isinstance(one, int) or one],
        ),
        "num_experts of a bitmatrix": (lambda value: module.pack_bitmatrix(make(ids()), value), numbers),
        "top_k of a bitmatrix": (
            lambda value: module.unpack_bitmatrix(make(array(T, 1, dtype="uint32")), E, value),
            numbers,
        ),
        "top_k": (lambda value: module.RouterSpec(value), numbers[:4] + numbers[5:9]),
        "num_groups": (lambda value: module.RouterSpec(2, num_groups=value), [[2], "2", 2.0, None, True, 0]),
        "scale": (lambda value: module.RouterSpec(2, scale=value), reals),
        "limit": (lambda value: module.Activation("silu", limit=value), reals[:4] + reals[5:]),
        "alpha": (lambda value: module.Activation("swiglu_oai", alpha=value), reals[:4] + reals[5:]),
        "order": (lambda value: module.reduce(y, layout(), order=value), words),
        "out_dtype": (
            lambda value: module.reduce(y, layout(), out_dtype=value),
            [["float32"], 1, "Float32", "int32", object(), np.array([1, 2])],
        ),
        "checked": (lambda value: module.make_layout(make(ids()), E, checked=value), [1, "yes", None, [True]]),
    }  # fmt: skip


@both
@pytest.mark.parametrize("option", [
    "num_experts", "alignment", "max_rows", "rows", "num_experts of a bitmatrix", "top_k of a bitmatrix", "top_k",
    "num_groups", "scale", "limit", "alpha", "order", "out_dtype", "checked",
])  # fmt: skip
def test_wrong_values(package: str, option: str) -> None:
    module, make = front_end(package)
    call, values = _calls(module, make)[option]
    with module.cpu_engine("reference"):
        for value in values:
            with pytest.raises(InvalidInput, match=rf"{option.split()[0]}.*; \w") as caught:
                call(value)
            assert "got" in str(caught.value), value


@both
def test_classes_derived_from_options_and_bundles(package: str) -> None:
    """They may have fields and methods that nothing would read: alone, inside of other options, and as bundles."""
    module, make = front_end(package)
    logits = make(array(T, E))

    def derived(kind: type, *values: Any) -> Any:
        return dataclasses.dataclass(frozen=True)(type("Mine", (kind,), {}))(*values)

    experts = derived(module.ExpertWeights, make(array(E, 8, 8)), make(array(E, 4, 8)))
    spec = module.MoESpec(module.Activation("silu"), module.RouterSpec(K))
    with module.cpu_engine("reference"):
        for name, call in {
            "spec": lambda: module.route(logits, derived(module.RouterSpec, K)),
            "activation": lambda: module.MoESpec(derived(module.Activation, "silu")),
            "router": lambda: module.MoESpec(module.Activation("silu"), derived(module.RouterSpec, K)),
            "experts": lambda: module.moe(make(array(T, 8)), experts, module.RouterLogits(logits), spec),
            "routing": lambda: module.moe(make(array(T, 8)), experts, derived(module.RouterLogits, logits), spec),
            "format": lambda: module.quantize(logits, derived(module.Format, "mine", "e4m3", None, None)),
        }.items():
            with pytest.raises(InvalidInput, match=r" must be .*, got Mine; build"):
                call()
            assert name
