"""Experts whose last product stores the row of every slot at an address, on every engine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode

import moe_torch
from moe_core.errors import InvalidInput
from moe_core.formats import scheme_named
from moe_core.specs import Activation, MoESpec, Tuning
from moe_core.specs.operands import ExpertWeights, TopK
from moe_torch.parallel import peer_ops
from tests.support.torch import on_engines, running_on

E, D, F = 3, 32, 24
PLAIN = MoESpec(Activation("silu"))
#: Slots of the first expert: more row blocks than there are sections of them, and a rest.
HOT = 300


def draw(device: Any, tokens: int, top_k: int, dtype: Any, width: int = D) -> tuple[Any, ExpertWeights, TopK]:
    """x, experts with biases, and ids of which most are the first expert's, some -1 and none the second's."""
    random = torch.Generator().manual_seed(tokens + top_k)
    shapes = {"x": (tokens, width), "gate_up": (E, width, 2 * F), "down": (E, F, width), "bias": (E, width)}
    arrays = {name: torch.randn(shape, generator=random).to(device, dtype) for name, shape in shapes.items()}
    ids = torch.randint(-1, 1, (tokens, top_k), generator=random)
    ids[tokens - tokens // 5 :, -1] = 2
    weights = torch.rand(tokens, top_k, generator=random)
    experts = ExpertWeights(arrays["gate_up"], arrays["down"], down_bias=arrays["bias"])
    return arrays["x"], experts, TopK(ids.int().to(device), weights.to(device))


def places(routing: TopK, width: int, dtype: Any) -> tuple[Any, Any, Any]:
    """Memory full of NaN, the row of it that each slot goes to (-1 = none), and addresses."""
    slots, device = routing.ids.numel(), routing.ids.device
    memory = torch.full((slots + 7, width), torch.nan, dtype=dtype, device=device)
    rows = torch.randperm(slots + 7, generator=torch.Generator().manual_seed(1))[:slots]
    rows[::11] = -1
    first, size = memory.data_ptr(), width * memory.element_size()
    return memory, rows, torch.where(rows < 0, 0, first + rows * size).to(device)


def rows_of_slots(x: Any, experts: ExpertWeights, routing: TopK, spec: MoESpec) -> Any:
    """The row of every slot, `[T * K, D]`, by an op with one slot for each token."""
    slots, top_k = routing.ids.numel(), routing.ids.shape[1]
    alone = TopK(routing.ids.view(slots, 1), routing.weights.view(slots, 1))
    return moe_torch.moe(x.repeat_interleave(top_k, 0), experts, alone, spec).output


def require_stored(memory: Any, rows: Any, wanted: Any, routing: TopK) -> None:
    """Rows of slots with an expert and an address are there, and nothing else is."""
    goes = (rows >= 0) & (routing.ids.view(-1).cpu() >= 0)
    assert torch.equal(memory[rows[goes]], wanted[goes])
    others = torch.ones(len(memory), dtype=torch.bool)
    others[rows[goes]] = False
    assert memory[others].isnan().all()


@contextlib.contextmanager
def beside(device: Any) -> Iterator[None]:
    """On another stream of a GPU, which waits for the current one, and for which the current one waits."""
    if device.type != "cuda":
        yield
        return
    before, other = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    other.wait_stream(before)
    with torch.cuda.stream(other):
        yield
    before.wait_stream(other)


@on_engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "top_k"), [(2 * HOT, 1), (HOT, 3), (1, 2), (0, 2)])
def test_rows_go_to_their_addresses(engine: str, dtype: Any, tokens: int, top_k: int) -> None:
    """Bit by bit those of slots alone, with the tiles of as many slots."""
    with running_on(engine) as device:
        x, experts, routing = draw(device, tokens, top_k, dtype)
        memory, rows, results_at = places(routing, D, dtype)
        spec, alone = (dataclasses.replace(PLAIN, tuning=Tuning(expected_tokens=900 // each)) for each in (top_k, 1))
        found = peer_ops.experts_push(x, experts, routing, spec, results_at, memory=memory)
        require_stored(memory, rows, rows_of_slots(x, experts, routing, alone), routing)
        assert found.output.shape == (0, D) and found.ids is routing.ids
        wanted = moe_torch.moe(x, experts, routing, PLAIN)
        assert torch.equal(found.tokens_per_expert, wanted.tokens_per_expert)


@on_engines
def test_products_of_few_and_many_rows(engine: str) -> None:
    """Sizes that every family of kernels takes, with few rows for each expert and with many."""
    with running_on(engine) as device:
        for tokens in (24, 700) if engine == "cuda" else (24, 90):
            x, experts, routing = draw(device, tokens, 1, torch.bfloat16, 256)
            down = torch.randn(E, 192, 256, device=device).bfloat16() / 16
            gate_up = torch.randn(E, 256, 384, device=device).bfloat16() / 16
            experts = dataclasses.replace(experts, gate_up=gate_up, down=down)
            memory, rows, results_at = places(routing, 256, torch.bfloat16)
            peer_ops.experts_push(x, experts, routing, PLAIN, results_at)
            require_stored(memory, rows, rows_of_slots(x, experts, routing, PLAIN), routing)


@on_engines
@pytest.mark.parametrize("limits", [(None, None), (1, 2), (500, 500)], ids=str)
def test_product_2_by_itself(engine: str, limits: tuple[int | None, int | None]) -> None:
    """On however many multiprocessors, and on another stream of a GPU, it stores the same bits, and nothing before."""
    with running_on(engine) as device:
        x, experts, routing = draw(device, HOT, 2, torch.bfloat16, 256)
        down, gate_up = (torch.randn(E, *sides, device=device).bfloat16() for sides in ((192, 256), (256, 384)))
        experts = dataclasses.replace(experts, gate_up=gate_up / 16, down=down / 16)
        memory, _, results_at = places(routing, 256, torch.bfloat16)
        begun = peer_ops.experts_begin(x, experts, routing, PLAIN, results_at, multiprocessors=limits)
        assert memory.isnan().all()
        with beside(device):
            found = begun.finish()
        stored = memory.clone()
        memory.fill_(torch.nan)
        wanted = peer_ops.experts_push(x, experts, routing, PLAIN, results_at)
        assert torch.equal(stored.view(torch.int16), memory.view(torch.int16)) and found.output.shape == (0, 256)
        assert torch.equal(found.tokens_per_expert, wanted.tokens_per_expert) and found.ids is routing.ids
        # Without addresses slots are summed.
        begun = peer_ops.experts_begin(x, experts, routing, PLAIN, None, multiprocessors=limits)
        with beside(device):
            found = begun.finish()
        assert torch.equal(found.output, moe_torch.moe(x, experts, routing, PLAIN).output)


@on_engines
@pytest.mark.parametrize("name", ["mxfp4_w4a16", "fp8_block", "int4_w4a16_zp"])
def test_quantised_experts(engine: str, name: str) -> None:
    """As published, and prepacked where the engine has kernels for that."""
    scheme = scheme_named(name)
    with running_on(engine) as device:
        for tokens in (8, 800) if engine == "cuda" else (60,):
            x, _, routing = draw(device, tokens, 1, torch.bfloat16, 256)
            matrices = [torch.randn(E, *sides, device=device) / 16 for sides in ((512, 256), (256, 256))]
            up, down = (moe_torch.quantize(one.bfloat16(), scheme.weights, layout="out_in") for one in matrices)
            spec = MoESpec(PLAIN.activation, None, "out_in", activations=scheme.activations)
            given = [ExpertWeights(up, down)]
            if engine == "cuda" and scheme.activations is None:
                given.append(moe_torch.prepack_weights(given[0], spec))
            for experts in given:
                memory, rows, results_at = places(routing, 256, torch.bfloat16)
                wanted = rows_of_slots(x, experts, routing, spec)
                peer_ops.experts_push(x, experts, routing, spec, results_at)
                require_stored(memory, rows, wanted, routing)
                memory.fill_(torch.nan)
                peer_ops.experts_begin(x, experts, routing, spec, results_at, multiprocessors=(3, 2)).finish()
                require_stored(memory, rows, wanted, routing)


def leaves_of(x: Any, experts: ExpertWeights, routing: TopK) -> tuple[list[Any], ExpertWeights, TopK]:
    """Copies that ask for gradients: x, both matrices and weights; experts and routing of these."""
    leaves = [one.clone().requires_grad_() for one in (x, experts.gate_up, experts.down, routing.weights)]
    return leaves, ExpertWeights(*leaves[1:3], down_bias=experts.down_bias), TopK(routing.ids, leaves[3])


@on_engines
@pytest.mark.parametrize("top_k", [1, 3])
def test_gradients_are_those_of_the_op(engine: str, top_k: int) -> None:
    with running_on(engine) as device:
        spec, alone = (dataclasses.replace(PLAIN, tuning=Tuning(expected_tokens=900 // each)) for each in (top_k, 1))
        x, experts, routing = draw(device, HOT, top_k, torch.float32)
        d_y = torch.randn(HOT, D, device=device)
        wanted = rows_of_slots(x, experts, routing, alone)
        found = []
        for pushes in (False, True):
            leaves, own, given = leaves_of(x, experts, routing)
            if pushes:
                memory, rows, results_at = places(routing, D, torch.float32)
                output = peer_ops.experts_push(leaves[0], own, given, spec, results_at).output
                require_stored(memory, rows, wanted, routing)
                assert output.shape == (HOT, D) and output.untyped_storage().nbytes() == 4
            else:
                output = moe_torch.moe(leaves[0], own, given, spec).output
            output.backward(d_y)
            found.append([one.grad for one in leaves])
        for one, pushed in zip(*found, strict=True):
            assert torch.equal(one, pushed)
        # Rows of d_x go to addresses, too, and what autograd passes on has no memory.
        slots = TopK(routing.ids.view(-1, 1), routing.weights.view(-1, 1))
        by_slot, own, given = leaves_of(x.repeat_interleave(top_k, 0), experts, slots)
        moe_torch.moe(by_slot[0], own, given, alone).output.backward(d_y.repeat_interleave(top_k, 0))
        leaves, own, given = leaves_of(x, experts, routing)
        results, gradients = places(routing, D, torch.float32), places(routing, D, torch.float32)
        options: dict[str, Any] = {"gradients_at": gradients[2]}
        peer_ops.experts_push(leaves[0], own, given, spec, results[2], **options).output.backward(d_y)
        require_stored(*gradients[:2], by_slot[0].grad, routing)
        assert leaves[0].grad is not None and leaves[0].grad.shape == x.shape
        for one, leaf in zip(found[0][1:], leaves[1:], strict=True):
            assert leaf.grad is not None and torch.equal(one, leaf.grad)


@on_engines
def test_addresses_of_results(engine: str) -> None:
    """Sources that name no rank or slot, and those behind the last row, have none."""
    with running_on(engine) as device:
        sources = torch.tensor([[1, 4], [0, 0], [-1, 2], [2, 1], [1, -1], [0, 5], [1, 2], [1, 3]], dtype=torch.int32)
        table = torch.tensor([1 << 40, 1 << 50], device=device)
        for filled, count in ((7, 7), (0, 0), (99, 8), (-3, 0)):
            start = torch.tensor([0, 3, filled], dtype=torch.int32, device=device)
            options: dict[str, Any] = {"num_slots": 5, "width": 24, "dtype": torch.bfloat16}
            found = peer_ops.result_addresses(sources.to(device), start, table, **options)
            wanted = [(1 << 50) + 4 * 48, 1 << 40, 0, 0, 0, 0, (1 << 50) + 96, (1 << 50) + 144]
            assert found.tolist() == [*wanted[:count], *[0] * (8 - count)]


def test_shapes_are_known_without_data() -> None:
    with FakeTensorMode():
        x, experts, routing = torch.empty(6, D), ExpertWeights(torch.empty(E, D, 2 * F), torch.empty(E, F, D)), None
        routing = TopK(torch.empty(6, 2, dtype=torch.int32), torch.empty(6, 2))
        found = peer_ops.experts_push(x, experts, routing, PLAIN, torch.empty(12, dtype=torch.int64))
        assert found.output.shape == (0, D) and found.tokens_per_expert.shape == (E,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"results_at": torch.zeros(9, dtype=torch.int64)}, r"results_at must be \[10\], got \(9,\)"),
        ({"results_at": torch.zeros(10, dtype=torch.int32)}, "results_at must be int64"),
        ({"spec": dataclasses.replace(PLAIN, out_dtype="float32")}, "out_dtype must be None with results_at"),
        ({"width": 30}, "rows of the output must be a multiple of 16 bytes, got 60"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    x, experts, routing = draw("cpu", 5, 2, torch.bfloat16, changes.pop("width", D))
    given = {"spec": PLAIN, "results_at": torch.zeros(10, dtype=torch.int64)} | changes
    with running_on("reference"), pytest.raises(InvalidInput, match=message):
        peer_ops.experts_push(x, experts, routing, given["spec"], given["results_at"])
