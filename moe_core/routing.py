"""Planning of the router product, of routing (logits to ids and weights) and of bitmatrices.

`plan_layout` and `plan_schedule` live in `moe_core.layout` and are importable from here too.
"""

from __future__ import annotations

import functools

from moe_core import dtypes
from moe_core.activation import row_stride
from moe_core.arrays import ArraySpec, require_spec
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layout import BLOCK_ELEMENTS, optional, padded, plan_layout, plan_schedule, require_experts
from moe_core.plan import Constant, LaunchPlan, PlanBuilder, Pointer, Scalar
from moe_core.specs import INT32_LIMIT, LayoutSpec, LogitsSpec, RouterSpec, require_at_least
from moe_core.target import Target
from moe_core.tuning import TileConfig

__all__ = [
    "plan_layout",
    "plan_pack_bitmatrix",
    "plan_router",
    "plan_routing",
    "plan_schedule",
    "plan_unpack_bitmatrix",
]

#: Programs of one warp that an SM holds at most (CUDA: 32 blocks per SM); more tokens are looped over.
_PROGRAMS_PER_SM = 32
#: Columns of logits one warp handles (32 per thread); above, warps are added.
_COLUMNS_PER_WARP = 1024
#: Elements of a tile of a bitmatrix kernel, and its tokens at most.
_BITMATRIX_ELEMENTS = {"cuda": 2048, "interpreter": BLOCK_ELEMENTS["interpreter"]}
_BITMATRIX_TOKENS = 128


#: Tiles of the router product, largest first, by kind of dot. Steps along d are long where tiles are small, because few
#: loads are in flight. Two warps for 32 x 32: with four, ptxas aims at too few registers and spills.
_ROUTER_TILES = {
    "16-bit": (
        TileConfig(128, 128, 64, num_warps=8, num_stages=3),
        TileConfig(64, 128, 64, num_warps=4, num_stages=4),
        TileConfig(64, 64, 64, num_warps=4, num_stages=4),
        TileConfig(64, 32, 128, num_warps=4, num_stages=4),
        TileConfig(32, 32, 128, num_warps=2, num_stages=4),
        TileConfig(64, 16, 128, num_warps=4, num_stages=4),
        TileConfig(16, 16, 256, num_warps=4, num_stages=6),
    ),
    "tf32": (
        TileConfig(64, 64, 32, num_warps=8, num_stages=3),
        TileConfig(32, 32, 32, num_warps=2, num_stages=4),
        TileConfig(16, 16, 64, num_warps=4, num_stages=4),
    ),
    "ieee": (
        TileConfig(64, 64, 32, num_warps=8, num_stages=3),
        TileConfig(32, 32, 32, num_warps=4, num_stages=3),
        TileConfig(16, 16, 64, num_warps=4, num_stages=4),
    ),
}
_LARGEST_TILE = 128


def router_tile(num_tokens: int, num_experts: int, d: int, kind: str, target: Target) -> TileConfig:
    """The largest tile whose grid still gives three quarters of the SMs a program; else the smallest, so that few
    tokens are spread along the experts."""
    if target.kind == "interpreter":
        return TileConfig(min(128, padded(num_tokens)), min(256, padded(num_experts)), min(1024, padded(d)))
    tiles = _ROUTER_TILES[kind]
    for tile in tiles:
        programs = -(-num_tokens // tile.block_m) * -(-num_experts // tile.block_n)
        if tile.block_n <= padded(num_experts) and 4 * programs >= 3 * target.num_sms:
            return tile
    return tiles[-1]


@functools.lru_cache(maxsize=4096)
def plan_router(
    x: ArraySpec, weight: ArraySpec, bias: ArraySpec | None, spec: LogitsSpec, target: Target
) -> LaunchPlan:
    """logits fp32 `[T, E]` = x `[T, D]` . weight `[D, E]` (`in_out`) or `[E, D]` (`out_in`) + bias `[E]`.

    x, weight and bias: bf16, fp16 or fp32 each; where x and weight differ both are widened to fp32. Rows of x may be
    strided. fp32 products are IEEE unless spec.allow_tf32. Inputs: x, weight, [bias]; output: logits. Raises
    InvalidInput.
    """
    require_spec("x", x, ("num_tokens", "d_model"), dtypes.MATMUL_DTYPES, contiguous=False)
    stride = row_stride("x", x)
    num_tokens, d = x.shape
    in_out = spec.weight_layout == "in_out"
    require_spec("weight", weight, (d, "num_experts") if in_out else ("num_experts", d), dtypes.MATMUL_DTYPES)
    num_experts = weight.shape[1] if in_out else weight.shape[0]
    if d < 1 or num_experts < 1:
        raise InvalidInput(f"weight must have no empty axis, got {weight.shape}; pass at least one expert and column")
    if weight.size >= INT32_LIMIT or num_tokens > INT32_LIMIT - _LARGEST_TILE:
        raise Unsupported(
            f"the router kernel numbers tokens and weights in int32, got x {x.shape} and weight {weight.shape}; "
            "split the batch"
        )
    if bias is not None:
        require_spec("bias", bias, (num_experts,), dtypes.MATMUL_DTYPES)

    builder = PlanBuilder("router", target)
    arrays = {"x": x, "weight": weight, "bias": bias}
    present = {name: builder.input(name, array) for name, array in arrays.items() if array is not None}
    builder.output("logits", ArraySpec((num_tokens, num_experts), "float32"))
    if not target.compiled:
        builder.sums("logits: d_model in the order of NumPy's matmul, fp32")
        builder.reference("routing:router", present, {"spec": spec}, ("logits",))
        return builder.build()
    widened = x.dtype != weight.dtype
    is_fp32 = widened or x.dtype == "float32"
    precision = "tf32" if is_fp32 and spec.allow_tf32 else "ieee"
    tile = router_tile(num_tokens, num_experts, d, precision if is_fp32 else "16-bit", target)
    kind = precision if is_fp32 else x.dtype
    builder.sums(f"logits: d_model in order, one {kind} dot of {tile.block_k} terms at a time, fp32, then the bias")
    builder.launch(
        "router:router",
        (-(-num_tokens // tile.block_m), -(-num_experts // tile.block_n)),
        {
            "x": Pointer("x"),
            "weight": Pointer("weight"),
            "bias": optional("bias", bias),
            "logits": Pointer("logits"),
            "num_tokens": Scalar(num_tokens),
            "D": Constant(d),
            "NUM_EXPERTS": Constant(num_experts),
            "X_STRIDE": Constant(stride),
            "WEIGHT_LAYOUT": Constant(spec.weight_layout),
            "LOGITS_DTYPE": Constant(spec.logits_dtype),
            "WIDEN": Constant(widened),
            "INPUT_PRECISION": Constant(precision),
            "BLOCK_M": Constant(tile.block_m),
            "BLOCK_N": Constant(tile.block_n),
            "BLOCK_K": Constant(tile.block_k),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return builder.build()


@functools.lru_cache(maxsize=4096)
def plan_routing(
    logits: ArraySpec,
    spec: RouterSpec,
    target: Target,
    *,
    correction_bias: ArraySpec | None = None,
    token_mask: ArraySpec | None = None,
    with_bitmatrix: bool = False,
) -> LaunchPlan:
    """ids int32 `[T, K]` and weights fp32 `[T, K]` of logits fp32 `[T, E]`.

    correction_bias fp32 `[E]` moves the selection, never the weights. token_mask bool `[T]`: a masked token gets ids -1
    and weights 0. Without a bias experts are ordered by their logits (every scoring is monotone), with one by fp32
    score + bias (topk_then_softmax: logit + bias); -0.0 ties with 0.0, NaN ranks below every number, ties go to the
    lower id. Inputs: logits, [correction_bias], [token_mask]; outputs: ids, weights, [bitmatrix uint32
    `[T, ceil(E / 32)]`]. Raises InvalidInput, Unsupported.
    """
    require_spec("logits", logits, ("num_tokens", "num_experts"), "float32")
    num_tokens, num_experts = logits.shape
    spec.validate_experts(num_experts, correction_bias is not None)
    top_k = spec.require_top_k()
    LayoutSpec(num_tokens, top_k, num_experts)  # Slots are numbered in int32.
    if correction_bias is not None:
        require_spec("correction_bias", correction_bias, (num_experts,), "float32")
    if token_mask is not None:
        require_spec("token_mask", token_mask, (num_tokens,), "bool")

    builder = PlanBuilder("routing", target)
    arrays = {"logits": logits, "correction_bias": correction_bias, "token_mask": token_mask}
    present = {name: builder.input(name, array) for name, array in arrays.items() if array is not None}
    outputs = [
        builder.output("ids", ArraySpec((num_tokens, top_k), "int32")),
        builder.output("weights", ArraySpec((num_tokens, top_k), "float32")),
    ]
    if with_bitmatrix:
        outputs.append(builder.output("bitmatrix", ArraySpec((num_tokens, -(-num_experts // 32)), "uint32")))
    builder.note(f"selection on {'score + bias' if correction_bias is not None else 'the logits'}")
    if not target.compiled:
        builder.sums("softmax and renormalisation: NumPy's pairwise sums, fp32")
        builder.reference("routing:route", present, {"spec": spec, "with_bitmatrix": with_bitmatrix}, outputs)
        return builder.build()
    require_experts(num_experts)
    groups, members = padded(spec.num_groups, 1), padded(num_experts // spec.num_groups, 1)
    columns, slots = groups * members, padded(top_k, 1)
    block_t, num_warps = 1, min(16, max(1, columns // _COLUMNS_PER_WARP))
    if target.kind == "interpreter":
        block_t = min(padded(num_tokens, 1), max(1, BLOCK_ELEMENTS["interpreter"] // columns))
    programs = -(-num_tokens // block_t)
    if target.kind == "cuda":
        programs = min(programs, max(1, _PROGRAMS_PER_SM // num_warps) * target.num_sms)
    builder.sums(
        f"softmax over experts: a tree over {columns} columns, over slots and renormalisation: a tree over {slots} in "
        f"order of selection; {num_warps} warps whatever the number of tokens; fp32"
    )
    builder.launch(
        "topk:route",
        (programs,),
        {
            "logits": Pointer("logits"),
            "correction_bias": optional("correction_bias", correction_bias),
            "token_mask": optional("token_mask", token_mask),
            "ids": Pointer("ids"),
            "weights": Pointer("weights"),
            "bitmatrix": Pointer("bitmatrix") if with_bitmatrix else Constant(None),
            "num_tokens": Scalar(num_tokens),
            "NUM_EXPERTS": Constant(num_experts),
            "TOP_K": Constant(top_k),
            "SCORING": Constant(spec.scoring),
            "SOFTMAX_LAST": Constant(spec.order == "topk_then_softmax"),
            "RENORMALIZE": Constant(spec.renormalize),
            "SCALE": Constant(spec.scale),
            "NUM_GROUPS": Constant(spec.num_groups),
            "TOPK_GROUP": Constant(spec.topk_group),
            "BY_EXPERT": Constant(spec.slot_order == "expert"),
            "BLOCK_T": Constant(block_t),
            "GROUPS": Constant(groups),
            "MEMBERS": Constant(members),
            "SLOTS": Constant(slots),
            "WORDS": Constant(padded(-(-num_experts // 32), 1)),
        },
        num_warps=num_warps,
    )
    return builder.build()


def _bitmatrix_tokens(num_tokens: int, width: int, target: Target) -> int:
    """Tokens per program, a power of two, for rows of `width` elements."""
    return min(_BITMATRIX_TOKENS, padded(num_tokens, 1), max(1, _BITMATRIX_ELEMENTS[target.kind] // width))


@functools.lru_cache(maxsize=4096)
def plan_pack_bitmatrix(ids: ArraySpec, num_experts: int, target: Target) -> LaunchPlan:
    """bitmatrix uint32 `[T, ceil(E / 32)]` of ids int32 `[T, K]`: bit e % 32 of word e // 32 says that e was chosen.

    -1 sets no bit. duplicates int32 `[1]`: slots whose expert an earlier slot of the token has; invalid_ids int32
    `[1]`: ids outside [-1, E); both set no further bit. Input: ids; outputs: bitmatrix, duplicates, invalid_ids.
    Raises InvalidInput, Unsupported.
    """
    require_spec("ids", ids, ("num_tokens", "top_k"), "int32")
    require_at_least("num_experts", num_experts, 1)
    num_tokens, top_k = ids.shape
    LayoutSpec(num_tokens, top_k, num_experts)  # Slots are numbered in int32.
    builder = PlanBuilder("pack_bitmatrix", target)
    builder.input("ids", ids)
    words = -(-num_experts // 32)
    builder.output("bitmatrix", ArraySpec((num_tokens, words), "uint32"))
    counters = [builder.output(name, ArraySpec((1,), "int32")) for name in ("duplicates", "invalid_ids")]
    if not target.compiled:
        outputs = ("bitmatrix", *counters)
        builder.reference("routing:pack_bitmatrix", {"ids": "ids"}, {"num_experts": num_experts}, outputs)
        return builder.build()
    require_experts(num_experts)
    block_t = _bitmatrix_tokens(num_tokens, padded(words, 1), target)
    # Without tokens one program still writes the counters.
    programs = max(1, -(-num_tokens // block_t))
    parts = counters
    if programs > 1:
        parts = [builder.scratch(f"{name}_parts", ArraySpec((programs,), "int32")) for name in counters]
    builder.launch(
        "bitmatrix:pack",
        (programs,),
        {
            "ids": Pointer("ids"),
            "bitmatrix": Pointer("bitmatrix"),
            "duplicates": Pointer(parts[0]),
            "invalid_ids": Pointer(parts[1]),
            "num_tokens": Scalar(num_tokens),
            "NUM_EXPERTS": Constant(num_experts),
            "TOP_K": Constant(top_k),
            "BLOCK_T": Constant(block_t),
            "WORDS": Constant(padded(words, 1)),
        },
    )
    if programs > 1:
        builder.launch(
            "bitmatrix:sum_counts",
            (1,),
            {
                "first_parts": Pointer(parts[0]),
                "second_parts": Pointer(parts[1]),
                "first": Pointer(counters[0]),
                "second": Pointer(counters[1]),
                "num_parts": Scalar(programs),
                "BLOCK": Constant(1024 if target.kind == "cuda" else 4),
            },
        )
    return builder.build()


@functools.lru_cache(maxsize=4096)
def plan_unpack_bitmatrix(bitmatrix: ArraySpec, num_experts: int, top_k: int, target: Target) -> LaunchPlan:
    """ids int32 `[T, K]` of a bitmatrix uint32 `[T, ceil(E / 32)]`: ascending, -1 behind the last.

    Of more than K set bits the lowest K; bits at and above E are ignored. Input: bitmatrix; output: ids. Raises
    InvalidInput, Unsupported.
    """
    require_at_least("num_experts", num_experts, 1)
    require_at_least("top_k", top_k, 1)
    require_spec("bitmatrix", bitmatrix, ("num_tokens", -(-num_experts // 32)), "uint32")
    num_tokens = bitmatrix.shape[0]
    builder = PlanBuilder("unpack_bitmatrix", target)
    builder.input("bitmatrix", bitmatrix)
    builder.output("ids", ArraySpec((num_tokens, top_k), "int32"))
    if not target.compiled:
        constants = {"num_experts": num_experts, "top_k": top_k}
        builder.reference("routing:unpack_bitmatrix", {"bitmatrix": "bitmatrix"}, constants, ("ids",))
        return builder.build()
    require_experts(max(num_experts, top_k))
    experts, slots = padded(num_experts, 1), padded(top_k, 1)
    block_t = _bitmatrix_tokens(num_tokens, max(experts, slots), target)
    builder.launch(
        "bitmatrix:unpack",
        (-(-num_tokens // block_t),),
        {
            "bitmatrix": Pointer("bitmatrix"),
            "ids": Pointer("ids"),
            "num_tokens": Scalar(num_tokens),
            "NUM_EXPERTS": Constant(num_experts),
            "TOP_K": Constant(top_k),
            "BLOCK_T": Constant(block_t),
            "EXPERTS": Constant(experts),
            "SLOTS": Constant(slots),
        },
    )
    return builder.build()
