"""Measured tile configurations: `moebius-tune` writes them as JSON, and plans look them up before the heuristics."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from moe_core.base import codec, plan_type, require_at_least, require_choice
from moe_core.base.files import load_json, whole_file
from moe_core.errors import InvalidInput
from moe_core.specs.tile import TileConfig

#: Raised when the meaning of a file changes.
FORMAT_VERSION = 1
_SHIPPED = pathlib.Path(__file__).parent / "tables"
#: Families of plain weights.
_FAMILIES = ("portable", "sm90")
_NOT_SM90 = "the product that was measured cannot run in it"
PROVENANCE_FIELDS = ("gpu", "driver", "versions", "commit", "command", "date")

_SCALARS: Mapping[str, type] = {"int": int, "str": str, "bool": bool}

T = TypeVar("T")


def rows_bucket(rows: int) -> int:
    """The next power of two; 0 for 0. Example: 100 and 128 rows are bucket 128."""
    return 1 << (rows - 1).bit_length() if rows > 0 else 0


@plan_type
@dataclass(frozen=True)
class TileKey:
    """The product of an entry: layout rows, groups (experts), n output columns, buffers: weight tiles per step (2 for
    fused gate and up), weight_layout, not_sm90: why the `sm90` family cannot multiply the operands, or empty.
    """

    rows: int
    groups: int
    d: int
    n: int
    dtype: str
    buffers: int = 1
    weight_layout: str = "in_out"
    not_sm90: str = "the product was described without its operands"


def entry_key(key: TileKey) -> TileKey:
    """The key of a product's entry: the bucket of its rows, and one common text for not_sm90."""
    return dataclasses.replace(key, not_sm90=_NOT_SM90 if key.not_sm90 else "", rows=rows_bucket(key.rows))


@plan_type
@dataclass(frozen=True)
class TileEntry:
    """One configuration for one product on one architecture. Raises InvalidInput for tiles of quantised weights."""

    arch: int
    problem: TileKey
    config: TileConfig

    def __post_init__(self) -> None:
        config = self.config
        require_choice("family of a table's configuration", config.family, _FAMILIES)
        for name in ("block_m", "block_n", "block_k"):
            if getattr(config, name) < 16 or getattr(config, name) % 16:
                raise InvalidInput(
                    f"{name} of a table's configuration must be a multiple of 16 (tensor-core tile), got {config}; "
                    "measure again with moebius-tune"
                )
        for name in ("num_warps", "num_stages", "group_m"):
            require_at_least(f"{name} of a table's configuration", getattr(config, name), 1)
        reason = _NOT_SM90 if self.problem.not_sm90 else ""
        object.__setattr__(self, "problem", dataclasses.replace(self.problem, not_sm90=reason))


@plan_type
@dataclass(frozen=True)
class TileTable:
    """Configurations by architecture and problem. Make one with `TileTable.of` or `TileTable.load`.

    text: the entries as canonical JSON, because specs are hashed, compared and sent as text. Raises InvalidInput for
    any other text.
    """

    text: str

    def __post_init__(self) -> None:
        _entries(self.text)

    @classmethod
    def of(cls, entries: Iterable[TileEntry]) -> TileTable:
        """A table of entries in any order. Raises InvalidInput for two of one problem, and rows that are no bucket."""
        ordered = sorted(entries, key=codec.dumps)
        seen: set[tuple[int, TileKey]] = set()
        for entry in ordered:
            if entry.problem.rows != rows_bucket(entry.problem.rows):
                raise InvalidInput(
                    f"rows of an entry must be a power of two, got {entry.problem.rows}; use rows_bucket(rows)"
                )
            if (entry.arch, entry.problem) in seen:
                raise InvalidInput(
                    f"entries must name a problem once, got sm_{entry.arch} {entry.problem} twice; remove one"
                )
            seen.add((entry.arch, entry.problem))
        return cls(codec.dumps(tuple(ordered)))

    @classmethod
    def load(cls, path: str | pathlib.Path) -> TileTable:
        """The table of a file of `moebius-tune`. Raises InvalidInput for any other file."""
        return cls.of(measurement.entry for measurement in read_measurements(path)[1])

    @property
    def entries(self) -> tuple[TileEntry, ...]:
        return _entries(self.text)

    def find(self, key: TileKey, arch: int) -> TileConfig | None:
        """The configuration measured for the product's bucket of rows on the architecture, or None.

        The product's own not_sm90 goes first, but the other one counts too, because the sizes are equal: a layer with
        gelu uses measurements with silu. The result never names the sm90 family for a product that it cannot run.
        """
        wanted, index = entry_key(key), _index(self.text)
        other = dataclasses.replace(wanted, not_sm90="" if wanted.not_sm90 else _NOT_SM90)
        config = index.get((arch, wanted), index.get((arch, other)))
        return None if config is not None and config.family == "sm90" and key.not_sm90 else config


@functools.lru_cache(maxsize=64)
def _entries(text: str) -> tuple[TileEntry, ...]:
    try:
        entries = codec.loads(text)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"text must be that of a TileTable, got {text!r:.80} ({error}); use TileTable.of") from error
    if not isinstance(entries, tuple) or not all(isinstance(entry, TileEntry) for entry in entries):
        raise InvalidInput(f"text must hold TileEntries, got {text!r:.80}; use TileTable.of or TileTable.load")
    return entries


@functools.lru_cache(maxsize=64)
def _index(text: str) -> Mapping[tuple[int, TileKey], TileConfig]:
    return {(entry.arch, entry.problem): entry.config for entry in _entries(text)}


@functools.cache
def shipped_table(arch: int) -> TileTable:
    """The package's table for an architecture, maybe without entries."""
    path = _SHIPPED / f"sm_{arch}.json"
    return TileTable.load(path) if path.is_file() else TileTable.of(())


@dataclass(frozen=True)
class Measurement:
    """An entry and its microseconds, and the heuristics' in the same run."""

    entry: TileEntry
    microseconds: float
    heuristic_microseconds: float


def write_measurements(
    path: str | pathlib.Path, provenance: Mapping[str, Any], measurements: Sequence[Measurement]
) -> None:
    """Write a table's file. Raises InvalidInput without one of PROVENANCE_FIELDS, or for contradicting entries."""
    require_provenance(provenance, "provenance")
    TileTable.of(measurement.entry for measurement in measurements)

    def reading_order(measurement: Measurement) -> tuple[Any, ...]:
        rows, *product = dataclasses.astuple(measurement.entry.problem)
        return measurement.entry.arch, *product, rows

    def record(measurement: Measurement) -> dict[str, Any]:
        times = {name: round(getattr(measurement, name), 2) for name in ("microseconds", "heuristic_microseconds")}
        return dataclasses.asdict(measurement.entry) | times

    head = {"format": FORMAT_VERSION, "provenance": dict(provenance)}
    write_record(path, head, "entries", map(record, sorted(measurements, key=reading_order)))


def write_record(
    path: str | pathlib.Path, head: Mapping[str, Any], name: str, records: Iterable[Mapping[str, Any]]
) -> None:
    """Write JSON whose last field has a line for each record."""
    lines = ",\n".join(f"    {json.dumps(record)}" for record in records)
    body = f"[\n{lines}\n  ]" if lines else "[]"
    with whole_file(path) as partial:
        partial.write_text(json.dumps(head, indent=2).removesuffix("\n}") + f',\n  "{name}": {body}\n}}\n')


def read_measurements(path: str | pathlib.Path) -> tuple[Mapping[str, Any], tuple[Measurement, ...]]:
    """(provenance, measurements) of a table's file. Raises InvalidInput for others."""
    content = read_record(path, "a table that moebius-tune wrote", FORMAT_VERSION)
    records = content.get("entries")
    if not isinstance(records, list):
        raise InvalidInput(f"entries of {str(path)!r} must be a list, got {type(records).__name__}; correct the file")
    return content["provenance"], tuple(_measurement(record, f"entry {i}") for i, record in enumerate(records))


def read_record(path: str | pathlib.Path, what: str, version: int) -> dict[str, Any]:
    """The content of a file of `moebius-tune`. Raises InvalidInput unless it has this format and a provenance."""
    try:
        content = load_json(path)
    except InvalidInput as error:
        raise InvalidInput(f"path must be {what}, got {str(path)!r} ({error}); make one with moebius-tune") from error
    found = content.get("format") if isinstance(content, dict) else type(content).__name__
    if not isinstance(content, dict) or found != version:
        raise InvalidInput(
            f"format of {str(path)!r} must be {version}, got {found!r}; run moebius-tune of this version"
        )
    require_provenance(content.get("provenance"), f"provenance of {str(path)!r}")
    return content


def require_provenance(provenance: Any, name: str) -> None:
    missing = [field for field in PROVENANCE_FIELDS if not isinstance(provenance, Mapping) or field not in provenance]
    if missing:
        raise InvalidInput(f"{name} must say {', '.join(PROVENANCE_FIELDS)}, got no {', '.join(missing)}; add them")


def _measurement(record: Any, name: str) -> Measurement:
    fields = ("arch", "problem", "config", "microseconds", "heuristic_microseconds")
    if not isinstance(record, dict) or set(record) != set(fields):
        raise InvalidInput(f"{name} must have the fields {', '.join(fields)}, got {record!r:.120}; correct the file")
    numbers = [record[field] for field in ("arch", "microseconds", "heuristic_microseconds")]
    if type(numbers[0]) is not int or not all(
        isinstance(number, (int, float)) and 0 < number < math.inf for number in numbers
    ):
        raise InvalidInput(f"{name} must have positive numbers for arch and microseconds, got {numbers}; correct it")
    problem = _from_fields(TileKey, record["problem"], f"problem of {name}")
    config = _from_fields(TileConfig, record["config"], f"config of {name}")
    try:
        return Measurement(TileEntry(numbers[0], problem, config), *numbers[1:])
    except InvalidInput as error:
        raise InvalidInput(f"{name} must be of a tile of plain weights: {error}") from error


def _from_fields(kind: type[T], fields: Any, name: str) -> T:
    declared = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    required = {key for key, field in declared.items() if field.default is dataclasses.MISSING}
    if not isinstance(fields, dict) or not required <= set(fields) <= set(declared):
        raise InvalidInput(
            f"{name} must have the fields {', '.join(declared)} ({', '.join(sorted(required))} at least), "
            f"got {fields!r:.160}; measure again with moebius-tune of this version"
        )
    for key, value in fields.items():
        if type(value) is not _SCALARS[str(declared[key].type)]:
            raise InvalidInput(
                f"{key} of {name} must be of type {declared[key].type}, got {value!r:.200}; correct the file"
            )
    return kind(**fields)
