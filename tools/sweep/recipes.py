"""Recipes that users run around models of transformers, step by step against eager transformers and float64 autograd.

Each runs in two ways: on `experts` (`moe_torch.transformers.use(model)`), and on `layers` (`MoE.from_block` in the
places of the blocks, in bfloat16 with the blocks' routers where these return ids).
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import moe_torch.transformers
from moe_core.checkpoint import Checkpoint, convert_checkpoint, open_checkpoint, other_tensors, save_checkpoint
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import format_named
from moe_core.layers import convert_weights
from moe_torch import LayerWeights, MoE
from moe_torch.trace import RoutingTrace, capture, replay
from tools.sweep import models
from tools.sweep.judge import (
    RANDOM,
    STEPS,
    Run,
    as_block,
    far_from_ties,
    fresh,
    generated,
    judge,
    layers_of,
    loaded,
    logits_of,
    loss_of,
    prompts,
    require_bits,
    require_close,
    require_logits,
    require_losses,
    require_near,
    require_run,
    train,
)  # fmt: skip
from tools.sweep.measure import of_block, short

#: Those that people run most.
FAMILIES = (
    "dbrx", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoehybrid", "hunyuan_v1_moe",
    "jamba", "lfm2_moe", "llama4", "minimax_m2", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_5_moe", "qwen3_moe", "qwen3_next",
)  # fmt: skip
WAYS, DTYPES = ("experts", "layers"), ("float32", "bfloat16")


def put(model: Any, way: str) -> Any:
    """The model with its experts on Moebius. Raises what our calls raise."""
    if way == "experts":
        moe_torch.transformers.use(model)
        return model
    for path, block in models.moe_blocks(model).items():
        keep = model.dtype == torch.bfloat16
        try:
            layer = MoE.from_block(block, model.config, block_router=keep)
        except Unsupported as refusal:
            if not str(refusal).startswith("block_router"):
                raise
            layer = MoE.from_block(block, model.config)
        stand_in(model, path, layer)
    return model


def stand_in(model: Any, path: str, layer: MoE) -> None:
    """Put a layer into the place of a block."""
    rows = torch.zeros(1, 1, layer.spec.d_model, dtype=model.dtype)
    with torch.no_grad():
        if isinstance(model.get_submodule(path)(rows), tuple):
            layer.register_forward_hook(lambda module, inputs, y: (y, None))
    model.set_submodule(path, layer)


def step(family: str, way: str, dtype: str, folder: Path) -> None:
    """Losses of a loop and all gradients."""
    for training in (True, False) if family in RANDOM else (True,):
        ours = train(put(fresh(family, dtype), way), prompts(family), training=training)
        if dtype == "float32" or not training or family not in RANDOM:  # what is drawn follows every rounding
            require_run("train", ours, family, dtype, training=training)


def routed(family: str, way: str, dtype: str, folder: Path) -> None:
    """A trace in a file gives equal logits, and a step of training with it the gradients."""
    model, ids = put(fresh(family, dtype), way), prompts(family)
    with capture() as recording:
        wanted = logits_of(model, ids)
    recording.trace().save(folder / "trace.safetensors")
    trace = RoutingTrace.load(folder / "trace.safetensors")
    with replay(trace):
        assert torch.equal(logits_of(model, ids), wanted), "replayed logits differ"
    _one_step(model, family, dtype, trace)


def rollout(family: str, way: str, dtype: str, folder: Path) -> None:
    """Ids of experts alone, as serving engines return them, in a step of training."""
    model, ids = put(fresh(family, dtype), way), prompts(family)
    with capture() as recording:
        logits_of(model, ids)
    served = torch.stack([layer.ids for layer in recording.layers], 1).numpy()
    num_experts = recording.layers[0].num_experts
    _one_step(model, family, dtype, RoutingTrace.from_routed_experts(served, num_experts=num_experts))


def _one_step(model: Any, family: str, dtype: str, trace: RoutingTrace) -> None:
    with replay(trace):
        loss = loss_of(model, prompts(family))
    loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    eager, exact = (judge(family, one, family not in RANDOM) for one in (dtype, "float64"))
    require_losses("replay", dtype, loss.detach()[None], eager.losses[:1], exact.losses[:1])
    require_close("replay", dtype, as_block(model, gradients), eager.gradients, exact.gradients)


def generate(family: str, way: str, dtype: str, folder: Path) -> None:
    """Tokens, with the model's cache."""
    ids = prompts(family)
    wanted, found = (generated(one, ids) for one in (fresh(family, dtype), put(fresh(family, dtype), way)))
    assert torch.equal(found, wanted), f"tokens {found.tolist()}, of eager transformers {wanted.tolist()}"


def publish(family: str, way: str, dtype: str, folder: Path) -> None:
    """A trained model is saved, published under both kinds of names, and transformers reloads its bits."""
    model = put(fresh(family, dtype), way)
    train(model, prompts(family), training=family not in RANDOM)
    model.save_pretrained(folder / "saved")
    again, state = loaded(fresh(family, dtype), folder / "saved"), model.state_dict()
    require_bits("reloaded", again.state_dict(), state)
    checkpoint = open_checkpoint(folder / "saved")
    if way == "experts":
        layers = [(number, LayerWeights.from_checkpoint(checkpoint.layer(number))) for number in checkpoint.moe_layers]
    else:
        layers = list(_exported(checkpoint, layers_of(model)))
    for storage in (None, "fused"):
        path, others = folder / f"published-{storage}", other_tensors(checkpoint)
        save_checkpoint(path, checkpoint.path, layers, storage=storage, other_tensors=others)
        require_bits("published", loaded(again, path).state_dict(), state)
    if dtype == "float32":  # a step in bfloat16 may lead to ties
        require_logits("reloaded", model, again, prompts(family))
    ours = put(loaded(again, folder / "published-None"), way)
    require_near("published", logits_of(ours, prompts(family)), logits_of(model, prompts(family)), dtype)


def _exported(checkpoint: Checkpoint, layers: dict[str, MoE]) -> Iterator[tuple[int, LayerWeights]]:
    """(number, weights) of layers. Shared experts beside a block are as in the checkpoint."""
    for number, layer in zip(checkpoint.moe_layers, layers.values(), strict=True):
        weights, read = layer.export_weights(), LayerWeights.from_checkpoint(checkpoint.layer(number))
        shared = convert_weights(read, weights.storage).shared
        yield number, weights if weights.shared is not None else dataclasses.replace(weights, shared=shared)


def quantise(family: str, way: str, dtype: str, folder: Path) -> None:
    """Converted checkpoints against eager transformers with the dequantised weights, in logits and a loop.

    experts: transformers loads the published format, and dequantises it on a CPU. layers: ours, on the stored bytes.
    """
    model = fresh(family, dtype)
    put(copy.deepcopy(model), way)
    model.save_pretrained(folder / "plain")
    plain, of_experts = open_checkpoint(folder / "plain"), ("mxfp4" if family == "gpt_oss" else "fp8_block",)
    for name in of_experts if way == "experts" else ("int8_row", "int4_row"):
        loader = "transformers" if way == "experts" else "moebius"
        convert_checkpoint(plain.path, folder / name, format_named(name), loader=loader)
        packed = open_checkpoint(folder / name)
        layers = [(number, packed.layer(number)) for number in packed.moe_layers]
        values = [(number, LayerWeights.from_checkpoint(layer.dequantized(dtype))) for number, layer in layers]
        save_checkpoint(folder / f"{name}-values", plain.path, values, other_tensors=other_tensors(plain))
        eager = loaded(model, folder / f"{name}-values")
        if way == "experts":
            ours = loaded(model, folder / name)
            require_bits(name, ours.state_dict(), eager.state_dict())
            put(ours, way)
        else:
            ours = fresh(family, dtype)
            for (path, block), (_, layer) in zip(models.moe_blocks(model).items(), layers, strict=True):
                _stand_in_quantised(ours, path, LayerWeights.from_checkpoint(layer), block)
        # Other weights have other ties.
        exact, ids = copy.deepcopy(eager).double(), prompts(family)
        if dtype == "bfloat16":
            ids = far_from_ties(copy.deepcopy(exact), eager)
        require_logits(name, ours, eager, ids)
        options: Any = {"training": family not in RANDOM, "logits": False}
        runs = [train(one, ids, **options) for one in (ours, eager, exact)]
        require_losses(name, dtype, *(one.losses for one in runs))
        names = runs[0].gradients.keys() & runs[1].gradients.keys()
        others = runs[1].gradients.keys() - names
        assert all("expert" in one or "shared" in one for one in others), others
        if dtype == "float32" or family not in RANDOM:  # SparseMixer's thresholds follow the rounding of logits
            require_close(name, dtype, *({one: run.gradients[one] for one in names} for run in runs))


def _stand_in_quantised(model: Any, path: str, weights: LayerWeights, block: Any) -> None:
    stand_in(model, path, layer := MoE.from_weights(of_block(weights, block)).eval())
    twin, plain = MoE.from_block(copy.deepcopy(block), model.config), dict(layer.named_parameters())
    kept = [name for name in plain if not name.startswith("shared_experts.")]
    if layer.storage.gate_layout != twin.storage.gate_layout:
        kept = [name for name in kept if name != "experts.gate_up_bias"]
    layer.block_arrays = tuple(one for one in twin.block_arrays if one.name in kept)


def adapt(family: str, way: str, dtype: str, folder: Path) -> None:
    """peft's LoRA of experts, routers and all linear layers: trained, saved, reloaded, merged, saved."""
    import peft  # type: ignore[import-not-found]

    base, ids = put(fresh(family, dtype), way), prompts(family)
    untrained = copy.deepcopy(base)
    torch.manual_seed(5)
    # Mamba's layers read weights past adapters, a block's router does not follow them, and transformers' routers have
    # one on their weight.
    excluded = r"dt_proj|mixer\.out_proj"
    if way == "experts" or any(hasattr(layer, "block_router") for layer in layers_of(base).values()):
        excluded += "|gate|router"
    targets: Any = {"target_parameters": _targets(base), "exclude_modules": rf".*\.({excluded})"}
    targets["target_modules"] = "all-linear"
    config = peft.LoraConfig(r=2, **targets)
    model: Any = peft.get_peft_model(base, config)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    # Small steps: in bfloat16 experts must stay far from ties.
    optimizer = torch.optim.Adam(trained.values(), 1e-3 if dtype == "float32" else 1e-5)
    for _ in range(STEPS):
        loss = loss_of(model, ids)
        loss.backward()
        found = {name: one.grad.clone() for name, one in trained.items() if one.grad is not None}
        judges = [_judge_adapters(model, untrained, family, one, ids) for one in (dtype, "float64")]
        require_losses("adapters", dtype, loss.detach()[None], *(one.losses for one in judges))
        require_close("adapters", dtype, found, *(one.gradients for one in judges))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    wanted = logits_of(model, ids)
    model.save_pretrained(folder / "adapter")
    again = peft.PeftModel.from_pretrained(untrained, folder / "adapter")
    held = dict(again.named_parameters())
    require_bits("reloaded adapters", {name: held[name] for name in trained}, trained)
    require_near("reloaded adapters", logits_of(again, ids), wanted, dtype)
    merged: Any = model.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    eager = loaded(merged, folder / "merged")
    require_bits("merged", eager.state_dict(), merged.state_dict())
    require_logits("merged", merged, eager, ids)
    require_near("merged", logits_of(merged, ids), wanted, dtype)


def _targets(model: Any) -> list[str]:
    """Experts' matrices, and routers of transformers."""
    layers, blocks = layers_of(model), {} if layers_of(model) else models.moe_blocks(model)
    names = [f"{path}.{name}" for path in layers for name in ("experts.gate_up", "experts.down")]
    for path, block in blocks.items():
        for name, one in block.named_parameters():
            if (name.startswith("experts.") and one.ndim == 3) or name in ("gate.weight", "router.weight"):
                names.append(f"{path}.{name}")
    return names


def _judge_adapters(adapted: Any, base: Any, family: str, dtype: str, ids: torch.Tensor) -> Run:
    """The loss of an eager model on W + s B A, and its gradients to A and B."""
    held = copy.deepcopy(adapted).to(getattr(torch, dtype))
    held.zero_grad()
    weights = {}
    for path, module in held.named_modules():
        if not hasattr(module, "get_delta_weight") or not hasattr(module, "lora_A") or not len(module.lora_A):
            continue
        name = path.removeprefix("base_model.model.").replace(".base_layer", "")
        name += "." + getattr(module, "parameter_name", "weight")
        weights[name] = base.get_parameter(name).detach().to(
            module.lora_A["default"].weight.dtype
        ) + module.get_delta_weight("default")
    loss = loss_of(fresh(family, dtype), ids, as_block(base, weights))
    loss.backward()
    gradients = {name: one.grad for name, one in held.named_parameters() if one.requires_grad and one.grad is not None}
    return Run(loss.detach()[None], gradients)


RECIPES: dict[str, Callable[[str, str, str, Path], None]] = {
    "train": step, "adapt": adapt, "replay": routed, "rollout": rollout, "generate": generate, "publish": publish,
    "quantise": quantise,
}  # fmt: skip


class Case(NamedTuple):
    family: str
    recipe: str
    way: str
    dtype: str


def every_case(family: str) -> list[Case]:
    return [Case(family, recipe, way, dtype) for recipe in RECIPES for way in WAYS for dtype in DTYPES]


def run(case: Case) -> str:
    """The reason why a recipe does not run, or nothing. Raises AssertionError where a result is wrong."""
    family, recipe, way, dtype = case
    with tempfile.TemporaryDirectory() as folder, moe_torch.cpu_engine("reference"):
        try:
            RECIPES[recipe](family, way, dtype, Path(folder))
        except (Unsupported, InvalidInput) as refusal:
            return short(str(refusal))
    return ""
