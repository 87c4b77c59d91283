"""The interface of Triton's `triton_kernels`, as of Triton 3.5, on the ops of Moebius (docs/user/migration.md).

    from moe_torch.compat.triton_kernels.matmul_ogs import FnSpecs, FusedActivation, PrecisionConfig, matmul_ogs
    from moe_torch.compat.triton_kernels.routing import routing
    from moe_torch.compat.triton_kernels.swiglu import swiglu_fn

Modules have the paths they have there, and names, parameters and their order are kept, however many. Options that we
cannot honour raise Unsupported. Nothing of the other library is imported, except by `to_upstream`.
"""

from moe_torch.compat.triton_kernels.interop import from_upstream, to_upstream

__all__ = ["from_upstream", "to_upstream"]
