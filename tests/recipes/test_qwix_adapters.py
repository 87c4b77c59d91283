"""Adapters that the real Qwix adds to our layers, or it says why not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flax", reason="the layers under test need flax")
qwix = pytest.importorskip("qwix", reason="needs qwix (pip install 'moebius[recipes]')")

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx as flax_nnx

import moe_jax
from moe_core.checkpoint import read_adapter
from moe_core.layers import MoELayerSpec
from moe_jax import InvalidInput, Unsupported, layers, linen, tunix
from tests.support.jax import running_on
from tests.support.quantized.qwix import D, E, F, K, Model, quantized, rule, tokens

#: qwix 0.1.8 uses names that flax deprecates.
pytestmark = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:qwix\.")


def lora(*rules: Any, **options: Any) -> Any:
    if not rules:
        options = {"module_path": ".*moe", "rank": 3, "alpha": 6.0, "lora_b_initializer": NORMAL} | options
    return qwix.LoraProvider(rules or None, **options)


NORMAL = jax.nn.initializers.normal()


class TunixModel(Model):
    def __init__(self, rngs: flax_nnx.Rngs) -> None:
        super().__init__(rngs)
        config: dict[str, Any] = {"embed_dim": D, "hidden_dim": F, "num_experts": E, "num_experts_per_tok": K}
        names = SimpleNamespace(exp_weight_edf=(None,) * 3, exp_weight_efd=(None,) * 3)
        types = {"dtype": jnp.float32, "param_dtype": jnp.float32}
        self.moe: Any = tunix.MoELayer(SimpleNamespace(**config, **types, shd_config=names), rngs=rngs)


@pytest.mark.parametrize(
    ("kind", "quantised"), [(Model, {}), (Model, {"weight_qtype": jnp.int4, "tile_size": 32}), (TunixModel, {})]
)
def test_adapters_of_rules_are_trained_as_without_qwix(kind: Any, quantised: dict[str, Any]) -> None:
    """The initialisers draw them, and the whole training has the bits of the same adapter in `add_lora`."""
    with running_on("reference"):
        x, plain = tokens(), kind(flax_nnx.Rngs(0))
        model = qwix.apply_lora_to_model(plain, lora(**quantised), x, rngs=flax_nnx.Rngs(1))
        twin, adapter = kind(flax_nnx.Rngs(0)), model.moe.lora.export()
        if quantised:
            scheme = layers.scheme_of_rule(qwix.LoraRule(rank=3, alpha=6.0, **quantised))
            assert scheme is not None and model.moe.spec.experts.scheme == scheme
            twin.moe.quantize_experts(scheme)
        drawn = jax.nn.initializers.he_uniform()(flax_nnx.Rngs(1).params(), (E, D, 3), jnp.float32)
        np.testing.assert_array_equal(adapter.a1, drawn)
        assert plain.moe.lora is None and adapter.scale.min() == adapter.scale.max() == 2
        twin.moe.add_lora(moe_jax.LoRA(3, alpha=6.0), rngs=flax_nnx.Rngs(2)).load(0, adapter)
        before = jax.tree.map(np.array, flax_nnx.state(model))

        @flax_nnx.jit
        def step(model: Any, optimizer: Any) -> Any:
            trained = flax_nnx.DiffState(0, flax_nnx.LoRAParam)
            loss, gradients = flax_nnx.value_and_grad(lambda model: jnp.square(model(x) - x).mean(), argnums=trained)(
                model
            )
            optimizer.update(model, gradients)
            return loss

        for one in (model, twin):
            optimizer = flax_nnx.Optimizer(one, optax.adam(1e-2), wrt=flax_nnx.LoRAParam)
            losses = [float(step(one, optimizer)) for _ in range(3)]
            assert losses[-1] < losses[0]
        ours, theirs = (jax.tree.leaves_with_path(flax_nnx.to_pure_dict(flax_nnx.state(one))) for one in (twin, model))
        for (path, one), (_, other) in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(path))
        changed = [
            not np.array_equal(*pair)
            for pair in zip(*map(jax.tree.leaves, (before, flax_nnx.state(model))), strict=True)
        ]
        assert sum(changed) == 4, "a1, b1, a2, b2"


def test_adapters_of_rules_in_linen() -> None:
    with running_on("reference"):
        x, base = tokens(), linen.MoE(D, F, E, K)
        model, twin = (
            qwix.apply_lora_to_model(base, lora(module_path=".*")),
            base.clone(lora=moe_jax.LoRA(3, alpha=6.0)),
        )
        variables = nn.meta.unbox(model.init(jax.random.key(0), x))
        assert np.abs(variables["lora"]["b1"][..., :3, :]).min() > 0

        def gradients(layer: Any) -> Any:
            rest = {name: one for name, one in variables.items() if name != "lora"}
            return jax.grad(lambda lora: jnp.square(layer.apply(rest | {"lora": lora}, x)).sum())(variables["lora"])

        assert not np.array_equal(model.apply(variables, x), base.apply({"params": variables["params"]}, x))
        np.testing.assert_array_equal(model.apply(variables, x), twin.apply(variables, x))
        jax.tree.map(np.testing.assert_array_equal, gradients(model), gradients(twin))
        for layer in (model, twin):
            with pytest.raises(
                InvalidInput, match=r"variables must hold the collections lora and lora_state.*init_lora"
            ):
                layer.apply({"params": variables["params"]}, x)
        with pytest.raises(
            InvalidInput, match=r"adapters must be those of Qwix's rule, LoRA\(rank=3, .*got LoRA\(rank=5"
        ):
            qwix.apply_lora_to_model(base.clone(lora=moe_jax.LoRA(5)), lora(module_path=".*")).apply(variables, x)


def test_dropout_and_refusals_of_adapters() -> None:
    with running_on("reference"):
        x, model = tokens(), Model(flax_nnx.Rngs(0))
        dropped = qwix.apply_lora_to_model(model, lora(dropout=0.5), x, rngs=flax_nnx.Rngs(1))
        assert not np.array_equal(dropped(x), dropped(x))
        dropped.eval()
        np.testing.assert_array_equal(dropped(x), dropped(x))
        qwix.apply_lora_to_model(dropped, lora(dropout=0.5), x, rngs=flax_nnx.Rngs(1))
        with pytest.raises(InvalidInput, match=r"adapters must be those of Qwix's rule"):
            qwix.apply_lora_to_model(dropped, lora(rank=4), x, rngs=flax_nnx.Rngs(1))
        with pytest.raises(InvalidInput, match=r"rngs must draw the new adapter.*without skip_nnx_init"):
            qwix.apply_lora_to_model(model, lora(), x, rngs=flax_nnx.Rngs(1), skip_nnx_init=True)(x)
        with pytest.raises(InvalidInput, match="rank must be"):
            qwix.apply_lora_to_model(model, lora(rank=0), x, rngs=flax_nnx.Rngs(1))
        both = {"weight_qtype": jnp.int8, "act_qtype": jnp.int8}
        with pytest.raises(Unsupported, match="experts with quantised activations"):
            qwix.apply_lora_to_model(model, lora(**both), x, rngs=flax_nnx.Rngs(1))
        with pytest.raises(Unsupported, match="Qwix cannot quantise the parameters of Tunix's MoELayer"):
            quantized(TunixModel(flax_nnx.Rngs(0)), rule(weight_qtype=jnp.int8))


@pytest.mark.parametrize("product", ["einsum", "dot_general"])
def test_adapters_of_einsum_and_dot_general(product: str) -> None:
    """Qwix's factors of a model with batched products are read as they compute."""

    def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
        if product == "einsum":
            return jnp.einsum("etd,edf->etf", x, weight)
        return jax.lax.dot_general(x, weight, (((2,), (1,)), ((0,), (0,))))

    class Experts(flax_nnx.Module):
        wi_0: Any
        wi_1: Any
        wo: Any

        def __init__(self, rngs: flax_nnx.Rngs) -> None:
            shapes = {"wi_0": (E, D, F // 2), "wi_1": (E, D, F // 2), "wo": (E, F // 2, D)}
            for name, shape in shapes.items():
                setattr(self, name, flax_nnx.Param(jax.random.normal(rngs.params(), shape)))

        def __call__(self, x: jax.Array) -> jax.Array:
            hidden = multiply(x, self.wi_0[...]) + 2 * multiply(x, self.wi_1[...])
            return multiply(hidden, self.wo[...])

    class Whole(flax_nnx.Module):
        def __init__(self, rngs: flax_nnx.Rngs) -> None:
            self.layers = flax_nnx.List([Experts(rngs)])

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.layers[0](x)

    x, normal = jnp.ones((E, 3, D)), jax.nn.initializers.normal()
    provider = qwix.LoraProvider(module_path=".*", rank=2, alpha=5.0, lora_b_initializer=normal)
    model = qwix.apply_lora_to_model(Whole(flax_nnx.Rngs(0)), provider, x, rngs=flax_nnx.Rngs(1))
    arrays = {
        ".".join(map(str, path)): np.asarray(one[...]) for path, one in flax_nnx.to_flat_state(flax_nnx.state(model))
    }
    factors = {name: array for name, array in arrays.items() if "_lora_" in name}
    spec = MoELayerSpec(D, F // 2, E, 2)
    layer = read_adapter(factors, spec, packing="qwix", settings={"r": 2, "lora_alpha": 5}).layer(0)
    gate_up, down = layer.pairs()["gate_up"], layer.pairs()["down"]
    for expert in range(E):
        first = np.concatenate([arrays[f"layers.0.wi_{is_up}"][expert] for is_up in (0, 1)], -1)
        pre = np.asarray(x[expert]) @ (first + gate_up.change(expert))
        hidden = pre[:, : F // 2] + 2 * pre[:, F // 2 :]
        wanted = hidden @ (arrays["layers.0.wo"][expert] + down.change(expert))
        np.testing.assert_allclose(model(x)[expert], wanted, rtol=1e-4, atol=1e-3)
