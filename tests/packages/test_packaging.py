"""What an installation offers: one version, typed packages, engines found by name, extras."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.resources
import pathlib
import re
import runpy
import tomllib

import pytest
import yaml

import moe_core
from tests.support.paths import ROOT

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
