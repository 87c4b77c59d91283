"""Classes for vLLM's kernel, made of ours."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from moe_core.errors import InvalidInput, Unsupported
from moe_torch.modular.experts import FusedMoEPermuteExpertsUnpermute
from moe_torch.modular.newest.experts import FusedMoEExperts
from moe_torch.modular.newest.lora import LoRAExpertsMixin
from moe_torch.modular.prepare_finalize import (
    BatchedPrepareAndFinalize,
    FusedMoEPrepareAndFinalize,
    MoEPrepareAndFinalizeNoEP,
)
from moe_torch.modular.vllm.experts import AdaptedExperts
from moe_torch.modular.vllm.prepare_finalize import AdaptedPrepareAndFinalize

#: vLLM's base -> the first base of adapted classes.
_FIRST: dict[str, Any] = {
    "FusedMoEExpertsModular": AdaptedExperts,
    "FusedMoEPrepareAndFinalizeModular": AdaptedPrepareAndFinalize,
}


def _kernels() -> Any:
    try:
        from vllm.model_executor.layers.fused_moe import modular_kernel  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Unsupported(f"vllm must be installed to adapt classes to its kernel, got {error!r}; install it") from None
    return modular_kernel


def adapt(cls: type, *configs: Any, **options: Any) -> Any:
    """Return the class for vLLM's `FusedMoEKernel`.

    cls: this library's experts or a class derived from them, MoEPrepareAndFinalizeNoEP or BatchedPrepareAndFinalize.
    Adapted experts are made as vLLM makes experts: `(moe_config, quant_config)`, and for the batched format
    max_num_tokens and num_dispatchers. configs: vLLM's FusedMoEConfig, its FusedMoEQuantConfig or both, to check now
    and not only when an object is made. options: keywords of the constructor of cls, such as tuning. Raises Unsupported
    for classes and configurations that do not run, with the reason.
    """
    if not isinstance(cls, type):
        raise InvalidInput(f"cls must be a class, got {type(cls).__name__}; pass its class")
    if issubclass(cls, (MoEPrepareAndFinalizeNoEP, BatchedPrepareAndFinalize)):
        if configs or options:
            raise InvalidInput(f"configs and options must be left out for {cls.__name__}; pass them to its objects")
        return _adapted("FusedMoEPrepareAndFinalizeModular", cls, _kernels())
    if issubclass(cls, FusedMoEPermuteExpertsUnpermute) and not inspect.isabstract(cls):
        adapted = _adapted("FusedMoEExpertsModular", cls, _kernels(), **options)
        adapted.require(*configs)
        return adapted
    reason = "is no class of this library's experts"
    if issubclass(cls, FusedMoEPrepareAndFinalize):
        reason = "exchanges tokens between ranks, for which vLLM has its classes"
    elif issubclass(cls, FusedMoEExperts):
        reason = "is abstract" if inspect.isabstract(cls) else "takes the router's logits"
    raise Unsupported(
        f"cls must be experts, or prepare and finalize of one device, got {cls.__name__}, which {reason}"
        "; pass another class"
    )


@functools.cache
def _adapted(kind: str, cls: type, kernels: Any, **options: Any) -> Any:
    bases = (_FIRST[kind], cls, getattr(kernels, kind))
    if issubclass(cls, LoRAExpertsMixin) and (mixin := _their_mixin()) is not None:
        bases += (mixin,)  # which owners of layers with adapters ask for
    names = {"base": cls, "options": options, "kernels": kernels, "__doc__": cls.__doc__, "__module__": cls.__module__}
    return type(cls.__name__, bases, names)


def _their_mixin() -> Any:
    try:
        from vllm.model_executor.layers.fused_moe.experts import (  # pyright: ignore[reportMissingImports]
            lora_experts_mixin,
        )
    except ImportError:  # of older releases
        return None
    return lora_experts_mixin.LoRAExpertsMixin
