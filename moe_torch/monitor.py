"""Write what a training's routers do: load, dropped tokens, losses, gradient norms, tokens per second.

`moe_torch.transformers.MonitorCallback` calls it for transformers' Trainer, `moe_torch.lightning.MonitorCallback` for
Lightning. `moe_core.monitor` says what the values are, docs/user/watch.md how to call it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from moe_core.base.checks import as_integer, require_flag
from moe_core.errors import InvalidInput, Unsupported
from moe_core.monitor import LayerWindow, model_values, writer_of
from moe_torch.bridge.options import require_instance
from moe_torch.layers.losses import router_losses
from moe_torch.layers.moe import MoE
from moe_torch.layers.placed import PlacedTensor, held_experts
from moe_torch.operators.watched import BEHIND, FORWARDS, KEPT, OVERFLOW, Sampling, Watch

__all__ = ["Monitor"]

_LOSSES = ("load_balance_loss", "z_loss")


class Monitor:
    """Counts what the MoE layers of a model do, and writes it every few steps.

    Forwards in train mode count on the device, also in CUDA graphs, compiled code and under gradient accumulation.
    Recomputed forwards of checkpoints do not. Only a step that writes waits for the device, and only in that step are
    losses and gradient norms computed. With several processes every one makes a monitor and calls `step`: it adds the
    counts of all ranks. Make it before the model is compiled.

    Layers are `moe_torch.MoE`, also of `from_block` and with experts on several ranks, and experts modules of
    `moe_torch.transformers.use`, whose z-loss needs a router that transformers records.

    Args:
        model: any module with such layers.
        writer: TensorBoard's SummaryWriter, wandb or a run of it, a logger of Lightning, or a function of (values,
            step). None: writes nothing, as on ranks other than 0.
        every: steps between two writings. per_layer, gradients: also each layer's values, norms of gradients.
        group: ranks with tokens of their own. None: all, if torch.distributed is initialised.

    Raises:
        InvalidInput: a model without such layers, or wrong options.
        Unsupported: experts of transformers that do not run on Moebius, or in its own expert parallelism.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        writer: Any,
        *,
        every: int = 50,
        prefix: str = "moe",
        per_layer: bool = True,
        gradients: bool = True,
        group: Any = None,
    ) -> None:
        require_instance("model", model, torch.nn.Module)
        self._write, self._every = writer_of(writer), as_integer("every", every, 1)
        for name, flag in (("per_layer", per_layer), ("gradients", gradients)):
            require_flag(name, flag)
        self._prefix, self._per_layer, self._gradients, self._group = prefix, per_layer, gradients, group
        self.steps, self._sampling = 0, Sampling(self._every == 1)
        #: Slots routed in all layers in the last window.
        self.counted = 0
        self._handles: list[Any] = []
        self._layers = [_Layer(name, module, self) for name, module in _moe_modules(model)]
        if not self._layers:
            raise InvalidInput(
                f"model must have MoE layers on Moebius, got a {type(model).__name__} with none; use moe_torch.MoE, or "
                "call moe_torch.transformers.use(model) first"
            )
        _watch_routers(model, self._layers, self._handles)

    @property
    def layers(self) -> tuple[str, ...]:
        """Paths of the layers."""
        return tuple(layer.name for layer in self._layers)

    @torch.no_grad()
    def step(self, step: int | None = None) -> dict[str, Any] | None:
        """End an optimizer's step, ahead of zero_grad. Returns what it wrote, or None if it did not.

        step: its number for the writer. None: calls so far. A collective every `every` calls.

        Raises InvalidInput if no layer has a gradient in a step that writes.
        """
        self.steps += 1
        if self.steps % self._every:
            self._sampling.due = (self.steps + 1) % self._every == 0
            return None
        norms = [layer.norms() if self._gradients else {} for layer in self._layers]
        if self._gradients and not any(norms) and any(layer.is_trained for layer in self._layers):
            raise InvalidInput(
                f"step must be called behind backward and ahead of zero_grad, got no gradient in {self.layers[0]} or "
                "any other layer; move the call, or pass gradients=False"
            )
        windows = self._windows(norms)
        self.counted = sum(int(window.counts.sum()) for window in windows)
        began, now = self._sampling.began, time.perf_counter()
        values = model_values(
            windows, 0.0 if began is None else now - began, prefix=self._prefix, per_layer=self._per_layer
        )
        self._write(values, self.steps if step is None else step)
        for layer in self._layers:
            layer.watch.counts.zero_()
            layer.watch.sums.zero_()
        self._sampling.began = time.perf_counter()
        self._sampling.due = self._every == 1
        return values

    def close(self) -> None:
        """Stop watching the model."""
        for layer in self._layers:
            if isinstance(layer.module, MoE):
                layer.module.watch = None
        for handle in self._handles:
            handle.remove()

    def _windows(self, norms: list[dict[str, torch.Tensor]]) -> list[LayerWindow]:
        """Read all layers at once."""
        counts = torch.cat([layer.watch.counts for layer in self._layers])
        sums = torch.stack([layer.watch.sums for layer in self._layers])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for total in (counts, sums):
                torch.distributed.all_reduce(total, group=self._group)
        vectors = [norm.reshape(-1).float() for of_layer in norms for norm in of_layer.values()]
        measured = torch.cat([sums.view(-1), *vectors]).cpu().numpy().astype(np.float64)
        totals, sums, measured = counts.cpu().numpy(), *np.split(measured, [sums.numel()])
        windows, ints, floats = [], 0, 0
        for number, (layer, of_layer) in enumerate(zip(self._layers, norms, strict=True)):
            size = len(layer.watch.counts) - BEHIND
            count, behind = totals[ints : ints + size], totals[ints + size : ints + size + BEHIND]
            ints += size + BEHIND
            losses, forwards = sums[2 * number : 2 * number + 2], behind[FORWARDS]
            read: dict[str, Any] = {}
            for name, norm in of_layer.items():
                read[name] = measured[floats : floats + norm.numel()]
                floats += norm.numel()
            each = read.pop("each", None)
            windows.append(
                LayerWindow(
                    layer.name, layer.watch.top_k, count,
                    kept=int(behind[KEPT]) if layer.watch.drops else None,
                    overflow=int(behind[OVERFLOW]) // layer.sharing if layer.sharing else None,
                    losses={n: one / forwards for n, one in zip(_LOSSES, losses, strict=True) if one or n == "z_loss"}
                    if forwards else {},
                    norms={name: float(one[0]) for name, one in read.items()}, expert_norms=each,
                )
            )  # fmt: skip
        return windows


class _Layer:
    """A layer under watch. experts: the module with arrays `[E, ...]`."""

    def __init__(self, name: str, module: Any, monitor: Monitor) -> None:
        self.name, self.module = name, module
        #: Of transformers.
        self.router: torch.nn.Module | None = None
        device, counted = next(iter(module.parameters()), torch.empty(0)).device, True
        self.sharing, drops, losses, top_k = 0, False, _z_loss, 1
        if isinstance(module, MoE):
            spec, experts = module.spec, module._parts()["experts"]
            exchange = experts.exchange
            # Each of these ranks is told the overflow of all.
            self.sharing = 0 if exchange is None else exchange.parallel.ranks().size
            # Ranks of a tensor axis with the same tokens count them once.
            split = None if exchange is None else exchange.parallel.split
            counted = split is None or split.tokens == "split" or split.index == 0
            self.num_experts, top_k, drops = spec.num_experts, spec.top_k, spec.capacity_factor is not None
            losses = _router_losses(spec.router)
        else:
            self.num_experts = _experts_of(module)
        options = {"dtype": torch.int64, "device": device}
        counts = torch.zeros(self.num_experts + BEHIND, **options)
        sums = torch.zeros(2, dtype=torch.float32, device=device)
        self.watch = Watch(monitor._sampling, counts, sums, losses, top_k, drops)
        if not counted:
            return
        if isinstance(module, MoE):
            if module.watch is not None:
                raise InvalidInput(f"{name} must have no monitor yet, got one that has; call close() of the first")
            module.watch = self.watch
        else:
            monitor._handles.append(module.register_forward_pre_hook(self._count_ids, with_kwargs=True))

    def _count_ids(self, module: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        if module.training:
            self.watch(ids=positional[1] if len(positional) > 1 else named["top_k_index"])

    @property
    def is_trained(self) -> bool:
        return any(parameter.requires_grad for _, parameter in self._trained())

    def norms(self) -> dict[str, torch.Tensor]:
        """fp32 norms of each group's gradients, of those that have one, and `each` `[E]` of experts."""
        squares: dict[str, list[torch.Tensor]] = {}
        for group, parameter in self._trained():
            gradient: Any = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            if gradient is None:
                continue
            one = _squares(gradient, group == "experts" and gradient.shape[:1] == (self.num_experts,))
            squares.setdefault(group, []).append(one.sum())
            if one.dim():
                squares.setdefault("each", []).append(one)
        return {group: torch.stack(ones).sum(0).sqrt() for group, ones in squares.items()}

    def _trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """(group, parameter)."""
        parts = [("", self.module)] if isinstance(self.module, MoE) else [("experts", self.module)]
        parts += [("router", self.router)] if self.router is not None else []
        for group, module in parts:
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    yield group or name.partition(".")[0], parameter


def _squares(gradient: Any, by_expert: bool) -> torch.Tensor:
    """fp32 sum of squares, or `[E]` of each expert. A collective for sharded gradients."""
    if isinstance(gradient, PlacedTensor):
        # Each rank has its experts, or slices of them.
        mesh, rank, placement, *_ = gradient._where
        held, local = held_experts(placement, rank), gradient._local.float().movedim(gradient.axis, 0)
        sums = local.new_zeros(placement.num_experts)
        sums[torch.tensor(held, dtype=torch.long, device=local.device)] = local.flatten(1).square().sum(1)
        part = gradient.part
        axes = [mesh] if part is None or part.cut is None else [mesh, part.mesh]
        for axis in axes:
            torch.distributed.all_reduce(sums, group=axis.get_group())
        return sums if by_expert else sums.sum()
    axes = tuple(range(1, gradient.dim())) if by_expert else None
    # A norm, because DTensors of any placement have one.
    norm: Any = torch.linalg.vector_norm(gradient, dim=axes, dtype=torch.float32)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return norm.square()


def _router_losses(router: Any) -> Any:
    def losses(logits: torch.Tensor, counts: torch.Tensor, token_mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        balance, z = router_losses(logits.detach(), counts, token_mask, router)
        return balance.float(), z.float()

    return losses


def _z_loss(logits: torch.Tensor, counts: Any, token_mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
    z = torch.logsumexp(logits.detach().float(), dim=-1).square().mean()
    return torch.zeros_like(z), z


def _moe_modules(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            inside += (f"{name}.",)
            yield name or type(module).__name__, module
        elif not name.startswith(inside or ("\0",)) and _experts_of(module):
            if not _runs_on_moebius(module):
                raise Unsupported(
                    f"{name} of model must run on Moebius, got {type(module).__name__} of transformers; call "
                    "moe_torch.transformers.use(model) before"
                )
            if getattr(module, "_is_expert_parallel", False) or hasattr(
                getattr(module, "down_proj", None), "placements"
            ):
                raise Unsupported(
                    f"{name} of model must have its experts on this rank, got transformers' expert parallelism, where "
                    "ranks share a batch; use layers of MoE.from_block and moe_torch.parallel.parallelize"
                )
            yield name, module


def _experts_of(module: Any) -> int:
    """E of an experts module of transformers, else 0."""
    is_experts = (hasattr(module, "has_gate") and hasattr(module, "is_transposed")) or hasattr(
        module, "moebius_options"
    )
    return int(module.num_experts) if is_experts else 0


def _runs_on_moebius(experts: Any) -> bool:
    config = getattr(experts, "config", None)
    return hasattr(experts, "moebius_options") or getattr(config, "_experts_implementation", None) == "moebius"


def _watch_routers(model: torch.nn.Module, layers: list[_Layer], handles: list[Any]) -> None:
    """Hook routers of transformers, next to experts modules, that its models record."""
    by_parent = {layer.name.rpartition(".")[0]: layer for layer in layers if not isinstance(layer.module, MoE)}
    tables = [getattr(module, "_can_record_outputs", None) or {} for module in (model.modules() if by_parent else ())]
    listed = [table["router_logits"] for table in tables if "router_logits" in table]
    recorders = [one for entry in listed for one in (entry if isinstance(entry, list) else [entry])]
    kinds = {getattr(one, "target_class", one): getattr(one, "index", 0) for one in recorders}
    for name, module in model.named_modules() if kinds else ():
        layer = by_parent.get(name.rpartition(".")[0])
        if layer is not None and layer.router is None and type(module) in kinds:
            layer.router = module
            hook = _router_hook(layer.watch, layer.num_experts, kinds[type(module)])
            handles.append(module.register_forward_hook(hook))


def _router_hook(watch: Watch, num_experts: int, index: int) -> Any:
    def observe(router: Any, arguments: Any, output: Any) -> None:
        logits = output[index] if isinstance(output, (tuple, list)) else output
        if router.training and logits.shape[-1] == num_experts:
            watch(logits=logits.reshape(-1, num_experts))

    return observe
