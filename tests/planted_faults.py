"""Faults planted in copies of the kernels, and the process that runs the parity tool on each copy.

Run as a script: `python -m tests.planted_faults PLAN`. PLAN is JSON: a list of [folder with kernels, arguments of
moe-parity]. The frameworks are imported once; every entry then runs in a fork whose kernels come from its folder. Exits
with 0; each entry leaves its exit status in `status` in its folder and its output in `log`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

#: The folder whose kernels are copied and changed.
KERNELS = Path(__file__).parents[1] / "moe_core" / "kernels"


@dataclass(frozen=True)
class Fault:
    """One line of a kernel changed: `old`, which must occur, becomes `new` everywhere in the file.

    case: the built-in case that must turn red, stage: the first divergent stage it must name. tokens: see --tokens.
    """

    old: str
    new: str
    case: str
    stage: str
    tokens: int = 12


#: By kernel file. None of them makes a kernel read or write outside its arrays: that would end the process.
FAULTS: dict[str, tuple[Fault, ...]] = {
    "router": (
        Fault("accumulator += tl.load(bias", "accumulator -= tl.load(bias", "gpt_oss", "logits"),
        Fault("num_tokens - 1)", "num_tokens - 2)", "mixtral", "logits"),
    ),
    "topk": (
        Fault("bits ^ ((bits >> 31) & 0x7FFFFFFF)", "bits", "mixtral", "ids"),
        Fault("for _ in range(TOPK_GROUP):", "for _ in range(TOPK_GROUP - 1):", "deepseek_v3", "ids"),
        Fault("scores + load_rows(biases", "scores - load_rows(biases", "deepseek_v3", "ids"),
        Fault("kept = tl.load(token_mask", "kept = 1 - tl.load(token_mask", "qwen2_moe", "ids"),
        Fault("if RENORMALIZE:", "if not RENORMALIZE:", "mixtral", "weights"),
        Fault("values *= SCALE", "values *= 1.0", "deepseek_v3", "weights"),
    ),
    "layout": (
        Fault("position[:, None] < position[None, :]", "position[:, None] > position[None, :]", "mixtral", "layout"),
        Fault(
            "tl.gather(before, tl.where(experts", "0 * tl.gather(before, tl.where(experts", "qwen3_moe", "layout", 96
        ),
        Fault("group_start + experts, starts,", "group_start + experts, starts * 0,", "mixtral", "layout"),
        Fault("group_sizes + experts, sizes,", "group_sizes + experts, sizes // 2,", "mixtral", "layout"),
        Fault("tl.where(placed, row, -1)", "tl.where(placed, row, 0)", "qwen2_moe", "layout"),
        Fault("tl.where(blocks < block, counts, 0)", "tl.where(blocks < block, 0, 0)", "qwen3_moe", "layout", 96),
    ),
    "schedule": (
        Fault("row + 1, experts,", "row + 1, experts // 2,", "mixtral", "matmul1"),
        Fault("tl.where(busy, block, -1)", "tl.where(busy, 0, -1)", "mixtral", "matmul1", 160),
    ),
    "route_and_layout": (
        Fault("group_sizes + experts, sizes,", "group_sizes + experts, sizes // 2,", "mixtral", "moe (composed)"),
        Fault("tl.store(weights + target, values,", "tl.store(weights + target, -values,", "mixtral", "moe (composed)"),
        Fault("rank[None, :], all_ranks", "0 * rank[None, :], all_ranks", "mixtral", "moe (composed)"),
    ),
    "bitmatrix": (
        Fault("1 << (experts & 31)", "1 << (experts & 30)", "mixtral", "bitmatrix"),
        Fault("place = tl.cumsum(bits, axis=1) - 1", "place = tl.cumsum(bits, axis=1)", "mixtral", "bitmatrix"),
    ),
    "matmul_ogs": (
        Fault("slots // TOP_K", "slots // TOP_K * 0", "mixtral", "matmul1"),
        Fault("result.to(y.dtype", "result.to(tl.bfloat16).to(y.dtype", "mixtral", "matmul1"),
        Fault("accumulator += tl.load(bias", "accumulator -= tl.load(bias", "gpt_oss", "matmul1"),
        Fault("second = first + N * N_STRIDE", "second = first", "qwen3_moe", "activation"),
        Fault("tl.load(row_weight + slots", "tl.load(row_weight + rows", "mixtral", "matmul2"),
    ),
    "activation": (
        Fault("(up + 1.0)", "up", "gpt_oss", "activation"),
        Fault("tl.where(gate > LIMIT, LIMIT, gate)", "gate", "gpt_oss", "activation"),
        Fault("tl.exp(-x)", "tl.exp(-1.0001 * x)", "mixtral", "activation"),
        Fault("x + base + WIDTH + columns", "x + base + columns", "qwen3_moe", "activation_op"),
    ),
    "reduction": (
        Fault("range(TOP_K)", "range(TOP_K - 1)", "mixtral", "output"),
        Fault("extra *= sigmoid(", "extra += sigmoid(", "qwen2_moe", "output"),
        Fault("value * weight[:, None]", "value", "llama4", "matmul1"),
        Fault("zeros = tl.zeros((BLOCK_M, BLOCK_N)", "zeros = 1 + tl.zeros((BLOCK_M, BLOCK_N)", "qwen2_moe", "matmul1"),
    ),
}


def plant(kernel_file: str, fault: Fault, folder: Path) -> None:
    """Copy every kernel file into `folder`, one of them with the fault."""
    folder.mkdir()
    for path in KERNELS.glob("*.py"):
        source = path.read_text()
        if path.stem == kernel_file:
            assert fault.old in source, f"{path.name} no longer holds {fault.old!r}: plant the fault elsewhere"
            source = source.replace(fault.old, fault.new)
        (folder / path.name).write_text(source)


def _run(folder: Path, arguments: list[str]) -> int:
    """The parity tool on the kernels of a folder."""
    kernels = importlib.import_module("moe_core.kernels")
    kernels.__path__[:] = [str(folder)]
    return importlib.import_module("moe_core.parity.cli").main(arguments)


def _fork(folder: Path, arguments: list[str]) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 3
    try:
        with (folder / "log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            status = _run(folder, arguments)
            sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    importlib.import_module("moe_torch.parity_engine")
    for place, options in json.loads(sys.argv[1]):
        (Path(place) / "status").write_text(str(_fork(Path(place), options)))
