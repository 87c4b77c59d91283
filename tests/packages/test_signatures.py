"""Signatures stay short: what belongs together travels as one record, or as one aggregate of a kernel."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

from tests.support.paths import ROOT

MOST, MOST_OF_DEVICE_FUNCTIONS = 8, 12
#: Functions and methods with the published parameters of vLLM, triton_kernels, torch, megablox and MaxText. Layers and
#: calls of whole layers too: users name their options one by one.
PUBLISHED = {
    "moe_torch/compat/triton_kernels/matmul_ogs.py": {"matmul_ogs"},
    "moe_torch/compat/triton_kernels_38/matmul.py": {"matmul"},
    "moe_torch/compat/triton_kernels_38/reduce.py": {"reduce"},
    "moe_torch/modular/deep_gemm_dispatch.py": {"__init__"},
    "moe_torch/modular/experts.py": {"apply"},
    "moe_torch/modular/gpt_oss.py": {"triton_kernel_fused_experts", "triton_kernel_moe_forward"},
    "moe_torch/modular/kernel.py": {"forward"},
    "moe_torch/modular/newest/lora.py": {"apply_w13_lora", "apply_w2_lora"},
    "moe_torch/modular/newest/monolithic.py": {"apply"},
    "moe_torch/modular/prepare_finalize.py": {"prepare"},
    "moe_jax/modular/deep_gemm.py": {"deep_gemm_experts", "batched_deep_gemm_experts", "triton_or_deep_gemm_experts"},
    "moe_jax/modular/experts.py": {"fused_experts", "unfused_experts"},
    "moe_torch/grouped.py": {"scaled_grouped_mm"},
    "moe_torch/ops.py": {"explain_moe", "moe"},
    "moe_torch/parallel/forward.py": {"moe"},
    "moe_jax/grouped.py": {"gmm"},
    "moe_torch/layers/moe.py": {"__init__"},
    "moe_jax/ops.py": {"explain_moe", "moe"},
    "moe_jax/spread.py": {"moe"},
    "moe_jax/nnx.py": {"__init__"},
    "moe_jax/maxtext.py": {"__init__"},
    "moe_jax/layers/functional.py": {"forward"},
    "moe_jax/parallel/forward.py": {"moe"},
}


def functions(path: pathlib.Path, source: str) -> Iterator[tuple[str, bool, int]]:
    """(name, compiled by Triton, parameters without self and cls) of every function of a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if path.parts[:2] == ("moe_torch", "operators") and ast.unparse(node.body) == "...":
                continue  # It declares an operator's schema, which is flat, and callers name every argument.
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            compiled = any("jit" in ast.unparse(one) or "constexpr" in ast.unparse(one) for one in node.decorator_list)
            yield node.name, compiled, len([one for one in arguments if one.arg not in ("self", "cls")])


def sources(*patterns: str) -> dict[str, str]:
    """path -> text of the files that match."""
    files = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


def too_long(files: dict[str, str]) -> list[str]:
    """Functions of the host with more than MOST parameters, but for the published ones."""
    return [
        f"{path}: {name} takes {count} parameters"
        for path, source in files.items()
        for name, compiled, count in functions(pathlib.Path(path), source)
        if not compiled and count > MOST and name not in PUBLISHED.get(path, ())
    ]


def test_functions_take_few_parameters() -> None:
    files = sources("moe_core/**/*.py", "moe_torch/**/*.py", "moe_jax/**/*.py")
    assert len(files) > 400 and not (long := too_long(files)), long
    for path, names in PUBLISHED.items():
        counts = {name: count for name, _, count in functions(pathlib.Path(path), files[path]) if count > MOST}
        assert names <= set(counts), f"{path}: {names - set(counts)} need no exception"


def test_device_functions_take_few_parameters() -> None:
    """Functions that other kernels call; a launch passes what it needs to the others."""
    files = sources("moe_core/ops/**/kernels/*.py", "moe_core/ops/**/*kernel.py")
    calls = [node for text in files.values() for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    called = {ast.unparse(call.func).rpartition(".")[2] for call in calls}
    long = [
        f"{path}: {name} takes {count} parameters"
        for path, source in files.items()
        for name, compiled, count in functions(pathlib.Path(path), source)
        if compiled and name in called and count > MOST_OF_DEVICE_FUNCTIONS
    ]
    assert len(files) > 30 and "await_tile" in called and not long, long


def test_a_ninth_parameter_is_found() -> None:
    parameters = ", ".join("abcdefghi")
    assert too_long({"new.py": f"def one({parameters}): ...\n"}) == ["new.py: one takes 9 parameters"]
    assert not too_long({"moe_torch/operators/new.py": f"def one({parameters}): ...\n"})
    assert too_long({"moe_torch/operators/new.py": f"def one({parameters}): return a\n"})
    assert not too_long({"new.py": f"class A:\n    def one(self, {parameters[:-3]}): ...\n"})
