"""The interface of Triton 3.5's `triton_kernels` on the ops of Moebius (docs/user/migration.md).

    from moe_torch.compat.triton_kernels.matmul_ogs import FnSpecs, FusedActivation, PrecisionConfig, matmul_ogs
    from moe_torch.compat.triton_kernels.routing import routing
    from moe_torch.compat.triton_kernels.swiglu import swiglu_fn

Paths, names, parameters and their order are kept. Options that we cannot honour raise Unsupported.
"""

from moe_torch.compat.triton_kernels.interop import from_upstream, to_upstream

__all__ = ["from_upstream", "to_upstream"]
