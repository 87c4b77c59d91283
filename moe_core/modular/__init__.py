"""Names, sizes and configurations of modular kernels, shared by `moe_torch.modular` and `moe_jax.modular`."""
