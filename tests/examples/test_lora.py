"""The LoRA example of JAX refuses layers of which it would leave something out, and those of the modular kernel agree.

That they run is shown by tests/docs/test_docs.py.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from moe_core.formats import scheme_named
from moe_core.layers import ExpertsSpec, MoELayerSpec, SharedExpertsSpec
from moe_core.specs.routing import RouterSpec
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
LEFT_OUT: list[tuple[str, dict[str, Any]]] = [
    ("router_bias", {"router_bias": True}),
    ("correction_bias", {"correction_bias": True}),
    ("shared_experts", {"shared_experts": SharedExpertsSpec(8)}),
    ("logits_dtype", {"logits_dtype": "bfloat16"}),
    ("capacity_factor", {"capacity_factor": 1.0}),
    ("apply_router_weight_on_input", {"top_k": 1, "apply_router_weight_on_input": True}),
    ("experts.bias", {"experts": ExpertsSpec(bias=True, gate_layout="halves")}),
    ("experts.gate_layout", {"experts": ExpertsSpec(gate_layout="interleaved")}),
    ("experts.scheme.activations", {"experts": ExpertsSpec(gate_layout="halves", scheme=scheme_named("fp8_channel"))}),
]
on_all = pytest.mark.parametrize(("name", "options"), [pytest.param(*one, id=one[0]) for one in LEFT_OUT])


def layer_spec(**options: Any) -> MoELayerSpec:
    given = {"top_k": 2, "experts": ExpertsSpec(gate_layout="halves"), "router": RouterSpec(renormalize=True)} | options
    return MoELayerSpec(d_model=8, d_ff=8, num_experts=4, **given)


@on_all
def test_jax(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    nnx = pytest.importorskip("flax.nnx", reason="needs Flax")
    pytest.importorskip("optax", reason="needs optax")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("lora_jax")

    def layer(**options: Any) -> Any:
        return nnx.eval_shape(lambda: example.MoE.from_spec(layer_spec(**options), rngs=nnx.Rngs(0)))

    example.refuse_what_is_left_out(layer())
    with pytest.raises(ValueError, match=f"ignore the layer's {name};"):
        example.forward(None, layer(**options), None)


def test_modular_kernels_train_alike_in_torch_and_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers in both: the first loss in all its digits, later ones but for what optimizers round."""
    pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("optax", reason="needs optax")
    from tests.support import jax as jax_support
    from tests.support import torch as torch_support

    monkeypatch.syspath_prepend(str(EXAMPLES))
    engine = "cuda" if torch_support.REAL_KERNELS == "cuda" else "reference"
    with torch_support.running_on(engine):
        ours = importlib.import_module("modular_lora_torch").train()
    with jax_support.running_on(engine):
        theirs = importlib.import_module("modular_lora_jax").train()
    assert ours[-1] < 0.5 * ours[0]
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
