"""The command `moebius-doctor`: show this machine's packages and GPUs, test its results, and list what cannot be
trusted."""

from moe_core.tools.doctor.cli import main

__all__ = ["main"]
