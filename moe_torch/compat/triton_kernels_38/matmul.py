"""Products of matrices, of batches and of ragged tensors, with gather, scatter and fused activation.

    c[scatter(rows of e)] = acc + gammas * activation(out_alpha * (a[gather(rows of e)] @ b[e] + betas * bias[e]))

A row is cast once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_torch.bridge.options import require_instance
from moe_torch.compat.triton_kernels.matmul_ogs_details.operands import Operand, memory_of
from moe_torch.compat.triton_kernels.matmul_ogs_details.opt_flags import InapplicableConstraint, set_idle_sms
from moe_torch.compat.triton_kernels.matmul_ogs_details.options import Epilogue, FnName
from moe_torch.compat.triton_kernels.matmul_ogs_details.product import delivered
from moe_torch.compat.triton_kernels.numerics import InFlexData, OutFlexData
from moe_torch.compat.triton_kernels_38.mxfp import per_matrix
from moe_torch.compat.triton_kernels_38.options import (
    FlexCtx,
    FnSpecs,
    FusedActivation,
    PrecisionConfig,
    Result,
    activation_of,
    checked_precision,
    keep_scales,
    result_of,
    to_fp8,
    to_microscaled,
)
from moe_torch.compat.triton_kernels_38.products import Fused, by_rows, ragged_k
from moe_torch.compat.triton_kernels_38.reduce import reduce
from moe_torch.compat.triton_kernels_38.tensor import (
    FP4,
    RaggedTensorMetadata,
    Storage,
    Tensor,
    convert_layout,
    wrap_torch_tensor,
)

__all__ = [
    "FP4", "Epilogue", "FlexCtx", "FnName", "FnSpecs", "FusedActivation", "InFlexData",
    "InapplicableConstraint", "OutFlexData", "PrecisionConfig", "RaggedTensorMetadata", "Storage", "Tensor",
    "convert_layout", "matmul", "matmul_set_idle_sms", "reduce", "wrap_torch_tensor",
]  # fmt: skip

matmul_set_idle_sms = set_idle_sms


def matmul(
    a: Any,
    b: Any,
    bias: torch.Tensor | None,
    a_ragged_metadata: RaggedTensorMetadata | None = None,
    b_ragged_metadata: RaggedTensorMetadata | None = None,
    gather_indx: torch.Tensor | None = None,
    scatter_indx: torch.Tensor | None = None,
    precision_config: PrecisionConfig | None = None,
    betas: torch.Tensor | None = None,
    gammas: torch.Tensor | None = None,
    out_alpha: float | None = None,
    c: torch.Tensor | Tensor | None = None,
    fused_comm: Any = None,
    fused_activation: FusedActivation | None = None,
    epilogue: Epilogue | None = None,
    c_acc_in: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply a with the matrices of b.

    - Plain: a `[M, K]`, b `[K, N]`, bias `[N]`. A batch: `[B, M, K]`, `[B, K, N]`, `[B, N]`.
    - a ragged: rows of slice e of a with b[e], b `[E, K, N]`, bias `[E, N]`.
    - Both ragged along K: `a[:, slice e] @ b[slice e]`, a `[M, K]`, b `[K, N]`, no bias. The result is `[E, M, N]`.

    gather_indx int32 `[M]`: the row of a for each row. scatter_indx int32 `[M]`: where each row goes. Rows without an
    index (-1), and those that no row goes to, are zeros. betas, gammas: fp32 `[M]`. c: memory for the result. c_acc_in:
    added last. a is bf16, fp16 or fp32, or fp8 e4m3, mxfp8 or mxfp4. b too, K contiguous for mxfp4. Microscaled a with
    plain b, and quantised operands of ragged K, are dequantised first.

    A result is plain, fp8 (out_dtype, flex_ctx.out_data), mxfp8 or mxfp4 (epilogue, c_mx_scale). Gradients are as in
    `moe_torch.matmul_ogs`, for plain results. Raises InvalidInput, and Unsupported for options that we lack.
    """
    precision, activation = checked_precision(precision_config), activation_of(fused_activation)
    if fused_comm is not None:
        raise Unsupported("fused_comm must be None: a product writes to one GPU; exchange its result afterwards")
    for name, metadata in (("a_ragged_metadata", a_ragged_metadata), ("b_ragged_metadata", b_ragged_metadata)):
        if metadata is not None:
            require_instance(name, metadata, RaggedTensorMetadata)
    flex = precision.flex_ctx
    x = Operand("a", a, "precision_config.a_mx_scale", precision.a_mx_scale, "flex_ctx.lhs_data", flex.lhs_data)
    w = Operand("b", b, "precision_config.b_mx_scale", precision.b_mx_scale, "flex_ctx.rhs_data", flex.rhs_data)
    result = result_of(precision, epilogue, flex.lhs_data.reinterpret(memory_of("a", a)).dtype)
    # Sums stay unrounded until the last addition or conversion.
    wide = result.sums if c_acc_in is None else torch.float32
    config, fused = replace(precision, out_dtype=wide), Fused(bias, betas, gammas, out_alpha, activation)
    if b_ragged_metadata is None:
        numbers = by_rows(x, w, (a_ragged_metadata, gather_indx, scatter_indx), config, fused)
    elif a_ragged_metadata is None or gather_indx is not None or scatter_indx is not None:
        raise InvalidInput(
            "b_ragged_metadata needs a_ragged_metadata, and neither gather_indx nor scatter_indx, as K is ragged; pass "
            "the slices of both"
        )
    else:
        numbers = ragged_k(x, w, (a_ragged_metadata, b_ragged_metadata), config, fused)
    if c_acc_in is not None:
        numbers = numbers + _scaled(c_acc_in, flex.acc_data, numbers.shape)
    return _finished(numbers, result, precision, None if c is None else memory_of("c", c))


def _scaled(c_acc_in: torch.Tensor, flex: InFlexData, shape: torch.Size) -> torch.Tensor:
    added = flex.reinterpret(memory_of("c_acc_in", c_acc_in))
    if tuple(added.shape) not in (tuple(shape), (1, *shape)):
        raise InvalidInput(f"c_acc_in must be {list(shape)}, got {list(added.shape)}; allocate it so")
    added = added.reshape(shape).float()
    return added if flex.scale is None else added * per_matrix("acc_data.scale", flex.scale, shape)


def _finished(
    numbers: torch.Tensor, result: Result, precision: PrecisionConfig, memory: torch.Tensor | None
) -> torch.Tensor:
    flex = precision.flex_ctx.out_data
    if result.microscaled:
        values, scales = to_microscaled(numbers, result.dtype)
        keep_scales(precision.c_mx_scale, scales)
    elif result.dtype.itemsize == 1:
        values = to_fp8(numbers, result.dtype, flex)
    else:
        values = numbers.to(result.dtype)
    if memory is None:
        return values
    shape = tuple(values.shape)
    wanted = (1, *shape) if memory.ndim == len(shape) + 1 else shape
    return delivered("c", flex.reinterpret(memory), values, wanted).reshape(shape)
