"""Weights of modular experts: activations by name, quantisation, and tiles that suit every chunk of a batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from moe_core import formats
from moe_core.base.arrays import ArraySpec
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

#: Appended to the name of an activation that multiplies by nothing: `silu_no_mul`.
UNGATED_SUFFIX = "_no_mul"
#: How the family stores gate and up columns: gate first, but for gpt-oss, which interleaves them.
_NAMES = {
    "silu": Activation("silu"),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "relu2": Activation("relu2"),
    "swiglu_oai": Activation("swiglu_oai", gate_layout="interleaved"),
    "swigluoai": Activation("swiglu_oai", gate_layout="interleaved"),
}
_NAMES |= {name + UNGATED_SUFFIX: Activation(name, gated=False) for name in ("silu", "gelu", "gelu_tanh", "relu2")}


def activation_of(activation: str | Activation) -> Activation:
    """The activation of a name of the family; an `Activation` is returned as it is.

    Gated names read a buffer of twice their width: `silu`, `gelu`, `gelu_tanh`, `relu2` with the gate columns first,
    `swiglu_oai` (or `swigluoai`; alpha 1.702, limit 7) with gate and up interleaved. `silu_no_mul`, `gelu_no_mul`,
    `gelu_tanh_no_mul`, `relu2_no_mul` are not gated. Other alphas, limits and gate layouts: pass an `Activation`, whose
    gate_layout must not be `separate`. Raises InvalidInput (a ValueError) for other names.
    """
    if isinstance(activation, Activation):
        if activation.gate_layout == "separate":
            raise InvalidInput(
                "activation must have its gate and up columns in one buffer, as w1 has, got gate_layout='separate'; "
                "choose halves or interleaved"
            )
        return activation
    found = _NAMES.get(activation)
    if found is None:
        raise InvalidInput(
            f"activation must be one of {', '.join(_NAMES)} or an Activation, got {activation!r}; name one of these"
        )
    return found


def width_after(width: int, activation: str | Activation) -> int:
    """Columns that an activation makes of `width` columns: half of them if it is gated."""
    return width // 2 if activation_of(activation).gated else width


_INT8_TENSOR = Format("int8_tensor", "int8", None, None)


def _grouped(element: str, name: str, rows: int, columns: int, known: Format) -> Format:
    """The format of a block of an element; the registered one where it has these sizes."""
    if (known.group_rows, known.group_columns) == (rows, columns):
        return known
    return Format(f"{name}_{rows}x{columns}", element, rows, columns)


def weight_quantization(config: FusedMoEQuantConfig) -> Format | None:
    """The format of w1 and w2, None for weights that are not quantised.

    fp8_w8a8: per block of block_shape, per output channel with per_act_token_quant, else per tensor. int8_w8a8: alike.
    int8_w8a16, int4_w4a16: unsigned codes in groups of block_shape[1] along the input axis (None: one group), with zero
    points where they are given. mxfp4: e2m1 in groups of 32.
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
        if block is not None and block[0] not in (0, 1):
            raise InvalidInput(
                f"block_shape must be (0, group) or (1, group) for {scheme}, whose groups lie along the input axis, "
                f"got {block}; pass (0, {block[1]})"
            )
        columns, zero_points = None if block is None else block[1], config.w1_zp is not None
        grouped = formats.int8_grouped if scheme == "int8_w8a16" else formats.int4_grouped
        return grouped(columns, zero_points)
    if scheme in ("mxfp4_w4a4", "mxfp4_w4a16"):
        if block is not None:
            raise InvalidInput(f"block_shape must be None for {scheme}, whose groups are 32 columns, got {block}")
        return formats.MXFP4
    return None


def activation_quantization(config: FusedMoEQuantConfig) -> Format | None:
    """The format of the activations before each product, None where they are not quantised."""
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
    """The reason experts of this configuration cannot run anywhere, whatever the sizes and the device; None if they
    can."""
    for name, precision in (("w1_precision", config.w1_precision), ("w2_precision", config.w2_precision)):
        if precision is not None:
            return f"{name} is a precision object of another library; pass its scales as {name[:2]}_scale"
    return None


def rows_are_alone(config: FusedMoEQuantConfig) -> bool:
    """Whether a token's result depends on that token alone: not where one scale is found from all of them."""
    format = activation_quantization(config)
    if format is None or format.group_rows is not None:
        return True
    return config.a1_scale is not None and config.a2_scale is not None


def expert_weights(w1: Any, w2: Any, config: FusedMoEQuantConfig, weight_layout: str) -> ExpertWeights:
    """w1 and w2, with biases, scales and zero points of the configuration, as what the ops take.

    Scales may have any shape with the elements that `QuantizedTensor` wants; those of activations become the input
    scales, fp32 `[1]`. Raises InvalidInput for arrays that are missing or do not fit, Unsupported for precision
    objects.
    """
    reason = why_unsupported(config)
    if reason is not None:
        raise Unsupported(reason)
    format = weight_quantization(config)
    if format is None:
        # Without a scheme a configuration has biases alone.
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
    if tuple(scales.shape) != wanted.scales:
        if math.prod(scales.shape) != math.prod(wanted.scales):
            raise InvalidInput(
                f"{name}_scale must be {wanted.scales} for {spec.format} weights {tuple(shape)}, got "
                f"{tuple(scales.shape)}; check block_shape and the layout"
            )
        scales = scales.reshape(wanted.scales)
    return QuantizedTensor(spec, values, scales, zero_points)


def tuning_of_whole(
    x: ArraySpec,
    experts: ExpertWeights,
    size: ProblemSize,
    products: tuple[MatmulSpec, MatmulSpec],
    target: Target,
    activations: Format | None = None,
) -> Tuning | None:
    """The tuning with which chunks of a batch add up as both products of the whole do; None = what they have is enough,
    or an engine without tiles.

    x `[M, K]` and experts: ArraySpecs; products: the specs of both for the whole batch, their tuning included;
    activations: the format of rows. A tile configuration decides the order of a sum: here it is chosen once, for size.M
    tokens.
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
