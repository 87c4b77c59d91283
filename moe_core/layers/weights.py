"""The canonical form of one layer's weights."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_core.base import dtypes, require_choice, require_kind
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, Scheme, known_scheme
from moe_core.layers.around import LatentSpec, LayerPart, OutputSpec
from moe_core.layers.spec import (
    LAYER_FIELDS,
    MAXTEXT,
    MOE_SPEC_FIELDS,
    ExpertsSpec,
    MoELayerSpec,
    SharedExpertsSpec,
    Storage,
    storage_of,
)
from moe_core.ops.quantize.reference import dequantize
from moe_core.specs import MoESpec, NormSpec, RouterSpec, TokenRounding
from moe_core.specs.operands import ExpertWeights, LayerRouter, RouterWeights, SharedExpert, named_arrays, named_fields


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer's NumPy arrays. spec computes with them as they are, and its layouts are the tags.

    Layouts are never guessed from shapes, because square weights fit several. experts and shared have one dtype, biases
    have it or float32, the router and shared.gate any matmul dtype, and correction_bias float32. experts.layer_index is
    None. Raises InvalidInput.

    The experts' matrices may be `QuantizedTensor`s in one format, shared ones are plain. A layer has no static input
    scales. before, after: the projections of a layer with a latent width. output: operations on the experts' results.
    Their matrices have the experts' dtype, norms and biases any. capacity_factor, token_rounding: see `MoELayerSpec`.
    """

    spec: MoESpec
    experts: ExpertWeights
    router: RouterWeights
    shared: SharedExpert | None = None
    before: LayerPart | None = None
    after: LayerPart | None = None
    output: LayerPart | None = None
    capacity_factor: float | None = None
    token_rounding: TokenRounding | None = None

    def __post_init__(self) -> None:
        require_kind("spec", self.spec, MoESpec)
        require_kind("experts", self.experts, ExpertWeights)
        require_kind("router", self.router, LayerRouter if isinstance(self.router, LayerRouter) else RouterWeights)
        require_kind("shared", self.shared, SharedExpert, optional=True)
        if isinstance(self.router, LayerRouter) and (self.router.norm is None) != (self.router.spec is None):
            raise InvalidInput(
                f"router.spec must be a NormSpec where router.norm is given and only then, got {self.router.spec}; "
                "pass both or neither"
            )
        for name, kind in (("before", LatentSpec), ("after", type(None)), ("output", OutputSpec)):
            part = getattr(self, name)
            require_kind(name, part, LayerPart, optional=True)
            if part is not None:
                require_kind(f"{name}.spec", part.spec, kind)
        if self.spec.router is None:
            raise InvalidInput("spec.router must be a RouterSpec, got None; a layer routes by itself")
        if self.experts.layer_index is not None:
            raise InvalidInput("experts.layer_index must be None, got a stack of layers; pass one layer's arrays")
        for name in ("gate_up_input_scale", "down_input_scale"):
            if getattr(self.experts, name) is not None:
                raise InvalidInput(
                    f"experts.{name} must be None, got an array: layers find the scales of their rows; call the moe op "
                    "for static ones"
                )
        self._check_formats()
        for name, array in self.named().items():
            if not isinstance(array, np.ndarray):
                raise InvalidInput(f"{name} must be a NumPy array, got {type(array).__name__}; convert it")
        self._check_shapes()
        self._check_dtypes()

    def named(self) -> dict[str, Any]:
        """name -> array, by the names of `MoELayerSpec.parameters`, in its order."""
        bundles = {"router.": self.router, "experts.": self.experts, "shared_experts.": self.shared}
        bundles |= {f"{name}.": getattr(self, name) for name in _AROUND}
        present = [(prefix, bundle) for prefix, bundle in bundles.items() if bundle is not None]
        arrays = {name: array for prefix, bundle in present for name, array in named_arrays(bundle, prefix)}
        # Arrays of one matrix stay in their order.
        return {name: arrays[name] for name in sorted(arrays, key=lambda name: _NAMES.index(_matrix_name(name)))}

    @property
    def storage(self) -> Storage:
        """The layouts of the arrays. An ungated layer's gate_layout is nominal."""
        return storage_of(self.spec)

    @property
    def dtype(self) -> str:
        """Canonical dtype of x: the experts', or, if they are quantised, the shared expert's or else the router's."""
        if not isinstance(self.experts.down, QuantizedTensor):
            return dtypes.canonical(self.experts.down.dtype)
        return dtypes.canonical((self.router.weight if self.shared is None else self.shared.down).dtype)

    @property
    def scheme(self) -> Scheme | None:
        """The formats of quantised experts, a registered scheme if there is one."""
        if not isinstance(self.experts.down, QuantizedTensor):
            return None
        weights, activations = self.experts.down.format, self.spec.activations
        name = f"{weights}_with_{'plain' if activations is None else activations}"
        return known_scheme(weights, activations) or Scheme(name, weights, activations)

    def layer_spec(self) -> MoELayerSpec:
        """The layer of these weights, with its experts' layouts stated."""
        spec, shared = self.spec, self.shared
        width_axis = -2 if spec.weight_layout == "in_out" else -1
        d_model, num_experts = self.router.weight.shape[:: 1 if spec.router_weight_layout == "in_out" else -1]
        gate_layout = self.storage.gate_layout if spec.activation.gated else None
        has_bias = self.experts.down_bias is not None
        shared_activation = spec.shared_activation
        if shared_activation is not None and shared_activation.gated:
            shared_activation = dataclasses.replace(shared_activation, gate_layout="halves")  # not stated
        assert spec.router is not None
        table = getattr(self.router, "table", None)
        return MoELayerSpec(
            d_model,
            self.experts.down.shape[width_axis],
            num_experts,
            spec.router.require_top_k(),
            spec.router,
            ExpertsSpec(spec.activation, has_bias, spec.weight_layout, gate_layout, self.scheme),
            shared and SharedExpertsSpec(shared.down.shape[width_axis], shared.gate is not None, shared_activation),
            router_bias=self.router.bias is not None,
            correction_bias=self.router.correction_bias is not None,
            router_norm=getattr(self.router, "spec", None),
            expert_scale=getattr(self.router, "expert_scale", None) is not None,
            output=self.output and self.output.spec,
            latent=self.before and self.before.spec,
            sparse_mixer=getattr(self.router, "sparse_mixer", None),
            token_table=0 if table is None else len(table),
            **{name: getattr(spec, name) for name in MOE_SPEC_FIELDS},
            **{name: getattr(self, name) for name in LAYER_FIELDS},
        )

    @classmethod
    def from_checkpoint(cls, layer: Any) -> LayerWeights:
        """The weights of a `moe_core.checkpoint.MoELayer`; no expert is copied.

        A quantised layer computes in its scheme, activations included. Its shared experts are dequantised, because no
        op takes them quantised.
        """
        spec, shared = layer.spec, layer.shared
        if layer.scheme is not None:
            spec = dataclasses.replace(spec, activations=layer.scheme.activations)
        if shared is not None:
            packed = {name: array for name, array in named_fields(shared) if isinstance(array, QuantizedTensor)}
            plain = {name: dequantize(array, layer.dtype) for name, array in packed.items()}
            shared = dataclasses.replace(shared, **plain)
        return cls(spec, layer.experts, layer.router, shared, **{name: getattr(layer, name) for name in _AROUND})

    @classmethod
    def from_named(cls, arrays: Mapping[str, Any], spec: MoELayerSpec, default: Storage) -> LayerWeights:
        """The inverse of `named`, for arrays stored as `spec.storage(default)`. Raises InvalidInput for other names."""
        wanted = [parameter.name for parameter in spec.parameters(default)]
        _require_names("arrays", list(arrays), wanted)
        scheme, layout = spec.experts.scheme, spec.storage(default).weight_layout

        def bundle(kind: type, prefix: str) -> Any:
            fields: dict[str, Any] = {}
            for name in wanted:
                if name.startswith(prefix):
                    field, _, part = name.removeprefix(prefix).partition(".")
                    fields[field] = {**fields.get(field, {}), part: arrays[name]} if part else arrays[name]
            for field, parts in fields.items():
                if isinstance(parts, dict) and scheme is not None:
                    fields[field] = QuantizedTensor(QuantizedSpec(scheme.weights, layout), **parts)
            return kind(**fields)

        shared = None if spec.shared_experts is None else bundle(SharedExpert, "shared_experts.")
        experts = bundle(ExpertWeights, "experts.")
        router = layer_router(bundle(dict, "router."), spec.router_norm, spec.sparse_mixer)
        only_layers = {name: getattr(spec, name) for name in LAYER_FIELDS}
        weights = cls(spec.moe_spec(default), experts, router, shared, **layer_parts(arrays, spec), **only_layers)
        described, stored = weights.layer_spec(), spec.stored_as(spec.storage(default))
        for name in [field.name for field in dataclasses.fields(stored)]:
            kept, wanted = getattr(described, name), getattr(stored, name)
            if kept != wanted:
                raise Unsupported(
                    f"{name} must be one that LayerWeights describe, got {wanted}, which would become {kept}; make the "
                    "layer without it"
                )
        return weights

    def _check_formats(self) -> None:
        spec, experts, down = self.spec, self.experts, self.experts.down
        format = down.format if isinstance(down, QuantizedTensor) else None
        if spec.activations is not None and format is None:
            raise InvalidInput(
                f"spec.activations must be None with plain experts, got {spec.activations}; quantise the experts"
            )
        for name, bundle in (("router", self.router), ("experts", experts), ("shared", self.shared)):
            for field, array in () if bundle is None else named_fields(bundle, f"{name}."):
                wanted = format if field in _MATRICES else None
                stored = array.format if isinstance(array, QuantizedTensor) else None
                if stored != wanted:
                    like = " like experts.down" if field in _MATRICES else ""
                    raise InvalidInput(
                        f"{field} must be {_plainly(wanted)}{like}, got {_plainly(stored)}; quantise gate_up, up and "
                        "down of experts in one format and nothing else"
                    )
                if stored is not None and array.spec.tiling is not None:
                    raise InvalidInput(
                        f"{field} must be in its published layout, as layers and checkpoints exchange weights, got "
                        f"{array}; call restore_weights"
                    )
                if stored is not None and array.layout != spec.weight_layout:
                    raise InvalidInput(
                        f"{field} must be {spec.weight_layout} like spec.weight_layout, got {array}; correct the tags"
                    )

    def _check_shapes(self) -> None:
        ranks = {"router.weight": 2, "experts.down": 3, "experts.down.values": 3, "shared_experts.down": 2}
        arrays = self.named()
        present = {_matrix_name(name) for name in arrays}
        for name in _REQUIRED:
            if name not in present and (self.shared is not None or not name.startswith("shared")):
                raise InvalidInput(f"{name} must be an array, got None; pass it")
        for name, rank in ranks.items():
            if name in arrays and arrays[name].ndim != rank:
                raise InvalidInput(f"{name} must have {rank} axes, got {arrays[name].shape}; pass one layer's array")
        expected = {parameter.name: parameter for parameter in self.layer_spec().parameters(self.storage)}
        _require_names("weights", list(arrays), list(expected))
        for name, array in arrays.items():
            if array.shape != expected[name].shape:
                axes = ", ".join(axis or "1" for axis in expected[name].axes)
                raise InvalidInput(
                    f"{name} must be {list(expected[name].shape)} ({axes}) by the layouts of spec ({self.storage}), "
                    f"got {array.shape}; correct the tags or the array"
                )

    def _check_dtypes(self) -> None:
        dtype = self.dtype
        label = "experts.down" if self.scheme is None else "the layer"
        require_choice(f"{label}'s dtype", dtype, dtypes.MATMUL_DTYPES)
        for name, array in self.named().items():
            allowed: tuple[str, ...] = (dtype,)
            if _matrix_name(name) != name:
                continue  # Arrays of a quantised matrix have what its format says.
            if name in ("router.correction_bias", "router.table"):
                allowed = ("float32",) if name == "router.correction_bias" else ("int32",)
            elif name.startswith(("router.", "output.")) or name in ("shared_experts.gate", "before.norm"):
                allowed = dtypes.MATMUL_DTYPES
            elif name.endswith("_bias"):
                allowed = (dtype, "float32")
                if name == "experts.up_bias" and self.experts.gate_up_bias is not None:
                    allowed = (dtypes.canonical(self.experts.gate_up_bias.dtype),)
            if dtypes.canonical(array.dtype) not in allowed:
                raise InvalidInput(f"{name} must be {' or '.join(allowed)}, got {array.dtype}; cast it to {allowed[0]}")


def layer_router(arrays: Mapping[str, Any], norm: NormSpec | None, sparse_mixer: float | None = None) -> RouterWeights:
    more = {"norm", "table", "expert_scale"} & arrays.keys()
    if not more and sparse_mixer is None:
        return RouterWeights(**arrays)
    return LayerRouter(**arrays, spec=norm, sparse_mixer=sparse_mixer)


def layer_parts(arrays: Mapping[str, Any], spec: Any) -> dict[str, LayerPart]:
    specs = {"before": spec.latent, "after": None, "output": spec.output}
    parts = {}
    for part, means in specs.items():
        fields = {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith(f"{part}.")}
        if fields or means is not None:
            parts[part] = LayerPart(**fields, spec=means)
    return parts


def _every_name() -> tuple[str, ...]:
    experts, shared = ExpertsSpec(bias=True, gate_layout="separate"), SharedExpertsSpec(1, gate=True)
    options = dict.fromkeys(("router_bias", "correction_bias", "expert_scale"), True)
    around = {"output": OutputSpec(NormSpec(), bias=True), "latent": LatentSpec(1, NormSpec()), "token_table": 1}
    spec = MoELayerSpec(1, 1, 1, 1, RouterSpec(), experts, shared, router_norm=NormSpec(), **around, **options)
    return tuple(parameter.name for parameter in spec.parameters(MAXTEXT))


_AROUND = ("before", "after", "output")
_NAMES = _every_name()
_MATRICES = ("experts.gate_up", "experts.up", "experts.down")
_REQUIRED = ("router.weight", "experts.gate_up", "experts.down", "shared_experts.gate_up", "shared_experts.down")


def _matrix_name(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _plainly(format: Format | None) -> str:
    return "plain" if format is None else f"in {format}"


def _require_names(what: str, given: list[str], wanted: list[str]) -> None:
    missing = [name for name in wanted if name not in given]
    unknown = [name for name in given if name not in wanted]
    if missing or unknown:
        problems = [f"lacks {', '.join(missing)}"] if missing else []
        problems += [f"has {', '.join(unknown)}, which this layer does not"] if unknown else []
        raise InvalidInput(
            f"{what} must hold {', '.join(wanted)}; got one that {' and '.join(problems)}; make both sides the same "
            "kind of layer"
        )


def warn_left_out(**parts: Any) -> None:
    """Name what a layer has and its `LayerWeights` do not hold: parts that are not empty."""
    if names := ", ".join(name if value is True else f"{name}={value}" for name, value in parts.items() if value):
        text = f"export_weights leaves out {names}; give it to the new layer (adapters by export and load, or merged)"
        warnings.warn(text, stacklevel=3)
