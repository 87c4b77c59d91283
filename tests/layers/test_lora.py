"""Options of adapters: shapes of their slots, scales, and adapters that do not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from moe_core import InvalidInput, Unsupported
from moe_core.formats import scheme_named
from moe_core.layers import ExpertsSpec, LoRA, MoELayerSpec, SharedExpertsSpec
from moe_core.layers.around import OutputSpec
from moe_core.layers.lora import TARGETS
from moe_core.specs import Activation, MoESpec
from moe_core.specs.norm import NormSpec
from moe_core.specs.operands import LoRAFactors


def layer(**options: Any) -> MoELayerSpec:
    return MoELayerSpec(d_model=8, d_ff=6, num_experts=4, top_k=2, **options)


def factors(rank: int = 3, **changed: tuple[int, ...] | None) -> LoRAFactors:
    shapes = {"a1": (4, 8, rank), "b1": (4, rank, 12), "a2": (4, 6, rank), "b2": (4, rank, 8)} | changed
    return LoRAFactors(**{name: np.zeros(shape) for name, shape in shapes.items() if shape is not None})


def test_slots_and_scales() -> None:
    lora = LoRA(rank=3, alpha=6, slots=2, max_rank=17)
    shapes = {"a1": (2, 4, 8, 32), "b1": (2, 4, 32, 12), "a2": (2, 4, 6, 32), "b2": (2, 4, 32, 8)}
    assert lora.shapes(layer()) == shapes and lora.rank_of(factors(), shapes, 4) == 3
    assert LoRA(1, targets=("down",), shared=True).shapes(layer()) == {"a2": (1, 1, 6, 16), "b2": (1, 1, 16, 8)}
    every, shared = LoRA(1, targets=tuple(TARGETS)), layer(shared_experts=SharedExpertsSpec(5))
    beyond = {"a_router": (8, 16), "b_router": (16, 4), "a1_shared": (8, 16), "b1_shared": (16, 10)}
    beyond |= {"a2_shared": (5, 16), "b2_shared": (16, 8)}
    assert every.shapes(shared).items() >= {name: (1, 1, *sides) for name, sides in beyond.items()}.items()
    with pytest.raises(InvalidInput, match="targets must be of a layer with shared experts"):
        every.require_layer(layer())
    assert (lora.scale(3), lora.scale(12), LoRA(4).scale(4)) == (2, 0.5, 1)
    assert LoRA(4, alpha=6, rslora=True).scale(4) == 3
    half = np.float32(0.5)
    assert type(LoRA(4, alpha=half).scale(4)) is float, "layers hold, and plans name, numbers of Python"
    assert (
        type(LoRA(4, dropout=half).dropout)
        is type(MoESpec(Activation("silu"), lora_dropout=half).lora_dropout)
        is float
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be"),
        ({"slots": 0}, "slots must be"),
        ({"max_rank": 3}, "max_rank must be"),
        ({"targets": ()}, "targets must be"),
        ({"targets": ("down", "down")}, "targets must be"),
        ({"dropout": 1.0}, "dropout must be"),
        ({"shared": 1}, "shared must be"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        LoRA(**dict[str, Any](rank=4) | options)


def test_adapters_that_do_not_fit() -> None:
    lora = LoRA(rank=3)
    shapes = lora.shapes(layer())
    for wrong, message in (
        (LoRAFactors(), "factors must be pairs"),
        (factors(b1=None), "factors must be pairs"),
        (factors(b2=(4, 3, 9)), "factors.b2 must be"),
        (factors(a1=(1, 8, 3)), "factors.a1 must be"),
        (factors(rank=4), "factors.a1 must be"),
        (dataclasses.replace(factors(), scale=np.ones(1)), r"factors.scale must be \[4\], one for each expert, got"),
    ):
        with pytest.raises(InvalidInput, match=message):
            lora.rank_of(wrong, shapes, 4)
    assert lora.rank_of(factors(rank=2, a1=None, b1=None), shapes, 4) == 2
    with pytest.raises(InvalidInput, match="factors must be pairs"):
        lora.rank_of(factors(), LoRA(rank=3, targets=("down",)).shapes(layer()), 4)
    with pytest.raises(InvalidInput, match="slot must be"):
        lora.require_slot(1)
    with pytest.raises(InvalidInput, match="rank must be"):
        lora.require_rank(4)
    assert lora.require_rank(1) == 1
    normed = layer(output=OutputSpec(NormSpec(), "experts"))
    for spec in (normed, layer(experts=ExpertsSpec(scheme=scheme_named("fp8_channel")))):
        with pytest.raises(Unsupported, match="lora must be None"):
            lora.require_layer(spec)
        LoRA(3, targets=("router",)).require_layer(spec)
    lora.require_layer(layer(expert_scale=True))
