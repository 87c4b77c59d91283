"""Converted checkpoints as transformers with compressed-tensors loads them, and as our reader does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from moe_core.checkpoint import convert_checkpoint, open_checkpoint
from moe_core.checkpoint.config import read_json
from moe_core.errors import Unsupported
from moe_core.formats import format_named
from tests.support.families import row_named
from tests.support.families.judge import assert_same_layer, hidden_states, judge, loaded
from tools.sweep import models

#: A multiple of every group, and two groups of 32.
_WIDTH = 64
#: Logits in bfloat16 where transformers keeps a module in float32 beside plain weights only.
_ROUNDING = 0.05


def wide(row: str) -> tuple[str, Any]:
    """(family, its tiny model in bfloat16) with experts as wide as formats need."""
    family, changes = row_named(row)
    settings = models.settings(family) | changes
    widened = {
        name: _wider(value) for name, value in settings.items() if name.endswith(("intermediate_size", "_config"))
    }
    others = ("expert_ffn_hidden_size", "moe_hidden_size", "moe_latent_size")
    widened |= {name: _WIDTH for name in others if settings.get(name)}
    return family, models.build(family, **changes | widened).to(torch.bfloat16)


def _wider(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _wider(one) for name, one in value.items()}
    return _WIDTH if value == models.F else value


def verdict(row: str, model: Any, source: Path, path: Path, format: str) -> str:
    """`equal`, or why transformers refuses; then only our reader is judged. Raises AssertionError where numbers differ.

    model: of the source. path: a new directory. Our decoding gives a plain checkpoint, which transformers computes.
    """
    refusal = ""
    try:
        convert_checkpoint(source, path, format_named(format))
    except Unsupported as error:
        refusal = str(error)
        try:
            convert_checkpoint(source, path, format_named(format), loader="moebius")
        except Unsupported as none:
            return str(none)
    convert_checkpoint(path, path / "plain", "bfloat16")
    plain = loaded(model, path / "plain", torch.bfloat16)
    checkpoint = open_checkpoint(path)
    number, label = checkpoint.moe_layers[-1], f"{row} {format}"
    if not refusal:
        _assert_same_model(
            models.model_class(row_named(row)[0]).__name__,
            row,
            plain,
            loaded(model, path, torch.bfloat16, **_options(row, path)),
        )
    layer = checkpoint.layer(number).dequantized("bfloat16").dequantized("float32")
    assert_same_layer(layer, judge(plain.float(), number, hidden_states()), label)
    return refusal.partition("got ")[2].partition(": ")[2].partition(";")[0] or "equal"


def _options(row: str, path: Path) -> dict[str, Any]:
    """Llama 4's experts become Linear modules, which would quantise activations as well."""
    settings = read_json(path / "config.json")["quantization_config"]
    groups = settings.get("config_groups", {}).values()
    if row_named(row)[0] != "llama4" or all(group["input_activations"] is None for group in groups):
        return {}
    return {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}


def _assert_same_model(name: str, row: str, plain: Any, quantized: Any) -> None:
    """Weights equal bit by bit where both models have them, in the dtype of the checkpoint, and so do the logits."""
    family = row_named(row)[0]
    wanted, found = plain.state_dict(), quantized.state_dict()
    for key in wanted.keys() & found.keys():
        assert torch.equal(wanted[key].float(), found[key].float()), f"{name}: {key} differs"
    experts = [key for key in found if "experts" in key and found[key].is_floating_point()]
    wide = [key for key in experts if found[key].dtype == torch.float32 != wanted.get(key, found[key]).dtype]
    assert not wide, f"{name}: {wide[0]} is float32"
    alike = all(wanted[key].dtype == found[key].dtype for key in wanted.keys() & found.keys())
    with torch.no_grad():
        one, other = (models.outputs(each(**models.inputs(family))).float() for each in (plain, quantized))
    error = float((one - other).norm() / one.norm())
    assert error <= (0 if alike else _ROUNDING), f"{name}: logits differ by {error:.1e}"
