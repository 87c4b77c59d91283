"""Layers called as on one device, on meshes of data, fsdp and expert axes: what is split, what moves, equal results."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import LatentSpec, MoELayerSpec, OutputSpec, SharedExpertsSpec
from moe_core.specs import NormSpec, TokenRounding
from moe_jax import layers
from moe_jax.bridge import mesh as meshes
from moe_jax.parallel import ExchangeSpec, ExpertAxis
from tests.support.jax import running_on

D = 8
PLAIN = MoELayerSpec(D, 12, 8, 2, shared_experts=SharedExpertsSpec(4))
CAPACITY = MoELayerSpec(
    D, 12, 8, 2, capacity_factor=0.75, expert_scale=True, router_norm=NormSpec(1e-5), latent=LatentSpec(6)
)
NORMED = MoELayerSpec(D, 12, 8, 2, output=OutputSpec(norm=NormSpec(1e-5), of="experts"))
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh_of(kind: AxisType, **axes: int) -> Mesh:
    devices = jax.devices("cpu")[: int(np.prod(list(axes.values())))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=devices)


def draw(spec: MoELayerSpec, *shape: int, **options: Any) -> tuple[Any, Any]:
    return layers.initialize(spec, jax.random.key(0), **options), jax.random.normal(jax.random.key(1), (*shape, D))


def step(spec: MoELayerSpec, **options: Any) -> Any:
    """(loss, (y, aux)) and the gradients of parameters and x."""

    def loss(parameters: Any, x: jax.Array) -> Any:
        y, aux = layers.forward(parameters, x, spec, return_aux=True, **options)
        return jnp.sin(y).sum() + 0.1 * aux.load_balance_loss + 0.01 * aux.z_loss, (y, aux)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


@functools.cache
def alone(spec: MoELayerSpec, *shape: int) -> Any:
    with running_on("reference"):
        return jax.jit(step(spec))(*draw(spec, *shape))


def require_equal(found: Any, one: Any, exact: bool = False) -> None:
    """exact: y bitwise, as where each expert has its rows of one device. NumPy adds up a single row in another order
    than several."""
    (loss, (y, aux)), (d_parameters, d_x) = found
    (own_loss, (own_y, own_aux)), (own_d_parameters, own_d_x) = one
    if exact:
        np.testing.assert_array_equal(y, own_y)
    for name in ("tokens_per_expert", "ids", "invalid_ids"):
        np.testing.assert_array_equal(getattr(aux, name), getattr(own_aux, name), name)
    sums = (y, d_x, d_parameters, loss, aux.load_balance_loss, aux.z_loss)
    own_sums = (own_y, own_d_x, own_d_parameters, own_loss, own_aux.load_balance_loss, own_aux.z_loss)
    jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, 1e-5, 1e-5), sums, own_sums)


def fsdp(spec: MoELayerSpec, experts: str | None = None, axis: str = "fsdp") -> Any:
    """PartitionSpecs: d_model over an axis, experts over another."""
    every = [(leaf.path, leaf.parameter.axes) for leaf in layers.leaves(spec)]
    split: dict[Any, Any] = {"d_model": axis, "experts": experts}
    return layers.nested(
        (path, P(*(split.get(name) if path[0] != "gate" or name == "d_model" else None for name in axes)))
        for path, axes in every
    )


def placed(parameters: Any, mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec)), parameters, specs)


@pytest.mark.parametrize(
    ("spec", "axes", "kind", "split"),
    [
        (PLAIN, {"data": 2, "model": 2}, AUTO, None),
        (CAPACITY, {"data": 4}, AUTO, P("data")),
        (NORMED, {"data": 2, "sequence": 2}, EXPLICIT, P("data", "sequence")),
        (PLAIN, {"data": 2, "model": 2}, EXPLICIT, P("data")),
        (PLAIN, {"data": 1}, AUTO, None),
        (PLAIN, {"data": 1}, EXPLICIT, P("data")),
    ],
)
def test_plain_layers_on_any_mesh(spec: MoELayerSpec, axes: Any, kind: AxisType, split: Any) -> None:
    """x as it comes, or split; y is split as x is."""
    mesh = mesh_of(kind, **axes)
    with running_on("reference"), jax.set_mesh(mesh):
        parameters, x = draw(spec, 4, 6)
        x = x if split is None else jax.device_put(x, NamedSharding(mesh, split))
        found = jax.jit(step(spec))(parameters, x)
    require_equal(found, alone(spec, 4, 6))
    y = found[0][1][0]
    wanted = split or P(tuple(axes) if len(axes) > 1 else "data")
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, wanted), y.ndim)
    if kind == EXPLICIT:
        assert tuple(y.sharding.spec)[: len(wanted)] == tuple(wanted), "axes of one device stay in types"


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("current", [True, False])
def test_fsdp_and_experts(kind: AxisType, current: bool) -> None:
    """Matrices are gathered where tokens are split, experts exchange tokens, gradients lie as parameters do."""
    mesh = mesh_of(kind, fsdp=2, ep=2)
    specs = fsdp(PLAIN, "ep")
    options: Any = {} if kind == EXPLICIT else {"parameter_specs": specs, "expert_axis": "ep"}
    if kind == AUTO and not current:
        options.pop("expert_axis")
    with running_on("reference"), jax.set_mesh(mesh) if current else contextlib.nullcontext():
        parameters, x = draw(PLAIN, 4, 6)
        parameters, x = placed(parameters, mesh, specs), jax.device_put(x, NamedSharding(mesh, P("fsdp")))
        found = jax.jit(step(PLAIN, **options))(parameters, x)
    require_equal(found, alone(PLAIN, 4, 6))
    assert found[0][1][1].overflow is not None, "experts are parallel"
    held = jax.tree.map(
        lambda one, spec: one.sharding.is_equivalent_to(NamedSharding(mesh, spec), one.ndim), found[1][0], specs
    )
    assert held["wi_0"] and held["wo"]


def test_stacks_gather_one_layer() -> None:
    mesh = mesh_of(EXPLICIT, fsdp=2)
    with running_on("reference"):
        parameters, x = draw(PLAIN, 4, num_layers=2)
        one = [layers.forward(parameters, x, PLAIN, layer_index=index) for index in range(2)]
        specs = jax.tree.map(lambda spec: P(None, *spec), fsdp(PLAIN), is_leaf=lambda one: isinstance(one, P))
        parameters, x = placed(parameters, mesh, specs), jax.device_put(x, NamedSharding(mesh, P("fsdp")))
        call = jax.jit(lambda index: layers.forward(parameters, x, PLAIN, layer_index=index))
        with jax.set_mesh(mesh):
            for index in range(2):
                np.testing.assert_allclose(call(index), one[index], 1e-5, 1e-6)
            assert np.isnan(call(2)).all()
            text = call.lower(0).as_text()
            with pytest.raises(InvalidInput, match=r"layer_index must be in \[0, 2\), got 2"):
                layers.forward(parameters, x, PLAIN, layer_index=2)
    assert "all_gather" in text and "2x8x8x12" not in text.split("all_gather", 1)[1].split("\n")[0]


def test_eager_calls_run_one_cached_program() -> None:
    """With the bits of jit. A second call compiles nothing."""
    mesh, cache = mesh_of(AUTO, ep=4), cast(Any, meshes._run)
    with running_on("reference"), jax.set_mesh(mesh):
        parameters, x = draw(PLAIN, 4, 6)
        parameters = jax.device_put(parameters, layers.expert_sharding(PLAIN, mesh))
        first = layers.forward(parameters, x, PLAIN, expert_axis="ep")
        size = cache._cache_size()
        np.testing.assert_array_equal(layers.forward(parameters, x, PLAIN, expert_axis="ep"), first)
        np.testing.assert_array_equal(layers.forward(parameters, x, PLAIN), first, "the experts' sharding shows it")
        assert cache._cache_size() == size
        np.testing.assert_array_equal(
            jax.jit(lambda p, x: layers.forward(p, x, PLAIN, expert_axis="ep"))(parameters, x), first
        )
    np.testing.assert_array_equal(first, alone(PLAIN, 4, 6)[0][1][0])


@pytest.mark.parametrize("shape", [(1, 8), (3, 8), (2, 2)])
def test_axes_that_the_first_one_is_too_short_for(shape: tuple[int, int]) -> None:
    mesh = mesh_of(AUTO, data=2, ep=2)
    with running_on("reference"), jax.set_mesh(mesh):
        found = jax.jit(step(PLAIN, expert_axis="ep"))(*draw(PLAIN, *shape))
    require_equal(found, alone(PLAIN, *shape))


def test_experts_that_the_axis_does_not_divide_are_placed() -> None:
    spec, mesh = MoELayerSpec(D, 12, 6, 2), mesh_of(AUTO, ep=4)
    with running_on("reference"), jax.set_mesh(mesh):
        parameters, x = draw(spec, 4, 6)
        parameters = jax.device_put(parameters, layers.expert_sharding(spec, mesh))
        found = jax.jit(step(spec, expert_axis="ep"))(parameters, x)
    require_equal(found, alone(spec, 4, 6), exact=True)


def test_manual_axes_are_left_out() -> None:
    """Inside the caller's shard_map over data the layer opens one over the rest."""
    mesh = mesh_of(AUTO, data=2, ep=2)
    with running_on("reference"), jax.set_mesh(mesh):
        parameters, x = draw(PLAIN, 4, 6)
        for axis in ("ep", None, ExpertAxis(tokens=("data", "ep"))):
            call = functools.partial(layers.forward, parameters, spec=PLAIN, expert_axis=axis)
            outer = jax.shard_map(call, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
            np.testing.assert_allclose(jax.jit(outer)(x), alone(PLAIN, 4, 6)[0][1][0], 1e-5, 1e-6)


def test_what_would_move_unasked_is_refused() -> None:
    mesh = mesh_of(EXPLICIT, data=2, model=2)
    tensor, rounded = fsdp(PLAIN, axis="model"), MoELayerSpec(D, 12, 8, 2, token_rounding=TokenRounding(16))
    cases: Any = (
        (PLAIN, tensor, P("data"), {}, r"gate/kernel must be whole over 'model', where x has no tokens"),
        (PLAIN, fsdp(PLAIN, "model", "data"), P("data"), {"expert_axis": "data"},
            "must have its experts split over 'data', the"),
        (PLAIN, None, P("data", None, "model"), {}, r"x must be whole along its last axis, got .* over model"),
        (rounded, None, P("data"), {}, "token_rounding is not there for a layer on several ranks"),
        (CAPACITY, None, P("data", "model"), {},
            "capacity_factor must be None where several batch axes of x are split"),
    )  # fmt: skip
    with running_on("reference"), jax.set_mesh(mesh):
        for spec, specs, split, options, message in cases:
            parameters, x = draw(spec, 4, 6)
            parameters = parameters if specs is None else placed(parameters, mesh, specs)
            with pytest.raises(Unsupported, match=message):
                jax.jit(functools.partial(layers.forward, spec=spec, **options))(
                    parameters, jax.device_put(x, NamedSharding(mesh, split))
                )
        parameters, x = draw(PLAIN, 4, 6)
        with pytest.raises(InvalidInput, match="token_axes must be None with ExpertAxis"):
            layers.forward(
                placed(parameters, mesh, tensor),
                x,
                PLAIN,
                expert_axis=ExpertAxis("data", tokens=("data",)),
                token_axes=("data",),
            )
        # Asked for, it is gathered.
        found = jax.jit(functools.partial(layers.forward, spec=PLAIN, token_axes=("data", "model")))(
            placed(parameters, mesh, tensor), x
        )
    np.testing.assert_allclose(found, alone(PLAIN, 4, 6)[0][1][0], 1e-5, 1e-6)


def test_vmap_of_a_layer_on_a_mesh() -> None:
    """With spmd_axis_name the batch is over an axis that the layer leaves out."""
    mesh = mesh_of(AUTO, data=2, model=2)
    with running_on("reference"), jax.set_mesh(mesh):
        parameters, x = draw(PLAIN, 4, 6)
        for name, axes in (("data", ("model",)), (None, None)):
            call = functools.partial(layers.forward, parameters, spec=PLAIN, token_axes=axes)
            y = jax.jit(jax.vmap(call, spmd_axis_name=name))(jax.device_put(x, NamedSharding(mesh, P("data"))))
            np.testing.assert_allclose(y, alone(PLAIN, 4, 6)[0][1][0], 1e-5, 1e-6)


def test_explain_says_what_moves() -> None:
    mesh = mesh_of(EXPLICIT, fsdp=2, ep=2)
    with jax.set_mesh(mesh):
        parameters = placed(draw(PLAIN)[0], mesh, fsdp(PLAIN, "ep"))
        text = layers.explain_mesh(PLAIN, (4, 6, D), parameters, token_axes=("fsdp",))
    assert "x is split as P(('fsdp', 'ep'), None), and y as x" in text
    assert "rows travel over ep and back (all_to_all)" in text
    assert f"wi_0 is gathered over fsdp: {8 * 8 * 12 * 4 // 2} bytes a device" in text
    assert layers.explain_mesh(PLAIN, (4, 6, D), draw(PLAIN)[0]) == ""
    with jax.set_mesh(mesh_of(AUTO, data=2, model=1)):
        assert "x is split as P('data', None), and" in layers.explain_mesh(PLAIN, (4, 6, D), draw(PLAIN)[0])


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_what_jit_does_not_see_is_explained_and_refused(kind: AxisType) -> None:
    mesh = mesh_of(kind, fsdp=2, ep=2)
    with running_on("reference"), jax.set_mesh(mesh):
        specs = fsdp(PLAIN, "ep")
        parameters = placed(draw(PLAIN)[0], mesh, specs)
        ways: list[dict[str, Any]] = [{}, {"expert_axis": "ep"}, {"parameter_specs": specs}]
        texts = [layers.explain_mesh(PLAIN, (4, 6, D), parameters, **way) for way in ways]
        tokens, wanted = draw(PLAIN, 4, 6)[1], alone(PLAIN, 4, 6)[0][1][0]
        x = jax.device_put(tokens, NamedSharding(mesh, P(("fsdp", "ep"))))
        for way, text in zip(ways, texts, strict=True):
            call = jax.jit(functools.partial(layers.forward, spec=PLAIN, **way))
            refuses = pytest.raises(jax.errors.JaxRuntimeError, match=r"must be .*, got .*fsdp.*parameter_specs")
            with refuses if "jit hides" in text else contextlib.nullcontext():
                np.testing.assert_allclose(call(parameters, x), wanted, 1e-5, 1e-6)
        call, x = functools.partial(layers.forward, draw(PLAIN)[0], spec=PLAIN), jax.device_put(x, P(None, "ep"))
        moves = pytest.raises(jax.errors.JaxRuntimeError, match=r"x must be split as .*, got .*ep.*token_axes")
        with moves if kind == AUTO else contextlib.nullcontext():
            jax.jit(call)(x)
        np.testing.assert_allclose(jax.jit(functools.partial(call, token_axes=P(None, "ep")))(x), wanted, 1e-5, 1e-6)
    hides = [[over in text for over in ("wi_0 over ep, fsdp,", "wi_0 over fsdp,", "jit hides")] for text in texts]
    told = [[True, False, True], [False, True, True], [False] * 3]
    assert hides == (told if kind == AUTO else [[False] * 3] * 3)
    for line in "\n".join(texts).splitlines():
        assert ("jit hides" in line) == line.endswith("name it by parameter_specs, logical rules or expert_axis")


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("shape", [(1,), (3, 1), (2, 3)])
def test_batches_smaller_than_the_mesh(shape: tuple[int, ...], kind: AxisType) -> None:
    """Decoding on four devices, with the numbers of one: padding is masked."""
    mesh = mesh_of(kind, ep=4)
    with running_on("reference"):
        parameters, x = draw(PLAIN, *shape)
        mask = jnp.arange(int(np.prod(shape))).reshape(shape) != 1
        ids = jnp.broadcast_to(jnp.array([1, 6]), (*shape, 2))
        options = {"token_mask": mask, "routed_by": layers.RoutedBy(expert_ids=ids)}
        few, plain = ExpertAxis("ep", ExchangeSpec("all_gather")), ExpertAxis("ep")

        def step(axis: Any, options: Any, parameters: Any, x: jax.Array) -> Any:
            return jax.value_and_grad(
                lambda x: (lambda y, aux: (jnp.sin(y).sum() + aux.z_loss, (y, aux)))(
                    *layers.forward(parameters, x, PLAIN, expert_axis=axis, return_aux=True, **options)
                ),
                has_aux=True,
            )(x)

        for given in ({}, options):
            wanted = step(None, given, parameters, x)
            with jax.set_mesh(mesh):
                experts = placed(parameters, mesh, layers.expert_specs(PLAIN))
                found = jax.jit(functools.partial(step, few, given))(experts, x)
                with pytest.raises(InvalidInput, match="x must have batch axes that the 4 devices"):
                    jax.jit(functools.partial(step, plain, given))(experts, x)
            (_, (y, aux)), slope = found
            (_, (own_y, own_aux)), own_slope = wanted
            for name in ("tokens_per_expert", "ids"):
                np.testing.assert_array_equal(getattr(aux, name), getattr(own_aux, name))
            for got, want in ((y, own_y), (slope, own_slope), (aux.load_balance_loss, own_aux.load_balance_loss)):
                np.testing.assert_allclose(got, want, 1e-5, 1e-5)
