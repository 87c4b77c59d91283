"""`grouped_mm` and `scaled_grouped_mm` beside torch's own."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import ScalingType, SwizzleType

import moe_torch
from moe_torch import InvalidInput, Unsupported
from moe_torch.bridge.operator import Operator
from moe_torch.operators import grouped
from tests.support.torch import on_engines, running_on

#: On a GPU, torch's own kernel needs groups of columns that start at multiples of 16 bytes.
ENDS = (8, 8, 24, 32, 40)
#: mat_a and mat_b of the four forms, with 40 of 48 places of the ragged axis in groups.
FORMS = {
    "rows": ((48, 16), (5, 16, 32)),
    "columns": ((5, 8, 16), (16, 48)),
    "reduction": ((8, 48), (48, 32)),
    "batches": ((5, 8, 16), (5, 16, 24)),
}
ROW, SCALED = ScalingType.RowWise, cast(Any, moe_torch.scaled_grouped_mm)


def draw(*shape: int, dtype: Any = torch.bfloat16, whole: bool = False, seed: int = 0) -> Any:
    """Normal numbers, or small whole ones, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    if whole:
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def inside(form: str, y: Any) -> Any:
    """The part of a result that torch computes: it leaves the rest as it comes."""
    return y[: ENDS[-1]] if form == "rows" else y[:, : ENDS[-1]] if form == "columns" else y


def grouped_part(form: str, operand: int, gradient: Any) -> Any:
    """The places of an operand's gradient that are in groups."""
    axis = {"rows": (0, None), "columns": (None, 1), "reduction": (1, 0), "batches": (None, None)}[form][operand]
    return gradient if axis is None else gradient.narrow(axis, 0, ENDS[-1])


def offs_of(form: str, device: Any) -> Any:
    return None if form == "batches" else torch.tensor(ENDS, dtype=torch.int32, device=device)


@on_engines
@pytest.mark.parametrize("form", FORMS)
def test_equals_torch_bitwise_where_sums_are_exact(engine: str, form: str) -> None:
    """Results and gradients, row-major and column-major."""
    with running_on(engine) as device:
        offs = offs_of(form, device)
        for transposed in itertools.product((False, True), repeat=2):
            both = []
            for function in (torch._grouped_mm, moe_torch.grouped_mm):
                leaves = [draw(*shape, whole=True).to(device) for shape in FORMS[form]]
                leaves = [one.mT.contiguous().mT if flip else one for one, flip in zip(leaves, transposed, strict=True)]
                leaves = [leaf.requires_grad_() for leaf in leaves]
                y = inside(form, function(*leaves, offs=offs))
                d_y = draw(*y.shape, whole=True, seed=1).to(device)
                both.append((y, *torch.autograd.grad(y, leaves, d_y)))
            (theirs, d_a, d_b), (ours, our_a, our_b) = both
            assert torch.equal(ours, theirs), transposed
            assert torch.equal(grouped_part(form, 0, our_a), grouped_part(form, 0, d_a)), transposed
            assert torch.equal(grouped_part(form, 1, our_b), grouped_part(form, 1, d_b)), transposed


@pytest.mark.parametrize("form", FORMS)
def test_random_numbers_agree_with_torch(form: str) -> None:
    """On this engine the sums are those of torch's own products, in fp32."""
    a, b = (draw(*shape, dtype=torch.float32) for shape in FORMS[form])
    offs = offs_of(form, "cpu")
    ours, theirs = moe_torch.grouped_mm(a, b, offs), torch._grouped_mm(a, b, offs=offs)
    torch.testing.assert_close(inside(form, ours), inside(form, theirs))
    assert form in ("reduction", "batches") or not (ours[40:] if form == "rows" else ours[:, 40:]).any()


@on_engines
def test_bias_and_out_dtype(engine: str) -> None:
    with running_on(engine) as device:
        a, b = (draw(*shape, whole=True).to(device) for shape in FORMS["rows"])
        bias = draw(5, 32, dtype=torch.float32, whole=True).to(device).requires_grad_()
        offs = offs_of("rows", device)
        y = moe_torch.grouped_mm(a, b, offs, bias, out_dtype=torch.float32)
        groups = torch.bucketize(torch.arange(40, device=device), offs, right=True)
        wanted = torch.bmm(a[:40, None].float(), b[groups].float())[:, 0] + bias[groups]
        assert y.dtype == torch.float32 and torch.equal(y[:40], wanted) and not y[40:].any()
        (d_bias,) = torch.autograd.grad(y.sum(), bias)
        assert d_bias.dtype == torch.float32
        assert torch.equal(d_bias[:, 0].cpu(), torch.tensor([8.0, 0, 16, 8, 8]))


def quantised(form: str, device: Any) -> tuple[Any, Any, Any, Any]:
    """e4m3 operands in the order that torch wants, and their scales."""
    a, b = (draw(*shape, dtype=torch.float32).to(torch.float8_e4m3fn) for shape in FORMS[form])
    b = b.mT.contiguous().mT
    sizes = [a.shape[:-1], (*b.shape[:-2], b.shape[-1])]
    if form == "reduction":
        sizes = [(5 * size,) for (size,) in sizes]
    scales = [draw(*size, dtype=torch.float32).exp() for size in sizes]
    return tuple(one.to(device) for one in (a, b, *scales))


@on_engines
@pytest.mark.parametrize("form", FORMS)
def test_scaled(engine: str, form: str) -> None:
    """Beside products of the codes, group by group."""
    with running_on(engine) as device:
        a, b, scale_a, scale_b = quantised(form, device)
        offs = offs_of(form, device)
        options = {"offs": offs, "output_dtype": torch.float32}
        y = SCALED(a, b, scale_a, ROW, [scale_b], [ROW], SwizzleType.NO_SWIZZLE, **options)
        a, b = a.float(), b.float()
        for group, (first, last) in enumerate(itertools.pairwise((0, *ENDS))):
            part = slice(first, last)
            if form == "rows":
                found, wanted = y[part], (a[part] @ b[group]) * scale_a[part, None] * scale_b[group]
            elif form == "columns":
                found, wanted = y[:, part], (a[group] @ b[:, part]) * scale_a[group, :, None] * scale_b[part]
            elif form == "reduction":
                scales = scale_a.view(5, -1, 1)[group] * scale_b.view(5, 1, -1)[group]
                found, wanted = y[group], (a[:, part] @ b[part]) * scales
            else:
                found, wanted = y[group], (a[group] @ b[group]) * scale_a[group, :, None] * scale_b[group]
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
        codes = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        half = moe_torch.scaled_grouped_mm(*codes, scale_a, ROW, scale_b, ROW, offs=offs)
        assert torch.equal(half, y.bfloat16())


@pytest.mark.parametrize("form", FORMS)
def test_scaled_products_refuse_gradients(form: str) -> None:
    a, b, scale_a, scale_b = quantised(form, "cpu")
    for scale in (scale_a, scale_b):
        scale.requires_grad_()
        with pytest.raises(Unsupported, match=r"scale_[ab] must need no gradient, as scaled_grouped_mm has none; det"):
            moe_torch.scaled_grouped_mm(a, b, scale_a, ROW, scale_b, ROW, offs=offs_of(form, "cpu"))
        scale.requires_grad_(False)


def test_matrices_without_rows() -> None:
    y = moe_torch.grouped_mm(draw(5, 0, 16), draw(5, 16, 24))
    assert y.shape == (5, 0, 24)


def test_opcheck() -> None:
    samples, original = {}, Operator.run

    def record(operator: Any, arguments: tuple[Any, ...]) -> Any:
        given = tuple(
            one.detach().requires_grad_(one.requires_grad) if hasattr(one, "detach") else one for one in arguments
        )
        samples[operator.name, len([one for one in given if one is not None])] = (operator, given)
        return original(operator, arguments)

    with pytest.MonkeyPatch.context() as patch, running_on("reference"):
        patch.setattr(Operator, "run", record)
        for form, shapes in FORMS.items():
            a, b = (draw(*shape).requires_grad_() for shape in shapes)
            moe_torch.grouped_mm(a, b, offs_of(form, "cpu"))
        moe_torch.grouped_mm(draw(48, 16), draw(5, 16, 32), offs_of("rows", "cpu"), draw(5, 32))
        SCALED(**scaled_arguments())
        operators = {one.name for one in vars(grouped).values() if isinstance(one, Operator)}
        assert {name for name, _ in samples} == operators
        utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        for label, (operator, arguments) in samples.items():
            # The check of the schema multiplies tensors, which e4m3 cannot.
            chosen = utilities[operator is grouped.GROUPED_MM_QUANTIZED :]
            results = torch.library.opcheck(operator.overload, arguments, test_utils=chosen)
            assert set(results.values()) == {"SUCCESS"}, f"{label}: {results}"


def scaled_arguments() -> dict[str, Any]:
    a, b, scale_a, scale_b = quantised("rows", "cpu")
    named = {"mat_a": a, "mat_b": b, "scale_a": scale_a, "scale_recipe_a": ROW, "scale_b": scale_b}
    return named | {"scale_recipe_b": ROW, "offs": offs_of("rows", "cpu")}


def test_numbers_of_rows_recompile_nothing() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(moe_torch.grouped_mm, fullgraph=True, backend=counter, dynamic=True)
    for rows in (40, 48, 77):
        a, b, offs = draw(rows, 16), draw(5, 32, 16).mT, offs_of("rows", "cpu")
        assert torch.equal(step(a, b, offs), moe_torch.grouped_mm(a, b, offs))
    assert counter.frame_count == 1


def test_wrong_arguments() -> None:
    a, b, offs = draw(48, 16), draw(5, 16, 32), offs_of("rows", "cpu")
    for arguments, error, message in (
        ((a, b, None), InvalidInput, r"offs must be one axis of 5, got None; pass an entry for every group"),
        ((a, b, offs[:4]), InvalidInput, r"offs must be one axis of 5, got \(4,\); pass an entry for every group"),
        ((a, b, offs.float()), InvalidInput, r"offs must be integers, got torch.float32; cast it"),
        ((a, b.float(), offs), InvalidInput, r"mat_b must be torch.bfloat16 like mat_a, got torch.float32; c"),
        ((a, b.mT, offs), InvalidInput, r"mat_b must have 16 as its axis k, like mat_a, got \(5, 32, 16\); t"),
        ((a[0], b, offs), InvalidInput, r"mat_a must be a tensor with 2 or 3 axes, got \(16,\); reshape it"),
        ((a, b[:, :, ::2], offs), InvalidInput, r"mat_b must be row-major or column-major without gaps, got s"),
        ((b.mT, b, offs), InvalidInput, r"offs must be None if mat_a and mat_b are 3D, got a tensor; leave"),
        ((b.mT, b[:4], None), InvalidInput, r"mat_b must have 5 groups like mat_a, got 4; pass both"),
        ((a.mT, a, offs, b[0]), Unsupported, r"bias must be None with a 2D mat_b, got a tensor; add it to the"),
        ((a, b, [8, 48]), InvalidInput, r"offs must be an integer tensor, got list; pass torch.tensor"),
        ((a.char(), b.char(), offs), InvalidInput, r"mat_a must be bfloat16 or float16 or float32 .*got torch.int8"),
        ((a, b[:, :, :0], offs), InvalidInput, r"mat_b must have no empty axis, got \(5, 16, 0\); leave the call out"),
        ((b[:0].mT, b[:0], None), InvalidInput, r"mat_b must have no empty axis, got \(0, 16, 32\); leave the call"),
        ((a, b, offs, None, torch.int8), InvalidInput, r"out_dtype must be one of bfloat16.* 'int8'; name one"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            cast(Any, moe_torch.grouped_mm)(*arguments)
    good = scaled_arguments()
    for changed, error, message in (
        ({"scale_recipe_a": ScalingType.BlockWise1x32}, Unsupported, r"scale_recipe_a must be RowWise, got .*"),
        ({"swizzle_b": SwizzleType.SWIZZLE_32_4_4}, Unsupported, r"swizzle_b must be NO_SWIZZLE, got"),
        ({"contraction_dim": (1, 1)}, Unsupported, r"contraction_dim must be \(\), got \(1, 1\); pass"),
        ({"scale_a": [good["scale_a"]] * 2}, Unsupported, r"scale_a must be one value, got 2; scales of"),
        ({"scale_a": good["scale_a"][1:]}, InvalidInput, r"scale_a must be torch.float32 \[48\], got torch"),
        ({"scale_b": good["scale_b"].half()}, InvalidInput, r"scale_b must be torch.float32 .*, got torch.float16"),
        ({"mat_b": good["mat_b"].contiguous()}, InvalidInput, r"mat_b must be column-major, got strides"),
        ({"mat_a": a, "mat_b": b}, InvalidInput, r"mat_a must be float8_e4m3fn, got torch.bfloat16; c"),
        ({"swizzle_a": []}, Unsupported, r"swizzle_a must be one value, got 0; scales of"),
        ({"contraction_dim": 1}, Unsupported, r"contraction_dim must be \(\), got 1; pass"),
        ({"use_fast_accum": "no"}, InvalidInput, r"use_fast_accum must be True or False, got 'no'"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            SCALED(**(good | changed))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_large_products_equal_torch_on_a_gpu(dtype: Any) -> None:
    """Sizes of the Hopper kernels: results and gradients of exact sums, with an empty group and a tail."""
    rows, groups, k, n = 8192, 16, 1024, 768
    sizes = torch.tensor([0, 900, 1, 127, *[500] * 12])
    offs = sizes.cumsum(0, dtype=torch.int32).cuda()
    filled = int(sizes.sum())
    x, weight = draw(rows, k, whole=True).cuda(), draw(groups, n, k, whole=True).cuda()
    if dtype != torch.bfloat16:
        scales = torch.ones(rows, device="cuda"), torch.ones(groups, n, device="cuda")
        codes = x.to(dtype), weight.to(dtype).mT
        theirs = torch.nn.functional.scaled_grouped_mm(*codes, scales[0], ROW, scales[1], ROW, offs=offs)
        ours = SCALED(*codes, scales[0], ROW, scales[1], ROW, offs=offs)
        assert torch.equal(ours[:filled], theirs[:filled]) and not ours[filled:].any()
        return
    both = []
    for product in (moe_torch.grouped_mm, torch.nn.functional.grouped_mm):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = product(leaves[0], leaves[1].mT, offs=offs)
        d_y = torch.where(
            torch.arange(rows, device="cuda")[:, None] < filled, draw(rows, n, whole=True, seed=1).cuda(), 0
        )
        d_x, d_weight = torch.autograd.grad(y, leaves, d_y)
        both.append((y[:filled], d_x[:filled], d_weight))
    for name, ours, theirs in zip(("y", "d_x", "d_weight"), *both, strict=True):
        assert torch.equal(ours, theirs), name
