"""Converting a checkpoint: megabytes and CPU time, beside a plain copy of as many bytes; needs no GPU.

    python -m benchmarks.convert [--targets bf16,int4_g32,...] [--experts 32] [--rounds 3] [--output record.json]

Writes a layer of Qwen3-30B-A3B's sizes one expert at a time, and one of gpt-oss's in stacks, with random bf16 weights.
Each round converts and then copies, so that both meet the same load of the machine. Bytes are those read, from the page
cache, and written, to the disk. CPU time is of all threads.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.loading import machine, write_layer, write_random
from benchmarks.provenance import provenance
from benchmarks.record import command, table, write_record
from moe_core.base.files import whole_file
from moe_core.checkpoint import convert_checkpoint
from moe_core.formats import format_named

PLAIN = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "nvfp4": "nvfp4"}
TARGETS = (*PLAIN, "int4_g32", "int8_row", "fp8_block", "mxfp8", "mxfp4")
#: The targets of gpt-oss's stacks.
STACKS = ("bf16", "mxfp4")
_COLUMNS = {
    "source": "source", "target": "target", "megabytes": "MB", "mb_s": "MB/s", "copy_mb_s": "copy: MB/s",
    "cpu_ms": "CPU ms per MB", "copy_cpu_ms": "copy: CPU ms per MB",
}  # fmt: skip
_PIECE, _MB = 2**22, 1e6


class Took(NamedTuple):
    seconds: float
    cpu_seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__, targets=TARGETS, experts=32, widths="2048,768,2880", rounds=3)
    options = parser.parse_args(arguments)
    load, (d_model, d_ff, width) = os.getloadavg()[0], map(int, options.widths.split(","))
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for source, of_source in (("qwen3_moe", TARGETS), ("gpt_oss", STACKS)):
            path = Path(directory, source)
            path.mkdir()
            if source == "gpt_oss":
                write_layer(path, "bf16", options.experts, width)
            else:
                write_one_by_one(path, options.experts, d_model, d_ff)
            for target in options.targets.split(","):
                if target in of_source:
                    rows.append({"source": source, "target": target, **measure(path, target, options.rounds)})
    print(table(rows, _COLUMNS))
    if options.output:
        facts = provenance("benchmarks.convert") | machine() | {"load_average": load, "rounds": options.rounds}
        sizes = {"experts": options.experts, "qwen3_moe": [d_model, d_ff], "gpt_oss": [width, width]}
        write_record(options.output, {"provenance": facts, "sizes": sizes, "rows": rows})
    return 0


def write_one_by_one(directory: Path, experts: int, d_model: int, d_ff: int) -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": d_model, "moe_intermediate_size": d_ff}
    config |= {
        "num_experts": experts,
        "num_experts_per_tok": min(8, experts),
        "norm_topk_prob": True,
        "hidden_act": "silu",
    }
    block = "model.layers.0.mlp."
    tensors = {f"{block}gate.weight": ("BF16", (experts, d_model))}
    for expert in range(experts):
        for name, shape in (("gate", (d_ff, d_model)), ("up", (d_ff, d_model)), ("down", (d_model, d_ff))):
            tensors[f"{block}experts.{expert}.{name}_proj.weight"] = ("BF16", shape)
    write_random(directory, config, tensors)


def measure(path: Path, target: str, rounds: int) -> dict[str, float]:
    """Medians over the rounds."""
    format: Any = PLAIN.get(target) or format_named(target)
    times: dict[str, list[Took]] = {"": [], "copy_": []}
    source = path / "model.safetensors"
    written = 0
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory(dir=path.parent) as made:
            converted = _took(lambda made=made: convert_checkpoint(path, made, format, loader="moebius"))
            written = sum(file.stat().st_size for file in Path(made).glob("*.safetensors"))
            copied = _took(lambda made=made, size=written: _copy(source, Path(made, "copy"), size))
        if number:  # the first round warms up
            times[""].append(converted)
            times["copy_"].append(copied)
    megabytes = (source.stat().st_size + written) / _MB
    result = {"megabytes": megabytes}
    for name, some in times.items():
        result[f"{name}mb_s"] = megabytes / statistics.median(one.seconds for one in some)
        result[f"{name}cpu_ms"] = 1000 * statistics.median(one.cpu_seconds for one in some) / megabytes
    return result


def _took(function: Callable[[], object]) -> Took:
    start, cpu = time.perf_counter(), time.process_time()
    function()
    return Took(time.perf_counter() - start, time.process_time() - cpu)


def _copy(source: Path, target: Path, size: int) -> None:
    """Read all of the source, and write `size` bytes to the disk, as a conversion does."""
    piece = b""
    with source.open("rb", buffering=0) as file, whole_file(target) as partial, partial.open("wb", 0) as output:
        while read := file.read(_PIECE):
            piece = read if len(read) >= len(piece) else piece
            size -= output.write(piece[: min(size, len(read))])
        while size:
            size -= output.write(piece[:size])


if __name__ == "__main__":
    sys.exit(main())
