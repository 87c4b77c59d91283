"""Every complaint of the torch front-end: right type; the argument's name, the expectation, the value and the fix."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode

import moe_torch
from moe_torch import Activation, InvalidInput, MatmulOperands, MatmulSpec, MoESpec, RouterSpec, Unsupported
from tests.torch_support import D_FF, D_MODEL, NUM_EXPERTS, REAL_KERNELS, running_on, torch_layer

LAYER = torch_layer()
X, EXPERTS, ROUTING, SPEC = LAYER
SILU = SPEC.activation
IDS = torch.zeros(4, 2, dtype=torch.int32)
LOGITS = torch.zeros(9, NUM_EXPERTS)
DENSE = MatmulSpec("in_out")
TOO_MANY = RouterSpec(6)
BY_TOKEN = MatmulSpec("in_out", "token", "slot")


@pytest.fixture(autouse=True)
def reference_engine() -> Iterator[None]:
    torch._dynamo.reset()
    with running_on("reference"):
        yield


def ids_like(num_tokens: int, top_k: int = 2) -> Any:
    return torch.arange(num_tokens * top_k, dtype=torch.int32).reshape(num_tokens, top_k) % NUM_EXPERTS


def layout_of(num_tokens: int, num_experts: int = NUM_EXPERTS, **options: Any) -> Any:
    return moe_torch.make_layout(ids_like(num_tokens), num_experts, **options)


def multiply(layout: Any, operands: Any = None, spec: MatmulSpec = BY_TOKEN) -> Any:
    return moe_torch.matmul_ogs(operands or MatmulOperands(X, EXPERTS.gate_up), layout, spec)


def moe(**changes: Any) -> Any:
    """A whole layer with arguments, or fields of its weights, replaced."""
    fields = {field.name for field in dataclasses.fields(EXPERTS)}
    experts = dataclasses.replace(EXPERTS, **{name: changes.pop(name) for name in list(changes) if name in fields})
    arguments = {"x": X, "experts": experts, "routing": ROUTING, "spec": SPEC} | changes
    return moe_torch.moe(**arguments)


def misaligned(tensor: Any) -> Any:
    """The same values one element behind the start of an allocation."""
    storage = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return storage[1:].view(tensor.shape).copy_(tensor)


#: name -> (call, pattern): rank, shape, dtype, strides, options.
INVALID: dict[str, tuple[Callable[[], Any], str]] = {
    "rank of x": (
        lambda: moe(x=X.reshape(3, 3, D_MODEL)),
        r"x must be \[num_tokens, d_model\], got \(3, 3, 48\); flatten the leading axes first",
    ),
    "dtype of x": (
        lambda: moe(x=X.double()),
        r"x must be bfloat16 or float16 or float32, got float64; cast it to bfloat16",
    ),
    "dtype no plan knows": (
        lambda: moe_torch.router(X.to(torch.complex64), ROUTING.weight),
        r"x must have a dtype among float32, .*, got torch\.complex64; cast it",
    ),
    "strides of x": (
        lambda: moe(x=torch.zeros(D_MODEL, 9).T),
        r"x must .*, got strides \(1, 9\).*; make it contiguous",
    ),
    "overlapping rows of x": (
        lambda: moe(x=torch.zeros(1, D_MODEL).expand(9, D_MODEL)),
        r"x must not have overlapping rows, got strides \(0, 1\).*; make it contiguous",
    ),
    "router weight shape": (
        lambda: moe_torch.router(X, ROUTING.weight.T.contiguous()),
        r"weight must be \[48, .*\], got \(5, 48\); pass an array of that shape",
    ),
    "router bias shape": (
        lambda: moe_torch.router(X, ROUTING.weight, bias=torch.zeros(4)),
        r"bias must be \[5\], got \(4,\); pass an array of that shape",
    ),
    "logits dtype": (
        lambda: moe_torch.route(LOGITS.half(), RouterSpec(2)),
        r"logits must be float32, got float16; cast it to float32",
    ),
    "K above E": (
        lambda: moe_torch.route(LOGITS, TOO_MANY),
        r"top_k must be at most num_experts = 5, got 6; lower top_k",
    ),
    "K above E in moe": (
        lambda: moe(spec=MoESpec(SILU, TOO_MANY)),
        r"top_k must be at most num_experts = 5, got 6; lower top_k",
    ),
    "correction bias dtype": (
        lambda: moe_torch.route(LOGITS, RouterSpec(2), correction_bias=torch.zeros(5, dtype=torch.bfloat16)),
        r"correction_bias must be float32, got bfloat16; cast it to float32",
    ),
    "token mask dtype": (
        lambda: moe_torch.route(LOGITS, RouterSpec(2), token_mask=torch.ones(9)),
        r"token_mask must be bool, got float32; cast it to bool",
    ),
    "token mask shape": (
        lambda: moe(token_mask=torch.ones(8, dtype=torch.bool)),
        r"token_mask must be \[9\], got \(8,\); pass an array of that shape",
    ),
    "ids dtype": (
        lambda: moe_torch.make_layout(IDS.long(), 5),
        r"ids must be int32, got int64; cast it to int32",
    ),
    "ids rank": (
        lambda: moe_torch.make_layout(IDS.reshape(-1), 5),
        r"ids must be \[num_tokens, top_k\], got \(8,\); reshape it",
    ),
    "number of experts": (
        lambda: moe_torch.make_layout(IDS, 0),
        r"num_experts must be an integer of at least 1, got 0; pass such a number",
    ),
    "number of experts is a number": (
        lambda: moe_torch.make_layout(IDS, True),
        r"num_experts must be an integer of at least 1, got True; pass such a number",
    ),
    "alignment with max_rows": (
        lambda: moe_torch.make_layout(IDS, 5, alignment=8, max_rows=8),
        r"alignment must be 1 when max_rows is given, got 8; round max_rows up instead",
    ),
    "expert map dtype": (
        lambda: moe_torch.make_layout(IDS, 5, expert_map=torch.zeros(9)),
        r"expert_map must be int32, got float32; cast it to int32",
    ),
    "expert map shape": (
        lambda: moe(expert_map=torch.zeros(4, dtype=torch.int32)),
        r"expert_map must be \[5\], got \(4,\); pass an array of that shape",
    ),
    "bitmatrix dtype": (
        lambda: moe_torch.unpack_bitmatrix(torch.zeros(4, 2, dtype=torch.int32), 40, 2),
        r"bitmatrix must be uint32, got int32; cast it to uint32",
    ),
    "bitmatrix words": (
        lambda: moe_torch.unpack_bitmatrix(torch.zeros(4, 1, dtype=torch.uint32), 40, 2),
        r"bitmatrix must be \[num_tokens, 2\], got \(4, 1\); pass an array of that shape",
    ),
    "weight of another layout": (
        lambda: multiply(layout_of(9), spec=MatmulSpec("out_in", "token", "slot")),
        r"weight must be \[5, n, 48\], got \(5, 48, 64\); pass an array of that shape",
    ),
    "weight dtype": (
        lambda: multiply(layout_of(9), MatmulOperands(X, EXPERTS.gate_up.half())),
        r"weight must be float32, got float16; cast it to float32",
    ),
    "weight strides": (
        lambda: multiply(layout_of(9), MatmulOperands(X, torch.zeros(5, 64, D_MODEL).transpose(1, 2))),
        r"weight must be row-major contiguous, got strides \(3072, 1, 48\); make it contiguous first",
    ),
    "number of experts of the weight": (
        lambda: multiply(layout_of(9, 7)),
        r"weight must be \[7, 48, n\], got \(5, 48, 64\); pass an array of that shape",
    ),
    "x of another layout": (
        lambda: multiply(layout_of(8)),
        r"x must be \[8, 48\], got \(9, 48\); pass an array of that shape",
    ),
    "layout put together": (
        lambda: multiply(dataclasses.replace(layout_of(9), group_sizes=torch.zeros(4, dtype=torch.int32))),
        r"group_sizes must be int32\[5\], got int32\[4\]; pass the layout's own array",
    ),
    "layout with other rows": (
        lambda: multiply(dataclasses.replace(layout_of(9), slot_of_row=layout_of(8).slot_of_row)),
        r"slot_of_row must be int32\[18\], got int32\[16\]; pass the layout's own array",
    ),
    "gather without a layout": (
        lambda: multiply(None, MatmulOperands(X, EXPERTS.gate_up[0])),
        r"gather and scatter must be 'row' without a layout, got 'token' and 'slot'; pass a layout",
    ),
    "row weight shape": (
        lambda: multiply(layout_of(9), MatmulOperands(X, EXPERTS.gate_up, row_weight=torch.zeros(9))),
        r"row_weight must be \[18\], got \(9,\); pass an array of that shape",
    ),
    "up without separate": (
        lambda: multiply(layout_of(9), MatmulOperands(X, EXPERTS.gate_up, up=EXPERTS.gate_up)),
        r"up must be None unless a gate_layout='separate' activation is fused; leave it out",
    ),
    "odd width": (
        lambda: moe_torch.activation(torch.zeros(4, 7), SILU),
        r"x must have an even width \(gate and up\), got 7; pass both halves",
    ),
    "up of an activation": (
        lambda: moe_torch.activation(torch.zeros(4, 8), Activation("silu", gate_layout="separate")),
        r"up must be \[4, 8\] of float32, got None; pass the array",
    ),
    "out_dtype of a name": (
        lambda: moe_torch.activation(torch.zeros(4, 8), SILU, out_dtype="int32"),
        r"out_dtype must be one of bfloat16, float16, float32, got 'int32'; name one of these",
    ),
    "out_dtype of torch": (
        lambda: moe_torch.activation(torch.zeros(4, 8), SILU, out_dtype=torch.complex64),
        r"out_dtype must be a torch dtype, one of bfloat16, float16, float32, got torch\.complex64; pass one of these",
    ),
    "slots of a reduction": (
        lambda: moe_torch.reduce(torch.zeros(17, 8), layout_of(9)),
        r"y must be \[18, d_model\], got \(17, 8\); pass an array of that shape",
    ),
    "order of a reduction": (
        lambda: moe_torch.reduce(torch.zeros(18, 8), layout_of(9), order="token"),
        r"order must be one of slot, row, got 'token'; name one of these",
    ),
    "shared shape": (
        lambda: moe_torch.reduce(torch.zeros(18, 8), layout_of(9), shared=torch.zeros(8, 8)),
        r"shared must be \[9, 8\], got \(8, 8\); pass an array of that shape",
    ),
    "gate without shared": (
        lambda: moe_torch.reduce(torch.zeros(18, 8), layout_of(9), shared_gate=torch.zeros(9, 1)),
        r"shared_gate must be None without shared, got an array; pass shared or leave it out",
    ),
    "weights of rows": (
        lambda: moe_torch.scale_rows(X, torch.zeros(9)),
        r"weights must be \[9, 1\], got \(9,\); reshape it",
    ),
    "rank of the experts": (
        lambda: moe(gate_up=EXPERTS.gate_up[0]),
        r"experts\.gate_up must be \[num_experts, 48, width\], got \(48, 64\); reshape it",
    ),
    "shape of down": (
        lambda: moe(down=EXPERTS.down.transpose(1, 2).contiguous()),
        r"experts\.down must be \[5, 32, 48\], got \(5, 48, 32\); pass an array of that shape",
    ),
    "experts without a map": (
        lambda: moe(routing=moe_torch.RouterLogits(torch.zeros(9, 8))),
        r"routing must score the 5 experts of experts\.gate_up, got 8; pass expert_map",
    ),
    "no router": (
        lambda: moe(spec=MoESpec(SILU)),
        r"spec\.router must be a RouterSpec when routing from x or logits, got None; pass one",
    ),
    "two routings": (
        lambda: moe(routing=moe_torch.TopK(ids_like(9), torch.zeros(9, 2))),
        r"spec\.router must be None when ids and weights are given; remove one of the two",
    ),
    "ids of another batch": (
        lambda: moe(routing=moe_torch.TopK(ids_like(8), torch.zeros(8, 2)), spec=MoESpec(SILU)),
        r"routing\.ids must be \[9, top_k\], got \(8, 2\); pass an array of that shape",
    ),
    "weights of other ids": (
        lambda: moe(routing=moe_torch.TopK(ids_like(9), torch.zeros(9, 3)), spec=MoESpec(SILU)),
        r"routing\.weights must be \[9, 2\], got \(9, 3\); pass an array of that shape",
    ),
    "weighted input with K = 2": (
        lambda: moe(
            routing=moe_torch.TopK(ids_like(9), torch.zeros(9, 2)),
            spec=MoESpec(SILU, apply_router_weight_on_input=True),
        ),
        r"top_k must be 1 with apply_router_weight_on_input, got 2; weight the output instead",
    ),
    "no tensor": (
        lambda: moe_torch.router(X.numpy(), ROUTING.weight),
        r"x must be a torch\.Tensor, got ndarray; convert it with moe_torch\.from_dlpack",
    ),
    "no tensor in a bundle": (
        lambda: moe(gate_up=EXPERTS.gate_up.numpy()),
        r"experts\.gate_up must be a torch\.Tensor, got ndarray; convert it with moe_torch\.from_dlpack",
    ),
    "missing tensor": (
        lambda: moe_torch.router(X, None),
        r"weight must be \[48, num_experts\] of bfloat16 .*, got None; pass the array",
    ),
    "missing tensor in a bundle": (
        lambda: moe(down=None),
        r"experts\.down must be \[5, 32, 48\] of float32, got None; pass the array",
    ),
    "no spec": (
        lambda: moe_torch.route(LOGITS, 2),
        r"spec must be a RouterSpec, got int; build one from moe_torch",
    ),
    "no operands": (
        lambda: moe_torch.matmul_ogs(X, None, DENSE),
        r"operands must be a MatmulOperands, got Tensor; build one from moe_torch",
    ),
    "no layout": (
        lambda: multiply(IDS),
        r"layout must be a RaggedLayout, got Tensor; build one from moe_torch",
    ),
    "no routing": (
        lambda: moe(routing=LOGITS),
        r"routing must be a RouterWeights or RouterLogits or TopK, got Tensor; build one from moe_torch",
    ),
    "no shared expert": (
        lambda: moe(shared=(EXPERTS.gate_up[0], EXPERTS.down[0])),
        r"shared must be a SharedExpert, got tuple; build one from moe_torch",
    ),
    "sparse tensor": (
        lambda: moe_torch.router(X.to_sparse(), ROUTING.weight),
        r"x must be a dense tensor, got layout torch\.sparse_coo; call to_dense\(\) on it",
    ),
    "mixed devices": (
        lambda: moe_torch.router(X, ROUTING.weight.to("meta")),
        r"weight must be on cpu like x, got meta; move it with \.to\('cpu'\)",
    ),
    "mixed devices in moe": (
        lambda: moe(x=X.to("meta")),
        r"experts\.gate_up must be on meta like x, got cpu; move it with \.to\('meta'\)",
    ),
    "misaligned x": (
        lambda: moe_torch.router(misaligned(X), ROUTING.weight),
        r"x must start at a multiple of 16 bytes, got address 0x[0-9a-f]+ \(storage offset 1\); clone\(\) it",
    ),
    "misaligned weight": (
        lambda: moe(down=misaligned(EXPERTS.down)),
        r"experts\.down must start at a multiple of 16 bytes, got address .*; clone\(\) it",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_input(name: str) -> None:
    call, pattern = INVALID[name]
    with pytest.raises(InvalidInput, match=pattern) as caught:
        call()
    assert type(caught.value) is InvalidInput
    with pytest.raises(InvalidInput, match=pattern):
        call()


def test_alignment_is_checked_on_every_call() -> None:
    """Equal metadata takes the prepared plan, whose run still looks at addresses."""
    fine = X.clone()
    moe_torch.router(fine, ROUTING.weight)
    with pytest.raises(InvalidInput, match=r"x must start at a multiple of 16 bytes.*clone"):
        moe_torch.router(misaligned(X), ROUTING.weight)
    with running_on(REAL_KERNELS) as device:
        clone = misaligned(X).clone().to(device)
        assert moe_torch.router(clone, ROUTING.weight.to(device)).shape == (9, NUM_EXPERTS)


def test_a_device_without_kernels_is_unsupported() -> None:
    with pytest.raises(Unsupported, match=r"arrays must be on a CPU or a CUDA device, got 'meta'; move them there"):
        moe_torch.explain_moe(
            X.to("meta"),
            moe_torch.ExpertWeights(EXPERTS.gate_up.to("meta"), EXPERTS.down.to("meta")),
            moe_torch.RouterWeights(ROUTING.weight.to("meta")),
            SPEC,
        )


#: Refused while a program is traced: the planner sees the example sizes.
TRACED = ("rank of x", "dtype of x", "router weight shape", "K above E", "ids dtype", "weight dtype", "shape of down")


@pytest.mark.parametrize("name", TRACED)
def test_compiled_programs_show_the_same_complaint(name: str) -> None:
    call, pattern = INVALID[name]
    with pytest.raises(Exception, match=pattern):
        torch.compile(call, fullgraph=True, backend="eager", dynamic=True)()


def test_fake_tensors_are_checked_as_real_ones() -> None:
    with FakeTensorMode(), pytest.raises(InvalidInput, match=r"weight must be \[48, .*\], got \(5, 48\)"):
        moe_torch.router(torch.empty(9, D_MODEL), torch.empty(5, D_MODEL))
    with pytest.raises(InvalidInput, match=r"logits must be float32, got float16"):
        moe_torch.route(LOGITS.half().to("meta"), RouterSpec(2))


def test_complaints_name_the_fix() -> None:
    """Every pattern above ends in a remedy after a semicolon."""
    for name, (_, pattern) in INVALID.items():
        assert re.search(r"; ?\w", pattern), name


def test_foreign_arrays_are_named() -> None:
    for foreign in (np.zeros((9, D_FF), np.float32), [[0.0] * D_FF] * 9, 3.0):
        with pytest.raises(InvalidInput, match=rf"x must be a torch\.Tensor, got {type(foreign).__name__}"):
            moe_torch.activation(foreign, SILU)
    with pytest.raises(InvalidInput, match=r"x must be a torch\.Tensor, got None; pass the tensor"):
        moe_torch.activation(None, SILU)
