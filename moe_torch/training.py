"""The operators of a training step: a whole MoE forward that keeps what its backward reads, and that backward.

Each is one plan; what is kept and what is computed: docs/training.md. `moe_torch.gradients` calls them. Those of
quantised experts, which are frozen, take the scales and zero points beside each matrix, and are otherwise the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moe_core.arrays import ALIGNMENT
from moe_core.moe_backward import plan_moe_backward
from moe_core.operands import OutputGradients, RouterLogits, RouterWeights, TopK
from moe_core.plan import LaunchPlan
from moe_core.specs import MoESpec
from moe_torch.dispatch import Operator, argument_names
from moe_torch.main_grad import MATRICES
from moe_torch.operators import (
    MOE,
    MOE_BUNDLES,
    MOE_TENSORS,
    Outputs,
    hidden_width,
    moe_operands,
    moe_shapes,
    plan_moe_of,
)
from moe_torch.options import decode
from moe_torch.quantized_operators import (
    EXPERT_MATRICES,
    INPUT_SCALES,
    QuantizedOperator,
    plan_quantized_moe,
)

_OVERLOADS = {TopK: "top_k", RouterLogits: "router_logits", RouterWeights: "router_weights"}
#: The results of a forward after `output`, in order, by the names under which its backward reads them. With ids and
#: weights given these are what the forward used: a replay may have put others in the place of the caller's.
RESULTS = {
    TopK: ("tokens_per_expert", "invalid_ids", "routing.ids", "routing.weights"),
    RouterLogits: ("tokens_per_expert", "invalid_ids", "ids", "weights"),
    RouterWeights: ("tokens_per_expert", "invalid_ids", "ids", "weights", "logits"),
}


def kept_names(spec: MoESpec, shared_gate_up: Any, shared_gate: Any) -> tuple[str, ...]:
    """The buffers kept, which follow the results; arrays: of the shared expert, None where absent."""
    names = ["kept.group_start", "kept.slot_of_row", "kept.row_of_slot"]
    if not spec.recompute:
        names.insert(0, "kept.pre_activation")
        if shared_gate_up is not None:
            names.append("kept.shared_pre_activation")
    if shared_gate is not None:
        names.append("kept.shared_gate")
    return tuple(names)


# moe_training: tensors and options of moe
def _plan_training(kind: type, *request: Any) -> LaunchPlan:
    *arrays, spec, target = request
    return plan_moe_of(moe_operands(kind, arrays), spec, target, keep=True)


def _training_shapes(kind: type, *request: Any) -> Outputs:
    *arrays, spec = request
    outputs = moe_shapes(kind, *request)
    given = moe_operands(kind, arrays)
    x, experts, routing, shared = given.x, given.experts, given.routing, given.shared
    if kind is TopK:
        outputs += [(tuple(routing.ids.shape), torch.int32), (tuple(routing.weights.shape), torch.float32)]
    tokens = x.shape[0]
    slots = tokens * (routing.ids.shape[1] if kind is TopK else spec.router.top_k)
    num_experts = experts.gate_up.shape[0 if experts.layer is None else 1]

    def pre_activation(rows: Any, bundle: Any) -> tuple[tuple[Any, ...], torch.dtype]:
        return (rows, spec.activation.input_width(hidden_width(bundle.gate_up, spec))), x.dtype

    shapes = {
        "kept.pre_activation": pre_activation(slots, experts),
        "kept.group_start": ((num_experts + 1,), torch.int32),
        "kept.slot_of_row": ((slots,), torch.int32),
        "kept.row_of_slot": ((slots,), torch.int32),
        "kept.shared_gate": ((tokens, 1), torch.float32),
    }
    if shared is not None:
        shapes["kept.shared_pre_activation"] = pre_activation(tokens, shared)
    parts = (None, None) if shared is None else (shared.gate_up, shared.gate)
    return outputs + [shapes[name] for name in kept_names(spec, *parts)]


class _Training(Operator):
    """Results: output, tokens_per_expert, invalid_ids, ids, weights, then logits if routed from x, then what is kept.

    Given ids and weights are copied: an operator returns no alias.
    """

    @functools.cached_property
    def _copied(self) -> tuple[int, ...]:
        return tuple(self.names.index(name) for name in ("routing.ids", "routing.weights") if name in self.names)

    def _run(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[torch.Tensor]:
        outputs = super()._run(key, arguments)
        outputs[3:3] = [arguments[place].clone() for place in self._copied]
        return outputs


class _QuantizedTraining(_Training, QuantizedOperator):
    """The same with quantised experts."""


def _training(kind: type) -> Operator:
    return _Training(
        f"moe_training.{_OVERLOADS[kind]}({MOE_TENSORS[kind]}, str options) -> Tensor[]",
        functools.partial(_plan_training, kind),
        functools.partial(_training_shapes, kind),
        bundles=MOE_BUNDLES,
    )


def _quantized_training(kind: type) -> Operator:
    return _QuantizedTraining(
        f"moe_quantized_training.{_OVERLOADS[kind]}",
        MOE_TENSORS[kind],
        EXPERT_MATRICES,
        functools.partial(plan_quantized_moe, kind, keep=True),
        functools.partial(_training_shapes, kind),
        more=INPUT_SCALES,
        returns="Tensor[]",
    )


# moe_backward: gradients of outputs, tensors of moe, results of the forward, kept buffers; options (MoESpec, wanted)
_UPSTREAM = {
    TopK: "Tensor gradients_output",
    RouterLogits: "Tensor gradients_output, Tensor? gradients_weights",
    RouterWeights: "Tensor gradients_output, Tensor? gradients_weights, Tensor? gradients_logits",
}
_FOUND = {
    TopK: "Tensor tokens_per_expert",
    RouterLogits: "Tensor tokens_per_expert, Tensor ids, Tensor weights",
    RouterWeights: "Tensor tokens_per_expert, Tensor ids, Tensor weights, Tensor logits",
}
_KEPT_TENSORS = (
    "Tensor? kept_pre_activation, Tensor kept_group_start, Tensor kept_slot_of_row, Tensor kept_row_of_slot, "
    "Tensor? kept_shared_pre_activation, Tensor? kept_shared_gate"
)
_INTO_TENSORS = ", ".join(
    f"Tensor({letter}!)? into_{name.replace('.', '_')}" for letter, name in zip("abcdef", MATRICES, strict=True)
)
_BACKWARD_BUNDLES = ("gradients", *MOE_BUNDLES, "kept", "into")


def _backward_tensors(kind: type, adds: bool) -> str:
    """The tensors of a backward in its schema; adds: those that take sums too."""
    parts = (_UPSTREAM[kind], MOE_TENSORS[kind], _FOUND[kind], _KEPT_TENSORS)
    return ", ".join((*parts, _INTO_TENSORS) if adds else parts)


def _with_dots(names: Sequence[str]) -> tuple[str, ...]:
    """`into.experts_down` -> `into.experts.down`."""
    shown = {f"into.{name.replace('.', '_')}": f"into.{name}" for name in MATRICES}
    return tuple(shown.get(name, name) for name in names)


def _accumulated(wanted: tuple[str, ...], given: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of the gradients wanted that are added to a tensor."""
    return tuple(name for name in wanted if given.get(f"into.{name.removeprefix('d_')}") is not None)


def _plan_backward(kind: type, names: tuple[str, ...], *request: Any) -> LaunchPlan:
    """names: of the arrays of the request, quantised ones as one."""
    *arrays, spec, wanted, target = request
    given = dict(zip(names, arrays, strict=True))
    upstream = (given.get(f"gradients.{name}") for name in ("output", "weights", "logits"))
    operands = moe_operands(kind, [given[name] for name in MOE[kind].names])
    options = {"wanted": wanted, "accumulate": _accumulated(wanted, given)}
    return plan_moe_backward(OutputGradients(*upstream), operands, spec, target, **options)


def _gradient_shapes(names: tuple[str, ...], *request: Any) -> Outputs:
    *tensors, _, wanted = request
    given = dict(zip(names, tensors, strict=True))
    added = _accumulated(wanted, given)
    arrays = [given[name.removeprefix("d_")] for name in wanted if name not in added]
    return [(tuple(array.shape), array.dtype) for array in arrays]


class _Backward(Operator):
    """Results: the gradients that the options name, in that order."""

    @functools.cached_property
    def _num_upstream(self) -> int:
        return sum(name.startswith("gradients.") for name in self.names)

    def _run(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[torch.Tensor]:
        return super()._run(key, self._with_aligned(arguments))

    def _with_aligned(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        upstream = [_aligned(gradient) for gradient in arguments[: self._num_upstream]]
        return (*upstream, *arguments[self._num_upstream :])


class _BackwardInto(_Backward):
    """The gradients of matrices for which there is a tensor `into` are added to it; results: the others."""

    def _run(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[torch.Tensor]:
        arguments = self._with_aligned(arguments)
        ready = self._cache.get(key) or self._remember(key, arguments)
        given = dict(zip(self.names, arguments[:-1], strict=True))
        _, wanted, *_ = decode(arguments[-1])
        into = {name: given[f"into.{name.removeprefix('d_')}"] for name in _accumulated(wanted, given)}
        torch.autograd.graph.increment_version(list(into.values()))
        places = [into.get(name) for name in wanted]
        outputs = ready.run([arguments[index].data_ptr() for index in ready.selection], places)
        return [output for name, output in zip(wanted, outputs, strict=True) if name not in into]


class _QuantizedBackward(_Backward, QuantizedOperator):
    """The same with quantised experts, whose formats follow in the options."""


class _QuantizedBackwardInto(_BackwardInto, QuantizedOperator):
    """The same with quantised experts; what is added are the gradients of the matrices that are not quantised."""


def _aligned(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient may be a slice that starts anywhere; kernels take addresses that are multiples of ALIGNMENT."""
    return gradient.clone() if gradient is not None and gradient.data_ptr() % ALIGNMENT else gradient


def _backward(kind: type, adds: bool) -> Operator:
    tensors = _backward_tensors(kind, adds)
    names = _with_dots(argument_names(tensors, _BACKWARD_BUNDLES))
    build, packet = (_BackwardInto, "moe_backward_into") if adds else (_Backward, "moe_backward")
    operator = build(
        f"{packet}.{_OVERLOADS[kind]}({tensors}, str options) -> Tensor[]",
        functools.partial(_plan_backward, kind, names),
        functools.partial(_gradient_shapes, names),
        bundles=_BACKWARD_BUNDLES,
    )
    operator.names = _with_dots(operator.names)
    return operator


def _quantized_backward(kind: type, adds: bool) -> Operator:
    tensors = _backward_tensors(kind, adds)
    names = _with_dots(argument_names(tensors, _BACKWARD_BUNDLES))
    build, suffix = (_QuantizedBackwardInto, "_into") if adds else (_QuantizedBackward, "")
    operator = build(
        f"moe_quantized_backward{suffix}.{_OVERLOADS[kind]}",
        tensors,
        EXPERT_MATRICES,
        functools.partial(_plan_backward, kind, names),
        functools.partial(_gradient_shapes, names),
        returns="Tensor[]",
        bundles=_BACKWARD_BUNDLES,
    )
    operator.names = _with_dots(operator.names)
    return operator


TRAINING: dict[type, Operator] = {kind: _training(kind) for kind in _OVERLOADS}
BACKWARD: dict[type, Operator] = {kind: _backward(kind, adds=False) for kind in _OVERLOADS}
#: With tensors that take the sum of what they hold and a gradient.
BACKWARD_INTO: dict[type, Operator] = {kind: _backward(kind, adds=True) for kind in _OVERLOADS}

#: The same of quantised experts.
QUANTIZED_TRAINING: dict[type, Operator] = {kind: _quantized_training(kind) for kind in _OVERLOADS}
QUANTIZED_BACKWARD: dict[type, Operator] = {kind: _quantized_backward(kind, adds=False) for kind in _OVERLOADS}
QUANTIZED_BACKWARD_INTO: dict[type, Operator] = {kind: _quantized_backward(kind, adds=True) for kind in _OVERLOADS}
