"""A checkpoint directory and its MoE layers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_core.base import dtypes
from moe_core.base.files import path_of
from moe_core.checkpoint import quantized
from moe_core.checkpoint.config import read_config
from moe_core.checkpoint.families import Architecture, architecture_of, text_model
from moe_core.checkpoint.packing import Packing
from moe_core.checkpoint.quantization import read_quantization
from moe_core.checkpoint.stacks import LayerNames, found_names, layer_stacks
from moe_core.checkpoint.storage import ReadProgress, Stack, StackReader, TensorIndex, find_tensors
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedTensor, Scheme
from moe_core.layers.around import LayerPart
from moe_core.layers.weights import layer_parts, layer_router
from moe_core.specs import ExpertWeights, MoESpec, RouterWeights, SharedExpert

#: Endings of tensor names in quantised storage only.
_QUANTISED = ("_blocks", "_scales", "weight_scale_inv", "weight_scale", "weight_packed", "qweight")


@dataclass(frozen=True, eq=False)
class MoELayer:
    """One MoE layer. spec computes with experts, router and shared (NumPy arrays) as they are.

    Weights are in the family's fused storage: `[E, 2F, D]`, `[E, D, F]` with gate_layout `halves` (weight_layout
    `out_in`: most families) or `[E, D, 2F]`, `[E, F, D]` (`in_out`: gpt_oss, interleaved, aria, llama4). Per-expert
    storage is stacked into the same form, so that both give equal bits. The router weight is `[E, D]` (`out_in`). spec
    keeps fp32 logits; replace logits_dtype to reproduce models that round them.

    Weights of a quantised checkpoint are `QuantizedTensor`s with the stored bits, all `out_in` (gpt_oss still
    interleaved). gate and up are apart (`separate`) if one group of the format would hold rows of both. scheme: the
    formats in config.json, None for a plain layer. before, after, output: as in `LayerWeights`.
    """

    layer: int
    family: str
    spec: MoESpec
    experts: ExpertWeights
    router: RouterWeights
    shared: SharedExpert | None
    d_model: int
    d_ff: int
    num_experts: int
    scheme: Scheme | None = None
    before: LayerPart | None = None
    after: LayerPart | None = None
    output: LayerPart | None = None

    @property
    def dtype(self) -> str:
        """Canonical dtype of the experts' weights, or of the router's weight if they are quantised."""
        weight = self.experts.gate_up
        return dtypes.canonical((self.router.weight if isinstance(weight, QuantizedTensor) else weight).dtype)

    def dequantized(self, dtype: str = "bfloat16") -> MoELayer:
        """The layer with plain weights in `dtype`: each is code x scale in fp32, cast once.

        The router and fp32 biases are kept; other plain weights and biases are cast.
        """

        def is_cast(name: str, array: Any) -> bool:
            return not (name.endswith("_bias") and array.dtype.name == "float32")

        parts = {name: getattr(self, name) for name in ("experts", "shared", "before", "after", "output")}
        present = {name: part for name, part in parts.items() if part is not None}
        plain = {name: quantized.plain_bundle(part, dtype, is_cast) for name, part in present.items()}
        return dataclasses.replace(self, scheme=None, **plain)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint directory: the facts in config.json, and the places of the tensors.

    packing: the storage of quantised weights, or None. nested: the path to `config` in a multimodal model's
    config.json.
    """

    path: Path
    family: str
    config: Mapping[str, Any] = field(repr=False)
    architecture: Architecture = field(repr=False)
    index: TensorIndex = field(repr=False)
    packing: Packing | None = field(default=None, repr=False)
    nested: tuple[str, ...] = field(default=(), repr=False)

    @property
    def scheme(self) -> Scheme | None:
        return None if self.packing is None else self.packing.scheme

    @property
    def num_layers(self) -> int:
        return self.architecture.num_layers

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return self.architecture.moe_layers

    def layer(self, layer: int, progress: Callable[[ReadProgress], object] | None = None) -> MoELayer:
        """Read the tensors of one MoE layer; progress is called as bytes arrive.

        Everything is checked against config.json before the first weight is read. Raises InvalidInput for a layer out
        of range or without experts, missing tensors, and shapes or dtypes that disagree; Unsupported for quantised
        tensors that config.json does not describe.
        """
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < self.num_layers:
            raise InvalidInput(
                f"layer must be an integer from 0 to {self.num_layers - 1}, got {layer!r}; {self.path} has "
                f"{self.num_layers} layers"
            )
        if layer not in self.moe_layers:
            first = f"the first MoE layer is {self.moe_layers[0]}" if self.moe_layers else "no layer has experts"
            raise InvalidInput(
                f"layer must be one with experts ({self.architecture.moe_layers_rule}), got {layer}, which is dense; "
                f"{first}"
            )
        names = self._names(layer)
        with StackReader(self.index) as reader:
            if self.packing is None:
                _refuse_quantised(self.index, names.block, reader)
            architecture, stacks = self._layout(names, reader)
            stored = reader.check(stacks)
            _require_one_dtype(stored)
            arrays: dict[str, Any] = reader.read(stacks, stored, progress)
        is_packed = "experts.gate_up" not in arrays
        if self.packing is not None:
            arrays = quantized.assemble(arrays, self.packing)

        def bundle(kind: type, prefix: str) -> Any:
            return kind(**{name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)})

        experts = bundle(ExpertWeights, "experts.")
        router = layer_router(bundle(dict, "router."), architecture.router_norm, architecture.sparse_mixer)
        shared = bundle(SharedExpert, "shared.") if architecture.shared_d_ff else None
        sizes = (architecture.d_model, architecture.d_ff, architecture.num_experts)
        scheme = self.scheme if is_packed else None
        spec, around = architecture.spec_of(layer), layer_parts(arrays, architecture)
        return MoELayer(layer, self.family, spec, experts, router, shared, *sizes, scheme, **around)

    def stacks(self, layer: int) -> dict[str, Stack]:
        """The arrays of a layer by field name, and the file tensors of each."""
        with StackReader(self.index) as reader:
            return self._layout(self._names(layer), reader)[1]

    def _layout(self, names: LayerNames, reader: StackReader) -> tuple[Architecture, dict[str, Stack]]:
        packing, architecture = self.packing, self.architecture
        if architecture.naming.turned and names.fused is not None and names.fused[0] in self.index.files:
            # As in transformers, the shape decides and its own orientation is preferred.
            shape = layer_stacks(architecture, names)["experts.gate_up"].shape
            stored = reader.stored_shape(names.fused[0])
            names = dataclasses.replace(names, turned=stored != shape and stored == (shape[0], shape[2], shape[1]))
        stacks = layer_stacks(architecture, names)
        _refuse_unread(self.index, names, stacks, reader)
        if packing is None:
            return architecture, stacks
        if quantized.is_quantized(stacks["experts.gate_up"].parts[0].tensor, packing, self.index):
            architecture = quantized.quantized_architecture(architecture, stacks, packing, self.index)
            separate = architecture.spec.activation.gate_layout == "separate"
            stacks = quantized.quantized_stacks(layer_stacks(architecture, names), packing, self.index, separate)
        quantized.refuse_unread(self.index, names.block, stacks)
        return architecture, stacks

    def block(self, layer: int) -> str:
        """The prefix of the layer's router and experts: `model.layers.3.mlp.`."""
        return self._names(layer).block

    def _names(self, layer: int) -> LayerNames:
        def holds(weight: str) -> bool:
            packed = self.packing is not None and quantized.is_quantized(weight, self.packing, self.index)
            return packed or weight in self.index.files

        return found_names(self.architecture, layer, self.index, holds, self.nested)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a Hugging Face checkpoint directory (config.json and safetensors) without reading weights.

    Raises InvalidInput for a missing directory, config.json or tensor index and for settings that are missing or
    disagree; Unsupported for an unknown model_type, an unreadable quantization_config, or without safetensors.
    """
    directory = path_of(path)
    config = text_model(read_config(directory))
    architecture = architecture_of(config)
    packing = read_quantization(config.quantization, config.model_type)
    index = find_tensors(directory)
    return Checkpoint(directory, config.model_type, config.settings, architecture, index, packing, config.nested)


def _refuse_quantised(index: TensorIndex, block: str, reader: StackReader) -> None:
    for name in index.below(block):
        if name.endswith(_QUANTISED):
            raise Unsupported(
                f"{name} in {index.files[name]} ({reader.stored_dtype(name)}) belongs to a quantised layer, for which "
                "config.json has no quantization_config; dequantise the checkpoint to bfloat16 first"
            )


def _refuse_unread(index: TensorIndex, names: LayerNames, stacks: Mapping[str, Stack], reader: StackReader) -> None:
    read = {part.tensor for stack in stacks.values() for part in stack.parts}
    modules = sorted({name.removesuffix("weight") for name in read if name.endswith(".weight")})
    held = [(module, name) for module in modules for name in index.below(module)]
    stored = [name for module, name in held if name.endswith("bias") and "." not in name.removeprefix(module)]
    stored += [name for name in names.shared if name in index.files and 0 not in reader.stored_shape(name)]
    unread = [name for name in stored if name not in read]
    if unread:
        raise Unsupported(
            f"{unread[0]} in {index.files[unread[0]]} is no part of the layer that config.json describes, so the layer "
            "would compute something else; use the config.json that belongs to the weights, or keep the model's block"
        )


def _require_one_dtype(stored: Mapping[str, str]) -> None:
    """Both multiply one x. Biases may be fp32."""
    free = ("router.", "output.", "before.norm")
    plain = [name for name in stored if not name.startswith(free) and not name.endswith(quantized.ARRAYS)]
    weights = {name: stored[name] for name in plain}
    wanted = weights.get("experts.gate_up", stored["router.weight"])
    for name, dtype in weights.items():
        if dtype != wanted and not (name.endswith("_bias") and dtype == "float32"):
            raise InvalidInput(
                f"{name} must be {wanted} like experts.gate_up, got {dtype}; cast the checkpoint to one dtype"
            )
