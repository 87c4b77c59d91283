"""Weights of modular experts: activations by name, quantisation, tiles."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

from moe_core import formats
from moe_core.base.arrays import ArraySpec
from moe_core.base.dtypes import canonical
from moe_core.base.target import Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, quantized_specs
from moe_core.modular.quant_config import FusedMoEQuantConfig
from moe_core.modular.types import ProblemSize
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.tile_choice import choose_tile
from moe_core.specs.matmul import Activation, MatmulSpec
from moe_core.specs.operands import ExpertWeights, MatmulOperands
from moe_core.specs.routing import LayoutSpec
from moe_core.specs.tuning import Tuning

UNGATED_SUFFIX = "_no_mul"
#: Gate first, but interleaved for gpt-oss.
_NAMES = {
    "silu": Activation("silu"),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "gelu_pytorch_tanh": Activation("gelu_tanh"),
    "relu2": Activation("relu2"),
    "swiglu_oai": Activation("swiglu_oai", gate_layout="interleaved"),
    "swigluoai": Activation("swiglu_oai", gate_layout="interleaved"),
}
_NAMES |= {name + UNGATED_SUFFIX: Activation(name, gated=False) for name in ("silu", "gelu", "gelu_tanh", "relu2")}


def activation_of(activation: str | enum.Enum | Activation) -> Activation:
    """The activation of the family with this name or enumeration value. An `Activation` is returned as it is.

    Gated names read a buffer of twice their width: `silu`, `gelu`, `gelu_tanh`, `relu2` with the gate columns first,
    `swiglu_oai` (or `swigluoai`; alpha 1.702, limit 7) with gate and up interleaved. `silu_no_mul`, `gelu_no_mul`,
    `gelu_tanh_no_mul`, `relu2_no_mul` are not gated. Pass an `Activation` for other options (not `separate`). Raises
    InvalidInput for other names.
    """
    if isinstance(activation, Activation):
        if activation.gate_layout == "separate":
            raise InvalidInput(
                "activation must have its gate and up columns in one buffer, as w1 has, got gate_layout='separate'; "
                "choose halves or interleaved"
            )
        return activation
    # Ported code may have the names in an enumeration.
    name = activation.value if isinstance(activation, enum.Enum) else activation
    known = _NAMES.get(name) if isinstance(name, str) else None
    if known is None:
        raise InvalidInput(
            f"activation must be one of {', '.join(_NAMES)} or an Activation, got {activation!r}; name one of these"
        )
    return known


def width_after(width: int, activation: str | Activation) -> int:
    """Half the columns if it is gated."""
    return width // 2 if activation_of(activation).gated else width


_INT8_TENSOR = Format("int8_tensor", "int8", None, None)


def _grouped(element: str, name: str, rows: int, columns: int, known: Format) -> Format:
    if (known.group_rows, known.group_columns) == (rows, columns):
        return known
    return Format(f"{name}_{rows}x{columns}", element, rows, columns)


def weight_quantization(config: FusedMoEQuantConfig) -> Format | None:
    """The format of w1 and w2, or None.

    fp8_w8a8, int8_w8a8: per block of block_shape, per output channel with per_act_token_quant, else per tensor.
    int8_w8a16, int4_w4a16: unsigned codes in groups of block_shape[1] along the input axis (None: one group), perhaps
    with zero points. mxfp4: e2m1 in groups of 32.
    """
    block, scheme = config.block_shape, config.scheme
    if scheme == "fp8_w8a8":
        if block is not None:
            return _grouped("e4m3", "fp8_block", *block, known=formats.FP8_BLOCK)
        return formats.FP8_CHANNEL if config.per_act_token_quant else formats.FP8_TENSOR
    if scheme == "int8_w8a8":
        if block is not None:
            return Format(f"int8_block_{block[0]}x{block[1]}", "int8", *block)
        return formats.INT8_CHANNEL if config.per_act_token_quant else _INT8_TENSOR
    if scheme in ("int8_w8a16", "int4_w4a16"):
        columns, zero_points = None if block is None else block[1], config.w1_zp is not None
        grouped = formats.int8_grouped if scheme == "int8_w8a16" else formats.int4_grouped
        return grouped(columns, zero_points)
    if scheme in ("mxfp4_w4a4", "mxfp4_w4a16"):
        return formats.MXFP4
    return None


def activation_quantization(config: FusedMoEQuantConfig) -> Format | None:
    if not config.quantizes_activations:
        return None
    if config.scheme == "mxfp4_w4a4":
        return formats.MXFP4
    element, tensor, token = ("e4m3", formats.FP8_TENSOR, formats.FP8_TOKEN)
    if config.scheme == "int8_w8a8":
        element, tensor, token = ("int8", _INT8_TENSOR, formats.INT8_TOKEN)
    if config.block_shape is not None:
        columns = config.block_shape[1]
        if element == "e4m3":
            return _grouped(element, "fp8_group", 1, columns, formats.FP8_GROUP)
        return Format(f"int8_group_1x{columns}", element, 1, columns)
    return token if config.per_act_token_quant else tensor


def why_unsupported(config: FusedMoEQuantConfig) -> str | None:
    """The reason why no experts can run this configuration, or None."""
    for name, precision in (("w1_precision", config.w1_precision), ("w2_precision", config.w2_precision)):
        if precision is not None and not hasattr(precision, "weight_scale"):
            return f"{name} is a precision object of another library; pass its scales as {name[:2]}_scale"
    return None


def rows_are_alone(config: FusedMoEQuantConfig) -> bool:
    """False: one scale is computed from all tokens."""
    format = activation_quantization(config)
    if format is None or format.group_rows is not None:
        return True
    return config.a1_scale is not None and config.a2_scale is not None


def expert_weights(w1: Any, w2: Any, config: FusedMoEQuantConfig, weight_layout: str) -> ExpertWeights:
    """Join w1 and w2 with biases, scales and zero points of the configuration for the ops.

    Scales and zero points have the shapes of `QuantizedTensor`, with axes of size 1 left out or added (`[E]` for `[E,
    1, 1]`). Activation scales become input scales, fp32 `[1]`. Signed int8 weights of int8_w8a16 have a scale per
    output channel. Raises InvalidInput for missing or wrong arrays, Unsupported for precision objects.
    """
    for name in ("w1_precision", "w2_precision"):
        if getattr(config, name) is not None:
            raise Unsupported(f"{name} is a precision object of another library; pass its scales as {name[:2]}_scale")
    format = weight_quantization(config)
    if config.scheme == "int8_w8a16" and canonical(w1.dtype) == "int8":
        if config.block_shape is not None or config.w1_zp is not None:
            raise InvalidInput(
                "w1 must be unsigned codes where int8_w8a16 has groups or zero points, got int8; shift them: "
                "(w1.to(int16) + 128).to(uint8)"
            )
        format = formats.INT8_CHANNEL
    if format is None:
        return ExpertWeights(w1, w2, gate_up_bias=config.w1_bias, down_bias=config.w2_bias)
    return ExpertWeights(
        _quantized("w1", w1, config.w1_scale, config.w1_zp, QuantizedSpec(format, weight_layout)),
        _quantized("w2", w2, config.w2_scale, config.w2_zp, QuantizedSpec(format, weight_layout)),
        gate_up_bias=config.w1_bias,
        down_bias=config.w2_bias,
        gate_up_input_scale=_input_scale("a1_scale", config),
        down_input_scale=_input_scale("a2_scale", config),
    )


def _input_scale(name: str, config: FusedMoEQuantConfig) -> Any:
    scale, format = getattr(config, name), activation_quantization(config)
    if scale is None:
        return None
    if format is None or format.group_rows is not None:
        raise InvalidInput(
            f"{name} must be None for {config.scheme}, whose activations have "
            f"{'no scales' if format is None else 'scales of their own per token'}, got an array; leave it out"
        )
    if math.prod(scale.shape) != 1:
        raise InvalidInput(
            f"{name} must have one element, the scale of all activations, got {tuple(scale.shape)}; pass the largest"
        )
    return scale.reshape(1)


def _quantized(name: str, values: Any, scales: Any, zero_points: Any, spec: QuantizedSpec) -> QuantizedTensor:
    if scales is None:
        raise InvalidInput(f"{name}_scale must be an array for {spec.format}, got None; pass the scales of {name}")
    per_byte = spec.format.own_element.per_byte
    shape = list(values.shape)
    shape[-1 if spec.layout == "out_in" else -2] *= per_byte
    wanted = formats.quantized_shapes(spec, shape)
    description = f"{spec.format} weights {tuple(shape)} in layout {spec.layout}"
    scales = _without_unit_axes(f"{name}_scale", scales, wanted.scales, description)
    if zero_points is not None and wanted.zero_points is not None:
        zero_points = _without_unit_axes(f"{name}_zp", zero_points, wanted.zero_points, description)
    return QuantizedTensor(spec, values, scales, zero_points)


def _without_unit_axes(name: str, array: Any, wanted: tuple[int, ...], what: str) -> Any:
    """Insert or drop axes of size 1. Raises InvalidInput for other shapes."""
    got = tuple(array.shape)
    if got == wanted:
        return array
    if [size for size in got if size != 1] == [size for size in wanted if size != 1]:
        return array.reshape(wanted)
    fix = "check block_shape and the layout"
    if got == (*wanted[:-2], wanted[-1], wanted[-2]):
        fix = (
            f"this is the transposed order, [E, groups, N] of AWQ and GPTQ checkpoints for example; pass {name}.mT "
            "(the scales lie as the weights do)"
        )
    raise InvalidInput(f"{name} must be {wanted} for {what}, got {got}; {fix}")


def tuning_of_whole(
    x: ArraySpec,
    experts: ExpertWeights,
    size: ProblemSize,
    products: tuple[MatmulSpec, MatmulSpec],
    target: Target,
    activations: Format | None = None,
) -> Tuning | None:
    """The tuning with which chunks add up like both products of the whole batch. None if theirs does, or without tiles.

    Tiles decide the order of a sum: here they are chosen once, for size.M tokens. x `[M, K]` and experts are
    ArraySpecs, products the specs of both products, activations the format of rows.
    """
    if not target.compiled:
        return None
    layout, (first, second) = LayoutSpec(size.M, size.topk, size.E), products
    if any(product.tuning is not None and product.tuning.batch_invariant for product in products):
        return None
    width = experts.down.shape[-2 if second.weight_layout == "in_out" else -1]

    def rows(array: ArraySpec) -> object:
        return array if activations is None else quantized_specs(QuantizedSpec(activations), array.shape)

    hidden = ArraySpec((size.M * size.topk, width), x.dtype)
    operands_1 = MatmulOperands(rows(x), experts.gate_up, bias=experts.gate_up_bias)
    operands_2 = MatmulOperands(rows(hidden), experts.down, bias=experts.down_bias)
    if activations is not None:
        first, second = (dataclasses.replace(product, out_dtype=x.dtype) for product in products)
    problems = MatmulProblem(operands_1, layout, first, target), MatmulProblem(operands_2, layout, second, target)
    chosen = [choose_tile(problem, f"tuning.matmul_{number}") for number, problem in enumerate(problems, 1)]
    configs = [choice.config for choice in chosen if choice is not None]
    assert len(configs) == 2, "a compiled target has tiles"
    return Tuning(*configs, table=None if first.tuning is None else first.tuning.table)
