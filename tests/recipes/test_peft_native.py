"""PEFT's adapters of experts on our ops: PEFT's numbers, gradients, files and errors, without whole weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_torch import InvalidInput, MoE, SharedExpertsSpec, Unsupported
from moe_torch.transformers import use
from tests.support.families import tiny

peft = pytest.importorskip("peft", reason="needs peft (pip install 'moebius[recipes]')")

from peft.tuners.lora import layer as theirs

import moe_torch.peft

#: PEFT reads a name of transformers that will go, and overlooks parameters when it checks patterns.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.*:FutureWarning", "ignore:The following alpha_pattern keys:RuntimeWarning"
)
BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
FAMILIES = ("gpt_oss", "qwen3_moe", "mixtral")


def config(rank: int = 3, alpha: float = 8, targets: tuple[str, ...] = BOTH, **options: Any) -> Any:
    options = {"init_lora_weights": False, "target_modules": [], **options}
    return peft.LoraConfig(r=rank, lora_alpha=alpha, target_parameters=list(targets), **options)


def adapted(family: str = "qwen3_moe", *configs: Any) -> Any:
    """A model with adapters `default`, `b`, `c` on our ops' experts, which PEFT still wraps."""
    torch.manual_seed(0)
    model = tiny(family)
    use(model)
    first, *others = configs or (config(),)
    model = peft.get_peft_model(model, first)
    for name, other in zip("bc", others, strict=False):
        model.add_adapter(name, other)
    return model


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    with moe_torch.cpu_engine("reference"):
        yield


def step(model: Any, tokens: int = 10) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradients of whatever has one."""
    model.zero_grad()
    y = model(torch.arange(tokens).view(2, -1) % 50).logits
    if y.requires_grad:
        y.square().sum().backward()
    return y.detach(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@contextlib.contextmanager
def no_whole_weight(model: Any) -> Iterator[None]:
    """Fail if PEFT computes a weight, or if a call keeps a tensor of its size for the backward."""
    weights = [one for name, one in model.named_parameters() if "experts" in name and "lora_" not in name]
    shapes, known = {tuple(sorted(one.shape)) for one in weights}, {one.data_ptr() for one in weights}

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.ndim < 3 or tuple(sorted(tensor.shape)) not in shapes or tensor.data_ptr() in known, tensor.shape
        return tensor

    def refused(*arguments: Any) -> None:
        raise AssertionError("PEFT computes a whole weight")

    with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(kept, lambda one: one):
        patch.setattr(theirs.ParamWrapper, "_activate_lora", refused)
        yield


def assert_same(found: Any, wanted: Any, label: str = "") -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5, msg=f"{label} logits")
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        tolerance = 1e-5 * float(gradient.abs().max()) + 1e-7
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=tolerance, msg=f"{label} {name}")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", [BOTH, BOTH[:1], BOTH[1:]], ids=["both", "gate_up", "down"])
def test_numbers_and_gradients_are_pefts(family: str, targets: tuple[str, ...]) -> None:
    """Ranks 1, 3 and 5, several adapters at once, and scales by pattern."""
    patterns = {"use_rslora": True, "alpha_pattern": {"experts.down_proj": 5.0}}
    model = adapted(family, config(3, 8, targets), config(5, 5, targets, **patterns), config(1, 0, targets))
    for active in ("default", "b", ["default", "b"], ["c", "b"]):
        model.base_model.set_adapter(active)
        wanted = step(model)
        assert wanted[1]
        with moe_torch.peft.native(model), no_whole_weight(model):
            assert_same(step(model), wanted, f"{active}")
        with pytest.raises(AssertionError, match="PEFT computes a whole weight"), no_whole_weight(model):
            step(model)


def test_adapters_are_switched_merged_and_saved_as_pefts(tmp_path: Path) -> None:
    model, plain = adapted("gpt_oss", config(), config(20)), adapted("gpt_oss", config(), config(20))
    native = moe_torch.peft.native(model)
    assert native.wrappers == 2 * model.config.num_hidden_layers
    base = step(model.base_model.model.__class__(model.config))[0].shape
    for label, change in {
        "default": lambda one: None,
        "switched": lambda one: one.set_adapter("b"),
        "merged": lambda one: one.merge_adapter(),
        "scaled": lambda one: [part.set_scale("b", 3.0) for part in one.modules() if hasattr(part, "set_scale")],
        "added": lambda one: (torch.manual_seed(5), one.add_adapter("new", config(5)), one.set_adapter("new")),
        "deleted": lambda one: (one.set_adapter("default"), one.delete_adapter("new")),
    }.items():
        for one in (model, plain):
            change(one)
        found, wanted = step(model), step(plain)
        assert found[0].shape == base
        assert_same(found, wanted, label)
        with model.disable_adapter(), plain.disable_adapter(), torch.no_grad():
            ids = torch.arange(6)[None]
            assert torch.equal(model(ids).logits, plain(ids).logits), "both are the base model, bit for bit"
    for name, one in (("native", model), ("plain", plain)):
        one.save_pretrained(tmp_path / name)
    for path in sorted((tmp_path / "plain").rglob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / "native" / path.relative_to(tmp_path / "plain")).read_bytes()
    torch.manual_seed(0)
    fresh = tiny("gpt_oss")
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "native", is_trainable=True)
    use(again)
    assert_same(step(again), step(plain), "loaded")
    assert_same(step(model.merge_and_unload()), step(plain.merge_and_unload()), "merged and unloaded")


def test_checkpointing_autocast_and_use_after_adapters() -> None:
    model = adapted("mixtral")
    wanted = step(model)
    use(model)  # of a model with adapters
    assert {type(one) for one in model.modules() if isinstance(one, theirs.ParamWrapper)} == {
        moe_torch.peft.ParamWrapper
    }
    with no_whole_weight(model):
        assert_same(step(model), wanted)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        assert_same(step(model), wanted, "checkpointed")
        model.gradient_checkpointing_disable()
    model.base_model.model.set_experts_implementation("eager")
    assert_same(step(model), wanted, "transformers' experts again")
    use(model)
    with torch.autocast("cpu", torch.bfloat16):
        y, gradients = step(model)
    assert gradients.keys() == wanted[1].keys()
    torch.testing.assert_close(y.float(), wanted[0], rtol=0.1, atol=0.05)


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_few_tokens_and_ids_of_no_expert(family: str, tokens: int) -> None:
    model = adapted(family)
    wrapper = next(one for name, one in model.named_modules() if name.endswith("layers.0.mlp.experts"))
    experts, width = wrapper.num_experts, model.config.hidden_size
    x = torch.randn(tokens + 3 if tokens else 0, width, requires_grad=True)
    # All to one expert, ids of no expert, and one token twice to the same.
    ids = torch.tensor([[1, 1], [experts, 0], [experts, experts], [1, 1]])[: len(x)]
    weights = torch.rand(len(x), 2, requires_grad=True)
    results = []
    for native in (False, True):
        with moe_torch.peft.native(model) if native else contextlib.nullcontext():
            y = wrapper(x, ids, weights)
            factors = [one for name, one in wrapper.named_parameters() if "lora_" in name]
            results.append((y, torch.autograd.grad(y.square().sum(), [x, weights, *factors])))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=5e-5)
    assert len(x) == 0 or not results[1][0][2].any()


def test_bf16_is_nearer_to_float64_than_whole_weights() -> None:
    """PEFT rounds W + s B A to bf16; ours adds the products."""
    model = adapted("qwen3_moe", config(8, 2))
    exact = step(model.double())[0]
    model.bfloat16()
    errors = []
    for native in (False, True):
        with moe_torch.peft.native(model) if native else contextlib.nullcontext():
            errors.append(float((step(model)[0].double() - exact).norm() / exact.norm()))
    assert errors[1] < 1.1 * errors[0], errors


PARTS = ("router.weight", "shared_experts.gate_up", "shared_experts.down", "shared_experts.gate")


def test_adapters_of_the_router_and_of_shared_experts() -> None:
    """Of a layer and of a model, beside the experts': PEFT's numbers and gradients, and its merge."""
    shared = torch.nn.Sequential(MoE(16, 8, 4, 2, shared_experts=SharedExpertsSpec(8, True)))
    layer = peft.get_peft_model(shared, config(targets=("0.experts.gate_up", *(f"0.{name}" for name in PARTS))))
    x, found = torch.randn(9, 16), []
    for native in (False, True):
        layer.zero_grad()
        with moe_torch.peft.native(layer) if native else contextlib.nullcontext():
            y = layer(x)
            y.square().sum().backward()
        named = layer.named_parameters()
        found.append((y.detach(), {name: one.grad.clone() for name, one in named if one.grad is not None}))
    assert_same(*found, "layer")
    assert len(found[0][1]) == 10 and all(one.any() for one in found[0][1].values())
    torch.testing.assert_close(layer.merge_and_unload()(x), found[0][0], rtol=1e-4, atol=1e-5)
    options = {"target_modules": ["shared_expert.gate_proj", "shared_expert.down_proj"]}
    model = peft.get_peft_model(tiny("qwen2_moe"), config(targets=(*BOTH, "mlp.gate.weight"), **options))
    wanted = step(model)
    use(model)
    assert_same(step(model), wanted, "model")
    assert {"gate", "down_proj", "gate_proj"} <= {name.split(".lora_")[0].split(".")[-1] for name in wanted[1]}


def test_what_falls_back_says_so() -> None:
    model = adapted("gpt_oss", config(targets=("mlp.experts.down_proj", "mlp.experts.down_proj_bias")))
    wanted = step(model)
    moe_torch.peft.native(model)
    with pytest.warns(UserWarning, match="because down_proj_bias is no matrix of experts; leave it out"):
        assert_same(step(model), wanted)
    model = adapted("qwen3_moe")
    wanted = step(model)
    moe_torch.peft.native(model)
    inner = next(one for name, one in model.named_modules() if name.endswith("layers.0.mlp.experts.base_layer"))
    handle = inner.register_forward_hook(lambda *arguments: None)
    with pytest.warns(UserWarning, match="the wrapper of gate_up_proj has hooks; put them on the experts"):
        assert_same(step(model), wanted)
    handle.remove()


def test_refusals() -> None:
    with pytest.raises(InvalidInput, match="model must have adapters of experts' parameters, got none"):
        moe_torch.peft.native(tiny("qwen3_moe"))
    plain = peft.get_peft_model(tiny("qwen3_moe"), config())
    with pytest.raises(
        Unsupported, match=r"must run on Moebius, got .*Qwen3MoeExperts; call moe_torch.transformers.use"
    ):
        moe_torch.peft.native(plain)
    model = adapted()
    moe_torch.peft.native(model)
    with pytest.raises(Unsupported, match=r"init_lora_weights must leave .* got 'pissa'"):
        model.add_adapter("pissa", config(init_lora_weights="pissa"))
    with pytest.raises(ValueError, match=r"does not work with use_dora=True|variants like DoRA"):
        adapted("qwen3_moe", config(use_dora=True))
    with pytest.raises(ValueError, match="does not support mixed adapter batches"):
        adapted_model = adapted("qwen3_moe", config(), config())
        moe_torch.peft.native(adapted_model)
        adapted_model.eval()(torch.arange(4).view(2, 2), adapter_names=["default", "b"])
    trained = adapted()
    for option in ("recompute", "main_grad"):
        use(trained, **{option: True})
        with pytest.raises(Unsupported, match=f"low-rank factors need experts without {option}"):
            step(trained)
    model = peft.get_peft_model(torch.nn.Sequential(MoE(8, 8, 2, 1)), config(targets=("experts.down",)))
    model.base_model.model[0].experts.base_layer.exchange = object()
    for _ in range(2):
        with pytest.raises(Unsupported, match="experts on several ranks take no adapters of PEFT"):
            model(torch.zeros(1, 8))
        moe_torch.peft.native(model)


def test_experts_that_peft_trains_whole() -> None:
    """`modules_to_save` wraps them, and PEFT's wrapper has their attributes."""
    model = peft.get_peft_model(
        tiny("qwen3_moe"), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["experts"])
    )
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "modules_to_save" in name:
                one.mul_(2)
    wanted = step(model)
    assert len(use(model).modules) == 2 * model.config.num_hidden_layers
    torch.testing.assert_close(step(model), wanted, rtol=1e-4, atol=1e-4)
