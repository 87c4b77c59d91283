"""Plans the router product."""

from __future__ import annotations

from moe_core.base import INT32_LIMIT, ArraySpec, Target, dtypes, keep_plans, padded, require_spec, row_stride
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.common.drain import must_drain
from moe_core.ops.reduction.rowwise import require_wide
from moe_core.ops.router.kernels import router as kernels
from moe_core.plan import LaunchPlan, PlanBuilder, declare_kernel, passed
from moe_core.specs import LogitsSpec, TileConfig

ROUTER = declare_kernel(kernels.router, pdl="start")

#: Tiles, largest first, by kind of dot: sides, warps, stages. Steps along d are long in small tiles, because few loads
#: are in flight. Two warps for 32 x 32: with four, ptxas spills.
_ROUTER_TILES = {
    "16-bit": (
        *((128, 128, 64, 8, 3), (64, 128, 64, 4, 4), (64, 64, 64, 4, 4), (64, 32, 128, 4, 4)),
        *((32, 32, 128, 2, 4), (64, 16, 128, 4, 4), (16, 16, 256, 4, 6)),
    ),
    "tf32": ((64, 64, 32, 8, 3), (32, 32, 32, 2, 4), (16, 16, 64, 4, 4)),
    "ieee": ((64, 64, 32, 8, 3), (32, 32, 32, 4, 3), (16, 16, 64, 4, 4)),
    "split": ((64, 128, 64, 4, 2), (64, 64, 32, 4, 2), (32, 32, 32, 4, 3), (16, 16, 64, 4, 4)),
}
_INVARIANT_ROWS = 32
_LARGEST_TILE = 128


def router_tile(num_tokens: int | None, num_experts: int, d: int, kind: str, target: Target) -> TileConfig:
    """The largest tile that gives 3/4 of the SMs a program, else the smallest. None: one for any num_tokens."""
    if target.interpreted:
        block_m = _INVARIANT_ROWS if num_tokens is None else min(128, padded(num_tokens))
        return TileConfig(block_m, min(256, padded(num_experts)), min(1024, padded(d)))
    tiles = [TileConfig(*tile) for tile in _ROUTER_TILES[kind]]
    if num_tokens is None:
        fitting = [tile for tile in tiles if tile.block_n <= padded(num_experts)]
        return min(fitting, key=lambda tile: abs(tile.block_m - _INVARIANT_ROWS))
    for tile in tiles:
        programs = -(-num_tokens // tile.block_m) * -(-num_experts // tile.block_n)
        if tile.block_n <= padded(num_experts) and 4 * programs >= 3 * target.num_sms:
            return tile
    return tiles[-1]


@keep_plans
def plan_router(
    x: ArraySpec,
    weight: ArraySpec,
    bias: ArraySpec | None,
    spec: LogitsSpec,
    target: Target,
    *,
    split: bool = False,
    wide: ArraySpec | None = None,
) -> LaunchPlan:
    """logits fp32 `[T, E]` = x `[T, D]` . weight `[D, E]` (`in_out`) or `[E, D]` (`out_in`) + bias `[E]`.

    x, weight and bias: bf16, fp16 or fp32 each; different x and weight are both widened to fp32. Rows of x may be
    strided. fp32 products are IEEE unless spec.allow_tf32; split: fp32 x with a bf16 weight uses the tensor cores, as
    exactly, except that an infinity becomes NaN. wide fp32 `[T, D]`: only checked, for the backward. Inputs: x, weight,
    [bias]; output: logits.
    """
    require_spec("x", x, ("num_tokens", "d_model"), dtypes.MATMUL_DTYPES, contiguous=False)
    require_wide(wide, x)
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
    present = builder.inputs({"x": x, "weight": weight, "bias": bias})
    builder.output("logits", ArraySpec((num_tokens, num_experts), "float32"))
    if not target.compiled:
        by_row = ", one row at a time" if spec.batch_invariant else ""
        builder.sums(f"logits: d_model in the order of NumPy's matmul, fp32{by_row}")
        from moe_core.ops.router import reference as twins

        return builder.reference(twins.router, present, {"spec": spec}, ("logits",))
    widened = x.dtype != weight.dtype
    is_fp32 = widened or x.dtype == "float32"
    precision = "tf32" if is_fp32 and spec.allow_tf32 else "ieee"
    product = f"widen_{precision}" if widened else precision
    kind = precision if is_fp32 else "16-bit"
    if split and (x.dtype, weight.dtype) == ("float32", "bfloat16"):
        product, kind = "split_a", "split"
    rows = None if spec.batch_invariant else spec.expected_tokens or num_tokens
    tile = router_tile(rows, num_experts, d, kind, target)
    dot = product if is_fp32 else x.dtype
    builder.sums(f"logits: d_model in order, one {dot} dot of {tile.block_k} terms at a time, fp32, then the bias")
    arguments = {
        **builder.pointers("x", "weight", "bias", "logits"),
        **passed(num_tokens=num_tokens, D=d, NUM_EXPERTS=num_experts, X_STRIDE=stride),
        **passed(WEIGHT_LAYOUT=spec.weight_layout, LOGITS_DTYPE=spec.logits_dtype, PRODUCT=product),
        **passed(DRAINED=must_drain(product, target)),
        **passed(BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, PDL=None),
    }
    grid = (-(-num_tokens // tile.block_m), -(-num_experts // tile.block_n))
    builder.launch(ROUTER, grid, arguments, tile.num_warps, tile.num_stages)
    return builder.build()
