"""The command `moebius-doctor`: what this machine runs, whether it computes right, and what cannot be trusted here."""

from moe_core.tools.doctor.cli import main

__all__ = ["main"]
