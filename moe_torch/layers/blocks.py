"""A live MoE block of a Hugging Face model as a layer on the same weights."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from moe_core.checkpoint.config import settings_of
from moe_core.checkpoint.families import Architecture, architecture_of, text_model
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import MoELayerSpec, Storage
from moe_core.layers.spec import storage_of
from moe_torch.bridge.arrays import align, require_plain
from moe_torch.bridge.options import require_instance
from moe_torch.bridge.private import graph_break, recomputations, uncompiled
from moe_torch.layers.block_names import BlockArray, keep_names

_ACTIVATIONS: dict[str, Any] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu2": lambda x: x.relu().square(),
}


class _Recorded:
    """The return_aux of a call that transformers' recorder made one."""


_RECORDED: Any = _Recorded()


class _Asked:
    """True while transformers collects routers' logits: what compiled code can read and guard."""

    logits = False


def _watch_recorder() -> None:
    """Note when transformers' recorder begins and ends, because Dynamo takes no context variable."""
    collector: Any = _collector()
    if collector is None or "reset" in vars(collector):
        return
    begin, end = collector.set, collector.reset

    tokens: list[Any] = []  # of every thread that records; none where transformers is compiled

    def begun(value: Any) -> Any:
        token = begin(value)
        if value is not None and "router_logits" in value:
            _Asked.logits = True
            if token is not None:
                tokens.append(token)
        return token

    def ended(token: Any) -> None:
        if token is not None and token in tokens:
            tokens.remove(token)
        _Asked.logits = len(tokens) > 0
        end(token)

    collector.set, collector.reset = begun, ended


def _collector() -> Any:
    return getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)


def _recorder() -> dict[str, Any] | None:
    """The dict in which transformers collects router logits of this forward (`output_router_logits=True`), or None."""
    if not _Asked.logits:
        return None
    collector = _collector()
    collected = collector.global_var if collector.compiling else _read(collector)
    return collected if collected is not None and "router_logits" in collected else None


@graph_break
def _read(collector: Any) -> Any:
    collected = collector.get()
    if collected is not None and "router_logits" in collected:
        for owner, name in uncompiled(recomputations)():
            _ask_again(owner, name)
    return collected


def _ask_for_logits(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook: the recorder knows routers of transformers by their class, and not this layer's."""
    if _recorder() is None or kwargs.get("return_aux"):
        return None
    return args, {**kwargs, "return_aux": _RECORDED}


def _ask_again(owner: Any, name: str) -> None:
    """Let the function of a checkpoint that a backward will run ask for logits, too: it must save the same tensors."""
    function = getattr(owner, name)
    if hasattr(function, "asks"):
        return

    @functools.wraps(function)
    def asking(*arguments: Any) -> Any:
        collector: Any = _collector()
        token = collector.set({"router_logits": []})
        try:
            return function(*arguments)
        finally:
            collector.reset(token)

    setattr(asking, "asks", True)  # noqa: B010
    setattr(owner, name, asking)


def _record_logits(layer: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    recorder = _recorder()
    if recorder is None or not kwargs.get("return_aux"):
        return output
    y, aux = output
    recorder["router_logits"].append(aux.logits)
    return y if kwargs["return_aux"] is _RECORDED else output


class BlockWeights(NamedTuple):
    """tensors: by the layer's names, the block's own except `copied`, and `arrays` holds the block's names. takes_ids:
    the model passes unused token ids. input_noise: see `Architecture`.
    """

    spec: MoELayerSpec
    tensors: dict[str, torch.Tensor]
    copied: tuple[str, ...]
    arrays: tuple[BlockArray, ...]
    takes_ids: bool
    input_noise: float


def block_weights(block: torch.nn.Module, config: Any) -> BlockWeights:
    require_instance("block", block, torch.nn.Module)
    # JetMoE's blocks have the experts' matrices as children.
    experts, kind = getattr(block, "experts", getattr(block, "input_linear", None)), type(block).__name__
    if experts is None:
        children = ", ".join(name for name, _ in block.named_children()) or "no submodule"
        raise InvalidInput(
            f"block must be an MoE block with submodules experts and gate or router, got {kind} with {children}; pass "
            "one such as model.model.layers[0].mlp"
        )
    if config is None:
        config = getattr(block, "config", None) or getattr(experts, "config", None)
    if config is None:
        raise InvalidInput(f"config must be given for {kind}, which does not keep its own, got None; pass model.config")
    settings = text_model(settings_of(config))
    architecture = architecture_of(settings)
    storage = storage_of(architecture.spec)
    spec, values = _layer_spec(architecture, block).stored_as(storage), dict(_tensors(block))
    if not architecture.naming.blocks[0]:
        values = {name: tensor for name, tensor in values.items() if name.startswith(("router.", "experts."))}
    names = _names(architecture, table=spec.token_table > 0)
    if not any(name.startswith("shared_experts.") for name in names):
        # The model has them outside of its block.
        spec = dataclasses.replace(spec, shared_experts=None)
    known = [name for alternatives in names.values() for name in alternatives]
    _require_as_made(block, architecture, settings.settings, spec)
    unknown, missing = [name for name in values if name not in known], [name for name in known if name not in values]
    if unknown:
        shared = architecture.family.shared
        told = () if shared is None else [name for name in (*shared.copies, *shared.width) if name in settings.settings]
        by = " with ".join(("its config", *(f"{name} = {settings.settings[name]}" for name in told)))
        raise Unsupported(
            f"block must hold only {', '.join(known)} by {by}, got {kind} with {', '.join(unknown)}, which the layer "
            "does not compute with; keep the block, and run its experts by moe_torch.transformers"
        )
    if missing:
        raise InvalidInput(
            f"block must hold {', '.join(missing)} by its config, got {kind} without; pass the config that the block "
            "was made with"
        )
    for name, tensor in values.items():
        require_plain(f"{name} of block", tensor)
        if tensor.device.type == "cpu":
            align(name, tensor)
    arrays = _arrays(names, values, storage, spec.num_experts, architecture.naming.flat)
    stored = {array.name: _stored(array, [values[name] for name in array.names]) for array in arrays}
    tensors = {name: tensor for name, (tensor, _) in stored.items()}
    for parameter in spec.parameters(storage):
        if tensors[parameter.name].shape != parameter.shape:
            raise InvalidInput(
                f"{names[parameter.name][0]} of block must make {parameter.name} {list(parameter.shape)} by its "
                f"config, got {list(tensors[parameter.name].shape)}; pass the config that the block was made with"
            )
    copied = tuple(name for name, (_, is_copy) in stored.items() if is_copy)
    takes_ids = bool(architecture.tables) and not spec.token_table
    return BlockWeights(spec, tensors, copied, arrays, takes_ids, architecture.input_noise)


def _require_as_made(
    block: torch.nn.Module, architecture: Architecture, settings: Mapping[str, Any], spec: MoELayerSpec
) -> None:
    """Refuse a block that no longer computes what its config says. Sizes are checked by the tensors' shapes."""
    naming, kind = architecture.naming, type(block).__name__
    # A block that is a whole decoder layer lends its router and experts.
    lent = () if naming.blocks[0] else (naming.router[0].partition(".")[0], "experts")
    wanted = {name: value for name, value in settings.items() if isinstance(value, (bool, int, float, str))}
    wanted |= {"top_k": spec.top_k} | ({"num_group": wanted["n_group"]} if "n_group" in wanted else {})
    wanted = {name: one for name, one in wanted.items() if name[:11] != "num_experts" and not name.endswith("_size")}
    rows, shared = torch.linspace(-3, 3, 9, device="cpu"), spec.shared_experts and spec.shared_experts.activation
    for path, part in block.named_modules():
        if lent and path.partition(".")[0] not in lent:
            continue
        path = path or "block"
        activation = shared or spec.experts.activation if path[:6] == "shared" else spec.experts.activation
        function, known = getattr(part, "act_fn", None), _ACTIVATIONS.get(activation.name)
        if function is not None and known is not None and not torch.allclose(function(rows), known(rows), atol=1e-3):
            raise InvalidInput(
                f"{path}.act_fn of {kind} must be {activation.name} by its config, got {function}; pass the "
                "config that the block was made with"
            )
        if _is_changed(part):
            raise Unsupported(
                f"{path} of {kind} must run its class's own forward without hooks, got another, which the layer would "
                "not follow; undo it, or keep the block and run its experts by moe_torch.transformers.use(model)"
            )
        for name, value in vars(part).items():
            if name in wanted and value != wanted[name]:
                raise InvalidInput(
                    f"{path}.{name} of {kind} must be {wanted[name]} by its config, got {value}; give both one value"
                )


def _is_changed(part: torch.nn.Module) -> bool:
    """Return True if another forward or hook stands before that of a part of transformers or torch."""
    kinds = [kind for kind in type(part).__mro__ if "forward" in vars(kind) and kind is not torch.nn.Module]
    known = [kind.__module__.startswith(("transformers.", "torch.")) for kind in kinds]
    kept: Any = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    hooks = [hook for of_kind in kept for hook in of_kind.values()]
    own = any(not getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks)
    return "forward" in vars(part) or own or (any(known) and not known[0])


def act_as_block(layer: Any, weights: BlockWeights) -> None:
    """Give a layer the names, the noise and the recorded logits of its block."""
    layer.copied, layer.input_noise = weights.copied, weights.input_noise
    keep_names(layer, weights.arrays)
    _watch_recorder()
    layer.register_forward_pre_hook(_ask_for_logits, with_kwargs=True)
    layer.register_forward_hook(_record_logits, with_kwargs=True)
    if layer.input_noise or layer.spec.sparse_mixer is not None:
        layer.register_forward_pre_hook(_noise_of_training, with_kwargs=True)
    if weights.takes_ids:
        layer.register_forward_pre_hook(_without_input_ids, with_kwargs=True)


def _without_input_ids(layer: torch.nn.Module, positional: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A hook that drops token ids, which models pass to all blocks if some have tables."""
    return positional, {name: value for name, value in named.items() if name != "input_ids"}


def _noise_of_training(
    layer: Any, positional: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook with the noise of the block, drawn as it does."""
    if not layer.training:
        return positional, named
    if layer.spec.sparse_mixer is not None:
        raise Unsupported(
            "a layer on a block with SparseMixer must be in evaluation, got training, where the block draws experts at "
            "random; call layer.eval(), or train the block with our experts by moe_torch.transformers.use(model)"
        )
    x, noise = positional[0] if positional else named["x"], layer.input_noise
    x = x * torch.empty_like(x).uniform_(1.0 - noise, 1.0 + noise)
    return ((x, *positional[1:]), named) if positional else ((), named | {"x": x})


def _layer_spec(architecture: Architecture, block: torch.nn.Module) -> MoELayerSpec:
    """If layers of its model differ, the one with the block's limits."""
    if architecture.tables and architecture.naming.table in dict(_tensors(block)):
        return architecture.layer_spec(architecture.tables[0])
    if not architecture.layer_activations:
        return architecture.layer_spec()
    limits = tuple(getattr(getattr(block, part, None), "limit", None) for part in ("experts", "shared_experts"))
    for layer in architecture.moe_layers:
        spec = architecture.layer_spec(layer)
        shared = spec.shared_experts and spec.shared_experts.activation
        spec_limits = (spec.experts.activation.limit, (shared or spec.experts.activation).limit)
        if tuple(math.inf if limit is None else limit for limit in spec_limits) == limits:
            return spec
    raise InvalidInput(
        f"block must clamp as a layer of its config, got {type(block).__name__} with limits {limits} of experts and "
        "shared experts; pass the config that the block was made with"
    )


def _tensors(block: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from block.named_parameters()
    yield from block.named_buffers()


def _names(architecture: Architecture, *, table: bool) -> dict[str, tuple[str, ...]]:
    """Arrays of the layer -> tensors of the block: a gate and an up, or one."""
    naming, family = architecture.naming, architecture.family
    router, (*gate_up, down) = naming.router[0], naming.fused[0]
    names: dict[str, tuple[str, ...]] = {"router.weight": (router,)}
    if family.router_bias:
        names["router.bias"] = (router.removesuffix("weight") + "bias",)
    if architecture.correction_bias and not table:
        names["router.correction_bias"] = naming.correction_bias[:1]
    if architecture.router_norm is not None:
        names["router.norm"] = (naming.norm,)
    if table:
        names["router.table"] = (naming.table,)
    if family.expert_scale:
        names["router.expert_scale"] = (naming.expert_scale,)
    names |= {"experts.gate_up": tuple(gate_up), "experts.down": (down,)}
    if family.expert_bias:
        names |= {"experts.gate_up_bias": (f"{gate_up[0]}_bias",), "experts.down_bias": (f"{down}_bias",)}
    names |= {one.name: naming.around[one.name][:1] for one in architecture.around()}
    *first, last = naming.shared[0]
    if architecture.shared_d_ff and not last.startswith("/"):
        names |= {"shared_experts.gate_up": tuple(first), "shared_experts.down": (last,)}
        if family.shared is not None and family.shared.gate:
            names["shared_experts.gate"] = (naming.shared_gate,)
    return names


def _stored(array: BlockArray, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """The layer's array of a block's tensors, and True if it is a copy."""
    whole, parts = tensors[0], [tensor.detach() for tensor in tensors]
    with torch.autocast("cuda" if whole.is_cuda else "cpu", enabled=False):
        joined = array.join(parts)
    if array.name in ("router.table", "router.correction_bias"):
        return joined, joined.dtype != whole.dtype
    if joined is parts[0]:
        return whole, False
    return torch.nn.Parameter(joined, requires_grad=whole.requires_grad), True


def _arrays(
    names: dict[str, tuple[str, ...]], values: dict[str, torch.Tensor], storage: Storage, num_experts: int, flat: bool
) -> tuple[BlockArray, ...]:
    arrays = []
    for name, stored in names.items():
        first, plain = values[stored[0]], name.startswith(("shared_experts.", "before.weight", "after.weight"))
        of_rows = flat and name in ("experts.gate_up", "experts.down")
        turned = name == "experts.down" if of_rows else plain and storage.weight_layout == "in_out"
        arrays.append(BlockArray(name, stored, tuple(first.shape), first.dtype, turned, num_experts if of_rows else 0))
    return tuple(arrays)
