"""The interface of Triton 3.8's triton_kernels on our ops, against loops that say what it means there."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput
from moe_torch import compat
from moe_torch.compat import installed
from moe_torch.compat.triton_kernels import numerics
from moe_torch.compat.triton_kernels.compaction import compaction
from moe_torch.compat.triton_kernels.routing import _routing_clear_bitmatrix, compute_expt_data
from moe_torch.compat.triton_kernels_38 import layout, matmul, mxfp, reduce, tensor, topk
from moe_torch.compat.triton_kernels_38.matmul import Epilogue, FlexCtx, FnSpecs, PrecisionConfig
from moe_torch.modular import pack_bitmatrix
from tests.support.modular.triton_kernels_38 import ORDER, SIZES, SWIGLU, M, activated, near, slices
from tests.support.torch import REAL_KERNELS, running_on
from tests.support.triton_kernels import TOPK, D, E, N, T, normal

pytestmark = pytest.mark.usefixtures("reference_engine_of_torch")


# Installing


@pytest.mark.parametrize("generation", ["3.5", "3.8"])
def test_every_published_path_is_importable(generation: str) -> None:
    with compat.install(generation=generation) as package:
        assert compat.install(generation=generation).package is package is sys.modules["triton_kernels"]
        for path, module in installed.paths(generation).items():
            assert importlib.import_module(f"triton_kernels.{path}") is sys.modules[module]
        from triton_kernels import tensor as found  # type: ignore[import-not-found]

        # Ported code tells generations apart by these.
        assert hasattr(found, "SparseMatrix") == (generation == "3.8")
        missing = "matmul_ogs" if generation == "3.8" else "matmul"
        with pytest.raises(ModuleNotFoundError, match=missing):
            importlib.import_module(f"triton_kernels.{missing}")
        assert importlib.util.find_spec("triton_kernels") is not None
        with pytest.raises(InvalidInput, match="uninstall first"):
            compat.install(generation="3.5" if generation == "3.8" else "3.8")
    assert not [name for name in sys.modules if name.partition(".")[0] == "triton_kernels"]
    compat.uninstall()


def test_another_package_is_refused_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    real = types.ModuleType("triton_kernels")
    real.__file__ = "/somewhere/triton_kernels/__init__.py"
    monkeypatch.setitem(sys.modules, "triton_kernels", real)
    with pytest.raises(InvalidInput, match="/somewhere/triton_kernels"):
        compat.install()
    compat.uninstall()
    assert sys.modules["triton_kernels"] is real
    with pytest.raises(InvalidInput, match="generation"):
        compat.install(generation="3.7")


def test_parameters_are_the_published_ones() -> None:
    """Those of v3.8.0, whose order callers rely on."""
    published = {
        matmul.matmul: "a b bias a_ragged_metadata b_ragged_metadata gather_indx scatter_indx precision_config betas "
        "gammas out_alpha c fused_comm fused_activation epilogue c_acc_in",
        topk.topk: "x k apply_softmax dim y_indx n_rows all_gather symm_mem_pool",
        reduce.reduce: "x dim mask scale x_mxscale x_flex x_global_scale y y_dtype y_flex y_flex_saturate_inf y_has_mx "
        "y_mx_scale_dtype y_microblock_size y_value_pack_factor postprocess_fn1 postprocess_fn2 unpadded_batch_size",
        PrecisionConfig: "max_num_imprecise_acc allow_tf32 flex_ctx acc_scale flexpoint_saturate_inf "
        "report_quantization_err_fn a_mx_scale a_mx_tensor_scale a_microblock_size b_mx_scale b_mx_tensor_scale "
        "b_microblock_size c_mx_scale c_microblock_size c_value_pack_factor out_dtype intermediate_out_dtype "
        "enforce_bitwise_invariance",
        tensor.RaggedTensorMetadata: "slice_sizes slice_offs block_offs_data block_schedule_data expected_slice_size "
        "slice_sizes_divisibility",
        mxfp.downcast_to_mxfp: "x out_dtype axis scale_dtype microblock_size DEQUANT_SCALE_ROUNDING_MODE",
        tensor.wrap_torch_tensor: "torch_tensor dtype shape shape_max layout",
    }
    for function, names in published.items():
        assert list(inspect.signature(function).parameters) == names.split(), function


# Choices


@pytest.mark.parametrize("n_rows", [None, 5, torch.tensor([7])], ids=str)
@pytest.mark.parametrize("chosen", [False, True])
def test_topk_is_a_sparse_matrix(n_rows: Any, chosen: bool) -> None:
    logits = normal(T, 40)
    given = torch.stack([torch.arange(T), torch.arange(T) - 1], 1).to(torch.int16) if chosen else None
    found = topk.topk(logits, TOPK, y_indx=given, n_rows=n_rows)
    count = T if n_rows is None else int(n_rows)
    ids = given.long() if given is not None else logits.argsort(dim=1, descending=True, stable=True)[:, :TOPK]
    ids = torch.where(torch.arange(T)[:, None] < count, ids, -1)
    assert found.indx.tolist() == ids.tolist() and found.mask.dtype == tensor.BIT and found.mask.shape[1] == 40
    scores = torch.where(ids >= 0, logits.gather(1, ids.clamp(min=0)), -torch.inf).softmax(1).nan_to_num()
    near(found.vals, scores)
    words, metadata = found.mask.data.view(torch.int32), found.mask_metadata
    for column in range(40):
        bits = (words[:, column // 32] >> (column % 32)) & 1
        assert bits.bool().tolist() == (ids == column).any(1).tolist()
        assert metadata.col_sum[column] == (ids == column).sum()
    slots = [slot for column in range(40) for slot in (ids.flatten() == column).nonzero().flatten().tolist()]
    assert metadata.col_sorted_indx.tolist() == slots + [-1] * (T * TOPK - len(slots))
    assert [metadata.row_sorted_indx[slot] for slot in slots] == list(range(len(slots)))
    # A column whose bit is cleared has no choice.
    words.zero_()
    assert not tensor.make_bitmatrix_metadata(found.indx, found.mask).col_sum.any()


def test_ties_go_to_the_lower_column_and_gradients_flow() -> None:
    assert topk.topk(torch.zeros(2, E), 3, apply_softmax=False).indx.tolist() == [[0, 1, 2]] * 2
    logits = normal(T, E).requires_grad_()
    topk.topk(logits, TOPK).vals[:, 0].sum().backward()
    values = logits.detach().requires_grad_()
    values.topk(TOPK).values.softmax(1)[:, 0].sum().backward()
    near(logits.grad, values.grad)


def test_tiles_are_those_of_the_older_interface() -> None:
    metadata, data = slices(), compute_expt_data(SIZES, E, M)
    assert metadata.n_slices == E and metadata.slice_offs.tolist() == data.token_offs_raw.tolist()
    for height in metadata.block_sizes():
        assert metadata.block_offs(height).tolist() == data.token_offs_pad[height].tolist()
        assert metadata.block_schedule(height).tolist() == data.block_pid_map[height].tolist()
    assert metadata.block_offs_data.shape == (4, E + 1)
    assert replace(metadata, expected_slice_size=3).block_schedule_data is metadata.block_schedule_data
    assert metadata.block_schedule_data.shape[1] == metadata.max_n_blocks(E, M)


def test_launches_of_kernels_call_functions() -> None:
    ids = torch.tensor([[0, 33], [-1, 0]])
    bits = torch.zeros(2, 2, dtype=torch.uint32)
    pack_bitmatrix[(1,)](bits, ids, 2, 2, 2, BLOCK_SIZE_M=512, BLOCK_SIZE_K=32)
    assert bits.tolist() == [[1, 2], [1, 0]]
    values, columns = compaction(torch.tensor([[1.0, 2], [3, 4]]), ids.int(), bits)
    assert columns.tolist() == [[0, 33], [0, -1]] and values.tolist() == [[1, 2], [4, -1]]
    full = torch.full((2, 3), 2**32 - 1, dtype=torch.uint32)
    _routing_clear_bitmatrix[(2,)](full, 3, 1, 3, 37, BLOCK_N=512)
    assert full.tolist() == [[2**32 - 1, 31, 0]] * 2


# Products

INDEX = torch.randint(0, T, (M,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
INDEX[[2, 9]] = -1
WAYS = {"neither": (None, None), "gather": (INDEX, None), "scatter": (None, ORDER), "both": (INDEX, ORDER)}


def stated(a: Any, b: Any, metadata: Any, way: Any, fused: dict[str, Any], count: int) -> torch.Tensor:
    """a `[*, K]`, b `[E, K, N]`, row by row of count, in double precision."""
    gather, scatter = way
    width = b.shape[-1] // (2 if fused.get("fused_activation") else 1)
    result = torch.zeros(count, width, dtype=torch.double)
    for number in range(b.shape[0]):
        first = 0 if metadata is None else int(metadata.slice_offs[number])
        for row in range(first, first + (count if metadata is None else int(metadata.slice_sizes[number]))):
            source = row if gather is None else int(gather[row])
            target = row if scatter is None else int(scatter[row])
            if source < 0 or target < 0:
                continue
            sums = a[source].double() @ b[number].double()
            if fused.get("bias") is not None:
                factor = 1.0 if fused.get("betas") is None else fused["betas"][row].double()
                sums = sums + fused["bias"].double().reshape(b.shape[0], -1)[number] * factor
            sums = sums * fused.get("out_alpha", 1.0)
            sums = activated(sums) if fused.get("fused_activation") else sums
            result[target] = sums * (1.0 if fused.get("gammas") is None else fused["gammas"][row].double())
    return result


def fused_of(kind: str, count: int) -> dict[str, Any]:
    if kind == "plain":
        return {"bias": None}
    fused: dict[str, Any] = {"bias": normal(E, N), "gammas": normal(count, seed=1)}
    if kind == "all":
        fused |= {"betas": normal(count, seed=2), "out_alpha": 0.5, "fused_activation": SWIGLU}
    return fused


@pytest.mark.parametrize("kind", ["plain", "weighted", "all"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("padded", [False, True], ids=["adjacent", "padded"])
def test_ragged_products_are_what_they_state(kind: str, way: str, padded: bool) -> None:
    gather, scatter = WAYS[way]
    metadata = slices(padded)
    count = M
    if padded:
        # Slices at multiples of 8 need more rows.
        count = int(metadata.slice_offs[-1])
        gather = None if gather is None else torch.cat([gather, gather, gather])[:count]
        scatter = None if scatter is None else torch.randperm(count).int()
    a = normal(count if gather is None else T, D)
    b, fused = normal(E, D, N), fused_of(kind, count)
    expected = stated(a, b, metadata, (gather, scatter), fused, count)
    bias = fused.pop("bias")
    found = matmul.matmul(a, b, bias, metadata, None, gather, scatter, **fused)
    near(found, expected)
    memory = torch.full((1, *found.shape), 7.0)
    again = matmul.matmul(a, b, bias, metadata, None, gather, scatter, c=memory, **fused)
    assert again.data_ptr() == memory.data_ptr() and torch.equal(again, found)


@pytest.mark.parametrize("way", WAYS)
def test_a_plain_product_is_one_slice(way: str) -> None:
    gather, scatter = WAYS[way]
    a, b = normal(M if gather is None else T, D), normal(1, D, N)
    fused = {"bias": normal(N), "gammas": normal(M, seed=1), "fused_activation": SWIGLU}
    expected = stated(a, b, None, (gather, scatter), fused, M)
    bias = fused.pop("bias")
    for weight in (b, b[0]):
        near(matmul.matmul(a, weight, bias, None, None, gather, scatter, **fused), expected)


def test_batches_and_empty_products() -> None:
    a, b, bias = normal(3, 4, D), normal(3, N, D).mT, normal(3, N)
    near(matmul.matmul(a, b, bias, gammas=torch.arange(4.0)), (a @ b + bias[:, None]) * torch.arange(4.0)[:, None])
    for shape, expected in (((0, 4, D), (0, 4, N)), ((3, 0, D), (3, 0, N)), ((3, 4, 0), (3, 4, N))):
        assert matmul.matmul(normal(*shape), normal(shape[0], shape[2], N), None).shape == expected
    none = tensor.make_ragged_tensor_metadata(torch.zeros(E, dtype=torch.int32), 0)
    assert matmul.matmul(normal(0, D), normal(E, D, N), normal(E, N), none).shape == (0, N)
    assert matmul.matmul(normal(2, D), normal(D, 0), None).shape == (2, 0)


@pytest.mark.parametrize("engine", [REAL_KERNELS, "reference"])
@pytest.mark.parametrize("padding", ["", "a", "b", "ab"])
def test_a_ragged_k_sums_each_slice(engine: str, padding: str) -> None:
    """A weight's gradient."""
    with running_on(engine) as device:
        sides = {}
        for name, columns in (("a", 7), ("b", 9)):
            metadata = slices(name in padding)
            count = int(metadata.slice_offs[-1]) if name in padding else M
            sides[name] = normal(count, columns).to(torch.bfloat16), metadata
        (a, of_a), (b, of_b) = sides["a"], sides["b"]
        expected = torch.stack([
            a[one : one + size].double().T @ b[two : two + size].double()
            for one, two, size in zip(of_a.slice_offs[:-1], of_b.slice_offs[:-1], SIZES, strict=True)
        ])  # fmt: skip
        on = [
            replace(one, **{n: getattr(one, n).to(device) for n in ("slice_sizes", "slice_offs")})
            for one in (of_a, of_b)
        ]
        wide, gammas = PrecisionConfig(out_dtype=torch.float32), normal(7, seed=3)
        for left in (a.T, a.T.contiguous()):
            found = matmul.matmul(left.to(device), b.to(device), None, *on, precision_config=wide)
            near(found.cpu(), expected)
        sums = normal(E, 7, 9).to(device)
        found = matmul.matmul(
            left.to(device), b.to(device), None, *on, precision_config=wide, gammas=gammas.to(device), out_alpha=2.0,
            c_acc_in=sums, c=sums,
        )  # fmt: skip
        assert found.data_ptr() == sums.data_ptr()
        near(found.cpu(), normal(E, 7, 9) + 2 * expected * gammas[:, None])
        right = b[:, :8].contiguous().to(device)
        found = matmul.matmul(left.to(device), right, None, *on, precision_config=wide, fused_activation=SWIGLU)
        near(found.cpu(), activated(expected[..., :8].flatten(0, 1)).unflatten(0, (E, 7)))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_results_have_scales(dtype: Any) -> None:
    a, b = normal(M, D), normal(E, D, N)
    exact, scale = matmul.matmul(a, b, None, slices()), torch.tensor([0.5])
    actual, largest = torch.zeros(1), torch.finfo(dtype).max
    flex = FlexCtx(out_data=numerics.OutFlexData(dtype, scale, actual))
    precision = PrecisionConfig(out_dtype=dtype, flex_ctx=flex)
    memory = torch.empty(M, N, dtype=torch.uint8)
    found = matmul.matmul(a, b, None, slices(), precision_config=precision, c=memory)
    assert torch.equal(found.float(), (exact / 0.5).to(dtype).float())
    near(actual, (exact.abs().max() / largest)[None], 1e-6)
    precision.flex_ctx = FlexCtx(out_data=numerics.OutFlexData(dtype, torch.tensor([1e-6])))
    found = matmul.matmul(a, b, torch.full((E, N), torch.nan), slices(), precision_config=precision)
    assert found[:15].float().isnan().all() and not found[15:].float().any()
    big = matmul.matmul(a, b, None, slices(), precision_config=precision)
    assert big.float().abs().max() == largest, "values saturate"


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4"])
def test_microscaled_results_are_quantised_sums(kind: str) -> None:
    dtype = torch.uint8 if kind == "mxfp4" else torch.float8_e4m3fn
    function = getattr(mxfp, f"quantize_{kind}_fn")
    epilogue = Epilogue(FnSpecs(f"QUANTIZE_{kind.upper()}", function))
    a, b = normal(M, D), normal(E, D, 40)
    scales = torch.empty(M, 2, dtype=torch.uint8)
    precision = PrecisionConfig(out_dtype=dtype, c_mx_scale=scales, c_microblock_size=mxfp.MXFP_BLOCK_SIZE)
    found = matmul.matmul(a, b, None, slices(), precision_config=precision, epilogue=epilogue)
    values, expected = mxfp.downcast_to_mxfp(matmul.matmul(a, b, None, slices()), dtype, -1)
    assert torch.equal(found.view(torch.uint8), values.view(torch.uint8)) and torch.equal(scales, expected)
    with pytest.raises(InvalidInput, match="c_mx_scale"):
        matmul.matmul(a, b, None, slices(), precision_config=replace(precision, c_mx_scale=None), epilogue=epilogue)
    with pytest.raises(InvalidInput, match="c_mx_scale"):
        matmul.matmul(a, b, None, slices(), precision_config=precision)


@pytest.mark.parametrize("a_kind", ["bf16", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("b_kind", ["bf16", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("batch", [False, True], ids=["ragged", "batch"])
def test_quantised_operands_are_their_numbers(a_kind: str, b_kind: str, batch: bool) -> None:
    if (a_kind, b_kind) == ("mxfp4", "mxfp8"):
        pytest.skip("mxfp4 rows have kernels with mxfp4 weights alone")
    a, b = normal(*((E, 3, 64) if batch else (M, 64))), normal(E, 64, N)
    precision = PrecisionConfig(out_dtype=torch.float32, allow_tf32=False)
    operands, numbers = [], []
    for name, array, kind, axis in (("a", a, a_kind, -1), ("b", b, b_kind, -2)):
        held = array.to(torch.bfloat16)
        if kind != "bf16":
            values, scale = mxfp.downcast_to_mxfp(array, torch.uint8 if kind == "mxfp4" else torch.float8_e4m3fn, axis)
            wrapped = tensor.wrap_torch_tensor(values, tensor.FP4 if kind == "mxfp4" else None)
            assert list(wrapped.shape) == list(array.shape)
            held = (
                tensor.convert_layout(wrapped, layout.make_default_matmul_mxfp4_w_layout(-2))
                if name == "b"
                else wrapped
            )
            setattr(precision, f"{name}_mx_scale", tensor.wrap_torch_tensor(scale))
            setattr(precision, f"{name}_microblock_size", 32)
            numbers.append(mxfp.upcast_from_mxfp(values, scale, torch.float32, axis))
        else:
            numbers.append(held.float())
        operands.append(held)
    found = matmul.matmul(*operands, None, None if batch else slices(), precision_config=precision)
    expected = numbers[0] @ numbers[1] if batch else stated(*numbers, slices(), (None, None), {}, M)
    near(found, expected, 2e-2 if "bf16" in (a_kind, b_kind) else 1e-4)


def test_gradients_flow_through_a_gather() -> None:
    a, b, gammas = normal(T, D), normal(E, D, N), normal(M)
    parts = [one.requires_grad_() for one in (a, b, gammas)]
    found = matmul.matmul(a, b, None, slices(), None, INDEX, ORDER, gammas=gammas)
    gradients = torch.autograd.grad(found.square().sum(), parts)
    experts = torch.repeat_interleave(torch.arange(E), SIZES)
    rows = torch.einsum("rd,rdn->rn", a[INDEX[:15].clamp(min=0)], b[experts]) * gammas[:15, None]
    kept = (INDEX[:15] >= 0) & (ORDER[:15] >= 0)
    wanted = torch.autograd.grad(torch.where(kept[:, None], rows, 0).square().sum(), parts)
    for left, right in zip(gradients, wanted, strict=True):
        near(left, right, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "mxfp4"])
def test_a_forward_on_a_gpu_is_that_of_the_reference(kind: str) -> None:
    """The calls of a serving engine, with fused gather and scatter, against the same on the CPU."""
    tokens, top_k, experts, d, f = 300, 4, 16, 512, 256

    def forward(device: str) -> torch.Tensor:
        x, logits = normal(tokens, d).to(device, torch.bfloat16), normal(tokens, experts).to(device)
        chosen = topk.topk(logits, top_k)
        order = chosen.mask_metadata.col_sorted_indx
        metadata = tensor.make_ragged_tensor_metadata(chosen.mask_metadata.col_sum, order.shape[0])
        weights, configs = [], []
        for shape in ((experts, d, 2 * f), (experts, f, d)):
            weight, config = (normal(*shape) / 20).to(torch.bfloat16), PrecisionConfig()
            if kind == "mxfp4":
                weight, scale = mxfp.downcast_to_mxfp(weight, torch.uint8, -2)
                config = PrecisionConfig(b_mx_scale=scale.to(device), b_microblock_size=32)
            weights.append(weight.to(device))
            configs.append(config)
        biases = [normal(experts, 2 * f).to(device), normal(experts, d).to(device)]
        gather = torch.div(order, top_k, rounding_mode="trunc")
        first, second = zip(weights, biases, strict=True)
        hidden = matmul.matmul(x, *first, metadata, None, gather, None, configs[0], fused_activation=SWIGLU)
        gammas = chosen.vals.flatten()[order]
        rows = matmul.matmul(hidden, *second, metadata, None, None, order, configs[1], gammas=gammas)
        return reduce.reduce(rows.view(tokens, top_k, d), 1)[0].float().cpu()

    near(forward("cuda"), forward("cpu"), 3e-2)
