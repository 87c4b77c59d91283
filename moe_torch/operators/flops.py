"""Formulas for `torch.utils.flop_counter.FlopCounterMode`: matrix products and norms, as `moe_core.layers.layer_cost`.

A layer's forward and backward count what `layer.cost` says, for the gradients that are computed. Slots that a capacity
limit drops count, because their number is on the device.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from moe_core.formats import QuantizedTensor
from moe_core.specs.operands import RouterWeights, TopK
from moe_torch.bridge.operator import Operator
from moe_torch.bridge.options import decode
from moe_torch.operators import grouped, pushed, stages, table
from moe_torch.operators.shapes import width_of

_MODULE = "torch.utils.flop_counter"
_Formula = Callable[[Any], int]
_EXPERTS = ("gate_up", "up", "down")


def _wants(call: Any, *names: str) -> int:
    """The number of these gradients that a backward computes; d_wide is d_x."""
    return len({"d_x" if name == "d_wide" else name for name in call.wanted} & set(names))


def _parts(call: Any) -> dict[str, int]:
    """FLOPs of each product of one forward."""
    tokens, routing, spec = call.x.shape[0], call.routing, call.spec
    slots = tokens * (routing.ids.shape[1] if isinstance(routing, TopK) else spec.router.top_k)
    parts = dict.fromkeys((*_EXPERTS, *(f"shared.{name}" for name in _EXPERTS), "router", "shared.gate"), 0)
    if isinstance(routing, RouterWeights):
        parts["router"] = 2 * tokens * call.x.shape[1] * width_of(routing.weight, spec.router_weight_layout)
    for prefix, bundle, rows in (("", call.experts, slots), ("shared.", call.shared, tokens)):
        if bundle is not None:
            for name in _EXPERTS:
                matrix = getattr(bundle, name)
                parts[f"{prefix}{name}"] = 0 if matrix is None else 2 * rows * matrix.shape[-1] * matrix.shape[-2]
    for name in ("a1", "b1", "a2", "b2") if getattr(call, "lora", None) is not None else ():
        factor = getattr(call.lora, name)
        parts[f"lora.{name}"] = 0 if factor is None else 2 * slots * factor.shape[-1] * factor.shape[-2]
    if call.shared is not None and call.shared.gate is not None:
        parts["shared.gate"] = 2 * tokens * call.x.shape[1]
    return parts


def _forward(call: Any) -> int:
    return sum(_parts(call).values())


def _backward(call: Any) -> int:
    parts, through = _parts(call), _wants(call, "d_x")
    total = parts["router"] * (through + _wants(call, "d_routing.weight"))
    total += parts["shared.gate"] * (through + _wants(call, "d_shared.gate"))
    for bundle, prefix in (("experts", ""), ("shared", "shared.")):
        trained = [f"d_{bundle}.{name}" for name in ("gate_up", "up", "gate_up_bias", "up_bias")]
        hidden = 1 if through or _wants(call, *trained) or (not prefix and _wants(call, "d_routing.weights")) else 0
        for name in ("gate_up", "up"):
            total += parts[f"{prefix}{name}"] * (through + _wants(call, f"d_{bundle}.{name}"))
        total += parts[f"{prefix}down"] * (hidden + _wants(call, f"d_{bundle}.down"))
    for name in ("a1", "b1", "a2", "b2"):
        # A product pulls the gradient back, and one makes the factor's.
        total += parts.get(f"lora.{name}", 0) * (1 + _wants(call, f"d_lora.{name}"))
    return total + (parts["gate_up"] + parts["up"] if call.spec.recompute else 0)


def _product(call: Any) -> int:
    rows, slots = call.x.shape[0], call.row_of_slot
    rows = rows if slots is None else min(slots.shape[0], call.slot_of_row.shape[0])
    matrices = [call.weight] if call.up is None else [call.weight, call.up]
    return sum(2 * rows * one.shape[-1] * one.shape[-2] for one in matrices)


def _grouped(call: Any) -> int:
    return 2 * call.x.shape[0] * call.weight.shape[-1] * call.weight.shape[-2]


def _grouped_contraction(call: Any) -> int:
    return 2 * call.left.shape[0] * call.left.shape[1] * call.right.shape[1]


def _router(call: Any) -> int:
    return 2 * call.x.shape[0] * call.weight.shape[0] * call.weight.shape[1]


def _pulled(product: _Formula) -> _Formula:
    return lambda call: product(call) * (_wants(call, "d_x") + _wants(call, "d_weight"))


def _norm(call: Any) -> int:
    return 4 * call.x.shape[0] * call.x.shape[1]


def _of_every_routing(*names: str) -> list[Operator]:
    return [one for name in names for one in getattr(table, name).values()]


def _formulas() -> list[tuple[_Formula, Sequence[Operator]]]:
    forwards = _of_every_routing("MOE", "MOE_QUANTIZED", "TRAINING", "QUANTIZED_TRAINING", "LORA", "LORA_TRAINING")
    names = (f"{kind}BACKWARD{into}" for kind in ("", "QUANTIZED_", "LORA_") for into in ("", "_INTO"))
    backwards = _of_every_routing(*names)
    forwards += [pushed.EXPERTS_PUSH, pushed.EXPERTS_PUSH_TRAINING, pushed.EXPERTS_PUSH_QUANTIZED]
    forwards += [pushed.EXPERTS_PUSH_QUANTIZED_TRAINING, pushed.EXPERTS_IN_PARTS, pushed.EXPERTS_IN_PARTS_QUANTIZED]
    return [
        (_forward, forwards),
        (_backward, [*backwards, *pushed.BACKWARDS, *pushed.QUANTIZED_BACKWARDS]),
        (_product, (stages.MATMUL_OGS, stages.MATMUL_OGS_QUANTIZED)),
        (_pulled(_product), (stages.MATMUL_OGS_BACKWARD, stages.MATMUL_OGS_QUANTIZED_BACKWARD)),
        (_grouped, (grouped.GROUPED_MM, grouped.GROUPED_MM_QUANTIZED)),
        (_grouped_contraction, (grouped.GROUPED_CONTRACTION,)),
        (_router, (stages.ROUTER,)),
        (_pulled(_router), (stages.ROUTER_BACKWARD,)),
        (_norm, (stages.RMS_NORM,)),
        (lambda call: 2 * _norm(call), (stages.RMS_NORM_BACKWARD,)),
    ]


def _count(formula: _Formula, operators: Sequence[Operator], arguments: tuple[Any, ...]) -> int:
    *tensors, options = arguments
    fitting = [one for one in operators if len(one.names) == len(tensors)]
    if len(fitting) > 1:
        # Logits and given ids are equally many tensors.
        def decided(one: Operator) -> bool:
            return "routing.ids" in one.names

        given = next(one for one in fitting if decided(one))
        ids = tensors[given.names.index("routing.ids")]
        is_given = ids is not None and not ids.is_floating_point()
        fitting = [one for one in fitting if decided(one) == is_given]
    keywords = fitting[0].signature.keywords(tensors, decode(options), QuantizedTensor.unchecked)
    return formula(SimpleNamespace(**keywords))


def register(counter: Any) -> None:
    """Add the formulas to the module of FlopCounterMode. Operators without products or norms count 0."""
    for formula, operators in _formulas():
        packets: dict[str, list[Operator]] = {}
        for operator in operators:
            packets.setdefault(operator.name.partition(".")[0], []).append(operator)
        for name, overloads in packets.items():

            def count(*arguments: Any, formula: Any = formula, overloads: Any = overloads, **_: Any) -> int:
                return _count(formula, overloads, arguments)

            counter.register_flop_formula(getattr(torch.ops.moebius, name), get_raw=True)(count)


class _OnImport(importlib.abc.MetaPathFinder):
    """Registers the formulas when the user imports FlopCounterMode, which imports Triton."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute: Any = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                register(module)

            spec.loader.exec_module = exec_module  # pyright: ignore[reportAttributeAccessIssue]
        return spec


def register_when_imported() -> None:
    if _MODULE in sys.modules:
        register(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _OnImport())
