"""PEFT's LoRA of experts, on our op, see docs/user/lora.md.

PEFT adds scale B A to the whole weight in every forward. Here the op adds both products in one
sum. So a call copies no weights, and a backward makes no gradient of their size. Everything
else is PEFT's: add, switch, disable, merge, delete, save and load.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_torch.bridge.options import require_instance
from moe_torch.layers.lora.stages import LowRank
from moe_torch.layers.parameters import ExpertParameters

try:
    from peft.tuners.lora import layer as _layer
except ImportError as error:
    raise Unsupported(f"moe_torch.peft needs peft 0.19.1 or later, got: {error}; pip install 'peft>=0.19.1'") from error

_RANK_STEP = 16
#: A name of a parameter: its product.
_PRODUCTS = {"gate_up_proj": 1, "gate_up": 1, "up_proj": 1, "up": 1, "down_proj": 2, "down": 2}
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class _Part(NamedTuple):
    """Factors of one adapter: a `[E, in, r]` and b `[E, r, out]`, both views."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


# PEFT finds wrappers by the name of their class.
class ParamWrapper(_layer.ParamWrapper):
    """PEFT's wrapper of a parameter, which hands the factors of all wrappers of a module down to our op."""

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        initial = config.init_lora_weights
        if isinstance(initial, str) and initial.lower().startswith(_CHANGE_BASE):
            raise Unsupported(
                f"init_lora_weights must leave the experts' weights as they are, got {initial!r}; PEFT has no such "
                "initial values for parameters: choose True or 'gaussian'"
            )
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        wrappers = list(_chain(self))
        experts = self.get_base_layer()
        if _is_under_way(experts) or not _is_ours(experts):  # as after `set_experts_implementation("eager")`
            return super().forward(x, *args, **kwargs)
        reason = _why_materialised(wrappers, experts)
        if reason is not None:
            warnings.warn(f"PEFT adds its factors to whole weights in every forward, because {reason}", stacklevel=2)
            return super().forward(x, *args, **kwargs)
        self._check_forward_args(x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        parts: dict[str, list[_Part]] = {}
        for wrapper in wrappers:
            if wrapper.disable_adapters:
                if wrapper.merged:
                    wrapper.unmerge()
            elif not wrapper.merged:
                active = [_part(wrapper, name) for name in wrapper.active_adapters if name in wrapper.lora_A]
                if active:
                    parts[wrapper.parameter_name] = active
        if not parts:
            return experts(x, *args, **kwargs)
        return experts(x, *args, **kwargs, low_rank=_factors(parts, experts))


def _chain(wrapper: Any) -> Iterator[Any]:
    """The wrappers of one module, outermost first."""
    while isinstance(wrapper, _layer.ParamWrapper):
        yield wrapper
        wrapper = wrapper.base_layer


def _is_under_way(experts: Any) -> bool:
    """True inside a call that an outer wrapper gave back to PEFT."""
    proxies = (_layer._LoraParameterProxy, _layer._LoraFactorsProxy)
    lists = getattr(experts, "parametrizations", {}).values()
    return any(isinstance(one, proxies) for parametrizations in lists for one in parametrizations)


def _why_materialised(wrappers: list[Any], experts: Any) -> str | None:
    for wrapper in wrappers:
        if wrapper.parameter_name not in _PRODUCTS:
            return f"{wrapper.parameter_name} is no matrix of experts; leave it out of target_parameters"
    hooked = [one for one in wrappers[1:] if one._forward_hooks or one._forward_pre_hooks]
    if hooked and not any(_is_peft_hook(one) for one in hooked):
        return f"the wrapper of {hooked[0].parameter_name} has hooks; put them on the experts"
    if hasattr(experts, "parametrizations"):
        return "the experts have parametrizations; remove them"
    if hasattr(experts, "down_proj_scale_inv"):
        return "fp8 experts quantise their rows; use layers with adapters of their own"
    return None


def _is_peft_hook(wrapper: Any) -> bool:
    """Hooks of mixed batches, which the wrapper refuses anyway."""
    names = {getattr(getattr(hook, "func", hook), "__module__", "") for hook in wrapper._forward_pre_hooks.values()}
    return not wrapper._forward_hooks and all(name.startswith("peft.") for name in names)


def _part(wrapper: Any, adapter: str) -> _Part:
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    experts = wrapper.num_experts
    a = a.view(experts, -1, a.shape[-1]).transpose(1, 2)
    b = b.view(len(b), -1, experts).permute(2, 1, 0)
    return _Part(a, b, wrapper.scaling[adapter])


def _factors(parts: dict[str, list[_Part]], experts: Any) -> LowRank:
    """One adapter of all active ones: their ranks next to one another, with one scale."""
    scale = next(iter(parts.values()))[0].scale or 1.0
    # Separate matrices of gate and up: b has the columns of gate, then those of up.
    separate = isinstance(experts, ExpertParameters) and experts.up is not None
    sides: dict[str, list[torch.Tensor]] = {}
    for name, some in parts.items():
        number = _PRODUCTS[name]
        for part in some:
            b = part.b if part.scale == scale else part.b * (part.scale / scale)
            if separate and number == 1:
                width = b.shape[-1]
                b = torch.nn.functional.pad(b, (width, 0) if name == "up" else (0, width))
            sides.setdefault(f"a{number}", []).append(part.a)
            sides.setdefault(f"b{number}", []).append(b)
    return LowRank(**{side: _joined(some, 2 if side[0] == "a" else 1) for side, some in sides.items()}, scale=scale)


def _joined(factors: list[torch.Tensor], axis: int) -> torch.Tensor:
    """Factors along their ranks, with zeros up to a multiple of 16."""
    shape = list(factors[0].shape)
    shape[axis] = -sum(factor.shape[axis] for factor in factors) % _RANK_STEP
    if len(factors) == 1 and not shape[axis]:
        return factors[0]
    return torch.cat([*factors, factors[0].new_zeros(shape)], axis)


def _is_ours(experts: Any) -> bool:
    config = getattr(experts, "config", None)
    return isinstance(experts, ExpertParameters) or getattr(config, "_experts_implementation", None) == "moebius"


class Native:
    """The changes of `native`, which leaving the context undoes. wrappers: number of PEFT's that run on Moebius."""

    def __init__(self, changed: list[Any], wrappers: int) -> None:
        self._changed, self.wrappers = changed, wrappers

    def __enter__(self) -> Native:
        return self

    def __exit__(self, *error: object) -> None:
        for wrapper in self._changed:
            wrapper.__class__ = _layer.ParamWrapper


def native(model: torch.nn.Module) -> Native:
    """Run PEFT's adapters of a model's experts on our ops, from now on or, as a context manager, in a block.

    model: with adapters of PEFT. `moe_torch.transformers.use(model)` does it, too, for a model that has adapters.
    Adapters that are added later count, and several active ones add up. Results equal PEFT's
    within rounding, and files are PEFT's.

    Raises InvalidInput for a model without adapters of experts' parameters, Unsupported for experts that do not run on
    Moebius. A call that our ops cannot take warns, and runs as PEFT's.
    """
    require_instance("model", model, torch.nn.Module)
    wrappers = {path: one for path, one in model.named_modules() if isinstance(one, _layer.ParamWrapper)}
    # Others wrap weights of routers, such as [E, D].
    mine = {path: one for path, one in wrappers.items() if one.num_experts > 1 or _is_ours(one.get_base_layer())}
    if not mine:
        raise InvalidInput(
            "model must have adapters of experts' parameters, got none; call peft.get_peft_model with "
            "target_parameters such as mlp.experts.gate_up_proj first"
        )
    for path, wrapper in mine.items():
        if not _is_ours(wrapper.get_base_layer()):
            raise Unsupported(
                f"the experts with adapters must run on Moebius, got {path} of "
                f"{type(wrapper.get_base_layer()).__name__}; call moe_torch.transformers.use(model) first"
            )
    changed = [one for one in mine.values() if type(one) is _layer.ParamWrapper]
    for wrapper in changed:
        wrapper.__class__ = ParamWrapper
    return Native(changed, len(mine))
