"""Statistics of MoE layers in training, from counts, and writers for them. Letters: E experts, K top-k."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moe_core.errors import InvalidInput

Values = Mapping[str, Any]
Write = Callable[[Values, int], Any]


def load_entropy(counts: np.ndarray) -> float:
    """The entropy of the load `[E]` over ln E: 1 is even, 0 one expert, or no token."""
    total = int(counts.sum())
    share = counts[counts > 0] / max(total, 1)
    return float(-(share * np.log(share)).sum() / (np.log(len(counts)) or 1.0)) if total else 0.0


def load_imbalance(counts: np.ndarray) -> float:
    """The busiest expert's load over the mean, 0 without a token."""
    total = int(counts.sum())
    return float(counts.max() * len(counts) / total) if total else 0.0


@dataclass(frozen=True)
class LayerWindow:
    """Counts of a layer since the last reading. name: path in the model. top_k: K. counts: `[E]`, slots routed to each
    expert, before any limit, `[0]`: unknown. kept: slots that a capacity limit left, None: it has none. overflow: rows
    of an exchange that found no memory, None: no exchange. losses: name -> mean over the forwards of the last step.
    norms: group of parameters -> its gradient's norm in the last step. expert_norms: `[E]`, of each expert.
    """

    name: str
    top_k: int
    counts: np.ndarray
    kept: int | None = None
    overflow: int | None = None
    losses: Mapping[str, float] = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)
    expert_norms: np.ndarray | None = None

    def values(self) -> dict[str, Any]:
        """Scalars, and arrays for histograms, by name."""
        counts, total = self.counts, max(int(self.counts.sum()), 1)
        values: dict[str, Any] = {}
        if counts.size:
            values |= {"load_entropy": load_entropy(counts), "load_imbalance": load_imbalance(counts)}
            values |= {"dead_experts": int((counts == 0).sum()), "load": counts * (len(counts) / total)}
        if self.kept is not None:
            values["dropped"] = (int(counts.sum()) - self.kept) / total
        if self.overflow is not None:
            values["overflow"] = self.overflow
        values |= self.losses
        values |= {f"grad_norm_{group}": norm for group, norm in self.norms.items()}
        return values if self.expert_norms is None else values | {"grad_norm_of_experts": self.expert_norms}


#: How values of layers make one of the model. Others are means.
_MEAN = lambda values: float(np.mean(values))  # noqa: E731
_ROOT = lambda values: float(np.sqrt(np.square(values).sum()))  # noqa: E731
_JOINED: dict[str, Callable[[Any], Any]] = {"dead_experts": sum, "overflow": sum, "load_imbalance": max}


def model_values(
    layers: Sequence[LayerWindow], seconds: float, *, prefix: str = "moe", per_layer: bool = True
) -> dict[str, Any]:
    """Values of a window by tag: `moe/load_entropy` of the model, and `moe/<layer>/load_entropy` of each layer.

    The model has the mean of its layers' entropies, dropped shares and losses, the sum of dead experts, the largest
    imbalance, and the norm of all layers' gradients of a group. Tokens per second are of the first layer that saw any,
    without masked ones.

        layers: of the model, in order.
        seconds: of the window.
        prefix: of each tag.
        per_layer: also each layer's values, with arrays for histograms.
    """
    by_layer = {layer.name: layer.values() for layer in layers}
    names = list(dict.fromkeys(name for values in by_layer.values() for name in values))
    tags: dict[str, Any] = {}
    for name in names:
        held = [values[name] for values in by_layer.values() if name in values]
        if not isinstance(held[0], np.ndarray):
            join = _ROOT if name.startswith("grad_norm") else _JOINED.get(name, _MEAN)
            tags[f"{prefix}/{name}"] = join(held)
    tokens = next((layer.counts.sum() / layer.top_k for layer in layers if layer.counts.any()), 0.0)
    tags[f"{prefix}/tokens_per_second"] = float(tokens / seconds) if seconds > 0 else 0.0
    if per_layer:
        tags |= {f"{prefix}/{layer}/{name}": one for layer, values in by_layer.items() for name, one in values.items()}
    return tags


def writer_of(writer: Any) -> Write:
    """A function of (values by tag, step) for a writer of any library. None: writes nothing.

    Takes TensorBoard's `SummaryWriter` (add_scalar, add_histogram), Flax's (scalar, histogram), the module wandb or one
    of its runs (log), a logger of Lightning (log_metrics), and a function of (values, step). Raises InvalidInput.
    """
    if writer is None:
        return lambda values, step: None
    if hasattr(writer, "add_scalar"):
        return _by_kind(writer.add_scalar, getattr(writer, "add_histogram", None))
    if hasattr(writer, "scalar") and hasattr(writer, "histogram"):
        return _by_kind(writer.scalar, writer.histogram)
    if hasattr(writer, "log_metrics"):
        return lambda values, step: writer.log_metrics(_scalars(values), step=step)
    if hasattr(writer, "log"):
        return lambda values, step: writer.log(_of_wandb(values), step=step)
    if callable(writer):
        return writer
    raise InvalidInput(
        f"writer must have add_scalar (TensorBoard), log (wandb), log_metrics (Lightning) or be a function of (values, "
        f"step), got {type(writer).__name__}; pass one such as torch.utils.tensorboard.SummaryWriter(), or None"
    )


def _scalars(values: Values) -> dict[str, Any]:
    return {tag: value for tag, value in values.items() if not isinstance(value, np.ndarray)}


def _by_kind(scalar: Callable[..., Any], histogram: Callable[..., Any] | None) -> Write:
    def write(values: Values, step: int) -> None:
        for tag, value in values.items():
            if not isinstance(value, np.ndarray):
                scalar(tag, value, step)
            elif histogram is not None:
                histogram(tag, value, step)

    return write


def _of_wandb(values: Values) -> dict[str, Any]:
    histogram = getattr(sys.modules.get("wandb"), "Histogram", None)
    if histogram is None:
        return _scalars(values)
    return {tag: histogram(value) if isinstance(value, np.ndarray) else value for tag, value in values.items()}
