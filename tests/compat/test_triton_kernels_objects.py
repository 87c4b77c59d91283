"""The objects of triton_kernels and ours: carried there and back, with the same parameters, and run on a GPU."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput, Unsupported
from moe_core.parity.tolerance import assert_close, matmul_tolerance
from moe_torch.compat.triton_kernels import from_upstream, tensor, to_upstream
from moe_torch.compat.triton_kernels import matmul_ogs as ours
from moe_torch.compat.triton_kernels.matmul_ogs import matmul_ogs
from moe_torch.compat.triton_kernels.numerics_details import mxfp
from moe_torch.compat.triton_kernels.routing import routing
from moe_torch.compat.triton_kernels.topk import topk
from tests.support.torch import to_numpy
from tests.support.triton_kernels import ALPHA, LIMIT, SWIGLU, TOPK, D, E, N, T, foreign_function, normal, tolerances

pytestmark = pytest.mark.usefixtures("reference_engine_of_torch")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A package with classes of the same names and fields, some fewer, and a layout that stores memory transposed."""

    class Swizzled:
        name = "SWIZZLED"

        @staticmethod
        def unswizzle_data(data: Any) -> Any:
            return data.mT

    def made(name: str, *fields: str) -> type:
        return dataclasses.make_dataclass(name, [(field, object, None) for field in fields])

    def _swiglu_fn() -> None:
        """The function that is compiled there."""

    class Bitmatrix:
        def __init__(self, storage: Any, shape: Any, shape_max: Any = None, scratchpad: Any = None) -> None:
            self.storage, self.shape, self.shape_max, self.scratchpad = storage, shape, shape_max, scratchpad

    flex = ("dtype", "expected_scale", "actual_scale", "checksum_scale")
    contents = {
        "routing": [made("RoutingData", "gate_scal", "expt_hist", "n_expts_tot", "n_expts_act", "expt_data"),
            made("ExptData", "hist", "token_offs_raw", "token_offs_pad", "block_pid_map"),
            made("GatherIndx", "src_indx", "dst_indx"), made("ScatterIndx", "src_indx", "dst_indx")],
        "matmul_ogs": [
            made("FnSpecs", "name", "fn", "fn_arg_names", "fn_arg_do_not_specialize"),
            made("FusedActivation", "specs", "fn_args", "reduction_n"),
            made("FlexCtx", "lhs_data", "rhs_data", "out_data"),
            made("PrecisionConfig", "allow_tf32", "flex_ctx", "weight_scale", "out_dtype", "acc_scale"),
        ],
        "numerics": [made("InFlexData", "dtype", "scale"), made("OutFlexData", *flex)],
        "tensor": [made("Storage", "data", "layout"), made("Tensor", "storage", "dtype", "shape", "shape_max"),
            made("FloatType", "bitwidth_exponent", "bitwidth_mantissa", "is_signed"), Bitmatrix],
        "swiglu": [],
    }  # fmt: skip
    package = types.ModuleType("stand_in")
    for name, classes in contents.items():
        module = types.ModuleType(f"stand_in.{name}")
        for kind in classes:
            kind.__module__ = module.__name__
            setattr(module, kind.__name__, kind)
        setattr(package, name, module)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    package.swiglu.swiglu_fn = _swiglu_fn
    monkeypatch.setitem(sys.modules, "stand_in", package)
    return types.SimpleNamespace(**{name: getattr(package, name) for name in contents}, Swizzled=Swizzled)


class Padded:
    """A layout that pads the last two axes with other numbers, and knows the shape before."""

    name = "PADDED"

    def __init__(self, *initial_shape: int) -> None:
        self.initial_shape = initial_shape

    @staticmethod
    def swizzle_data(data: Any) -> Any:
        rows, columns = data.shape[-2:]
        return torch.nn.functional.pad(data, (0, -columns % 256, 0, -rows % 2), value=77).flip(-1)

    @staticmethod
    def unswizzle_data(data: Any) -> Any:
        return data.flip(-1)


def test_objects_travel_there_and_back(stand_in: types.SimpleNamespace) -> None:
    found = routing(normal(T, E), TOPK)
    there = to_upstream(found, "stand_in")
    assert [type(part) for part in there] == [
        getattr(stand_in.routing, kind) for kind in ("RoutingData", "GatherIndx", "ScatterIndx")
    ]
    assert isinstance(there[0].expt_data.block_pid_map, dict) and there[0].gate_scal is found[0].gate_scal
    bare = dataclasses.replace(found[0], expt_data=None)
    assert set(to_upstream(bare, "stand_in").expt_data.token_offs_pad) == {16, 32, 64, 128}
    with pytest.raises(Unsupported, match="expected_tokens_per_expt"):
        to_upstream(dataclasses.replace(found[0], expected_tokens_per_expt=3), "stand_in")
    back = from_upstream(there)
    x, w = normal(T, D), normal(E, D, N)
    assert torch.equal(matmul_ogs(x, w, None, *back), matmul_ogs(x, w, None, *found))

    fused = to_upstream(SWIGLU, "stand_in")
    assert fused.specs.fn is stand_in.swiglu.swiglu_fn and fused.fn_args == (ALPHA, LIMIT)
    assert from_upstream(fused) == SWIGLU
    with pytest.raises(Unsupported, match="fused function"):
        from_upstream(stand_in.matmul_ogs.FnSpecs("other", foreign_function, (), ()))
    bits = topk(normal(T, E), TOPK)[2]
    assert torch.equal(from_upstream(to_upstream(bits, "stand_in")).data, bits.data)


def test_swizzled_memory_comes_back_plain(stand_in: types.SimpleNamespace) -> None:
    values, scales = mxfp.downcast_to_mxfp(normal(E, 64, N), torch.uint8, axis=1)
    there = stand_in.tensor
    fp4 = there.FloatType(2, 1, True)
    weight = there.Tensor(there.Storage(values.mT, stand_in.Swizzled()), fp4, [E, 64, N], [E, 64, N])
    config = stand_in.matmul_ogs.PrecisionConfig(
        True,
        to_upstream(ours.FlexCtx(), "stand_in"),
        there.Tensor(there.Storage(scales.mT, stand_in.Swizzled()), torch.uint8, list(scales.shape), None),
        torch.float32,
        1.0,
    )
    mine, precision = from_upstream((weight, config))
    assert mine.dtype == tensor.FP4 and torch.equal(mine.data, values) and mine.data.stride(-2) == 1
    x = normal(T, 64)
    found = matmul_ogs(
        x,
        from_upstream(to_upstream(mine, "stand_in")),
        None,
        *routing(normal(T, E), TOPK)[:2],
        precision_config=precision,
    )
    plain = matmul_ogs(
        x, mxfp.upcast_from_mxfp(values, scales, torch.float32, 1), None, *routing(normal(T, E), TOPK)[:2]
    )
    assert_close(to_numpy(found), to_numpy(plain), matmul_tolerance("float32", "float32", 64), label="mxfp4")


@pytest.mark.parametrize("shape", [(90, 5760), (45, 2880), (4, 128), (2, 64), (3, 160), (2, 256)])
def test_what_a_layout_pads_is_cropped(stand_in: types.SimpleNamespace, shape: tuple[int, int]) -> None:
    """The scales of two matrices [K / 32, N], padded as layouts of Hopper pad them."""
    scales = torch.arange(2 * shape[0] * shape[1]).to(torch.uint8).reshape(2, *shape)
    there = stand_in.tensor
    storage = there.Storage(Padded.swizzle_data(scales), Padded(*scales.shape))
    found = from_upstream(there.Tensor(storage, torch.uint8, [*scales.shape], None))
    assert found.shape == [2, *shape] and torch.equal(found.data, scales) and found.data.stride(-2) == 1
    for wrong in ((3, *shape), (2, shape[0], 9999), (2, 99, shape[1])):
        with pytest.raises(InvalidInput, match="storage must hold the initial_shape of its layout"):
            from_upstream(there.Storage(storage.data, Padded(*wrong)))


def upstream(name: str) -> Any:
    pytest.importorskip(
        "triton_kernels.matmul_ogs",
        reason="needs python/triton_kernels of the Triton repository (tag v3.5.1) on PYTHONPATH; the distribution "
        "named triton-kernels on the package index is another project",
    )
    return importlib.import_module(f"triton_kernels.{name}")


def test_parameters_are_those_of_upstream() -> None:
    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    modules = {"matmul_ogs": ours} | {
        name: importlib.import_module(f"moe_torch.compat.triton_kernels.{name}")
        for name in ("routing", "topk", "swiglu", "tensor")
    }
    functions = (
        *("routing.routing", "routing.routing_from_bitmatrix", "routing.compute_expt_data"),
        *("matmul_ogs.matmul_ogs", "topk.topk", "swiglu.swiglu", "tensor.wrap_torch_tensor"),
        *("tensor.convert_layout", "tensor.Bitmatrix"),
    )
    for path in functions:
        module, _, name = path.partition(".")
        assert names(getattr(modules[module], name)) == names(getattr(upstream(module), name)), path
    for name in ("RoutingData", "FnSpecs", "FusedActivation", "Epilogue", "FlexCtx", "PrecisionConfig", "Tensor"):
        module = upstream("routing" if name == "RoutingData" else "tensor" if name == "Tensor" else "matmul_ogs")
        assert names(getattr(ours, name)) == names(getattr(module, name)), name


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["bfloat16", "float16", "mxfp4"])
def test_forward_agrees_with_upstream(weights: str) -> None:
    """The same calls on both sides; then each side with the other's objects."""
    matmul, swiglu_there, routing_there = upstream("matmul_ogs"), upstream("swiglu"), upstream("routing")
    tokens, top_k, experts, d, f = 200, 4, 16, 256, 384
    dtype = torch.float16 if weights == "float16" else torch.bfloat16
    x, logits = normal(tokens, d).cuda().to(dtype), normal(tokens, experts).cuda()
    plain = [(normal(experts, d, 2 * f) / 16).cuda().to(dtype), (normal(experts, f, d) / 20).cuda().to(dtype)]
    biases = [normal(experts, 2 * f).cuda(), normal(experts, d).cuda()]
    scales: list[Any] = [None, None]
    if weights == "mxfp4":
        pairs = [mxfp.downcast_to_mxfp(w, torch.uint8, axis=1) for w in plain]
        plain, scales = [values for values, _ in pairs], [scale for _, scale in pairs]

    def forward(module: Any, fused: Any, routed: Any) -> tuple[Any, Any]:
        data, gather, scatter = routed
        first, second = (tensor_of(module, w, scale) for w, scale in zip(plain, scales, strict=True))
        hidden = module.matmul_ogs(
            x, first[0], biases[0], data, gather_indx=gather, precision_config=first[1], fused_activation=fused
        )
        output = module.matmul_ogs(
            hidden, second[0], biases[1], data, scatter_indx=scatter, precision_config=second[1], gammas=data.gate_scal
        )
        return hidden, output

    def tensor_of(module: Any, w: Any, scale: Any) -> tuple[Any, Any]:
        if scale is None:
            return w, module.PrecisionConfig()
        return module.wrap_torch_tensor(w, dtype=module.FP4), module.PrecisionConfig(weight_scale=module.Tensor(scale))

    fused = matmul.FusedActivation(
        matmul.FnSpecs("swiglu", swiglu_there.swiglu_fn, ("alpha", "limit")), (ALPHA, LIMIT), 2
    )
    there, here = routing_there.routing(logits, top_k), routing(logits, top_k)
    for mine, other in zip(here, there, strict=True):
        for field in ("src_indx", "dst_indx", "expt_hist"):
            if hasattr(other, field):
                assert torch.equal(getattr(mine, field), getattr(other, field)), field
    torch.testing.assert_close(here[0].gate_scal, there[0].gate_scal, rtol=1e-5, atol=1e-6)
    for block_m, tiles in there[0].expt_data.block_pid_map.items():
        assert torch.equal(here[0].expt_data.block_pid_map[block_m], tiles), block_m
        assert torch.equal(here[0].expt_data.token_offs_pad[block_m], there[0].expt_data.token_offs_pad[block_m])
    expected = forward(matmul, fused, there)
    tolerance = tolerances(str(dtype).removeprefix("torch."), d, f, top_k, experts)
    for label, found in {
        "ours": forward(ours, SWIGLU, here),
        "ours with its objects": forward(ours, from_upstream(fused), from_upstream(there)),
        "it with our objects": forward(matmul, to_upstream(SWIGLU), to_upstream(here)),
    }.items():
        for stage, left, right in zip(("activation", "output"), found, expected, strict=True):
            assert_close(to_numpy(left), to_numpy(right), tolerance[stage], label=f"{label}: {stage}")
