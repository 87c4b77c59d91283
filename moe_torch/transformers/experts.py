"""The forward of experts modules."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, replace
from importlib import util
from typing import Any

import torch

from moe_core.base.checks import require_flags, require_kind
from moe_core.base.dtypes import ID_DTYPES, MATMUL_DTYPES, ROUTER_WEIGHT_DTYPES
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format
from moe_core.specs import Activation, MoESpec
from moe_core.specs.operands import ExpertWeights, TopK
from moe_core.specs.tuning import Tuning
from moe_torch.bridge.arrays import align, package_of
from moe_torch.bridge.operator import call_first
from moe_torch.bridge.options import DTYPE_NAMES, TORCH_DTYPES
from moe_torch.bridge.private import transforming
from moe_torch.layers.casts import autocast_device
from moe_torch.layers.lora.stages import LowRank, run_stages
from moe_torch.operators.requests import moe_request

try:
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from moe_torch.transformers.activations import NAME, activation_of, unsupported
except ImportError as error:
    raise Unsupported(
        f"moe_torch.transformers needs transformers 5.17 or later, got: {error}; pip install 'transformers>=5.17'"
    ) from error
from moe_torch.transformers.fp8 import fp8_weights
from moe_torch.transformers.subclasses import subclass_weights

OPTIONS = "moebius_options"


@dataclass(frozen=True)
class ExpertsOptions:
    """Fields of `moe_torch.MoESpec`. batch_invariant: of the tuning."""

    recompute: bool = False
    tuning: Tuning | None = None
    allow_tf32: bool = False
    batch_invariant: bool = False
    main_grad: bool = False

    def __post_init__(self) -> None:
        require_flags(self, "recompute", "allow_tf32", "batch_invariant", "main_grad")
        require_kind("tuning", self.tuning, Tuning, optional=True)
        if self.batch_invariant:
            object.__setattr__(self, "tuning", replace(self.tuning or Tuning(), batch_invariant=True))


_DEFAULTS = ExpertsOptions()
_ID_DTYPES = tuple(TORCH_DTYPES[name] for name in ID_DTYPES)
_WEIGHT_DTYPES = tuple(TORCH_DTYPES[name] for name in ROUTER_WEIGHT_DTYPES)


def register() -> None:
    """Register `experts_implementation="moebius"` and `DistributedConfig(ep_implementation="moebius")` in transformers.

    Calling it again changes nothing. transformers accepts the name for every model, even if its experts never read it:
    `use` raises there. Experts that cannot run on Moebius raise Unsupported when they are called.
    """
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    # Before 5.23 transformers lacks these names.
    if torch.distributed.is_available() and util.find_spec("transformers.distributed.expert_parallel"):
        importlib.import_module("moe_torch.transformers.parallel")


def has_interface(module: torch.nn.Module) -> bool:
    """True if transformers selects the module's forward by its config's experts_implementation."""
    return {"has_gate", "is_transposed"} <= vars(module).keys()  # PEFT's wrappers have their module's attributes


def align_weights(model: torch.nn.Module) -> int:
    """Copy expert weights to addresses that are multiples of 16 bytes, and return the number of copies.

    transformers leaves stacked weights in the mapped file on a CPU, at other addresses. The first eager forward and
    `use` copy them. Call this before a compiled first forward. Parameters stay the same objects.

    Raises InvalidInput for misaligned views of a flat buffer, which copies would leave.
    """
    return sum(_align(module) for module in model.modules() if has_interface(module))


def _align(experts: torch.nn.Module) -> int:
    return sum([align(name, weight) for name, weight in experts.named_parameters(recurse=False)])


def experts_forward(
    experts: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    low_rank: LowRank | None = None,
) -> torch.Tensor:
    """Run an experts module of transformers: output `[T, D]` in the dtype of hidden_states.

    experts: a class decorated with transformers' `use_experts_implementation`. Its flags give the layout of weights.
    hidden_states: `[T, D]`, cast to the weights' dtype. top_k_index: `[T, K]` integers. Numbers outside [0, E) are no
    expert (transformers' mark of another process's experts). top_k_weights: `[T, K]`.

    Under `torch.autocast` hidden_states, weights and output have autocast's dtype, and gradients the weights' own. fp8
    weights (`FP8Experts`) run in fp8. Hidden states are quantised as the model says, unless these or top_k_weights need
    a gradient. torchao's int8 and float8 weights run on their own bytes, and hidden states as they are. Experts with
    `has_post_expert_norm` run as several operators, and so do those with low_rank, factors of a `moe_torch.peft`.

    Raises Unsupported for weights in another format and for unknown activations.
    """
    x, weights, routing, spec = operands_of(experts, hidden_states, top_k_index, top_k_weights)
    norm: Any = experts.post_expert_norm if getattr(experts, "has_post_expert_norm", False) else None
    if norm is None and low_rank is None:
        output = call_first(*moe_request(x, weights, routing, spec))
    else:
        output = run_stages(x, weights, routing, spec, low_rank=low_rank, norm=norm)
    return returned(output, hidden_states.dtype)


def returned(output: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The output in the dtype of hidden states, under autocast as it is."""
    return output if torch.is_autocast_enabled(autocast_device(output)) else _cast(output, dtype)


def options_of(experts: Any) -> ExpertsOptions:
    return getattr(experts, OPTIONS, _DEFAULTS)


def operands_of(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> tuple[torch.Tensor, ExpertWeights, TopK, MoESpec]:
    options, device = options_of(experts), autocast_device(hidden_states)
    if hidden_states.is_cpu and not torch.compiler.is_compiling() and not transforming():
        _align(experts)
    is_fp8, is_packed, activations = _is_fp8(experts), _is_packed(experts), None
    _require_options(experts, options, is_fp8 or is_packed)
    casts = torch.is_autocast_enabled(device) and hidden_states.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if casts else None
    if is_fp8:
        weights, activations = fp8_weights(experts)
        if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
            activations = None
        dtype = dtype or hidden_states.dtype
    elif is_packed:
        weights, dtype = subclass_weights(experts), dtype or hidden_states.dtype
    else:
        weights = _weights(experts, dtype, options.main_grad)
        dtype = weights.down.dtype
    # The last call's object is recognised at once.
    make = _new_spec if torch.compiler.is_compiling() else _known_spec
    spec = make(activation_of(experts), experts.is_transposed, options, activations)
    if dtype == torch.float64:
        top_k_weights = top_k_weights.to(dtype)
    return _dense(hidden_states, dtype), weights, given_routing(top_k_index, top_k_weights), spec


def given_routing(top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> TopK:
    return TopK(_dense(top_k_index, *_ID_DTYPES), _dense(top_k_weights, *_WEIGHT_DTYPES, torch.float64))


def _dense(array: torch.Tensor, *dtypes: torch.dtype) -> torch.Tensor:
    """Contiguous, in its dtype if that is listed, else in the first one."""
    return (array if array.dtype in dtypes else array.to(dtypes[0])).contiguous()


def _cast(array: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Faster on the host if nothing changes."""
    return array if array.dtype == dtype else array.to(dtype)


def why_unsupported(experts: torch.nn.Module, options: ExpertsOptions = _DEFAULTS) -> str | None:
    """The reason why the forward would raise Unsupported, or None."""
    try:
        is_fp8, is_packed = _is_fp8(experts), _is_packed(experts)
        _require_options(experts, options, is_fp8 or is_packed)
        activation_of(experts)
        if is_fp8:
            fp8_weights(experts)
        elif is_packed:
            subclass_weights(experts)
        else:
            _require_plain(experts, _first(experts))
    except Unsupported as error:
        return str(error)
    return None


def _is_fp8(experts: Any) -> bool:
    return hasattr(experts, "down_proj_scale_inv")


def _is_packed(experts: Any) -> bool:
    return package_of(_first(experts)) != "torch" or package_of(experts.down_proj) != "torch"


def _first(experts: Any) -> torch.Tensor:
    return experts.gate_up_proj if experts.has_gate else experts.up_proj


def _require_plain(experts: Any, weight: torch.Tensor) -> None:
    if weight.dtype != torch.float64 and DTYPE_NAMES.get(weight.dtype) not in MATMUL_DTYPES:
        raise unsupported(experts, f"has weights of {weight.dtype}, not of {', '.join(MATMUL_DTYPES)} (quantised)")


def _require_options(experts: Any, options: ExpertsOptions, is_frozen: bool) -> None:
    if getattr(experts, "has_post_expert_norm", False) and (options.recompute or options.main_grad):
        raise unsupported(experts, "normalises what each expert returns, and has no recompute or main_grad")
    if options.main_grad and is_frozen:
        raise unsupported(experts, "has frozen quantised weights, and no main_grad")


def _new_spec(
    activation: Activation, is_transposed: bool, options: ExpertsOptions, activations: Format | None
) -> MoESpec:
    return MoESpec(
        activation,
        weight_layout="in_out" if is_transposed else "out_in",
        activations=activations,
        recompute=options.recompute,
        tuning=options.tuning,
        allow_tf32=options.allow_tf32,
        main_grad=options.main_grad,
    )


_known_spec = functools.lru_cache(maxsize=256)(_new_spec)


def _weights(experts: Any, dtype: torch.dtype | None, main_grad: bool) -> ExpertWeights:
    """dtype: autocast's. None: their own."""
    first = _first(experts)
    _require_plain(experts, first)
    if dtype is None:
        dtype = first.dtype
    elif main_grad and dtype != first.dtype:
        raise InvalidInput(
            f"main_grad must be False where autocast casts the weights from {first.dtype} to {dtype}, got "
            "True; turn autocast off, or leave main_grad out of use(model)"
        )
    biases: dict[str, torch.Tensor] = {}
    if experts.has_bias:
        bias = experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias
        biases = {"gate_up_bias": _cast(bias, dtype), "down_bias": _cast(experts.down_proj_bias, dtype)}
    return ExpertWeights(_cast(first, dtype), _cast(experts.down_proj, dtype), **biases)
