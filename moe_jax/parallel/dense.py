"""The shared expert's forward for a rank's tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from moe_core.ops.moe.names import result_names
from moe_core.ops.router.forward import plan_router
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, MoEOperands, SharedExpert, TopK
from moe_jax.autodiff.function import differentiated
from moe_jax.autodiff.moe import MoERule
from moe_jax.bridge import platforms
from moe_jax.bridge.calls import moe_request

_GATE = "saved.shared_gate"


class _Dense(MoERule):
    """Rows and the gate's logits. The gradient of rows arrives multiplied by the gate, to round as on one device."""

    def forward(self, arrays: Mapping[str, Any], save: bool) -> dict[str, Any]:
        shared = self.operands.shared
        assert shared is not None
        if shared.gate is None:
            return super().forward(arrays, save)
        operands = dataclasses.replace(self.operands, shared=dataclasses.replace(shared, gate=None))
        ungated = {name: array for name, array in arrays.items() if name != "shared.gate"}
        outputs = MoERule.forward(dataclasses.replace(self, operands=operands), ungated, save)
        product = {"x": arrays["x"], "weight": arrays["shared.gate"]}
        gate = (self.operands.x, shared.gate, None, self.spec.shared_gate_spec())
        return outputs | {_GATE: self.execute(product, plan_router, *gate)["logits"]}


def shared_output(
    x: jax.Array, wide: jax.Array, experts: ExpertWeights, shared: SharedExpert, spec: MoESpec
) -> tuple[jax.Array, jax.Array | None]:
    """Rows fp32 `[T, D]` and gate logits fp32 `[T, 1]`, for `reduce`. wide: see `gather_rows`."""
    tokens = x.shape[0]
    nowhere = TopK(jnp.full((tokens, 1), -1, jnp.int32), jnp.zeros((tokens, 1), jnp.float32))
    spec = dataclasses.replace(spec, router=None, out_dtype="float32")
    experts = jax.tree.map(jax.lax.stop_gradient, experts)
    x = jax.lax.stop_gradient(x)
    call, (of_x, of_experts, of_routing, _), options = moe_request(x, experts, nowhere, spec, shared=shared)
    call.optional("wide", wide)
    arrays, operands = call.placed(), MoEOperands(of_x, of_experts, of_routing, **options)
    results = (*result_names(TopK), *(() if shared.gate is None else (_GATE,)))
    names = (tuple(arrays), results, ("output",))
    outputs = differentiated(_Dense(*names, operands, spec, platforms.targets(), None, True), arrays.values())
    return outputs["output"], outputs.get(_GATE)
