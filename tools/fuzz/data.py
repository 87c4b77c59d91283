"""The arrays of a case, drawn on the device that its engine runs on, in the storage that the case states."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from tools.fuzz.case import EXPERT_TARGETS, Case
from tools.fuzz.oracle.formats import Quantized, quantize

Tensor = torch.Tensor
TORCH = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
#: Ids that no expert has, and those that int32 cannot hold: cut to it, most would be an expert's, one -1.
_INVALID = (-2, 2**31 - 1, -(2**31), 1000)
_FAR = (2**32 + 3, 2**32 - 1, 2**33, -(2**40))  # an expert's id is added to 2**33


@dataclass
class Arrays:
    """By the names of the ops' arguments (`x`, `routing.weight`, `experts.gate_up`, `d_output`, ...).

    plain: what an engine takes. quantized: matrices as their format stores them. meaning: the float64 numbers of these.
    """

    plain: dict[str, Tensor] = field(default_factory=dict)
    quantized: dict[str, Quantized] = field(default_factory=dict)
    meaning: dict[str, Tensor] = field(default_factory=dict)

    def numbers(self) -> dict[str, Tensor]:
        """What every array means: float64 numbers, or integers and booleans as they are."""
        found = self.plain | self.meaning
        return {name: own.to(torch.float64) if own.is_floating_point() else own for name, own in found.items()}


class Draw:
    def __init__(self, case: Case, device: str) -> None:
        self.random = torch.Generator(device).manual_seed(case.seed)
        self.device, self.case = device, case

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.random, device=self.device)

    def normal(self, *shape: int, rms: float = 1.0, dtype: str | None = None) -> Tensor:
        dtype = dtype or self.case.dtype
        wide = torch.float64 if dtype == "float64" else torch.float32
        numbers = torch.randn(shape, generator=self.random, device=self.device, dtype=wide) * rms
        return numbers.to(TORCH[dtype])

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.random, device=self.device)

    def matrix(self, inside: int, outside: int, *lead: int, layout: str) -> Tensor:
        shape = (inside, outside) if layout == "in_out" else (outside, inside)
        return self.normal(*lead, *shape, rms=inside**-0.5)


def draw(case: Case, device: str = "cpu") -> Arrays:
    """Every array of the case, from its seed; the same on every machine with the same kind of device."""
    draw, arrays = Draw(case, device), Arrays()
    plain = arrays.plain
    T, single = case.num_tokens, "float64" if case.dtype == "float64" else "float32"
    if case.kind not in ("route", "layout"):
        plain["x"] = draw_rows(draw, case)
    if case.masked:
        plain["token_mask"] = draw.uniform(T) < 0.7
    if case.gate_inputs:
        plain["gate_inputs"] = draw.normal(T, case.D)
    if case.kind == "norm":
        plain["weight"] = _factors(draw, case, case.D)
    else:
        _draw_routing(draw, case, plain, single)
    if case.packs > 1:
        plain["pack_start"] = _pack_start(case, device)
    if case.kind in ("moe", "layer", "stages"):
        _draw_experts(draw, case, arrays)
    if case.kind == "layer":
        _draw_around(draw, case, plain)
    if case.adapters:
        _draw_adapters(draw, case, plain)
    if case.mapped:
        order = torch.randperm(case.mapped, generator=draw.random, device=device)
        local = torch.full((case.mapped,), -1, dtype=torch.int32, device=device)
        local[order[: case.E]] = torch.arange(case.E, dtype=torch.int32, device=device)
        plain["expert_map"] = local
    if case.gradient:
        if case.kind != "route":
            plain["d_output"] = draw.normal(T, case.D, dtype=case.out_dtype or case.dtype)
        if case.source != "ids" or case.kind == "route":
            plain["d_weights"] = draw.normal(T, case.choices, dtype=single)
    return arrays


def draw_rows(draw: Draw, case: Case) -> Tensor:
    T, D = case.num_tokens, case.D
    x, where = draw.normal(T, D), draw.uniform(T, D)
    if case.x_kind in ("nan", "inf"):
        rows = draw.uniform(T, 1) < 0.4
        value = float(case.x_kind)
        x = torch.where((where < 2.0 / D) & rows, torch.where(where * D > 1, -value, value), x.float()).to(x.dtype)
    elif case.x_kind == "zeros":
        x = torch.where(where < 0.5, 0.0, x.float()).to(x.dtype) if case.seed % 2 else torch.zeros_like(x)
    elif case.x_kind in ("large", "tiny"):
        x = (x * (64.0 if case.x_kind == "large" else 2.0**-12)).to(x.dtype)
    elif case.x_kind == "one_hot":
        x = torch.nn.functional.one_hot(draw.integers(0, D, T), D).to(x.dtype)
    return x


def _draw_routing(draw: Draw, case: Case, plain: dict[str, Tensor], single: str) -> None:
    T, K, E = case.num_tokens, case.K, case.num_ids
    routed = case.E if case.packs > 1 else E
    lead = _layers(case)
    if case.source == "x":
        plain["routing.weight"] = draw.matrix(case.D, E, *lead, layout=case.router_layout)
        if case.router_bias:
            plain["routing.bias"] = draw.normal(*lead, E, rms=0.3)
        if case.router_norm:
            plain["routing.norm"] = _factors(draw, case, *lead, case.D)
        if case.expert_scale:
            plain["routing.expert_scale"] = (draw.normal(*lead, E, rms=0.3) + 1).to(TORCH[case.dtype])
    if case.source == "logits" or case.kind == "route":
        plain["logits"] = _logits(draw, case, T, routed, single)
    if case.correction_bias:
        plain["correction_bias"] = draw.normal(*lead, E, rms=0.2, dtype=single)
    if case.table:
        order = torch.argsort(draw.uniform(*lead, case.table, E), -1)[..., :K]
        plain["routing.table"] = order.to(torch.int32).contiguous()
        plain["input_ids"] = draw.integers(-2, case.table + 2, T).to(torch.int32)
    if case.source == "ids" or case.given_ids:
        plain["ids"] = draw_ids(draw, case, T, K, routed)
        if case.kind == "moe":
            dtype = TORCH[single if single == "float64" else case.router_weight_dtype]
            plain["weights"] = (draw.uniform(T, K).to(dtype) + 0.05).contiguous()
    if case.packs > 1 and "ids" in plain:
        plain["ids"] = offset_ids(plain["ids"], case)


def _pack_start(case: Case, device: str) -> Tensor:
    """The first expert of each token's pack, int32 [packs * T, 1]."""
    first = torch.arange(case.packs, dtype=torch.int32, device=device) * case.E
    return first.repeat_interleave(case.T)[:, None].contiguous()


def offset_ids(ids: Tensor, case: Case) -> Tensor:
    """Ids within packs as ids of all packs' experts; what names no expert still names none."""
    first = _pack_start(case, str(ids.device))
    moved = torch.where((ids >= 0) & (ids < case.E), ids + first, ids)
    others = (ids >= case.E) & (ids < case.num_ids)
    return torch.where(others, 2**31 - 1, moved).to(ids.dtype)


def _logits(draw: Draw, case: Case, T: int, E: int, single: str) -> Tensor:
    kind, normal = case.logit_kind, draw.normal(T, E, dtype=single)
    where = draw.uniform(T, E)
    if kind == "ties":
        return torch.round(normal)
    if kind == "all_equal":
        return torch.full_like(normal, 0.5)
    if kind == "signed_zeros":
        return torch.where(where < 0.3, torch.round(normal), torch.where(where < 0.6, 0.0, -0.0)).to(normal.dtype)
    if kind == "some_nan":
        return torch.where(where < 0.2, torch.nan, normal)
    if kind == "infinite":
        return torch.where(where < 0.1, torch.inf, torch.where(where < 0.3, -torch.inf, normal))
    return normal * 6 if kind == "spread" else normal


def draw_ids(draw: Draw, case: Case, T: int, K: int, E: int) -> Tensor:
    kind, repeats = case.id_kind, case.kind not in ("route", "layer")
    distinct = torch.argsort(draw.uniform(T, E), 1)[:, :K]
    where = draw.uniform(T, K)
    if kind == "one_expert" and repeats:
        ids = torch.full((T, K), E - 1, device=draw.device)
    elif kind in ("duplicates", "first_half") and repeats:
        ids = draw.integers(0, max(1, E // 2) if kind == "first_half" else E, T, K)
    else:
        ids = distinct
    if kind == "missing":
        ids = torch.where(where < 0.3, -1, ids)
    elif kind == "all_missing":
        ids = torch.full_like(ids, -1)
    elif kind == "invalid":
        far = _FAR if case.ids_dtype == "int64" else ()
        known = torch.tensor((*_INVALID, E, -1, *far), device=draw.device)
        invalid = known[draw.integers(0, len(known), T, K)]
        invalid = torch.where(invalid == 2**33, invalid + distinct, invalid)
        ids = torch.where(where < 0.3, invalid, ids)
    return ids.to(getattr(torch, case.ids_dtype)).contiguous()


def _draw_experts(draw: Draw, case: Case, arrays: Arrays) -> None:
    separate = case.gated and case.gate_layout == "separate"
    width = case.F if separate else case.width
    lead = ((case.stack,) if case.stack else ()) + (case.E * case.packs,)
    sizes = {"gate_up": (case.inner, width), "down": (case.F, case.inner)}
    if separate:
        sizes["up"] = (case.inner, case.F)
    for name, (inside, outside) in sizes.items():
        matrix = draw.matrix(inside, outside, *lead, layout=case.weight_layout)
        arrays.plain[f"experts.{name}"] = matrix
        if case.weights:
            stored, meaning = quantize(matrix.float(), case.weights, case.weight_layout)
            arrays.quantized[f"experts.{name}"], arrays.meaning[f"experts.{name}"] = stored, meaning
        if case.bias:
            arrays.plain[f"experts.{name}_bias"] = draw.normal(*lead, outside, rms=0.3)
    if case.stack:
        arrays.plain["experts.layer_index"] = draw.integers(0, case.stack, 1).to(torch.int32)
    if case.shared:
        width = case.shared * (1 if separate or not case.gated else 2)
        shared = {"gate_up": (case.D, width), "down": (case.shared, case.D)}
        if separate:
            shared["up"] = (case.D, case.shared)
        if case.shared_gate:
            shared["gate"] = (case.D, 1)
        for name, (inside, outside) in shared.items():
            arrays.plain[f"shared.{name}"] = draw.matrix(inside, outside, *_layers(case), layout=case.weight_layout)
    if case.static_scales:
        for name in ("gate_up", "down"):
            arrays.plain[f"experts.{name}_input_scale"] = draw.uniform(1) * 2.0**-6 + 2.0**-9
    if case.main_grad:
        for name in [name for name in arrays.plain if name.split(".")[-1] in ("gate_up", "up", "down")]:
            arrays.plain[f"main_grad.{name}"] = draw.normal(*arrays.plain[name].shape, dtype="float32")


def _draw_adapters(draw: Draw, case: Case, plain: dict[str, Tensor]) -> None:
    """Slots of every rank up to 16, some empty; entries behind a rank hold numbers. Some ids name no adapter."""
    by_expert, alone = (case.adapters, case.E), case.kind == "layer" and case.adapters == 1
    sides = {"gate_up": ("1", case.inner, case.width), "down": ("2", case.F, case.inner)}
    sides |= {"router": ("_router", case.D, case.num_ids), "shared_down": ("2_shared", case.shared, case.D)}
    sides["shared_gate_up"] = ("1_shared", case.D, case.width // case.F * case.shared)
    for target in case.targeted:
        name, inside, outside = sides[target]
        count = case.E if target in EXPERT_TARGETS and not case.shared_factors else 1
        plain[f"lora.a{name}"] = draw.normal(case.adapters, count, inside, 16, rms=inside**-0.5)
        plain[f"lora.b{name}"] = draw.normal(case.adapters, count, 16, outside, rms=0.25)
    scale, ranks = draw.uniform(*by_expert) + 0.25, draw.integers(-2, 17, *by_expert).clamp(min=int(alone))
    if case.adapters > 2:
        ranks[1] = 0
    plain["lora.scale"] = scale.double() if case.dtype == "float64" else scale
    plain["lora.ranks"] = ranks.to(torch.int32)
    if not alone:
        plain["adapter_ids"] = draw.integers(-2, case.adapters + 1, case.T).to(torch.int32)


def _draw_around(draw: Draw, case: Case, plain: dict[str, Tensor]) -> None:
    """What a layer has around its experts."""
    lead, layout = _layers(case), case.weight_layout
    if case.latent:
        plain["before.weight"] = draw.matrix(case.D, case.latent, *lead, layout=layout)
        plain["after.weight"] = draw.matrix(case.latent, case.D, *lead, layout=layout)
        if case.latent_norm:
            plain["before.norm"] = _factors(draw, case, *lead, case.latent)
    if case.out_norm:
        plain["output.norm"] = _factors(draw, case, *lead, case.inner if case.out_norm == "experts" else case.D)
    if case.out_bias:
        plain["output.bias"] = draw.normal(*lead, case.D, rms=0.3)


def _factors(draw: Draw, case: Case, *shape: int) -> Tensor:
    """Parameters of a norm, whose factors lie around 1."""
    return (draw.normal(*shape, rms=0.3) + (0 if case.centred else 1)).to(TORCH[case.dtype])


def _layers(case: Case) -> tuple[int, ...]:
    """The leading axis of what a stack of layers has beside experts."""
    return (case.stack,) if case.stack and case.kind == "layer" else ()


def is_parameter(name: str) -> bool:
    """Whether an array is a layer's own."""
    parts = ("experts.", "shared.", "routing.", "before.", "after.", "output.", "lora.")
    return name.startswith(parts) or name == "correction_bias"


def one_layer(case: Case, arrays: Mapping[str, Tensor]) -> tuple[Case, dict[str, Tensor]]:
    """The layer of a stack that the case runs, as a case of its own."""
    if not case.stack:
        return case, dict(arrays)
    index, found = int(arrays["experts.layer_index"]), dict(arrays)
    del found["experts.layer_index"]
    for name in found:
        if is_parameter(name.removeprefix("main_grad.")):
            found[name] = found[name][index]
    return dataclasses.replace(case, stack=0), found
