"""Threads, streams, CUDA graphs and devices: torch ops run where and when torch says, and never wait for a device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_core.base.recent import Recent, forget_plans
from moe_torch.operators import stages
from tests.support.torch import (
    NUM_EXPERTS,
    full_layer,
    on_engines,
    require_equal,
    running_on,
    to_torch,
    torch_layer,
)

THREADS, ROUNDS = 2, 3


def in_threads(work: Callable[[int], None], count: int = THREADS) -> None:
    """Run `work(number)` in threads that start together; the first exception is raised here."""
    barrier, errors = threading.Barrier(count), []

    def body(number: int) -> None:
        try:
            barrier.wait()
            work(number)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@on_engines
def test_threads_get_their_own_results(engine: str) -> None:
    with running_on(engine) as device:
        layers = [torch_layer(device, seed=number, num_tokens=6 + number) for number in range(THREADS)]
        expected = [tuple(moe_torch.moe(*layer)) for layer in layers]
        forget_plans()

    def work(number: int) -> None:
        with running_on(engine):
            for _ in range(ROUNDS):
                require_equal(tuple(moe_torch.moe(*layers[number])), expected[number], f"thread {number}")

    in_threads(work)


def test_the_cache_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = stages.SCALE_ROWS
    monkeypatch.setattr(operator, "plans", Recent(3))
    with running_on("reference"):
        for rows in (1, 2, 3, 4, 5, 1, 6, 7, 8, 9):
            x = torch.ones(rows, 8)
            require_equal(moe_torch.scale_rows(x, torch.full((rows, 1), 2.0)), x * 2, f"{rows} rows")
            assert len(operator.plans) <= 6


@pytest.fixture
def gpu_layer() -> Any:
    """A whole layer on the first GPU, run once so that its kernels are loaded."""
    layer = torch_layer("cuda", dtype="bfloat16", num_tokens=33)
    moe_torch.moe(*layer)
    torch.cuda.synchronize()
    return layer


def staged(x: Any, layer: Any) -> Any:
    """The stages as separate ops."""
    router = layer.spec.router
    chosen = moe_torch.route(moe_torch.router(x, layer.routing.weight), router)
    layout = moe_torch.make_layout(chosen.ids, NUM_EXPERTS)
    first = moe_torch.MatmulSpec("in_out", "token", "row", layer.spec.activation)
    hidden = moe_torch.matmul_ogs(moe_torch.MatmulOperands(x, layer.experts.gate_up), layout, first)
    operands = moe_torch.MatmulOperands(hidden, layer.experts.down, row_weight=chosen.weights)
    slots = moe_torch.matmul_ogs(operands, layout, moe_torch.MatmulSpec("in_out", "row", "slot"))
    return moe_torch.reduce(slots, layout)


@pytest.mark.gpu
def test_no_op_waits_for_the_device(gpu_layer: Any) -> None:
    """First calls (planning, compiling, loading) and later ones, with torch raising on every synchronisation."""
    full, options = full_layer()
    x, experts, routing = to_torch(tuple(full[:3]), "cuda")
    options = {name: to_torch(value, "cuda") for name, value in options.items()}
    fresh = [torch_layer("cuda", num_tokens=tokens).x for tokens in (17, 64)]
    layer = torch_layer("cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            moe_torch.moe(*gpu_layer)
            moe_torch.moe(x, experts, routing, full.spec, **options)
            for rows in fresh:
                moe_torch.moe(rows, *layer[1:])
                staged(rows, layer)
            bitmatrix = moe_torch.pack_bitmatrix(moe_torch.moe(*layer).ids, NUM_EXPERTS)
            moe_torch.unpack_bitmatrix(bitmatrix, NUM_EXPERTS, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.cuda.set_sync_debug_mode("error")
        try:
            moe_torch.moe(*gpu_layer, checked=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("program", ["whole", "staged"])
def test_cuda_graphs_capture_and_replay(gpu_layer: Any, program: str) -> None:
    layer = gpu_layer

    def run(x: Any) -> Any:
        return moe_torch.moe(x, *layer[1:]).output if program == "whole" else staged(x, layer)

    x = layer.x.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(x)
        with pytest.raises(moe_torch.Unsupported, match="checked=True reads a counter on the host"):
            moe_torch.moe(x, *layer[1:], checked=True)
    for seed in range(3):
        values = torch_layer("cuda", dtype="bfloat16", num_tokens=33, seed=seed + 10).x
        x.copy_(values)
        captured.fill_(float("nan"))
        graph.replay()
        require_equal(captured, run(values), f"replay {seed}")


@pytest.mark.gpu
def test_ops_run_on_the_current_stream(gpu_layer: Any) -> None:
    """Work queued before on a side stream is seen, without any synchronisation in between."""
    expected = tuple(moe_torch.moe(*gpu_layer))
    side = torch.cuda.Stream()
    noise = torch.empty(64 << 20, device="cuda")
    x = torch.zeros_like(gpu_layer.x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(50):
            noise.fill_(1.0)
        x.copy_(gpu_layer.x)
        result = tuple(moe_torch.moe(x, *gpu_layer[1:]))
    side.synchronize()
    require_equal(result, expected, "side stream")


@pytest.mark.gpu
def test_threads_on_streams_of_their_own(gpu_layer: Any) -> None:
    layers = [torch_layer("cuda", dtype="bfloat16", seed=number, num_tokens=40 + number) for number in range(THREADS)]
    expected = [tuple(moe_torch.moe(*layer)) for layer in layers]
    torch.cuda.synchronize()

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = [tuple(moe_torch.moe(*layers[number])) for _ in range(50)]
        stream.synchronize()
        for result in results:
            require_equal(result, expected[number], f"thread {number}")

    in_threads(work)


@pytest.mark.gpu
def test_misaligned_and_mixed_tensors_on_a_gpu(gpu_layer: Any) -> None:
    layer: Any = torch_layer("cuda")
    shifted = torch.cat([layer.x.new_zeros(1), layer.x.flatten()])[1:].view(layer.x.shape)
    assert shifted.data_ptr() % 16
    expected = moe_torch.router(layer.x, layer.routing.weight)
    require_equal(moe_torch.router(shifted, layer.routing.weight), expected, "misaligned")
    with pytest.raises(moe_torch.InvalidInput, match=r"weight must be on cuda:0 like x, got cpu; move it with \.to"):
        moe_torch.router(layer.x, layer.routing.weight.cpu())
    with pytest.raises(moe_torch.InvalidInput, match=r"weight must be on cpu like x, got cuda:0; move it with \.to"):
        moe_torch.router(layer.x.cpu(), layer.routing.weight)


@pytest.mark.gpu
def test_every_device_runs_its_own_tensors() -> None:
    """With several GPUs, tensors decide, not the current device; a device is never mixed with another."""
    results = []
    for index in range(torch.cuda.device_count()):
        layer = torch_layer(f"cuda:{index}")
        with torch.cuda.device(0):
            result = moe_torch.moe(*layer)
            assert result.output.device == torch.device("cuda", index)
            assert torch.cuda.current_device() == 0
        results.append(tuple(None if item is None else item.cpu() for item in result))
    for index, result in enumerate(results):
        require_equal(result, results[0], f"device {index}")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own imports
def test_compiled_programs_with_cuda_graphs(gpu_layer: Any) -> None:
    """torch.compile's own CUDA graphs, which re-use the memory of outputs."""
    torch._dynamo.reset()
    layer = gpu_layer
    compiled = torch.compile(lambda x: moe_torch.moe(x, *layer[1:]).output * 2, fullgraph=True, backend="cudagraphs")
    for seed in range(4):
        x = torch_layer("cuda", dtype="bfloat16", num_tokens=33, seed=seed).x
        torch.compiler.cudagraph_mark_step_begin()
        require_equal(compiled(x).clone(), moe_torch.moe(x, *layer[1:]).output * 2, f"step {seed}")
