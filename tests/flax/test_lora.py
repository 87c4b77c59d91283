"""Adapters of both Flax layers: training of these alone, slots loaded and evicted, and layers that have none."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_core.checkpoint import ExpertAdapter, LoRAPair
from moe_core.formats import scheme_named
from moe_core.layers import MoELayerSpec
from moe_core.layers.around import OutputSpec
from moe_core.layers.lora import TARGETS
from moe_core.specs.norm import NormSpec
from moe_core.specs.operands import LoRAFactors
from moe_jax import LoRA
from tests.support.flax import draw_weights, nnx_layer
from tests.support.jax import cpu_mesh, running_on, untyped
from tests.support.training.lora_stages import STAGES

nnx = pytest.importorskip("flax.nnx", reason="needs Flax")
optax = pytest.importorskip("optax", reason="needs optax")

from moe_jax import linen
from moe_jax.nnx import ExpertsSpec, MoE, SharedExpertsSpec

D, F, E, K, T = 16, 8, 4, 2, 12
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, T // 2, D)), jnp.float32)
IDS = jnp.asarray(np.random.default_rng(1).integers(-1, 3, (2, T // 2)), jnp.int32)


@pytest.fixture(autouse=True)
def on_reference() -> Iterator[None]:
    with running_on("reference"):
        yield


def make(lora: LoRA | None = None, seed: int = 0, **options: Any) -> Any:
    return MoE(D, F, E, K, lora=lora, rngs=nnx.Rngs(seed), **options)


def adapter(rank: int, seed: int, experts: int = E, **more: Any) -> LoRAFactors:
    random = np.random.default_rng(seed)
    shapes = {"a1": (D, rank), "b1": (rank, 2 * F), "a2": (F, rank), "b2": (rank, D)}
    factors = {name: random.standard_normal((experts, *shape)).astype(np.float32) / 4 for name, shape in shapes.items()}
    return LoRAFactors(**factors, **more)


def merged(layer: Any, factors: LoRAFactors, scale: float) -> Any:
    """A layer with the adapter added to its weights."""
    weights: Any = layer.export_weights()
    experts, change = weights.experts, scale * np.asarray(factors.a1) @ np.asarray(factors.b1)
    gate, up = np.split(change, 2, axis=-1)
    if experts.up is None:  # interleaved
        gate, up = np.stack([gate, up], axis=-1).reshape(change.shape), None
    more = {"gate_up": gate, "up": up, "down": scale * np.asarray(factors.a2) @ np.asarray(factors.b2)}
    added = {name: np.asarray(getattr(experts, name)) + one for name, one in more.items() if one is not None}
    return MoE.from_weights(dataclasses.replace(weights, experts=dataclasses.replace(experts, **added)))


def test_training_changes_adapters_alone() -> None:
    model, teacher = make(LoRA(rank=4, alpha=8)), make(seed=1)
    target, before = teacher(X), jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))
    np.testing.assert_allclose(model(X), make()(X), rtol=1e-5, atol=1e-6)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)

    def loss(model: Any) -> jax.Array:
        return jnp.square(model(X) - target).mean()

    @nnx.jit
    def step(model: Any, optimizer: Any) -> jax.Array:
        value, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer)) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]
    after = nnx.to_pure_dict(nnx.state(model))
    changed = {
        jax.tree_util.keystr(path)
        for (path, one), (_, other) in zip(*map(jax.tree_util.tree_leaves_with_path, (before, after)), strict=True)
        if not np.array_equal(one, other)
    }
    assert changed == {f"['lora']['{name}']" for name in ("a1", "b1", "a2", "b2")}


def run_nnx(lora: LoRA, changes: Any) -> Any:
    layer = make(lora)
    for method, *arguments in changes:
        getattr(layer.lora, method)(*arguments)
    return layer(X, adapter_ids=IDS, return_aux=True), layer.lora.export(1)


def run_linen(lora: LoRA, changes: Any) -> Any:
    layer = linen.MoE(D, F, E, K, lora=lora)
    variables = layer.load_weights(make().export_weights()) | layer.init_lora(jax.random.key(0))
    for method, *arguments in changes:
        variables = getattr(layer, f"{method}_lora")(variables, *arguments)
    return layer.apply(variables, X, adapter_ids=IDS, return_aux=True), layer.export_lora(variables, 1)


def test_slots_of_both_layers() -> None:
    lora = LoRA(rank=4, alpha=8, slots=3, max_rank=20)
    first, second = adapter(3, 1), adapter(20, 2, scale=np.full(E, 0.5, np.float32))
    changes = [("load", 0, second), ("load", 0, first), ("load", 1, second), ("load", 2, first), ("evict", 2)]
    (y, aux), exported = run_nnx(lora, changes)
    (of_linen, _), also = run_linen(lora, changes)
    np.testing.assert_array_equal(y, of_linen)
    for name, one in vars(second).items():
        if one is not None and name != "ranks":
            np.testing.assert_array_equal(getattr(exported, name), one)
            np.testing.assert_array_equal(getattr(also, name), one)
    plain = make()
    assert aux.invalid_ids.tolist() == [int((IDS == 2).sum())]
    for slot, one in ((-1, plain), (2, plain), (0, merged(plain, first, 8 / 3)), (1, merged(plain, second, 0.5))):
        rows = np.asarray(IDS) == slot
        assert rows.any()
        np.testing.assert_allclose(np.asarray(y)[rows], np.asarray(one(X))[rows], rtol=1e-4, atol=1e-5)


def test_one_program_serves_every_change_of_slots() -> None:
    layer, traces = make(LoRA(rank=4, slots=3)), []

    @jax.jit
    def serve(layer: Any, ids: jax.Array) -> jax.Array:
        traces.append(1)
        return layer(X, adapter_ids=ids)

    outputs = [np.asarray(serve(layer, IDS))]
    for change in (lambda: layer.lora.load(0, adapter(4, 3)), lambda: layer.lora.reset(1, rngs=nnx.Rngs(0), rank=2),
                   lambda: layer.lora.load(1, adapter(1, 4)), lambda: layer.lora.evict(1)):  # fmt: skip
        change()
        outputs.append(np.asarray(serve(layer, IDS)))
    layer.lora.load(0, adapter(4, 3))
    layer.lora.reset(rngs=nnx.Rngs(0))
    assert not np.asarray(layer.lora.export().b1).any(), "the first slot, unless another is named"
    assert len(traces) == 1
    differs = [not np.array_equal(one, other) for one, other in itertools.pairwise(outputs)]
    assert differs == [True, False, True, True]
    np.testing.assert_array_equal(outputs[-1], outputs[1])


@pytest.mark.parametrize("options", [{"shared": True}, {"targets": ("down",)}, {"dtype": jnp.bfloat16}], ids=str)
def test_linen_trains_the_collection(options: dict[str, Any]) -> None:
    layer: Any = linen.MoE(D, F, E, K, lora=LoRA(rank=4, **options))
    variables = linen.nn.meta.unbox(layer.init(jax.random.key(0), X))
    assert set(variables) == {"params", linen.LORA, linen.LORA_STATE}
    lora, rest = variables[linen.LORA], {name: one for name, one in variables.items() if name != linen.LORA}
    wide = options.get("targets") is None
    assert set(lora) == ({"a1", "b1", "a2", "b2"} if wide else {"a2", "b2"})
    gradients = jax.grad(lambda lora: jnp.square(layer.apply(rest | {linen.LORA: lora}, X)).sum())(lora)
    for name, one in gradients.items():
        assert one.dtype == lora[name].dtype == (options.get("dtype") or jnp.float32)
        assert bool(jnp.any(one != 0)) == (name[0] == "b")  # B is zero at first.


def test_dropout_is_of_training() -> None:
    layer = make(LoRA(rank=4, dropout=0.5))
    layer.lora.load(0, adapter(4, 5))
    plain = make(LoRA(rank=4))
    plain.lora.load(0, adapter(4, 5))
    first, second = layer(X), layer(X)
    assert not np.array_equal(first, second)
    layer.eval()
    np.testing.assert_array_equal(layer(X), plain(X))

    of_linen: Any = linen.MoE(D, F, E, K, lora=LoRA(rank=4, dropout=0.5))
    variables = of_linen.load_weights(make().export_weights()) | of_linen.init_lora(jax.random.key(0))
    variables = of_linen.load_lora(variables, 0, adapter(4, 5))
    dropped = [of_linen.apply(variables, X, rngs={"dropout": jax.random.key(seed)}) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    assert not np.array_equal(dropped[1], dropped[2])
    with pytest.raises(Exception, match="dropout"):
        of_linen.apply(variables, X)
    evaluated = of_linen.clone(lora=LoRA(rank=4))
    np.testing.assert_array_equal(evaluated.apply(variables, X), plain(X))


def test_quantised_experts_from_a_checkpoint() -> None:
    side = 32
    base = MoE(side, side, E, K, experts=ExpertsSpec(gate_layout="halves"), rngs=nnx.Rngs(0))
    base.quantize_experts(scheme_named("mxfp4_w4a16"))
    layer = MoE.from_weights(untyped(base.export_weights()))
    layer.add_lora(LoRA(rank=4), rngs=nnx.Rngs(1))
    x = jax.random.normal(jax.random.key(0), (T, side))
    np.testing.assert_array_equal(layer(x), base(x))
    gradients = nnx.grad(lambda layer: jnp.square(layer(x)).sum(), argnums=nnx.DiffState(0, nnx.LoRAParam))
    leaves = jax.tree.leaves(nnx.jit(gradients)(layer))
    assert len(leaves) == 4 and any(np.asarray(one).any() for one in leaves)


def test_a_mesh_splits_tokens() -> None:
    layer = make(LoRA(rank=4, slots=3))
    for slot in range(3):
        layer.lora.load(slot, adapter(4, slot))
    x, ids = X.reshape(T, D), IDS.reshape(T)

    @jax.jit
    def loss(layer: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
        y, aux = layer(x, adapter_ids=ids, return_aux=True)
        return jnp.square(y).sum() + aux.load_balance_loss

    wanted = loss(layer, x, ids)
    graph, lora, rest = nnx.split(layer, nnx.LoRAParam, ...)

    def by_factors(lora: Any) -> jax.Array:
        return loss(nnx.merge(graph, lora, rest), x, ids)

    gradients = jax.grad(by_factors)(lora)
    with jax.set_mesh(cpu_mesh()):
        np.testing.assert_allclose(jax.jit(by_factors)(lora), wanted, rtol=1e-5)
        for one, other in zip(*map(jax.tree.leaves, (jax.jit(jax.grad(by_factors))(lora), gradients)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", STAGES)
def test_layers_in_stages(name: str) -> None:
    """Each token as a layer with its adapter merged has it, and without one as the layer before."""
    spec = MoELayerSpec(64, 48, 4, 2, **STAGES[name], shared_experts=SharedExpertsSpec(24))
    layer, plain = (nnx_layer(draw_weights(spec), spec) for _ in range(2))
    x, random = jnp.asarray(np.random.default_rng(0).standard_normal((33, 64)), jnp.float32), np.random.default_rng(1)
    ids, mask = jnp.arange(33, dtype=jnp.int32) % 4 - 1, jnp.asarray(random.random(33) < 0.8)
    width = 32 if name == "latent" else 64
    shapes = {"a1": (width, 4), "b1": (4, 96), "a2": (48, 4), "b2": (4, width)}
    drawn = [
        LoRAFactors(**{one: random.standard_normal((4, *shape), np.float32) / 8 for one, shape in shapes.items()})
        for _ in range(2)
    ]
    lora = layer.add_lora(LoRA(4, alpha=8, slots=3), rngs=nnx.Rngs(1))
    for slot, factors in enumerate(drawn):
        lora.load(slot, factors)

    def loss(layer: Any) -> Any:
        y, aux = layer(x, token_mask=mask, adapter_ids=ids, return_aux=True)
        return jnp.square(y).sum(), (y, aux.invalid_ids)

    only = nnx.DiffState(0, nnx.LoRAParam)
    gradients, (y, invalid) = nnx.jit(nnx.grad(loss, argnums=only, has_aux=True))(layer)
    y, slots, used = map(np.asarray, (y, ids, mask))
    assert invalid[0] == (used & (slots == 2)).sum()
    without = nnx.jit(lambda layer: layer(x, token_mask=mask))
    for slot, factors in enumerate(drawn):
        rows = (slots == slot) & used
        np.testing.assert_allclose(
            y[rows], np.asarray(without(merged(plain, factors, 2.0)))[rows], rtol=1e-3, atol=1e-3
        )
    rows = (slots < 0) | (slots == 2)
    np.testing.assert_array_equal(y[rows], np.asarray(without(plain))[rows])
    assert all(np.abs(one[:2]).sum() > 0 and not one[2].any() for one in jax.tree.leaves(gradients))
    assert "d_lora.b2" in str(layer.explain(33, training=True))


def test_strict_promotion_of_dtypes() -> None:
    """Of every target, with a mask of dropout."""

    def gradients() -> Any:
        layer = make(LoRA(rank=4, targets=tuple(TARGETS), dropout=0.5), shared_experts=SharedExpertsSpec(8))
        return nnx.grad(lambda layer: jnp.square(layer(X)).sum(), argnums=nnx.DiffState(0, nnx.LoRAParam))(layer)

    with jax.numpy_dtype_promotion("strict"):  # JAX refuses while it traces.
        traced = jax.eval_shape(gradients)
    assert len(jax.tree.leaves(traced)) == 2 * len(TARGETS)


def test_plans_name_adapters() -> None:
    layer = make(LoRA(rank=4, slots=2))
    of_linen = linen.MoE(D, F, E, K, lora=LoRA(rank=4))
    for one in (layer, of_linen):
        assert "lora.a1" in str(one.explain(T)) and "d_lora.b2" in str(one.explain(T, training=True))
        one.warmup([1, T])
        with pytest.raises(moe_jax.Unsupported, match="cost counts no adapters"):
            one.cost(T)


def test_refusals() -> None:
    layer, several = make(LoRA(rank=4)), make(LoRA(rank=4, slots=2))
    for call, message in (
        (lambda: make(LoRA(rank=4), output=OutputSpec(NormSpec(), "experts")), "a norm of each expert's result"),
        (lambda: make(LoRA(rank=4), num_layers=2), "lora must be None for a stack"),
        (lambda: make({"rank": 4}), "lora must be LoRA"),  # type: ignore[arg-type]
        (lambda: linen.MoE(D, F, E, K, lora=LoRA(rank=4), num_layers=2), "lora must be None for a stack"),
        (lambda: make()(X, adapter_ids=IDS), "adapter_ids must be None"),
        (lambda: several(X), "adapter_ids must be given"),
        (lambda: several(X, adapter_ids=IDS[0]), r"adapter_ids must be int32\[2, 6\]"),
        (lambda: several(X, adapter_ids=IDS.astype(jnp.float32)), "adapter_ids must be int32"),
        (lambda: layer.add_lora(LoRA(rank=4), rngs=nnx.Rngs(0)), "no adapters yet"),
        (lambda: layer.lora.load(1, adapter(4, 0)), "slot must be"),
        (lambda: layer.lora.load(0, adapter(17, 0)), "factors.a1 must be"),
        (lambda: layer.lora.reset(0, rngs=nnx.Rngs(0), rank=5), "rank must be"),
        (lambda: layer.lora.load(0, adapter(4, 0, experts=1)), "factors.a1 must be"),
        (lambda: layer.lora.load(0, {}), "factors must be LoRAFactors"),
        (lambda: several.lora.export(0), "slot must hold an adapter"),
        (lambda: linen.MoE(D, F, E, K).init_lora(jax.random.key(0)), "must have lora"),
    ):
        with pytest.raises((moe_jax.InvalidInput, moe_jax.Unsupported), match=message):
            call()


@pytest.mark.parametrize("gate_layout", ["separate", "interleaved"])
def test_adapters_of_files(gate_layout: str) -> None:
    """As `read_adapter` gives them: another order of gate and up, gate and up apart (a wider rank), one product."""
    layer = make(LoRA(rank=3), experts=ExpertsSpec(gate_layout=gate_layout))
    random, ranks, scale = np.random.default_rng(0), np.full(E, 6, np.int32), np.full(E, 0.5, np.float32)
    drawn = [random.standard_normal((E, *shape)).astype(np.float32) for shape in ((D, 6), (6, 2 * F), (F, 3), (3, D))]
    a1, b1, a2, b2 = drawn
    first, second = LoRAPair(a1, b1, scale, ranks, True), LoRAPair(a2, b2, scale, ranks // 2)
    layer.lora.load(0, ExpertAdapter(first, second, "halves"))
    held = np.asarray(layer.lora.b1.get_value())[0, :, :6]
    np.testing.assert_array_equal(held[..., ::2] if gate_layout == "interleaved" else held[..., :F], b1[..., :F])
    wanted = merged(make(experts=ExpertsSpec(gate_layout=gate_layout)), LoRAFactors(*drawn), 0.5)
    np.testing.assert_allclose(layer(X), wanted(X), rtol=1e-3, atol=1e-4)
    layer.lora.load(0, ExpertAdapter(None, second))
    assert not layer.lora.a1.get_value().any() and layer.lora.a2.get_value().any()
    router = LoRAPair(a1[:1, :, :3], b1[:1, :3, :E], scale[:1], ranks[:1] // 2)
    lora = make(LoRA(rank=3, targets=("router",))).lora
    lora.load(0, ExpertAdapter(None, None, router=router))
    np.testing.assert_array_equal(lora.export().b_router, router.b)
    assert lora.scale.get_value()[0].tolist() == [0.5] * E
