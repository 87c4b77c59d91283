"""Every field of a layer's description, changed: layers that differ from a base in one field each.

`changed()` walks the dataclasses, so that a new field of one is there without a word here, or `UNREACHED` names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moe_core.formats import Scheme, format_named, scheme_named
from moe_core.layers import HUGGING_FACE, ExpertsSpec, LatentSpec, LayerWeights, MoELayerSpec, OutputSpec
from moe_core.layers import SharedExpertsSpec as Shared
from moe_core.layers.around import NORM_OF
from moe_core.layers.parameter import first_table
from moe_core.ops.quantize.reference import quantize
from moe_core.specs import Activation, NormSpec, RouterSpec, TokenRounding, Tuning, matmul, routing
from moe_core.specs.operands import named_arrays
from moe_core.specs.tile import TileConfig
from moe_core.specs.tile_table import TileTable
from tests.support.layers import draw_weights, draw_x

D, F, E, T = 128, 64, 8, 48
_SHARED = Shared(16, True, Activation("gelu"))
_NORM, _SIGMOID = NormSpec(1e-5), RouterSpec(scoring="sigmoid", renormalize=True, num_groups=4, topk_group=2)


def _layer(router: RouterSpec | None = None, top_k: int = 2, **options: Any) -> MoELayerSpec:
    return MoELayerSpec(D, F, E, top_k, router or RouterSpec(), **options)


#: A field is changed in each of them that allows it.
BASES = (
    _layer(shared_experts=_SHARED, tuning=Tuning(), output=OutputSpec(_NORM), latent=LatentSpec(32, _NORM)),
    _layer(shared_experts=_SHARED, router_norm=_NORM, experts=ExpertsSpec(bias=True)),
    _layer(_SIGMOID, correction_bias=True, token_rounding=TokenRounding(16)),
    _layer(experts=ExpertsSpec(Activation("softcapped_silu"), scheme=scheme_named("fp8_channel"))),
    _layer(top_k=1, tuning=Tuning(expected_tokens=8)),
    _layer(_SIGMOID, shared_experts=Shared(16, activation=Activation("softcapped_silu"))),
)
_TILES = TileConfig(16, 16, 16)
#: Values of classes that a walk through their fields would not make.
_INSTANCES: dict[type, tuple[Any, ...]] = {
    TileConfig: (_TILES, TileConfig(32, 32, 16)),
    TileTable: (TileTable.of(()),),
    Activation: (Activation("relu2"), Activation("swiglu_oai"), Activation("gelu", False)),
    Scheme: (
        *map(scheme_named, ("mxfp4_w4a16", "int4_w4a16_zp", "fp8_tensor", "mxfp8")),
        Scheme("unregistered", format_named("fp8_channel"), None),
    ),
    OutputSpec: (OutputSpec(_NORM), OutputSpec(scale=0.5)),
    LatentSpec: (LatentSpec(32),),
    TokenRounding: (TokenRounding(16),),
    Shared: (Shared(16),),
}
_CHOICES = (
    *matmul.ACTIVATIONS, *matmul.GATE_LAYOUTS, *matmul.WEIGHT_LAYOUTS, *routing.SCORINGS, *routing.ORDERS,
    *routing.SLOT_ORDERS, *routing.ROUNDING_MODES, *NORM_OF, "bfloat16", "logits", "best", "pair",
)  # fmt: skip
_NUMBERS: dict[type, tuple[Any, ...]] = {int: (2, 16, 48, 1, 32), float: (0.5, 0.01, 1.5), bool: (True, False)}
#: Fields that no layer has another value of, and the reason.
UNREACHED = {
    "router.top_k": "it is the layer's",
    "shared_experts.activation.gated": "it is the experts'",
    "shared_experts.activation.gate_layout": "it is the experts'",
}


def _kinds(hint: Any) -> tuple[type, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def fields_of(cls: type, prefix: str = "") -> Iterator[tuple[str, tuple[type, ...]]]:
    """(path, types) of every field below a dataclass. Tiles and schemes are values."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path, kinds = f"{prefix}{field.name}", _kinds(hints[field.name])
        yield path, kinds
        for kind in kinds:
            if dataclasses.is_dataclass(kind) and kind not in (TileConfig, TileTable, Scheme):
                yield from fields_of(kind, f"{path}.")


def _replaced(value: Any, path: Sequence[str], new: Any) -> Any:
    first, *rest = path
    also = {}
    if first == "top_k" and isinstance(value, MoELayerSpec):
        also = {"router": dataclasses.replace(value.router, top_k=None)}
    return dataclasses.replace(value, **{first: _replaced(getattr(value, first), rest, new) if rest else new}, **also)


def _values(kinds: tuple[type, ...]) -> tuple[Any, ...]:
    return tuple(itertools.chain.from_iterable(map(_values_of, kinds)))


def _values_of(kind: type) -> tuple[Any, ...]:
    if kind in (str, type(None)):
        return _CHOICES if kind is str else (None,)
    return _NUMBERS.get(kind) or _INSTANCES.get(kind) or (kind(),)


@functools.cache
def changed(bases: tuple[MoELayerSpec, ...] = BASES) -> dict[str, tuple[MoELayerSpec, ...]]:
    """path -> layers that differ from a base in this field."""
    layers: dict[str, tuple[MoELayerSpec, ...]] = {}
    for path, kinds in fields_of(MoELayerSpec):
        *above, _ = path.split(".")
        made: dict[MoELayerSpec, None] = {}
        for base, value in itertools.product(bases, _values(kinds)):
            if functools.reduce(lambda part, name: part and getattr(part, name), above, base) is None:
                continue
            with contextlib.suppress(ValueError, NotImplementedError):
                made |= {} if (spec := _replaced(base, path.split("."), value)) == base else {spec: None}
        layers[path] = tuple(made)
    return layers


def each_value(path: str) -> list[MoELayerSpec]:
    """Every value of a field once, on one base after the other."""
    of: dict[Any, list[MoELayerSpec]] = {}
    for spec in changed()[path]:
        value = functools.reduce(lambda part, name: part and getattr(part, name), path.split("."), spec)
        of.setdefault(value, []).append(spec)
    return [some[number % len(some)] for number, some in enumerate(of.values())]


def weights_of(spec: MoELayerSpec) -> LayerWeights:
    """Weights of a layer, quantised if it is, with a table of distinct ids if it has one."""
    scheme = spec.experts.scheme
    plain = dataclasses.replace(spec, experts=dataclasses.replace(spec.experts, scheme=None), fast_accumulate=False)
    if spec.token_table:
        arrays = _with_table(plain)
    else:
        arrays = draw_weights(plain).named()
    if scheme is not None:
        layout = spec.storage(HUGGING_FACE).weight_layout
        for name in [name for name in arrays if name in ("experts.gate_up", "experts.up", "experts.down")]:
            arrays |= dict(named_arrays(quantize(arrays.pop(name), scheme.weights, layout=layout), f"{name}."))
    return LayerWeights.from_named(arrays, spec, HUGGING_FACE)


def _with_table(plain: MoELayerSpec) -> dict[str, np.ndarray]:
    arrays = draw_weights(dataclasses.replace(plain, token_table=0)).named()
    tables = [one for one in plain.parameters(HUGGING_FACE) if one.role == "table"]
    return arrays | {one.name: first_table(one) for one in tables}


def inputs_of(spec: MoELayerSpec) -> tuple[np.ndarray, np.ndarray | None]:
    """(x `[T, D]`, input ids `[T]` of a layer with a table)."""
    ids = np.arange(T, dtype=np.int32) % spec.token_table if spec.token_table else None
    return draw_x((T,), d_model=spec.d_model), ids
