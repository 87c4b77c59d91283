"""`moe_jax.moe` where the devices of a mesh share the experts."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedTensor
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import (
    ExpertWeights,
    LoRAFactors,
    MoEOutput,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
    named_fields,
)
from moe_jax import ops
from moe_jax.bridge.calls import Array
from moe_jax.bridge.mesh import (
    Names,
    Split,
    as_names,
    free_axes,
    held,
    mesh_of,
    opened,
    seeded_here,
    spec_of,
    specs_of,
    split_tokens,
)
from moe_jax.parallel.axis import ExpertAxis
from moe_jax.parallel.forward import run


def moe(
    x: Array,
    experts: ExpertWeights,
    routing: RouterWeights | RouterLogits | TopK,
    spec: MoESpec,
    *,
    token_mask: Array | None = None,
    expert_map: Array | None = None,
    shared: SharedExpert | None = None,
    lora: LoRAFactors | None = None,
    adapter_ids: Array | None = None,
    checked: bool = False,
) -> MoEOutput:
    """Run one whole MoE forward as one custom call, and its gradients as one more, as `moe_torch.moe`.

    x: bf16, fp16 or fp32 `[T, D]`. lora: adapters' factors (docs/user/lora.md), with adapter_ids int32 `[T]`. If one
    mesh axis visibly splits the experts, rows travel over it. Results have the bits of one device.
    """
    names = _axes_of(experts) if isinstance(experts, ExpertWeights) else ()
    mesh = mesh_of(jax.tree.leaves((x, experts))) if names else None
    names = () if mesh is None else tuple(name for name in names if free_axes(mesh).get(name, 1) > 1)
    if mesh is None or not names:
        options: Any = {"token_mask": token_mask, "expert_map": expert_map, "shared": shared, "checked": checked}
        return ops.moe(x, experts, routing, spec, **options, lora=lora, adapter_ids=adapter_ids)
    others = {"expert_map": expert_map is not None, "checked": checked, "a second axis": len(names) > 1}
    others["experts.layer_index"] = experts.layer_index is not None
    for name, is_there in others.items():
        if is_there:
            raise Unsupported(
                f"experts must be whole on every device with {name}, got a split over {', '.join(names)}; reshard "
                "them, or call moe_jax.parallel.moe inside a jax.shard_map of your own"
            )
    if lora is None and adapter_ids is not None:
        raise InvalidInput("adapter_ids must be None without lora, got an array; pass lora too")
    arrays = {"x": x, "experts": experts, "routing": routing, "token_mask": token_mask, "shared": shared}
    arrays |= {"lora": lora, "adapter_ids": adapter_ids}
    (axis,), num_experts = names, _array_of(experts.down).shape[0]
    split = split_tokens(x, mesh, needed=(axis,))
    of_experts = functools.partial(_by_expert, num_experts=num_experts, axis=axis, split=split)
    arrays = {name: value for name, value in arrays.items() if value is not None}
    specs = {
        name: of_experts(value, 0, name=name) if name == "experts" else specs_of(name, value, name in _ROWS, split)
        for name, value in arrays.items()
        if name != "lora"
    }
    if lora is not None:
        factors = {name: of_experts(one, 1, name=f"lora.{name}") for name, one in named_fields(lora) if name[0] in "ab"}
        specs["lora"] = dataclasses.replace(jax.tree.map(lambda _: P(), lora), **factors)
    arrays = {name: held(name, value, specs[name], mesh) for name, value in arrays.items()}
    summed = ("tokens_per_expert", "invalid_ids")
    results = MoEOutput(*(P() if name in summed else split.tokens for name in MoEOutput._fields))
    return opened(_Local(spec, axis, num_experts, split.over), split, results, (arrays, specs))


_ROWS = ("x", "token_mask", "adapter_ids")


def _array_of(weight: Any) -> Any:
    return weight.values if isinstance(weight, QuantizedTensor) else weight


def _axes_of(experts: ExpertWeights) -> Names:
    """The mesh axes that visibly split the experts."""
    number = int(experts.layer_index is not None)
    shown = (spec_of(_array_of(weight)) or () for weight in (experts.gate_up, experts.down))
    return next((names for spec in shown if (names := as_names((*spec, None, None)[number]))), ())


def _by_expert(value: Any, number: int, name: str, num_experts: int, axis: str, split: Split) -> Any:
    """PartitionSpecs of arrays of experts, their axis is `number`. Those of all experts at once are whole."""

    def of(path: Any, array: Any) -> P:
        entries = [*(spec_of(array) or ()), *(None,) * array.ndim][: array.ndim]
        is_split = array.ndim > number and array.shape[number] == num_experts
        if is_split and set(as_names(entries[number])) <= {axis}:
            entries[number] = None  # of another axis it is refused
        split.whole(".".join([name, *(str(getattr(key, "name", key)) for key in path)]), entries)
        return P(*(None,) * number, axis) if is_split else P()

    return jax.tree_util.tree_map_with_path(of, value)


@dataclass(frozen=True)
class _Local:
    """The call of one device, a key of jit's cache."""

    spec: MoESpec
    axis: str
    num_experts: int
    over: Names

    def __call__(self, arrays: dict[str, Any]) -> MoEOutput:
        group, lora = ExpertAxis(self.axis).group(self.num_experts), arrays.get("lora")
        adapters = lora and (seeded_here(lora, self.over), arrays.get("adapter_ids"))
        x, experts, routing = (arrays[name] for name in ("x", "experts", "routing"))
        result = run(x, experts, routing, self.spec, group, arrays.get("token_mask"), arrays.get("shared"), adapters)
        counts = (jax.lax.psum(one, self.over) for one in (result.tokens_per_expert, result.invalid_ids))
        return MoEOutput(*result[:4], *counts)
