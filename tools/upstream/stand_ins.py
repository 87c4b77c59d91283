"""What vLLM's files import of the rest of vLLM, as little as they need, in our own words."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    triton = tl = None


class _Platform:
    """One device: CUDA where torch has it, else the CPU; every other question is answered with no."""

    device_name = "the machine's"

    def is_cuda(self) -> bool:
        return torch.cuda.is_available()

    def is_cuda_alike(self) -> bool:
        # vLLM then quantises with its operators, here ours: Triton's interpreter does not round to the nearest e4m3.
        return True

    def is_cpu(self) -> bool:
        return not torch.cuda.is_available()

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: False


class _No:
    """Has every attribute; called, each says no."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: False


class Settings:
    """vLLM's environment variables: those that are named, all others unset."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Workspaces:
    def get_simultaneous(self, *shapes: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]


class _Scheduler:
    DEFAULT_MAX_NUM_BATCHED_TOKENS_FOR_BATCHED_DP = 256


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _no(*_: Any, **__: Any) -> bool:
    return False


def _moe_sum(input: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(input.float().sum(1))


def _gated(function: Any) -> Any:
    def apply(output: torch.Tensor, input: torch.Tensor) -> None:
        gate, up = input.float().chunk(2, -1)
        output.copy_(function(gate) * up)

    return apply


def _swigluoai(output: torch.Tensor, input: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> None:
    gate, up = input.float()[..., ::2].clamp(max=limit), input.float()[..., 1::2].clamp(-limit, limit)
    output.copy_(gate * torch.sigmoid(alpha * gate) * (up + 1))


def _group_quant(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    size: int,
    eps: float,
    least: float,
    most: float,
    ue8m0: bool = False,
    column_major: bool = False,
    aligned: bool = False,
) -> None:
    groups = x.float().unflatten(-1, (-1, size))
    found = groups.abs().amax(-1).clamp(min=eps) / most
    found = torch.exp2(torch.ceil(torch.log2(found))) if ue8m0 else found
    scales.copy_(found)
    values.copy_((groups / found[..., None]).clamp(least, most).flatten(-2).to(values.dtype))


_GELU = torch.nn.functional.gelu
silu_and_mul, gelu_and_mul = _gated(torch.nn.functional.silu), _gated(_GELU)
#: Operators of vLLM's extension module, by schema.
_OPERATORS = {
    "silu_and_mul(Tensor! output, Tensor input) -> ()": silu_and_mul,
    "gelu_and_mul(Tensor! output, Tensor input) -> ()": gelu_and_mul,
    "gelu_tanh_and_mul(Tensor! output, Tensor input) -> ()": _gated(functools.partial(_GELU, approximate="tanh")),
    "swigluoai_and_mul(Tensor! output, Tensor input, float alpha=1.702, float limit=7.0) -> ()": _swigluoai,
    "per_token_group_fp8_quant(Tensor x, Tensor! values, Tensor! scales, int size, float eps, float least, float most, "
    "bool ue8m0=False, bool column_major=False, bool aligned=False) -> ()": _group_quant,
}


@functools.cache
def define_operators() -> torch.library.Library:
    """Define `torch.ops._C` as far as the cases call it, once in a process; the library keeps them."""
    library = torch.library.Library("_C", "FRAGMENT")
    for schema, function in _OPERATORS.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    return library


def _register(op_name: str, op_func: Any, **_: Any) -> None:
    """`torch.ops.vllm.NAME`, once in a process."""
    if not hasattr(torch.ops.vllm, op_name):
        torch.library.custom_op(f"vllm::{op_name}", op_func, mutates_args=())


#: Names by module.
STAND_INS: dict[str, dict[str, Any]] = {
    "vllm": {"envs": Settings()},
    "vllm.envs": {"__getattr__": lambda name: None},
    "vllm.logger": {"init_logger": lambda name: _No()},
    "vllm.platforms": {"current_platform": _Platform()},
    "vllm.platforms.rocm": {"on_gfx950": _no},
    "vllm.config": {"SchedulerConfig": _Scheduler},
    "vllm._aiter_ops": {"rocm_aiter_ops": _No()},
    "vllm._custom_ops": {"moe_sum": _moe_sum},
    "vllm.triton_utils": {"triton": triton, "tl": tl, "HAS_TRITON": triton is not None},
    "vllm.utils.deep_gemm": {"is_deep_gemm_e8m0_used": _no},
    "vllm.utils.import_utils": {
        "has_triton_kernels": lambda: True,
        # As vLLM finds out: 3.5.1 has matmul_ogs, and no SparseMatrix.
        "get_triton_kernels_version": lambda: "3.5.1" if find_spec("triton_kernels.matmul_ogs") else "3.8",
    },
    "vllm.utils.torch_utils": {"PIN_MEMORY": False, "direct_register_custom_op": _register},
    "vllm.model_executor.layers.quantization.utils.humming": {"prioritize_humming": lambda backends: backends},
    "vllm.v1.worker.workspace": {"current_workspace_manager": _Workspaces},
    "vllm.v1.worker.ubatching": {
        "dbo_enabled": _no,
        "dbo_maybe_run_recv_hook": _nothing,
        "dbo_register_recv_hook": _nothing,
        "dbo_yield": _nothing,
    },
}
