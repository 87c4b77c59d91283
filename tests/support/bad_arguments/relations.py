"""Which sizes of an op's arguments belong together: valid calls of every op, and the axes that may change alone.

`broken` changes one axis or one dtype of one array of a valid call. All of these must be refused, in both front-ends,
but for the axes and dtypes that a call names as free.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.base.dtypes import numpy_dtype
from moe_core.formats import QuantizedSpec, QuantizedTensor, format_named, quantized_specs
from moe_core.ops.activation.backward import plan_activation_backward
from moe_core.ops.matmul.backward import plan_matmul_ogs_backward
from moe_core.ops.moe.backward import plan_moe_backward
from moe_core.ops.moe.options import BackwardOptions
from moe_core.ops.router.backward import plan_router_backward
from moe_core.ops.routing.backward import plan_routing_backward
from moe_core.specs import Activation, LayoutSpec, LogitsSpec, MatmulSpec, MoESpec, RouterSpec
from moe_core.specs.operands import (
    ExpertWeights,
    LayoutArrays,
    MatmulOperands,
    MoEOperands,
    OutputGradients,
    RaggedLayout,
    RouterLogits,
    RouterWeights,
    RoutingGradients,
    SharedExpert,
    TopK,
)
from tests.support.bad_arguments.case import D, E, F, K, T, array, ids

#: Experts of all devices, where a map tells which are here.
GLOBAL = 7
SILU, SEPARATE = Activation("silu"), Activation("silu", gate_layout="separate")
PADDED = LayoutSpec(T, K, E, alignment=4)
_BUNDLES = (ExpertWeights, MatmulOperands, RouterLogits, RouterWeights, SharedExpert, TopK, RaggedLayout)
_BUNDLES += (QuantizedTensor, OutputGradients, RoutingGradients, MoEOperands)
#: What an array is changed to. JAX has none of 64 bits by default.
_OTHER_DTYPE = {"float32": "bfloat16", "int32": "float32", "bool": "uint8", "uint32": "int32", "int8": "uint8"}


class Call(NamedTuple):
    """`op(**arguments)` is a valid call, with ArraySpecs for arrays.

    free: arrays whose dtype, and axes (`x 0` is the first of x), that may change alone. planner: of a backward, which
    front-ends call with arrays of their own making.
    """

    op: str
    arguments: Mapping[str, Any]
    free: tuple[str, ...] = ()
    planner: Callable[..., Any] | None = None


def front_end(package: str) -> tuple[Any, Callable[[ArraySpec], Any]]:
    """The module of a front-end, and what makes zeros of its own; skips where its framework is missing."""
    pytest.importorskip(package.removeprefix("moe_"))
    module = importlib.import_module(package)
    if package == "moe_torch":
        torch = importlib.import_module("torch")
        return module, lambda spec: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
    jnp = importlib.import_module("jax.numpy")
    return module, lambda spec: jnp.asarray(np.zeros(spec.shape, numpy_dtype(spec.dtype)))


def call_id(call: Call) -> str:
    return f"{call.op}-{len(tuple(named(call.arguments)))}-arrays"


def layout(spec: LayoutSpec) -> RaggedLayout:
    own = LayoutArrays.specs(spec)
    return RaggedLayout(spec, own.group_sizes, own.group_start, own.slot_of_row, own.row_of_slot, ids(1))


def named(value: Any, path: str = "") -> Iterator[tuple[str, ArraySpec]]:
    """(path, spec) of every array of a call's arguments; nothing reads a layout's invalid_ids."""
    if isinstance(value, ArraySpec):
        yield path, value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from named(one, name)
    elif isinstance(value, _BUNDLES):
        for field in dataclasses.fields(value):
            if field.name not in ("spec", "invalid_ids"):
                yield from named(getattr(value, field.name), f"{path}.{field.name}")


def replaced(value: Any, change: Callable[[str, ArraySpec], Any], path: str = "") -> Any:
    """A call's arguments with `change(path, spec)` in the place of every array."""
    if isinstance(value, ArraySpec):
        return change(path, value)
    if isinstance(value, Mapping):
        return {name: replaced(one, change, name) for name, one in value.items()}
    if not isinstance(value, _BUNDLES):
        return value
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.name != "spec"}
    changed = {name: replaced(one, change, f"{path}.{name}") for name, one in fields.items()}
    return dataclasses.replace(value, **changed)


def broken(call: Call) -> Iterator[tuple[str, str, ArraySpec]]:
    """(what was changed, path, spec): every axis one longer and one shorter, every dtype another."""
    for path, spec in named(call.arguments):
        for axis, size in enumerate(spec.shape):
            for other in (size + 1, size - 1):
                shape = (*spec.shape[:axis], other, *spec.shape[axis + 1 :])
                yield f"{path} {axis}", path, ArraySpec(shape, spec.dtype)
        yield path, path, ArraySpec(spec.shape, _OTHER_DTYPE[spec.dtype])


def _operands(**changes: Any) -> MatmulOperands:
    return MatmulOperands(**({"x": array(T, D), "weight": array(E, D, 2 * F)} | changes))


def _experts(**changes: Any) -> ExpertWeights:
    return ExpertWeights(**({"gate_up": array(E, D, 2 * F), "down": array(E, F, D)} | changes))


_EVERY_EXPERT = _experts(
    gate_up=array(E, D, F), up=array(E, D, F), gate_up_bias=array(E, F), up_bias=array(E, F), down_bias=array(E, D)
)
_SHARED = SharedExpert(array(D, F), array(F, D), up=array(D, F), gate=array(D, 1))
#: What may be of another dtype than x; biases may, where x is not float32.
_ROUTING = ("routing.weight", "routing.bias", "shared.gate")
#: The arrays of a layout that a reduction does not read.
_UNREAD = tuple(f"layout.{name}{axis}" for name in ("group_sizes", "group_start", "slot_of_row") for axis in ("", " 0"))
_ROUTER = RouterWeights(array(D, GLOBAL), array(GLOBAL), array(GLOBAL))
_INT8 = quantized_specs(QuantizedSpec(format_named("int8_channel"), "in_out"), (E, D, 2 * F))
_BY_TOKEN = MatmulSpec("in_out", "token", "slot")

CALLS = (
    Call("router", {"x": array(T, D), "weight": array(D, E)}, ("x 0", "weight 1", "x", "weight")),
    Call("router", {"x": array(T, D), "weight": array(D, E), "bias": array(E)}, ("x 0", "x", "weight", "bias")),
    Call("route",
        {"logits": array(T, E), "spec": RouterSpec(K), "correction_bias": array(E),
        "token_mask": array(T, dtype="bool")}),
    Call("route", {"logits": array(T, E), "spec": RouterSpec(K), "ids": ids()}, ("logits 1",)),
    Call("make_layout",
        {"ids": ids(), "num_experts": E, "expert_map": ids(GLOBAL), "token_mask": array(T, dtype="bool")},
        ("ids 1", "expert_map 0")),
    Call("pack_bitmatrix", {"ids": ids(), "num_experts": 40}, ("ids 0", "ids 1")),
    Call("unpack_bitmatrix", {"bitmatrix": array(T, 2, dtype="uint32"), "num_experts": 40, "top_k": K},
        ("bitmatrix 0",)),
    Call("matmul_ogs",
        {"operands": _operands(bias=array(E, 2 * F), row_weight=array(T, K)), "layout": layout(LayoutSpec(T, K, E)),
        "spec": _BY_TOKEN}, ()),
    Call("matmul_ogs", {"operands": _operands(x=array(PADDED.capacity, D), weight=array(3, E, D, F), up=array(3, E, D,
        F), bias=array(3, E, F), up_bias=array(3, E, F), row_weight=array(T * K), layer_index=ids(1)),
        "layout": layout(PADDED), "spec": MatmulSpec("in_out", "row", "row", SEPARATE)}, ()),
    Call("matmul_ogs",
        {"operands": _operands(x=array(T * K, D), weight=array(E, 2 * F, D)), "layout": layout(LayoutSpec(T, K, E)),
        "spec": MatmulSpec("out_in", "slot")}, ("operands.weight 1",)),
    Call("matmul_ogs", {"operands": _operands(weight=_INT8), "layout": layout(LayoutSpec(T, K, E)), "spec": _BY_TOKEN},
        ("operands.x",)),
    Call("matmul_ogs",
        {"operands": _operands(weight=array(D, F), row_weight=array(T)), "layout": None, "spec": MatmulSpec("in_out")},
        ("operands.weight 1",)),
    Call("activation", {"x": array(T, 2 * F), "activation": SILU}, ("x 0", "x")),
    Call("activation", {"x": array(T, F), "activation": SEPARATE, "up": array(T, F)}),
    Call("reduce",
        {"y": array(T * K, D), "layout": layout(LayoutSpec(T, K, E)), "shared": array(T, D),
        "shared_gate": array(T, 1)}, ("y", "shared", *_UNREAD)),
    Call("reduce", {"y": array(T * K, D), "layout": layout(LayoutSpec(T, K, E))}, ("y 1", "y", *_UNREAD)),
    Call("reduce", {"y": array(PADDED.capacity, D), "layout": layout(PADDED), "order": "row"}, ("y 1", "y", *_UNREAD)),
    Call("scale_rows", {"x": array(T, D), "weights": array(T, 1)}, ("x 1", "x")),
    Call("quantize_rows", {"x": array(T, D), "format": format_named("fp8_tensor"), "used_by": ids(T * K)},
        ("x 1", "x")),
    Call("quantize_rows", {"x": array(T, D), "format": format_named("fp8_tensor"), "scales": array(1)},
        ("x 0", "x 1", "x")),
    Call("moe",
        {"x": array(T, D), "experts": _EVERY_EXPERT, "routing": _ROUTER, "spec": MoESpec(SEPARATE, RouterSpec(K)),
        "token_mask": array(T, dtype="bool"), "expert_map": ids(GLOBAL), "shared": _SHARED}, _ROUTING),
    Call("moe", {"x": array(T, D), "experts": _experts(gate_up=array(3, E, D, 2 * F), down=array(3, E, F, D),
        layer_index=ids(1)), "routing": TopK(ids(), array(T, K)), "spec": MoESpec(SILU)}, ("routing.weights",)),
    Call("moe",
        {"x": array(T, D), "experts": _experts(gate_up=_INT8), "routing": RouterLogits(array(T, E), array(E)),
        "spec": MoESpec(SILU, RouterSpec(K))}),
)  # fmt: skip

#: The same of backwards, which are planned with what the front-ends' autodiff passes on.
BACKWARDS = (
    Call("router",
        {"d_logits": array(T, E), "x": array(T, D), "weight": array(D, E), "bias": array(E), "spec": LogitsSpec(),
        "wanted": ("d_x", "d_weight", "d_bias")}, ("x", "weight", "bias"), plan_router_backward),
    Call("route",
        {"gradients": RoutingGradients(array(T, K), array(T, E), array(1), array(1), ids(E)), "logits": array(T, E),
        "ids": ids(), "spec": RouterSpec(K), "token_mask": array(T, dtype="bool")}, (), plan_routing_backward),
    Call("matmul_ogs", {"d_y": array(T * K, 2 * F), "operands": _operands(bias=array(E, 2 * F),
        row_weight=array(T * K)), "layout": LayoutSpec(T, K, E), "spec": _BY_TOKEN, "wanted": ("d_x", "d_weight",
        "d_bias", "d_row_weight")}, ("d_y",), plan_matmul_ogs_backward),
    Call("activation", {"d_y": array(T, F), "x": array(T, F), "activation": SEPARATE, "up": array(T, F)}, ("d_y",),
        plan_activation_backward),
    Call("moe", {"gradients": OutputGradients(array(T, D), array(T, K), array(T, GLOBAL), array(1), array(1)),
        "operands": MoEOperands(array(T, D), _EVERY_EXPERT, _ROUTER, array(T, dtype="bool"), ids(GLOBAL), _SHARED),
        "spec": MoESpec(SEPARATE, RouterSpec(K)), "options": BackwardOptions(("d_x",))}, ("gradients.output",
        *(f"operands.{name}" for name in _ROUTING)), plan_moe_backward),
)  # fmt: skip
