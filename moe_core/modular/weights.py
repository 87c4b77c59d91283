"""Weights of modular experts, and their tiles."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from moe_core import formats
from moe_core.base.arrays import ArraySpec
from moe_core.base.dtypes import canonical
from moe_core.base.target import Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, quantized_specs
from moe_core.modular.quant_config import SCALES_OF_PRECISION, FusedMoEQuantConfig
from moe_core.modular.schemes import NVFP4, activation_quantization, weight_quantization
from moe_core.modular.types import ProblemSize
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.tile_choice import choose_tile
from moe_core.specs.matmul import MatmulSpec
from moe_core.specs.operands import ExpertWeights, MatmulOperands
from moe_core.specs.routing import LayoutSpec
from moe_core.specs.tuning import Tuning


def why_unsupported(config: FusedMoEQuantConfig) -> str | None:
    """The reason why no experts can run this configuration, or None."""
    for name, precision in (("w1_precision", config.w1_precision), ("w2_precision", config.w2_precision)):
        if precision is not None and not any(hasattr(precision, field) for field in SCALES_OF_PRECISION):
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
    for number, scale in ((1, config.w1_scale), (2, config.w2_scale)):
        if format == NVFP4 and scale is not None and canonical(scale.dtype) == "float8_e4m3fn":
            raise InvalidInput(f"g{number}_alphas must be given with e4m3 w{number}_scale, got None; pass [E] in fp32")
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
