"""Plans of the tables of an exchange for the compile gate."""

from __future__ import annotations

from collections.abc import Iterator

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.exchange.operands import ReceiveOperands, SendOperands
from moe_core.ops.exchange.tables import plan_receive_tables, plan_send_tables
from moe_core.plan.steps import LaunchPlan
from moe_core.specs.exchange import TableSpec

#: E, W, K.
_SIZES = ((128, 4, 8), (32, 2, 4), (8, 8, 2), (256, 8, 6))


def plans(target: Target) -> Iterator[LaunchPlan]:
    """Every mode, with masks, replicas and bounds."""
    tokens, header = 512, ArraySpec((8,), "int32")
    for number, (experts, ranks, top_k) in enumerate(_SIZES):
        each = -(-experts // ranks) + number % 2
        ids, weights = ArraySpec((tokens, top_k), "int32"), ArraySpec((tokens, top_k), "float32")
        places, start = ArraySpec((ranks * each,), "int32"), ArraySpec((experts + 1,), "int32")
        of_all = ArraySpec((ranks,), "int32") if number % 2 else None
        mask = ArraySpec((tokens,), "bool") if number // 2 else None
        for mode, rows in (
            ("all_to_all", "slots"), ("all_to_all", "tokens"), ("padded", "slots"), ("padded", "tokens"),
            ("all_gather", "tokens"),
        ):  # fmt: skip
            counted = mode == "all_to_all"
            bounds, stores = () if counted else (tokens, 2 * tokens), counted and rows == "tokens" and number % 2 == 1
            spec = TableSpec(mode, rows, ranks, each, experts, *bounds, own_first=stores)
            for limits in (None, ArraySpec((2, ranks), "int32")) if counted else (None,):
                operands = SendOperands(ids, weights, places, start, header, mask, of_all, limits)
                yield plan_send_tables(operands, spec, 1, target)
            if counted and rows == "slots":
                continue
            came, num_rows = ArraySpec((tokens, spec.width(top_k)), "int32", (64, 1)), tokens
            if not counted:
                came = ArraySpec((ranks, 8 + tokens * spec.width(top_k)), "int32")
                num_rows = ranks * (tokens if spec.by_slot else spec.back_rows)
            lost = ArraySpec((tokens,), "bool") if number % 2 and not counted else None
            counts = ArraySpec((ranks, 10), "int32") if counted else None
            results = ArraySpec((1, 96), "bfloat16") if stores else None
            received = ReceiveOperands(came, None if counted else header, lost, counts, results)
            yield plan_receive_tables(received, spec, 1, top_k, num_rows, tokens, target)
