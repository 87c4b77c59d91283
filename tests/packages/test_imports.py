"""Imports point one way, and each package works where the others' dependencies do not exist.

Fresh processes block packages at the import system; a static look at every file holds the direction of imports.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import sys
from collections.abc import Iterable

from tests.support.paths import ROOT
from tests.support.runtime.isolation import run_blocked

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


#: As on macOS: layers run, and the tools say why no kernel does.
WITHOUT_TRITON = """
import contextlib, io
from moe_core.parity.cli import main
from moe_core.tools.doctor.cli import diagnose
from moe_torch import MoE

assert MoE(32, 32, 4, 2)(torch.ones(3, 32)).shape == (3, 32)
said = io.StringIO()
with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
    assert main(["--case", "llama4", "--dtype", "float32", "--tokens", "5"]) == 2
assert "no kernel can run here, because Triton is not installed" in said.getvalue(), said.getvalue()
assert "left out: jax, which needs jax" in said.getvalue(), said.getvalue()
untrusted = list(diagnose(lambda line: None).untrusted())
assert any("Triton is not installed" in line for line in untrusted), untrusted
"""


def test_blocker_blocks() -> None:
    run_blocked(
        ("json_that_is_not_there", "statistics"),
        "try:\n    import statistics\nexcept ModuleNotFoundError as error:\n    assert error.name == 'statistics'\n"
        "else:\n    raise SystemExit('statistics was imported')\nassert blocker.attempts == ['statistics']\n",
    )


def test_core_imports_with_numpy_alone() -> None:
    names = [name for name, path in SOURCES.items() if name.startswith("moe_core") and not needs_triton(name, path)]
    assert "moe_core.runtime.prepare" in names
    run_blocked(
        ("torch", "jax", "jaxlib", "triton", "flax", "safetensors", "transformers", "tvm_ffi", "jax_tvm_ffi"),
        f"import importlib\nfor name in {names!r}: importlib.import_module(name)\n"
        "assert not blocker.attempts, blocker.attempts\n",
    )


def test_core_runs_a_plan_with_numpy_alone() -> None:
    run_blocked(
        ("torch", "jax", "jaxlib", "triton", "flax", "safetensors"),
        "import numpy as np\n"
        "from moe_core.ops.routing import topk as routing\n"
        "from moe_core.runtime import prepare as runtime\n"
        "from moe_core.base.arrays import ArraySpec\n"
        "from moe_core.specs.routing import RouterSpec\n"
        "from moe_core.base.target import cpu_target\n"
        "plan = routing.plan_routing(ArraySpec((3, 8), 'float32'), RouterSpec(top_k=2), cpu_target())\n"
        "logits = np.arange(24, dtype=np.float32).reshape(3, 8)\n"
        "ids, weights = np.empty((3, 2), np.int32), np.empty((3, 2), np.float32)\n"
        "runtime.prepare(plan)([array.ctypes.data for array in (logits, ids, weights)])\n"
        "assert ids.tolist() == [[7, 6]] * 3, ids\n",
    )


def test_planning_for_a_gpu_loads_neither_triton_nor_twins() -> None:
    run_blocked(
        ("torch", "jax", "triton"),
        "from moe_core.ops.moe import backward, forward\n"
        "from moe_core.base.arrays import ArraySpec\n"
        "from moe_core.base.target import Target\n"
        "from moe_core.specs.matmul import Activation\n"
        "from moe_core.specs.moe import MoESpec\n"
        "from moe_core.specs.operands import ExpertWeights, MoEOperands, RouterWeights\n"
        "from moe_core.specs.routing import RouterSpec\n"
        "array = lambda *shape: ArraySpec(shape, 'bfloat16')\n"
        "experts = ExpertWeights(array(8, 64, 128), array(8, 64, 64))\n"
        "operands = MoEOperands(array(9, 64), experts, RouterWeights(array(64, 8)))\n"
        "spec = MoESpec(Activation('silu'), RouterSpec(top_k=2))\n"
        "assert all(plan.steps for plan in backward.plan_training(operands, spec, Target('cuda', 90, 132)))\n"
        "twins = [name for name in sys.modules if name.startswith('moe_core.ops.') and '.reference' in name]\n"
        "assert not blocker.attempts and not twins, (blocker.attempts, twins)\n",
    )


def test_torch_front_end_without_jax_and_triton() -> None:
    run_blocked(
        ("jax", "jaxlib", "flax", "tvm_ffi", "jax_tvm_ffi", "triton"),
        "import torch\nfrom moe_torch import ops, parallel\n"
        "assert not {'torch._dynamo', 'sympy', 'moe_jax'} & {*sys.modules}\n"
        "array = torch.from_numpy\n" + MOE_CALL + WITHOUT_TRITON,
    )


def test_jax_front_end_without_torch_and_triton() -> None:
    run_blocked(
        ("torch", "flax", "triton", "moe_torch"),
        "import jax\nimport moe_jax\nfrom moe_jax import ops\narray = jax.numpy.asarray\n" + MOE_CALL,
    )


#: The rooms of each package: a file imports from its own room and from those ahead of it. The page on architecture
#: shows the same order. `__init__` is the face of a package. The face of `moe_torch.parallel` exports layers' names,
#: too, so it is a room behind layers; other faces belong to their room.
ROOMS = {
    "moe_core": (
        *("errors", "__init__", "base", "formats", "specs", "plan", "runtime"),
        *("ops.common", "ops.activation", "ops.routing", "ops.reduction", "ops.prepack", "ops.quantize"),
        *("ops.exchange", "ops.lora", "ops.matmul", "ops.router", "ops.norm", "ops.moe"),
        *("layers", "checkpoint", "trace", "parallel", "monitor", "view", "modular", "parity", "tools", "__main__"),
    ),
    "moe_torch": (
        *("bridge", "operators", "autograd", "quantize", "rows", "grouped", "trace", "launcher", "warmup"),
        *(
            "ops",
            "parallel",
            "layers",
            "parallel.__init__",
            "monitor",
            "modular",
            "peft",
            "transformers",
            "lightning",
            "torchtitan",
            "megatron",
            "compat",
            "parity",
            "__init__",
        ),
    ),
    "moe_jax": (
        *("bridge", "autodiff", "quantize", "rows", "grouped", "trace", "ops", "warmup", "buckets"),
        *("parallel", "spread", "layers", "monitor", "modular", "variables", "nnx", "maxtext", "tunix", "linen"),
        *("parity", "parity_ranks", "__init__"),
    ),
}
PACKAGES = tuple(ROOMS)
#: What each may import of others: none comes with the other framework alone.
ALLOWED = {
    "moe_core": {"numpy", "ml_dtypes", "triton", "safetensors", "gguf"},
    "moe_torch": {"moe_core", "torch", "numpy", "ml_dtypes", "transformers", "gguf", "peft", "vllm", "megatron"}
    | {"torchtitan", "lightning", "pytorch_lightning"},
    "moe_jax": {"moe_core", "jax", "numpy", "flax", "qwix"},
}
#: The one file that speaks to the FFI's own package.
FFI = "moe_jax.bridge.ffi"


def module_name(path: pathlib.Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


SOURCES = {
    module_name(path.relative_to(ROOT)): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))
}


@functools.cache
def imported_modules(name: str, top_level_only: bool = False) -> tuple[tuple[int, str], ...]:
    """(line, dotted module) of every import statement of a module; `from a import b` gives `a.b` where that is one."""
    tree, found = ast.parse(SOURCES[name].read_text()), list[tuple[int, str]]()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name}:{node.lineno}: imports must be absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.append((node.lineno, inner if inner in SOURCES else node.module))
    return tuple(found)


def room_of(name: str) -> tuple[str, int] | None:
    """(package, number of the room) of a module; None for other packages and for the empty face of `moe_core.ops`."""
    package, _, inner = name.partition(".")
    if package not in ROOMS or name not in SOURCES:
        return None
    face = f"{inner}.__init__".lstrip(".")
    if SOURCES[name].name == "__init__.py" and face in ROOMS[package]:
        return package, ROOMS[package].index(face)
    rooms = [number for number, room in enumerate(ROOMS[package]) if f"{inner}.".startswith(f"{room}.")]
    return (package, rooms[0]) if rooms else None


def room_violations(name: str, imports: Iterable[tuple[int, str]]) -> list[str]:
    """The imports of a module from rooms behind its own."""
    room = room_of(name)
    if room is None:
        return []
    rooms = [(line, module, room_of(module)) for line, module in imports]
    behind = [(line, module) for line, module, other in rooms if other and other[0] == room[0] and other[1] > room[1]]
    return [f"{name}:{line} imports {module}" for line, module in behind]


def in_cycles(edges: dict[str, set[str]]) -> list[str]:
    """The names that import each other in circles, or lie between two circles."""
    left = set(edges)
    while free := {name for name in left if not edges[name] & left or not any(name in edges[other] for other in left)}:
        left -= free
    return sorted(left)


def test_every_module_has_a_room() -> None:
    homeless = {name for name in SOURCES if room_of(name) is None} - {"moe_core.ops"}
    assert not homeless, f"{homeless} stand in no room"
    assert not list(imported_modules("moe_core.ops"))
    root = {path.name for path in (ROOT / "moe_core").iterdir() if path.is_file()}
    assert root == {"__init__.py", "__main__.py", "errors.py", "monitor.py", "trace.py", "py.typed"}


def rooms_shown(page: str, package: str) -> list[str]:
    """The rooms of a package in the order of a page's picture of folders."""
    block = page.partition(f"  {package}/")[2]
    # Up to the next package: names at the left are rooms, those of ops/ are in its line.
    lines = block[: re.search(r"\n  \w+/", block).start()].split("\n")  # type: ignore[union-attr]
    if package != "moe_core":
        return re.findall(r"\w+", " ".join(lines))
    names: list[str] = []
    for line in lines:
        if re.match(r" {4}\w", line):
            name, _, rest = line.strip().partition(" ")
            names += [name.rstrip("/")] if name != "ops/" else []
            line = rest if name == "ops/" else ""
        names += [f"ops.{inner}" for inner in re.findall(r"(\w+)/ ?(?:·|$)", line.strip())]
    return names


def test_the_page_on_architecture_shows_the_rooms_in_order() -> None:
    page = (ROOT / "docs" / "developer" / "architecture.md").read_text().partition("## Folders")[2]
    for package, rooms in ROOMS.items():
        assert rooms_shown(page, package) == [room for room in rooms if "__" not in room], package


def test_imports_point_one_way() -> None:
    wrong = []
    for name in SOURCES:
        package = name.split(".")[0]
        allowed = ALLOWED[package] | {package, *sys.stdlib_module_names} | ({"jax_tvm_ffi"} if name == FFI else set())
        found = list(imported_modules(name))
        wrong += [f"{name}:{line} imports {module}" for line, module in found if module.split(".")[0] not in allowed]
        wrong += room_violations(name, iter(found))
    assert not wrong, wrong


def test_files_and_rooms_have_no_cycles() -> None:
    edges = {
        name: {module for _, module in imported_modules(name) if module in SOURCES and module != name}
        for name in SOURCES
    }
    assert not in_cycles(edges), in_cycles(edges)
    rooms: dict[str, set[str]] = {}
    for name, modules in edges.items():
        others = {str(room) for room in map(room_of, modules) if room} - {str(room_of(name))}
        rooms.setdefault(str(room_of(name)), set()).update(others)
    assert not in_cycles(rooms), in_cycles(rooms)


def test_a_planted_import_is_found() -> None:
    down = iter([(3, "moe_core.ops.matmul.forward"), (4, "numpy"), (5, "moe_core.base.arrays")])
    assert room_violations("moe_core.ops.routing.layout", down) == [
        "moe_core.ops.routing.layout:3 imports moe_core.ops.matmul.forward"
    ]
    for name, module in (
        ("moe_torch.parallel.forward", "moe_torch.layers.moe"),
        ("moe_torch.layers.moe", "moe_torch.parallel"),
        ("moe_torch.layers", "moe_torch.modular.calls"),
        ("moe_jax.ops", "moe_jax.nnx"),
    ):
        assert room_violations(name, iter([(1, module)])) == [f"{name}:1 imports {module}"]
        assert not room_violations(module, iter([(1, name)]))
    assert in_cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]
    assert not in_cycles({"a": {"b"}, "b": {"c"}, "c": set()})


def is_kernel_file(path: pathlib.Path) -> bool:
    return path.parent.name == "kernels" or path.stem.endswith("kernel")


def needs_triton(name: str, path: pathlib.Path) -> bool:
    """Kernels, and what the interpreter package loads when it is used."""
    inner = name.startswith("moe_core.runtime.interpreter.")
    return inner or (name.startswith("moe_core.ops.") and is_kernel_file(path))


def test_files_and_folders_stay_small() -> None:
    long = {str(path): count for path in SOURCES.values() if (count := path.read_text().count("\n")) > 400}
    assert not long, f"files have at most 400 lines: {long}"
    full = {
        str(folder): count
        for folder in {path.parent for path in SOURCES.values()}
        if (count := sum(path.name != "__init__.py" for path in folder.glob("*.py"))) > 18
    }
    assert not full, f"folders have at most 18 files: {full}"


def test_core_imports_triton_lazily_and_kernels_nothing_else() -> None:
    kernels, twins = 0, 0
    for name, path in SOURCES.items():
        if not name.startswith("moe_core."):
            continue
        roots = {module.split(".")[0] for _, module in imported_modules(name, top_level_only=True)}
        in_ops = name.startswith("moe_core.ops.")
        if in_ops and is_kernel_file(path) and path.name != "__init__.py":
            kernels += 1
            foreign = {module for _, module in imported_modules(name) if module != "__future__"}
            own = {module for module in foreign if module in SOURCES and is_kernel_file(SOURCES[module])}
            wrong = {module for module in foreign - own if module.split(".")[0] != "triton"}
            assert not wrong, f"{path} imports {wrong}; kernels know Triton and other kernels only"
        elif not needs_triton(name, path):
            assert "triton" not in roots, f"{path} imports triton when it is imported"
        if in_ops and (path.stem.startswith("reference") or path.parent.name == "reference"):
            twins += 1
            allowed = {"__future__", "numpy", "ml_dtypes", "moe_core"} | set(sys.stdlib_module_names)
            assert roots <= allowed, f"{path}: {roots}"
            wrong = [
                module for _, module in imported_modules(name) if module in SOURCES and is_kernel_file(SOURCES[module])
            ]
            assert not wrong, f"{path} imports {wrong}; the reference never imports a kernel"
    assert kernels >= 36 and twins >= 12, "the patterns of kernels or of twins match too few files"


def test_flax_is_imported_by_its_layers_alone() -> None:
    users = {name for name in SOURCES for _, module in imported_modules(name) if module.split(".")[0] == "flax"}
    assert users == {"moe_jax.nnx", "moe_jax.variables", "moe_jax.linen"}, f"{users} import flax"
