"""What of one family runs on Moebius, measured on its tiny model."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import moe_torch.transformers
from moe_core.checkpoint import open_checkpoint, other_tensors, save_checkpoint
from moe_core.errors import InvalidInput, Unsupported
from moe_torch import LayerWeights, MoE, layer_spec_from_config
from tools.sweep import models

#: Errors up to this are rounding: float32, relative to the largest value.
TOLERANCE = 1e-4
#: A gradient counts as at least this share of the model's largest, so that one that is zero but for rounding passes.
_FLOOR = 1e-3
#: Children of a decoder layer that are replaced one by one.
_PARTS = ("router", "experts")
#: What a family may run: the experts of its model, a layer from its config, one on a live block, files in and out.
PARTS = ("experts", "preset", "block", "reader", "writer")


@dataclass
class Row:
    """One family. logits, gradients: errors of the model with Moebius' experts against its own, relative to the largest
    value; None where they do not run. reasons: part -> why it does not run; of PARTS, empty for one that does.
    """

    family: str
    logits: float | None = None
    gradients: float | None = None
    reasons: dict[str, str] = field(default_factory=dict)


def measure(family: str) -> Row:
    """Everything about one family. Raises AssertionError where something runs and is wrong."""
    row, model = Row(family), models.build(family)

    def part(name: str, run: Callable[[], Any], *needs: str) -> Any:
        lacking = [need for need in needs if need in row.reasons]
        if lacking:
            row.reasons[name] = f"needs the {lacking[0]}"
            return None
        try:
            return run()
        except (Unsupported, InvalidInput) as error:
            row.reasons[name] = short(str(error))
            return None

    errors = part("experts", lambda: experts_errors(family, model))
    if errors is not None:
        row.logits, row.gradients = errors
    part("preset", lambda: layer_spec_from_config(model.config))
    part("block", lambda: _blocks(family, model), "preset")
    with tempfile.TemporaryDirectory() as directory:
        read, written = Path(directory, "read"), Path(directory, "written")
        model.save_pretrained(read)
        layers = part("reader", lambda: _read(model, read), "preset")
        part("writer", lambda: _write(model, read, written, layers), "preset", "reader")
    return row


def experts_errors(family: str, model: Any) -> tuple[float, float]:
    """(of the outputs, of the gradients) with Moebius' experts against eager ones. Raises Unsupported."""
    wanted, wanted_gradients = _step(family, model)
    moe_torch.transformers.use(model)
    try:
        given, gradients = _step(family, model)
    finally:
        model.set_experts_implementation("eager")
    largest = max(float(gradient.abs().max()) for gradient in wanted_gradients.values())
    errors = []
    for name, gradient in wanted_gradients.items():
        scale = max(float(gradient.abs().max()), _FLOOR * largest)
        errors.append(float((gradients[name] - gradient).abs().max()) / scale)
    found = float((given - wanted).abs().max() / wanted.abs().max()), max(errors)
    assert 0 < max(found) < TOLERANCE, f"{family} with our experts differs by {found}"
    return found


def _step(family: str, model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The outputs of a model, and the gradients of its parameters through a random sum of them."""
    model.zero_grad()
    output = models.outputs(model(**models.inputs(family)))
    generator = torch.Generator().manual_seed(2)
    (output * torch.randn(output.shape, generator=generator)).sum().backward()
    gradients = {name: own.grad.clone() for name, own in model.named_parameters() if own.grad is not None}
    return output.detach(), gradients


def block_run(block: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(what a block returns for x `[B, T, D]`, the ids `[B * T, K]` it gave its experts, None where it gave none)."""
    if models.is_decoder(block):
        # It normalises what experts take, and routes its own input: here both are x.
        rows = x.view(-1, x.shape[-1])
        _, weights, ids = block.router(rows)
        return block.experts(rows, ids, weights).view_as(x), ids
    given: list[Any] = []
    if not hasattr(block, "experts"):
        return block(x), None
    hook = block.experts.register_forward_pre_hook(
        lambda module, positional, named: given.extend((*positional, *named.values())), with_kwargs=True
    )
    output = block(x, **table_ids(block, x))
    hook.remove()
    ids = [one for one in given if isinstance(one, torch.Tensor) and one.dtype == torch.int64]
    output = output[0] if isinstance(output, tuple) else output
    return output.view_as(x), ids[0] if ids else None


def table_ids(block: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The ids of tokens, for a block or a layer that looks the experts up in a table."""
    has_table = getattr(block, "is_hash", False) or (isinstance(block, MoE) and block.router.table is not None)
    return {"input_ids": models.ids_of(x)} if has_table else {}


def moe_layers(model: Any) -> dict[int, Any]:
    """The MoE blocks of a model by the numbers of their layers."""
    blocks = models.moe_blocks(model)
    if not blocks:
        raise Unsupported("the model has no module of a router and experts alone")
    return {int(re.findall(r"\.(\d+)\.", f".{path}.")[-1]): block for path, block in blocks.items()}


class _Router(torch.nn.Module):
    """In the place of a decoder layer's router: remembers what the layer's own shall score."""

    def forward(self, rows: torch.Tensor) -> tuple[None, None, None]:
        self.rows = rows
        return None, None, None


class _Experts(torch.nn.Module):
    """In the place of its experts: the layer."""

    def __init__(self, router: _Router, layer: MoE) -> None:
        super().__init__()
        self.router, self.layer = router, layer

    def forward(self, x: torch.Tensor, ids: None, weights: None) -> torch.Tensor:
        return self.layer(x, gate_inputs=self.router.rows)


def _blocks(family: str, model: Any) -> None:
    """Every block as a layer on its own weights, apart and in the model."""
    moe_layers(model)
    blocks = models.moe_blocks(model)
    layers = {path: MoE.from_block(block, model.config) for path, block in blocks.items()}
    parts = {path: {n: part for n, part in block.named_children() if n in _PARTS} for path, block in blocks.items()}
    for path, layer in layers.items():
        _require_same(f"from_block of {path}", layer, blocks[path])
    with torch.no_grad():
        wanted = models.outputs(model(**models.inputs(family)))
        for path, layer in layers.items():
            if models.is_decoder(blocks[path]):
                model.set_submodule(f"{path}.router", router := _Router())
                model.set_submodule(f"{path}.experts", _Experts(router, layer))
                continue
            zeros = torch.zeros(1, 1, layer.spec.d_model)
            if isinstance(blocks[path](zeros, **table_ids(blocks[path], zeros)), tuple):
                layer.register_forward_hook(lambda module, inputs, y: (y, None))
            model.set_submodule(path, layer)
        given = models.outputs(model(**models.inputs(family)))
        for path, block in blocks.items():
            model.set_submodule(path, block)
            for name, part in parts[path].items():
                model.set_submodule(f"{path}.{name}", part)
    error = float((given - wanted).abs().max() / wanted.abs().max())
    assert error < TOLERANCE, f"{family} with layers in place of its blocks differs by {error}"


def _read(model: Any, path: Path) -> list[tuple[int, LayerWeights]]:
    """The layers of a checkpoint that transformers wrote."""
    checkpoint, blocks, found = open_checkpoint(path), moe_layers(model), []
    if checkpoint.moe_layers != tuple(blocks):
        raise Unsupported(f"only {checkpoint.moe_layers} of the layers {tuple(blocks)}")
    for number, block in blocks.items():
        weights = LayerWeights.from_checkpoint(checkpoint.layer(number))
        _require_same(f"layer {number} of the checkpoint", MoE.from_weights(of_block(weights, block)), block)
        found.append((number, weights))
    return found


def of_block(weights: LayerWeights, block: Any) -> LayerWeights:
    """A layer's weights without the shared experts that some models have beside the block."""
    is_beside = not any("shared" in name for name, _ in block.named_children())
    return dataclasses.replace(weights, shared=None) if is_beside else weights


def _write(model: Any, read: Path, written: Path, layers: list[tuple[int, LayerWeights]]) -> None:
    """A checkpoint of our own, which transformers loads with the same bits."""
    save_checkpoint(written, read, layers, other_tensors=other_tensors(open_checkpoint(read)))
    differing = _differing(model, written)
    if differing and _differing(model, read):
        raise Unsupported(f"transformers does not load its own files of {type(model).__name__}")
    assert not differing, f"{', '.join(differing)} of the checkpoint that we wrote for {type(model).__name__} differ"


def _differing(model: Any, path: Path) -> list[str]:
    """The tensors of a model that transformers loads otherwise."""
    loaded = type(model).from_pretrained(path, dtype=torch.float32).state_dict()
    return [name for name, tensor in model.state_dict().items() if not torch.equal(loaded[name], tensor)]


def _require_same(what: str, layer: MoE, block: Any) -> None:
    """Compare a layer with a block of transformers: the experts of every token, and the output."""
    x = torch.randn(2, models.T // 2, layer.spec.d_model, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        wanted, ids = block_run(block, x)
        y, aux = layer(x, return_aux=True, **table_ids(layer, x))
    if ids is not None:
        assert torch.equal(aux.ids.sort(-1).values, ids.sort(-1).values.int()), f"{what}: other experts"
    error = float((y - wanted).abs().max() / wanted.abs().max())
    assert error < TOLERANCE, f"{what} differs by {error}"


def short(message: str) -> str:
    """A message without the advice behind its semicolon, folders, lists of names and what all refusals begin with."""
    message = re.sub(r"^the experts of \w+ must all run on Moebius, got \S+ \((\w+)\):", r"\1:", message)
    message = re.sub(r"must be one of .*, got", "is", re.sub(r"/\S*/(?=[\w.]+)", "", message))
    return message.partition(";")[0]
