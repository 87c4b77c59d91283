"""NumPy twins of the logits' scale and softcap."""

from __future__ import annotations

import numpy as np

from moe_core.ops.activation.reference import softcap, softcap_derivative
from moe_core.specs import RouterSpec


def bounded(logits: np.ndarray, spec: RouterSpec) -> np.ndarray:
    """The logits that are scored: softcap * tanh(logits * logit_scale / softcap), or logits * logit_scale."""
    with np.errstate(all="ignore"):
        scaled = logits if spec.logit_scale == 1 else logits * logits.dtype.type(spec.logit_scale)
        return scaled if spec.softcap is None else softcap(scaled, spec.softcap)


def through_bounds(d_bounded: np.ndarray, logits: np.ndarray, spec: RouterSpec) -> np.ndarray:
    if spec.softcap is None and spec.logit_scale == 1:
        return d_bounded
    # Logits of a token without a gradient are undefined.
    untouched = d_bounded == 0
    with np.errstate(all="ignore"):
        if spec.softcap is not None:
            d_bounded = d_bounded * softcap_derivative(logits * logits.dtype.type(spec.logit_scale), spec.softcap)
        if spec.logit_scale != 1:
            d_bounded = d_bounded * logits.dtype.type(spec.logit_scale)
    return np.where(untouched, 0.0, d_bounded)
