"""The canonical form of one layer's weights: NumPy arrays and the tags that say what they are.

Checkpoints, torch layers and Flax layers all meet here: each writes `LayerWeights` and reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from moe_core import dtypes
from moe_core.checks import require_choice, require_kind
from moe_core.errors import InvalidInput
from moe_core.layers.spec import (
    ExpertsSpec,
    MoELayerSpec,
    Parameter,
    SharedExpertsSpec,
    Storage,
)
from moe_core.operands import ExpertWeights, RouterWeights, SharedExpert, named_arrays
from moe_core.specs import MoESpec


class _CheckpointLayer(Protocol):
    """What `moe_core.checkpoint.MoELayer` has."""

    @property
    def spec(self) -> MoESpec: ...
    @property
    def experts(self) -> ExpertWeights: ...
    @property
    def router(self) -> RouterWeights: ...
    @property
    def shared(self) -> SharedExpert | None: ...


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer's arrays; spec computes with them as they are, and its layouts are the tags.

    Layouts are never guessed from shapes (square weights fit several): shapes are checked against the tags. experts
    and shared have one dtype; biases that or float32; the router and shared.gate any matmul dtype; correction_bias
    float32. experts.layer is None: one layer, not a stack. Raises InvalidInput.
    """

    spec: MoESpec
    experts: ExpertWeights
    router: RouterWeights
    shared: SharedExpert | None = None

    def __post_init__(self) -> None:
        require_kind("spec", self.spec, MoESpec)
        require_kind("experts", self.experts, ExpertWeights)
        require_kind("router", self.router, RouterWeights)
        require_kind("shared", self.shared, SharedExpert, optional=True)
        if self.spec.router is None:
            raise InvalidInput("spec.router must be a RouterSpec, got None; a layer routes by itself")
        if self.experts.layer is not None:
            raise InvalidInput("experts.layer must be None, got a stack of layers; pass one layer's arrays")
        for name, array in self.named().items():
            if not isinstance(array, np.ndarray):
                raise InvalidInput(f"{name} must be a NumPy array, got {type(array).__name__}; convert it")
        self._check_shapes()
        self._check_dtypes()

    def named(self) -> dict[str, Any]:
        """name -> array, by the names of `MoELayerSpec.parameters`, in its order."""
        bundles = {"router.": self.router, "experts.": self.experts, "shared_experts.": self.shared}
        arrays = {
            name: array
            for prefix, bundle in bundles.items()
            if bundle is not None
            for name, array in named_arrays(bundle, prefix)
        }
        return {name: arrays[name] for name in sorted(arrays, key=_NAMES.index)}

    @property
    def storage(self) -> Storage:
        """The layouts of the arrays; an ungated layer's gate_layout is nominal."""
        spec = self.spec
        return Storage(spec.weight_layout, spec.activation.gate_layout or "halves", spec.router_weight_layout)

    @property
    def dtype(self) -> str:
        """Canonical dtype of the experts' weights."""
        return dtypes.canonical(self.experts.down.dtype)

    def layer_spec(self) -> MoELayerSpec:
        """The layer these weights make, its experts' layouts stated as they are."""
        spec, storage, shared = self.spec, self.storage, self.shared
        in_out = spec.weight_layout == "in_out"
        assert spec.router is not None
        return MoELayerSpec(
            d_model=self.router.weight.shape[0 if spec.router_weight_layout == "in_out" else 1],
            d_ff=self.experts.down.shape[-2 if in_out else -1],
            num_experts=self.router.weight.shape[1 if spec.router_weight_layout == "in_out" else 0],
            top_k=spec.router.require_top_k(),
            router=spec.router,
            experts=ExpertsSpec(
                spec.activation,
                bias=self.experts.down_bias is not None,
                weight_layout=storage.weight_layout,
                gate_layout=storage.gate_layout if spec.activation.gated else None,
            ),
            shared_experts=None
            if shared is None
            else SharedExpertsSpec(shared.down.shape[-2 if in_out else -1], shared.gate is not None),
            router_bias=self.router.bias is not None,
            correction_bias=self.router.correction_bias is not None,
            apply_router_weight_on_input=spec.apply_router_weight_on_input,
            logits_dtype=spec.logits_dtype,
            allow_tf32=spec.allow_tf32,
            tuning=spec.tuning,
            recompute=spec.recompute,
            main_grad=spec.main_grad,
        )

    @classmethod
    def from_checkpoint(cls, layer: _CheckpointLayer) -> LayerWeights:
        """The weights of a layer that `moe_core.checkpoint` read; nothing is copied."""
        return cls(layer.spec, layer.experts, layer.router, layer.shared)

    @classmethod
    def from_named(cls, arrays: Mapping[str, Any], spec: MoELayerSpec, default: Storage) -> LayerWeights:
        """The arrays of a layer by name, stored as `spec.storage(default)`: the inverse of `named`.

        Raises InvalidInput for names that are missing or unknown.
        """
        wanted = [parameter.name for parameter in spec.parameters(default)]
        _require_names("arrays", list(arrays), wanted)

        def bundle(kind: type, prefix: str) -> Any:
            return kind(**{name.removeprefix(prefix): arrays[name] for name in wanted if name.startswith(prefix)})

        shared = None if spec.shared_experts is None else bundle(SharedExpert, "shared_experts.")
        experts, router = bundle(ExpertWeights, "experts."), bundle(RouterWeights, "router.")
        return cls(spec.moe_spec(default), experts, router, shared)

    def _check_shapes(self) -> None:
        ranks = {"router.weight": 2, "experts.down": 3, "shared_experts.down": 2}
        arrays = self.named()
        for name in _REQUIRED:
            if name not in arrays and (self.shared is not None or not name.startswith("shared")):
                raise InvalidInput(f"{name} must be an array, got None; pass it")
        for name, rank in ranks.items():
            if name in arrays and arrays[name].ndim != rank:
                raise InvalidInput(f"{name} must have {rank} axes, got {arrays[name].shape}; pass one layer's array")
        expected = {parameter.name: parameter for parameter in self.layer_spec().parameters(self.storage)}
        _require_names("weights", list(arrays), list(expected))
        for name, array in arrays.items():
            if array.shape != expected[name].shape:
                raise InvalidInput(
                    f"{name} must be {_show(expected[name])} by the layouts of spec ({self.storage}), "
                    f"got {array.shape}; correct the tags or the array"
                )

    def _check_dtypes(self) -> None:
        own = self.dtype
        require_choice("experts.down's dtype", own, dtypes.MATMUL_DTYPES)
        for name, array in self.named().items():
            allowed: tuple[str, ...] = (own,)
            if name == "router.correction_bias":
                allowed = ("float32",)
            elif name.startswith("router.") or name == "shared_experts.gate":
                allowed = dtypes.MATMUL_DTYPES
            elif name.endswith("_bias"):
                allowed = (own, "float32")
                if name == "experts.up_bias" and self.experts.gate_up_bias is not None:
                    allowed = (dtypes.canonical(self.experts.gate_up_bias.dtype),)
            if dtypes.canonical(array.dtype) not in allowed:
                raise InvalidInput(f"{name} must be {' or '.join(allowed)}, got {array.dtype}; cast it to {allowed[0]}")


def _every_name() -> tuple[str, ...]:
    """All names a layer can have, in the order of `MoELayerSpec.parameters`."""
    spec = MoELayerSpec(
        d_model=1,
        d_ff=1,
        num_experts=1,
        top_k=1,
        experts=ExpertsSpec(bias=True, gate_layout="separate"),
        shared_experts=SharedExpertsSpec(1, gate=True),
        router_bias=True,
        correction_bias=True,
    )
    return tuple(parameter.name for parameter in spec.parameters(Storage("in_out", "separate", "in_out")))


_NAMES = _every_name()
_REQUIRED = ("router.weight", "experts.gate_up", "experts.down", "shared_experts.gate_up", "shared_experts.down")


def _show(parameter: Parameter) -> str:
    return f"{list(parameter.shape)} ({', '.join(axis or '1' for axis in parameter.axes)})"


def _require_names(what: str, given: list[str], wanted: list[str]) -> None:
    """Raise InvalidInput unless the names are the wanted ones, in any order."""
    missing = [name for name in wanted if name not in given]
    unknown = [name for name in given if name not in wanted]
    if missing or unknown:
        problem = " and ".join(
            text
            for text in (
                f"lacks {', '.join(missing)}" if missing else "",
                f"has {', '.join(unknown)}, which this layer does not" if unknown else "",
            )
            if text
        )
        raise InvalidInput(
            f"{what} must hold {', '.join(wanted)}; got one that {problem}; make both sides the same kind of layer"
        )
