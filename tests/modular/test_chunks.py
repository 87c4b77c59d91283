"""Chunks of a batch get the tiles of the whole: asked for with the very products that the whole computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import QuantizedSpec, quantized_specs
from moe_core.modular import weights as core_weights
from moe_core.modular.schemes import activation_quantization, weight_quantization
from moe_core.modular.types import ProblemSize
from moe_core.modular.weights import tuning_of_whole
from moe_core.ops.matmul import forward as matmul_ogs
from moe_core.ops.moe import forward as moe
from moe_core.specs import Activation, MoESpec
from moe_core.specs.operands import ExpertWeights, TopK
from moe_torch import modular
from moe_torch.modular import FusedMoEModularKernel, FusedMoEQuantConfig, MoEPrepareAndFinalizeNoEP
from tests.support.torch import REAL_KERNELS, require_equal, running_on

E, K, F, TOPK = 4, 256, 128, 2
make = FusedMoEQuantConfig.make
CONFIGURATIONS = {
    "plain": make(),
    "fp8_block": make(use_fp8_w8a8=True, block_shape=[128, 128]),
    "fp8_token": make(use_fp8_w8a8=True, per_act_token_quant=True),
    "int8_token": make(use_int8_w8a8=True, per_act_token_quant=True),
    "mxfp4_w4a4": make(use_mxfp4_w4a4=True),
    "mxfp4_w4a16": FusedMoEQuantConfig("mxfp4_w4a16"),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What tiles are chosen for, as they are: problems but for row weights."""
    requests, choose = [], matmul_ogs.choose_tile

    def note(problem: Any, *name: str) -> Any:
        operands = dataclasses.replace(problem.operands, row_weight=None)
        requests.append(dataclasses.replace(problem, operands=operands))
        return choose(problem, *name)

    for module in (moe, matmul_ogs, core_weights):
        monkeypatch.setattr(module, "choose_tile", note)
    return requests


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("tokens", [64, 4096])
def test_tiles_are_chosen_for_the_products_of_the_composed_plan(name: str, tokens: int, asked: list[Any]) -> None:
    """On a GPU, in every format: operands, output dtype and activation decide what is legal, and what is fast."""
    config, target = CONFIGURATIONS[name], Target("cuda", 90, 132)
    x, format, activations = ArraySpec((tokens, K), "bfloat16"), weight_quantization(config), None
    weights = [ArraySpec(shape, "bfloat16") for shape in ((E, 2 * F, K), (E, K, F))]
    if format is not None:
        weights = [quantized_specs(QuantizedSpec(format, "out_in"), weight.shape) for weight in weights]
        activations = activation_quantization(config)
    experts, spec = (
        ExpertWeights(*weights),
        MoESpec(Activation("silu"), weight_layout="out_in", activations=activations),
    )
    routing = TopK(*[ArraySpec((tokens, TOPK), dtype) for dtype in ("int32", "float32")])
    # The plan may be known, which then asks for nothing.
    moe.plan_moe.__wrapped__(x, experts, routing, spec, target)
    expected = asked[:2]
    asked.clear()
    products = modular.TritonExperts(config).products("silu")
    tuning = tuning_of_whole(x, experts, ProblemSize(E, tokens, 2 * F, K, TOPK), products, target, activations)
    assert asked == expected
    assert tuning is not None and tuning.matmul_1 is not None and tuning.matmul_2 is not None


def test_tiles_are_chosen_for_the_products_of_single_stages(asked: list[Any]) -> None:
    """Experts whose stages are open ask for products without an activation; chunks of theirs are bitwise the whole."""
    arrays = {f"w{number}_scale": torch.rand(E, rows, 1) for number, rows in ((1, 2 * F), (2, K))}
    config = make(use_fp8_w8a8=True, per_act_token_quant=True, **arrays)
    random = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(E, generator=random)[:TOPK] for _ in range(24)]).int()
    x, weights = torch.randn(24, K, generator=random).bfloat16(), torch.rand(24, TOPK, generator=random)
    w1, w2 = (torch.randn(shape, generator=random).to(torch.float8_e4m3fn) for shape in ((E, 2 * F, K), (E, K, F)))
    with running_on(REAL_KERNELS) as device, torch.no_grad():
        arguments = [tensor.to(device) for tensor in (x, w1, w2, weights, ids)]
        config = dataclasses.replace(config, **{name: scale.to(device) for name, scale in arrays.items()})
        experts = modular.UnfusedOAITritonExperts(config, weight_layout="out_in")
        whole, chunked = (
            FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), experts, chunk_size=size) for size in (None, 16)
        )
        found = whole(*arguments)
        expected = asked[:2]
        asked.clear()
        require_equal(chunked(*arguments), found, "chunks")
        assert asked[:2] == expected
