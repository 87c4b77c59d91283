"""The torch layer from a Hugging Face config: statistics, balancing without a loss, one operator when compiled."""

from __future__ import annotations

import torch

from moe_torch import MoE, layer_spec_from_config

CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


@torch.no_grad()
def main() -> None:
    """Make the layer, balance its experts for a few steps, and put it in a compiled block."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    # A path to config.json or a transformers config serves as well.
    spec = layer_spec_from_config(CONFIG)
    layer = MoE.from_spec(spec, device=device, dtype=torch.bfloat16)
    print(layer)
    for name, tensor in layer.state_dict().items():
        print(f"  {name:28} {str(tensor.dtype).removeprefix('torch.'):9} {list(tensor.shape)}")

    x = torch.randn(8, 32, spec.d_model, device=device, dtype=torch.bfloat16)
    # Padding: masked tokens visit no routed expert and count in no statistic.
    token_mask = torch.arange(32, device=device).expand(8, 32) < 24
    for step in range(4):
        y, aux = layer(x, token_mask, return_aux=True)
        assert int(aux.tokens_per_expert.sum()) == 8 * 24 * spec.top_k
        busiest, loss = int(aux.tokens_per_expert.max()), float(aux.load_balance_loss)
        print(f"step {step}: busiest expert {busiest} slots, load balance {loss:.4f}, z-loss {float(aux.z_loss):.3f}")
        layer.update_correction_bias(aux.tokens_per_expert, rate=0.01)

    block = torch.nn.Sequential(torch.nn.LayerNorm(spec.d_model, device=device, dtype=torch.bfloat16), layer)
    # aot_eager traces as inductor does, and needs no C++ compiler.
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), block(x)) and y.shape == x.shape
    print("compiled without a graph break: equal to the last bit")


if __name__ == "__main__":
    main()
