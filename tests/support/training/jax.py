"""What the tests of JAX gradients share: whole problems, the same in a plain loop, the plans of programs."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import moe_jax
from moe_core.plan.registry import lookup
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, RouterLogits, RouterWeights, SharedExpert, TopK, named_arrays
from tests.support.jax import draw

T, K, E, D, F = 7, 2, 5, 24, 16


class Problem(NamedTuple):
    """The arguments of `moe` that hold arrays, as one pytree; x, experts, routing and shared are differentiated."""

    x: Any
    experts: ExpertWeights
    routing: Any
    shared: SharedExpert | None = None
    token_mask: Any = None
    expert_map: Any = None


def run(problem: Problem, spec: MoESpec, front_end: Any = moe_jax) -> moe_jax.MoEOutput:
    """The op."""
    x, experts, routing, shared, token_mask, expert_map = problem
    return front_end.moe(x, experts, routing, spec, token_mask=token_mask, expert_map=expert_map, shared=shared)


def make(spec: MoESpec, kind: type = RouterWeights, dtype: str = "float32", **options: Any) -> Problem:
    """A drawn problem. options: bias, correction_bias, shared (bool or "gate"), mask, expert_map, seed."""
    random = np.random.default_rng(options.get("seed", 0))
    activation, out_in = spec.activation, spec.weight_layout == "out_in"

    def matrix(*shape: int) -> np.ndarray:
        array = draw(random, *shape, dtype=dtype)
        return np.ascontiguousarray(array.swapaxes(-1, -2)) if out_in else array

    def vector(*shape: int) -> np.ndarray | None:
        return draw(random, *shape) * np.float32(0.3) if options.get("bias") else None

    separate = activation.gate_layout == "separate"
    width = F if separate or not activation.gated else 2 * F
    experts = ExpertWeights(
        matrix(E, D, width), matrix(E, F, D), matrix(E, D, F) if separate else None, vector(E, width),
        vector(E, F) if separate else None, vector(E, D),
    )  # fmt: skip
    num_global = E + 2 if options.get("expert_map") else E
    mask = np.arange(T) != 3 if options.get("mask") else None
    expert_map = np.array([0, 1, -1, 2, 3, -1, 4], np.int32) if options.get("expert_map") else None
    correction = draw(random, num_global) if options.get("correction_bias") else None
    x = draw(random, 1, T, D, dtype=dtype)[0]
    if kind is RouterWeights:
        gate = draw(random, D, num_global)
        gate = np.ascontiguousarray(gate.T) if spec.router_weight_layout == "out_in" else gate
        routing: Any = RouterWeights(gate, vector(num_global), correction)
    elif kind is RouterLogits:
        routing = RouterLogits(draw(random, 1, T, num_global)[0], correction)
    else:
        ids = random.integers(-1, num_global, (T, K)).astype(np.int32)
        routing = TopK(ids, random.random((T, K), np.float32))
    shared = None
    if options.get("shared"):
        gated = options["shared"] == "gate"
        shared = SharedExpert(
            matrix(D, width), matrix(F, D), matrix(D, F) if separate else None, matrix(D, 1) if gated else None
        )
    return Problem(x, experts, routing, shared, mask, expert_map)


def _activated(pre: jax.Array, up: jax.Array | None, activation: Activation) -> jax.Array:
    width = pre.shape[-1] // 2
    gate = pre
    if activation.gate_layout == "halves":
        gate, up = pre[:width], pre[width:]
    elif activation.gate_layout == "interleaved":
        gate, up = pre[0::2], pre[1::2]
    if activation.limit is not None:
        assert up is not None
        gate, up = jnp.minimum(gate, activation.limit), jnp.clip(up, -activation.limit, activation.limit)
    if activation.name == "swiglu_oai":
        return gate * jax.nn.sigmoid(activation.alpha * gate) * (up + 1)
    acts = {"silu": jax.nn.silu, "gelu": lambda x: jax.nn.gelu(x, approximate=False), "relu2": _relu2}
    value = acts[activation.name](gate)
    return value if up is None else value * up


def _relu2(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


def _expert(x: jax.Array, bundle: Any, expert: int | jax.Array | None, spec: MoESpec) -> jax.Array:
    """One row through one expert; None: the shared one."""

    def of(name: str) -> Any:
        array = getattr(bundle, name, None)
        return array if array is None or expert is None else array[expert]

    def product(x: jax.Array, matrix: str, bias: str) -> jax.Array | None:
        weight, offset = of(matrix), of(bias)
        if weight is None:
            return None
        result = x @ (weight.T if spec.weight_layout == "out_in" else weight)
        return result if offset is None else result + offset

    pre = product(x, "gate_up", "gate_up_bias")
    assert pre is not None
    result = product(_activated(pre, product(x, "up", "up_bias"), spec.activation), "down", "down_bias")
    assert result is not None
    return result


def _weights(logits: jax.Array, chosen: jax.Array, router: RouterSpec) -> jax.Array:
    """The weights of one token's experts."""
    if router.order == "topk_then_softmax":
        return router.scale * jax.nn.softmax(logits[chosen])
    scores = {
        "softmax": jax.nn.softmax,
        "sigmoid": jax.nn.sigmoid,
        "sqrt_softplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
    }[router.scoring](logits)[chosen]
    return router.scale * (scores / scores.sum() if router.renormalize else scores)


def compile_quickly(function: Any) -> Any:
    """jax.jit for a long loop that runs once: the time goes into compiling it, which optimisations more than double."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(function, compiler_options=options)


# Without it XLA multiplies float32 in TF32 on a GPU, here and in the gradient.
@jax.default_matmul_precision("highest")
def plain(problem: Problem, ids: Any, spec: MoESpec) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """(output, weights, logits) in a loop over tokens and slots, for the ids that the op chose.

    An absent slot is an expert's product that is not added.
    """
    x, experts, routing, shared, *maps = problem
    mask, expert_map = (None if one is None else np.asarray(one) for one in maps)
    logits = None
    if isinstance(routing, RouterLogits):
        logits = routing.logits
    elif isinstance(routing, RouterWeights):
        logits = x @ (routing.weight.T if spec.router_weight_layout == "out_in" else routing.weight)
        logits = logits if routing.bias is None else logits + routing.bias
        if mask is not None:  # What flows into the logits of a masked token goes no further.
            logits = jnp.where(mask[:, None], logits, jax.lax.stop_gradient(logits))
    local = ids if expert_map is None else jnp.where(ids < 0, -1, jnp.asarray(expert_map)[jnp.maximum(ids, 0)])

    def of_one_token(arguments: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        x, given, chosen, local, is_saved = arguments
        weights = given
        if not isinstance(routing, TopK):
            assert spec.router is not None
            weights = jnp.where(is_saved, _weights(given, chosen, spec.router), 0)
        row = jnp.zeros(x.shape)
        for slot in range(ids.shape[1]):
            if spec.apply_router_weight_on_input:
                part = _expert(x * weights[slot], experts, local[slot], spec)
            else:
                part = weights[slot] * _expert(x, experts, local[slot], spec)
            row = row + jnp.where(is_saved & (local[slot] >= 0), part, 0)
        if shared is not None:
            more = _expert(x, shared, None, spec.of_shared())
            if shared.gate is not None:
                gate = shared.gate.T if spec.weight_layout == "out_in" else shared.gate
                more = more * jax.nn.sigmoid(x @ gate)
            row = row + more
        return row, weights

    given = routing.weights if isinstance(routing, TopK) else logits
    kept = np.ones(len(ids), bool) if mask is None else mask
    rows, weights = jax.lax.map(of_one_token, (x, given, ids, local, kept))
    return rows, None if isinstance(routing, TopK) else weights, logits


def is_float(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def split(problem: Problem) -> tuple[dict[str, Any], Any]:
    """The floating arrays that have gradients, by name, and a function that puts others in their place."""
    names = {"x": problem.x}
    for prefix, bundle in (("experts.", problem.experts), ("routing.", problem.routing), ("shared.", problem.shared)):
        if bundle is not None:
            names |= dict(named_arrays(bundle, prefix))
    names = {name: array for name, array in names.items() if is_float(array) and "correction" not in name}

    def put(arrays: dict[str, Any]) -> Problem:
        result = problem._replace(x=arrays.get("x", problem.x))
        for field in ("experts", "routing", "shared"):
            own = {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith(field + ".")}
            if own:
                bundle = getattr(result, field)
                result = result._replace(**{field: type(bundle)(**(dict(named_arrays(bundle)) | own))})
        return result

    return names, put


def plans_in(lowered: Any) -> list[LaunchPlan]:
    """The plans of the custom calls of a lowered program, in order."""
    keys = re.findall(r'backend_config = \{plan_0 = "(.+?)", plan_1 = "(.+?)", plan_2 = "(.+?)"\}', lowered.as_text())
    return [lookup("".join(parts)) for parts in keys]


def gradients_in(plan: LaunchPlan) -> tuple[str, ...]:
    """The names of what a backward computes."""
    assert plan.name == "moe_backward"
    return tuple(buffer.name for buffer in plan.outputs)


SILU = Activation("silu")


#: (name, spec, kind of routing, options of `make`): every argument and every kind of array that has a gradient.
CASES: list[tuple[str, MoESpec, type, dict[str, Any]]] = [
    ("softmax", MoESpec(SILU, RouterSpec(K)), RouterWeights, {}),
    ("gpt-oss",
        MoESpec(Activation("swiglu_oai", gate_layout="interleaved"), RouterSpec(K, order="topk_then_softmax"),
        weight_layout="out_in", router_weight_layout="out_in"), RouterWeights, {"bias": True, "mask": True}),
    ("deepseek", MoESpec(Activation("silu", gate_layout="separate"), RouterSpec(K, scoring="sigmoid", renormalize=True,
        scale=2.5), shared_activation=Activation("silu", gate_layout="separate", limit=0.5)), RouterWeights,
        {"correction_bias": True, "shared": "gate", "bias": True}),
    ("ungated logits", MoESpec(Activation("relu2", gated=False), RouterSpec(K, scoring="sqrt_softplus")), RouterLogits,
        {"shared": True, "mask": True}),
    ("map", MoESpec(SILU, RouterSpec(K, renormalize=True)), RouterLogits, {"expert_map": True, "bias": True}),
    ("decided", MoESpec(Activation("gelu")), TopK, {"expert_map": True, "mask": True}),
    ("on input", MoESpec(SILU, RouterSpec(1), apply_router_weight_on_input=True), RouterWeights, {"bias": True}),
]  # fmt: skip


SOFTMAX = CASES[0][1]


def drawn(shape: tuple[int, ...], seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def loss_of(results: Any, problem: Problem) -> jax.Array:
    """A scalar into which output, weights and logits flow, where the routing makes these."""
    output, weights, logits = results
    total = (output.astype(jnp.float32) * drawn(output.shape, 1)).sum()
    if not isinstance(problem.routing, TopK):
        total += (weights * drawn(weights.shape, 2)).sum()
    if isinstance(problem.routing, RouterWeights):
        total += (logits * drawn(logits.shape, 3)).sum()
    return total


def op_loss(problem: Problem, spec: MoESpec) -> jax.Array:
    result = run(problem, spec)
    return loss_of((result.output, result.weights, result.logits), problem)


def require_equal(first: Any, second: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), first, second)
