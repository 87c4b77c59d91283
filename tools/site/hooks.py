"""What mkdocs does beside the pages of docs/: pages out of other files, and links that lead to them.

Pages are written for the code host: README.md is the first page there, and links lead to any file of the repository.
Here every linked file has a place in the site, and every link is written anew for it. A link that leads nowhere is a
warning, and mkdocs.yml makes a warning an error.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import ast
import json
import logging
import os
import posixpath
import re
import runpy
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

from tools.site import errors, front, notebooks, reference
from tools.site.links import PAGES, PLACES, ROOT, linked_files, place_of, rewritten

log = logging.getLogger("mkdocs.hooks.site")

#: What Markdown of the code host shows as a list or a table, and the site as plain text.
_LOST = re.compile(r"<p>(?:[^<]|<(?!/p>))*?\n(?:[-*] |\d+\. |\|)")


def on_config(config: Any) -> Any:
    """Fill the parts of the navigation that follow from files; with `mike`, offer the versions."""
    if os.environ.get("MIKE_DOCS_VERSION"):
        config.extra["version"] = {"provider": "mike", "default": "latest"}
    examples = [f"examples/{path.stem}.md" for path in sorted((ROOT / "examples").glob("*.py"))]
    api = [*(f"api/{name}.md" for name in reference.MODULES), reference.SHARED]
    more = {"API": api, "Examples": examples}
    for section in config.nav:
        for title, pages in section.items():
            if title in more:
                pages.extend(more[title])
    return config


def example_pages() -> dict[str, str]:
    """A page for each example, its docstring above its source, and their list."""
    pages, rows = {}, []
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text()
        text = (ast.get_docstring(ast.parse(source)) or "").strip()
        summary = text.split("\n\n")[0].replace("\n", " ")
        rows.append(f"| [{path.name}]({path.stem}.md) | {summary.rstrip(':')} |")
        pages[f"examples/{path.stem}.md"] = f"# {path.name}\n\n{text}\n\n```python\n{source}```\n"
    intro = "For everybody who would rather read a program. All of these run on a CPU, and the tests run them:"
    table = "\n".join(["| example | what it shows |", "|---|---|", *rows])
    command = "```bash\npython examples/torch_layer.py\n```"
    pages["examples/index.md"] = f"# Examples\n\n{intro}\n\n{command}\n\n{table}\n"
    return pages


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that do not lie in docs/, and files that pages link to."""
    moved = files.get_file_from_path("README.md")
    if moved is not None:
        files.remove(moved)
    made = {PLACES.get(name, f"repository/{name}"): (ROOT / name).read_text() for name in (*PLACES, *PAGES)}
    version, repository = os.environ.get("MIKE_DOCS_VERSION"), os.environ.get("MOEBIUS_REPOSITORY")
    if version and repository and json.loads(version).get("version") != "dev":
        released = runpy.run_path(str(ROOT / "setup.py"))["released"]
        start = (ROOT / "docs/user/start.md").read_text()
        made["readme.md"] = released(made["readme.md"], repository)
        files.remove(files.src_uris["user/start.md"])
        made["user/start.md"] = released(start, repository)
    made |= example_pages() | reference.pages(ROOT) | {"errors.md": errors.page(ROOT)}
    made["index.md"] = front.page((ROOT / "README.md").read_text())
    made["site.css"] = (ROOT / "tools/site/site.css").read_text()
    for path in sorted((ROOT / "docs").rglob("*.ipynb")):
        made[place_of(str(path.relative_to(ROOT)))] = notebooks.as_markdown(path)
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    origin = {place: path for path, place in PLACES.items()} | {f"repository/{name}": name for name in PAGES}
    for file in list(files.documentation_pages()):
        path = origin.get(file.src_uri, f"docs/{file.src_uri}")
        for linked in linked_files(path, file.content_string):
            add(files, config, linked)
    return files


def add(files: Files, config: Any, path: str) -> None:
    """Add a file of the repository to the site, or a folder's files and their list."""
    place = place_of(path)
    if files.get_file_from_path(place) is not None:
        return
    if (ROOT / path).is_dir():
        inside = sorted(file.name for file in (ROOT / path).iterdir() if file.is_file())
        text = "\n".join([f"# {path}", "", *(f"- [{name}]({name})" for name in inside)])
        files.append(File.generated(config, place, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
        for name in inside:
            add(files, config, posixpath.join(path, name))
    else:
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links of a page as they are in the site."""
    place = page.file.src_uri
    origin = {there: here for here, there in PLACES.items()}.get(place)
    if origin is None:
        origin = place.removeprefix("repository/") if place.startswith("repository/") else f"docs/{place}"
    if not (ROOT / origin).exists() and not (ROOT / origin).with_suffix(".ipynb").exists():
        return markdown  # made here, with links of the site

    text, broken = rewritten(origin, markdown, place, lambda target: files.get_file_from_path(target) is not None)
    for link in broken:
        log.warning("%s links to %s, which is not in the site", origin, link)
    if (ROOT / origin).with_suffix(".ipynb").exists():
        text = text.replace("\n\n", f"\n\n{notebooks.links(origin, os.environ)}\n\n", 1)
    return text


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Warn where the site would show Markdown as text."""
    if not page.file.src_uri.startswith("api/"):
        for match in _LOST.finditer(html):
            log.warning("%s has a list or table without an empty line before it: %.80r", page.file.src_uri, match[0])
    return html


def on_post_page(output: str, **_: Any) -> str:
    """Give the theme's search a name, which screen readers say."""
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )


on_post_template = on_post_page  # of the page for what is not there
