"""Tests of torch.training."""
