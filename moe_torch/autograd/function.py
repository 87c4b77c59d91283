"""One autograd function for all operators, which follows a rule for each. Second derivatives and `vmap` are refused.

It runs the operator that the rule names, and later computes the rule's gradients, usually with one more operator.
Compiled programs contain these two operators.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import torch

from moe_core.errors import Unsupported
from moe_torch.bridge import private
from moe_torch.bridge.operator import DIFFERENTIABLE, Operator, call


class Rule:
    """The differentiation of one operator, by names of its tensors. Tensors that are not differentiable are constants.

    forward: the operator that runs. Its results begin like `operator`'s. flowing: results with a gradient, None: all.
    """

    flowing: Sequence[int] | None = None
    named = True

    def __init__(self, operator: Operator, differentiable: Collection[str], forward: Operator | None = None) -> None:
        self.operator, self.differentiable, self.forward = operator, frozenset(differentiable), forward or operator
        packet = operator.name.partition(".")[0].partition("_backward")[0]
        self.op = packet.removesuffix("_quantized").removesuffix("_lora")

    def run(self, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        results = call(self.forward, arguments)
        return (results,) if isinstance(results, torch.Tensor) else tuple(results)

    def refuse(self, tensors: dict[str, Any], options: str, asked: list[str]) -> None:
        """Raise Unsupported for a required gradient that does not exist."""

    def saved(self, ctx: Any, tensors: dict[str, Any], results: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        return tensors

    def gradients(
        self, ctx: Any, saved: dict[str, Any], upstream: list[torch.Tensor | None], asked: list[str]
    ) -> dict[str, torch.Tensor]:
        """Return at least the gradients of `asked`, by name. upstream: of flowing results, contiguous, not all None."""
        raise NotImplementedError


class _Backward(Rule):
    """create_graph=True would differentiate the gradients again."""

    def __init__(self, operator: Operator) -> None:
        super().__init__(operator, operator.names)

    def saved(self, ctx: Any, tensors: dict[str, Any], results: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        return {}

    def gradients(self, ctx: Any, saved: Any, upstream: Any, asked: list[str]) -> NoReturn:
        raise Unsupported(
            f"{self.op} has no second derivative; where first gradients are constants of a loss, compute them without "
            "create_graph=True (in torch.func, detach() them); for a second derivative along v, take the difference of "
            "two gradients, (g(x + h * v) - g(x - h * v)) / (2 * h)"
        )


class _Function(torch.autograd.Function):
    """`(rule, *tensors, options) -> results of the rule's forward`."""

    @staticmethod
    def forward(rule: Rule, *arguments: Any) -> tuple[torch.Tensor, ...]:
        return rule.run(arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        rule, *tensors, ctx.options = inputs
        flowing = output if rule.flowing is None else [output[index] for index in rule.flowing]
        ctx.mark_non_differentiable(*[one for one in output if not any(one is other for other in flowing)])
        ctx.set_materialize_grads(False)
        saved = rule.saved(ctx, dict(zip(rule.operator.names, tensors, strict=True)), output)
        ctx.rule, ctx.names = rule, tuple(saved)
        ctx.save_for_backward(*saved.values())

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise Unsupported("moe_torch has no forward mode, as torch.func.hessian and jacfwd take it; use reverse mode")

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        rule, names, computed = ctx.rule, ctx.rule.operator.names, {}
        if any(one is not None and private.is_batched(one) for one in gradients):
            raise Unsupported(
                f"{rule.op} takes one gradient of its result at a time, got a batch (is_grads_batched=True, or a "
                "vectorised jacobian or hessian); loop over the batch, or leave vectorize out"
            )
        pairs = zip(names, ctx.needs_input_grad[1:], strict=False)
        asked = [name for name, needed in pairs if needed and name in rule.differentiable]
        # Gradients come with any strides. A sum has strides of 0.
        indices = range(len(gradients)) if rule.flowing is None else rule.flowing
        upstream = [None if (one := gradients[index]) is None else one.contiguous() for index in indices]
        if asked and any(one is not None for one in upstream):
            saved = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
            computed = rule.gradients(ctx, saved, upstream, asked)
        return (None, *[computed.get(name) if name in asked else None for name in names], None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, rule: Rule, *arguments: Any) -> NoReturn:
        raise Unsupported(
            f"{rule.op} has no gradient inside of torch.func.vmap; take the gradient of the whole batch, or loop over "
            "it"
        )


#: Made once, so that a compiler that breaks a graph here sees a call and no class.
_apply = private.apply_of(_Function)


def _differentiated(rule: Rule, *arguments: Any) -> Any:
    named = dict(zip(rule.operator.names, arguments, strict=False))
    asked = [name for name, tensor in named.items() if tensor is not None and tensor.requires_grad]
    rule.refuse(named, arguments[-1], asked)
    return rule.operator.pack(_apply(rule, *arguments)[: rule.operator.signature.returns])


def define_gradient(rule: Rule, *backwards: Operator) -> None:
    """backwards: the operators that compute the gradient."""
    if rule.named and rule.op not in DIFFERENTIABLE:
        DIFFERENTIABLE.append(rule.op)
    for each in (rule, *[_Backward(backward) for backward in backwards]):
        each.operator.define_gradient(each.differentiable, functools.partial(_differentiated, each))
