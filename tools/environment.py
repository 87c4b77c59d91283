"""Make the virtual environment the Makefile's targets run in: `python3 tools/environment.py`.

Nothing happens when the environment is up to date, so every target asks for it first. An environment that lacks extras
gets them beside those that it has.

- Without a CUDA device everything is installed from the package index, torch in one fixed version.
- With one, torch, triton and jax must already be importable by the Python that runs this script: which builds fit the
  driver is that machine's business. The environment then sees that Python's packages and pip adds only what is
  missing, so that a machine without a network works when nothing is. Linters and `recipes` are left out.

`CUDA_VISIBLE_DEVICES= make test` hides the devices and gives the first kind.

`--packages-of .venv` takes the packages from another environment instead of the index: those that the project and the
extras require, and what these require, as links to the same files. What they do not require is not there. `--without
triton` leaves a package out, too.

`--beside .venv` shows the packages of another environment, and pip adds what the extras need beyond them.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXTRAS = "torch,jax,flax,checkpoint,test,bench"
#: One torch for all CPU runs, so that two of them differ only in what is being tested, and the transformers whose
#: families the documents list.
CPU_TORCH, CPU_TRANSFORMERS = "torch==2.13.0", "transformers==5.23.0"
#: Seconds after which somebody who waits wants to read something.
TELL_EVERY = 10


def has_cuda_device() -> bool:
    """Whether the CUDA driver is there and shows at least one device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def fingerprint(on_gpu: bool) -> str:
    """Changes when the environment must be made again, whatever its extras."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", pathlib.Path(__file__)):
        digest.update(path.read_bytes())
    digest.update(json.dumps([str(ROOT), sys.version, on_gpu]).encode())
    return digest.hexdigest()


def share_packages(directory: pathlib.Path, beside: pathlib.Path | None = None) -> None:
    """Let the environment see the packages of the running Python, which may itself be a virtual environment, or of
    another environment."""
    folders = [folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
    if beside is not None:
        folders = [str(folder) for folder in beside.glob("lib/python*/site-packages")]
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in folders]
    target = next(directory.glob("lib/python*/site-packages"))
    (target / "host_packages.pth").write_text("".join(lines))


def make(
    directory: pathlib.Path,
    extras: str,
    on_gpu: bool,
    packages_of: pathlib.Path | None = None,
    beside: pathlib.Path | None = None,
    add: bool = False,
    without: str | None = None,
) -> None:
    """Create the environment, unless `add`, and install the project, editable, with `extras` into it."""
    if not add:
        with_pip = beside is not None or (not on_gpu and packages_of is None)
        venv.create(directory, clear=True, with_pip=with_pip, symlinks=True)
    install = [str(directory / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
    project = ["--editable", f"{ROOT}[{extras}]"]
    if packages_of is not None:
        link_packages(packages_of, directory, extras, without)
        run_pip([*install, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)])
    elif beside is not None:
        share_packages(directory, beside)
        run_pip([*install, *project])
    elif on_gpu:
        if not add:
            share_packages(directory)
        run_pip([*install, "--no-build-isolation", *project])
    else:
        chosen = extras.split(",")
        pinned = [CPU_TORCH] if "torch" in chosen else []
        pinned += [CPU_TRANSFORMERS] if {"test", "transformers", "recipes"} & set(chosen) else []
        run_pip([*install, *pinned, *project])


def run_pip(command: list[str]) -> None:
    """Run pip and say what it does: every download of some megabytes, the packages it installs, and every TELL_EVERY
    seconds that it is still there. All that it printed follows if it fails; raises CalledProcessError. Modules are
    compiled when they are first imported, if Python may keep the bytecode; most never are."""
    options = ["--progress-bar", "off", *([] if sys.dont_write_bytecode else ["--no-compile"])]
    start, said, doing = time.monotonic(), [], "starting pip"

    def tell() -> None:
        print(f"  {time.monotonic() - start:4.0f} s  {doing}", flush=True)

    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def read(output: Iterable[str]) -> None:
            for line in output:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, args=(pip.stdout,), daemon=True).start()
        tell()
        while True:
            try:
                line = lines.get(timeout=TELL_EVERY)
            except queue.Empty:
                tell()
                continue
            if line is None:
                break
            said.append(line)
            if found := re.match(r"Collecting (\S+)", line):
                doing = f"looking for {found[1]}"
            elif found := re.match(r"\s+Downloading (\S+) \((.+)\)", line):
                doing = f"downloading {found[1].rsplit('/')[-1]}, {found[2]}"
                if re.search("[MG]B$", found[2]):
                    tell()
            elif line.startswith("Installing collected packages"):
                doing = f"installing {line.count(',') + 1} packages"
                tell()
    if pip.returncode:
        print("".join(said), end="", file=sys.stderr, flush=True)
        raise subprocess.CalledProcessError(pip.returncode, command)


def normalised(name: str) -> str:
    """A distribution's name as indices compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required(site: pathlib.Path, extras: str, without: str | None = None) -> list[importlib.metadata.Distribution]:
    """The distributions in `site` that the project, left out itself, needs with `extras` and to be installed, but
    `without` and what it needs. Raises LookupError."""
    sys.path.insert(0, str(site))
    from packaging.requirements import Requirement

    installed = {normalised(found.name): found for found in importlib.metadata.distributions(path=[str(site)])}
    wanted, seen = [("moebius", frozenset(extras.split(","))), ("pip", frozenset()), ("setuptools", frozenset())], set()
    found = {}
    while wanted:
        name, options = wanted.pop()
        if name not in installed:
            raise LookupError(f"{site} must hold {name}; make that environment with the extras {extras}, too")
        found[name] = installed[name]
        for option in {"", *options}:
            if (name, option) in seen:
                continue
            seen.add((name, option))
            for line in installed[name].requires or []:
                requirement = Requirement(line)
                needed = requirement.marker is None or requirement.marker.evaluate({"extra": option})
                if needed and requirement.name != without:
                    wanted.append((normalised(requirement.name), frozenset(requirement.extras)))
    del found["moebius"]
    return list(found.values())


def link_packages(source: pathlib.Path, directory: pathlib.Path, extras: str, without: str | None = None) -> None:
    """Link what `extras` require from the environment `source` into `directory`, file by file."""
    site, target = (next(folder.glob("lib/python*/site-packages")) for folder in (source, directory))
    for distribution in required(site, extras, without):
        for file in distribution.files or []:
            # Scripts lie outside of the packages and begin with the path of their environment.
            path = pathlib.Path(os.path.normpath(site / file))
            # Bytecode that imports left is not in the list.
            bytecode = pathlib.Path(importlib.util.cache_from_source(path)) if path.suffix == ".py" else path
            for one in {path, bytecode}:
                if one.is_relative_to(site) and one.is_file():
                    link = target / one.relative_to(site)
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.unlink(missing_ok=True)
                    try:
                        os.link(one, link)
                    except OSError:
                        shutil.copy2(one, link)


def main() -> int:
    """Make the environment unless it is up to date; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=".venv", help="folder of the environment (default: .venv)")
    parser.add_argument("--extras", help="extras of the project, comma-separated (default: all the tests need)")
    parser.add_argument("--packages-of", help="an environment to take the packages from (default: the package index)")
    parser.add_argument("--without", help="a package to leave out of --packages-of")
    parser.add_argument("--beside", help="an environment whose packages this one sees, and pip adds what is missing")
    options = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 - this is where an old Python is told so
        version = ".".join(map(str, sys.version_info[:3]))
        print(f"python must be 3.11 or newer, got {version}; name one: make PYTHON=python3.12 ...", file=sys.stderr)
        return 1
    on_gpu = has_cuda_device()
    missing = [name for name in ("torch", "triton", "jax") if importlib.util.find_spec(name) is None]
    if on_gpu and missing:
        print(
            f"{sys.executable} must have torch, triton and jax for this machine's CUDA device, got no "
            f"{', '.join(missing)}; install the builds that fit the driver, name another Python (make PYTHON=...), "
            "or hide the device (CUDA_VISIBLE_DEVICES= make ...)",
            file=sys.stderr,
        )
        return 1
    extras = options.extras or (EXTRAS if on_gpu else f"{EXTRAS},recipes,lint")
    directory = ROOT / options.directory
    if directory.is_symlink():
        print(f"{directory} must not be a link, whose target would be emptied; remove the link", file=sys.stderr)
        return 1
    inside = pathlib.Path(sys.prefix).resolve() == directory.resolve()
    stamp, wanted = directory / "environment.json", fingerprint(on_gpu)
    made = json.loads(stamp.read_text()) if stamp.exists() else {}
    current = made.get("fingerprint") == wanted and (inside or made.get("python") == sys.executable)
    held = set(made.get("extras", [])) if current else set()
    if current and set(extras.split(",")) <= held:
        return 0
    # One that takes packages from another is made anew, as it holds those of exact extras.
    add = current and not (options.packages_of or options.beside)
    if inside and not add:
        print(f"{directory} must be made again, and it is active; run `deactivate` first", file=sys.stderr)
        return 1
    beside = f" beside the packages of {sys.executable}" if on_gpu else ""
    extras = ",".join(sorted(set(extras.split(",")) | held)) if add else extras
    print(f"{'completing' if add else 'making'} {directory} with {extras}{beside}", flush=True)
    if not add:
        stamp.unlink(missing_ok=True)
    others = [ROOT / name if name else None for name in (options.packages_of, options.beside)]
    make(directory, extras, on_gpu, *others, add=add, without=options.without)
    python = made["python"] if add else sys.executable
    stamp.write_text(json.dumps({"fingerprint": wanted, "python": python, "extras": extras.split(",")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
