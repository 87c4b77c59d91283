"""tools/environment.py: an environment made of another's packages has what its extras require, and nothing else."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from types import ModuleType

import pytest

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
    environment.link_packages(tmp_path / "all", tmp_path / "one", "torch,test")
    modules = {path.stem for path in target.glob("*.py")}
    assert modules == {"pip", "setuptools", "numpy", "torch", "sympy", "Py.Test"}
    assert (target / "torch.py").samefile(site / "torch.py") and (target / "sympy-1.0.dist-info").is_dir()
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
