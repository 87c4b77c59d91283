"""Adapters of a router and a shared expert, made of a front-end's ops. Equations: docs/user/lora.md.

`of` is the front-end: its `ops`, and functions of arrays that frameworks name differently.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.lora.adapters import SALTS, Dropout
from moe_core.specs import MatmulSpec, MoESpec
from moe_core.specs.operands import BEYOND_EXPERTS, LoRAFactors, MatmulOperands, RouterWeights, TopK

_WORD = 0xFFFFFFFF


def dropout_mask(rows: Any, columns: Any, seed: Any, dropout: Dropout, number: Any = int) -> Any:
    """The elements that remain, bool `[rows, columns]`, as in `kernels.dropout`. number: of the arrays' integers."""

    def mixed(bits: Any) -> Any:
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            bits = (bits ^ (bits >> number(shift))) * number(factor) & number(_WORD)
        return bits ^ (bits >> number(16))

    row_bits = mixed((rows * number(0x9E3779B1) + seed) & number(_WORD))
    column_bits = (columns * number(0x85EBCA77) + number(SALTS[dropout.masked])) & number(_WORD)
    return mixed(row_bits[:, None] ^ column_bits) >= number(dropout.threshold)


def refuse_beyond_experts(lora: LoRAFactors) -> None:
    """For calls that run experts alone."""
    names = [name for name in BEYOND_EXPERTS if getattr(lora, name) is not None]
    if names:
        raise Unsupported(
            f"lora.{names[0]} must be None here, where experts alone have adapters, got an array; call moe or a layer"
        )


class AdaptedTokens(NamedTuple):
    """ids: each token's adapter, -1 for none. layout: of tokens by adapter."""

    factors: LoRAFactors
    ids: Any
    layout: Any
    dropout: float


def adapted_tokens(
    of: Any, lora: LoRAFactors, ids: Any, dropout: float, token_mask: Any = None
) -> tuple[AdaptedTokens, Any]:
    """(the tokens, int32 `[1]` the number that names no adapter)."""
    named = (ids >= 0) & (ids < len(lora.ranks))
    known = named & (lora.ranks > 0).any(1)[of.index(of.where(named, ids, 0))]
    wrong = ~known & (ids != -1)
    if token_mask is not None:
        # A masked token still visits the shared expert, and so its adapter.
        wrong = wrong & token_mask
    ids = of.where(known, ids, -1)
    layout = of.ops.make_layout(ids[:, None], len(lora.scale))
    return AdaptedTokens(lora, ids, layout, dropout), of.like(wrong.sum(), ids).reshape(1)


def _change(of: Any, rows: Any, pair: Any, spec: MoESpec, adapters: AdaptedTokens, number: int) -> Any:
    """s (rows A) B of each token's adapter, fp32 `[T, N]`, zeros without one. number: of the mask, each another than
    the experts'."""
    (a, b), (lora, ids, layout, dropout) = (one[:, 0] for one in pair), adapters
    has, left, scale = ids >= 0, rows, lora.scale[:, 0]
    slot, used = of.index(of.where(has, ids, 0)), (of.arange(a.shape[-1], ids) < lora.ranks[:, :, None]).any(1)
    if dropout:
        mask = Dropout(dropout, "token")
        left, scale = of.where(of.kept(rows.shape, lora.seed + number, mask), rows, 0), scale * mask.kept
    more = {"out_dtype": _wide(rows), "allow_tf32": spec.allow_tf32, "tuning": spec.matmul_tuning()}
    product = MatmulSpec("in_out", "token", "slot", **more)
    # Rows without an adapter, and columns behind a rank, hold anything.
    a, b = of.where(used[:, None], a, 0), of.where(used[:, :, None], b, 0)
    low = of.ops.matmul_ogs(MatmulOperands(left, of.like(a, rows)), layout, product)
    low = of.where(has[:, None], low * scale[slot][:, None], 0)
    return of.where(has[:, None], of.ops.matmul_ogs(MatmulOperands(low, of.like(b, low)), layout, product), 0)


def _wide(array: Any) -> str | None:
    return None if str(array.dtype).endswith("float64") else "float32"


def adapted_logits(of: Any, rows: Any, router: RouterWeights, spec: MoESpec, lora: AdaptedTokens) -> Any:
    """`rows W + bias + s (rows A) B`, fp32 `[T, E]`."""
    plain = dataclasses.replace(spec.logits_spec(), logits_dtype="float32")
    logits = of.ops.router(rows, router.weight, bias=router.bias, spec=plain)
    logits = logits + _change(of, rows, (lora.factors.a_router, lora.factors.b_router), spec, lora, 1)
    return of.rounded(logits, spec.logits_dtype)


def shared_output(of: Any, x: Any, shared: Any, spec: MoESpec, lora: Any = None, layer_index: Any = None) -> Any:
    """The shared expert's output `[T, D]`, cast after each product. lora: AdaptedTokens."""
    index = layer_index if len(shared.down.shape) == 3 else None

    def multiply(rows: Any, weight: Any, number: int, columns: slice = slice(None)) -> Any:
        a, b = (getattr(lora.factors, f"{side}{number}_shared") for side in "ab") if lora else (None, None)
        more = {"allow_tf32": spec.allow_tf32, "tuning": spec.matmul_tuning()}
        product = MatmulSpec(spec.weight_layout, out_dtype=None if a is None else _wide(rows), **more)
        y = of.ops.matmul_ogs(MatmulOperands(rows, weight, layer_index=index), None, product)
        if a is None or b is None:
            return y
        return of.like(y + _change(of, rows, (a, b[..., columns]), spec, lora, 1 + number), rows)

    half, up = shared.gate_up.shape[-1 if spec.weight_layout == "in_out" else -2], None
    if shared.up is not None:
        up = multiply(x, shared.up, 1, slice(half, None))
    pre = multiply(x, shared.gate_up, 1, slice(half))
    y = multiply(of.ops.activation(pre, spec.shared_activation or spec.activation, up=up), shared.down, 2)
    if shared.gate is None:
        return y
    return of.like(y * of.sigmoid(of.ops.router(x, shared.gate, spec=spec.shared_gate_spec())), y)


def run_beyond_experts(of: Any, operands: tuple[Any, Any, Any], spec: MoESpec, lora: LoRAFactors, more: Any) -> Any:
    """`moe` with factors of the router or the shared expert. operands: x, experts, routing. more: other arguments."""
    (x, experts, routing), mask, adapter_ids = operands, more["token_mask"], more.pop("adapter_ids")
    _check(routing, spec, lora, adapter_ids, more)
    tokens, invalid = adapted_tokens(of, lora, adapter_ids, spec.lora_dropout, mask)
    own, dropout, changed, shared = lora.of_experts(), spec.lora_dropout, {}, more["shared"]
    if lora.a_router is not None:
        rows = x if mask is None else of.where(mask[:, None], x, 0)
        changed["logits"] = logits = adapted_logits(of, rows, routing, spec, tokens)
        routing = TopK(*of.ops.route(logits, spec.router, correction_bias=routing.correction_bias, token_mask=mask))
        spec = dataclasses.replace(spec, router=None)
    visited = None
    if lora.a1_shared is not None or lora.a2_shared is not None:
        visited = shared_output(of, x, shared, spec, tokens)
        more, spec = more | {"shared": None}, dataclasses.replace(spec, shared_activation=None)
    more = more | ({"lora": own, "adapter_ids": adapter_ids} if own is not None else {})
    result = of.ops.moe(x, experts, routing, dataclasses.replace(spec, lora_dropout=dropout if own else 0.0), **more)
    if own is None:
        changed["invalid_ids"] = result.invalid_ids + invalid
    if visited is not None:
        changed["output"] = of.like(of.like(result.output, lora.scale) + visited, result.output)
    return result._replace(**changed)


def _check(routing: Any, spec: MoESpec, lora: LoRAFactors, adapter_ids: Any, more: dict[str, Any]) -> None:
    for name, one in (("lora.scale", lora.scale), ("lora.ranks", lora.ranks), ("adapter_ids", adapter_ids)):
        if one is None:
            raise InvalidInput(f"{name} must be an array with lora, got None; pass it")
    for name in BEYOND_EXPERTS[::2]:
        a, b = (getattr(lora, f"{side}{name[1:]}") for side in "ab")
        if (a is None) != (b is None):
            raise InvalidInput(f"lora.{name} and lora.b{name[1:]} must both be arrays or None, got one; pass both")
    if (lora.a1_shared is not None or lora.a2_shared is not None) and more["shared"] is None:
        raise InvalidInput("shared must be a SharedExpert with factors of it, got None; pass it, or leave these out")
    if spec.main_grad:
        raise Unsupported("spec.main_grad must be False with adapters beyond experts, got True; leave one out")
    if more["checked"] and lora.of_experts() is None:
        raise Unsupported("checked must be False where lora has no factors of experts, got True; read invalid_ids")
    if lora.a_router is None:
        return
    if type(routing) is not RouterWeights or spec.router is None:
        raise Unsupported(
            f"routing must be RouterWeights with lora.a_router, got {type(routing).__name__}; pass the router's weights"
        )
    slots, shape = lora.scale.shape[0], list(routing.weight.shape)
    inside, outside = shape if spec.router_weight_layout == "in_out" else shape[::-1]
    a, b = list(lora.a_router.shape), list(lora.b_router.shape)
    if a[:3] != [slots, 1, inside] or b != [slots, 1, a[-1], outside]:
        raise InvalidInput(
            f"lora.a_router and lora.b_router must be [{slots}, 1, {inside}, R] and [{slots}, 1, R, {outside}], got "
            f"{a} and {b}; pass factors of this router"
        )
