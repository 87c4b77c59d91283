"""fp8 and mxfp4 checkpoints as `from_pretrained` loads them, with their experts on our quantised kernels.

transformers loads these formats on a GPU, and dequantises them elsewhere. So that the loading itself runs here too, its
checks for a GPU, and its download of kernels that Moebius replaces, are left out.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
pytest.importorskip("accelerate")

from transformers.integrations import mxfp4

import moe_torch.transformers
from moe_core.errors import Unsupported
from moe_core.formats import FP8_BLOCK, MXFP4, MXFP8
from moe_torch import Activation, ops
from moe_torch.compat import triton_kernels
from moe_torch.compat.triton_kernels import matmul_ogs, tensor
from moe_torch.compat.triton_kernels.tensor_details import layout
from moe_torch.transformers.activations import _of_fp8
from moe_torch.transformers.fp8 import fp8_weights
from moe_torch.transformers.mxfp4 import Mxfp4Experts
from tests.support.torch import running_on

on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
D, F, E, K = 256, 128, 4, 2
_SIZES = {
    "vocab_size": 64, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "num_experts_per_tok": K, "pad_token_id": 0,
}  # fmt: skip


def tokens(device: str) -> Any:
    return (torch.arange(24, device=device).reshape(2, 12) * 5 + 1) % 64


def save(model: Any, folder: pathlib.Path, tensors: dict[str, Any], quantization: dict[str, Any]) -> None:
    model.save_pretrained(folder)
    safetensors_torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))


def saved(model: Any, folder: pathlib.Path) -> dict[str, Any]:
    """The tensors of a model, as transformers writes them."""
    model.save_pretrained(folder)
    return safetensors_torch.load_file(folder / "model.safetensors")


def fp8_checkpoint(folder: pathlib.Path) -> Any:
    """Writes a checkpoint in blocks of 128 x 128; returns the model with the weights that it stands for."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**_SIZES, moe_intermediate_size=F, num_experts=E, norm_topk_prob=True)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    tensors = {}
    exact = saved(model, folder / "plain")
    for name, weight in exact.items():
        if ".experts." in name:
            matrix = ops.quantize(weight[None], FP8_BLOCK)
            tensors[name] = matrix.values[0]
            tensors[f"{name}_scale_inv"] = matrix.scales[0]
            exact[name] = ops.dequantize(matrix)[0]
        else:
            tensors[name] = weight
    others = ["lm_head", *[f"model.layers.{n}.{part}" for n in range(2) for part in ("self_attn", "mlp.gate")]]
    quantization = {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
        "modules_to_not_convert": others,
    }  # fmt: skip
    save(model, folder, tensors, quantization)
    safetensors_torch.save_file(exact, folder / "plain" / "model.safetensors", {"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32).eval()


def load_fp8(folder: pathlib.Path, device: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(
        "transformers.quantizers.quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer.validate_environment",
        lambda self, **keywords: None,
    )
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map=device).eval()


@on_devices
def test_fp8_experts(device: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_on("reference") if device == "cpu" else contextlib.nullcontext():
        exact = fp8_checkpoint(tmp_path).to(device)
        model = load_fp8(tmp_path, device, monkeypatch)
        experts = model.model.layers[0].mlp.experts
        assert type(experts).__name__ == "FP8Experts"
        assert experts.gate_up_proj.dtype == torch.float8_e4m3fn
        before = experts.gate_up_proj.data_ptr(), experts.gate_up_proj_scale_inv.detach().clone()
        assert len(moe_torch.transformers.use(model).modules) == 2
        assert before[0] % 16 or experts.gate_up_proj.data_ptr() == before[0]
        with torch.no_grad():
            wanted, found = exact(tokens(device)).logits, model(tokens(device)).logits
        assert torch.equal(experts.gate_up_proj_scale_inv, before[1])
        error = (found - wanted).norm() / wanted.norm()
        assert 1e-6 < error < 0.05, error  # hidden states are rounded to e4m3
        # Where hidden states need a gradient they are not: then the products are those of the exact weights.
        x = model.get_input_embeddings()(tokens(device)).detach().requires_grad_()
        y = exact.get_input_embeddings()(tokens(device)).detach().requires_grad_()
        found, wanted = model(inputs_embeds=x).logits, exact(inputs_embeds=y).logits
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
        found.square().mean().backward()
        wanted.square().mean().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-2, atol=1e-6)


def test_other_fp8_experts_are_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8_checkpoint(tmp_path)
    model = load_fp8(tmp_path, "cpu", monkeypatch)
    experts = model.model.layers[1].mlp.experts
    for name, value, text in (
        ("activation_scheme", "static", "quantises hidden states by static scales"),
        ("block_size", (64, 64), r"blocks of \(64, 64\)"),
    ):
        own = getattr(experts, name)
        setattr(experts, name, value)
        with pytest.raises(Unsupported, match=rf"model.layers.1.mlp.experts \(FP8Experts\): .*{text}"):
            moe_torch.transformers.use(model)
        setattr(experts, name, own)
    experts.gate_up_proj_scale_inv = torch.nn.Parameter(torch.ones(E, 3, 2))
    with pytest.raises(Unsupported, match=r"scales \[4, 3, 2\] of gate_up_proj, not \[4, 2, 2\]"):
        moe_torch.transformers.use(model)


def test_one_scale_per_matrix(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8_checkpoint(tmp_path)
    model = load_fp8(tmp_path, "cpu", monkeypatch)
    experts = model.model.layers[0].mlp.experts
    experts.block_size = None
    experts.gate_up_proj_scale_inv = torch.nn.Parameter(torch.rand(E, 2, 1) * 1e-3)
    experts.down_proj_scale_inv = torch.nn.Parameter(torch.rand(E, 1, 1) * 1e-3)
    weights, activations = fp8_weights(experts)
    assert str(activations) == "fp8_token"
    gate = experts.gate_up_proj.float() * experts.gate_up_proj_scale_inv.repeat_interleave(F, dim=1)
    torch.testing.assert_close(ops.dequantize(weights.gate_up).float(), gate.detach())


@pytest.mark.parametrize("format", [MXFP8, MXFP4], ids=str)
def test_groups_of_32_with_exponents(format: Any) -> None:
    """Exponents come as bytes or as float8_e8m0fnu, and e2m1 as int8."""
    experts: Any = types.SimpleNamespace(activation_scheme="dynamic", block_size=(1, 32), has_gate=True)
    made = {}
    for name, shape in (("gate_up_proj", (E, 2 * F, D)), ("down_proj", (E, D, F))):
        made[name] = ops.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(3)), format)
        values = made[name].values
        setattr(experts, name, values.view(torch.int8) if format == MXFP4 else values)
        setattr(experts, f"{name}_scale_inv", made[name].scales.view(torch.float8_e8m0fnu))
    weights, activations = fp8_weights(experts)
    assert activations == (MXFP8 if format == MXFP8 else None)
    for found, name in ((weights.gate_up, "gate_up_proj"), (weights.down, "down_proj")):
        assert found.spec.format == format
        assert torch.equal(ops.dequantize(found), ops.dequantize(made[name]))
    experts.down_proj_scale_inv = made["down_proj"].scales.float()
    with pytest.raises(Unsupported, match=r"scales of torch\.float32 in groups of 32, not of 8-bit exponents"):
        fp8_weights(experts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp8_experts_under_autocast(dtype: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states are cast, the weights stay fp8; a router trains where hidden states need no gradient."""
    fp8_checkpoint(tmp_path)
    model = load_fp8(tmp_path, "cpu", monkeypatch)
    moe_torch.transformers.use(model, recompute=True)
    experts, ids = model.model.layers[0].mlp.experts, torch.tensor([[0, 1], [2, 3]])
    with running_on("reference"):
        for has_gradient in (False, True):
            x = torch.randn(2, D, generator=torch.Generator().manual_seed(1)).requires_grad_(has_gradient)
            weights = torch.rand(2, K, generator=torch.Generator().manual_seed(2)).requires_grad_()
            with torch.autocast("cpu", dtype):
                y = experts(x, ids, weights)
            with torch.set_grad_enabled(has_gradient):
                wanted = experts(x.detach().to(dtype).requires_grad_(has_gradient), ids, weights.detach())
            y.float().square().sum().backward()
            assert y.dtype == dtype and weights.grad is not None and float(weights.grad.abs().min()) > 0
            if has_gradient:
                assert torch.equal(y, wanted) and x.grad is not None and x.grad.dtype == torch.float32
        with torch.no_grad(), torch.autocast("cpu", dtype):
            assert torch.equal(experts(x, ids, weights), experts(x.to(dtype), ids, weights))
    with pytest.raises(Unsupported, match=r"FP8Experts\): .* has frozen quantised weights, and no main_grad"):
        moe_torch.transformers.use(model, main_grad=True)


def mxfp4_checkpoint(folder: pathlib.Path) -> Any:
    """Writes a gpt-oss checkpoint as it is published; returns the model with the weights that it stands for."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**_SIZES, intermediate_size=F, num_local_experts=E)
    model = transformers.GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.normal_(std=0.1)
    tensors = {}
    exact = saved(model, folder / "plain")
    for name, weight in list(exact.items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            matrix = ops.quantize(weight.mT.contiguous(), MXFP4)
            tensors[f"{name}_blocks"] = matrix.values.reshape(*matrix.scales.shape, 16)
            tensors[f"{name}_scales"] = matrix.scales
            exact[name] = ops.dequantize(matrix).float().mT.contiguous()
        else:
            tensors[name] = weight
    others = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    save(model, folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": others})
    safetensors_torch.save_file(exact, folder / "plain" / "model.safetensors", {"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32).eval()


@on_devices
def test_mxfp4_gpt_oss(device: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer = "transformers.quantizers.quantizer_mxfp4"
    if device == "cpu":
        if not hasattr(mxfp4, "get_current_accelerator"):
            pytest.skip(f"transformers {transformers.__version__} loads mxfp4 on the current accelerator only")
        monkeypatch.setattr(mxfp4, "get_current_accelerator", lambda: None)
    monkeypatch.setattr(f"{quantizer}.Mxfp4HfQuantizer.validate_environment", lambda self, **keywords: None)
    monkeypatch.setattr(f"{quantizer}.get_current_accelerator", lambda: torch.device("cuda"), raising=False)
    hub = triton_kernels
    hub.matmul_ogs, hub.tensor = matmul_ogs, tensor  # type: ignore[attr-defined]
    assert layout.StridedLayout
    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", lambda *names, **keywords: hub)
    with running_on("reference") if device == "cpu" else contextlib.nullcontext():
        exact = mxfp4_checkpoint(tmp_path).to(device)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.float32, device_map=device
        ).eval()
        assert type(model.model.layers[0].mlp.experts).__name__ == "Mxfp4GptOssExperts"
        # Releases before 5.23 put a forward of theirs in the place of a block's. Another stays.
        theirs, other = (lambda block, x: None), (lambda block, x: type(block).forward(block, x))
        monkeypatch.setattr(mxfp4, "mlp_forward", theirs, raising=False)
        blocks: Any = [layer.mlp for layer in model.model.layers]
        for block, forward in zip(blocks, (theirs, other), strict=True):
            block.forward = types.MethodType(forward, block)
        report = moe_torch.transformers.use(model, batch_invariant=True)
        assert ["forward" in vars(block) for block in blocks] == [False, True]
        assert report.modules == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
        experts = model.model.layers[1].mlp.experts
        assert isinstance(experts, Mxfp4Experts)
        published = safetensors_torch.load_file(tmp_path / "model.safetensors")
        for name in ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"):
            assert torch.equal(getattr(experts, name).cpu(), published[f"model.layers.1.mlp.experts.{name}"]), name
        with torch.no_grad():
            torch.testing.assert_close(model(tokens(device)).logits, exact(tokens(device)).logits, rtol=2e-4, atol=2e-4)
            x = torch.randn(6, D, device=device)
            ids, weights = torch.arange(12, device=device).view(6, K) % E, torch.rand(6, K, device=device)
            for dtype in (torch.bfloat16, torch.float16):
                with torch.autocast(torch.device(device).type, dtype):
                    y = experts(x, ids, weights)
                assert y.dtype == dtype and torch.equal(y, experts(x.to(dtype), ids, weights))
        assert moe_torch.transformers.use(model).modules == report.modules
        with pytest.raises(Unsupported, match="frozen"):
            moe_torch.transformers.use(model, recompute=True)
        x = model.get_input_embeddings()(tokens(device)).detach().requires_grad_()
        model(inputs_embeds=x).logits.square().mean().backward()
        y = exact.get_input_embeddings()(tokens(device)).detach().requires_grad_()
        exact(inputs_embeds=y).logits.square().mean().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Activation("silu")),
        ({"limit": 3.0}, Activation("silu", limit=3.0)),
        ({"swiglu_alpha": 1.5, "swiglu_limit": 7.0}, Activation("swiglu_oai", alpha=1.5, limit=7.0)),
        ({"gate_softcap": 4.0, "up_softcap": 2.0}, Activation("softcapped_silu", alpha=4.0, limit=2.0)),
    ],
)
def test_activations_of_fp8_experts(fields: dict[str, float], expected: Activation) -> None:
    absent = dict.fromkeys(("limit", "swiglu_alpha", "swiglu_limit", "gate_softcap", "up_softcap"))
    assert _of_fp8(types.SimpleNamespace(act_fn=torch.nn.SiLU(), **{**absent, **fields})) == expected
