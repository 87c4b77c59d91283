"""A checkpoint directory and its MoE layers."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_core.base import dtypes
from moe_core.base.files import path_of
from moe_core.checkpoint import quantized
from moe_core.checkpoint.config import inside, read_config, read_json
from moe_core.checkpoint.families import Architecture, architecture_of, text_model
from moe_core.checkpoint.gguf import gguf_files, gguf_quantization, with_transformers
from moe_core.checkpoint.packing import Packing
from moe_core.checkpoint.quantization import read_quantization
from moe_core.checkpoint.resolve import tensors_of
from moe_core.checkpoint.rules import Quantization
from moe_core.checkpoint.stacks import LayerNames, found_names, gguf_names, layer_stacks, written_names
from moe_core.checkpoint.storage import ReadProgress, Stack, StackReader, TensorIndex, find_tensors
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedTensor, Scheme
from moe_core.layers.around import LayerPart
from moe_core.layers.weights import layer_parts, layer_router
from moe_core.specs import ExpertWeights, MoESpec, RouterWeights, SharedExpert

NO_SHARED_EXPERT = (
    "layers are read without the shared experts of config.json: no file holds a tensor of one. Other loaders, such as "
    "transformers, fill theirs with random numbers"
)


@dataclass(frozen=True, eq=False)
class MoELayer:
    """One MoE layer. spec computes with experts, router and shared (NumPy arrays) as they are.

    Weights are in the family's fused storage: `[E, 2F, D]`, `[E, D, F]` with gate_layout `halves` (weight_layout
    `out_in`: most families) or `[E, D, 2F]`, `[E, F, D]` (`in_out`: gpt_oss, interleaved, aria, llama4). Per-expert
    storage is stacked into the same form, so that both give equal bits. The router weight is `[E, D]` (`out_in`). spec
    keeps fp32 logits; replace logits_dtype to reproduce models that round them.

    Weights of a quantised checkpoint are `QuantizedTensor`s with the stored bits, all `out_in` (gpt_oss still
    interleaved). gate and up are apart (`separate`) if one group of the format would hold rows of both. scheme: the
    formats in config.json, None for a plain layer. Experts in several formats, or in one that no kernel takes, are
    dequantised, and notes say so. before, after, output: as in `LayerWeights`.
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
    notes: tuple[str, ...] = ()

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
            return not (name.endswith(("_bias", "_input_scale")) and array.dtype.name == "float32")

        parts = {name: getattr(self, name) for name in ("experts", "shared", "before", "after", "output")}
        present = {name: part for name, part in parts.items() if part is not None}
        plain = {name: quantized.plain_bundle(part, dtype, is_cast) for name, part in present.items()}
        no_scales = {"gate_up_input_scale": None, "down_input_scale": None}
        plain["experts"] = dataclasses.replace(plain["experts"], **no_scales)
        return dataclasses.replace(self, scheme=None, **plain)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint directory: the facts in config.json, and the places of the tensors.

    quantization: the rules of its quantization_config, or None. nested: the path to `config` in a multimodal model's
    config.json. document: config.json, or the same from GGUF's metadata. only: the GGUF file that was named.
    """

    path: Path
    family: str
    config: Mapping[str, Any] = field(repr=False)
    architecture: Architecture = field(repr=False)
    index: TensorIndex = field(repr=False)
    quantization: Quantization | None = field(default=None, repr=False)
    nested: tuple[str, ...] = field(default=(), repr=False)
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)
    only: str | None = None

    @property
    def packing(self) -> Packing | None:
        """The first storage that config.json declares for an expert. Each layer's tensors decide."""
        if self.quantization is None or not self.moe_layers:
            return None
        names = written_names(self.architecture, self.moe_layers[0], None, self.nested)
        experts = [f"{block}experts" for block in (names.block, names.canonical)]
        packings = self.quantization.packings((*(f"{block}.0.gate_proj" for block in experts), *experts))
        return next(iter(packings), None)

    @property
    def scheme(self) -> Scheme | None:
        """The experts' formats by config.json, or None. `MoELayer.scheme` has those of a layer."""
        return None if self.packing is None else self.packing.scheme

    @property
    def num_layers(self) -> int:
        return self.architecture.num_layers

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return self.architecture.moe_layers

    def layer(
        self, layer: int, progress: Callable[[ReadProgress], object] | None = None, *, allow_bad_scales: bool = False
    ) -> MoELayer:
        """Read the tensors of one MoE layer; progress is called as bytes arrive.

        Everything is checked against config.json before the first weight is read. Warns, as MoELayer.notes say, of
        experts that are dequantised, of activations that stay plain, and of shared experts that config.json has but no
        layer in the files. allow_bad_scales: take scales that are NaN,
        infinite or 0. Raises InvalidInput for a layer out of range or without experts, missing tensors, shapes or
        dtypes that disagree, and such scales; Unsupported for quantised tensors that config.json does not describe.
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
        with StackReader(self.index) as reader:
            layout = self._layout(layer, reader, allow_bad_scales)
            stored = reader.check(layout.stacks)
            _require_one_dtype(stored)
            scales = quantized.read_input_scales(layout, reader, self.index, allow_bad_scales)
            arrays: dict[str, Any] = reader.read(layout.stacks, stored, progress) | scales
        for note in layout.notes:
            warnings.warn(f"{self.path}: {note}", stacklevel=2)
        architecture, arrays = layout.architecture, quantized.assemble(arrays, layout.packings)

        def bundle(kind: type, prefix: str) -> Any:
            return kind(**{name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)})

        experts = bundle(ExpertWeights, "experts.")
        router = layer_router(bundle(dict, "router."), architecture.router_norm, architecture.sparse_mixer)
        shared = bundle(SharedExpert, "shared.") if architecture.shared_d_ff else None
        sizes = (architecture.d_model, architecture.d_ff, architecture.num_experts)
        spec, around = architecture.spec_of(layer), layer_parts(arrays, architecture)
        weights = (spec, experts, router, shared, *sizes, layout.scheme)
        return MoELayer(layer, self.family, *weights, **around, notes=layout.notes)

    def stacks(self, layer: int) -> Mapping[str, Stack]:
        """The arrays of a layer by field name, and the file tensors of each."""
        with StackReader(self.index) as reader:
            return self._layout(layer, reader).stacks

    def layout(self, layer: int) -> quantized.Layout:
        """How the files store a layer, and how it is read."""
        with StackReader(self.index) as reader:
            return self._layout(layer, reader)

    def _layout(self, layer: int, reader: StackReader, allow_bad_scales: bool = False) -> quantized.Layout:
        names, architecture = self.names(layer), self.architecture
        if architecture.naming.turned and not names.gguf and names.fused and names.fused[0] in self.index.files:
            # As in transformers, the shape decides and its own orientation is preferred.
            shape = layer_stacks(architecture, names)["experts.gate_up"].shape
            stored = reader.stored_shape(names.fused[0])
            names = dataclasses.replace(names, turned=stored != shape and stored == (shape[0], shape[2], shape[1]))
        if names.gguf:
            # Converters of other years leave out axes of one element.
            stored = {"flat_gate": names.shared_gate, "flat_bias": names.correction_bias}
            held = {field: reader.stored_shape(name) for field, name in stored.items() if name in self.index.files}
            names = dataclasses.replace(names, **{field: len(shape) == 1 for field, shape in held.items()})
        if (names.fused is None or names.gguf) and architecture.spec.activation.gate_layout == "interleaved":
            # Experts that were split have gate and up in modules of their own.
            architecture = dataclasses.replace(architecture, spec=architecture.spec.with_gate_layout("halves"))
        dtype = self.config.get("dtype") or self.config.get("torch_dtype")
        layout = quantized.layer_layout(
            architecture, names, self.quantization, self.index, reader, dtype, allow_bad_scales
        )
        _refuse_unread(self.index, names, layout.stacks, reader)
        if architecture.lacks_shared:
            return dataclasses.replace(layout, notes=(*layout.notes, NO_SHARED_EXPERT))
        return layout

    def block(self, layer: int) -> str:
        """The prefix of the layer's router and experts: `model.layers.3.mlp.`."""
        return self.names(layer).block

    def names(self, layer: int) -> LayerNames:
        def holds(weight: str) -> bool:
            return bool(tensors_of(weight, self.index))

        if self.index.is_gguf:
            return gguf_names(self.architecture, layer, self.index)
        return found_names(self.architecture, layer, self.index, holds, self.nested)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a Hugging Face checkpoint directory (config.json and safetensors) without reading weights.

    Or a GGUF file, or a directory with one. Without a config.json beside it, transformers makes one from its metadata.

    Raises InvalidInput for a missing directory, config.json or tensor index and for settings that are missing or
    disagree; Unsupported for an unknown model_type, an unreadable quantization_config, or without safetensors.
    """
    directory, only = path_of(path), None
    if directory.suffix == ".gguf" and directory.is_file():
        directory, only = directory.parent, directory.name
    lone = not (directory / "config.json").exists() and gguf_files(directory, only)
    index = find_tensors(directory, only) if lone else None
    document = (
        with_transformers(directory / lone[0]).config_of(index, lone[0]) if lone and index else read_config(directory)
    )
    config = text_model(document)
    architecture = architecture_of(config)
    settings = config.quantization
    if not settings and (own := inside(directory, "hf_quant_config.json")).exists():
        settings = {"quant_method": "modelopt", **read_json(own)}
    quantization = read_quantization(settings, config.model_type, config.settings)
    index = index or find_tensors(directory, only)
    quantization = gguf_quantization() if index.is_gguf else quantization
    if architecture.shared_d_ff and not any("share" in name or "shexp" in name for name in index.files):
        spec = dataclasses.replace(architecture.spec, shared_activation=None)
        architecture = dataclasses.replace(architecture, shared_d_ff=0, spec=spec, lacks_shared=True)
    facts = (config.settings, architecture, index, quantization, config.nested, document, only)
    checkpoint = Checkpoint(directory, config.model_type, *facts)
    # Settings of experts that cannot be read raise here. Other matrices do not matter.
    _ = checkpoint.packing
    return checkpoint


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
    wanted = weights.get("experts.gate_up", weights.get("shared.gate_up", stored["router.weight"]))
    for name, dtype in weights.items():
        if dtype != wanted and not (name.endswith("_bias") and dtype == "float32"):
            raise InvalidInput(
                f"{name} must be {wanted} like experts.gate_up, got {dtype}; cast the checkpoint to one dtype"
            )
