"""The canonical form of LoRA adapters of experts."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moe_core.base.checks import require_choice
from moe_core.checkpoint.config import settings_of
from moe_core.checkpoint.families import architecture_of, text_model
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers.convert import gate_place
from moe_core.layers.spec import HUGGING_FACE, MoELayerSpec, storage_of
from moe_core.ops.common.rounding import to_float32

#: Ranks of the op's operands are padded to a multiple.
RANK_STEP = 16
PRODUCTS = ("gate_up", "down")


@dataclass(frozen=True, eq=False)
class LoRAPair:
    """Factors of one product: `x W` becomes `x W + scale (x a) b`.

    a: `[E, in, R]`. b: `[E, R, out]`. scale: float32 `[E]`. ranks: int32 `[E]`, with zeros beyond in both
    factors.
    separate: gate and up have factors of their own, so that a is `[A_gate | A_up]` and b block-diagonal.
    """

    a: np.ndarray
    b: np.ndarray
    scale: np.ndarray
    ranks: np.ndarray
    separate: bool = False

    def change(self, expert: int) -> np.ndarray:
        """scale a b of one expert, float32 `[in, out]`."""
        return self.scale[expert] * (to_float32(self.a[expert]) @ to_float32(self.b[expert]))


@dataclass(frozen=True, eq=False)
class ExpertAdapter:
    """The adapter of one layer's experts. None: the product has none. router: of the router, with one expert.

    gate_layout: of the columns of gate_up.b, `halves` or `interleaved`, as they lie in the base model's matrix. An
    ungated layer ignores it.
    """

    gate_up: LoRAPair | None
    down: LoRAPair | None
    gate_layout: str = "halves"
    router: LoRAPair | None = None

    def pairs(self) -> dict[str, LoRAPair]:
        pairs = {name: getattr(self, name) for name in PRODUCTS}
        return {name: pair for name, pair in pairs.items() if pair is not None}

    def with_gate_layout(self, gate_layout: str) -> ExpertAdapter:
        """The same adapter for a matrix with gate and up columns in another order."""
        require_choice("gate_layout", gate_layout, ("halves", "interleaved"))
        pair = self.gate_up
        if pair is None or gate_layout == self.gate_layout:
            return replace(self, gate_layout=gate_layout)
        b, width = np.empty_like(pair.b), pair.b.shape[-1] // 2
        for is_up in (False, True):
            b[..., gate_place(gate_layout, is_up, width)] = pair.b[..., gate_place(self.gate_layout, is_up, width)]
        return replace(self, gate_up=replace(pair, b=b), gate_layout=gate_layout)

    def operands(self) -> dict[str, np.ndarray | None]:
        """a1, b1, a2, b2[, a_router, b_router], with R padded to a multiple of 16 by zeros, scale and ranks `[E]`, of a
        router alone `[1]`, as the op takes them.

        Raises Unsupported if products have different scales, because the op takes one.
        """
        router = {} if self.router is None else {"_router": self.router}
        pairs = [*self.pairs().values(), *router.values()]
        if not all((pair.scale == pairs[0].scale).all() for pair in pairs):
            scales = " and ".join(str(pair.scale[0]) for pair in pairs)
            raise Unsupported(
                f"gate_up, down and router must have one scale, got {scales}; multiply the factor b of one product by "
                "the ratio"
            )
        size = -(-max(pair.a.shape[-1] for pair in pairs) // RANK_STEP) * RANK_STEP
        arrays: dict[str, np.ndarray | None] = {}
        for number, pair in ({"1": self.gate_up, "2": self.down} | router).items():
            for name, axis in (("a", 2), ("b", 1)):
                factor = None if pair is None else getattr(pair, name)
                arrays[f"{name}{number}"] = None if factor is None else _padded(factor, axis, size)
        ranks = functools.reduce(np.maximum, [pair.ranks for pair in pairs])
        return arrays | {"scale": pairs[0].scale, "ranks": ranks.astype(np.int32)}


def _padded(factor: np.ndarray, axis: int, size: int) -> np.ndarray:
    widths = [(0, 0)] * 3
    widths[axis] = 0, size - factor.shape[axis]
    return np.ascontiguousarray(np.pad(factor, widths))


@dataclass(frozen=True)
class AdapterBase:
    """The experts of the base model: sizes, and how their matrices are stored. width: outputs of the first product."""

    num_experts: int
    d_model: int
    d_ff: int
    width: int
    weight_layout: str
    gate_layout: str

    @classmethod
    def of(cls, base: Any) -> AdapterBase:
        """base: a `MoELayerSpec`, or a model's config as `layer_spec_from_config` takes it."""
        if isinstance(base, AdapterBase):
            return base
        if isinstance(base, MoELayerSpec):
            spec, storage = base, base.storage(HUGGING_FACE)
        else:
            architecture = architecture_of(text_model(settings_of(base)))
            spec, storage = architecture.layer_spec(None), storage_of(architecture.spec)
        width = spec.experts.activation.input_width(spec.d_ff)
        # Files keep gate and up of separate matrices apart.
        gate_layout = "halves" if storage.gate_layout == "separate" else storage.gate_layout
        return cls(spec.num_experts, spec.d_model, spec.d_ff, width, storage.weight_layout, gate_layout)

    def sizes(self, product: str) -> tuple[int, int]:
        """Inputs and outputs of a product."""
        return (self.d_model, self.width) if product == "gate_up" else (self.d_ff, self.d_model)


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter of a model's experts.

    base: of the experts, a `MoELayerSpec`, or a model's config as `layer_spec_from_config` takes it.
    layers: by the path of the experts' module, such as `model.layers.0.mlp.experts`. names: each product's parameter
    there, such as `gate_up_proj`, and the router's module. settings: adapter_config.json. others: tensors of the file
    that belong to other modules, unchanged.
    """

    base: Any
    layers: Mapping[str, ExpertAdapter]
    settings: Mapping[str, Any] = field(default_factory=dict)
    packing: str = "peft"
    names: Mapping[str, str] = field(default_factory=lambda: {"gate_up": "gate_up_proj", "down": "down_proj"})
    others: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", AdapterBase.of(self.base))

    def path(self, layer: int | str) -> str:
        """The path of a layer by its number or path. Raises InvalidInput if the adapter has none."""
        if layer in self.layers:
            return str(layer)
        paths = [path for path in self.layers if re.findall(r"(?<![^.])\d+(?![^.])", path)[-1:] == [str(layer)]]
        if len(paths) != 1:
            raise InvalidInput(
                f"layer must be the number or path of one layer with an adapter, got {layer!r}; the paths are "
                f"{', '.join(self.layers)}: name one"
            )
        return paths[0]

    def layer(self, layer: int | str) -> ExpertAdapter:
        """The adapter of the layer with this number or path."""
        return self.layers[self.path(layer)]
