"""Adapters of a router and a shared expert, against float64 layers with merged weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import moe_torch
from moe_core.layers.lora import TARGETS
from moe_core.ops.lora.adapters import Dropout
from moe_core.ops.lora.reference import kept
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import BEYOND_EXPERTS, ExpertWeights, LoRAFactors, RouterWeights, SharedExpert
from moe_torch import InvalidInput, LoRA, MoELayerSpec, SharedExpertsSpec, TopK, Unsupported, trace
from moe_torch.layers.lora.slots import LoRAParameters

D, F, S, E, K = 32, 16, 24, 5, 2
PAIRS = {"1": ("gate_up",), "2": ("down",), "_router": ("weight",), "1_shared": ("gate_up",), "2_shared": ("down",)}


@pytest.fixture(autouse=True)
def engine(request: pytest.FixtureRequest) -> Iterator[None]:
    """The reference, which has float64. Masks also in Triton's interpreter."""
    if "masks" in request.node.name:
        yield
        return
    with moe_torch.cpu_engine("reference"):
        yield


def problem(tokens: int, slots: int, rank: int, seed: int, **options: Any) -> dict[str, Any]:
    """Arguments of the op. Behind a rank lies anything but zeros."""
    drawn = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=drawn) / shape[-2] ** 0.5

    sides = {"1": (E, D, 2 * F), "2": (E, F, D), "_router": (1, D, E), "1_shared": (1, D, 2 * S), "2_shared": (1, S, D)}
    factors = {}
    for name, (count, inside, outside) in sides.items():
        factors[f"a{name}"], factors[f"b{name}"] = draw(slots, count, inside, 16), draw(slots, count, 16, outside)
        factors[f"a{name}"][..., rank:], factors[f"b{name}"][:, :, rank:] = float("inf"), float("nan")
    scale = (torch.rand(slots, generator=drawn) + 0.5)[:, None].expand(slots, E).contiguous()
    ranks = torch.full((slots, E), rank, dtype=torch.int32)
    ids = torch.randint(-1, slots + 1, (tokens,), generator=drawn, dtype=torch.int32)
    return {
        "x": torch.randn(tokens, D, generator=drawn), "experts": ExpertWeights(draw(E, D, 2 * F), draw(E, F, D)),
        "routing": RouterWeights(draw(D, E), torch.randn(E, generator=drawn)),
        "spec": MoESpec(Activation("silu"), RouterSpec(K), **options),
        "shared": SharedExpert(draw(D, 2 * S), draw(S, D), gate=draw(D, 1)),
        "lora": LoRAFactors(**factors, scale=scale, ranks=ranks), "adapter_ids": ids,
    }  # fmt: skip


def merged(given: dict[str, Any], slot: int) -> dict[str, Any]:
    """The arguments of float64 for tokens of one adapter."""
    lora, parts = given["lora"], {"experts": given["experts"], "shared": given["shared"], "routing": given["routing"]}
    parts = {
        name: dataclasses.replace(part, **{f.name: None if (one := getattr(part, f.name)) is None else one.double()
                                           for f in dataclasses.fields(part)})
        for name, part in parts.items()
    }  # fmt: skip
    for name, (field,) in PAIRS.items():
        a, b = getattr(lora, f"a{name}"), getattr(lora, f"b{name}")
        if slot in range(len(lora.scale)) and a is not None:
            part = "routing" if name == "_router" else "shared" if "shared" in name else "experts"
            rank, weight = int(lora.ranks[slot, 0]), getattr(parts[part], field)
            change = lora.scale[slot, 0].double() * a[slot, ..., :rank].double() @ b[slot, :, :rank].double()
            parts[part] = dataclasses.replace(parts[part], **{field: weight + change.view(-1, *weight.shape)[0]
                                                              if weight.dim() == 2 else weight + change})  # fmt: skip
    return parts | {"spec": given["spec"]}


def leaves_of(given: dict[str, Any]) -> list[Any]:
    factors = [getattr(given["lora"], f"{side}{name}") for name in PAIRS for side in "ab"]
    return [one.requires_grad_() for one in (given["x"], *factors) if one is not None]


def close(one: Any, wanted: Any, label: str) -> None:
    assert (one.double() - wanted.double()).norm() <= 2e-6 * wanted.double().norm() + 1e-6, label


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from([0, 1, 19]), st.sampled_from([1, 3]), st.sampled_from([1, 5, 16]), st.integers(0, 99),
    st.sampled_from([("router",), ("shared_down",), ("router", "shared_gate_up"), tuple(TARGETS)]), st.booleans(),
)  # fmt: skip
def test_the_op_and_its_gradients(tokens: int, slots: int, rank: int, seed: int, targets: Any, masked: bool) -> None:
    given_ = problem(tokens, slots, rank, seed)
    out = {name: None for target, pair in TARGETS.items() if target not in targets for name in pair}
    given_["lora"] = dataclasses.replace(given_["lora"], **out)
    mask = torch.rand(tokens) < 0.7 if masked else None
    leaves, ids = leaves_of(given_), given_["adapter_ids"]
    result = moe_torch.moe(**given_, token_mask=mask)
    assert int(result.invalid_ids) == int(
        ((ids == slots) & (torch.ones(tokens).bool() if mask is None else mask)).sum()
    )
    wanted, logits = torch.zeros(tokens, D, dtype=torch.float64), torch.zeros(tokens, E, dtype=torch.float64)
    for slot in range(-1, slots + 1):
        for visits in (True, False):
            rows = (ids == slot) if mask is None else (ids == slot) & (mask == visits)
            if rows.any() and (visits or mask is not None):
                # A masked token has the shared expert's adapter, as merged weights have it.
                call = merged(given_, slot)
                held = None if visits else torch.zeros(int(rows.sum()), dtype=torch.bool)
                one = moe_torch.moe(given_["x"][rows].double(), **call, token_mask=held)
                wanted, logits = wanted.clone(), logits.clone()
                wanted[rows], logits[rows] = one.output, one.logits
    d_output, d_logits = torch.randn(tokens, D), torch.randn(tokens, E)
    visited = slice(None) if mask is None else mask
    close(result.output, wanted, "output")
    close(result.logits[visited], logits[visited], "logits")
    loss = (result.output * d_output).sum() + (result.logits * d_logits)[visited].sum()
    if not wanted.requires_grad:
        return  # no tokens
    exact = (wanted * d_output).sum() + (logits * d_logits)[visited].sum()
    pairs = zip(*(torch.autograd.grad(one, leaves, allow_unused=True) for one in (loss, exact)), strict=True)
    for number, (one, other) in enumerate(pairs):
        if other is not None:
            used = torch.isfinite(other)
            close(one[used], other[used], f"gradient {number}")


def test_one_adapter_does_not_reach_another_and_none_has_the_bits_of_the_base() -> None:
    given_ = problem(17, 2, 16, 3)
    given_["lora"] = dataclasses.replace(given_["lora"], **dict.fromkeys(BEYOND_EXPERTS[2:]), a1=None, b1=None)
    before = moe_torch.moe(**given_)
    plain = {name: one for name, one in given_.items() if name not in ("lora", "adapter_ids")}
    without = given_["adapter_ids"] != 0
    for name in ("a_router", "b_router", "a2", "b2"):
        getattr(given_["lora"], name)[0] = float("nan")
    after, base = moe_torch.moe(**given_), moe_torch.moe(**plain)
    torch.testing.assert_close(after.output[without], before.output[without])
    assert torch.equal(after.logits[without], before.logits[without]) and without.any()
    assert torch.isnan(after.logits[~without]).all()
    none = (given_["adapter_ids"] < 0) | (given_["adapter_ids"] == 2)
    torch.testing.assert_close(after.output[none], base.output[none])
    assert torch.equal(after.logits[none], base.logits[none])


def test_dropout_masks() -> None:
    given_ = problem(23, 2, 16, 4, lora_dropout=0.25)
    seed = torch.tensor([2**31 - 2], dtype=torch.int32)
    given_["lora"] = dataclasses.replace(given_["lora"], seed=seed)
    lora, ids, x = given_["lora"], given_["adapter_ids"], given_["x"]
    found, one = moe_torch.moe(**given_), Dropout(0.25, "token")
    mask = torch.from_numpy(kept(np.array([2**31 - 1], np.int32), np.arange(23), D, one))
    assert 0.15 < (~mask).float().mean() < 0.35
    logits = x.double() @ given_["routing"].weight.double() + given_["routing"].bias
    for slot in (0, 1):
        low = (x * mask).double()[ids == slot] @ lora.a_router[slot, 0].double() / 0.75
        logits[ids == slot] += lora.scale[slot, 0] * low @ lora.b_router[slot, 0].double()
    close(found.logits, logits, "logits")
    assert torch.equal(moe_torch.moe(**given_).output, found.output)
    # Of the shared expert alone, the masks of both products.
    given_["experts"].down.zero_()
    given_["lora"] = dataclasses.replace(lora, a1=None, b1=None, a2=None, b2=None)
    shared, hidden, products = given_["shared"], x.double(), []
    for number, weight in ((1, shared.gate_up), (2, shared.down)):
        masked = np.array([2**31 - 2 + number + 1], np.int64).astype(np.int32)
        mask, product = torch.from_numpy(kept(masked, np.arange(23), hidden.shape[1], one)), hidden @ weight.double()
        a, b = (getattr(lora, f"{side}{number}_shared").double() for side in "ab")
        for slot in (0, 1):
            low = (hidden * mask)[ids == slot] @ a[slot, 0] / 0.75
            product[ids == slot] += lora.scale[slot, 0] * low @ b[slot, 0]
        products.append(product)
        gate, up = product.chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
    close(moe_torch.moe(**given_).output, products[1] * torch.sigmoid(x.double() @ shared.gate.double()), "output")
    given_["lora"] = lora
    other = dataclasses.replace(lora, seed=seed - 1)
    assert not torch.equal(moe_torch.moe(**given_ | {"lora": other}).logits, found.logits)


@pytest.mark.parametrize("scheme", [None, "fp8_block"])
def test_a_layer(scheme: str | None) -> None:
    """Also with quantised activations, whose experts take none, with given ids, in programs and under a trace."""
    torch.manual_seed(0)
    experts = moe_torch.ExpertsSpec(scheme=None if scheme is None else moe_torch.scheme_named(scheme))
    options = {"router_bias": True, "logits_dtype": "bfloat16", "shared_experts": SharedExpertsSpec(128, gate=True)}
    layer: Any = moe_torch.MoE.from_spec(MoELayerSpec(128, 128, 4, 2, experts=experts, **options))
    x, ids = torch.randn(3, 5, 128), torch.arange(15, dtype=torch.int32).view(3, 5) % 3 - 1
    base = layer.eval()(x)
    lora = layer.add_lora(LoRA(4, alpha=8, slots=2, dropout=0.5, targets=("router", "shared_down"))).eval()
    assert {name for name, one in layer.named_parameters() if one.requires_grad} == {
        f"lora.{name}" for name in (*TARGETS["router"], *TARGETS["shared_down"])
    }
    lora.reset(0)
    lora.reset(1)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, adapter_ids=ids), base)
        for slot in (0, 1):
            lora.b_router.data[slot, :, :4].normal_()
            lora.b2_shared.data[slot, :, :4].normal_()
        y, aux = layer(x, adapter_ids=ids, return_aux=True)
        assert torch.equal(aux.logits, aux.logits.bfloat16().float()), "rounded once, as the base"
        torch.testing.assert_close(y[ids < 0], base[ids < 0])
        assert (y != base).any(-1)[ids >= 0].all()
        torch.testing.assert_close(layer(x, adapter_ids=ids, expert_ids=aux.ids.view(3, 5, 2)), y)
        with trace.capture() as recording:
            assert torch.equal(layer(x, adapter_ids=ids), y)
        assert len(recording.layers) == 1
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x, adapter_ids=ids), y)
    if scheme is None:
        layer(x, adapter_ids=ids).sum().backward()
        assert lora.b_router.grad.any() and lora.b2_shared.grad.any() and layer.router.weight.grad is None
    for part in (layer.router, layer.shared_experts):  # alone, they know no adapter of a token
        with pytest.raises(Unsupported, match="Parameters must be called by its layer"):
            part(x[0])
    handle = layer.router.register_forward_hook(lambda *given: None)
    with pytest.raises(Unsupported, match=r"layer\.router .* must have no hooks"):
        layer(x, adapter_ids=ids)
    handle.remove()
    layer.lora = None
    torch.testing.assert_close(layer(x), base)
    assert layer.router(x[0]).isfinite().all()


def test_dropout_in_evaluation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LoRAParameters.bundle
    monkeypatch.setattr(LoRAParameters, "bundle", lambda self: setattr(self, "training", True) or plain(self))
    with pytest.raises(AssertionError):
        test_a_layer(None)


def test_refusals() -> None:
    given_, logits = problem(3, 1, 4, 0), torch.randn(3, E)
    change: Any
    routed = TopK(torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1))
    lora, plain = given_["lora"], dataclasses.replace(given_["spec"], router=None)
    alone = dataclasses.replace(lora, a1=None, b1=None, a2=None, b2=None)
    for change, kind, message in (
        ({"routing": moe_torch.RouterLogits(logits)}, Unsupported, "routing must be RouterWeights with lora.a_router"),
        ({"routing": routed, "spec": plain}, Unsupported, "routing must be RouterWeights with lora.a_router"),
        ({"shared": None}, InvalidInput, "shared must be a SharedExpert"),
        ({"lora": dataclasses.replace(lora, b_router=None)}, InvalidInput, "lora.a_router and lora.b_router must both"),
        ({"lora": dataclasses.replace(lora, b_router=lora.b_router[..., 1:])}, InvalidInput, "b_router must be"),
        ({"lora": alone, "checked": True}, Unsupported, "checked must be False"),
        ({"adapter_ids": None}, InvalidInput, "adapter_ids must be an array"),
        ({"spec": dataclasses.replace(given_["spec"], main_grad=True)}, Unsupported, "main_grad must be False"),
    ):
        with pytest.raises(kind, match=message):
            moe_torch.moe(**given_ | change)
    with pytest.raises(Unsupported, match=r"lora\.a_router must be None here"):
        moe_torch.explain_moe(**given_)


def test_float64() -> None:
    spec = MoELayerSpec(8, 4, 3, 2, shared_experts=SharedExpertsSpec(4, gate=True))
    layer, x = moe_torch.MoE.from_spec(spec, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    names = [f"lora.{name}" for name in layer.add_lora(LoRA(2, targets=tuple(TARGETS))).present()]
    factors = [torch.randn_like(layer.get_parameter(name), requires_grad=True) for name in names]

    def call(*factors: Any) -> Any:
        return torch.func.functional_call(layer, dict(zip(names, factors, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, factors, fast_mode=True)
