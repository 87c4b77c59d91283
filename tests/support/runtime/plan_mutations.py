"""Plan files with random changes: loading one raises our own errors only, and running what was loaded never crashes.

    python -m tests.support.runtime.plan_mutations CASES SEED

prints, as JSON, how many cases were refused, loaded, and run. A foreign exception ends the process with an error.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from moe_core.base import codec, dtypes
from moe_core.base.arrays import ArraySpec, TensorView
from moe_core.base.target import Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.reduction.reduce import plan_scale_rows
from moe_core.plan import registry
from moe_core.plan.steps import LaunchPlan
from moe_core.runtime.prepare import run
from tests.support.harness import H200
from tests.support.moe import layer_plan

#: What takes the place of a value.
_VALUES = (
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, -(2**63), 10**30, 10**5000, 0.5, "", "x", "bfloat16", "a.b:c",
    "\ud800",
    "os:system", "base.files:open_file", "matmul.reference:np", [], [1], [[1, 2]], {}, {"float": "zz"}, {"float": 1},
    {"float": "0x1p+3", "type": "Scalar"}, {"type": "Pointer", "buffer": "nowhere"}, {"type": 3},
    {"type": "LaunchPlan"},
)  # fmt: skip
#: Bytes of arrays that are run; larger ones only have to be loaded.
_MOST_BYTES = 2**24


def plans() -> list[LaunchPlan]:
    """Small and large ones, of NumPy twins and of kernels."""
    rows, weights = ArraySpec((10, 8), "float32"), ArraySpec((10, 1), "float32")
    found = [plan_scale_rows(rows, weights, target) for target in (Target("reference"), H200)]
    return [*found, layer_plan(None, 8, Target("reference"), "float32"), layer_plan(None, 8, H200)]


def changed(value: Any, draw: random.Random) -> Any:
    """A copy with one to three changes."""
    holder = [copy.deepcopy(value)]
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(_places(holder))
        node, key = draw.choice(places)
        old, kind = node[key], draw.randrange(6)
        if kind == 0 and type(old) is int:
            node[key] = draw.choice((old + 1, old - 1, old * 2, -old, old + 2**32, float(old)))
        elif kind == 1 and isinstance(old, str) and old:
            place = draw.randrange(len(old))
            node[key] = old[:place] + chr(draw.randrange(1, 300)) + old[place + draw.randrange(2) :]
        elif kind == 2 and node is not holder:
            node.pop(key)
        elif kind == 3 and isinstance(node, list) and node is not holder:
            node.insert(key, copy.deepcopy(old))
        elif kind == 4:
            other, place = draw.choice(places)
            node[key] = copy.deepcopy(other[place]) if other is not node or place != key else None
        else:
            node[key] = copy.deepcopy(draw.choice(_VALUES))
    return holder[0] if holder else None


def _places(node: Any) -> Any:
    """(list or dict, index or name) of every value."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from _places(node[key])


def changed_bytes(content: bytes, draw: random.Random) -> bytes:
    """A copy with one to three bytes changed, left out or doubled, cut off, or nested too deep."""
    kind = draw.randrange(12)
    if kind == 0:
        return content[: draw.randrange(len(content))]
    if kind == 1:
        return b"[" * 200_000 + content
    found = bytearray(content)
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(found))
        found[place : place + draw.randrange(2)] = draw.choice((b"", bytes([draw.randrange(256)]), b"0", b"9", b"-"))
    return bytes(found)


def run_plan(plan: LaunchPlan) -> bool:
    """Run a plan of NumPy twins on memory as large as its buffers; False where that is too much of it."""
    buffers = (*plan.inputs, *plan.outputs)
    total = sum(_span(buffer.spec) for buffer in buffers) + plan.scratch_bytes
    if plan.target.compiled or total > _MOST_BYTES:
        return False
    specs = {buffer.name: buffer.spec for buffer in buffers}
    if plan.scratch_bytes:
        specs["scratch"] = ArraySpec((plan.scratch_bytes,), "uint8")
    memory = {name: np.zeros(_span(spec) + 16, np.uint8) for name, spec in specs.items()}
    views = {}
    for name, array in memory.items():
        views[name] = TensorView(array.ctypes.data + -array.ctypes.data % 16, specs[name], ("cpu", 0), array)
    try:
        run(plan, views)
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception:
        pass  # A plan that was changed and given the key of its text is its author's: it may fail, and not crash.
    return True


def _span(spec: ArraySpec) -> int:
    """Bytes from the first element to the last."""
    steps = sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
    return (steps + 1 if spec.size else 0) * dtypes.itemsize(spec.dtype)


def main(cases: int, seed: int) -> dict[str, int]:
    draw, counts = random.Random(seed), {"refused": 0, "loaded": 0, "run": 0}
    sources = plans()
    values = [json.loads(codec.dumps(plan)) for plan in sources]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plans.json")
        contents = [(registry.export_plans(path, [registry.register(plan)]), path.read_bytes()) for plan in sources]
        for case in range(cases):
            try:
                if case % 2:
                    # As someone would who computes the key of what he changed.
                    plan = registry.decode_plan(changed(draw.choice(values), draw))
                    counts["run"] += run_plan(plan)
                else:
                    keys, content = draw.choice(contents)
                    path.write_bytes(changed_bytes(content, draw))
                    assert registry.load_plans(path) in (keys, ()), "a changed plan was registered"
                counts["loaded"] += 1
            except (InvalidInput, Unsupported):
                counts["refused"] += 1
    return counts


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
