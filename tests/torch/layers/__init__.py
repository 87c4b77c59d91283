"""Tests of torch.layers."""
