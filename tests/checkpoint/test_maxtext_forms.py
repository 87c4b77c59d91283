"""The forms of MaxText trees: fused gate and up, boxes of Linen, variables of NNX, `value` keys; both ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moe_core import InvalidInput
from moe_core.checkpoint import from_maxtext, to_maxtext
from moe_core.layers import MAXTEXT

pytest.importorskip("flax", reason="the trees are made by flax")

import flax.linen as nn
import jax
import orbax.checkpoint
from flax import nnx as flax_nnx
from flax.core import freeze

from moe_jax import linen
from tests.support.flax import assert_same_bits, draw_weights, nnx_layer, preset

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
