"""The gradient of the composed operator `moe`, and so of everything made of it.

Way of a training step: `moebius::moe` meets a tensor that asks for a gradient -> its autograd layer, here ->
`moebius::moe_training` -> later `moebius::moe_backward`, which computes the gradients asked for and nothing else.
Compiled programs contain the last two. x, the weights and biases of experts, shared expert and router have gradients,
and given logits or weights; into them flow those of the output and of the weights and logits returned. What is integer
or bool has none, nor have correction_bias and layer. There are no second derivatives.

Quantised experts have operators of their own, `moebius::moe_quantized_training` and `moebius::moe_quantized_backward`.
Gradients go through their matrices, which are frozen. Where x and the hidden rows are quantised too nothing has one.
What is refused, and why: `moe_core.expert_checks.why_no_moe_gradient`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, NoReturn

import torch

from moe_core.errors import Unsupported
from moe_core.expert_checks import why_no_moe_gradient
from moe_core.formats import QuantizedTensor
from moe_core.operands import RouterLogits, RouterWeights, TopK
from moe_torch.dispatch import Operator, call
from moe_torch.main_grad import MATRICES, destination, main_grads, require_eager
from moe_torch.operators import MOE, moe_operands
from moe_torch.options import TORCH_DTYPES, decode, encode
from moe_torch.quantized_operators import MOE_QUANTIZED, QuantizedOperator
from moe_torch.training import (
    BACKWARD,
    BACKWARD_INTO,
    QUANTIZED_BACKWARD,
    QUANTIZED_BACKWARD_INTO,
    QUANTIZED_TRAINING,
    RESULTS,
    TRAINING,
    kept_names,
)

_CONSTANTS = {"experts.layer", "routing.ids", "routing.correction_bias", "token_mask", "expert_map"}
#: The places of the results into which gradients flow.
_FLOWING = {TopK: (0,), RouterLogits: (0, 4), RouterWeights: (0, 4, 5)}
_NUM_RETURNED = {kind: len(operator.overload._schema.returns) for kind, operator in MOE.items()}
_NO_VMAP = "moe has no gradient inside of torch.func.vmap; take the gradient of the whole batch, or loop over it"


class _Operators(NamedTuple):
    """Those of one operator `moe`. kind: of its routing."""

    kind: type
    moe: Operator
    training: Operator
    backward: Operator
    backward_into: Operator


_ALL = [
    _Operators(kind, *(table[kind] for table in tables))
    for tables in (
        (MOE, TRAINING, BACKWARD, BACKWARD_INTO),
        (MOE_QUANTIZED, QUANTIZED_TRAINING, QUANTIZED_BACKWARD, QUANTIZED_BACKWARD_INTO),
    )
    for kind in MOE
]


class _MoE(torch.autograd.Function):
    """`(operators, tensors of moe, options) -> results of moe_training`."""

    @staticmethod
    def forward(used: _Operators, *arguments: Any) -> tuple[torch.Tensor, ...]:
        return tuple(call(used.training, *arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.used, *tensors, ctx.options = inputs
        flowing = [output[place] for place in _FLOWING[ctx.used.kind]]
        ctx.mark_non_differentiable(*[one for one in output if not any(one is other for other in flowing)])
        ctx.set_materialize_grads(False)
        # Given ids and weights are among the results: see RESULTS.
        names, twice = ctx.used.moe.names, RESULTS[ctx.used.kind]
        saved = [None if name in twice else tensor for name, tensor in zip(names, tensors, strict=True)]
        ctx.save_for_backward(*saved, *output[1:])
        spec, *_ = decode(ctx.options)
        # Saved tensors come back without their attributes; those of other tensors shall not be kept alive.
        ctx.holders, ctx.edges = {}, {}
        if spec.main_grad:
            given = [name for name, tensor in zip(names, tensors, strict=True) if tensor is not None]
            ctx.edges = {name: place for place, name in enumerate(given)}
            ctx.holders = {
                name: tensor
                for name, tensor in zip(names, tensors, strict=True)
                if name in MATRICES and tensor is not None and tensor.requires_grad
            }

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        used, saved = ctx.used, ctx.saved_tensors
        kind, names = used.kind, used.moe.names
        spec, *formats = decode(ctx.options)
        known = dict(zip(names, saved, strict=False))
        kept = kept_names(spec, known["shared.gate_up"], known["shared.gate"])
        known |= dict(zip((*RESULTS[kind], *kept), saved[len(names) :], strict=True))
        upstream = [gradients[place] for place in _FLOWING[kind]]
        if upstream[0] is None:
            dtype = known["x"].dtype if spec.out_dtype is None else TORCH_DTYPES[spec.out_dtype]
            upstream[0] = torch.zeros_like(known["x"], dtype=dtype, memory_format=torch.contiguous_format)
        labels = ("gradients.output", "gradients.weights", "gradients.logits")
        known |= {name: _dense(gradient) for name, gradient in zip(labels, upstream, strict=False)}
        asked = [
            name
            for name, needed in zip(names, ctx.needs_input_grad[1:], strict=False)
            if needed and name not in _CONSTANTS
        ]
        flows = {name: destination(ctx.next_functions[ctx.edges[name]][0]) for name in asked if name in ctx.holders}
        asked = [name for name in asked if flows.get(name) != "nowhere"]
        into = main_grads({name: ctx.holders[name] for name in asked if flows.get(name) == "weight"})
        known |= {f"into.{name}": buffer for name, buffer in into.items()}
        options = encode(spec, tuple(f"d_{name}" for name in asked), *formats)
        operator = used.backward_into if into else used.backward
        made = [name for name in asked if name not in into]
        found: dict[str, torch.Tensor] = {}
        if asked:
            found = dict(zip(made, call(operator, *[known.get(name) for name in operator.names], options), strict=True))
        return (None, *[found.get(name) for name in names], None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
        raise Unsupported(_NO_VMAP)


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Gradients come in any strides, those of a sum in none."""
    return None if gradient is None else gradient.contiguous()


class _MoEBackward(torch.autograd.Function):
    """`moe_backward` where the gradients may be differentiated again, as with create_graph=True: that is refused."""

    @staticmethod
    def forward(operator: Operator, *arguments: Any) -> tuple[torch.Tensor, ...]:
        return tuple(call(operator, *arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        raise Unsupported(
            "moe has a gradient, and no gradient of that one; leave second derivatives out, or detach() the gradients"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
        raise Unsupported(_NO_VMAP)


def _refuse(used: _Operators, named: dict[str, Any], options: str) -> None:
    """Raise Unsupported where a call with quantised experts has no gradient of what asks for one."""
    if not isinstance(used.moe, QuantizedOperator):
        return
    spec, formats = decode(options)
    asked = [name for name, tensor in named.items() if tensor is not None and tensor.requires_grad]
    arrays, _ = used.moe.joined(list(named.values()), formats, QuantizedTensor.unchecked)
    reason = why_no_moe_gradient(moe_operands(used.kind, arrays).experts, spec, asked)
    if reason is not None:
        raise Unsupported(
            f"{reason}; or detach() what requires a gradient ({', '.join(asked)}), or call moe under torch.no_grad()"
        )


def _gradient(used: _Operators, *arguments: Any) -> tuple[torch.Tensor, ...]:
    *tensors, options = arguments
    named = dict(zip(used.moe.names, tensors, strict=True))
    _refuse(used, named, options)
    spec, *_ = decode(options)
    if spec.main_grad:
        require_eager(tensors)
        # Found here too, where the caller is to be seen.
        main_grads({name: named[name] for name in MATRICES if named[name] is not None and named[name].requires_grad})
    return _MoE.apply(used, *arguments)[: _NUM_RETURNED[used.kind]]


def _second_gradient(operator: Operator, *arguments: Any) -> list[torch.Tensor]:
    return list(_MoEBackward.apply(operator, *arguments))


def define_gradients() -> None:
    """Give `moe` its gradient."""
    for used in _ALL:
        # Arrays of quantised matrices are among them, to be refused.
        used.moe.define_gradient(frozenset(used.moe.names) - _CONSTANTS, functools.partial(_gradient, used))
        for backward in (used.backward, used.backward_into):
            backward.define_gradient(frozenset(backward.names), functools.partial(_second_gradient, backward))
