"""`moebius-tune`: measure tile configurations on this machine's GPU and write the table that plans read."""

from moe_core.tools.tune.cli import main

__all__ = ["main"]
