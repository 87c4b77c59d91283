"""The composed op with its gradient: one custom call forward, one backward.

Undifferentiated it is the call of `plan_moe` and nothing else. Differentiated in reverse, the forward is the plan that
also keeps what a backward reads (`plan_moe(keep=True)`), and the backward one call of `plan_moe_backward`. JAX says for
which arguments a gradient is asked, and into which results one flows: what nobody asks for is neither planned nor kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from moe_core.dtypes import numpy_dtype
from moe_core.errors import Unsupported
from moe_core.expert_checks import why_no_moe_gradient
from moe_core.moe import plan_moe
from moe_core.moe_backward import gradient_names, plan_moe_backward, plan_training
from moe_core.operands import (
    ExpertWeights,
    MoEOperands,
    MoEOutput,
    OutputGradients,
    RouterLogits,
    RouterWeights,
    Routing,
    SharedExpert,
    TopK,
)
from moe_core.plan import LaunchPlan
from moe_core.routing import plan_router
from moe_core.specs import MoESpec
from moe_core.target import Target
from moe_jax import platforms
from moe_jax.calls import OpCall, Request, require_type, undifferentiable
from moe_jax.differentiation import Kept, varying_alike

#: Names under which the policies of `jax.checkpoint` find what a backward reads: the pre-activations of the experts
#: (large), and the routing with its layout (small). With both saved, a backward runs no forward again; where one is
#: missing, it runs the whole forward again.
KEPT_NAMES = ("moebius_pre_activation", "moebius_routing")

#: A trace's ids and weights, as the experts' plan takes them and as a call names them beside its own routing.
_REPLAYED = {"routing.ids": "replayed.ids", "routing.weights": "replayed.weights"}


@dataclass(frozen=True)
class _Call:
    """What is static of one call. operands: of specs. names: its arrays, in the order in which they are passed.

    replayed: None, or the specs of ids and weights that come with the arrays instead of from the routing. The gradient
    flows into the routing all the same, as if it had chosen them.
    """

    operands: MoEOperands
    spec: MoESpec
    names: tuple[str, ...]
    targets: tuple[tuple[str, Target], ...]
    replayed: TopK | None

    @functools.cached_property
    def results(self) -> tuple[str, ...]:
        """What the call returns, by the names of `plan_moe`."""
        names = ("output", "tokens_per_expert", "invalid_ids")
        if not isinstance(self.operands.routing, TopK):
            names += ("ids", "weights")
        return (*names, "logits") if isinstance(self.operands.routing, RouterWeights) else names

    @functools.cached_property
    def read(self) -> tuple[str, ...]:
        """The outputs of a forward that keeps them which a backward reads."""
        given = self.operands
        names = ("tokens_per_expert", *(name for name in ("ids", "weights", "logits") if name in self.results))
        names += ("kept.group_start", "kept.slot_of_row", "kept.row_of_slot")
        if given.shared is not None and given.shared.gate is not None:
            names += ("kept.shared_gate",)
        if not self.spec.recompute:
            names += ("kept.pre_activation",)
            names += ("kept.shared_pre_activation",) if given.shared is not None else ()
        return names

    def forward(self, arrays: Mapping[str, Any], keep: bool) -> dict[str, Any]:
        """Every output of the plan, and of the router where that runs apart, by name."""
        given, routing, spec = self.operands, self.operands.routing, self.spec
        arrays = self._as_used(arrays)
        if self.replayed is not None:
            routing, spec = self.replayed, dataclasses.replace(spec, router=None)
        options: dict[str, Any] = {name: getattr(given, name) for name in ("token_mask", "expert_map", "shared")}
        if keep:
            options["keep"] = True
        outputs = self._execute("moe", arrays, plan_moe, given.x, given.experts, routing, spec, **options)
        if self.replayed is None or isinstance(given.routing, TopK):
            return outputs
        outputs |= {"ids": arrays["routing.ids"], "weights": arrays["routing.weights"]}
        if isinstance(given.routing, RouterWeights):
            used = {name.removeprefix("routing."): array for name, array in arrays.items()}
            router = (given.x, given.routing.weight, given.routing.bias, spec.logits_spec())
            outputs |= self._execute("moe", used, plan_router, *router)
        return outputs

    def backward(
        self, arrays: Mapping[str, Any], gradients: dict[str, Any], wanted: tuple[str, ...]
    ) -> dict[str, jax.Array]:
        """The gradients of the call's arrays, by the arrays' names; `gradients` are those of its outputs."""
        call = OpCall("moe")
        bundle = call.bundle("gradients", OutputGradients(**gradients), "gradients.")
        arrays = self._as_used(arrays) | {f"gradients.{name}": array for name, array in gradients.items()}
        request = self._backward_request(bundle, wanted, tuple(arrays))
        found = undifferentiable(request, *arrays.values())
        named = {name.removeprefix("d_"): gradient for name, gradient in zip(wanted, found, strict=True)}
        return {name: self._in_stack(name, gradient, arrays) for name, gradient in named.items()}

    def _backward_request(self, gradients: OutputGradients, wanted: tuple[str, ...], names: tuple[str, ...]) -> Request:
        options: dict[str, Any] = {"wanted": wanted}
        if self.operands.experts.layer is not None:
            options["one_layer"] = True
        arguments = (gradients, self.operands, self.spec)
        return Request("moe_backward", plan_moe_backward, arguments, tuple(options.items()), names, self.targets)

    def _execute(
        self, op: str, arrays: Mapping[str, Any], planner: Callable[..., LaunchPlan], *arguments: Any, **options: Any
    ) -> dict[str, Any]:
        request = Request(op, planner, arguments, tuple(options.items()), tuple(arrays), self.targets)
        outputs = request.plan(dict(self.targets).get(platforms.default_platform(), self.targets[0][1])).outputs
        values = undifferentiable(request, *arrays.values())
        return {buffer.name: value for buffer, value in zip(outputs, values, strict=True)}

    def _as_used(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays by the plans' names: a trace's ids and weights stand for given ones."""
        used = {name: array for name, array in arrays.items() if name not in _REPLAYED.values()}
        return used | {name: arrays[given] for name, given in _REPLAYED.items() if given in arrays}

    def _in_stack(self, name: str, gradient: jax.Array, arrays: Mapping[str, Any]) -> jax.Array:
        """The gradient of an array, of which one layer was used: zeros for the others.

        Written so that XLA, where it adds this to what other layers gave (in the backward of a scan), adds the one
        layer in place and makes no zeros.
        """
        bundle, _, field = name.partition(".")
        shape = getattr(getattr(self.operands, bundle), field).shape if field else gradient.shape
        if gradient.shape == shape:
            return gradient
        zeros = jnp.zeros(shape, gradient.dtype)
        return jax.lax.dynamic_update_index_in_dim(zeros, gradient, arrays["experts.layer"][0], 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _composed(call: _Call, *arrays: Any) -> tuple[Any, ...]:
    outputs = call.forward(dict(zip(call.names, arrays, strict=True)), keep=False)
    return tuple(outputs[name] for name in call.results)


def _forward_rule(call: _Call, *primals: Any) -> tuple[tuple[Any, ...], Kept]:
    arrays = {name: primal.value for name, primal in zip(call.names, primals, strict=True)}
    perturbed = {name: primal.perturbed for name, primal in zip(call.names, primals, strict=True)}
    differentiated = [name for name, is_perturbed in perturbed.items() if is_perturbed]
    reason = why_no_moe_gradient(call.operands.experts, call.spec, differentiated)
    if differentiated and reason is not None:
        raise Unsupported(reason)
    asked = [perturbed[name.removeprefix("d_")] for name in gradient_names(call.operands)]
    outputs = call.forward(arrays, keep=any(asked))
    results = tuple(outputs[name] for name in call.results)
    read = {}
    for name in call.read:
        pre_activation, of_routing = KEPT_NAMES
        value = outputs[name] if any(asked) else jnp.zeros(0)
        read[name] = checkpoint_name(value, pre_activation if name.endswith("pre_activation") else of_routing)
    return results, Kept.make(arrays, read, asked)


def _backward_rule(call: _Call, kept: Kept, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    wanted = kept.wanted(gradient_names(call.operands))
    gradients = {
        name: cotangent
        for name, cotangent in zip(call.results, cotangents, strict=True)
        if name in ("output", "weights", "logits") and not isinstance(cotangent, SymbolicZero)
    }
    if not wanted or not gradients:
        return (None,) * len(call.names)
    if "output" not in gradients:
        x = call.operands.x
        gradients["output"] = jnp.zeros(x.shape, numpy_dtype(call.spec.out_dtype or x.dtype))
    found = call.backward(kept.arrays | kept.outputs, gradients, wanted)
    return tuple(found.get(name) for name in call.names)


_composed.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
# Inlined into an outer trace, so that programs hold nothing but the custom calls.
_run = jax.jit(_composed, static_argnums=0, inline=True)


def run_moe(
    x: Any,
    experts: Any,
    routing: Any,
    spec: Any,
    *,
    token_mask: Any = None,
    expert_map: Any = None,
    shared: Any = None,
    replayed: Routing | None = None,
) -> MoEOutput:
    """`moe_jax.ops.moe`, also with a trace's ids and weights in the place of the routing's, which is still trained."""
    call, (x_spec, *bundles, _), options = moe_call(x, experts, routing, spec, token_mask, expert_map, shared)
    chosen = None
    if replayed is not None:
        chosen = TopK(*(call.array(name, array) for name, array in zip(_REPLAYED.values(), replayed, strict=True)))
    arrays = call.placed()
    static = _Call(MoEOperands(x_spec, *bundles, **options), spec, tuple(arrays), platforms.targets(), chosen)
    results = dict(zip(static.results, _run(static, *varying_alike(arrays.values())), strict=True))
    if isinstance(routing, TopK):
        results["ids"], results["weights"] = (routing.ids, routing.weights) if replayed is None else replayed
    logits = routing.logits if isinstance(routing, RouterLogits) else results.get("logits")
    return MoEOutput(**(results | {"logits": logits}))


def moe_call(
    x: Any, experts: Any, routing: Any, spec: Any, token_mask: Any, expert_map: Any, shared: Any
) -> tuple[OpCall, tuple[Any, ...], dict[str, Any]]:
    """The call of `moe` for arrays or ShapeDtypeStructs, and the arguments and keywords of its planner."""
    require_type("experts", experts, ExpertWeights)
    require_type("routing", routing, RouterWeights, RouterLogits, TopK)
    require_type("spec", spec, MoESpec)
    if spec.main_grad:
        raise Unsupported(
            "spec.main_grad must be False in JAX, whose arrays nothing is added to in place, got True; leave it out, "
            "and add up the gradients of micro-batches in float32, as docs/training.md shows"
        )
    call = OpCall("moe")
    arguments = (
        call.array("x", x),
        call.bundle("experts", experts, "experts."),
        call.bundle("routing", routing, "routing."),
        spec,
    )
    keywords: dict[str, Any] = {
        "token_mask": call.optional("token_mask", token_mask),
        "expert_map": call.optional("expert_map", expert_map),
        "shared": None,
    }
    if shared is not None:
        require_type("shared", shared, SharedExpert)
        keywords["shared"] = call.bundle("shared", shared, "shared.")
    return call, arguments, keywords


def training_plans(call: OpCall, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[LaunchPlan, ...]:
    """The plans of a training step, of what `moe_call` returned."""
    x, experts, routing, spec = arguments
    operands = MoEOperands(x, experts, routing, **keywords)
    return plan_training(operands, spec, call.target(), one_layer=True)
