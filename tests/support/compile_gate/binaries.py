"""What binaries use and do: registers, spills, and whether an operand of wgmma is written before it has been read."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

#: An instruction of nvdisasm: its name and its operands.
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Za-z0-9_.]*)\s*(.*?);")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_BRANCH = re.compile(r"\((\.L_x_\d+)\)")
#: A wgmma of PTX whose left operand is a list of registers.
_LEFT_IN_REGISTERS = re.compile(r"wgmma\.mma_async[^{;]*\{[^}]*\},\s*\{")
_WGMMA = re.compile(r"[A-Z]GMMA\b")
#: Instructions whose first register is no result.
_NO_RESULT = re.compile(
    r"(ST[A-Z]*|LDGSTS|RED|BAR|BRA|EXIT|UTMA[A-Z]*|SYNCS|WARPGROUP|DEPBAR|BSSY|BSYNC|CCTL|[A-Z]GMMA)\b"
)
_LEFT_REGISTERS = 4


class _Step(NamedTuple):
    """An instruction, or a label (name None)."""

    name: str | None
    text: str


def resource_usage(report: str) -> tuple[int, int]:
    """(registers, spilled bytes per thread) from `cuobjdump --dump-resource-usage`."""
    fields = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report))
    return int(fields["REG"]), int(fields["STACK"]) + int(fields["LOCAL"])


def _printed(tool: str, cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, *options, file.name], check=True, capture_output=True, text=True).stdout


def usage_of(cubin: bytes) -> tuple[int, int]:
    """(registers, spilled bytes per thread)."""
    from triton import knobs

    return resource_usage(_printed(knobs.nvidia.cuobjdump.path, cubin, "--dump-resource-usage"))


def overwritten_operand(ptx: str, cubin: bytes) -> str:
    """What `overwritten` finds in a binary whose PTX has a wgmma with an operand in registers."""
    if _LEFT_IN_REGISTERS.search(ptx) is None:
        return ""
    from triton import knobs

    return overwritten(_printed(knobs.nvidia.nvdisasm.path, cubin, "-c"))


def overwritten(sass: str) -> str:
    """The first write to a register that a pending wgmma may still have to read; "" = there is none.

    wgmma reads a left operand in registers some time after it was issued. `WARPGROUP.DEPBAR.LE gsb0, n` waits until at
    most n groups are pending. ptxas keeps the registers of what is issued and awaited within one pass of a loop, but
    not of what is pending at its end, as Triton 3.6 leaves it. So every loop is followed twice.
    """
    code = list(_steps(sass))
    labels = {step.text: place for place, step in enumerate(code) if step.name is None}
    for end, step in enumerate(code):
        target = _BRANCH.search(step.text) if step.name == "BRA" else None
        start = end if target is None else labels.get(target[1], end)
        if start < end and (found := _followed(code[start : end + 1])):
            return found
    return ""


def _steps(sass: str) -> Iterator[_Step]:
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            yield _Step(None, label[1])
        elif found := _INSTRUCTION.search(line):
            yield _Step(found[1], found[2])


def _followed(loop: list[_Step]) -> str:
    pending: list[frozenset[int]] = []
    for step in (*loop, *loop):
        name = step.name or ""
        if _WGMMA.match(name):
            left = re.match(r"R\d+, R(\d+)", step.text)
            first = int(left[1]) if left else None
            pending.append(frozenset() if first is None else frozenset(range(first, first + _LEFT_REGISTERS)))
        elif name.startswith("WARPGROUP.DEPBAR"):
            most = int(step.text.rsplit("0x", 1)[1], 16)
            pending = pending[len(pending) - most :] if 0 < most < len(pending) else pending if most else []
        elif any(_results(step) & registers for registers in pending):
            return f"{name} {step.text.strip()} writes what one of {len(pending)} pending wgmma reads"
    return ""


def _results(step: _Step) -> frozenset[int]:
    """Registers that an instruction writes."""
    name = step.name or ""
    found = re.match(r"(?:U?P\w+,\s*)?R(\d+)\b", step.text)
    if not name or _NO_RESULT.match(name) or found is None:
        return frozenset()
    wide = ".128" in name or (name.startswith("LDSM") and name.endswith(".4"))
    double = ".64" in name or "WIDE" in name or (name.startswith("LDSM") and name.endswith(".2"))
    return frozenset(range(int(found[1]), int(found[1]) + (4 if wide else 2 if double else 1)))
