"""Devices, processes and kernels for tests of the runtime."""
