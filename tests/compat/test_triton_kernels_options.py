"""The interface of triton_kernels on our ops: quantised weights, the activation alone, and what is refused."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_core.errors import InvalidInput, Unsupported
from moe_core.parity.tolerance import assert_close, matmul_tolerance
from moe_torch.compat.triton_kernels import from_upstream, numerics, swiglu, tensor, to_upstream
from moe_torch.compat.triton_kernels import matmul_ogs as ours
from moe_torch.compat.triton_kernels.matmul_ogs import PrecisionConfig, matmul_ogs
from moe_torch.compat.triton_kernels.matmul_ogs_details import opt_flags
from moe_torch.compat.triton_kernels.numerics_details import mxfp
from moe_torch.compat.triton_kernels.routing import GatherIndx, RoutingData, routing
from moe_torch.compat.triton_kernels.tensor_details import layout
from moe_torch.compat.triton_kernels.topk import topk
from tests.support.torch import to_numpy
from tests.support.triton_kernels import ACTIVATION, ALPHA, LIMIT, SWIGLU, TOPK, D, E, N, T, foreign_function, normal

pytestmark = pytest.mark.usefixtures("reference_engine_of_torch")


QUANTIZED = ("mxfp4", "mxfp8", "fp8 per tensor", "fp8 per expert", "fp8 x fp8", "mxfp8 x mxfp4")


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantised_weights_are_what_they_stand_for(kind: str) -> None:
    """The product with a quantised weight is that with the numbers it stands for."""
    k = 64
    x, w = normal(T, k).bfloat16(), normal(E, k, N).bfloat16()
    data, gather, _ = routing(normal(T, E), TOPK)
    precision = PrecisionConfig(out_dtype=torch.float32)
    plain_x, left = x.float(), x
    if "mxfp4" in kind or kind == "mxfp8":
        dtype = torch.uint8 if "mxfp4" in kind else torch.float8_e4m3fn
        values, scales = mxfp.downcast_to_mxfp(w, dtype, axis=1)
        assert values.stride(-2) == 1, "packed along K"
        plain_w = mxfp.upcast_from_mxfp(values, scales, torch.float32, axis=1)
        options, default = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        wrapped = tensor.wrap_torch_tensor(values, dtype=tensor.FP4 if dtype is torch.uint8 else None)
        assert wrapped.shape == [E, k, N]
        right = tensor.convert_layout(wrapped, options, **default)
        precision.weight_scale = tensor.Tensor(scales) if kind == "mxfp4" else scales
    else:
        right = w.mT.contiguous().to(torch.float8_e4m3fn).mT if kind == "fp8 x fp8" else w.to(torch.float8_e4m3fn)
        scale = torch.arange(1, E + 1) / 4 if kind == "fp8 per expert" else torch.tensor([0.5])
        plain_w = right.float() * scale.view(-1, 1, 1)
        precision.flex_ctx = ours.FlexCtx(rhs_data=numerics.InFlexData(scale=scale))
    if kind == "fp8 x fp8":
        left, scale = x.to(torch.float8_e4m3fn), torch.tensor([0.25])
        plain_x = left.float() * scale
        flex = numerics.InFlexData(dtype=torch.float8_e4m3fn, scale=scale)
        precision.flex_ctx = dataclasses.replace(precision.flex_ctx, lhs_data=flex)
    if kind == "mxfp8 x mxfp4":
        left, precision.act_scale = mxfp.downcast_to_mxfp(x, torch.float8_e4m3fn, axis=-1)
        plain_x = mxfp.upcast_from_mxfp(left, precision.act_scale, torch.float32, axis=-1)
    found = matmul_ogs(left, right, None, data, gather, precision_config=precision)
    wanted = matmul_ogs(plain_x, plain_w, None, data, gather)
    tolerance = matmul_tolerance("bfloat16", "float32", k)
    assert_close(to_numpy(found), to_numpy(wanted), tolerance, label=kind)


def test_swiglu_alone() -> None:
    a = normal(2, 5, 12)
    config = swiglu.PrecisionConfig(limit=LIMIT)
    gate, up = a[..., ::2].clamp(max=LIMIT), a[..., 1::2].clamp(-LIMIT, LIMIT)
    wanted = gate * torch.sigmoid(ALPHA * gate) * (up + 1)
    torch.testing.assert_close(swiglu.swiglu(a, ALPHA, config), wanted)
    torch.testing.assert_close(
        swiglu.swiglu_fn(a[0], ALPHA, None), moe_torch.activation(a[0], dataclasses.replace(ACTIVATION, limit=None))
    )
    flex = swiglu.FlexCtx(inp_data=numerics.InFlexData(scale=torch.ones(1)))
    with pytest.raises(Unsupported, match="inp_data"):
        swiglu.swiglu(a, ALPHA, swiglu.PrecisionConfig(LIMIT, flex))


def flexible(**data: Any) -> dict[str, Any]:
    return {"precision_config": PrecisionConfig(flex_ctx=ours.FlexCtx(**data))}


one = torch.ones(1)
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "acc_scale": {"precision_config": PrecisionConfig(acc_scale=2.0)},
    "report_quantization_err_fn": {"precision_config": PrecisionConfig(report_quantization_err_fn=foreign_function)},
    "out_scale": {"precision_config": PrecisionConfig(out_scale=one)},
    "out_dtype": {"precision_config": PrecisionConfig(out_dtype=torch.float8_e4m3fn)},
    "saturated": {"precision_config": PrecisionConfig(flexpoint_saturate_inf=True)},
    "expected_scale": flexible(out_data=numerics.OutFlexData(expected_scale=one)),
    "x must have no flex data": flexible(lhs_data=numerics.InFlexData(scale=one)),
    "w must have no flex data": flexible(rhs_data=numerics.InFlexData(scale=one)),
    "swiglu_fn": {"fused_activation": ours.FusedActivation(ours.FnSpecs("relu", foreign_function, ()), (), 1)},
    "epilogue": {"epilogue": ours.Epilogue(ours.FnSpecs("quantize", foreign_function, ()))},
    "e5m2": {"w": normal(D, N).to(torch.float8_e5m2)},
    "fp8 e4m3 where it has microscales": {
        "w": normal(D, N).to(torch.float8_e5m2),
        "precision_config": PrecisionConfig(weight_scale=torch.zeros(1, N, dtype=torch.uint8)),
    },
    "sizes of its memory": {"x": tensor.Tensor(normal(T, D), shape=[torch.tensor(4), D], shape_max=[T, D])},
    rf"got \[{T - 1}, {D}\] in \[{T}, {D}\]: no kernel reads a part": {
        "x": tensor.Tensor(normal(T, D), shape=[T - 1, D])
    },
    "two FP4 elements": {"w": tensor.Tensor(torch.zeros(D // 2, N, dtype=torch.uint8), tensor.FP4, [D, N - 4])},
    "elements of torch": {"x": tensor.Tensor(normal(T, D), tensor.BIT, [T, D])},
    "packed along N": {
        "w": torch.zeros(D, N, dtype=torch.uint8),
        "precision_config": PrecisionConfig(weight_scale=torch.zeros(1, N, dtype=torch.uint8)),
    },
}
INVALID: dict[str, dict[str, Any]] = {
    "fused_activation must be": {"fused_activation": foreign_function},
    "reduction_n": {"fused_activation": dataclasses.replace(SWIGLU, reduction_n=1)},
    "without a function": {"fused_activation": ours.FusedActivation(fn_args=(1.0,))},
    "reduction_n 1 and no fn_args": {"fused_activation": ours.FusedActivation(reduction_n=2)},
    "from_upstream": {"routing_data": types.SimpleNamespace(expt_hist=None)},
    "w must be .* without routing_data": {"w": normal(2, D, N)},
    "gammas must be": {"gammas": normal(T + 1)},
    "bias must be": {"bias": normal(N + 1)},
    "y must be": {"y": torch.empty(T, N)},
    "out_alpha": {"out_alpha": float("nan")},
    "where its elements are FP4": {"w": tensor.Tensor(normal(D, N), tensor.FP4, [2 * D, N])},
    "weight_scale": {"w": torch.zeros(D, N, dtype=torch.uint8)},
    "x must be": {"x": normal(2, 2, 2, D)},
    "flatten x": {"x": normal(2, T, D), "w": normal(2, D, N), "gather_indx": GatherIndx(one.int(), one.int())},
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_options_that_we_do_not_have_are_refused(reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        matmul_ogs(**{"x": normal(T, D), "w": normal(D, N), "bias": None} | UNSUPPORTED[reason])


@pytest.mark.parametrize("reason", INVALID)
def test_what_contradicts_itself_is_refused(reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        matmul_ogs(**{"x": normal(T, D), "w": normal(D, N), "bias": None} | INVALID[reason])


def test_constraints_on_tiles_change_nothing() -> None:
    x, w = normal(T, D), normal(D, N)
    plain = matmul_ogs(x, w, None)
    opt_flags.update_opt_flags_constraints({"split_k": 1, "is_persistent": True, "epilogue_subtile": 1})
    opt_flags.update_opt_flags_constraints({"block_m": 64, "block_n": 32, "block_k": None, "fused_scatter": False})
    opt_flags.update_opt_flags_constraints({"num_stages": 3, "idle_sms": 2})
    assert torch.equal(matmul_ogs(x, w, None), plain)
    opt_flags.reset_opt_flags_constraints()
    assert issubclass(opt_flags.InapplicableConstraint, Exception)
    with pytest.raises(InvalidInput, match=r"constraints must have names among .*block_m.*, got 'blockm'; leave it"):
        opt_flags.update_opt_flags_constraints({"split_k": 1, "blockm": 64})
    pairs: Any = [("split_k", 1)]
    with pytest.raises(InvalidInput, match="constraints must be a dict"):
        opt_flags.update_opt_flags_constraints(pairs)


def test_refusals_of_routing_tensors_and_conversions() -> None:
    data, gather, _ = routing(normal(T, E), TOPK)
    codes = torch.zeros(2, 20, dtype=torch.uint8)
    for reason, call in {
        "rows for this routing": lambda: matmul_ogs(normal(T - 1, D), normal(E, D, N), None, data, gather),
        "w must be": lambda: matmul_ogs(normal(T, D), normal(E - 1, D, N), None, data, gather),
        "simulated_ep": lambda: routing(normal(T, E), TOPK, simulated_ep=4),
        "expt_indx": lambda: routing(normal(T, E), TOPK, expt_indx=torch.zeros(T, 3, dtype=torch.int32)),
        "logits must be": lambda: routing(normal(1, T, E), TOPK),
        "shape must be given": lambda: tensor.Tensor(torch.zeros(2, dtype=torch.uint8), dtype=tensor.FP4),
        "axis of stride 1": lambda: tensor.wrap_torch_tensor(torch.zeros(4, 4)[::2, ::2]),
        "bits|uint32": lambda: tensor.Bitmatrix(torch.zeros(4, 4), [4, 4]),
        "value must be": lambda: from_upstream(object()),
        "of moe_torch": lambda: to_upstream(object()),
        "even axis 1 for mxfp4": lambda: mxfp.downcast_to_mxfp(normal(2, 33), torch.uint8, 1),
        "ROUND_UP or ROUND_DOWN": lambda: mxfp.downcast_to_mxfp(normal(2, 32), torch.uint8, 1, 1),
        "src_tensor must be bf16": lambda: mxfp.downcast_to_mxfp(normal(2, 32).double(), torch.float8_e5m2, 1),
        "target_dtype must be bf16": lambda: mxfp.upcast_from_mxfp(codes, codes[:, :1], torch.float64, 1),
        r"scale must be \[2, 2\], .* got \[2, 1\]": lambda: mxfp.upcast_from_mxfp(
            codes, codes[:, :1], torch.float32, 1
        ),
        "expt_data must be given": lambda: to_upstream(RoutingData(None, data.expt_hist, E, TOPK)),
    }.items():
        with pytest.raises(InvalidInput, match=reason):
            call()
    swizzled = layout.HopperMXValueLayout
    for reason, call in {
        "HopperMXValueLayout": lambda: tensor.convert_layout(tensor.Tensor(normal(2, 2)), swizzled, mx_axis=0),
        "dim": lambda: topk(normal(T, E), 2, dim=0),
        "return_bitmatrix": lambda: topk(normal(T, E), 2, return_bitmatrix=False),
        "out_quant_type": lambda: mxfp.downcast_to_mxfp(normal(2, 32), torch.int8, 1),
        "tensor must be of one of": lambda: mxfp.upcast_from_mxfp(normal(2, 32), normal(2, 1), torch.float32, 1),
        "cannot be used": lambda: to_upstream(gather, "package_that_is_not_there"),
    }.items():
        with pytest.raises(Unsupported, match=reason):
            call()
