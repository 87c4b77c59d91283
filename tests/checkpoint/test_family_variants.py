"""Variants of every family's config: what is described is what transformers' block computes, and the rest is refused.

Settings of the MoE layers are changed at random in the config of a tiny model. transformers builds it, and
`MoE.from_block` must give the block's ids and output, or raise. MOEBIUS_VARIANTS asks for more variants of each row.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from moe_core.checkpoint import open_checkpoint
from moe_core.checkpoint.families import architecture_of, text_model
from moe_core.checkpoint.presets import layer_spec_from_config
from moe_core.errors import InvalidInput, Unsupported

torch = pytest.importorskip("torch", reason="the judge needs torch")
transformers = pytest.importorskip("transformers", reason="the judge needs transformers")

from moe_torch import MoE
from tests.support.families import IS_EARLIER, JUDGE, ROWS, row_named, settings_of, tiny
from tools.sweep import models
from tools.sweep.measure import TOLERANCE, block_run, table_ids

pytestmark = [
    pytest.mark.skipif(IS_EARLIER, reason=f"blocks of transformers before {JUDGE} may compute variants otherwise"),
    pytest.mark.usefixtures("reference_engine_of_torch"),
]
COUNT = int(os.environ.get("MOEBIUS_VARIANTS", "1"))
#: Settings that may change an MoE layer.
_SETTINGS = re.compile(
    "moe|expert|top_?k|group|rout|norm_|scal|hidden_act|dense|sparse|freq|mlp|swiglu|shared|bias|limit|cap|alpha|scor"
)
_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2", "tanh")
#: Of attention, in which blocks have no part: some values of theirs take long to build.
_OTHERS = re.compile("index|rope|mtp|rms|layer_norm|softmax|attn|attention|embed|initializer")


def _other_values(name: str, value: Any) -> list[Any]:
    if "act" in name and isinstance(value, str):
        return [other for other in _ACTIVATIONS if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [other for other in (0, 1, 2, value + 1, 2 * value) if other != value]
    if isinstance(value, float):
        return [0.0, 0.3, 1.0, 2.5, None]
    return [1, 2, 0.5] if value is None else []


def variants(row: str) -> list[dict[str, Any]]:
    """COUNT variants of a row, of one to three settings that differ from its own."""
    family, own = row_named(row)
    config = settings_of(family, own)
    others = {name: _other_values(name, config[name]) for name in sorted(config) if _SETTINGS.search(name)}
    names = [name for name, values in others.items() if values and not _OTHERS.search(name)]
    draw = random.Random(row)
    found = []
    for _ in range(COUNT):
        chosen = draw.sample(names, draw.randint(1, min(3, len(names))))
        found.append({name: draw.choice(others[name]) for name in chosen})
    return found


def built(family: str, changes: dict[str, Any]) -> Any:
    """The model, or None for settings that transformers does not build."""
    try:
        return models.build(family, **changes)
    except Exception:
        return None


def require_same_or_refused(model: Any, changes: dict[str, Any]) -> bool:
    """Whether the last MoE block of a model ran as a layer, which agreed; False where it was refused."""
    blocks = {int(re.findall(r"\.(\d+)\.", f".{path}.")[-1]): block for path, block in models.moe_blocks(model).items()}
    try:
        architecture = architecture_of(text_model(model.config.to_dict()))
    except (InvalidInput, Unsupported):
        return False
    assert architecture.moe_layers == tuple(blocks), (changes, architecture.moe_layers_rule)
    if not blocks:
        return False
    block = blocks[architecture.moe_layers[-1]]
    try:
        layer = MoE.from_block(block, model.config)
    except (InvalidInput, Unsupported):
        return False
    x = torch.randn(2, 6, layer.spec.d_model, generator=torch.Generator().manual_seed(3))
    try:
        with torch.no_grad():
            wanted, ids = block_run(block, x)
    except (RuntimeError, IndexError, ValueError):
        return False  # transformers cannot run it either
    with torch.no_grad():
        y, aux = layer(x, return_aux=True, **table_ids(layer, x))
    assert ids is None or torch.equal(aux.ids.sort(-1).values, ids.sort(-1).values.int()), changes
    error = float((y - wanted).abs().max())
    assert error <= TOLERANCE * float(wanted.abs().max()), (changes, error)
    return True


@pytest.mark.parametrize("row", ROWS)
def test_variants_agree_or_are_refused(row: str) -> None:
    family, own = row_named(row)
    for changes in variants(row):
        model = built(family, own | changes)
        if model is not None:
            require_same_or_refused(model, changes)


#: What transformers computes and a preset once described as something else.
AGREE = [
    ("aria", {"hidden_act": "gelu"}),
    ("aria", {"hidden_act": "silu"}),
    ("glm5_next", {"hidden_act": "gelu", "swiglu_limit": 0.5}),
    ("hy_v4", {"hidden_act": "gelu", "swiglu_limit": 0.5}),
]


@pytest.mark.parametrize(("family", "changes"), AGREE)
def test_experts_and_shared_experts_have_their_own_activations(family: str, changes: dict[str, Any]) -> None:
    assert require_same_or_refused(tiny(family, **changes), changes)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        *((family, {"mlp_bias": True}, "mlp_bias .* a bias of the shared experts") for family in
          ("aria", "deepseek_v2", "deepseek_ocr2", "hy_v3", "nemotron_h", "unlimited_ocr")),
        ("axk2", {"n_group": 4, "topk_group": 2}, "n_group in config.json must be 1 for axk2, got 4; groups in which"),
        ("cohere2_moe", {"shared_expert_combination_strategy": "max"}, "must be 'sum' .* got 'max'; another comb"),
        ("ernie4_5_moe", {"moe_norm_min": 0.3}, "moe_norm_min in config.json must be at most"),
        ("gemma4", {"enable_moe_block": None}, "enable_moe_block in config.json must be True"),
        ("longcat_flash", {"zero_expert_num": None}, "zero_expert_num in config.json must be 0"),
        ("step3p7", {"hidden_act": "gelu"}, "hidden_act in config.json must be 'silu'"),
    ],
)  # fmt: skip
def test_other_arithmetic_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    """None = the setting is absent."""
    settings = {**settings_of(family, row_named(family)[1]), **changes}
    settings = {name: value for name, value in settings.items() if name not in changes or value is not None}
    with pytest.raises(Unsupported, match=message):
        layer_spec_from_config(settings)


def test_two_names_of_a_setting_must_agree() -> None:
    settings = settings_of(*row_named("hunyuan_v1_moe"))
    assert layer_spec_from_config({**settings, "moe_topk": [3, 3], "num_experts_per_tok": 3}).top_k == 3
    with pytest.raises(
        InvalidInput, match=r"moe_topk and num_experts_per_tok in config.json must be equal, .* 3 and 2"
    ):
        layer_spec_from_config({**settings, "moe_topk": 3, "num_experts_per_tok": 2})


@pytest.mark.parametrize(
    ("family", "saved", "read", "name"),
    [
        # Where the config states no width of shared experts, transformers makes them as wide as a dense MLP.
        ("hy_v3", {"num_shared_experts": 0}, {}, "shared_mlp.gate_proj.weight"),
        ("nemotron_h", {"moe_shared_expert_intermediate_size": 0}, {}, "shared_experts.up_proj.weight"),
        ("deepseek_v2", {"mlp_bias": True}, {"mlp_bias": False}, "proj.bias"),
        ("deepseek_v3", {}, {"n_shared_experts": 0}, "shared_experts.gate_proj.weight"),
    ],
)
def test_readers_refuse_tensors_that_the_config_does_not_describe(
    tmp_path: Path, family: str, saved: dict[str, Any], read: dict[str, Any], name: str
) -> None:
    model = tiny(family, **saved)
    model.save_pretrained(tmp_path)
    for setting, value in read.items():
        setattr(model.config, setting, value)
    model.config.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(Unsupported, match=f"{name} in .* is no part of the layer that config.json describes"):
        checkpoint.layer(checkpoint.moe_layers[-1])
