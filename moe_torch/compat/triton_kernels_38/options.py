"""The options of `matmul`, and what its results are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from moe_core.base.checks import require_flag
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import MXFP4_CEIL, MXFP8_CEIL
from moe_core.formats.mx import GROUP
from moe_core.specs.matmul import Activation
from moe_torch.bridge.options import require_instance
from moe_torch.compat.triton_kernels import numerics
from moe_torch.compat.triton_kernels.matmul_ogs_details import options as shared
from moe_torch.compat.triton_kernels.matmul_ogs_details.operands import memory_of
from moe_torch.compat.triton_kernels.matmul_ogs_details.options import Epilogue, FnName
from moe_torch.compat.triton_kernels.tensor import Tensor
from moe_torch.compat.triton_kernels_38 import mxfp
from moe_torch.compat.triton_kernels_38.tensor import dtype_to_torch_dtype
from moe_torch.quantize import quantize_rows

_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: By function of an epilogue, the type of its values.
_QUANTIZED = {FnName.QUANTIZE_MXFP8: torch.float8_e4m3fn, FnName.QUANTIZE_MXFP4: torch.uint8}


@dataclass(frozen=True)
class FnSpecs:
    """A function to fuse, its name and the names of its arguments. reduction_n: columns that become one.

    fn: None, `swiglu.swiglu_fn`, or in an epilogue one of `numerics_details.mxfp`. fn_arg_do_not_specialize changes no
    result.
    """

    name: str
    fn: Any
    fn_arg_names: tuple[str, ...] = ()
    fn_arg_do_not_specialize: tuple[str, ...] = ()
    reduction_n: int = 1

    @staticmethod
    def default() -> FnSpecs:
        return FnSpecs("dflt", None)


NO_FUNCTION = FnSpecs.default()


@dataclass(frozen=True)
class FusedActivation:
    """fn_args: values in the order of specs.fn_arg_names."""

    specs: FnSpecs = NO_FUNCTION
    fn_args: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class FlexCtx(shared.FlexCtx):
    """acc_data: the scale of c_acc_in, one or one per matrix."""

    acc_data: numerics.InFlexData = numerics.PLAIN_INPUT


@dataclass(eq=False)
class PrecisionConfig(shared.Precision):
    """a_mx_scale, b_mx_scale: e8m0 bytes, one for 32 elements along K. c_mx_scale: memory for a quantised result's.
    out_dtype: None: a's. enforce_bitwise_invariance: one summation order for any number of rows. No effect:
    intermediate_out_dtype, as our sums are in fp32, and as upstream acc_scale and c_value_pack_factor."""

    plain_flex = FlexCtx()
    a_mx_scale: Tensor | torch.Tensor | None = None
    a_mx_tensor_scale: torch.Tensor | None = None
    a_microblock_size: int | None = None
    b_mx_scale: Tensor | torch.Tensor | None = None
    b_mx_tensor_scale: torch.Tensor | None = None
    b_microblock_size: int | None = None
    c_mx_scale: Tensor | torch.Tensor | None = None
    c_microblock_size: int | None = None
    c_value_pack_factor: int = 1
    out_dtype: Any = None
    intermediate_out_dtype: torch.dtype | None = None
    enforce_bitwise_invariance: bool = False


_DEFAULT = PrecisionConfig()


class Result(NamedTuple):
    """dtype: of the values in memory. sums: of the product. microscaled: values have scales of groups."""

    dtype: torch.dtype
    sums: torch.dtype
    microscaled: bool


def checked_precision(precision: PrecisionConfig | None) -> PrecisionConfig:
    """The options, or the defaults. Raises Unsupported."""
    if precision is None:
        return _DEFAULT
    require_instance("precision_config", precision, PrecisionConfig)
    require_instance("flex_ctx", precision.flex_ctx, FlexCtx)
    for name in ("allow_tf32", "enforce_bitwise_invariance", "flexpoint_saturate_inf"):
        require_flag(name, getattr(precision, name))
    for side in "abc":
        size, scale = (getattr(precision, f"{side}_{name}") for name in ("microblock_size", "mx_scale"))
        dtype = torch.uint8 if scale is None else (scale.data if isinstance(scale, Tensor) else scale).dtype
        mxfp.require_mx(f"precision_config.{side}_mx_scale", dtype, GROUP if size is None else size)
    for name in ("a_mx_tensor_scale", "b_mx_tensor_scale", "report_quantization_err_fn"):
        if getattr(precision, name) is not None:
            raise Unsupported(f"precision_config.{name} must be None: no kernel reads it; leave it out")
    return precision


def activation_of(fused: FusedActivation | None) -> Activation | None:
    if fused is None:
        return None
    require_instance("fused_activation", fused, FusedActivation)
    specs = fused.specs
    return shared.fused_function(specs.name, specs.fn, fused.fn_args, specs.reduction_n)


def result_of(precision: PrecisionConfig, epilogue: Epilogue | None, dtype_of_a: torch.dtype) -> Result:
    """Raises InvalidInput, and Unsupported for results that we lack."""
    dtype = dtype_to_torch_dtype(dtype_of_a if precision.out_dtype is None else precision.out_dtype)
    if epilogue is not None:
        require_instance("epilogue", epilogue, Epilogue)
    specs = NO_FUNCTION if epilogue is None else epilogue.specs
    flex, microscaled, names = precision.flex_ctx.out_data, specs.fn is not None, ", ".join(k.name for k in _QUANTIZED)
    known = not microscaled or (specs.fn in _QUANTIZED and specs.name == specs.fn.name)
    if not known or (epilogue is not None and epilogue.fn_arg_values_matmul):
        raise Unsupported(
            f"epilogue {specs.name!r} cannot be compiled into our kernels, which have {names} with the functions of "
            "numerics_details.mxfp; apply it to the result"
        )
    wanted = _QUANTIZED.get(specs.fn, dtype)
    if (precision.c_mx_scale is not None) != microscaled or dtype != wanted:
        raise InvalidInput(
            f"c_mx_scale must be memory for scales with an epilogue of {names}, out_dtype {wanted}, and else None, got "
            f"{type(precision.c_mx_scale).__name__} and {dtype}; pass all of them"
        )
    require_output("flex_ctx.out_data", flex, dtype, microscaled, precision.flexpoint_saturate_inf)
    if precision.intermediate_out_dtype not in (None, *_PLAIN):
        raise Unsupported(
            f"intermediate_out_dtype must be bf16, fp16, fp32 or None, got {precision.intermediate_out_dtype}: partial "
            "sums are in fp32; leave it out"
        )
    return Result(dtype, torch.float32 if dtype.itemsize == 1 else dtype, microscaled)


def require_output(
    name: str, flex: numerics.OutFlexData, dtype: torch.dtype, microscaled: bool, saturate_inf: bool
) -> None:
    """Refuse types of results that we lack, and scales that have no meaning for them."""
    if not microscaled and dtype not in (*_FP8, *_PLAIN):
        raise Unsupported(f"results must be bf16, fp16, fp32 or fp8, got {dtype}: there are no others; choose one")
    if flex.dtype not in (None, dtype):
        raise InvalidInput(f"{name}.dtype must be None or the result's {dtype}, got {flex.dtype}; leave it out")
    if flex.checksum_scale is not None:
        raise Unsupported(f"{name}.checksum_scale must be None: no kernel adds one up; leave it out")
    if (microscaled or dtype in _PLAIN) and (saturate_inf or any(scale is not None for scale in flex)):
        raise Unsupported(
            f"{name} must have no scales, and infinities not be saturated, unless results are fp8 without microscales, "
            f"got {dtype}; scale the result"
        )


def to_fp8(numbers: torch.Tensor, dtype: torch.dtype, flex: numerics.OutFlexData) -> torch.Tensor:
    """numbers / expected_scale (one, or one per matrix) in fp8, saturated. actual_scale grows with the largest."""
    largest, scale = torch.finfo(dtype).max, flex.expected_scale
    with torch.no_grad():
        if flex.actual_scale is not None and numbers.numel():
            found = (numbers.float().abs().amax() / largest).to(flex.actual_scale)
            flex.actual_scale.copy_(torch.maximum(flex.actual_scale, found))
        if scale is not None:
            numbers = numbers / mxfp.per_matrix("expected_scale", scale, numbers.shape)
        return numbers.clamp(-largest, largest).to(dtype)


def to_microscaled(numbers: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scales `[..., ceil(N / 32)]`) of fp32 `[..., N]`: mxfp8, or mxfp4 (bytes `[..., N / 2]`)."""
    *lead, columns = numbers.shape
    per_byte = 2 if dtype == torch.uint8 else 1
    if columns % per_byte:
        raise InvalidInput(f"an mxfp4 result must have an even number of columns, got {columns}; pad b")
    rows = pad(numbers.detach().reshape(-1, columns), (0, -columns % GROUP))
    quantized = quantize_rows(rows, MXFP4_CEIL if per_byte == 2 else MXFP8_CEIL)
    values = quantized.values[:, : columns // per_byte]
    return values.reshape(*lead, columns // per_byte), quantized.scales.reshape(*lead, -1)


def keep_scales(memory: Any, scales: torch.Tensor) -> None:
    destination = memory_of("c_mx_scale", memory)
    if destination.numel() != scales.numel():
        raise InvalidInput(f"c_mx_scale must be {list(scales.shape)}, got {list(destination.shape)}; allocate it so")
    destination.copy_(scales.reshape(destination.shape))
