"""What the modular kernels of both front-ends share: names, sizes and configurations, independent of any framework.

`moe_torch.modular` and `moe_jax.modular` are what users import; docs/user/modular.md lists every name.
"""
