"""Memory that ranks of one process reach at each other's addresses, and exchanges through it."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np

from moe_core.base import dtypes
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.exchange import operands
from moe_core.ops.exchange.operands import in_records
from moe_core.ops.exchange.pull import plan_combine_pull_weights
from moe_core.ops.exchange.push import plan_combine_push, plan_dispatch_push, plan_push_counts, plan_push_slots
from moe_core.ops.exchange.tables import plan_peer_places
from tests.support.harness import GUARD_BYTES, OUTPUT_GUARD, GuardedBuffer, engine_target, run_plan, spec_of
from tests.support.parallel.twin.arithmetic import sends
from tests.support.runtime.device_memory import DeviceBytes

#: Engines of one process with the memory of all ranks, on the host or on a GPU; and those that read the host's.
ENGINES = (engine_target(), Target("reference"))
ON_HOST = tuple(target for target in ENGINES if target.kind != "cuda")


class Places(NamedTuple):
    """The results of `plan_peer_places` for one rank."""

    owners: np.ndarray
    rows: np.ndarray
    received: np.ndarray
    overflow: np.ndarray


class DeviceBuffer(GuardedBuffer):
    """A GuardedBuffer with a copy on a GPU, whose address it has. `image` is what is written and read here."""

    def __init__(self, name: str, spec: ArraySpec, guard: int) -> None:
        super().__init__(name, spec, guard)
        self._memory = DeviceBytes(self.image)
        weakref.finalize(self, self._memory.free).atexit = False

    @property
    def address(self) -> int:
        return self._memory.address + GUARD_BYTES

    def upload(self) -> None:
        self._memory.write(self.image)

    def download(self) -> None:
        self.image[:] = self._memory.read()


class Peers:
    """W ranks of one process: one array of each name at every rank, poisoned, between guard zones."""

    def __init__(self, num_ranks: int, target: Target) -> None:
        self.num_ranks, self.target = num_ranks, target
        self.buffers: dict[str, list[GuardedBuffer]] = {}

    def make(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        """One array of this name for every rank."""
        spec, kind = ArraySpec(shape, dtype), DeviceBuffer if self.target.kind == "cuda" else GuardedBuffer
        self.buffers[name] = [kind(f"{name} of {rank}", spec, OUTPUT_GUARD) for rank in range(self.num_ranks)]

    def at(self, name: str) -> np.ndarray:
        """The table of the addresses of an array."""
        return np.array([buffer.address for buffer in self.buffers[name]], np.int64)

    def of(self, name: str, rank: int) -> np.ndarray:
        """A rank's array, to read and to write."""
        buffer = self.buffers[name][rank]
        return buffer.view(buffer.image)

    def run(self, plan: Any, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
        """`run_plan` with the memory of all ranks, whose guard zones stay untouched."""
        others = [buffer for buffers in self.buffers.values() for buffer in buffers]
        given = {name: array for name, array in arrays.items() if array is not None}
        on_device = [buffer for buffer in others if isinstance(buffer, DeviceBuffer)]
        for buffer in on_device:
            buffer.upload()
        found = run_plan(plan, given, others=() if on_device else others)
        for buffer in on_device:
            buffer.download()
        for buffer in others:
            buffer.check(buffer.image)
        return found

    def places(self, ids: list[np.ndarray], num_places: int, receive: int) -> list[Places]:
        """Of every rank, from the places of its slots; counts go through the ranks' memory."""
        layouts = [sends(own, num_places) for own in ids]
        self.make("counts", (self.num_ranks, num_places), "int32")
        table = self.at("counts")
        for rank, layout in enumerate(layouts):
            plan = plan_push_counts(spec_of(layout.group_sizes), spec_of(table), self.target, rank=rank)
            self.run(plan, {"counts": layout.group_sizes, "counts_at": table})
        found = []
        for rank, (own, layout) in enumerate(zip(ids, layouts, strict=True)):
            arrays = {"ids": own, "group_start": layout.group_start, "row_of_slot": layout.row_of_slot}
            arrays["counts"] = self.of("counts", rank)
            specs = [spec_of(array) for array in arrays.values()]
            plan = plan_peer_places(*specs, self.target, rank=rank, receive=receive)
            found.append(Places(**self.run(plan, arrays)))
        return found

    def dispatch(self, x: np.ndarray, places: Places, num_rows: int, **options: Any) -> None:
        """`plan_dispatch_push` to the arrays `rows`, and `scales` with a format."""
        arrays = {"x": x, "owners": places.owners, "rows": places.rows, "rows_at": self.at("rows")}
        scales = self.at("scales") if "format" in options else None
        sent = in_records(plan_dispatch_push, places=operands.Places)
        specs = {name: spec_of(array) for name, array in arrays.items()}
        plan = sent(**specs, target=self.target, num_rows=num_rows, scales_at=spec_of(scales), **options)
        self.run(plan, arrays | {"scales_at": scales})

    def push_slots(self, weights: np.ndarray, places: Places, rank: int, num_rows: int) -> None:
        """`plan_push_slots` to the arrays `weights` and `sources`."""
        arrays = {"weights": weights, "owners": places.owners, "rows": places.rows}
        tables = {"weights_at": self.at("weights"), "sources_at": self.at("sources")}
        specs = {name: spec_of(array) for name, array in (arrays | tables).items()}
        plan = in_records(plan_push_slots, places=operands.Places)
        self.run(plan(**specs, target=self.target, rank=rank, num_rows=num_rows), arrays | tables)

    def combine_weights(self, places: Places, num_rows: int) -> np.ndarray:
        """`plan_combine_pull_weights` from the arrays `weights`."""
        arrays = {"owners": places.owners, "rows": places.rows, "weights_at": self.at("weights")}
        specs = {name: spec_of(array) for name, array in arrays.items()}
        plan = in_records(plan_combine_pull_weights, places=operands.Places)
        return self.run(plan(**specs, target=self.target, num_rows=num_rows), arrays)["out"]

    def combine_push(self, rank: int, group_start: np.ndarray, num_slots: int, **options: Any) -> None:
        """`plan_combine_push` of a rank's `results`, by its `sources`, to the arrays `slots`."""
        arrays = {"y": self.of("results", rank), "sources": self.of("sources", rank), "group_start": group_start}
        arrays |= {"slots_at": self.at("slots")}
        specs = [spec_of(array) for array in arrays.values()]
        self.run(plan_combine_push(*specs, self.target, num_slots=num_slots, **options), arrays)


def poisoned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """What an array of a rank holds before anything arrives."""
    size = int(np.prod(shape)) * dtypes.itemsize(dtype)
    return np.full(size, 0xFF, np.uint8).view(dtypes.numpy_dtype(dtype)).reshape(shape)
