"""Faults planted in copies of the kernels, and the process that runs the parity tool on each copy.

Run as a script: `python -m tests.support.faults.forward PLAN`. PLAN is JSON: a list of [folder with kernels, arguments
of moe-parity]. The frameworks are imported once; every entry then runs in a fork whose kernels come from its folder.
Exits with 0; each entry leaves its exit status in `status` in its folder and its output in `log`.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.faults.kernel_copies import INTERPRETER, OpFault, prepare_forks, run_on_copy


@dataclass(frozen=True)
class Fault(OpFault):
    """A fault that the parity tool must find.

    case: the built-in case that must turn red, stage: the first divergent stage it must name. tokens: see --tokens.
    """

    case: str
    stage: str
    tokens: int = 4


#: By kernel file. None of them makes a kernel read or write outside its arrays: that would end the process.
FAULTS: dict[str, tuple[Fault, ...]] = {
    "router.kernels.router": (
        Fault("accumulator += tl.load(bias", "accumulator -= tl.load(bias", "gpt_oss", "logits"),
        Fault("num_tokens - 1)", "num_tokens - 2)", "mixtral", "logits"),
    ),
    "routing.kernels.topk": (
        Fault("bits ^ ((bits >> 31) & 0x7FFFFFFF)", "bits", "mixtral", "ids", 12),
        Fault("for _ in range(TOPK_GROUP):", "for _ in range(TOPK_GROUP - 1):", "deepseek_v3", "ids"),
        Fault("scores + load_rows(biases", "scores - load_rows(biases", "deepseek_v3", "ids"),
        Fault("kept = tl.load(router.token_mask", "kept = 1 - tl.load(router.token_mask", "qwen2_moe", "ids"),
        Fault("if router.RENORMALIZE:", "if not router.RENORMALIZE:", "mixtral", "weights"),
        Fault("values *= router.SCALE", "values *= 1.0", "deepseek_v3", "weights"),
    ),
    "routing.kernels.layout": (
        Fault("position[:, None] < position[None, :]", "position[:, None] > position[None, :]", "mixtral", "layout"),
        Fault(
            "tl.gather(before, tl.where(experts", "0 * tl.gather(before, tl.where(experts", "qwen3_moe", "layout", 96
        ),
        Fault("group_start + experts, starts,", "group_start + experts, starts * 0,", "mixtral", "layout"),
        Fault("group_sizes + experts, sizes,", "group_sizes + experts, sizes // 2,", "mixtral", "layout"),
        Fault("tl.where(placed, row, -1)", "tl.where(placed, row, 0)", "qwen2_moe", "layout"),
        Fault("tl.where(blocks < block, counts, 0)", "tl.where(blocks < block, 0, 0)", "qwen3_moe", "layout", 96),
        Fault("tl.cumsum(owned, axis=0) - owned", "tl.cumsum(owned, axis=0) // 2", "qwen3_moe", "layout", 96),
    ),
    "routing.kernels.schedule": (
        Fault("row + 1, experts,", "row + 1, experts // 2,", "mixtral", "matmul1"),
        Fault("tl.where(busy, block, -1)", "tl.where(busy, 0, -1)", "mixtral", "matmul1", 160),
    ),
    "routing.kernels.route_and_layout": (
        Fault("write_sizes(sizes, groups)", "write_sizes(sizes // 2, groups)", "mixtral", "moe (composed)"),
        Fault("tl.store(weights + target, values,", "tl.store(weights + target, -values,", "mixtral", "moe (composed)"),
        Fault("rank[None, :], all_ranks", "0 * rank[None, :], all_ranks", "mixtral", "moe (composed)"),
    ),
    "moe.kernels.chained": (
        Fault('N=D, SCATTER="slot"', 'N=D, SCATTER="row"', "mixtral", "moe (composed)", 12),
        Fault("second_weight, None, second_bias", "second_weight, None, None", "gpt_oss", "moe (composed)", 12),
    ),
    "moe.kernels.one_token": (
        Fault("others < tl.expand_dims", "others > tl.expand_dims", "mixtral", "moe (composed)", 1),
        Fault("finished == num_blocks - 1", "finished == 0", "mixtral", "moe (composed)", 1),
        Fault("weight, None, bias", "weight, None, None", "gpt_oss", "moe (composed)", 1),
    ),
    "routing.kernels.bitmatrix": (
        Fault("1 << (experts & 31)", "1 << (experts & 30)", "mixtral", "bitmatrix"),
        Fault("place = tl.cumsum(bits, axis=1) - 1", "place = tl.cumsum(bits, axis=1)", "mixtral", "bitmatrix"),
    ),
    "common.kernels.rows": (Fault("slots // TOP_K", "slots // TOP_K * 0", "mixtral", "matmul1"),),
    "matmul.portable.kernel": (
        Fault("result.to(pointers.dtype", "result.to(tl.bfloat16).to(pointers.dtype", "mixtral", "matmul1"),
        Fault("accumulator += tl.load(bias", "accumulator -= tl.load(bias", "gpt_oss", "matmul1"),
        Fault("second = first + weights.N * weights.N_STRIDE", "second = first", "qwen3_moe", "activation"),
        Fault("epilogue.row_weight + slots", "epilogue.row_weight + rows", "mixtral", "matmul2"),
    ),
    "activation.kernels.formulas": (
        Fault("(up + 1.0)\n        elif", "up\n        elif", "gpt_oss", "activation"),
        Fault("gate = tl.where(gate > LIMIT, LIMIT, gate)", "gate = gate", "gpt_oss", "activation"),
        Fault("tl.exp(-x)", "tl.exp(-1.0001 * x)", "mixtral", "activation"),
    ),
    "activation.kernels.forward": (
        Fault("x + base + WIDTH + columns", "x + base + columns", "qwen3_moe", "activation_op"),
    ),
    "reduction.kernels.reduce": (
        Fault("range(TOP_K)", "range(TOP_K - 1)", "mixtral", "output"),
        Fault("extra *= sigmoid(", "extra += sigmoid(", "qwen2_moe", "output"),
        Fault("value * weight[:, None]", "value", "llama4", "matmul1"),
    ),
    "common.kernels.zero_rows": (
        Fault("zeros = tl.zeros((BLOCK_M, BLOCK_N)", "zeros = 1 + tl.zeros((BLOCK_M, BLOCK_N)", "qwen2_moe", "matmul1"),
    ),
    "matmul.quantized.kernel": (
        Fault("return column + side * N", "return column", "deepseek_v3_fp8_block", "activation"),
    ),
    "quantize.kernels.rows": (Fault("0x7FFFF + ((size >> 20) & 1)", "0x7FFF", "deepseek_v3_fp8_block", "quantized_x"),),
}


def _run_parity(arguments: list[str]) -> int:
    return importlib.import_module("moe_core.parity.cli").main(arguments)


if __name__ == "__main__":
    prepare_forks(("moe_torch.parity.torch", "moe_core.parity.cli", *INTERPRETER))
    # Forks live for seconds: none has time to go through all that the frameworks hold in search of garbage.
    gc.disable()
    for place, options in json.loads(sys.argv[1]):
        run_on_copy(Path(place), lambda arguments=options: _run_parity(arguments))
