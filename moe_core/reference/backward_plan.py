"""NumPy twins of backwards as plans run them: from arrays by the names of the plans' inputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_core import dtypes
from moe_core.formats import QuantizedSpec
from moe_core.operands import ExpertWeights, OutputGradients, RouterLogits, RouterWeights, SharedExpert, TopK
from moe_core.reference.backward_moe import Request, moe_backward_stages
from moe_core.reference.backward_routing import router_backward
from moe_core.reference.matmul import matmul_ogs, quantized_from
from moe_core.reference.reduction import scale_rows
from moe_core.reference.rounding import round_to
from moe_core.reference.routing import layout as make_layout
from moe_core.specs import LayoutSpec, LogitsSpec, MatmulSpec, MoESpec

_ROUTING: dict[str, type] = {"routing.weight": RouterWeights, "routing.logits": RouterLogits, "routing.ids": TopK}


def _bundle(kind: type, prefix: str, arrays: dict[str, np.ndarray]) -> Any:
    return kind(**{name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)})


def _pre_activation(
    x: np.ndarray, experts: ExpertWeights, ids: np.ndarray, weights: np.ndarray, spec: MoESpec, masks: dict[str, Any]
) -> np.ndarray:
    """Matmul 1 before its activation, `[T * K, 2F]` by slot, as the forward rounds it."""
    num_experts = experts.down.shape[0 if experts.layer is None else 1]
    layout = LayoutSpec(ids.shape[0], ids.shape[1], num_experts)
    groups = make_layout(ids, masks["expert_map"], masks["token_mask"], layout=layout)[:3]
    source = scale_rows(x, weights) if spec.apply_router_weight_on_input else x
    options = MatmulSpec(spec.weight_layout, "token", "slot", None, dtypes.canonical(x.dtype), spec.allow_tf32)
    halves = [(experts.gate_up, experts.gate_up_bias)]
    if experts.up is not None:
        halves.append((experts.up, experts.up_bias))
    products = [
        matmul_ogs(source, weight, *groups, bias=bias, layer=experts.layer, layout=layout, spec=options)
        for weight, bias in halves
    ]
    return np.concatenate(products, axis=1)


def moe_backward(
    *,
    spec: MoESpec,
    wanted: tuple[str, ...],
    accumulate: tuple[str, ...],
    one_layer: bool,
    tensors: tuple[tuple[str, QuantizedSpec], ...] = (),
    **arrays: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """The gradients that wanted names, in its order; arrays: by the names of `plan_moe_backward`'s inputs.

    The pre-activation comes from `kept.pre_activation` (by layout row; `kept.row_of_slot` finds a slot's) or, without
    it, is computed again. Gradients that accumulate names are fp32 and added to `into.<name>`. one_layer: of a stack,
    only the layer used. tensors: quantised inputs, see `quantized_from`.
    """
    arrays = quantized_from(arrays, tensors)
    x, experts = arrays["x"], _bundle(ExpertWeights, "experts.", arrays)
    routing = next(_bundle(kind, "routing.", arrays) for name, kind in _ROUTING.items() if name in arrays)
    shared = _bundle(SharedExpert, "shared.", arrays) if "shared.gate_up" in arrays else None
    given = isinstance(routing, TopK)
    ids, weights = (routing.ids, routing.weights) if given else (arrays["ids"], arrays["weights"])
    masks = {"token_mask": arrays.get("token_mask"), "expert_map": arrays.get("expert_map")}
    stages = {"ids": ids, "weights": weights}
    if not given:
        stages["logits"] = arrays["logits"] if isinstance(routing, RouterWeights) else routing.logits
    if "kept.pre_activation" in arrays:
        pre, row_of_slot = arrays["kept.pre_activation"], arrays["kept.row_of_slot"]
        slots = np.flatnonzero(row_of_slot >= 0)
        stages["matmul1"] = np.zeros(pre.shape, pre.dtype)
        stages["matmul1"][slots] = pre[row_of_slot[slots]]
    else:
        stages["matmul1"] = _pre_activation(x, experts, ids, weights, spec, masks)
    if "kept.shared_pre_activation" in arrays:
        stages["shared_matmul1"] = arrays["kept.shared_pre_activation"]
    if "kept.shared_gate" in arrays:
        stages["shared_gate"] = arrays["kept.shared_gate"]
    into = {name: arrays["into." + name.removeprefix("d_")] for name in accumulate}
    request = Request(frozenset(wanted), into)
    gradients = _bundle(OutputGradients, "gradients.", arrays)
    found = moe_backward_stages(gradients, x, experts, routing, spec, stages, shared=shared, request=request, **masks)
    if one_layer and experts.layer is not None:
        whole = len(experts.down.shape)
        rank = {"d_experts": whole, "d_shared": whole - 1}
        index = int(experts.layer[0])
        for name in wanted:
            bundle, _, field = name.partition(".")
            is_bias = field.endswith("_bias")
            if found[name].ndim == rank.get(bundle, 0) - is_bias:
                found[name] = found[name][index]
    return tuple(found[name] for name in wanted)


def router_backward_plan(
    d_logits: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    *,
    spec: LogitsSpec,
    wanted: tuple[str, ...],
    bias_dtype: str | None,
) -> tuple[np.ndarray, ...]:
    """The gradients of the router product that wanted names, in its order, each rounded once."""
    bias = None if bias_dtype is None else np.zeros(0, dtypes.numpy_dtype(bias_dtype))
    found = router_backward(d_logits, x, weight, bias, spec=spec)
    made = {"d_x": round_to(found.x, x.dtype), "d_weight": found.weight, "d_bias": found.bias}
    return tuple(made[name] for name in wanted)
