"""JAX transformations of the ops: jit, scan, cond, checkpoint, vmap, donation; which derivatives are refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_core.specs import RouterSpec
from moe_jax.bridge import ffi
from tests.support.jax import (
    REAL_KERNELS,
    on_engines,
    program_text,
    run_stack,
    running_on,
    small_layer,
    stacked_weights,
    to_jax,
    weight_copies,
)


def run_sliced(
    x: jax.Array, stacked: moe_jax.ExpertWeights, routing: moe_jax.RouterWeights, spec: moe_jax.MoESpec
) -> jax.Array:
    """The same with the weights as the scan's inputs, which copies each layer's."""

    def layer(carry: jax.Array, experts: moe_jax.ExpertWeights) -> tuple[jax.Array, None]:
        return carry + moe_jax.moe(carry, experts, routing, spec).output, None

    return jax.lax.scan(layer, x, stacked)[0]


def test_scan_over_stacked_layers_copies_no_weight() -> None:
    with running_on(REAL_KERNELS):
        x, _, routing = to_jax(small_layer()[:3])
        stacked, spec = stacked_weights(), small_layer().spec
        compiled = program_text(jax.jit(run_stack, static_argnums=3).lower(x, stacked, routing, spec))
        assert 'custom_call_target="moebius_plan"' in compiled
        assert weight_copies(compiled, stacked) == []
        # The search does find copies where there are some.
        sliced = program_text(jax.jit(run_sliced, static_argnums=3).lower(x, stacked, routing, spec))
        assert weight_copies(sliced, stacked)


@on_engines
def test_one_moe_is_one_custom_call(engine: str) -> None:
    with running_on(engine):
        layer = small_layer()
        lowered = jax.jit(lambda *arrays: moe_jax.moe(*arrays, spec=layer.spec)).lower(*to_jax(layer[:3]))
        calls = [line for line in program_text(lowered).splitlines() if " custom-call(" in line]
        assert len(calls) == 1, calls
        keys = re.findall(r'plan_\d+ = "([^"]+)"', lowered.as_text())
        assert [len(part) for part in keys] == [7, 7, 7]


@on_engines
def test_cond_and_checkpoint(engine: str) -> None:
    with running_on(engine):
        layer = small_layer()
        x, experts, routing = to_jax(layer[:3])

        def forward(x: jax.Array) -> jax.Array:
            return moe_jax.moe(x, experts, routing, layer.spec).output

        expected = np.asarray(forward(x))
        chosen = jax.jit(lambda flag, x: jax.lax.cond(flag, forward, lambda x: x, x))
        np.testing.assert_array_equal(np.asarray(chosen(True, x)), expected)
        np.testing.assert_array_equal(np.asarray(chosen(False, x)), np.asarray(x))
        np.testing.assert_array_equal(np.asarray(jax.jit(jax.checkpoint(forward))(x)), expected)


@pytest.mark.parametrize("axes", [(3,), (3, 4)], ids=("of each", "of tokens of each"))
def test_vmap_over_biases(axes: tuple[int, ...]) -> None:
    layer = small_layer(num_tokens=4)
    spec = dataclasses.replace(layer.spec, router=RouterSpec(2, "sigmoid"))
    with running_on("reference"):
        x, experts, routing = to_jax(layer[:3])
        drawn = np.random.default_rng(0).normal(size=(*axes, len(experts.down)))
        biases = jnp.asarray(drawn, jnp.float32)

        def forward(bias: jax.Array) -> moe_jax.MoEOutput:
            return moe_jax.moe(x, experts, dataclasses.replace(routing, correction_bias=bias), spec)

        for many, one in zip(jax.vmap(forward)(biases), zip(*map(forward, biases), strict=True), strict=True):
            np.testing.assert_allclose(many, np.stack(one), 1e-5, 1e-5)


@pytest.mark.parametrize("kind", ["router", "ids", "experts", "experts and ids", "experts and routers"])
def test_vmap_over_tokens_is_one_call(kind: str) -> None:
    """Forward, and with gradients one more. Counts, masks and invalid ids are those of each element. A batch of experts
    has one call behind those of their routers."""
    with running_on("reference"):
        layer = small_layer(num_tokens=4)
        x, experts, routing = to_jax(layer[:3])
        batch, axes = jnp.stack([x, -x, 2 * x]), (0, 0, None, None)
        options: dict[str, Any] = {}
        mask = jnp.arange(12).reshape(3, 4) % 5 > 0
        if kind.startswith("experts"):
            experts, axes = jax.tree.map(lambda one: jnp.stack([one, -one, 2 * one]), experts), (0, 0, None, 0)
        if kind == "experts and routers":
            routing, axes = jax.tree.map(lambda one: jnp.stack([one, -one, 2 * one]), routing), (0, 0, 0, 0)
        if kind.endswith("ids"):
            ids = jnp.asarray(np.random.default_rng(0).integers(-2, 9, (3, 4, 2)), jnp.int32)
            routing, axes = moe_jax.TopK(ids, jnp.ones((3, 4, 2))), (*axes[:2], 0, axes[3])
            if kind == "ids":
                options = {"expert_map": jnp.asarray([3, -1, 0, 4, 1, 2, -1], jnp.int32)}
        spec = dataclasses.replace(layer.spec, router=None if kind.endswith("ids") else layer.spec.router)

        def forward(x: jax.Array, mask: jax.Array, routing: Any, experts: Any) -> moe_jax.MoEOutput:
            return moe_jax.moe(x, experts, routing, spec, token_mask=mask, **options)

        def loss(*arguments: Any) -> jax.Array:
            return jnp.sin(jax.vmap(forward, axes)(*arguments).output).sum()

        arguments = batch, mask, routing, experts
        many = jax.jit(jax.vmap(forward, axes))
        gradient = jax.jit(jax.grad(loss, argnums=(0, 3)))
        results, gradients = many(*arguments), gradient(*arguments)
        before = ffi.callback_count()
        jax.block_until_ready(many(*arguments))
        # A router and a choice, and for each router one, in front.
        calls = 1 + {"experts": 2, "experts and routers": 4}.get(kind, 0)
        assert ffi.callback_count() - before == calls
        jax.block_until_ready(gradient(*arguments))
        assert ffi.callback_count() - before == 3 * calls
        d_experts = []
        for number in range(3):
            each: list[Any] = [
                part if axis is None else jax.tree.map(itemgetter(number), part)
                for part, axis in zip(arguments, axes, strict=True)
            ]
            for name, found, wanted in zip(results._fields, results, forward(*each), strict=True):
                if wanted is not None:
                    np.testing.assert_allclose(found[number], wanted, 1e-5, 1e-5, err_msg=name)
            own = jax.grad(lambda *given: jnp.sin(forward(*given).output).sum(), (0, 3))(*each)
            np.testing.assert_allclose(gradients[0][number], own[0], 1e-4, 1e-5)
            d_experts.append(own[1])
        wanted = jax.tree.map(lambda *parts: jnp.stack(parts) if axes[3] == 0 else sum(parts), *d_experts)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, 1e-4, 1e-5), gradients[1], wanted)


@on_engines
def test_donation(engine: str) -> None:
    with running_on(engine):
        layer = small_layer()
        x, experts, routing = to_jax(layer[:3])
        expected = np.asarray(x + moe_jax.moe(x, experts, routing, layer.spec).output)
        step = jax.jit(lambda x: x + moe_jax.moe(x, experts, routing, layer.spec).output, donate_argnums=0)
        result = step(x)
        np.testing.assert_array_equal(np.asarray(result), expected)
        assert x.is_deleted()


def derivatives() -> list[Any]:
    """Ways to ask for a derivative of a function of x that is no scalar."""
    return [
        pytest.param(lambda f, x: jax.grad(lambda x: f(x).sum())(x), id="grad"),
        pytest.param(lambda f, x: jax.jvp(f, (x,), (x,)), id="jvp"),
        pytest.param(lambda f, x: jax.vjp(f, x), id="vjp"),
        pytest.param(lambda f, x: jax.linearize(f, x), id="linearize"),
        pytest.param(lambda f, x: jax.jit(jax.grad(lambda x: jax.checkpoint(f)(x).sum()))(x), id="checkpoint"),
        pytest.param(lambda f, x: jax.vmap(jax.grad(lambda x: f(x).sum()))(x[None]), id="vmap of grad"),
    ]


@pytest.mark.parametrize("derive", derivatives())
@pytest.mark.parametrize("jitted", [False, True])
def test_derivatives_of_stages_are_refused(derive: Callable[..., Any], jitted: bool) -> None:
    with running_on("reference"):
        layer = small_layer()
        x = to_jax(layer.x)

        def forward(x: jax.Array) -> jax.Array:
            return moe_jax.scale_rows(x, jnp.ones((len(x), 1)))

        with pytest.raises(moe_jax.Unsupported, match=r"scale_rows has no derivative.*activation, reduce, .* have one"):
            derive(jax.jit(forward) if jitted else forward, x)


def test_derivatives_past_the_op_work() -> None:
    with running_on("reference"):
        layer = small_layer()
        x, experts, routing = to_jax(layer[:3])

        def loss(x: jax.Array, scale: jax.Array) -> jax.Array:
            frozen = jax.lax.stop_gradient((x, experts, routing))
            return (moe_jax.moe(*frozen, layer.spec).output * scale * x).sum()

        gradient = jax.jit(jax.grad(loss, argnums=1))(x, jnp.float32(2))
        output = np.asarray(moe_jax.moe(x, experts, routing, layer.spec).output)
        np.testing.assert_allclose(gradient, (output * layer.x).sum(), rtol=1e-4)


def test_changing_the_engine_traces_again() -> None:
    layer = small_layer()
    traces = []

    @jax.jit
    def forward(x: jax.Array) -> jax.Array:
        traces.append(moe_jax.explain_moe(x, *arrays, spec=layer.spec).split(",")[0])
        return x

    with jax.default_device(jax.devices("cpu")[0]):
        x, *arrays = to_jax(layer[:3])
        with moe_jax.cpu_engine("reference"):
            forward(x)
            forward(x)
        with moe_jax.cpu_engine("interpreter"):
            forward(x)
        with moe_jax.cpu_engine("reference"):
            forward(x)
    assert traces == ["moe on reference", "moe on interpreter"]


def test_bundles_are_pytrees() -> None:
    layer = to_jax(small_layer()[:3])
    leaves, structure = jax.tree.flatten(layer)
    assert len(leaves) == 4
    rebuilt = jax.tree.unflatten(structure, leaves)
    assert rebuilt[1].gate_up is layer[1].gate_up and rebuilt[2].bias is None
    with running_on("reference"):
        layout = jax.jit(moe_jax.make_layout, static_argnums=1)(jnp.array([[0, 1]], jnp.int32), 3)
    assert isinstance(layout, moe_jax.RaggedLayout)
    assert layout.spec == moe_jax.LayoutSpec(1, 2, 3) and layout.group_sizes.shape == (3,)
