"""Scripts that run as in a fresh process each, without importing again what they import in common.

`ScriptServer` starts `python -m tests.support.runtime.script_server MISSING MODULES` (both JSON): a process in which
the packages MISSING do not exist and which has imported MODULES, and nothing more. It reads one request per line,
[script, file for its output, file for its errors], runs the script in a fork of itself, and answers with a line that
holds its status.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.support.paths import ROOT

#: After so many seconds a script is ended.
LIMIT = 240


class Done(NamedTuple):
    """How a script ended: 0 is success, and minus a number is the signal that ended it."""

    status: int
    output: str
    errors: str


class ScriptServer:
    """Runs scripts one after another, each in a fork of one process.

    missing: packages that cannot be imported, as on a machine that does not have them. modules: imported beforehand;
    name only what every script imports by itself, since a script finds them even if it forgets to.
    """

    def __init__(self, missing: Sequence[str], modules: Sequence[str], environment: Mapping[str, str]) -> None:
        command = [
            sys.executable, "-m", "tests.support.runtime.script_server", json.dumps(missing), json.dumps(modules),
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, script: pathlib.Path, folder: pathlib.Path) -> Done:
        """Run a script from the root of the checkout; what it prints lies in `folder`, too."""
        assert self._process.stdin and self._process.stdout
        output, errors = folder / "output", folder / "errors"
        self._process.stdin.write(json.dumps([str(script), str(output), str(errors)]) + "\n")
        self._process.stdin.flush()
        status = self._process.stdout.readline()
        assert status, f"the process that runs scripts has ended with {self._process.wait()}"
        return Done(int(status), output.read_text(), errors.read_text())

    def close(self) -> None:
        """End the process, which waits for nothing else."""
        self._process.communicate()


def _next_script() -> str | None:
    """Serve requests; in a fork, the script that it is to run; None once there are no more requests."""
    for line in sys.stdin:
        script, *files = json.loads(line)
        child = os.fork()
        if not child:
            signal.alarm(LIMIT)
            for descriptor, path in enumerate(files, 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            return script
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def _run(script: str) -> None:
    """As `python SCRIPT` does."""
    sys.argv = [script]
    sys.path[0] = str(pathlib.Path(script).parent)
    module = types.ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    code = compile(pathlib.Path(script).read_text(), script, "exec", dont_inherit=True)
    exec(code, module.__dict__)


if __name__ == "__main__":
    # To the import system None means that the package does not exist.
    sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))
    for name in json.loads(sys.argv[2]):
        importlib.import_module(name)
    # A fork that ends would otherwise look through all that was imported, for longer than most scripts run.
    gc.collect()
    gc.freeze()
    if (chosen := _next_script()) is None:
        # Nothing of this process is left to end in order.
        os._exit(0)
    _run(chosen)
