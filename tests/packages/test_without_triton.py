"""Where Triton is not installed, as on macOS: layers run on the NumPy reference, and commands say what is missing.

Runs in an environment of its own, which .ci/run makes: `python tools/environment.py --directory .venv-cpu --extras
all,test --packages-of .venv --without triton`. The other tests block imports of Triton one by one.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tools.snippets import PAGES, labelled

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed here")

SNIPPETS = [(page, line, source) for page in PAGES for label, line, source in labelled((ROOT / page).read_text())]
#: Layers, ops, training and loops in both front-ends.
EXAMPLES = ("torch_layer", "flax_layer", "torch_forward", "jax_forward", "lora_torch", "decode_loop")
COMMANDS = pathlib.Path(sys.executable).parent


def run(*command: str | pathlib.Path, status: int = 0, **variables: str) -> str:
    """What a command prints, as a user runs it outside of the checkout."""
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "XLA_FLAGS")}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(part) for part in command], env=environment | variables, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == status, f"{done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.parametrize(("page", "line", "source"), SNIPPETS, ids=[f"{page}:{line}" for page, line, _ in SNIPPETS])
def test_snippets_run(page: str, line: int, source: str) -> None:
    assert run(sys.executable, "-c", source).strip() or "assert" in source


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str) -> None:
    assert run(sys.executable, ROOT / "examples" / f"{name}.py").strip()


def test_parity_says_that_no_kernel_can_run() -> None:
    found = run(COMMANDS / "moe-parity", "--case", "llama4", "--tokens", "5", status=2)
    assert found.count("NOT TESTED: the NumPy reference ran") == 4
    assert "no kernel can run here, because Triton is not installed (it exists for Linux)\n" in found


def test_the_doctor_says_what_cannot_be_trusted() -> None:
    found = run(COMMANDS / "moebius-doctor", status=2)
    assert "kernels: Triton is not installed (it exists for Linux), so layers run on the NumPy reference" in found
    assert "moebius-doctor: NOTHING WAS TESTED" in found


def test_the_interpreter_is_refused_with_a_fix() -> None:
    script = "import torch, moe_torch\nmoe_torch.MoE(8, 8, 2, 1)(torch.randn(3, 8))"
    found = run(sys.executable, "-c", script, status=1, TRITON_INTERPRET="1")
    assert (
        "Unsupported: the interpreter engine needs Triton, which is not installed here (it exists for Linux)" in found
    )
    assert "unset TRITON_INTERPRET" in found


def test_compare_finds_a_difference_between_layers_of_both_frameworks() -> None:
    """The reference computes; that a layer was ported with every bit can be proved here, too."""
    script = (
        "import jax, numpy, torch, moe_jax.nnx, moe_torch\n"
        "ported = moe_torch.MoE(16, 8, 4, 2).requires_grad_(False)\n"
        "x = torch.randn(5, 16)\n"
        "for change in (0.0, 1.0):\n"
        "    layer = moe_jax.nnx.MoE.from_weights(ported.export_weights())\n"
        "    y = jax.jit(lambda layer, x: layer(x))(layer, x.numpy() + numpy.float32(change))\n"
        "    print(numpy.array_equal(numpy.asarray(y), ported(x).numpy()))\n"
    )
    assert run(sys.executable, "-c", script).split() == ["True", "False"]
