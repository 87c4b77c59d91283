"""One MoE layer as functions: parameters, initialiser, forward. The Flax layers use them.

Parameters are nested dicts of arrays with MaxText's names, in the storage `MAXTEXT` unless the spec has another:
`gate/kernel` `[D, E]`, `wi_0` (gate), `wi_1` (up) `[E, D, F]` and `wo` `[E, F, D]`. gate_layout `halves` or
`interleaved` and ungated experts have one buffer `wi`. Biases: `gate/bias`, `wi_0_bias`, `wi_1_bias` (`wi_bias`),
`wo_bias`. `gate/correction_bias` is state. Shared experts: `shared_experts/wi_0/kernel` and so on, and
`shared_experts/gate/kernel`. A stack of L layers has a leading axis `[L, ...]` on every array.

With `ExpertsSpec(scheme=...)`, `wi_0`, `wi_1` and `wo` hold `values`, `scales` and, if the format has them,
`zero_points`, as in `QuantizedTensor`. They start as zeros, are never cast, and have no gradient. Other gradients flow
through them, unless the scheme also quantises activations. Prepacked ones are `tiled_values`, `tiled_scales` and
`tiled_zero_points`.

x, matrices of experts and shared experts, and biases other than fp32 are cast to the compute dtype. Every call copies
matrices it casts, so store them in the compute dtype (param_dtype). Gates and fp32 biases stay fp32, because one bit of
a logit can choose another expert.
"""

from moe_jax.layers import description
from moe_jax.layers.axes import known_specs, require_rules
from moe_jax.layers.description import *  # noqa: F403 - its `__all__`
from moe_jax.layers.functional import CHECKPOINT_NAMES, explain, explain_mesh, forward, warmup
from moe_jax.layers.lora import Adapters
from moe_jax.layers.losses import router_losses
from moe_jax.layers.parameters import (
    DEFAULT_KERNEL_INIT,
    Initializer,
    Leaf,
    Parameters,
    find,
    initialize,
    is_prepacked,
    leaves,
    nested,
)
from moe_jax.layers.qwix import current_rule, is_training, scheme_of_rule
from moe_jax.layers.sharded import expert_sharding, expert_specs, local_leaf, require_axis
from moe_jax.layers.stages import RoutedBy
from moe_jax.layers.trained_codes import fake_quantized
from moe_jax.layers.weights import export_weights, load_weights, prepack_weights, quantize_experts, restore_weights

__all__ = [
    "CHECKPOINT_NAMES", "DEFAULT_KERNEL_INIT", "Adapters", "Initializer", "Leaf", "Parameters", "RoutedBy",
    "current_rule", "expert_sharding", "expert_specs", "explain", "explain_mesh", "export_weights", "fake_quantized",
    "find", "forward", "initialize", "is_prepacked", "is_training", "known_specs", "leaves", "load_weights",
    "local_leaf", "nested", "prepack_weights", "quantize_experts", "require_axis", "require_rules", "restore_weights",
    "router_losses", "scheme_of_rule", "warmup",
]  # fmt: skip
__all__ += description.__all__
