"""MaxText's trees: every form of them is read, and what is written is read by MaxText's layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flax", reason="the trees are made by flax")

import flax.linen as nn
import jax
import orbax.checkpoint
from flax import nnx as flax_nnx
from flax.core import freeze

from moe_core import InvalidInput, Unsupported
from moe_core.checkpoint import from_maxtext, open_checkpoint, to_maxtext
from moe_core.layers import HUGGING_FACE, MAXTEXT, ExpertsSpec, LayerWeights, MoELayerSpec, Storage
from moe_core.parity.tolerance import assert_close
from moe_core.specs.matmul import Activation
from moe_jax import layers as jax_layers
from moe_jax import linen, nnx
from tests.support.flax import (
    CONFIGS,
    assert_same_bits,
    draw_weights,
    nnx_layer,
    preset,
)
from tests.support.jax import ENGINES, running_on
from tests.support.layers import tolerances

DTYPES = ("bfloat16", "float32")
UNGATED = MoELayerSpec(16, 12, 4, 2, experts=ExpertsSpec(Activation("relu2"), bias=True))


def paths_of(tree: Any) -> dict[str, np.ndarray]:
    flat, _ = jax.tree.flatten_with_path(tree)
    return {"/".join(key.key for key in path): np.asarray(array) for path, array in flat}


@pytest.mark.parametrize("storage", [HUGGING_FACE, MAXTEXT, Storage("in_out", "interleaved", "in_out")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*CONFIGS, "ungated"])
def test_there_and_back(name, dtype, storage):
    spec = UNGATED if name == "ungated" else preset(name)
    weights = draw_weights(spec, dtype, storage=storage)
    tree = to_maxtext(weights)
    assert_same_bits(from_maxtext(tree, spec, storage=MAXTEXT), weights)
    # The names and shapes are those of the layers of moe_jax, which keep a correction bias apart from a bias.
    expected = {"/".join(leaf.path): leaf.shape for leaf in jax_layers.leaves(spec)}
    found = {path: array.shape for path, array in paths_of(tree).items()}
    if spec.correction_bias:
        expected["gate/bias"] = expected.pop("gate/correction_bias")
    assert found == expected
    if storage == MAXTEXT:
        assert all(
            any(np.shares_memory(array, own) for own in weights.named().values()) for array in paths_of(tree).values()
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_the_parameters_of_a_flax_layer_are_such_a_tree(name):
    spec, weights = preset(name), draw_weights(preset(name))
    assert_same_bits(from_maxtext(nnx_layer(weights, spec).parameters(), spec, storage=MAXTEXT), weights)
    if spec.d_model not in (spec.d_ff, spec.num_experts):
        assert_same_bits(from_maxtext(nnx_layer(weights, spec).parameters(), spec), weights)


def test_a_layer_of_a_scan_and_the_nesting_of_deepseek():
    spec = preset("deepseek_v3")
    every = [draw_weights(spec, "bfloat16", seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays, axis=1), *(to_maxtext(one) for one in every))
    shared = stacked.pop("shared_experts")
    block = {"MoeBlock_0": stacked, "shared_experts": shared}
    for number, weights in enumerate(every):
        assert_same_bits(from_maxtext(block, spec, storage=MAXTEXT, layer=number), weights)
    with pytest.raises(InvalidInput, match=r"gate/kernel must have more than 3 layers along axis 1, got \(48, 3, 8\)"):
        from_maxtext(block, spec, layer=3)


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
def test_square_weights_are_never_guessed(layout):
    square = Storage(layout, "separate", layout)
    for spec, message in (
        (MoELayerSpec(16, 16, 4, 2), r"where d_model = d_ff, got None for experts.gate_up \[4, 16, 16\]"),
        (MoELayerSpec(16, 12, 16, 2), r"where d_model = num_experts, got None for router.weight \[16, 16\]"),
    ):
        spec = spec.stored_as(square) if "num_experts" in message else spec
        weights = draw_weights(spec.stored_as(square), storage=square)
        tree = {"gate": {"kernel": weights.router.weight}, "wi_0": weights.experts.gate_up}
        tree |= {"wi_1": weights.experts.up, "wo": weights.experts.down}
        with pytest.raises(InvalidInput, match=f"storage must be given {message}"):
            from_maxtext(tree, spec)
        assert_same_bits(from_maxtext(tree, spec, storage=square), weights)


def test_other_refusals():
    spec = dataclasses.replace(preset("gpt_oss"), d_ff=24)
    tree = to_maxtext(draw_weights(spec))
    with pytest.raises(InvalidInput, match="got one that lacks wi_1"):
        from_maxtext({name: value for name, value in tree.items() if name != "wi_1"}, spec)
    with pytest.raises(InvalidInput, match="got one that also has wi_2"):
        from_maxtext(tree | {"wi_2": tree["wi_1"]}, spec)
    with pytest.raises(InvalidInput, match="arrays of tree must have the sizes of spec"):
        from_maxtext(tree, dataclasses.replace(spec, d_ff=20))
    with pytest.raises(InvalidInput, match=r"storage.gate_layout must be 'separate'.*got 'halves'"):
        from_maxtext(tree, spec, storage=HUGGING_FACE)
    with pytest.raises(InvalidInput, match="tree must be a Mapping"):
        from_maxtext([tree], spec)
    both = dataclasses.replace(spec, correction_bias=True)
    with pytest.raises(Unsupported, match="one name for them, got both"):
        to_maxtext(draw_weights(both))
    with pytest.raises(InvalidInput, match="lacks gate/correction_bias"):
        from_maxtext(tree, both)
    parameters = nnx_layer(draw_weights(both), both).parameters()
    assert_same_bits(from_maxtext(parameters, both), draw_weights(both))


def test_shapes_are_checked_against_the_told_storage():
    spec = preset("mixtral")
    with pytest.raises(InvalidInput, match="by the layouts of spec"):
        from_maxtext(to_maxtext(draw_weights(spec)), spec, storage=Storage("out_in", "separate", "in_out"))


needs_judge = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("torch", "transformers")), reason="the judge needs torch and transformers"
)


def _in_flax(layer: nnx.MoE, engine: str, calls: list[Any]) -> Callable[[Any], Any]:
    """The forward of a transformers MoE block, computed by a Flax layer."""
    import torch

    def forward(hidden: Any, *_: Any, **__: Any) -> Any:
        with running_on(engine):
            y = np.asarray(layer(jax.numpy.asarray(hidden.numpy())))
        calls.append((hidden, y))
        return torch.tensor(y)

    return forward


@needs_judge
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_checkpoint_of_transformers_gives_the_same_logits_through_flax(tmp_path: Path, family: str, engine: str):
    import torch

    from tools.sweep import models

    model, ids = models.build(family), torch.arange(24).view(2, 12) % 16
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    with torch.no_grad():
        expected = model(ids).logits
    for number in checkpoint.moe_layers:
        weights = LayerWeights.from_checkpoint(checkpoint.layer(number))
        spec, block, calls = weights.layer_spec().stored_as(MAXTEXT), model.model.layers[number].mlp, []
        own = block.forward
        block.forward = _in_flax(nnx_layer(weights, spec), engine, calls)
        kept = block.forward

        def returning_alike(hidden: Any, kept: Any = kept, own: Any = own) -> Any:
            theirs = own(hidden)
            return (kept(hidden), *theirs[1:]) if isinstance(theirs, tuple) else kept(hidden)

        block.forward = returning_alike
        with torch.no_grad():
            found = model(ids).logits
            theirs = own(calls[0][0])
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        assert_close(calls[0][1], theirs.numpy(), tolerances(spec, "float32")["output"], f"layer {number}")
    torch.testing.assert_close(found, expected)


Tree = dict[str, Any]


def prefused(tree: Tree) -> Tree:
    """As MaxText's prefuse_moe_weights stores experts: biases and shared experts stay apart."""
    rest = {name: array for name, array in tree.items() if name not in ("wi_0", "wi_1")}
    return rest | {"wi": np.concatenate([tree["wi_0"], tree["wi_1"]], -1)}


def boxed(tree: Tree) -> Tree:
    """As `nn.with_logical_partitioning` makes parameters."""
    return jax.tree.map(lambda array: nn.LogicallyPartitioned(array, ("axis",) * array.ndim), tree)


def in_state(tree: Tree) -> Any:
    return flax_nnx.State(jax.tree.map(flax_nnx.Param, tree))


def below_value(tree: Tree) -> Tree:
    return jax.tree.map(lambda array: {"value": array}, tree)


def nested(tree: Tree) -> Tree:
    """As MaxText's RoutedAndSharedMoE is."""
    return {"MoeBlock_0": {key: value for key, value in tree.items() if key != "shared_experts"}} | (
        {"shared_experts": tree["shared_experts"]} if "shared_experts" in tree else {}
    )


FORMS: dict[str, Callable[[Tree], Any]] = {
    "prefused": prefused,
    "boxed": boxed,
    "state": in_state,
    "value": below_value,
    "frozen": lambda tree: freeze(boxed(tree)),
    "all of it": lambda tree: below_value(nested(prefused(tree))),
    "boxed and prefused": lambda tree: boxed(prefused(tree)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe"])
def test_forms_are_read_and_written_back(name: str, form: str) -> None:
    spec = preset(name)
    weights, others = draw_weights(spec, "bfloat16"), draw_weights(spec, "bfloat16", seed=1)
    tree = FORMS[form](to_maxtext(weights))
    assert_same_bits(from_maxtext(tree, spec, storage=MAXTEXT), weights)
    back = to_maxtext(others, like=tree)
    assert type(back) is type(tree) and jax.tree.structure(back) == jax.tree.structure(tree)
    assert_same_bits(from_maxtext(back, spec, storage=MAXTEXT), others)
    # A layer takes what was read, whatever it was read from.
    layer = nnx_layer(from_maxtext(tree, spec, storage=MAXTEXT), spec, param_dtype="bfloat16")
    exported = layer.export_weights()
    assert not isinstance(exported, list)
    assert_same_bits(exported, weights)


def test_a_layer_of_a_prefused_scan() -> None:
    spec = preset("gpt_oss")
    every = [draw_weights(spec, seed=seed) for seed in range(2)]
    trees = [prefused(to_maxtext(one)) for one in every]
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays, axis=1), *trees)
    for number, weights in enumerate(every):
        assert_same_bits(from_maxtext(stacked, spec, storage=MAXTEXT, layer=number), weights)


def test_trees_of_our_layers_are_read_and_written_back() -> None:
    """Boxed as Linen's init makes them, fused as gate_layout="halves" stores them, and with both biases of a router."""
    spec = dataclasses.replace(preset("deepseek_v3"), router_bias=True)
    weights = draw_weights(spec)
    for gate_layout in ("separate", "halves"):
        experts = dataclasses.replace(spec.experts, gate_layout=gate_layout)
        module = linen.MoE.from_spec(dataclasses.replace(spec, experts=experts))
        variables = module.init(jax.random.key(0), np.zeros((2, spec.d_model), np.float32))
        gate = variables["params"]["gate"] | variables[linen.STATE]["gate"]
        tree = variables["params"] | {"gate": gate}
        back = to_maxtext(weights, like=tree)
        assert jax.tree.structure(back) == jax.tree.structure(tree)
        assert_same_bits(from_maxtext(back, spec, storage=MAXTEXT), weights)


def test_orbax_restores_boxes_as_value_keys(tmp_path) -> None:
    spec, weights = preset("mixtral"), draw_weights(preset("mixtral"))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", boxed(prefused(to_maxtext(weights))))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "tree")
    assert set(restored["wi"]) == {"value"}
    assert_same_bits(from_maxtext(restored, spec, storage=MAXTEXT), weights)


def test_other_trees_are_refused() -> None:
    spec, weights = preset("mixtral"), draw_weights(preset("mixtral"))
    tree = prefused(to_maxtext(weights))
    with pytest.raises(InvalidInput, match=r"like must hold .* got one that lacks gate/bias"):
        to_maxtext(draw_weights(preset("gpt_oss")), like=to_maxtext(weights))
    with pytest.raises(InvalidInput, match=r"wo of like must be \[4, 40, 48\] as weights have it, got \[4, 40, 49\]"):
        to_maxtext(weights, like=tree | {"wo": np.zeros((4, 40, 49))})
    interleaved = dataclasses.replace(spec, experts=dataclasses.replace(spec.experts, gate_layout="interleaved"))
    with pytest.raises(InvalidInput, match=r"got one that lacks wi_0, wi_1"):
        from_maxtext(tree, interleaved, storage=MAXTEXT)
    with pytest.raises(InvalidInput, match=r"arrays of tree must have the sizes of spec, got experts.gate_up"):
        from_maxtext(tree | {"wi": tree["wi"][..., :-1]}, spec)
