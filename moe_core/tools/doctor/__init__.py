"""The command `moebius-doctor`: test this machine and list what cannot be trusted."""

from moe_core.tools.doctor.cli import main

__all__ = ["main"]
