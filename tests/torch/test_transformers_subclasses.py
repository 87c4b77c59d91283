"""Experts with weights in tensor subclasses: torchao's run on their own bytes, others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import moe_torch.transformers
from moe_core.errors import InvalidInput, Unsupported
from moe_torch import MoE
from moe_torch.transformers.experts import ExpertsOptions
from tests.support.torch import on_engines, running_on
from tools.sweep import models


def _class(name: str, module: str = "torchao.quantization") -> Any:
    """A wrapper like torchao's, which runs no operator."""

    def new(cls: Any, qdata: Any, scale: Any, dtype: Any, **others: Any) -> Any:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=dtype, device=qdata.device)
        wrapper.__dict__.update(qdata=qdata, scale=scale, **others)
        return wrapper

    def refuse(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            raise NotImplementedError(f"{name} dispatch: {func}")
        return args[0]

    body = {"__new__": new, "__torch_dispatch__": classmethod(refuse), "__module__": module}
    return type(name, (torch.Tensor,), body)


def quantise(model: Any, kind: Any, dtype: Any = torch.int8, **others: Any) -> dict[str, Any]:
    """Put `kind` in the place of all experts' weights; return what they stand for."""
    plain = {}
    for path, experts in model.named_modules():
        for name in ("gate_up_proj", "down_proj") if hasattr(experts, "is_transposed") else ():
            weight = getattr(experts, name).detach()
            scale = weight.abs().amax(-1, keepdim=True) / 100
            values = (weight / scale).round().to(dtype)
            setattr(experts, name, torch.nn.Parameter(kind(values, scale, weight.dtype, **others), requires_grad=False))
            plain[f"{path}.{name}"] = values.float() * scale
    return plain


def tokens(device: Any) -> Any:
    return (torch.arange(24, device=device).reshape(2, 12) * 5 + 1) % 32


@on_engines
@pytest.mark.parametrize(("name", "dtype"), [("Int8Tensor", torch.int8), ("Float8Tensor", torch.float8_e4m3fn)])
def test_torchao_weights_run_as_their_values(engine: str, name: str, dtype: Any) -> None:
    with running_on(engine) as device, torch.no_grad():
        model, other = models.build("qwen3_moe").to(device), models.build("qwen3_moe").to(device)
        plain = quantise(model, _class(name), dtype, zero_point=torch.zeros(1, device=device), act_quant_kwargs=None)
        other.load_state_dict(plain, strict=False)
        for one in (model, other):
            moe_torch.transformers.use(one)
        torch.testing.assert_close(model(tokens(device)).logits, other(tokens(device)).logits, rtol=1e-3, atol=1e-4)
        x, routing = torch.randn(6, models.D, device=device), torch.ones(6, models.K, device=device)
        experts = model.model.layers[0].mlp.experts
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            assert experts(x, routing.int(), routing).dtype == torch.bfloat16
        with pytest.raises(Unsupported, match="has frozen quantised weights, and no main_grad"):
            moe_torch.transformers.use(model, main_grad=True)
        model.model.layers[0].mlp.experts.moebius_options = ExpertsOptions(main_grad=True)
        with pytest.raises(Unsupported, match="has frozen quantised weights, and no main_grad"):
            model(tokens(device))
        with pytest.raises(Unsupported, match=rf"must be a plain tensor, got torchao\.quantization\.{name}; leave it"):
            MoE.from_block(model.model.layers[0].mlp)


@pytest.mark.parametrize(
    ("kind", "others", "message"),
    [
        (_class("Int4Tensor"), {}, r"in torchao\.quantization\.Int4Tensor, not torchao's int8 or float8 weights alone"),
        (_class("Params4bit", "bitsandbytes.nn"), {}, r"in bitsandbytes\.nn\.Params4bit, not torchao's int8"),
        (_class("Int8Tensor", "elsewhere"), {}, r"in elsewhere\.Int8Tensor, not"),
        (_class("Int8Tensor"), {"act_quant_kwargs": object()}, "Int8Tensor with act_quant_kwargs, not"),
        (_class("Int8Tensor"), {"act_pre_scale": torch.ones(1)}, "Int8Tensor with act_pre_scale, not"),
        (_class("Int8Tensor"), {"zero_point": torch.ones(1)}, "Int8Tensor with zero_point, not"),
        (_class("Float8Tensor"), {}, "Float8Tensor, not"),
        (_class("Int8Tensor"), {"scale": torch.ones(1)}, r"has scales \[1\] of gate_up_proj, not \[8, 48, 1\]"),
    ],
)
def test_other_subclasses_are_refused_by_name(kind: Any, others: dict[str, Any], message: str) -> None:
    model = models.build("qwen3_moe")
    quantise(model, kind, **{name: value for name, value in others.items() if name != "scale"})
    for experts in model.modules():
        if "scale" in others and hasattr(experts, "is_transposed"):
            experts.gate_up_proj.scale = others["scale"]
    with pytest.raises(Unsupported, match=message):
        moe_torch.transformers.use(model)


def test_one_quantised_matrix_and_transposed_ones_are_refused() -> None:
    model = models.build("qwen3_moe")
    down = model.model.layers[0].mlp.experts.down_proj
    quantise(model, _class("Int8Tensor"))
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    aligned = weight.qdata
    weight.qdata = torch.zeros(weight.numel() + 1, dtype=torch.int8)[1:].view(weight.shape)
    with pytest.raises(InvalidInput, match="gate_up_proj must start at a multiple of 16 bytes"):
        moe_torch.transformers.use(model)
    weight.qdata = aligned
    model.model.layers[0].mlp.experts.down_proj = down
    with pytest.raises(Unsupported, match="has down_proj as a plain tensor beside a quantised one; quantise both"):
        moe_torch.transformers.use(model)
    model = models.build("gpt_oss")
    quantise(model, _class("Int8Tensor"))
    with pytest.raises(Unsupported, match="has quantised weights that are transposed or have a bias"):
        moe_torch.transformers.use(model)


@pytest.mark.parametrize("in_stages", [False, True])
def test_layers_and_ops_name_a_quantised_router(in_stages: bool) -> None:
    """torchao's `quantize_` takes every Linear, and a layer's router is one."""
    layer = moe_torch.MoE.from_spec(moe_torch.MoELayerSpec(32, 48, 8, 2, expert_scale=in_stages))
    weight = layer.router.weight.detach()
    layer.router.weight = torch.nn.Parameter(_class("Int8Tensor")(weight, weight, weight.dtype), requires_grad=False)
    message = r"weight must be a plain tensor, got torchao\.quantization\.Int8Tensor; leave it out"
    for call in (lambda: layer(torch.randn(3, 32)), layer.export_weights):
        with pytest.raises(Unsupported, match=message):
            call()
