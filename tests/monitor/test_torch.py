"""The monitor of torch models: equal counts however a model runs, and what it refuses."""

from __future__ import annotations

import copy
import inspect
import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.utils.checkpoint import checkpoint

from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import MoELayerSpec
from moe_torch import MoE
from moe_torch.monitor import Monitor
from moe_torch.operators.watched import BEHIND, Sampling, Watch
from tests.support.families import IS_EARLIER

pytestmark = pytest.mark.usefixtures("reference_engine_of_torch")
D, E, K, T = 16, 6, 2, 10


def build(family: str) -> Any:
    from tools.sweep import models

    return models.build(family).float()


class Net(torch.nn.Module):
    def __init__(self, spec: MoELayerSpec, run: Any = None, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(MoE.from_spec(spec) for _ in range(layers))
        self.run = run or (lambda layer, x: layer(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.run(layer, x)
        return x


def train(net: Any, called: Any = None, *, steps: int = 4, **options: Any) -> list[Any]:
    """Two parts of each step, a forward in evaluation, and a step that writes every second time."""
    written: list[Any] = []
    monitor = Monitor(
        net, lambda values, step: written.append((step, values | {"n": monitor.counted})), every=2, **options
    )
    optimizer, called = torch.optim.SGD(net.parameters(), 1e-2), net if called is None else called
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for _ in range(2):
            x = torch.randn(T, D, generator=generator).requires_grad_()
            called(x).square().mean().backward()
        net.eval()(x)
        net.train()
        optimizer.step()
        monitor.step()
        optimizer.zero_grad()
    monitor.close()
    return written


def require_equal(found: list[Any], expected: list[Any]) -> None:
    assert [step for step, _ in found] == [step for step, _ in expected] == [2, 4]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"moe/tokens_per_second"}:
            np.testing.assert_allclose(one[name], other[name], 1e-4, err_msg=name)


PLAIN = MoELayerSpec(D, 8, E, K)


@pytest.fixture(scope="module")
def expected() -> Any:
    return {layers: train(Net(PLAIN, layers=layers)) for layers in (1, 2)}


# Dynamo asks every input for its gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    "kind", ["reentrant", "not reentrant", "compiled", "compiled checkpoint", "checkpointed compile"]
)
def test_forwards_count_once(kind: str, expected: Any) -> None:
    layers = 1 if "compile" in kind else 2
    assert [values["n"] for _, values in expected[layers]] == [layers * 2 * 2 * T * K] * 2
    compiled: dict[Any, Any] = {}

    def run(layer: Any, x: torch.Tensor) -> Any:
        if kind == "checkpointed compile":
            layer = compiled.setdefault(layer, torch.compile(layer, backend="aot_eager"))
        return layer(x) if kind == "compiled" else checkpoint(layer, x, use_reentrant=kind == "reentrant")

    net = Net(PLAIN, run, layers)
    called = (
        torch.compile(net, backend="aot_eager", fullgraph=kind == "compiled") if kind.startswith("compiled") else net
    )
    require_equal(train(net, called), expected[layers])


def test_values_are_those_of_the_layers() -> None:
    net = Net(MoELayerSpec(D, 8, E, K, capacity_factor=0.75))
    layer: Any = net.layers[0]
    total, kept, losses = np.zeros(E), 0, []
    x = torch.randn(3, T, D)
    monitor = Monitor(net, None, every=3)
    for part in x:
        net.zero_grad()
        y, aux = layer(part, return_aux=True)
        (y.square().mean() + aux.z_loss).backward()
        total, kept = total + aux.tokens_per_expert.numpy(), kept + int((aux.ids >= 0).sum())
        losses = [aux.load_balance_loss.item(), aux.z_loss.item()]
        values = monitor.step(100)
    assert values is not None and 0 < kept < 3 * T * K
    np.testing.assert_allclose(values["moe/layers.0/load"], total / total.mean())
    assert values["moe/layers.0/dropped"] == pytest.approx(1 - kept / (3 * T * K)) == values["moe/dropped"] * 2
    assert [values[f"moe/layers.0/{name}"] for name in ("load_balance_loss", "z_loss")] == pytest.approx(losses)
    each = [layer.experts.gate_up.grad.flatten(1), layer.experts.down.grad.flatten(1)]
    each = torch.cat(each, 1).norm(dim=1)
    np.testing.assert_allclose(values["moe/layers.0/grad_norm_of_experts"], each.numpy(), 1e-5)
    assert values["moe/layers.0/grad_norm_experts"] == pytest.approx(each.norm().item(), 1e-5)
    assert values["moe/layers.0/grad_norm_router"] == pytest.approx(layer.router.weight.grad.norm().item(), 1e-5)
    # The second layer saw no token.
    assert values["moe/layers.1/dead_experts"] == E and "moe/layers.1/z_loss" not in values


def test_hard_inputs() -> None:
    """Masked tokens, none at all, one, all to one expert, NaN."""
    layer = MoE(D, 8, E, K)
    with torch.no_grad():
        layer.router.weight.zero_()
    monitor = Monitor(layer, None, every=1)
    mask = torch.arange(T) < 4
    for x, token_mask, tokens in (
        (torch.randn(T, D), mask, 4),
        (torch.randn(0, D), None, 0),
        (torch.randn(1, D), None, 1),
        (torch.full((T, D), torch.nan), None, None),
    ):
        layer.zero_grad()
        layer(x, token_mask).sum().backward()
        values = monitor.step()
        assert values is not None
        if tokens is not None:
            assert values["moe/MoE/load"].tolist() == ([E / K] * K + [0] * (E - K) if tokens else [0] * E)
            assert values["moe/tokens_per_second"] > 0 or not tokens


def test_ids_outside_of_the_experts_are_none() -> None:
    """transformers marks experts of other processes so."""
    watch = Watch(Sampling(), torch.zeros(E + BEHIND, dtype=torch.int64), torch.zeros(2), None, 1, False)
    watch(ids=torch.tensor([[0, -1], [E, 2], [E + 5, 2], [-7, E - 1]]), overflow=torch.tensor([3]))
    assert watch.counts.tolist() == [1, 0, 2, 0, 0, 1, 4, 0, 3, 0] and watch.top_k == 2


def test_bits_copies_and_files_of_a_watched_layer() -> None:
    layer, x = MoE(D, 8, E, K), torch.randn(T, D)
    expected = layer(x)
    monitor = Monitor(layer, None)
    assert torch.equal(layer(x), expected) and layer(x).grad_fn is not None
    assert copy.deepcopy(layer).watch is None and "watch" not in str(list(layer.state_dict()))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).watch is None and layer.watch is not None
    with pytest.raises(InvalidInput, match="MoE must have no monitor yet"):
        Monitor(layer, None)
    monitor.close()
    assert layer.watch is None


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_models_of_transformers(family: str) -> None:
    """A block's layer and the block's experts count the same."""
    pytest.importorskip("transformers")
    moe_torch_transformers = pytest.importorskip("moe_torch.transformers")
    model = build(family).train()
    with pytest.raises(Unsupported, match=r"must run on Moebius, got \w+Experts of transformers; call moe_torch"):
        Monitor(model, None)
    moe_torch_transformers.use(model)
    tokens = torch.arange(24).reshape(2, 12) % model.config.vocab_size
    found, report = [], ()
    for kind in ("use", "block"):
        if kind == "block":
            for path in report:
                parent = path.rpartition(".")[0]
                block = model.get_submodule(parent)
                # Routers of the sweep have ties.
                model.set_submodule(parent, MoE.from_block(block, model.config, block_router=True))
        monitor = Monitor(model, None, every=1)
        report = report or monitor.layers
        model.zero_grad()
        model(tokens).logits.float().square().mean().backward()
        found.append(monitor.step())
        monitor.close()
    for name, value in found[0].items():
        if name.startswith(f"moe/{report[0]}/") and name.endswith(("load_entropy", "/load", "z_loss")):
            np.testing.assert_allclose(found[1][name.replace(".experts/", "/")], value, 2e-3, 1e-6, err_msg=name)
    # Earlier releases record no router of some families.
    recorded = any(name.endswith("z_loss") for name in found[0]) and "moe/grad_norm_router" in found[0]
    assert recorded or (IS_EARLIER and family == "deepseek_v3")


def test_the_callback_of_the_trainer(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    moe_torch_transformers = pytest.importorskip("moe_torch.transformers")
    pytest.importorskip("accelerate")
    model = build("qwen3_moe")
    moe_torch_transformers.use(model)
    written: list[Any] = []
    callback = moe_torch_transformers.MonitorCallback(lambda values, step: written.append((step, values)), every=2)
    rows = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(16)]
    recomputes = "activation_checkpointing"
    if recomputes not in inspect.signature(transformers.TrainingArguments).parameters:
        recomputes = "gradient_checkpointing"
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, report_to=[],
        **{recomputes: True}, save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback]).train()
    assert [step for step, _ in written] == [2, 4]
    top_k = model.config.num_experts_per_tok
    for _, values in written:
        assert values["moe/grad_norm_experts"] > 0 and values["moe/tokens_per_second"] > 0 and values["moe/z_loss"] > 0
    # Two steps of two parts of two rows of eight tokens, recomputed forwards left out.
    assert callback.monitor.counted == 2 * 2 * 2 * 8 * top_k * len(callback.monitor.layers)
    blocks = [layer.mlp for layer in model.model.layers]
    assert not any(module._forward_hooks for block in blocks for module in block.modules()), "the watch ends"


def lightning_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """moe_torch.lightning, on a Callback of our own where Lightning is not installed."""
    try:
        import lightning.pytorch  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        for name in ("lightning", "lightning.pytorch"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        setattr(sys.modules["lightning.pytorch"], "Callback", type("Callback", (), {}))  # noqa: B010
        monkeypatch.delitem(sys.modules, "moe_torch.lightning", raising=False)
    import moe_torch.lightning

    return moe_torch.lightning


def test_the_callback_of_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = lightning_of(monkeypatch).MonitorCallback(every=1)
    net, logged = Net(PLAIN), []
    logger = SimpleNamespace(log_metrics=lambda values, step: logged.append(step), experiment=None)
    trainer = SimpleNamespace(optimizers=[None], logger=logger, is_global_zero=True, global_step=4)
    callback.on_train_start(trainer, net)
    net(torch.randn(T, D)).sum().backward()
    callback.on_before_optimizer_step(trainer, net, None)
    callback.on_train_end(trainer, net)
    assert logged == [5] and net.layers[0].watch is None
    for wrong, error, message in (
        ({"optimizers": [None, None]}, Unsupported, "one optimizer, got 2"),
        ({"logger": None}, InvalidInput, "writer must be given"),
    ):
        with pytest.raises(error, match=message):
            callback.on_train_start(SimpleNamespace(**(vars(trainer) | wrong)), net)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_graphs_count_as_they_replay() -> None:
    net = Net(MoELayerSpec(64, 64, E, K)).cuda().bfloat16()
    x, steps = torch.randn(128, 64, device="cuda", dtype=torch.bfloat16), 3
    monitor: Any = Monitor(net, None, every=1)

    def step() -> None:
        net.zero_grad(set_to_none=False)
        net(x).float().square().mean().backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    expected = monitor.step()
    for _ in range(steps):
        graph.replay()
    found = monitor.step()
    assert monitor.counted == steps * 2 * 128 * K
    for name in ("load_entropy", "z_loss", "grad_norm_experts"):
        assert found[f"moe/{name}"] == pytest.approx(expected[f"moe/{name}"], rel=1e-2), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_no_step_but_a_writing_one_waits_for_the_device() -> None:
    net = Net(MoELayerSpec(64, 64, E, K, capacity_factor=1.25)).cuda()
    monitor, x = Monitor(net, None, every=3), torch.randn(128, 64, device="cuda")
    for number in range(5):
        # In a step that writes, only the reading waits.
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            net(x).square().mean().backward()
            torch.cuda.set_sync_debug_mode("default" if number % 3 == 2 else torch.cuda.get_sync_debug_mode())
            monitor.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        net.zero_grad()


def test_what_is_refused() -> None:
    layer = MoE(D, 8, E, K)
    for options, message in (
        ({"every": 0}, "every"), ({"per_layer": 1}, "per_layer"), ({"gradients": None}, "gradients"),
        ({"writer": 3}, "writer must"),
        ({"model": torch.nn.Linear(2, 2)}, "must have MoE layers on Moebius, got a Linear"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=message):
            made: Any = Monitor
            made(**({"model": layer, "writer": None} | options))
    monitor = Monitor(layer, None, every=1)
    layer(torch.randn(T, D)).sum().backward()
    layer.zero_grad()
    with pytest.raises(InvalidInput, match="behind backward and ahead of zero_grad"):
        monitor.step()
    monitor.close()
    layer(torch.randn(T, D))
    assert Monitor(layer, None, every=1, gradients=False).step() is not None
