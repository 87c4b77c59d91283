"""The part of the compile gate that every change compiles: for each architecture every kernel, with every type of its
arguments and every value of its constants at least once. Of sizes and strides one value stands for all that the same
power of two divides.

Run as `python -m tests.support.compile_gate.cover ARCH PART PARTS` in a process without TRITON_INTERPRET; prints one
JSON list of records, like the gate's own script, of every PARTS-th launch from PART on.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import json
import re
import sys
from collections import Counter

from moe_core.base.target import Target
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan
from moe_core.runtime.compiler import launch_signature
from tests.support.compile_gate.gate import GROUPS, NUM_SMS, distinct_launches, measure

#: Groups of kernels for one architecture alone.
ONLY: dict[str, str] = dict.fromkeys(
    (
        *("sm90", "sm90_tall", "sm90_swapped", "shipped_table", "prepared", "prepared_integers", "prepared_tall"),
        *("quantized_sm90", "pushed_prepacked"),
    ),
    "90",
)
#: The architecture that kernels are tuned for. On others numbers among the constants, sizes and tiles, do not count.
TUNED = 90
#: Constants that say how a kernel works: each of their numbers counts. Others are sizes, strides and counts.
_OF_TILES = re.compile(r"BLOCK_|STAGES|WARPS|REGISTERS|GROUP_M|PAIRS|DEEP")
#: The highest power of two that matters of the others: bytes of the widest load.
_WIDEST = 16


def facts(plan: LaunchPlan, launch: KernelLaunch, numbers: bool) -> set[tuple[str, str, str]]:
    """(kernel, argument, type or value) of what makes a launch's kernel another one."""
    found = {(launch.kernel.name, name, kind) for name, kind in launch_signature(plan, launch)}
    if numbers:
        found |= {
            (launch.kernel.name, "warps", str(launch.num_warps)),
            (launch.kernel.name, "stages", str(launch.num_stages)),
        }
    for name, value in launch.arguments:
        constant = value.value if isinstance(value, Constant) else None
        if isinstance(value, Constant) and (numbers or isinstance(constant, bool | str | None)):
            found.add((launch.kernel.name, name, _counted(name, constant)))
    return found


def _counted(name: str, constant: object) -> str:
    """What counts of a constant's value."""
    if type(constant) is not int or constant in (0, 1) or _OF_TILES.search(name):
        return repr(constant)
    return f"a multiple of {min(constant & -constant, _WIDEST)}"


def _cost(launch: KernelLaunch) -> float:
    """Roughly how long a launch compiles, beside others of its kernel: instructions grow with a tile's rows."""
    rows = dict(launch.arguments).get("BLOCK_M")
    return 1 + rows.value / 64 if isinstance(rows, Constant) and isinstance(rows.value, int) else 1


@functools.cache
def everything(arch: int) -> list[tuple[LaunchPlan, KernelLaunch]]:
    """The launches of all groups for an architecture; what two groups have stands there twice."""
    target, found = Target("cuda", arch, NUM_SMS[arch]), []
    for group, plans in GROUPS.items():
        if ONLY.get(group, str(arch)) == str(arch):
            found += distinct_launches(plans(target))
    return found


def cover(arch: int) -> list[tuple[LaunchPlan, KernelLaunch]]:
    """Launches of `everything` that have all its facts: as the next one that with the most facts no other has yet. A
    fact counts the less the more launches have it. Those that later ones made needless are left out in the end."""
    launches = everything(arch)
    own = [facts(plan, launch, numbers=arch == TUNED) for plan, launch in launches]
    cost = [_cost(launch) for _, launch in launches]
    common = Counter(fact for one in {*map(frozenset, own)} for fact in one)
    left = set(common)

    def worth(number: int) -> int:
        # Of integers, whose sum is the same in every process, whatever the order of a set.
        return sum(10**9 // common[fact] for fact in own[number] & left)

    queue, chosen = [(-worth(number), number) for number in range(len(own))], []
    heapq.heapify(queue)
    while left:
        _, number = heapq.heappop(queue)
        if queue and -(now := worth(number)) > queue[0][0]:
            heapq.heappush(queue, (-now, number))
            continue
        chosen.append(number)
        left -= own[number]
    times = Counter(fact for number in chosen for fact in own[number])
    for number in sorted(chosen, key=cost.__getitem__, reverse=True):
        if all(times[fact] > 1 for fact in own[number]):
            times.subtract(own[number])
            chosen.remove(number)
    return [launches[number] for number in sorted(chosen)]


if __name__ == "__main__":
    architecture, part, parts = map(int, sys.argv[1:])
    device = Target("cuda", architecture, NUM_SMS[architecture])
    records = [measure(plan, launch, device) for plan, launch in cover(architecture)[part::parts]]
    print(json.dumps([dataclasses.asdict(record) for record in records]))
