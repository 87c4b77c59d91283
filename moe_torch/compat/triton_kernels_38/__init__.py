"""Modules of Triton 3.8's `triton_kernels` that differ from 3.5's (docs/user/migration.md)."""
