"""A case on torch tensors."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch

import moe_torch
from tools.fuzz.case import Case
from tools.fuzz.data import is_parameter, one_layer
from tools.fuzz.engines import (
    OPS,
    Results,
    layer_name,
    layer_spec,
    layer_weights,
    lora_of,
    routed_ids,
    running_on,
    trained,
)

_VIEWS = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
}


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype in _VIEWS:
        view, dtype = _VIEWS[tensor.dtype]
        return tensor.view(view).numpy().view(dtype)
    return tensor.numpy()


def run(case: Case, arrays: Mapping[str, torch.Tensor], engine: str) -> Results:
    """The outputs by name, and the gradients as `d name`."""
    with running_on(engine):
        if case.kind == "layer":
            case, arrays = one_layer(case, arrays)
            layer = layer_of(case, arrays)
            found = step(case, arrays, layer, dict(layer.named_parameters()))
            if case.capacity or case.tile:
                found["routed_ids"] = routed_ids(case, moe_torch.ops, arrays, found["logits"])
            return found
        names = trained(case, arrays) if case.gradient else []
        inputs = dict(arrays) | {name: arrays[name].detach().requires_grad_() for name in names}
        give_main_grads(inputs, arrays)
        with torch.set_grad_enabled(case.gradient):
            outputs = OPS[case.kind](case, moe_torch.ops, inputs)
        return results_of(case, outputs, arrays, {name: inputs[name] for name in names})


def results_of(case: Case, outputs: Mapping[str, Any], arrays: Mapping[str, torch.Tensor], inputs: Any) -> Results:
    """The outputs of an op, and the gradients of its trained inputs."""
    found = _detached(outputs)
    if not case.gradient:
        return found
    pairs = [(outputs[name], arrays[f"d_{name}"]) for name in ("output", "weights") if f"d_{name}" in arrays]
    return found | _gradients(pairs, inputs)


def _detached(outputs: Mapping[str, Any]) -> Results:
    return {name: array.detach() for name, array in outputs.items() if array is not None}


def give_main_grads(inputs: Mapping[str, torch.Tensor], arrays: Mapping[str, torch.Tensor]) -> None:
    """What the backward adds the gradients of matrices to, in the attribute that Megatron has for it."""
    for name in inputs:
        if f"main_grad.{name}" in arrays:
            inputs[name].main_grad = arrays[f"main_grad.{name}"].clone()  # type: ignore[attr-defined]


def _gradients(pairs: list[tuple[torch.Tensor, torch.Tensor]], inputs: Mapping[str, torch.Tensor]) -> Results:
    outputs, flowing = zip(*pairs, strict=True)
    if any(hasattr(own, "main_grad") for own in inputs.values()):
        for own in inputs.values():
            own.grad = None
        torch.autograd.backward(outputs, flowing)
        given = {name: getattr(own, "main_grad", own.grad) for name, own in inputs.items()}
        assert all(own.grad is None for own in inputs.values() if hasattr(own, "main_grad"))
        return {f"d {name}": torch.zeros_like(inputs[name]) if one is None else one for name, one in given.items()}
    found = torch.autograd.grad(outputs, tuple(inputs.values()), flowing, allow_unused=True)
    zeros = (torch.zeros_like(own) if one is None else one for own, one in zip(inputs.values(), found, strict=True))
    return {f"d {name}": gradient for name, gradient in zip(inputs, zeros, strict=True)}


def layer_of(case: Case, arrays: Mapping[str, torch.Tensor]) -> Any:
    """The layer of a case with its weights, frozen."""
    layer = moe_torch.MoE.from_spec(layer_spec(case), device=arrays["x"].device, dtype=getattr(torch, case.dtype))
    own = {name: array for name, array in arrays.items() if is_parameter(name) and not name.startswith("lora.")}
    if case.dtype == "float64":  # which LayerWeights do not hold
        for name, tensor in {**dict(layer.named_parameters()), **dict(layer.named_buffers())}.items():
            given = next(array for field, array in own.items() if layer_name(field) == name)
            is_turned = name == "router.weight" and case.router_layout == "in_out"
            tensor.data.copy_(given.T if is_turned else given)
    else:
        layer.load_weights(layer_weights(case, {name: _to_numpy(array) for name, array in own.items()}))
    if lora := lora_of(case):
        slots = layer.add_lora(lora)
        for name, tensor in {**slots.present(), "scale": slots.scale, "ranks": slots.ranks}.items():
            tensor.data.copy_(arrays[f"lora.{name}"])
    return layer.requires_grad_(False)


def step(
    case: Case,
    arrays: Mapping[str, torch.Tensor],
    layer: Any,
    parameters: Mapping[str, Any],
    more: Mapping[str, Any] = types.MappingProxyType({}),
) -> Results:
    """What a call of a layer, or of something around it, returns, and its gradients. more: others that have one."""
    rows = {name: arrays[name].clone() for name in ("x", "gate_inputs") if name in arrays}
    rows = {name: own.requires_grad_(case.gradient) for name, own in rows.items()}
    others = {"gate_inputs": rows.get("gate_inputs"), "expert_ids": arrays.get("ids")}
    others |= {name: arrays.get(name) for name in ("input_ids", "adapter_ids")}
    names = [name for name in trained(case, arrays) if is_parameter(name)] if case.gradient else []
    wanted = {name: parameters[layer_name(name)].requires_grad_() for name in names} | dict(more)
    give_main_grads(wanted, arrays)
    with torch.set_grad_enabled(case.gradient):
        y, aux = layer(rows["x"], arrays.get("token_mask"), **others, return_aux=True)
        found = _detached({"output": y} | aux._asdict())
        if case.gradient:
            pairs = [(y, arrays["d_output"]), (aux.weights, arrays["d_weights"])]
            for loss, factor in ((aux.load_balance_loss, case.balance), (aux.z_loss, case.z)):
                pairs += [(loss, torch.full_like(loss, factor))] if factor else []
            pairs = [pair for pair in pairs if pair[0].requires_grad]
            found |= _gradients(pairs, rows | wanted)
            if case.router_layout == "in_out" and "d routing.weight" in found:  # torch stores [E, D]
                found["d routing.weight"] = found["d routing.weight"].T.contiguous()
    return found
