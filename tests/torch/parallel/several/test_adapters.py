"""Adapters of experts on several gloo ranks, against one device."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import init_device_mesh

import moe_torch
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import ExpertsSpec, MoELayerSpec
from moe_core.parallel import ExchangeSpec, Placement
from moe_core.parallel.placement import gather_experts
from moe_core.parallel.tensor import cut_of, split_factors
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import LoRAFactors, TopK
from moe_torch import LoRA, MoE
from moe_torch.parallel import ExpertParallel, PlacedTensor, Rebalancer, moe, parallelize
from moe_torch.parallel import adapters as module
from moe_torch.parallel.moving import MovingPlacement
from moe_torch.parallel.routes import CollectiveRoutes
from tests.support.parallel.grid import Grid, join_arrays
from tests.support.parallel.lora import FACTORS, draw_lora, of_rank, require_factors
from tests.support.parallel.placements import placement_of
from tests.support.parallel.pool import Pool, ranks
from tests.support.parallel.tensor import axes
from tests.support.parallel.torch import mesh_of, mesh_of_hosts, parallel_of, poisoned, trained
from tests.support.parallel.twins import PLAIN, Problem, draw_problem
from tests.support.parallel.ways import TORCH_WAYS, every_torch_way, require_same, sizes_of
from tests.support.torch import running_on, to_numpy, to_torch

__all__ = ["ranks"]

OAI = MoESpec(Activation("swiglu_oai", gate_layout="interleaved"), RouterSpec(2, renormalize=True))
SEPARATE = MoESpec(Activation("silu", gate_layout="separate"), RouterSpec(2), "out_in", "out_in")
# torch does not say that these are public.
dcp: Any = checkpoint
FAULTS = ("ids of others", "factors of others", "part left out")


@contextlib.contextmanager
def broken(fault: str | None) -> Iterator[None]:
    """A planted fault, by name."""
    ids, columns = CollectiveRoutes.push_ids, module.held_columns
    targets: dict[Any, Any] = {
        "ids of others": (CollectiveRoutes, "push_ids", lambda *arguments: ids(*arguments).roll(1)),
        "factors of others": (module, "held_columns", lambda *arguments: columns(*arguments)[::-1]),
        "part left out": (module._Whole, "apply", lambda axis, *arrays: arrays),
    }
    with mock.patch.object(*targets[fault]) if fault else contextlib.nullcontext():
        yield


def operands(own: Any, lora: Any, ids: np.ndarray, d_output: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Arguments in torch and their leaves, by the names of gradients."""
    given: Any = (own.x, own.experts, own.routing, own.token_mask, d_output, own.shared, lora, ids)
    given = to_torch(given, "cpu")
    leaves = {"x": given[0].requires_grad_()}
    for prefix, bundle in (("experts", given[1]), ("routing", given[2]), ("shared", given[5])):
        leaves |= {f"{prefix}.{name}": array for name, array in trained(bundle).items()}
    leaves |= {f"lora.{name}": getattr(given[6], name).requires_grad_() for name in FACTORS}
    return given, leaves


def results(found: Any, d_output: torch.Tensor, leaves: dict[str, torch.Tensor]) -> dict[str, Any]:
    found.output.backward(d_output.to(found.output.dtype))
    every: dict[str, Any] = {name: to_numpy(array) for name, array in found._asdict().items() if array is not None}
    return every | {f"d_{name}": to_numpy(cast(Any, array.grad)) for name, array in leaves.items()}


def run_rank(group: Any, problem: Problem, way: ExchangeSpec, lora: Any, ids: Any, fault: str | None) -> Any:
    rank = torch.distributed.get_rank(group)
    own, placement = problem.ranks()[rank], problem.placement
    with running_on("reference"), poisoned(), broken(fault):
        part = of_rank(lora, placement, rank, own.experts.down.shape[0])
        given = operands(own, part, problem.of_rank(rank, ids), problem.gradients()[rank].output)
        (x, experts, routing, mask, d_output, shared, factors, own_ids), leaves = given
        options: Any = {"parallel": parallel_of(group, way, problem), "placement": placement, "token_mask": mask}
        options |= {"shared": shared, "lora": factors, "adapter_ids": own_ids}
        return results(moe(x, experts, routing, problem.spec, **options), d_output, leaves)


def run_of_grid(_: Any, grid: Grid, way: ExchangeSpec, lora: Any, ids: np.ndarray, fault: str | None) -> Any:
    problem, over = grid.problem, axes(grid.problem.placement.num_ranks, grid.size)
    if over is None:
        return None
    own, number = grid.ranks()[over.row][over.index], grid.number(over.row, over.index)
    with running_on("reference"), poisoned(), broken(fault):
        part = split_factors(lora, grid.size, grid.layouts()[1])[over.index]
        part = of_rank(part, problem.placement, over.row, own.experts.down.shape[0])
        given = operands(own, part, problem.of_rank(number, ids), grid.gradients()[over.row][over.index].output)
        (x, experts, routing, mask, d_output, shared, factors, own_ids), leaves = given
        options: Any = {"tensor": over.tensor, "tensor_tokens": grid.tokens}
        parallel = ExpertParallel(over.experts, way, max(problem.tokens) + 1, **options)
        options = {"parallel": parallel, "placement": problem.placement, "token_mask": mask, "shared": shared}
        options |= {"lora": factors, "adapter_ids": own_ids}
        return results(moe(x, experts, routing, problem.spec, **options), d_output, leaves)


def run_alone(problem: Problem, lora: Any, ids: np.ndarray) -> dict[str, Any]:
    with running_on("reference"):
        given, leaves = operands(problem, lora, ids, problem.d_output)
        x, experts, routing, mask, d_output, shared, factors, own_ids = given
        options: Any = {"token_mask": mask, "shared": shared, "lora": factors, "adapter_ids": own_ids}
        return results(moe_torch.moe(x, experts, routing, problem.spec, **options), d_output, leaves)


def require_alone(parts: list[Any], alone: dict[str, Any], problem: Problem, label: str) -> None:
    for name in ("output", "d_x", "d_routing.weights"):
        if name in alone:
            require_same(np.concatenate([part[name] for part in parts]), alone[name], f"{name}, {label}")
    for name in ("tokens_per_expert", "invalid_ids"):
        np.testing.assert_array_equal(sum(part[name] for part in parts), alone[name], f"{name}, {label}")
    require_factors(parts, alone, problem.placement, label)


@every_torch_way
def test_the_bits_of_one_device(ranks: Pool, way: ExchangeSpec) -> None:
    """Forward and backward; factors of experts and shared ones, empty slots, and ids that are none."""
    number, equal = TORCH_WAYS.index(way), way.mode in ("all_gather", "padded")
    cases = (
        ("linear", "random", "float32", PLAIN, "float32"),
        ("round_robin", "hot_rank", "bfloat16", SEPARATE, "float32"),
        ("balanced", "masked", "float32", OAI, "bfloat16"),
    )
    for seed, (kind, load, dtype, spec, factors) in enumerate(cases):
        size = (2, 3, 4)[(seed + number) % 3]
        tokens = (6,) * size if equal else (11, 0, 5, 2)[:size]
        problem = draw_problem(
            seed, placement_of(kind, 5, size), tokens, 2, load, dtype, spec, extras=seed > 0, sizes=sizes_of(way)
        )
        if dtype == "float32":
            # BLAS adds up the rows of a shared expert in an order that depends on their number.
            problem = dataclasses.replace(problem, shared=None)
        lora, ids = draw_lora(problem, shared=seed == 1, dtype=factors)
        alone = run_alone(problem, lora, ids)
        parts = ranks.call(run_rank, [(problem, way, lora, ids, None)] * size)
        require_alone(parts, alone, problem, f"{kind}, {load}, {dtype}")
    for fault in FAULTS[: 2 * (number == 1)]:
        parts = ranks.call(run_rank, [(problem, way, lora, ids, fault)] * size)
        with pytest.raises(AssertionError, match=fault):
            require_alone(parts, alone, problem, fault)


def test_a_deep_ep_buffer(ranks: Pool) -> None:
    way, placement = ExchangeSpec(rows="slots", transport="deep_ep"), placement_of("linear", 6, 2)
    for tokens in ((5, 3), (4, 3)):
        problem = draw_problem(4, placement, tokens, 2, "random", "bfloat16", PLAIN, sizes=(32, 8))
        lora, ids = draw_lora(problem)
        parts = ranks.call(run_rank, [(problem, way, lora, ids, None)] * 2)
        require_alone(parts, run_alone(problem, lora, ids), problem, str(way))


@pytest.mark.parametrize("tokens", ["split", "replicated"])
def test_experts_split_over_a_tensor_axis(ranks: Pool, tokens: str) -> None:
    """Nearly one device: parts of low2 are rounded on their ranks. Whole factors get the sum of parts."""
    for way, spec in ((TORCH_WAYS[1], PLAIN), (TORCH_WAYS[4], SEPARATE), (TORCH_WAYS[6], OAI)):
        placement = placement_of("round_robin", 5, 2)
        each = (6,) * (4 if tokens == "split" else 2)
        extras = spec.router is not None
        problem = draw_problem(3, placement, each, 2, "random", "float32", spec, extras=extras, sizes=(16, 8))
        grid, (lora, ids) = Grid(problem, 2, tokens), draw_lora(problem)
        alone = run_alone(problem, lora, ids)
        for fault in (None, *FAULTS[2:]):
            parts = ranks.call(run_of_grid, [(grid, way, lora, ids, fault)] * 4)
            with pytest.raises(AssertionError) if fault else contextlib.nullcontext():
                for index in range(2):
                    of_axis = parts[index::2]
                    for name in ("a1", "b2"):
                        require_near(whole_of(of_axis, name, placement), alone[f"d_lora.{name}"], name)
        every = parts if tokens == "split" else parts[::2]
        for name in ("output", "d_x"):
            require_near(np.concatenate([part[name] for part in every]), alone[name], name)
        assert sum(int(part["invalid_ids"][0]) for part in every) == alone["invalid_ids"][0]
        for name in ("b1", "a2"):
            cut, both = (
                cut_of(name, "in_out", grid.layouts()[1]),
                [whole_of(parts[i::2], name, placement) for i in (0, 1)],
            )
            require_near(join_arrays(both, cut), alone[f"d_lora.{name}"], name)


def whole_of(parts: list[Any], name: str, placement: Placement) -> np.ndarray:
    return gather_experts([part[f"d_lora.{name}"] for part in parts], placement, axis=1)


def require_near(found: np.ndarray, wanted: np.ndarray, label: str) -> None:
    np.testing.assert_allclose(found, wanted, 0, 1e-5 * (1 + np.abs(wanted).max()), err_msg=label)


SPEC = MoELayerSpec(16, 24, 7, 3, RouterSpec(3, renormalize=True), ExpertsSpec(bias=True))


def make_layer(options: LoRA, parallel: Any = None, placement: Any = None, *, first: bool = False) -> MoE:
    """A layer with adapters 1 (new) and 2 (loaded); first: adapters ahead of the ranks."""
    torch.manual_seed(0)
    layer = MoE.from_spec(SPEC)
    if parallel is not None and not first:
        parallelize(layer, parallel, placement=placement)
    slots = layer.add_lora(options)
    if parallel is not None and first:
        parallelize(layer, parallel, placement=placement)
    torch.manual_seed(5)
    slots.reset(1)
    random, axis = np.random.default_rng(3), 1 if options.shared else 7
    sides = {"a1": (16, 9), "b1": (9, 48), "a2": (24, 9), "b2": (9, 16)}
    slots.load(2, LoRAFactors(**{n: random.standard_normal((axis, *s), np.float32) for n, s in sides.items()}))
    return layer


def run_layer(layer: MoE, tokens: slice) -> dict[str, Any]:
    x, d_y, random = *rows_of_layer(), np.random.default_rng(1)
    ids = torch.from_numpy(random.integers(-1, 3, len(x), dtype=np.int32))
    own = x[tokens].clone().requires_grad_()
    y, aux = layer(own, adapter_ids=ids[tokens], return_aux=True)
    (y * d_y[tokens]).sum().backward()
    slots: Any = layer.lora
    made: dict[str, Any] = {"y": y, "d_x": own.grad, "invalid": aux.invalid_ids}
    for name in FACTORS:
        gradient = getattr(slots, name).grad
        made[f"d_{name}"] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    slots.evict(1)
    made["evicted"] = layer(own, adapter_ids=ids[tokens])
    made |= {name: getattr(slots.export(2), name) for name in FACTORS}
    assert all(one.grad is None and not one.requires_grad for one in layer.experts.parameters())
    return {name: one.detach().numpy() for name, one in made.items()}


def rows_of_layer() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(18, 16, generator=generator) for _ in range(2)]


def layer_on_rank(group: Any, kind: str, shared: bool, first: bool, folder: str) -> Any:
    rank, placement = torch.distributed.get_rank(group), placement_of(kind, 7, 3, 1)
    parallel, options = ExpertParallel(mesh_of(group)), LoRA(8, slots=3, max_rank=16, shared=shared)
    with running_on("reference"):
        layer = make_layer(options, parallel, placement, first=first)
        dcp.save(layer.lora.state_dict(), checkpoint_id=folder, process_group=group)
        other = parallelize(MoE.from_spec(SPEC), parallel, placement=placement_of("linear", 7, 3))
        state = other.add_lora(options).state_dict()
        dcp.load(state, checkpoint_id=folder, process_group=group)
        whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in state.values()]
        return run_layer(layer, slice(6 * rank, 6 * rank + 6)), dict(zip(state, map(to_numpy, whole), strict=True))


@pytest.mark.parametrize(
    ("kind", "shared", "first"), [("linear", False, True), ("balanced", False, False), ("linear", True, False)]
)
def test_layers_with_adapters(ranks: Pool, tmp_path: pathlib.Path, kind: str, shared: bool, first: bool) -> None:
    """Reset, load, evict, export, gradients and checkpoints are one device's, on every rank."""
    with running_on("reference"):
        alone = make_layer(LoRA(8, slots=3, max_rank=16, shared=shared))
        state, wanted = (
            {n: to_numpy(one).copy() for n, one in alone.lora.state_dict().items()},
            run_layer(alone, slice(None)),
        )
    found = ranks.call(layer_on_rank, [(kind, shared, first, str(tmp_path))] * 3)
    for name in ("y", "d_x", "evicted"):
        np.testing.assert_array_equal(np.concatenate([made[name] for made, _ in found]), wanted[name], name)
    assert sum(int(made["invalid"][0]) for made, _ in found) == wanted["invalid"][0] > 0
    for name in FACTORS:
        parts = [made[f"d_{name}"] for made, _ in found]
        if shared:
            require_near(np.sum(parts, axis=0), wanted[f"d_{name}"], name)
        for made, loaded in found:
            np.testing.assert_array_equal(made[name], wanted[name], name)
            if not shared:
                np.testing.assert_array_equal(made[f"d_{name}"], wanted[f"d_{name}"], name)
            for key, array in state.items():
                np.testing.assert_array_equal(loaded[key], array, key)


def layer_over_tensor(_: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    parallel = ExpertParallel(mesh["ep"], tensor=mesh["tp"], tensor_tokens="replicated", gradients="mean")
    with running_on("reference"):
        layer = make_layer(LoRA(8, slots=3, max_rank=16), parallel)
        assert isinstance(layer.lora.b1, PlacedTensor) and not isinstance(layer.lora.a2, PlacedTensor)
        row = mesh["ep"].get_local_rank()
        return run_layer(layer, slice(9 * row, 9 * row + 9))


def test_layers_over_a_tensor_axis(ranks: Pool) -> None:
    """Halves of gate and up are split each. Gradients are means over the two ranks with tokens."""
    found = ranks.call(layer_over_tensor, [()] * 4)
    with running_on("reference"):
        wanted = run_layer(make_layer(LoRA(8, slots=3, max_rank=16)), slice(None))
    for name in ("y", "d_x", "evicted"):
        require_near(np.concatenate([made[name] for made in found[::2]]), wanted[name], name)
    for made in found:
        for name in FACTORS:
            np.testing.assert_array_equal(made[name], wanted[name], name)
            require_near(2 * made[f"d_{name}"], wanted[f"d_{name}"], name)


def other_calls(group: Any) -> Any:
    """Hosts, dropout, and what calls and layers refuse."""
    rank = torch.distributed.get_rank(group)
    options, parallel = LoRA(8, slots=3, max_rank=16, dropout=0.5), ExpertParallel(mesh_of(group))
    hosts = ExpertParallel(mesh_of_hosts(2))
    with running_on("reference"):
        x, ids = rows_of_layer()[0][6 * rank % 13 :][:5], torch.arange(5, dtype=torch.int32) % 4 - 1
        layers = [make_layer(options, one).eval() for one in (parallel, hosts)]
        found = [layer(x, adapter_ids=ids) for layer in layers]
        found.append(layers[0](x, adapter_ids=ids, gate_inputs=x))  # in stages
        layers[0].train()
        for seed in (0, 0, 1):
            torch.manual_seed(seed + 10 * rank)
            found.append(layers[0](x, adapter_ids=ids))
        found[-1].sum().backward()
        raised = []
        moved: Any = MovingPlacement(Placement.linear(8, 4), torch.device("cpu"))
        given: Any = (x, layers[0].experts.operands(), TopK(ids[:, None], x[:, :1]), PLAIN)
        calls = (
            lambda: Rebalancer([layers[0]], parallel),
            lambda: moe(*given, parallel=parallel, placement=moved, lora=LoRAFactors()),
            lambda: moe(*given, parallel=parallel, placement=moved, adapter_ids=ids),
        )
        for call in calls:
            try:
                call()
            except (Unsupported, InvalidInput) as error:
                raised.append(f"{type(error).__name__}: {error}")
    return [one.detach().numpy() for one in found], raised, cast(Any, layers[0].lora).a1.grad is not None


def test_hosts_dropout_and_refusals(ranks: Pool) -> None:
    for (plain, hosts, staged, first, again, other), raised, has_gradient in ranks.call(other_calls, [()] * 4):
        np.testing.assert_array_equal(plain, hosts)
        np.testing.assert_array_equal(plain, staged)
        np.testing.assert_array_equal(first, again)
        assert has_gradient and (first != other).any() and (first != plain).any()
        texts = (
            "Unsupported: layers with adapters do not move experts",
            "Unsupported: lora must be None with a MovingPlacement",
            "InvalidInput: adapter_ids must be None without lora",
        )
        assert [one[: len(text)] for one, text in zip(raised, texts, strict=True)] == list(texts)
