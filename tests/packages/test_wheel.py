"""The wheel works outside of the checkout: built from a copy, installed into a folder, used by a fresh process."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.support.paths import ROOT

PACKAGES = ("moe_core", "moe_torch", "moe_jax")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
#: Run where the wheel is installed: argv[1] is that folder.
SCRIPT = """
import importlib, importlib.metadata, importlib.util, json, pathlib, sys
site = pathlib.Path(sys.argv[1])
import moe_core
assert pathlib.Path(moe_core.__file__).is_relative_to(site), moe_core.__file__
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.activation.forward import plan_activation
from moe_core.specs.matmul import Activation
from moe_core.specs.tile_table import shipped_table
entries = len(shipped_table(90).entries)
assert entries, "the shipped table is empty"
plan = plan_activation(ArraySpec((4, 8), "float32"), Activation("silu"), Target("cuda", 90, 132))
assert plan.steps and plan.explain()
needs = {"moe_torch": ("torch",), "moe_jax": ("jax", "jax_tvm_ffi")}
for name, packages in needs.items():
    if all(map(importlib.util.find_spec, packages)):
        module = importlib.import_module(name)
        assert pathlib.Path(module.__file__).is_relative_to(site), module.__file__
distribution = importlib.metadata.Distribution.at(next(site.glob("*.dist-info")))
assert distribution.version == moe_core.__version__
loaded = []
for entry in distribution.entry_points:
    package = entry.module.partition(".")[0]
    if all(map(importlib.util.find_spec, needs.get(package, ()))):
        assert callable(entry.load()), entry
        loaded.append(entry.name)
print(json.dumps({"entries": entries, "loaded": loaded}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Built from copies of the files that matter: a build in the checkout would leave files there."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in (*PACKAGES, "tests", "benchmarks"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    (path,) = built.glob("*.whl")
    return path


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    wanted = {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}
    assert held == wanted
    assert {f"{package}/py.typed" for package in PACKAGES} | {"moe_core/specs/tables/sm_90.json"} <= held


def test_the_wheel_works_outside_of_the_checkout(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, timeout=240)
    hidden = ("TRITON_INTERPRET", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    script = elsewhere / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(site)]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    found = json.loads(done.stdout)
    assert {
        "moe-parity",
        "moebius-convert",
        "moebius-doctor",
        "moebius-tune",
        "moebius-view",
        "moebius-choose",
        "reference",
    } <= set(found["loaded"])
