"""Shared by `moe_torch.modular` and `moe_jax.modular`."""
