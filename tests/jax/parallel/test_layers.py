"""Layers with their experts on four devices against the same layers on one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import scheme_named
from moe_core.layers import ExpertsSpec, LatentSpec, MoELayerSpec, OutputSpec, SharedExpertsSpec
from moe_core.parallel import ExchangeSpec
from moe_core.specs import Activation, NormSpec
from moe_jax import layers
from moe_jax.layers import losses
from moe_jax.parallel import ExpertAxis
from tests.support.jax import running_on
from tests.support.parallel.jax import ep_mesh

D = 8
PLAIN = MoELayerSpec(D, 12, 8, 2)
SPECS = {
    "shared experts and biases": MoELayerSpec(
        D, 12, 8, 3, experts=ExpertsSpec(Activation("swiglu_oai", gate_layout="interleaved"), bias=True),
        shared_experts=SharedExpertsSpec(4, gate=True), router_bias=True,
    ),
    "a correction bias": MoELayerSpec(D, 12, 12, 2, correction_bias=True),
    "a capacity and a latent width": MoELayerSpec(
        D, 12, 8, 2, capacity_factor=0.75, expert_scale=True, router_norm=NormSpec(1e-5), latent=LatentSpec(6),
        output=OutputSpec(bias=True),
    ),
}  # fmt: skip
EXCHANGES = dict(zip(SPECS, (ExchangeSpec("padded", "slots"), ExchangeSpec(), ExchangeSpec("all_gather")), strict=True))
#: Parameters whose gradients are sums over ranks in another order.
WHOLE = ("gate", "shared_experts", "before", "after", "output")


def draw(spec: MoELayerSpec, dtype: Any = jnp.float32, **options: Any) -> tuple[Any, ...]:
    """parameters, x `[8, 3, D]` and a mask."""
    parameters = layers.initialize(spec, jax.random.key(0), **options)
    if spec.correction_bias:
        parameters["gate"]["correction_bias"] = 0.1 * jax.random.normal(jax.random.key(2), (spec.num_experts,))
    x = jax.random.normal(jax.random.key(1), (8, 3, D), dtype)
    return parameters, x, jnp.arange(24).reshape(8, 3) % 5 > 0


def loss_of(forward: Callable[..., Any]) -> Any:
    """The gradients of a loss of y and of both losses of the router."""

    def loss(parameters: Any, x: jax.Array, mask: jax.Array) -> Any:
        y, aux = forward(parameters, x, token_mask=mask, return_aux=True)
        return jnp.sin(y.astype(jnp.float32)).sum() + 0.1 * aux.load_balance_loss + 0.01 * aux.z_loss, (y, aux)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, allow_int=True))


@functools.cache
def alone(name: str) -> Any:
    """What `loss_of` gives for a layer on one device."""
    with running_on("reference"):
        return loss_of(functools.partial(layers.forward, spec=SPECS[name]))(*draw(SPECS[name]))


def compare(spec: MoELayerSpec, one: Any, found: Any) -> None:
    """Raise unless everything but sums over ranks has the same bits; these are equal up to rounding."""
    (loss, (y, aux)), (d_parameters, d_x) = one
    (own_loss, (own_y, own_aux)), (own_d_parameters, own_d_x) = found
    np.testing.assert_array_equal(own_y, y)
    np.testing.assert_array_equal(own_d_x, d_x)
    for name in ("tokens_per_expert", "ids", "weights", "invalid_ids"):
        np.testing.assert_array_equal(getattr(own_aux, name), getattr(aux, name), name)
    for name in ("load_balance_loss", "z_loss"):
        np.testing.assert_allclose(getattr(own_aux, name), getattr(aux, name), 1e-6, err_msg=name)
    np.testing.assert_allclose(own_loss, loss, 1e-6, 1e-5)
    assert own_aux.overflow.tolist() == [0] and aux.overflow is None
    for leaf in layers.leaves(spec):
        if leaf.is_state:
            continue
        own, other = layers.find(own_d_parameters, leaf.path), layers.find(d_parameters, leaf.path)
        if leaf.path[0] in WHOLE:
            np.testing.assert_allclose(own, other, 1e-5, 1e-6, err_msg=str(leaf.path))
        else:
            np.testing.assert_array_equal(own, other, str(leaf.path))


@pytest.mark.parametrize("name", SPECS)
def test_layers_on_a_mesh_have_the_bits_of_one_device(name: str) -> None:
    """A layer opens its own shard_map under the mesh that is set, whose axes XLA or the types of arrays follow."""
    spec, number = SPECS[name], list(SPECS).index(name)
    mesh = ep_mesh(4, AxisType.Explicit if number == 1 else AxisType.Auto)
    with running_on("reference"):
        parameters, x, mask = draw(spec)
        with jax.set_mesh(mesh):
            placed = jax.device_put(parameters, layers.expert_sharding(spec, mesh))
            tokens = (x, mask) if number == 1 else jax.device_put((x, mask), NamedSharding(mesh, P("ep")))
            axis = ExpertAxis(exchange=EXCHANGES[name])
            found = loss_of(functools.partial(layers.forward, spec=spec, expert_axis=axis))(placed, *tokens)
        assert found[1][0]["wo"].sharding.spec[0] == "ep"
    compare(spec, alone(name), found)


def test_a_stack_in_a_scan_beside_data_parallelism() -> None:
    """The batch is over both axes of the mesh, and bf16 parameters are read in place."""
    mesh = jax.make_mesh((2, 2), ("data", "ep"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:4])
    forward = functools.partial(layers.forward, spec=PLAIN)

    def stack(parameters: Any, x: jax.Array, *, return_aux: bool, **options: Any) -> Any:
        def layer(x: jax.Array, index: jax.Array) -> Any:
            y, aux = forward(parameters, x, layer_index=index, return_aux=True, **options)
            return (x + y).astype(x.dtype), aux

        x, aux = jax.lax.scan(layer, x, jnp.arange(2))
        return x, jax.tree.map(lambda one: one[-1], aux)

    with running_on("reference"):
        parameters, x, mask = draw(PLAIN, jnp.bfloat16, param_dtype=jnp.bfloat16, num_layers=2)
        one = loss_of(stack)(parameters, x, mask)
        with jax.set_mesh(mesh):
            placed = jax.device_put(parameters, layers.expert_sharding(PLAIN, mesh, num_layers=2))
            found = loss_of(functools.partial(stack, expert_axis="ep"))(placed, x, mask)
    for own, other in ((found[0][1][0], one[0][1][0]), (found[1][1], one[1][1])):
        np.testing.assert_array_equal(np.asarray(own, np.float32), np.asarray(other, np.float32))
    np.testing.assert_array_equal(one[0][1][1].tokens_per_expert, found[0][1][1].tokens_per_expert)
    # Over the data axis the gradients of experts are added up too.
    for own, other in zip(jax.tree.leaves(found[1][0]), jax.tree.leaves(one[1][0]), strict=True):
        own, other = (np.asarray(array, np.float32) for array in (own, other))
        np.testing.assert_allclose(own, other, 2e-2, 1e-2 * np.abs(other).max())


def test_a_layer_in_the_callers_shard_map() -> None:
    """Losses are shares, whose mean over ranks is the loss of all tokens, as are their gradients."""
    spec, mesh, one = SPECS["a correction bias"], ep_mesh(4), alone("a correction bias")
    with running_on("reference"):
        parameters, x, mask = draw(spec)

        def local(parameters: Any, x: jax.Array, mask: jax.Array) -> Any:
            y, aux = layers.forward(parameters, x, spec, token_mask=mask, return_aux=True, expert_axis="ep")
            losses = jax.lax.pmean(0.1 * aux.load_balance_loss + 0.01 * aux.z_loss, "ep")
            counts = jax.lax.psum(aux.tokens_per_expert, "ep")
            return jax.lax.psum(jnp.sin(y).sum(), "ep") + losses, y, counts

        specs = layers.expert_specs(spec)
        call = jax.shard_map(local, mesh=mesh, in_specs=(specs, P("ep"), P("ep")), out_specs=(P(), P("ep"), P()))
        value = jax.jit(
            jax.value_and_grad(lambda *given: (lambda loss, *more: (loss, more))(*call(*given)), has_aux=True)
        )
        (loss, (y, counts)), gradients = value(parameters, x, mask)
    np.testing.assert_array_equal(y, one[0][1][0])
    np.testing.assert_array_equal(counts, one[0][1][1].tokens_per_expert)
    np.testing.assert_allclose(loss, one[0][0], 1e-6)
    np.testing.assert_array_equal(gradients["wi_0"], one[1][0]["wi_0"])
    np.testing.assert_allclose(gradients["gate"]["kernel"], one[1][0]["gate"]["kernel"], 1e-5, 1e-6)


def test_bounds_of_layers() -> None:
    """What does not fit is counted and NaN; a bound that all fits into changes nothing."""
    mesh, exchange = ep_mesh(2), ExchangeSpec("padded", "slots")
    with running_on("reference"):
        parameters, x, _ = draw(PLAIN)
        one = layers.forward(parameters, x, PLAIN)
        for receive, overflows in ((80, False), (16, True)):
            axis = ExpertAxis(exchange=dataclasses.replace(exchange, receive=receive))
            call = functools.partial(layers.forward, spec=PLAIN, expert_axis=axis, return_aux=True)
            with jax.set_mesh(mesh):
                y, aux = jax.jit(call)(parameters, x)
            lost = np.isnan(np.asarray(y)).all(axis=-1)
            np.testing.assert_array_equal(np.asarray(y)[~lost], np.asarray(one)[~lost])
            assert lost.any() == overflows == bool(aux.overflow[0] > 0) and lost.sum() <= aux.overflow[0]


def shares_are_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    real = jax.lax.axis_size
    monkeypatch.setattr(losses.jax.lax, "axis_size", lambda axis: 1 if isinstance(axis, tuple) else real(axis))


def test_a_missing_divisor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["a correction bias"]
    shares_are_not_divided(monkeypatch)
    with running_on("reference"), pytest.raises(AssertionError, match="Arrays are not equal"):
        parameters, x, mask = draw(spec)
        with jax.set_mesh(ep_mesh(4)):
            found = loss_of(functools.partial(layers.forward, spec=spec, expert_axis="ep"))(parameters, x, mask)
        compare(spec, alone("a correction bias"), found)


def test_where_parameters_are() -> None:
    spec = MoELayerSpec(64, 64, 8, 2, experts=ExpertsSpec(scheme=scheme_named("mxfp4_w4a16")), correction_bias=True)
    specs = layers.expert_specs(spec, "model", num_layers=3)
    assert specs["wo"]["values"] == P(None, "model", None, None) and specs["gate"]["kernel"] == P(None, None, None)
    assert specs["gate"]["correction_bias"] == P(None, None)
    held = layers.expert_sharding(SPECS["shared experts and biases"], ep_mesh(4))
    assert held["wi_bias"].spec == P("ep", None) and held["shared_experts"]["wo"]["kernel"].spec == P(None, None)
    assert layers.expert_sharding(PLAIN, ep_mesh(3))["wo"].is_fully_replicated, "3 devices do not divide 8 experts"
    with pytest.raises(InvalidInput, match=r"axis must be one of the mesh's .*, got 'model'"):
        layers.expert_sharding(PLAIN, ep_mesh(4), "model")


def test_wrong_layers_are_refused() -> None:
    normed = MoELayerSpec(D, 12, 8, 2, output=OutputSpec(norm=NormSpec(1e-5), of="experts"))
    cases: Any = (
        (PLAIN, "ep", (6, D), InvalidInput, r"the 4 devices of \('ep',\) divide, got .* pad its 6 tokens to 8 and"),
        (PLAIN, "ep", (2, 6, D), InvalidInput, r"the 4 devices of \('ep',\) divide, got .* reshape x to \[12, 8\]"),
        (PLAIN, "exp", (8, D), InvalidInput, "expert_axis must be an axis of the mesh .*, got 'exp'; name one of ep"),
        (PLAIN, ExpertAxis(tokens=("data", "ep")), (8, D), InvalidInput, "token_axes must name axes of .*, got 'data'"),
        (normed, "ep", (8, D), Unsupported, "expert_axis must be None for a layer with a norm of each expert's result"),
        (PLAIN, 3, (8, D), InvalidInput, "expert_axis must be the name of a mesh axis or an ExpertAxis, got 3"),
    )
    for spec, axis, shape, error, message in cases:
        with running_on("reference"), jax.set_mesh(ep_mesh(4)), pytest.raises(error, match=message):
            parameters = jax.eval_shape(lambda spec=spec: layers.initialize(spec, jax.random.key(0)))
            call = functools.partial(layers.forward, spec=spec, expert_axis=axis)
            jax.eval_shape(call, parameters, jax.ShapeDtypeStruct(shape, jnp.float32))
    with pytest.raises(InvalidInput, match=r"tokens must be names of mesh axes with 'ep' among them, got \('data',\)"):
        ExpertAxis(tokens=("data",))


def test_without_a_mesh_a_layer_runs_on_one_device_or_on_that_of_its_arrays() -> None:
    with running_on("reference"):
        parameters, x, mask = draw(PLAIN)
        one = layers.forward(parameters, x, PLAIN, token_mask=mask)
        np.testing.assert_array_equal(layers.forward(parameters, x, PLAIN, token_mask=mask, expert_axis="ep"), one)
        split = jax.device_put(x, NamedSharding(ep_mesh(4), P("ep")))
        found = jax.jit(functools.partial(layers.forward, spec=PLAIN, expert_axis="ep"))(parameters, split)
        np.testing.assert_array_equal(found, layers.forward(parameters, x, PLAIN))
