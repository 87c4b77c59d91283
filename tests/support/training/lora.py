"""Layers with adapters, and what they give with materialised weights in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_core.base import dtypes
from moe_core.base.target import Target
from moe_core.formats import QuantizedTensor, scheme_named
from moe_core.ops.moe.backward import plan_moe_backward
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import BackwardOptions, ForwardOptions
from moe_core.ops.moe.reference.backward import moe_backward_stages
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.ops.prepack.prepack import tile
from moe_core.ops.quantize.reference import dequantize, quantize
from moe_core.specs import Activation, MoESpec
from moe_core.specs.operands import ExpertWeights, LoRAFactors, MoEOperands, OutputGradients, TopK, named_arrays
from tests.support.harness import run_plan, spec_of

PAIRS = ("a1", "b1", "a2", "b2")
REFERENCE = Target("reference")
OAI = Activation("swiglu_oai", gate_layout="interleaved")
TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2, "float16": 3e-3}


@dataclass(frozen=True)
class Problem:
    """Arrays of one layer with adapters. d_output: the gradient of its output."""

    x: np.ndarray
    experts: ExpertWeights
    routing: TopK
    spec: MoESpec
    lora: LoRAFactors
    adapter_ids: np.ndarray
    d_output: np.ndarray
    token_mask: np.ndarray | None = None
    expert_map: np.ndarray | None = None

    @property
    def operands(self) -> MoEOperands:
        names = ("x", "experts", "routing", "token_mask", "expert_map", "lora", "adapter_ids")
        return MoEOperands(**{name: getattr(self, name) for name in names})

    @property
    def specs(self) -> MoEOperands:
        return dataclasses.replace(
            self.operands, **{name: spec_of(value) for name, value in vars(self.operands).items() if value is not None}
        )

    def arrays(self) -> dict[str, np.ndarray]:
        arrays = {"x": self.x, "adapter_ids": self.adapter_ids}
        for name in ("experts", "routing", "lora"):
            arrays |= dict(named_arrays(getattr(self, name), f"{name}."))
        others = {"token_mask": self.token_mask, "expert_map": self.expert_map}
        return arrays | {name: array for name, array in others.items() if array is not None}

    def forward(self, target: Target, *, lora: bool = True, save: bool = False) -> dict[str, np.ndarray]:
        specs, arrays = self.specs, self.arrays()
        options = ForwardOptions(
            specs.token_mask, specs.expert_map, None, save, lora=specs.lora, adapter_ids=specs.adapter_ids
        )
        if not lora:
            options = dataclasses.replace(options, lora=None, adapter_ids=None)
            arrays = {name: one for name, one in arrays.items() if "lora." not in name and name != "adapter_ids"}
        plan = plan_moe(specs.x, specs.experts, specs.routing, self.spec, target, options=options)
        return run_plan(plan, arrays)

    def backward(self, target: Target, wanted: tuple[str, ...]) -> dict[str, np.ndarray]:
        made = self.forward(target, save=True)
        gradients, options = OutputGradients(spec_of(self.d_output)), BackwardOptions(wanted)
        plan = plan_moe_backward(gradients, self.specs, self.spec, target, options=options)
        arrays = {"gradients.output": self.d_output} | self.arrays() | made
        arrays["routing.ids"] = self.routing.ids.astype(np.int32)
        return run_plan(plan, {buffer.name: arrays[buffer.name] for buffer in plan.inputs})


def draw(
    spec: MoESpec,
    *,
    tokens: int = 9,
    sizes: tuple[int, int, int, int] = (32, 24, 3, 2),
    ranks: tuple[int, ...] = (3, 16, 7),
    padded: int = 16,
    dtype: str = "float32",
    factor_dtype: str | None = None,
    shared: bool = False,
    scheme: str | None = None,
    pairs: tuple[str, ...] = PAIRS,
    biased: bool = True,
    exact: bool = False,
    seed: int = 0,
) -> Problem:
    """sizes: D, F, E, K. ranks: of the adapters (0: an empty slot). exact: small integers, whose sums are exact."""
    random, (d, f, e, k) = np.random.default_rng(seed), sizes
    numpy_dtype = dtypes.numpy_dtype(dtype)

    def array(*shape: int, kind: np.dtype = numpy_dtype, scale: float = 1.0) -> np.ndarray:
        if exact:
            return random.integers(-1, 2, shape).astype(kind)
        return (scale * random.standard_normal(shape, np.float32)).astype(kind)

    def matrix(inside: int, outside: int) -> np.ndarray:
        shape = (inside, outside) if spec.weight_layout == "in_out" else (outside, inside)
        return array(e, *shape, scale=inside**-0.5)

    separate = spec.activation.gate_layout == "separate"
    width = f if separate else spec.activation.input_width(f)
    experts = ExpertWeights(
        matrix(d, width),
        matrix(f, d),
        matrix(d, f) if separate else None,
        array(e, width) if biased else None,
        array(e, f) if biased and separate else None,
        array(e, d) if biased else None,
    )
    if scheme is not None:
        format = scheme_named(scheme).weights
        names = ("gate_up", "down", "up")
        whole = {name: getattr(experts, name) for name in names if getattr(experts, name) is not None}
        parts = {
            name: quantize(one.astype(np.float32), format, layout=spec.weight_layout) for name, one in whole.items()
        }
        experts = dataclasses.replace(experts, **parts)
    kind, slots = dtypes.numpy_dtype(factor_dtype or dtype), len(ranks)
    columns = width * (2 if separate else 1)
    shapes = {"a1": (d, padded), "b1": (padded, columns), "a2": (f, padded), "b2": (padded, d)}
    factors = {}
    for name in pairs:
        inside, outside = shapes[name]
        one = array(slots, 1 if shared else e, inside, outside, kind=kind, scale=inside**-0.5)
        for slot, rank in enumerate(ranks):
            one[slot][(..., slice(rank, None)) if name[0] == "a" else (slice(None), slice(rank, None))] = 0
        factors[name] = one
    scale = np.broadcast_to(np.array([1.0, 0.5, 2.0, 0.25] * slots, np.float32)[:slots, None], (slots, e)).copy()
    by_expert = np.broadcast_to(np.array(ranks, np.int32)[:, None], (slots, e)).copy()
    dropped = np.array([7], np.int32) if spec.lora_dropout else None
    ids = np.stack([random.permutation(e)[:k] for _ in range(tokens)]) if tokens else np.zeros((0, k))
    weights = random.random((tokens, k), np.float32) if not exact else random.integers(1, 3, (tokens, k))
    return Problem(
        array(tokens, d),
        experts,
        TopK(ids.astype(np.int32), weights.astype(np.float32)),
        spec,
        LoRAFactors(**factors, scale=scale, ranks=by_expert, seed=dropped),
        random.integers(-1, slots, tokens).astype(np.int32),
        array(tokens, d),
    )


def _wide(array: np.ndarray | QuantizedTensor | None, dtype: str) -> np.ndarray | None:
    if isinstance(array, QuantizedTensor):
        return dequantize(array, dtype).astype(np.float64)
    return None if array is None else array.astype(np.float64)


def materialised(problem: Problem, adapter: int) -> ExpertWeights:
    """W + scale A B in float64. adapter -1: W."""
    experts = problem.experts
    names = ("gate_up", "down", "up", "gate_up_bias", "up_bias", "down_bias")
    wide = {name: _wide(getattr(experts, name), str(problem.x.dtype)) for name in names}
    if adapter >= 0:
        added = {}
        for number in (1, 2):
            a, b = getattr(problem.lora, f"a{number}"), getattr(problem.lora, f"b{number}")
            if a is not None:
                product = a[adapter].astype(np.float64) @ b[adapter].astype(np.float64)
                added[number] = problem.lora.scale[adapter][:, None, None] * product
        if wide["up"] is not None and 1 in added:
            parts = dict(zip(("gate_up", "up"), np.split(added[1], 2, axis=2), strict=True))
        else:
            parts = {"gate_up": added[1]} if 1 in added else {}
        parts |= {"down": added[2]} if 2 in added else {}
        for name, one in parts.items():
            wide[name] = wide[name] + (one if problem.spec.weight_layout == "in_out" else one.swapaxes(1, 2))
    return ExpertWeights(**wide)


def effective(problem: Problem) -> np.ndarray:
    """Adapters of tokens, -1 for empty and absent slots."""
    ids, ranks = problem.adapter_ids, problem.lora.ranks
    named = (ids >= 0) & (ids < len(ranks))
    return np.where(named & (ranks[np.where(named, ids, 0)].max(axis=1, initial=0) > 0), ids, -1)


def oracle(problem: Problem) -> dict[str, np.ndarray]:
    """Output and gradients in float64, adapter by adapter."""
    spec, ids, lora = problem.spec, effective(problem), problem.lora
    spec = dataclasses.replace(spec, lora_dropout=0.0, recompute=False)
    factors = {name: getattr(lora, name).astype(np.float64) for name in PAIRS if getattr(lora, name) is not None}
    made = {"output": np.zeros(problem.x.shape), "d_x": np.zeros(problem.x.shape)}
    made |= {"d_routing.weights": np.zeros(problem.routing.weights.shape)}
    made |= {f"d_lora.{name}": np.zeros(one.shape) for name, one in factors.items()}
    for adapter in sorted(set(ids.tolist())):
        rows, experts = np.flatnonzero(ids == adapter), materialised(problem, adapter)
        x, routing = problem.x[rows].astype(np.float64), TopK(*(one[rows] for one in vars(problem.routing).values()))
        mask = None if problem.token_mask is None else problem.token_mask[rows]
        options: Mapping[str, Any] = {"token_mask": mask, "expert_map": problem.expert_map}
        stages = moe_stages(x, experts, routing, spec, **options)
        made["output"][rows] = stages["output"]
        operands = MoEOperands(x, experts, routing, **options)
        upstream = OutputGradients(problem.d_output[rows].astype(np.float64))
        found = moe_backward_stages(upstream, operands, spec, {name: stages[name] for name in ("ids", "weights")})
        for name in ("d_x", "d_routing.weights"):
            made[name][rows] = found[name]
        for name in ("gate_up", "down", "up"):
            if (part := found.get(f"d_experts.{name}")) is not None:
                made.setdefault(f"d_experts.{name}", np.zeros(part.shape))
                made[f"d_experts.{name}"] += part
        if adapter < 0:
            continue
        by_layout = {
            n: one if spec.weight_layout == "in_out" else one.swapaxes(1, 2)
            for n, one in found.items()
            if n.startswith("d_experts.") and one.ndim == 3
        }
        d_first = by_layout["d_experts.gate_up"]
        if experts.up is not None:
            d_first = np.concatenate([d_first, by_layout["d_experts.up"]], axis=2)
        for number, d_weight in ((1, d_first), (2, by_layout["d_experts.down"])):
            if f"a{number}" not in factors:
                continue
            a, b = factors[f"a{number}"][adapter], factors[f"b{number}"][adapter]
            d_weight = lora.scale[adapter][:, None, None] * d_weight
            rank = lora.ranks[adapter].max()
            for name, one in ((f"a{number}", d_weight @ b.swapaxes(1, 2)), (f"b{number}", a.swapaxes(1, 2) @ d_weight)):
                kept = np.arange(one.shape[2 if name[0] == "a" else 1]) < rank
                one = one * (kept if name[0] == "a" else kept[:, None])
                made[f"d_lora.{name}"][adapter] += one.sum(axis=0, keepdims=True) if a.shape[0] == 1 else one
    return made


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - wanted) / max(np.linalg.norm(wanted), 1e-9))


def drawn_in_tiles(activation: Activation, scheme: str = "mxfp4_w4a16", **options: Any) -> Problem:
    """Published experts whose sizes prepacked tiles take."""
    spec = MoESpec(activation, weight_layout="out_in")
    return draw(spec, **({"sizes": (320, 192, 8, 2), "scheme": scheme, "dtype": "bfloat16"} | options))


def prepacked(problem: Problem) -> Problem:
    experts, order = problem.experts, problem.spec.activation.gate_layout or "rows"
    tiled = dataclasses.replace(experts, gate_up=tile(experts.gate_up, order), down=tile(experts.down, "rows"))
    return dataclasses.replace(problem, experts=tiled)
