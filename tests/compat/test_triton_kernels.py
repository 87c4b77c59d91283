"""The interface of triton_kernels on our ops: routing and products against NumPy statements of what they mean there."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_core.parity.tolerance import assert_close
from moe_core.specs import MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, RouterLogits
from moe_torch.compat.triton_kernels.matmul_ogs import PrecisionConfig, matmul_ogs
from moe_torch.compat.triton_kernels.routing import (
    GatherIndx,
    RoutingData,
    ScatterIndx,
    compute_expt_data,
    compute_expt_data_torch,
    routing,
    routing_from_bitmatrix,
)
from moe_torch.compat.triton_kernels.topk import topk
from tests.support.torch import REAL_KERNELS, running_on, to_numpy
from tests.support.triton_kernels import ACTIVATION, ALPHA, LIMIT, SWIGLU, TOPK, D, E, N, T, normal, tolerances

pytestmark = pytest.mark.usefixtures("reference_engine_of_torch")


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def stated_routing(
    logits: np.ndarray,
    top_k: int,
    sm_first: bool = False,
    given: np.ndarray | None = None,
    simulated_ep: int = 1,
    n_rows: int | None = None,
) -> dict[str, np.ndarray]:
    """What `routing` means: loops over tokens; rows of an expert in slot order, the rest -1."""
    slots: list[tuple[int, int, float]] = []
    num_local = logits.shape[1] // simulated_ep
    for token, row in enumerate(logits[:n_rows]):
        scores = softmax(row) if sm_first else row
        ids = np.sort(np.argsort(-scores, kind="stable")[:top_k]) if given is None else given[token]
        values = scores[ids] if sm_first else softmax(scores[ids])
        kept = [(expert, value) for expert, value in zip(ids, values, strict=True) if expert < num_local]
        slots += [(expert, token * top_k + choice, value) for choice, (expert, value) in enumerate(kept)]
    slots.sort(key=lambda slot: slot[0])
    found = {
        "hist": np.bincount([expert for expert, _, _ in slots], minlength=num_local),
        "slot_of_row": np.full(logits.shape[0] * top_k, -1),
        "row_of_slot": np.full(logits.shape[0] * top_k, -1),
        "gate": np.zeros(logits.shape[0] * top_k),
    }
    for row, (_, slot, value) in enumerate(slots):
        found["slot_of_row"][row], found["row_of_slot"][slot], found["gate"][row] = slot, row, value
    return found


def require_routing(result: tuple[Any, Any, Any], stated: dict[str, np.ndarray]) -> None:
    data, gather, scatter = result
    for name, array in (
        ("hist", data.expt_hist),
        ("slot_of_row", gather.src_indx),
        ("slot_of_row", scatter.dst_indx),
        ("row_of_slot", gather.dst_indx),
        ("row_of_slot", scatter.src_indx),
    ):
        assert array.dtype == torch.int32
        np.testing.assert_array_equal(to_numpy(array), stated[name], err_msg=name)
    assert data.gate_scal.dtype == torch.float32
    np.testing.assert_allclose(to_numpy(data.gate_scal), stated["gate"], rtol=1e-6)


GIVEN = torch.tensor([[(3 * token + 1) % E, token % E] if token % 3 else [5, 0] for token in range(T)])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sm_first": True},
        {"n_rows": 5},
        {"simulated_ep": 2, "sm_first": True},
        {"expt_indx": GIVEN},
        {"expt_indx": GIVEN.to(torch.int16), "sm_first": True, "simulated_ep": 3},
        {"n_rows": torch.tensor([7]), "expt_indx": GIVEN},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_routing_is_what_it_states(options: dict[str, Any], dtype: Any) -> None:
    logits = normal(T, E).to(dtype)
    stated = dict(options)
    if "expt_indx" in stated:
        stated["given"] = stated.pop("expt_indx").numpy()
    if isinstance(stated.get("n_rows"), torch.Tensor):
        stated["n_rows"] = int(stated["n_rows"])
    found = routing(logits, TOPK, **options)
    require_routing(found, stated_routing(logits.double().numpy(), TOPK, **stated))
    assert (found[0].n_expts_tot, found[0].n_expts_act) == (E // options.get("simulated_ep", 1), TOPK)


def test_routing_takes_any_number_of_choices_and_any_ids() -> None:
    logits = normal(T, E)
    require_routing(routing(logits, 5), stated_routing(logits.double().numpy(), 5))
    ids = torch.tensor([[0, -1], [E, 1], [-1, -1]])
    data, gather, _ = routing(logits[:3], 2, expt_indx=ids)
    assert data.expt_hist.tolist() == [1, 1, 0, 0, 0, 0] and gather.src_indx.tolist() == [0, 3, -1, -1, -1, -1]
    assert data.gate_scal.tolist() == [1, 1, 0, 0, 0, 0], "the softmax is over experts that exist"


@pytest.mark.parametrize("hist", [[20, 0, 3, 129], [0, 0, 0, 0], [1, 0, 1, 0]], ids=str)
def test_expert_data_counts_tiles(hist: list[int]) -> None:
    rows = sum(hist)
    data = compute_expt_data_torch(torch.tensor(hist, dtype=torch.int32), len(hist), rows)
    assert data.token_offs_raw.tolist() == list(itertools.accumulate(hist, initial=0))
    assert list(data.token_offs_pad) == list(data.block_pid_map) == [16, 32, 64, 128]
    for block_m in data.token_offs_pad:
        counts = [-(-size // block_m) for size in hist]
        assert data.token_offs_pad[block_m].tolist() == list(itertools.accumulate(counts, initial=0))
        tiles = [expert + (tile << 16) for expert, count in enumerate(counts) for tile in range(count)]
        found = data.block_pid_map[block_m].tolist()
        assert found == tiles + [-1] * (len(found) - len(tiles))
        assert len(found) >= RoutingData(None, None, len(hist), 1).n_blocks(rows, block_m)
    data_of_three = RoutingData(None, None, 3, 1)
    assert [data_of_three.n_blocks(rows, 16) for rows in (0, 3, 4, 18, 19)] == [0, 3, 3, 3, 4]
    with pytest.raises(KeyError):
        data.block_pid_map[8]
    assert compute_expt_data(None, 4, 0).hist is None


def test_bitmatrix_says_which_experts_exist() -> None:
    logits = normal(T, E)
    values, ids, bits = topk(logits, TOPK, n_rows=7)
    assert bits.shape == [7, 32] and bits.shape_max == [T, 32] and ids.dtype == torch.int32
    assert bits.device == logits.device
    require_routing(routing_from_bitmatrix(bits, values, ids, E, TOPK), stated_routing(logits.numpy(), TOPK, n_rows=7))
    counts, partials = bits.sum(4)
    assert partials.shape == (3, 32)
    assert counts[:E].tolist() == np.bincount(to_numpy(ids)[:7].ravel(), minlength=E).tolist()
    # An expert whose bit is cleared has no row.
    words = bits.data.view(torch.int32)
    first = int(ids[0, 0])
    words[0] &= ~(1 << first)
    assert routing_from_bitmatrix(bits, values, ids, E, TOPK)[0].expt_hist.sum() == 13
    # Ids of the third word.
    values, ids, bits = topk(normal(T, 70), 70)
    assert routing_from_bitmatrix(bits, values, ids, 70, 70)[0].expt_hist.tolist() == [T] * 70
    assert (
        topk(logits, 2, apply_softmax=False)[0].tolist() == torch.gather(logits, 1, topk(logits, 2)[1].long()).tolist()
    )


def stated_product(
    x: np.ndarray, w: np.ndarray, experts: np.ndarray, sources: np.ndarray, options: dict[str, Any]
) -> np.ndarray:
    """What `matmul_ogs` means before the scatter: experts and sources say, row by row, the matrix and the row of x."""
    width = w.shape[-1] // (2 if options.get("fused_activation") else 1)
    y = np.zeros((len(experts), width))
    for row, (expert, source) in enumerate(zip(experts, sources, strict=True)):
        if expert < 0:
            continue
        result = x[source] @ w[expert]
        if options.get("bias") is not None:
            result = result + options["bias"][expert] * (1 if options.get("betas") is None else options["betas"][row])
        result = result * options.get("out_alpha", 1.0)
        if options.get("fused_activation"):
            gate, up = np.minimum(result[0::2], LIMIT), np.clip(result[1::2], -LIMIT, LIMIT)
            result = gate / (1 + np.exp(-ALPHA * gate)) * (up + 1)
        y[row] = result * (1 if options.get("gammas") is None else options["gammas"][row])
    return y


def stated_scatter(y: np.ndarray, row_of_slot: np.ndarray, top_k: int) -> np.ndarray:
    padded = np.concatenate([y, np.zeros((1, y.shape[1]))])
    return padded[row_of_slot].reshape(-1, top_k, y.shape[1]).sum(1)


def doubles(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double().numpy() if isinstance(value, torch.Tensor) else value for name, value in options.items()
    }


def options_of(kind: str, num_matrices: int, rows: int) -> dict[str, Any]:
    if kind == "plain":
        return {"bias": None}
    gammas = normal(rows, seed=1).to(torch.bfloat16 if kind == "fused" else torch.float32)
    options: dict[str, Any] = {"bias": normal(num_matrices, N), "gammas": gammas}
    if kind == "everything":
        options |= {"betas": normal(rows, seed=2), "out_alpha": 0.5}
    if kind != "scaled":
        options["fused_activation"] = SWIGLU
    return options if kind != "scaled" else options | {"out_alpha": -2.0}


KINDS = pytest.mark.parametrize("kind", ["plain", "fused", "scaled", "everything"])


def require_near(found: torch.Tensor, stated: np.ndarray) -> None:
    assert found.dtype == torch.float32 and found.shape == stated.shape
    np.testing.assert_allclose(to_numpy(found), stated, rtol=2e-5, atol=2e-5)


@KINDS
@pytest.mark.parametrize("way", ["gather", "scatter", "both", "neither", "other way back", "pruned"])
def test_grouped_product_is_what_it_states(kind: str, way: str) -> None:
    logits, w = normal(T, E), normal(E, D, N)
    data, gather, scatter = routing(logits, TOPK, simulated_ep=2 if way == "pruned" else 1)
    w = w[: data.n_expts_tot]
    options = options_of(kind, data.n_expts_tot, T * TOPK)
    slots = to_numpy(gather.src_indx)
    experts = np.full(T * TOPK, -1)
    experts[slots >= 0] = np.repeat(np.arange(data.n_expts_tot), to_numpy(data.expt_hist))
    gathers, scatters = way in ("gather", "both", "other way back", "pruned"), way not in ("gather", "neither")
    if way == "other way back":
        order = torch.randperm(T * TOPK, generator=torch.Generator().manual_seed(3)).int()
        scatter = ScatterIndx(order, order.argsort().int())
    x = normal(T if gathers else T * TOPK, D)
    sources = slots // TOPK if gathers else np.arange(T * TOPK)
    stated = stated_product(x.double().numpy(), w.double().numpy(), experts, sources, doubles(options))
    if scatters:
        stated = stated_scatter(stated, to_numpy(scatter.src_indx), TOPK)
    indices = {"gather_indx": gather if gathers else None, "scatter_indx": scatter if scatters else None}
    require_near(matmul_ogs(x, w, routing_data=data, **indices, **options), stated)


@KINDS
@pytest.mark.parametrize("way", ["dense", "one of a stack", "gather and scatter"])
def test_product_with_one_matrix_is_what_it_states(kind: str, way: str) -> None:
    x, w = normal(T, D), normal(1, D, N)
    gather = scatter = None
    sources = np.arange(T)
    if way == "gather and scatter":
        sources = np.array([3, 3, 0, 8, 1])
        index = torch.tensor([2, 0, 1, 4, 3], dtype=torch.int32)
        gather = GatherIndx(torch.from_numpy(sources).int(), index)
        scatter = ScatterIndx(index, index.argsort().int())
    options = options_of(kind, 1, len(sources))
    zeros = np.zeros(len(sources), int)
    stated = stated_product(x.double().numpy(), w.double().numpy(), zeros, sources, doubles(options))
    if scatter is not None:
        stated = stated_scatter(stated, to_numpy(scatter.src_indx), 1)
    matrix = w if way == "one of a stack" else w[0]
    found = matmul_ogs(x, matrix, gather_indx=gather, scatter_indx=scatter, **options)
    require_near(found, stated)


@KINDS
def test_product_of_a_batch_is_what_it_states(kind: str) -> None:
    x, w = normal(3, 4, D), normal(3, N, D).mT
    options = options_of(kind, 3, 4)
    factors = {name: np.tile(value, 3) for name, value in doubles(options).items() if name in ("betas", "gammas")}
    experts, flat = np.repeat(np.arange(3), 4), x.double().numpy().reshape(12, D)
    stated = stated_product(flat, w.double().numpy(), experts, np.arange(12), doubles(options) | factors)
    require_near(matmul_ogs(x, w, **options), stated.reshape(3, 4, -1))


@pytest.mark.parametrize("engine", [REAL_KERNELS, "reference"])
def test_forward_is_that_of_the_composed_op(engine: str) -> None:
    """Bit by bit on the reference: the same roundings at the same places. Weights may lie transposed."""
    with running_on(engine) as device:
        x, logits = normal(T, D).to(device, torch.bfloat16), normal(T, E).to(device)
        gate_up, down = normal(E, D, 2 * N).to(x), normal(E, N, D).to(x)
        biases = normal(E, 2 * N).to(device), normal(E, D).to(device)
        data, gather, scatter = routing(logits, TOPK)
        columns_first = gate_up.mT.contiguous().mT
        hidden = matmul_ogs(x, columns_first, biases[0], data, gather, fused_activation=SWIGLU)
        memory = torch.empty(1, T, D, dtype=torch.bfloat16, device=device)
        precision = PrecisionConfig(allow_tf32=False, out_dtype=torch.bfloat16, enforce_bitwise_invariance=True)
        result = matmul_ogs(hidden, down, biases[1], data, None, scatter, precision, gammas=data.gate_scal, y=memory)
        assert result.data_ptr() == memory.data_ptr() and result.shape == (T, D)
        router = RouterSpec(TOPK, order="topk_then_softmax", slot_order="expert")
        experts = ExpertWeights(gate_up, down, gate_up_bias=biases[0], down_bias=biases[1])
        whole = moe_torch.moe(x, experts, RouterLogits(logits), MoESpec(ACTIVATION, router)).output
        tolerance = tolerances("bfloat16", D, N, TOPK, E)["output"]
        assert_close(to_numpy(result), to_numpy(whole), tolerance, label=engine)
        # Without the reduction, as ported code asks for it.
        data.n_expts_act = 1
        slots = matmul_ogs(hidden, down, biases[1], data, None, scatter, gammas=data.gate_scal)
        assert slots.shape == (T * TOPK, D)
        summed = slots.float().view(T, TOPK, D).sum(1).to(torch.bfloat16)
        assert_close(to_numpy(summed), to_numpy(whole), tolerance, label="slots")


def test_a_forward_is_one_graph_for_any_number_of_tokens() -> None:
    w1, w2, bias = normal(E, D, N), normal(E, N // 2, D), normal(E, N)

    def forward(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        data, gather, scatter = routing(logits, TOPK)
        precision = PrecisionConfig(allow_tf32=False)
        hidden = matmul_ogs(x, w1, bias, data, gather, None, precision, fused_activation=SWIGLU)
        return matmul_ogs(hidden, w2, None, data, scatter_indx=scatter, gammas=data.gate_scal)

    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend="eager")
    for tokens, stance in ((T, "default"), (4, "fail_on_recompile")):
        x, logits = normal(tokens, D), normal(tokens, E)
        with torch.compiler.set_stance(stance):
            assert torch.equal(compiled(x, logits), forward(x, logits)), tokens


def test_empty_batches_give_empty_results() -> None:
    data, gather, scatter = routing(normal(0, E), TOPK)
    w = normal(E, D, N)
    hidden = matmul_ogs(normal(0, D), w, normal(E, N), data, gather, fused_activation=SWIGLU)
    assert hidden.shape == (0, N // 2)
    result = matmul_ogs(hidden, normal(E, N // 2, D), None, data, None, scatter, gammas=data.gate_scal)
    assert result.shape == (0, D)
    assert matmul_ogs(normal(3, 0, D), w[:3], None).shape == (3, 0, N)


def test_gradients_flow_through_routing_and_products() -> None:
    x, logits, w = normal(T, D), normal(T, E), normal(E, D, N)
    parts = [tensor.requires_grad_() for tensor in (x, logits, w)]
    data, gather, scatter = routing(logits, TOPK)
    result = matmul_ogs(x, w, None, data, gather, scatter, gammas=data.gate_scal)
    found = torch.autograd.grad(result.square().sum(), parts)
    chosen, ids = logits.topk(TOPK)
    every = torch.einsum("td,edn->ten", x, w)
    rows = every.gather(1, ids[..., None].expand(-1, -1, N))
    wanted = torch.autograd.grad((rows * chosen.softmax(-1)[..., None]).sum(1).square().sum(), parts)
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
