"""Rows of tokens and results more than 2**31 elements behind the start of their array, here and at peers.

As tests/ops/test_far_rows.py: arrays are sparse, and the last program of a launch runs alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.formats import format_named
from moe_core.ops.exchange.direct import TOLD, plan_push_tokens_once
from moe_core.ops.exchange.operands import HomeTokens, Places, TokenSizes, TokenTables, in_records
from moe_core.ops.exchange.pull import plan_take_rows
from moe_core.ops.exchange.push import plan_combine_push, plan_dispatch_push
from moe_core.ops.quantize.reference import quantize_rows
from moe_core.plan.steps import Constant, KernelLaunch
from tests.support.harness import engine_target, spec_of
from tests.support.runtime.far import HERE, LAST, ROWS, WIDTH, agree, draw, far, half
from tests.support.runtime.memory import run_last_programs, sparse

pytestmark = pytest.mark.skipif(engine_target().kind != "interpreter", reason="a GPU would need all of the memory")
#: One tile for each program, so that the last sees the last rows alone.
EVERY = 2**30
#: The last columns of a tile.
COLUMNS = 16


def table(array: np.ndarray) -> np.ndarray:
    """Of one rank, whose array this is."""
    return np.array([array.ctypes.data], np.int64)


def places() -> dict[str, np.ndarray]:
    """Of ROWS tokens with a slot each, the last LAST rows at rank 0; no other goes anywhere."""
    rows = np.full((ROWS, 1), -1, np.int32)
    rows[-LAST:, 0] = np.arange(ROWS - LAST, ROWS)
    return {"owners": np.minimum(rows, 0), "rows": rows}


def run(plan: Any, arrays: dict[str, np.ndarray], **others: np.ndarray) -> dict[str, np.ndarray]:
    return run_last_programs(plan, arrays, others=others)


def test_rows_of_tokens() -> None:
    last, there = draw(half(LAST, WIDTH)), sparse((ROWS, WIDTH), "bfloat16")
    arrays = {"x": far(half(ROWS, WIDTH), last), **places(), "rows_at": table(there)}
    specs = {name: spec_of(array) for name, array in arrays.items()}
    plan = in_records(plan_dispatch_push, places=Places)(**specs, target=HERE, num_rows=ROWS)
    run(plan, arrays, there=there)
    agree(there[-LAST:, -COLUMNS:], last[:, -COLUMNS:])


def test_rows_of_codes() -> None:
    format, last = format_named("fp8_group"), draw(half(LAST, WIDTH))
    there, scales = sparse((ROWS, WIDTH), "uint8"), sparse((ROWS, -(-WIDTH // 128)), "float32")
    arrays = {"x": far(half(ROWS, WIDTH), last), **places(), "rows_at": table(there)}
    specs = {name: spec_of(array) for name, array in arrays.items()} | {"scales_at": ArraySpec((1,), "int64")}
    plan = in_records(plan_dispatch_push, places=Places)(**specs, target=HERE, num_rows=ROWS, format=format)
    run(plan, arrays | {"scales_at": table(scales)}, there=there, scales=scales)
    codes, expected = quantize_rows(last, format=format)
    agree(there[-LAST:, -COLUMNS:], codes.view(np.uint8)[:, -COLUMNS:])
    agree(scales[-LAST:, -1:], expected[:, -1:])


def test_results_that_go_home() -> None:
    last, there = draw(half(LAST, WIDTH)), sparse((ROWS, WIDTH), "bfloat16")
    sources = np.zeros((ROWS, 2), np.int32)
    sources[:, 1] = np.arange(ROWS)
    arrays = {"y": far(half(ROWS, WIDTH), last), "sources": sources, "group_start": np.array([0, ROWS], np.int32)}
    arrays |= {"slots_at": table(there)}
    specs = [spec_of(array) for array in arrays.values()]
    (launch,) = plan_combine_push(*specs, HERE, num_slots=ROWS, programs=EVERY).steps
    assert isinstance(launch, KernelLaunch)
    sizes: dict[str, Any] = {name: one.value for name, one in launch.arguments if isinstance(one, Constant)}
    sections, height, blocks = sizes["SECTIONS"], sizes["BLOCK_M"], -(-WIDTH // sizes["BLOCK_N"])
    # Blocks of rows come from sections by turns: the program that has the last one is to be the last.
    section, block = -(-ROWS // (height * sections)), -(-ROWS // height) - 1
    tile = (block % section * sections + block // section + 1) * blocks - 1
    run(plan_combine_push(*specs, HERE, num_slots=ROWS, programs=tile + 1), arrays, there=there)
    agree(there[-LAST:, -COLUMNS:], last[:, -COLUMNS:])


def test_rows_that_are_taken() -> None:
    last = draw(half(LAST, WIDTH))
    arrays = {"x": far(half(ROWS, WIDTH), last), "rows": np.arange(ROWS, dtype=np.int32)[:, None]}
    arrays |= {"group_start": np.array([0, ROWS], np.int32)}
    found = run(plan_take_rows(*map(spec_of, arrays.values()), HERE, programs=EVERY), arrays)["y"]
    agree(found[-LAST:, -COLUMNS:], last[:, -COLUMNS:])


def test_tokens_at_their_places() -> None:
    last, there = draw(half(LAST, WIDTH)), sparse((ROWS, WIDTH), "bfloat16")
    beside = {"peer_ids": sparse((ROWS, 1), "int32"), "peer_weights": sparse((ROWS, 1), "float32")}
    beside |= {"peer_headers": sparse((3, TOLD), "int32")}
    arrays = {"x": far(half(ROWS, WIDTH), last), "ids": sparse((ROWS, 1), "int32")}
    arrays |= {"weights": sparse((ROWS, 1), "float32"), "header": np.arange(8, dtype=np.int32)}
    arrays |= {"rows_at": table(there), **{f"{name[5:]}_at": table(array) for name, array in beside.items()}}
    specs = {name: spec_of(array) for name, array in arrays.items()}
    sizes = {"rank": 0, "per_rank": 1, "num_experts": 1, "most": ROWS}
    plan = in_records(plan_push_tokens_once, operands=HomeTokens, tables=TokenTables, sizes=TokenSizes)
    run(plan(**specs, target=HERE, **sizes, programs=EVERY), arrays, there=there, **beside)
    agree(there[-LAST:, -COLUMNS:], last[:, -COLUMNS:])
