"""gpt-oss experts from a file in the published mxfp4 layout compute what transformers computes of the same file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="transformers computes in torch")

import moe_torch
from moe_core.checkpoint import MoELayer, open_checkpoint
from moe_core.formats import MXFP4, QuantizedTensor
from moe_core.ops.router.reference import router
from moe_core.ops.routing.reference import route
from moe_core.parity.tolerance import Tolerance, assert_close, stage_tolerances
from moe_core.specs.operands import TopK
from tests.support.checkpoint_files import write
from tests.support.quantized.files import MXFP4 as MXFP4_CONFIG
from tests.support.quantized.files import E, mxfp4_layer, quantized_config
from tests.support.torch import ENGINES, running_on, to_numpy, to_torch

D, F, T = 64, 96, 12
EXPERTS = "model.layers.0.mlp.experts."


def theirs(tensors: dict[str, np.ndarray], x: np.ndarray, routing: TopK) -> np.ndarray:
    """The output of transformers' experts in fp32, their weights made of the file's tensors by transformers itself."""
    from transformers import GptOssConfig
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    module = GptOssExperts(GptOssConfig(num_local_experts=E, hidden_size=D, intermediate_size=F))
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales = (torch.from_numpy(tensors[f"{EXPERTS}{name}_{part}"]) for part in ("blocks", "scales"))
            getattr(module, name).copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            bias = tensors[f"{EXPERTS}{name}_bias"].astype(np.float32)
            getattr(module, f"{name}_bias").copy_(torch.from_numpy(bias))
        ids, weights = torch.from_numpy(routing.ids).long(), torch.from_numpy(routing.weights)
        return module(torch.from_numpy(x), ids, weights).numpy()


@dataclasses.dataclass(frozen=True)
class Published:
    """One layer as it is read, its input and routing, transformers' output of it, and how close ours must come."""

    layer: MoELayer
    x: np.ndarray
    routing: TopK
    expected: np.ndarray
    tolerance: Tolerance


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    directory: Path = tmp_path_factory.mktemp("gpt_oss")
    tensors = mxfp4_layer(D, F)
    layer = open_checkpoint(write(directory, quantized_config("gpt_oss", MXFP4_CONFIG, D, F), {0: tensors})).layer(0)
    for weight in (layer.experts.gate_up, layer.experts.down):
        assert isinstance(weight, QuantizedTensor) and weight.format == MXFP4
    x = np.random.default_rng(2).standard_normal((T, D)).astype(np.float32)
    rule = layer.spec.router
    assert rule is not None
    logits = router(x, layer.router.weight, layer.router.bias, spec=layer.spec.logits_spec())
    ids, weights = route(logits, spec=rule)
    routing = TopK(ids, weights)
    sizes = {"d_model": D, "d_ff": F, "top_k": rule.require_top_k(), "num_experts": E}
    tolerances = stage_tolerances(layer.spec, "float32", **sizes, routed_from="ids", weights_format=MXFP4)
    return Published(layer, x, routing, theirs(tensors, x, routing), tolerances["output"])


def arguments(published: Published) -> tuple[Any, ...]:
    """x, experts, routing and spec of a forward from given ids, biases in fp32 like x."""
    experts = published.layer.experts
    biases = {name: getattr(experts, name).astype(np.float32) for name in ("gate_up_bias", "down_bias")}
    spec = dataclasses.replace(published.layer.spec, router=None)
    return published.x, dataclasses.replace(experts, **biases), published.routing, spec


@pytest.mark.parametrize("engine", ENGINES)
def test_torch(published: Published, engine: str) -> None:
    x, experts, routing, spec = arguments(published)
    with running_on(engine) as device, torch.no_grad():
        ours = moe_torch.moe(*(to_torch(value, device) for value in (x, experts, routing)), spec).output
    assert_close(to_numpy(ours), published.expected, published.tolerance, f"gpt-oss experts, torch on {engine}")


@pytest.mark.parametrize("engine", ENGINES)
def test_jax(published: Published, engine: str) -> None:
    pytest.importorskip("jax")
    import moe_jax
    from tests.support import jax as jax_support

    x, experts, routing, spec = arguments(published)
    with jax_support.running_on(engine):
        ours = moe_jax.moe(*map(jax_support.to_jax, (x, experts, routing)), spec).output
    assert_close(np.asarray(ours), published.expected, published.tolerance, f"gpt-oss experts, JAX on {engine}")
