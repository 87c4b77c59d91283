"""Scripts in fresh processes in which some packages do not exist."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.support.paths import ROOT

#: Run first in the fresh process: packages named in `blocked` cannot be imported, and attempts are recorded.
BLOCKER = """
import json, sys

class Blocker:
    def __init__(self, blocked):
        self.blocked, self.attempts = blocked, []

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            self.attempts.append(name)
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
        return None

blocker = Blocker(set(json.loads(sys.argv[1])))
sys.meta_path.insert(0, blocker)
"""


def run_blocked(blocked: tuple[str, ...], script: str) -> None:
    """Run a script on the CPU reference engine in a fresh process in which `blocked` packages do not exist."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": _python_path()}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER + script, json.dumps(blocked)], env=environment, cwd=ROOT, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, f"with {blocked} blocked:\n{done.stdout}{done.stderr}"


def _python_path() -> str:
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(ROOT), *([inherited] if inherited else [])])
