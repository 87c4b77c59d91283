"""The command `moebius-doctor`: show what this machine runs, test its results, and list what cannot be trusted."""

from moe_core.tools.doctor.cli import main

__all__ = ["main"]
