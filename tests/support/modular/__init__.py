"""What tests of the modular kernels share."""
