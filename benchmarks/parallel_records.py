"""Every record of several GPUs in one run: one part after another, each in a session of its own that is ended whole.

    python -m benchmarks.parallel_records FOLDER [--parts links,training] [--seconds 900] [--ranks 2]

Writes NAME.json and NAME.log of every part, and parts.json with commands, exit codes and seconds. First it compiles the
kernels of all parts on CPU cores. Ranks that outlive a launcher would spin on their GPUs and slow all others down.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import chosen_names

_CELLS = {
    "training": "--training --tokens 16384 --modes peer,all_to_all --shapes gptoss120b,mixtral,dsv3",
    "dsv3": "--shapes dsv3",
    "forward": "--modes peer,all_to_all --shapes gptoss120b,qwen3,glm45air,mixtral",
}
#: By part: what torchrun starts on how many of all ranks (1 / the number).
_USES = {"uses": (1, "batches,adapters,hosts"), "fsdp": (1, "training"), "resumed": (2, "resumed")}
PARTS = ("links", *_CELLS, *_USES, "killed", "jax")
#: What compiling may take, and every part.
_COMPILING, _PART = 240.0, 180.0


def commands(name: str, folder: Path, ranks: int, device: str) -> list[str]:
    """The command of a part, without the interpreter."""
    on_gpus, output = device == "cuda", ["--output", str(folder / f"{name}.json")]
    if name == "links":
        more = [] if on_gpus else ["--device", "cpu", "--ranks", str(ranks)]
        return ["-m", "moe_core.tools.tune", "--links", "--link-seconds", "8", *more, *output]
    if name in _CELLS:
        # A CPU has tiny shapes.
        given = _CELLS[name].split() if on_gpus else ["--training"] * (name == "training")
        given += ["--ranks", str(ranks), "--device", device, "--cell-seconds", "0.06"]
        return ["-m", "benchmarks.parallel", *given, *output]
    if name in _USES:
        share, parts = _USES[name]
        started = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks // share)]
        given = ["-m", "benchmarks.parallel_uses", "--device", device, "--parts", parts]
        if name != "uses":
            given += ["--shapes", "granite", "--tokens", "1024", "--checkpoint", str(folder / "saved")]
        return [*started, *given, *output]
    if name == "killed":
        return ["-m", "benchmarks.parallel_killed", "--device", device, *output]
    return ["-m", "benchmarks.jax_layers", "--parts", "mesh,split", *output]


def compiling(names: Sequence[str], folder: Path, ranks: int) -> list[list[str]]:
    """Commands that compile the kernels of these parts, without a GPU."""
    found = [[*commands(name, folder, ranks, "cuda"), "--kernels", "only"] for name in names if name in _CELLS]
    if set(names) & set(_USES):
        parts = "hosts,batches,adapters" * ("uses" in names), "recipe" * bool({"fsdp", "resumed"} & set(names))
        found.append(
            ["-m", "benchmarks.parallel_ahead", "--ranks", str(ranks), "--parts", ",".join(filter(None, parts))]
        )
    return found


class Runs:
    """Processes with sessions of their own, and what became of them."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.end, self.rows = folder, time.monotonic() + seconds, []

    def run(self, calls: Sequence[tuple[str, list[str]]], limit: float) -> None:
        """Run commands, each by its name, side by side; what runs longer is ended with all that it started."""
        began = time.monotonic()
        until, running = min(self.end, began + limit), []
        for name, command in calls:
            with (self.folder / f"{name}.log").open("wb") as log:
                options: Any = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
                process = subprocess.Popen([sys.executable, *command], **options)
            running.append((name, command, process))
        for name, command, process in running:
            try:
                code: int | str = process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = "ended: the time was spent"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            seconds = round(time.monotonic() - began, 1)
            self.rows.append(
                {"part": name, "exit": code, "seconds": seconds, "command": " ".join(["python", *command])}
            )
            (self.folder / "parts.json").write_text(json.dumps(self.rows, indent=1) + "\n")
            print(f"{name}: {code}, {seconds} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts. Returns the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS), help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=900.0, help="of all (default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tiny layers, over gloo")
    parser.add_argument("--kernels", default="compile", choices=("compile", "only", "ready"), help="as of parallel")
    options = parser.parse_args(arguments)
    names = chosen_names(parser, "--parts", options.parts, PARTS)
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    runs = Runs(folder, options.seconds)
    if options.device == "cuda" and options.kernels != "ready":
        calls = compiling(names, folder, options.ranks)
        runs.run([(f"compile{number}", call) for number, call in enumerate(calls)], _COMPILING)
    if options.kernels != "only":
        for name in names:
            ready = ["--kernels", "ready"] * (name in _CELLS)
            runs.run([(name, commands(name, folder, options.ranks, options.device) + ready)], _PART)
    return sum(row["exit"] != 0 for row in runs.rows)


if __name__ == "__main__":
    sys.exit(main())
