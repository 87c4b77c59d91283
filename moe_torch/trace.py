"""Record the experts that every token visits, and replay them, in any torch model with experts on Moebius.

    with capture() as recording:
        model(x)
    recording.trace().save("routing.safetensors")

    with replay(RoutingTrace.load("routing.safetensors")):   # perhaps captured by moe_jax.trace
        model(x)

Both see every whole MoE forward (`moe_torch.MoE`, `moe_torch.ops.moe`, the experts of transformers) in the block and
its thread, in order, compiled models included. They do not see replayed CUDA graphs, nor experts that run stage by
stage, such as those with a norm of each expert's result. Capturing a graph or exporting a program inside of the block
raises Unsupported.

A replayed layer with a router still computes its logits for the losses. Its ids and weights are the trace's, and its
token mask still holds. With a capacity limit the layer's own choices stay in its MoEAux. If the caller of `moe` brings
ids and weights, output and counts follow the trace, and the returned ids and weights are the caller's (moe_jax returns
the trace's).

In training the gradient of the trace's weights flows into the router for the trace's ids, at the live logits, also
outside of the block. Do not checkpoint replayed layers: `torch.utils.checkpoint` runs them again without the trace.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.specs.operands import RouterWeights, TopK
from moe_core.trace import LayerRouting, Playback, RoutingTrace, layers_of, sizes_of
from moe_torch.bridge import private
from moe_torch.bridge.operator import Operator
from moe_torch.bridge.options import decode
from moe_torch.operators import stages
from moe_torch.operators import table as operators
from moe_torch.operators.kinds import as_float32, as_int32
from moe_torch.operators.table import MOE_QUANTIZED, QUANTIZED_TRAINING, TRAINING

__all__ = ["LayerRouting", "Recording", "RoutingTrace", "capture", "replay"]

#: Forward -> the class of its routing, its operator, and the like operator that takes ids and weights.
_FORWARDS: dict[Any, tuple[type, Operator, Operator]] = {
    operator.overload: (kind, operator, forwards[TopK])
    for forwards in (operators.MOE, MOE_QUANTIZED, TRAINING, QUANTIZED_TRAINING)
    for kind, operator in forwards.items()
}


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
    """Record the routing of every whole MoE forward in the block. Raises InvalidInput if none ran."""
    recording = Recording()

    def record(call: _Call) -> Any:
        results = call.run()
        arguments = call.arguments
        ids, weights = (arguments["routing.ids"], arguments["routing.weights"]) if call.kind is TopK else results[3:5]
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
    """Run the whole MoE forwards in the block with the ids and weights of a trace, in order.

    Args:
        trace: a RoutingTrace, or layers with torch tensors (`Recording.layers`).

    Raises:
        InvalidInput: a layer's tokens, top-k or experts differ from the trace's, or other layers run than the trace
            has.
    """
    playback = Playback(layers_of(trace))

    def play(call: _Call) -> Any:
        x = call.arguments["x"]
        layer = playback.next(x.shape[0], *call.sizes)
        return call.run_with(_tensor(layer.ids, x.device), _tensor(layer.weights, x.device))

    with _Observer(play):
        yield
    playback.finish()


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
            arguments = stages.ROUTER.arguments(
                x=self.arguments["x"], weight=self.arguments["routing.weight"], bias=self.arguments["routing.bias"],
                wide=None, spec=self._spec.logits_spec(),
            )  # fmt: skip
            routed = (*routed, stages.ROUTER.overload(*arguments))
        return [*routed, *kept] if kept else routed


class _Observer(private.TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, visit: Callable[[_Call], Any]) -> None:
        super().__init__()
        self._visit = visit

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code calls our operators, too."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _FORWARDS:
            return func(*args, **(kwargs or {}))
        x = args[0]
        if private.is_fake(x) or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            raise Unsupported(
                "capture() and replay() see layers that run, got one that is being exported or captured into a CUDA "
                "graph, whose later runs they could not see; do that outside of the block"
            )
        return self._visit(_Call(func, tuple(args)))


def _tensor(array: Any, device: torch.device) -> torch.Tensor:
    return array.to(device) if isinstance(array, torch.Tensor) else torch.tensor(array, device=device)
