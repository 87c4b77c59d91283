"""DeepGEMM's grouped products on our kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_core.base.checks import require_at_least, require_flag
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import FP8_BLOCK, FP8_GROUP
from moe_core.modular.deep_gemm import RECIPE, check_products, has_e8m0_mode, matmul_side, pair_of, tile_for_rows
from moe_core.specs.matmul import MatmulSpec
from moe_core.specs.operands import MatmulOperands
from moe_core.specs.tile import TileConfig
from moe_core.specs.tuning import MatmulTuning
from moe_torch import ops
from moe_torch.bridge.arrays import target_of_device
from moe_torch.bridge.options import constant_result
from moe_torch.modular.into import write_into
from moe_torch.modular.stages import batched_layout
from moe_torch.operators.requests import matmul_request

Quantized = tuple[torch.Tensor, torch.Tensor]
_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


def m_grouped_fp8_gemm_nt_contiguous(
    a: Quantized,
    b: Quantized,
    d: torch.Tensor,
    m_indices: torch.Tensor,
    recipe: Sequence[int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """Write `d[row] = a[row] @ b[m_indices[row]].T` for every row: the contiguous layout.

    K and N are multiples of 128. Groups may begin anywhere, in any order. Works in CUDA graphs and under
    `torch.compile`, without gradients. a: e4m3 `[M, K]` and scales fp32 `[M, K / 128]`, of any strides. b: e4m3 `[G, N,
    K]` and scales fp32 `[G, N / 128, K / 128]`. d: `[M, N]` in bf16, fp16 or fp32, dense rows. m_indices: int32 `[M]`,
    the group of each row. Rows with another number, such as -1, are not read and are zero in d. recipe: None or (1,
    128, 128). compiled_dims, disable_ue8m0_cast: checked, without effect.
    """
    _require_options(recipe, compiled_dims, disable_ue8m0_cast)
    _require_products(a, b, d, masked=False)
    rows, groups = a[0].shape[0], b[0].shape[0]
    _require_indices("m_indices", m_indices, rows)
    layout = ops.make_layout(m_indices.reshape(-1, 1), groups)
    _write(d, a, b, layout, MatmulSpec("out_in", "token", "slot", out_dtype=_name(d)))


def m_grouped_fp8_gemm_nt_masked(
    a: Quantized,
    b: Quantized,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: Sequence[int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """Write `d[g, :masked_m[g]] = a[g, :masked_m[g]] @ b[g].T` for every group: the masked layout.

    a: e4m3 `[G, M, K]` and scales fp32 `[G, M, K / 128]`. d: `[G, M, N]`. masked_m: int32 `[G]` on the device. Rows
    past it are not read, and are zeros in d. expected_m: about how many rows of a group are used, to choose tiles. The
    rest is as in `m_grouped_fp8_gemm_nt_contiguous`.
    """
    _require_options(recipe, compiled_dims, disable_ue8m0_cast)
    require_at_least("expected_m", expected_m, 1)
    groups, rows, n = _require_products(a, b, d, masked=True)
    _require_indices("masked_m", masked_m, groups)
    k = a[0].shape[2]
    flat = d.view(groups * rows, n)
    device = d.device
    tile = _tile(groups, n, k, min(expected_m, max(rows, 1)), _name(d), device.type, device.index or 0)
    tuning = None if tile is None else MatmulTuning(TileConfig(*tile))
    spec = MatmulSpec("out_in", out_dtype=_name(d), tuning=tuning)
    layout = batched_layout(groups, rows, masked_m.clamp(0, rows))
    a = a[0].reshape(groups * rows, k), a[1].reshape(groups * rows, a[1].shape[2])
    _write(flat, a, b, layout, spec)


def is_blackwell_deep_gemm_e8m0_used(device: torch.device | str | None = None) -> bool:
    """Return True on chips where DeepGEMM takes power-of-two scales only: Blackwell, sm_100 to sm_109.

    device: None: the current CUDA device, if any. `e8m0=True` makes experts use such scales.
    """
    if device is None:
        if not torch.cuda.is_available():
            return False
        device = torch.device("cuda", torch.cuda.current_device())
    device = torch.device(device)
    return device.type == "cuda" and _on_blackwell(device.index or 0)


@constant_result
def _on_blackwell(index: int) -> bool:
    return has_e8m0_mode(target_of_device(torch.device("cuda", index)))


@constant_result
def _tile(groups: int, n: int, k: int, rows: int, out_dtype: str, kind: str, index: int) -> tuple[Any, ...] | None:
    """Fields of the tile, a constant of compiled programs."""
    tile = tile_for_rows((groups, n, k), rows, out_dtype, target_of_device(torch.device(kind, index)))
    return None if tile is None else tuple(getattr(tile, name) for name in TileConfig.__match_args__)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _write(d: torch.Tensor, a: Quantized, b: Quantized, layout: ops.RaggedLayout, spec: MatmulSpec) -> None:
    sides = (matmul_side(format, side[0], side[1].contiguous()) for format, side in ((FP8_GROUP, a), (FP8_BLOCK, b)))
    operator, arguments = matmul_request(MatmulOperands(*sides), layout, spec)
    write_into(operator, {"y": d}, arguments)


def _require_products(a: Quantized, b: Quantized, d: torch.Tensor, masked: bool) -> tuple[Any, ...]:
    pairs = pair_of("a", a), pair_of("b", b)
    for name, (values, _) in (("a", a), ("b", b)):
        if not values.is_contiguous():
            raise InvalidInput(f"{name}[0] must be dense, got strides {values.stride()}; call contiguous() on it")
    shape = check_products(*pairs, masked=masked)
    if d.dtype not in _OUTPUTS or tuple(d.shape) != shape or not d.is_contiguous():
        raise InvalidInput(
            f"d must be bf16, fp16 or fp32 {list(shape)}, dense, got {d.dtype} {list(d.shape)} with strides "
            f"{d.stride()}; allocate it so"
        )
    return shape


def _require_indices(name: str, indices: torch.Tensor, count: Any) -> None:
    if indices.dtype != torch.int32 or indices.dim() != 1 or indices.shape[0] != count:
        raise InvalidInput(
            f"{name} must be torch.int32 [{count}], got {indices.dtype} {list(indices.shape)}; cast or cut it"
        )


def _require_options(recipe: Sequence[int] | None, compiled_dims: str, disable_ue8m0_cast: bool) -> None:
    if recipe is not None and tuple(recipe) != RECIPE:
        raise Unsupported(f"recipe must be None or {RECIPE}, the groups that share a scale, got {recipe}; quantise so")
    if not isinstance(compiled_dims, str) or set(compiled_dims) - set("mnk"):
        raise InvalidInput(f"compiled_dims must be letters of 'mnk', got {compiled_dims!r}; leave it out")
    require_flag("disable_ue8m0_cast", disable_ue8m0_cast)
