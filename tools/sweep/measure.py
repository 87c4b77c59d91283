"""What of one family runs on Moebius, measured on its tiny model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

import moe_torch.transformers
from moe_core.errors import InvalidInput, Unsupported
from tools.sweep import models

#: Errors up to this are rounding: float32, relative to the largest value.
TOLERANCE = 2e-5
#: A gradient counts as at least this share of the model's largest, so that one that is zero but for rounding passes.
_FLOOR = 1e-3


@dataclass(frozen=True)
class Row:
    """One family. Empty texts mean yes; others say what is missing.

    experts, layer: reasons why `experts_implementation="moebius"`, and a preset, do not run. logits, gradients: errors
    against eager experts, relative to the largest value; None where nothing ran. block, reader, writer: reasons why
    `MoE.from_block`, the checkpoint's reader and its writer do not.
    """

    family: str
    experts: str = ""
    logits: float | None = None
    gradients: float | None = None


def measure(family: str) -> Row:
    """Everything about one family."""
    model = models.build(family)
    row = Row(family)
    try:
        logits, gradients = experts_errors(family, model)
    except (Unsupported, InvalidInput) as error:
        return dataclasses.replace(row, experts=str(error))
    return dataclasses.replace(row, logits=logits, gradients=gradients)


def experts_errors(family: str, model: Any) -> tuple[float, float]:
    """(of the outputs, of the gradients) with Moebius' experts against eager ones."""
    wanted, wanted_gradients = _step(family, model)
    moe_torch.transformers.register()
    model.set_experts_implementation("moebius")
    given, gradients = _step(family, model)
    model.set_experts_implementation("eager")
    largest = max(float(gradient.abs().max()) for gradient in wanted_gradients.values())
    errors = []
    for name, gradient in wanted_gradients.items():
        scale = max(float(gradient.abs().max()), _FLOOR * largest)
        errors.append(float((gradients[name] - gradient).abs().max()) / scale)
    return float((given - wanted).abs().max() / wanted.abs().max()), max(errors)


def _step(family: str, model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The outputs of a model, and the gradients of its parameters through a random sum of them."""
    model.zero_grad()
    output = models.outputs(model(**models.inputs(family)))
    generator = torch.Generator().manual_seed(2)
    (output * torch.randn(output.shape, generator=generator)).sum().backward()
    gradients = {name: own.grad.clone() for name, own in model.named_parameters() if own.grad is not None}
    return output.detach(), gradients


def block_run(block: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(what a block returns for x `[B, T, D]`, the ids `[B * T, K]` it gave its experts, None where it gave none)."""
    given: list[Any] = []
    hook = block.experts.register_forward_pre_hook(
        lambda module, positional, named: given.extend((*positional, *named.values())), with_kwargs=True
    )
    output = block(x)
    hook.remove()
    ids = [one for one in given if isinstance(one, torch.Tensor) and one.dtype == torch.int64]
    output = output[0] if isinstance(output, tuple) else output
    return output.view_as(x), ids[0] if ids else None
