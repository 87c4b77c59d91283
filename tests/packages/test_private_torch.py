"""Private names of torch are in one file, and a torch without them computes the same."""

from __future__ import annotations

import ast
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
WITHOUT = "replayed_routing or adds_no_calls or interpreter or leading_axes"


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


#: Imports and calls a layer in a process of its own for each name, which is not there while moe_torch takes its names.
EACH = """
import hashlib, importlib, os, pathlib, re, sys, traceback
import torch
from tests.support.without_private import hidden, load_private

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

for name in (None, *load_private().NAMES):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            with hidden([name] if name else []):
                importlib.import_module("moe_torch")
            print(name, digest(), flush=True)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.waitpid(child, 0)
"""


def test_without_each_name_a_layer_computes_the_same() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", EACH]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=250)
    digests = dict(line.split() for line in run.stdout.splitlines())
    missing = [name for name in ("None", *private_names()) if name not in digests]
    assert not missing, f"{missing} ended in an error\n{run.stderr}"
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


#: What the two lost features say.
LOST = """
import dataclasses
import torch
from tests.support.without_private import load_private, use_without
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


def test_what_is_lost_says_so() -> None:
    run = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert run.returncode == 0, run.stderr
