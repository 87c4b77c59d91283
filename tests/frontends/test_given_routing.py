"""ids and weights as routers give them: results, gradients and traces of casting them first, and equal bits."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from moe_core.base.dtypes import numpy_dtype
from moe_core.errors import InvalidInput
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import TopK
from tests.support.frontends import FRONTENDS, Frontend, require_equal
from tests.support.frontends.small import D_MODEL, NUM_EXPERTS, Layer, on_engines, small_layer

FAR = [2**32 + 3, -(2**40), 2**31, -1, NUM_EXPERTS]
on_dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])


@contextlib.contextmanager
def running_on(frontend: Frontend, engine: str, x64: bool = True) -> Any:
    with frontend.x64(x64), frontend.running_on(engine):
        yield


def given(frontend: Frontend, dtype: str, tokens: int = 9, top_k: int = 2, x64: bool = True) -> tuple[Layer, TopK]:
    """A layer routed by ids, int64 where x64 is on, and weights in a dtype; and both cast first, far ids to -2."""
    layer, random = small_layer(num_tokens=tokens, top_k=top_k), np.random.default_rng(1)
    ids = np.array([random.permutation(NUM_EXPERTS)[:top_k] for _ in range(tokens)], np.int64).reshape(tokens, top_k)
    if x64 and tokens > 1:
        ids.reshape(-1)[: len(FAR)] = FAR
    weights = random.random((tokens, top_k), np.float32).astype(numpy_dtype(dtype))
    cast = TopK(np.clip(ids, -2, NUM_EXPERTS).astype(np.int32), weights.astype(np.float32))
    own = TopK(ids if x64 else ids.astype(np.int32), weights)
    x, experts, own, cast = frontend.arrays((layer.x, layer.experts, own, cast))
    return Layer(x, experts, own, MoESpec(layer.spec.activation)), cast


@on_engines
@on_dtypes
@pytest.mark.parametrize(
    ("tokens", "top_k", "x64"), [(0, 2, True), (1, 1, True), (9, 2, True), (9, 5, True), (9, 2, False)]
)
def test_results_are_those_of_casting_first(
    frontend: Frontend, engine: str, dtype: str, tokens: int, top_k: int, x64: bool
) -> None:
    with running_on(frontend, engine, x64):
        (x, experts, own, spec), cast = given(frontend, dtype, tokens, top_k, x64)
        found, wanted = (frontend.ops.moe(x, experts, one, spec) for one in (own, cast))
        assert found.ids is own.ids and found.weights is own.weights
        assert int(wanted.invalid_ids[0]) == (4 if x64 and tokens > 1 else 0)
        for name in ("output", "tokens_per_expert", "invalid_ids"):
            require_equal(*(frontend.numpy(getattr(one, name)) for one in (found, wanted)), name)
        layouts = [frontend.ops.make_layout(one.ids, NUM_EXPERTS) for one in (own, cast)]
        require_equal(*map(frontend.numpy, layouts), "layout")
        if frontend.name == "torch":
            launched = frontend.ops.prepare_moe(experts, TopK, spec)(x, own)
            require_equal(*map(frontend.numpy, (launched, wanted.output)), "launcher")


@on_engines
@on_dtypes
def test_gradients_are_those_of_casting_first(frontend: Frontend, engine: str, dtype: str) -> None:
    with running_on(frontend, engine):
        (x, experts, own, spec), cast = given(frontend, dtype)
        factors = frontend.arrays(np.linspace(-1, 1, 9 * D_MODEL, dtype=np.float32))

        def loss(leaves: dict[str, Any], ids: Any = own.ids, cast: bool = False) -> Any:
            weights = frontend.cast(leaves["weights"], "float32") if cast else leaves["weights"]
            return (frontend.ops.moe(leaves["x"], experts, TopK(ids, weights), spec).output.reshape(-1) * factors).sum()

        leaves = {"x": x, "weights": own.weights}
        wanted = frontend.numpy(frontend.gradients(lambda leaves: loss(leaves, cast.ids, True), leaves))
        assert wanted["weights"].dtype == numpy_dtype(dtype) and wanted["weights"].any()
        for name, derive in {
            "eager": lambda leaves: frontend.gradients(loss, leaves),
            **frontend.programs(loss),
        }.items():
            require_equal(frontend.numpy(derive(leaves)), wanted, name)


def test_traces_hold_int32_and_fp32(frontend: Frontend) -> None:
    ids, weights = np.random.default_rng(2).integers(-1, NUM_EXPERTS, (9, 2)), np.ones((9, 2), numpy_dtype("bfloat16"))
    with running_on(frontend, "reference"):
        (x, experts, _, spec), _ = given(frontend, "bfloat16")
        own, other = frontend.arrays((TopK(ids, weights), TopK(0 * ids, 0 * weights)))

        def output(routing: TopK) -> Any:
            return frontend.ops.moe(x, experts, routing, spec).output

        def gradient(output: Any, routing: TopK) -> Any:
            leaves = {"weights": routing.weights}
            return frontend.gradients(lambda leaves: output(TopK(routing.ids, leaves["weights"])).sum(), leaves)

        wanted, (layer,), replayed = frontend.traced(output, own)
        assert [str(one) for one in (layer.ids.dtype, layer.weights.dtype)] == ["int32", "float32"]
        require_equal(*map(frontend.numpy, (replayed(other), wanted)), "replayed")
        require_equal(*map(frontend.numpy, (gradient(replayed, other), gradient(output, own))), "gradient")


@on_engines
@on_dtypes
def test_both_give_the_same_bits(engine: str, dtype: str) -> None:
    outputs = []
    for name, kind in FRONTENDS.items():
        pytest.importorskip(name)
        frontend = kind(name)
        with running_on(frontend, engine):
            (x, experts, own, spec), _ = given(frontend, dtype)
            outputs.append(frontend.numpy(frontend.ops.moe(x, experts, own, spec).output))
    require_equal(*outputs)


def test_other_dtypes_are_refused(frontend: Frontend) -> None:
    with running_on(frontend, "reference"):
        (x, experts, own, spec), _ = given(frontend, "bfloat16")
        for routing, message in (
            (TopK(frontend.cast(own.ids, "bool"), own.weights), "ids must be int32 or .*, got bool; cast it to"),
            (TopK(own.ids, own.ids), "weights must be float32 or bfloat16 or float16, got int64; cast it to float32"),
        ):
            with pytest.raises(InvalidInput, match=rf"routing\.{message}"):
                frontend.ops.moe(x, experts, routing, spec)
