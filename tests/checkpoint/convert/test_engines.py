"""vLLM's and SGLang's own classes take converted files.

Of vLLM: its scheme for each module, and each byte of the experts in its parameters. Of SGLang: its scheme.

The wheels' files run unmodified, without compiled operators. The choice of a kernel, which needs a GPU, is replaced. In
SGLang so are the classes that load, which import such operators. `.ci/daily` installs the wheels, and
`MOEBIUS_ENGINES=1` turns their absence into an error.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="vLLM needs torch")
for name in ("vllm", "sglang"):
    if importlib.util.find_spec(name) is None:
        assert os.environ.get("MOEBIUS_ENGINES") != "1", f"{name} must be installed"
        pytest.skip("needs wheels that a step of .ci/daily installs", allow_module_level=True)

from safetensors.torch import load_file

from moe_core.checkpoint import convert_checkpoint
from moe_core.formats import format_named
from tests.support.checkpoint_files import E, K
from tests.support.quantized.plain import D, F, source
from tools.upstream import imports

pytestmark = pytest.mark.filterwarnings("ignore")
MOE = "vllm.model_executor.layers.fused_moe"
METHODS = "vllm.model_executor.layers.quantization"
COMPRESSED = f"{METHODS}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"
UNTOUCHED = 0x5A
METHOD_FILES = tuple(
    f"compressed_tensors_moe_{name}"
    for name in ("w4a4_mxfp4", "w4a4_nvfp4", "w8a8_fp8", "w8a8_int8", "w8a8_mxfp8", "wna16")
)
LAYER = "model.layers.1.mlp.experts"


def settings_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())["quantization_config"]


def quantization(path: Path) -> Any:
    """vLLM's config object of the files."""
    settings = settings_of(path)
    kind = importlib.import_module(METHODS).get_quantization_config(settings["quant_method"])
    return kind.from_config(settings)


def experts(config: Any, name: str = LAYER, width: int = F) -> Any:
    moe, manager = importlib.import_module(f"{MOE}.config"), importlib.import_module(f"{MOE}.expert_map_manager")
    sizes = dict.fromkeys(("tp_size", "pcp_size", "dp_size", "ep_size", "sp_size"), 1)
    ranks = dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank", "ep_rank"), 0)
    parallel = moe.FusedMoEParallelConfig(
        **sizes, **ranks, use_ep=False, all2all_backend="allgather_reducescatter", enable_eplb=False
    )
    described = moe.FusedMoEConfig(
        num_experts=E,
        experts_per_token=K,
        hidden_dim=D,
        intermediate_size=width,
        num_local_experts=E,
        num_logical_experts=E,
        activation=importlib.import_module(f"{MOE}.activation").MoEActivation.SILU,
        device="cpu",
        routing_method=moe.RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
    )
    maps = manager.ExpertMapManager(
        max_num_batched_tokens=16,
        top_k=K,
        global_num_experts=E,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=parallel,
        placement_strategy="linear",
        enable_eplb=False,
    )
    kind = importlib.import_module(f"{MOE}.routed_experts").RoutedExperts
    return kind(name, torch.bfloat16, described, config, maps)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Every choice of a kernel names none."""
    folder = importlib.import_module(COMPRESSED).__name__.rpartition(".")[0]
    modules = [importlib.import_module(f"{folder}.{name}") for name in METHOD_FILES]
    for module in (*modules, *map(importlib.import_module, (f"{METHODS}.fp8", f"{MOE}.unquantized_fused_moe_method"))):
        for name in vars(module):
            if name.startswith("select_") and name.endswith("_moe_backend"):
                # Of integer weights, Marlin alone takes one scale per channel.
                backend = mock.MagicMock() if "wna16" not in name else module.WNA16MoEBackend.MARLIN
                monkeypatch.setattr(module, name, lambda *_, backend=backend, **__: (backend, None))
    settings = importlib.import_module("vllm.config")
    config = settings.VllmConfig(device_config=settings.DeviceConfig(device="cpu"))
    with settings.set_current_vllm_config(config):
        distributed = importlib.import_module("vllm.distributed")
        if not distributed.model_parallel_is_initialized():
            distributed.init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "gloo")
            distributed.initialize_model_parallel()
        yield


#: Format, loader, vLLM's method for its experts.
FORMATS = [
    ("int4_g32", "transformers", "CompressedTensorsWNA16MoEMethod"),
    ("int4_g32_zp", "moebius", "CompressedTensorsWNA16MoEMethod"),
    ("int8_row", "transformers", "CompressedTensorsWNA16MoEMethod"),
    ("int8_channel", "moebius", "CompressedTensorsW8A8Int8MoEMethod"),
    ("fp8_channel", "transformers", "CompressedTensorsW8A8Fp8MoEMethod"),
    ("mxfp4", "transformers", "CompressedTensorsW4A4Mxfp4MoEMethod"),
    ("nvfp4", "moebius", "CompressedTensorsW4A4Nvfp4MoEMethod"),
    ("mxfp8", "moebius", "CompressedTensorsW8A8Mxfp8MoEMethod"),
    ("fp8_block", "transformers", "Fp8MoEMethod"),
    ("mxfp8", "transformers", "Fp8MoEMethod"),
]


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize(("format", "loader", "method"), FORMATS)
def test_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, loader: str, method: str) -> None:
    path = tmp_path / "made"
    # vLLM takes blocks in whole widths only.
    width = 128 if format == "fp8_block" else F
    monkeypatch.setattr("tests.support.quantized.plain.F", width)
    plain = source(tmp_path / "plain", "qwen3_moe", "per_expert")
    convert_checkpoint(plain, path, format if format == "nvfp4" else format_named(format), loader=loader)
    layer = experts(quantization(path), width=width)
    assert type(layer.quant_method).__name__ == method
    for parameter in layer.parameters():
        parameter.data.view(torch.uint8).fill_(UNTOUCHED)
    tensors = {
        name.removeprefix(f"{LAYER}."): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
        if name.startswith(f"{LAYER}.")
    }
    assert len(list(layer.load_weights(tensors.items()))) == len(tensors)
    for name, parameter in layer.named_parameters():
        stem, _, rest = name.partition("_")
        if "input_global_scale" in name:
            # Experts with plain rows take none.
            assert layer.quant_method.use_a16
            continue
        modules = ("gate_proj", "up_proj") if stem == "w13" else ("down_proj",)
        stored = [[tensors[f"{expert}.{module}.{rest}"] for module in modules] for expert in range(E)]
        wanted = torch.stack([parts[-1] if rest == "weight_shape" else torch.cat(parts) for parts in stored])
        # Scales and shapes are widened.
        assert torch.equal(parameter.data.double().flatten(), wanted.double().flatten()), name


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("format", ["int4_g32", "fp8_channel", "fp8_block"])
def test_layers_of_multi_token_prediction_stay_plain(tmp_path: Path, format: str) -> None:
    plain = source(tmp_path / "plain", "deepseek_v3", "per_expert")
    config = json.loads((plain / "config.json").read_text())
    # Layer 2 predicts the token after the next.
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (plain / "config.json").write_text(json.dumps(config))
    convert_checkpoint(plain, tmp_path / "made", format_named(format))
    config = quantization(tmp_path / "made")
    methods = [type(experts(config, f"model.layers.{n}.mlp.experts").quant_method).__name__ for n in (1, 2)]
    assert methods[0] != methods[1] == "UnquantizedFusedMoEMethod"
    if format != "fp8_block":
        config.ignore = []
        assert type(experts(config, "model.layers.2.mlp.experts").quant_method).__name__ == methods[0]


SGLANG = "sglang.srt.layers.quantization"
#: Format -> SGLang's scheme for its experts, or "" where it raises.
SCHEMES = {
    **dict.fromkeys(("int4_g32", "int4_g32_zp", "int8_row", "int8_g32"), "CompressedTensorsWNA16MoE"),
    **{"fp8_channel": "CompressedTensorsW8A8Fp8MoE", "nvfp4": "CompressedTensorsW4A16Nvfp4MoE"},
    **dict.fromkeys(("int8_channel", "fp8_tensor", "mxfp4", "mxfp8"), ""),
}


class _Scheme(type):
    """The classes that load: each is known by its name."""

    def __call__(cls, *_: Any, **__: Any) -> str:
        return cls.__name__


def sglang() -> Any:
    """Inside a world, SGLang's config of compressed-tensors, of one CUDA device."""
    folder = Path(next(iter(importlib.util.find_spec("sglang").submodule_search_locations))).parent  # type: ignore[union-attr]
    listed = (folder / f"{SGLANG}.compressed_tensors.schemes".replace(".", "/") / "__init__.py").read_text()
    schemes = {name: _Scheme(name, (), {}) for name in re.findall(r"CompressedTensors\w+", listed)}
    no, backend = (lambda *_: False), mock.MagicMock()
    backend.is_flashinfer_trtllm = backend.is_triton = backend.is_auto = no
    names = {
        f"{SGLANG}.compressed_tensors.schemes": schemes,
        "sglang.srt.layers.moe": {"get_moe_runner_backend": lambda: backend},
        "sglang.srt.runtime_context": {"get_platform": lambda: mock.MagicMock(is_sm100=False)},
        "sglang.srt.utils": {"is_cuda": lambda: True, "is_hip": no, "is_npu": no, "is_xpu": no},
    }
    served = [f"{SGLANG}.{name}" for name in ("base_config", "compressed_tensors.compressed_tensors")]
    return imports.world(folder, names, {}, (*served, f"{SGLANG}.compressed_tensors.utils"))


def test_schemes_of_sglang(tmp_path: Path) -> None:
    plain = source(tmp_path / "plain", "qwen3_moe", "per_expert")
    with sglang():
        kind = importlib.import_module(f"{SGLANG}.compressed_tensors.compressed_tensors").CompressedTensorsConfig
        for format, wanted in SCHEMES.items():
            path = tmp_path / format
            convert_checkpoint(plain, path, format if format == "nvfp4" else format_named(format), loader="moebius")
            config = kind.from_config(settings_of(path))
            try:
                scheme = config.get_moe_scheme(torch.nn.Module(), LAYER)
            except (NotImplementedError, AttributeError, RuntimeError):
                scheme = ""
            assert scheme == wanted, format
