"""DeepGEMM's contract: shapes and dtypes of its grouped products, and its mode of scales.

Grouped products `D = A @ B.T` of e4m3: A with fp32 scales of 1 x 128 values, B with fp32 scales of 128 x 128.
Contiguous layout: A `[M, K]`, the rows of a group together and padded to 128, `m_indices [M]` names the group of each
row. Masked layout: A `[G, M, K]` with `masked_m [G]` used rows in each group. Source: README and tests of
github.com/deepseek-ai/DeepGEMM.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moe_core import formats
from moe_core.base.dtypes import MATMUL_DTYPES
from moe_core.base.target import Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import FP8_BLOCK, FP8_GROUP, Format, QuantizedSpec, QuantizedTensor, quantized_specs
from moe_core.modular.quant_config import FusedMoEQuantConfig
from moe_core.modular.schemes import activation_quantization, weight_quantization
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.tile_choice import choose_tile
from moe_core.plan.steps import LaunchPlan
from moe_core.specs.matmul import MatmulSpec
from moe_core.specs.operands import ExpertWeights, MatmulOperands
from moe_core.specs.routing import LayoutSpec
from moe_core.specs.tile import TileConfig
from moe_core.specs.tuning import MatmulTuning

#: Rows of padded groups, sides of a weight's block.
ALIGNMENT = 128
_E4M3 = "float8_e4m3fn"
#: Upstream's term: rows of A, rows of B, columns of both that share a scale.
RECIPE = (1, ALIGNMENT, ALIGNMENT)


def deep_gemm_block_shape() -> list[int]:
    """[rows, columns] of weights that share a scale. Groups are padded to the first number."""
    return [ALIGNMENT, ALIGNMENT]


def has_e8m0_mode(target: Target) -> bool:
    """See `is_blackwell_deep_gemm_e8m0_used` in `moe_torch.modular`."""
    return target.is_sm100


def activation_format(e8m0: bool) -> Format:
    """The format of quantised activations: 1 x 128, with e8m0 power-of-two scales."""
    return formats.FP8_GROUP_POW2 if e8m0 else FP8_GROUP


def why_not_deep_gemm(config: FusedMoEQuantConfig) -> str | None:
    """None: DeepGEMM's experts can run it."""
    quantization = weight_quantization(config), activation_quantization(config)
    if quantization == (FP8_BLOCK, FP8_GROUP):
        return None
    weights, activations = ("plain" if format is None else format.name for format in quantization)
    return (
        f"DeepGEMM multiplies {FP8_GROUP} rows with {FP8_BLOCK} weights, got {activations} rows and {weights} weights; "
        f"pass FusedMoEQuantConfig.make(use_fp8_w8a8=True, block_shape={deep_gemm_block_shape()})"
    )


class Pair(NamedTuple):
    """Shapes and dtypes of values and scales."""

    values: Sequence[Any]
    values_dtype: str
    scales: Sequence[Any]
    scales_dtype: str


def _name(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def pair_of(name: str, pair: Any) -> Pair:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise InvalidInput(f"{name} must be (values, scales), got {type(pair).__name__}; pass both arrays")
    values, scales = pair
    if not all(hasattr(one, "shape") and hasattr(one, "dtype") for one in pair):
        kinds = ", ".join(type(one).__name__ for one in pair)
        raise InvalidInput(f"{name} must be two arrays (values, scales), got ({kinds}); pass both arrays")
    return Pair(values.shape, _name(values), scales.shape, _name(scales))


def check_experts(experts: ExpertWeights) -> ExpertWeights:
    """Raises InvalidInput if a product would break the contract."""
    for weight in (experts.gate_up, experts.down):
        k = weight.values.shape[2]
        rows = Pair((0, k), _E4M3, (0, k // ALIGNMENT), "float32")
        check_products(rows, pair_of("b", (weight.values, weight.scales)))
    return experts


def has_scales(hidden_states: Any, a1q_scale: Any) -> bool:
    """True if hidden states `[.., K]` are e4m3 with scales `[.., K / 128]`, False for bf16, fp16 or fp32 without."""
    dtype, (*lead, columns) = _name(hidden_states), hidden_states.shape
    if dtype == _E4M3 and a1q_scale is None:
        raise InvalidInput("a1q_scale must be given for e4m3 hidden_states, got None; pass their scales")
    if dtype == _E4M3:
        wanted = [*lead, columns // ALIGNMENT]
        if _name(a1q_scale) != "float32" or list(a1q_scale.shape) != wanted:
            raise InvalidInput(
                f"a1q_scale must be float32 {wanted}, a scale for each 1 x {ALIGNMENT} values, got {a1q_scale.dtype} "
                f"{list(a1q_scale.shape)}; pass those of hidden_states"
            )
    elif a1q_scale is not None or dtype not in MATMUL_DTYPES:
        raise InvalidInput(
            f"hidden_states must be bf16, fp16 or fp32 without a1q_scale, or e4m3 with it, got {hidden_states.dtype} "
            f"and {'no' if a1q_scale is None else 'an'} a1q_scale; pass one of these pairs"
        )
    return dtype == _E4M3


def check_products(a: Pair, b: Pair, *, masked: bool = False) -> tuple[Any, ...]:
    """The shape of D: `[M, N]` (masked: `[G, M, N]`). Raises InvalidInput, and Unsupported for packed scales."""
    for name, pair in (("a", a), ("b", b)):
        if pair.values_dtype != _E4M3:
            raise InvalidInput(f"{name}[0] must be {_E4M3}, got {pair.values_dtype}; quantise it with quantize_rows")
        if pair.scales_dtype != "float32":
            kind = Unsupported if pair.scales_dtype == "int32" else InvalidInput
            raise kind(
                f"{name}[1] must be float32, powers of two of e8m0 scales too, got {pair.scales_dtype}; unpack the "
                "bytes of packed ones, each 2^(byte - 127)"
            )
    rank = 3 if masked else 2
    if len(a.values) != rank or len(b.values) != 3:
        wanted = "[G, M, K] of the masked layout" if masked else "[M, K] of the contiguous layout"
        raise InvalidInput(
            f"a[0] must be {wanted} and b[0] [G, N, K], got {tuple(a.values)} and {tuple(b.values)}; reshape them"
        )
    groups, n, k = b.values
    if not groups or (masked and a.values[0] != groups):
        raise InvalidInput(
            f"a[0] must have the {groups} groups of b[0], at least one, got {tuple(a.values)} and {tuple(b.values)}; "
            "pass a block of rows for each"
        )
    if a.values[-1] != k:
        raise InvalidInput(f"a[0] must have the {k} columns of b[0], got {tuple(a.values)}; pass rows of that width")
    for name, size in (("N", n), ("K", k)):
        if size % ALIGNMENT or not size:
            raise InvalidInput(
                f"{name} must be a multiple of {ALIGNMENT}, whose weights share scales, got {size} in b[0] "
                f"{tuple(b.values)}; pad the weights with zeros"
            )
    shapes = {
        "a[1]": (a.scales, (*a.values[:-1], k // ALIGNMENT)),
        "b[1]": (b.scales, (groups, n // ALIGNMENT, k // ALIGNMENT)),
    }
    for name, (shape, wanted) in shapes.items():
        if tuple(shape) != wanted:
            group = f"{RECIPE[0 if name == 'a[1]' else 1]} x {RECIPE[2]}"
            raise InvalidInput(
                f"{name} must be {tuple(wanted)}, a scale for each {group} values, got {tuple(shape)}; pass the scales "
                f"of {name[0]}[0]"
            )
    return (*a.values[:-1], n)


@functools.lru_cache(maxsize=1024)
def tile_for_rows(sizes: tuple[int, int, int], rows: int, out_dtype: str, target: Target) -> TileConfig | None:
    """The tiles for this number of rows in each group (`expected_m`), or None. sizes: (G, N, K)."""
    groups, n, k = sizes
    layout = LayoutSpec(groups * rows, 1, groups)
    x = quantized_specs(QuantizedSpec(FP8_GROUP), (groups * rows, k))
    operands = MatmulOperands(x, quantized_specs(QuantizedSpec(FP8_BLOCK), (groups, n, k)))
    choice = choose_tile(MatmulProblem(operands, layout, MatmulSpec("out_in", out_dtype=out_dtype), target))
    return None if choice is None else choice.config


def plan_masked(
    operands: MatmulOperands, layout: LayoutSpec, spec: MatmulSpec, expected_m: int, target: Target
) -> LaunchPlan:
    groups, n, k = operands.weight.shape
    assert spec.out_dtype is not None
    config = tile_for_rows((groups, n, k), expected_m, spec.out_dtype, target)
    if config is not None:
        spec = dataclasses.replace(spec, tuning=MatmulTuning(config))
    return plan_matmul_ogs(operands, layout, spec, target)


def matmul_side(format: Format, values: Any, scales: Any) -> QuantizedTensor:
    return QuantizedTensor.unchecked(QuantizedSpec(format), values, scales)


TRITON, DEEP_GEMM = "triton_expert", "deep_gemm_expert"
#: DeepGEMM does not pay for fewer input columns of the second product.
_LEAST_WIDTH = 512


@dataclass(frozen=True)
class ExpertsChoice:
    """The chosen member of `TritonOrDeepGemmExperts` and the reason."""

    member: str
    reason: str

    def __str__(self) -> str:
        return f"{self.member}: {self.reason}"


def why_not_allowed(allow_deep_gemm: bool, use_fp8_w8a8: bool, block_shape: Sequence[int] | None) -> str | None:
    """The reason why DeepGEMM is not allowed at any size, or None."""
    if not allow_deep_gemm:
        return "allow_deep_gemm is False"
    if not use_fp8_w8a8:
        return "use_fp8_w8a8 is False"
    if block_shape is None or list(block_shape) != deep_gemm_block_shape():
        return f"block_shape is not {deep_gemm_block_shape()}"
    return None


def why_not_valid_shape(M: Any, N: Any, K: Any) -> str | None:
    """M may be symbolic. N: columns of w1 for memory, of w2's input for the choice."""
    if M < ALIGNMENT:
        return f"there are fewer than {ALIGNMENT} tokens"
    if N % ALIGNMENT or K % ALIGNMENT:
        return f"N or K is no multiple of {ALIGNMENT}"
    if N <= _LEAST_WIDTH:
        return f"N is at most {_LEAST_WIDTH}"
    return None


@dataclass(frozen=True)
class DispatchCase:
    """The facts that decide. M tokens. w2: its shape `[E, K, N]`. dtypes: of w1 and w2. strided: names of arrays that
    are not contiguous. e8m0_used: the chip's mode of scales is in use. quantized: by `prepare`, for DeepGEMM only."""

    M: Any
    w2: Sequence[int]
    dtypes: tuple[str, str]
    strided: tuple[str, ...] = ()
    e8m0_used: bool = False
    quantized: bool = False


def choose_experts(not_allowed: str | None, case: DispatchCase) -> ExpertsChoice:
    """DeepGEMM if it is allowed and the case valid for it."""
    if not_allowed is not None:
        return ExpertsChoice(TRITON, not_allowed)
    if case.e8m0_used:
        return ExpertsChoice(DEEP_GEMM, "the chip's mode of power-of-two scales is in use")
    if case.quantized:
        return ExpertsChoice(DEEP_GEMM, "the hidden states are quantised already")
    _, k, n = case.w2
    reason = why_not_valid_shape(case.M, n, k)
    if reason is None and case.dtypes != (_E4M3, _E4M3):
        reason = f"w1 and w2 are {' and '.join(case.dtypes)}, not both {_E4M3}"
    if reason is None and case.strided:
        reason = f"{case.strided[0]} is not contiguous"
    if reason is not None:
        return ExpertsChoice(TRITON, reason)
    return ExpertsChoice(DEEP_GEMM, "it is allowed, and sizes, dtypes and strides are valid for it")


def explain_choice(not_allowed: str | None, case: DispatchCase) -> str:
    _, k, n = case.w2
    choice = choose_experts(not_allowed, case)
    return f"{choice} (M = {case.M}, N = {n}, K = {k}; w1 and w2 {' and '.join(case.dtypes)})"
