"""vLLM's and SGLang's own classes take converted files.

The engine's scheme for each module, and each byte of the experts in its parameters.

The wheels' files run unmodified, without compiled operators. The choice of a kernel, which needs a GPU, is replaced. In
SGLang so are the imports of kernels and of its server. `.ci/daily` installs the wheels, and `MOEBIUS_ENGINES=1` turns
their absence into an error.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from functools import partial
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
        max_num_batched_tokens=16, top_k=K, global_num_experts=E, num_redundant_experts=0, num_expert_group=None,
        moe_parallel_config=parallel, placement_strategy="linear", enable_eplb=False,
    )  # fmt: skip
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
    tensors = stored_experts(path)
    assert len(list(layer.load_weights(tensors.items()))) == len(tensors)
    for name, parameter in layer.named_parameters():
        if "input_global_scale" in name:
            # Experts with plain rows take none.
            assert layer.quant_method.use_a16
            continue
        assert_loaded(name, parameter, tensors)


def stored_experts(path: Path) -> dict[str, Any]:
    """The tensors of LAYER, by their names below it."""
    tensors = load_file(path / "model.safetensors").items()
    return {name.removeprefix(f"{LAYER}."): tensor for name, tensor in tensors if name.startswith(f"{LAYER}.")}


def assert_loaded(name: str, parameter: Any, tensors: dict[str, Any]) -> None:
    """A parameter of all experts holds what the files have, possibly transposed."""
    stem, _, rest = name.partition("_")
    modules = ("gate_proj", "up_proj") if stem == "w13" else ("down_proj",)
    stored = [[tensors[f"{expert}.{module}.{rest}"] for module in modules] for expert in range(E)]
    wanted = torch.stack([parts[-1] if rest == "weight_shape" else torch.cat(parts) for parts in stored])
    wanted = wanted if parameter.ndim < 3 or parameter.shape == wanted.shape else wanted.transpose(1, 2)
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


SGLANG, SGLANG_MOE = "sglang.srt.layers.quantization", "sglang.srt.layers.moe"
SCHEME_FILES = f"{SGLANG}.compressed_tensors.schemes"
#: SGLang's scheme for the experts of formats -> its file.
SCHEMES = {
    "CompressedTensorsWNA16MoE": ("compressed_tensors_wNa16_moe", ("int4_g32", "int8_row", "int8_g32", "int4_g32_zp")),
    "CompressedTensorsW8A8Fp8MoE": ("compressed_tensors_w8a8_fp8_moe", ("fp8_channel",)),
    "CompressedTensorsW4A16Nvfp4MoE": ("compressed_tensors_w4a16_nvfp4_moe", ("nvfp4",)),
}
#: SGLang raises for these.
REFUSED = ("int8_channel", "fp8_tensor", "mxfp4", "mxfp8")


@contextlib.contextmanager
def sglang() -> Iterator[tuple[Any, type]]:
    """SGLang's config of compressed-tensors and its layer of experts, of one CUDA device."""
    folder = Path(next(iter(importlib.util.find_spec("sglang").submodule_search_locations))).parent  # type: ignore[union-attr]
    listed = (folder / SCHEME_FILES.replace(".", "/") / "__init__.py").read_text()
    # Other schemes raise when they are made.
    schemes = {name: mock.Mock(side_effect=NotImplementedError) for name in re.findall(r"CompressedTensors\w+", listed)}
    no, backend = (lambda *_, **__: False), mock.MagicMock()
    backend.is_flashinfer_trtllm = backend.is_triton = backend.is_auto = backend.is_triton_kernels = no
    runner = {"get_moe_runner_backend": lambda: backend}

    def with_attributes(parameter: Any, attributes: Any) -> None:
        vars(parameter).update(attributes)

    def as_it_is(*_: Any, **__: Any) -> Any:
        return lambda function: function

    kinds = dict.fromkeys(("is_hip", "is_npu", "is_xpu", "is_cpu", "get_bool_env_var", "cpu_has_amx_support"), no)
    names = {
        SCHEME_FILES: schemes | {"WNA16_SUPPORTED_BITS": [4, 8]},
        SGLANG_MOE: runner,
        "sglang.srt.runtime_context": {"get_platform": lambda: mock.MagicMock(is_sm100=False)},
        "sglang.srt.utils": {"is_cuda": lambda: True, "set_weight_attrs": with_attributes, **kinds},
        "sglang.srt.utils.custom_op": {"register_custom_op": as_it_is},
        "sglang.srt.environ": {"envs": mock.MagicMock()},
        "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph": {"register_split_op": as_it_is},
    }
    layers = f"{SGLANG_MOE}.fused_moe_triton"
    served = [f"{SGLANG}.{name}" for name in ("base_config", "base_scheme", "compressed_tensors.compressed_tensors")]
    served += [f"{SGLANG}.compressed_tensors.utils", f"{SGLANG_MOE}.utils", f"{layers}.layer"]
    files = {name: f"{SCHEME_FILES}.{file}" for name, (file, _) in SCHEMES.items()}
    served += [f"{SCHEME_FILES}.compressed_tensors_scheme", *files.values()]
    with imports.world(folder, names, {f"{SGLANG_MOE}.utils": runner}, served):
        package, base = (importlib.import_module(name) for name in (SCHEME_FILES, served[-1 - len(files)]))
        vars(package)["CompressedTensorsMoEScheme"] = base.CompressedTensorsMoEScheme
        vars(package).update({name: getattr(importlib.import_module(file), name) for name, file in files.items()})
        layer = importlib.import_module(f"{layers}.layer")
        vars(importlib.import_module(layers))["FusedMoeWeightScaleSupported"] = layer.FusedMoeWeightScaleSupported
        config = importlib.import_module(f"{SGLANG}.compressed_tensors.compressed_tensors").CompressedTensorsConfig
        yield config, layer.FusedMoE


def layer_of_sglang(kind: Any, config: Any) -> Any:
    """A layer on one rank, without the runner and the dispatcher that its own initialiser makes."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    off = ("uses_expert_location", "_has_fused_shared", "use_presharded_weights", "use_triton_kernels")
    facts = dict.fromkeys((*off, "use_flashinfer_trtllm_moe"), False) | {"moe_tp_size": 1, "quant_config": config}
    facts |= dict.fromkeys(("moe_tp_rank", "num_fused_shared_experts", "_expert_storage_rank"), 0)
    facts |= dict.fromkeys(("_num_local_routed", "num_local_experts"), E)
    facts["moe_runner_config"], facts["quant_method"] = mock.MagicMock(is_gated=True), mock.Mock(spec=[])
    for name, value in facts.items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize(("format", "wanted"), [
    *((format, name) for name, (_, formats) in SCHEMES.items() for format in formats), *((one, "") for one in REFUSED)
])  # fmt: skip
def test_experts_of_sglang(tmp_path: Path, format: str, wanted: str) -> None:
    plain, path = source(tmp_path / "plain", "qwen3_moe", "per_expert"), tmp_path / "made"
    convert_checkpoint(plain, path, format if format == "nvfp4" else format_named(format), loader="moebius")
    with sglang() as (configs, kind):
        config = configs.from_config(settings_of(path))
        layer = layer_of_sglang(kind, config)
        if not wanted:
            with pytest.raises((NotImplementedError, AttributeError, RuntimeError)):
                config.get_moe_scheme(layer, LAYER)
            return
        layer.scheme = scheme = config.get_moe_scheme(layer, LAYER)
        assert type(scheme).__name__ == wanted
        sizes = {"num_experts": E, "hidden_size": D, "intermediate_size_per_partition": F}
        scheme.create_weights(layer, **sizes, params_dtype=torch.bfloat16, weight_loader=layer.weight_loader)
        parameters, tensors = dict(layer.named_parameters()), stored_experts(path)
        modules = {f"ckpt_{half}_proj_name": f"{half}_proj" for half in ("gate", "up", "down")}
        for parameter, module, expert, shard in kind.make_expert_params_mapping(**modules, num_experts=E):
            start = module.removeprefix("experts.")
            for name, tensor in tensors.items():
                if name.startswith(start):
                    full = parameter.removeprefix("experts.") + name.removeprefix(start)
                    target = parameters[full]
                    load = partial(target.weight_loader, target, tensor, full, shard_id=shard, expert_id=expert)
                    if "zero_point" in name:
                        # SGLang's parameters are the transposes of the files' tensors, which it turns but for these.
                        with pytest.raises(RuntimeError, match="size of tensor"):
                            load()
                        return
                    load()
    names = {name.split(".", 2)[2] for name in tensors}
    for name, parameter in parameters.items():
        if name.partition("_")[2] in names:
            assert_loaded(name, parameter, tensors)
    assert {name.partition("_")[2] for name in parameters} >= names
