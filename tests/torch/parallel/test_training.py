"""The training example on four gloo ranks against one process, bit by bit; and layers under FSDP."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.distributed.fsdp import fully_shard

import moe_torch
from moe_core.errors import Unsupported
from moe_core.specs.operands import RouterLogits
from moe_torch import MoE
from moe_torch.layers.losses import router_losses
from moe_torch.parallel import ExpertParallel
from tests.support.layers import EVERYTHING, draw_weights, draw_x
from tests.support.parallel.pool import Pool, ranks
from tests.support.parallel.torch import mesh_of
from tests.support.paths import ROOT
from tests.support.torch import require_equal, running_on, to_torch

__all__ = ["ranks"]

RANKS = 4
#: Six experts: three ranks have two, and one has none.
SIZES = {"d_model": 16, "d_ff": 16, "experts": 6, "layers": 2, "length": 8, "batch": 8}
STEPS = 20
Steps = list[dict[str, np.ndarray]]


@contextlib.contextmanager
def examples() -> Iterator[Any]:
    """Imports an example by name, on the reference engine."""
    with mock.patch.object(sys, "path", [str(ROOT / "examples"), *sys.path]), running_on("reference"):
        yield importlib.import_module


def numbers(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Every gradient, whole."""
    gradients: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
    whole = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in gradients.items()}
    return {name: one.detach().numpy().copy() for name, one in whole.items()}


def on_ranks(group: Any, ordered: bool, steps: int, divisor: int | None = None) -> tuple[list[float], Steps]:
    """The losses, and the gradients of every step, of a rank of the example. divisor: a planted fault."""
    with examples() as example:
        language_model, train_torch_parallel = example("language_model"), example("train_torch_parallel")
        settings = language_model.Settings(**SIZES, steps=steps)
        found, real = [], train_torch_parallel.average_gradients

        def observed(model: Any, *arguments: Any) -> None:
            real(model, *arguments)
            found.append(numbers(model))

        faults = contextlib.ExitStack()
        if divisor is not None:
            faults.enter_context(mock.patch.object(ExpertParallel, "gradient_divisor", divisor))
        with faults, mock.patch.object(train_torch_parallel, "average_gradients", observed):
            return train_torch_parallel.train(settings, ordered), found


def in_one_process(group: Any) -> tuple[list[float], list[float], Steps]:
    """The losses of one process; then losses and gradients of one where the experts see the whole batch at once, and
    all else its four parts."""
    with examples() as example:
        language_model, train_torch = example("language_model"), example("train_torch")
        settings = language_model.Settings(**SIZES, steps=STEPS)
        models = [train_torch.LanguageModel(settings) for _ in range(RANKS)]
        first, *others = models
        decays, epsilon = language_model.DECAYS, language_model.ADAM_EPSILON
        optimizer = torch.optim.Adam(first.parameters(), settings.learning_rate, decays, epsilon, foreach=False)
        losses, steps = [], []
        for batch in language_model.batches(settings):
            inputs, targets = (train_torch.on_device(tokens).chunk(RANKS) for tokens in batch)
            parts = losses_of_parts(models, inputs, targets)
            functools.reduce(torch.add, parts).backward()
            for name, parameter in first.named_parameters():
                if ".moe.experts." not in name:
                    gradients = [model.get_parameter(name).grad for model in models]
                    parameter.grad = functools.reduce(torch.add, gradients)
                parameter.grad /= RANKS
            steps.append(numbers(first))
            optimizer.step()
            for model in models:
                model.zero_grad()
            for model in others:
                model.load_state_dict(first.state_dict())
            losses.append((functools.reduce(torch.add, [loss.detach() for loss in parts]) / RANKS).item())
        return train_torch.train(settings)[0], losses, steps


def losses_of_parts(models: list[Any], inputs: Any, targets: Any) -> list[torch.Tensor]:
    """The loss of each part of the batch, by a copy of the model for each; all use the first one's experts."""
    xs = [model.embed(part) for model, part in zip(models, inputs, strict=True)]
    penalties = [torch.zeros(()) for _ in models]
    for blocks in zip(*(model.blocks for model in models), strict=True):
        xs = [x + block.attention(block.attention_norm(x)) for x, block in zip(xs, blocks, strict=True)]
        rows = [block.moe_norm(x).flatten(0, 1) for x, block in zip(xs, blocks, strict=True)]
        logits = [block.moe.router(x) for x, block in zip(rows, blocks, strict=True)]
        layer = blocks[0].moe
        routing = RouterLogits(torch.cat(logits))
        found = moe_torch.moe(torch.cat(rows), layer.experts.operands(), routing, layer.moe_spec)
        for number, (y, own) in enumerate(zip(found.output.chunk(len(models)), logits, strict=True)):
            xs[number] = xs[number] + y.view_as(xs[number])
            balance, z = router_losses(own, found.tokens_per_expert.float() / len(models), None, layer.spec.router)
            penalties[number] = penalties[number] + (0.01 * balance + 0.001 * z)
    found = zip(models, xs, targets, penalties, strict=True)
    return [model.cross_entropy(model.norm(x), part) + penalty for model, x, part, penalty in found]


@pytest.fixture(scope="module")
def alone(ranks: Pool) -> tuple[list[float], list[float], Steps]:
    return ranks.call(in_one_process, [()])[0]


def test_ordered_sums_give_every_bit_of_one_process(ranks: Pool, alone: Any) -> None:
    """Losses and all gradients of 20 steps in fp32."""
    _, losses, steps = alone
    for found, own in ranks.call(on_ranks, [(True, STEPS)] * RANKS):
        assert found == losses and losses[-1] < losses[0] - 0.5
        assert len(own) == len(steps) == STEPS
        for step, (gradients, expected) in enumerate(zip(own, steps, strict=True)):
            assert gradients.keys() == expected.keys()
            for name, gradient in expected.items():
                assert gradient.any()
                np.testing.assert_array_equal(gradients[name], gradient, f"step {step}, {name}")


def test_other_sums_differ_by_rounding(ranks: Pool, alone: Any) -> None:
    """Losses of 20 steps are those of one process, also of a plain one, within 1e-6; so are gradients, of one step."""
    plain, losses, steps = alone
    for found, own in ranks.call(on_ranks, [(False, STEPS)] * RANKS):
        np.testing.assert_allclose(found, losses, 1e-6)
        np.testing.assert_allclose(found, plain, 1e-6)
        for name, expected in steps[0].items():
            if ".moe.experts." in name:
                np.testing.assert_array_equal(own[0][name], expected, name)
            else:
                np.testing.assert_allclose(own[0][name], expected, 0, 1e-6 * np.abs(expected).max(), err_msg=name)


def test_a_missing_divisor_is_found(ranks: Pool, alone: Any) -> None:
    """Adam hides it in losses; the gradients show it."""
    _, own = ranks.call(on_ranks, [(True, 1, 1)] * RANKS)[0]
    for name, expected in alone[2][0].items():
        assert np.array_equal(own[0][name], expected) == (".moe.experts." not in name)


def on_sharded_layers(group: Any) -> None:
    """The order of a large model: meta, shard, memory, then values. Two processes share an odd number of experts."""
    rank, odd = torch.distributed.get_rank(group), 5
    spec = dataclasses.replace(EVERYTHING, num_experts=odd)
    mesh = mesh_of(group)
    layer = MoE.from_spec(spec, device="meta")
    model = torch.nn.Sequential(torch.nn.Identity(), layer)
    fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(rank)
    layer.reset_parameters()
    gate_up: Any = layer.experts.gate_up
    assert gate_up.placements[0].is_shard(0) and gate_up.shape[0] == odd
    assert gate_up.to_local().shape[0] == (3, 2)[rank], "an expert is on one rank, whole"
    assert all(hasattr(parameter, "full_tensor") for parameter in layer.parameters())
    with pytest.raises(Unsupported, match=r"router.weight is a sharded DTensor.*load the weights before sharding"):
        layer.load_weights(draw_weights(spec))
    plain = MoE.from_weights(layer.export_weights())
    assert plain.experts.gate_up.std(dim=(1, 2)).min() > 0, "every rank's experts came"
    x = to_torch(draw_x((2, 3), seed=rank))
    with running_on("reference"), torch.no_grad():
        require_equal(model(x), plain(x), f"rank {rank}")
    # The parts alone: the layer calls them, and their parameters are there while they run.
    parted = MoE.from_weights(plain.export_weights())
    for part in (parted.router, parted.experts, parted.shared_experts):
        fully_shard(part, mesh=mesh)  # pyright: ignore[reportArgumentType, reportCallIssue]
    sharded: Any = parted.experts.down
    assert sharded.placements[0].is_shard(0)
    with running_on("reference"):
        y, wanted = parted(x), plain(x)
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
        y.square().sum().backward()
        wanted.square().sum().backward()
    gradient: Any = parted.experts.down.grad
    total = plain.experts.down.grad
    torch.distributed.all_reduce(total, group=group)
    torch.testing.assert_close(gradient.full_tensor(), total / 2, rtol=1e-4, atol=1e-5)


def test_fully_sharded(ranks: Pool) -> None:
    ranks.call(on_sharded_layers, [()] * 2)
