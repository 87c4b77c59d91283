"""Training through frozen quantised experts in torch: gradients, programs, layers, and the bits of JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")


import moe_torch
from moe_core.formats import QuantizedTensor, format_named
from moe_core.ops.quantize.reference import dequantize, quantize
from moe_core.parity.tolerance import assert_close
from moe_core.specs import Activation, MatmulSpec, MoESpec, RouterSpec
from moe_core.specs.operands import OutputGradients, map_arrays, named_fields
from moe_torch import MatmulOperands
from moe_torch.bridge.operator import Operator
from moe_torch.layers.weights import from_numpy
from moe_torch.operators.stages import MATMUL_OGS_QUANTIZED_BACKWARD
from moe_torch.operators.table import QUANTIZED_BACKWARD, QUANTIZED_BACKWARD_INTO, QUANTIZED_TRAINING
from tests.support.strategies import hard_routing
from tests.support.torch import REAL_KERNELS, running_on, to_numpy, to_torch
from tests.support.training.loop import Loop, Problem, draw_problem, routed
from tests.support.training.tolerances import FP32
from tests.support.training.torch import Seen, Step

D, F = 64, 32
MXFP4, INT4, FP8 = (format_named(name) for name in ("mxfp4", "int4_g32_zp", "fp8_block"))
RENORMALIZED = RouterSpec(2, "sigmoid", renormalize=True)
#: Activation, formats of gate and up and of down (None: plain and trained), weight layout, routing.
CASES = {
    "routed": (Activation("swiglu_oai", gate_layout="interleaved"), (MXFP4, MXFP4), "out_in", "weights"),
    "given ids": (Activation("silu", gate_layout="separate"), (INT4, INT4), "in_out", "ids"),
    "given logits": (Activation("gelu"), (FP8, FP8), "out_in", "logits"),
    "plain down": (Activation("relu2", gated=False), (MXFP4, None), "out_in", "ids"),
}
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


class Frozen(NamedTuple):
    """A problem with dequantised experts, and the quantised matrices that these were, by name."""

    problem: Problem
    matrices: dict[str, QuantizedTensor]


def frozen(name: str, dtype: str = "float32", *, poison: bool = True, **options: Any) -> Frozen:
    """A case. Where ids are given some are -1, and (poison) what nobody may read is NaN, unused experts' scales too."""
    activation, (gate_up, down), layout, routing = CASES[name]
    spec = MoESpec(activation, weight_layout=layout, router_weight_layout=layout, **options)
    given = routing == "ids"
    case = hard_routing("missing_ids" if given else "expert_map")
    problem = draw_problem(case, spec, d_model=D, d_ff=F, dtype=dtype, with_shared=not given, poison=given and poison)
    if not given:
        num_experts = case.num_experts if case.expert_map is None else len(case.expert_map)
        problem = routed(problem, RENORMALIZED, num_experts, from_logits=routing == "logits")
    formats = {"gate_up": gate_up, "up": gate_up, "down": down}
    with np.errstate(invalid="ignore"):
        made = {
            field: quantize(np.asarray(array, np.float32), format, layout=layout)
            for field, array in named_fields(problem.experts)
            if (format := formats.get(field)) is not None
        }
    plain = {field: dequantize(tensor, dtype) for field, tensor in made.items()}
    problem = problem.replace(experts=dataclasses.replace(problem.experts, **plain))
    return Frozen(problem, {f"experts.{field}": tensor for field, tensor in made.items()})


def on(device: Any, tensor: QuantizedTensor) -> QuantizedTensor:
    """The same in torch, in memory of its own."""
    return map_arrays(tensor, lambda array: from_numpy(array).clone().to(device))


def quantized_step(given: Frozen, device: Any = "cpu") -> Step:
    """The problem as a training step through the quantised matrices."""
    step = Step(given.problem, device, frozen=tuple(given.matrices))
    step.tensors |= {name: on(device, tensor) for name, tensor in given.matrices.items()}
    return step


def check(name: str, engine: str) -> None:
    """Every gradient against autograd of a loop over tokens with dequantised weights."""
    given = frozen(name)
    with running_on(engine) as device:
        step = quantized_step(given, device)
        found, ids = step.gradients(), to_numpy(step.forward().ids)
    wanted = Loop(given.problem, ids).autograd(torch.float64)
    assert wanted.keys() - found.keys() == given.matrices.keys()
    for key, gradient in found.items():
        assert gradient.dtype == step.leaves[key].dtype and gradient.any(), key
        rms = np.sqrt(np.square(wanted[key]).mean())
        assert_close(to_numpy(gradient), wanted[key], FP32, f"d_{key}", scale=rms)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_a_plain_loop(name: str) -> None:
    check(name, "reference")


def test_gradients_of_real_kernels() -> None:
    check("given ids", REAL_KERNELS)


def of_outputs(problem: Problem) -> Problem:
    """Without the losses, which each framework makes of the logits by its own operations."""
    given = problem.gradients
    return problem.replace(gradients=OutputGradients(given.output, given.weights, given.logits))


@pytest.mark.parametrize(
    ("name", "dtype", "engine"), [("routed", "bfloat16", REAL_KERNELS), ("plain down", "float32", "reference")]
)
def test_torch_and_jax_give_equal_bits(name: str, dtype: str, engine: str) -> None:
    jax = pytest.importorskip("jax", reason="needs both frameworks")
    import moe_jax
    from tests.support import jax as jax_support

    given = frozen(name, dtype)
    given = given._replace(problem=of_outputs(given.problem))
    with running_on(engine) as device:
        ours = {key: to_numpy(value) for key, value in quantized_step(given, device).gradients().items()}
    with jax_support.running_on(engine):
        leaves = {key: array for key, array in given.problem.arrays().items() if key not in given.matrices}
        leaves, matrices = (jax.tree.map(jax.numpy.asarray, tree) for tree in (leaves, given.matrices))
        upstream = dict(named_fields(given.problem.gradients))

        def outputs(leaves: dict[str, Any]) -> dict[str, Any]:
            result = called(moe_jax, given.problem, leaves | matrices)
            return {key: getattr(result, key) for key in upstream}

        results, pull = jax.vjp(jax.jit(outputs), leaves)
        (theirs,) = pull({key: jax.numpy.asarray(array, results[key].dtype) for key, array in upstream.items()})
    assert ours.keys() == theirs.keys()
    for key, gradient in ours.items():
        other = np.asarray(theirs[key])
        assert gradient.any() and gradient.tobytes() == other.tobytes(), f"{key}: {np.sum(gradient != other)} differ"


def called(ops: Any, problem: Problem, arrays: dict[str, Any]) -> Any:
    """The op of a front-end with these arrays, by name, in the place of the problem's."""

    def bundle(name: str, value: Any) -> Any:
        own = {key.partition(".")[2]: array for key, array in arrays.items() if key.startswith(f"{name}.")}
        return None if value is None else dataclasses.replace(value, **own)

    options = {"token_mask": problem.token_mask, "expert_map": problem.expert_map}
    experts, routing = bundle("experts", problem.experts), bundle("routing", problem.routing)
    return ops.moe(arrays["x"], experts, routing, problem.spec, **options, shared=bundle("shared", problem.shared))


def product(weight: Any, leaves: dict[str, Any], ids: Any) -> Any:
    """Rows of tokens times the weight of each expert, by slot: weighted, with a bias."""
    layout = moe_torch.make_layout(ids, weight.shape[0])
    operands = MatmulOperands(leaves["x"], weight, bias=leaves["bias"], row_weight=leaves["row_weight"])
    return moe_torch.matmul_ogs(operands, layout, MatmulSpec("out_in", "token", "slot"))


def product_problem(device: Any) -> tuple[QuantizedTensor, dict[str, Any], Any]:
    random, case = np.random.default_rng(3), hard_routing("missing_ids")
    shapes = {"x": (case.num_tokens, D), "bias": (case.num_experts, 24), "row_weight": case.ids.shape}
    leaves = {
        name: torch.tensor(random.standard_normal(shape, np.float32), device=device).requires_grad_()
        for name, shape in shapes.items()
    }
    weight = random.standard_normal((case.num_experts, 24, D), np.float32)
    return on(device, quantize(weight, MXFP4)), leaves, to_torch(case.ids, device)


@pytest.mark.parametrize("engine", ["reference", REAL_KERNELS])
def test_products_have_the_gradients_of_plain_ones(engine: str) -> None:
    """Of x, bias and row weight, with rows of NaN that nothing reads."""
    with running_on(engine) as device:
        weight, leaves, ids = product_problem(device)
        with torch.no_grad():
            leaves["x"][(ids < 0).all(1)] = torch.nan
        found, wanted = (
            torch.autograd.grad(product(one, leaves, ids).square().sum(), list(leaves.values()))
            for one in (weight, moe_torch.dequantize(weight))
        )
        for name, one, other in zip(leaves, found, wanted, strict=True):
            assert one.any(), name
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=name)
        (slope,) = torch.autograd.grad(product(weight, leaves, ids).square().sum(), leaves["x"], create_graph=True)
        with pytest.raises(moe_torch.Unsupported, match="matmul_ogs has no second derivative"):
            slope.sum().backward()


def samples() -> Iterator[tuple[Operator, tuple[Any, ...]]]:
    """Operators of training with quantised weights, and calls of them. Not of fp8, which torch cannot compare, nor of
    NaN."""
    steps = [
        quantized_step(frozen(name, poison=False, main_grad=name == "plain down")) for name in ("routed", "plain down")
    ]
    down = steps[-1].leaves["experts.down"]
    down.main_grad = torch.zeros_like(down)
    with Seen() as seen:
        for step in steps:
            step.value().backward(retain_graph=step is steps[0])
        weight, leaves, ids = product_problem("cpu")
        product(weight, leaves, ids).sum().backward()
    operators: list[Operator] = [MATMUL_OGS_QUANTIZED_BACKWARD]
    for table in (QUANTIZED_TRAINING, QUANTIZED_BACKWARD, QUANTIZED_BACKWARD_INTO):
        operators += table.values()
    for operator in operators:
        names = [argument.name for argument in operator.overload._schema.arguments]
        for packet, arguments, _ in seen.calls:
            if packet == operator.name.partition(".")[0] and list(arguments) == names:
                tensors = [value.detach() if isinstance(value, torch.Tensor) else value for value in arguments.values()]
                yield operator, tuple(tensors)


def test_opcheck() -> None:
    with running_on("reference"):
        calls = dict(samples())
        assert {operator.name.partition(".")[0] for operator in calls} == {
            "matmul_ogs_quantized_backward",
            "moe_quantized_training",
            "moe_quantized_backward",
            "moe_quantized_backward_into",
        }
        for operator, arguments in calls.items():
            # What adds to tensors in place is for eager code, and for the others one kind of routing is enough.
            utilities = (
                UTILITIES if operator.name.endswith(("router_weights", "ogs_quantized_backward")) else UTILITIES[:3]
            )
            results = torch.library.opcheck(operator.overload, arguments, test_utils=utilities)
            assert set(results.values()) == {"SUCCESS"}, f"{operator.name}: {results}"
