"""Parts of `matmul_ogs`."""
