"""Write planned shards piece by piece, header first, and go on after an interruption by the journal."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_core.base.files import path_of, require_new, whole_file
from moe_core.checkpoint.config import read_json
from moe_core.checkpoint.storage import NUMPY_DTYPES
from moe_core.errors import InvalidInput, Unsupported

JOURNAL, INDEX = "moebius-convert.json", "model.safetensors.index.json"
_ALIGNMENT = 8
_THREADS = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 16)
#: Bits of the dtypes in headers.
BITS = {name: 8 * np.dtype(dtype).itemsize for name, dtype in NUMPY_DTYPES.items()} | {"F4": 4}
#: Headers' names of arrays' dtypes.
HEADERS = {np.dtype(dtype).name: name for name, dtype in NUMPY_DTYPES.items()}


class TensorPlan(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8

    @classmethod
    def like(cls, name: str, array: np.ndarray) -> TensorPlan:
        return cls(name, HEADERS[array.dtype.name], array.shape)


class Made(NamedTuple):
    """Arrays of any shape, and what to call behind them, in order."""

    arrays: Sequence[np.ndarray]
    settle: Sequence[Callable[[], None]] = ()


Job = Callable[[], Made]


@dataclass(frozen=True)
class Unit:
    """Tensors, and jobs (of `work` bytes at most) that make their bytes in order, in any thread."""

    tensors: tuple[TensorPlan, ...]
    jobs: Callable[[], Iterable[Job]]
    work: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def in_shards(units: Iterable[Unit], limit: int) -> list[list[Unit]]:
    """Consecutive units up to `limit` bytes per shard. A larger unit has a shard alone."""
    shards: list[list[Unit]] = []
    size = limit
    names: set[str] = set()
    for unit in units:
        repeated = [tensor.name for tensor in unit.tensors if tensor.name in names]
        if repeated:
            raise InvalidInput(f"every tensor must be written once, got {repeated[0]} again; rename it in the source")
        names |= {tensor.name for tensor in unit.tensors}
        if size + unit.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(unit)
        size += unit.nbytes
    return shards


def _header(units: Sequence[Unit]) -> bytes:
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in (tensor for unit in units for tensor in unit.tensors):
        offsets = [start, start + tensor.nbytes]
        content[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        start = offsets[1]
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_ALIGNMENT, "little") + text


class Stream:
    """A conversion's directory. A context manager that leaves no file after wrong input.

    Finished shards and the journal stay after any other interruption, and a second run with the same `identity` goes
    on. state: what a finished shard adds to the report; the last one in the journal is `self.state`.
    """

    def __init__(self, path: Any, identity: str) -> None:
        self._directory = path_of(path, "destination")
        self._identity, self._made = identity, []
        self.state: Any = None
        self._finished: list[str] = []
        if self._directory.exists() and (not self._directory.is_dir() or any(self._directory.iterdir())):
            self._resume()

    def _resume(self) -> None:
        journal = self._directory / JOURNAL
        if not journal.is_file():
            require_new("destination", self._directory)
        content = read_json(journal)
        if content.get("identity") != self._identity:
            raise InvalidInput(
                f"destination must be new, or have an interrupted conversion with the same source and options, got "
                f"{self._directory} with another one; name another directory, or remove it"
            )
        self._finished, self.state = list(content["finished"]), content["state"]
        self._made = [*self._finished, JOURNAL]
        for left in self._directory.glob("*.partial"):
            left.unlink()

    def write(self, shards: Sequence[Sequence[Unit]], state: Callable[[], Any], done: Callable[[Unit], None]) -> None:
        """done: called after every unit, also for units of finished shards."""
        self._directory.mkdir(parents=True, exist_ok=True)
        count = len(shards)
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        names = ["model.safetensors"] if count == 1 else names
        most = max(sum(unit.nbytes for unit in units) for units in shards) if shards else 0
        weight_map = {}
        for name, units in zip(names, shards, strict=True):
            weight_map |= {tensor.name: name for unit in units for tensor in unit.tensors}
            if name in self._finished and (self._directory / name).is_file():
                for unit in units:
                    done(unit)
                continue
            with self._whole(name) as partial, partial.open("wb") as file:
                file.write(_header(units))
                written = 0
                for unit, made in _made_ahead(units, most):
                    for array in made.arrays:
                        data: Any = array.reshape(-1).view(np.uint8)
                        file.write(data)
                        written += array.nbytes
                    for settle in made.settle:
                        settle()
                    if unit is not None:
                        assert written == unit.nbytes, (unit.tensors, written)
                        done(unit)
                        written = 0
            self._finished.append(name)
            journal = {"identity": self._identity, "finished": self._finished, "state": state()}
            self._write_json(JOURNAL, journal)
        if len(names) > 1:
            size = sum(unit.nbytes for units in shards for unit in units)
            self._write_json(INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})

    def finish(self, settings: Mapping[str, Any], side_files: Iterable[Path]) -> None:
        """config.json is written last: a killed process leaves no directory that looks like a checkpoint."""
        for file in side_files:
            with self._whole(file.name) as partial:
                shutil.copyfile(file, partial)
        self._write_json("config.json", settings)
        (self._directory / JOURNAL).unlink(missing_ok=True)

    def _write_json(self, name: str, content: Any) -> None:
        with self._whole(name) as partial:
            partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @contextlib.contextmanager
    def _whole(self, name: str) -> Iterator[Path]:
        self._made.append(name)
        try:
            with whole_file(self._directory / name) as partial:
                yield partial
        except OSError as error:
            raise OSError(f"{self._directory / name} could not be written: {error}") from error

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for name in self._made if kind is not None and issubclass(kind, (InvalidInput, Unsupported)) else ():
            (self._directory / name).unlink(missing_ok=True)


def _made_ahead(units: Sequence[Unit], room: int) -> Iterator[tuple[Unit | None, Made]]:
    """Yield results of jobs in order, each unit after its last one. Threads work ahead in `room` bytes of memory."""
    waiting: collections.deque[tuple[Unit | None, int, Future[Made]]] = collections.deque()
    taken = 0
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for unit in units:
                jobs = list(unit.jobs())
                for number, job in enumerate(jobs, 1):
                    while waiting and (taken + unit.work > room or len(waiting) >= 2 * _THREADS):
                        yield waiting[0][0], waiting[0][2].result()
                        taken -= waiting.popleft()[1]
                    waiting.append((unit if number == len(jobs) else None, unit.work, pool.submit(_run, job)))
                    taken += unit.work
            while waiting:
                yield waiting[0][0], waiting[0][2].result()
                waiting.popleft()
        finally:
            for _, _, future in waiting:
                future.cancel()


def _run(job: Job) -> Made:
    made = job()
    return made._replace(arrays=[np.ascontiguousarray(array) for array in made.arrays])
