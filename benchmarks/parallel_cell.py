"""What the benchmark of expert parallelism measures: ways of exchange, cells, and who measures them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from benchmarks.shapes import ALL_SHAPES, Shape
from moe_core.formats import format_named
from moe_core.layers.spec import MoELayerSpec
from moe_core.parallel import ExchangeSpec, predict
from moe_core.parallel.machine import machine_of

#: The share of a GPU's memory that weights may take, with their gradients where there are any.
_FOR_WEIGHTS = 0.6
#: What is measured, by the name of a mode: fields of ExchangeSpec.
EXCHANGES: dict[str, dict[str, Any]] = {
    **{mode: {"mode": mode} for mode in ("all_gather", "all_to_all", "padded", "peer")},
    **{f"peer_{chunks}_chunks": {"mode": "peer", "chunks": chunks} for chunks in (2, 4)},
    "peer_fp8_rows": {"mode": "peer", "format": format_named("fp8_group")},
}


@dataclass(frozen=True)
class Setting:
    """Who measures. device: cuda, cpu, or shared, GPU 0 of all ranks, which then talk over gloo. seconds: of every
    median. limit: after which ranks hang."""

    ranks: int
    device: str
    seed: int
    seconds: float
    limit: float


@dataclass(frozen=True)
class Cell:
    """What is measured at once. tokens: of a rank. training: a step, forward and backward, instead of a forward.
    shared: with a shared expert, as large as another one."""

    shape: Shape
    tokens: int
    mode: str
    rows: str
    training: bool
    shared: bool = False

    def __str__(self) -> str:
        what = " training" * self.training + " with a shared expert" * self.shared
        return f"{self.shape.name}, {self.tokens} tokens a rank, {self.mode} of {self.rows}{what}"

    @property
    def exchange(self) -> ExchangeSpec:
        return ExchangeSpec(rows=self.rows, **EXCHANGES[self.mode])

    @property
    def named(self) -> dict[str, Any]:
        """The fields of a row that say which one it is."""
        fields = {"shape": self.shape.name, "experts": self.shape.num_experts, "tokens": self.tokens}
        fields |= {"mode": self.mode, "rows": self.rows, "what": "training" if self.training else "forward"}
        return fields | ({"shared": True} if self.shared else {})


def fitting(shape: Shape, memory: float, training: bool) -> Shape:
    """The shape with as many experts, halved as often as needed, as one GPU of so many bytes has room for."""
    experts = shape.num_experts
    while shape.weight_bytes(experts) * (2 if training else 1) > _FOR_WEIGHTS * memory and experts > shape.top_k:
        experts //= 2
    return dataclasses.replace(shape, num_experts=experts)


def layer_of(shape: Shape, experts: int | None = None) -> MoELayerSpec:
    """A shape as a layer of the cost model."""
    return MoELayerSpec(shape.d_model, shape.d_ff, experts or shape.num_experts, shape.top_k)


def predicted(row: dict[str, Any], ranks: int, machine: Any) -> float:
    """Microseconds of a row. One device's times, of all experts and of a rank's, are the row's."""
    layer = layer_of(ALL_SHAPES[row["shape"]], row["experts"])
    spec = ExchangeSpec(rows=row["rows"], **EXCHANGES[row["mode"]])
    training = row["what"] == "training"
    # The model takes a step's products as those of three forwards.
    products = tuple(row[name] / (3 if training else 1) for name in ("alone_us", "experts_us"))
    of_layer = dataclasses.replace(machine_of(machine), products=products)
    return predict(layer, row["tokens"], ranks, of_layer, spec, training=training).us
