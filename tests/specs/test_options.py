"""Options of specs: flags, tiles, limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moe_core import InvalidInput, Unsupported
from moe_core.base import codec
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.activation.forward import plan_activation
from moe_core.plan.steps import Scalar
from moe_core.specs import Activation, LayoutSpec, LogitsSpec, MatmulSpec, MoESpec, RouterSpec, TileConfig


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RouterSpec(2, renormalize="no"), "renormalize must be True or False, got 'no'"),
        (lambda: RouterSpec(2, renormalize=1), "renormalize must be True or False, got 1"),
        (lambda: RouterSpec(2, scale="abc"), "scale must be finite, got 'abc'; pass a finite number"),
        (lambda: RouterSpec(2, scale=None), "scale must be finite, got None"),
        (lambda: RouterSpec(2, scale=float("nan")), "scale must be finite, got nan"),
        (lambda: RouterSpec(2, order=""), "order must be one of softmax_then_topk, .*got ''"),
        (lambda: RouterSpec(2, "sigmoid", order="softmax_then_topk"), "order must be None for scoring='sigmoid'"),
        (lambda: RouterSpec(2, "sigmoid", epsilon=0.1), r"epsilon must be 0, or above 0 with renormalize .*got 0\.1"),
        (lambda: RouterSpec(2, renormalize=True, epsilon=0.1), "epsilon must be 0, .* got 0.1 with 'softmax'"),
        (lambda: RouterSpec(2, softcap=0), r"softcap must be above 0, got 0\.0"),
        (lambda: RouterSpec(2, logit_scale=-1), r"logit_scale must be above 0, got -1\.0"),
        (lambda: RouterSpec(2, bias_on="score"), "bias_on must be one of scores, logits, got 'score'"),
        (lambda: RouterSpec(2, group_score="sum"), "group_score must be one of best, pair, got 'sum'"),
        (lambda: RouterSpec(0), "top_k must be an integer of at least 1, got 0"),
        (lambda: RouterSpec(2, num_groups=2, topk_group=3), "topk_group must be at most num_groups = 2, got 3"),
        (lambda: Activation("swiglu_oai", alpha=float("inf")), "alpha must be finite, got inf"),
        (lambda: Activation("silu", gated=1), "gated must be True or False, got 1"),
        (lambda: Activation("swiglu_oai", gated=False), "gated must be True for swiglu_oai, got False"),
        (lambda: MatmulSpec("in_out", out_dtype="int8"), "out_dtype must be one of bfloat16, float16, float32, got"),
        (lambda: Activation("silu", False, "interleaved"), "gate_layout must be None where gated=False"),
        (lambda: LogitsSpec(allow_tf32="yes"), "allow_tf32 must be True or False, got 'yes'"),
        (lambda: MatmulSpec("in_out", allow_tf32="no"), "allow_tf32 must be True or False, got 'no'"),
        (lambda: MatmulSpec("in_out", activation="silu"), "activation must be an Activation or None, got str"),
        (lambda: MoESpec("silu"), "activation must be an Activation, got str"),
        (lambda: MoESpec(Activation("silu"), router=4), "router must be a RouterSpec or None, got int"),
        (lambda: LayoutSpec(2**30, 4, 8), r"must stay below 2\*\*31, got 1073741824 \* 4; split the batch"),
        (lambda: ArraySpec((2, 3), "float32", (3,)), "strides must have one entry per axis"),
        (lambda: ArraySpec((-2, 3), "float32"), "shape must have no negative size"),
    ],
)
def test_bad_options(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


def test_equal_options_are_one_spec() -> None:
    """Plans are cached by spec: what compares equal must also plan equal."""
    assert str(RouterSpec(2, scale=-0.0).scale) == "0.0"
    assert RouterSpec(2, scale=np.float32(2.5)) == RouterSpec(2, scale=2.5)
    assert Activation("swigluoai", gate_layout="interleaved") == Activation("swiglu_oai", gate_layout="interleaved")
    assert Activation("silu", gated=False).gate_layout is None


def test_what_an_activation_is_not_told() -> None:
    """A stated limit is one, whatever the default of another activation is."""
    assert Activation("silu").limit is None and Activation("silu", limit=7.0).limit == 7.0
    assert Activation("silu", limit=None) == Activation("silu") != Activation("silu", limit=7.0)
    assert Activation("swiglu_oai") == Activation("swiglu_oai", alpha=1.702, limit=7.0)
    assert Activation("swiglu_oai", limit=None).limit is None
    assert Activation("softcapped_silu") == Activation("softcapped_silu", alpha=4, limit=25)
    for one in (Activation("silu", limit=7.0), Activation("clamped_silu"), Activation("swiglu_oai", limit=None)):
        assert codec.loads(codec.dumps(one)) == one
        assert dataclasses.replace(one, gate_layout="separate").limit == one.limit


def test_gates_of_shared_experts_lie_as_others() -> None:
    spec = MoESpec(Activation("silu"), shared_activation=Activation("gelu")).with_gate_layout("interleaved")
    assert spec.shared_activation is not None
    assert (spec.activation.gate_layout, spec.shared_activation.gate_layout) == ("interleaved", "interleaved")


def test_what_a_tile_is_not_told() -> None:
    assert TileConfig(16, 32, 64) == TileConfig(16, 32, 64, num_warps=4, num_stages=3, group_m=8, family="portable")


FLAGS = {
    MoESpec: ("fast_accumulate", "recompute", "main_grad", "apply_router_weight_on_input", "allow_tf32"),
    MatmulSpec: ("fast_accumulate", "allow_tf32"),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FLAGS.items() for name in names])
@pytest.mark.parametrize("value", [1, "no", None])
def test_other_values_are_refused(kind: Any, name: str, value: object) -> None:
    first: Any = Activation("silu") if kind is MoESpec else "in_out"
    options: dict[str, Any] = {name: value}
    with pytest.raises(InvalidInput, match=f"{name} must be True or False, got {value!r}"):
        kind(first, **options)


def test_counts_beyond_32_bits_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"must fit into 32 bits, got 2147483648; split the batch"):
        Scalar(2**31)
    with pytest.raises(Unsupported, match="32 bits"):
        plan_activation(ArraySpec((2**31, 2), "bfloat16"), Activation("silu"), Target("cuda", 90, 132))
    with pytest.raises(Unsupported, match="would need a grid"):
        plan_activation(ArraySpec((1, 2**28), "bfloat16"), Activation("silu"), Target("cuda", 90, 132))
