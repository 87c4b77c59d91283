"""Plain forwards of a layer take its arrays from where modules keep them, in the operator's order."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_core.formats import scheme_named
from moe_torch.layers import calls
from tests.support.torch import require_equal

D_MODEL = 64
SIZES = D_MODEL, 64, 5, 2
torch.manual_seed(0)
X = torch.randn(9, D_MODEL)

pytestmark = pytest.mark.usefixtures("reference_engine_of_torch")


def make(kind: str) -> Any:
    """A layer of a kind; together they keep arrays in all the places where modules do."""
    shared, experts = moe_torch.SharedExpertsSpec(16), moe_torch.ExpertsSpec
    quantized = experts(bias=True, scheme=scheme_named("mxfp4_w4a16"))
    router: dict[str, Any] = {"router_bias": True, "correction_bias": True}
    made = {
        "biases": lambda: moe_torch.MoE(*SIZES, experts=experts(bias=True, gate_layout="separate")),
        "shared experts": lambda: moe_torch.MoE(*SIZES, shared_experts=shared),
        "correction bias": lambda: moe_torch.MoE.from_spec(moe_torch.MoELayerSpec(*SIZES, **router)),
        "quantised, with biases": lambda: moe_torch.MoE(*SIZES, experts=quantized, shared_experts=shared),
    }
    return made[kind]()


@pytest.mark.parametrize("kind", ["biases", "shared experts", "correction bias", "quantised, with biases"])
def test_a_layer_gives_all_its_arrays_in_order(kind: str) -> None:
    layer = make(kind)
    x = torch.zeros(3, D_MODEL)
    found, arrays = calls.tensors_of(layer, x), layer._arrays(layer._modules)
    assert found is not None and found[0] is x and layer._held_places[0] == 0
    assert [id(arrays[place]) for place in layer._held_places[1:]] == [id(tensor) for tensor in found[1:]]
    assert sum(array is not None for array in arrays) == len(found) - 1
    # One place for two arrays would not go unnoticed.
    assert len({id(tensor) for tensor in found}) == len(found) == len(set(layer._held_places))


def test_layers_with_the_same_options_and_other_arrays() -> None:
    plain = moe_torch.MoE(*SIZES).requires_grad_(False)
    biased = moe_torch.MoE.from_spec(moe_torch.MoELayerSpec(*SIZES, router_bias=True)).requires_grad_(False)
    torch.nn.init.normal_(biased.router.bias)
    assert plain._options == biased._options
    for _ in range(3):
        for layer in (plain, biased):
            require_equal(layer(X), layer(X, return_aux=True)[0], "beside the other")


def test_arrays_that_modules_keep_elsewhere_are_read_at_each_call() -> None:
    layer = moe_torch.MoE(*SIZES).requires_grad_(False)
    expected = layer(X)
    require_equal(layer(X), expected, "seen")
    down = layer.experts.down
    del layer.experts.down
    layer.experts.down = 2 * down
    assert calls.tensors_of(layer, X) is None
    require_equal(layer(X), 2 * expected, "a plain attribute")
    del layer.experts.down
    layer.experts.down = torch.nn.Parameter(4 * down, requires_grad=False)
    require_equal(layer(X), 4 * expected, "a parameter again")
    swapped = torch.func.functional_call(layer, {"experts.down": 8 * down}, (X,))
    require_equal(swapped, 8 * expected, "functional_call")
    require_equal(layer(X), 4 * expected, "as it was")
