"""One MoE backward in NumPy, stage by stage, at the rounding points of the kernels.

What it reads of the forward is what a training step keeps: x, the routing (logits, ids, weights; the layout follows
from ids) and the pre-activation as stored, in the dtype of x. Neither gathered inputs nor the activation nor expert
outputs are kept. Rounding points: d_output to the dtype of x (nothing where it has that dtype already), d_pre,
weighted_hidden and d_slots to the dtype of x, every result to the dtype of what it is the gradient of; all else is
fp32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_core import dtypes
from moe_core.errors import InvalidInput
from moe_core.operands import ExpertWeights, OutputGradients, RouterLogits, RouterWeights, SharedExpert, TopK
from moe_core.reference.activation import sigmoid
from moe_core.reference.backward_activation import expert_activation_backward
from moe_core.reference.backward_matmul import bias_gradient, bias_product, input_gradient, weight_gradient
from moe_core.reference.backward_routing import router_backward, routing_backward
from moe_core.reference.matmul import matmul_ogs
from moe_core.reference.reduction import reduce, scale_rows
from moe_core.reference.rounding import round_to, to_float32
from moe_core.reference.routing import layout as make_layout
from moe_core.reference.routing import router
from moe_core.specs import LayoutSpec, LogitsSpec, MatmulSpec, MoESpec

Routing = RouterWeights | RouterLogits | TopK


def _layer_of(array: Any, layer: np.ndarray | None) -> Any:
    return array if array is None or layer is None else array[int(layer[0])]


@dataclass(frozen=True)
class Request:
    """What a backward is to compute. wanted: names of gradients, None = all there are. into: fp32 arrays by name, to
    which the gradient of that name is added before its cast, which is to fp32 then."""

    wanted: frozenset[str] | None = None
    into: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def wants(self, name: str) -> bool:
        return self.wanted is None or name in self.wanted

    def stacked(self, name: str, gradient: np.ndarray, whole: np.ndarray, layer: np.ndarray | None) -> np.ndarray:
        """The gradient of a stack of layers of which one was used: nothing is added to all others."""
        if layer is None:
            return gradient
        into = self.into.get(name)
        result = np.zeros(whole.shape, gradient.dtype) if into is None else into.copy()
        result[int(layer[0])] = gradient
        return result


EVERYTHING = Request()


def _matrix_gradients(
    bundle: ExpertWeights | SharedExpert,
    operands: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    gathers: tuple[str, str, str],
    spec: MoESpec,
    where: dict[str, Any],
    request: Request,
    prefix: str,
    layer: np.ndarray | None,
) -> dict[str, np.ndarray]:
    """Those wanted of gate_up, up and down. operands: x, d_pre, weighted_hidden, d_out; gathers: of x, of rows by slot,
    of d_out."""
    x, d_pre, hidden, d_out = operands
    of_x, by_slot, of_output = gathers

    def product(name: str, left: np.ndarray, right: np.ndarray, gather: tuple[str, str]) -> np.ndarray:
        if spec.weight_layout == "out_in":
            left, right, gather = right, left, (gather[1], gather[0])
        into = _layer_of(request.into.get(prefix + name), layer)
        dtype = "float32" if into is not None else dtypes.canonical(getattr(bundle, name).dtype)
        return weight_gradient(left, right, into=into, gather=gather, out_dtype=dtype, **where)

    width = d_pre.shape[1] // 2 if bundle.up is not None else d_pre.shape[1]
    factors = {
        "down": (hidden, d_out, (by_slot, of_output)),
        "gate_up": (x, d_pre[:, :width], (of_x, by_slot)),
        "up": (x, d_pre[:, width:], (of_x, by_slot)),
    }
    return {
        prefix + name: request.stacked(prefix + name, product(name, *factors[name]), getattr(bundle, name), layer)
        for name in factors
        if request.wants(prefix + name) and isinstance(getattr(bundle, name), np.ndarray)
    }


class _MoEBackward:
    """The stages of one backward; one method per part. `found` collects what `moe_backward_stages` returns."""

    def __init__(self, gradients: OutputGradients, request: Request, *arguments: Any) -> None:
        self.x, self.experts, self.routing, self.spec, self.stages = arguments[:5]
        self.token_mask, self.expert_map, self.shared = arguments[5:]
        self.gradients, self.request = gradients, request
        self.found: dict[str, np.ndarray] = {}
        self.dtype = dtypes.canonical(self.x.dtype)
        self.d_out = round_to(gradients.output, self.x.dtype)
        self.d_x = np.zeros(self.x.shape, np.float32)

    def through_experts(self) -> np.ndarray:
        """Gradients of the experts and the experts' part of d_x; the gradient of the weights fp32 `[T, K]`."""
        experts, spec, stages, layer = self.experts, self.spec, self.stages, self.experts.layer
        ids, weights = stages["ids"], stages["weights"].reshape(-1)
        layout = LayoutSpec(ids.shape[0], ids.shape[1], experts.down.shape[0 if layer is None else 1])
        sizes, start, slot_of_row, row_of_slot, _ = make_layout(ids, self.expert_map, self.token_mask, layout=layout)
        groups = {"group_sizes": sizes, "group_start": start, "slot_of_row": slot_of_row}
        where: dict[str, Any] = groups | {"layout": layout}
        on_input = spec.apply_router_weight_on_input
        row_weight = None if on_input else weights

        back = MatmulSpec(spec.weight_layout, "token", "slot", None, "float32", spec.allow_tf32)
        d_hidden = input_gradient(self.d_out, experts.down, layer=layer, spec=back, **where)
        product = None
        if experts.down_bias is not None:
            product = bias_product(self.d_out, _layer_of(experts.down_bias, layer), gather="token", **where)
        d_pre, hidden, d_weight = expert_activation_backward(
            d_hidden,
            stages["matmul1"],
            row_of_slot,
            row_weight,
            product,
            activation=spec.activation,
            order="slot",
        )
        back = MatmulSpec(spec.weight_layout, "slot", "slot", None, None, spec.allow_tf32)
        d_slots = input_gradient(d_pre, experts.gate_up, up=experts.up, layer=layer, spec=back, **where)
        self.found |= {"d_hidden": d_hidden, "d_pre": d_pre, "weighted_hidden": hidden, "d_slots": d_slots}

        source = scale_rows(self.x, stages["weights"]) if on_input else self.x
        operands, gathers = (source, d_pre, hidden, self.d_out), ("token", "slot", "token")
        self.found |= _matrix_gradients(experts, operands, gathers, spec, where, self.request, "d_experts.", layer)
        self._biases(d_pre, row_weight, where)

        if on_input:
            # K = 1: a slot is its token. What was x times the weight gives gradients of both.
            tokens = np.flatnonzero(row_of_slot >= 0)
            d_source = to_float32(d_slots[tokens])
            d_weight = np.zeros(layout.num_slots, np.float32)
            with np.errstate(all="ignore"):
                d_weight[tokens] = (d_source * to_float32(self.x[tokens])).sum(axis=-1, dtype=np.float32)
                self.d_x[tokens] += d_source * weights[tokens, None]
        else:
            self.d_x += reduce(d_slots, row_of_slot, top_k=layout.top_k, out_dtype="float32")
        return d_weight.reshape(ids.shape)

    def _biases(self, d_pre: np.ndarray, row_weight: np.ndarray | None, where: dict[str, Any]) -> None:
        """gate_up_bias, up_bias and down_bias, those there are."""
        experts = self.experts
        width = d_pre.shape[1] // 2 if experts.up is not None else d_pre.shape[1]
        parts = {
            "gate_up_bias": (d_pre[:, :width], None, "slot"),
            "up_bias": (d_pre[:, width:], None, "slot"),
            "down_bias": (self.d_out, row_weight, "token"),
        }
        for name, (d_y, weight, gather) in parts.items():
            bias, full = getattr(experts, name), f"d_experts.{name}"
            if bias is not None and self.request.wants(full):
                dtype = dtypes.canonical(bias.dtype)
                found = bias_gradient(d_y, row_weight=weight, gather=gather, out_dtype=dtype, **where)
                self.found[full] = self.request.stacked(full, found, bias, experts.layer)

    def through_shared(self, shared: SharedExpert) -> None:
        """The shared expert: one expert of every token, weighted by the sigmoid of its gate."""
        spec, x = self.spec, self.x
        layer = self.experts.layer if shared.gate_up.ndim == 3 else None
        pre, gate = self.stages.get("shared_matmul1"), self.stages.get("shared_gate")
        if pre is None:
            pre, gate = self._shared_forward(shared, layer)
        wide = MatmulSpec(spec.weight_layout, out_dtype="float32", allow_tf32=spec.allow_tf32)
        d_hidden = input_gradient(self.d_out, shared.down, layer=layer, layout=None, spec=wide)
        d_pre, hidden, d_sigmoid = expert_activation_backward(
            d_hidden,
            pre,
            row_weight=None if gate is None else sigmoid(gate),
            activation=spec.activation,
        )
        d_x = input_gradient(d_pre, shared.gate_up, up=shared.up, layer=layer, layout=None, spec=wide)
        operands, gathers = (x, d_pre, hidden, self.d_out), ("row", "row", "row")
        where: dict[str, Any] = {"layout": None}
        self.found |= _matrix_gradients(shared, operands, gathers, spec, where, self.request, "d_shared.", layer)
        with np.errstate(all="ignore"):
            self.d_x += d_x
            if gate is not None and shared.gate is not None:
                d_gate = d_sigmoid[:, None] * (sigmoid(gate) * sigmoid(-gate))
                found = router_backward(d_gate, x, shared.gate, spec=LogitsSpec(spec.weight_layout))
                self.found["d_shared.gate"] = found.weight
                self.d_x += found.x

    def _shared_forward(self, shared: SharedExpert, layer: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """(pre-activation, gate logits) of the shared expert, as the forward computes them."""
        spec, x = self.spec, self.x
        first = MatmulSpec(spec.weight_layout, allow_tf32=spec.allow_tf32)
        matrices = [shared.gate_up] if shared.up is None else [shared.gate_up, shared.up]
        parts = [matmul_ogs(x, array, layer=layer, layout=None, spec=first) for array in matrices]
        gate: np.ndarray | None = None
        if shared.gate is not None:
            gate = router(x, shared.gate, spec=LogitsSpec(spec.weight_layout, allow_tf32=spec.allow_tf32))
        return np.concatenate(parts, axis=1), gate

    def through_router(self, d_weights: np.ndarray) -> None:
        """From the weights, the losses and the logits' own gradient to the logits, and to x where they come from it."""
        given, spec, stages, routing = self.gradients, self.spec, self.stages, self.routing
        if isinstance(routing, TopK):
            extra = [name for name in ("weights", "logits", "load_balance", "z") if getattr(given, name) is not None]
            if extra:
                raise InvalidInput(
                    f"gradients.{extra[0]} must be None where ids and weights are given, which are no outputs then; "
                    "got a value, leave it out"
                )
            self.found["d_routing.weights"] = d_weights
            return
        logits, ids = stages["logits"], stages["ids"]
        with np.errstate(all="ignore"):
            total = d_weights if given.weights is None else d_weights + given.weights
        d_logits = routing_backward(
            logits,
            ids,
            total,
            given.logits,
            given.load_balance,
            given.z,
            np.bincount(ids[ids >= 0], minlength=logits.shape[1]),
            self.token_mask,
            spec=spec.router,
        )
        self.found |= {"d_weights": d_weights, "d_logits": d_logits}
        if isinstance(routing, RouterLogits):
            self.found["d_routing.logits"] = d_logits
            return
        options = LogitsSpec(spec.router_weight_layout, spec.logits_dtype, spec.allow_tf32)
        into = self.request.into.get("d_routing.weight")
        found = router_backward(d_logits, self.x, routing.weight, routing.bias, self.token_mask, into, spec=options)
        self.found["d_routing.weight"] = found.weight
        if found.bias is not None:
            self.found["d_routing.bias"] = found.bias
        with np.errstate(all="ignore"):
            self.d_x += found.x


def moe_backward_stages(
    gradients: OutputGradients,
    x: np.ndarray,
    experts: ExpertWeights,
    routing: Routing,
    spec: MoESpec,
    stages: dict[str, np.ndarray],
    *,
    token_mask: np.ndarray | None = None,
    expert_map: np.ndarray | None = None,
    shared: SharedExpert | None = None,
    request: Request = EVERYTHING,
) -> dict[str, np.ndarray]:
    """Every stage of one MoE backward; stages: what `moe_stages` returned for the same arguments, of which logits, ids,
    weights and matmul1 are read, and of a shared expert shared_matmul1 `[T, 2S]` and shared_gate fp32 `[T, 1]` where
    they are there (else they are computed again, to the same bits). request: what is wanted and added to.

    Keys, by slot with exact zeros where a slot has no expert: d_hidden fp32 `[T * K, F]` (before the weight), d_pre
    `[T * K, 2F]` (or F), weighted_hidden `[T * K, F]`, d_slots `[T * K, D]`; then d_weights fp32 `[T, K]` and d_logits
    fp32 `[T, E]` (absent where ids are given). The results: d_x, `d_experts.*`, `d_shared.*` and `d_routing.*` for
    every array of the bundles that has a gradient (correction_bias, ids and layer have none), with its shape and dtype.

    d_x = the fp32 sum of a token's slots in order (with apply_router_weight_on_input: times the weight), + the shared
    expert's, + its gate's, + the router's; one cast. A stacked array has a zero gradient but for the layer used.
    Quantised matrices have none; what goes back through them is `input_gradient`'s.
    Raises InvalidInput where ids are given and a gradient of what comes before them is too.
    """
    backward = _MoEBackward(gradients, request, x, experts, routing, spec, stages, token_mask, expert_map, shared)
    d_weights = backward.through_experts()
    if shared is not None:
        backward.through_shared(shared)
    backward.through_router(d_weights)
    return backward.found | {"d_x": round_to(backward.d_x, x.dtype)}
