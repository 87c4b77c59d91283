"""Nothing in the Hopper kernels touches shared memory unordered, by the model in `tests.support.hopper`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import triton.language as tl

from moe_core.ops.matmul.sm90.kernels.fp8 import matmul_fp8
from moe_core.ops.matmul.sm90.kernels.matmul import matmul_ogs
from moe_core.ops.matmul.sm90.kernels.swapped import matmul_ogs as matmul_swapped
from moe_core.ops.matmul.sm90.kernels.tall import matmul_ogs as matmul_tall
from moe_core.ops.matmul.sm90.kernels.weight_gradient import weight_gradient
from moe_core.ops.matmul.sm90_packed.kernels.few_rows import matmul_few_rows
from moe_core.ops.matmul.sm90_packed.kernels.matmul import matmul_mixed_input
from tests.support.faults.kernel_copies import OpFault
from tests.support.hopper.language import run_kernel
from tests.support.hopper.machine import Hang, Race
from tests.support.hopper.values import OPAQUE, Array

#: Experts with whole blocks, with fewer rows than a consumer has, with none, and with a low last block.
SIZES = (200, 0, 30, 192, 129)


def layout(height: int) -> dict[str, Any]:
    """A layout of row blocks of that height, with idle blocks behind."""
    sizes = [min(size, 3 * height) for size in SIZES]
    starts = [sum(sizes[:expert]) for expert in range(len(sizes))]
    blocks = [(block, expert) for expert, size in enumerate(sizes) for block in range(-(-size // height))]
    schedule = [number for pair in (*blocks, (0, -1), (0, -1)) for number in pair]
    rows = sum(sizes)
    return {
        "group_sizes": Array(sizes), "group_start": Array(starts), "schedule": Array(schedule),
        "num_blocks": len(blocks) + 2, "num_rows": rows, "num_slots": rows,
    }  # fmt: skip


COMMON = {
    "NUM_EXPERTS": len(SIZES), "NUM_LAYERS": 1, "layer_index": None, "TOP_K": 2, "SCATTER": "row", "ACTIVATION": "silu",
    "ALPHA": 1.0, "LIMIT": None, "COUNTER": 0, "GROUP_M": 2, "PDL": None, "BIAS_LAYER_STRIDE": 0,
}  # fmt: skip
PLAIN = {**COMMON, "D": 192, "N": 128, "X_STRIDE": 192, "TRUSTED": True, "UP_BIAS_LAYER_STRIDE": 0, "row_weight": None}

TAIL = {"tail_low": OPAQUE, "TAIL_SLOTS": 8, "TAIL_RANK": 64, "TAIL_R_STRIDE": 1, "TAIL_N_STRIDE": 64}


def dense(height: int, **options: Any) -> dict[str, Any]:
    """Arguments of products of bf16 weights."""
    halves = options.get("GATE_LAYOUT", "halves") in ("halves", "interleaved")
    chosen = {
        "GATE_LAYOUT": "halves", "IN_OUT": True, "STAGES": 3, "GATHER": "row", "pre": None, "up_bias": None, **options,
    }  # fmt: skip
    if height == 192:
        del chosen["pre"]
    elif height == 128:
        chosen.setdefault("tail_low", None)
    return {**PLAIN, **layout(height), "WEIGHT_N": 256 if halves else 128, **chosen}


def codes(**options: Any) -> dict[str, Any]:
    """Arguments of products of fp8."""
    scales = {"X_SCALE_STRIDE": 2, "X_GROUP": 128, "SCALE_ROWS": 2, "SCALE_COLUMNS": 2, "GROUP_ROWS": 128, "GROUP": 128}
    chosen = {"FAST": False, "GATHER": "row", "GATE_LAYOUT": "halves", "STAGES": 3, "HIDDEN": "bfloat16", **options}
    registers = {"CONSUMER_REGISTERS": 208, "PRODUCER_REGISTERS": 88, "RULE": None, "y_scales": None, "given": None}
    registers["maxima"] = None
    plain = {name: value for name, value in PLAIN.items() if name != "PDL"}
    return {**plain, **layout(128), "WEIGHT_N": 256, "D": 384, **scales, **registers, **chosen}


def packed(height: int, **options: Any) -> dict[str, Any]:
    """Arguments of products of mxfp4 weights."""
    chosen = {"GATHER": "token", "STAGES": 3, "PAIRS": 2, "DEEP": 1, "PRODUCER_WARPS": 4, "REGISTERS": None}
    chosen |= {"tail_low": None, **options}
    matrix = {"D": 384, "N": 64, "WEIGHT_N": 128, "STEPS": 3, "BLOCKS": 2, "COLUMNS": 128, "GROUPS": 4, "REPEAT": 1}
    kind = {
        "ELEMENT": "e2m1", "GATE_LAYOUT": "interleaved", "zero_points": None, "X_STRIDE": 384,
        "weight_map": SimpleNamespace(dtype=tl.uint8), "BLOCK_M": height,
    }  # fmt: skip
    return {**COMMON, **layout(height), **matrix, **kind, **chosen}


def few_rows(**options: Any) -> dict[str, Any]:
    """Arguments of products of few rows with tiled weights."""
    arguments = packed(8, CHUNK=2, SPAN=256, STEPS=7, D=896, X_STRIDE=896, ALIKE=1, EARLY=False, **options)
    names = ("num_blocks", "COUNTER", "GROUP_M", "weight_map", "STAGES", "PAIRS", "DEEP", "PRODUCER_WARPS")
    return {name: value for name, value in arguments.items() if name not in names}


def gradient(**options: Any) -> dict[str, Any]:
    """Arguments of gradients of weights."""
    chosen = {"LEFT_GATHER": "row", "RIGHT_GATHER": "row", "STAGES": 3, **options}
    arrays = {name: value for name, value in layout(128).items() if name not in ("schedule", "num_blocks")}
    sizes = {"M": 192, "N": 256, "LEFT_STRIDE": 192, "RIGHT_STRIDE": 256, "LEFT_START": 0, "RIGHT_START": 0}
    return {**arrays, **sizes, "NUM_GROUPS": len(SIZES), "TOP_K": 2, **chosen}


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "halves": (matmul_ogs, dense(128)),
    "halves, biased": (matmul_ogs, dense(128, IN_OUT=False, STAGES=2)),
    "gathered": (matmul_ogs, dense(128, GATHER="token", GATE_LAYOUT="interleaved", bias=None, up_bias=None)),
    "no activation": (matmul_ogs, dense(128, GATE_LAYOUT=None, ACTIVATION=None, STAGES=4, SCATTER="slot")),
    "pre-activation": (matmul_ogs, dense(128, pre=OPAQUE)),
    "tail": (matmul_ogs, dense(128, **TAIL)),
    "tail, gathered": (matmul_ogs, dense(128, GATHER="token", IN_OUT=False, STAGES=2, **TAIL)),
    "tall": (matmul_tall, dense(192)),
    "tall, gathered": (matmul_tall, dense(192, GATHER="token", IN_OUT=False, STAGES=2)),
    "tall, no activation": (matmul_tall, dense(192, GATE_LAYOUT=None, ACTIVATION=None, SCATTER="slot")),
    "swapped": (matmul_swapped, dense(160)),
    "swapped, gathered": (matmul_swapped, dense(160, GATHER="token", IN_OUT=False, GATE_LAYOUT="interleaved")),
    "swapped, narrow, slots": (matmul_swapped, dense(160, GATE_LAYOUT=None, ACTIVATION=None, SCATTER="slot", N=320)),
    "swapped, pre-activation": (matmul_swapped, dense(160, pre=OPAQUE, row_weight=OPAQUE, N=72, STAGES=2)),
    "fp8": (matmul_fp8, codes()),
    "fp8, gathered": (matmul_fp8, codes(GATHER="token", STAGES=2)),
    "fp8, fast": (matmul_fp8, codes(FAST=True, GROUP=0, X_GROUP=0, GROUP_ROWS=0)),
    "fp8 to codes": (matmul_fp8, codes(y_scales=OPAQUE, RULE="block")),
    "fp8 with maxima": (matmul_fp8, codes(maxima=OPAQUE, N=136)),
    "gradient": (weight_gradient, gradient()),
    "gradient, left gathered": (weight_gradient, gradient(LEFT_GATHER="token", STAGES=2)),
    "gradient, right gathered": (weight_gradient, gradient(RIGHT_GATHER="token")),
    "packed, 64 rows": (matmul_mixed_input, packed(64)),
    "packed, 128 rows": (matmul_mixed_input, packed(128, GATHER="row", DEEP=1, PAIRS=4)),
    "packed, few rows": (matmul_mixed_input, packed(16, STAGES=2, DEEP=2, COUNTER=None)),
    "packed, wide": (matmul_mixed_input, packed(256, STAGES=2)),
    "packed, wide, by row": (matmul_mixed_input, packed(256, GATHER="row")),
    "streamed": (matmul_few_rows, few_rows()),
    "streamed integers": (matmul_few_rows, few_rows(ELEMENT="uint4", zero_points=OPAQUE, GATHER="row")),
}


@pytest.mark.parametrize("name", CASES)
def test_everything_is_ordered(name: str) -> None:
    kernel, arguments = CASES[name]
    for seed in range(3):
        machine = run_kernel(kernel, arguments, seed)
        if kernel is matmul_few_rows:  # no partitions, no TMA, no wgmma
            assert machine.kinds == {"generic", "copy"} and len(machine.warps) == 2
        else:
            assert {"generic", "async"} <= machine.kinds and len(machine.warps) == 6


#: (case, fault, what is found).
FAULTS = (
    ("halves", OpFault("num_outstanding=1", "num_outstanding=2"), Race),
    ("halves, biased", OpFault("gl.where(stage == 0, pipeline.STAGES - 1, stage - 1)", "stage"), (Race, Hang)),
    ("halves", OpFault("mbarrier.wait(pipeline.full.index(stage), phase)\n    if", "if"), Race),
    ("halves", OpFault("mbarrier.wait(pipeline.empty.index(stage), phase ^ 1)", "pass"), Race),
    ("halves", OpFault("(WIDE + ROWS) * BYTES", "WIDE * BYTES"), Race),
    ("halves", OpFault("(WIDE + 2 * ROWS) * BYTES", "(WIDE + 3 * ROWS) * BYTES"), Hang),
    ("halves", OpFault("tma.store_wait(0)\n    barrier()", "barrier()"), Race),
    ("halves", OpFault("        fence_async_shared()\n", "        pass\n"), Race),
    ("halves", OpFault("gl.where(wrapped, phase ^ 1, phase)", "phase"), (Race, Hang)),
    ("halves", OpFault("        release_stage(pipeline, stage)\n", ""), Hang),
    ("halves", OpFault("    release_tile(pipeline, place)", "    pass"), Hang),
    (
        "halves",
        OpFault("    barrier()\n    mbarrier.arrive(pipeline.ring_full", "    mbarrier.arrive(pipeline.ring_full"),
        Race,
    ),
    (
        "halves",
        OpFault("    barrier()\n    mbarrier.arrive(pipeline.empty", "    mbarrier.arrive(pipeline.empty"),
        Race,
    ),
    ("halves", OpFault("mbarrier.wait(pipeline.ring_empty.index(place), ring_phase ^ 1)", "pass"), Race),
    ("halves", OpFault("tiles.left.index(2 * stage + 1)", "tiles.left.index(2 * stage)"), Race),
    ("gathered", OpFault("fence_async_shared()", "pass"), Race),
    ("gathered", OpFault("async_copy.mbarrier_arrive(ready, increment_count=False)", "pass"), Hang),
    ("tail", OpFault("        fence_async_shared()\n        barrier()\n", "        barrier()\n"), Race),
    ("tail", OpFault("mbarrier.wait(pipeline.empty.index(stage), phase ^ 1)\n            flags", "flags"), Race),
    ("tail, gathered", OpFault("1 + 32 * gl.num_warps() if pipeline.COPIED else 1", "1"), Hang),
    ("tall", OpFault("num_outstanding=2", "num_outstanding=4"), Race),
    ("tall, gathered", OpFault("CHUNKS * stage + chunk", "CHUNKS * stage + chunk // 2"), Race),
    ("swapped", OpFault("tma.store_wait(1)", "tma.store_wait(2)"), Race),
    # A parity that flips with pieces instead of bulk stores.
    ("swapped", OpFault("turn ^= 1", "turn = FIRST // PART % 2"), Race),
    ("swapped", OpFault("(WIDE + (chunk + 1) * HEIGHT) * BYTES", "(WIDE + HEIGHT) * BYTES"), (Race, Hang)),
    ("swapped, gathered", OpFault("fence_async_shared()", "pass"), Race),
    ("swapped, narrow, slots", OpFault("        stage, phase = skip_tile(", "        skip_tile("), (Race, Hang)),
    (
        "fp8",
        OpFault("0, deps=[partial])\n        release", "9, deps=[partial])\n        release"),
        Race,
    ),
    ("fp8", OpFault("    barrier()\n    mbarrier.arrive(turns", "    mbarrier.arrive(turns"), Hang),
    ("fp8", OpFault("(PART + 1 + WHICH) % 2", "PART"), Hang),
    ("gradient", OpFault("    release_tile(pipeline, place)", "    pass"), Hang),
    ("gradient", OpFault("LEFT_BYTES + RIGHT_BYTES)", "LEFT_BYTES)"), (Race, Hang)),
    ("packed, 64 rows", OpFault("warpgroup_mma_wait(num_outstanding=0", "warpgroup_mma_wait(num_outstanding=9"), Race),
    ("packed, wide", OpFault("sums = wait_for(sums, 0, REST)", "sums = wait_for(sums, 2, REST)"), Race),
    ("packed, wide", OpFault("product.pipeline, stage)", "product.pipeline, following)"), (Race, Hang)),
    ("streamed", OpFault("async_copy.wait_group(0)\n        barrier()", "barrier()"), Race),
    ("streamed", OpFault("wait_group(0)\n        barrier()", "wait_group(1)\n        barrier()"), Race),
    ("streamed", OpFault("async_copy.wait_group(0)\n        barrier()", "async_copy.wait_group(0)"), Race),
    ("streamed integers", OpFault("rows = x_tiles.index(side)", "rows = x_tiles.index(1 - side)"), Race),
)


@pytest.mark.parametrize(("name", "fault", "found"), FAULTS)
def test_faults_are_found(name: str, fault: OpFault, found: Any) -> None:
    kernel, arguments = CASES[name]
    with pytest.raises(found):
        for seed in range(8):
            run_kernel(kernel, arguments, seed, fault)
