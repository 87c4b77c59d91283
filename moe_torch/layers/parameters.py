"""The parts of a layer: parameters, and the computation of each part."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedSpec, QuantizedTensor, quantized_shapes
from moe_core.layers import HUGGING_FACE, MoELayerSpec, Parameter, Storage, tiled_specs
from moe_core.ops.lora.beyond import adapted_logits, shared_output
from moe_core.specs import MoESpec
from moe_core.specs.operands import ExpertWeights, RouterWeights, SharedExpert, TopK, named_arrays
from moe_torch import ops
from moe_torch.bridge.arrays import require_same_device
from moe_torch.bridge.options import TORCH_DTYPES
from moe_torch.layers.casts import at_least_float32, autocast
from moe_torch.layers.lora.stages import LowRank, run_stages
from moe_torch.layers.shards import moved_bytes, on_own_experts
from moe_torch.operators.beyond import ARRAYS
from moe_torch.quantize import prepack_weights, restore_weights, tile


class QuantizedMatrix(torch.nn.Module):
    """The arrays of a quantised matrix as buffers, which keep their dtypes. A state_dict has the published layout."""

    values: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None

    def __init__(self, spec: QuantizedSpec, parameters: Sequence[Parameter], device: torch.device | str | None) -> None:
        super().__init__()
        self.spec = spec
        present = {parameter.name.rpartition(".")[2]: parameter for parameter in parameters}
        for name in ("values", "scales", "zero_points"):
            array = present.get(name)
            made = None
            if array is not None:
                assert array.dtype is not None
                made = torch.empty(array.shape, dtype=TORCH_DTYPES[array.dtype], device=device)
            self.register_buffer(name, made)

    def tensor(self) -> QuantizedTensor:
        return QuantizedTensor(self.spec, self.values, self.scales, self.zero_points)

    def hold(self, tensor: QuantizedTensor) -> None:
        self.spec = tensor.spec
        for name, array in named_arrays(tensor):
            setattr(self, name, array)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.spec.tiling is None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        for name, array in named_arrays(on_own_experts(restore_weights, self.tensor()), prefix):
            destination[name] = array

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Tile published arrays for a tiled matrix."""
        tiling, names = self.spec.tiling, [name for name, _ in named_arrays(self.tensor())]
        present = [name for name in names if f"{prefix}{name}" in state_dict]
        if tiling is not None and present and present != names:
            missing = ", ".join(f"{prefix}{name}" for name in names if name not in present)
            raise InvalidInput(
                f"state_dict must hold every array of a prepacked matrix, which are put into order together, got "
                f"{prefix}{present[0]} without {missing}; load them in one bucket, or call restore_weights before "
                "loading and prepack_weights after it"
            )
        if tiling is not None and all(f"{prefix}{name}" in state_dict for name in names):
            published = QuantizedSpec(self.spec.format)
            arrays = {name: state_dict[f"{prefix}{name}"] for name in names}
            wanted = quantized_shapes(published, self.tensor().shape)._asdict()
            if all(array.shape == wanted[name] for name, array in arrays.items()):
                tensor = on_own_experts(tile, QuantizedTensor(published, **arrays), tiling.order)
                state_dict = {**state_dict, **dict(named_arrays(tensor, prefix))}
        for name, buffer in self._buffers.items():
            given = state_dict.get(f"{prefix}{name}")
            kinds = {torch.float32: (torch.float32, torch.bfloat16, torch.float16)}  # these widen exactly
            if buffer is not None and given is not None and given.dtype not in kinds.get(buffer.dtype, (buffer.dtype,)):
                rest[-1].append(
                    f"{prefix}{name} must be {buffer.dtype}, got {given.dtype}, and copies convert numbers; load the "
                    "format's own bytes (tensor.view(dtype))"
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedMatrix:
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = moved_bytes(buffer, fn)
        return self

    def extra_repr(self) -> str:
        tiled = "" if self.spec.tiling is None else f", tiled in order {self.spec.tiling.order}"
        return f"{self.spec.format}, {self.spec.layout}, {list(self.values.shape)}{tiled}"


def _buffer_dtype(dtype: torch.dtype | None) -> torch.dtype:
    return torch.float64 if (dtype or torch.get_default_dtype()) == torch.float64 else torch.float32


class ParameterGroup(torch.nn.Module):
    """The arrays of one part of a layer, by NAMES, None if absent. trained: parameters require a gradient."""

    NAMES: ClassVar[tuple[str, ...]]
    #: The layer sets both.
    spec: MoESpec
    layer_spec: MoELayerSpec
    #: True if the layer has adapters of this router or shared expert.
    adapted: bool = False

    def __init__(
        self,
        parameters: Sequence[Parameter],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        quantized: QuantizedSpec | None = None,
        *,
        trained: bool,
    ) -> None:
        torch.nn.Module.__init__(self)
        present = {parameter.name.split(".")[1]: parameter for parameter in parameters}
        for name in self.NAMES:
            parameter = present.get(name)
            if parameter is None:
                self.register_parameter(name, None)
            elif parameter.role == "quantized":
                assert quantized is not None
                arrays = [array for array in parameters if array.name.split(".")[1] == name]
                self.add_module(name, QuantizedMatrix(quantized, arrays, device))
            elif parameter.role in ("buffer", "table"):
                stored = torch.int32 if parameter.role == "table" else _buffer_dtype(dtype)
                self.register_buffer(name, torch.empty(parameter.shape, dtype=stored, device=device))
            else:
                value = torch.empty(parameter.shape, dtype=dtype, device=device)
                self.register_parameter(name, torch.nn.Parameter(value, requires_grad=trained))

    def _require_adapters(self, lora: Any) -> None:
        if self.adapted and lora is None:
            raise Unsupported(
                f"{type(self).__name__} must be called by its layer, which has adapters of it, got a call alone; call "
                "the layer"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> ParameterGroup:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            if buffer is not None and after is not None and after.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(after.device, _buffer_dtype(after.dtype))
        return self


class RouterParameters(ParameterGroup, torch.nn.Linear):
    """`logits = router(x)`: fp32 `[T, E]` of x `[T, D]`.

    weight `[E, D]`, bias `[E]`; buffers correction_bias fp32 `[E]` and table int32 `[V, K]`; norm `[D]`, factors of
    normalised rows; expert_scale `[E]`, for `scaled`. A Linear, so that adapters and other tools find it.
    """

    NAMES = ("weight", "bias", "correction_bias", "norm", "table", "expert_scale")
    correction_bias: torch.Tensor | None
    norm: torch.Tensor | None
    table: torch.Tensor | None
    expert_scale: torch.Tensor | None

    @property
    def in_features(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.weight.shape[0]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.normal_(std=self.in_features**-0.5)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, input: torch.Tensor, lora: Any = None) -> torch.Tensor:
        """lora: AdaptedTokens."""
        self._require_adapters(lora)
        if self.norm is not None:
            assert self.layer_spec.router_norm is not None
            input = ops.rms_norm(input, self.norm, self.layer_spec.router_norm)
        if lora is not None:
            return adapted_logits(ARRAYS, input, RouterWeights(self.weight, self.bias), self.spec, lora)
        return ops.router(input, self.weight, bias=self.bias, spec=self.spec.logits_spec())

    def scaled(self, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Weights `[T, K]` times the scales of experts ids `[T, K]` (-1: 0), with gradients summed as the router's."""
        scale = self.expert_scale
        if scale is None:
            return weights
        require_here("router.expert_scale", scale, weights)
        scale = at_least_float32(scale)
        rows = ops.router(scale.new_zeros(ids.shape[0], 1), scale.new_zeros(1, scale.shape[0]), bias=scale)
        return weights * rows.gather(1, ids.clamp(min=0).long())


class Uncast:
    """Weights of slots, which keep their dtype where a wrapper casts tensors."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights


class ExpertParameters(ParameterGroup):
    """`y = experts(x, ids, weights)`: `[T, D]` of x `[T, D]`, ids and weights `[T, K]` in any dtype of `TopK`.

    `norm` `[D]`: factors of a norm of each expert's result. Arrays are the fields of `ExpertWeights`.
    """

    NAMES = ("gate_up", "down", "up", "gate_up_bias", "up_bias", "down_bias")
    # Tensors, or QuantizedMatrix.
    gate_up: Any
    down: Any
    up: Any
    gate_up_bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    #: A `moe_torch.layers.parallel.LayerExchange`, if experts are on several ranks.
    exchange: Any = None

    @property
    def is_transposed(self) -> bool:
        """Return True if matrices are `[E, in, out]`, for adapters."""
        return self.spec.weight_layout == "in_out"

    @property
    def moe(self) -> Any:
        return ops.moe if self.exchange is None else self.exchange.moe

    def operands(self) -> ExpertWeights:
        """On several ranks, this rank's."""
        arrays = {name: getattr(self, name) for name in self.NAMES}
        arrays = {name: one.tensor() if isinstance(one, QuantizedMatrix) else one for name, one in arrays.items()}
        if self.exchange is not None:
            arrays = {name: self.exchange.local(one) for name, one in arrays.items()}
        return ExpertWeights(**{name: autocast(one, name) for name, one in arrays.items()})

    def forward(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor | Uncast,
        norm: torch.Tensor | None = None,
        *,
        low_rank: LowRank | None = None,
    ) -> torch.Tensor:
        spec = dataclasses.replace(self.spec, router=None, shared_activation=None)
        routing = TopK(ids, weights.weights if isinstance(weights, Uncast) else weights)
        x, operands = autocast(x), self.operands()
        if norm is None and low_rank is None:
            return self.moe(x, operands, routing, spec).output
        of_each = self.layer_spec.norm_of_experts
        by = None if norm is None or of_each is None else lambda slots: ops.rms_norm(slots, norm, of_each)
        return run_stages(x, operands, routing, spec, low_rank=low_rank, norm=by)


def require_here(name: str, array: Any, x: torch.Tensor) -> Any:
    """Return an array, or refuse one that a wrapper gathers or loads for its part's own call alone."""
    if hasattr(array, "device_mesh"):
        part = name.partition(".")[0]
        raise Unsupported(f"{name} must be whole outside of layer.{part}, got a shard; call fully_shard on the layer")
    require_same_device(name, array, "x", x)
    return array


class SharedParameters(ParameterGroup):
    """`y = shared_experts(x)`: `[T, D]` of x `[T, D]`. Arrays are the fields of `SharedExpert`."""

    NAMES = ("gate_up", "down", "up", "gate")
    gate_up: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor | None
    gate: torch.Tensor | None

    def operands(self) -> SharedExpert:
        return SharedExpert(**{name: autocast(getattr(self, name), name) for name in self.NAMES})

    def forward(self, x: torch.Tensor, lora: Any = None) -> torch.Tensor:
        """lora: as of `RouterParameters`."""
        self._require_adapters(lora)
        spec = self.spec
        if spec.main_grad:
            raise Unsupported(
                "layer.shared_experts must be without hooks, wrappers and adapters where main_grad=True: called alone, "
                "its matrices have their gradients in .grad; put them on the layer, or leave the adapters out"
            )
        return shared_output(ARRAYS, autocast(x), self.operands(), spec, lora)


def is_overridden(kind: type[torch.nn.Module]) -> bool:
    """Return True if a class of a part has a forward that is not the library's."""
    return not kind.forward.__module__.startswith("moe_torch.layers.")


def has_own_call(part: torch.nn.Module) -> bool:
    """Return True if a call runs more than the part's forward: hooks, a wrapper, a replaced or overridden forward."""
    if not isinstance(part, ParameterGroup) or is_overridden(type(part)):
        return True
    attributes = part.__dict__
    return bool(
        attributes["_forward_pre_hooks"]
        or attributes["_forward_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or "forward" in attributes
    )


def is_gathered(part: Any) -> bool:
    """Return True for a unit of `fully_shard`: its call gathers parameters, perhaps in another dtype."""
    return hasattr(part, "set_requires_gradient_sync")


def own_part(part: Any, name: str) -> Any:
    """The layer's module in a wrapper: of PEFT's `modules_to_save`, the copy that its call runs."""
    copies = getattr(part, "modules_to_save", None)
    if copies is not None and not part.disable_adapters:
        part = next((copies[name] for name in part.active_adapters[:1] if name in copies), part)
    for module in part.modules():
        if isinstance(module, ParameterGroup):
            return module
    raise InvalidInput(
        f"layer.{name} must be the layer's own module or a wrapper that holds it, got {type(part).__name__}; wrap the "
        "module instead of replacing it"
    )


class PrepackedExperts(torch.nn.Module):
    spec: MoELayerSpec
    storage: Storage
    _is_quantized: bool
    _parts: Callable[[], dict[str, Any]]
    _tensors: Callable[[], dict[str, torch.Tensor]]
    _set_options: Callable[[], None]

    @property
    def is_prepacked(self) -> bool:
        return self._is_quantized and self._parts()["experts"].down.spec.tiling is not None

    def prepack_weights(self) -> None:
        """Put loaded quantised experts into the order of Hopper's kernels, in place: `moe_torch.prepack_weights`.

        The layer then has no gradients: call it under `torch.no_grad()`, and train after `restore_weights`. state_dict,
        load_state_dict, load_weights and export_weights keep the published layout. Raises InvalidInput for experts that
        cannot be tiled, and Unsupported for ones sharded other than by experts.
        """
        tiled_specs(self.spec, self.storage)
        self._hold(on_own_experts(prepack_weights, self._matrices(), self.spec.moe_spec(HUGGING_FACE)))

    def restore_weights(self) -> None:
        """Undo `prepack_weights`, in place. Other layers stay as they are."""
        if self.is_prepacked:
            self._hold(on_own_experts(restore_weights, self._matrices()))

    @contextlib.contextmanager
    def published(self) -> Iterator[dict[str, torch.Tensor]]:
        """Parameters and buffers by name, in the published layout inside the `with` block."""
        prepacked = self.is_prepacked
        self.restore_weights()
        try:
            yield self._tensors()
        finally:
            if prepacked:
                self.prepack_weights()

    def restored_tensors(self) -> dict[str, torch.Tensor]:
        """Arrays of prepacked matrices in their published layout; empty for other layers."""
        if not self.is_prepacked:
            return {}
        return dict(named_arrays(on_own_experts(restore_weights, self._matrices()), "experts."))

    def _matrices(self) -> ExpertWeights:
        experts = self._parts()["experts"]
        return ExpertWeights(experts.gate_up.tensor(), experts.down.tensor())

    def _hold(self, matrices: ExpertWeights) -> None:
        experts = self._parts()["experts"]
        experts.gate_up.hold(matrices.gate_up)
        experts.down.hold(matrices.down)
        self._set_options()
