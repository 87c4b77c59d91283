"""Run the Python of the first pages: `python tools/snippets.py --label torch` runs what begins `# needs .[torch]`.

CI runs each label in an environment that has this extra and nothing else, so that what a reader installs is what a
block needs. The packages under test are those that are installed: the checkout is not on the path.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: What a newcomer reads first, and whose blocks say what they need.
PAGES = ("README.md", "docs/user/start.md")
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LABEL = re.compile(r"# needs \.\[(\w+)\]\n")


def labelled(text: str) -> list[tuple[str | None, int, str]]:
    """(label or None, line, source) of every Python block of a page."""
    found = []
    for fence in FENCE.finditer(text):
        label = LABEL.match(fence[1])
        found.append((label[1] if label else None, text.count("\n", 0, fence.start()) + 2, fence[1]))
    return found


def main() -> int:
    """Run what is labelled so; the exit status: 0 all ran, 1 one failed, 2 nothing has the label."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", required=True, help="an extra: torch, jax, flax, transformers or all")
    label = parser.parse_args().label
    blocks = [(page, *block) for page in PAGES for block in labelled((ROOT / page).read_text()) if block[0] == label]
    if not blocks:
        print(f"no Python block of {', '.join(PAGES)} begins `# needs .[{label}]`", file=sys.stderr)
        return 2
    failed = 0
    for page, _, line, source in blocks:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            script = pathlib.Path(folder) / "block.py"
            # Blank lines in front make a traceback name the page's line.
            script.write_text("\n" * (line - 1) + source)
            done = subprocess.run([sys.executable, str(script)], cwd=folder)
        failed += done.returncode != 0
        verdict = "ran" if done.returncode == 0 else f"FAILED with status {done.returncode}"
        print(f"{page}:{line}, .[{label}]: {verdict} in {time.monotonic() - began:.1f} s", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
