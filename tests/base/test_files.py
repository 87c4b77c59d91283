"""JSON of strangers at the limits, and a tensor's bytes in pieces."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_core.base.files import file_writer, load_json, open_file, whole_file
from moe_core.checkpoint import convert_checkpoint, load_hidden_states, open_checkpoint, save_checkpoint
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import format_named
from moe_core.parallel.machine import MachineRecord
from moe_core.plan.registry import export_plans, load_plans
from moe_core.specs.tile_table import TileTable
from moe_core.trace import LayerRouting, RoutingTrace

NESTED = 4 * 2**20


def written(path: Path, text: str, size: int = 0) -> Path:
    """A file of this text, and blanks up to a size."""
    path.write_bytes(text.encode().ljust(size))
    return path


def nested(levels: int) -> Any:
    content: Any = 1
    for _ in range(levels):
        content = [content]
    return content


@pytest.mark.parametrize(
    "content", [2**63 - 1, 1 - 2**63, nested(63), {"a": {"b": ["ü"]}}, [True, None, 1e300]], ids=str
)
def test_what_may_be_read(tmp_path: Path, content: Any) -> None:
    assert load_json(written(tmp_path / "a.json", json.dumps(content))) == content


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (str(2**63), "an integer beyond 64 bits"),
        (str(-(2**63)), "an integer beyond 64 bits"),
        (json.dumps({"a": [2**63]}), "an integer beyond 64 bits"),
        (json.dumps(nested(64)), "more than 64 levels"),
        ('["\\ud800"]', "surrogates not allowed"),
        ('{"\\ud800": 1}', "surrogates not allowed"),
    ],
)
def test_what_nobody_writes(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=rf"a\.json must be a readable JSON file, got: .*{message}"):
        load_json(written(tmp_path / "a.json", text))


def lists(number: int) -> str:
    return f"[{','.join(['[]', '{}'] * (number // 2))}]"


@pytest.mark.parametrize(
    ("text", "size", "allowed"),
    [
        (lists(2000), NESTED, True),
        (lists(998), NESTED + 1, True),
        (lists(1000), NESTED + 1, False),
        (f"[{'1,' * 400_000}1]", NESTED + 1, True),
        (f"[{'1,' * 400_001}1]", NESTED + 1, False),
        ('"ü"', NESTED, True),
        ('"ü"', NESTED + 1, False),
    ],
)
def test_large_files_must_be_flat(tmp_path: Path, text: str, size: int, allowed: bool) -> None:
    path = written(tmp_path / "a.json", text, size)
    if allowed:
        assert load_json(path) == json.loads(text)
    else:
        with pytest.raises(InvalidInput, match=r"an index of 400000 tensors at most, to have 4194305 bytes, got other"):
            load_json(path)


def test_the_largest_file(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", "1", 40 * 2**20)
    assert load_json(path) == 1
    written(path, "1", 40 * 2**20 + 1)
    with pytest.raises(InvalidInput, match="must have at most 41943040 bytes, got 41943041"):
        load_json(path)


def test_bytes_that_come_in_pieces_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    array = np.arange(100, dtype=np.int32)
    numpy.save_file({"a": array}, tmp_path / "a.safetensors", {"kind": "test"})
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, start: read(file, [buffers[0][:96]], start))
    with open_file(tmp_path / "a.safetensors") as file:
        assert file.metadata() == {"kind": "test"} and list(file.entries) == ["a"]
        found = np.empty(400, np.uint8)
        file.read_into(file.entry("a").start, found)
        np.testing.assert_array_equal(found.view(np.int32), array)
        with pytest.raises(InvalidInput, match=r"must hold the tensor b, got a file without it"):
            file.entry("b")
        with pytest.raises(InvalidInput, match="must be complete, got an end 40 bytes early"):
            file.read_into(file.entry("a").start + 40, found)
        os.utime(tmp_path / "a.safetensors", (1, 1))
        with pytest.raises(InvalidInput, match="must stay as it is while it is read, got a change"):
            file.read_into(file.entry("a").start, found)


@pytest.mark.parametrize("header", [{"__metadata__": 2, "a": 1}, {"a": 2}], ids=["metadata", "tensors"])
def test_a_name_given_twice_is_refused(tmp_path: Path, header: dict[str, int]) -> None:
    """Which one safetensors took is not known."""
    pytest.importorskip("safetensors")
    texts = {"__metadata__": '{"x":"1"}', "a": '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'}
    if header.get("__metadata__") == 2:
        texts["__metadata__"] = '{"x":"1","x":"2"}'
        header = dict.fromkeys(header, 1)
    text = "{" + ",".join(f'"{name}":{texts[name]}' for name, count in header.items() for _ in range(count)) + "}"
    data = text.encode().ljust(-(-len(text) // 8) * 8)
    (tmp_path / "a.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + b"1")
    with (
        pytest.raises(InvalidInput, match="must be a readable safetensors file, got"),
        open_file(tmp_path / "a.safetensors"),
    ):
        pass


def test_a_missing_package_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for what in (lambda: file_writer("traces"), lambda: open_file(tmp_path / "a.safetensors").__enter__()):
        with pytest.raises(
            Unsupported, match=r"(writing traces|reading \.safetensors files) needs the package safetens"
        ):
            what()


def test_a_file_of_ours_is_whole_or_as_before(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with whole_file(path) as partial:
        partial.write_text("first")
        assert not path.exists()
    with pytest.raises(ValueError, match="no more"), whole_file(path) as partial:
        partial.write_text("second")
        raise ValueError("no more")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_a_file_of_ours_has_its_name_when_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes before it gets the name, and then the directory, which holds the name."""
    path, synced = tmp_path / "a.txt", []

    def fsync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with whole_file(path) as partial:
        partial.write_text("first")
    assert synced == [(path.stat().st_ino, False), (tmp_path.stat().st_ino, True)]


def test_devices_are_written_and_not_replaced() -> None:
    with whole_file("/dev/null") as path:
        path.write_text("x")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("path", [3, b"x", None, ["x"]], ids=repr)
def test_paths_that_are_none(path: Any) -> None:
    plans = RoutingTrace((LayerRouting(np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32), 1),))
    calls: list[Callable[[Any], object]] = [
        open_checkpoint, load_hidden_states, RoutingTrace.load, plans.save, TileTable.load, load_plans, export_plans,
        MachineRecord.load, lambda path: convert_checkpoint(path, "x", format_named("int8_channel")),
        lambda path: save_checkpoint(path, {"model_type": "mixtral"}, ()),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(InvalidInput):
            call(path)
