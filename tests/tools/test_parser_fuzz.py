"""The fuzzer of parsers: some thousand cases without a foreign error, and each kind of failure found when planted."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_core.errors import InvalidInput, Unsupported
from tools.parser_fuzz import __main__ as tool
from tools.parser_fuzz.changes import changed_array, changed_bytes, changed_document, changed_json, changed_tensors
from tools.parser_fuzz.subjects import Subject, subjects


def test_every_file_is_read_before_it_is_changed(tmp_path):
    found = subjects(tmp_path)
    for subject in found:
        subject.read(subject.directory)
    names = " ".join(subject.name for subject in found)
    for word in ("config qwen3_moe", "index.json", "mxfp4 model", "conversion of", "states.npy", "trace", "table.json"):
        assert word in names


def test_some_thousand_cases(capsys):
    assert tool.main(["--cases", "1500", "--seed", "20261124"]) == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert "1500 cases, seed 20261124" in printed and "InvalidInput" in printed and "accepted" in printed


def test_changes_depend_on_the_seed_alone_and_change():
    document = b'{"a": [1, "x", null], "b": {"c": 0.5}}'
    header = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    tensors = len(header).to_bytes(8, "little") + header + bytes(4)
    array = b"\x93NUMPY\x01\x00\x46\x00" + b"{'descr':'<f4','fortran_order':False,'shape':(1,),}".ljust(70) + bytes(4)
    for change, content in (
        (changed_document, document),
        (changed_bytes, document),
        (changed_tensors, tensors),
        (changed_array, array),
    ):
        results = [change(content, random.Random(case)) for case in range(300)]
        assert results == [change(content, random.Random(case)) for case in range(300)]
        assert len(set(results)) > 150
    texts = [changed_json(document.decode(), random.Random(case)) for case in range(2000)]
    for part in ('"a":[1,"x",null],"a":', "\\ud800", "NaN", "[" * 500, "1" * 5000, "../x"):
        assert any(part in text for text in texts), part


def _wait() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (lambda: {}["gate"], "KeyError at "),
        (lambda: "\ud800".encode(), "UnicodeEncodeError at "),
        (lambda: 10**400 / 3.0, "OverflowError at "),
        (_wait, "TooSlow at "),
        (lambda: len(b"x" * 3 * 10**8), " MB"),
        (lambda: (_ for _ in ()).throw(InvalidInput("fine")), None),
        (lambda: (_ for _ in ()).throw(Unsupported("fine")), None),
    ],
)
def test_planted_failures_are_found(tmp_path, monkeypatch, fault: Callable[[], object], found):
    """A reader that fails at its third case."""
    calls: list[bytes] = []

    def read(directory: Path) -> None:
        calls.append((directory / "x.json").read_bytes())
        if len(calls) == 3:
            fault()

    subject = Subject("planted", tmp_path, "x.json", b'{"a": 1}', changed_document, read)
    monkeypatch.setattr(tool, "subjects", lambda root: [subject])
    result = tool.run(5, 7, keep=tmp_path / "kept")
    assert sum(result["counts"].values()) == 5 == len(calls)
    if found is None:
        assert not result["failures"]
        return
    ((failure, repeat),) = result["failures"].items()
    assert found in failure and failure.startswith("planted: ")
    assert repeat == "python -m tools.parser_fuzz --seed 7 --first 2 --cases 1"
    assert (tmp_path / "kept" / "7-2-x.json").read_bytes() == calls[2]
    assert (tmp_path / "x.json").read_bytes() == b'{"a": 1}'
