"""A layer's parts where something around them wants to be called: hooks, adapters, offloading."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch

from moe_core.errors import InvalidInput
from moe_core.layers import SharedExpertsSpec, convert_weights
from moe_core.specs import Activation
from moe_torch import MoE
from moe_torch.layers.parameters import RouterParameters
from moe_torch.trace import capture
from tests.support.layers import EVERYTHING, SPECS, STORAGES, D, E, S, draw_weights, draw_x
from tests.support.torch import on_engines, require_equal, running_on, to_torch

PARTS = ("router", "experts", "shared_experts")
#: Every sum of the stages is the operator's, and a shared expert's output is added to a rounded one.
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def run(layer: MoE, x: torch.Tensor, mask: Any = None) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """y, aux, and the gradients of a loss of both, by name."""
    x = x.detach().requires_grad_()
    y, aux = layer(x, mask, return_aux=True)
    loss = y.square().sum() + aux.load_balance_loss + aux.z_loss
    named = dict(layer.named_parameters()) | {"x": x}
    return y.detach(), aux, dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def require_close(found: Any, wanted: Any, label: str) -> None:
    torch.testing.assert_close(found, wanted, **CLOSE, msg=lambda text: f"{label}: {text}")


@on_engines
@pytest.mark.parametrize("part", PARTS)
def test_hooks_fire(part: str, engine: str) -> None:
    """Each kind of hook sees the part's own call, and the layer computes what it did."""
    with running_on(engine) as device:
        layer = MoE.from_weights(draw_weights(EVERYTHING), device=device)
        x = to_torch(draw_x((2, 5)), device)
        mask = torch.tensor([[True, True, False, True, True]] * 2, device=device)
        y, aux, gradients = run(layer, x, mask)
        module, seen = getattr(layer, part), []
        handles = [
            module.register_forward_pre_hook(lambda _, arguments: seen.append(("before", arguments[0].shape))),
            module.register_forward_hook(lambda _, arguments, result: seen.append(("after", result.shape))),
            module.register_full_backward_hook(lambda _, inputs, outputs: seen.append(("gradient", outputs[0].shape))),
        ]
        hooked, hooked_aux, hooked_gradients = run(layer, x, mask)
        width = E if part == "router" else D
        assert seen == [("before", (10, D)), ("after", (10, width)), ("gradient", (10, width))]
        require_close(hooked, y, "y")
        assert aux.overflow is None and hooked_aux.overflow is None
        for name, wanted in list(aux._asdict().items())[:-1]:
            # Logits of masked tokens may be anything.
            kept = mask.view(-1) if name == "logits" else ...
            require_close(getattr(hooked_aux, name)[kept], wanted[kept], name)
        for name, wanted in gradients.items():
            require_close(hooked_gradients[name], wanted, f"gradient of {name}")
        for handle in handles:
            handle.remove()
        require_equal(run(layer, x, mask)[0], y, "hooks removed")
        assert len(seen) == 3


def test_hooks_change_what_they_return() -> None:
    """What a hook returns counts: logits of a router, rows of the experts, x of the shared experts."""
    layer = MoE.from_weights(draw_weights(EVERYTHING)).requires_grad_(False)
    x = to_torch(draw_x((6,)))
    _, aux = layer(x, return_aux=True)
    chosen = torch.zeros(6, E)
    chosen[:, : EVERYTHING.top_k] = 50.0
    spec = dataclasses.replace(EVERYTHING, correction_bias=False, router=SPECS["mixtral"].router)
    other = MoE.from_weights(draw_weights(spec)).requires_grad_(False)
    with other.router.register_forward_hook(lambda *_: chosen):
        ids = other(x, return_aux=True)[1].ids
    assert set(ids.flatten().tolist()) == set(range(EVERYTHING.top_k)) != set(aux.ids.flatten().tolist())
    with layer.experts.register_forward_hook(lambda *_: torch.zeros(6, D)):
        require_close(layer(x), layer.shared_experts(x), "experts zeroed")  # pyright: ignore[reportOptionalCall]
    with layer.shared_experts.register_forward_pre_hook(lambda *_: (x * 0,)):  # pyright: ignore[reportOptionalMemberAccess]
        require_close(layer(x), layer.experts(x, aux.ids, aux.weights), "shared experts of zeros")


@pytest.mark.parametrize("storage", STORAGES[::3], ids=str)
def test_parts_alone(storage: Any) -> None:
    """The parts' forwards, called by hand, are the layer's."""
    spec = dataclasses.replace(
        EVERYTHING,
        experts=SPECS["qwen2_moe"].experts,
        shared_experts=SharedExpertsSpec(S, gate=True, activation=Activation("gelu")),
    )
    weights = convert_weights(draw_weights(spec), storage)
    layer, x = MoE.from_weights(weights).requires_grad_(False), to_torch(draw_x((6,)))
    y, aux = layer(x, return_aux=True)
    routed = layer.experts(x, aux.ids, aux.weights)
    require_close(routed + layer.shared_experts(x), y, "sum of the parts")  # pyright: ignore[reportOptionalCall]
    assert layer.experts.is_transposed == (storage.weight_layout == "in_out")
    assert isinstance(layer.router, torch.nn.Linear) and layer.router(x).dtype == torch.float32
    assert (layer.router.in_features, layer.router.out_features) == (D, E)


def test_a_router_is_initialised_as_the_layer_initialises_it() -> None:
    """Training frameworks call every module's reset_parameters, the layer's and then its parts'."""
    layer = MoE(256, 16, 64, 2)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # pyright: ignore[reportCallIssue]
    assert abs(float(layer.router.weight.detach().std()) * 16 - 1) < 0.05


def test_a_hook_on_the_router_changes_no_bit() -> None:
    layer, x = MoE.from_weights(draw_weights(EVERYTHING)).requires_grad_(False), to_torch(draw_x((6,)))
    y = layer(x)
    layer.router.register_forward_hook(lambda *_: None)
    require_equal(layer(x), y, "y")
    for twin in (copy.deepcopy(MoE.from_weights(layer.export_weights())), pickle.loads(pickle.dumps(plain(layer)))):
        require_equal(twin(x), y, "a copy")


def plain(layer: MoE) -> MoE:
    """A twin without hooks."""
    return MoE.from_weights(layer.export_weights())


def test_a_plain_layer_is_one_operator() -> None:
    layer, x = MoE.from_weights(draw_weights(EVERYTHING)).requires_grad_(False), to_torch(draw_x((6,)))
    with torch.profiler.profile(acc_events=True) as profile:
        layer(x)
    assert [event.name for event in profile.events() or () if event.name.startswith("moebius::")] == ["moebius::moe"]
    layer.router.register_forward_hook(lambda *_: None)
    with capture() as recording:
        layer(x)
    assert len(recording.layers) == 1, "traces see the experts of a hooked layer once"


def test_wrapped_and_replaced_forwards() -> None:
    """A wrapper around a part, and a forward put in its place as accelerate does, are called."""
    layer, x = MoE.from_weights(draw_weights(EVERYTHING)).requires_grad_(False), to_torch(draw_x((6,)))
    y, text = layer(x), layer.explain(6)
    own: Any = layer.experts
    layer.experts = torch.nn.Sequential(own)  # pyright: ignore[reportAttributeAccessIssue]
    assert layer.explain(6) == text and layer.export_weights().experts.down.shape[0] == E
    layer.experts = own
    forward = own.forward
    own.forward = lambda x, ids, weights: 2 * forward(x, ids, weights)
    require_close(layer(x), y + forward(x, *layer(x, return_aux=True)[1][3:5]), "the replaced forward ran")
    layer.router = torch.nn.Linear(D, E)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(InvalidInput, match=r"layer.router must be the layer's own module or a wrapper.*got Linear"):
        layer(x)


def test_parts_are_found_by_type() -> None:
    found = [module for module in MoE(16, 16, 4, 2).modules() if isinstance(module, torch.nn.Linear)]
    assert len(found) == 1 and isinstance(found[0], RouterParameters)


@pytest.mark.parametrize("part", ["router", "experts", "shared_experts"])
@pytest.mark.parametrize("how", ["subclass", "class"])
def test_an_overridden_forward_is_called(part: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the layer has run before, when calls go past the parts."""
    with running_on("reference"), torch.no_grad():
        layer = MoE(16, 24, 4, 2, shared_experts=SharedExpertsSpec(8))
        x = torch.randn(5, 16)
        for _ in range(3):
            before = layer(x)
        module = getattr(layer, part)
        kind = type(module)

        def forward(self: Any, *arguments: Any) -> Any:
            return original(self, *arguments) * 0

        original = kind.forward
        if how == "class":
            monkeypatch.setattr(kind, "forward", forward)
        else:
            module.__class__ = type("Mine", (kind,), {"forward": forward})
        after = layer(x)
        assert not torch.equal(after, before)
        if part == "experts":
            torch.testing.assert_close(after, layer.shared_experts(x))
