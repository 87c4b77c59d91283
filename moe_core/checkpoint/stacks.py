"""Names and stacks of a layer's file tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from moe_core.checkpoint.families import Architecture, Naming
from moe_core.checkpoint.storage import Part, Stack, TensorIndex, rows_apart, rows_in_turn, turn
from moe_core.errors import InvalidInput

#: Before `layers.<n>.` in any family, with nestings of multimodal models.
_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.", "language_model.", "thinker.model.")


@dataclass(frozen=True)
class LayerNames:
    """The full names of one layer's tensors in one storage.

    block: the prefix of router and experts, `model.layers.3.mlp.`. fused: (gate_up, down), None: per expert. turned,
    interleaved: of `fused`. table: "" if the layer has none.
    """

    block: str
    router: str
    correction_bias: str
    fused: tuple[str, ...] | None
    shared: tuple[str, ...]
    shared_gate: str
    turned: bool = False
    interleaved: bool = False
    norm: str = ""
    table: str = ""
    expert_scale: str = ""
    around: Mapping[str, str] = field(default_factory=dict)

    @property
    def router_bias(self) -> str:
        return self.router.removesuffix("weight") + "bias"


_Choice = Callable[[list[tuple[str, ...]]], tuple[str, ...]]


def _names(naming: Naming, root: str, block: str, choose: _Choice, *, fused: bool, table: bool) -> LayerNames:
    """root: `model.layers.3.`. block: `mlp` or nothing."""
    inside = f"{root}{block}." if block else root

    def full(name: str) -> str:
        return root + name[1:] if name.startswith("/") else inside + name

    def pick(alternatives: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
        return choose([tuple(map(full, names)) for names in alternatives])

    def one(alternatives: tuple[str, ...]) -> str:
        return pick(tuple((name,) for name in alternatives))[0]

    chosen = pick(naming.fused) if fused else None
    return LayerNames(
        inside,
        one(naming.router),
        one(naming.correction_bias),
        chosen,
        pick(naming.shared),
        full(naming.shared_gate),
        interleaved=naming.interleaved and chosen == tuple(map(full, naming.fused[-1])),
        norm=full(naming.norm),
        table=full(naming.table) if table else "",
        expert_scale=full(naming.expert_scale),
        around={name: one(alternatives) for name, alternatives in naming.around.items()},
    )


def _own_prefixes(naming: Naming, nested: tuple[str, ...]) -> tuple[str, ...]:
    """qwen3_omni_moe nests its thinker, which nests the text."""
    prefixes = naming.nested_prefixes if nested else naming.prefixes
    return tuple(f"thinker.{prefix}" for prefix in prefixes) if "thinker_config" in nested else prefixes


def written_names(architecture: Architecture, layer: int, storage: str | None, nested: tuple[str, ...]) -> LayerNames:
    """transformers' names for `fused`, the published ones for others."""
    naming = architecture.naming
    newest = 0 if storage == "fused" else -1
    root = f"{_own_prefixes(naming, nested)[newest]}{naming.layers}.{layer}."
    fused = storage == "fused" or naming.per_expert is None
    kind = {"fused": fused, "table": layer in architecture.tables}
    return _names(naming, root, naming.blocks[newest], lambda found: found[newest], **kind)


def found_names(
    architecture: Architecture,
    layer: int,
    index: TensorIndex,
    holds: Callable[[str], bool],
    nested: tuple[str, ...],
) -> LayerNames:
    """The names of a layer in the files. holds: True for a weight in them, quantised or not."""
    naming = architecture.naming
    prefixes = dict.fromkeys((*_own_prefixes(naming, nested), *_PREFIXES))
    roots = [f"{prefix}{naming.layers}.{layer}." for prefix in prefixes]

    def choose(alternatives: list[tuple[str, ...]]) -> tuple[str, ...]:
        return next((names for names in alternatives if holds(names[0])), alternatives[-1])

    kind = {"fused": True, "table": layer in architecture.tables}
    candidates = [_names(naming, root, block, choose, **kind) for root in roots for block in naming.blocks]
    names = next((names for names in candidates if names.router in index.files), None)
    if names is None:
        raise InvalidInput(
            f"{index.directory} must hold the router of layer {layer} under a name such as {candidates[0].router}, got "
            f"{index.summary()} without it; download the checkpoint again or correct its config.json"
        )
    assert names.fused is not None
    if naming.per_expert is None or holds(names.fused[0]):
        return names
    first, last = (
        f"{names.block}experts.{expert}.{naming.per_expert[0]}.weight" for expert in (0, architecture.num_experts - 1)
    )
    if holds(first) and architecture.num_experts > len(index.files):
        # A number in config.json must not make endless names.
        raise InvalidInput(
            f"{index.directory} must hold {last} for num_experts = {architecture.num_experts}, got {index.summary()} "
            "without it; download the checkpoint again or correct its config.json"
        )
    if not holds(first):
        raise InvalidInput(
            f"{index.directory} must hold {names.fused[0]} or {first}, got {index.summary()} without "
            "either; download the checkpoint again or correct its config.json"
        )
    return dataclasses.replace(names, fused=None)


def layer_stacks(architecture: Architecture, names: LayerNames) -> dict[str, Stack]:
    """The arrays of a layer by field name (`experts.gate_up`), and the tensors of each."""
    num_experts, d_model, family = architecture.num_experts, architecture.d_model, architecture.family
    # A wrong number of experts is reported before one seems missing.
    stacks = {"router.weight": Stack.whole(names.router, (num_experts, d_model))}
    if family.router_bias:
        stacks["router.bias"] = Stack.whole(names.router_bias, (num_experts,))
    if names.table:
        assert architecture.spec.router is not None
        shape = (architecture.vocab_size, architecture.spec.router.require_top_k())
        casts = (lambda ids: ids.astype(np.int32)), (lambda ids: ids.astype(np.int64))
        part = Part(names.table, shape, (), *casts)
        stacks["router.table"] = Stack(shape, (part,), dtype="int32", accepts=("I64", "I32"))
    elif architecture.correction_bias:
        shape = (1, num_experts) if architecture.naming.bias_row else (num_experts,)
        parts = (Part(names.correction_bias, shape, decode=np.ravel if len(shape) > 1 else None),)
        stacks["router.correction_bias"] = Stack((num_experts,), parts, dtype="float32")
    if architecture.router_norm is not None:
        stacks["router.norm"] = Stack.whole(names.norm, (d_model,))
    if family.expert_scale:
        stacks["router.expert_scale"] = Stack.whole(names.expert_scale, (num_experts,))
    stacks |= _expert_stacks(architecture, names)
    if architecture.shared_d_ff:
        # Plain modules are `out_in`, whatever the layout of the fused experts.
        turned = architecture.spec.weight_layout == "in_out"
        sizes = (architecture.shared_d_ff, d_model)
        stacks |= _mlp_stacks("shared.", names.shared, architecture, *sizes, turned=turned)
        if family.shared is not None and family.shared.gate:
            shape = (d_model, 1) if turned else (1, d_model)
            stacks["shared.gate"] = Stack(shape, (_part(names.shared_gate, shape, turned=turned),))
    for one in architecture.around():
        turned = one.role == "weight" and architecture.spec.weight_layout == "in_out"
        stacks[one.name] = Stack(one.shape, (_part(names.around[one.name], one.shape, turned=turned),))
    return stacks


def _expert_stacks(architecture: Architecture, names: LayerNames) -> dict[str, Stack]:
    num_experts, d_ff, width = architecture.num_experts, architecture.d_ff, architecture.expert_width
    if names.fused is None:
        modules = architecture.naming.per_expert
        assert modules is not None
        per_expert = []
        for expert in range(num_experts):
            tensors = tuple(f"{names.block}experts.{expert}.{module}.weight" for module in modules)
            per_expert.append(_mlp_stacks("experts.", tensors, architecture, d_ff, width, place=(expert,)))
        return {
            name: Stack((num_experts, *stack.shape), tuple(part for one in per_expert for part in one[name].parts))
            for name, stack in per_expert[0].items()
        }
    lead, turned = (num_experts,), names.turned
    stacks = _mlp_stacks("experts.", names.fused, architecture, d_ff, width, lead=lead, turned=turned)
    if architecture.naming.flat:
        stacks = {name: _flat(stack, num_experts, d_ff, name.endswith("down")) for name, stack in stacks.items()}
    if names.interleaved:
        gate_up = stacks["experts.gate_up"]
        apart = dataclasses.replace(gate_up.parts[0], decode=rows_apart, encode=rows_in_turn)
        stacks["experts.gate_up"] = dataclasses.replace(gate_up, parts=(apart,))
    widths = {"gate_up": architecture.spec.activation.input_width(d_ff), "down": width}
    for name, tensor in zip(widths, names.fused, strict=True) if architecture.family.expert_bias else ():
        stacks[f"experts.{name}_bias"] = Stack.whole(f"{tensor}_bias", (num_experts, widths[name]))
    return stacks


def _mlp_stacks(
    prefix: str,
    names: tuple[str, ...],
    architecture: Architecture,
    d_ff: int,
    d_model: int,
    *,
    lead: tuple[int, ...] = (),
    turned: bool = False,
    place: tuple[int, ...] = (),
) -> dict[str, Stack]:
    """One MLP, or a stack of `lead`: gate_up (gate first) from one tensor or two, and down.

    names: see `Naming.shared`. turned: files hold the transposes. place: the MLP's position in the stack of experts.
    """
    step = -1 if architecture.spec.weight_layout == "in_out" else 1
    *halves, down = names
    rows = architecture.spec.activation.input_width(d_ff)
    gate_up = (*lead, *(rows, d_model)[::step])
    half_rows = rows // len(halves)
    half_shape = (*lead, *(half_rows, d_model)[::step])
    parts = []
    for half, name in enumerate(halves):
        columns = slice(half * half_rows, (half + 1) * half_rows)
        # The experts and, in `in_out`, d_model precede the rows.
        before = len(lead) + (step == -1)
        inside = (*(slice(None),) * before, columns) if len(halves) > 1 else ()
        parts.append(_part(name, half_shape, (*place, *inside), turned=turned))
    down_shape = (*lead, *(d_model, d_ff)[::step])
    return {
        f"{prefix}gate_up": Stack(gate_up, tuple(parts)),
        f"{prefix}down": Stack(down_shape, (_part(down, down_shape, place, turned=turned),)),
    }


def _flat(stack: Stack, num_experts: int, d_ff: int, turned: bool) -> Stack:
    """The stack of all experts with tensors `[E * F, D]`; turned: instead of `[D, F]` each."""

    def decode(array: np.ndarray) -> np.ndarray:
        experts = array.reshape(num_experts, d_ff, -1)
        return turn(experts) if turned else experts

    d_model = stack.shape[1 if turned else 2]
    shape, encode = (num_experts * d_ff, d_model), turn if turned else None
    parts = (dataclasses.replace(part, shape=shape, decode=decode, encode=encode) for part in stack.parts)
    return dataclasses.replace(stack, parts=tuple(parts))


def _part(name: str, shape: tuple[int, ...], place: tuple[int | slice, ...] = (), *, turned: bool) -> Part:
    """shape: of the place. A turned tensor has the last two axes exchanged."""
    if not turned:
        return Part(name, shape, place)
    return Part(name, (*shape[:-2], shape[-1], shape[-2]), place, turn, turn)
