"""Flax layers under jit, scan, remat, shard_map and differentiation, and what they refuse."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from moe_core.layers import MAXTEXT, MoEAux, MoELayerSpec
from moe_core.specs.operands import ExpertWeights, SharedExpert
from moe_jax import InvalidInput, layers, linen, moe, nnx
from tests.support.flax import draw_tokens, draw_weights, linen_layer, nnx_layer, preset, stored_for_flax
from tests.support.jax import REAL_KERNELS, on_engines, program_text, running_on, weight_copies

NUM_LAYERS = 3
INDICES = np.arange(NUM_LAYERS, dtype=np.int32)
Run = Callable[[Any, jax.Array], jax.Array]


def everything() -> MoELayerSpec:
    """Biases, a correction bias, gated shared experts: all that a stack can hold."""
    spec = preset("qwen2_moe")
    experts = dataclasses.replace(spec.experts, bias=True)
    return dataclasses.replace(spec, experts=experts, router_bias=True, correction_bias=True)


def stack(spec: MoELayerSpec, **options: Any) -> nnx.MoE:
    return nnx_layer(
        [draw_weights(spec, seed=seed) for seed in range(NUM_LAYERS)], spec, num_layers=NUM_LAYERS, **options
    )


def scan_of_jax(stacked: nnx.MoE, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, index: (x + stacked(x, layer_index=index), None), x, INDICES)[0]


def scan_of_nnx(stacked: nnx.MoE, x: jax.Array) -> jax.Array:
    @flax_nnx.scan(in_axes=(None, flax_nnx.Carry, 0), out_axes=flax_nnx.Carry)
    def step(stacked: nnx.MoE, x: jax.Array, index: jax.Array) -> jax.Array:
        return x + stacked(x, layer_index=index)

    return step(stacked, x, jnp.asarray(INDICES))


class LinenModel(nn.Module):
    """The recipe of moe_jax.linen's docstring."""

    spec: MoELayerSpec

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        stacked = linen.MoE.from_spec(self.spec, num_layers=NUM_LAYERS, name="moe")
        step = nn.scan(
            lambda stacked, x, index: (x + stacked(x, layer_index=index), None),
            variable_broadcast=("params", linen.STATE),
            variable_axes={"intermediates": 0},
            split_rngs={"params": False},
        )
        return step(stacked, x, jnp.asarray(INDICES))[0]


def linen_stack(spec: MoELayerSpec) -> tuple[LinenModel, dict[str, Any]]:
    weights = [draw_weights(spec, seed=seed) for seed in range(NUM_LAYERS)]
    _, variables = linen_layer(weights, spec, num_layers=NUM_LAYERS)
    return LinenModel(spec), {collection: {"moe": tree} for collection, tree in variables.items()}


@on_engines
def test_scan_over_a_stack_equals_a_loop_over_layers(engine: str) -> None:
    spec = everything()
    with running_on(engine):
        x = jnp.asarray(draw_tokens(spec, "float32", 2, 3))
        expected = x
        for seed in range(NUM_LAYERS):
            expected = expected + jax.jit(nnx.MoE.__call__)(nnx_layer(draw_weights(spec, seed=seed), spec), expected)
        model, variables = linen_stack(spec)
        results = {
            "jax.lax.scan": jax.jit(scan_of_jax)(stack(spec), x),
            "nnx.scan": jax.jit(scan_of_nnx)(stack(spec), x),
            "nn.scan": jax.jit(model.apply)(variables, x),
        }
    for name, result in results.items():
        np.testing.assert_array_equal(np.asarray(result), np.asarray(expected), err_msg=name)


def copies(compiled: str, stacked: nnx.MoE) -> list[str]:
    """Instructions that make an array as large as a matrix or bias of the (shared) experts, of one layer or of all."""
    held: dict[str, Any] = stacked.parameters()
    experts = ExpertWeights(
        held["wi_0"], held["wo"], held["wi_1"], held["wi_0_bias"], held["wi_1_bias"], held["wo_bias"]
    )
    own = held["shared_experts"]
    shared = SharedExpert(own["wi_0"]["kernel"], own["wo"]["kernel"], own["wi_1"]["kernel"])
    return weight_copies(compiled, experts) + weight_copies(compiled, shared)  # type: ignore[arg-type]


def test_a_shared_stack_must_have_the_layers_of_the_experts() -> None:
    spec = everything()
    stacked = stored_for_flax(draw_weights(spec), spec)
    experts = jax.tree.map(lambda array: jnp.stack([array] * NUM_LAYERS), stacked.experts)
    experts = dataclasses.replace(experts, layer_index=jnp.zeros(1, jnp.int32))
    shared = jax.tree.map(lambda array: jnp.stack([array] * 2), stacked.shared)
    message = rf"shared\.gate_up must be \[{NUM_LAYERS}, 48, width\], got \(2, 48, 40\)"
    with running_on("reference"), pytest.raises(InvalidInput, match=message):
        moe(jnp.ones((3, 48)), experts, stacked.router, spec.moe_spec(MAXTEXT), shared=shared)


@pytest.mark.parametrize("run", [scan_of_jax, scan_of_nnx, None], ids=["jax", "nnx", "linen"])
def test_a_scan_over_a_stack_copies_no_weight(run: Run | None) -> None:
    """Programs of other engines name other plans, and are the same otherwise."""
    spec = everything()
    with running_on(REAL_KERNELS):
        model, variables = linen_stack(spec)
        stacked, x = stack(spec), jnp.asarray(draw_tokens(spec, "float32", 7))
        program = jax.jit(model.apply).lower(variables, x) if run is None else jax.jit(run).lower(stacked, x)
        compiled = program_text(program)
        assert 'custom_call_target="moebius_plan"' in compiled
        assert copies(compiled, stacked) == []


def test_what_the_docstrings_say_about_copies() -> None:
    """Plain nnx.jit copies what it gives back; a compute dtype other than the stored one costs one layer's copy."""
    spec = everything()
    with running_on("reference"):
        stacked, x = stack(spec), jnp.asarray(draw_tokens(spec, "float32", 7))
        lean = flax_nnx.jit(scan_of_jax, graph_updates=False)
        assert copies(program_text(lean.lower(stacked, x)), stacked) == []
        assert copies(program_text(flax_nnx.jit(scan_of_jax).lower(stacked, x)), stacked)
        casting = stack(spec, dtype=jnp.bfloat16)
        compiled = program_text(jax.jit(lambda stacked, x: stacked(x, layer_index=1)).lower(casting, x))
        matrix = casting.wi_0.get_value().shape[1:]
        assert f"bf16[{','.join(map(str, matrix))}]" in compiled, "one layer is cut out and cast"
        assert f"bf16[{','.join(map(str, (NUM_LAYERS, *matrix)))}]" not in compiled, "never all of them"


def test_a_stack_computed_in_another_dtype() -> None:
    spec = everything()
    with running_on("reference"):
        x = jnp.asarray(draw_tokens(spec, "float32", 5))
        alone = nnx_layer(draw_weights(spec, seed=1), spec, dtype=jnp.bfloat16)(x)
        np.testing.assert_array_equal(stack(spec, dtype=jnp.bfloat16)(x, layer_index=1), alone)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["in place", "cast"])
@pytest.mark.parametrize("kind", [int, np.int32, np.int64, np.asarray, jnp.asarray])
def test_a_known_index_outside_a_stack_is_refused(kind: Callable[[int], Any], dtype: Any) -> None:
    spec = preset("mixtral")
    with running_on("reference"):
        stacked, x = stack(spec, dtype=dtype), jnp.asarray(X)
        for index in (NUM_LAYERS, 7, -1):
            with pytest.raises(InvalidInput, match=rf"layer_index must be in \[0, 3\), got {index}"):
                stacked(x, layer_index=kind(index))
        wide = 2**32 + 1  # its lower half names a layer
        with pytest.raises(InvalidInput, match=rf"layer_index must be in \[0, 3\), got {wide}"):
            stacked(x, layer_index=np.asarray(wide))
        np.testing.assert_array_equal(stacked(x, layer_index=kind(1)), stacked(x, layer_index=1))


@pytest.mark.parametrize(("engine", "dtype"), [("reference", jnp.bfloat16), (REAL_KERNELS, None)])
def test_a_traced_index_outside_a_stack_gives_nan(engine: str, dtype: Any) -> None:
    """Whether the matrices are cut out and cast, or read in place by the kernels."""
    spec = everything()
    with running_on(engine):
        stacked, x = stack(spec, dtype=dtype), jnp.asarray(draw_tokens(spec, "float32", 5))
        run = jax.jit(lambda stacked, x, index: stacked(x, layer_index=index))
        for index in (-1, NUM_LAYERS, 7):
            y = run(stacked, x, index)
            assert y.dtype == (dtype or x.dtype) and np.isnan(np.asarray(y, np.float32)).all(), index
        np.testing.assert_array_equal(
            run(stacked, x, 2), jax.jit(lambda stacked, x: stacked(x, layer_index=2))(stacked, x)
        )


def test_linen_sows_every_layer_of_a_scan() -> None:
    spec = everything()
    with running_on("reference"):
        model, variables = linen_stack(spec)
        x = jnp.asarray(draw_tokens(spec, "float32", 2, 3))
        _, sown = jax.jit(functools.partial(model.apply, mutable=["intermediates"]))(variables, x)
        (aux,) = sown["intermediates"]["moe"]["moe_aux"]
        assert aux.tokens_per_expert.shape == (NUM_LAYERS, spec.num_experts)
        assert aux.load_balance_loss.shape == (NUM_LAYERS,)
        assert (aux.tokens_per_expert.sum(axis=1) == 6 * spec.top_k).all()


def test_linen_sows_what_return_aux_gives() -> None:
    spec = preset("deepseek_v3")
    with running_on("reference"):
        layer, variables = linen_layer(draw_weights(spec), spec)
        x = jnp.asarray(draw_tokens(spec, "float32", 4))
        run = jax.jit(functools.partial(layer.apply, mutable=["intermediates"]), static_argnames="return_aux")
        y, sown = run(variables, x)
        (aux,) = sown["intermediates"]["moe_aux"]
        (again, wanted), _ = run(variables, x, return_aux=True)
        np.testing.assert_array_equal(y, again)
        jax.tree.map(np.testing.assert_array_equal, aux, wanted)
        fresh = jax.jit(layer.init)(jax.random.key(0), x)
        assert set(fresh) == {"params", linen.STATE}, "nothing is sown while parameters are made"
        assert np.asarray(layer.apply(fresh, x)).any(), "boxed parameters work as they are"


@pytest.mark.parametrize(("policy", "calls"), [((), 2), (("mlpwo",), 1), (("moe_mlpwo",), 1), (("mlpwi_0",), 2)])
def test_remat_policies_know_the_output_by_maxtexts_names(policy: tuple[str, ...], calls: int) -> None:
    """Derivatives of what follows the layer need its output: saved under its name, or computed again."""
    spec = preset("mixtral")
    saves = jax.checkpoint_policies.save_only_these_names(*policy)
    with running_on("reference"):
        layer, x = nnx_layer(draw_weights(spec), spec), jnp.asarray(draw_tokens(spec, "float32", 3))

        @functools.partial(jax.checkpoint, policy=saves)
        def block(scale: jax.Array, layer: nnx.MoE, x: jax.Array) -> jax.Array:
            return jnp.sin(layer(x) * scale).sum()

        frozen = jax.lax.stop_gradient((layer, x))
        gradient = jax.value_and_grad(lambda scale: block(scale, *frozen))
        program = str(jax.make_jaxpr(gradient)(jnp.float32(2)))
        assert program.count("moebius_call[") == calls
        assert np.isfinite(jax.jit(gradient)(jnp.float32(2))[1])


X = np.ones((2, 3, 48), np.float32)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        pytest.param((X[..., :40],), {}, r"x must be \[\.\.\., 48\] \(d_model\), got \(2, 3, 40\)", id="width"),
        pytest.param((np.float32(1),), {}, r"x must be a jax.Array, got float32", id="no array"),
        pytest.param((X.astype(np.int32),), {}, r"x must be bfloat16 or float16 or float32, got int32", id="tokens"),
        pytest.param((X.astype(np.float64),), {}, r"x must have a dtype that JAX keeps, got float64", id="float64"),
        pytest.param((X,), {"gate_inputs": X.astype(np.float64)}, r"gate_inputs must have a dtype that JAX keeps",
            id="float64 of the router"),
        pytest.param((X,), {"token_mask": np.ones(6, bool)},
            r"token_mask must be bool\[2, 3\], one for each token of x, got bool\[6\]", id="mask"),
        pytest.param((X,), {"layer_index": 0}, r"layer_index must be given with a stack of layers and only then, got 0",
            id="no stack"),
    ],
)  # fmt: skip
def test_wrong_calls_are_refused(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    spec = preset("mixtral")
    with running_on("reference"), pytest.raises(InvalidInput, match=message):
        nnx_layer(draw_weights(spec), spec)(*arguments, **options)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (None, r"got None with a stack of layers"),
        (NUM_LAYERS, r"layer_index must be in \[0, 3\), got 3"),
        (-1, r"layer_index must be in \[0, 3\), got -1"),
        (np.zeros(2, np.int32), r"layer_index must be one integer, got int32\[2\]"),
        (np.float32(1), r"layer_index must be one integer, got float32\[\]"),
    ],
)
def test_wrong_layers_of_a_stack_are_refused(layer: Any, message: str) -> None:
    spec = preset("mixtral")
    with running_on("reference"), pytest.raises(InvalidInput, match=message):
        stack(spec)(jnp.asarray(X), layer_index=layer)


def test_aux_has_its_fields() -> None:
    spec = preset("mixtral")
    with running_on("reference"):
        layer = nnx_layer(draw_weights(spec), spec)
        aux = jax.jit(lambda x: layer(x, return_aux=True)[1])(X)
    assert isinstance(aux, MoEAux) and aux.ids.shape == (6, 2) and layers.MoEAux is MoEAux
