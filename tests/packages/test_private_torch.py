"""Private names of torch are in one file, and a torch without them computes the same."""

from __future__ import annotations

import ast
import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT

torch = pytest.importorskip("torch")

PRIVATE = "moe_torch/bridge/private.py"
#: How modules hold what they own. Torch documents them in part; pickled modules hold them all.
OF_MODULES = {"_parameters", "_buffers", "_modules"}
#: Of every NamedTuple.
OF_PYTHON = {"_exit", "_asdict", "_replace", "_field_defaults"}
#: Run without any private name. Beside them: what compares fast calls with others, and what only modes see.
CORE = ("tests/torch/layers/test_layers.py", "tests/torch/layers/test_training.py", "tests/torch/test_ops.py")
#: And programs of layers with less than others have, or that run the interpreter.
WITHOUT = "replayed_routing or adds_no_calls or interpreter or leading_axes or real_kernels or limited or around"


def product_files() -> list[pathlib.Path]:
    return sorted(path for package in ("moe_core", "moe_torch", "moe_jax") for path in (ROOT / package).rglob("*.py"))


def private(name: str | None) -> bool:
    return name is not None and name.startswith("_") and not name.startswith("__")


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Names that a file gives to something of its own."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "module", "layer", "spec"):
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value  # `__slots__`, `setattr` and `replace` name fields as text.


def foreign_names(tree: ast.AST, ours: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of private names that are none of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in ours | OF_MODULES | OF_PYTHON:
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, name) for name in names if private(name))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch.")]
            yield from ((node.lineno, name) for name in names if any(map(private, name.split("."))))
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", str(node.value)):
            yield node.lineno, node.value


def test_one_file_names_what_is_private() -> None:
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in product_files()}
    ours = {name for path, tree in trees.items() if path != PRIVATE for name in defined_names(tree)}
    # Those of transformers and PEFT have tests of their own versions.
    others = re.compile(rf"moe_torch/(transformers/.*|peft\.py)|{PRIVATE}")
    files = [path for path in trees if path.startswith("moe_torch/") and not others.fullmatch(path)]
    foreign = [f"{path}:{line} {name}" for path in files for line, name in foreign_names(trees[path], ours)]
    assert foreign == []
    assert any(name == "_dispatch_keys" for _, name in foreign_names(ast.parse("torch._C._dispatch_keys(x)"), ours))
    assert list(foreign_names(ast.parse("from torch.utils._pytree import tree_map"), ours)) == [(1, "_pytree")]


#: Imports and calls a layer in a process of its own for each group of names, which are not there while moe_torch takes
#: its names. Without all of them, two features are lost, and say so.
EACH = """
import dataclasses, hashlib, importlib, json, os, pathlib, re, sys, traceback
import torch
from tests.support.without_private import hidden, load_private, use_without

text = "".join(path.read_text() for path in pathlib.Path("moe_torch").rglob("*.py"))
for module in sorted(set(re.findall(r"^from (moe_core[.a-z0-9_]*) import", text, re.M))):
    importlib.import_module(module)

def digest():
    import moe_torch
    torch.manual_seed(0)
    layer, x = moe_torch.MoE(16, 16, 2, 1), torch.randn(3, 16)
    with torch.no_grad():
        outputs = [layer(x), layer(x), layer(x.view(1, 3, 16))]
    outputs += [layer(x), *torch.autograd.grad(layer(x).sum(), list(layer.parameters()))]
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in outputs)).hexdigest()

for number, names in enumerate(json.loads(sys.argv[1])):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            with hidden(names):
                importlib.import_module("moe_torch")
            print(number, digest(), flush=True)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.waitpid(child, 0)

use_without(load_private().NAMES)
import moe_torch
from moe_torch import trace
from moe_torch.bridge import eager

assert not eager.plain_thread() and eager.plain_tensor(torch.ones(2))
assert not eager.plain_tensor(torch.ones(2).to_sparse())
layer = moe_torch.MoE(16, 16, 2, 1)
layer = moe_torch.MoE.from_spec(dataclasses.replace(layer.spec, main_grad=True))
for weight in layer.parameters():
    weight.main_grad = torch.zeros_like(weight)
def capture():
    with trace.capture():
        pass
for lost, call in (("main_grad", lambda: layer(torch.ones(2, 16))), ("capture", capture)):
    try:
        call()
    except moe_torch.Unsupported as error:
        assert lost in str(error) and torch.__version__ in str(error), error
    else:
        raise SystemExit(f"{lost} was not refused")
"""


def groups(names: list[str]) -> list[list[str]]:
    """No name; then as many groups that each name is in three of them, no two names in the same three: of any two each
    is missing once while the other is there. Each name alone, where more than the default examples are asked for."""
    if "MOEBIUS_EXAMPLES" in os.environ:
        return [[], *([name] for name in names)]
    count = next(n for n in itertools.count(3) if math.comb(n, 3) >= len(names))
    codes = list(zip(names, itertools.combinations(range(count), 3), strict=False))
    return [[], *([name for name, code in codes if number in code] for number in range(count))]


def test_without_some_names_a_layer_computes_the_same_and_without_all_it_says_what_is_lost() -> None:
    missing = groups(private_names())
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", EACH, json.dumps(missing)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=250)
    assert run.returncode == 0, run.stderr
    digests = dict(line.split() for line in run.stdout.splitlines())
    wrong = [names for number, names in enumerate(missing) if str(number) not in digests]
    assert not wrong, f"{wrong} ended in an error\n{run.stderr}"
    assert len(set(digests.values())) == 1, digests


def private_names() -> list[str]:
    from moe_torch.bridge.private import NAMES

    return NAMES


def test_without_all_names_a_core_of_the_suite_passes() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.without_private", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, *CORE, "-k", f"not ({WITHOUT})"], capture_output=True, text=True, cwd=ROOT, timeout=280
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
    assert " passed" in run.stdout
