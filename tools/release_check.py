"""Build what would be published and try it as a stranger would: `make release-check`.

The source distribution and the wheel are built from a copy of the tracked files, and lie in build/release at the end.
The wheel is installed with its extra `all` in an empty environment outside of the checkout. There every snippet of the
README and of docs/user/start.md runs, and the doctor, and a parity case. A tag in MOEBIUS_REVISION must be that of the
version.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LABELS = ("torch", "jax", "flax", "transformers", "all")
#: One torch, as tools/environment.py has it.
PINNED = re.search(r'CPU_TORCH, CPU_TRANSFORMERS = "(.+?)", "(.+?)"', (ROOT / "tools/environment.py").read_text())
#: What a source distribution may hold besides the packages and its own metadata.
TOP = {
    *("CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "SECURITY.md"),
    *("moe_core", "moe_jax", "moe_torch", "moebius.egg-info", "pyproject.toml", "setup.cfg", "setup.py"),
}


#: What was done: its name, its seconds, and whether it went well.
_done: list[tuple[str, float, bool]] = []


def step(what: str, *command: str | pathlib.Path, cwd: pathlib.Path) -> None:
    """Run a command and keep how long it took; raises CalledProcessError."""
    began = time.monotonic()
    print(f"== {what}", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    good = subprocess.run([str(part) for part in command], cwd=cwd, env=environment).returncode == 0
    _done.append((what, time.monotonic() - began, good))
    if not good:
        raise subprocess.CalledProcessError(1, what)


def summary() -> str:
    """A line for each step that was run."""
    width = max((len(what) for what, _, _ in _done), default=0)
    return "\n".join(
        f"{'ok' if good else 'FAILED':6}  {what:{width}}  {seconds:4.0f} s" for what, seconds, good in _done
    )


def why_not_released(version: str) -> list[str]:
    """What the files beside the code still say otherwise about a version."""
    changelog, citation = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff"))
    found = re.search(rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$", changelog, re.MULTILINE)
    wrong = [] if found else [f"CHANGELOG.md must have the line `## [{version}] - YYYY-MM-DD`; add it"]
    if f"\nversion: {version}\n" not in citation or (found and f"date-released: {found[1]}\n" not in citation):
        wrong.append(f"CITATION.cff must have version {version} and the date of CHANGELOG.md; correct it")
    tag = os.environ.get("MOEBIUS_REVISION", f"v{version}")
    if tag != f"v{version}":
        wrong.append(f"the tag must be v{version}, got {tag}; correct moe_core.__version__ or the tag")
    return wrong


def build(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """(source distribution, wheel) in `folder`, the wheel made from the source distribution."""
    source = folder / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    dist = folder / "dist"
    step("build", sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, source, cwd=folder)
    (archive,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    step("twine check", sys.executable, "-m", "twine", "check", "--strict", archive, wheel, cwd=folder)
    with tarfile.open(archive) as members:
        top = {name.split("/")[1] for name in members.getnames() if "/" in name}
    if top != TOP:
        raise SystemExit(f"the source distribution must hold {sorted(TOP)}, differs by {sorted(top ^ TOP)}")
    return archive, wheel


def main() -> int:
    """Check everything, and end with what was checked; the exit status."""
    try:
        status, conclusion = check()
    except subprocess.CalledProcessError as error:
        status, conclusion = 1, f"{error.cmd} failed; its output is above"
    except SystemExit as error:
        status, conclusion = 1, str(error)
    print(f"\n{summary()}\n\nrelease-check: {conclusion}", flush=True)
    return status


def check() -> tuple[int, str]:
    """(exit status, last line). Raises CalledProcessError and SystemExit for what is wrong."""
    assert PINNED
    with tempfile.TemporaryDirectory(prefix="moebius-release-") as name:
        folder = pathlib.Path(name)
        archive, wheel = build(folder)
        version = wheel.name.split("-")[1]
        if wrong := why_not_released(version):
            return 1, "; ".join(wrong)
        python = folder / "environment" / "bin" / "python"
        step("an empty environment", sys.executable, "-m", "venv", folder / "environment", cwd=folder)
        pip = (python, "-m", "pip", "--disable-pip-version-check")
        pinned = (PINNED[1], PINNED[2])
        step("the wheel with its extra `all`", *pip, "install", "--quiet", *pinned, f"{wheel}[all]", cwd=folder)
        step("pip check", *pip, "check", cwd=folder)
        inside = f"import moe_core, pathlib; assert pathlib.Path(moe_core.__file__).is_relative_to({name!r})"
        step("where it is imported from", python, "-c", inside, cwd=folder)
        for label in LABELS:
            step(f"snippets of .[{label}]", python, ROOT / "tools" / "snippets.py", "--label", label, cwd=folder)
        commands = python.parent
        step("doctor", commands / "moebius-doctor", cwd=folder)
        step("parity", commands / "moe-parity", "--engines", "torch,jax", "--case", "llama4", cwd=folder)
        kept = ROOT / "build" / "release"
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        for path in (archive, wheel):
            shutil.copy2(path, kept)
    return 0, f"moebius {version} could be released: {kept}"


if __name__ == "__main__":
    sys.exit(main())
