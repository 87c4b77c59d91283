"""Imports point one way, and each package works where the others' dependencies do not exist.

Fresh processes block packages at the import system; a static look at every file holds the direction of imports.
"""

from __future__ import annotations

import ast
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

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

MOE_CALL = """
import numpy as np
random = np.random.default_rng(0)
draw = lambda *shape: array(random.standard_normal(shape).astype(np.float32))
spec = ops.MoESpec(ops.Activation("silu"), ops.RouterSpec(top_k=2))
result = ops.moe(draw(5, 16), ops.ExpertWeights(draw(4, 16, 16), draw(4, 8, 16)), ops.RouterLogits(draw(5, 4)), spec)
output = np.asarray(result.output)
assert output.shape == (5, 16) and np.isfinite(output).all() and output.any(), output
assert int(np.asarray(result.tokens_per_expert).sum()) == 10
"""


def run_blocked(blocked: tuple[str, ...], script: str) -> None:
    """Run a script on the CPU reference engine in a fresh process in which `blocked` packages do not exist."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": _python_path()}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER + script, json.dumps(blocked)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"with {blocked} blocked:\n{done.stdout}{done.stderr}"


def _python_path() -> str:
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(ROOT), *([inherited] if inherited else [])])


def test_blocker_blocks() -> None:
    run_blocked(
        ("json_that_is_not_there", "statistics"),
        "try:\n    import statistics\nexcept ModuleNotFoundError as error:\n    assert error.name == 'statistics'\n"
        "else:\n    raise SystemExit('statistics was imported')\nassert blocker.attempts == ['statistics']\n",
    )


def test_core_imports_with_numpy_alone() -> None:
    names = [own_name(path) for path in SOURCES if path.parts[0] == "moe_core" and not needs_triton(path)]
    assert "moe_core.runtime" in names
    run_blocked(
        ("torch", "jax", "jaxlib", "triton", "flax", "safetensors", "transformers", "tvm_ffi", "jax_tvm_ffi"),
        f"import importlib\nfor name in {names!r}: importlib.import_module(name)\n"
        "assert not blocker.attempts, blocker.attempts\n",
    )


def test_core_runs_a_plan_with_numpy_alone() -> None:
    run_blocked(
        ("torch", "jax", "jaxlib", "triton", "flax", "safetensors"),
        "import numpy as np\n"
        "from moe_core import routing, runtime\n"
        "from moe_core.arrays import ArraySpec\n"
        "from moe_core.specs import RouterSpec\n"
        "from moe_core.target import cpu_target\n"
        "plan = routing.plan_routing(ArraySpec((3, 8), 'float32'), RouterSpec(top_k=2), cpu_target())\n"
        "logits = np.arange(24, dtype=np.float32).reshape(3, 8)\n"
        "ids, weights = np.empty((3, 2), np.int32), np.empty((3, 2), np.float32)\n"
        "runtime.prepare(plan)([array.ctypes.data for array in (logits, ids, weights)])\n"
        "assert ids.tolist() == [[7, 6]] * 3, ids\n",
    )


def test_torch_front_end_without_jax_and_triton() -> None:
    run_blocked(
        ("jax", "jaxlib", "flax", "tvm_ffi", "jax_tvm_ffi", "triton", "moe_jax"),
        "import torch\nfrom moe_torch import ops\nassert 'torch._dynamo' not in sys.modules, 'it imports slowly'\n"
        "array = torch.from_numpy\n" + MOE_CALL,
    )


def test_jax_front_end_without_torch_and_triton() -> None:
    run_blocked(
        ("torch", "flax", "triton", "moe_torch"),
        "import jax\nimport moe_jax\nfrom moe_jax import ops\narray = jax.numpy.asarray\n" + MOE_CALL,
    )


#: Where every module of the core stands; a file may import only from its own layer and those below.
LAYERS = {
    "base": (
        "errors",
        "checks",
        "dtypes",
        "codec",
        "target",
        "arrays",
        "dlpack",
        "tuning",
        "tile_table",
        "specs",
        "operands",
        "formats",
        "prepared",
    ),
    "leaves": ("kernels", "reference"),
    "planning": (
        "arena",
        "plan",
        "tile_choice",
        "layout",
        "selection",
        "routing",
        "routing_backward",
        "matmul_operands",
        "matmul_hopper",
        "matmul_hopper_fp8",
        "matmul_mixed",
        "matmul_stream",
        "quantized_tiles",
        "matmul_quantized",
        "matmul_ogs",
        "matmul_quantized_transposed",
        "activation",
        "activation_backward",
        "reduction",
        "fusion",
        "overlap",
        "quantize_rows",
        "expert_checks",
        "weight_gradient_hopper",
        "weight_gradient",
        "backward_rows",
        "matmul_backward",
        "router_backward",
        "matmul_codes",
        "moe",
        "shared_backward",
        "backward_stages",
        "moe_backward",
    ),
    "runtime": ("cuda", "tensor_map", "compiler", "interpreter", "runtime", "warmup"),
    "tools": ("checkpoint", "doctor", "layers", "modular", "parity", "trace", "tune"),
}
LEVEL = {name: level for level, names in enumerate(LAYERS.values()) for name in names}
FRONT_END_LEVEL = len(LAYERS)
PACKAGES = ("moe_core", "moe_torch", "moe_jax")
SOURCES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported_modules(path: pathlib.Path, top_level_only: bool = False) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import statement of a file; `from a import b` gives `a` and `a.b`."""
    tree = ast.parse((ROOT / path).read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}:{node.lineno}: imports must be absolute"
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def level_of(dotted: str) -> int | None:
    """The layer of a module of the project; None for everything else and for the bare `moe_core` package."""
    parts = dotted.split(".")
    if parts[0] in ("moe_torch", "moe_jax"):
        return FRONT_END_LEVEL
    if parts[0] != "moe_core" or len(parts) == 1:
        return None
    return LEVEL.get(parts[1])


def needs_triton(path: pathlib.Path) -> bool:
    """Kernels, and what the interpreter package loads when it is used."""
    return path.parts[1] == "kernels" or (path.parts[1] == "interpreter" and path.name != "__init__.py")


def own_name(path: pathlib.Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_point_one_way(path: pathlib.Path) -> None:
    name = own_name(path)
    package = name.split(".")[0]
    banned = {
        "moe_core": {"torch", "jax", "flax", "moe_torch", "moe_jax", "tvm_ffi", "jax_tvm_ffi"},
        "moe_torch": {"jax", "flax", "moe_jax", "tvm_ffi", "jax_tvm_ffi"},
        "moe_jax": {"torch", "moe_torch"} | (set() if name == "moe_jax.ffi" else {"tvm_ffi", "jax_tvm_ffi"}),
    }[package]
    own_level = level_of(name) if name != "moe_core" else LEVEL["errors"]
    assert own_level is not None, f"{path} stands in no layer; add it to LAYERS"
    wrong = []
    for line, module in imported_modules(path):
        level = level_of(module)
        if module.split(".")[0] in banned or (level is not None and level > own_level):
            wrong.append(f"{path}:{line} imports {module}")
    assert not wrong, wrong


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parts[0] == "moe_core"], ids=str)
def test_core_imports_triton_lazily_and_kernels_nothing_else(path: pathlib.Path) -> None:
    roots = {(line, module.split(".")[0]) for line, module in imported_modules(path, top_level_only=True)}
    if path.parts[1] == "kernels":
        foreign = {module for _, module in imported_modules(path)} - {"__future__", "__future__.annotations"}
        allowed = ("triton", "moe_core.kernels")
        assert all(module.startswith(allowed) for module in foreign), (
            f"{path} imports {foreign}; kernels know Triton only"
        )
    elif not needs_triton(path):
        assert "triton" not in {root for _, root in roots}, f"{path} imports triton when it is imported"
    if path.parts[1] == "reference":
        names = {root for _, root in roots}
        assert names <= {"__future__", "numpy", "ml_dtypes", "moe_core"} | set(sys.stdlib_module_names), (
            f"{path}: {names}"
        )


def test_flax_is_imported_by_its_layers_alone() -> None:
    users = {str(path) for path in SOURCES for _, module in imported_modules(path) if module.split(".")[0] == "flax"}
    assert users <= {"moe_jax/nnx.py", "moe_jax/linen.py"}, f"{users} import flax"
