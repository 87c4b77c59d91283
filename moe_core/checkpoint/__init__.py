"""Readers of Hugging Face checkpoints: one MoE layer at a time, as NumPy arrays and the spec that computes with them.

    checkpoint = open_checkpoint("Qwen3-30B-A3B")     # config.json and the tensor index; no weights yet
    layer = checkpoint.layer(checkpoint.moe_layers[0])  # reads this layer's tensors, nothing else
    moe_torch.ops.moe(x, layer.experts, layer.router, layer.spec, shared=layer.shared)  # after moving the arrays

Families: mixtral, qwen3_moe, gpt_oss, deepseek_v3, in bfloat16, float16 or float32, one file or shards, per-expert or
fused storage. Needs the package safetensors (`pip install 'moebius[checkpoint]'`), neither torch nor jax.
"""

from moe_core.checkpoint.hidden_states import load_hidden_states
from moe_core.checkpoint.layer import Checkpoint, MoELayer, open_checkpoint
from moe_core.checkpoint.storage import ReadProgress

__all__ = ["Checkpoint", "MoELayer", "ReadProgress", "load_hidden_states", "open_checkpoint"]
