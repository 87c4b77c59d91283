"""Record the experts that every token visits, and replay them, in any torch model with experts on Moebius.

Both (docs/user/layers.md) see every MoE layer (`moe_torch.MoE`, also with experts on several ranks,
`moe_torch.ops.moe`, the experts of transformers) in the block and its thread, in order, compiled models included. They
do not see replayed CUDA graphs. Capturing a graph or exporting a program inside of the block raises Unsupported.

A replayed layer with a router still computes its logits for the losses. Its ids and weights are the trace's, and its
token mask still holds. A layer that runs in stages has its live weights at these ids in MoEAux. If the caller of `moe`
brings ids and weights, output and counts follow the trace, and the returned ids and weights are the caller's (moe_jax
returns the trace's).

A trace of ids alone (`RoutingTrace.from_routed_experts`) pins the experts. Their weights are the router's, from the
live logits at these ids: routers of `moe`, of `route`, and of transformers where they choose by `torch.topk`.

In training the gradient of the weights flows into the router for the trace's ids, at the live logits, also outside of
the block. Checkpointed layers (`torch.utils.checkpoint`, and functions that keep `ctx.run_function`) are recomputed
with the routing of their forward, and count once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moe_core.errors import InvalidInput, Unsupported
from moe_core.specs import RouterSpec
from moe_core.specs.operands import RouterWeights, TopK
from moe_core.trace import LayerRouting, Playback, RoutingTrace, layers_of, sizes_of
from moe_torch.bridge import private
from moe_torch.bridge.operator import Operator
from moe_torch.bridge.options import decode
from moe_torch.operators import stages
from moe_torch.operators import table as operators
from moe_torch.operators.kinds import as_float32, as_int32
from moe_torch.operators.routed import ROUTED, WATCH
from moe_torch.operators.table import LORA, LORA_TRAINING, MOE_QUANTIZED, QUANTIZED_TRAINING, TRAINING

__all__ = ["LayerRouting", "Recording", "RoutingTrace", "capture", "replay"]

#: Forward -> the class of its routing, its operator, and the like operator that takes ids and weights.
_FORWARDS: dict[Any, tuple[type, Operator, Operator]] = {
    operator.overload: (kind, operator, forwards[TopK])
    for forwards in (operators.MOE, MOE_QUANTIZED, TRAINING, QUANTIZED_TRAINING, LORA, LORA_TRAINING)
    for kind, operator in forwards.items()
}


_TOPK = torch.ops.aten.topk.default
#: Operators that choose ids from scores.
_ROUTERS = (stages.ROUTE.overload, stages.ROUTE_ROUNDED.overload, _TOPK)


class Recording:
    """`layers` has ids and weights on their device."""

    def __init__(self) -> None:
        self._layers: list[LayerRouting] = []

    @property
    def layers(self) -> tuple[LayerRouting, ...]:
        return tuple(self._layers)

    def trace(self) -> RoutingTrace:
        """Return the layers in NumPy. Waits for the device."""
        layers = [(layer.ids.cpu().numpy(), layer.weights.cpu().numpy(), layer.num_experts) for layer in self._layers]
        return RoutingTrace(tuple(LayerRouting(*layer) for layer in layers))


@contextlib.contextmanager
def capture() -> Iterator[Recording]:
    """Record the routing of every MoE layer in the block. Raises InvalidInput if none ran."""
    recording = Recording()

    def record(call: _Seen) -> Any:
        results = call.run()
        ids, weights = call.used(results)
        _, num_experts = call.sizes
        # Copies, because compiled code may reuse the memory.
        recording._layers.append(LayerRouting(as_int32(ids).clone(), as_float32(weights).clone(), num_experts))
        return results

    with _Observer(record):
        yield recording
    if not recording._layers:
        raise InvalidInput(
            "capture() must surround a model with MoE layers on Moebius, got none that ran; run the model in the "
            "block, and not as a replayed CUDA graph"
        )


@contextlib.contextmanager
def replay(trace: RoutingTrace | LayerRouting | Sequence[LayerRouting]) -> Iterator[None]:
    """Run the MoE layers in the block with the ids of a trace, and its weights if it has them, in order.

        trace: a RoutingTrace, or layers with torch tensors (`Recording.layers`).

    Raises:
        InvalidInput: a layer's tokens, top-k or experts differ from the trace's, or other layers run than the trace
            has.
        Unsupported: a trace of ids alone, and a layer with weights from elsewhere.
    """
    player = _Player(layers_of(trace))
    with _Observer(player.play, player):
        yield
    player.playback.finish()


class _Player:
    def __init__(self, layers: Sequence[LayerRouting]) -> None:
        self.playback = Playback(layers)
        #: The router that has the next layer's ids, and the token mask of the last one.
        self._chosen, self.token_mask = "", None

    def play(self, call: _Seen) -> Any:
        layer = self._fitting(self.playback.next, call.rows, *call.sizes)
        mask, self.token_mask = call.token_mask if call.token_mask is not None else self.token_mask, None
        ids, *weights = [_masked(_tensor(array, call.device), mask) for array in layer.arrays]
        kept = LayerRouting(ids, weights[0] if weights else None, layer.num_experts)
        for owner, name in private.recomputations():
            _keep(owner, name, kept, call.weights_at)
        chosen, self._chosen = self._chosen, ""
        if weights:
            return call.run_with(ids, weights[0])
        if not call.brings_weights:
            return call.run_with(ids, call.live_weights(ids))
        if not chosen:
            raise Unsupported(
                f"a trace of ids alone needs the logits of each layer, got weights from elsewhere{_where()}; replay a "
                "trace with weights, or route by moe, route, or torch.topk of scores [T, E]"
            )
        # A capacity limit may have dropped ids of `route`. Routers of transformers know no id -1.
        return call.run() if chosen == "route" else call.run_with(ids, call.used(())[1])

    def choose(self, router: str, sizes: tuple[int, int, int], device: torch.device) -> torch.Tensor | None:
        """The ids of the next layer, if its router is asked: `route`, or `topk` by a trace of ids alone."""
        if router == "topk" and not (self.playback.lacks_weights and self.playback.fits(*sizes)):
            return None
        ids = self._fitting(self.playback.choice, *sizes)
        self._chosen = "" if ids is None else router
        return None if ids is None else _tensor(ids, device)

    def _fitting(self, method: Callable[..., Any], *sizes: int) -> Any:
        try:
            return method(*sizes)
        except InvalidInput as error:
            raise InvalidInput(f"{error}{_where()}") from None


def _where() -> str:
    """The place of the running layer in its model, for messages."""
    modules = private.calling_modules()
    if not modules:
        return ""
    names = {module: name for name, module in modules[-1].named_modules()}
    path = max((names.get(module, "") for module in modules), key=len)
    return f" (at {path or 'the model'}, {type(modules[0]).__name__})"


class _CompiledPlayer(_Player):
    """Layers by the address of their weights, because a compiled backward runs any of them again."""

    def __init__(self, layers: Sequence[LayerRouting], weights_at: Sequence[Any]) -> None:
        super().__init__(layers)
        self._layers, self._weights_at = layers, tuple(weights_at)

    def play(self, call: _Seen) -> Any:
        if self._weights_at.count(call.weights_at) != 1 or self.playback.lacks_weights:
            raise Unsupported(
                "a compiled program with checkpoints replays a trace with weights, in layers that run once and have "
                "weights of their own; compile what is checkpointed: checkpoint(torch.compile(block), x)"
            )
        self.playback = Playback((self._layers[self._weights_at.index(call.weights_at)],))
        return super().play(call)


def _keep(owner: Any, name: str, layer: LayerRouting, weights_at: Any) -> None:
    """Let the function that a backward will run replay the layer, behind those before."""
    function = getattr(owner, name)
    kept = getattr(function, "replayed", None)
    if kept is not None:
        kept.append((layer, weights_at))
        return
    kept = [(layer, weights_at)]

    @functools.wraps(function)
    def replaying(*arguments: Any) -> Any:
        layers, addresses = zip(*kept, strict=True)
        player = _CompiledPlayer(layers, addresses) if private.is_compiled(owner) else _Player(layers)
        with _Observer(player.play, player, recomputes=True):
            return function(*arguments)

    setattr(replaying, "replayed", kept)  # noqa: B010
    setattr(owner, name, replaying)


class _WeightsAt:
    """The address of experts' weights, equal as long as nobody freed them: autocast's copies may follow one another."""

    def __init__(self, weights: torch.Tensor) -> None:
        self._address, self._storage = weights.data_ptr(), StorageWeakRef(weights.untyped_storage())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _WeightsAt) or self._address != other._address:
            return False
        return not self._storage.expired() and not other._storage.expired()


class _Call:
    """A whole MoE forward. kind: of its routing. arguments: by name, with its options."""

    def __init__(self, overload: Any, arguments: tuple[Any, ...]) -> None:
        self._overload = overload
        self.kind, self._operator, self._forward = _FORWARDS[overload]
        self.arguments = dict(zip((*self._operator.names, "options"), arguments, strict=True))
        self._spec, *self._formats = decode(self.arguments["options"])

    @property
    def sizes(self) -> tuple[int, int]:
        """(K, E)."""
        *tensors, _ = self.arguments.values()
        bundles = self._operator.signature.shapes(tensors, (self._spec, *self._formats))
        return sizes_of(bundles["experts"], bundles["routing"], self._spec, bundles["expert_map"])

    @property
    def rows(self) -> int:
        return self.arguments["x"].shape[0]

    @property
    def device(self) -> torch.device:
        return self.arguments["x"].device

    @property
    def weights_at(self) -> _WeightsAt:
        return _WeightsAt(self.arguments["experts.gate_up"])

    @property
    def brings_weights(self) -> bool:
        return self.kind is TopK

    @property
    def token_mask(self) -> Any:
        return self.arguments["token_mask"]

    def used(self, results: Any) -> Any:
        """ids and weights."""
        return [self.arguments[f"routing.{name}"] for name in ("ids", "weights")] if self.kind is TopK else results[3:5]

    def live_weights(self, ids: torch.Tensor) -> torch.Tensor:
        """The router's weights fp32 `[T, K]` of ids, without gradients."""
        logits = self._logits() if self.kind is RouterWeights else self.arguments["routing.logits"]
        assert self._spec.router is not None
        return _weigh(logits, ids, self.arguments["token_mask"], self._spec.router)

    def _logits(self) -> torch.Tensor:
        arguments = stages.ROUTER.arguments(
            x=self.arguments["x"], weight=self.arguments["routing.weight"], bias=self.arguments["routing.bias"],
            wide=None, spec=self._spec.logits_spec(),
        )  # fmt: skip
        return stages.ROUTER.overload(*arguments)

    def run(self) -> Any:
        return self._overload(*self.arguments.values())

    def run_with(self, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        tensors = {**self.arguments, "routing.ids": ids, "routing.weights": weights}
        spec = dataclasses.replace(self._spec, router=None)
        results = self._forward.overload(*self._forward.by_name(tensors, spec, *self._formats))
        if self.kind is TopK:
            return results
        # In training, ids, weights and saved tensors follow. Otherwise results must be the caller's own.
        routed, kept = tuple(results[:5]), tuple(results[5:])
        if len(results) == 3:
            routed = (*results, ids.clone(), weights.clone())
        if self.kind is RouterWeights:
            routed = (*routed, self._logits())
        return [*routed, *kept] if kept else routed


class _Routed:
    """The routing of experts that run stage by stage, or on several ranks: `moe_torch.operators.routed`."""

    brings_weights, weights_at, token_mask = True, 0, None

    def __init__(self, ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> None:
        self._pair, self.sizes = (ids, weights), (ids.shape[1], num_experts)
        self.rows, self.device = ids.shape[0], ids.device

    def run(self) -> Any:
        return ROUTED(*self._pair, self.sizes[1])

    def used(self, results: Any) -> Any:
        return self._pair

    def live_weights(self, ids: torch.Tensor) -> NoReturn:
        raise AssertionError("its caller brings weights")

    def run_with(self, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        pair = [new.to(old.dtype) for new, old in zip((ids, weights), self._pair, strict=True)]
        return ROUTED(*pair, self.sizes[1])


_Seen = _Call | _Routed


def _weigh(logits: torch.Tensor, ids: torch.Tensor, token_mask: Any, spec: RouterSpec) -> torch.Tensor:
    arguments = stages.ROUTE.arguments(logits=logits, correction_bias=None, token_mask=token_mask, given=ids, spec=spec)
    return stages.ROUTE.overload(*arguments)[1]


class _Observer(private.TorchDispatchMode):
    """visit: runs a layer. player: of a replay. recomputes: of a checkpoint's backward, which others do not see."""

    supports_higher_order_operators = True

    def __init__(
        self, visit: Callable[[_Seen], Any], player: _Player | None = None, *, recomputes: bool = False
    ) -> None:
        super().__init__()
        self._visit, self._player = visit, player
        self._recomputes = recomputes or private.in_backward()  # opened by what a checkpoint runs again

    def __enter__(self) -> Any:
        WATCH.traces += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        WATCH.traces -= 1
        return super().__exit__(*error)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code calls our operators, too."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = func in _FORWARDS or func in _ROUTERS or func is ROUTED
        if not known or WATCH.hidden or (private.in_backward() and not self._recomputes):
            return func(*args, **(kwargs or {}))
        if func in _ROUTERS:
            # Under DistributedDataParallel, compilers run routers here, and the program runs them again.
            return func(*args, **(kwargs or {})) if private.compiles() else self._route(func, args, kwargs or {})
        x = args[0]
        if private.is_fake(x) or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            raise Unsupported(
                "capture() and replay() see layers that run, got one that is being exported or captured into a CUDA "
                "graph, whose later runs they could not see; do that outside of the block"
            )
        return self._visit(_Routed(*args) if func is ROUTED else _Call(func, tuple(args)))

    def _route(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Let a router choose the trace's ids: `route`, or one of transformers, by topk of scores `[T, E]`."""
        if func is not _TOPK and self._player is not None:
            self._player.token_mask = args[2]
        if func is stages.ROUTE_ROUNDED.overload:
            if self._player is not None:
                self._player.playback.require_weights()
            return func(*args, **kwargs)
        scores, router = args[0], "route" if func is stages.ROUTE.overload else "topk"
        top_k = decode(args[-1])[0].top_k if router == "route" else args[1]
        ids, player = None, self._player
        # dim, and largest: routers take the largest of each row.
        by_row = router == "route" or ((*args[2:3], -1)[0] in (-1, 1) and (*args[3:4], True)[0])
        if player is not None and by_row and scores.dim() == 2 and scores.is_floating_point():
            ids = player.choose(router, (scores.shape[0], top_k, scores.shape[1]), scores.device)
        if ids is None or player is None:
            return func(*args, **kwargs)
        if router == "route":
            logits, _, token_mask, _, options = args
            if not player.playback.lacks_weights:  # the trace dropped slots, which count in sums of weights
                ids = torch.where(ids < 0, func(*args, **kwargs)[0], ids)
            return func(logits, None, token_mask, ids, options)
        ids = ids.clamp(min=0).long()
        return scores.gather(1, ids), ids


def _masked(array: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
    """ids or weights `[T, K]` without those of masked tokens."""
    if token_mask is None or len(token_mask) != len(array):
        return array
    return array.masked_fill(~token_mask[:, None], 0 if array.is_floating_point() else -1)


def _tensor(array: Any, device: torch.device) -> torch.Tensor:
    tensor = array.to(device) if isinstance(array, torch.Tensor) else torch.tensor(array, device=device)
    return tensor.contiguous()
