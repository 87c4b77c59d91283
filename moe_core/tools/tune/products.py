"""Grouped matmuls of a layer for a number of tokens, as in `plan_moe`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_core.base import ArraySpec, Target
from moe_core.layers import ExpertsSpec, MoELayerSpec, SharedExpertsSpec, Storage
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.tile_choice import tile_key
from moe_core.specs import Activation, LayoutSpec, MatmulOperands, MatmulSpec
from moe_core.specs.tile_table import TileKey, entry_key

_GPT_OSS = ExpertsSpec(Activation("swiglu_oai"))
PRESETS: Mapping[str, MoELayerSpec] = {
    "qwen3-30b-a3b": MoELayerSpec(2048, 768, 128, 8),
    "qwen3-235b-a22b": MoELayerSpec(4096, 1536, 128, 8),
    "gpt-oss-20b": MoELayerSpec(2880, 2880, 32, 4, experts=_GPT_OSS),
    "gpt-oss-120b": MoELayerSpec(2880, 2880, 128, 4, experts=_GPT_OSS),
    "mixtral-8x7b": MoELayerSpec(4096, 14336, 8, 2),
    "deepseek-v3": MoELayerSpec(7168, 2048, 256, 8, shared_experts=SharedExpertsSpec(2048)),
}


@dataclass(frozen=True)
class Product:
    """One grouped matmul of a layer. operands: a bundle of ArraySpecs. layout: None: dense."""

    name: str
    num_tokens: int
    operands: MatmulOperands
    layout: LayoutSpec | None
    spec: MatmulSpec

    def problem(self, target: Target) -> MatmulProblem:
        return MatmulProblem(self.operands, self.layout, self.spec, target)

    @property
    def key(self) -> TileKey:
        return tile_key(self.problem(Target("reference")))

    @property
    def bucket(self) -> TileKey:
        return entry_key(self.key)


def products_of(layer: MoELayerSpec, storage: Storage, dtype: str, num_tokens: int) -> tuple[Product, ...]:
    """Both products of a layer's experts, then its shared experts'."""
    spec, (D, F, E, K) = layer.moe_spec(storage), (layer.d_model, layer.d_ff, layer.num_experts, layer.top_k)
    activation = spec.activation
    separate = activation.gate_layout == "separate"

    def matrix(inputs: int, outputs: int, *lead: int) -> ArraySpec:
        shape = (inputs, outputs) if spec.weight_layout == "in_out" else (outputs, inputs)
        return ArraySpec((*lead, *shape), dtype)

    def gate_up(width: int, *lead: int) -> MatmulOperands:
        x, columns = ArraySpec((num_tokens, D), dtype), width if separate else activation.input_width(width)
        return MatmulOperands(x, matrix(D, columns, *lead), up=matrix(D, width, *lead) if separate else None)

    layout = LayoutSpec(num_tokens, K, E)
    row_weight = ArraySpec((num_tokens, K), "float32")
    down = MatmulOperands(ArraySpec((layout.capacity, F), dtype), matrix(F, D, E), row_weight=row_weight)
    first = MatmulSpec(spec.weight_layout, "token", "row", activation, allow_tf32=spec.allow_tf32)
    second = MatmulSpec(spec.weight_layout, "row", "slot", allow_tf32=spec.allow_tf32)
    entries: list[tuple[Any, ...]] = [("gate_up", gate_up(F, E), layout, first), ("down", down, layout, second)]
    if layer.shared_experts is not None:
        S = layer.shared_experts.d_ff
        dense = MatmulSpec(spec.weight_layout, activation=activation, allow_tf32=spec.allow_tf32)
        entries.append(("shared gate_up", gate_up(S), None, dense))
        operands = MatmulOperands(ArraySpec((num_tokens, S), dtype), matrix(S, D))
        dense = MatmulSpec(spec.weight_layout, out_dtype="float32", allow_tf32=spec.allow_tf32)
        entries.append(("shared down", operands, None, dense))
    return tuple(Product(name, num_tokens, *rest) for name, *rest in entries)


def distinct_products(products: Iterable[Product]) -> Sequence[Product]:
    """One product for each table entry: the one with most rows."""
    kept: dict[TileKey, Product] = {}
    for product in products:
        known = kept.get(product.bucket)
        if known is None or product.key.rows > known.key.rows:
            kept[product.bucket] = product
    return tuple(kept.values())
