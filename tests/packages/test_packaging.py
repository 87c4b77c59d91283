"""What an installation offers: one version, typed packages, engines found by name, extras."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import tomllib

import pytest

import moe_core
from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ENGINES = PROJECT["project"]["entry-points"]["moebius.engines"]


def test_version_has_one_source() -> None:
    assert importlib.metadata.version("moebius") == moe_core.__version__
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "moe_core.__version__"}


def test_changelog_has_an_entry_for_the_version() -> None:
    assert f"## [{moe_core.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


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
