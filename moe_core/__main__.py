"""`python -m moe_core`: what is installed, and the commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import moe_core
from moe_core.tools.doctor.machine import packages

#: Command -> what it does, as its own help says at length.
COMMANDS = {
    "moe-parity": "run a layer through the reference, torch and JAX, and name the first stage that differs",
    "moebius-doctor": "say what this machine runs, and test every op against the reference",
    "moebius-choose": "format, memory, speed and parallelism of a model on your GPUs",
    "moebius-convert": "quantise the experts of a checkpoint",
    "moebius-tune": "measure tiles on this machine's GPU",
    "moebius-view": "make a page of a routing trace, a parity report or plans",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print versions and commands; the exit status."""
    parser = argparse.ArgumentParser("python -m moe_core", description="Print versions and the commands of Moebius.")
    parser.add_argument("--version", action="version", version=f"moebius {moe_core.__version__}")
    parser.parse_args(arguments)
    for package in packages():
        problem = f"  {package.problem}" if package.problem else ""
        print(f"{package.name:15} {package.version or 'not installed'}{problem}")
    print("\ncommands (--help explains each):")
    for name, summary in COMMANDS.items():
        print(f"  {name:15} {summary}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
