"""The torch layer as a module: state_dict, construction, dtypes, weights in and out, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.distributed.tensor import Replicate, Shard

from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import (
    HUGGING_FACE,
    MAXTEXT,
    ExpertsSpec,
    LayerWeights,
    LoRA,
    SharedExpertsSpec,
    Storage,
    convert_weights,
)
from moe_core.parity.tolerance import assert_close
from moe_core.specs import Activation, RouterSpec
from moe_core.specs.operands import ExpertWeights
from moe_torch import MoE
from moe_torch.layers.shards import on_own_experts
from tests.support.layers import EVERYTHING, D, E, F, K, draw_weights, draw_x, tolerances
from tests.support.torch import on_engines, require_equal, running_on, to_numpy, to_torch
from tests.support.torch_layers import make, stages


def test_state_dict_names_and_round_trip() -> None:
    weights = draw_weights(EVERYTHING)
    layer = make(weights)
    state = layer.state_dict()
    assert list(state) == list(weights.named())
    assert [name for name, _ in layer.named_parameters()] == [name for name in state if "correction" not in name]
    fresh = MoE.from_spec(EVERYTHING)
    assert fresh.load_state_dict(state) == torch.nn.modules.module._IncompatibleKeys([], [])
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = MoE.from_spec(EVERYTHING, device="meta")
    loaded.load_state_dict(torch.load(file), assign=True)
    x = to_torch(draw_x((5,)))
    with running_on("reference"), torch.no_grad():
        for other in (fresh, loaded, copy.deepcopy(layer)):
            require_equal(other(x), layer(x), "round trip")


def test_kernels_are_made_for_the_device_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("moe_torch.layers.plans.warmup", lambda plans, devices: seen.append(devices))
    MoE.from_spec(EVERYTHING).warmup([3])
    assert seen == [(0,)], "a device without a number is the first"


def test_meta_construction() -> None:
    layer = MoE.from_spec(EVERYTHING, device="meta", dtype=torch.bfloat16)
    assert all(tensor.is_meta for tensor in layer.state_dict().values())
    assert {tensor.dtype for tensor in layer.parameters()} == {torch.bfloat16}
    weights = draw_weights(EVERYTHING, dtype="bfloat16")
    with pytest.raises(InvalidInput, match=r"router.weight must have memory, got a meta tensor; call to_empty"):
        layer.load_weights(weights)
    with pytest.raises(InvalidInput, match="must have memory"):
        layer.export_weights()
    x = torch.zeros(3, D, dtype=torch.bfloat16)
    for forward in (lambda: layer(x), lambda: layer.explain(3), lambda: layer.warmup([3])):
        with pytest.raises(
            InvalidInput, match=r"call to_empty\(device=\.\.\.\) on the module that holds it, then load"
        ):
            forward()
    layer.to_empty(device="cpu").load_weights(weights)
    assert layer(x).shape == x.shape
    assert layer.get_buffer("router.correction_bias").dtype == torch.float32
    for name, tensor in layer.state_dict().items():
        require_equal(tensor, to_torch(weights.named()[name]), name)
    with torch.device("meta"):
        layer = MoE(D, F, E, K)
    assert layer.experts.down.is_meta
    assert all(tensor.is_meta for tensor in layer.add_lora(LoRA(2)).state_dict().values())
    layer.to_empty(device="cpu")
    for tensor in layer.state_dict().values():
        tensor.view(torch.uint8).fill_(255)
    layer.reset_parameters()
    wanted = MoE(D, F, E, K).add_lora(LoRA(2))
    for name, tensor in layer.lora.state_dict().items():
        assert (name[0] == "a" and tensor.std() > 0) or torch.equal(tensor, wanted.state_dict()[name]), name


def test_initial_values() -> None:
    torch.manual_seed(0)
    layer = MoE.from_spec(dataclasses.replace(EVERYTHING, d_model=64, d_ff=128))
    for name, tensor in layer.state_dict().items():
        if name.endswith("bias"):
            assert not tensor.any(), name
        else:
            fan_in = {"experts.down": 128, "shared_experts.down": 16}.get(name, 64)
            assert abs(tensor.std() * fan_in**0.5 - 1) < 0.2, name
    torch.manual_seed(0)
    layer.reset_parameters()
    with running_on("reference"), torch.no_grad():
        assert layer(torch.randn(3, 64)).isfinite().all()


def test_casting_the_layer_keeps_the_correction_bias() -> None:
    weights = draw_weights(EVERYTHING)
    for cast in (lambda layer: layer.to(torch.bfloat16), lambda layer: layer.bfloat16(), lambda layer: layer.half()):
        layer = cast(make(weights))
        assert layer.experts.down.dtype != torch.float32
        require_equal(layer.router.correction_bias, to_torch(weights.router.correction_bias), "fp32 bits")
    with running_on("reference"):
        x = to_torch(draw_x((3,))).to(torch.float16)
        assert layer(x).dtype == torch.float16


@pytest.mark.parametrize("storage", [HUGGING_FACE, MAXTEXT, Storage("in_out", "interleaved", "in_out")], ids=str)
def test_weights_in_and_out(storage: Storage) -> None:
    weights = draw_weights(EVERYTHING, dtype="bfloat16", storage=storage)
    layer = MoE.from_spec(EVERYTHING, dtype=torch.bfloat16)
    layer.load_weights(weights)
    back = convert_weights(layer.export_weights(), storage)
    assert back.spec == weights.spec
    for name, array in weights.named().items():
        assert array.tobytes() == back.named()[name].tobytes(), name
        array.flags.writeable = False
    layer.load_weights(weights)
    as_stored = MoE.from_weights(weights)
    assert as_stored.spec.experts.gate_layout == storage.gate_layout
    x = to_torch(draw_x((4,), dtype="bfloat16"))
    with running_on("reference"), torch.no_grad():
        one, other = to_numpy(as_stored(x)), to_numpy(layer(x))
    assert_close(one, other, tolerances(EVERYTHING, "bfloat16")["output"], "stored otherwise")


def test_weights_are_taken_over_where_they_can_be() -> None:
    weights = draw_weights(EVERYTHING)
    down, router = weights.experts.down, weights.router.weight
    for array in weights.named().values():
        array.setflags(write=True)
    layer = MoE.from_weights(weights, copy=False)
    assert np.shares_memory(to_numpy(layer.experts.down), down) and layer.experts.down.requires_grad
    assert not np.shares_memory(to_numpy(MoE.from_weights(weights).experts.down), down)
    down.setflags(write=False)
    shifted = np.empty(router.nbytes + 4, np.uint8)[4:].view(router.dtype).reshape(router.shape)
    shifted[...] = router
    moved = dataclasses.replace(weights, router=dataclasses.replace(weights.router, weight=shifted))
    layer = MoE.from_weights(moved, copy=False)
    assert not np.shares_memory(to_numpy(layer.experts.down), down), "a read-only array"
    assert not np.shares_memory(to_numpy(layer.router.weight), shifted), "an array at an address kernels do not take"


def test_loading_refuses_other_layers_and_rounding() -> None:
    layer = MoE.from_spec(EVERYTHING)
    cases = {
        "d_ff is 32, got 16": dataclasses.replace(EVERYTHING, d_ff=16),
        "router is RouterSpec": dataclasses.replace(EVERYTHING, router=RouterSpec(renormalize=True)),
        "shared_experts is SharedExpertsSpec": dataclasses.replace(EVERYTHING, shared_experts=None),
        "experts is ExpertsSpec": dataclasses.replace(EVERYTHING, experts=ExpertsSpec(Activation("silu"), bias=True)),
        "correction_bias is True, got False": dataclasses.replace(EVERYTHING, correction_bias=False),
    }
    for message, other in cases.items():
        with pytest.raises(InvalidInput, match=f"weights must be of this layer, whose {message}"):
            layer.load_weights(draw_weights(other))
    # A layer that limits capacity or rounds logits has the same weights.
    changed = dataclasses.replace(EVERYTHING, capacity_factor=1.0, logits_dtype="bfloat16", allow_tf32=True)
    MoE.from_spec(changed).load_weights(draw_weights(EVERYTHING))
    layer.load_weights(draw_weights(EVERYTHING, dtype="bfloat16"))
    require_equal(
        layer.experts.down.detach(),
        to_torch(draw_weights(EVERYTHING, dtype="bfloat16").experts.down).float(),
        "widened",
    )
    with pytest.raises(InvalidInput, match=r"router.weight must be bfloat16, got float32, which would be rounded"):
        MoE.from_spec(EVERYTHING, dtype=torch.bfloat16).load_weights(draw_weights(EVERYTHING))
    with pytest.raises(InvalidInput, match="weights must be a LayerWeights, got dict"):
        layer.load_weights({})  # type: ignore[arg-type]


def test_dtypes_may_differ_where_the_ops_allow_it() -> None:
    """A float32 router and float32 biases beside bfloat16 experts, as checkpoints hold them."""
    weights = draw_weights(EVERYTHING, dtype="bfloat16")
    widen = {
        name: array.astype(np.float32) for name, array in weights.named().items() if "bias" in name or "router" in name
    }
    mixed = LayerWeights.from_named(weights.named() | widen, EVERYTHING, HUGGING_FACE)
    layer = make(mixed)
    assert (layer.router.weight.dtype, layer.experts.down.dtype) == (torch.float32, torch.bfloat16)
    x = draw_x((6,), dtype="bfloat16")
    with running_on("reference"):
        np.testing.assert_array_equal(to_numpy(layer(to_torch(x))), stages(mixed, x)["output"])


def test_reparametrised_weights_are_used() -> None:
    """A parametrisation (as LoRA libraries use) takes a parameter from where modules keep it."""

    class Doubled(torch.nn.Module):
        def forward(self, weight: Any) -> Any:
            return 2 * weight

    weights, x = draw_weights(EVERYTHING), to_torch(draw_x((4,)))
    layer, plain = make(weights), make(weights)
    torch.nn.utils.parametrize.register_parametrization(layer.experts, "down", Doubled())
    plain.experts.down.mul_(2)
    with running_on("reference"):
        require_equal(layer(x), plain(x), "doubled")


WRONG_CALLS: dict[str, tuple[Any, str]] = {
    "width": (lambda layer, x: layer(x[..., :-1]), r"x must be \[..., d_model\] with d_model = 48, got \(2, 3, 47\)"),
    "scalar": (lambda layer, x: layer(torch.tensor(1.0)), r"x must be \[..., d_model\] .* got \(\)"),
    "array": (lambda layer, x: layer(x.numpy()), "x must be a torch.Tensor, got ndarray"),
    "dtype": (lambda layer, x: layer(x.half()),
        "x must be torch.float32 like the layer's parameters, got torch.float16"),
    "mask shape": (lambda layer, x: layer(x, torch.ones(6, dtype=torch.bool)),
        r"token_mask must be bool \(2, 3\), one for each token of x, got torch.bool \(6,\)"),
    "mask dtype": (lambda layer, x: layer(x, torch.ones(2, 3)), r"token_mask must be bool \(2, 3\).*got torch.float32"),
    "mask array": (lambda layer, x: layer(x, [True]), "token_mask must be a torch.Tensor, got list"),
    "device": (lambda layer, x: layer(x.to("meta")), "must be on meta like x, got cpu"),
    "explain": (lambda layer, x: layer.explain((2, 3)),
        r"tokens must be a number of tokens or a shape .* got \(2, 3\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls_say_what_is_wrong(name: str) -> None:
    call, message = WRONG_CALLS[name]
    with running_on("reference"), pytest.raises(InvalidInput, match=message):
        call(make(draw_weights(EVERYTHING)), to_torch(draw_x((2, 3))))


def test_wrong_constructions_say_what_is_wrong() -> None:
    with pytest.raises(InvalidInput, match="top_k must be at most num_experts = 8, got 9"):
        MoE(D, F, E, 9)
    with pytest.raises(InvalidInput, match="spec must be a MoELayerSpec, got dict"):
        MoE.from_spec({})  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="weights must be a LayerWeights, got MoE"):
        MoE.from_weights(MoE(D, F, E, K))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dtypes_no_operator_takes_are_refused(device: str) -> None:
    accepted = "dtype must be torch.bfloat16, torch.float16, torch.float32, torch.float64, got torch.complex64"
    for build in (lambda **options: MoE(D, F, E, K, **options), lambda **options: MoE.from_spec(EVERYTHING, **options)):
        with pytest.raises(InvalidInput, match=f"{accepted}; pass dtype=torch.float32"):
            build(device=device, dtype=torch.complex64)
        torch.set_default_dtype(torch.float64)
        try:
            assert build(device=device).experts.down.dtype == torch.float64
            assert build(device=device, dtype=torch.float16).experts.down.dtype == torch.float16
            assert make(draw_weights(EVERYTHING)).experts.down.dtype == torch.float32, "weights state their own"
        finally:
            torch.set_default_dtype(torch.float32)


@on_engines
def test_explain(engine: str) -> None:
    with running_on(engine) as device:
        layer = make(draw_weights(EVERYTHING), device)
        text = layer.explain((2, 5, D))
        assert text == layer.explain(10) and text.startswith("moe on ") and "sums" in text
        assert layer.explain(torch.Size((10, D))) == text
        limited = make(draw_weights(EVERYTHING), device, capacity_factor=1.0).explain(10)
    assert "capacity limit: slots behind the first 4 of an expert get id -1" in limited
    assert "selection on score + bias" in limited
    assert [limited.index(f"{name} on ") for name in ("router", "routing", "layout", "moe")] == sorted(
        limited.index(f"{name} on ") for name in ("router", "routing", "layout", "moe")
    )


def test_repr() -> None:
    layer = MoE(D, F, E, K, experts=ExpertsSpec(gate_layout="separate"), shared_experts=SharedExpertsSpec(16))
    assert "d_model=48, d_ff=32, num_experts=8, top_k=3" in repr(layer)
    assert "storage=out_in/separate, shared_d_ff=16" in repr(layer)
    assert layer.get_parameter("experts.up").shape == (E, F, D) and layer.router.bias is None


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        ((Replicate(),), "experts.down must be sharded by experts alone, got"),
        ((Shard(1),), "experts.down must be sharded by experts alone, got"),
        ((Shard(0), Shard(0)), "experts.down must be sharded by experts alone, got"),
        ((Shard(0), Replicate()), "experts.down must not be split over a tensor axis to be laid out anew"),
        ((Shard(0), Shard(2)), "experts.down must not be split over a tensor axis to be laid out anew"),
    ],
)
def test_only_whole_experts_are_laid_out_anew(placed: tuple[Any, ...], message: str) -> None:
    mesh = SimpleNamespace(size=lambda axis: 2, get_local_rank=lambda axis: 0)

    def array(*placements: Any) -> Any:
        whole = torch.zeros(4, 6, 6)
        return SimpleNamespace(
            placements=placements, device_mesh=mesh, shape=whole.shape, ndim=3, to_local=lambda: whole
        )

    with pytest.raises(Unsupported, match=message):
        on_own_experts(lambda bundle: bundle, ExpertWeights(array(Shard(0)), array(*placed)))
