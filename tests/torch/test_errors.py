"""Complaints of the torch front-end: its own, and that those of planners arrive, eagerly and while tracing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode

import moe_torch
from moe_core.base.arrays import ArraySpec
from moe_torch import InvalidInput, MatmulOperands, MatmulSpec, RouterSpec
from moe_torch.bridge import private
from tests.support.bad_arguments import sample
from tests.support.bad_arguments.case import Case, case_id
from tests.support.torch import D_FF, D_MODEL, NUM_EXPERTS, REAL_KERNELS, running_on, torch_layer

LAYER = torch_layer()
X, EXPERTS, ROUTING, SPEC = LAYER
MODULE = moe_torch.MoE(D_MODEL, D_FF, NUM_EXPERTS, 2)
SILU = SPEC.activation
IDS = torch.zeros(4, 2, dtype=torch.int32)
LOGITS = torch.zeros(9, NUM_EXPERTS)
DENSE = MatmulSpec("in_out")
FP8 = moe_torch.format_named("fp8_tensor")
TOO_MANY = RouterSpec(6)
BY_TOKEN = MatmulSpec("in_out", "token", "slot")
SEPARATE = MatmulSpec("in_out", activation=moe_torch.Activation("silu", gate_layout="separate"))

pytestmark = pytest.mark.usefixtures("fresh_reference_engine_of_torch")


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


def nested() -> Any:
    """Two sequences of different lengths."""
    return torch.nested.nested_tensor([torch.zeros(3, D_MODEL), torch.zeros(2, D_MODEL)], layout=torch.jagged)


def emptied(tensor: Any) -> Any:
    """The same shape over a storage without memory, as sharded training frees parameters between steps."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def scales_elsewhere() -> Any:
    tensor = moe_torch.quantize(X, moe_torch.format_named("fp8_channel"))
    return moe_torch.QuantizedTensor(tensor.spec, tensor.values, tensor.scales.to("meta"))


#: name -> (call, pattern): what no planner sees, or sees of tensors alone.
INVALID: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype no plan knows": (lambda: moe_torch.router(X.to(torch.complex64), ROUTING.weight),
        r"x must have a dtype among float32, .*, got torch\.complex64; cast it"),
    "layout put together": (lambda: multiply(dataclasses.replace(layout_of(9),
        group_sizes=torch.zeros(4, dtype=torch.int32))),
        r"layout\.group_sizes must be \[5\], got \(4,\); pass an array of that shape"),
    "layout with other rows": (lambda: multiply(dataclasses.replace(layout_of(9),
        slot_of_row=layout_of(8).slot_of_row)),
        r"layout\.slot_of_row must be \[18\], got \(16,\); pass an array of that shape"),
    "out_dtype of torch": (lambda: moe_torch.activation(torch.zeros(4, 8), SILU, out_dtype=torch.complex64),
        r"out_dtype must be a torch dtype, one of bfloat16, float16, float32, got torch\.complex64; pass one of these"),
    "no tensor": (lambda: moe_torch.router(X.numpy(), ROUTING.weight),
        r"x must be a torch\.Tensor, got ndarray; convert it with moe_torch\.from_dlpack"),
    "no tensor in a bundle": (lambda: moe(gate_up=EXPERTS.gate_up.numpy()),
        r"experts\.gate_up must be a torch\.Tensor, got ndarray; convert it with moe_torch\.from_dlpack"),
    "no spec": (lambda: moe_torch.route(LOGITS, 2), r"spec must be a RouterSpec, got int; build one from moe_torch"),
    "no operands": (lambda: moe_torch.matmul_ogs(X, None, DENSE),
        r"operands must be a MatmulOperands, got Tensor; build one from moe_torch"),
    "no layout": (lambda: multiply(IDS), r"layout must be a RaggedLayout, got Tensor; build one from moe_torch"),
    "no routing": (lambda: moe(routing=LOGITS),
        r"routing must be a RouterWeights or RouterLogits or TopK, got Tensor; build one from moe_torch"),
    "no shared expert": (lambda: moe(shared=(EXPERTS.gate_up[0], EXPERTS.down[0])),
        r"shared must be a SharedExpert, got tuple; build one from moe_torch"),
    "sparse tensor": (lambda: moe_torch.router(X.to_sparse(), ROUTING.weight),
        r"x must be a dense tensor, got layout torch\.sparse_coo; call to_dense\(\) on it"),
    **{f"sparse {name} of a layer": (
        lambda name=name, value=value: MODULE(**{"x": X, name: value.to_sparse()}),
        rf"{name} must be a dense tensor, got layout torch\.sparse_coo; call to_dense\(\) on it")
        for name, value in (("x", X), ("token_mask", X[:, 0] > 0), ("gate_inputs", X), ("expert_ids", X[:, :2].int()))},
    "nested x of a layer": (lambda: MODULE(nested()),
        r"x must be one dense tensor, got a nested tensor; call \.to_padded_tensor\(0\) or pass its \.values\(\)"),
    "nested tensor": (lambda: moe_torch.router(nested(), ROUTING.weight),
        r"x must be one dense tensor, got a nested tensor; call \.to_padded_tensor\(0\) or pass its \.values\(\)"),
    "nested tensor in quantize_rows": (lambda: moe_torch.quantize_rows(nested(), FP8),
        r"x must be one dense tensor, got a nested tensor; call \.to_padded_tensor"),
    "nested tensor in a bundle": (lambda: moe(gate_up=nested()),
        r"experts\.gate_up must be one dense tensor, got a nested tensor; call \.to_padded_tensor"),
    "emptied x": (lambda: moe_torch.router(emptied(X), ROUTING.weight),
        r"x must have memory for float32\[9, 48\], got a null address, as of .* resize_\(0\); allocate it again"),
    "emptied weight": (lambda: moe(down=emptied(EXPERTS.down)),
        r"experts\.down must have memory for .*, got a null address, .*; allocate it again"),
    "emptied weight to quantise": (lambda: moe_torch.quantize(emptied(X), FP8),
        r"weight must have memory for .*, got a null address, .*; allocate it again"),
    "mixed devices in dequantize": (lambda: moe_torch.dequantize(scales_elsewhere()),
        r"tensor\.scales must be on cpu like tensor\.values, got meta; move it with \.to\('cpu'\)"),
    "mixed devices in restore_weights": (lambda: moe_torch.restore_weights(scales_elsewhere()),
        r"weights\.scales must be on cpu like weights\.values, got meta; move it with \.to\('cpu'\)"),
    "layout of other tokens": (lambda: multiply(dataclasses.replace(layout_of(9),
        spec=moe_torch.LayoutSpec(8, 2, NUM_EXPERTS))),
        r"layout\.slot_of_row must be \[16\], got \(18,\); pass an array of that shape"),
    "mixed devices": (lambda: moe_torch.router(X, ROUTING.weight.to("meta")),
        r"weight must be on cpu like x, got meta; call to_empty\(device=\.\.\.\) on the module that holds it"),
    "mixed devices in moe": (lambda: moe(x=X.to("meta")),
        r"experts\.gate_up must be on meta like x, got cpu; move it with \.to\('meta'\)"),
    "misaligned weight": (lambda: moe(down=misaligned(EXPERTS.down)),
        r"experts\.down must start at a multiple of 16 bytes, got address .* \(storage offset 1\); clone\(\) it"),
    "misaligned second weight": (lambda: multiply(None,
        MatmulOperands(misaligned(X), EXPERTS.gate_up[0], misaligned(EXPERTS.gate_up[0])), SEPARATE),
        r"up must start at a multiple of 16 bytes, got address .*; clone\(\) it"),
}  # fmt: skip


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
    with pytest.raises(InvalidInput, match=r"weight must start at a multiple of 16 bytes.*clone"):
        moe_torch.router(misaligned(X), misaligned(ROUTING.weight))
    with running_on(REAL_KERNELS) as device:
        clone = misaligned(X).clone().to(device)
        assert moe_torch.router(clone, ROUTING.weight.to(device)).shape == (9, NUM_EXPERTS)


def test_a_device_without_kernels_is_unsupported() -> None:
    with pytest.raises(InvalidInput, match=r"arrays must have memory, got tensors on meta; call to_empty"):
        moe_torch.explain_moe(
            X.to("meta"),
            moe_torch.ExpertWeights(EXPERTS.gate_up.to("meta"), EXPERTS.down.to("meta")),
            moe_torch.RouterWeights(ROUTING.weight.to("meta")),
            SPEC,
        )


def tensor(spec: ArraySpec) -> Any:
    """Zeros with a spec's strides, which may overlap."""
    last = sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
    return torch.zeros(max(last, spec.size) + 1, dtype=getattr(torch, spec.dtype)).as_strided(spec.shape, spec.stride)


@pytest.mark.parametrize("case", sample(), ids=case_id)
def test_complaints_of_planners_arrive(case: Case) -> None:
    """Their type and their text, and the same of a second call, which finds no plan prepared."""
    engine = "interpreter" if case.kind == "unsupported" else "reference"
    for _ in range(2):
        with running_on(engine), pytest.raises(case.error, match=case.text) as caught:
            getattr(moe_torch, case.op)(**case.given(tensor))
        assert type(caught.value) is case.error


#: Refused while a program is traced: the planner sees the example sizes.
TRACED = (
    *(("moe", "rank"), ("moe", "dtype"), ("moe", "shape"), ("router", "shape"), ("route", "option")),
    *(("make_layout", "dtype"), ("matmul_ogs", "dtype")),
)


@pytest.mark.parametrize(
    "case", [case for case in sample() if (case.op, case.kind) in (*TRACED, ("route", "unsupported"))], ids=case_id
)
def test_compiled_programs_show_the_same_complaint(case: Case) -> None:
    op, arguments = getattr(moe_torch, case.op), case.given(tensor)
    engine = "interpreter" if case.kind == "unsupported" else "reference"
    # torch wraps what is raised while it traces, and names the error in its message.
    with running_on(engine), pytest.raises(Exception, match=case.text) as caught:
        torch.compile(lambda: op(**arguments), fullgraph=True, backend="eager", dynamic=True)()
    assert case.error.__name__ in f"{type(caught.value)}{caught.value}"


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


@pytest.mark.parametrize("build", [lambda one: moe_torch.RouterSpec(scale=one), lambda one: moe_torch.NormSpec(one)])
def test_trained_numbers(build: Any) -> None:
    """An option is a constant of a plan, and a parameter in its place would lose its gradient."""
    with pytest.raises(
        InvalidInput, match=r"must be a number, because options have no gradient, got an array \(Parameter\)"
    ):
        build(torch.nn.Parameter(torch.tensor(1.0)))


def test_memory_that_runs_out_beside_a_subclass_is_torchs_error() -> None:
    """Programs catch it to take smaller batches."""
    weight = torch.zeros(D_MODEL, 4).as_subclass(type("Foreign", (torch.nn.Parameter,), {}))
    error = torch.cuda.OutOfMemoryError("no memory")
    full = mock.patch.object(private, "allocator", return_value=mock.Mock(side_effect=error))
    with full, pytest.raises(torch.cuda.OutOfMemoryError, match="no memory"):
        moe_torch.router(torch.zeros(2, D_MODEL), weight)
