"""A case on JAX arrays, as one compiled program for each set of shapes and options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch

import moe_jax
import moe_torch
from moe_core.specs.operands import LoRAFactors
from moe_jax import layers
from tools.fuzz.case import Case
from tools.fuzz.data import is_parameter
from tools.fuzz.engines import OPS, Results, device_of, layer_name, layer_spec, routed_ids, running_on, trained


def run(case: Case, arrays: Mapping[str, torch.Tensor], engine: str) -> Results:
    """The outputs by name, and the gradients as `d name`."""
    device = jax.devices("cuda" if engine == "cuda" else "cpu")[0]
    wide = case.dtype == "float64" or case.ids_dtype == "int64"
    with running_on(engine), jax.enable_x64(wide), jax.default_device(device):
        found = program(case.static, engine)({name: to_jax(array) for name, array in arrays.items()})
        return {name: to_torch(array, device_of(engine)) for name, array in found.items() if array is not None}


def to_jax(tensor: torch.Tensor) -> jax.Array:
    if tensor.numel() == 0:
        return jnp.zeros(tensor.shape, str(tensor.dtype).removeprefix("torch."))
    return moe_jax.from_dlpack(tensor.contiguous())


def to_torch(array: jax.Array, device: str) -> torch.Tensor:
    if array.size == 0:
        return torch.zeros(array.shape, dtype=getattr(torch, array.dtype.name), device=device)
    return moe_torch.from_dlpack(array)


@functools.lru_cache(maxsize=64)
def program(case: Case, engine: str) -> Callable[..., Any]:
    """The compiled function of a dict of arrays; engine: whose trace it is."""
    del engine
    return jax.jit(functools.partial(_outputs_and_gradients, case))


def _outputs_and_gradients(case: Case, arrays: dict[str, Any]) -> dict[str, Any]:
    call = functools.partial(_layer if case.kind == "layer" else _op, case)
    if not case.gradient:
        return call(arrays)
    names = trained(case, arrays)
    if case.kind == "layer":
        names = [name for name in names if name in ("x", "gate_inputs") or is_parameter(name)]

    factors = {"load_balance_loss": case.balance, "z_loss": case.z}
    losses = {name: factor for name, factor in factors.items() if factor}

    def objective(own: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        outputs = call(arrays | own)
        wanted = [outputs[name] for name in ("output", "weights") if f"d_{name}" in arrays]
        return wanted + [outputs[name] for name in losses], outputs

    _, pull, found = jax.vjp(objective, {name: arrays[name] for name in names}, has_aux=True)
    flowing = [arrays[f"d_{name}"] for name in ("output", "weights") if f"d_{name}" in arrays]
    flowing += [jnp.asarray(factor, found[name].dtype) for name, factor in losses.items()]
    (gradients,) = pull(flowing)
    if case.kind == "layer" and case.stack:
        index = arrays["experts.layer_index"][0]
        gradients = {
            name: of_layer(one, index) if is_parameter(name) else one for name, one in gradients.items()
        }  # fmt: skip
    return found | {f"d {name}": gradient for name, gradient in gradients.items()}


def of_layer(gradient: jax.Array, index: jax.Array) -> jax.Array:
    """The part of one layer of a stack, NaN where another layer has a gradient as well."""
    others = jnp.arange(len(gradient)).reshape(-1, *[1] * (gradient.ndim - 1)) != index
    stray = (others & (gradient != 0)).any()
    return jnp.where(stray, jnp.nan, gradient[index]).astype(gradient.dtype)


def _op(case: Case, arrays: dict[str, Any]) -> dict[str, Any]:
    return OPS[case.kind](case, moe_jax.ops, arrays)


def _layer(case: Case, arrays: dict[str, Any]) -> dict[str, Any]:
    spec = layer_spec(case)
    named = {layer_name(name): array for name, array in arrays.items() if is_parameter(name)}
    if case.router_layout == "out_in":  # Flax stores [D, E]
        named["router.weight"] = named["router.weight"].swapaxes(-1, -2)
    tree = layers.nested((leaf.path, named[leaf.parameter.name]) for leaf in layers.leaves(spec))
    dtype = jnp.dtype(case.dtype)
    options: dict[str, Any] = {"token_mask": arrays.get("token_mask")}
    options["routed_by"] = layers.RoutedBy(arrays.get("gate_inputs"), arrays.get("ids"), arrays.get("input_ids"))
    options["layer_index"] = arrays.get("experts.layer_index")
    if case.adapters:
        factors = LoRAFactors(**{name[5:]: array for name, array in arrays.items() if name.startswith("lora.")})
        options["adapters"] = layers.Adapters(factors, arrays.get("adapter_ids"))
    y, aux = layers.forward(tree, arrays["x"], spec, dtype=dtype, return_aux=True, **options)
    found = {"output": y} | aux._asdict()
    if case.capacity or case.tile:
        logits = jax.lax.stop_gradient(aux.logits)
        if case.stack and case.correction_bias:
            arrays = arrays | {"correction_bias": arrays["correction_bias"][arrays["experts.layer_index"][0]]}
        found["routed_ids"] = routed_ids(case, moe_jax.ops, arrays, logits)
    return found
