"""What a newcomer waits for: clone, install as README.md says, first layers, `make parity`; each step timed.

    python3 tools/newcomer.py                 # in a folder of its own, which goes away at the end
    python3 tools/newcomer.py --limit 240     # fails where the whole takes longer than so many seconds

What pip needs is downloaded before each step and not timed. Run it on a machine that does nothing else. Exit status: 0,
or 1 where a step fails or a limit is passed.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: What `make parity` installs.
CPU_TORCH = re.findall(r'CPU_TORCH, CPU_TRANSFORMERS = "(.+?)"', (ROOT / "tools/environment.py").read_text())[0]
PARITY = re.findall("--extras (torch,jax,checkpoint)", (ROOT / "Makefile").read_text())[0]
#: Seconds until `make parity` must say something.
FIRST_OUTPUT = 5.0
#: For pip, which then takes all that it needs from what was downloaded.
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "../wheels"}


class Step(NamedTuple):
    """Something that was waited for. processor: seconds of all its processes. first: seconds until it printed
    something, None where it printed nothing."""

    name: str
    seconds: float
    processor: float
    first: float | None


def processor_seconds() -> float:
    """Of all processes that this one has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run(name: str, command: list[str], folder: pathlib.Path, environment: dict[str, str]) -> Step:
    """Run a command and time it; raises CalledProcessError, with all that it printed on stderr."""
    began, before, said = time.monotonic(), processor_seconds(), []
    first: list[float] = []
    print(f"== {name}: {' '.join(command)}", flush=True)
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout

        def read() -> None:
            for line in process.stdout or ():
                first[:] = first or [time.monotonic() - began]
                said.append(line)

        reader = threading.Thread(target=read)
        reader.start()
        status = process.wait()
        reader.join()
    step = Step(name, time.monotonic() - began, processor_seconds() - before, first[0] if first else None)
    print("".join(said[-3:]) + f"   {step.seconds:.1f} s", flush=True)
    if status:
        print("".join(said), file=sys.stderr)
        raise subprocess.CalledProcessError(status, command)
    return step


def installs(readme: str) -> list[str]:
    """The commands of a page that install something, without their comments."""
    return [re.sub(r"\s+#.*", "", line) for line in readme.splitlines() if line.startswith("pip install ")]


def download(what: str, checkout: pathlib.Path, environment: dict[str, str]) -> None:
    """Have pip download `what`, which is not timed; where the index of CPU builds is out of reach, by its version."""
    command = f"python -m pip download --quiet --retries 1 --dest ../wheels 'setuptools>=77' {what}"
    usual = re.sub(r" torch --index-url \S+", f" {CPU_TORCH}", command)
    if command == usual or subprocess.run(["bash", "-c", command], cwd=checkout, env=environment).returncode:
        run("download", ["bash", "-c", usual], checkout, environment)


def walk(folder: pathlib.Path) -> list[Step]:
    """Do all that the README says, in the order in which it says it."""
    checkout, environment = folder / "moebius", dict(os.environ)
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        environment.pop(name, None)
    binaries = folder / "environment" / "bin"
    environment["PATH"] = f"{binaries}{os.pathsep}{environment['PATH']}"
    steps = [
        run("clone", ["git", "clone", "--quiet", str(ROOT), str(checkout)], folder, environment),
        run("environment", [sys.executable, "-m", "venv", str(binaries.parent)], folder, environment),
    ]
    for number, command in enumerate(installs((checkout / "README.md").read_text()), 1):
        download(command.removeprefix("pip install "), checkout, environment)
        steps.append(run(f"install {number}", ["bash", "-c", command], checkout, environment | OFFLINE))
    snippet = [str(binaries / "python"), "tools/snippets.py", "--label", "torch"]
    steps.append(run("first layer", snippet, checkout, environment))
    download(f"{CPU_TORCH} '.[{PARITY}]'", checkout, environment)
    parity = ["make", "parity", f"PYTHON={sys.executable}"]
    steps.append(run("make parity", parity, checkout, environment | OFFLINE))
    return steps


def main() -> int:
    """Walk, print the times, and compare them with the limits; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=240, help="seconds of all steps (default: 240)")
    limit = parser.parse_args().limit
    with tempfile.TemporaryDirectory(prefix="moebius-newcomer-") as name:
        steps = walk(pathlib.Path(name))
    total, first = sum(step.seconds for step in steps), steps[-1].first
    for step in steps:
        said = "" if step.first is None else f", first output after {step.first:.1f} s"
        print(f"{step.name:12} {step.seconds:6.1f} s, {step.processor:6.1f} s of processors{said}")
    processor = sum(step.processor for step in steps)
    print(f"{'all':12} {total:6.1f} s, {processor:6.1f} s of processors, without downloads")
    late = [f"all steps took {total:.0f} s, more than {limit:.0f}"] if total > limit else []
    if first is None or first > FIRST_OUTPUT:
        late.append(f"make parity said nothing for {first} s, more than {FIRST_OUTPUT:.0f}")
    print(*(late or ["within the limits"]), sep="\n")
    return int(bool(late))


if __name__ == "__main__":
    sys.exit(main())
