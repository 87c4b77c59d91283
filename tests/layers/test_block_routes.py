"""Blocks of configs with one changed field, as layers and back: the field arrives, or the route names it.

The fields are those that a family reads, and the values those with which transformers builds a model that runs.
MOEBIUS_ROUTES=all takes every field of every family.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import moe_torch
from moe_core.checkpoint.families import architecture_of, text_model
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import HUGGING_FACE
from moe_torch import MoE, layer_spec_from_config
from tests.support.families import IS_EARLIER, JUDGE, ROWS, Seen, settings_of
from tests.support.families.judge import loaded
from tools.sweep import models
from tools.sweep.measure import TOLERANCE, block_run, table_ids

pytestmark = pytest.mark.skipif(IS_EARLIER, reason=f"blocks of transformers before {JUDGE} may read other fields")
EVERY = os.environ.get("MOEBIUS_ROUTES") == "all"
_VALUES: dict[type, tuple[Any, ...]] = {
    bool: (True, False),
    int: (4, 2, 1, 16, 48, 0),
    float: (0.5, 2.0),
    str: ("gelu", "relu2", "softmax", "sigmoid", "greedy", "group_limited_greedy", "sum"),
    type(None): (2, 0.5, True),
}


#: Lists and records, and fields with one value that transformers runs in the tiny models.
UNCHANGED = (
    "mlp_layer_types", "mlp_only_layers", "moe_layers", "layers_block_type", "swiglu_limits", "swiglu_limits_shared",
    "ffn_config", "enable_moe_block", "moe_apply_router_weight_on_input",
)  # fmt: skip


def fields_of(row: str) -> list[tuple[str, Any]]:
    """(field, value) of what the family reads in the config of its tiny model."""
    family, changes = ROWS[row]
    config, seen = text_model(settings_of(family, changes)), set[str]()
    architecture_of(dataclasses.replace(config, settings=Seen(config.settings, seen)))
    return [(name, config.settings[name]) for name in sorted(seen & set(config.settings))]


def cases() -> dict[str, tuple[str, str]]:
    """Every field once, or of every family."""
    found: dict[str, tuple[str, str]] = {}
    for row in ROWS:
        for name, _ in fields_of(row):
            found.setdefault(f"{row} {name}" if EVERY else name, (row, name))
    return found


CASES = cases()


def built(row: str, changes: dict[str, Any]) -> tuple[Any, str, Any, Any] | None:
    """(model, path of its last block, x, output), or None for settings that transformers does not run."""
    family, others = ROWS[row]
    try:
        model = models.build(family, **others | changes)
        path, block = list(models.moe_blocks(model).items())[-1]
        x = torch.randn(2, 6, model.config.get_text_config().hidden_size, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            return model, path, x, block_run(block, x)
    except Exception:
        return None


@pytest.mark.parametrize(("row", "field"), CASES.values(), ids=CASES)
def test_a_block(row: str, field: str, tmp_path: Path) -> None:
    value, ran = dict(fields_of(row))[field], 0
    for other in _VALUES.get(type(value), ()):
        if other != value and (made := built(row, {field: other})) is not None:
            ran += 1
            through_files(field, *made, tmp_path / str(ran))
            if not EVERY:
                break
    assert EVERY or bool(ran) != (field in UNCHANGED), field


def through_files(field: str, model: Any, path: str, x: Any, wanted: tuple[Any, Any], folder: Path) -> None:
    block, number = model.get_submodule(path), int(re.findall(r"\.(\d+)", path)[-1])
    try:
        layer = MoE.from_block(block, model.config)
    except (InvalidInput, Unsupported) as refusal:
        assert field in str(refusal), refusal
        return
    with moe_torch.cpu_engine("reference"), torch.no_grad():
        y, aux = layer(x, return_aux=True, **table_ids(layer, x))
        assert float((y - wanted[0]).abs().max()) <= TOLERANCE * float(wanted[0].abs().max()), field
        assert wanted[1] is None or torch.equal(aux.ids.sort(-1).values, wanted[1].sort(-1).values.int()), field
    before = model.state_dict()
    if not models.is_decoder(block):
        model.set_submodule(path, layer)
    after = model.state_dict()
    assert {name: one.shape for name, one in after.items()} == {name: one.shape for name, one in before.items()}
    model.save_pretrained(folder)
    back = loaded(model, folder)
    again = MoE.from_block(back.get_submodule(path), back.config)
    assert again.spec == layer.spec, field
    for name, one in layer.state_dict().items():
        assert torch.equal(again.state_dict()[name], one), (field, name)
    try:
        described = layer_spec_from_config(folder, layer=number).stored_as(HUGGING_FACE)
    except (InvalidInput, Unsupported) as refusal:
        assert field in str(refusal), refusal
        return
    shared = layer.spec.shared_experts and described.shared_experts
    assert layer.spec.stored_as(HUGGING_FACE) == dataclasses.replace(described, shared_experts=shared), field
