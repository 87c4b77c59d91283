"""Replayed layers that a checkpoint's backward runs again: gradients are those without the checkpoint."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint

from moe_core.errors import Unsupported
from moe_core.layers import MoELayerSpec
from moe_core.trace import LayerRouting
from moe_torch import MoE, NormSpec, OutputSpec
from moe_torch.trace import capture, replay
from tests.support.torch import running_on

T, D, E, K = 7, 16, 4, 2
PLAIN = MoELayerSpec(D, 24, E, K)
SPECS = {
    "plain": PLAIN,
    "stages": dataclasses.replace(PLAIN, capacity_factor=2.0),
    "norm of experts": dataclasses.replace(PLAIN, output=OutputSpec(NormSpec(1e-6), "experts")),
}
Block = Callable[[Any], Any]


class OwnCheckpoint(torch.autograd.Function):
    """As Megatron's and DeepSpeed's."""

    @staticmethod
    def forward(ctx: Any, run_function: Block, x: Any) -> Any:
        ctx.run_function = run_function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run_function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run_function(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


def outer(block: Block, x: Any) -> Any:
    return checkpoint(lambda x: checkpoint(block, x, use_reentrant=False) * 2, x, use_reentrant=False) / 2


CHECKPOINTS: dict[str, Callable[[Block, Any], Any]] = {
    "plain": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "nested": outer,
    "autograd function": OwnCheckpoint.apply,
    "saved on the host": lambda block, x: saved_on_host(block, x),
}


def saved_on_host(block: Block, x: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return checkpoint(block, x, use_reentrant=False)


def models() -> list[Any]:
    """Two blocks, each with a plain layer and one more kind."""
    torch.manual_seed(0)
    return [[MoE.from_spec(PLAIN), MoE.from_spec(spec)] for spec in (SPECS["stages"], SPECS["norm of experts"])]


def run(blocks: list[Any], x: Any, around: Callable[[Block, Any], Any]) -> Any:
    for layers in blocks:

        def block(x: Any, layers: Any = layers) -> Any:
            for layer in layers:
                x = x + layer(x)
            return x

        x = around(block, x)
    return x


def random_trace(seed: int, *, weights: bool) -> list[LayerRouting]:
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for _ in range(4):
        ids = torch.rand(T, E, generator=generator).argsort(1)[:, :K].int()
        layers.append(LayerRouting(ids, torch.rand(T, K, generator=generator) if weights else None, E))
    return layers


@pytest.mark.parametrize("weights", [True, False], ids=["weights", "ids alone"])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_micro_batches_and_their_backwards_in_any_order(kind: str, weights: bool) -> None:
    """Each micro-batch replays a trace of its own. Backwards run in the block, behind it, or of both losses."""
    xs = [torch.randn(T, D, generator=torch.Generator().manual_seed(seed)).requires_grad_() for seed in (1, 2)]
    traces = [random_trace(seed, weights=weights) for seed in (3, 4)]
    with running_on("reference"):
        blocks = models()
        wanted = []
        for x, trace in zip(xs, traces, strict=True):
            with replay(trace):
                wanted.append(gradients_of(blocks, run(blocks, x, lambda block, x: block(x)).square().sum()))

        def losses(order: str) -> list[Any]:
            made = []
            for x, trace in zip(xs, traces, strict=True):
                with replay(trace):
                    loss = run(blocks, x, CHECKPOINTS[kind]).square().sum()
                    made.append(gradients_of(blocks, loss) if order == "inside" else loss)
            return made

        found: dict[str, Any] = {"inside": losses("inside")}
        found["behind"] = [gradients_of(blocks, loss) for loss in losses("behind")]
        first, second = losses("behind")
        late = gradients_of(blocks, second)
        found["last first"] = [gradients_of(blocks, first), late]
        both = gradients_of(blocks, sum(losses("behind")))
    for order, parts in found.items():
        for one, other in zip(parts, wanted, strict=True):
            for new, old in zip(one, other, strict=True):
                torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5, msg=order)
    for new, *old in zip(both, *wanted, strict=True):
        torch.testing.assert_close(new, sum(old), rtol=1e-4, atol=1e-4)
    assert any((new - old).abs().max() > 0.1 for new, old in zip(*wanted, strict=True))


def gradients_of(blocks: list[Any], loss: Any) -> list[Any]:
    """By backward, because reentrant checkpoints take no torch.autograd.grad."""
    parameters = [one for layers in blocks for layer in layers for one in layer.parameters()]
    for parameter in parameters:
        parameter.grad = None
    loss.backward()
    return [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_recomputed_layer_is_captured_once(kind: str) -> None:
    x = torch.randn(T, D).requires_grad_()
    with running_on("reference"), capture() as recording:
        run(models(), x, CHECKPOINTS[kind]).sum().backward()
    assert len(recording.trace()) == 4


def test_blocks_that_a_checkpoint_runs_again() -> None:
    """capture and replay are opened by the checkpointed function, and so by its recomputation."""
    blocks, x, layers = models(), torch.randn(T, D).requires_grad_(), random_trace(3, weights=True)

    def opened(x: Any) -> Any:
        with capture() as recording, replay(layers):
            y = run(blocks, x, lambda block, x: block(x))
        for one, other in zip(recording.layers, layers, strict=True):
            assert torch.equal(one.ids, other.ids)
        return y.square().sum()

    with running_on("reference"):
        wanted = gradients_of(blocks, opened(x))
        for one, other in zip(gradients_of(blocks, checkpoint(opened, x, use_reentrant=False)), wanted, strict=True):
            torch.testing.assert_close(one, other)


def test_compiled_programs_with_checkpoints() -> None:
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
    trace = random_trace(3, weights=True)[:3]
    with running_on("reference"):
        first, second, third = (MoE.from_spec(PLAIN) for _ in range(3))

        def model(x: Any, last: Any = third) -> Any:
            x = x + first(x)
            x = x + checkpoint(lambda x: second(x).sin(), x, use_reentrant=False)
            return x + checkpoint(lambda x: last(x).sin(), x, use_reentrant=False)

        compiled: Any = torch.compile(model, backend="aot_eager")
        with replay(trace):
            wanted = gradients_of([[first, second, third]], model(x).sum())
        with replay(trace):
            loss = compiled(x).sum()
        for new, old in zip(gradients_of([[first, second, third]], loss), wanted, strict=True):
            torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5)
        with replay(trace):
            loss = compiled(x, second).sum()
        with pytest.raises(Unsupported, match=r"a compiled program with checkpoints replays .* layers that run once"):
            loss.backward()


def test_without_a_trace_nothing_is_kept() -> None:
    x = torch.randn(T, D).requires_grad_()
    with running_on("reference"):
        blocks = models()
        plain = gradients_of(blocks, run(blocks, x, lambda block, x: block(x)).sum())
        with replay(random_trace(0, weights=True)), torch.no_grad():
            run(blocks, x, CHECKPOINTS["plain"])
        loss = run(blocks, x, CHECKPOINTS["plain"]).sum()
        assert all(map(torch.equal, gradients_of(blocks, loss), plain))


def test_a_torch_without_the_hooks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_torch.bridge import private

    monkeypatch.setattr(private, "_top_hooks", None)
    needs = pytest.raises(Unsupported, match=r"replay\(\) needs torch\._C\._autograd's saved")
    with running_on("reference"), needs, replay(random_trace(0, weights=True)):
        run(models(), torch.randn(T, D), CHECKPOINTS["plain"])
    # torch 2.11 ends a checkpoint that raised, and its hooks, when nothing refers to it.
    del needs
    gc.collect()
