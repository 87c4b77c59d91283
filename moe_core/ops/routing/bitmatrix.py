"""Planning of bitmatrices: one bit per expert of a token."""

from __future__ import annotations

from moe_core.base import ArraySpec, Target, as_integer, keep_plans, padded, require_spec
from moe_core.ops.routing.kernels import bitmatrix as kernels
from moe_core.ops.routing.layout import BLOCK_ELEMENTS, require_experts
from moe_core.plan import LaunchPlan, PlanBuilder, declare_kernel, passed
from moe_core.specs import LayoutSpec

PACK = declare_kernel(kernels.pack)
SUM_COUNTS = declare_kernel(kernels.sum_counts)
UNPACK = declare_kernel(kernels.unpack)

_ELEMENTS, _MOST_TOKENS = {"gpu": 2048, "interpreter": BLOCK_ELEMENTS["interpreter"]}, 128


def _block_tokens(num_tokens: int, width: int, target: Target) -> int:
    return min(_MOST_TOKENS, padded(num_tokens, 1), max(1, _ELEMENTS[target.engine] // width))


@keep_plans
def plan_pack_bitmatrix(ids: ArraySpec, num_experts: int, target: Target) -> LaunchPlan:
    """bitmatrix uint32 `[T, ceil(E / 32)]` of ids int32 `[T, K]`: bit e % 32 of word e // 32 means that e was chosen.

    -1 sets no bit. duplicates int32 `[1]` counts slots that repeat an expert of the token, invalid_ids int32 `[1]` ids
    outside [-1, E). Neither sets a bit. Outputs: bitmatrix, duplicates, invalid_ids.
    """
    require_spec("ids", ids, ("num_tokens", "top_k"), "int32")
    num_experts = as_integer("num_experts", num_experts, 1)
    num_tokens, top_k = ids.shape
    LayoutSpec(num_tokens, top_k, num_experts)  # Slots are numbered in int32.
    builder = PlanBuilder("pack_bitmatrix", target)
    builder.input("ids", ids)
    words = -(-num_experts // 32)
    builder.output("bitmatrix", ArraySpec((num_tokens, words), "uint32"))
    counters = [builder.output(name, ArraySpec((1,), "int32")) for name in ("duplicates", "invalid_ids")]
    if not target.compiled:
        outputs = ("bitmatrix", *counters)
        constants = {"num_experts": num_experts}
        from moe_core.ops.routing import reference as twins

        return builder.reference(twins.pack_bitmatrix, {"ids": "ids"}, constants, outputs)
    require_experts(num_experts)
    block_t = _block_tokens(num_tokens, padded(words, 1), target)
    # Without tokens one program still writes the counters.
    programs = max(1, -(-num_tokens // block_t))
    parts = counters
    if programs > 1:
        parts = [builder.scratch(f"{name}_parts", ArraySpec((programs,), "int32")) for name in counters]
    arguments = passed(ids="ids", bitmatrix="bitmatrix", duplicates=parts[0], invalid_ids=parts[1])
    arguments |= passed(num_tokens=num_tokens, NUM_EXPERTS=num_experts, TOP_K=top_k, BLOCK_T=block_t)
    builder.launch(PACK, (programs,), arguments | passed(WORDS=padded(words, 1)))
    if programs > 1:
        arguments = passed(first_parts=parts[0], second_parts=parts[1], first=counters[0], second=counters[1])
        builder.launch(SUM_COUNTS, (1,), arguments | passed(num_parts=programs, BLOCK=1024 if target.on_gpu else 4))
    return builder.build()


@keep_plans
def plan_unpack_bitmatrix(bitmatrix: ArraySpec, num_experts: int, top_k: int, target: Target) -> LaunchPlan:
    """ids int32 `[T, K]` of a bitmatrix uint32 `[T, ceil(E / 32)]`: its lowest K below E, ascending, then -1."""
    num_experts, top_k = as_integer("num_experts", num_experts, 1), as_integer("top_k", top_k, 1)
    require_spec("bitmatrix", bitmatrix, ("num_tokens", -(-num_experts // 32)), "uint32")
    num_tokens = bitmatrix.shape[0]
    LayoutSpec(num_tokens, top_k, num_experts)  # Slots are numbered in int32.
    builder = PlanBuilder("unpack_bitmatrix", target)
    builder.input("bitmatrix", bitmatrix)
    builder.output("ids", ArraySpec((num_tokens, top_k), "int32"))
    if not target.compiled:
        constants = {"num_experts": num_experts, "top_k": top_k}
        inputs = {"bitmatrix": "bitmatrix"}
        from moe_core.ops.routing import reference as twins

        return builder.reference(twins.unpack_bitmatrix, inputs, constants, ("ids",))
    require_experts(max(num_experts, top_k))
    experts, slots = padded(num_experts, 1), padded(top_k, 1)
    block_t = _block_tokens(num_tokens, max(experts, slots), target)
    arguments = passed(bitmatrix="bitmatrix", ids="ids", num_tokens=num_tokens, NUM_EXPERTS=num_experts, TOP_K=top_k)
    arguments |= passed(BLOCK_T=block_t, EXPERTS=experts, SLOTS=slots)
    builder.launch(UNPACK, (-(-num_tokens // block_t),), arguments)
    return builder.build()
