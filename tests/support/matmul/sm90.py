"""Cases and configurations of the sm90 family."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from hypothesis import strategies as st

from moe_core.base.arrays import ArraySpec
from moe_core.specs import Activation, MatmulSpec, MoESpec, RouterSpec, TileConfig, Tuning
from moe_core.specs.operands import ExpertWeights, RouterLogits
from tests.support.harness import H200, engine_target
from tests.support.matmul.cases import Case
from tests.support.strategies import ID_KINDS

SM_90 = H200


FIRST, SECOND = (TileConfig(128, width, 64, 4, 4, 8, "sm90") for width in (128, 256))


ACTIVATIONS = (
    None,
    Activation("silu"),
    Activation("gelu_tanh", gate_layout="separate"),
    Activation("relu2", gated=False),
    Activation("swiglu_oai", gate_layout="interleaved"),
    Activation("silu", limit=0.75),
    Activation("clamped_silu", gate_layout="separate", limit=0.75),
    Activation("softcapped_silu", gate_layout="interleaved", alpha=1.5, limit=2.0),
)


@functools.cache
def needs_sm_90() -> None:
    target = engine_target()
    if target.kind != "cuda" or target.arch != 90:
        pytest.skip(f"this kernel needs sm_90, this machine has {target}")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    spec = MatmulSpec(
        draw(st.sampled_from(["in_out", "out_in"])),
        draw(st.sampled_from(["row", "token", "slot"])),
        draw(st.sampled_from(["row", "slot"])),
        draw(st.sampled_from(ACTIVATIONS)),
    )
    return Case(
        num_tokens=draw(st.sampled_from([0, 1, 3, 70, 200, 700])),
        top_k=draw(st.sampled_from([1, 2, 3])),
        num_experts=draw(st.sampled_from([1, 3, 8])),
        d=draw(st.sampled_from([64, 192, 448])),
        n=draw(st.sampled_from([8, 72, 128, 264, 320])),
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        spec=spec,
        ids=draw(st.sampled_from(ID_KINDS)),
        alignment=draw(st.sampled_from([1, 8])),
        bias=draw(st.sampled_from([None, "float32", "same"])),
        row_weight=draw(st.booleans()),
        stacked=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )


def config_of(case: Case) -> TileConfig:
    gated = case.spec.activation is not None and case.spec.activation.gated
    return FIRST if gated else SECOND


def keeping(activation: Activation, n: int, *, weight_layout: str = "in_out", gather: str = "token", **options: Any):
    """A product whose pre-activation is kept: groups of whole row blocks and of few rows, narrow last column tiles."""
    spec = MatmulSpec(weight_layout, gather, "row", activation)
    given = {"num_tokens": 500, "top_k": 2, "num_experts": 5, "d": 192, "dtype": "bfloat16", "ids": "some_absent"}
    return Case(**(given | {"n": n, "spec": spec, "bias": "float32"} | options))


KEEPING = {
    "halves": keeping(Activation("silu"), 264),
    "halves of one narrow tile": keeping(
        Activation("gelu_tanh"), 8, weight_layout="out_in", bias=None, ids="one_expert"
    ),
    "separate": keeping(
        Activation("silu", gate_layout="separate"), 200, weight_layout="out_in", dtype="float16", stacked=True
    ),
    "interleaved": keeping(Activation("swiglu_oai", gate_layout="interleaved"), 72, bias="same", gather="slot"),
    "interleaved, stacked": keeping(
        Activation("gelu_tanh", gate_layout="interleaved"), 192, weight_layout="out_in", dtype="float16", stacked=True
    ),
    "ungated": keeping(Activation("relu2", gated=False), 328, stacked=True, alignment=8),
    "ungated, by row": keeping(Activation("gelu_tanh", gated=False), 136, gather="row", bias=None),
}


def tall(config: TileConfig) -> TileConfig:
    return dataclasses.replace(config, block_m=192, num_stages=3)


def swapped(case: Case) -> TileConfig:
    """Rows, row weights and lists of rows of x leave room for three stages."""
    full = case.spec.gather != "row" and case.row_weight
    return dataclasses.replace(config_of(case), block_m=160, num_stages=3 if full else 4, group_m=4)


def moe_arguments(gate_layout: str = "halves", heights: tuple[int, int] = (192, 192), tokens: int = 512) -> Any:
    """x, experts, routing and spec of a layer whose products have row blocks of 128, 160 (swapped) or 192 rows."""
    width, up = (192, ArraySpec((8, 256, 192), "bfloat16")) if gate_layout == "separate" else (384, None)
    biases = {"gate_up_bias": ArraySpec((8, width), "float32"), "down_bias": ArraySpec((8, 256), "float32")}
    down = ArraySpec((8, 192, 256), "bfloat16")
    if up is not None:
        biases["up_bias"] = ArraySpec((8, 192), "float32")
    experts = ExpertWeights(ArraySpec((8, 256, width), "bfloat16"), down, up, **biases)
    tiles = [TileConfig(rows, n, 64, 4, 4, 4, "sm90") for rows, n in zip(heights, (128, 256), strict=True)]
    tuning = Tuning(*(tall(tile) if tile.block_m == 192 else tile for tile in tiles))
    spec = MoESpec(Activation("silu", gate_layout=gate_layout), RouterSpec(2), tuning=tuning)
    return ArraySpec((tokens, 256), "bfloat16"), experts, RouterLogits(ArraySpec((tokens, 8), "float32")), spec
