"""Loading a layer of a real size from a checkpoint: seconds and peak memory; needs no GPU.

    python -m benchmarks.loading [--storages bf16,mxfp4] [--experts 128] [--output record.json]

Writes a checkpoint of one layer of gpt-oss-120b's sizes with random weights, and loads it in a process per front-end,
as its users do: `MoE.from_weights(LayerWeights.from_checkpoint(open_checkpoint(path).layer(0)), copy=False)`. The peak
is what resident memory (mapped files included) grew by at most, over the bytes of the weights; a small layer was loaded
before. The file was just written, so it is read from the page cache. The exit status is 1 where a peak is above 1.2
times the weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import provenance
from benchmarks.record import command, table, write_record

#: What a peak may be, over the bytes of the weights.
ALLOWED = 1.2
STORAGES, FRONT_ENDS = ("bf16", "mxfp4"), ("torch", "flax")
_COLUMNS = {
    "storage": "weights", "front_end": "front-end", "weights_gib": "GiB", "seconds": "seconds",
    "peak_over_weights": "peak / weights",
}  # fmt: skip
#: D and F of gpt-oss-120b; its layers have 128 experts.
_WIDTH = 2880
_PIECE = 2**24
_GIB = 2**30


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, storages=STORAGES, experts=128, width=_WIDTH)
    parser.add_argument("--measure", nargs=2, metavar=("FRONT_END", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return 0
    rows = []
    for storage in options.storages.split(","):
        with tempfile.TemporaryDirectory() as directory:
            write_layer(Path(directory), storage, options.experts, options.width)
            for front_end in FRONT_ENDS:
                words = [sys.executable, "-m", "benchmarks.loading", "--measure", front_end, directory]
                done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
                rows.append({"storage": storage, "front_end": front_end, **json.loads(done.stdout)})
    print(table(rows, _COLUMNS))
    if options.output:
        facts = provenance("benchmarks.loading") | machine()
        sizes = {"experts": options.experts, "d_model": options.width, "d_ff": options.width}
        write_record(options.output, {"provenance": facts, "sizes": sizes, "rows": rows})
    return int(any(row["peak_over_weights"] > ALLOWED for row in rows))


def write_layer(directory: Path, storage: str, experts: int, width: int) -> None:
    """A gpt-oss checkpoint of one layer, written piece by piece."""
    config: dict[str, Any] = {"model_type": "gpt_oss", "num_hidden_layers": 1, "hidden_size": width}
    config |= {"intermediate_size": width, "num_local_experts": experts, "num_experts_per_tok": 4}
    block = "model.layers.0.mlp."
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        f"{block}router.weight": ("BF16", (experts, width)),
        f"{block}router.bias": ("BF16", (experts,)),
        f"{block}experts.gate_up_proj_bias": ("BF16", (experts, 2 * width)),
        f"{block}experts.down_proj_bias": ("BF16", (experts, width)),
    }
    for name, rows in (("gate_up_proj", 2 * width), ("down_proj", width)):
        if storage == "bf16":
            tensors[f"{block}experts.{name}"] = ("BF16", (experts, width, rows))
        else:
            tensors[f"{block}experts.{name}_blocks"] = ("U8", (experts, rows, width // 32, 16))
            tensors[f"{block}experts.{name}_scales"] = ("U8", (experts, rows, width // 32))
    if storage == "mxfp4":
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.router"]}
    write_random(directory, config, tensors)


def write_random(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """config.json, and a file of random numbers for name -> (BF16 or U8, shape)."""
    (directory / "config.json").write_text(json.dumps(config))
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * (2 if dtype == "BF16" else 1)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    random = np.random.default_rng(0)
    # bfloat16 from -1 to 1 or so; bytes of mxfp4 of any value, scales around 1.
    floats = (random.standard_normal(_PIECE).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    codes = random.integers(0, 256, _PIECE, np.uint8).tobytes()
    scales = random.integers(120, 128, _PIECE, np.uint8).tobytes()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, entry in header.items():
            source = floats if entry["dtype"] == "BF16" else scales if name.endswith("_scales") else codes
            left = entry["data_offsets"][1] - entry["data_offsets"][0]
            while left:
                left -= file.write(source[: min(left, len(source))])


def measure(front_end: str, path: str) -> dict[str, float]:
    """Load the layer of a checkpoint in this process; compares it with the files afterwards."""
    from moe_core.checkpoint import open_checkpoint
    from moe_core.layers import LayerWeights

    if front_end == "torch":
        from moe_torch import MoE
    else:
        from moe_jax.nnx import MoE

    def load(path: str) -> Any:
        return MoE.from_weights(LayerWeights.from_checkpoint(open_checkpoint(path).layer(0)), copy=False)

    with tempfile.TemporaryDirectory() as small:
        # What a framework loads at its first layer is none of the next one's.
        write_layer(Path(small), "bf16", 4, 64)
        load(small)
    before, start = _reset_peak(), time.perf_counter()
    layer = load(path)
    seconds, grown = time.perf_counter() - start, _memory("VmHWM") - before
    weights: LayerWeights = layer.export_weights()
    held = sum(array.nbytes for array in weights.named().values())
    read = LayerWeights.from_checkpoint(open_checkpoint(path).layer(0)).named()
    for name, array in weights.named().items():
        given = read.pop(name)
        # The router of a Flax layer lies the other way round.
        if not np.array_equal(given.T if given.shape != array.shape else given, array):
            raise SystemExit(f"{name} of the {front_end} layer is not that of {path}")
        del given
    return {"weights_gib": held / _GIB, "seconds": seconds, "peak_gib": grown / _GIB, "peak_over_weights": grown / held}


def _memory(field: str) -> int:
    """Bytes of resident memory: VmRSS now, VmHWM at most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise SystemExit("peak memory is read as Linux tells it")


def _reset_peak() -> int:
    """Forget the peak so far; the bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def machine() -> dict[str, Any]:
    """For records of CPUs."""
    lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = lines[0].partition(":")[2].strip() if lines else platform.processor()
    return {"cpu": cpu, "cores": os.cpu_count(), "system": platform.platform()}


if __name__ == "__main__":
    sys.exit(main())
