"""Read a quantization_config of any producer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from moe_core.checkpoint import layouts
from moe_core.checkpoint.compressed import read_compressed_tensors
from moe_core.checkpoint.packing import Packing, mxfp4_packing, plain_packing
from moe_core.checkpoint.rules import (
    Packings,
    Quantization,
    Rule,
    Settings,
    dropped,
    one_rule,
    require,
    require_known,
    static,
    unsupported,
)
from moe_core.errors import InvalidInput
from moe_core.formats import FP8_TENSOR, MXFP4, Scheme, scheme_named

_BLOCK, _MX_BLOCK = [128, 128], [1, 32]


def read_quantization(settings: Any, family: str, model: Settings | None = None) -> Quantization | None:
    """The rules of a quantization_config, or None. family: model_type. model: the other settings of config.json."""
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise InvalidInput(
            f"quantization_config in config.json must be an object, got {settings!r}; restore the original config.json"
        )
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise unsupported(f"quant_method {method!r}", f"the methods that can be read are {', '.join(_METHODS)}")
    if method == "mxfp4" and family != "gpt_oss":
        raise unsupported(f"quant_method mxfp4 for {family}", "only gpt_oss is published in it")
    read, keys = _METHODS[method]
    require_known(settings, f"{keys} {_ANY_METHOD}", f"quantization_config of {method}")
    # Only fp8 has it, in either place.
    return read({"expert_dtype": (model or {}).get("expert_dtype"), **settings})


def _fp8(settings: Settings) -> Quantization:
    require(
        settings, fmt=("e4m3", "float8_e4m3fn"), activation_scheme=("dynamic", "static"), expert_dtype=("fp8", "fp4"),
        scale_fmt=("float", "ue8m0"),
    )  # fmt: skip
    block, power_of_two = settings.get("weight_block_size"), settings.get("scale_fmt") == "ue8m0"
    if block not in (_BLOCK, _MX_BLOCK, None):
        raise unsupported(f"weight_block_size {block!r}", f"it must be {_BLOCK}, {_MX_BLOCK} or null")
    if settings.get("activation_scheme") == "static" and block is not None:
        raise unsupported("activation_scheme 'static' with blocks", "static scales are per tensor")
    if block == _MX_BLOCK:
        if not power_of_two:
            raise unsupported(f"weight_block_size {_MX_BLOCK} without scale_fmt 'ue8m0'", "its scales are exponents")
        packings = [plain_packing(scheme_named("mxfp8"), settings, ".weight_scale_inv")]
    elif block is None:
        is_static = settings.get("activation_scheme") == "static"
        packing = plain_packing(Scheme("fp8_tensor", FP8_TENSOR, FP8_TENSOR), settings)
        packings = [static(packing) if is_static else packing]
    else:
        scheme = scheme_named("fp8_block_pow2" if power_of_two else "fp8_block")
        packings = [plain_packing(scheme, settings, suffix) for suffix in (".weight_scale_inv", ".scale")]
    if settings.get("expert_dtype") == "fp4":
        note = "experts in fp4 multiply plain rows: no kernel takes activations in groups of 128 with them"
        return one_rule(settings, dataclasses.replace(layouts.fp4(settings), notes=(note,)), *packings)
    return one_rule(settings, *packings)


def _bits_and_group(settings: Settings, bits: str, group: str) -> tuple[int, int | None]:
    width, size = settings.get(bits), settings.get(group)
    if width not in (4, 8) or isinstance(width, bool):
        raise unsupported(f"{bits} {width!r}", "it must be 4 or 8")
    if not isinstance(size, int) or isinstance(size, bool) or (size != -1 and not 0 < size < 2**31):
        raise InvalidInput(f"{group} in config.json must be a positive integer or -1, got {size!r}; restore the file")
    return width, None if size == -1 else size


def _awq(settings: Settings) -> Quantization:
    require(settings, version=("gemm", "GEMM"), format=("gemm",), pack_dtype=("int32",))
    names = ("w_bit", "q_group_size") if "w_bit" in settings else ("bits", "group_size")
    bits, group_size = _bits_and_group(settings, *names)
    if bits != 4:
        raise unsupported(f"{names[0]} {bits}", "awq gemm has 4")
    return one_rule(settings, layouts.awq(bits, group_size, settings))


def _gptq(settings: Settings) -> Quantization:
    require(settings, checkpoint_format=("gptq", "gptq_v2"), format=("gptq", "gptq_v2"), pack_dtype=("int32",))
    require(settings, dynamic=({},), is_marlin_format=(False,), rotation=("",))
    kind = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    bits, group_size = _bits_and_group(settings, "bits", "group_size")
    return one_rule(settings, layouts.gptq(bits, group_size, settings, kind == "gptq"))


def _modelopt(settings: Settings) -> Quantization:
    inner = settings.get("quantization")
    if isinstance(inner, Mapping):
        require_known(inner, _MODELOPT, "quantization of modelopt")
        settings = {**settings, **inner}
    algorithm, parts = settings.get("quant_algo"), settings.get("quantized_layers")
    if algorithm != "MIXED_PRECISION":
        return one_rule(settings, _modelopt_packing(algorithm, settings))
    if not isinstance(parts, Mapping) or not all(isinstance(part, Mapping) for part in parts.values()):
        raise InvalidInput(
            f"quantized_layers in config.json must map names to objects, got {parts!r:.200}; restore the original"
        )

    @functools.cache
    def packings(kind: str) -> Packings:
        return (_modelopt_packing(kind, settings),)

    rules = []
    for name, part in parts.items():
        require_known(part, "quant_algo group_size awq_block_size has_zero_point pre_quant_scale", "quantized_layers")
        rules.append(Rule((name,), functools.partial(packings, str(part.get("quant_algo")))))
    return Quantization(settings, tuple(rules))


def _modelopt_packing(algorithm: Any, settings: Settings) -> Packing:
    require(settings, has_zero_point=(False,), pre_quant_scale=(False,))

    def fp8() -> Packing:
        return static(plain_packing(Scheme("fp8_tensor", FP8_TENSOR, FP8_TENSOR), settings))

    made: dict[Any, Callable[[], Packing]] = {
        "FP8": fp8,
        "FP8_PER_CHANNEL_PER_TOKEN": lambda: plain_packing(scheme_named("fp8_channel"), settings),
        "NVFP4": lambda: dataclasses.replace(layouts.nvfp4(settings, True), notes=(dropped("nvfp4", "nvfp4"),)),
        "W4A16_NVFP4": lambda: layouts.nvfp4(settings, True),
        "MXFP8": lambda: plain_packing(scheme_named("mxfp8"), settings),
    }
    if algorithm not in made:
        raise unsupported(f"quant_algo {algorithm!r:.200}", f"the ones that can be read are {', '.join(made)}")
    return made[algorithm]()


def _bitsandbytes(settings: Settings) -> Quantization:
    require(settings, bnb_4bit_quant_storage=("uint8",), llm_int8_has_fp16_weight=(False,))
    kinds = ("nf4", "fp4")
    return one_rule(
        settings,
        *(layouts.bitsandbytes_4bit(settings, kind) for kind in kinds),
        dataclasses.replace(layouts.bitsandbytes_8bit(settings), notes=(dropped("int8", "bitsandbytes int8"),)),
    )


#: Keys that change nothing in an expert, in any producer's settings.
_ANY_METHOD = """quant_method modules_to_not_convert ignored_layers modules_to_convert kv_cache_scheme dequantize
    kv_cache_quant_algo quantization_status global_compression_ratio version producer meta run_compressed"""
_GPTQ = """bits group_size sym desc_act format checkpoint_format pack_dtype dynamic lm_head damp_percent
    damp_auto_increment static_groups true_sequential act_group_aware backend max_input_length model_seqlen
    block_name_to_quantize module_name_preceding_first_block batch_size pad_token_id cache_block_outputs
    modules_in_block_to_quantize tokenizer dataset model_name_or_path model_file_base_name use_cuda_fp16
    use_exllama exllama_config disable_exllama is_marlin_format offload_to_disk method mse rotation"""
_AWQ = """w_bit bits q_group_size group_size zero_point format pack_dtype backend do_fuse fuse_max_seq_len
    modules_to_fuse exllama_config sym desc_act"""
_MODELOPT = """quant_algo group_size exclude_modules quantized_layers kv_cache_quant_algo has_zero_point
    pre_quant_scale awq_block_size"""
_BITSANDBYTES = """load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage
    bnb_4bit_quant_type bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight
    llm_int8_skip_modules llm_int8_threshold"""
#: quant_method -> (reader, keys it knows).
_METHODS: dict[str, tuple[Callable[[Settings], Quantization], str]] = {
    "mxfp4": (lambda settings: one_rule(settings, mxfp4_packing(Scheme("mxfp4_w4a16", MXFP4), settings)), ""),
    "fp8": (_fp8, "fmt activation_scheme weight_block_size scale_fmt expert_dtype"),
    "compressed-tensors": (
        read_compressed_tensors,
        "format config_groups ignore sparsity_config transform_config moe_sparsity_config packed_modules_mapping",
    ),
    "awq": (_awq, _AWQ),
    "gptq": (_gptq, _GPTQ),
    "modelopt": (_modelopt, f"{_MODELOPT} config_groups ignore quantization"),
    "bitsandbytes": (_bitsandbytes, _BITSANDBYTES),
    "hqq": (lambda settings: one_rule(settings, layouts.hqq(settings)), "quant_config skip_modules"),
    "torchao": (
        lambda settings: one_rule(settings, *layouts.torchao(settings)),
        "quant_type quant_type_kwargs include_input_output_embeddings untie_embedding_weights",
    ),
}
