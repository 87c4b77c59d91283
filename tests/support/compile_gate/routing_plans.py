"""Plans of routing, layouts and the router for the compile gate."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.reduction.rowwise import plan_gather_rows
from moe_core.ops.router.forward import plan_router
from moe_core.ops.routing.bitmatrix import plan_pack_bitmatrix, plan_unpack_bitmatrix
from moe_core.ops.routing.layout import plan_layout, plan_layout_of_runs, plan_schedule
from moe_core.ops.routing.rounding import plan_candidates, plan_keep_candidates
from moe_core.ops.routing.topk import plan_route_and_layout, plan_routing
from moe_core.plan.steps import LaunchPlan
from moe_core.specs.operands import RouterLogits
from moe_core.specs.routing import LayoutSpec, LogitsSpec, RouterSpec, TokenRounding


def plans(target: Target) -> Iterator[LaunchPlan]:
    """Every rule, layout and number of tokens that has kernels of its own."""
    logits, bias, mask = ArraySpec((512, 384), "float32"), ArraySpec((384,), "float32"), ArraySpec((512,), "bool")
    for router in (
        RouterSpec(6, renormalize=True),
        RouterSpec(6, order="topk_then_softmax", slot_order="expert"),
        RouterSpec(6, "sigmoid", scale=2.5),
        RouterSpec(6, "sqrt_softplus", renormalize=True, num_groups=8, topk_group=4),
        RouterSpec(6, "sigmoid", renormalize=True, epsilon=1e-6, softcap=30.0, logit_scale=0.5, bias_on="logits"),
        RouterSpec(6, num_groups=8, topk_group=4, group_score="pair"),
    ):
        yield plan_routing(logits, router, target, token_mask=mask, with_bitmatrix=True)
        yield plan_routing(logits, router, target, correction_bias=bias)
        yield plan_routing(logits, router, target, token_mask=mask, given=ArraySpec((512, 6), "int32"))
    few_choices = ((48, 1), (128, 1), (128, 2), (512, 1), (512, 2))
    for tokens, (num_experts, top_k) in (
        *itertools.product((1, 4, 16, 64, 1024, 2048, 16384), ((128, 8), (512, 10))),
        *itertools.product((65, 16384), few_choices),
        (1024, (4096, 8)),
    ):
        scores, layout = ArraySpec((tokens, num_experts), "float32"), LayoutSpec(tokens, top_k, num_experts)
        yield plan_route_and_layout(RouterLogits(scores), RouterSpec(top_k), layout, target, block_ms=(16, 128))
    for router in (
        RouterSpec(6, renormalize=True),
        RouterSpec(6, order="topk_then_softmax"),
        RouterSpec(6, "sigmoid", renormalize=True, scale=2.5, num_groups=8, topk_group=4),
    ):
        yield plan_candidates(logits, router, TokenRounding(), target, correction_bias=bias, token_mask=mask)
    for num_experts, top_k, rounding in (
        (128, 4, TokenRounding()),
        (384, 6, TokenRounding(192, "up", 16)),
        (64, 8, TokenRounding(64, "down")),
    ):
        table = ArraySpec((4096, rounding.width(top_k, num_experts)), "int32")
        yield plan_keep_candidates(table, top_k, num_experts, rounding, target)
    for tokens in (1, 64, 1024, 16384):
        ids, layout = ArraySpec((tokens, 8), "int32"), LayoutSpec(tokens, 8, 128)
        yield plan_layout(ids, layout, target, block_ms=(16, 128))
        aligned = dataclasses.replace(layout, alignment=128)
        expert_map = ArraySpec((256,), "int32")
        yield plan_layout(ids, aligned, target, expert_map=expert_map, token_mask=ArraySpec((tokens,), "bool"))
        yield plan_layout(ids, dataclasses.replace(layout, max_rows=512), target)
        yield plan_layout(ids, dataclasses.replace(layout, rows=2 * tokens), target, block_ms=(64,))
        for dtype in ("bfloat16", "float16"):
            weights = ArraySpec((tokens, 8), dtype)
            yield plan_layout(ArraySpec((tokens, 8), "int64"), layout, target, given_weights=weights, block_ms=(16,))
        slots = ArraySpec((layout.num_slots,), "int32")
        for table in (None, ArraySpec((layout.num_slots, 8), "int32")):
            yield plan_gather_rows(ArraySpec((tokens, 2880), "bfloat16"), slots, slots, layout, target, table=table)
        yield plan_schedule(layout, 64, target)
        for sources, stride in ((4, None), (8, tokens)):
            yield plan_layout_of_runs(ArraySpec((sources, 32), "int32"), sources * tokens, target, stride=stride)
        yield plan_pack_bitmatrix(ids, 130, target)
        yield plan_unpack_bitmatrix(ArraySpec((tokens, 5), "uint32"), 130, 8, target)
    for spec in (LogitsSpec(), LogitsSpec("out_in", "bfloat16")):
        for dtype in ("bfloat16", "float32"):
            for tokens in (1, 64, 4096):
                shape = (2048, 128) if spec.weight_layout == "in_out" else (128, 2048)
                weight = ArraySpec(shape, dtype)
                yield plan_router(ArraySpec((tokens, 2048), dtype), weight, None, spec, target)
