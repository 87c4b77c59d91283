"""What launches GPUs get, as digests in launches.json: a change of a tile, a grid or a constant that no CPU runs shows.

`python -m tests.support.compile_gate.recorded` records them anew.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from moe_core.base.target import Target
from moe_core.plan.steps import KernelLaunch
from tests.support.compile_gate.cover import ONLY
from tests.support.compile_gate.gate import GROUPS, NUM_SMS

FILE = Path(__file__).with_name("launches.json")


def launches(arch: int) -> dict[str, str]:
    """Of each group of plans and each kernel: how many launches there are, and a digest of all they say, in order."""
    target = Target("cuda", arch, NUM_SMS[arch])
    found: dict[str, list[str]] = {}
    for group, plans in GROUPS.items():
        if ONLY.get(group, str(arch)) == str(arch):
            for plan in plans(target):
                for step in plan.steps:
                    assert isinstance(step, KernelLaunch), step
                    found.setdefault(f"{group} {step.kernel.name}", []).append(repr(step))
    return {name: f"{len(own)} {hashlib.sha256(repr(own).encode()).hexdigest()[:12]}" for name, own in found.items()}


def recorded() -> dict[str, dict[str, str]]:
    return json.loads(FILE.read_text())


if __name__ == "__main__":
    FILE.write_text(json.dumps({f"sm_{arch}": launches(arch) for arch in NUM_SMS}, indent=1, sort_keys=True) + "\n")
