"""Options of the grouped matmul, its fused activation and its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_core.base import WEIGHT_LAYOUTS, checks, plan_type
from moe_core.errors import InvalidInput
from moe_core.specs.tuning import MatmulTuning

_GATHERS = ("row", "slot", "token")


@plan_type
@dataclass(frozen=True)
class WeightGradientSpec:
    """Options of one gradient of weights.

    Args:
        gather: the index of left and right: layout `row`, `slot` or `token`.
        left_columns, right_columns: (first, number) of the columns to take, or None for all.
        out_dtype: the dtype of d_weight, or None if it is not wanted.
        bias_side: `left` or `right`: its column sums are d_bias, in bias_dtype. None: no d_bias.
        num_layers: layers of the result, with a layer index.
        family: kernels to use, `portable` or `sm90`. None: the faster one that can run, for expected_tokens and
            expected_experts.
    """

    out_dtype: str | None
    gather: tuple[str, str] = ("row", "row")
    left_columns: tuple[int, int] | None = None
    right_columns: tuple[int, int] | None = None
    bias_side: str | None = None
    bias_dtype: str = "float32"
    num_layers: int = 1
    allow_tf32: bool = False
    family: str | None = None
    expected_tokens: int | None = None
    expected_experts: int | None = None

    def __post_init__(self) -> None:
        if self.family is not None:
            checks.require_choice("family", self.family, ("portable", "sm90"))
        for side in self.gather:
            checks.require_choice("gather", side, _GATHERS)
        if self.bias_side is not None:
            checks.require_choice("bias_side", self.bias_side, ("left", "right"))
        elif self.out_dtype is None:
            raise InvalidInput("out_dtype must be a dtype where bias_side is None, got None; ask for one of the two")
        checks.set_matmul_dtype(self, "out_dtype", optional=True)
        checks.set_matmul_dtype(self, "bias_dtype", optional=True)


#: The default of (alpha, limit). alpha None: the activation has none.
_CONSTANTS: dict[str, tuple[float | None, float | None]] = {
    "silu": (None, None),
    "gelu": (None, None),
    "gelu_tanh": (None, None),
    "relu2": (None, None),
    "swiglu_oai": (1.702, 7.0),
    "clamped_silu": (None, 7.0),
    "softcapped_silu": (4.0, 25.0),
}
ACTIVATIONS = tuple(_CONSTANTS)
ALWAYS_GATED = ("swiglu_oai", "clamped_silu", "softcapped_silu")
_MAY_LACK = (("limit", "swiglu_oai"), ("limit", "softcapped_silu"))
GATE_LAYOUTS = ("halves", "interleaved", "separate")
#: A constant that the caller has not stated. torch.compile traces a string.
_DEFAULT: Any = "default"


@plan_type
@dataclass(frozen=True)
class Activation:
    """An activation in fp32. gated: `act(gate) * up`, input 2F wide; else `act(x)`, input F wide.

    gate_layout: `halves` (gate columns first), `interleaved` (gate even columns, up odd) or `separate` (two buffers).
    Ignored if ungated.

    limit bounds both factors of a gated activation; None: no bound. Its default is 7.0 for swiglu_oai and clamped_silu,
    25.0 for softcapped_silu and None for the others. With `u = clamp(up, -limit, limit)`:

    - silu, gelu, gelu_tanh, relu2: `act(min(gate, limit)) * u`
    - clamped_silu: `min(silu(gate), limit) * u`
    - swiglu_oai: `g = min(gate, limit); g * sigmoid(alpha * g) * (u + 1)`, alpha 1.702 by default
    - softcapped_silu: `alpha * tanh(gate / alpha) * sigmoid(gate) * limit * tanh(up / limit)`, alpha 4.0 by default;
      up itself without a limit

    The last three are always gated, and clamped_silu always limited. The others have no alpha.
    """

    name: str
    gated: bool = True
    gate_layout: str | None = "halves"
    alpha: float | None = _DEFAULT
    limit: float | None = _DEFAULT

    def __post_init__(self) -> None:
        if isinstance(self.name, str) and self.name == "swigluoai":
            object.__setattr__(self, "name", "swiglu_oai")
        checks.require_choice("activation", self.name, ACTIVATIONS)
        checks.require_flag("gated", self.gated)
        if self.name in ALWAYS_GATED and not self.gated:
            raise InvalidInput(f"gated must be True for {self.name}, got False; it has no ungated form")
        for field, default in zip(("alpha", "limit"), _CONSTANTS[self.name], strict=True):
            value = getattr(self, field)
            if isinstance(value, str) and value == _DEFAULT:
                value = default
            elif value is None:
                if default is not None and (field, self.name) not in _MAY_LACK:
                    raise InvalidInput(f"{field} must be a number for {self.name}, got None; leave it out")
            elif field == "alpha" and default is None:
                raise InvalidInput(
                    f"alpha belongs to swiglu_oai and softcapped_silu, got {value} for {self.name}; leave it out"
                )
            elif not self.gated:
                raise InvalidInput(f"limit must be None where gated=False, got {value}; leave it out")
            else:
                value = checks.finite_float(field, value)
                if value <= 0 and (field, self.name) != ("alpha", "swiglu_oai"):
                    raise InvalidInput(f"{field} must be positive, got {value}; leave it out for the default")
            object.__setattr__(self, field, value)
        if self.gated:
            checks.require_choice("gate_layout", self.gate_layout, GATE_LAYOUTS)
        elif self.gate_layout in ("halves", None):  # the default: not stated
            object.__setattr__(self, "gate_layout", None)
        else:
            raise InvalidInput(f"gate_layout must be None where gated=False, got {self.gate_layout!r}; leave it out")

    def input_width(self, width: int) -> int:
        """Columns of its input for `width` columns of its output."""
        return 2 * width if self.gated else width


@plan_type
@dataclass(frozen=True)
class MatmulSpec:
    """Options of one ragged grouped matmul, `y[row] = epilogue(x[row] @ w[expert of row])`.

    Args:
        weight_layout: `in_out` `[E, D, N]` or `out_in` `[E, N, D]`.
        gather: the row of x for a layout row: `row` (x is in layout order), `token` (slot // K) or `slot`.
        scatter: the destination of a layout row: `row` (layout order) or `slot`.
        out_dtype: None: the dtype of x, which must then not be quantised.
        allow_tf32: fp32 inputs may use TF32 (else IEEE fp32).
        fast_accumulate: fp8 products may accumulate in the tensor cores over more than 128 columns.
    """

    weight_layout: str
    gather: str = "row"
    scatter: str = "row"
    activation: Activation | None = None
    out_dtype: str | None = None
    allow_tf32: bool = False
    tuning: MatmulTuning | None = None
    fast_accumulate: bool = False

    def __post_init__(self) -> None:
        checks.require_choice("weight_layout", self.weight_layout, WEIGHT_LAYOUTS)
        checks.require_kind("tuning", self.tuning, MatmulTuning, optional=True)
        checks.require_choice("gather", self.gather, ("row", "token", "slot"))
        checks.require_choice("scatter", self.scatter, ("row", "slot"))
        checks.require_kind("activation", self.activation, Activation, optional=True)
        checks.require_flags(self, "fast_accumulate", "allow_tf32")
        checks.set_matmul_dtype(self, "out_dtype", optional=True)
