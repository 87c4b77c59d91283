"""Eager transformers, in float64 and in a model's dtype, as the judge of a model with our experts."""

from __future__ import annotations

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_torch import MoE
from tools.sweep import models

#: Blocks that draw experts at random in training.
RANDOM = ("phimoe",)
#: float32: largest error, relative to the largest number. Gradients count as at least `_FLOOR` of the largest of all.
TOLERANCE, _FLOOR = 1e-4, 1e-3
#: bfloat16: error of a norm, beyond that of eager transformers in bfloat16.
_FACTOR, _SLACK = 3.0, 2**-5
_EAGER: Any = {"experts_implementation": "eager"}
#: Models that generate need a layer of attention.
_SETTINGS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"intermediate_size": 32},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "qwen3_5_moe": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
}
STEPS, _TOKENS, _NEW = 3, 8, 6
Tensors = dict[str, torch.Tensor]


@functools.lru_cache(maxsize=4)
def _loaded(family: str, dtype: str) -> Any:
    """As transformers loads a checkpoint in float32: buffers of positions, for one, keep their dtype."""
    models.quiet()
    model = models.build(family, **_SETTINGS.get(family, {}))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return loaded(model, Path(folder), dtype)


def fresh(family: str, dtype: str = "float64") -> Any:
    return copy.deepcopy(_loaded(family, dtype))


def loaded(model: Any, path: Path, dtype: Any = None) -> Any:
    """A model that transformers loads without a complaint, by default in the dtype of `model`."""
    found, report = type(model).from_pretrained(path, output_loading_info=True, dtype=dtype or model.dtype, **_EAGER)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    return found.eval()


@functools.lru_cache(maxsize=1)
def prompts(family: str) -> torch.Tensor:
    return far_from_ties(fresh(family), fresh(family, "bfloat16"))


def far_from_ties(exact: Any, model: Any) -> torch.Tensor:
    """Ids `[2, T]` for which a bfloat16 model and others near it choose experts and next tokens as the exact one."""
    generator = torch.Generator().manual_seed(7)
    ids = generated(exact, torch.randint(3, models.VOCABULARY, (128, _TOKENS), generator=generator))
    wanted, chosen = _choices(exact, ids)
    first, second = wanted[:, _TOKENS - 1 : -1].topk(2).values.unbind(-1)
    worst = torch.zeros(len(ids), dtype=torch.float64)
    for number in range(4):
        rounded = copy.deepcopy(model)
        for parameter in rounded.parameters() if number else ():
            parameter.data.mul_(1 + 2**-8 * torch.randn(parameter.shape, generator=generator))
        logits, others = _choices(rounded, ids)
        error = (logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        noise = (logits - wanted)[:, _TOKENS - 1 : -1].abs().amax(-1) / (first - second)
        worst = worst.maximum(error.amax(1)).maximum(noise.amax(1) / 4) + (others != chosen).any(1)
    best = worst.argsort()[:2]
    assert worst[best].max() < 0.25, f"no two prompts are far from ties: {worst.sort().values[:4]}"
    return ids[best, :_TOKENS]


def _choices(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits `[B, T, V]`, all tokens' experts `[B, ...]` where routers return ids)."""
    seen: list[torch.Tensor] = []
    for block in models.moe_blocks(model).values():
        block.get_submodule("experts").register_forward_pre_hook(
            lambda module, positional, named: seen.extend((*positional, *named.values())), with_kwargs=True
        )
    logits = logits_of(model, ids).double()
    chosen = [one.sort(-1).values.view(len(ids), -1) for one in seen if one.dtype == torch.int64]
    return logits, torch.cat([torch.zeros(len(ids), 0, dtype=torch.int64), *chosen], 1)


def generated(model: Any, ids: torch.Tensor) -> torch.Tensor:
    options: Any = {"max_new_tokens": _NEW, "min_new_tokens": _NEW, "do_sample": False, "use_cache": True}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def loss_of(model: Any, ids: torch.Tensor, weights: Tensors | None = None, *, logits: bool = True) -> torch.Tensor:
    """logits: with the balance loss of the routers'."""
    named: Any = {"output_router_logits": logits} if hasattr(model.config, "output_router_logits") else {}
    named |= {"input_ids": ids, "labels": ids}
    return (model(**named) if weights is None else torch.func.functional_call(model, weights, (), named)).loss


def layers_of(model: Any) -> dict[str, MoE]:
    return {path: module for path, module in model.named_modules() if isinstance(module, MoE)}


def as_block(model: Any, held: Tensors) -> Tensors:
    """Arrays of a model with layers in its blocks' places, by the names and shapes of the blocks."""
    renamed = dict(held)
    for path, layer in layers_of(model).items():
        for array in layer.block_arrays:
            if (one := renamed.pop(f"{path}.{array.name}", None)) is not None:
                names = (f"{path}.{name}" for name in array.names)
                renamed |= dict(zip(names, array.split(one), strict=True))
    return renamed


class Run(NamedTuple):
    """Losses of the steps, and gradients of the first one."""

    losses: torch.Tensor
    gradients: Tensors


def train(model: Any, ids: torch.Tensor, *, training: bool = True, logits: bool = True) -> Run:
    """A loop as users write it."""
    torch.manual_seed(3)
    model.train(training)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    optimizer, losses, gradients = torch.optim.SGD(trained.values(), 1e-3), [], {}
    for _ in range(STEPS):
        loss = loss_of(model, ids, logits=logits)
        loss.backward()
        gradients = gradients or {name: one.grad.clone() for name, one in trained.items() if one.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    model.eval()
    return Run(torch.stack(losses), as_block(model, gradients))


@functools.lru_cache(maxsize=4)
def judge(family: str, dtype: str, training: bool = True) -> Run:
    """Of eager transformers."""
    return train(fresh(family, dtype), prompts(family), training=training)


def error_of(one: torch.Tensor, exact: torch.Tensor, dtype: str, floor: float = 0) -> float:
    """Of float32 the largest, else of the norm, relative to the exact tensor's, or to `floor` if that is larger."""
    norm = torch.inf if dtype == "float32" else 2
    sizes = [float(torch.linalg.vector_norm(some.double(), norm)) for some in (one.double() - exact, exact)]
    return sizes[0] / max(sizes[1], floor, 1e-300)


def require_close(label: str, dtype: str, ours: Tensors, eager: Tensors, exact: Tensors) -> None:
    """Within float32's tolerance of the exact tensors, in bfloat16 about as close to them as eager transformers."""
    assert ours.keys() == exact.keys() == eager.keys(), (label, ours.keys() ^ exact.keys(), ours.keys() ^ eager.keys())
    largest = max(float(one.abs().max()) for one in exact.values())
    for name, wanted in exact.items():
        floor = _FLOOR * largest * (1 if dtype == "float32" else wanted.numel() ** 0.5)
        error, theirs = (error_of(some[name], wanted, dtype, floor) for some in (ours, eager))
        allowed = TOLERANCE if dtype == "float32" else _FACTOR * theirs + _SLACK
        assert error <= allowed, f"{label}, {name}: error {error:.1e}, of eager transformers {theirs:.1e}"


def require_losses(label: str, dtype: str, ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """Models of bfloat16 have fp32 losses."""
    errors = [float(((one.double() - exact) / exact).abs().max()) for one in (ours, eager)]
    allowed = TOLERANCE if dtype == "float32" else max(_FACTOR * errors[1], 2**-8)
    assert errors[0] <= allowed, f"{label}: losses differ by {errors[0]:.1e}, of eager transformers {errors[1]:.1e}"


def require_bits(label: str, found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys(), (label, found.keys() ^ wanted.keys())
    different = [name for name, one in wanted.items() if not torch.equal(found[name], one)]
    assert not different, f"{label}: {', '.join(different)} differ"


def require_near(label: str, found: torch.Tensor, wanted: torch.Tensor, dtype: str) -> None:
    """Logits of other weights by a rounding, or of equal ones at other addresses, which CPU libraries sum otherwise."""
    error = error_of(found, wanted.double(), dtype)
    assert error < (TOLERANCE if dtype == "float32" else 2**-4), f"{label}: logits differ by {error:.1e}"


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def require_logits(label: str, model: Any, eager: Any, ids: torch.Tensor) -> None:
    """Of a model against an eager one with its weights, and that one in float64."""
    exact = copy.deepcopy(eager).double()
    every = ({"logits": logits_of(one, ids)} for one in (model, eager, exact))
    require_close(label, str(model.dtype).removeprefix("torch."), *every)


def require_run(label: str, ours: Run, family: str, dtype: str, *, training: bool = True) -> None:
    """Against eager transformers, and where nothing is drawn at random against it in float64."""
    eager = judge(family, dtype, training)
    exact = eager if training and family in RANDOM else judge(family, "float64", training)
    require_losses(label, dtype, ours.losses, eager.losses, exact.losses)
    require_close(label, dtype, ours.gradients, eager.gradients, exact.gradients)
