"""One MoE backward in NumPy, stage by stage, with the rounding points of the kernels.

Rounding points: d_output (if its dtype differs), d_pre, weighted_hidden and d_slots to the dtype of x, and every result
to the dtype of its array. All else is fp32.

An ending such as `_RF` is the shape of a local array: R rows of the layout, D and F widths, N = 2F or F.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moe_core.base.threads import Later
from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedSpec
from moe_core.ops.activation.reference import expert_activation_backward, sigmoid
from moe_core.ops.common.bundles import bundle_of, quantized_from
from moe_core.ops.common.rounding import plain_name, round_to, to_float32, working_dtype
from moe_core.ops.matmul.reference import backward as matmul
from moe_core.ops.matmul.reference.forward import matmul_ogs, pick_layer
from moe_core.ops.matmul.reference.rows import Rows, dense_rows, in_slot_order, rows_of
from moe_core.ops.moe.options import BackwardOptions
from moe_core.ops.moe.reference.lora import LoRATwin
from moe_core.ops.reduction.reference import reduce, scale_rows
from moe_core.ops.router.reference import router, router_backward
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.ops.routing.reference_backward import routing_backward
from moe_core.specs import LayoutSpec, LogitsSpec, MatmulSpec, MoESpec
from moe_core.specs.operands import (
    ExpertActivationOperands,
    ExpertWeights,
    LoRAFactors,
    MatmulOperands,
    MoEOperands,
    OutputGradients,
    RouterLogits,
    RouterWeights,
    RoutingGradients,
    SharedExpert,
    TopK,
)

_ROUTING: dict[str, type] = {"routing.weight": RouterWeights, "routing.logits": RouterLogits, "routing.ids": TopK}
#: Saved array of the forward -> its stage.
_SAVED = {
    "saved.pre_activation": "pre_activation",
    "saved.shared_pre_activation": "shared_matmul1",
    "saved.shared_gate": "shared_gate",
}


@dataclass(frozen=True)
class Request:
    """wanted: names, None means all. into: fp32 arrays by name, added to that gradient before its cast to fp32. places:
    memory by name for the gradients of matrices. wide: d_x stays fp32. by_slot: d_x is `[T * K, D]`."""

    wanted: frozenset[str] | None = None
    into: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    places: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    wide: bool = False
    by_slot: bool = False

    def wants(self, name: str) -> bool:
        return self.wanted is None or name in self.wanted


EVERYTHING = Request()


class _Chain(NamedTuple):
    """Weights and rows of the experts or the shared expert. tokens: of each row, to copy x and d_out from `source`."""

    bundle: ExpertWeights | SharedExpert
    prefix: str
    layer_index: np.ndarray | None
    x: np.ndarray
    d_out: np.ndarray
    rows: Rows
    source: np.ndarray | None = None
    tokens: np.ndarray | None = None
    lora: LoRATwin | None = None

    def at_once(self) -> bool:
        """True if nothing reads the first product's result before the others run."""
        arrays = vars(self.bundle)
        if self.lora is not None:
            return False
        plain = all(isinstance(arrays[name], np.ndarray) for name in ("gate_up", "down"))
        biases = any(array is not None for name, array in arrays.items() if name.endswith("_bias"))
        wide = self.x.dtype == working_dtype(self.x)
        return plain and wide and not biases and self.bundle.up is None and self.layer_index is None

    def pre_activation(self, spec: MoESpec) -> np.ndarray:
        matmul = MatmulSpec(spec.weight_layout, "row", "row", None, plain_name(self.x), spec.allow_tf32)
        names = [name for name in ("gate_up", "up") if getattr(self.bundle, name) is not None]
        sides = [(getattr(self.bundle, name), getattr(self.bundle, f"{name}_bias", None)) for name in names]
        products = [MatmulOperands(self.x, weight, bias=bias, layer_index=self.layer_index) for weight, bias in sides]
        if self.lora is None:
            return np.concatenate([matmul_ogs(operands, matmul, self.rows) for operands in products], axis=1)
        matmul = dataclasses.replace(matmul, out_dtype="float32")
        plain = [dataclasses.replace(one, bias=None) for one in products]
        sums = np.concatenate([matmul_ogs(operands, matmul, self.rows) for operands in plain], axis=1)
        return self.lora.pre_activation(sums, [bias for _, bias in sides], self.rows, plain_name(self.x))


class MoEBackward:
    """One method per part. `results`: see `moe_backward_stages`. `by_row`: the same arrays by layout row."""

    def __init__(
        self,
        gradients: OutputGradients,
        operands: MoEOperands,
        spec: MoESpec,
        stages: Mapping[str, Any],
        request: Request = EVERYTHING,
    ) -> None:
        self.x, self.experts, self.routing = operands.x, operands.experts, operands.routing
        self.token_mask, self.expert_map, self.shared = operands.token_mask, operands.expert_map, operands.shared
        self.gradients, self.spec, self.stages, self.request = gradients, spec, stages, request
        self.lora = operands.lora
        self.results: dict[str, np.ndarray] = {}
        self.d_out = round_to(gradients.output, self.x.dtype)
        # Through the experts, and all else, which is summed first as in the kernels.
        self.d_x = np.zeros(self.x.shape, working_dtype(self.x))
        self.d_rest: np.ndarray | None = None
        self.by_row: dict[str, np.ndarray] = {}
        self.row_of_slot = np.zeros(0, np.int32)

    def run(self) -> dict[str, np.ndarray]:
        d_weights = self.through_experts()
        if self.shared is not None:
            self.through_shared(self.shared)
        self.through_router(d_weights)
        if self.request.by_slot:
            self.results["d_x"] = self.rows_of_slots(self.by_row["d_slots"])
            return self.results
        with np.errstate(all="ignore"):
            total = self.d_x if self.d_rest is None else self.d_x + self.d_rest
        self.results["d_x"] = total if self.request.wide else round_to(total, self.x.dtype)
        return self.results

    def rows_of_slots(self, rows: np.ndarray) -> np.ndarray:
        """Layout rows by slot, zeros for slots without a row."""
        slots = np.flatnonzero(self.row_of_slot >= 0)
        by_slot = np.zeros((len(self.row_of_slot), rows.shape[1]), rows.dtype)
        by_slot[slots] = rows[self.row_of_slot[slots]]
        return by_slot

    def _add(self, d_x: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            self.d_rest = d_x if self.d_rest is None else self.d_rest + d_x

    def _through(
        self, chain: _Chain, pre: np.ndarray | None, out_dtype: str | None, weighting: ExpertActivationOperands
    ) -> tuple[np.ndarray, ...]:
        """d_hidden, d_pre, weighted_hidden, d_weight and rows of d_x. Stores the gradients. pre None: recompute."""
        bundle, d_out = chain.bundle, chain.d_out
        spec = self.spec.of_shared() if isinstance(bundle, SharedExpert) else self.spec
        pre = chain.pre_activation(spec) if pre is None else pre
        product = MatmulSpec(spec.weight_layout, "row", "row", None, out_dtype, spec.allow_tf32)
        d_hidden_RF = np.empty((len(pre), pre.shape[1] // (2 if spec.activation.gated else 1)), working_dtype(pre))
        later = Later()

        def fill(then: Callable[[slice], None] | None) -> None:
            source, tokens = chain.source, chain.tokens
            d_y, gather, follow = d_out, "row", then
            if chain.lora is not None:
                plain = dataclasses.replace(product, out_dtype="float32")
                operands = MatmulOperands(d_y, bundle.down, layer_index=chain.layer_index)
                matmul.input_gradient(operands, plain, chain.rows, places=(d_hidden_RF,))
                chain.lora.pull_back(2, d_y, d_hidden_RF)
                if then is not None:
                    then(slice(0, len(d_hidden_RF)))
                return
            if source is not None and tokens is not None and then is not None:

                def gather_too(block: slice) -> None:
                    for array, rows in ((source, chain.x), (self.d_out, d_out)):
                        array.take(tokens[block], 0, rows[block], "clip")
                    then(block)

                d_y, gather, follow = self.d_out, "token", gather_too
            matmul.input_gradient(
                MatmulOperands(d_y, bundle.down, layer_index=chain.layer_index),
                dataclasses.replace(product, gather=gather, out_dtype="float32"),
                chain.rows,
                places=(d_hidden_RF,),
                later=later if then and chain.at_once() else None,
                then=follow,
            )

        operands = dataclasses.replace(weighting, d_hidden=d_hidden_RF, pre=pre)
        d_pre_RN, hidden_RF, d_weight = expert_activation_backward(operands, activation=spec.activation, fill=fill)
        operands = MatmulOperands(d_pre_RN, bundle.gate_up, bundle.up, layer_index=chain.layer_index)
        if chain.lora is None:
            d_rows_RD = matmul.input_gradient(operands, product, chain.rows, later=later)
        else:
            wide = dataclasses.replace(product, out_dtype="float32")
            d_rows_RD = matmul.input_gradient(operands, wide, chain.rows)
            chain.lora.pull_back(1, d_pre_RN, d_rows_RD)
            d_rows_RD = round_to(d_rows_RD, plain_name(d_pre_RN))
            weight = weighting.row_weight
            self.results |= chain.lora.gradients(chain.x, hidden_RF, d_pre_RN, d_out, weight, self.request.wants)
        width = d_pre_RN.shape[1] // 2 if bundle.up is not None else d_pre_RN.shape[1]
        factors = {
            "down": (hidden_RF, d_out),
            "gate_up": (chain.x, d_pre_RN[:, :width]),
            "up": (chain.x, d_pre_RN[:, width:]),
        }
        for name, (left, right) in factors.items():
            matrix, full = getattr(bundle, name), chain.prefix + name
            if self.request.wants(full) and isinstance(matrix, np.ndarray):
                request = self.request
                trained = matmul.Trained(matrix, chain.layer_index, request.into.get(full), request.places.get(full))
                self.results[full] = matmul.matrix_gradient(
                    (left, "row"), (right, "row"), trained, chain.rows, weight_layout=spec.weight_layout, later=later
                )
            bias, full = getattr(bundle, f"{name}_bias", None), f"{full}_bias"
            if bias is not None and self.request.wants(full):
                weight = weighting.row_weight if name == "down" else None
                d_bias = matmul.bias_gradient(right, chain.rows, row_weight=weight, out_dtype=plain_name(bias))
                self.results[full] = matmul.Trained(bias, chain.layer_index).in_stack(d_bias)
        with np.errstate(all="ignore"):
            later.run()
        return d_hidden_RF, d_pre_RN, hidden_RF, d_weight, d_rows_RD

    def through_experts(self) -> np.ndarray:
        """Store the gradients. Returns the gradient of the weights, fp32 `[T, K]`."""
        experts, stages, layer_index = self.experts, self.stages, self.experts.layer_index
        ids, weights = stages["ids"], stages["weights"].reshape(-1)
        num_experts = experts.down.shape[0 if layer_index is None else 1]
        layout = LayoutSpec(ids.shape[0], ids.shape[1], num_experts, limit=self.spec.row_limit)
        arrays = stages.get("layout") or make_layout(ids, self.expert_map, self.token_mask, layout=layout)
        sizes, start, slot_of_row, self.row_of_slot = arrays[:4]
        rows = rows_of(layout, sizes, start, slot_of_row)
        lora = None
        if self.lora is not None:
            rows = in_slot_order(rows)
            lora = LoRATwin(self.lora, layout, self.spec, stages["adapters"], slot_of_row)
        on_input = self.spec.apply_router_weight_on_input
        source = scale_rows(self.x, stages["weights"]) if on_input else self.x
        # By layout row from here on. Rows without a slot are undefined.
        slots = np.maximum(slot_of_row, 0)
        tokens = slots // layout.top_k
        pre = stages.get("pre_activation")
        if pre is None and "matmul1" in stages:
            pre = stages["matmul1"][slots]
        product = None
        if experts.down_bias is not None:
            bias = pick_layer(experts.down_bias, layer_index)
            product = matmul.bias_product(self.d_out, bias, rows, gather="token")
        row_of_slot = self.row_of_slot
        x, d_out = (np.empty((len(tokens), array.shape[1]), array.dtype) for array in (source, self.d_out))
        chain = _Chain(experts, "d_experts.", layer_index, x, d_out, rows, source, tokens, lora)
        if pre is None or not chain.at_once() or min(slot_of_row.min(initial=0), row_of_slot.min(initial=0)) < 0:
            chain = chain._replace(x=source[tokens], d_out=self.d_out[tokens], tokens=None)
        weighting = ExpertActivationOperands(None, None, row_of_slot, None if on_input else weights, product)
        d_hidden_RF, d_pre_RN, hidden_RF, d_weight, d_rows_RD = self._through(chain, pre, None, weighting)
        self.by_row = {"d_hidden": d_hidden_RF, "d_pre": d_pre_RN, "weighted_hidden": hidden_RF, "d_slots": d_rows_RD}
        if on_input:
            # K = 1, so a slot is its token. x was multiplied with the weight: both get gradients.
            tokens = np.flatnonzero(row_of_slot >= 0)
            d_source_RD = to_float32(d_rows_RD[row_of_slot[tokens]])
            d_weight = np.zeros(layout.num_slots, working_dtype(self.x))
            with np.errstate(all="ignore"):
                d_weight[tokens] = (d_source_RD * to_float32(self.x[tokens])).sum(axis=-1)
                self.d_x[tokens] += d_source_RD * weights[tokens, None]
        elif not self.request.by_slot:
            self.d_x = reduce(d_rows_RD, row_of_slot, top_k=layout.top_k, order="row", out_dtype="float32")
        return d_weight.reshape(ids.shape)

    def through_shared(self, shared: SharedExpert) -> None:
        """One expert for every token, weighted by the sigmoid of its gate."""
        spec, x = self.spec, self.x
        layer_index = self.experts.layer_index if shared.gate_up.ndim == 3 else None
        pre, gate = self.stages.get("shared_matmul1"), self.stages.get("shared_gate")
        if pre is None and shared.gate is not None:
            gate = router(x, shared.gate, spec=LogitsSpec(spec.weight_layout, allow_tf32=spec.allow_tf32))
        chain = _Chain(shared, "d_shared.", layer_index, x, self.d_out, dense_rows(len(x)))
        weighting = ExpertActivationOperands(None, None, row_weight=None if gate is None else sigmoid(gate))
        *_, d_sigmoid, d_x = self._through(chain, pre, "float32", weighting)
        self._add(d_x)
        if gate is not None and shared.gate is not None:
            with np.errstate(all="ignore"):
                d_gate = d_sigmoid[:, None] * (sigmoid(gate) * sigmoid(-gate))
                gate_gradients = router_backward(d_gate, x, shared.gate, spec=LogitsSpec(spec.weight_layout))
            self.results["d_shared.gate"] = gate_gradients.weight
            self._add(gate_gradients.x)

    def through_router(self, d_weights: np.ndarray) -> None:
        """From the weights, losses and logits to the logits, and to x if it was routed."""
        gradients, spec, stages, routing = self.gradients, self.spec, self.stages, self.routing
        if isinstance(routing, TopK):
            extra = [
                name for name in ("weights", "logits", "load_balance", "z") if getattr(gradients, name) is not None
            ]
            if extra:
                raise InvalidInput(
                    f"gradients.{extra[0]} must be None where ids and weights are given, which are no outputs then; "
                    "got a value, leave it out"
                )
            self.results["d_routing.weights"] = d_weights
            return
        assert spec.router is not None
        logits, ids = stages["logits"], stages["ids"]
        with np.errstate(all="ignore"):
            total = d_weights if gradients.weights is None else d_weights + gradients.weights
        counts = np.bincount(ids[ids >= 0], minlength=logits.shape[1])
        flowing = RoutingGradients(total, gradients.logits, gradients.load_balance, gradients.z, counts)
        d_logits = routing_backward(flowing, logits, ids, self.token_mask, spec=spec.router)
        self.results |= {"d_weights": d_weights, "d_logits": d_logits}
        if isinstance(routing, RouterLogits):
            self.results["d_routing.logits"] = d_logits
            return
        options = LogitsSpec(spec.router_weight_layout, spec.logits_dtype, spec.allow_tf32)
        into = self.request.into.get("d_routing.weight")
        router_gradients = router_backward(
            d_logits, self.x, routing.weight, routing.bias, self.token_mask, into, spec=options
        )
        self.results["d_routing.weight"] = router_gradients.weight
        if router_gradients.bias is not None:
            self.results["d_routing.bias"] = router_gradients.bias
        self._add(router_gradients.x)


def moe_backward_stages(
    gradients: OutputGradients,
    operands: MoEOperands,
    spec: MoESpec,
    stages: Mapping[str, np.ndarray],
    *,
    request: Request = EVERYTHING,
) -> dict[str, np.ndarray]:
    """Every stage of one MoE backward.

    stages: the result of `moe_stages` for the same arguments. Read are logits, ids, weights, matmul1 and, with a shared
    expert, shared_matmul1 `[T, 2S]` and shared_gate fp32 `[T, 1]`. A missing matmul1 is recomputed bitwise.

    Keys by slot, exact zeros without an expert: d_hidden fp32 `[T * K, F]` (before the weight), d_pre `[T * K, 2F]` (or
    F), weighted_hidden `[T * K, F]`, d_slots `[T * K, D]`. Then d_weights fp32 `[T, K]` and d_logits fp32 `[T, E]`
    (unless ids are given). Results: d_x, `d_experts.*`, `d_shared.*` and `d_routing.*`, each like its array.

    d_x = the fp32 sum of a token's slots in order (with apply_router_weight_on_input: times the weight), then the
    shared expert's, its gate's and the router's part, one cast. Other layers of a stack get zeros. Raises InvalidInput
    if ids are given and an output gradient needs the logits.
    """
    backward = MoEBackward(gradients, operands, spec, stages, request)
    return backward.run() | {name: backward.rows_of_slots(rows) for name, rows in backward.by_row.items()}


def moe_backward_plan(
    arrays: Mapping[str, np.ndarray],
    *,
    spec: MoESpec,
    options: BackwardOptions,
    tensors: tuple[tuple[str, QuantizedSpec], ...] = (),
    by_slot: bool = False,
    places: tuple[np.ndarray, ...] = (),
) -> tuple[np.ndarray, ...]:
    """The gradients in options.wanted, in order, from `plan_moe_backward`'s inputs by name. places: optional memory for
    the gradients, in the order of wanted. by_slot: see `Request`."""
    wanted = options.wanted
    arrays = quantized_from(arrays, tensors)
    routing = next(bundle_of(kind, arrays, "routing.") for name, kind in _ROUTING.items() if name in arrays)
    shared = bundle_of(SharedExpert, arrays, "shared.") if "shared.gate_up" in arrays else None
    experts, masks = bundle_of(ExpertWeights, arrays, "experts."), (arrays.get("token_mask"), arrays.get("expert_map"))
    source = vars(routing) if isinstance(routing, TopK) else arrays
    stages: dict[str, Any] = {name: source[name] for name in ("ids", "weights")}
    if not isinstance(routing, TopK):
        stages["logits"] = arrays["logits"] if isinstance(routing, RouterWeights) else routing.logits
    layout = "tokens_per_expert", "saved.group_start", "saved.slot_of_row", "saved.row_of_slot"
    stages["layout"] = tuple(arrays[name] for name in layout)
    stages |= {stage: arrays[name] for name, stage in _SAVED.items() if name in arrays}
    lora = bundle_of(LoRAFactors, arrays, "lora.") if "lora.scale" in arrays else None
    if lora is not None:
        stages["adapters"] = {name: arrays.get(f"saved.{name}") for name in ("virtual_start", "low1", "low2")}
    into = {name: arrays["into." + name.removeprefix("d_")] for name in options.accumulate}
    request = Request(frozenset(wanted), into, dict(zip(wanted, places, strict=False)), options.wide, by_slot)
    operands = MoEOperands(arrays["x"], experts, routing, *masks, shared, lora)
    gradients = bundle_of(OutputGradients, arrays, "gradients.")
    results = MoEBackward(gradients, operands, spec, stages, request).run()
    if options.one_layer and experts.layer_index is not None:
        rank = len(experts.down.shape)
        ranks = {"d_experts": rank, "d_shared": rank - 1}
        for name in wanted:
            bundle, _, field = name.partition(".")
            if results[name].ndim == ranks.get(bundle, 0) - field.endswith("_bias"):
                results[name] = results[name][int(experts.layer_index[0])]
    return tuple(results[name] for name in wanted)
