"""Faults planted in copies of the Hopper matmul, and the process that compiles or runs each copy.

Run as a script: `python -m tests.hopper_faults ACTION FOLDER...`, in a process without TRITON_INTERPRET: Gluon has no
interpreter. Every folder holds kernels; a fork that takes its kernels from there leaves its exit status in `status` in
the folder and its output in `log`. ACTION:

- `compile`: for sm_90, needs no GPU; instructions go to `instructions`. Exits with 0 where it compiles.
- `run`: on the first GPU, against the reference. Exits with 0 where they agree, RESULT_DIFFERS where they do not.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path

from moe_core.compiler import compile_launch
from moe_core.matmul_ogs import plan_matmul_ogs
from moe_core.parity.tolerance import assert_close, matmul_tolerance
from moe_core.plan import KernelLaunch
from moe_core.specs import Activation, MatmulSpec
from moe_core.target import Target
from moe_core.tuning import TileConfig
from tests.backward_faults import OpFault
from tests.test_matmul_ogs import Case, build, expected_matmul, run_matmul, specs_of

#: By kernel file. None of them changes what is waited for, how often, or an address beyond what is clamped or masked
#: afterwards: a copy neither hangs nor leaves its arrays.
FAULTS: dict[str, tuple[OpFault, ...]] = {
    "hopper": (
        OpFault("activate_gated(first, last,", "activate_gated(last, first,"),
        OpFault("gl.maximum(slots, 0)", "gl.maximum(slots // 2, 0)"),
        OpFault("a_tiles.index(2 * stage + WHICH)", "a_tiles.index(2 * stage)"),
        OpFault("exists = within < rows", "exists = within < rows - 1"),
    ),
    "hopper_producer": (
        OpFault("gl.arange(0, ROWS, layout), rows - 1)", "gl.arange(0, ROWS, layout), rows - 2)"),
        OpFault("within = tile * PIECE + columns % PIECE", "within = tile * PIECE + (columns + 1) % PIECE"),
        OpFault('second = column + (N if GATE_LAYOUT == "halves" else 0)', "second = column"),
    ),
    "hopper_ring": (OpFault("write_fact(ring, place, 3, tile)", "write_fact(ring, place, 3, tile // 2)"),),
}
RESULT_DIFFERS = 10
_SPEC = MatmulSpec("in_out", "token", "slot", Activation("silu"))
#: Groups of two row blocks and more, three column tiles, the last one narrow, and everything that is optional.
_CASE = Case(300, 2, 4, 128, 264, "bfloat16", _SPEC, "uniform", bias="float32", row_weight=True)
_CONFIG = TileConfig(128, 128, 64, 4, 4, 8, "hopper")


def _compile(folder: Path) -> int:
    operands, layout, _ = build(_CASE)
    target = Target("cuda", 90, 132)
    plan = plan_matmul_ogs(specs_of(operands), layout, _SPEC, target, config=_CONFIG)
    (launch,) = [step for step in plan.steps if isinstance(step, KernelLaunch) and step.kernel == "hopper:matmul_ogs"]
    ptx = compile_launch(plan, launch, target).asm["ptx"]
    # Directives and comments hold lines and columns of the source, which every fault changes.
    lines = [line.partition("//")[0].strip() for line in ptx.splitlines()]
    (folder / "instructions").write_text("\n".join(line for line in lines if line and not line.startswith(".")))
    return 0


def _run(folder: Path) -> int:
    operands, layout, arrays = build(_CASE)
    # Outside of the comparison: a write out of bounds is an error of its own.
    actual = run_matmul(operands, layout, arrays, _SPEC, config=_CONFIG)
    expected = expected_matmul(operands, layout, arrays, _SPEC)
    tolerance = matmul_tolerance(_CASE.dtype, _CASE.dtype, _CASE.d, activation=_SPEC.activation)
    try:
        assert_close(actual, expected, tolerance, label="y")
    except AssertionError as error:
        print(error)
        return RESULT_DIFFERS
    return 0


ACTIONS = {"compile": _compile, "run": _run}


def _fork(action: str, folder: Path) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 3
    try:
        with (folder / "log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            kernels = importlib.import_module("moe_core.kernels")
            kernels.__path__[:] = [str(folder)]
            status = ACTIONS[action](folder)
            assert importlib.import_module("moe_core.kernels.hopper").__file__ == str(folder / "hopper.py")
            sys.stdout.flush()
    except BaseException:
        status = 3
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    for place in sys.argv[2:]:
        (Path(place) / "status").write_text(str(_fork(sys.argv[1], Path(place))))
