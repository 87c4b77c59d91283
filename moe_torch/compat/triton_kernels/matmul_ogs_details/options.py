"""The options of `matmul_ogs`, and their translation for our ops."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

import torch

from moe_core.base.checks import require_flag
from moe_core.errors import InvalidInput, Unsupported
from moe_core.specs.matmul import Activation
from moe_torch.bridge.options import require_instance
from moe_torch.compat.triton_kernels import numerics
from moe_torch.compat.triton_kernels.swiglu import swiglu_activation, swiglu_fn
from moe_torch.compat.triton_kernels.tensor import Tensor

_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class FnSpecs:
    """A function to fuse, its name and the names of its arguments. fn: None, or `swiglu.swiglu_fn`.

    fn_arg_do_not_specialize changes no result.
    """

    name: str
    fn: Any
    fn_arg_names: tuple[str, ...]
    fn_arg_do_not_specialize: tuple[str, ...] = ()

    @staticmethod
    def default() -> FnSpecs:
        return FnSpecs("dflt", None, ())


NO_FUNCTION = FnSpecs.default()


@dataclass(frozen=True)
class FusedActivation:
    """fn_args: values in the order of specs.fn_arg_names. reduction_n: columns that become one."""

    specs: FnSpecs = NO_FUNCTION
    fn_args: tuple[Any, ...] = ()
    reduction_n: int = 1


@dataclass(frozen=True)
class Epilogue:
    """Only the default, no function, is supported."""

    specs: FnSpecs = NO_FUNCTION
    fn_arg_values_matmul: tuple[Any, ...] = ()
    fn_arg_values_finalize: tuple[Any, ...] = ()
    effective_itemsize: float | None = None


class FnName(Enum):
    QUANTIZE_MXFP8 = auto()
    QUANTIZE_MXFP4 = auto()
    QUANTIZE_NVFP4 = auto()


EpilogueSpecs = FnSpecs


@dataclass(frozen=True, eq=False)
class FlexCtx:
    """Scales of x, w (one, or one per expert) and the result."""

    lhs_data: numerics.InFlexData = numerics.PLAIN_INPUT
    rhs_data: numerics.InFlexData = numerics.PLAIN_INPUT
    out_data: numerics.OutFlexData = numerics.PLAIN_OUTPUT


PLAIN_FLEX = FlexCtx()


@dataclass(eq=False)
class Precision:
    """Options of all releases. Mutable, as ported code needs.

    allow_tf32: fp32 products may use TF32, the default here. max_num_imprecise_acc: no effect, since our sums are at
    least as precise.
    """

    plain_flex: ClassVar[FlexCtx] = PLAIN_FLEX
    max_num_imprecise_acc: int | None = None
    allow_tf32: bool = True
    flex_ctx: Any = None
    acc_scale: float = 1.0
    flexpoint_saturate_inf: bool = False
    report_quantization_err_fn: Any = None

    def __post_init__(self) -> None:
        # The default could not be made while a program is compiled.
        if self.flex_ctx is None:
            self.flex_ctx = self.plain_flex


@dataclass(eq=False)
class PrecisionConfig(Precision):
    """act_scale, weight_scale: e8m0 bytes, one for 32 elements along the reduction. out_dtype: None: x's.
    enforce_bitwise_invariance: one summation order for any number of rows."""

    act_scale: Tensor | torch.Tensor | None = None
    weight_scale: Tensor | torch.Tensor | None = None
    out_scale: Tensor | torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    enforce_bitwise_invariance: bool = False


_DEFAULT = PrecisionConfig()


def checked_precision(precision: PrecisionConfig | None) -> PrecisionConfig:
    """The options, or the defaults. Raises Unsupported."""
    if precision is None:
        return _DEFAULT
    require_instance("precision_config", precision, PrecisionConfig)
    require_instance("flex_ctx", precision.flex_ctx, FlexCtx)
    require_flag("allow_tf32", precision.allow_tf32)
    require_flag("enforce_bitwise_invariance", precision.enforce_bitwise_invariance)
    reason = numerics.why_not_plain_output(precision.flex_ctx.out_data, precision.flexpoint_saturate_inf)
    if precision.acc_scale != 1.0:
        reason = f"acc_scale must be 1, got {precision.acc_scale}: sums are not scaled while they grow; use out_alpha"
    if precision.report_quantization_err_fn is not None:
        reason = "report_quantization_err_fn must be None: results are not quantised"
    if precision.out_scale is not None:
        reason = "out_scale must be None: results are bf16, fp16 or fp32 and have no scales; quantise them afterwards"
    if precision.out_dtype is not None and precision.out_dtype not in _OUT_DTYPES:
        reason = f"out_dtype must be bf16, fp16 or fp32, got {precision.out_dtype}: there are no other results"
    if reason is not None:
        raise Unsupported(reason)
    return precision


def activation_of(fused: FusedActivation | None) -> Activation | None:
    if fused is None:
        return None
    require_instance("fused_activation", fused, FusedActivation)
    return fused_function(fused.specs.name, fused.specs.fn, fused.fn_args, fused.reduction_n)


def fused_function(name: str, fn: Any, fn_args: tuple[Any, ...], width: int) -> Activation | None:
    """width: `reduction_n`, the columns that become one."""
    if fn is None:
        if width != 1 or fn_args:
            raise InvalidInput(
                f"fused_activation must have reduction_n 1 and no fn_args without a function, got {width} and "
                f"{fn_args}; give specs the function"
            )
        return None
    if fn is not swiglu_fn:
        raise Unsupported(
            f"fused_activation {name!r} cannot be compiled into our kernels, which fuse swiglu_fn of "
            "moe_torch.compat.triton_kernels.swiglu; pass that one, or apply the function to the result"
        )
    if width != 2 or len(fn_args) != 2:
        raise InvalidInput(
            f"fused_activation must have reduction_n 2 and fn_args (alpha, limit) for swiglu_fn, got {width} and "
            f"{fn_args}; pass these"
        )
    return swiglu_activation(*fn_args)


def require_no_epilogue(epilogue: Epilogue | None) -> None:
    if epilogue is None:
        return
    require_instance("epilogue", epilogue, Epilogue)
    if epilogue.specs.fn is not None or epilogue.fn_arg_values_matmul or epilogue.fn_arg_values_finalize:
        raise Unsupported(
            f"epilogue {epilogue.specs.name!r} cannot be compiled into our kernels; apply it to the result"
        )
