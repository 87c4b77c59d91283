"""What the modular kernels of both front-ends share: names, sizes and configurations, independent of any framework.

`moe_torch.modular` and `moe_jax.modular` are what users import; docs/modular.md lists every name.
"""

from moe_core.modular.activation_format import FusedMoEActivationFormat
from moe_core.modular.activation_names import activation_of, width_after
from moe_core.modular.chunk_tuning import tuning_of_whole
from moe_core.modular.deep_gemm import deep_gemm_block_shape
from moe_core.modular.expert_tokens import ExpertTokensMetadata
from moe_core.modular.expert_weights import (
    activation_quantization,
    expert_weights,
    rows_are_alone,
    weight_quantization,
    why_unsupported,
)
from moe_core.modular.parallel_config import FusedMoEParallelConfig
from moe_core.modular.problem_size import ProblemSize, moe_problem_size
from moe_core.modular.quant_config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig
from moe_core.modular.quant_key import QuantKey, ScaleDesc, quant_key
from moe_core.modular.slot_context import SlotContext

__all__ = [
    "FUSED_MOE_UNQUANTIZED_CONFIG",
    "ExpertTokensMetadata",
    "FusedMoEActivationFormat",
    "FusedMoEParallelConfig",
    "FusedMoEQuantConfig",
    "ProblemSize",
    "QuantKey",
    "ScaleDesc",
    "SlotContext",
    "activation_of",
    "activation_quantization",
    "deep_gemm_block_shape",
    "expert_weights",
    "moe_problem_size",
    "quant_key",
    "rows_are_alone",
    "tuning_of_whole",
    "weight_quantization",
    "why_unsupported",
    "width_after",
]
