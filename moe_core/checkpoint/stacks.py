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


#: (gate, up, down) below `experts.<e>.` in files of quantisers, which split fused experts of any family.
_SPELLINGS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


@dataclass(frozen=True)
class LayerNames:
    """The full names of one layer's tensors in one storage.

    block: the prefix of router and experts, `model.layers.3.mlp.`. fused: (gate_up, down), in GGUF also (gate, up,
    down), None: per expert, with the names `modules`. turned, interleaved: of `fused`. table: "" if the layer has none.
    canonical: transformers' `block`. flat_gate, flat_bias: GGUF has the shared experts' gate as `[D]`, the
    correction bias as `[E]`.
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
    modules: tuple[str, ...] = ()
    canonical: str = ""
    gguf: bool = False
    flat_gate: bool = False
    flat_bias: bool = False

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
    number, block = root.split(".")[-2], naming.blocks[0] and f"{naming.blocks[0]}."
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
        modules=naming.per_expert or (),
        canonical=f"{naming.prefixes[0]}{naming.layers}.{number}.{block}",
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
    architecture: Architecture, layer: int, index: TensorIndex, holds: Callable[[str], bool], nested: tuple[str, ...]
) -> LayerNames:
    """The names of a layer in the files. holds: True for a weight in them, quantised or not."""
    naming = architecture.naming
    prefixes = dict.fromkeys((*_own_prefixes(naming, nested), *_PREFIXES))

    def choose(alternatives: list[tuple[str, ...]]) -> tuple[str, ...]:
        return next((names for names in alternatives if holds(names[0])), alternatives[-1])

    def candidates(prefixes: Mapping[str, None]) -> list[LayerNames]:
        kind = {"fused": True, "table": layer in architecture.tables}
        roots = [f"{prefix}{naming.layers}.{layer}." for prefix in prefixes]
        return [_names(naming, root, block, choose, **kind) for root in roots for block in naming.blocks]

    names = next((names for names in candidates(prefixes) if holds(names.router)), None)
    if names is None:
        names = _names_below_another_prefix(architecture, layer, index, candidates)
    assert names.fused is not None
    if holds(names.fused[0]):
        return names
    spellings = [naming.per_expert] if naming.per_expert else []
    spellings += [modules[not architecture.spec.activation.gated :] for modules in _SPELLINGS]
    firsts = [(modules, f"{names.block}experts.0.{modules[0]}.weight") for modules in dict.fromkeys(spellings)]
    match = next((first for first in firsts if holds(first[1])), None)
    if match is None:
        raise InvalidInput(
            f"{index.directory} must hold {names.fused[0]} or {firsts[0][1]}, got {index.summary()} without "
            "either; download the checkpoint again or correct its config.json"
        )
    modules, _ = match
    if architecture.num_experts > len(index.files):
        # A number in config.json must not make endless names.
        raise InvalidInput(
            f"{index.directory} must hold {names.block}experts.{architecture.num_experts - 1}.{modules[0]}.weight for "
            f"num_experts = {architecture.num_experts}, got {index.summary()} "
            "without it; download the checkpoint again or correct its config.json"
        )
    return dataclasses.replace(names, fused=None, modules=modules)


def _names_below_another_prefix(
    architecture: Architecture,
    layer: int,
    index: TensorIndex,
    candidates: Callable[[Mapping[str, None]], list[LayerNames]],
) -> LayerNames:
    """Exporters of multimodal models nest the text model once more."""
    tails = [names.router for names in candidates({"": None})]
    roots = index.router_roots(tails)
    if len(roots) > 1:
        raise InvalidInput(
            f"{index.directory} must hold one router of layer {layer}, got one below each of "
            f"{', '.join(map(repr, roots))}; save the text model alone"
        )
    for names in candidates(roots):
        if names.router in index.files:
            return names
    raise InvalidInput(
        f"{index.directory} must hold the router of layer {layer} under a name such as "
        f"{architecture.naming.prefixes[0]}{tails[0]}, got "
        f"{index.summary()} without it; download the checkpoint again or correct its config.json"
    )


def gguf_names(architecture: Architecture, layer: int, index: TensorIndex) -> LayerNames:
    """The names of a layer in GGUF files, which are the same for all families."""
    block, halves = f"blk.{layer}.", ("gate", "up") if architecture.spec.activation.gated else ("up",)

    def of(module: str) -> str:
        return f"{block}ffn_{module}.weight"

    experts, shared = (tuple(of(f"{half}_{end}") for half in (*halves, "down")) for end in ("exps", "shexp"))
    if (joined := of("gate_up_exps")) in index.files:
        experts = joined, experts[-1]
    names = LayerNames(block, of("gate_inp"), f"{block}exp_probs_b.bias", experts, shared, of("gate_inp_shexp"))
    # Arrays that GGUF has under no name of this table are reported as missing.
    others = {"norm": f"{block}router_norm", "expert_scale": f"{block}expert_scale"}
    around = {name: f"{block}{name}" for name in architecture.naming.around}
    return dataclasses.replace(names, gguf=True, around=around, **others)


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
        shape = (1, num_experts) if architecture.naming.bias_row and not names.flat_bias else (num_experts,)
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
            part = _part(names.shared_gate, shape, turned=turned)
            if names.flat_gate:
                part = Part(names.shared_gate, (d_model,), decode=lambda row: row.reshape(shape))
            stacks["shared.gate"] = Stack(shape, (part,))
    for one in architecture.around():
        turned = one.role == "weight" and architecture.spec.weight_layout == "in_out"
        stacks[one.name] = Stack(one.shape, (_part(names.around[one.name], one.shape, turned=turned),))
    return stacks


def _expert_stacks(architecture: Architecture, names: LayerNames) -> dict[str, Stack]:
    num_experts, d_ff, width = architecture.num_experts, architecture.d_ff, architecture.expert_width
    if names.fused is None:
        # Modules are `out_in`, whatever the layout of the fused experts.
        turned, per_expert = architecture.spec.weight_layout == "in_out", []
        for expert in range(num_experts):
            tensors = tuple(f"{names.block}experts.{expert}.{module}.weight" for module in names.modules)
            one = _mlp_stacks("experts.", tensors, architecture, d_ff, width, turned=turned, place=(expert,))
            if architecture.family.expert_bias:
                one |= _biases(one, tensors, expert)
            per_expert.append(one)
        return {
            name: Stack((num_experts, *stack.shape), tuple(part for one in per_expert for part in one[name].parts))
            for name, stack in per_expert[0].items()
        }
    lead, turned = (num_experts,), names.turned or (names.gguf and architecture.spec.weight_layout == "in_out")
    stacks = _mlp_stacks("experts.", names.fused, architecture, d_ff, width, lead=lead, turned=turned)
    if architecture.naming.flat and not names.gguf:
        stacks = {name: _flat(stack, num_experts, d_ff, name.endswith("down")) for name, stack in stacks.items()}
    if names.interleaved:
        gate_up = stacks["experts.gate_up"]
        apart = dataclasses.replace(gate_up.parts[0], decode=rows_apart, encode=rows_in_turn)
        stacks["experts.gate_up"] = dataclasses.replace(gate_up, parts=(apart,))
    widths = {"gate_up": architecture.spec.activation.input_width(d_ff), "down": width}
    if architecture.family.expert_bias and names.gguf:
        *halves, down = (tensor.removesuffix("weight") + "bias" for tensor in names.fused)
        rows = 2 * d_ff // len(halves)
        places = ((slice(None), slice(n * rows, (n + 1) * rows)) for n in range(len(halves)))
        parts = tuple(Part(name, (num_experts, rows), place) for name, place in zip(halves, places, strict=True))
        stacks["experts.gate_up_bias"] = Stack((num_experts, 2 * d_ff), parts)
        stacks["experts.down_bias"] = Stack.whole(down, (num_experts, width))
        return stacks
    for name, tensor in zip(widths, names.fused, strict=True) if architecture.family.expert_bias else ():
        stacks[f"experts.{name}_bias"] = Stack.whole(f"{tensor}_bias", (num_experts, widths[name]))
    return stacks


def _biases(stacks: Mapping[str, Stack], tensors: tuple[str, ...], expert: int) -> dict[str, Stack]:
    """The biases of one expert's modules, with gate and up in halves."""
    *halves, down = (tensor.removesuffix("weight") + "bias" for tensor in tensors)
    axis = -1 if stacks["experts.down"].parts[0].is_turned else -2
    sizes = {name: stacks[f"experts.{name}"].shape[axis] for name in ("gate_up", "down")}
    rows = sizes["gate_up"] // len(halves)
    parts = [Part(name, (rows,), (expert, slice(n * rows, (n + 1) * rows))) for n, name in enumerate(halves)]
    whole = Part(down, (sizes["down"],), (expert,))
    return {
        "experts.gate_up_bias": Stack((sizes["gate_up"],), tuple(parts)),
        "experts.down_bias": Stack((sizes["down"],), (whole,)),
    }


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
    """One MLP, or a stack of `lead`: gate_up (gate first) from one tensor or two, and down. names: see `Naming.shared`.
    turned: files hold the transposes. place: the MLP's position in the stack of experts."""
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
