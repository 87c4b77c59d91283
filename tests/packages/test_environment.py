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
    with pytest.raises(LookupError, match="must hold flax"):
        distribution(site, "jaxlib")
        (site / "moebius-1.0.dist-info" / "METADATA").write_text(
            'Metadata-Version: 2.4\nName: moebius\nVersion: 1.0\nRequires-Dist: flax; extra == "flax"\n'
        )
        environment.required(site, "flax")
