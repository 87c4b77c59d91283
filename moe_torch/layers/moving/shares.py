"""The experts of shared-out layers with their optimizer states, as rows that a rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel.placement import Placement
from moe_torch.bridge.options import require_instance
from moe_torch.layers.listed import part_of
from moe_torch.layers.moe import MoE
from moe_torch.layers.parallel import LayerExchange, refuse_adapters
from moe_torch.layers.placed import PlacedTensor
from moe_torch.parallel.axes import ExpertParallel


class Share:
    """One layer. optimizers: may hold states of its experts."""

    def __init__(self, layer: MoE, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.experts: Any = layer._parts()["experts"]
        self.exchange: LayerExchange = self.experts.exchange
        refuse_adapters(layer)
        self._optimizers = optimizers
        for name, array in self.arrays():
            placed = getattr(array, "placements", ())
            if not isinstance(array, PlacedTensor) and (len(placed) != 1 or not placed[0].is_shard(0)):
                raise Unsupported(
                    f"experts.{name} must be shared out by experts alone to move, got {type(array).__name__} "
                    f"{placed or list(array.shape)}; keep experts that move out of fully_shard"
                )

    @property
    def placement(self) -> Placement:
        return self.exchange.placement

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Parameters and buffers, then the optimizers' states of their shapes, the same on every rank."""
        for path, name, arrays in self._slots():
            yield f"{path}{name}", arrays[name]
            for state in self._states_of(arrays[name]):
                alike = [key for key in sorted(state) if _is_alike(state[key], arrays[name])]
                yield from ((f"{path}{name}.{key}", state[key]) for key in alike)

    def _slots(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for path, module in self.experts.named_modules():
            for arrays in (module._parameters, module._buffers):
                yield from ((path and f"{path}.", name, arrays) for name in list(arrays) if arrays[name] is not None)

    def _states_of(self, parameter: Any) -> list[dict[str, Any]]:
        return [optimizer.state[parameter] for optimizer in self._optimizers if parameter in optimizer.state]

    def replace(self, parts: Sequence[torch.Tensor], placement: Placement, parallel: ExpertParallel) -> None:
        """Hold other rows, by `arrays`, of a placement on these ranks. Gradients go."""
        where = parallel.axis, parallel.ranks().rank, placement
        left = iter(parts)
        for _, name, arrays in self._slots():
            arrays[name] = self._replaced(arrays[name], left, where)
        self.exchange.placement, self.exchange.parallel = placement, parallel

    def _replaced(self, array: Any, left: Iterator[torch.Tensor], where: Any) -> Any:
        states = self._states_of(array)
        new = _placed(array, next(left), where)
        for state in states:
            alike = [key for key, one in sorted(state.items()) if _is_alike(one, array)]
            state |= {key: _placed(state[key], next(left), where) for key in alike}
        if new is not array:
            for optimizer in self._optimizers:
                if array in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(array)
                for group in optimizer.param_groups:
                    group["params"] = [new if one is array else one for one in group["params"]]
        return new


def _is_alike(state: Any, array: Any) -> bool:
    return isinstance(state, (PlacedTensor, DTensor)) and state.shape == array.shape


def _placed(array: Any, part: torch.Tensor, where: Any) -> Any:
    """The same object where it can hold any rows."""
    if isinstance(array, PlacedTensor):
        array._local, array._where, array.grad = part, where, None
        return array
    placed: Any = PlacedTensor(part, where)
    return torch.nn.Parameter(placed, array.requires_grad) if isinstance(array, torch.nn.Parameter) else placed


def shares_of(model: Any, optimizers: Iterable[torch.optim.Optimizer] = ()) -> list[Share]:
    """The shared-out layers of a model, all on the same ranks. Raises InvalidInput and Unsupported."""
    require_instance("model", model, torch.nn.Module)
    optimizers = list(optimizers)
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    shares = [Share(layer, optimizers) for layer in layers if layer._parts()["experts"].exchange is not None]
    if not shares or len({id(share.exchange.parallel.ranks().group) for share in shares}) != 1:
        raise InvalidInput(
            f"model must have layers of parallelize on the same ranks, got {len(shares)}; call parallelize first, or "
            "pass the layers of one mesh"
        )
    if shares[0].exchange.parallel.split.size > 1:
        raise Unsupported("model must have no tensor axis to move experts, got one; leave tensor out")
    return shares


def rows_of(share: Share) -> list[torch.Tensor]:
    """This rank's part of each of `arrays`, without copies."""
    return [part_of(array).detach() for _, array in share.arrays()]
