"""Logical axis names of a layer's arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from moe_core.errors import InvalidInput
from moe_jax.bridge.mesh import as_names
from moe_jax.layers.parameters import Leaf, nested

Names = tuple[str | None, ...]
#: field of LogicalAxes -> its axes, and an example.
_ROLES: dict[str, tuple[str, ...]] = {
    "router": ("d_model", "experts"),
    "wi": ("experts", "d_model", "d_ff"),
    "wo": ("experts", "d_ff", "d_model"),
    "wi_bias": ("experts", "d_ff"),
    "wo_bias": ("experts", "d_model"),
    "shared_wi": ("d_model", "d_ff"),
    "shared_wo": ("d_ff", "d_model"),
}
_SYNONYMS: dict[str, frozenset[str]] = {
    "experts": frozenset({"exp", "expert", "experts"}),
    "d_model": frozenset({"embed_moe", "embed_no_exp", "embed_router", "embed"}),
    "d_ff": frozenset({"mlp_moe", "mlp"}),
}


@dataclass(frozen=True)
class LogicalAxes:
    """Logical axis names of each group of arrays. None leaves an axis whole. Defaults are MaxText's (0.2.5).

    Each tuple follows the axes in MaxText's layout, and other storages permute it. Router biases, the fused `wi`,
    quantised arrays and the gate of shared experts use the same fields.

    MaxText's blocks without shared experts have `router=("embed", None)`, its older rules also `wi=("exp",
    "embed_no_exp", "mlp"), wo=("exp", "mlp", "embed_no_exp")`. With `shard_exp_on_fsdp` it has `wi=("embed_moe", None,
    "mlp_moe"), wo=("embed_moe", "mlp_moe", None)`.

    Args:
        router: `[D, E]`.
        wi: `[E, D, F]`.
        wo: `[E, F, D]`.
        wi_bias: `[E, F]`.
        wo_bias: `[E, D]`.
        shared_wi: `[D, S]`.
        shared_wo: `[S, D]`.
        stack: the leading axis of a stack of layers.
        tokens: of x's batch axes.
    """

    router: Names = ("embed_router", None)
    wi: Names = ("exp", "embed_moe", "mlp_moe")
    wo: Names = ("exp", "mlp_moe", "embed_moe")
    wi_bias: Names = ("exp", "activation_mlp")
    wo_bias: Names = ("exp", "activation_embed")
    shared_wi: Names = ("embed", "mlp")
    shared_wo: Names = ("mlp", "embed")
    stack: str | None = "layers"
    tokens: Names = ("activation_batch", "activation_norm_length")

    def __post_init__(self) -> None:
        for field, roles in _ROLES.items():
            names = getattr(self, field)
            right = isinstance(names, tuple) and len(names) == len(roles)
            if not right or not all(name is None or isinstance(name, str) for name in names):
                raise InvalidInput(
                    f"{field} must be {len(roles)} names or None, of the axes {', '.join(roles)}, got {names!r}; pass "
                    f"a tuple such as {type(self).__dataclass_fields__[field].default!r}"
                )
        if self.stack is not None and not isinstance(self.stack, str):
            raise InvalidInput(f"stack must be one name or None, got {self.stack!r}; pass 'layers'")
        if not isinstance(self.tokens, tuple) or not all(name is None or isinstance(name, str) for name in self.tokens):
            raise InvalidInput(f"tokens must be a tuple of names, got {self.tokens!r}; pass ('activation_batch',)")

    def of(self, leaf: Leaf) -> Names:
        names: dict[str | None, str | None] = dict(zip(_ROLES[_field(leaf)], getattr(self, _field(leaf)), strict=True))
        axes = tuple(names.get(axis) for axis in leaf.parameter.axes)
        return axes if len(axes) == len(leaf.shape) else (self.stack, *axes)


def require_rules(leaf: Leaf, axes: LogicalAxes, rules: Sequence[Any]) -> None:
    """Raise InvalidInput if rules would silently lose the sharding of a matrix: no rule for d_model, or for an axis
    that the rules split under another name. Other axes stay whole, as in Flax and MaxText."""
    if not rules or leaf.parameter.role not in ("weight", "quantized"):
        return
    known, split = {name for name, _ in rules}, {name for name, on_mesh in rules if on_mesh}
    field = _field(leaf)
    for role, name in zip(_ROLES[field], getattr(axes, field), strict=True):
        if name is None or name in known or role not in leaf.parameter.axes:
            continue
        others = sorted(_SYNONYMS[role] & split)
        if role == "d_model" or others:
            hint = f" ({', '.join(others)})" if others else ""
            listed = ", ".join(sorted(known)) if len(known) <= 12 else f"{len(known)} other names"
            raise InvalidInput(
                f"logical axis rules must map {name}, an axis of {'/'.join(leaf.path)}, got rules for {listed}; add "
                f"({name!r}, None) to leave that axis whole, or give the layer the names of your rules{hint} with "
                "logical_axes=LogicalAxes(...)"
            )


def known_specs(
    every: Sequence[Leaf], axes: LogicalAxes, shape: tuple[int, ...], resolve: Callable[..., Any], rules: Sequence[Any]
) -> dict[str, Any]:
    """Options of `forward` for x of this shape under rules, by Flax's `logical_to_mesh_axes`."""
    if not rules:
        return {}
    options: dict[str, Any] = {"parameter_specs": nested((leaf.path, resolve(axes.of(leaf), rules)) for leaf in every)}
    sizes, known = jax.sharding.get_abstract_mesh().shape, {name for name, _ in rules}
    names = axes.tokens[: len(shape) - 1]
    if sizes and known & set(names):
        entries, resolved = [], resolve(names, rules)
        for size, entry in zip(shape, resolved, strict=False):
            here = tuple(name for name in as_names(entry) if name in sizes)
            entries.append(here if size and size % math.prod(sizes[name] for name in here) == 0 else None)
        options["token_axes"] = jax.sharding.PartitionSpec(*entries)
    return options


def _field(leaf: Leaf) -> str:
    group, matrix, *_ = leaf.parameter.name.split(".")
    if group == "router":
        return "router"
    is_down, is_bias = matrix.startswith("down"), matrix.endswith("_bias")
    return ("shared_" if group == "shared_experts" else "") + ("wo" if is_down else "wi") + ("_bias" if is_bias else "")
