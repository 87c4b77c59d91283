"""`moebius-tune`: measures tile configurations on this machine's GPU and writes the table that plans look up.

Nothing here runs while a layer runs: a plan reads tables and never measures.
"""

from moe_core.tools.tune.cli import main

__all__ = ["main"]
