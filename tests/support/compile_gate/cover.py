"""The part of the compile gate that every change compiles: for each architecture every kernel, with every type of its
arguments and every value of its constants at least once. Of sizes and strides one value stands for all that the same
power of two divides.

Run as `python -m tests.support.compile_gate.cover ARCH PART PARTS` in a process without TRITON_INTERPRET; prints one
JSON list of records, like the gate's own script, of every PARTS-th launch from PART on. A launch that passed.json names
is left out: with its sources, constants and compiler it was within the limits. So are copies with planted faults that
it names. `cover --record` compiles what the file lacks for the architecture that kernels are tuned for, and writes it
anew.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import heapq
import importlib.metadata
import inspect
import io
import json
import re
import sys
import tempfile
import tokenize
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType

from moe_core.base.target import Target
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan
from moe_core.runtime.compiler import launch_signature
from tests.support.compile_gate.gate import GROUPS, NUM_SMS, Record, distinct_launches, measure
from tests.support.faults import instructions, pdl, sm90
from tests.support.faults.kernel_copies import Planted, import_from, plant
from tests.support.paths import ROOT

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
PASSED = Path(__file__).with_name("passed.json")
#: What compiles launches and measures binaries.
_MEASURING = (
    ROOT / "moe_core" / "runtime" / "compiler.py",
    ROOT / "moe_core" / "specs" / "tile.py",
    *(PASSED.with_name(f"{name}.py") for name in ("gate", "binaries", "pdl_order", "exchange_plans")),
)
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
    wanted = set(common)

    def worth(number: int) -> int:
        # Of integers, whose sum is the same in every process, whatever the order of a set.
        return sum(10**9 // common[fact] for fact in own[number] & wanted)

    queue, chosen = [(-worth(number), number) for number in range(len(own))], []
    heapq.heapify(queue)
    while wanted:
        _, number = heapq.heappop(queue)
        if queue and -(now := worth(number)) > queue[0][0]:
            heapq.heappush(queue, (-now, number))
            continue
        chosen.append(number)
        wanted -= own[number]
    times = Counter(fact for number in chosen for fact in own[number])
    for number in sorted(chosen, key=cost.__getitem__, reverse=True):
        if all(times[fact] > 1 for fact in own[number]):
            times.subtract(own[number])
            chosen.remove(number)
    return [launches[number] for number in sorted(chosen)]


def code(path: Path) -> str:
    """A file without comments, docstrings and empty lines, on which no binary depends."""
    text = path.read_text()
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            first, last = node.body[0].lineno, node.body[0].end_lineno or 0
            lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


@functools.cache
def sources(module: str) -> str:
    """The code of a file of kernels and of all that it imports from others."""
    text = code(ROOT / f"{module.replace('.', '/')}.py")
    return "\n".join([text, *(sources(name) for name in re.findall(r"^from (moe_core\S+) import", text, re.MULTILINE))])


@functools.cache
def _measuring() -> str:
    return "\n".join([importlib.metadata.version("triton"), *map(code, _MEASURING)])


def digest(plan: LaunchPlan, launch: KernelLaunch, arch: int, judged: str = "") -> str:
    """Of what a launch's record depends on: sources, types, constants, compiler, what measures it, and `judged`."""
    constants = [(name, value.value) for name, value in launch.arguments if isinstance(value, Constant)]
    options = (arch, launch.kernel, launch_signature(plan, launch), constants, launch.num_warps, launch.num_stages)
    text = f"{options}\n{sources('moe_core.ops.' + launch.kernel.name.partition(':')[0])}\n{_measuring()}{judged}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def unrecorded(arch: int) -> list[tuple[LaunchPlan, KernelLaunch]]:
    """The launches of the cover that passed.json does not name."""
    passed = set(json.loads(PASSED.read_text()))
    return [found for found in cover(arch) if digest(*found, arch) not in passed]


def fault_digests(faults: ModuleType) -> dict[str, str]:
    """By entry of a module's FAULTS: a digest of its launch, of the faults, and of what judges their copies."""
    judging = map(inspect.getsource, (plant, import_from, instructions, faults.judge, faults.assert_faults_show))
    judged_by = "\n".join(judging)
    launches = {name: faults.launch_of(name) for name in faults.FAULTS}
    return {
        name: digest(plan, launch, TUNED, f"{faults.FAULTS[name]}\n{judged_by}")
        for name, (plan, launch) in launches.items()
    }


def unrecorded_faults(faults: ModuleType) -> Planted:
    """Faults that passed.json does not name: their copies must show them."""
    passed = set(json.loads(PASSED.read_text()))
    digests = fault_digests(faults)
    return {name: files for name, files in faults.FAULTS.items() if digests[name] not in passed}


def compiled(arch: int, part: int, parts: int) -> list[Record]:
    device = Target("cuda", arch, NUM_SMS[arch])
    return [measure(plan, launch, device) for plan, launch in unrecorded(arch)[part::parts]]


def record() -> None:
    """Compile what passed.json lacks, and write the cover of today. Raises AssertionError with what breaks a limit."""
    digests = [digest(*found, TUNED) for found in cover(TUNED)]
    for faults in (sm90, pdl):
        with tempfile.TemporaryDirectory() as folder:
            faults.assert_faults_show(Path(folder), unrecorded_faults(faults))
        digests += fault_digests(faults).values()
    with ProcessPoolExecutor() as pool:
        parts = list(pool.map(compiled, [TUNED] * 8, range(8), [8] * 8))
    broken = [f"{violation}: {one.label}" for part in parts for one in part for violation in one.violations()]
    assert not broken, "\n".join(broken)
    PASSED.write_text(json.dumps(sorted(digests), indent=0) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--record"]:
        record()
    else:
        print(json.dumps([dataclasses.asdict(one) for one in compiled(*map(int, sys.argv[1:]))]))
