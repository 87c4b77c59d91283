"""Configurations of the fused-MoE family: which formats they mean, what becomes of their arrays, what is refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import FP8_BLOCK, FP8_CHANNEL, FP8_GROUP, FP8_TENSOR, FP8_TOKEN, MXFP4, QuantizedTensor
from moe_core.modular.quant_config import FUSED_MOE_UNQUANTIZED_CONFIG, SCHEMES, FusedMoEQuantConfig
from moe_core.modular.schemes import activation_quantization, quant_key, weight_quantization
from moe_core.modular.types import FusedMoEParallelConfig, moe_problem_size
from moe_core.modular.weights import expert_weights

make = FusedMoEQuantConfig.make
E4M3 = ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize(
    ("config", "weights", "activations"),
    [
        (make(), None, None),
        (make(use_fp8_w8a8=True), FP8_TENSOR, FP8_TENSOR),
        (make(True, per_act_token_quant=True), FP8_CHANNEL, FP8_TOKEN),
        (make(True, block_shape=[128, 128]), FP8_BLOCK, FP8_GROUP),
        (make(use_mxfp4_w4a4=True), MXFP4, MXFP4),
    ],
    ids=str,
)
def test_formats_of_float_schemes(config: FusedMoEQuantConfig, weights: object, activations: object) -> None:
    assert weight_quantization(config) == weights and activation_quantization(config) == activations


def test_formats_of_integer_schemes() -> None:
    names = {
        "int8_channel": make(use_int8_w8a8=True, per_act_token_quant=True),
        "int8_tensor": make(use_int8_w8a8=True),
        "int8_block_64x64": make(use_int8_w8a8=True, block_shape=(64, 64)),
        "int8_row": make(use_int8_w8a16=True),
        "int4_g64": make(use_int4_w4a16=True, block_shape=[0, 64]),
        "int4_g128_zp": make(use_int4_w4a16=True, block_shape=[0, 128], w1_zp=np.zeros(1), w2_zp=np.zeros(1)),
        "fp8_block_64x32": make(use_fp8_w8a8=True, block_shape=[64, 32]),
    }
    assert {name: str(weight_quantization(config)) for name, config in names.items()} == {n: n for n in names}
    assert str(activation_quantization(names["int8_channel"])) == "int8_token"
    assert str(activation_quantization(names["int8_block_64x64"])) == "int8_group_1x64"
    assert activation_quantization(names["int4_g64"]) is None
    assert str(activation_quantization(names["fp8_block_64x32"])) == "fp8_group_1x32"


def test_scales_and_biases_become_operands() -> None:
    """Shapes that hold the same numbers fit; others name what is wanted."""
    w1, w2 = np.zeros((3, 8, 16), E4M3), np.zeros((3, 16, 4), E4M3)
    scales = np.arange(3, dtype=np.float32)
    bias = np.zeros((3, 8), np.float32)
    config = make(use_fp8_w8a8=True, w1_scale=scales, w2_scale=scales.reshape(3, 1), w1_bias=bias)
    experts = expert_weights(w1, w2, config, "out_in")
    assert isinstance(experts.gate_up, QuantizedTensor) and experts.gate_up.shape == (3, 8, 16)
    assert experts.down.scales.shape == (3, 1, 1) and experts.gate_up_bias is bias and experts.down_bias is None
    # mxfp4 `[3, 64, 8]` in `in_out`: bytes of two inputs, and two groups of 32.
    scales = {"w1_scale": np.zeros((3, 2, 8), np.uint8), "w2_scale": np.zeros((3, 2, 4), np.uint8)}
    halves = np.zeros((3, 32, 8), np.uint8), np.zeros((3, 32, 4), np.uint8)
    packed = expert_weights(*halves, make(use_mxfp4_w4a4=True, **scales), "in_out")
    assert packed.gate_up.shape == (3, 64, 8)
    zero_points = {"w1_zp": np.zeros((3, 1, 32, 2), np.uint8), "w2_zp": np.zeros((3, 32, 1, 2), np.uint8)}
    scales = {"w1_scale": np.ones((3, 64, 2), np.float32), "w2_scale": np.ones((3, 64, 2), np.float32)}
    config = make(use_int4_w4a16=True, block_shape=[0, 32], **scales, **zero_points)
    packed = expert_weights(*[np.zeros((3, 64, 32), np.uint8)] * 2, config, "out_in")
    assert packed.gate_up.zero_points.shape == packed.down.zero_points.shape == (3, 32, 2)
    with pytest.raises(InvalidInput, match=r"w1_scale must be \(3, 1, 1\)"):
        expert_weights(w1, w2, make(use_fp8_w8a8=True, w1_scale=bias, w2_scale=bias), "out_in")
    with pytest.raises(InvalidInput, match="w1_scale must be an array for fp8_tensor"):
        expert_weights(w1, w2, make(use_fp8_w8a8=True), "out_in")
    with pytest.raises(Unsupported, match="w1_precision is a precision object"):
        expert_weights(w1, w2, make(w1_precision=object()), "out_in")


#: Published orders of scales that are not those of the weights: scheme, block_shape, shapes of w1 and of its scales.
TRANSPOSED = {
    "int4 of AWQ and GPTQ": ("use_int4_w4a16", (0, 32), (2, 12, 48), (2, 3, 12)),
    "mxfp4 beside transposed weights": ("use_mxfp4_w4a4", None, (2, 12, 48), (2, 3, 12)),
    "fp8 blocks": ("use_fp8_w8a8", (4, 8), (2, 12, 48), (2, 6, 3)),
}


@pytest.mark.parametrize("case", TRANSPOSED)
def test_scales_in_another_order_are_refused(case: str) -> None:
    """They have as many elements, so that reshaping them would be silently wrong."""
    scheme, block, values, scales = TRANSPOSED[case]
    dtype = {"use_fp8_w8a8": E4M3}.get(scheme, np.uint8)
    kind = np.uint8 if "mxfp4" in scheme else np.float32
    w1, given = np.zeros(values, dtype), np.zeros(scales, kind)

    def weights(w1_scale: np.ndarray) -> Any:
        config = make(**{scheme: True}, block_shape=block, w1_scale=w1_scale, w2_scale=np.swapaxes(given, 1, 2))
        return expert_weights(w1, w1, config, "out_in")

    with pytest.raises(InvalidInput, match=r"transposed order.*pass w1_scale\.mT"):
        weights(given)
    with pytest.raises(InvalidInput, match=r"w1_scale must be \(2, .* check block_shape"):
        weights(given.reshape(-1))
    assert weights(np.swapaxes(given, 1, 2)[:, None]).gate_up.scales.shape == (2, scales[2], scales[1])


def test_a_static_scale_is_one_number() -> None:
    scales = {"w1_scale": np.ones(2, np.float32), "w2_scale": np.ones(2, np.float32)}
    weights = [np.zeros((2, 32, 32), ml_dtypes.float8_e4m3fn)] * 2
    with pytest.raises(InvalidInput, match="a2_scale must have one element"):
        expert_weights(*weights, make(True, **scales, a2_scale=np.ones(2, np.float32)), "out_in")


def test_contradictions_are_refused() -> None:
    wrong = {
        "at most one of": lambda: make(use_fp8_w8a8=True, use_int8_w8a8=True),
        "block_shape must not be given without a scheme": lambda: make(block_shape=[128, 128]),
        "w2_zp must not be given without a scheme": lambda: make(w2_zp=np.zeros(1)),
        "per_act_token_quant must be False for int4_w4a16": lambda: make(use_int4_w4a16=True, per_act_token_quant=True),
        r"block_shape must be \(rows, columns\)": lambda: make(True, block_shape=[128]),
        "make takes no w3_scale": lambda: make(w3_scale=np.zeros(1)),
        "use_fp8_w8a8 must be True or False": lambda: make(1),  # type: ignore[arg-type]
        r"block_shape must be \(0, group\)": lambda: make(use_int4_w4a16=True, block_shape=[8, 8]),
        "block_shape must be None for mxfp4": lambda: make(use_mxfp4_w4a4=True, block_shape=[1, 32]),
        "per_act_token_quant must be False with block_shape": lambda: make(
            True, per_act_token_quant=True, block_shape=[128, 128]
        ),
        "block_shape rows must be an integer of at least 1": lambda: make(True, block_shape=[0, 128]),
        "must not be given twice": lambda: make(True, w1_scale=np.zeros(1)).with_arrays(w1_scale=np.zeros(1)),
        "ep_rank must be below ep_size": lambda: FusedMoEParallelConfig(ep_size=2, ep_rank=2, use_ep=True),
        "ep_size must be 1 without use_ep": lambda: FusedMoEParallelConfig(ep_size=2),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_sizes_come_from_axes_that_nothing_packs() -> None:
    """mxfp4 halves the input axes of weights and tokens; the outputs say how wide everything is."""
    assert moe_problem_size((7, 8), (5, 64, 8), (5, 16, 16), (7, 2), "out_in") == (5, 7, 64, 16, 2)
    assert moe_problem_size((7, 8), (5, 8, 64), (5, 16, 16), (7, 2), "in_out") == (5, 7, 64, 16, 2)
    assert moe_problem_size((5, 9, 16), (5, 64, 16), (5, 16, 32), (7, 2), "out_in") == (5, 9, 64, 16, 2)
    with pytest.raises(InvalidInput, match="a block of rows for each of the 5 experts"):
        moe_problem_size((4, 9, 16), (5, 64, 16), (5, 16, 32), (7, 2), "out_in")


def test_shapes_of_scales() -> None:
    pytest.importorskip("torch")
    from moe_torch.modular import FusedMoEQuantConfig as OfTorch

    blocks = OfTorch.make(use_fp8_w8a8=True, block_shape=[128, 128])
    assert blocks.scale_shape(7, 300) == (7, 3) and blocks.batched_scale_shape(4, 7, 300) == (4, 7, 3)
    assert OfTorch.make(use_fp8_w8a8=True, per_act_token_quant=True).scale_shape(7, 300) == (7, 1)
    assert OfTorch.make(use_fp8_w8a8=True).scale_shape(7, 300) == (1, 1)
    assert OfTorch.make().scale_shape(7, 300) is None


def test_capabilities_answer_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from moe_torch import modular

    cpu, key = torch.device("cpu"), quant_key(FP8_BLOCK, static=True)
    assert key == modular.QuantKey("e4m3", modular.ScaleDesc("float32", True, (128, 128)))
    schemes = [FusedMoEQuantConfig(name) for name in SCHEMES]
    foreign = make(w1_precision=object())
    for experts in (modular.TritonExperts, modular.OAITritonExperts, modular.BatchedTritonExperts):
        for config in (FUSED_MOE_UNQUANTIZED_CONFIG, *schemes):
            assert experts.supports(config, cpu) is None, config
        assert "pass its scales as w1_scale" in experts.supports(foreign, cpu)
        assert "meta" in experts.supports(FUSED_MOE_UNQUANTIZED_CONFIG, torch.device("meta"))
        assert "meta" in experts.supports(FUSED_MOE_UNQUANTIZED_CONFIG, "nowhere")
        assert "config must be a FusedMoEQuantConfig" in experts.supports(None, cpu)
        odd = make(use_int4_w4a16=True, block_shape=[0, 7])
        assert "7" in experts.supports(odd, cpu)
        for name in (["silu"], "tanh"):
            reason = experts.supports(FUSED_MOE_UNQUANTIZED_CONFIG, cpu, activation=name)
            assert reason.startswith("activation must be one of silu, ") and f"got {name!r}" in reason
            assert not experts._supports_activation(name)
        parallel = FusedMoEParallelConfig(ep_size=4, ep_rank=3, use_ep=True)
        assert experts.supports(FUSED_MOE_UNQUANTIZED_CONFIG, cpu, parallel_config=parallel) is None
        assert experts._supports_current_device() and experts._supports_no_act_and_mul()
        assert experts._supports_quant_scheme(None, None) and experts._supports_quant_scheme(key, None)
        assert not experts._supports_quant_scheme(None, key)
    with monkeypatch.context() as patch:
        patch.setattr(
            "moe_torch.modular.newest.experts.target_of_device", mock.Mock(side_effect=Unsupported("no kernels"))
        )
        assert not modular.TritonExperts._supports_current_device()
    with pytest.raises(Unsupported, match="w1_precision is a precision object"):
        modular.TritonExperts(foreign)
