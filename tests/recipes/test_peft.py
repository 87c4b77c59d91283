"""LoRA by the real peft: adapters of the experts' parameters and of the router, trained, saved, loaded and merged."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_torch import ExpertsSpec, MoE, MoELayerSpec, NormSpec, RouterSpec, SharedExpertsSpec

peft = pytest.importorskip("peft", reason="needs peft (pip install 'moebius[recipes]')")

import moe_torch.peft

D, F, E, K = 16, 24, 4, 2


class Model(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(D, D)
        self.moe = MoE(D, F, E, K, shared_experts=SharedExpertsSpec(8, gate=True), **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(self.inner(x))


def train(model: Any, x: torch.Tensor, steps: int = 8) -> list[float]:
    """The loss of every step; every adapter has a gradient from the second step on."""
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    optimizer, losses = torch.optim.Adam(trained.values(), 1e-2), []
    target = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    for step in range(steps):
        loss = (model(x) - target).square().mean()
        loss.backward()
        if step:
            silent = [name for name, one in trained.items() if one.grad is None or not one.grad.any()]
            assert not silent, f"no gradient: {silent}"
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_experts_and_router(layout: str, native: bool, tmp_path: Path) -> None:
    options = {"experts": ExpertsSpec(weight_layout=layout)}
    model, x = Model(**options), torch.randn(10, D, generator=torch.Generator().manual_seed(1))
    y, before = model(x).detach(), {name: one.clone() for name, one in model.state_dict().items()}
    config = peft.LoraConfig(
        r=3,
        target_modules=["router"],
        target_parameters=["moe.experts.gate_up", "moe.experts.down", "moe.shared_experts.down"],
    )
    adapted = peft.get_peft_model(model, config)
    if native:
        assert moe_torch.peft.native(adapted).wrappers == 2
    torch.testing.assert_close(adapted(x), y, msg="new adapters change nothing")
    inner = adapted.base_model.model.moe.experts.base_layer
    assert (inner.in_features, inner.out_features) == (D, 2 * F), "the factors lie as the products do"

    losses = train(adapted, x)
    assert losses[-1] < 0.95 * losses[0]
    trained = adapted(x).detach()
    with adapted.disable_adapter():
        torch.testing.assert_close(adapted(x), y)
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(Model(**options), tmp_path)
    if native:
        moe_torch.peft.native(loaded)
    assert torch.equal(loaded(x), trained)

    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(x), trained)
    assert set(merged.state_dict()) == set(before), "names are those of the layer"
    changed = {name for name, one in merged.state_dict().items() if not torch.equal(one, before[name])}
    assert changed == {"moe.experts.gate_up", "moe.experts.down", "moe.router.weight", "moe.shared_experts.down"}


def test_on_the_weight_by_hand() -> None:
    """What an adapter computes: the layer on W + s B A, and the gradients of its factors."""
    model, x = Model(), torch.randn(10, D, generator=torch.Generator().manual_seed(1))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_parameters=["moe.experts.gate_up"]))
    wrapper = adapted.base_model.model.moe.experts
    torch.nn.init.normal_(wrapper.lora_B["default"].weight)
    twin = Model()
    delta = wrapper.get_delta_weight("default")
    weights = {"moe.experts.gate_up": twin.moe.experts.gate_up.detach() + delta}
    y = torch.func.functional_call(twin, weights, (x,))
    torch.testing.assert_close(adapted(x), y)
    factors = [wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight]
    found = torch.autograd.grad(adapted(x).square().sum(), factors)
    wanted = torch.autograd.grad(y.square().sum(), factors)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("gate_layout", ["halves", "interleaved", "separate"])
def test_our_ops_add_what_peft_adds(gate_layout: str) -> None:
    model = Model(experts=ExpertsSpec(bias=True, gate_layout=gate_layout))
    names = ["gate_up", "up", "down"] if gate_layout == "separate" else ["gate_up", "down"]
    config = peft.LoraConfig(r=3, target_parameters=[f"moe.experts.{name}" for name in names], init_lora_weights=False)
    adapted, x = peft.get_peft_model(model, config), torch.randn(10, D, requires_grad=True)
    results = []
    for native in (False, True):
        with moe_torch.peft.native(adapted) if native else contextlib.nullcontext():
            y = adapted(x)
            arrays = [x, *(one for one in adapted.parameters() if one.requires_grad)]
            results.append((y, torch.autograd.grad(y.square().sum(), arrays)))
    assert len(results[1][1]) == 1 + 2 * len(names)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_bfloat16_router_and_all_linear() -> None:
    """Logits stay fp32 behind an adapter, and `all-linear` finds the router."""
    model, x = Model(dtype=torch.bfloat16).bfloat16(), torch.randn(10, D).bfloat16()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    names = {name for name, one in adapted.named_modules() if type(one).__name__ == "Linear" and "lora" in repr(one)}
    assert any(name.endswith("moe.router") for name in names) and any(name.endswith("inner") for name in names)
    y, aux = adapted.base_model.model.moe(x, return_aux=True)
    assert y.dtype == torch.bfloat16 and aux.weights.dtype == torch.float32
    assert adapted.base_model.model.moe.router(x).dtype == torch.float32


def test_copies_that_peft_trains_whole(tmp_path: Path) -> None:
    """`modules_to_save`: the copy counts in every part of the layer, in exports and after the merge."""
    router, norm = RouterSpec(scoring="sigmoid"), NormSpec(1e-5)
    spec = MoELayerSpec(D, F, E, K, router, correction_bias=True, router_norm=norm, expert_scale=True)
    model, x = Model(), torch.randn(40, D, generator=torch.Generator().manual_seed(1))
    model.moe, config = MoE.from_spec(spec), peft.LoraConfig(target_modules=["inner"], modules_to_save=["router"])
    adapted = peft.get_peft_model(model, config)
    moe = adapted.base_model.model.moe
    copy = moe.router.modules_to_save["default"]
    _, aux = moe(model.inner(x), return_aux=True)
    moe.update_correction_bias(aux.tokens_per_expert, 5.0)
    adapted(x).square().sum().backward()
    assert all(bool(one.grad.any()) for one in copy.parameters()), "the scale of experts, too"
    with torch.no_grad():
        copy.expert_scale.mul_(torch.arange(1, E + 1))
    y = adapted(x).detach()
    torch.testing.assert_close(MoE.from_weights(moe.export_weights())(model.inner(x)), y)
    with adapted.disable_adapter():
        assert not torch.equal(adapted(x), y) and moe._parts()["router"] is moe.router.original_module
    torch.testing.assert_close(adapted.merge_and_unload()(x), y)


def test_an_export_names_adapters_that_it_leaves_out(recwarn: pytest.WarningsRecorder) -> None:
    config = peft.LoraConfig(target_modules=["router"], target_parameters=["moe.experts.down"], init_lora_weights=False)
    adapted = peft.get_peft_model(Model(), config)
    moe = adapted.base_model.model.moe
    with pytest.warns(UserWarning, match="leaves out PEFT's adapters of router, PEFT's adapters of experts; .* merged"):
        moe.export_weights()
    recwarn.clear()
    adapted.merge_adapter()
    x = torch.randn(5, D)
    torch.testing.assert_close(MoE.from_weights(moe.export_weights())(x), moe(x))
    adapted.unmerge_adapter()
    with adapted.disable_adapter():
        torch.testing.assert_close(MoE.from_weights(moe.export_weights())(x), moe(x))
    assert not recwarn.list
