"""What `matmul_ogs` calls for its operands: the operator, its tensors and its options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_core.formats import QuantizedTensor
from moe_core.operands import MatmulOperands, RaggedLayout
from moe_core.specs import MatmulSpec
from moe_torch.dispatch import Operator
from moe_torch.operators import MATMUL_OGS
from moe_torch.options import encode, require_instance
from moe_torch.quantized_operators import MATMUL_OGS_QUANTIZED


def is_quantized(first: Any, second: Any, third: Any) -> bool:
    """Whether one of three matrices is a `QuantizedTensor`."""
    return (
        isinstance(first, QuantizedTensor) or isinstance(second, QuantizedTensor) or isinstance(third, QuantizedTensor)
    )


def operand_arrays(operands: MatmulOperands) -> tuple[Any, ...]:
    """The arrays of a bundle in the order of the operator's arguments."""
    return (
        operands.x,
        operands.weight,
        operands.up,
        operands.bias,
        operands.up_bias,
        operands.row_weight,
        operands.layer,
    )


def matmul_request(
    operands: MatmulOperands, layout: RaggedLayout | None, spec: MatmulSpec
) -> tuple[Operator, Sequence[Any], str]:
    """The operator for such operands, its tensors in order (None where absent) and its options.

    Raises InvalidInput for arguments of another type.
    """
    require_instance("operands", operands, MatmulOperands)
    require_instance("spec", spec, MatmulSpec)
    sizes, grouping = None, (None, None, None, None)
    if layout is not None:
        require_instance("layout", layout, RaggedLayout)
        sizes = (layout.spec.top_k, layout.spec.num_experts, layout.spec.alignment, layout.spec.max_rows)
        grouping = (layout.group_sizes, layout.group_start, layout.slot_of_row, layout.row_of_slot)
    arrays = (*operand_arrays(operands), *grouping)
    if is_quantized(operands.x, operands.weight, operands.up):
        text = encode(spec, sizes, MATMUL_OGS_QUANTIZED.formats(arrays))
        return MATMUL_OGS_QUANTIZED, MATMUL_OGS_QUANTIZED.arguments(arrays), text
    return MATMUL_OGS, arrays, encode(spec, sizes)
