"""Tables of measured tiles: what they hold, how they are found, read and written, and which are shipped."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import pathlib
import pickle

import pytest

from moe_core import InvalidInput
from moe_core.base import codec
from moe_core.base.target import Target
from moe_core.ops.matmul.families import why_illegal
from moe_core.ops.matmul.tile_choice import tile_key
from moe_core.specs.tile import TileConfig
from moe_core.specs.tile_table import (
    PROVENANCE_FIELDS,
    Measurement,
    TileEntry,
    TileKey,
    TileTable,
    entry_key,
    read_measurements,
    rows_bucket,
    shipped_table,
    write_measurements,
)
from tests.support.matmul.problems import plain_problem

PROBLEM = TileKey(128, 128, 2048, 768, "bfloat16", 2, "out_in")
CONFIG = TileConfig(32, 64, 64, 4, 5, 4)
ENTRY = TileEntry(90, PROBLEM, CONFIG)
PROVENANCE = dict.fromkeys(PROVENANCE_FIELDS, "said")
SHIPPED = sorted(
    path.name.removesuffix(".json").removeprefix("sm_")
    for path in importlib.resources.files("moe_core").joinpath("specs/tables").iterdir()
    if path.name.endswith(".json")
)
#: Multiprocessors of the devices that tables are shipped for.
NUM_SMS = {90: 132}


def other_rows(entry: TileEntry, rows: int) -> TileEntry:
    return dataclasses.replace(entry, problem=dataclasses.replace(entry.problem, rows=rows))


@pytest.mark.parametrize(("rows", "bucket"), [(0, 0), (1, 1), (2, 2), (3, 4), (128, 128), (129, 256), (131072, 131072)])
def test_buckets(rows: int, bucket: int) -> None:
    assert rows_bucket(rows) == bucket


def test_a_table_finds_the_bucket_of_its_problem_and_nothing_else() -> None:
    table = TileTable.of([ENTRY])
    for rows in (65, 100, 128):
        assert table.find(dataclasses.replace(PROBLEM, rows=rows), 90) == CONFIG
    for rows in (0, 64, 129):
        assert table.find(dataclasses.replace(PROBLEM, rows=rows), 90) is None
    assert table.find(PROBLEM, 80) is None
    changes = {"groups": 64, "d": 1024, "n": 512, "dtype": "float16", "buffers": 1, "weight_layout": "in_out"}
    assert set(changes) | {"rows", "not_sm90"} == {field.name for field in dataclasses.fields(TileKey)}
    for name, value in changes.items():
        assert table.find(dataclasses.replace(PROBLEM, **{name: value}), 90) is None, name


def test_the_reason_not_to_run_in_the_sm90_family_hides_no_entry() -> None:
    """Only that there is one matters: an entry of the problem's own kind goes before the other's."""
    able, unable, other = (dataclasses.replace(PROBLEM, not_sm90=reason) for reason in ("", "a reason", "another"))
    wide = dataclasses.replace(CONFIG, block_n=128)
    for measured in (able, unable):
        table = TileTable.of([TileEntry(90, measured, CONFIG)])
        assert [table.find(problem, 90) for problem in (able, unable, other)] == [CONFIG] * 3
    both = TileTable.of([TileEntry(90, able, CONFIG), TileEntry(90, unable, wide)])
    assert [both.find(problem, 90) for problem in (able, unable, other)] == [CONFIG, wide, wide]
    with pytest.raises(InvalidInput, match="entries must name a problem once"):
        TileTable.of([TileEntry(90, unable, CONFIG), TileEntry(90, other, wide)])
    config = TileConfig(128, 128, 64, 4, 4, 8, "sm90")
    sm90 = TileTable.of([TileEntry(90, able, config)])
    assert [sm90.find(problem, 90) for problem in (able, unable)] == [config, None]


def test_an_entry_key_is_what_an_entry_holds() -> None:
    for problem in (PROBLEM, dataclasses.replace(PROBLEM, rows=100, not_sm90="")):
        found = entry_key(problem)
        assert TileEntry(90, found, CONFIG).problem == found == entry_key(found)
        assert found.rows == 128 and bool(found.not_sm90) == bool(problem.not_sm90)


def test_equal_entries_are_equal_tables_in_any_order() -> None:
    more = other_rows(ENTRY, 64)
    one, other = TileTable.of([ENTRY, more]), TileTable.of([more, ENTRY])
    assert one == other and hash(one) == hash(other) and one != TileTable.of([ENTRY])
    assert set(one.entries) == {ENTRY, more}
    assert codec.loads(codec.dumps(one)) == one
    assert pickle.loads(pickle.dumps(one)) == one


def test_a_table_is_one_field() -> None:
    """Specs are compared, hashed and guarded field by field: a field per entry would cost that on every call."""
    assert [field.name for field in dataclasses.fields(TileTable)] == ["text"]


def test_entries_that_contradict_each_other() -> None:
    with pytest.raises(InvalidInput, match="entries must name a problem once"):
        TileTable.of([ENTRY, dataclasses.replace(ENTRY, config=TileConfig(16, 64, 64))])
    with pytest.raises(InvalidInput, match="rows of an entry must be a power of two, got 100"):
        TileTable.of([other_rows(ENTRY, 100)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "nonesuch"}, "family of a table's configuration must be one of portable, sm90, got 'nonesuch'"),
        ({"block_m": 3}, "block_m of a table's configuration must be a multiple of 16"),
        ({"block_n": 0}, "block_n of a table's configuration must be a multiple of 16"),
        ({"num_stages": 0}, "num_stages of a table's configuration must be an integer of at least 1, got 0"),
    ],
)
def test_tiles_that_no_plain_weights_have(tmp_path: pathlib.Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{message}"):
        dataclasses.replace(ENTRY, config=dataclasses.replace(CONFIG, **change))
    path = file_with(tmp_path / "table.json", **{f"config__{name}": value for name, value in change.items()})
    with pytest.raises(InvalidInput, match=f"^entry 0 must be of a tile of plain weights: {message}"):
        TileTable.load(path)


@pytest.mark.parametrize("text", ["", "not json", "{}", "[1]", '[{"type":"TileConfig"}]', codec.dumps(ENTRY)])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        TileTable(text)


def test_files_keep_entries_figures_and_provenance(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "table.json"
    measurements = [Measurement(ENTRY, 12.5, 14.0), Measurement(other_rows(ENTRY, 64), 9.0, 9.0)]
    write_measurements(path, PROVENANCE, measurements)
    provenance, found = read_measurements(path)
    assert provenance == PROVENANCE
    assert found == tuple(reversed(measurements)), "ordered by rows"
    assert TileTable.load(path) == TileTable.of(measurement.entry for measurement in measurements)
    write_measurements(path, PROVENANCE, found)
    first = path.read_text()
    write_measurements(path, PROVENANCE, measurements)
    assert path.read_text() == first, "the same content is the same file"
    write_measurements(path, PROVENANCE, [])
    assert TileTable.load(path) == TileTable.of([])


def file_with(path: pathlib.Path, **changes: object) -> pathlib.Path:
    """A table's file with one entry, changed."""
    write_measurements(path, PROVENANCE, [Measurement(ENTRY, 12.5, 14.0)])
    content = json.loads(path.read_text())
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if part in ("problem", "config", "record"):
            record = content["entries"][0]
            place = record if part == "record" else record[part]
            if value is None:
                del place[field]
            else:
                place[field] = value
        else:
            content[part] = value
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format of .* must be 1, got 2"),
        ({"provenance": {"gpu": "H200"}}, "provenance of .* must say .* got no driver"),
        ({"entries": {}}, "entries of .* must be a list"),
        ({"entries": [{}]}, "entry 0 must have the fields arch"),
        ({"record__microseconds": "fast"}, "must have positive numbers"),
        ({"record__arch": 0}, "must have positive numbers"),
        ({"problem__rows": "many"}, "rows of problem of entry 0 must be of type int"),
        ({"problem__d": None}, "problem of entry 0 must have the fields"),
        ({"problem__rows": 100}, "power of two"),
        ({"config__colour": 1}, "config of entry 0 must have the fields"),
        ({"config__block_m": True}, "block_m of config of entry 0 must be of type int"),
    ],
)
def test_wrong_files_are_refused(tmp_path: pathlib.Path, changes: dict[str, object], message: str) -> None:
    path = file_with(tmp_path / "table.json", **changes)
    with pytest.raises(InvalidInput, match=message):
        TileTable.load(path)


def test_files_that_are_no_tables(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidInput, match="must be a table that moebius-tune wrote"):
        TileTable.load(tmp_path / "missing.json")
    (tmp_path / "text.json").write_text("[")
    with pytest.raises(InvalidInput, match="must be a table that moebius-tune wrote"):
        TileTable.load(tmp_path / "text.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(InvalidInput, match=r"format of .* must be 1, got 'list'"):
        TileTable.load(tmp_path / "list.json")
    with pytest.raises(InvalidInput, match="provenance must say"):
        write_measurements(tmp_path / "table.json", {}, [])


def test_a_field_the_file_is_too_old_for_has_its_default(tmp_path: pathlib.Path) -> None:
    path = file_with(tmp_path / "table.json", config__group_m=None, problem__weight_layout=None)
    (entry,) = TileTable.load(path).entries
    assert entry.config == dataclasses.replace(CONFIG, group_m=TileConfig(16, 16, 16).group_m)
    assert entry.problem.weight_layout == TileKey(1, 1, 1, 1, "float32").weight_layout


@pytest.mark.parametrize("arch", SHIPPED)
def test_shipped_tables_are_legal(arch: str) -> None:
    table = shipped_table(int(arch))
    target = Target("cuda", int(arch), NUM_SMS[int(arch)])
    for entry in table.entries:
        assert entry.arch == target.arch, "a table holds one architecture"
        key = entry.problem
        problem = plain_problem(
            key.rows, key.groups, key.d, key.n, key.dtype, key.buffers, target=target, weight_layout=key.weight_layout
        )
        assert why_illegal(entry.config, problem) is None, entry
        assert entry_key(tile_key(problem)) == key


def test_a_table_is_shipped_for_the_tuned_architecture() -> None:
    assert "90" in SHIPPED
    assert shipped_table(80) == TileTable.of([]), "none for others"
