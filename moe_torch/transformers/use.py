"""Put a model's experts on Moebius, or report why not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers.integrations import mxfp4
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

from moe_core.errors import InvalidInput, Unsupported
from moe_core.specs.tuning import Tuning
from moe_torch.bridge.options import require_instance
from moe_torch.transformers.activations import NAME
from moe_torch.transformers.experts import (
    OPTIONS,
    ExpertsOptions,
    align_weights,
    has_interface,
    register,
    why_unsupported,
)
from moe_torch.transformers.mxfp4 import Mxfp4Experts

#: Routed experts that bypass the experts interface.
_EXPERTS = re.compile(r"(?<!Shared)(Experts|MoE|Moe)$")


@dataclass(frozen=True)
class Report:
    """modules: paths of the experts modules. copied: number of weights copied to aligned memory."""

    modules: tuple[str, ...]
    copied: int
    options: ExpertsOptions

    def __str__(self) -> str:
        return f"{len(self.modules)} experts modules run on Moebius ({self.copied} weights copied to aligned memory)"


def use(
    model: torch.nn.Module,
    *,
    recompute: bool = False,
    tuning: Tuning | None = None,
    allow_tf32: bool = False,
    batch_invariant: bool = False,
    main_grad: bool = False,
) -> Report:
    """Run every experts module of a Hugging Face model on Moebius from now on.

    model: of transformers, or a module around one. The other arguments are as in `moe_torch.MoESpec`, and
    batch_invariant as in its tuning. Calling `use` again replaces them. Modules of mxfp4 gpt-oss are replaced by ours
    with the same bytes. PEFT's adapters of experts run on our ops, as `moe_torch.peft.native` makes them.

    Raises Unsupported, and changes nothing, if any routed experts of the model would not run, naming each kind of
    module, its first path and the reason. Raises InvalidInput for a model without experts.
    """
    require_instance("model", model, torch.nn.Module)
    options = ExpertsOptions(recompute, tuning, allow_tf32, batch_invariant, main_grad)
    modules = dict(model.named_modules())
    swapped = {path: module for path, module in modules.items() if isinstance(module, Mxfp4Experts)}
    packed = {path: module for path, module in modules.items() if isinstance(module, Mxfp4GptOssExperts)}
    ours = {path: module for path, module in modules.items() if has_interface(module)}
    reasons: dict[type, str] = {}
    for path, module in modules.items():
        if module in packed.values():
            continue
        reason = why_unsupported(module, options) if path in ours else _why_outside(module)
        if reason is not None:
            reasons.setdefault(type(module), f"{path} ({type(module).__name__}): {reason}")
    frozen = packed | swapped
    if frozen and (recompute or main_grad):
        path = next(iter(frozen))
        reasons[Mxfp4GptOssExperts] = f"{path}: experts in mxfp4 are frozen; leave recompute and main_grad out"
    if reasons:
        kinds = "; ".join(reasons.values())
        raise Unsupported(
            f"the experts of {type(model).__name__} must all run on Moebius, got {kinds}; change what each reason names"
        )
    if not ours and not frozen:
        raise InvalidInput(f"model must have experts, got a {type(model).__name__} with none; leave it as it is")
    # Raises before anything else changes.
    copied = align_weights(model)
    ours |= swapped
    for path, module in packed.items():
        ours[path] = Mxfp4Experts(module)
        model.set_submodule(path, ours[path])
        # Before 5.23, transformers' forward of mxfp4 blocks routes by its own kernels.
        block, forward = model.get_submodule(path.rpartition(".")[0]), getattr(mxfp4, "mlp_forward", None)
        if forward is not None and getattr(block.__dict__.get("forward"), "__func__", None) is forward:
            del block.forward
    register()
    set_implementation: Any = getattr(model, "set_experts_implementation", None)
    if set_implementation is not None:
        set_implementation(NAME)
    for module in ours.values():
        setattr(module, OPTIONS, options)
        config: Any = getattr(module, "config", None)
        if config is not None and config._experts_implementation != NAME:
            config._experts_implementation = NAME
    if any(type(module).__name__ == "ParamWrapper" and module.num_experts != 1 for module in modules.values()):
        # PEFT imports slowly.
        from moe_torch.peft import native

        native(model)
    order = tuple(path for path in modules if path in ours)
    return Report(order, copied, options)


def _why_outside(module: torch.nn.Module) -> str | None:
    """None: modules that are no experts."""
    if not _EXPERTS.search(type(module).__name__) or isinstance(module, Mxfp4Experts):
        return None
    if any(has_interface(part) or isinstance(part, (Mxfp4GptOssExperts, Mxfp4Experts)) for part in module.modules()):
        return None
    return (
        "transformers computes it outside of its experts interface and ignores experts_implementation; keep "
        "transformers' own experts, or replace the block by moe_torch.MoE.from_block where the family has a preset"
    )
