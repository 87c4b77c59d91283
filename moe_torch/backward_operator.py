"""The operators that compute gradients of single stages."""

from __future__ import annotations

from typing import Any

import torch

from moe_core.arrays import ALIGNMENT
from moe_torch.dispatch import Operator


class BackwardOperator(Operator):
    """A backward whose first tensor is the gradient of the forward's result, which may start anywhere: autograd makes
    it, as a slice of a larger one for example, and the caller could not move it."""

    def _run(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[torch.Tensor]:
        gradient, *others = arguments
        if gradient.data_ptr() % ALIGNMENT:
            gradient = gradient.clone()
        return super()._run(key, (gradient, *others))
