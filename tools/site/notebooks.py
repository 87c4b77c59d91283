"""Notebooks of docs/tutorials: run, and compared with the outputs they are stored with.

    python -m tools.site.notebooks            run every notebook; other outputs than the stored ones are an error
    python -m tools.site.notebooks --write    store what they give

What a notebook prints must be the same on every machine, so that readers see what a run gives. Only printed text and
values count; what goes to stderr does not. Needs the extra `docs` beside what the notebooks import.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import difflib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.site.links import ROOT

FOLDER = ROOT / "docs" / "tutorials"
#: Seconds that one cell may take.
CELL_SECONDS = 120


def printed(cell: dict[str, Any]) -> str:
    """What a code cell prints, and the value of its last line."""
    texts = []
    for output in cell.get("outputs", []):
        if output["output_type"] == "stream" and output["name"] == "stdout":
            texts.append(output["text"])
        elif output["output_type"] == "execute_result":
            texts.append(output["data"]["text/plain"])
    return "".join(text if isinstance(text, str) else "".join(text) for text in texts)


def as_markdown(path: Path) -> str:
    """A notebook as a page: its text, its code, and what that prints."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        text = printed(cell).rstrip()
        parts += [f"```text\n{text}\n```"] if text else []
    return "\n\n".join(parts) + "\n"


def links(page: str, environment: Mapping[str, str]) -> str:
    """Links that open a tutorial: its file, and Colab where the repository's address on GitHub is known."""
    path = Path(page).with_suffix(".ipynb")
    found, revision = f"[Download the notebook]({path.name}).", environment.get("MOEBIUS_REVISION") or "main"
    repository = environment.get("MOEBIUS_REPOSITORY", "").rstrip("/")
    name = repository.removeprefix("https://github.com/")
    if name == repository:
        return found
    colab = f"https://colab.research.google.com/github/{name}/blob/{revision}/{path}"
    command = f"!pip install 'moebius[all] @ git+{repository}@{revision}'"
    return f"{found} [Open it in Colab]({colab}), and run `{command}` first."


def executed(path: Path) -> dict[str, Any]:
    """The notebook with the outputs of a run in a process of its own, without counters and times."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(ROOT)}}
    nbclient.NotebookClient(notebook, timeout=CELL_SECONDS, kernel_name="python3", resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            text = printed(cell)
            cell.execution_count = None
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
    return notebook


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the notebooks; 1 where one fails or prints something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of docs/tutorials")
    parser.add_argument("--write", action="store_true", help="store the outputs")
    options = parser.parse_args(arguments)
    paths = options.notebooks or sorted(FOLDER.glob("*.ipynb"))
    if not paths:
        parser.error(f"notebooks must lie in {FOLDER}, which has none")
    status = 0
    for path in paths:
        began = time.monotonic()
        before, notebook = as_markdown(path), executed(path)
        text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        seconds = time.monotonic() - began
        if options.write:
            path.write_text(text)
            print(f"{path.name}: {seconds:.0f} s, written", flush=True)
            continue
        after_path = ROOT / "build" / path.name
        after_path.parent.mkdir(exist_ok=True)
        after_path.write_text(text)
        stored, found = before.splitlines(), as_markdown(after_path).splitlines()
        difference = list(difflib.unified_diff(stored, found, "stored", "this run", lineterm="", n=1))
        print(f"{path.name}: {seconds:.0f} s, {'as stored' if not difference else 'differs'}", flush=True)
        if difference:
            print("\n".join(difference))
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
