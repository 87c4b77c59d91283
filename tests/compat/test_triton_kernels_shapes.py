"""The interface of triton_kernels on our ops: one expert, empty axes, factors with gradients, partial mx groups."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput
from moe_core.parity.tolerance import assert_close, matmul_tolerance
from moe_torch.compat.triton_kernels import matmul_ogs as ours
from moe_torch.compat.triton_kernels import numerics
from moe_torch.compat.triton_kernels.matmul_ogs import PrecisionConfig, matmul_ogs
from moe_torch.compat.triton_kernels.numerics_details import mxfp
from moe_torch.compat.triton_kernels.routing import routing
from moe_torch.compat.triton_kernels.swiglu import swiglu_fn
from tests.support.torch import to_numpy
from tests.support.triton_kernels import ALPHA, LIMIT, SWIGLU, TOPK, D, E, N, T, normal

pytestmark = pytest.mark.usefixtures("reference_engine_of_torch")


def close(found: Any, wanted: Any, k: int = D, dtype: str = "float32") -> None:
    assert found.shape == wanted.shape
    assert_close(to_numpy(found), to_numpy(wanted), matmul_tolerance(dtype, dtype, k), label="result")


@pytest.mark.parametrize("kind", ["plain", "mxfp4", "mxfp8", "fp8"])
def test_one_expert_takes_a_matrix(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its w may be [K, N] and its bias [N] or [1, N], with and without indices."""
    x, w, bias, precision = normal(T, 64), normal(64, N), normal(N), PrecisionConfig()
    given: Any = w
    if kind.startswith("mx"):
        dtype = torch.uint8 if kind == "mxfp4" else torch.float8_e4m3fn
        given, precision.weight_scale = mxfp.downcast_to_mxfp(w, dtype, axis=0)
        w = mxfp.upcast_from_mxfp(given, precision.weight_scale, torch.float32, axis=0)
    if kind == "fp8":
        given = w.to(torch.float8_e4m3fn)
        precision.flex_ctx = ours.FlexCtx(rhs_data=numerics.InFlexData(scale=torch.tensor([2.0])))
        w = given.float() * 2
    data, gather, scatter = routing(normal(T, 1), 1)
    # The sum of one choice is that choice.
    monkeypatch.setattr("moe_torch.ops.reduce", None)
    for indices in ((None, None), (gather, None), (gather, scatter)):
        for row in (bias, bias[None]):
            close(matmul_ogs(x, given, row, data, *indices, precision_config=precision), x @ w + bias, 64)


def test_one_matrix_for_several_experts_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"w must be \[6, K, N\] for this routing, got \[24, 16\]; pass every"):
        matmul_ogs(normal(T, D), normal(D, N), None, *routing(normal(T, E), TOPK)[:2])


FACTORS = {"plain": {}, "gammas": {"gammas": torch.arange(1.0, 1 + T)}, "alpha": {"out_alpha": 2.0}}


@pytest.mark.parametrize("options", FACTORS)
@pytest.mark.parametrize("fused", [None, SWIGLU], ids=["linear", "swiglu"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "batched"])
def test_a_sum_of_nothing_leaves_the_bias(batch: tuple[int, ...], fused: Any, options: str) -> None:
    """K = 0: the result is the bias, scaled, activated and weighted; zeros without one."""
    x, w, bias = torch.zeros(*batch, T, 0), torch.zeros(*batch, 0, N), normal(*batch, N)
    factors = FACTORS[options]
    wanted = bias[..., None, :].expand(*batch, T, N) * factors.get("out_alpha", 1.0)
    if fused is not None:
        wanted = swiglu_fn(wanted.reshape(-1, N), ALPHA, LIMIT).reshape(*batch, T, N // 2)
    wanted = wanted * factors.get("gammas", torch.ones(T))[:, None]
    close(matmul_ogs(x, w, bias, fused_activation=fused, **factors), wanted)
    assert not matmul_ogs(x, w, None, fused_activation=fused, **factors).any()


def test_empty_axes_of_a_routing() -> None:
    data, gather, scatter = routing(normal(T, E), TOPK)
    bias = normal(E, N)
    expert = torch.repeat_interleave(torch.arange(E), data.expt_hist.long())
    x, w = normal(T, D), normal(E, D, N)
    rows = matmul_ogs(x[:, :0], w[:, :0], bias, data, gather)
    close(rows, bias[expert])
    found = matmul_ogs(rows[:, :0], w[:, :0], bias, data, None, scatter, gammas=data.gate_scal)
    one = matmul_ogs(torch.zeros(T * TOPK, D), w, bias, data, None, scatter, gammas=data.gate_scal)
    close(found, one)
    for fused in (None, SWIGLU):
        assert matmul_ogs(x, w[..., :0], bias[:, :0], data, gather, fused_activation=fused).shape == (T * TOPK, 0)
        assert matmul_ogs(x, w[..., :0], None, data, gather, scatter, fused_activation=fused).shape == (T, 0)
    assert matmul_ogs(x[:0, :0], w[0, :0], None).shape == (0, N)
    assert matmul_ogs(x.bfloat16(), w[0, :, :0].bfloat16(), None).dtype == torch.bfloat16
    values, scales = (array[:, :0] for array in mxfp.downcast_to_mxfp(normal(E, 32, N), torch.uint8, axis=1))
    precision = PrecisionConfig(weight_scale=scales)
    close(matmul_ogs(x[:, :0], values, bias, data, gather, precision_config=precision), bias[expert])


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)], ids=str)
def test_an_empty_axis_must_be_empty_on_both_sides(sizes: tuple[int, int]) -> None:
    with pytest.raises(InvalidInput, match=rf"w must be \[..., {sizes[0]}, N\] for x .*, got \[{sizes[1]}, 16\]; pass"):
        matmul_ogs(normal(T, sizes[0]), normal(sizes[1], N), None)


def test_empty_axes_have_gradients() -> None:
    x, w, bias = normal(T, D).requires_grad_(), normal(D, 0).requires_grad_(), normal(N).requires_grad_()
    matmul_ogs(x, w, None).sum().backward()
    assert x.grad is not None and not x.grad.any() and w.grad is not None and w.grad.shape == (D, 0)
    matmul_ogs(torch.zeros(T, 0), torch.zeros(0, N), bias).sum().backward()
    assert bias.grad is not None
    torch.testing.assert_close(bias.grad, torch.full((N,), float(T)))


@pytest.mark.parametrize("fused", [None, SWIGLU], ids=["linear", "swiglu"])
@pytest.mark.parametrize("way", ["one", "batched", "rows", "gathered", "scattered"])
def test_gammas_have_gradients_everywhere(way: str, fused: Any) -> None:
    data, gather, scatter = routing(normal(T, E), TOPK)
    indices = {"rows": (data, None), "gathered": (data, gather), "scattered": (data, gather, scatter)}.get(way, ())
    routed = bool(indices)
    rows = T * TOPK if routed else T
    shape = (T if way in ("gathered", "scattered") else rows, D)
    x = normal(*(() if way != "batched" else (E,)), *shape)
    w = (normal(E, D, N) if routed or way == "batched" else normal(D, N)).requires_grad_()
    gammas = (torch.rand(rows) + 0.5).requires_grad_()
    found = matmul_ogs(x, w, None, *indices, gammas=gammas, fused_activation=fused)
    pulled = normal(*found.shape, seed=1)
    (found * pulled).sum().backward()
    flat = matmul_ogs(x, w.detach(), None, *indices[:2], fused_activation=fused)
    if way == "scattered":
        pulled = pulled[scatter.dst_indx.long() // TOPK]
    each = (flat * pulled).sum(-1)
    close(gammas.grad, each if way != "batched" else each.sum(0), N * E)
    assert w.grad is not None and w.grad.any()
    detached = matmul_ogs(x, w.detach(), None, *indices, gammas=gammas.detach(), fused_activation=fused)
    close(found.detach(), detached)


def test_a_batch_in_mxfp8() -> None:
    """x [B, M, K] with scales [B, M, K / 32]."""
    (left, scales), w = mxfp.downcast_to_mxfp(normal(E, T, 64), torch.float8_e4m3fn, axis=-1), normal(E, 64, N)
    right, precision = mxfp.downcast_to_mxfp(w, torch.uint8, axis=1), PrecisionConfig(out_dtype=torch.float32)
    precision.act_scale, precision.weight_scale = scales, right[1]
    found = matmul_ogs(left, right[0], None, precision_config=precision)
    wanted = mxfp.upcast_from_mxfp(left, scales, torch.float32, -1) @ mxfp.upcast_from_mxfp(*right, torch.float32, 1)
    close(found, wanted, 64)
    wrong = dataclasses.replace(precision, act_scale=scales[0])
    with pytest.raises(InvalidInput, match=r"act_scale must be \[6, 9, 2\], .* got \[9, 2\]; pass that of downcast"):
        matmul_ogs(left, right[0], None, precision_config=wrong)


ELEMENTS = {"mxfp4": torch.uint8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"mxfp4": 6.0, "e4m3": 448.0, "e5m2": 57344.0}
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def stated_mxfp(row: list[float], kind: str, up: bool) -> tuple[list[float], list[int]]:
    """(numbers, scale bytes) of a row, group by group, from the definition of the scales."""
    numbers, scales = [], []
    for start in range(0, len(row), 32):
        group = torch.tensor(row[start : start + 32])
        ratio = (group.abs().max() / torch.tensor(LARGEST[kind])).item()
        mantissa, exponent = math.frexp(ratio)
        power = exponent if up and mantissa > 0.5 else exponent - 1
        scales.append(127 if ratio == 0 else power + 127)
        held = (group / 2.0**power).clamp(-LARGEST[kind], LARGEST[kind])
        if kind == "mxfp4":
            # Codes are the places in the grid: of two as near as each other the even one.
            away = (held.abs()[:, None] - GRID).abs()
            codes = torch.tensor([min(range(8), key=lambda code: (line[code], code % 2)) for line in away.tolist()])
            held = GRID[codes] * held.sign()
        else:
            held = held.to(ELEMENTS[kind]).float()
        numbers += (held * 2.0**power).tolist()
    return numbers, scales


@pytest.mark.parametrize("columns", [2, 32, 50, 64, 400], ids=str)
@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
@pytest.mark.parametrize("kind", ELEMENTS)
def test_mx_formats_of_any_axis(kind: str, up: bool, columns: int) -> None:
    """Values and scales are those of the definition; a partial group at the end has a scale of its own."""
    source = normal(2, columns, 3) * torch.tensor([1.0, 100.0, 2.0**-20])
    source[1, :, 1] = 0.0
    mode = mxfp.DequantScaleRoundingMode.ROUND_UP if up else mxfp.DequantScaleRoundingMode.ROUND_DOWN
    values, scales = mxfp.downcast_to_mxfp(source, ELEMENTS[kind], 1, DEQUANT_SCALE_ROUNDING_MODE=mode)
    assert values.shape == (2, columns // (2 if kind == "mxfp4" else 1), 3) and values.stride(1) == 1
    assert scales.shape == (2, -(-columns // 32), 3) and scales.dtype == torch.uint8
    found = mxfp.upcast_from_mxfp(values, scales, torch.float32, axis=1)
    assert found.shape == source.shape and found.is_contiguous()
    for matrix in range(2):
        for column in range(3):
            numbers, bytes = stated_mxfp(source[matrix, :, column].tolist(), kind, up)
            assert scales[matrix, :, column].tolist() == bytes
            assert found[matrix, :, column].tolist() == numbers
    half = mxfp.upcast_from_mxfp(values, scales, torch.bfloat16, axis=1)
    assert half.dtype == torch.bfloat16 and torch.equal(half, found.bfloat16())


@pytest.mark.parametrize("kind", ELEMENTS)
def test_mx_formats_of_what_is_not_finite_or_tiny(kind: str) -> None:
    """Such groups have the scale NaN; rounded down, groups below all scales become zeros."""
    source = torch.full((3, 64), LARGEST[kind])
    source[0, 3], source[1, 40], source[2, :32] = torch.inf, torch.nan, 1e-40
    down = mxfp.DequantScaleRoundingMode.ROUND_DOWN
    values, scales = mxfp.downcast_to_mxfp(source, ELEMENTS[kind], 1, down)
    assert (scales == 255).tolist() == [[True, False], [False, True], [False, False]] and scales[2, 0] == 0
    found = mxfp.upcast_from_mxfp(values, scales, torch.float32, 1)
    assert found[0, :32].isnan().all() and found[1, 32:].isnan().all() and not found[2, :32].any()
    assert torch.equal(found[0, 32:], source[0, 32:]) and torch.equal(found[1, :32], source[1, :32])


PARTIAL = ("mxfp4", "mxfp8", "mxfp8 in rows", "mxfp8 x mxfp4", "mxfp8 x mxfp8 in rows")


@pytest.mark.parametrize("k", [2, 40, 400], ids=str)
@pytest.mark.parametrize("kind", PARTIAL)
@pytest.mark.parametrize("way", ["one", "batched", "routed"])
def test_partial_groups_multiply(way: str, kind: str, k: int) -> None:
    """K is no multiple of 32."""
    lead, batch = {"one": ((), ()), "batched": ((E,), (E,)), "routed": ((), (E,))}[way]
    x, w = normal(*lead, T, k).bfloat16(), normal(*batch, k, N).bfloat16()
    dtype = torch.uint8 if kind.endswith("mxfp4") else torch.float8_e4m3fn
    values, scales = mxfp.downcast_to_mxfp(w, dtype, axis=-2)
    plain_x, plain_w = x.float(), mxfp.upcast_from_mxfp(values, scales, torch.float32, axis=-2)
    if "in rows" in kind:
        values, scales = values.contiguous(), scales.contiguous()
    precision, left = PrecisionConfig(weight_scale=scales, out_dtype=torch.float32), x
    if " x " in kind:
        left, precision.act_scale = mxfp.downcast_to_mxfp(x, torch.float8_e4m3fn, axis=-1)
        plain_x = mxfp.upcast_from_mxfp(left, precision.act_scale, torch.float32, axis=-1)
    indices = routing(normal(T, E), TOPK)[:2] if way == "routed" else ()
    found = matmul_ogs(left, values, None, *indices, precision_config=precision)
    assert_close(
        to_numpy(found),
        to_numpy(matmul_ogs(plain_x, plain_w, None, *indices)),
        matmul_tolerance("bfloat16", "float32", k),
        label=kind,
    )
    with pytest.raises(InvalidInput, match=rf"w must be \[..., {k + 2}, N\] for x .* got .*{k}, 16\]; pass a matrix"):
        matmul_ogs(
            normal(*lead, T, k + 2).bfloat16(), values, None, *indices,
            precision_config=dataclasses.replace(precision, act_scale=None),
        )  # fmt: skip
