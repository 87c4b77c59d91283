"""The command `moebius-tune`."""

from moe_core.tools.tune.cli import main

__all__ = ["main"]
