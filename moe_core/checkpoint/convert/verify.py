"""Prove a conversion: read its files again, and compare them with the source and with transformers' model."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from moe_core.checkpoint.layer import Checkpoint, MoELayer, open_checkpoint
from moe_core.errors import InvalidInput
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.ops.quantize.reference import ErrorSum
from moe_core.specs import TopK

_TRANSFORMERS = "moe_torch.transformers.verify"
#: Of a recomputed error, and of a quantised format's: nvfp4 is read as plain weights, rounded to bf16 once more.
_SLACK, _ROUNDED = 1e-6, 2.0**-9
_MODEL_COPIES = 4


class VerifiedLayer(NamedTuple):
    """Relative Frobenius errors against the source. weights: of the experts, output: of their outputs. theirs:
    `equal` if transformers has our numbers, "" if it did not load the files."""

    layer: int
    weights: float
    output: float
    theirs: str = ""


@dataclass(frozen=True)
class Verification:
    """logits: transformers' relative error against the source's, or None. not_loaded: why transformers was left out."""

    layers: tuple[VerifiedLayer, ...]
    logits: float | None = None
    not_loaded: str = ""

    def __str__(self) -> str:
        rows = [f"{'layer':>7}{'weights':>12}{'output':>12}  transformers"]
        rows += [f"{one.layer:>7}{one.weights:>12.3e}{one.output:>12.3e}  {one.theirs or '-'}" for one in self.layers]
        theirs = self.not_loaded or f"logits of transformers differ from the source's by {self.logits:.3e}"
        return "\n".join(["verified, relative errors against the source:", *rows, theirs])


def verify_conversion(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    largest: float = math.inf,
    *,
    transformers: bool = True,
) -> Verification:
    """Read a conversion again and compare it with its source.

    Experts of both are read layer by layer, and rows run through both. With torch, transformers and, for its files,
    compressed-tensors, transformers loads the conversion: its experts must be ours bit by bit.

    Args:
        largest: the largest error of a layer's weights that the conversion reported. Infinite: any, NaN too.
        transformers: False for files that only this library must read.

    Raises InvalidInput that names the first layer with another error, or that transformers loads otherwise.
    """
    before, after = open_checkpoint(source), open_checkpoint(destination)
    rows = []
    for number in after.moe_layers:
        row = _compared(_read(before, number), _read(after, number))
        if largest < math.inf and not row.weights <= largest + (_SLACK if largest < 2 * _ROUNDED else _ROUNDED):
            raise InvalidInput(
                f"{after.path} must hold the converted experts, got layer {number}, whose weights differ from the "
                f"source's by {row.weights:.3e} instead of {largest:.3e}; convert it again"
            )
        rows.append(row)
    reason = _why_not_loaded(after) if transformers else "transformers was not tried: it need not load the files"
    if reason:
        return Verification(tuple(rows), not_loaded=reason)
    theirs, logits, reason = importlib.import_module(_TRANSFORMERS).compare(before, after)
    return Verification(tuple(row._replace(theirs=theirs) for row in rows), logits, reason)


def fits(destination: str | os.PathLike[str]) -> bool:
    """True if memory has room for transformers' plain models of a conversion."""
    checkpoint = open_checkpoint(destination)
    size = sum((checkpoint.path / name).stat().st_size for name in set(checkpoint.index.files.values()))
    return _MODEL_COPIES * size < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read(checkpoint: Checkpoint, number: int) -> MoELayer:
    with warnings.catch_warnings():
        # Notes of layers that are dequantised, as here all are.
        warnings.simplefilter("ignore")
        return checkpoint.layer(number, allow_bad_scales=True).dequantized("float32")


def _compared(before: MoELayer, after: MoELayer) -> VerifiedLayer:
    error, outputs = ErrorSum(), []
    for one, other in zip(_matrices(before), _matrices(after), strict=True):
        error.add(one, other)
    top_k = min(2, before.num_experts)
    # Every expert has rows.
    ids = np.arange(2 * before.num_experts).reshape(-1, top_k) % before.num_experts
    width = before.experts.down.shape[-1 if before.spec.weight_layout == "in_out" else -2]
    x = np.random.default_rng(0).standard_normal((len(ids), width)).astype(np.float32)
    for layer in (before, after):
        spec = replace(layer.spec, router=None, apply_router_weight_on_input=False)
        routing = TopK(ids.astype(np.int32), np.full(ids.shape, 1 / top_k, np.float32))
        outputs.append(moe_stages(x, layer.experts, routing, spec)["output"])
    difference = ErrorSum()
    difference.add(*outputs)
    return VerifiedLayer(before.layer, error.relative_frobenius, difference.relative_frobenius)


def _matrices(layer: MoELayer) -> Iterator[np.ndarray]:
    """gate, up and down `[E, N, D]`; ungated experts have no gate."""
    experts, layout = layer.experts, layer.spec.activation.gate_layout
    turned = layer.spec.weight_layout == "in_out"
    gate_up, down, up = (
        None if one is None else (one.swapaxes(-1, -2) if turned else one)
        for one in (experts.gate_up, experts.down, experts.up)
    )
    assert gate_up is not None and down is not None
    half = gate_up.shape[-2] // 2
    if not layer.spec.activation.gated or up is not None:
        yield from (gate_up, down) if up is None else (gate_up, up, down)
    elif layout == "interleaved":
        yield from (gate_up[:, ::2], gate_up[:, 1::2], down)
    else:
        yield from (gate_up[:, :half], gate_up[:, half:], down)


def _why_not_loaded(checkpoint: Checkpoint) -> str:
    needed: list[Any] = ["torch", "transformers"]
    method = None if checkpoint.quantization is None else checkpoint.quantization.method
    needed += ["compressed_tensors"] if method == "compressed-tensors" else ["accelerate"] if method else []
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"transformers was not tried: {', '.join(missing)} is not installed" if missing else ""
