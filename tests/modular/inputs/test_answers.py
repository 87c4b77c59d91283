"""A class runs what it says that it supports: every scheme and activation, and keys of other libraries."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import MXFP8_CEIL
from moe_core.modular.activations import _NAMES, activation_of
from moe_core.modular.quant_config import REFUSED_SCHEMES
from moe_core.modular.schemes import keys_of, weight_quantization
from moe_core.ops.quantize.reference import dequantize, quantize
from moe_core.specs import Activation
from moe_torch import modular
from moe_torch.modular import FusedMoEModularKernel, FusedMoEQuantConfig, QuantKey, ScaleDesc
from moe_torch.modular.newest import activation as newest_activation
from moe_torch.modular.newest import quant_configs
from tests.support.modular.problems import draw_problem
from tests.support.modular.quantized import CONFIGURATIONS, tensor
from tests.support.torch import require_equal, running_on, to_torch

E, K, F, M = 2, 128, 128, 5
STANDARD = {name: getattr(modular, name) for name in ("TritonExperts", "OAITritonExperts", "UnfusedOAITritonExperts")}
CLASSES: dict[str, Any] = STANDARD | {
    "DeepGemmExperts": modular.DeepGemmExperts,
    "BatchedTritonExperts": lambda config, **options: modular.BatchedTritonExperts(M, 1, config, **options),
    "BatchedDeepGemmExperts": lambda config, **options: modular.BatchedDeepGemmExperts(M, 1, config, **options),
}
CLASSES["TritonOrDeepGemmExperts"] = lambda config, weight_layout: modular.TritonOrDeepGemmExperts(
    **{f"use_{config.scheme}": True} if config.scheme else {},
    **{name: value for name, value in vars(config).items() if name not in ("scheme", "is_wrapped")},
)
#: Constants that a name cannot do without.
CONSTANTS = {
    "situ": {"gemm1_alpha": 4.0, "gemm1_beta": 25.0},
    "swigluoai_uninterleave": {"gemm1_alpha": 1.702, "gemm1_beta": 1.0, "gemm1_clamp_limit": 7.0},
}
SCHEMES = {"plain": FusedMoEQuantConfig()} | CONFIGURATIONS


class Drawn(NamedTuple):
    w1: Any
    w2: Any
    arrays: dict[str, Any]


def drawn(config: FusedMoEQuantConfig, layout: str, gated: bool) -> Drawn:
    random, format, weights, arrays = np.random.default_rng(0), weight_quantization(config), [], {}
    for number, (rows, columns) in enumerate((((1 + gated) * F, K), (K, F)), 1):
        weight = random.standard_normal((E, rows, columns)).astype(np.float32) / 8
        weight = weight if layout == "out_in" else np.ascontiguousarray(weight.swapaxes(1, 2))
        if format is None:
            weights.append(to_torch(weight))
            continue
        quantized = quantize(weight, format, layout=layout)
        weights.append(tensor(quantized.values, "cpu"))
        arrays[f"w{number}_scale"] = tensor(quantized.scales, "cpu")
        arrays[f"w{number}_zp"] = tensor(quantized.zero_points, "cpu")
    return Drawn(*weights, arrays)


def run(name: str, config: FusedMoEQuantConfig, activation: Any, weights: Drawn) -> Any:
    fields = {field: getattr(config, field) for field in ("scheme", "per_act_token_quant", "block_shape")}
    constants = CONSTANTS.get(activation, {})
    made = FusedMoEQuantConfig(**fields, **constants, **weights.arrays)
    experts = CLASSES[name](made, weight_layout="out_in")
    batched = "Batched" in name
    parts = modular.BatchedPrepareAndFinalize(M, E) if batched else modular.MoEPrepareAndFinalizeNoEP()
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[0, 1], [1, 0], [-1, 1], [0, -1], [-1, -1]], dtype=torch.int32)
    return FusedMoEModularKernel(parts, experts)(x, *weights[:2], torch.full((M, 2), 0.5), ids, activation=activation)


@pytest.mark.parametrize("name", CLASSES)
def test_an_answer_is_what_a_call_does(name: str) -> None:
    """Every scheme with every activation, known and unknown."""
    cls, cpu, seen = getattr(modular, name), torch.device("cpu"), set()
    for (scheme, config), gated in itertools.product(SCHEMES.items(), (True, False)):
        weights = drawn(config, "out_in", gated)
        for activation in (*_NAMES, "tanh"):
            if activation != "tanh" and _NAMES[activation].gated != gated:
                continue
            asked = dataclasses.replace(config, **CONSTANTS.get(activation, {}))
            reason = cls.supports(asked, cpu, activation=activation)
            seen.add(reason is None)
            with running_on("reference"), torch.no_grad():
                if reason is None:
                    output = run(name, config, activation, weights)
                    assert output.isfinite().all() and output[:4].any() and not output[4].any(), (scheme, activation)
                    continue
                with pytest.raises((Unsupported, InvalidInput)) as raised:
                    run(name, config, activation, weights)
            known = cls._supports_quant_scheme(*keys_of(config, static=False))
            # A scheme without a flag is an unknown argument.
            wanted = InvalidInput if known or name == "TritonOrDeepGemmExperts" else Unsupported
            assert raised.type is wanted, (scheme, activation, reason)
    assert seen == {True, False}


def test_every_key_is_normalised() -> None:
    """The keys of configurations with torch's dtypes, e8m0 and 4-bit names; everything else is no scheme."""
    names = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8, "e2m1": torch.uint8, "uint8": "uint8b128"}
    names |= {"uint4": SimpleNamespace(name="uint4b8")}

    def of_torch(key: QuantKey | None) -> Any:
        if key is None:
            return None
        # uint8 may be bytes of e8m0 scales or codes, which their group tells apart.
        dtype = torch.float16 if key.dtype in ("uint4", "uint8") else getattr(torch, key.scale.dtype)
        scale = SimpleNamespace(**vars(key.scale) | {"dtype": dtype})
        if scale.group_shape == (1, -1) and key.dtype in ("e4m3", "int8") and scale.static:
            scale.group_shape = (-1, 1)
        scale2 = key.scale2 and SimpleNamespace(**vars(key.scale2) | {"dtype": torch.float32})
        return SimpleNamespace(dtype=names[key.dtype], scale=scale, scale2=scale2, symmetric=key.symmetric)

    by_channel = FusedMoEQuantConfig("fp8_w8a16", w1_scale=torch.ones(E, F, 1))
    configs = (*SCHEMES.values(), by_channel)
    pairs = {keys_of(config, static) for config in configs for static in (False, True)}
    # Signed weights of int8_w8a16.
    pairs |= {(keys_of(SCHEMES["int8_w8a8"], static=False)[0], None)}
    sides = [set(side) for side in zip(*pairs, strict=True)]
    for pair, cls in itertools.product(itertools.product(*sides), STANDARD.values()):
        assert cls._supports_quant_scheme(*pair) == (pair in pairs), pair
        assert cls._supports_quant_scheme(*map(of_torch, pair)) == (pair in pairs), pair
    nvfp4, _ = keys_of(SCHEMES["nvfp4_w4a16"], static=False)
    assert nvfp4 is not None
    changes: tuple[dict[str, Any], ...] = (
        {"dtype": "nonsense"}, {"dtype": "e3m2"}, {"scale2": None}, {"symmetric": False},
        {"scale": ScaleDesc("uint8", True, (1, 16))}, {"scale": ScaleDesc("float8_e4m3fn", False, (1, 16))},
        {"scale": ScaleDesc("float8_e4m3fn", True, (1, 32))},
    )  # fmt: skip
    for change in changes:
        assert not modular.TritonExperts._supports_quant_scheme(dataclasses.replace(nvfp4, **change), None), change


@pytest.mark.parametrize("scheme", REFUSED_SCHEMES)
def test_schemes_without_an_exact_product_are_refused_by_name(scheme: str) -> None:
    with pytest.raises(Unsupported, match=f"scheme {scheme} has no exact product: "):
        FusedMoEQuantConfig(scheme)


def test_nvfp4_joins_both_scales_once() -> None:
    """fp4 value * (e4m3 scale * global scale), as vLLM's emulation multiplies; other pairs of arrays are refused."""
    config = SCHEMES["nvfp4_w4a16"]
    weights = drawn(config, "out_in", True)
    alphas = torch.tensor([0.25, 3.0])
    small = {name: scale.to(torch.float8_e4m3fn) for name, scale in weights.arrays.items() if name.endswith("scale")}
    joined = {name: scale.float() * alphas[:, None, None] for name, scale in small.items()}
    stored = FusedMoEQuantConfig("nvfp4_w4a16", **small, g1_alphas=alphas, g2_alphas=alphas)
    assert stored.g1_alphas is None and torch.equal(stored.w2_scale, joined["w2_scale"])
    assert torch.equal(dataclasses.replace(stored).w1_scale, joined["w1_scale"])
    given = FusedMoEQuantConfig("nvfp4_w4a16", **joined)
    x, ids = torch.randn(M, K), torch.tensor([[0], [1], [1], [0], [1]])
    with running_on("reference"), torch.no_grad():
        results = [
            FusedMoEModularKernel(modular.MoEPrepareAndFinalizeNoEP(), modular.TritonExperts(one))(
                x, *weights[:2], torch.ones(M, 1), ids
            )
            for one in (stored, given)
        ]
    require_equal(results[0], results[1], "joined")
    with pytest.raises(InvalidInput, match=r"w1_scale must be e4m3 \[E, \.\.\] with g1_alphas \[E\]"):
        FusedMoEQuantConfig("nvfp4_w4a16", **joined, g1_alphas=alphas)
    with pytest.raises(InvalidInput, match="g1_alphas must be None for fp8_w8a16"):
        FusedMoEQuantConfig("fp8_w8a16", g1_alphas=alphas)
    with pytest.raises(InvalidInput, match="g1_alphas must be given"):
        modular.TritonExperts(FusedMoEQuantConfig("nvfp4_w4a16", **small)).weights(*weights[:2])


def test_mxfp8_keeps_the_largest_of_a_group_in_range() -> None:
    """2^ceil(log2(amax / 448)), as vLLM quantises activations."""
    x = np.random.default_rng(0).standard_normal((7, 64)).astype(np.float32) * 100
    quantized = quantize(x, MXFP8_CEIL)
    exponent = np.ceil(np.log2(np.abs(x.reshape(7, 2, 32)).max(-1) / np.float32(448)))
    np.testing.assert_array_equal(quantized.scales, exponent + 127)
    assert np.abs(dequantize(quantized) - x).max() < 0.07 * np.abs(x).max()


def formula(name: str, gate: Any, up: Any, alpha: Any, beta: Any, limit: Any) -> Any:
    sigmoid = torch.sigmoid
    if name == "situ":
        return alpha * torch.tanh(gate / alpha) * sigmoid(gate) * (up if beta is None else beta * torch.tanh(up / beta))
    if name == "swiglustep":
        return (gate * sigmoid(gate)).clamp(max=7) * up.clamp(-7, 7)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * sigmoid(alpha * gate) * (up + beta)


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("situ", (4.0, 25.0, None)),
        ("situ", (2.0, None, None)),
        ("swiglustep", (None, None, None)),
        ("swiglustep", (None, None, 7.0)),
        ("swigluoai_uninterleave", (1.702, 1.0, 7.0)),
        ("swigluoai_uninterleave", (None, None, 2.0)),
        ("silu", (None, None, 1.5)),
        ("swigluoai", (1.5, 1.0, 3.0)),
    ],
)
def test_names_and_constants_mean_their_formulas(name: str, constants: Any) -> None:
    """In torch, by the configuration and by vLLM's moe_config, and in JAX."""
    alpha, beta, limit = constants
    config = FusedMoEQuantConfig(gemm1_alpha=alpha, gemm1_beta=beta, gemm1_clamp_limit=limit)
    values = 1.0 if alpha is None else alpha, beta if beta is not None or name == "situ" else 0.0, limit
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(0)) * 6
    gate, up = (x[:, 0::2], x[:, 1::2]) if name == "swigluoai" else x.chunk(2, 1)
    expected = formula(name, gate, up, *values)
    fields = ("swiglu_alpha", "swiglu_beta", "swiglu_limit")
    if name == "situ":
        fields = ("activation_situ_beta", "activation_situ_linear_beta", "swiglu_limit")
    member = enum.Enum("MoEActivation", {"ONE": name}).ONE
    with running_on("reference"), torch.no_grad():
        for experts in (
            modular.UnfusedOAITritonExperts(config),
            modular.UnfusedOAITritonExperts(SimpleNamespace(**dict(zip(fields, constants, strict=True))), None),
        ):
            output = torch.empty(9, 16)
            experts.activation(member, output, x)
            torch.testing.assert_close(output, expected, rtol=2e-6, atol=2e-6)
            assert experts.adjust_N_for_activation(32, member) == 16
    jax = pytest.importorskip("jax")
    from moe_jax import modular as other
    from tests.support import jax as jax_support

    problem = draw_problem(tokens=3)
    with jax_support.running_on("reference"):
        arrays = jax_support.to_jax(tuple(problem))
        chosen = activation_of(name, config)
        functions: Any = (other.fused_experts, other.unfused_experts)
        for run_experts in functions:
            named = run_experts(*arrays, name, quant_config=config, weight_layout="out_in")
            stated = run_experts(*arrays, chosen, weight_layout="out_in")
            np.testing.assert_array_equal(np.asarray(named), np.asarray(stated))
        assert jax.numpy.isfinite(named).all()


def test_constants_without_a_use_are_refused() -> None:
    def chosen(name: Any, **constants: Any) -> Activation:
        return activation_of(name, FusedMoEQuantConfig(**constants))

    wrong: dict[str, Any] = {
        "gemm1_clamp_limit must be None or left out for gelu": lambda: chosen("gelu", gemm1_clamp_limit=7.0),
        "gemm1_alpha must be 1.0 or left out for silu": lambda: chosen("silu", gemm1_alpha=1.702),
        "gemm1_clamp_limit must be 7.0 or left out for swiglustep": lambda: chosen("swiglustep", gemm1_clamp_limit=5.0),
        "gemm1_beta must be 1.0 or left out for swigluoai": lambda: chosen("swigluoai", gemm1_beta=0.0),
        "gemm1_clamp_limit must be given for swigluoai_unint": lambda: chosen("swigluoai_uninterleave", gemm1_beta=1.0),
        "gemm1_alpha must be given for situ": lambda: chosen("situ"),
        "left out for an Activation, which states": lambda: chosen(Activation("silu"), gemm1_clamp_limit=1.0),
        "gemm1_clamp_limit must be one number": lambda: modular.TritonExperts(
            SimpleNamespace(swiglu_limit=3.0), FusedMoEQuantConfig(gemm1_clamp_limit=7.0)
        ),
        "gemm1_alpha must be a finite number|gemm1_alpha must be": lambda: FusedMoEQuantConfig(gemm1_alpha="1"),  # type: ignore[arg-type]
    }
    for message, call in wrong.items():
        with pytest.raises(InvalidInput, match=message):
            call()
    with pytest.raises(Unsupported, match="swigluoai_uninterleave has kernels for gemm1_beta 1"):
        chosen("swigluoai_uninterleave", gemm1_alpha=1.702, gemm1_clamp_limit=7.0)


def test_published_activations_and_constants() -> None:
    kinds = newest_activation.MoEActivation
    for kind in kinds:
        wanted = [other for other in kinds if other.value == f"{kind.value}_no_mul"] or [kind]
        assert kind.without_mul() is wanted[0]
    assert kinds.from_str("silu").without_mul() is kinds.SILU_NO_MUL
    layer = SimpleNamespace(swiglu_limit=7.0, swiglu_alpha=2.0, activation_situ_beta=3.0)
    quantised = SimpleNamespace(gemm1_clamp_limit=None, gemm1_alpha=1.5)
    config = newest_activation.ApplyMoEActivationConfig
    assert config.from_configs(layer, quantised) == config(7.0, 1.5, 0.0, 3.0, None)
    defaults = inspect.signature(quant_configs.mxfp4_mxfp8_moe_quant_config).parameters
    assert defaults["is_scale_swizzled"].default is True and defaults["mx_alignment"].default == 0
