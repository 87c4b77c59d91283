"""Launches of plans for GPUs stay as they are recorded: what no CPU runs, and what only the speed tells."""

from __future__ import annotations

import ast

import pytest

from moe_core.base.target import Target
from moe_core.plan.steps import KernelLaunch
from tests.support.compile_gate.cover import ONLY
from tests.support.compile_gate.gate import GROUPS, NUM_SMS
from tests.support.compile_gate.recorded import launches, recorded
from tests.support.faults.kernel_copies import kernel_files


@pytest.mark.parametrize("arch", NUM_SMS)
def test_launches_are_those_that_are_recorded(arch: int) -> None:
    found, expected = launches(arch), recorded()[f"sm_{arch}"]
    changed = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    assert not changed, (
        f"the launches of {', '.join(changed[:8])} and {max(len(changed) - 8, 0)} more are other ones; where that was "
        "wanted: python -m tests.support.compile_gate.recorded"
    )


def parameters(kernel: str) -> list[str]:
    """Of a kernel's source."""
    module, _, name = kernel.partition(":")
    tree = ast.parse(kernel_files()[module].read_text())
    node = next(one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == name)
    return [argument.arg for argument in node.args.args]


def test_launches_name_the_parameters_of_their_kernel_in_order() -> None:
    """The interpreter passes arguments by name, and a GPU's launcher in order."""
    checked = set()
    for group, plans in GROUPS.items():
        arch = int(ONLY.get(group, "90"))
        for plan in plans(Target("cuda", arch, NUM_SMS[arch])):
            for step in plan.steps:
                assert isinstance(step, KernelLaunch)
                names = (step.kernel.name, *(name for name, _ in step.arguments))
                if names not in checked:
                    assert list(names[1:]) == parameters(step.kernel.name), step.kernel.name
                    checked.add(names)
    assert len({name for name, *_ in checked}) > 40
