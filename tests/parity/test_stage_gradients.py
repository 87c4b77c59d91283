"""Gradients through layers and through stage ops: torch's and JAX's bits are equal, and a plain loop's numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs both frameworks")
torch = pytest.importorskip("torch", reason="needs both frameworks")

import moe_jax
import moe_torch
from moe_core.errors import Unsupported
from moe_core.specs.matmul import Activation, MatmulSpec
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import RouterLogits, RouterWeights, TopK, map_arrays
from moe_torch.autograd import stages as torch_stages
from moe_torch.bridge.options import decode
from tests.support import jax as jax_support
from tests.support import torch as torch_support
from tests.support.frontends import FRONTENDS, Frontend, require_equal
from tests.support.frontends.small import draw, on_engines
from tests.support.training.jax import CASES, Problem, make, plans_in, run, split

T, D, F, E, RANK = 6, 16, 12, 4, 4
SILU = Activation("silu")
IDS = np.array([[0, 2], [2, 1], [2, -1], [0, 2], [-1, -1], [2, 0]], np.int32)
ORDERS = [pytest.param("slot", {}, id="slot"), pytest.param("row", {"alignment": 2}, id="row, aligned")]


def arrays(dtype: str) -> dict[str, np.ndarray]:
    """A layer with LoRA adapters on both products, by name; expert 3 has no rows."""
    random = np.random.default_rng(3)
    shapes = {
        "x": (T, D), "gate_up": (E, D, 2 * F), "gate_up_bias": (E, 2 * F), "gate_up_a": (E, D, RANK),
        "gate_up_b": (E, RANK, 2 * F), "down": (E, F, D), "down_a": (E, F, RANK), "down_b": (E, RANK, D),
        "shared": (T, D),
    }  # fmt: skip
    found = {name: draw(random, *shape, dtype=dtype) for name, shape in shapes.items()}
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


def both() -> list[Frontend]:
    return [kind(name) for name, kind in FRONTENDS.items()]


def loop(given: dict[str, Any], order: str) -> Any:
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


@on_engines
@pytest.mark.parametrize(("order", "options"), ORDERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frameworks_give_equal_bits(engine: str, order: str, options: dict[str, int], dtype: str) -> None:
    given, found = arrays(dtype), []
    if order == "row":
        del given["weights"]
    for frontend in both():
        with frontend.running_on(engine):
            leaves, ids = frontend.arrays((given, IDS))
            found.append(frontend.pull(lambda leaves: stages(frontend.ops, leaves, ids, order, options), leaves))  # noqa: B023
            if frontend.name == "torch" and dtype == "float32":
                wanted = frontend.pull(lambda leaves: loop(leaves, order), leaves)
                for name, gradient in wanted.items():
                    np.testing.assert_allclose(found[0][name], gradient, rtol=1e-4, atol=1e-5, err_msg=name)
    assert all(gradient.any() for gradient in found[0].values())
    require_equal(*found)


def test_activation_of_two_buffers() -> None:
    split, random, found = Activation("silu", gate_layout="separate"), np.random.default_rng(0), []
    given = {"gate": draw(random, 3, 8), "up": draw(random, 3, 8)}
    for frontend in both():
        with frontend.running_on("reference"):
            run = lambda leaves: frontend.ops.activation(leaves["gate"], split, up=leaves["up"])  # noqa: B023, E731
            found.append(frontend.pull(run, frontend.arrays(given)))
            if frontend.name == "torch":
                plain = lambda leaves: torch.nn.functional.silu(leaves["gate"]) * leaves["up"]  # noqa: E731
                wanted = frontend.pull(plain, frontend.arrays(given))
    require_equal(*found)
    for name, gradient in wanted.items():
        np.testing.assert_allclose(found[0][name], gradient, rtol=1e-5, atol=1e-6)


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
    made, inner = [], torch_stages.call

    def watch(operator: Any, arguments: tuple[Any, ...]) -> Any:
        if operator.name == "matmul_ogs_backward":
            _, _, wanted = decode(arguments[-1])
            made.append(wanted)
        return inner(operator, arguments)

    monkeypatch.setattr(torch_stages, "call", watch)
    given = {name: torch.tensor(array) for name, array in arrays("float32").items()}
    for name in TRAINED:
        given[name].requires_grad_()
    with torch_support.running_on("reference"):
        frozen_layer(moe_torch, given, torch.tensor(IDS)).sum().backward()
    assert sorted(made) == [("d_weight",), ("d_x",), ("d_x", "d_weight"), ("d_x", "d_weight"), ("d_x", "d_weight")]
    assert all((given[name].grad is not None) == (name in TRAINED) for name in given)


def test_programs(frontend: Frontend) -> None:
    with frontend.running_on("reference"):
        given, ids = frontend.arrays((arrays("float32"), IDS))
        adapters = {name: given[name] for name in TRAINED}

        def loss(adapters: dict[str, Any]) -> Any:
            return (frozen_layer(frontend.ops, given | adapters, ids) ** 2).sum()

        wanted = frontend.numpy(frontend.gradients(loss, adapters))
        for name, derive in frontend.programs(loss).items():
            require_equal(frontend.numpy(derive(adapters)), wanted, name)


def test_programs_are_batched_in_jax() -> None:
    with jax_support.running_on("reference"):
        given = jax_support.to_jax(arrays("float32"))
        adapters, ids = {name: given[name] for name in TRAINED}, jax.numpy.asarray(IDS)
        gradients = jax.grad(lambda adapters: jax.numpy.square(frozen_layer(moe_jax, given | adapters, ids)).sum())
        batched = jax.vmap(gradients)(jax.tree.map(lambda array: array[None], adapters))
        for name, wanted in gradients(adapters).items():
            assert np.array_equal(wanted, batched[name][0])


def test_data_parallel_in_jax() -> None:
    spread = jax.sharding.PartitionSpec
    with jax_support.running_on("reference"):
        given = jax_support.to_jax(arrays("float32"))
        adapters, x, ids = {name: given[name] for name in TRAINED}, given["x"], jax.numpy.asarray(IDS)

        def loss(adapters: dict[str, Any], x: Any, ids: Any) -> Any:
            return stages(moe_jax, given | adapters | {"x": x, "shared": x}, ids, "row", {}).sum()

        expected = jax.grad(loss)(adapters, x, ids)
        mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("data",))
        specs = (spread(), spread("data"), spread("data"))
        split = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=specs, out_specs=spread())
        found = jax.jit(split)(adapters, x, ids)
    for name in TRAINED:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_what_is_refused(frontend: Frontend) -> None:
    ops = frontend.ops
    separate = dataclasses.replace(SILU, gate_layout="separate")
    with frontend.running_on("reference"):
        x, weight, rows, gate, ids = frontend.arrays(
            (*(np.ones(shape, np.float32) for shape in ((3, 8), (8, 6), (3,), (3, 1))), np.zeros((3, 1), np.int32))
        )
        layout = ops.make_layout(ids, 1)

        def dense(x: Any = x, weight: Any = weight, activation: Activation | None = None, **more: Any) -> Any:
            operands = ops.MatmulOperands(x, weight, **more)
            return ops.matmul_ogs(operands, None, MatmulSpec("in_out", activation=activation)).sum()

        refused = [
            (r"fused activation has no gradient.*call the op `activation`", x, lambda x: dense(x, activation=SILU)),
            ("fused activation has no gradient", weight, lambda up: dense(activation=separate, up=up)),
            ("row_weight has no gradient without a layout", rows, lambda rows: dense(row_weight=rows)),
            ("reduce with a shared_gate has", x, lambda x: ops.reduce(x, layout, shared=x, shared_gate=gate).sum()),
        ]
        for message, leaf, function in refused:
            with pytest.raises(Unsupported, match=message):
                frontend.gradients(lambda leaves: function(leaves["leaf"]), {"leaf": leaf})  # noqa: B023


def test_second_derivatives_are_refused_in_torch() -> None:
    message = "matmul_ogs has no second derivative"
    x, weight = torch.ones(3, 8, requires_grad=True), torch.ones(8, 6)
    with torch_support.running_on("reference"):
        y = moe_torch.matmul_ogs(moe_torch.MatmulOperands(x, weight), None, MatmulSpec("in_out"))
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(Unsupported, match=message):
            slope.sum().backward()


#: bf16 and fp16 on the cases whose bundles differ most.
DTYPES = [*((case, "float32") for case in CASES), (CASES[1], "bfloat16"), (CASES[2], "float16"), (CASES[4], "bfloat16")]
on_cases = pytest.mark.parametrize(
    ("spec", "kind", "options", "dtype"),
    [pytest.param(*case[1:], dtype, id=f"{case[0]} {dtype}") for case, dtype in DTYPES],
)


def flowing(result: Any, kind: type) -> dict[str, np.ndarray]:
    """What flows into the outputs of a forward, by name: the same numbers for both frameworks, in float32."""
    names = {TopK: ("output",), RouterLogits: ("output", "weights"), RouterWeights: ("output", "weights", "logits")}
    random = np.random.default_rng(11)
    return {name: random.standard_normal(getattr(result, name).shape).astype(np.float32) for name in names[kind]}


def through_jax(problem: Problem, spec: MoESpec) -> dict[str, np.ndarray]:
    problem = jax_support.to_jax(problem)
    arrays, put = split(problem)
    names = flowing(run(problem, spec), type(problem.routing))

    def outputs(arrays: dict[str, Any]) -> dict[str, Any]:
        result = run(put(arrays), spec)
        return {name: getattr(result, name) for name in names}

    results, pull = jax.vjp(jax.jit(outputs), arrays)
    (found,) = pull({name: jax.numpy.asarray(one, results[name].dtype) for name, one in names.items()})
    return jax_support.to_numpy(found)


def through_torch(problem: Problem, spec: MoESpec, device: Any) -> dict[str, np.ndarray]:
    arrays, put = split(problem)
    leaves = {name: torch_support.to_torch(array, device).requires_grad_() for name, array in arrays.items()}

    def on_device(value: Any) -> Any:
        if isinstance(value, torch.Tensor) or value is None:
            return value
        return torch_support.to_torch(value, device) if isinstance(value, np.ndarray) else map_arrays(value, on_device)

    result = run(Problem(*map(on_device, put(leaves))), spec, moe_torch)
    outputs = flowing(result, type(problem.routing))
    gradients = [torch.tensor(one, device=device).to(getattr(result, name).dtype) for name, one in outputs.items()]
    found = torch.autograd.grad([getattr(result, name) for name in outputs], list(leaves.values()), gradients)
    return {name: torch_support.to_numpy(one) for name, one in zip(leaves, found, strict=True)}


@pytest.mark.parametrize("engine", jax_support.ENGINES)
@on_cases
def test_gradients_are_equal_bits(engine: str, spec: MoESpec, kind: type, options: dict[str, Any], dtype: str) -> None:
    problem = make(spec, kind, dtype, **options)
    with jax_support.running_on(engine):
        theirs = through_jax(problem, spec)
    with torch_support.running_on(engine) as device:
        ours = through_torch(problem, spec, device)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert gradient.dtype == theirs[name].dtype and gradient.any(), name
        assert gradient.tobytes() == theirs[name].tobytes(), f"{name}: {np.sum(gradient != theirs[name])} differ"
