"""A live MoE block of a Hugging Face model as a layer on the same weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from moe_core.checkpoint.presets import layer_spec_from_config
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import MoELayerSpec, SharedExpertsSpec, Storage
from moe_torch.bridge.options import require_instance

#: What blocks call their shared experts.
_SHARED = ("shared_experts", "shared_expert", "shared_mlp")
#: The layer's arrays -> the names that blocks have for them. A shared expert's gate_up may be two tensors instead.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "router.weight": ("gate.weight", "router.weight", "router.gate.weight", "gate.wg.weight"),
    "router.bias": ("gate.bias", "router.bias"),
    "router.correction_bias": (
        "gate.e_score_correction_bias",
        "e_score_correction_bias",
        "gate.moe_statics.e_score_correction_bias",
        "expert_bias",
    ),
    "experts.gate_up": ("experts.gate_up_proj", "experts.up_proj"),
    "experts.down": ("experts.down_proj",),
    "experts.gate_up_bias": ("experts.gate_up_proj_bias", "experts.up_proj_bias"),
    "experts.down_bias": ("experts.down_proj_bias",),
    "shared_experts.gate_up": tuple(f"{name}.gate_up_proj.weight" for name in _SHARED),
    "shared_experts.down": tuple(f"{name}.down_proj.weight" for name in _SHARED),
    "shared_experts.gate": ("shared_expert_gate.weight",),
}
#: Experts without transformers' experts interface, whose flags say how weights lie -> how they do.
_LAYOUTS = {"Llama4TextExperts": ("in_out", "halves"), "Step3p7Experts": ("out_in", "halves")}


class BlockWeights(NamedTuple):
    """tensors: by the layer's names; those of `copied` are new, the others are the block's own."""

    spec: MoELayerSpec
    tensors: dict[str, torch.Tensor]
    copied: tuple[str, ...]


def block_weights(block: torch.nn.Module, config: Any) -> BlockWeights:
    """What a layer that takes the place of `block` is, and its parameters; see `MoE.from_block`."""
    require_instance("block", block, torch.nn.Module)
    experts = getattr(block, "experts", None)
    if experts is None:
        children = ", ".join(name for name, _ in block.named_children()) or "no submodule"
        raise InvalidInput(
            f"block must be an MoE block with submodules experts and gate or router, got {type(block).__name__} with "
            f"{children}; pass one such as model.model.layers[0].mlp"
        )
    if config is None:
        config = getattr(block, "config", None) or getattr(experts, "config", None)
    if config is None:
        raise InvalidInput(
            f"config must be given for {type(block).__name__}, which does not keep its own, got None; pass model.config"
        )
    preset, own = layer_spec_from_config(config), _tensors(block)
    tensors = {name: own.pop(found) for name, names in _NAMES.items() for found in names if found in own}
    for name in ("router.weight", "experts.gate_up", "experts.down"):
        if name not in tensors:
            raise Unsupported(
                f"block must hold {name} as {' or '.join(_NAMES[name])}, got {type(block).__name__} without it; its "
                "weights cannot be shared"
            )
    storage, copied = _storage(experts), []
    _shared(own, tensors, copied, storage)
    if own:
        raise Unsupported(
            f"block must hold a router, experts and shared experts only, got {type(block).__name__} with "
            f"{', '.join(own)}; the layer does not compute with it: keep the block, and run its experts by "
            "moe_torch.transformers"
        )
    spec = _spec(preset, tensors, storage)
    bias = tensors.get("router.correction_bias")
    if bias is not None:
        tensors["router.correction_bias"] = bias.detach().reshape(-1).float()
        if bias.dtype != torch.float32:
            copied.append("router.correction_bias")
    wanted = {parameter.name: parameter.shape for parameter in spec.parameters(storage)}
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if given != wanted:
        differing = [name for name in {**wanted, **given} if wanted.get(name) != given.get(name)]
        listed = ", ".join(f"{name} {given.get(name, 'none')} for {wanted.get(name, 'none')}" for name in differing)
        raise InvalidInput(
            f"block must have the parts that config says, got {type(block).__name__} with {listed}; pass the config "
            "that the block was made with"
        )
    return BlockWeights(spec, tensors, tuple(copied))


def _tensors(block: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(block.named_parameters()), **dict(block.named_buffers())}


def _storage(experts: Any) -> Storage:
    """How the weights lie, as the experts themselves say."""
    kind = type(experts).__name__
    if hasattr(experts, "is_transposed") and hasattr(experts, "is_concatenated"):
        gate_layout = "halves" if experts.is_concatenated else "interleaved"
        return Storage("in_out" if experts.is_transposed else "out_in", gate_layout, "out_in")
    if kind not in _LAYOUTS:
        raise Unsupported(
            f"block.experts must say how its weights lie (is_transposed, is_concatenated), got {kind}, which does not; "
            "make the layer by MoE.from_spec and load its weights"
        )
    return Storage(*_LAYOUTS[kind], "out_in")


def _shared(own: dict[str, Any], tensors: dict[str, Any], copied: list[str], storage: Storage) -> None:
    """Move the shared experts' matrices from `own` to `tensors`; those that the storage has otherwise are copied."""
    down = tensors.get("shared_experts.down")
    if down is None:
        return
    for prefix in _SHARED:
        gate, up = (own.pop(f"{prefix}.{name}_proj.weight", None) for name in ("gate", "up"))
        if gate is not None and up is not None:
            whole = torch.cat([gate.detach(), up.detach()])
            if storage.gate_layout == "interleaved":
                whole = torch.stack([gate.detach(), up.detach()], 1).flatten(0, 1)
            tensors["shared_experts.gate_up"] = torch.nn.Parameter(whole, requires_grad=gate.requires_grad)
            copied.append("shared_experts.gate_up")
        elif up is not None:
            tensors["shared_experts.gate_up"] = up
    if storage.weight_layout == "in_out":
        for name in ("gate_up", "down", "gate"):
            whole = tensors.get(f"shared_experts.{name}")
            if whole is not None:
                turned = whole.detach().t().contiguous()
                tensors[f"shared_experts.{name}"] = torch.nn.Parameter(turned, requires_grad=whole.requires_grad)
                copied.append(f"shared_experts.{name}")


def _spec(preset: MoELayerSpec, tensors: Mapping[str, torch.Tensor], storage: Storage) -> MoELayerSpec:
    """The preset with the block's own sizes, storage and shared experts, which a model may have beside its block."""
    num_experts, d_model = tensors["router.weight"].shape
    width_axis = -2 if storage.weight_layout == "in_out" else -1
    shared, down = None, tensors.get("shared_experts.down")
    if down is not None:
        shared = SharedExpertsSpec(down.shape[width_axis], "shared_experts.gate" in tensors)
    d_ff = tensors["experts.down"].shape[width_axis]
    sizes = {"d_model": d_model, "d_ff": d_ff, "num_experts": num_experts}
    return dataclasses.replace(preset.stored_as(storage), shared_experts=shared, **sizes)
