"""Wrong values in the place of every argument of every op, in both front-ends: an error of the package, or a result.

Drawn by a seed; MOEBIUS_BAD_CALLS asks for more of them, or with a large number for all.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, QuantizedSpec, format_named
from moe_core.layers.spec import ExpertsSpec, MoELayerSpec, SharedExpertsSpec
from moe_core.specs import (
    Activation,
    LayoutSpec,
    LogitsSpec,
    MatmulSpec,
    MatmulTuning,
    MoESpec,
    NormSpec,
    RouterSpec,
    TileConfig,
    Tuning,
)
from tests.support.bad_arguments.case import D, E, F, T, array
from tests.support.bad_arguments.relations import _BUNDLES, CALLS, Call, front_end, layout, named, replaced

#: How many calls a test makes of each front-end.
COUNT = int(os.environ.get("MOEBIUS_BAD_CALLS", "400"))
FP8 = format_named("fp8_channel")
OPS = (
    *CALLS,
    Call("quantize", {"weight": array(E, D, F), "format": FP8, "layout": "in_out"}),
    Call("explain_moe", dict(CALLS[-1].arguments)),
)
#: What is no array and no option of any op.
JUNK: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "text": lambda: "float32",
    "bytes": lambda: b"x",
    "zero": lambda: 0,
    "minus one": lambda: -1,
    "large": lambda: 2**70,
    "NaN": lambda: float("nan"),
    "complex": lambda: 1j,
    "True": lambda: True,
    "list": lambda: [1.0, 2.0],
    "ragged list": lambda: [[1.0], [2.0, 3.0]],
    "tuple": lambda: (1, 2),
    "dict": lambda: {"x": 1},
    "set": lambda: {1},
    "object": object,
    "class": lambda: RouterSpec,
    "function": lambda: len,
    "format": lambda: FP8,
    "router spec": lambda: RouterSpec(2),
    "layer spec": lambda: MoESpec(Activation("silu")),
    "product spec": lambda: MatmulSpec("in_out"),
    "layout spec": lambda: LayoutSpec(T, 2, E),
    "layout": lambda: layout(LayoutSpec(T, 2, E)),
    "generator": lambda: (one for one in ()),
}
#: Arrays that are wrong wherever they stand: rank, size, dtype; of NumPy, whose dtypes no framework has all of.
ARRAYS: dict[str, Callable[[], np.ndarray]] = {
    "scalar": lambda: np.zeros((), np.float32),
    "empty": lambda: np.zeros((0,), np.float32),
    "five axes": lambda: np.zeros((1, 1, 1, 1, 1), np.float32),
    "complex": lambda: np.zeros((T, D), np.complex64),
    "16 bits": lambda: np.zeros((T, D), np.int16),
    "nothing by nothing": lambda: np.zeros((0, 0), np.float32),
    "bytes": lambda: np.zeros((T, D), np.uint8),
    "truth": lambda: np.zeros((T,), np.bool_),
}
NUMPY: dict[str, Callable[[], Any]] = {
    "objects": lambda: np.zeros((T, D), object),
    "texts": lambda: np.zeros((T, D), "U3"),
    "records": lambda: np.zeros((T, D), [("a", "f4")]),
    "dates": lambda: np.zeros((T, D), "M8[s]"),
    "big endian": lambda: np.zeros((T, D), ">f4"),
    "masked": lambda: np.ma.zeros((T, D), np.float32),
    "matrix of numbers": lambda: np.float32(3.0),
}


def torch_values(torch: Any) -> dict[str, Callable[[], Any]]:
    meta = torch.zeros(T, D, device="meta")
    return {
        "meta": lambda: meta,
        "sparse": lambda: torch.zeros(T, D).to_sparse(),
        "nested": lambda: torch.nested.nested_tensor([torch.zeros(2, D), torch.zeros(3, D)], layout=torch.jagged),
        "dtype": lambda: torch.float32,
        "size": lambda: torch.Size((T, D)),
        "device": lambda: torch.device("cpu"),
        "transposed": lambda: torch.zeros(D, T).T,
        "expanded": lambda: torch.zeros(1, D).expand(T, D),
        "complex view": lambda: torch.zeros(T, D, dtype=torch.complex64).conj(),
        "negated": lambda: torch._neg_view(torch.zeros(T, D)),
        "needs a gradient": lambda: torch.zeros(T, D, requires_grad=True),
        "of float8": lambda: torch.zeros(T, D).to(torch.float8_e5m2),
        "quantised by torch": lambda: torch.zeros(T, D, dtype=torch.uint16),
        "without memory": lambda: _emptied(torch.zeros(T, D)),
    }


def _emptied(tensor: Any) -> Any:
    tensor.untyped_storage().resize_(0)
    return tensor


def jax_values(jax: Any) -> dict[str, Callable[[], Any]]:
    return {
        "shape": lambda: jax.ShapeDtypeStruct((T, D), np.float32),
        "key": lambda: jax.random.key(0),
        "deleted": lambda: _deleted(jax.numpy.zeros((T, D))),
        "dtype": lambda: jax.numpy.float32,
        "of 4 bits": lambda: jax.numpy.zeros((T, D), jax.numpy.int4),
        "device": lambda: jax.devices()[0],
    }


def _deleted(array: Any) -> Any:
    array = array + 1
    array.delete()
    return array


#: Valid values of every field of options, by class.
OPTIONS: dict[type, dict[str, Any]] = {
    RouterSpec: {"top_k": 2, "scoring": "sigmoid", "order": None, "renormalize": True, "scale": 2.0, "num_groups": 2}
    | {"topk_group": 1, "slot_order": "score", "epsilon": 1e-6, "logit_scale": 1.0, "softcap": 3.0},
    LayoutSpec: {"num_tokens": 3, "top_k": 2, "num_experts": 4, "alignment": 1, "max_rows": 5},
    LogitsSpec: {"weight_layout": "in_out", "logits_dtype": "float32", "allow_tf32": False, "batch_invariant": False},
    NormSpec: {"epsilon": 1e-6, "scale": 1.0},
    Activation: {"name": "swiglu_oai", "gated": True, "gate_layout": "halves", "alpha": 1.0, "limit": 2.0},
    MatmulSpec: {"weight_layout": "in_out", "gather": "row", "scatter": "row", "activation": None, "out_dtype": None}
    | {"allow_tf32": False, "tuning": None, "fast_accumulate": False},
    MoESpec: {"activation": Activation("silu"), "router": RouterSpec(2), "weight_layout": "in_out", "out_dtype": None}
    | {"router_weight_layout": "in_out", "apply_router_weight_on_input": False, "logits_dtype": "float32"}
    | {"allow_tf32": False, "tuning": None, "recompute": False, "main_grad": False, "activations": None}
    | {"fast_accumulate": False, "shared_activation": None},
    MatmulTuning: {"config": None, "table": None, "batch_invariant": False},
    Tuning: {"matmul_1": None, "matmul_2": None, "table": None, "batch_invariant": False},
    TileConfig: {"block_m": 64, "block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 3, "group_m": 8}
    | {"family": "portable"},
    Format: {"name": "mine", "element": "e4m3", "group_rows": 1, "group_columns": 128, "scale_rule": "amax"}
    | {"zero_points": False},
    QuantizedSpec: {"format": FP8, "layout": "out_in", "tiling": None},
    ArraySpec: {"shape": (2, 3), "dtype": "float32", "strides": (3, 1)},
    SharedExpertsSpec: {"d_ff": 8, "gate": True, "activation": None},
    MoELayerSpec: {"d_model": 16, "d_ff": 8, "num_experts": 4, "top_k": 2, "router": RouterSpec()}
    | {"experts": ExpertsSpec(Activation("silu")), "shared_experts": None, "router_bias": False, "main_grad": False}
    | {"correction_bias": False, "apply_router_weight_on_input": False, "logits_dtype": "float32", "recompute": False}
    | {"capacity_factor": 1.5, "allow_tf32": False, "tuning": None, "fast_accumulate": False, "router_norm": None}
    | {"expert_scale": False},
    ExpertsSpec: {"activation": Activation("silu"), "weight_layout": "in_out", "gate_layout": "halves"},
    Target: {"kind": "cuda", "arch": 90, "num_sms": 132},
}


def values_of(package: str) -> dict[str, Callable[[], Any]]:
    """Every wrong value for a front-end by name."""
    framework = importlib.import_module(package.removeprefix("moe_"))
    own = torch_values(framework) if package == "moe_torch" else jax_values(framework)
    convert = framework.from_numpy if package == "moe_torch" else framework.numpy.asarray
    arrays = {f"array, {name}": lambda make=make: convert(make()) for name, make in ARRAYS.items()}
    foreign = {f"NumPy, {name}": make for name, make in (ARRAYS | NUMPY).items()}
    return {f"value, {name}": make for name, make in JUNK.items()} | arrays | foreign | own


def places(value: Any, path: str = "") -> Iterator[str]:
    """Every argument of a call, and every field of its bundles and layouts."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield name
            yield from places(one, name)
    elif isinstance(value, _BUNDLES):
        for field in dataclasses.fields(value):
            yield f"{path}.{field.name}"
            yield from places(getattr(value, field.name), f"{path}.{field.name}")


def changed(arguments: Mapping[str, Any], place: str, value: Any) -> dict[str, Any]:
    """The arguments with `value` in one place."""
    name, *fields = place.split(".")

    def put(bundle: Any, fields: list[str]) -> Any:
        if not fields:
            return value
        return dataclasses.replace(bundle, **{fields[0]: put(getattr(bundle, fields[0]), fields[1:])})

    return {**arguments, name: put(arguments[name], fields)}


def complaint(module: Any, call: Call, arguments: Mapping[str, Any], place: str, make: Callable[[], Any]) -> str | None:
    """What is wrong about the answer to a bad call; None for an error of the package or a result."""
    is_array = place in {path for path, _ in named(call.arguments)}
    value = make()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(module, call.op)(**changed(arguments, place, value))
    except (InvalidInput, Unsupported) as error:
        return None if "; " in str(error) else f"{type(error).__name__} without a fix: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if is_array and value is not None and not hasattr(value, "shape") and place not in call.free:
        return f"{type(value).__name__} was taken for an array"
    return None


def all_calls(package: str) -> list[tuple[Call, str, str]]:
    names = list(values_of(package))
    return [(call, place, name) for call in OPS for place in places(call.arguments) for name in names]


def check(package: str, chosen: list[tuple[Call, str, str]]) -> list[str]:
    module, make = front_end(package)
    values, wrong = values_of(package), []
    made: dict[int, Any] = {}
    for call, place, name in chosen:
        if id(call) not in made:
            made[id(call)] = replaced(call.arguments, lambda path, spec: make(spec))
        found = complaint(module, call, made[id(call)], place, values[name])
        if found is not None:
            wrong.append(f"{package}.{call.op}, {place} = {name}: {found[:300]}")
    return wrong


@pytest.mark.parametrize("package", ["moe_torch", "moe_jax"])
def test_bad_calls(package: str) -> None:
    module, _ = front_end(package)
    every = all_calls(package)
    chosen = np.random.default_rng(0).choice(len(every), min(COUNT, len(every)), replace=False)
    with module.cpu_engine("reference"):
        wrong = check(package, [every[place] for place in chosen])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
def test_bad_options(kind: type) -> None:
    """An error of the package, or options that hash and print, as plans need it."""
    valid, wrong = OPTIONS[kind], []
    assert set(valid) <= {field.name for field in dataclasses.fields(kind)}
    kind(**valid)
    for place in valid:
        for name, make in (JUNK | ARRAYS | NUMPY).items():
            try:
                hash(kind(**(valid | {place: make()})))
            except (InvalidInput, Unsupported) as error:
                if "; " not in str(error):
                    wrong.append(f"{place} = {name}: no fix in {error}")
            except Exception as error:
                wrong.append(f"{place} = {name}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
