"""One product for kernel families."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

from moe_core.base import INT32_LIMIT, ArraySpec, Target, dtypes, set_integer
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, QuantizedTensor
from moe_core.ops.lora.tail import Tail
from moe_core.ops.matmul.operands import MatmulSizes, check_operands, quantized_operands
from moe_core.specs import LayoutSpec, MatmulOperands, MatmulSpec, MatmulTuning, TileConfig

PLAIN, QUANTISED, PREPACKED = "plain", "quantised", "prepacked"
#: Partial maxima: one for each row of the sm90 family's consumers.
MAXIMA = 64


@dataclass(frozen=True)
class MatmulProblem:
    """The arguments of one `plan_matmul_ogs`, as ArraySpecs, checked on construction.

    out_format, finds_maxima, addressed: see `plan_product`. out_scale: the static scale fp32 `[1]` of out_format.
    expected_rows: rows to choose a tile for (None: spec.tuning's, else the layout's). multiprocessors: the most that
    persistent kernels fill (None: all), without effect on bits. tail: added to the sums before the bias.
    Raises InvalidInput, Unsupported.
    """

    operands: MatmulOperands
    layout: LayoutSpec | None
    spec: MatmulSpec
    target: Target
    outputs: tuple[str, ...] = ("y",)
    joined: bool = False
    out_format: Format | None = None
    out_scale: ArraySpec | None = None
    finds_maxima: bool = False
    addressed: bool = False
    expected_rows: int | None = None
    multiprocessors: int | None = None
    tail: Tail | None = None
    sizes: MatmulSizes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", check_operands(self.operands, self.layout, self.spec, self.joined))
        if self.multiprocessors is not None:
            set_integer(self, "multiprocessors", 1, INT32_LIMIT)
        quantized, outputs = self.quantized, self.outputs
        if quantized and (self.joined or ("x" in quantized and outputs != ("y",))):
            raise Unsupported(
                f"outputs must be ('y',) with a quantised x, and joined False with any quantised operand, got "
                f"{outputs} and {self.joined} with {', '.join(quantized)} quantised; dequantise it"
            )
        if outputs != ("y",) and any(tensor.spec.tiling is not None for tensor in quantized.values()):
            raise Unsupported(
                f"outputs must be ('y',) with prepacked weights, got {outputs}; restore the weights to train"
            )
        if outputs not in (("y",), ("pre",), ("y", "pre")):
            raise InvalidInput(f"outputs must be ('y',), ('pre',) or ('y', 'pre'), got {outputs}; choose one of them")
        weighted = self.operands.row_weight is not None
        if outputs != ("y",) and (self.spec.activation is None or weighted or self.spec.scatter != "row"):
            raise InvalidInput(
                "outputs must be ('y',) without a fused activation, with row_weight and with scatter='slot', got "
                f"{outputs}; leave them out"
            )

    @functools.cached_property
    def quantized(self) -> dict[str, QuantizedTensor]:
        return quantized_operands(self.operands)

    @property
    def weights(self) -> str:
        weight = self.operands.weight
        if not isinstance(weight, QuantizedTensor):
            return PLAIN
        return QUANTISED if weight.spec.tiling is None else PREPACKED

    @property
    def dtype(self) -> str:
        """The dtype of x, or of y if x is quantised."""
        x = self.operands.x
        dtype = self.spec.out_dtype if isinstance(x, QuantizedTensor) else x.dtype
        assert dtype is not None, "a quantised x is checked to have out_dtype"
        return dtype

    @property
    def d(self) -> int:
        return self.operands.x.shape[1]

    @property
    def n(self) -> int:
        return self.sizes.n

    @property
    def gate_layout(self) -> str | None:
        return self.spec.activation.gate_layout if self.spec.activation is not None else None

    @property
    def gated(self) -> bool:
        return self.spec.activation is not None and self.spec.activation.gated

    @property
    def buffers(self) -> int:
        """Weight tiles per step: 2 for fused gate and up."""
        return 2 if self.gated else 1

    @property
    def batch_invariant(self) -> bool:
        return self.tuning.batch_invariant

    @property
    def rows(self) -> int:
        if self.expected_rows is not None:
            return self.expected_rows
        tokens, layout = self.tuning.expected_tokens, self.layout
        if layout is not None and layout.limit is not None:
            return (layout.num_tokens if tokens is None else tokens) * layout.limit.per_token
        if tokens is not None:
            return tokens if layout is None else tokens * layout.top_k
        return self.operands.x.shape[0] if self.layout is None else self.layout.placed_slots

    @property
    def groups(self) -> int:
        return 1 if self.layout is None else self.layout.num_experts

    @property
    def used_groups(self) -> int:
        """Groups with rows if `rows` spread over as many as possible."""
        return min(self.expected_groups, self.rows)

    @property
    def expected_groups(self) -> int:
        experts = None if self.layout is None else self.tuning.expected_experts
        return self.groups if experts is None else experts

    @property
    def tuning(self) -> MatmulTuning:
        return self.spec.tuning or MatmulTuning()

    @property
    def rows_per_group(self) -> float:
        return self.rows / max(1, self.used_groups)

    @property
    def weight_bytes(self) -> int:
        """Bytes of plain weights that `used_groups` read."""
        return self.used_groups * self.d * self.n * self.buffers * dtypes.itemsize(self.dtype)

    @property
    def most_multiprocessors(self) -> int:
        most = self.target.num_sms
        return most if self.multiprocessors is None else min(self.multiprocessors, most)

    def waves(self, config: TileConfig) -> float:
        """Output tiles per multiprocessor with evenly spread rows."""
        per_group = -(-math.ceil(self.rows_per_group) // config.block_m) * -(-self.n // config.block_n)
        return self.used_groups * per_group / max(1, self.target.num_sms)

    def num_blocks(self, config: TileConfig) -> int:
        return -(-self.sizes.rows // config.block_m) if self.layout is None else self.layout.max_blocks(config.block_m)

    def tiles(self, config: TileConfig) -> int:
        return self.num_blocks(config) * -(-self.n // config.block_n)
