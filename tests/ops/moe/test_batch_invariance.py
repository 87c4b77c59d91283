"""`batch_invariant`: a token's result is the same, bit by bit, alone, in any batch, and in chunks of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import InvalidInput
from moe_core.base.dtypes import numpy_dtype
from moe_core.base.target import Target
from moe_core.layers import MoELayerSpec
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import ForwardOptions
from moe_core.ops.router.forward import plan_router
from moe_core.ops.routing.topk import plan_route_and_layout
from moe_core.plan.steps import KernelLaunch
from moe_core.specs import Activation, LayoutSpec, LogitsSpec, MatmulSpec, MatmulTuning, MoESpec, RouterSpec, Tuning
from moe_core.specs.operands import (
    ExpertWeights,
    MatmulOperands,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    map_arrays,
    named_arrays,
)
from tests.support.harness import engine_target, run_plan, spec_of

PINNED = Tuning(batch_invariant=True)
BY_TOKEN = ("output", "ids", "weights", "logits")
ENGINES = (engine_target(), Target("reference"))
on_engines = pytest.mark.parametrize("target", ENGINES, ids=lambda target: target.kind)
#: Runs `forward(x)` -> arrays by name.
Forward = Callable[[np.ndarray], dict[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer with a gated shared expert, in NumPy."""

    x: np.ndarray
    experts: ExpertWeights
    router: RouterWeights
    shared: SharedExpert
    spec: MoESpec


def draw_layer(
    num_tokens: int, dtype: str, seed: int, sizes: tuple[int, int, int] = (48, 40, 6), top_k: int = 3
) -> Layer:
    """sizes: D, F, E."""
    random, (D, F, E) = np.random.default_rng(seed), sizes

    def draw(*shape: int) -> np.ndarray:
        scale = shape[-2] ** -0.5
        return (random.standard_normal(shape, dtype=np.float32) * np.float32(scale)).astype(numpy_dtype(dtype))

    spec = MoESpec(Activation("silu"), RouterSpec(top_k, renormalize=True), tuning=PINNED)
    x = random.standard_normal((num_tokens, D), dtype=np.float32).astype(numpy_dtype(dtype))
    return Layer(
        x,
        ExpertWeights(draw(E, D, 2 * F), draw(E, F, D)),
        RouterWeights(draw(D, E)),
        SharedExpert(draw(D, 2 * F), draw(F, D), gate=draw(D, 1)),
        spec,
    )


def on_target(layer: Layer, target: Target) -> Forward:
    """The composed plan on a target."""

    def forward(x: np.ndarray) -> dict[str, np.ndarray]:
        bundles = (("experts.", layer.experts), ("routing.", layer.router), ("shared.", layer.shared))
        arrays = {"x": x} | {name: array for prefix, bundle in bundles for name, array in named_arrays(bundle, prefix)}
        experts, router, shared = (map_arrays(bundle, spec_of) for _, bundle in bundles)
        return run_plan(
            plan_moe(spec_of(x), experts, router, layer.spec, target, options=ForwardOptions(shared=shared)), arrays
        )

    return forward


def require_same_bits(part: np.ndarray, whole: np.ndarray, label: str) -> None:
    """Raise AssertionError unless two arrays have the same bytes."""
    part, whole = np.ascontiguousarray(part), np.ascontiguousarray(whole)
    assert part.shape == whole.shape and part.dtype == whole.dtype, label
    different = np.flatnonzero((part.view(np.uint8) != whole.view(np.uint8)).reshape(len(part), -1).any(axis=1))
    assert not different.size, f"{label}: rows {different[:8]} of {len(part)} differ"


def check(forward: Forward, x: np.ndarray, parts: list[slice], names: tuple[str, ...] = BY_TOKEN) -> None:
    """Every part of x alone must give the rows that the whole gives."""
    whole = forward(x)
    for part in parts:
        alone = forward(np.ascontiguousarray(x[part]))
        for name in names:
            require_same_bits(alone[name], whole[name][part], f"{name} of tokens {part.start} to {part.stop}")


def alone_and_in_chunks(num_tokens: int, chunk: int) -> list[slice]:
    chunks = [slice(start, min(start + chunk, num_tokens)) for start in range(0, num_tokens, chunk)]
    return [*chunks, slice(0, 1), slice(num_tokens - 1, num_tokens)]


@on_engines
@given(
    num_tokens=st.integers(2, 70), chunk=st.integers(1, 40), dtype=st.sampled_from(["float32", "bfloat16", "float16"])
)
def test_a_forward(target: Target, num_tokens: int, chunk: int, dtype: str) -> None:
    layer = draw_layer(num_tokens, dtype, seed=num_tokens)
    parts = alone_and_in_chunks(num_tokens, max(chunk, num_tokens // 4))
    check(on_target(layer, target), layer.x, parts)


@on_engines
def test_the_company_does_not_matter(target: Target) -> None:
    """The same token among others, at another place: other neighbours in its tile, other tiles."""
    layer = draw_layer(37, "bfloat16", seed=3)
    forward, order = on_target(layer, target), np.random.default_rng(0).permutation(37)
    whole, mixed = forward(layer.x), forward(np.ascontiguousarray(layer.x[order]))
    for name in BY_TOKEN:
        require_same_bits(mixed[name], whole[name][order], name)


@on_engines
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_single_ops(target: Target, dtype: str) -> None:
    """The router product and a dense product by themselves."""
    layer = draw_layer(33, dtype, seed=5)
    options = LogitsSpec(batch_invariant=True)
    dense = MatmulSpec("in_out", activation=Activation("silu"), tuning=MatmulTuning(batch_invariant=True))

    def forward(x: np.ndarray) -> dict[str, np.ndarray]:
        weight, gate_up = layer.router.weight, layer.shared.gate_up
        plan = plan_router(spec_of(x), spec_of(weight), None, options, target)
        found = run_plan(plan, {"x": x, "weight": weight})
        plan = plan_matmul_ogs(MatmulOperands(spec_of(x), spec_of(gate_up)), None, dense, target)
        return found | run_plan(plan, {"x": x, "weight": gate_up})

    check(forward, layer.x, alone_and_in_chunks(33, 8), ("logits", "y"))


@on_engines
@pytest.mark.parametrize(
    "router",
    [
        RouterSpec(6, renormalize=True),
        RouterSpec(3, order="topk_then_softmax", slot_order="expert"),
        RouterSpec(8, "sigmoid", renormalize=True, scale=2.5, num_groups=8, topk_group=4),
    ],
    ids=lambda router: f"{router.scoring}-{router.order}",
)
def test_routing(target: Target, router: RouterSpec) -> None:
    """One launch for few tokens, two for many, other tiles in each: the sums over a token's scores are the same."""
    logits = np.random.default_rng(6).standard_normal((200, 96), np.float32)

    def forward(x: np.ndarray) -> dict[str, np.ndarray]:
        layout = LayoutSpec(len(x), router.require_top_k(), 96)
        plan = plan_route_and_layout(RouterLogits(spec_of(x)), router, layout, target, block_ms=(16,))
        kernels.add(tuple(step.kernel.name for step in plan.steps if isinstance(step, KernelLaunch)))
        return run_plan(plan, {"logits": x})

    kernels: set[tuple[str, ...]] = set()
    sizes = (1, 3, 4, 16, 17, 32, 33, 64, 65, 130)
    check(forward, logits, [slice(start, start + size) for start in (0, 70) for size in sizes], ("ids", "weights"))
    assert target.kind == "reference" or len(kernels) == 2, kernels


def test_blas_alone_is_not_invariant() -> None:
    """Why the reference multiplies row by row: without it the test above would fail there."""
    layer = draw_layer(64, "float32", seed=1, sizes=(256, 64, 16))
    free = dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, tuning=None))
    with pytest.raises(AssertionError, match="differ"):
        check(on_target(free, Target("reference")), layer.x, alone_and_in_chunks(64, 7))


def test_the_reference_says_so() -> None:
    layer = draw_layer(4, "float32", 0)
    experts, router = map_arrays(layer.experts, spec_of), map_arrays(layer.router, spec_of)
    plan = plan_moe(spec_of(layer.x), experts, router, layer.spec, Target("reference"))
    assert sum("one row at a time" in line for line in plan.summation) == 3, plan.summation


def test_a_capacity_limit_contradicts_it() -> None:
    with pytest.raises(InvalidInput, match="capacity_factor must be None with batch_invariant"):
        MoELayerSpec(16, 8, 4, 2, capacity_factor=1.0, tuning=PINNED)


def torch_forward(layer: Layer, device: str) -> Forward:
    torch = pytest.importorskip("torch")
    import moe_torch
    from tests.support.torch import to_numpy, to_torch

    experts, router, shared = (to_torch(one, device) for one in (layer.experts, layer.router, layer.shared))

    def forward(x: np.ndarray) -> dict[str, np.ndarray]:
        with torch.no_grad():
            result = moe_torch.moe(to_torch(x, device), experts, router, layer.spec, shared=shared)
        return {name: to_numpy(getattr(result, name)) for name in BY_TOKEN}

    return forward


def jax_forward(layer: Layer) -> Forward:
    jax = pytest.importorskip("jax")
    pytest.importorskip("jax_tvm_ffi")
    import moe_jax
    from tests.support.jax import to_jax, to_numpy

    experts, router, shared = (to_jax(one) for one in (layer.experts, layer.router, layer.shared))
    jitted = jax.jit(lambda x: moe_jax.moe(x, experts, router, layer.spec, shared=shared))

    def forward(x: np.ndarray) -> dict[str, np.ndarray]:
        result = jitted(to_jax(x))
        return {name: to_numpy(getattr(result, name)) for name in BY_TOKEN}

    return forward


@on_engines
def test_torch(target: Target) -> None:
    pytest.importorskip("torch")
    from tests.support.torch import running_on

    layer = draw_layer(21, "bfloat16", seed=8)
    with running_on(target.kind) as device:
        check(torch_forward(layer, str(device)), layer.x, alone_and_in_chunks(21, 8))


@on_engines
def test_jax(target: Target) -> None:
    pytest.importorskip("jax")
    pytest.importorskip("jax_tvm_ffi")
    from tests.support.jax import running_on

    layer = draw_layer(21, "bfloat16", seed=8)
    with running_on(target.kind):
        check(jax_forward(layer), layer.x, alone_and_in_chunks(21, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_large_layer_on_a_gpu(dtype: str) -> None:
    """Numbers of tokens from every regime of the heuristics, whose tiles and instructions differ."""
    layer = draw_layer(2048, dtype, seed=2, sizes=(512, 256, 16), top_k=4)
    parts = [slice(start, start + count) for start, count in ((0, 1), (7, 3), (100, 17), (5, 64), (64, 300), (0, 1024))]
    check(on_target(layer, engine_target()), layer.x, [*parts, *alone_and_in_chunks(2048, 500)])


@pytest.mark.gpu
def test_both_front_ends_on_a_gpu() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    from tests.support.jax import running_on

    layer = draw_layer(300, "bfloat16", seed=4, sizes=(256, 128, 8))
    on_torch = torch_forward(layer, "cuda")
    with running_on("cuda"):
        on_jax = jax_forward(layer)
        for forward in (on_torch, on_jax):
            check(forward, layer.x, alone_and_in_chunks(300, 97))
        one, other = on_torch(layer.x[:97]), on_jax(layer.x)
        for name in BY_TOKEN:
            require_same_bits(one[name], other[name][:97], name)
