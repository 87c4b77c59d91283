"""Adapters in torch: the op's gradients, programs, and the slots of a layer."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_core.checkpoint import ExpertAdapter, LoRAPair
from moe_core.layers.around import OutputSpec
from moe_core.specs import Activation, MoESpec
from moe_core.specs.norm import NormSpec
from moe_core.specs.operands import ExpertWeights, LoRAFactors, TopK, map_arrays
from moe_torch import ExpertsSpec, InvalidInput, LoRA, MoELayerSpec, Unsupported, trace
from moe_torch.layers.lora.stages import LowRank, run_stages
from tests.support.training.lora import PAIRS, Problem, draw, oracle
from tests.support.training.lora_stages import STAGES

#: Kernels with adapters run in tests/ops/lora and in tests/layers/test_lora_routes.py.
pytestmark = pytest.mark.usefixtures("reference_engine_of_torch")
OAI = Activation("swiglu_oai", gate_layout="interleaved")
GRADIENTS = ("d_x", "d_routing.weights", *(f"d_lora.{name}" for name in PAIRS))


def tensors(bundle: Any) -> Any:
    return map_arrays(bundle, lambda array: torch.from_numpy(np.ascontiguousarray(array)))


def of_torch(problem: Problem) -> tuple[dict[str, Any], list[Any]]:
    """Arguments of the op, and those that get gradients."""
    x, routing, lora = torch.from_numpy(problem.x).requires_grad_(), tensors(problem.routing), tensors(problem.lora)
    leaves = [x, routing.weights.requires_grad_(), *[getattr(lora, name).requires_grad_() for name in PAIRS]]
    arguments = {"x": x, "experts": tensors(problem.experts), "routing": routing, "spec": problem.spec, "lora": lora}
    return arguments | {"adapter_ids": torch.from_numpy(problem.adapter_ids)}, leaves


@pytest.mark.parametrize("scheme", [None, "mxfp4_w4a16"])
def test_the_op_and_its_gradients(scheme: str | None) -> None:
    problem = draw(MoESpec(OAI, weight_layout="out_in"), ranks=(3, 0, 16), sizes=(64, 64, 3, 2), scheme=scheme)
    wanted, (arguments, leaves) = oracle(problem), of_torch(problem)
    y = moe_torch.moe(**arguments).output
    gradients = torch.autograd.grad(y, leaves, torch.from_numpy(problem.d_output))
    for name, one in zip(("output", *GRADIENTS), (y.detach(), *gradients), strict=True):
        assert np.linalg.norm(one.numpy() - wanted[name]) < 5e-6 * np.linalg.norm(wanted[name]), name
    with torch.no_grad():
        assert torch.equal(moe_torch.moe(**arguments).output, y)
    compiled = torch.compile(lambda **named: moe_torch.moe(**named).output, fullgraph=True, backend="aot_eager")
    again = compiled(**arguments)
    others = torch.autograd.grad(again, leaves, torch.from_numpy(problem.d_output))
    assert torch.equal(again, y) and all(torch.equal(*pair) for pair in zip(gradients, others, strict=True))
    explained = moe_torch.explain_moe(**arguments, training=True)
    assert "then ranks of each row's adapter" in explained


def test_a_frozen_base_gets_no_gradient() -> None:
    arguments, _ = of_torch(draw(MoESpec(OAI)))
    experts = arguments["experts"]
    moe_torch.moe(**arguments).output.sum().backward()
    assert arguments["lora"].a1.grad is not None and experts.gate_up.grad is None
    experts.gate_up.requires_grad_()
    moe_torch.moe(**arguments).output.sum().backward()
    assert experts.gate_up.grad.abs().sum() > 0


def test_bad_calls() -> None:
    arguments, _ = of_torch(draw(MoESpec(OAI)))
    with pytest.raises(InvalidInput, match="lora must be"):
        moe_torch.moe(**arguments | {"lora": None})
    with pytest.raises(InvalidInput, match="adapter_ids"):
        moe_torch.moe(**arguments | {"adapter_ids": arguments["adapter_ids"].long()})
    arguments["adapter_ids"][0] = 9
    with pytest.raises(InvalidInput, match="adapter"):
        moe_torch.moe(**arguments, checked=True)


def layer_of(scheme: str | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    experts = ExpertsSpec(bias=True, scheme=None if scheme is None else moe_torch.scheme_named(scheme))
    layer = moe_torch.MoE.from_spec(MoELayerSpec(64, 64, 4, 2, experts=experts, **options), dtype=dtype)
    if scheme is not None:
        for matrix in (layer.experts.gate_up, layer.experts.down):
            matrix.values.random_(0, 256)
            matrix.scales.fill_(120)
    return layer


def adapter(rank: int, seed: int, *, targets: tuple[str, ...] = ("gate_up", "down")) -> LoRAFactors:
    torch.manual_seed(seed)
    shapes = {"a1": (64, rank), "b1": (rank, 128), "a2": (64, rank), "b2": (rank, 64)}
    names = [name for name in PAIRS if (name[1] == "1") == ("gate_up" in targets) or len(targets) == 2]
    return LoRAFactors(**{name: torch.randn(4, *shapes[name]) / 8 for name in names})


@pytest.mark.parametrize("scheme", [None, "mxfp4_w4a16"])
def test_slots(scheme: str | None) -> None:
    layer, x = layer_of(scheme).eval(), torch.randn(3, 5, 64)
    base = layer(x)
    lora = layer.add_lora(LoRA(8, alpha=16, slots=3, max_rank=20))
    ids = torch.randint(-1, 3, (3, 5), dtype=torch.int32)
    assert torch.equal(layer(x, adapter_ids=ids), base), "empty slots add nothing"
    first, second = adapter(20, 1), adapter(5, 2)
    lora.load(0, first)
    lora.load(2, second)
    y, aux = layer(x, adapter_ids=ids, return_aux=True)
    assert int(aux.invalid_ids) == int((ids == 1).sum())
    changed = (y != base).any(-1)
    assert torch.equal(changed, (ids == 0) | (ids == 2))
    for slot, one in ((0, first), (2, second)):
        alone = layer(x, adapter_ids=torch.full_like(ids, slot))
        assert torch.allclose(alone[ids == slot], y[ids == slot], atol=1e-5, rtol=1e-5)
        exported = lora.export(slot)
        assert all(torch.equal(getattr(exported, name), getattr(one, name)) for name in PAIRS)
        assert torch.equal(exported.scale, torch.full((4,), 16 / one.a1.shape[-1]))
    lora.load(0, second)
    lora.evict(2)
    moved = layer(x, adapter_ids=ids)
    assert torch.equal(moved[ids != 0], base[ids != 0])
    again = copy.deepcopy(layer)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x, adapter_ids=ids), moved) and "lora.a1" in layer.state_dict()
    assert layer.to(torch.float64).lora.scale.dtype == torch.float32


@pytest.mark.parametrize("gate_layout", ["halves", "interleaved"])
def test_adapters_of_files(gate_layout: str) -> None:
    """As `read_adapter` gives them: with another order of gate and up, and gate and up apart (a wider rank)."""
    activation = OAI if gate_layout == "interleaved" else Activation("silu")
    experts = ExpertsSpec(activation, gate_layout=gate_layout)
    layer: Any = moe_torch.MoE.from_spec(MoELayerSpec(64, 64, 4, 2, experts=experts), dtype=torch.bfloat16)
    random, ranks, scale = np.random.default_rng(0), np.full(4, 6, np.int32), np.full(4, 0.5, np.float32)
    wide = ml_dtypes.bfloat16
    drawn = [random.standard_normal((4, *shape)).astype(wide) for shape in ((64, 6), (6, 128), (64, 3), (3, 64))]
    first, second = LoRAPair(*drawn[:2], scale, ranks, True), LoRAPair(*drawn[2:], scale, ranks // 2)
    router = LoRAPair(drawn[2][:1], drawn[3][:1, :, :4], scale[:1], ranks[:1] // 2)
    lora = layer.add_lora(LoRA(3, max_rank=6))
    lora.load(0, ExpertAdapter(first, second, "halves"))
    assert lora.ranks[0].tolist() == [6] * 4 and lora.scale[0].tolist() == [0.5] * 4
    b1 = lora.b1[0, :, :6].float().detach().numpy()
    gate = b1[..., ::2] if gate_layout == "interleaved" else b1[..., :64]
    np.testing.assert_array_equal(gate, drawn[1][..., :64].astype(np.float32))
    lora.load(0, ExpertAdapter(None, second))
    assert not lora.a1.any() and lora.a2.any()
    with pytest.raises(InvalidInput, match="got a_router, b_router"):
        lora.load(0, ExpertAdapter(None, None, router=router))
    lora = moe_torch.MoE(64, 64, 4, 2).add_lora(LoRA(3, targets=("down", "router")))
    lora.load(0, ExpertAdapter(None, None, router=router))
    assert lora.a_router.any() and not lora.a2.any() and lora.scale[0].tolist() == [0.5] * 4
    lora.load(0, ExpertAdapter(None, second, router=router))
    np.testing.assert_array_equal(lora.export(0).b_router, router.b.astype(np.float32))


def test_training_one_adapter_changes_nothing_else() -> None:
    layer, x = layer_of().train(), torch.randn(30, 64)
    base = layer(x)
    frozen = {name: one.clone() for name, one in layer.state_dict().items()}
    lora = layer.add_lora(LoRA(4, dropout=0.1))
    assert torch.equal(layer.eval()(x), base), "a new adapter adds nothing"
    wanted = torch.randn(30, 64)
    optimizer, losses = torch.optim.Adam(layer.train().parameters(), 0.05), []
    assert {name for name, one in layer.named_parameters() if one.requires_grad} == {f"lora.{name}" for name in PAIRS}
    for _ in range(12):
        loss = (layer(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(frozen[name], one) for name, one in layer.state_dict().items() if name in frozen)
    assert not torch.equal(layer(x), layer(x)), "dropout draws anew"
    assert torch.equal(layer.eval()(x), layer(x)), "no dropout in evaluation"
    assert copy.deepcopy(lora).to("meta").train().bundle().seed.is_meta
    assert all(not one[..., 4:].any() for one in (lora.a1, lora.a2))


def test_many_adapters_train_at_once() -> None:
    layer, x = layer_of(), torch.randn(12, 64)
    lora = layer.add_lora(LoRA(4, slots=2, rslora=True, alpha=3))
    lora.reset(0)
    lora.reset(1, rank=2)
    assert lora.scale[:, 0].tolist() == pytest.approx([3 / 2, 3 / 2**0.5])
    ids = torch.arange(12, dtype=torch.int32) % 3 - 1
    layer(x, adapter_ids=ids).square().sum().backward()
    assert lora.b1.grad is not None
    together = lora.b1.grad.clone()
    for slot in (0, 1):
        lora.b1.grad = None
        layer(x[ids == slot], adapter_ids=ids[ids == slot]).square().sum().backward()
        assert torch.allclose(lora.b1.grad[slot], together[slot], atol=1e-5) and together[slot].any()


def merged(layer: Any, slot: int) -> Any:
    """The layer with a slot's adapter added to its weights."""
    lora, other = layer.lora, copy.deepcopy(layer)
    other.lora = None
    with torch.no_grad():
        for weight, number in ((other.experts.gate_up, 1), (other.experts.down, 2)):
            a, b = (getattr(lora, f"{side}{number}")[slot] for side in "ab")
            weight += (lora.scale[slot, :, None, None] * a @ b).mT
    return other


@pytest.mark.parametrize("name", STAGES)
def test_layers_in_stages(name: str) -> None:
    """Each token as a layer with its adapter merged has it, without one as the layer before, and frozen weights."""
    torch.manual_seed(0)
    shared = moe_torch.SharedExpertsSpec(24)
    layer: Any = moe_torch.MoE.from_spec(MoELayerSpec(64, 48, 4, 2, shared_experts=shared, **STAGES[name]))
    x, mask = torch.randn(33, 64), torch.rand(33) < 0.8
    plain = layer(x, mask)
    lora = layer.add_lora(LoRA(4, alpha=8, slots=3, dropout=0.5))
    for slot in (0, 1):
        lora.reset(slot)
        for one in (lora.b1.data, lora.b2.data):
            one[slot, :, :4] = torch.randn(4, 4, one.shape[-1]) / 8
    ids = torch.arange(33, dtype=torch.int32) % 4 - 1
    assert not torch.equal(layer(x, mask, adapter_ids=ids), layer(x, mask, adapter_ids=ids)), "dropout draws anew"
    lora.options = dataclasses.replace(lora.options, dropout=0.0)
    y, aux = layer(x, mask, adapter_ids=ids, return_aux=True)
    assert int(aux.invalid_ids) == int((mask & (ids == 2)).sum()), "an empty slot counts, but not for masked tokens"
    for slot in (-1, 0, 1, 2):
        wanted = merged(layer, slot)(x, mask) if slot in (0, 1) else plain
        of_slot = (ids == slot) & mask
        torch.testing.assert_close(y[of_slot], wanted[of_slot], rtol=1e-4, atol=1e-4)
    assert torch.equal(y[(ids < 0) | (ids == 2)], plain[(ids < 0) | (ids == 2)])
    y.square().sum().backward()
    assert lora.a1.grad[:2].abs().sum() > 0 and not lora.b2.grad[2].any() and layer.experts.down.grad is None
    assert "d_lora.b2" in str(layer.explain(33, training=True))


def test_given_experts_and_hooks_of_the_router() -> None:
    layer, x = layer_of(), torch.randn(9, 64)
    lora = layer.add_lora(LoRA(4))
    lora.b1.data.normal_()
    y, aux = layer(x, return_aux=True)
    assert torch.equal(layer(x, expert_ids=aux.ids), y) and torch.equal(layer(x, gate_inputs=x), y)
    seen: list[Any] = []
    layer.router.register_forward_hook(lambda *given: seen.append(given))
    assert torch.equal(layer(x), y) and len(seen) == 1
    layer.experts.register_forward_hook(lambda *given: None)
    with pytest.raises(Unsupported, match="must have no hooks and wrappers"):
        layer(x)


@pytest.mark.parametrize("shared", [False, True])
def test_dtypes_autocast_and_programs(shared: bool) -> None:
    layer = layer_of(dtype=torch.bfloat16).eval()
    lora = layer.add_lora(LoRA(4, shared=shared, dtype=torch.float32))
    with torch.no_grad():
        lora.b1.normal_()
        lora.b2.normal_()
    x = torch.randn(7, 64, dtype=torch.bfloat16)
    y = layer(x)
    assert y.dtype == torch.bfloat16 and lora.a1.shape[1] == (1 if shared else 4)
    y.sum().backward()
    assert lora.a1.grad is not None and lora.a1.grad.dtype == torch.float32
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), y)
    wide = layer_of()
    wide.add_lora(LoRA(4, shared=shared))
    with torch.autocast("cpu", torch.bfloat16):
        assert wide(x.float()).dtype == torch.bfloat16


@pytest.mark.parametrize("training", [False, True])
def test_plans_of_a_layer_have_its_adapters(training: bool) -> None:
    layer = layer_of()
    assert "lora" not in str(layer.explain(9, training=training))
    layer.add_lora(LoRA(4, dropout=0.5, slots=2))
    state, text = torch.get_rng_state(), str(layer.explain(9, training=training))
    assert all(name in text for name in ("lora.a1", "lora.b2", "adapter_ids")) and ("d_lora.a2" in text) == training
    assert torch.equal(torch.get_rng_state(), state)


REFUSED = {
    "norms": ({"output": OutputSpec(NormSpec(), "experts")}, None, Unsupported, "norm of each expert's result"),
    "quantised rows": ({}, "fp8_block", Unsupported, "quantised activations"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_take_no_adapters(name: str) -> None:
    options, scheme, error, message = REFUSED[name]
    experts = ExpertsSpec(scheme=None if scheme is None else moe_torch.scheme_named(scheme))
    layer = moe_torch.MoE.from_spec(MoELayerSpec(128, 128, 4, 2, experts=experts, **options))
    with pytest.raises(error, match=message):
        layer.add_lora(LoRA(4))


def test_bad_slots_and_options() -> None:
    layer, x = layer_of(), torch.randn(3, 64)
    ids = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(InvalidInput, match="call add_lora first"):
        layer(x, adapter_ids=ids)
    lora, down = layer.add_lora(LoRA(np.int64(4), slots=2, targets=("down",))), adapter(4, 0, targets=("down",))
    for call, message in (
        (lambda: layer(x), "adapter_ids must be given"),
        (lambda: layer(x, adapter_ids=ids[:2]), "adapter_ids must be int32"),
        (lambda: layer.add_lora(LoRA(4)), "no adapters yet"),
        (lambda: lora.load(2, adapter(4, 0)), "slot must be"),
        (lambda: lora.load(0, adapter(4, 0)), "factors must be pairs of a2, b2"),
        (lambda: lora.load(0, adapter(17, 0, targets=("down",))), "larger max_rank"),
        (lambda: lora.load(0, dataclasses.replace(adapter(4, 0, targets=("down",)), b2=torch.zeros(4, 4, 63))), "b2"),
        (lambda: lora.export(1), "empty slot"),
        (lambda: lora.reset(0, rank=5), "rank must be below 5"),
        (lambda: LoRA(4, targets=("gate",)), "targets"),
        (lambda: LoRA(4, max_rank=2), "max_rank"),
        (lambda: LoRA(4, dropout=1.0), "dropout"),
        (lambda: LoRA(4, dropout="half"), "dropout must be finite"),
        (lambda: LoRA(4, alpha=float("nan")), "alpha must be finite, got nan"),
        (lambda: LoRA(4, alpha="16"), "alpha must be finite, got '16'"),
        (lambda: LoRA(4, dtype=torch.int8), "dtype must be one of bfloat16, float16, float32, got 'int8'"),
        (lambda: lora.reset(0, rank=2.5), "rank must be an integer"),
        (lambda: lora.load(0, adapter(8, 0, targets=("down",))), "at most"),
        (lambda: lora.load(0, dataclasses.replace(down, scale=torch.ones(3))), r"factors.scale must be \[4\], one for"),
        (
            lambda: lora.load(0, dataclasses.replace(down, ranks=torch.ones(1))),
            r"factors.ranks must be \[4\], .* \[1\]",
        ),
    ):
        with pytest.raises(InvalidInput, match=message):
            call()
    with pytest.raises(InvalidInput, match="targets must be of a layer with shared experts"):
        layer_of().add_lora(LoRA(4, targets=("shared_down",)))
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\).*"lora\.a2", "lora\.b2"'):
        layer_of().load_state_dict(layer.state_dict())


def test_traces_and_float64() -> None:
    layer, x = layer_of(), torch.randn(12, 64)
    layer.add_lora(LoRA(4)).b1.data.normal_()
    with trace.capture() as recording:
        y, aux = layer(x, return_aux=True)
    (routing,) = recording.layers
    assert torch.equal(routing.ids, aux.ids) and torch.equal(routing.weights, aux.weights)
    assert torch.equal(layer(x.view(3, 4, 64)), y.view(3, 4, 64))
    turned = trace.LayerRouting(routing.ids.roll(1, 0), routing.weights.roll(1, 0), 4)
    with trace.replay([turned]):
        moved, aux = layer(x, return_aux=True)
    assert torch.equal(aux.ids, turned.ids) and not torch.equal(moved, y)
    with moe_torch.cpu_engine("reference"):
        wide = layer.double()(x.double())
    assert wide.dtype == torch.float64 and torch.allclose(wide.float(), y, atol=1e-5, rtol=1e-4)


def test_low_rank_factors_of_experts_in_float64() -> None:
    """As stage ops, with the numbers of the one operator."""
    made = torch.Generator().manual_seed(0)
    shapes = (5, 16), (3, 16, 24), (3, 12, 16), (5, 2), (3, 16, 16), (3, 16, 24), (3, 12, 16), (3, 16, 16)
    x, gate_up, down, scores, *factors = (torch.randn(shape, generator=made) for shape in shapes)
    low_rank, ids, spec = LowRank(*factors, scale=0.5), torch.arange(10, dtype=torch.int32).view(5, 2) % 3, MoESpec(OAI)
    with moe_torch.cpu_engine("reference"):
        wanted, wide = (
            run_stages(
                x.to(dtype), ExpertWeights(gate_up.to(dtype), down.to(dtype)), TopK(ids, scores.to(dtype)), spec,
                low_rank=low_rank,
            )
            for dtype in (torch.float32, torch.float64)
        )  # fmt: skip
    torch.testing.assert_close(wide.float(), wanted, rtol=1e-4, atol=1e-4)
