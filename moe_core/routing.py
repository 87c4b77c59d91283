"""Planning of the router product and of bitmatrices.

Routing is planned in `moe_core.selection`, layouts and schedules in `moe_core.layout`; their planners are importable
from here too.
"""

from __future__ import annotations

import functools

from moe_core import dtypes
from moe_core.activation import row_stride
from moe_core.arrays import ArraySpec, require_spec
from moe_core.checks import require_at_least
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layout import BLOCK_ELEMENTS, optional, padded, plan_layout, plan_schedule, require_experts
from moe_core.plan import Constant, LaunchPlan, PlanBuilder, Pointer, Scalar
from moe_core.selection import plan_route_and_layout, plan_routing
from moe_core.specs import INT32_LIMIT, LayoutSpec, LogitsSpec
from moe_core.target import Target
from moe_core.tuning import TileConfig

__all__ = [
    "plan_layout",
    "plan_pack_bitmatrix",
    "plan_route_and_layout",
    "plan_router",
    "plan_routing",
    "plan_schedule",
    "plan_unpack_bitmatrix",
]

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
    "split": (
        TileConfig(64, 128, 64, num_warps=4, num_stages=2),
        TileConfig(64, 64, 32, num_warps=4, num_stages=2),
        TileConfig(32, 32, 32, num_warps=4, num_stages=3),
        TileConfig(16, 16, 64, num_warps=4, num_stages=4),
    ),
}
#: The height of the one tile for every number of tokens: that of a middling batch.
_INVARIANT_ROWS = 32
_LARGEST_TILE = 128


def router_tile(num_tokens: int | None, num_experts: int, d: int, kind: str, target: Target) -> TileConfig:
    """The largest tile whose grid still gives three quarters of the SMs a program; else the smallest, so that few
    tokens are spread along the experts. num_tokens None: the one tile for every number of tokens."""
    if target.kind == "interpreter":
        block_m = _INVARIANT_ROWS if num_tokens is None else min(128, padded(num_tokens))
        return TileConfig(block_m, min(256, padded(num_experts)), min(1024, padded(d)))
    tiles = _ROUTER_TILES[kind]
    if num_tokens is None:
        fitting = [tile for tile in tiles if tile.block_n <= padded(num_experts)]
        return min(fitting, key=lambda tile: abs(tile.block_m - _INVARIANT_ROWS))
    for tile in tiles:
        programs = -(-num_tokens // tile.block_m) * -(-num_experts // tile.block_n)
        if tile.block_n <= padded(num_experts) and 4 * programs >= 3 * target.num_sms:
            return tile
    return tiles[-1]


@functools.lru_cache(maxsize=4096)
def plan_router(
    x: ArraySpec, weight: ArraySpec, bias: ArraySpec | None, spec: LogitsSpec, target: Target, *, split: bool = False
) -> LaunchPlan:
    """logits fp32 `[T, E]` = x `[T, D]` . weight `[D, E]` (`in_out`) or `[E, D]` (`out_in`) + bias `[E]`.

    x, weight and bias: bf16, fp16 or fp32 each; where x and weight differ both are widened to fp32. Rows of x may be
    strided. fp32 products are IEEE unless spec.allow_tf32; split: fp32 x by a bf16 weight goes over the tensor cores,
    as exactly, but an infinity becomes NaN. Inputs: x, weight, [bias]; output: logits. Raises
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
        by_row = ", one row at a time" if spec.batch_invariant else ""
        builder.sums(f"logits: d_model in the order of NumPy's matmul, fp32{by_row}")
        builder.reference("routing:router", present, {"spec": spec}, ("logits",))
        return builder.build()
    widened = x.dtype != weight.dtype
    is_fp32 = widened or x.dtype == "float32"
    precision = "tf32" if is_fp32 and spec.allow_tf32 else "ieee"
    product = f"widen_{precision}" if widened else precision
    kind = precision if is_fp32 else "16-bit"
    if split and (x.dtype, weight.dtype) == ("float32", "bfloat16"):
        product, kind = "split_a", "split"
    rows = None if spec.batch_invariant else num_tokens
    tile = router_tile(rows, num_experts, d, kind, target)
    dot = product if is_fp32 else x.dtype
    builder.sums(f"logits: d_model in order, one {dot} dot of {tile.block_k} terms at a time, fp32, then the bias")
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
            "PRODUCT": Constant(product),
            "BLOCK_M": Constant(tile.block_m),
            "BLOCK_N": Constant(tile.block_n),
            "BLOCK_K": Constant(tile.block_k),
            "OVERLAP": Constant(None),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
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
