"""The documentation site, as far as it needs no mkdocs: sections of docstrings, places of links, notebooks, navigation.

`make docs` builds it and runs the notebooks.
"""

from __future__ import annotations

import ast
import functools
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.paths import ROOT
from tools.site import errors, front
from tools.site.links import linked_files, place_of, rewritten
from tools.site.notebooks import FOLDER, as_markdown, links
from tools.site.sections import LIKE, completed, with_sections

PROSE = """Sizes of a layout: rows by expert.

num_experts: local groups; some are empty. rows, columns: of one
matrix, e.g. of `x: y`. other: no parameter.
Raises InvalidInput for sizes below 0, Unsupported for others."""


def test_parameters_in_prose_become_a_section() -> None:
    found = with_sections(
        PROSE.replace("\n- rows: a list stays a list", ""), ["num_experts", "rows", "columns"], "Args"
    )
    assert found == (
        "Sizes of a layout: rows by expert.\n\nArgs:\n    num_experts: local groups; some are empty.\n"
        "    rows: of one matrix, e.g. of `x: y`. other: no parameter.\n"
        "    columns: of one matrix, e.g. of `x: y`. other: no parameter.\n\n"
        "**Raises** InvalidInput for sizes below 0, Unsupported for others."
    )


def test_parameters_that_share_a_line_of_a_section_get_their_own() -> None:
    text = "Sum.\n\nArgs:\n    rows, columns: of one matrix,\n        in this order.\n    other: alone.\n"
    found = with_sections(text, ["rows", "columns", "other"], "Args")
    both = "of one matrix,\n        in this order.\n"
    assert found == f"Sum.\n\nArgs:\n    rows: {both}    columns: {both}    other: alone.\n"


@pytest.mark.parametrize(
    "text", ["One line.", "Sum.\n\nArgs:\n    rows: a section\n", "Sum.\n\n- rows: of a list\n- columns: as well"]
)
def test_other_docstrings_stay(text: str) -> None:
    assert with_sections(text, ["rows", "columns"], "Args") == text.rstrip() or "Args:" in text


def test_a_docstring_gets_what_only_the_other_front_end_says() -> None:
    rows = "    rows: of one matrix,\n        in this order.\n"
    full = f"Sum.\n\nIn fp32.\n\nArgs:\n{rows}    wide: of torch.\n\nReturns:\n    a sum.\n"
    text = with_sections("Add, as `moe_torch.sum`.\n\nwide: of JAX. axis: its own.", ["rows", "wide", "axis"], "Args")
    assert completed(text, full) == (
        f"Add, as `moe_torch.sum`.\n\nIn fp32.\n\nArgs:\n{rows}"
        "    wide: of JAX.\n    axis: its own.\n\nReturns:\n    a sum."
    )
    assert completed("Add.", full).startswith("Add.\n\nIn fp32.\n\nArgs:\n    rows: ")


def test_what_docstrings_leave_to_the_other_front_end_is_there() -> None:
    """Every parameter of the JAX function is one of the torch function, which describes it."""
    functions = {
        package: {
            node.name: node
            for path in sorted((ROOT / package).rglob("*.py"))
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef) and "parallel" not in path.parts
        }
        for package in ("moe_torch", "moe_jax")
    }
    names = []
    for node in functions["moe_jax"].values():
        if like := LIKE.search(ast.get_docstring(node) or ""):
            names.append(like[1].rpartition(".")[2])
            full = functions["moe_torch"][names[-1]]
            parameters = [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]
            assert parameters == [one.arg for one in (*full.args.args, *full.args.kwonlyargs)]
            text = with_sections(str(ast.get_docstring(full)), parameters, "Args")
            assert [one for one in parameters if re.search(rf"\b{one}\b", text) is None] == [], node.name
    assert {"moe", "router", "warmup", "load_balance_loss"} <= set(names)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("README.md", "readme.md"),
        ("docs/README.md", "contents.md"),
        ("docs/user/layers.md", "user/layers.md"),
        ("docs/tutorials/port_to_flax.ipynb", "tutorials/port_to_flax.md"),
        ("examples/torch_layer.py", "examples/torch_layer.md"),
        ("examples", "examples/index.md"),
        ("benchmarks", "repository/benchmarks/README.md"),
        ("benchmarks/results", "repository/benchmarks/results/index.md"),
        ("CONTRIBUTING.md", "repository/CONTRIBUTING.md"),
    ],
)
def test_files_have_a_place_in_the_site(path: str, place: str) -> None:
    assert place_of(path) == place


def test_links_are_written_anew_and_broken_ones_found() -> None:
    text = (
        "[a](../../README.md#parity) [b](routing.md) ![c](../figures/x.svg) [d](https://d.org) [e](#e)\n"
        '<img src="../figures/time-balanced.svg"> <a href="layers.md#f">f</a>\n```text\n[g](none.md)\n```\n'
    )
    found, broken = rewritten("docs/user/layers.md", text, "user/layers.md", lambda place: True)
    assert found == (
        "[a](../readme.md#parity) [b](routing.md) ![c](../figures/x.svg) [d](https://d.org) [e](#e)\n"
        '<img src="../figures/time-balanced.svg"> <a href="layers.html#f">f</a>\n```text\n[g](none.md)\n```\n'
    )
    assert broken == ["../figures/x.svg"]
    _, broken = rewritten("docs/user/layers.md", text, "user/layers.md", lambda place: place != "readme.md")
    assert broken == ["../../README.md#parity", "../figures/x.svg"]


def test_linked_files_come_along() -> None:
    page = "[a](../../benchmarks/results/forward-h200.json) [b](layers.md) [c](../../examples/torch_layer.py)"
    assert linked_files("docs/user/performance.md", page) == {"benchmarks/results/forward-h200.json"}


@pytest.fixture(scope="module", autouse=True)
def read_once() -> Iterator[None]:
    """Reading the messages of all packages takes a second, and the command does it, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(errors, "messages", functools.cache(errors.messages))
        yield


@pytest.fixture(scope="module")
def messages() -> list[errors.Message]:
    return errors.messages(ROOT)


def test_the_page_of_errors_has_every_message(messages: list[errors.Message]) -> None:
    """Each text between quotes that the source raises, by a count of its own; each with an anchor and a subject."""
    raised = r"raise (?:InvalidInput|Unsupported)\(\s*f?\"([^{}\"\\]{12,})"
    sources = [path.read_text() for name in errors.PACKAGES for path in (ROOT / name).rglob("*.py")]
    begins = {begin.rstrip() for source in sources for begin in re.findall(raised, source)}
    texts = [message.text for message in messages]
    assert len(begins) > 300 and not [begin for begin in begins if not any(begin in text for text in texts)]
    assert len({message.anchor for message in messages}) == len(texts) > 1000
    assert {message.subject for message in messages} == set(errors.SUBJECTS)


def test_messages_say_what_to_do(messages: list[errors.Message]) -> None:
    """Their last part is the fix, or the message of another error."""
    without = [message for message in messages if "; " not in message.text and not message.is_reason]
    passed_on = re.compile(r"\{(error|problem|reason)\}|TopKWeightAndReduceContiguous for example$")
    assert not [message.text for message in without if not passed_on.search(message.text)]


def test_messages_are_read_as_they_are_written(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in errors.PACKAGES:
        (tmp_path / name).mkdir()
    source = """
def require_even(name, value, optional=False):
    if value % 2:
        raise InvalidInput(f"{name} must be even{' or None' if optional else ''}, got {value!r}; add " "one")
def why_not(x):
    return None if x else f"{x.shape[0]} rows are too many"
def run():
    require_even("rows", 3)
    raise Unsupported("no <such> thing; leave it out")
"""
    (tmp_path / "moe_core" / "checks.py").write_text(source)
    even, no, reason = errors.messages(tmp_path)
    assert even.text == "{name} must be even[ or None], got {value}; add one" and even.names == ("rows",)
    assert no.kind == "Unsupported" and reason.is_reason and reason.text == "{shape} rows are too many"
    text = errors.page(tmp_path)
    assert (
        f'id="{no.anchor}"' in text and "no &lt;such&gt; thing</code>" in text and "<b>Fix</b>: leave it out." in text
    )
    assert errors.main(["must", "be", "row-major", "contiguous"]) == 0 and "contiguous first" in capsys.readouterr().out
    assert errors.main(["zzz"]) == 1


def test_notebooks_open_where_the_repository_is_known() -> None:
    page = "docs/tutorials/port_to_flax.md"
    assert links(page, {}) == links(page, {"MOEBIUS_REPOSITORY": "https://other.org/a"}) != ""
    known = links(page, {"MOEBIUS_REPOSITORY": "https://github.com/a/b", "MOEBIUS_REVISION": "v1"})
    assert "(https://colab.research.google.com/github/a/b/blob/v1/docs/tutorials/port_to_flax.ipynb)" in known
    assert "git+https://github.com/a/b@v1" in known


def test_the_front_page_is_the_readme() -> None:
    text = front.page((ROOT / "README.md").read_text())
    assert "from moe_torch import MoE" in text and "from moe_jax.nnx import MoE" in text and "$ moe-parity" in text
    assert "# needs" not in text and "Mixture-of-Experts layers for PyTorch and JAX" in text


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    folders = ("user", "developer", "notebook", "tutorials")
    pages = [place_of(f"docs/{name}/{path.name}") for name in folders for path in (ROOT / "docs" / name).iterdir()]
    missing = [page for page in pages if f"- {page}\n" not in navigation]
    assert len(pages) > 15 and not missing, missing


def test_notebooks_are_stored_with_what_they_print() -> None:
    notebooks = sorted(FOLDER.glob("*.ipynb"))
    assert len(notebooks) >= 2
    for path in notebooks:
        cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        assert all(cell["execution_count"] is None for cell in code)
        assert sum(bool(cell["outputs"]) for cell in code) >= 4
        page = as_markdown(path)
        assert page.startswith("# ") and "```text\n" in page and "For everybody" in page.split("```")[0]
