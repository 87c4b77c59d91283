"""Modular kernels on stand-ins for DeepEP's buffers, on gloo ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_torch import modular
from moe_torch.modular import FusedMoEModularKernel
from tests.support.modular.deep_ep import Buffer
from tests.support.modular.problems import Problem
from tests.support.torch import running_on, to_numpy, to_torch

#: Of a low-latency call.
MOST = 4
#: Bytes that any problem here needs.
ROOM = 1 << 24


def tensors_of(problem: Problem) -> tuple[torch.Tensor, ...]:
    """Its arrays as tensors, e4m3 among them."""
    found = []
    for array in problem:
        fp8 = array.dtype.name == "float8_e4m3fn"
        tensor = to_torch(array.view(np.uint8) if fp8 else array)
        found.append(tensor.view(torch.float8_e4m3fn) if fp8 else tensor)
    return tuple(found)


def kernel_on(group: Any, kind: str, fp8: bool, **options: Any) -> FusedMoEModularKernel:
    """kind: `high_throughput` or `low_latency`."""
    ranks = dist.get_world_size(group)
    if kind == "high_throughput":
        part: Any = modular.DeepEPHTPrepareAndFinalize(Buffer(group), ranks, use_fp8_dispatch=fp8)
        experts: Any = modular.DeepGemmExperts() if fp8 else modular.TritonExperts()
    else:
        buffer = Buffer(group, num_rdma_bytes=ROOM, low_latency_mode=True)
        part = modular.DeepEPLLPrepareAndFinalize(buffer, MOST, ranks, fp8)
        kind_of = modular.BatchedDeepGemmExperts if fp8 else modular.BatchedTritonExperts
        experts = kind_of(MOST, ranks)
    return FusedMoEModularKernel(part, experts, **options)


def run_rank(
    group: Any, kind: str, fp8: bool, problem: Problem, scales: dict[str, Any], options: dict[str, Any]
) -> np.ndarray:
    """The output of this rank, whose experts and tokens these are."""
    kernel = kernel_on(group, kind, fp8)
    with running_on("reference"), torch.no_grad():
        scales = {name: to_torch(array) for name, array in scales.items()}
        output = kernel(*tensors_of(problem), **scales, **options)
    return to_numpy(output.float())


def failing_call(group: Any, change: dict[str, Any]) -> tuple[str, str]:
    """What the classes raise, its class and text, for hidden states of a shape and dtype, ids and options."""
    ranks = dist.get_world_size(group)
    columns, rows, topk = change.get("columns", 2048), change.get("rows", 2), change.get("topk", 2)
    buffer: Any = Buffer(group, num_rdma_bytes=change.get("room", ROOM), low_latency_mode=change.get("mode", True))
    buffer.group_size = change.get("group_size", ranks)
    buffer = change.get("buffer", buffer)
    try:
        dispatchers, fp8 = change.get("num_dispatchers", ranks), change.get("fp8", False)
        if change["kind"] == "high_throughput":
            part: Any = modular.DeepEPHTPrepareAndFinalize(
                buffer, dispatchers, 1, change.get("offset"), use_fp8_dispatch=fp8
            )
        else:
            part = modular.DeepEPLLPrepareAndFinalize(buffer, change.get("most", MOST), dispatchers, fp8)
        if "impl" in change:
            part.finalize(None, None, None, None, False, change["impl"], change.get("prepared"))
        x = torch.zeros(rows, columns, dtype=change.get("dtype", torch.bfloat16))
        weights = torch.ones(rows, topk).requires_grad_(change.get("trained", False))
        ids = torch.zeros(change.get("ids", rows), topk, dtype=torch.int32)
        config = change.get("quant_config", modular.FUSED_MOE_UNQUANTIZED_CONFIG)
        part.prepare(x, weights, ids, change.get("num_experts", 4), None, False, config, num_local_experts=4 // ranks)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
