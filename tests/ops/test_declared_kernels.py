"""Declarations of kernels say what their sources do. Only text is read: no kernel is imported.

And aggregates, which kernels make of their arguments, take their fields in order.
"""

from __future__ import annotations

import ast
import importlib
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from moe_core.ops.matmul.portable import plan as portable
from moe_core.ops.quantize import rows
from moe_core.ops.reduction import reduce as reduction
from moe_core.ops.router import forward as router
from moe_core.plan.steps import Kernel
from tests.support.faults.kernel_copies import kernel_files
from tests.support.paths import ROOT

OPS = ROOT / "moe_core" / "ops"
PLANNERS = sorted(set(OPS.rglob("*.py")) - set(kernel_files().values()))


class Function(NamedTuple):
    """A function of a kernel file, with the functions it calls as (module, name)."""

    node: ast.FunctionDef
    called: set[tuple[str, str]]


def _functions() -> Iterator[tuple[tuple[str, str], Function]]:
    for module, path in kernel_files().items():
        tree = ast.parse(path.read_text())
        imported = {
            alias.asname or alias.name: (str(node.module).removeprefix("moe_core.ops."), alias.name)
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
                yield (module, node.name), Function(node, {imported.get(name, (module, name)) for name in names})


FUNCTIONS = dict(_functions())


def _declared() -> list[tuple[str, Kernel]]:
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PLANNERS if path.stem != "__init__"]
    found = []
    for module in modules:
        for name in _declared_names(ROOT.joinpath(*module.split(".")).with_suffix(".py")):
            found.append((f"{module}.{name}", getattr(importlib.import_module(module), name)))
    return found


def _declared_names(path: pathlib.Path) -> list[str]:
    """The module constants that are kernels."""
    return [
        target.id
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and _makes_kernel(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]


def _makes_kernel(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "declare_kernel"


DECLARED = _declared()


def _with_helpers(key: tuple[str, str]) -> list[ast.FunctionDef]:
    """A kernel and all it calls."""
    found, waiting = {}, [key]
    while waiting:
        key = waiting.pop()
        if key in FUNCTIONS and key not in found:
            found[key] = FUNCTIONS[key].node
            waiting += FUNCTIONS[key].called
    return list(found.values())


@pytest.mark.parametrize(("where", "kernel"), DECLARED, ids=[where for where, _ in DECLARED])
def test_a_declaration_says_what_the_source_does(where: str, kernel: Kernel) -> None:
    key = (kernel.name.partition(":")[0], kernel.function)
    assert key in FUNCTIONS, f"{where}: {kernel.name} does not exist"
    node = FUNCTIONS[key].node
    assert [ast.unparse(one) for one in node.decorator_list] in (["triton.jit"], ["gluon.jit"])
    parameters = {argument.arg for argument in node.args.args}
    assert ("PDL" in parameters) == (kernel.pdl is not None)
    source = ast.unparse(node)
    behind_sums = "None if PDL == 'start' else PDL" in source or "PDL == 'tail'" in source
    assert behind_sums == (kernel.pdl == "tail")
    assert ("PDL == 'layout'" in source and not behind_sums) == (kernel.pdl == "layout")
    text = "".join(ast.unparse(one) for one in _with_helpers(key))
    assert kernel.pdl is None or "join(" in text or "gdc_wait()" in text, "it must wait for the launch ahead"
    assert kernel.prepacked_weight in {None, *parameters}
    counts = any("histogram(" in ast.unparse(one) for one in _with_helpers(key))
    assert counts == kernel.counts_slots


def test_every_kernel_is_declared_once_as_a_constant_beside_its_planner() -> None:
    names = [kernel.name for _, kernel in DECLARED]
    assert len(names) > 30 and len(set(names)) == len(names)
    made = sum(_makes_kernel(node) for path in PLANNERS for node in ast.walk(ast.parse(path.read_text())))
    assert made == len(DECLARED), "a kernel is declared elsewhere than as a module constant"
    launches = [
        f"{path.name}:{node.lineno}"
        for path in PLANNERS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "launch"
        and node.args
        and isinstance(node.args[0], ast.Constant | ast.JoinedStr)
    ]
    assert not launches, f"{launches} launch what is not declared"


def test_sizes_of_tiles_are_powers_of_two() -> None:
    """Triton's ranges are; what a GPU's compiler would refuse is seen here on any machine."""
    sizes = [size for tiles in router._ROUTER_TILES.values() for tile in tiles for size in tile[:3]]
    sizes += [size for name, choices in portable.CHOICES.items() if name.startswith("block") for size in choices]
    sizes += [reduction._FEW_COLUMNS, *reduction._MANY_COLUMNS, rows._MANY, rows._MANY_COLUMNS, rows._WIDEST_GROUP]
    assert not [size for size in sizes if size < 1 or size & (size - 1)]


def test_aggregates_take_their_fields_in_order() -> None:
    from moe_core.ops.common.kernels.aggregates import Schedule, Tiles

    schedule, tiles = Schedule(*range(5)), Tiles(*range(4))
    assert (schedule.GROUP_M, schedule.SPREAD, tiles.left, tiles.results) == (4, 1, 0, 3)
    assert Schedule(*range(6)).SPREAD == 5
    with pytest.raises(ValueError, match="argument 2 is longer"):
        Schedule(*range(7))
