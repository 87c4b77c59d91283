"""The files of a conversion: shards, interruptions, full disks, and the command."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moe_core.base.files import whole_file
from moe_core.checkpoint import ConversionProgress, convert_checkpoint, open_checkpoint
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import MXFP8
from moe_core.tools.convert_cli import main
from tests.support.paths import ROOT
from tests.support.quantized.plain import D, F, source


def test_progress_shards_and_side_files(tmp_path):
    path = source(tmp_path / "plain", "qwen3_moe", "per_expert")
    calls: list[ConversionProgress] = []
    convert_checkpoint(path, tmp_path / "small", MXFP8, shard_bytes=50_000, progress=calls.append)
    files = sorted(file.name for file in (tmp_path / "small").iterdir())
    assert "tokenizer.json" in files and "README.md" not in files and "model.safetensors.index.json" in files
    assert sum(name.endswith(".safetensors") for name in files) > 3
    written = open_checkpoint(tmp_path / "small").index.files
    assert calls[-1].tensors == calls[0].tensors_total == len(written) and {call.tensor for call in calls} <= set(
        written
    )
    assert all(one.tensors < other.tensors for one, other in itertools.pairwise(calls))
    size = sum(file.stat().st_size for file in (tmp_path / "small").glob("*.safetensors"))
    convert_checkpoint(path, tmp_path / "two", MXFP8, shard_bytes=size * 2 // 3)
    files = sorted(file.name for file in (tmp_path / "two").iterdir())
    assert sum(name.endswith(".safetensors") for name in files) == 2 and "model.safetensors.index.json" in files


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_second_run_goes_on(tmp_path, monkeypatch, error):
    """Finished shards are kept, and the files and the report are those of a run without an interruption."""
    path, small = source(tmp_path / "plain", "qwen3_moe", "per_expert"), tmp_path / "small"
    report = convert_checkpoint(path, tmp_path / "whole", MXFP8, shard_bytes=50_000)
    left = [3]

    def stop(progress: ConversionProgress) -> None:
        if "model-00004" in "".join(file.name for file in small.iterdir()):
            left[0] -= 1
            if not left[0]:
                raise error

    with pytest.raises(type(error)):
        convert_checkpoint(path, small, MXFP8, shard_bytes=50_000, progress=stop)
    kept = {file.name: file.stat().st_mtime_ns for file in small.glob("*.safetensors")}
    assert len(kept) == 3 and not (small / "config.json").exists()
    with pytest.raises(InvalidInput, match=r"destination must be new, or have an interrupted conversion with the same"):
        convert_checkpoint(path, small, MXFP8, shard_bytes=60_000)
    assert convert_checkpoint(path, small, MXFP8, shard_bytes=50_000) == report
    assert kept.items() <= {file.name: file.stat().st_mtime_ns for file in small.glob("*.safetensors")}.items()
    contents = [{file.name: file.read_bytes() for file in each.iterdir()} for each in (small, tmp_path / "whole")]
    assert contents[0] == contents[1]


#: Converts where no file may grow beyond so many bytes, as on a full disk.
CONVERT = """
import resource, sys
from moe_core.tools.convert_cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("most_bytes", "shard"), [(0, "model.safetensors"), (200_000, "model.safetensors"), (1_000_000, "tokenizer.json")]
)
def test_a_full_disk(tmp_path, most_bytes, shard):
    path = source(tmp_path / "plain", "qwen3_moe", "per_expert")
    (path / "tokenizer.json").write_bytes(bytes(2_000_000))
    command = [sys.executable, "-c", CONVERT, str(most_bytes), str(path), str(tmp_path / "small"), "--format", "mxfp8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2, done.stderr
    assert "moebius-convert: could not convert: " in done.stderr and "File too large" in done.stderr
    assert "Traceback" not in done.stderr and not done.stdout
    assert shard in done.stderr
    assert not {"config.json", shard} & {file.name for file in (tmp_path / "small").iterdir()}
    convert_checkpoint(path, tmp_path / "small", MXFP8)
    assert (tmp_path / "small" / "tokenizer.json").stat().st_size == 2_000_000


def test_a_file_has_its_name_when_it_is_whole(tmp_path):
    target = tmp_path / "table.json"
    target.write_text("old")
    for error in (OSError("disk full"), KeyboardInterrupt()):
        with pytest.raises(type(error)), whole_file(target) as partial:
            partial.write_text("ne")
            raise error
        assert [file.name for file in tmp_path.iterdir()] == ["table.json"] and target.read_text() == "old"
    with whole_file(target) as partial:
        partial.write_text("new")
        assert target.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"] and target.read_text() == "new"


def test_a_process_that_is_killed_leaves_no_checkpoint(tmp_path, monkeypatch):
    """Whatever the moment, there is no config.json, so nothing takes the directory for a checkpoint."""
    seen: list[set[str]] = []

    def look(self: Path, target: Path) -> Path:
        seen.append({file.name for file in target.parent.iterdir()})
        return rename(self, target)

    path, rename = source(tmp_path / "plain", "qwen3_moe", "per_expert"), Path.replace
    monkeypatch.setattr(Path, "replace", look)
    convert_checkpoint(path, tmp_path / "small", MXFP8, shard_bytes=50_000)
    before = [names for names in seen if "config.json" not in names]
    assert len(before) > 5 and "tokenizer.json" in {file.name for file in (tmp_path / "small").iterdir()}
    assert seen[-1] >= {"tokenizer.json", "model.safetensors.index.json"} and "config.json" not in seen[-1]


def test_directories_that_are_refused(tmp_path):
    path = source(tmp_path / "plain", "qwen3_moe", "per_expert")
    with pytest.raises(
        InvalidInput, match=r"destination must be a new or empty directory, got .*plain, which has content"
    ):
        convert_checkpoint(path, path, MXFP8)
    with pytest.raises(InvalidInput, match=r"got .*config.json, which is a file; name another"):
        convert_checkpoint(path, path / "config.json", MXFP8)


def test_experts_that_are_not_numbers(tmp_path):
    path = source(tmp_path / "plain", "qwen3_moe", "per_expert")
    file = path / "model-00002-of-00003.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.experts.3.up_proj.weight"] = np.zeros((F, D), np.int8)
    save_file(tensors, file)
    with pytest.raises(
        Unsupported, match=r"experts.3.up_proj.weight in .* must be bfloat16, float16 or float32, got I8"
    ):
        convert_checkpoint(path, tmp_path / "small", MXFP8)
    assert not (tmp_path / "small").exists()


def test_the_command(tmp_path, capsys):
    path = source(tmp_path / "plain", "qwen3_moe", "per_expert")
    report = tmp_path / "report.json"
    assert main([str(path), str(tmp_path / "small"), "--format", "int4_g32", "--json", str(report)]) == 0
    printed = capsys.readouterr()
    assert re.search(r"^int4_g32: experts .* MiB \(3\.54 times smaller\)$", printed.out, re.MULTILINE)
    document = json.loads(report.read_text())
    assert [row["layer"] for row in document["layers"]] == [0, 1, 2] and document["format"] == "int4_g32"
    for row in document["layers"]:
        assert f"{row['gate_up']:.3e}" in printed.out and f"{row['down']:.3e}" in printed.out
    assert "100%" in printed.err
    assert main([str(path), str(tmp_path / "again"), "--format", "int4_g32", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == document
    assert main([str(path), str(tmp_path / "small"), "--format", "int4_g32"]) == 2
    assert "could not convert: destination must be a new or empty directory" in capsys.readouterr().err
    assert main([str(path), str(tmp_path / "other"), "--format", "int4_g23"]) == 2
    wanted = "--format must be a known name, got 'int4_g23'; the nearest are int4_g32, int4_g128, int8_g32"
    assert wanted in capsys.readouterr().err
    assert main([str(path), str(tmp_path / "other"), "--format", "int4_g32", "--shard-mib", "0"]) == 2
    assert "--shard-mib must be an integer of at least 1, got 0" in capsys.readouterr().err


def test_the_command_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["moebius-convert"] == f"{main.__module__}:main"
