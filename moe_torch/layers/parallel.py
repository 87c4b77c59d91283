"""Layers with experts on several ranks, and their losses."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
import weakref
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedTensor
from moe_core.layers.result import MoEAux
from moe_core.parallel.header import LAYERS
from moe_core.parallel.placement import HOLE, Placement
from moe_core.parallel.result import ParallelOutput
from moe_core.parallel.tensor import cut_of, require_splittable
from moe_core.specs.operands import (
    ExpertWeights,
    LoRAFactors,
    MoEOperands,
    RouterWeights,
    SharedExpert,
    TopK,
    map_arrays,
    named_fields,
)
from moe_core.specs.routing import RouterSpec
from moe_torch.bridge.options import require_instance
from moe_torch.bridge.private import SUBCLASSES_OF_DTENSOR, dtensor_like, root_mesh
from moe_torch.layers.losses import router_losses
from moe_torch.layers.parameters import PrepackedExperts, is_gathered
from moe_torch.layers.placed import ExpertTensor, PlacedTensor, Slice, filled_up, held_experts
from moe_torch.layers.shards import Own
from moe_torch.parallel.axes import ExpertParallel, tell_peers, tells_peers
from moe_torch.parallel.forward import Calls, called
from moe_torch.parallel.moving import MovingPlacement
from moe_torch.parallel.tensor import total_of

Layer = TypeVar("Layer", bound=PrepackedExperts)


#: Layers of each group so far. Ranks make them in one order, and compare their numbers.
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@dataclass
class LayerExchange:
    """Replaces `moe_torch.moe` in a shared-out layer. counted, began: this forward's counts and exchange are sent."""

    parallel: ExpertParallel
    placement: Placement
    counted: bool = False
    began: bool = False
    moving: MovingPlacement | None = None
    warns: bool = False
    calls: Calls = dataclasses.field(default_factory=Calls)

    def __deepcopy__(self, memo: Any) -> LayerExchange:
        # Copies of a layer are on the same ranks, without a Rebalancer.
        calls = Calls.of_layer(self.calls.layer, self.calls.shares_factors)
        return LayerExchange(self.parallel, self.placement, calls=calls)

    def before(self, layer: Any, arguments: Any) -> None:
        self.counted = self.began = False
        if not all(self.placement.occupied) and is_gathered(layer.experts) and torch.is_grad_enabled():
            rank = self.placement.occupied.index(0)
            raise Unsupported(
                f"fully_shard of experts needs an expert on every rank, got {self.placement} and none on rank {rank}: "
                "torch's reduction of gradients fails there; share them among fewer ranks"
            )
        if self.warns and is_gathered(layer.experts) and torch.is_grad_enabled():
            self.warns = False
            warnings.warn(
                "FSDP averages other gradients than experts' over all ranks; pass ExpertParallel(gradients='mean'), or "
                "divide experts' gradients by parallel.gradient_divisor and ignore this",
                stacklevel=2,
            )

    def after(self, layer: Any, arguments: Any, output: Any) -> None:
        """Runs also if the forward raised: its peers would wait for an exchange."""
        if output is None and not self.began:
            device, spec = layer._parts()["router"].weight.device, layer.spec
            if spec.capacity_factor is not None and not self.counted and tells_peers(self.parallel, device):
                # Peers wait for counts first.
                with contextlib.suppress(RuntimeError):
                    self._counts_of_all(torch.zeros(1 + spec.num_experts, dtype=torch.int32, device=device))
            tell_peers(self.parallel, self.placement, device)

    def held(self) -> list[int]:
        return held_experts(self.placement, self.parallel.ranks().rank)

    @staticmethod
    def local(array: Any) -> Any:
        """This rank's part of a shared-out array or matrix; other tensors as they are."""
        if isinstance(array, QuantizedTensor):
            return map_arrays(array, LayerExchange.local)
        if isinstance(array, ExpertTensor):
            return array.to_part()
        return array.to_local() if isinstance(array, (DTensor, PlacedTensor)) else array

    def moe(
        self,
        x: torch.Tensor,
        experts: ExpertWeights,
        routing: RouterWeights | TopK,
        spec: Any,
        *,
        token_mask: torch.Tensor | None = None,
        shared: SharedExpert | None = None,
        lora: LoRAFactors | None = None,
        adapter_ids: torch.Tensor | None = None,
    ) -> ParallelOutput:
        """Counts are of this rank's tokens. lora: as the layer has them."""
        self.began = True
        lora = None if lora is None else map_arrays(lora, self.local)
        if not self.placement.occupied[self.parallel.ranks().rank]:
            # Products need at least one expert.
            experts = map_arrays(experts, lambda array: filled_up(array, 1))
            one = {name: array for name, array in named_fields(lora) if array.dim() == 4} if lora else {}
            one = {n: array.new_zeros(len(array), 1, *array.shape[2:]) for n, array in one.items() if not array.numel()}
            lora = lora and dataclasses.replace(lora, **one)
        placement = self.placement if self.moving is None else self.moving
        operands = MoEOperands(x, experts, routing, token_mask, None, shared, lora, adapter_ids)
        return called(operands, spec, self.parallel, placement, self.calls)

    def within_capacity(
        self, ids: torch.Tensor, place: torch.Tensor, group_sizes: torch.Tensor, ratio: tuple[int, int]
    ) -> torch.Tensor:
        """bool `[T * K]`: an expert's first slots of all ranks' tokens. place: the slot's number in this rank's."""
        tokens = torch.full((1,), ids.shape[0], dtype=torch.int32, device=ids.device)
        told, number = self._counts_of_all(torch.cat([tokens, group_sizes]))
        before = told[:number, 1:].sum(dim=0)
        capacity = -(-told[:, 0].sum() * ratio[0] // ratio[1])
        return place + before[ids.view(-1).clamp(min=0).long()] < capacity

    def _counts_of_all(self, counts: torch.Tensor) -> tuple[torch.Tensor, int]:
        """int32 `[ranks with tokens, 1 + E]`, tokens and slots of each expert, and this rank's row."""
        self.counted = True
        ranks, tensor = self.parallel.ranks("capacity"), self.parallel.tensor_ranks("capacity")
        told, number = counts, ranks.rank
        if tensor is not None and tensor.split.tokens == "split":
            told, number = tensor.ranks.all_gather(told, "counts"), number * tensor.split.size + tensor.split.index
        return ranks.all_gather(told, "counts").view(-1, len(counts)), number


def parallelize(layer: Layer, parallel: ExpertParallel, *, placement: Placement | None = None) -> Layer:
    """Share a layer's experts out among ranks, in place, and return it. Forwards and backwards then exchange rows.

    The experts' parameters become DTensors `[E, ...]`, sharded by their first axis over the mesh: rank r has the
    experts from r * ceil(E / W) on. Experts in another order are `PlacedTensor`s of the same shape, for optimizers but
    not for `fully_shard`. Both save whole experts by logical id in `state_dict` and `torch.distributed.checkpoint`, for
    any placement and number of ranks. Router and shared experts stay on every rank: average their gradients over all
    ranks with tokens of their own, and pass `gradients="mean"` to `parallel`, which does the same for experts.

    With `parallel.tensor`, a rank keeps slices of its experts: DTensors over both axes, `[Shard(0), Shard(axis)]`. Gate
    and up in halves, the default, are `PlacedTensor`s. down_bias is whole on every rank of the axis.

    Call it on every rank, before `fully_shard` and before an optimizer is made. A layer on `meta` gets no memory.

    Args:
        layer: a `moe_torch.MoE` with all its experts.
        placement: the experts of each rank. None: `Placement.linear`. With replicas, forwards that need a gradient
            raise Unsupported.

    Raises:
        InvalidInput: a placement of other sizes, a layer that is shared out already, a tensor axis that does not divide
            d_ff, or is no axis of the mesh's DeviceMesh.
        Unsupported: main_grad, a norm of each expert's result, a tensor axis that cuts groups of quantised experts, or
            prepacked ones.
    """
    require_instance("parallel", parallel, ExpertParallel)
    ranks, spec = parallel.ranks(), layer.spec
    if not hasattr(parallel.mesh, "get_group"):
        raise InvalidInput(
            f"parallel.mesh must be a DeviceMesh for a layer, got {type(parallel.mesh).__name__}"
            "; make one with init_device_mesh"
        )
    linear = Placement.linear(spec.num_experts, ranks.size)
    placement = linear if placement is None else placement
    require_instance("placement", placement, Placement)
    if (placement.num_experts, placement.num_ranks) != (spec.num_experts, ranks.size):
        raise InvalidInput(
            f"placement must be of the layer's {spec.num_experts} experts on the mesh's {ranks.size} ranks, got "
            f"{placement}; make it for them"
        )
    # Empty places come last, as parameters hold only experts.
    owners = tuple(tuple(sorted(rank, key=lambda expert: expert == HOLE)) for rank in placement.owners)
    placement = dataclasses.replace(placement, owners=owners)
    for name, wrong in (
        ("main_grad", spec.main_grad),
        ("apply_router_weight_on_input", spec.apply_router_weight_on_input),
        ("a norm of each expert's result", spec.norm_of_experts is not None),
    ):
        if wrong:
            raise Unsupported(f"{name} cannot be had across ranks; leave it out of the layer")
    experts = layer._parts()["experts"]
    if experts.exchange is not None:
        raise InvalidInput(
            "layer must have all its experts here, got one that is shared out already; share it out once"
        )
    exchange, split = LayerExchange(parallel, placement, warns=parallel.gradient_divisor > 1), parallel.split
    matrices = {name: one.spec for name, one in experts.named_children()}
    require_splittable(spec.d_ff, matrices, split)
    gated = spec.experts.activation.gated
    layouts = layer.storage.weight_layout, layer.storage.gate_layout if gated else None
    shared_out = functools.partial(share_out, exchange, layouts)
    for path, module in experts.named_modules():
        for name, array in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, as_parameter(shared_out(path or name, array), array.requires_grad))
        for name, array in list(module.named_buffers(recurse=False)):
            if array.shape[:1] != (spec.num_experts,):
                raise Unsupported(
                    f"experts.{name} must have a row for each expert, got {list(array.shape)}"
                    "; pass arrays that begin with the experts"
                )
            module.register_buffer(name, shared_out(path or name, array))
    number = 1 + _numbers.get(ranks.group, 0) % (LAYERS - 1)
    exchange.calls = Calls.of_layer(number)
    _numbers[ranks.group] = number
    experts.exchange = exchange
    lora: Any = layer.lora
    if lora is not None:
        lora.share_out(exchange, layouts[1])
    layer.register_forward_pre_hook(exchange.before)
    layer.register_forward_hook(exchange.after, always_call=True)
    return layer


def share_out(
    exchange: LayerExchange, layouts: tuple[str, str | None], name: str, array: torch.Tensor, axis: int = 0
) -> torch.Tensor:
    """This rank's part of an array of all experts, as a DTensor or PlacedTensor. layouts: of weight and gate."""
    parallel, placement, split = exchange.parallel, exchange.placement, exchange.parallel.split
    held = torch.tensor(exchange.held(), dtype=torch.long)
    # A copy frees the memory of other experts.
    local, part, places = array.detach().index_select(axis, held.to(array.device)), None, [Shard(axis)]
    if split.size > 1:
        cut = cut_of(name, *layouts)
        # Every rank has an entry for all of F, such as a scale per channel.
        part = Slice(parallel.tensor, cut if cut and array.shape[cut.axis] > 1 else None, split)
        local = Own(local, None, part.cut, split).taken(local)
        places.append(Shard(array.dim() + part.cut.axis) if part.cut else Replicate())
    linear = Placement.linear(placement.num_experts, placement.num_ranks)
    if placement.owners == linear.owners and not (part and part.cut and part.cut.parts > 1):
        mesh = parallel.axis if split.size == 1 else mesh_of_both(parallel.mesh, parallel.tensor)
        stride = torch.empty(array.shape, device="meta").stride()
        return DTensor.from_local(local, mesh, places, run_check=False, shape=array.shape, stride=stride)
    return PlacedTensor(local, (parallel.axis, parallel.ranks().rank, placement, *[axis] * (axis > 0)), part)


def as_parameter(shared: Any, requires_grad: bool) -> torch.nn.Parameter:
    if SUBCLASSES_OF_DTENSOR and isinstance(shared, DTensor):
        shared = dtensor_like(ExpertTensor, shared)
    return torch.nn.Parameter(shared, requires_grad=requires_grad)


def refuse_adapters(layer: Any) -> None:
    if layer.lora is not None:
        raise Unsupported("layers with adapters do not move experts, as factors stay on their ranks; merge them first")


def ignore_experts(model: torch.nn.Module) -> torch.nn.Module:
    """Let `torch.nn.parallel.DistributedDataParallel` leave out experts on several ranks. Returns the model.

    Raises InvalidInput for a model without such layers, or with gradients="sum", as all other gradients become means.
    """
    require_instance("model", model, torch.nn.Module)
    names = [name for tensors in (model.named_parameters(), model.named_buffers()) for name, one in tensors
             if isinstance(one, (DTensor, PlacedTensor))]  # fmt: skip
    exchanges = [one for module in model.modules() if isinstance(one := module.__dict__.get("exchange"), LayerExchange)]
    if not exchanges or any(one.parallel.gradient_divisor > 1 for one in exchanges):
        what = "gradients='sum'" if exchanges else "none"
        raise InvalidInput(
            f"model must have layers of parallelize with gradients='mean', got {what}; pass it to their ExpertParallel"
        )
    ignored = "_ddp_params_and_buffers_to_ignore"
    setattr(model, ignored, [*getattr(model, ignored, ()), *names])
    return model


def mesh_of_both(mesh: Any, tensor: Any) -> Any:
    """Return the mesh of two axes, experts first. Raises InvalidInput unless one mesh has both in that order."""
    names = tuple(getattr(one, "mesh_dim_names", None) or ("",) for one in (mesh, tensor))
    try:
        return root_mesh(mesh)[names[0] + names[1]]
    except (AttributeError, KeyError, ValueError, RuntimeError) as error:
        raise InvalidInput(
            f"parallel.mesh and parallel.tensor must be axes of one DeviceMesh, experts first, got axes {names[0]} and "
            f"{names[1]}; make one with init_device_mesh(..., mesh_dim_names=('ep', 'tp')) and pass mesh['ep'] and "
            "mesh['tp']"
        ) from error


def total_over_ranks(counts: torch.Tensor, parallel: ExpertParallel) -> torch.Tensor:
    """Add integer counts over all ranks, such as `MoEAux.tokens_per_expert` for `MoE.update_correction_bias`."""
    require_instance("counts", counts, torch.Tensor)
    if counts.is_floating_point():
        raise InvalidInput(
            f"counts must be integers, got {counts.dtype}: sums of others depend on the order; cast them to int64"
        )
    return total_of(parallel.ranks("counts"), parallel.tensor_ranks("counts"), counts.clone(), "counts")


def group_losses(
    aux: MoEAux, router: RouterSpec, parallel: ExpertParallel, *, token_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (load-balancing loss, z-loss) of the tokens of all ranks, fp32 scalars differentiable by aux.logits. A
    collective.

    The mean over ranks is the loss of one device with all tokens, and the same holds for gradients.

    Args:
        router: `layer.spec.router`.
    """
    require_instance("parallel", parallel, ExpertParallel)
    logits, counts = aux.logits, aux.tokens_per_expert
    tokens = torch.full((1,), logits.shape[0], dtype=torch.int32, device=logits.device)
    if token_mask is not None:
        tokens = token_mask.sum().to(torch.int32).view(1)
    ranks, tensor = parallel.ranks("losses"), parallel.tensor_ranks("losses")
    total = total_of(ranks, tensor, torch.cat([counts, tokens]), "counts")
    # Both losses are means over tokens: weight by this rank's share.
    share = parallel.token_ranks * tokens.float() / total[-1:].clamp(min=1).float()
    count = tokens.float().clamp(min=1)
    balance, z = router_losses(
        logits, (total[:-1].float() * count / total[-1:].clamp(min=1).float()), token_mask, router
    )
    return (balance * share).squeeze(0), (z * share).squeeze(0)
