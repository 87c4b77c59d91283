"""Every field of adapters' options on every route of a layer: it arrives, with the same bits of output."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
flax_nnx = pytest.importorskip("flax.nnx")

import jax.numpy as jnp

import moe_torch
from moe_core.layers import HUGGING_FACE, MAXTEXT, LoRA, MoELayerSpec, SharedExpertsSpec
from moe_core.layers.lora import TARGETS
from moe_core.layers.plans import layer_plans
from moe_core.plan import registry
from moe_core.runtime.cuda import cuda_available
from moe_core.specs.operands import map_arrays
from moe_jax import linen, nnx
from moe_jax.layers.functional import _planned_for
from moe_torch.bridge import operator
from moe_torch.bridge.arrays import target_of_device
from tools.fuzz.run_jax import to_jax, to_torch

SPEC, T = MoELayerSpec(32, 16, 4, 2, shared_experts=SharedExpertsSpec(8)), 9
#: Another value of each field, on adapters that show it.
FIELDS: dict[str, dict[str, Any]] = {
    "rank": {"rank": 5}, "alpha": {"alpha": 6.0}, "slots": {"slots": 2},
    "targets": {"targets": ("down", "router", "shared_gate_up", "shared_down")},
    "max_rank": {"max_rank": 20}, "rslora": {"rslora": True, "alpha": 6.0}, "dropout": {"dropout": 0.25},
    "shared": {"shared": True}, "dtype": {"dtype": torch.bfloat16},
}  # fmt: skip
pytestmark = pytest.mark.skipif(cuda_available(), reason="JAX would take the GPU; run it with CUDA_VISIBLE_DEVICES=")


@pytest.fixture(autouse=True)
def on_the_reference() -> Iterator[None]:
    with moe_torch.cpu_engine("reference"):
        yield


def adapted(options: LoRA) -> Any:
    layer = moe_torch.MoE.from_spec(SPEC)
    slots = layer.add_lora(options)
    for slot in range(options.slots):
        slots.reset(slot)
        for name, one in slots.present().items():
            rank = options.rank  # entries behind it do not travel
            used = one.data[slot, ..., :rank] if name[0] == "a" else one.data[slot, :, :rank]
            used.normal_()
    return layer


def in_torch(layer: Any, x: Any, ids: Any) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of evaluation, and of training with the masks of one seed."""
    with torch.no_grad():
        first = layer.eval()(x, adapter_ids=ids)
        torch.manual_seed(3)
        return first.numpy(), layer.train()(x, adapter_ids=ids).numpy()


def test_every_field_is_here() -> None:
    assert FIELDS.keys() == {field.name for field in dataclasses.fields(LoRA)}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field(field: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = LoRA(**{"rank": 4} | FIELDS[field])
    layer, x = adapted(options), torch.randn(T, SPEC.d_model)
    ids = (torch.arange(T) % (options.slots + 1) - 1).int()
    expected, saved = in_torch(layer, x, ids), io.BytesIO()
    assert (expected[0] != expected[1]).any() == (options.dropout > 0)
    files, loaded = pytest.importorskip("safetensors.torch"), moe_torch.MoE.from_spec(SPEC)
    loaded.add_lora(options)
    files.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    loaded.load_state_dict(files.load_file(tmp_path / "layer.safetensors"))
    torch.save(layer, saved)
    again = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
    for name, one in {"state": loaded, "deepcopy": copy.deepcopy(layer), "torch.save": again}.items():
        assert one.lora.options == options, name
        np.testing.assert_array_equal(in_torch(one, x, ids), expected, err_msg=name)
    adapters = [map_arrays(layer.lora.export(slot), to_jax) for slot in range(options.slots)]
    with pytest.warns(UserWarning, match="export_weights leaves out lora;"):
        weights = layer.export_weights()
    flax_layer = nnx.MoE.from_weights(weights)
    flax_layer.add_lora(options, rngs=flax_nnx.Rngs(0))
    module: Any = linen.MoE.from_spec(weights.layer_spec(), lora=options)
    variables = module.load_weights(weights) | module.init_lora(jax.random.key(0))
    for export in (flax_layer.export_weights, lambda: module.export_weights(variables)):
        with pytest.warns(UserWarning, match="export_weights leaves out lora;"):
            export()
    for slot, factors in enumerate(adapters):
        flax_layer.lora.load(slot, factors)
        variables = module.load_lora(variables, slot, factors)
    flax_layer.eval()
    merged: Any = flax_nnx.merge(*flax_nnx.split(flax_layer))
    for name, one in {"nnx": flax_layer, "clone": flax_nnx.clone(flax_layer), "merged": merged}.items():
        assert one.lora.options == options, name
        np.testing.assert_array_equal(one(to_jax(x), adapter_ids=to_jax(ids)), expected[0], err_msg=name)
    still = module.clone(lora=dataclasses.replace(module.lora, dropout=0.0))
    np.testing.assert_array_equal(still.apply(variables, to_jax(x), adapter_ids=to_jax(ids)), expected[0])
    for slot in range(options.slots):
        exported = module.export_lora(variables, slot), merged.lora.export(slot)
        loaded.lora.evict(slot)
        for one in exported:
            loaded.lora.load(slot, map_arrays(one, lambda array: to_torch(array, "cpu")))
    np.testing.assert_array_equal(in_torch(loaded, x, ids), expected, err_msg="and back")


@pytest.mark.parametrize("targets", [tuple(TARGETS), ("router",), ("down", "shared_down")])
def test_plans_of_a_layer_are_those_that_run(targets: tuple[str, ...]) -> None:
    spec = MoELayerSpec(40, 24, 4, 2, shared_experts=SharedExpertsSpec(8, gate=True))
    options, layer, ran = LoRA(4, targets=targets), moe_torch.MoE.from_spec(spec), []
    layer.add_lora(options)
    told = layer_plans(layer._operands_for(T), spec, HUGGING_FACE, target_of_device(torch.device("cpu")))[0]
    real = operator.prepare
    patched = mock.patch.object(operator, "prepare", lambda plan, index: ran.append(plan) or real(plan, index))
    with torch.no_grad(), patched:
        layer(torch.randn(T, 40))
    left = {plan.key: plan for plan in ran if plan not in told}
    assert ran and not left, "\n".join(plan.explain() for plan in left.values())
    explained = str(layer.explain(T))
    assert "matmul_ogs on" in explained and layer.warmup([T]).plans >= len(ran)
    of_jax = nnx.MoE.from_spec(spec, rngs=flax_nnx.Rngs(0))
    of_jax.add_lora(options, rngs=flax_nnx.Rngs(0))
    before = {*registry.registered_keys()}
    flax_nnx.grad(lambda layer, x: layer(x).sum(), argnums=(0, 1))(of_jax, jnp.ones((T, 40)))
    operands, target = _planned_for(spec, (T, 40), (None, jnp.float32), None, of_jax.parameters(), options)
    told = itertools.chain(*layer_plans(operands, spec, MAXTEXT, target, True))
    left = {*registry.registered_keys()} - before - {plan.key for plan in told}
    assert not left, "\n".join(registry.lookup(key).explain() for key in left)
