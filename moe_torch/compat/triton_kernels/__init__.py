"""The interface of Triton 3.5's `triton_kernels`, with its paths and parameters (docs/user/migration.md)."""

from moe_torch.compat.triton_kernels.interop import from_upstream, to_upstream

__all__ = ["from_upstream", "to_upstream"]
