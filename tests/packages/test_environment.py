"""The environment, the package and the wheel: extras, versions, what is in them."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.resources
import importlib.util
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from types import ModuleType

import pytest
import yaml

import moe_core
from tests.support.paths import ROOT


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    specification = importlib.util.spec_from_file_location("environment", ROOT / "tools" / "environment.py")
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def distribution(site: pathlib.Path, name: str, *requires: str) -> None:
    """A distribution of one module, as pip leaves it."""
    metadata = site / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    lines = ["Metadata-Version: 2.4", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {line}" for line in requires)]
    (metadata / "METADATA").write_text("\n".join(lines) + "\n")
    (site / f"{name}.py").write_text("")
    files = (f"{name}.py", f"{name}-1.0.dist-info/METADATA", f"../../../bin/{name}")
    (metadata / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_a_front_end_gets_its_own_packages(environment: ModuleType, tmp_path: pathlib.Path) -> None:
    site, target = (tmp_path / name / "lib" / "python3.11" / "site-packages" for name in ("all", "one"))
    distribution(site, "moebius", "numpy", 'torch; extra == "torch"', 'jax; extra == "jax"', 'py-test; extra == "test"')
    for name in ("pip", "setuptools", "numpy", "jax", "only_on_mars"):
        distribution(site, name)
    distribution(site, "torch", "SymPy>=1", 'only_on_mars; sys_platform == "mars"', 'jax; extra == "other"')
    distribution(site, "sympy")
    distribution(site, "Py.Test", "moebius[test]")
    target.mkdir(parents=True)
    compiled = pathlib.Path(importlib.util.cache_from_source(site / "torch.py")).relative_to(site)
    (site / compiled).parent.mkdir()
    (site / compiled).write_bytes(b"bytecode that an import left")
    environment.link_packages(tmp_path / "all", tmp_path / "one", "torch,test")
    modules = {path.stem for path in target.glob("*.py")}
    assert modules == {"pip", "setuptools", "numpy", "torch", "sympy", "Py.Test"}
    assert all((target / path).samefile(site / path) for path in ("torch.py", compiled))
    assert (target / "sympy-1.0.dist-info").is_dir()
    found = {one.name for one in environment.required(site, "torch,test", "torch")}
    assert found == {"pip", "setuptools", "numpy", "Py.Test"}
    with pytest.raises(LookupError, match="must hold flax"):
        distribution(site, "jaxlib")
        (site / "moebius-1.0.dist-info" / "METADATA").write_text(
            'Metadata-Version: 2.4\nName: moebius\nVersion: 1.0\nRequires-Dist: flax; extra == "flax"\n'
        )
        environment.required(site, "flax")


def test_missing_extras_are_added_and_other_sources_start_anew(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """`make parity` makes a small environment, and `make test` adds to it what it lacks."""
    made: list[tuple[str, bool]] = []
    (tmp_path / "tools").mkdir()
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "has_cuda_device", lambda: False)
    monkeypatch.setattr(environment, "fingerprint", lambda on_gpu: text)

    def make(
        directory: pathlib.Path, extras: str, on_gpu: bool, *others: object, add: bool, without: str | None
    ) -> None:
        directory.mkdir(exist_ok=True)
        made.append((extras, add))

    monkeypatch.setattr(environment, "make", make)
    text = "one"
    for options in ("--extras torch,jax", "--extras torch,jax,test", "--extras jax", ""):
        monkeypatch.setattr(sys, "argv", ["environment.py", *options.split()])
        assert environment.main() == 0
    everything = ",".join(sorted({*environment.EXTRAS.split(","), "recipes", "lint"}))
    assert made == [("torch,jax", False), ("jax,test,torch", True), (everything, True)]
    text = "another"
    monkeypatch.setattr(sys, "argv", ["environment.py", "--extras", "jax"])
    assert environment.main() == 0 and made[3:] == [("jax", False)]


def test_a_linked_environment_is_refused(
    environment: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Making an environment anew empties its folder, which a link has from somewhere else."""
    (tmp_path / "another").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "another")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "has_cuda_device", lambda: False)
    monkeypatch.setattr(sys, "argv", ["environment.py", "--directory", "link"])
    assert environment.main() == 1 and "must not be a link" in capsys.readouterr().err


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ENGINES = PROJECT["project"]["entry-points"]["moebius.engines"]


def test_version_has_one_source() -> None:
    assert importlib.metadata.version("moebius") == moe_core.__version__
    assert PROJECT["project"]["dynamic"] == ["version", "readme", "urls"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "moe_core.__version__"}


def test_changelog_has_an_entry_for_the_version() -> None:
    found = re.search(rf"^## \[{re.escape(moe_core.__version__)}\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert found and datetime.date.fromisoformat(found[1]), "a version that could be tagged has its date"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], str(citation["date-released"])) == (moe_core.__version__, found[1])


def test_entries_of_the_changelog_have_one_line() -> None:
    body = (ROOT / "CHANGELOG.md").read_text().split("\n## ", 1)[1].splitlines()[1:]
    wrong = [line for line in body if line and not re.match("- |## |#{3,4} |\\[", line)]
    assert not wrong, f"an entry of CHANGELOG.md has one line, got {wrong[0]!r}; shorten it"


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_workflows_and_forms_parse_and_run_what_exists(path: pathlib.Path) -> None:
    assert yaml.safe_load(path.read_text())
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    for kind, name in re.findall(r"run: (make |)([\w./-]+)", path.read_text()):
        assert name in targets if kind else (ROOT / name).exists(), name


def test_links_of_the_published_readme_lead_to_the_repository() -> None:
    setup = runpy.run_path(str(ROOT / "setup.py"))
    page = (
        "![bars](docs/a.svg) [`x`](docs/b.md#c) [home](https://a.org/x) [here](#there)\n"
        '<picture><source srcset="docs/dark.svg"><img src="docs/light.svg"></picture>\n[![badge](d.svg)](e.md)\n'
    )
    here = "https://example.org/moebius"
    found = setup["published"](page, here, "v1")
    assert f"![bars]({here}/raw/v1/docs/a.svg) [`x`]({here}/blob/v1/docs/b.md#c)" in found
    assert "[home](https://a.org/x) [here](#there)" in found
    assert f'srcset="{here}/raw/v1/docs/dark.svg"' in found and f'src="{here}/raw/v1/docs/light.svg"' in found
    assert f"[![badge]({here}/raw/v1/d.svg)]({here}/blob/v1/e.md)" in found
    assert setup["published"](page, None, "main") == " `x` [home](https://a.org/x) [here](#there)\n\n"
    readme = (ROOT / "README.md").read_text()
    for place in (here, None):
        text = setup["published"](readme, place, "v1")
        targets = re.findall(r"\]\(([^)\s]+)\)|\b(?:src|srcset|href)=\"([^\"]+)\"", text)
        assert targets and all(re.match("https://|#", one or other) for one, other in targets)
    for path in ("README.md", "docs/user/start.md"):  # what a release says of itself
        text = setup["released"]((ROOT / path).read_text(), here)
        assert not re.search(r"index yet|'\.\[|\$?MOEBIUS_REPOSITORY|from a checkout;", text)
        assert "pip install 'moebius[torch]'" in text and "Python 3.11 or newer" in text
    assert f"[![CI]({here}/actions/workflows/ci.yml/badge.svg)]" in setup["published"](readme, here, "v1")
    assert setup["urls"](None) == {} and setup["urls"](here)["Issues"] == f"{here}/issues"


@pytest.mark.parametrize("package", ["moe_core", "moe_torch", "moe_jax"])
def test_packages_are_typed(package: str) -> None:
    assert importlib.resources.files(package).joinpath("py.typed").is_file()


def test_extras() -> None:
    extras = set(importlib.metadata.metadata("moebius").get_all("Provides-Extra") or [])
    assert {"torch", "jax", "flax", "checkpoint", "test", "bench"} <= extras


def test_license_is_apache() -> None:
    assert importlib.metadata.metadata("moebius")["License-Expression"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_engines_are_found_by_name(name: str) -> None:
    (entry,) = importlib.metadata.entry_points(group="moebius.engines", name=name)
    assert entry.value == ENGINES[name]
    assert isinstance(entry.load(), type)


def test_parity_command_is_installed() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="moe-parity")
    assert entry.value == "moe_core.parity.cli:main"
    assert callable(entry.load())


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
