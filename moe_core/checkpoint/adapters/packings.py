"""How libraries pack the factors of experts into tensors, by name.

Shapes cannot tell the packings apart: both orders of B have one shape, and so have both roles where inputs and outputs
are as many. So a packing is named, or follows from the version of PEFT that wrote the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from moe_core.checkpoint.adapters.form import AdapterBase, ExpertAdapter, LoRAPair
from moe_core.checkpoint.adapters.settings import Settings
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers.convert import gate_place


class Packing(NamedTuple):
    """kind: `parameters` (PEFT's nested wrappers of 3-D parameters), `projections` (a module for each projection) or
    `qwix`.

    b_order: of the columns of B, `expert_fastest` (j E + e) or `expert_slowest` (e r + j). swapped: storages of bases
    on which A has the outputs and B the inputs. stacked: projections without an expert's number have a leading axis E
    or 1.
    """

    kind: str
    b_order: str = "expert_fastest"
    swapped: tuple[str, ...] = ()
    stacked: bool = False


_PEFT = Packing("parameters")
_EXPERT_SLOWEST = Packing("parameters", "expert_slowest")
PACKINGS: Mapping[str, Packing] = {
    "peft": _PEFT,
    "peft-0.18": Packing("parameters", swapped=("out_in",)),
    "peft-0.19.0": Packing("parameters", swapped=("out_in", "in_out")),
    "vllm-3d": _PEFT,
    "vllm-2d": Packing("projections"),
    "unsloth-old": _EXPERT_SLOWEST,
    "axolotl": _PEFT,
    "axolotl-scattermoe": _EXPERT_SLOWEST,
    "megatron-bridge": Packing("projections", stacked=True),
    "qwix": Packing("qwix"),
}
#: PEFT's packings and their first versions.
VERSIONS = (("peft", (0, 19, 1)), ("peft-0.19.0", (0, 19, 0)), ("peft-0.18", (0, 0, 0)))
_PREFIX = "base_model.model."
#: Names of parameters: the product, and the columns of its matrix.
_PARAMETERS = {"gate_up_proj": "gate_up", "gate_up": "gate_up", "down_proj": "down", "down": "down"}
_PROJECTIONS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_PROJECTIONS |= {"gate_up_proj": "gate_up", "wi": "gate_up", "wi_0": "gate", "wi_1": "up", "wo": "down"}
_OF_PARAMETER = re.compile(r"(?P<path>.+?)(?P<depth>(\.base_layer)*)\.lora_(?P<side>[AB])\.weight")
_OF_PROJECTION = re.compile(
    r"(?P<path>(?:.+\.)?experts)\.(?:(?P<expert>\d+)\.)?(?P<name>\w+)\.lora_(?P<side>[AB])\.weight"
)
_OF_ROUTER = re.compile(r"(?P<path>.+)\.(?P<name>gate|router)\.lora_A\.weight")
_OF_QWIX = re.compile(r"(?P<path>.+)[./](?P<name>\w+)_lora_(?P<side>[ab])")
Tensors = Mapping[str, np.ndarray]


def packing_of(settings: Settings) -> str | None:
    """PEFT's packing by its version. None: not written, or of a development between two of them."""
    version = settings.peft_version
    if version is None or ("dev" in str(settings.entries["peft_version"]) and version <= (0, 19, 1)):
        return None
    return next(name for name, first in VERSIONS if version >= first)


class Unpacked(NamedTuple):
    layers: dict[str, ExpertAdapter]
    names: dict[str, str]
    used: set[str]


def unpack(tensors: Tensors, packing: str, settings: Settings, base: AdapterBase) -> Unpacked:
    """The layers in a file's tensors, and the names of the tensors that are theirs."""
    form = PACKINGS[packing]
    if form.kind == "parameters":
        found = _unpack_parameters(tensors, packing, settings, base)
    else:
        found = _unpack_projections(tensors, form, settings, base)
    for key in tensors:
        match = _OF_ROUTER.fullmatch(key.removeprefix(_PREFIX))
        other = key.replace("lora_A.weight", "lora_B.weight")
        if match is None or other not in tensors:
            continue
        (a, b), module = (tensors[key], tensors[other]), f"{match['path']}.{match['name']}"
        if a.shape != (settings.rank(module), base.d_model) or b.shape != (base.num_experts, len(a)):
            continue  # of another module, or of no router of this base
        scale, path = settings.scale(module, len(a)), f"{match['path']}.experts"
        pair = LoRAPair(a.T[None], b.T[None], np.full(1, scale, np.float32), np.full(1, len(a), np.int32))
        held = found.layers.get(path, ExpertAdapter(None, None, base.gate_layout))
        found.layers[path], found.names["router"] = replace(held, router=pair), match["name"]
        found.used.update((key, other))
    return found


def target_names(path: str, settings: Settings, base: AdapterBase) -> list[str]:
    """The experts' parameters with factors at a path, by product."""
    names = set()
    for target in settings.target_parameters:
        module, _, name = target.rpartition(".")
        product = _PARAMETERS.get(name) or ("gate_up" if name in ("up_proj", "up") and base.width == base.d_ff else "")
        if product and (not module or path == module or path.endswith(f".{module}")):
            names.add((-1 if product == "gate_up" else 0, name))
    return [name for _, name in sorted(names)]


def _unpack_parameters(tensors: Tensors, packing: str, settings: Settings, base: AdapterBase) -> Unpacked:
    form = PACKINGS[packing]
    if not settings.target_parameters:
        raise InvalidInput(
            f"target_parameters must name the experts' parameters for the packing {packing}, got none; nested names "
            "are counted by it: pass the adapter_config.json of the file"
        )
    by_path: dict[str, dict[tuple[int, str], str]] = {}
    for name in tensors:
        match = _OF_PARAMETER.fullmatch(name.removeprefix(_PREFIX))
        if match:
            depth = match["depth"].count(".base_layer")
            by_path.setdefault(match["path"], {})[depth, match["side"]] = name
    found = Unpacked({}, {}, set())
    for path, keys in by_path.items():
        names = target_names(path, settings, base)
        if not names:
            continue
        pairs: dict[str, LoRAPair] = {}
        for position, name in enumerate(names):
            # The first registered parameter is wrapped first.
            depth = len(names) - 1 - position
            present = [keys[depth, side] for side in "AB" if (depth, side) in keys]
            if len(present) != 2:
                wanted = f"{_PREFIX}{path}{'.base_layer' * depth}.lora_A.weight and lora_B.weight"
                raise InvalidInput(f"the adapter must hold {wanted} for {name}, got {present}; save it again")
            product = "down" if name.startswith("down") else "gate_up"
            a, b = (tensors[key] for key in present)
            pairs[product] = _pair_of(f"{path}.{name}", a, b, (packing, form), settings, base, product)
            found.names[product] = name
            found.used.update(present)
        found.layers[path] = ExpertAdapter(pairs.get("gate_up"), pairs.get("down"), base.gate_layout)
    return found


def _pair_of(
    name: str,
    a: np.ndarray,
    b: np.ndarray,
    packing: tuple[str, Packing],
    settings: Settings,
    base: AdapterBase,
    product: str,
) -> LoRAPair:
    (label, form), experts, rank = packing, base.num_experts, settings.rank(name)
    inputs, outputs = base.sizes(product)
    swapped = base.weight_layout in form.swapped
    wanted = ((experts * rank, outputs), (inputs, experts * rank))
    straight = ((experts * rank, inputs), (outputs, experts * rank))
    if (a.shape, b.shape) != (wanted if swapped else straight):
        other = straight if swapped else wanted
        hint = "correct r, the base or the packing"
        if (a.shape, b.shape) == other:
            others = [name for name, _ in VERSIONS if (base.weight_layout in PACKINGS[name].swapped) != swapped]
            hint = f"these are the roles of {' or '.join(others)}: name that packing"
        shapes = wanted if swapped else straight
        raise InvalidInput(
            f"lora_A and lora_B of {name} must be {list(shapes[0])} and {list(shapes[1])} (rank {rank}, {experts} "
            f"experts, packing {label}), got {list(a.shape)} and {list(b.shape)}; {hint}"
        )
    written = packing_of(settings) if inputs == outputs else None
    if written is not None and (base.weight_layout in PACKINGS[written].swapped) != swapped:
        raise InvalidInput(
            f"the roles of lora_A and lora_B of {name} must be decided where inputs and outputs are both {inputs}, got "
            f"the packing {label} and peft_version {settings.entries['peft_version']!r}, which disagree; correct one "
            "of them"
        )
    rows, columns = a.reshape(experts, rank, -1), _apart(b, experts, rank, form.b_order)
    # Swapped: A's rows are b, and B's columns are a.
    a, b = (columns.swapaxes(1, 2), rows) if swapped else (rows.swapaxes(1, 2), columns)
    scale = np.full(experts, settings.scale(name, rank), np.float32)
    return LoRAPair(a, b, scale, np.full(experts, rank, np.int32))


def _apart(b: np.ndarray, experts: int, rank: int, order: str) -> np.ndarray:
    """`[E, r, N]` of packed columns `[N, E r]`."""
    if order == "expert_fastest":
        return b.reshape(len(b), rank, experts).transpose(2, 1, 0)
    return b.reshape(len(b), experts, rank).transpose(1, 2, 0)


def _together(b: np.ndarray, order: str) -> np.ndarray:
    """The inverse of `_apart`."""
    axes = (2, 1, 0) if order == "expert_fastest" else (2, 0, 1)
    return np.ascontiguousarray(b.transpose(axes)).reshape(b.shape[2], -1)


def _unpack_projections(tensors: Tensors, form: Packing, settings: Settings, base: AdapterBase) -> Unpacked:
    expression = _OF_QWIX if form.kind == "qwix" else _OF_PROJECTION
    by_path: dict[str, dict[str, dict[str, dict[str | None, str]]]] = {}
    found = Unpacked({}, {"gate_up": "gate_up_proj", "down": "down_proj"}, set())
    for key in tensors:
        match = expression.fullmatch(key.removeprefix(_PREFIX))
        if match is None or match["name"] not in _PROJECTIONS:
            continue
        expert = match["expert"] if form.kind == "projections" else None
        if expert is None and not (form.stacked or form.kind == "qwix"):
            continue
        sides = by_path.setdefault(match["path"], {}).setdefault(match["name"], {})
        sides.setdefault(match["side"].upper(), {})[expert] = key
        found.used.add(key)
    for path, projections in by_path.items():
        pairs: dict[str, LoRAPair] = {}
        for name, sides in projections.items():
            part = _PROJECTIONS[name]
            if part in pairs:
                raise InvalidInput(f"{path} must have one set of names, got {sorted(projections)}; save it again")
            pairs[part] = _stacked_pair(f"{path}.{name}", sides, tensors, form, settings, base)
        found.layers[path] = ExpertAdapter(_first(path, pairs, base), pairs.get("down"), base.gate_layout)
    return found


def _stacked_pair(
    name: str, sides: Mapping[str, Mapping], tensors: Tensors, form: Packing, settings: Settings, base: AdapterBase
) -> LoRAPair:
    experts, part = base.num_experts, _PROJECTIONS[name.rpartition(".")[2]]
    inputs, outputs = base.sizes("down" if part == "down" else "gate_up")
    outputs = outputs // 2 if part in ("gate", "up") and base.width != base.d_ff else outputs
    path, _, last = name.rpartition(".")
    modules = [f"{path}.{expert}.{last}" for expert in range(experts)]
    factors, factor_ranks = [], []
    for side, size in (("A", inputs), ("B", outputs)):
        keys = sides.get(side, {})
        arrays = (
            [tensors[keys[None]]] if None in keys else [tensors[keys[str(e)]] for e in range(experts) if str(e) in keys]
        )
        count = 1 if None in keys else experts
        if len(keys) != count or len(arrays) != count:
            raise InvalidInput(
                f"lora_{side} of {name} must be there for each of {experts} experts, got {sorted(map(str, keys))}; "
                "correct the base or save the adapter again"
            )
        if None in keys:
            # Qwix's einsum shares B between experts.
            whole = arrays[0][None] if form.kind == "qwix" and arrays[0].ndim == 2 else arrays[0]
            if whole.ndim != 3 or len(whole) not in (1, experts):
                raise InvalidInput(
                    f"lora_{side} of {name} must be [{experts} or 1, ...], got {list(whole.shape)}; correct the packing"
                )
            arrays = list(np.broadcast_to(whole, (experts, *whole.shape[1:])))
        # To a: [in, r], b: [r, out].
        arrays = arrays if form.kind == "qwix" else [array.T for array in arrays]
        axis = 0 if side == "A" else 1
        if any(array.ndim != 2 or array.shape[axis] != size for array in arrays):
            shapes = sorted({str(list(array.shape)) for array in arrays})
            raise InvalidInput(
                f"lora_{side} of {name} must have {size} {'inputs' if side == 'A' else 'outputs'}, got "
                f"{', '.join(shapes)} (transposed); correct the base or the packing"
            )
        factors.append(arrays)
        factor_ranks.append([array.shape[1 - axis] for array in arrays])
    wanted = [settings.rank(module) for module in modules]
    if factor_ranks != [wanted, wanted]:
        raise InvalidInput(
            f"r of {name} must be the rank of its factors, got {wanted[0]} for {factor_ranks[0][0]} and "
            f"{factor_ranks[1][0]}; pass the adapter_config.json of the file"
        )
    rank = max(wanted)
    pads = [((0, 0), (0, rank - own)) for own in wanted]
    a = np.stack([np.pad(array, pad) for array, pad in zip(factors[0], pads, strict=True)])
    b = np.stack([np.pad(array, pad[::-1]) for array, pad in zip(factors[1], pads, strict=True)])
    scale = np.array([settings.scale(module, own) for module, own in zip(modules, wanted, strict=True)], np.float32)
    return LoRAPair(a, b, scale, np.array(wanted, np.int32))


def _first(path: str, pairs: Mapping[str, LoRAPair], base: AdapterBase) -> LoRAPair | None:
    """Join the factors of gate and up."""
    parts = {part: pairs[part] for part in ("gate", "up") if part in pairs}
    if "gate_up" in pairs or not parts:
        if parts:
            raise InvalidInput(f"{path} must have gate and up together or apart, got both; save it again")
        return pairs.get("gate_up")
    if base.width == base.d_ff:
        return next(iter(parts.values()))
    some = next(iter(parts.values()))
    if any(not np.array_equal(pair.scale, some.scale) for pair in parts.values()):
        raise Unsupported(
            f"gate and up of {path} must have one scale, got {[float(pair.scale[0]) for pair in parts.values()]}; "
            "multiply B of one by the ratio"
        )
    half, layout = base.width // 2, base.gate_layout
    if len(parts) < 2:
        b = np.zeros((*some.b.shape[:2], base.width), some.b.dtype)
        b[..., gate_place(layout, "up" in parts, half)] = some.b
        return LoRAPair(some.a, b, some.scale, some.ranks)
    gate, up = parts["gate"], parts["up"]
    shared, rank = np.array_equal(gate.a, up.a), max(gate.a.shape[-1], up.a.shape[-1])
    starts = (0, 0) if shared else (0, rank)
    a = np.zeros((*some.a.shape[:2], starts[1] + rank), some.a.dtype)
    b = np.zeros((len(a), a.shape[-1], base.width), some.b.dtype)
    for start, is_up, pair in zip(starts, (False, True), (gate, up), strict=True):
        rows = slice(start, start + pair.a.shape[-1])
        a[..., rows] = pair.a
        b[:, rows, gate_place(layout, is_up, half)] = pair.b
    # Ranks count from the front, where the gate's factors may end in zeros.
    ranks = gate.ranks if shared else np.where(up.ranks > 0, rank + up.ranks, gate.ranks)
    return LoRAPair(a, b, some.scale, ranks.astype(np.int32), separate=not shared)


def pack(path: str, adapter: ExpertAdapter, packing: str, base: AdapterBase) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) of one layer's factors."""
    form, pairs = PACKINGS[packing], adapter.with_gate_layout(base.gate_layout).pairs()
    if form.kind == "parameters":
        for position, pair in enumerate(pairs.values()):
            root = f"{_PREFIX}{path}{'.base_layer' * (len(pairs) - 1 - position)}"
            swapped = base.weight_layout in form.swapped
            rows, columns = (pair.b, pair.a.swapaxes(1, 2)) if swapped else (pair.a.swapaxes(1, 2), pair.b)
            yield f"{root}.lora_A.weight", np.ascontiguousarray(rows).reshape(-1, rows.shape[-1])
            yield f"{root}.lora_B.weight", _together(columns, form.b_order)
        return
    if form.kind == "projections" and path.rpartition(".")[2] != "experts":
        raise InvalidInput(
            f"paths of layers must end in experts for the packing {packing}, got {path}; rename them: "
            "dataclasses.replace(adapter, layers={new_path: layer, ...})"
        )
    for product, pair in pairs.items():
        for name, a, b in _projections(product, pair, form, base):
            if form.kind == "qwix":
                yield f"{path}.{name}_lora_a", np.ascontiguousarray(a)
                yield f"{path}.{name}_lora_b", np.ascontiguousarray(b)
                continue
            for side, factor in (("A", a), ("B", b)):
                turned = np.ascontiguousarray(factor.swapaxes(1, 2))
                if form.stacked:
                    yield f"{_PREFIX}{path}.{name}.lora_{side}.weight", turned
                    continue
                for expert, array in enumerate(turned):
                    yield f"{_PREFIX}{path}.{expert}.{name}.lora_{side}.weight", array


def pack_router(path: str, pair: LoRAPair | None, name: str, packing: str) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) of a router's factors, an ordinary module beside the experts."""
    if pair is None:
        return
    if PACKINGS[packing].kind == "qwix":
        raise Unsupported("factors of a router have no names in qwix, got some; write them in another packing")
    root = f"{_PREFIX}{path.rpartition('.')[0]}.{name}"
    for side, factor in (("A", pair.a), ("B", pair.b)):
        yield f"{root}.lora_{side}.weight", np.ascontiguousarray(factor[0].T)


def _projections(
    product: str, pair: LoRAPair, form: Packing, base: AdapterBase
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    names = ("wi_0", "wi_1", "wo") if form.kind == "qwix" else ("gate_proj", "up_proj", "down_proj")
    if product == "down" or base.width == base.d_ff:
        yield names[2] if product == "down" else names[1], pair.a, pair.b
        return
    rank = pair.a.shape[-1] // 2
    for is_up in (False, True):
        columns = gate_place(base.gate_layout, is_up, base.width // 2)
        rows = slice(rank * is_up, rank * (is_up + 1)) if pair.separate else slice(None)
        yield names[is_up], pair.a[..., rows], pair.b[:, rows, columns]
