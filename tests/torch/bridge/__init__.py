"""Tests of torch.bridge."""
