"""The shared expert of a rank's tokens: a forward without other experts."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from moe_core.errors import Unsupported
from moe_core.ops.moe.names import result_names, saved_names
from moe_core.specs import MoESpec, Tuning
from moe_core.specs.operands import ExpertWeights, SharedExpert, TopK, named_arrays
from moe_torch.bridge.operator import call, call_first
from moe_torch.bridge.options import require_instance
from moe_torch.operators import stages, table
from moe_torch.operators.routed import hidden

_FORWARD, _TRAINING, _BACKWARD = (kinds[TopK] for kinds in (table.MOE, table.TRAINING, table.BACKWARD))
_RESULTS = (*result_names(TopK), "routing.ids", "routing.weights")
#: Columns of the expert without tokens.
_COLUMNS = 32


class _Dense(torch.autograd.Function):
    """`(given, spec, x, wide, gate_up, down, up, gate) -> (rows fp32 [T, D], logits of the gate fp32 [T, 1] or None)`.

    wide takes the gradient of x. The gradient of rows arrives multiplied by the gate, for one device's rounding.
    """

    @staticmethod
    def forward(ctx: Any, given: dict[str, Any], spec: MoESpec, x: torch.Tensor, wide: torch.Tensor, *own: Any) -> Any:
        given = given | {"x": x} | dict(zip(_SHARED, own, strict=True))
        ungated = given | {"shared.gate": None}
        with hidden():  # traces are of routed experts
            results = call(_TRAINING, _TRAINING.by_name(ungated, spec))
        names = (*_RESULTS, *saved_names(spec, SharedExpert(own[0], own[1])))
        logits = gate_logits(x, own[3], spec)
        saved = given | dict(list(zip(names, results, strict=True))[1:]) | {"saved.shared_gate": logits}
        ctx.names, ctx.spec = tuple(saved), spec
        ctx.save_for_backward(*saved.values())
        if logits is not None:
            ctx.mark_non_differentiable(logits)
        return results[0], logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: torch.Tensor, _: Any) -> Any:
        places = ("wide", *_SHARED)
        asked = [name for name, needed in zip(places, ctx.needs_input_grad[3:], strict=True) if needed]
        known = dict(zip(ctx.names, ctx.saved_tensors, strict=True)) | {"gradients.output": d_rows.contiguous()}
        results = call(_BACKWARD, _BACKWARD.by_name(known, ctx.spec, tuple(f"d_{name}" for name in asked)))
        gradients = dict(zip(asked, results, strict=True))
        return None, None, None, *[gradients.get(name) for name in places]


def gate_logits(x: torch.Tensor, gate: torch.Tensor | None, spec: MoESpec) -> torch.Tensor | None:
    """fp32 `[T, 1]`, None without a gate."""
    if gate is None:
        return None
    return stages.ROUTER.call(x=x, weight=gate.detach(), bias=None, wide=None, spec=spec.shared_gate_spec())


_SHARED = ("shared.gate_up", "shared.down", "shared.up", "shared.gate")


def shared_output(
    x: torch.Tensor,
    wide: torch.Tensor | None,
    shared: SharedExpert,
    experts: ExpertWeights,
    spec: MoESpec,
    group_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The shared expert's rows fp32 `[T, D]` and its gate's logits fp32 `[T, 1]`. group_tokens: for tiles."""
    require_instance("shared", shared, SharedExpert)
    if experts.layer_index is not None:
        raise Unsupported("shared must be None beside experts with a layer_index across ranks; pass one layer's")
    in_out, gate_layout = spec.weight_layout == "in_out", spec.activation.gate_layout
    separate = spec.activation.gated and gate_layout == "separate"
    width = _COLUMNS * (2 if spec.activation.gated and not separate else 1)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return x.new_zeros((1, rows, columns) if in_out else (1, columns, rows))

    none = ExpertWeights(
        matrix(x.shape[1], width), matrix(_COLUMNS, x.shape[1]), matrix(x.shape[1], _COLUMNS) if separate else None
    )
    nowhere = TopK(x.new_full((len(x), 1), -1, dtype=torch.int32), x.new_zeros((len(x), 1), dtype=torch.float32))
    tuning = Tuning() if spec.tuning is None else spec.tuning
    if tuning.expected_tokens is None:
        tuning = dataclasses.replace(tuning, expected_tokens=max(1, group_tokens))
    options: Any = {"router": None, "activations": None, "out_dtype": "float32", "tuning": tuning}
    spec = dataclasses.replace(spec, **options)
    operands = dict((*named_arrays(none, "experts."), *named_arrays(nowhere, "routing.")))
    matrices = shared.gate_up, shared.down, shared.up, shared.gate
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (wide, *matrices)):
        return cast(Any, _Dense.apply(operands, spec, x, wide, *matrices))
    operands |= {"x": x} | dict(zip(_SHARED[:3], matrices[:3], strict=True))
    with hidden():
        rows = call_first(_FORWARD, _FORWARD.by_name(operands, spec))
    return rows, gate_logits(x, shared.gate, spec)
