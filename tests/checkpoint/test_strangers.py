"""Checkpoints of strangers: whatever their files are, reading ends in InvalidInput, within a second and 200 MB."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_core.base.files import MOST_JSON_BYTES, MOST_TENSORS, open_file
from moe_core.checkpoint import convert_checkpoint, load_hidden_states, open_checkpoint
from moe_core.checkpoint.storage import read_tensor
from moe_core.errors import InvalidInput
from moe_core.formats import MXFP8
from tests.support.checkpoint_files import E, config_of, write, write_family

INDEX, SHARD = "model.safetensors.index.json", "model-00002-of-00003.safetensors"


def settings(path: Path, **changes: object) -> None:
    (path / "config.json").write_text(json.dumps(config_of("qwen3_moe", **changes)))


def in_index(path: Path, name: str) -> None:
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] = {tensor: name if file == SHARD else file for tensor, file in index["weight_map"].items()}
    (path / INDEX).write_text(json.dumps(index))


def header_of(path: Path, change: Callable[[dict], object]) -> None:
    data = (path / SHARD).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (path / SHARD).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def first(header: dict) -> dict:
    return next(entry for name, entry in header.items() if name.endswith("gate.weight"))


def replaced(path: Path, name: str, make: Callable[[Path], object]) -> None:
    (path / name).unlink()
    make(path / name)


def sparse(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def repeated_name(path: Path) -> None:
    data = (path / SHARD).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip()
    again = header[:-1] + b"," + header[1:]
    (path / SHARD).write_bytes(len(again).to_bytes(8, "little") + again + data[8 + length :])


def longest_index() -> str:
    """Of as many names as an index may have, and nearly as many bytes."""
    names = (f'"model.layers.9.mlp.experts.{n:034}.weight":"model-{n % 60:05}.safetensors"' for n in range(400_000))
    return '{"weight_map":{' + ",".join(names) + "}}"


def many_tensors(path: Path) -> None:
    """As many tensors as a header may have, of no bytes, under long names."""
    entry = '"model.layers.1.mlp.experts.%0100d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    text = "{" + ",".join(entry % i for i in range(MOST_TENSORS - 1)) + "}"
    (path / SHARD).write_bytes(len(text).to_bytes(8, "little") + text.encode())


#: name -> (what makes a checkpoint of qwen3_moe hostile, part of the message)
ATTACKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "many layers": (lambda path: settings(path, num_hidden_layers=10**9), "at most 10000, got 1000000000"),
    "many experts": (lambda path: settings(path, num_experts=10**9), "at most 100000, got 1000000000"),
    "experts that no file has": (lambda path: settings(path, num_experts=99_999), "experts.99998.gate_proj.weight for"),
    "an integer of 4,000 digits": (lambda path: settings(path, hidden_size=10**4000), "an integer beyond 64 bits"),
    "deep settings": (lambda path: (path / "config.json").write_text('{"a":' * 10**5), "readable JSON file, got"),
    "65 levels": (lambda path: (path / "config.json").write_text("[" * 65 + "]" * 65), "more than 64 levels"),
    "large settings": (lambda path: sparse(path / "config.json", 10**12), "at most 4194304 bytes, got 10000000"),
    "settings of lists": (lambda path: (path / "config.json").write_text("[" + "[]," * (2**22 // 3 - 2) + "1]"),
        "must hold a JSON object, got a list"),
    "no Unicode": (lambda path: settings(path, model_type="\ud800"), "surrogates not allowed"),
    "no UTF-8": (lambda path: (path / "config.json").write_bytes(b'{"a": "\xff"}'), "can't decode byte 0xff"),
    "settings from a pipe": (lambda path: replaced(path, "config.json", os.mkfifo), "a directory, pipe or device"),
    "settings from a device": (lambda path: replaced(path, "config.json", lambda file: file.symlink_to("/dev/zero")),
        "must lie in the checkpoint's directory"),
    "a settings directory": (lambda path: replaced(path, "config.json", Path.mkdir), "a directory, pipe or device"),
    "an index above": (lambda path: in_index(path, "../other/model.safetensors"), "must name files in the directory"),
    "an absolute shard": (lambda path: in_index(path, "/etc/passwd"), "must name files in the directory"),
    "a shard of zero bytes": (lambda path: in_index(path, "a\0b"), "must name files in the directory"),
    "a shard without a name": (lambda path: in_index(path, ""), "must name files in the directory"),
    "a long name": (lambda path: in_index(path, "x" * 5000), "must name files in the directory"),
    "a name without Unicode": (lambda path: in_index(path, "\udfff"), "surrogates not allowed"),
    "a deep index": (lambda path: (path / INDEX).write_text("[" * 10**6), "readable JSON file, got"),
    "a large index": (lambda path: sparse(path / INDEX, MOST_JSON_BYTES + 1), "must have at most 41943040 bytes"),
    "an index of lists": (lambda path: (path / INDEX).write_text("[" + "[]," * 10**7 + "[]]"), "must map ASCII names"),
    "an index of numbers": (lambda path: (path / INDEX).write_text("[" + "1000," * 8 * 10**6 + "1]"), "must map ASCII"),
    "a long index of four bytes": (
        lambda path: (path / INDEX).write_text('{"a": "\U0001f600' + "x" * 41 * 10**6 + '"}'),
        "must map ASCII names",
    ),
    "the longest index": (lambda path: (path / INDEX).write_text(longest_index()), "must hold the router of layer 1"),
    "a shard elsewhere": (lambda path: replaced(path, SHARD, lambda file: file.symlink_to("/etc/passwd")),
        "got a link to /etc/passwd"),
    "a link to itself": (lambda path: replaced(path, SHARD, lambda file: file.symlink_to(file)), "readable file, got"),
    "a pipe": (lambda path: replaced(path, SHARD, os.mkfifo), "a directory, pipe or device"),
    "a shard of zeros": (lambda path: sparse(path / SHARD, 0), "a header of 0 bytes in a file of 0"),
    "a large header": (lambda path: (path / SHARD).write_bytes((2**63).to_bytes(8, "little")),
        "a header of 9223372036854775808 bytes"),
    "a header of its file's size": (
        lambda path: [(path / SHARD).write_bytes((2**40 - 8).to_bytes(8, "little")), sparse(path / SHARD, 2**40)],
        "where 16777216 are the most",
    ),
    "the most tensors": (many_tensors, "must hold the tensor"),
    "too many tensors": (lambda path: (path / SHARD).write_bytes((2**20).to_bytes(8, "little") + b'"":{},' * 2**18),
        "the header of 80000 tensors at most"),
    "a deep header": (lambda path: (path / SHARD).write_bytes((300_000).to_bytes(8, "little") + b'{"a":' * 60_000),
        "readable safetensors file, got"),
    "a name twice": (repeated_name, "readable safetensors file, got"),
    "overlapping tensors": (
        lambda path: header_of(path, lambda header: first(header).update(data_offsets=[8, 8 + 2 * E * 24])),
        "readable safetensors file, got",
    ),
    "offsets that wrap": (
        lambda path: header_of(path, lambda header: first(header).update(data_offsets=[2**64 - 8, 2**64 - 1])),
        "readable safetensors file, got",
    ),
    "a shape that wraps": (lambda path: header_of(path, lambda header: first(header).update(shape=[2**32, 2**32])),
        "readable safetensors file, got"),
    "negative offsets": (lambda path: header_of(path, lambda header: first(header).update(data_offsets=[-8, 8])),
        "readable safetensors file, got"),
}  # fmt: skip

#: Reads one checkpoint after the other; prints how many seconds each computed, and how many MB more it took.
MEASURE = """
import json, sys, time
from pathlib import Path
from moe_core.checkpoint import open_checkpoint
from moe_core.errors import InvalidInput

def resident(field):
    status = Path("/proc/self/status").read_text()
    return int(status.partition(field)[2].split()[0]) / 1000

open_checkpoint(sys.argv[1]).layer(1)
for path in sys.argv[2:]:
    Path("/proc/self/clear_refs").write_text("5")  # the most memory so far is what there is now
    before, start, message = resident("VmRSS:"), time.process_time(), "nothing"
    try:
        open_checkpoint(path).layer(1)
    except InvalidInput as error:
        message = str(error)
    print(json.dumps([Path(path).name, message, time.process_time() - start, resident("VmHWM:") - before]))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What became of every attack: name -> (message, seconds, MB)."""
    root = tmp_path_factory.mktemp("attacks")
    plain, _ = write_family(root / "plain", "qwen3_moe", shards=True)
    for name, (attack, _) in ATTACKS.items():
        write_family(root / name, "qwen3_moe", shards=True)
        attack(root / name)
    paths = [str(root / name) for name in ATTACKS]
    command = [sys.executable, "-c", MEASURE, str(plain), *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: (message, seconds, megabytes) for name, message, seconds, megabytes in rows}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_end_soon_and_in_little_memory(measured, name):
    message, seconds, megabytes = measured[name]
    assert ATTACKS[name][1] in message
    # Headers and indices of as many tensors as are read are no attacks, but bound what one with names can take.
    most = 3 if name in ("the most tensors", "the longest index") else 1
    assert seconds < most and megabytes < 200 and len(message) < 1500


# Links


def cached(tmp_path: Path) -> Path:
    """A snapshot of Hugging Face's cache: every file a link to a blob."""
    repository = tmp_path / "hub" / "models--some--model"
    plain, _ = write_family(tmp_path / "plain", "qwen3_moe", shards=True)
    (plain / "tokenizer.json").write_text("{}")
    snapshot, blobs = repository / "snapshots" / "0123abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(plain.iterdir())):
        file.rename(blobs / f"blob{number}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"blob{number}")
    return snapshot


def test_the_links_of_hugging_faces_cache_are_followed(tmp_path):
    snapshot = cached(tmp_path)
    (tmp_path / "alias").symlink_to(snapshot)
    for path in (snapshot, tmp_path / "alias"):
        checkpoint = open_checkpoint(path)
        assert len([checkpoint.layer(layer) for layer in checkpoint.moe_layers]) == 3
    from huggingface_hub import try_to_load_from_cache

    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0123abc")
    found = try_to_load_from_cache("some/model", "config.json", cache_dir=tmp_path / "hub")
    assert isinstance(found, str) and open_checkpoint(Path(found).parent).moe_layers == (0, 1, 2)


def test_links_out_of_the_cache_are_not(tmp_path):
    snapshot = cached(tmp_path)
    for target in ("/etc/passwd", "../../refs/main", "../../../elsewhere"):
        (snapshot / SHARD).unlink()
        (snapshot / SHARD).symlink_to(target)
        with pytest.raises(InvalidInput, match="must lie in the checkpoint's directory, or in the blobs of Hugging"):
            open_checkpoint(snapshot).layer(1)


def test_links_within_the_directory_and_shards_in_folders(tmp_path):
    path, _ = write_family(tmp_path, "qwen3_moe", shards=True)
    (path / "shards").mkdir()
    (path / SHARD).rename(path / "shards" / "real")
    (path / "shards" / "link").symlink_to("real")
    in_index(path, "shards/link")
    assert open_checkpoint(path).layer(1).layer == 1


def test_a_converted_checkpoint_holds_no_file_from_elsewhere(tmp_path):
    config = config_of("qwen3_moe", hidden_size=32, moe_intermediate_size=32)
    block = "model.layers.0.mlp."
    shapes = {"gate.weight": (E, 32), "experts.gate_up_proj": (E, 64, 32), "experts.down_proj": (E, 32, 32)}
    tensors = {block + name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    path = write(tmp_path / "plain", config | {"num_hidden_layers": 1}, {0: tensors})
    (tmp_path / "secret").write_text("secret")
    (path / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidInput, match=r"tokenizer.json must lie in the checkpoint's directory, .*/secret; pass"):
        convert_checkpoint(path, tmp_path / "small", MXFP8)
    assert not (tmp_path / "small").exists()
    (path / "tokenizer.json").unlink()
    convert_checkpoint(path, tmp_path / "small", MXFP8)


# Hidden states

#: A .npy file up to its header of 80 bytes.
NPY = b"\x93NUMPY\x01\x00\x50\x00"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04" + bytes(100), "readable .npy file"),
        (b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535, "readable .npy file"),
        (NPY + b"{'descr':'<f4','fortran_order':False,'shape':(1000000000000,4),}".ljust(80), "bytes of data"),
        (NPY + b"{'descr':'<f4','fortran_order':False,'shape':(-1,-4),}".ljust(80), "bytes of data"),
    ],
)
def test_hidden_states_of_strangers(tmp_path, content, message):
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(InvalidInput, match=message):
        load_hidden_states(tmp_path / "x.npy")


def test_hidden_states_may_be_a_link(tmp_path):
    states = np.ones((2, 4), np.float32)
    for directory, save in (("npy", np.save), ("safetensors", lambda path, array: save_file({"x": array}, path))):
        save(tmp_path / f"real.{directory}", states)
        (tmp_path / directory).mkdir()
        (tmp_path / directory / f"x.{directory}").symlink_to(tmp_path / f"real.{directory}")
        assert (load_hidden_states(tmp_path / directory / f"x.{directory}") == states).all()


# Files that another takes the place of


def rewrite(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Put other tensors into the file itself, under the time stamp that it had."""
    before = path.stat()
    save_file(tensors, path.with_name("new"))
    path.write_bytes(path.with_name("new").read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino) == (
        before.st_size,
        before.st_mtime_ns,
        before.st_ino,
    )


def test_a_rewritten_file_is_read_with_its_own_header(tmp_path):
    path, tensors = write_family(tmp_path, "qwen3_moe", "fused")
    checkpoint = open_checkpoint(path)
    old = checkpoint.layer(1)
    # Layers 1 and 2 change places: the size of the file stays, the offsets of their tensors do not.
    other = {"0": "0", "1": "2", "2": "1"}
    stored = {name: array for layer in tensors.values() for name, array in layer.stored.items()}
    swapped = {re.sub(r"(?<=layers\.)\d", lambda found: other[found[0]], name): stored[name] for name in stored}
    rewrite(path / "model.safetensors", swapped)
    for layer, wanted in ((old, tensors[1]), (checkpoint.layer(1), tensors[2])):
        assert layer.experts.down.tobytes() == wanted.expected["experts.down"].tobytes()
        assert layer.router.weight.tobytes() == wanted.expected["router.weight"].tobytes()


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(4, np.float32), "b": np.ones(4, np.float32)}, path)
    with open_file(path) as file:
        assert read_tensor(file, "a").tolist() == [0, 0, 0, 0]
        rewrite(path, {"b": np.zeros(4, np.float32), "a": np.ones(4, np.float32)})
        with pytest.raises(InvalidInput, match="must stay as it is while it is read, got a change; read it again"):
            read_tensor(file, "b")
    with open_file(path) as file:
        assert read_tensor(file, "a").tolist() == [1, 1, 1, 1]


def test_files_are_closed_again(tmp_path):
    path, _ = write_family(tmp_path, "qwen3_moe", shards=True)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        open_checkpoint(path).layer(1)
        settings(path, hidden_size=9)
        with pytest.raises(InvalidInput):
            open_checkpoint(path).layer(1)
        settings(path)
    assert len(os.listdir("/proc/self/fd")) == before
