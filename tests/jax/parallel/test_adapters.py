"""Adapters of experts on several of JAX's host devices, against one device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_core.layers import LoRA, MoELayerSpec
from moe_core.parallel import ExchangeSpec
from moe_core.parallel.tensor import cut_of, split_experts, split_factors
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import LoRAFactors, named_fields
from moe_jax import layers, parallel
from moe_jax.layers import lora as slots
from moe_jax.parallel import ExpertAxis
from moe_jax.parallel import adapters as module
from tests.support.jax import running_on, to_jax
from tests.support.parallel.grid import join_arrays
from tests.support.parallel.jax import by_place, ep_mesh, trained
from tests.support.parallel.lora import FACTORS, draw_lora, of_rank, require_factors
from tests.support.parallel.placements import placement_of
from tests.support.parallel.twins import PLAIN, Problem, draw_problem
from tests.support.parallel.ways import WAYS, every_way, require_same, sizes_of

RANKS, WHOLE = P("ep"), P()
OAI = MoESpec(Activation("swiglu_oai", gate_layout="interleaved"), RouterSpec(2, renormalize=True))
CASES = (("round_robin", "random", "float32", PLAIN), ("linear", "masked", "bfloat16", OAI))


def factors_of(lora: LoRAFactors) -> dict[str, Any]:
    return {name: one for name, one in named_fields(lora) if name in FACTORS}


def differentiated(call: Any, lora: LoRAFactors, problem: Any, arrays: Any) -> Any:
    """(output, invalid_ids, gradients) of `call(x, experts, routing, lora)`."""
    x, experts, routing, d_output = arrays

    def forward(x: Any, experts: Any, weights: Any, factors: Any) -> Any:
        found = call(x, experts, dataclasses.replace(routing, **weights), dataclasses.replace(lora, **factors))
        return found.output, found

    output, pull, found = jax.vjp(forward, x, experts, trained(routing), factors_of(lora), has_aux=True)
    d_x, _, d_routing, d_factors = pull(d_output.astype(output.dtype))
    return output, found.invalid_ids, d_x, d_routing, d_factors


def by_name(found: Any) -> dict[str, Any]:
    output, invalid, d_x, d_routing, d_factors = jax.tree.map(np.asarray, found)
    made = {"output": output, "invalid_ids": invalid, "d_x": d_x}
    made |= {f"d_routing.{name}": one for name, one in d_routing.items()}
    return made | {f"d_lora.{name}": one for name, one in d_factors.items()}


def run_alone(problem: Problem, lora: LoRAFactors, ids: np.ndarray) -> dict[str, Any]:
    with running_on("reference"):
        given, options = to_jax((problem.x, problem.experts, problem.routing, problem.d_output)), {}
        options = {"token_mask": problem.token_mask, "adapter_ids": jnp.asarray(ids)}

        def call(x: Any, experts: Any, routing: Any, lora: Any) -> Any:
            return moe_jax.moe(x, experts, routing, problem.spec, lora=lora, **options)

        return by_name(differentiated(call, to_jax(lora), problem, given))


def run_group(problem: Problem, lora: LoRAFactors, ids: np.ndarray, way: ExchangeSpec) -> list[dict[str, Any]]:
    """Of each rank; shared factors have one gradient, the sum, which is rank 0's here."""
    placement, spec = problem.placement, problem.spec
    mask = problem.token_mask if problem.token_mask is not None else np.ones(len(problem.x), bool)
    shared = lora.a1.shape[1] == 1
    if not shared:
        parts = [factors_of(of_rank(lora, placement, rank, placement.per_rank)) for rank in range(placement.num_ranks)]
        joined = {name: np.concatenate([part[name] for part in parts], axis=1) for name in FACTORS}
        lora = dataclasses.replace(lora, **joined)
    axis = WHOLE if shared else P(None, "ep")
    of_lora = LoRAFactors(**dict.fromkeys(FACTORS, axis), scale=WHOLE, ranks=WHOLE)
    of_routing = RANKS if spec.router is None else WHOLE

    def step(x: Any, experts: Any, routing: Any, mask: Any, d_output: Any, lora: Any, ids: Any) -> Any:
        def call(x: Any, experts: Any, routing: Any, lora: Any) -> Any:
            options: Any = {"placement": placement, "exchange": way, "token_mask": mask}
            return parallel.moe(x, experts, routing, spec, lora=lora, adapter_ids=ids, **options)

        return differentiated(call, lora, problem, (x, experts, routing, d_output))

    mesh, of_factors = ep_mesh(placement.num_ranks), dict.fromkeys(FACTORS, axis)
    specs = (RANKS, RANKS, of_routing, RANKS, RANKS, of_lora, RANKS)
    call = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(RANKS, RANKS, RANKS, of_routing, of_factors))
    with running_on("reference"):
        arrays = problem.x, by_place(problem.experts, placement), problem.routing, mask, problem.d_output, lora, ids
        found = by_name(jax.jit(call)(*to_jax(arrays)))
    ranks = range(placement.num_ranks)
    if shared:
        zero = {name: np.zeros_like(one) for name, one in found.items() if "lora" in name}
        return [found, *[found | zero] * (placement.num_ranks - 1)]
    return [
        found | {n: np.split(one, len(ranks), 1)[rank] for n, one in found.items() if "lora" in n} for rank in ranks
    ]


def require_alone(parts: list[dict[str, Any]], alone: dict[str, Any], problem: Problem, label: str) -> None:
    for name in ("output", "d_x", "d_routing.weights"):
        if name in alone:
            require_same(parts[0][name], alone[name], f"{name}, {label}")
    assert parts[0]["invalid_ids"].sum() == alone["invalid_ids"][0], label
    require_factors(parts, alone, problem.placement, label)


@every_way
def test_the_bits_of_one_device(way: ExchangeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    number = WAYS.index(way)
    kind, load, dtype, spec = CASES[number % 2]
    size = 2 + number % 2
    problem = draw_problem(
        1, placement_of(kind, 5, size), (6,) * size, 2, load, dtype, spec, extras=number % 2 > 0, sizes=sizes_of(way)
    )
    problem = dataclasses.replace(problem, shared=None)
    lora, ids = draw_lora(problem, shared=number == 1)
    alone = run_alone(problem, lora, ids)
    require_alone(run_group(problem, lora, ids, way), alone, problem, f"{kind}, {load}, {dtype}")
    if number == 2:
        columns = module.held_columns
        monkeypatch.setattr(module, "held_columns", lambda *arguments: columns(*arguments)[::-1])
        with pytest.raises(AssertionError, match="other columns"):
            require_alone(run_group(problem, lora, ids, way), alone, problem, "other columns")


@pytest.mark.parametrize(("experts", "tokens", "staged"), [(8, (4, 3), False), (7, (6,), True)])
def test_layers_split_their_experts(experts: int, tokens: tuple[int, ...], staged: bool) -> None:
    """Factors may be whole on every device; few tokens, and numbers that the axis does not divide. Also in stages."""
    spec, options = MoELayerSpec(16, 8, experts, 2, expert_scale=staged), LoRA(4, slots=3)
    parameters = layers.initialize(spec, jax.random.key(0))
    arrays = slots.initial_adapters(options, spec, jax.random.key(1), jnp.float32)
    arrays = slots.new_adapter(arrays, options, 1, jax.random.key(2))
    arrays |= {name: arrays[name] + 0.1 for name in ("b1", "b2")}
    x = jax.random.normal(jax.random.key(3), (*tokens, 16))
    ids = jnp.arange(x.size // 16, dtype=jnp.int32).reshape(tokens) % 4 - 1

    def loss(factors: Any, axis: Any) -> Any:
        adapters = layers.Adapters(LoRAFactors(**{**arrays, **factors}), ids)
        y, aux = layers.forward(parameters, x, spec, adapters=adapters, return_aux=True, expert_axis=axis)
        return jnp.square(y).sum(), (y, aux.invalid_ids)

    axis = ExpertAxis("ep", ExchangeSpec("all_gather") if experts == 7 else ExchangeSpec())
    factors, step = {name: arrays[name] for name in FACTORS}, jax.value_and_grad(loss, has_aux=True)
    with running_on("reference"):
        (_, wanted), gradients = jax.jit(functools.partial(step, axis=None))(factors)
        with jax.set_mesh(ep_mesh(4, AxisType.Explicit if experts == 8 else AxisType.Auto)):
            (_, found), split = jax.jit(functools.partial(step, axis=axis))(factors)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    for name, one in gradients.items():
        np.testing.assert_array_equal(np.asarray(split[name]), np.asarray(one), name)


def test_experts_split_over_a_tensor_axis() -> None:
    """Nearly one device: parts of low2 are rounded on their ranks. Whole factors get the sum of parts."""
    placement = placement_of("linear", 6, 2)
    problem = draw_problem(3, placement, (6,) * 4, 2, "random", "float32", PLAIN, sizes=(16, 8))
    (lora, ids), layouts = draw_lora(problem), ("in_out", "halves")
    alone = run_alone(problem, lora, ids)

    def stacked(bundle: Any, parts: Any, axis: int) -> tuple[Any, Any]:
        """Slices of both ranks, and their specs. axis: of experts."""
        whole, specs = {}, {}
        for name, one in named_fields(bundle):
            cut, by_expert = cut_of(name, *layouts), (None,) * axis + ("ep",)
            whole[name] = np.stack([getattr(part, name) for part in parts]) if cut else one
            specs[name] = P("tp", *by_expert) if cut else P(*by_expert) if name in FACTORS else P()
        return dataclasses.replace(bundle, **whole), dataclasses.replace(bundle, **specs)

    def own(bundle: Any) -> Any:
        cut = {name: one[0] for name, one in named_fields(bundle) if cut_of(name, *layouts)}
        return dataclasses.replace(bundle, **cut)

    experts, of_experts = stacked(problem.experts, split_experts(problem.experts, 2, *layouts), 0)
    factors, of_factors = stacked(lora, split_factors(lora, 2, layouts[1]), 1)

    def step(x: Any, experts: Any, routing: Any, d_output: Any, lora: Any, ids: Any) -> Any:
        def call(x: Any, experts: Any, routing: Any, lora: Any) -> Any:
            options: Any = {"placement": placement, "tensor_axis": "tp", "adapter_ids": ids}
            return parallel.moe(x, own(experts), routing, PLAIN, lora=own(lora), **options)

        return differentiated(call, lora, problem, (x, experts, routing, d_output))

    kinds, rows = (AxisType.Auto,) * 2, P(("ep", "tp"))
    mesh = jax.make_mesh((2, 2), ("ep", "tp"), axis_types=kinds, devices=jax.devices()[:4])
    gradients = {name: getattr(of_factors, name) for name in FACTORS}
    specs, out = (rows, of_experts, rows, rows, of_factors, rows), (rows, rows, rows, rows, gradients)
    with running_on("reference"):
        arrays = problem.x, experts, problem.routing, problem.d_output, factors, ids
        found = by_name(jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out))(*to_jax(arrays)))
    for name in ("b1", "a2"):
        found[f"d_lora.{name}"] = join_arrays([*found[f"d_lora.{name}"]], cut_of(name, *layouts))
    assert found.pop("invalid_ids").sum() == alone.pop("invalid_ids")[0]
    for name, wanted in alone.items():
        np.testing.assert_allclose(found[name], wanted, 0, 1e-5 * (1 + np.abs(wanted).max()), err_msg=name)
