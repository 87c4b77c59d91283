"""Memory and time of a model on some GPUs: measured where a record has it, else between records, else bounds."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
import statistics
from dataclasses import dataclass
from typing import NamedTuple

from moe_core.base import INT32_LIMIT
from moe_core.base.checks import as_integer, require_choice
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers.costs import layer_cost
from moe_core.layers.spec import HUGGING_FACE
from moe_core.parallel.cost import predict
from moe_core.parallel.machine import choose_mode
from moe_core.parallel.placement import Placement
from moe_core.parallel.spec import ExchangeSpec
from moe_core.tools.choose.models import FORMATS, GB, GPUS, MODELS, Gpu, Model

#: bf16 weights and gradients, and Adam's fp32 copy and two moments.
TRAINING_BYTES = 16
#: Of a GPU's memory: the rest holds the context, kernels' scratch and what allocators lose.
USABLE = 0.9
#: Of the memory behind weights: for the KV cache and activations of a server.
LEAST_FREE = 0.1


_BY_SHAPE = {model.shape: model for model in MODELS.values()}


class Time(NamedTuple):
    """Microseconds of one MoE layer, and where they come from: `measured`, `between records`, or `predicted`."""

    us: float
    source: str


@dataclass(frozen=True)
class Option:
    """A format on N GPUs. weights, spent: bytes of each GPU, of weights, and of all that a step keeps. time: of one MoE
    layer. tokens_per_second: of all GPUs if only MoE layers ran, an upper bound of the model's. why_not: the reason if
    it does not fit. experts: GPUs that share the experts, in gpus // experts groups. mode: of their exchange.
    assumed: what the predicted time rests on."""

    format: str
    gpus: int
    experts: int
    mode: str
    parallel: str
    weights: int
    spent: int
    time: Time | None
    tokens_per_second: float
    why_not: str | None = None
    assumed: tuple[str, ...] = ()


@functools.cache
def measured() -> dict[tuple[str, str, str], dict[int, tuple[float, str]]]:
    """(gpu, shape, format or `training`) -> tokens -> (us, record)."""
    text = importlib.resources.files("moe_core.tools.choose").joinpath("measured.json").read_text()
    found: dict[tuple[str, str, str], dict[int, tuple[float, str]]] = {}
    for gpu, shape, kind, tokens, us, record in json.loads(text):
        found.setdefault((gpu, shape, kind), {})[tokens] = (us, record)
    return found


def time_alone(model: Model, gpu: Gpu, format: str, tokens: int, *, training: bool = False) -> Time:
    """Of a layer with all experts on one GPU. Between two records, time is a power of the tokens."""
    kind = "training" if training else format
    known = measured().get((gpu.name, model.shape, kind), {})
    if tokens in known:
        return Time(known[tokens][0], "measured")
    below, above = [n for n in known if n < tokens], [n for n in known if n > tokens]
    if below and above:
        low, high = max(below), min(above)
        part = math.log(tokens / low) / math.log(high / low)
        return Time(known[low][0] ** (1 - part) * known[high][0] ** part, "between records")
    return Time(_bound_us(model, gpu, format, tokens, training) * _over_bound(kind, model.shape, tokens), "predicted")


@functools.lru_cache(maxsize=4096)
def _over_bound(kind: str, shape: str, tokens: int) -> float:
    """Time over bound in records of an H200: of this shape, else the median of all, each at its nearest tokens."""
    ratios: dict[str, float] = {}
    for (gpu, other, of), times in measured().items():
        if gpu == "h200" and of == kind and other in _BY_SHAPE:
            nearest = min(times, key=lambda count: abs(math.log(count / tokens)))
            format = "bf16" if kind == "training" else kind
            bound = _bound_us(_BY_SHAPE[other], GPUS["h200"], format, nearest, kind == "training")
            ratios[other] = max(1.0, times[nearest][0] / bound)
    return ratios.get(shape, statistics.median(ratios.values()) if ratios else 1.0)


def _bound_us(model: Model, gpu: Gpu, format: str, tokens: int, training: bool, ranks: int = 1) -> float:
    """The longer of operations and bytes, of a GPU that has the experts of one rank and computes `tokens` tokens."""
    layer = model.layer
    cost = layer_cost(layer, HUGGING_FACE, tokens, "bfloat16", training=training)
    each = model.expert_bytes(format) / model.layers / layer.num_experts
    weights = min(layer.num_experts / ranks, tokens * layer.top_k) * each
    rows = 2 * tokens * layer.d_model * 2
    # Training reads weights twice and writes their gradients.
    moved = 3 * weights + 5 * rows / 2 if training else weights + rows
    return max(cost.flops / gpu.machine.tflops / 1e6, moved / gpu.machine.memory / 1e3)


def choose_parallelism(
    model: Model, gpu: Gpu, gpus: int, tokens: int, *, training: bool = False, format: str | None = None
) -> list[Option]:
    """Options for a model, the best first: those that fit, of them the published format, then by tokens per second.

    Every number of GPUs that divides `gpus` may share the experts, up to as many as there are experts. The others hold
    copies (FSDP shards them in training). Another format changes the weights, so it comes first only if the published
    one does not fit.

    Args:
        gpus: of one host, or of whole hosts.
        tokens: of one step, of all GPUs together.
        training: with Adam, all parameters trained in bf16. False: a server's step.
        format: of the experts' weights. None: all.

    Raises InvalidInput for wrong numbers, Unsupported for training in a quantised format.
    """
    gpus, tokens = as_integer("gpus", gpus, 1, INT32_LIMIT), as_integer("tokens", tokens, 1)
    host = gpu.machine.domain
    if gpus > host and gpus % host:
        raise InvalidInput(
            f"gpus must be at most {host}, or whole hosts of {host}, got {gpus}; take all GPUs of a host"
        )
    if tokens % gpus:
        raise InvalidInput(f"tokens must divide by gpus = {gpus}, got {tokens}; pass those of all GPUs together")
    if format is not None:
        require_choice("format", format, FORMATS)
    if training and format not in (None, "bf16"):
        raise Unsupported(f"format must be bf16 in training, got {format}: quantised experts are frozen; leave it out")
    formats: tuple[str, ...] = ("bf16",) if training else FORMATS if format is None else (format,)
    shared = [size for size in range(1, min(gpus, model.layer.num_experts) + 1) if gpus % size == 0]
    options = [_option(model, gpu, gpus, tokens, one, size, training) for one in formats for size in shared]
    return sorted(
        options, key=lambda one: (one.why_not is not None, one.format != model.native, -one.tokens_per_second)
    )


def _option(model: Model, gpu: Gpu, gpus: int, tokens: int, format: str, shared: int, training: bool) -> Option:
    groups = gpus // shared
    name = f"experts over {shared} GPUs"
    if shared == 1:
        name = "one GPU" if gpus == 1 else "experts sharded by FSDP" if training else f"{gpus} copies"
    elif groups > 1:
        name += f", sharded over {groups} by FSDP" if training else f", {groups} copies"
    mode, _ = choose_mode(
        tokens // gpus, Placement.linear(model.layer.num_experts, shared), gpu.machine, symmetric=True,
        row_bytes=2 * model.layer.d_model,
    )  # fmt: skip
    option = Option(format, gpus, shared, mode, name, 0, 0, None, 0.0)
    try:
        experts = model.expert_bytes(format)
    except (InvalidInput, Unsupported) as error:
        return dataclasses.replace(option, why_not=str(error).partition(";")[0])
    time, buffers, assumed = _time(model, gpu, option, tokens, training)
    spent = weights = experts // shared + model.dense_bytes
    if training:
        # FSDP shards everything, and gathers a layer's experts while another computes.
        weights = (experts + model.dense_bytes) // gpus
        # Per token and layer with `recompute`: x and the routing (docs/user/training.md).
        saved = 2 * model.layer.d_model + 4 * model.layer.num_experts + 16 * model.layer.top_k
        spent = weights * TRAINING_BYTES // 2 + model.layers * tokens // gpus * saved
        spent += 2 * experts // model.layers // shared if groups > 1 else 0
    # Layers use one set of buffers in turn.
    spent += buffers
    rate = tokens / (model.layers * time.us) * 1e6
    room = USABLE * gpu.gigabytes * GB
    needed = spent + (0 if training else LEAST_FREE * weights)
    why_not = None if needed <= room else f"needs {needed / GB:.0f} GB, and {room / GB:.0f} GB are usable"
    return dataclasses.replace(
        option, weights=weights, spent=spent, time=time, tokens_per_second=rate, why_not=why_not, assumed=assumed
    )


def _time(model: Model, gpu: Gpu, option: Option, tokens: int, training: bool) -> tuple[Time, int, tuple[str, ...]]:
    """The time, bytes of the exchange's buffers, and assumptions."""
    gpus, shared, format, machine = option.gpus, option.experts, option.format, gpu.machine
    each, groups = tokens // gpus, gpus // shared
    time, buffers, assumed = time_alone(model, gpu, format, each, training=training), 0, ()
    if shared > 1:
        # A rank's share is as far from its bound as one GPU with all experts is.
        bound = _bound_us(model, gpu, format, each, training)
        share = _bound_us(model, gpu, format, each, False, shared) * max(1.0, time.us / bound)
        known = dataclasses.replace(machine, products=(time.us / (3 if training else 1), share))
        found = predict(model.layer, each, shared, known, ExchangeSpec(option.mode), training=training)
        time, buffers, assumed = Time(found.us, "predicted"), found.buffers, found.assumed
    if training and groups > 1:
        # Two gathers and a scatter of gradients, next to the products.
        moved = 3 * model.expert_bytes(format) / model.layers / shared * (groups - 1) / groups
        far = gpus > machine.domain and machine.network is not None
        link = machine.network if far and machine.network else machine.link("all_gather")
        us = link.us(moved, groups - 1)
        if us > time.us:
            time = Time(us, "predicted")
            assumed = (*assumed, *([machine.assumed] if far and machine.assumed not in assumed else []))
    return time, buffers, assumed
