"""What `matmul_ogs` is made of."""
