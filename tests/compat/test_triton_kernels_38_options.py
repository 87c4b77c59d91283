"""The interface of Triton 3.8's triton_kernels: refusals by name, sums, layouts and microscaled numbers."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput, Unsupported
from moe_torch.compat.triton_kernels import numerics
from moe_torch.compat.triton_kernels_38 import layout, matmul, mxfp, reduce, tensor, topk
from moe_torch.compat.triton_kernels_38.matmul import Epilogue, FlexCtx, FnSpecs, FusedActivation, PrecisionConfig
from tests.support.modular.triton_kernels_38 import ORDER, SIZES, SWIGLU, M, activated, near, slices
from tests.support.triton_kernels import D, E, N, T, foreign_function, normal

pytestmark = pytest.mark.usefixtures("reference_engine_of_torch")


def refused(**fields: Any) -> dict[str, Any]:
    return {"precision_config": PrecisionConfig(**fields)}


REFUSED = {
    "fused_comm": {"fused_comm": object()},
    "epilogue 'other'": {"epilogue": Epilogue(FnSpecs("other", foreign_function))},
    "QUANTIZE_NVFP4": {"epilogue": Epilogue(FnSpecs("QUANTIZE_NVFP4", mxfp.quantize_nvfp4_fn))},
    "fused_activation 'other'": {"fused_activation": FusedActivation(FnSpecs("other", foreign_function))},
    "a_mx_tensor_scale": refused(a_mx_tensor_scale=torch.ones(M)),
    "b_mx_tensor_scale": refused(b_mx_tensor_scale=torch.ones(N)),
    "report_quantization_err_fn": refused(report_quantization_err_fn=foreign_function),
    "a_mx_scale.*NVFP4": refused(a_microblock_size=16),
    "b_mx_scale.*NVFP4": refused(b_mx_scale=torch.ones(E, 2, N).to(torch.float8_e4m3fn)),
    "intermediate_out_dtype": refused(intermediate_out_dtype=torch.float64),
    "float64": refused(out_dtype=torch.float64),
    "out_data must have no scales": refused(flex_ctx=FlexCtx(out_data=numerics.OutFlexData(None, torch.ones(1)))),
    "checksum_scale": refused(flex_ctx=FlexCtx(out_data=numerics.OutFlexData(None, None, None, torch.ones(1)))),
    "infinities": refused(flexpoint_saturate_inf=True),
    "no flex data": refused(flex_ctx=FlexCtx(rhs_data=numerics.InFlexData(None, torch.ones(1)))),
}


@pytest.mark.parametrize("text", REFUSED)
def test_options_that_no_kernel_has_are_refused_by_name(text: str) -> None:
    with pytest.raises(Unsupported, match=text):
        matmul.matmul(normal(M, D), normal(E, D, N), None, slices(), **REFUSED[text])


E5M2 = numerics.OutFlexData(torch.float8_e5m2)
TO_MXFP8 = Epilogue(FnSpecs("QUANTIZE_MXFP8", mxfp.quantize_mxfp8_fn))


@pytest.mark.parametrize(
    ("text", "arguments", "changes"),
    [
        ("b must be .6, K, N.", (normal(M, D), normal(5, D, N), None, slices()), {}),
        ("scatter_indx must be .18.", (normal(M, D), normal(E, D, N), None, slices()), {"scatter_indx": ORDER[:3]}),
        ("b_ragged_metadata needs", (normal(N, M), normal(M, D), None, None, slices()), {}),
        ("bias must be None where K is ragged", (normal(N, M), normal(M, D), normal(D), slices(), slices()), {}),
        ("flatten a", (normal(2, M, D), normal(2, D, N), None, None, None, ORDER), {}),
        ("c must be", (normal(M, D), normal(D, N), None), {"c": torch.empty(M, N + 1)}),
        ("c_acc_in must be", (normal(M, D), normal(D, N), None), {"c_acc_in": torch.empty(M, N + 1)}),
        ("betas must be .18.", (normal(M, D), normal(D, N), None), {"betas": torch.ones(3)}),
        ("a_ragged_metadata must be", (normal(M, D), normal(E, D, N), None, SIZES), {}),
        ("out_data.dtype", (normal(M, D), normal(D, N), None), refused(flex_ctx=FlexCtx(out_data=E5M2))),
        ("out_dtype torch.float8_e4m3fn", (normal(M, D), normal(D, N), None), {"epilogue": TO_MXFP8}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_wrong_arguments_name_the_fix(text: str, arguments: tuple[Any, ...], changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=text):
        matmul.matmul(*arguments, **changes)


def test_all_gather_and_swizzled_layouts_are_refused() -> None:
    for refusal, match in (
        (lambda: topk.topk(normal(T, E), 2, all_gather=True), "all_gather"),
        (lambda: topk.topk(normal(T, E), 2, dim=0), "dim"),
        (lambda: layout.BlackwellActMXScaleLayout(None), "BlackwellActMXScaleLayout"),
        (lambda: mxfp.downcast_to_mxfp(normal(2, 32), torch.uint8, 1, torch.float8_e4m3fn, 16), "NVFP4"),
        (lambda: reduce.reduce(normal(2, 3, 4), 1, postprocess_fn2=PLUS), "postprocess_fn2"),
        (lambda: reduce.reduce(normal(2, 3, 4), 1, postprocess_fn1=PLUS), "'plus'"),
        (lambda: reduce.reduce(normal(2, 3, 4), 1, y_flex_saturate_inf=True), "infinities"),
    ):
        with pytest.raises(Unsupported, match=match):
            refusal()


# Sums, layouts and numbers

PLUS = reduce.PostprocessFn(FnSpecs("plus", foreign_function))


@pytest.mark.parametrize("dim", [0, 1, 2, -2])
@pytest.mark.parametrize("mask", [None, (3, 5, 1), (1, 5, 6), (3, 5, 6)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "scaled", "activated"])
def test_reduce_is_what_it_states(dim: int, mask: Any, kind: str) -> None:
    x = normal(3, 5, 6).requires_grad_()
    kept = None if mask is None else (normal(*mask, seed=1) > 0).to(torch.int8)
    scale, fused = (normal(3, 1, 6) if kind == "scaled" else None), None
    expected = x.double() * (1 if scale is None else scale)
    expected = (expected if kept is None else expected * (kept != 0)).sum(dim)
    if kind == "activated" and dim != 2:
        fused, expected = reduce.PostprocessFn(SWIGLU.specs, SWIGLU.fn_args), activated(expected)
    flex, rows = numerics.InFlexData(None, torch.tensor([2.0])), torch.tensor([2])
    found, scales = reduce.reduce(x, dim, kept, scale, postprocess_fn1=fused)
    assert scales is None
    near(found, expected)
    near(torch.autograd.grad(found.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])
    memory = torch.full(found.shape, 7.0)
    changes: dict[str, Any] = {
        "y": memory,
        "unpadded_batch_size": rows,
        "postprocess_fn1": fused,
        "x_global_scale": torch.tensor(3.0),
    }
    changed, _ = reduce.reduce(x.detach(), dim, kept, scale, x_flex=None if fused else flex, **changes)
    assert changed.data_ptr() == memory.data_ptr() and (memory[2:] == 7).all()
    near(memory[:2], (expected * (3 if fused else 6)).detach()[:2])
    with pytest.raises(InvalidInput, match="y must be"):
        reduce.reduce(x.detach(), dim, kept, scale, **(changes | {"y": torch.ones(5, *found.shape)}))


def test_reduced_rows_may_be_quantised_on_both_sides() -> None:
    x = normal(4, 5, 64)
    values, scales = mxfp.downcast_to_mxfp(x, torch.float8_e4m3fn, -1)
    found, of_found = reduce.reduce(values, 1, x_mxscale=scales)
    numbers = mxfp.upcast_from_mxfp(values, scales, torch.float32, -1).sum(1)
    expected, of_expected = mxfp.downcast_to_mxfp(numbers, torch.float8_e4m3fn, -1)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(of_found, of_expected)
    flex, actual = numerics.InFlexData(None, torch.tensor([2.0])), torch.zeros(1)
    out = numerics.OutFlexData(torch.float8_e4m3fn, torch.tensor([4.0]), actual)
    narrow = x.to(torch.float8_e4m3fn)
    found, _ = reduce.reduce(narrow, 1, x_flex=flex, y_flex=out)
    assert torch.equal(found.float(), (narrow.float().sum(1) * 2 / 4).to(torch.float8_e4m3fn).float())
    near(actual, narrow.float().sum(1).abs().max()[None] * 2 / 448)
    with pytest.raises(InvalidInput, match="dim must be 0 or 1"):
        reduce.reduce(values, 2, x_mxscale=scales)


@pytest.mark.parametrize("axis", [-1, -2])
def test_layouts_move_the_axis_of_stride_one(axis: int) -> None:
    codes = torch.randint(0, 16, (3, 6, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = tensor.wrap_torch_tensor(codes[..., ::2] | (codes[..., 1::2] << 4), tensor.FP4)
    assert packed.shape == [3, 6, 8] and tensor.convert_layout(packed, layout.StridedLayout(-1)) is packed
    moved = tensor.convert_layout(packed, layout.StridedLayout(axis))
    even, odd = (codes.movedim(axis, -1)[..., first::2] for first in (0, 1))
    assert torch.equal(moved.data.movedim(axis, -1), even | (odd << 4)) and moved.data.stride(axis) == 1
    again = tensor.convert_layout(moved, layout.StridedLayout(2))
    with pytest.raises(NotImplementedError):
        layout.Layout([2]).swizzle_data(codes)
    assert torch.equal(again.data, packed.data) and again.shape == [3, 6, 8]
    plain = tensor.wrap_torch_tensor(normal(3, 4).T)
    assert plain.storage.layout == layout.StridedLayout(-2) and plain.dtype == tensor.FP32
    assert tensor.convert_layout(plain, layout.StridedLayout(0)) is plain
    assert tensor.convert_layout(plain, layout.StridedLayout()).data.is_contiguous()
    with pytest.raises(Unsupported, match="swizzle"):
        tensor.convert_layout(plain, layout.StridedLayout(), swizzle=1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_rounding_down_is_the_rule_of_ocp(dtype: Any) -> None:
    x = normal(5, 64) * 10
    down = mxfp.DequantScaleRoundingMode.ROUND_DOWN
    values, scales = mxfp.downcast_to_mxfp_torch(x, dtype, -1, torch.uint8, 32, torch.tensor([4.0]), down)
    largest = {torch.uint8: 2, torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}[dtype]
    exponents = (x / 4).reshape(5, 2, 32).abs().amax(-1).log2().floor() - largest
    assert torch.equal(scales.int() - 127, exponents.int())
    near(mxfp.upcast_from_mxfp(values, scales, torch.float32, -1), x / 4, 3.0)
    assert int(mxfp.MXFP_BLOCK_SIZE) == mxfp.MXFP_BLOCK_SIZE.value == 32 and mxfp.NVFP_BLOCK_SIZE.value == 16


def test_a_forward_is_one_graph_for_any_number_of_tokens() -> None:
    w1, w2, bias = normal(E, D, N), normal(E, N // 2, D), normal(E, N)

    def forward(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        chosen = topk.topk(logits, 2)
        order = chosen.mask_metadata.col_sorted_indx
        metadata = tensor.make_ragged_tensor_metadata(chosen.mask_metadata.col_sum, order.shape[0])
        gather, gammas = torch.div(order, 2, rounding_mode="trunc"), chosen.vals.flatten()[order]
        hidden = matmul.matmul(x, w1, bias, metadata, None, gather, fused_activation=SWIGLU)
        return matmul.matmul(hidden, w2, None, metadata, None, None, order, gammas=gammas).view(-1, 2, D).sum(1)

    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend="eager")
    for tokens, stance in ((T, "default"), (4, "fail_on_recompile")):
        x, logits = normal(tokens, D), normal(tokens, E)
        with torch.compiler.set_stance(stance):
            near(compiled(x, logits), forward(x, logits))
