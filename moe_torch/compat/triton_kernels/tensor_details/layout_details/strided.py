from moe_torch.compat.triton_kernels.tensor_details.layout import StridedLayout as StridedLayout
