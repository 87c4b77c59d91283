"""The quantisation of one layer's experts, and its arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe_core.base.checks import finite_float, require_at_least, require_choice, require_flag
from moe_core.base.dtypes import canonical
from moe_core.errors import InvalidInput, Unsupported

#: Those of the flags of `make`.
FLAGGED_SCHEMES = ("fp8_w8a8", "int8_w8a8", "int8_w8a16", "int4_w4a16", "mxfp4_w4a4")
SCHEMES = (*FLAGGED_SCHEMES, "mxfp4_w4a16", "fp8_w8a16", "mxfp8", "mxfp4_mxfp8", "mxfp4_w4a8", "nvfp4_w4a16")
#: Published schemes with other numbers than those of any product here.
REFUSED_SCHEMES = {
    "nvfp4_w4a4": "no quantiser here rounds the scales of activations to e4m3; nvfp4_w4a16 has the same weights",
    "int4_w4a8": "its kernels round each int4 weight times its scale to e4m3; int4_w4a16 has the same weights",
    "mxfp6": "no product here reads e3m2 or e2m3; dequantise the weights",
}
#: Numbers of the activation.
CONSTANTS = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
#: Groups of 32 or 16 columns.
_OWN_GROUPS = ("mxfp4_w4a4", "mxfp4_w4a16", "mxfp8", "mxfp4_mxfp8", "mxfp4_w4a8", "nvfp4_w4a16")
#: Unsigned codes in groups along the input axis.
_GROUPED = ("int8_w8a16", "int4_w4a16")
#: Fields of precision objects that hold scales of weights, in `triton_kernels` of Triton 3.5 and 3.8.
SCALES_OF_PRECISION = ("weight_scale", "b_mx_scale")
_QUANTIZED_ACTIVATIONS = ("fp8_w8a8", "int8_w8a8", "mxfp4_w4a4", "mxfp8", "mxfp4_mxfp8", "mxfp4_w4a8")
#: Schemes with a choice of scales for activations.
_BY_TOKEN = ("fp8_w8a8", "int8_w8a8")
#: Arrays that only quantised weights have.
QUANTIZATION_ARRAYS = ("w1_scale", "w2_scale", "w1_zp", "w2_zp", "a1_scale", "a2_scale")


def widened(array: Any) -> Any:
    """In fp32, of any library."""
    if hasattr(array, "astype"):
        return array.astype("float32")
    return array.float()


def _is_scheme(name: str) -> Any:
    return property(lambda self: self.scheme == name)


@dataclass(frozen=True, eq=False)
class FusedMoEQuantConfig:
    """One scheme, or None for weights in bf16, fp16 or fp32, and the arrays that go with the weights.

    Equal only to itself, as it holds arrays. Raises InvalidInput for contradictions. scheme: a name of SCHEMES. Those
    of REFUSED_SCHEMES raise Unsupported.
    per_act_token_quant: activations have a scale per token and weights one per output channel. False: one per tensor.
    block_shape: (rows, columns) of weights that share a scale. None: the scheme's. w1_bias, w2_bias: fp32 `[E, N]` and
    `[E, K]`. w1_scale, w2_scale, w1_zp, w2_zp: of the weights. a1_scale, a2_scale: static scales of the activations
    before each product. w1_precision, w2_precision: upstream's precision objects, also accepted as scales. g1_alphas,
    g2_alphas: fp32 `[E]`, global scales of nvfp4, which join e4m3 scales when both are given. gemm1_alpha, gemm1_beta,
    gemm1_clamp_limit: of activations, see `activation_of`.
    """

    scheme: str | None = None
    per_act_token_quant: bool = False
    block_shape: tuple[int, int] | None = None
    w1_bias: Any = None
    w2_bias: Any = None
    w1_precision: Any = None
    w2_precision: Any = None
    w1_scale: Any = None
    w2_scale: Any = None
    w1_zp: Any = None
    w2_zp: Any = None
    a1_scale: Any = None
    a2_scale: Any = None
    g1_alphas: Any = None
    g2_alphas: Any = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None
    #: Scales are in precision objects or wrappers, which `moe_torch.modular` unwraps.
    is_wrapped: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        require_flag("per_act_token_quant", self.per_act_token_quant)
        if self.scheme is not None:
            if (reason := REFUSED_SCHEMES.get(self.scheme)) is not None:
                raise Unsupported(f"scheme {self.scheme} has no exact product: {reason}; dequantise the weights")
            require_choice("scheme", self.scheme, SCHEMES)
        for name in CONSTANTS:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, finite_float(name, value))
        if self.block_shape is not None:
            rows_columns = tuple(self.block_shape)
            if len(rows_columns) != 2:
                raise InvalidInput(f"block_shape must be (rows, columns), got {self.block_shape}; pass two numbers")
            # 0 rows means "no grouping of output channels" in checkpoints.
            grouped = self.scheme in _GROUPED
            require_at_least("block_shape rows", rows_columns[0], 0 if grouped else 1)
            require_at_least("block_shape columns", rows_columns[1], 1)
            if grouped and rows_columns[0] > 1:
                raise InvalidInput(
                    f"block_shape must be (0, group) or (1, group) for {self.scheme}, whose groups lie along the input "
                    f"axis, got {rows_columns}; pass (0, {rows_columns[1]})"
                )
            if self.scheme in _OWN_GROUPS:
                raise InvalidInput(
                    f"block_shape must be None for {self.scheme}, whose groups have a size of their own, got "
                    f"{rows_columns}; leave it out"
                )
            if self.per_act_token_quant:
                raise InvalidInput(
                    "per_act_token_quant must be False with block_shape, whose activations have a scale per token and "
                    f"{rows_columns[1]} columns, got True and {rows_columns}; choose one"
                )
            object.__setattr__(self, "block_shape", rows_columns)
        for number in (1, 2):
            scale = getattr(self, f"w{number}_scale")
            if any(hasattr(scale, name) for name in SCALES_OF_PRECISION):
                object.__setattr__(self, f"w{number}_precision", scale)
                object.__setattr__(self, f"w{number}_scale", None)
        scales = (self.w1_scale, self.w2_scale)
        wrapped = any(hasattr(scale, "storage") and not callable(scale.storage) for scale in scales)
        object.__setattr__(self, "is_wrapped", wrapped or not self.w1_precision is self.w2_precision is None)
        if self.per_act_token_quant and self.scheme not in (*_BY_TOKEN, None):
            how = "have scales of their own" if self.quantizes_activations else "are not quantised"
            raise InvalidInput(
                f"per_act_token_quant must be False for {self.scheme}, whose activations {how}, got True; leave it out"
            )
        self._join_global_scales()
        if self.scheme is None:
            present = [name for name in ("block_shape", *QUANTIZATION_ARRAYS) if getattr(self, name) is not None]
            present += ["per_act_token_quant"] if self.per_act_token_quant else []
            if present:
                raise InvalidInput(
                    f"{present[0]} must not be given without a scheme, got one; name the scheme, as in "
                    "FusedMoEQuantConfig.make(use_fp8_w8a8=True)"
                )

    def _join_global_scales(self) -> None:
        """Multiply e4m3 scales of nvfp4 once, in fp32."""
        for number in (1, 2):
            scale, alphas = getattr(self, f"w{number}_scale"), getattr(self, f"g{number}_alphas")
            if alphas is None:
                continue
            if self.scheme != "nvfp4_w4a16":
                raise InvalidInput(
                    f"g{number}_alphas must be None for {self.scheme}, got an array; only nvfp4_w4a16 has global scales"
                )
            if scale is None:
                continue
            if canonical(scale.dtype) != "float8_e4m3fn" or tuple(alphas.shape) != (scale.shape[0],):
                raise InvalidInput(
                    f"w{number}_scale must be e4m3 [E, ..] with g{number}_alphas [E], got {scale.dtype} "
                    f"{tuple(scale.shape)} and {tuple(alphas.shape)}; pass fp32 scales without g{number}_alphas"
                )
            shape = (-1, *[1] * (len(scale.shape) - 1))
            joined = widened(scale) * widened(alphas).reshape(shape)
            object.__setattr__(self, f"w{number}_scale", joined)
            object.__setattr__(self, f"g{number}_alphas", None)

    @classmethod
    def make(
        cls,
        use_fp8_w8a8: bool = False,
        use_int8_w8a8: bool = False,
        use_int8_w8a16: bool = False,
        use_int4_w4a16: bool = False,
        use_mxfp4_w4a4: bool = False,
        per_act_token_quant: bool = False,
        block_shape: Sequence[int] | None = None,
        **arrays: Any,
    ) -> FusedMoEQuantConfig:
        """The configuration of at most one scheme (more: InvalidInput). arrays: the other fields."""
        requested = (use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, use_int4_w4a16, use_mxfp4_w4a4)
        flags = dict(zip(FLAGGED_SCHEMES, requested, strict=True))
        for name, flag in flags.items():
            require_flag(f"use_{name}", flag)
        chosen = [name for name, flag in flags.items() if flag]
        if len(chosen) > 1:
            raise InvalidInput(
                f"at most one of {', '.join(f'use_{name}' for name in flags)} must be True, got "
                f"{' and '.join(f'use_{name}' for name in chosen)}; choose one"
            )
        known = {field.name for field in dataclasses.fields(cls) if field.init}
        known -= {"scheme", "per_act_token_quant", "block_shape"}
        for name in arrays:
            if name not in known:
                raise InvalidInput(f"make takes no {name}; its arrays are {', '.join(sorted(known))}")
        block = None if block_shape is None else tuple(block_shape)
        return cls(chosen[0] if chosen else None, per_act_token_quant, block, **arrays)  # pyright: ignore[reportArgumentType]

    def with_arrays(self, **arrays: Any) -> FusedMoEQuantConfig:
        """Add the arrays of a call. Raises InvalidInput for an array that is set already."""
        present = {name: array for name, array in arrays.items() if array is not None}
        for name, array in present.items():
            current = getattr(self, name)
            if current is not None and current is not array:
                raise InvalidInput(
                    f"{name} must not be given twice, got it in the configuration and with the call; leave one out"
                )
        return dataclasses.replace(self, **present) if present else self

    @property
    def constants(self) -> tuple[float | None, float | None, float | None]:
        return self.gemm1_alpha, self.gemm1_beta, self.gemm1_clamp_limit

    @property
    def choices(self) -> tuple[Any, ...]:
        return self.scheme, self.per_act_token_quant, self.block_shape, *self.constants

    @property
    def arrays(self) -> tuple[Any, ...]:
        weights = (self.w1_scale, self.w2_scale, self.w1_zp, self.w2_zp)
        return (self.w1_bias, self.w2_bias, *weights, self.a1_scale, self.a2_scale)

    @property
    def quantizes_activations(self) -> bool:
        return self.scheme in _QUANTIZED_ACTIVATIONS

    use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16 = map(_is_scheme, SCHEMES[:3])
    use_int4_w4a16, use_mxfp4_w4a4, use_mxfp4_w4a16 = map(_is_scheme, SCHEMES[3:6])
    use_fp8_w8a16, use_mxfp4_w4a8 = map(_is_scheme, ("fp8_w8a16", "mxfp4_w4a8"))
    use_nvfp4_w4a16 = _is_scheme("nvfp4_w4a16")


FUSED_MOE_UNQUANTIZED_CONFIG = FusedMoEQuantConfig()
