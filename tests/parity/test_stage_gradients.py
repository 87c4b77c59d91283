"""Gradients through the stage ops: torch's and JAX's are equal bits, and those of a plain loop in torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs both frameworks")
torch = pytest.importorskip("torch", reason="needs both frameworks")

import moe_jax
import moe_torch
from moe_core.errors import Unsupported
from moe_core.specs.matmul import Activation, MatmulSpec
from moe_torch.bridge.options import decode
from tests.support import jax as jax_support
from tests.support import torch as torch_support
from tests.support.training.jax import plans_in

T, D, F, E, RANK = 6, 16, 12, 4, 4
SILU = Activation("silu")
IDS = np.int32([[0, 2], [2, 1], [2, -1], [0, 2], [-1, -1], [2, 0]])
ORDERS = [pytest.param("slot", {}, id="slot"), pytest.param("row", {"alignment": 2}, id="row, aligned")]


def arrays(dtype: str) -> dict[str, np.ndarray]:
    """A layer with LoRA adapters on both products, by name; expert 3 has no rows."""
    random = np.random.default_rng(3)
    shapes = {
        "x": (T, D),
        "gate_up": (E, D, 2 * F),
        "gate_up_bias": (E, 2 * F),
        "gate_up_a": (E, D, RANK),
        "gate_up_b": (E, RANK, 2 * F),
        "down": (E, F, D),
        "down_a": (E, F, RANK),
        "down_b": (E, RANK, D),
        "shared": (T, D),
    }
    found = {name: jax_support.draw(random, *shape, dtype=dtype) for name, shape in shapes.items()}
    return found | {"weights": random.random(IDS.shape, np.float32)}


def stages(ops: Any, given: dict[str, Any], ids: Any, order: str, options: dict[str, int]) -> Any:
    """The layer of either framework, stage by stage. With order `row` the slots' weights are left out."""
    layout = ops.make_layout(ids, E, **options)
    row_weight = given["weights"] if order == "slot" else None

    def product(x: Any, weight: Any, gather: str = "row", scatter: str = "row", **more: Any) -> Any:
        return ops.matmul_ogs(ops.MatmulOperands(x, weight, **more), layout, MatmulSpec("in_out", gather, scatter))

    low = product(given["x"], given["gate_up_a"], "token")
    pre = product(given["x"], given["gate_up"], "token", bias=given["gate_up_bias"]) + 0.5 * product(
        low, given["gate_up_b"]
    )
    hidden = ops.activation(pre, SILU)
    down = product(hidden, given["down"], "row", order, row_weight=row_weight)
    y = down + 0.5 * product(product(hidden, given["down_a"]), given["down_b"], "row", order, row_weight=row_weight)
    return ops.reduce(y, layout, order=order, shared=given["shared"])


def loop(given: dict[str, torch.Tensor], order: str) -> torch.Tensor:
    """The same, one token and expert after the other, in torch's own operations."""
    rows = []
    for token, ids in enumerate(IDS):
        row = given["shared"][token]
        for place, expert in enumerate(ids):
            if expert < 0:
                continue
            matrix = given["gate_up"][expert] + 0.5 * given["gate_up_a"][expert] @ given["gate_up_b"][expert]
            gate, up = (given["x"][token] @ matrix + given["gate_up_bias"][expert]).chunk(2)
            matrix = given["down"][expert] + 0.5 * given["down_a"][expert] @ given["down_b"][expert]
            y = (torch.nn.functional.silu(gate) * up) @ matrix
            row = row + (y * given["weights"][token, place] if order == "slot" else y)
        rows.append(row)
    return torch.stack(rows)


def asked(given: dict[str, Any], order: str) -> list[str]:
    return [name for name in given if order == "slot" or name != "weights"]


def upstream(dtype: str) -> np.ndarray:
    return jax_support.draw(np.random.default_rng(4), T, D, dtype=dtype)


def through_torch(program: Callable[..., Any], device: Any, dtype: str, order: str) -> dict[str, np.ndarray]:
    leaves = {name: torch_support.to_torch(array, device) for name, array in arrays(dtype).items()}
    names = asked(leaves, order)
    for name in names:
        leaves[name].requires_grad_()
    y = program(leaves)
    found = torch.autograd.grad(y, [leaves[name] for name in names], torch_support.to_torch(upstream(dtype), device))
    return {name: torch_support.to_numpy(one) for name, one in zip(names, found, strict=True)}


def through_jax(dtype: str, order: str, options: dict[str, int]) -> dict[str, np.ndarray]:
    given = jax_support.to_jax(arrays(dtype))
    trained = {name: given[name] for name in asked(given, order)}

    @jax.jit
    def gradients(trained: dict[str, Any], flowing: jax.Array) -> dict[str, Any]:
        run = lambda trained: stages(moe_jax, given | trained, jax.numpy.asarray(IDS), order, options)  # noqa: E731
        return jax.vjp(run, trained)[1](flowing)[0]

    return jax_support.to_numpy(gradients(trained, jax.numpy.asarray(upstream(dtype))))


@pytest.mark.parametrize("engine", jax_support.ENGINES)
@pytest.mark.parametrize(("order", "options"), ORDERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frameworks_give_equal_bits(engine: str, order: str, options: dict[str, int], dtype: str) -> None:
    with jax_support.running_on(engine):
        theirs = through_jax(dtype, order, options)
    with torch_support.running_on(engine) as device:
        ids = torch.tensor(IDS, device=device)
        ours = through_torch(lambda given: stages(moe_torch, given, ids, order, options), device, dtype, order)
        if dtype == "float32":
            wanted = through_torch(lambda given: loop(given, order), device, dtype, order)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert gradient.any() and gradient.dtype == theirs[name].dtype, name
        assert gradient.tobytes() == theirs[name].tobytes(), f"{name}: {np.sum(gradient != theirs[name])} differ"
        if dtype == "float32":
            np.testing.assert_allclose(gradient, wanted[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_activation_of_two_buffers() -> None:
    split = Activation("silu", gate_layout="separate")
    gate, up = (jax_support.draw(np.random.default_rng(seed), 3, 8) for seed in (0, 1))
    with jax_support.running_on("reference"):
        run = lambda gate, up: moe_jax.activation(gate, split, up=up).sum()  # noqa: E731
        theirs = jax.grad(run, argnums=(0, 1))(jax.numpy.asarray(gate), jax.numpy.asarray(up))
    leaves = [torch.tensor(array, requires_grad=True) for array in (gate, up)]
    with torch_support.running_on("reference"):
        ours = torch.autograd.grad(moe_torch.activation(leaves[0], split, up=leaves[1]).sum(), leaves)
    wanted = torch.autograd.grad((torch.nn.functional.silu(leaves[0]) * leaves[1]).sum(), leaves)
    for our, their, want in zip(ours, theirs, wanted, strict=True):
        assert np.array_equal(our.numpy(), np.asarray(their))
        torch.testing.assert_close(our, want)


def frozen_layer(ops: Any, given: dict[str, Any], ids: Any) -> Any:
    """A layer whose base weights nothing is asked for."""
    return stages(ops, given, ids, "slot", {})


TRAINED = ("gate_up_a", "gate_up_b", "down_a", "down_b")


def test_frozen_weights_cost_nothing_in_jax() -> None:
    with jax_support.running_on("reference"):
        given = jax_support.to_jax(arrays("float32"))
        adapters = {name: given[name] for name in TRAINED}
        step = jax.grad(lambda adapters: frozen_layer(moe_jax, given | adapters, jax.numpy.asarray(IDS)).sum())
        plans = plans_in(jax.jit(step).lower(adapters))
    made = [tuple(one.name for one in plan.outputs) for plan in plans if plan.name == "matmul_ogs_backward"]
    # Of four adapters d_weight, and no d_weight but theirs; nothing flows into x.
    assert sorted(made) == [("d_weight",), ("d_x",), ("d_x", "d_weight"), ("d_x", "d_weight"), ("d_x", "d_weight")]


def test_frozen_weights_cost_nothing_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    made, inner = [], moe_torch.autograd.stages.call

    def watch(operator: Any, *arguments: Any) -> Any:
        if operator.name == "matmul_ogs_backward":
            _, _, wanted = decode(arguments[-1])
            made.append(wanted)
        return inner(operator, *arguments)

    monkeypatch.setattr(moe_torch.autograd.stages, "call", watch)
    given = {name: torch.tensor(array) for name, array in arrays("float32").items()}
    for name in TRAINED:
        given[name].requires_grad_()
    with torch_support.running_on("reference"):
        frozen_layer(moe_torch, given, torch.tensor(IDS)).sum().backward()
    assert sorted(made) == [("d_weight",), ("d_x",), ("d_x", "d_weight"), ("d_x", "d_weight"), ("d_x", "d_weight")]
    assert all((given[name].grad is not None) == (name in TRAINED) for name in given)


def test_programs_of_torch() -> None:
    given, ids = {name: torch.tensor(array) for name, array in arrays("float32").items()}, torch.tensor(IDS)

    def loss(adapters: dict[str, torch.Tensor]) -> torch.Tensor:
        return frozen_layer(moe_torch, given | adapters, ids).square().sum()

    def gradients(program: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        adapters = {name: given[name].clone().requires_grad_() for name in TRAINED}
        return torch.autograd.grad(program(adapters), list(adapters.values()))

    with torch_support.running_on("reference"):
        expected = gradients(loss)
        compiled = gradients(torch.compile(loss, fullgraph=True, backend="aot_eager"))
        functional = torch.func.grad(loss)({name: given[name] for name in TRAINED})
    torch._dynamo.reset()
    for one, other, name in zip(expected, compiled, TRAINED, strict=True):
        assert torch.equal(one, other) and torch.equal(one, functional[name])


def test_programs_of_jax() -> None:
    with jax_support.running_on("reference"):
        given = jax_support.to_jax(arrays("float32"))
        adapters, ids = {name: given[name] for name in TRAINED}, jax.numpy.asarray(IDS)

        def loss(adapters: dict[str, Any]) -> jax.Array:
            return jax.numpy.square(frozen_layer(moe_jax, given | adapters, ids)).sum()

        expected = jax.grad(loss)(adapters)
        found = jax.jit(jax.grad(jax.checkpoint(loss)))(adapters)
        batched = jax.vmap(jax.grad(loss))(jax.tree.map(lambda array: array[None], adapters))
    for name in TRAINED:
        assert np.array_equal(expected[name], found[name]) and np.array_equal(expected[name], batched[name][0])


def test_data_parallel_in_jax() -> None:
    spread = jax.sharding.PartitionSpec
    with jax_support.running_on("reference"):
        given = jax_support.to_jax(arrays("float32"))
        adapters, x, ids = {name: given[name] for name in TRAINED}, given["x"], jax.numpy.asarray(IDS)

        def loss(adapters: dict[str, Any], x: jax.Array, ids: jax.Array) -> jax.Array:
            return stages(moe_jax, given | adapters | {"x": x, "shared": x}, ids, "row", {}).sum()

        expected = jax.grad(loss)(adapters, x, ids)
        mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("data",))
        specs = (spread(), spread("data"), spread("data"))
        split = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=specs, out_specs=spread())
        found = jax.jit(split)(adapters, x, ids)
    for name in TRAINED:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_what_torch_refuses() -> None:
    x, weight = torch.ones(3, 8, requires_grad=True), torch.ones(8, 6)
    dense = moe_torch.MatmulOperands(x, weight)
    with torch_support.running_on("reference"):
        with pytest.raises(Unsupported, match=r"fused activation has no gradient.*call the op `activation`"):
            moe_torch.matmul_ogs(dense, None, MatmulSpec("in_out", activation=SILU))
        up = torch.ones(8, 6, requires_grad=True)
        with pytest.raises(Unsupported, match="fused activation has no gradient"):
            spec = MatmulSpec("in_out", activation=dataclasses.replace(SILU, gate_layout="separate"))
            moe_torch.matmul_ogs(moe_torch.MatmulOperands(x.detach(), weight, up), None, spec)
        weighted = moe_torch.MatmulOperands(x.detach(), weight, row_weight=torch.ones(3, requires_grad=True))
        with pytest.raises(Unsupported, match="row_weight has no gradient without a layout"):
            moe_torch.matmul_ogs(weighted, None, MatmulSpec("in_out"))
        layout = moe_torch.make_layout(torch.zeros(3, 1, dtype=torch.int32), 1)
        with pytest.raises(Unsupported, match="reduce with a shared_gate has none"):
            moe_torch.reduce(x, layout, shared=x, shared_gate=torch.ones(3, 1))
        y = moe_torch.matmul_ogs(dense, None, MatmulSpec("in_out"))
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(Unsupported, match="matmul_ogs has no second derivative"):
            slope.sum().backward()


def test_what_jax_refuses() -> None:
    x, weight = jax.numpy.ones((3, 8)), jax.numpy.ones((8, 6))

    def dense(x: Any, activation: Activation | None = None, **more: Any) -> jax.Array:
        operands = moe_jax.MatmulOperands(x, weight, **more)
        return moe_jax.matmul_ogs(operands, None, MatmulSpec("in_out", activation=activation)).sum()

    with jax_support.running_on("reference"):
        with pytest.raises(Unsupported, match=r"fused activation has no gradient.*call the op `activation`"):
            jax.grad(lambda x: dense(x, SILU))(x)
        with pytest.raises(Unsupported, match="row_weight has no gradient without a layout"):
            jax.grad(lambda weights: dense(x, row_weight=weights))(jax.numpy.ones(3))
        layout = moe_jax.make_layout(jax.numpy.zeros((3, 1), "int32"), 1)
        gate = jax.numpy.ones((3, 1))
        with pytest.raises(Unsupported, match="reduce with a shared_gate has no derivative"):
            jax.grad(lambda x: moe_jax.reduce(x, layout, shared=x, shared_gate=gate).sum())(x)
        with pytest.raises(Unsupported, match="matmul_ogs has no second derivative"):
            jax.grad(lambda x: jax.grad(lambda x: dense(x) ** 2)(x).sum())(x)
