"""Fields, defaults and constants of every family against transformers' configs and blocks.

Fields that neither the source of a block nor the family reads change nothing in a layer.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the judge needs torch")
pytest.importorskip("transformers", reason="the judge needs transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_core.checkpoint.config import ModelConfig
from moe_core.checkpoint.families import FAMILIES, architecture_of, text_model
from moe_core.errors import InvalidInput, Unsupported
from moe_torch import MoE
from tests.support.families import IS_EARLIER, JUDGE, ROWS, Seen, settings_of
from tools.sweep import models
from tools.sweep.measure import TOLERANCE, block_run, table_ids

pytestmark = [
    pytest.mark.skipif(IS_EARLIER, reason=f"blocks of transformers before {JUDGE} may read other fields"),
    pytest.mark.usefixtures("reference_engine_of_torch"),
]
#: Field that a block reads and the family does not -> (the reason, families; None = any).
IGNORED: dict[str, tuple[str, set[str] | None]] = {
    "intermediate_size": ("the default width of an MLP, where the block passes that of shared experts", None),
    "dense_intermediate_size": ("the same", {"minimax_m3_vl_text"}),
    "enable_moe_fp32_combine": ("rounding of the sum with shared experts, which is fp32 here", {"hy_v3"}),
    "input_jitter_noise": ("noise of training, in which a layer with SparseMixer raises", {"phimoe"}),
    "n_group": ("of a topk_method with groups, which deepseek_v2 judges", {"deepseek_ocr2_text", "unlimited_ocr_text"}),
    "topk_group": ("the same, or n_group is 1", {"deepseek_ocr2_text", "unlimited_ocr_text", "axk2"}),
}


def read_by_block(model: Any) -> set[str]:
    """Fields in the source of the MoE blocks and their parts."""
    blocks = models.moe_blocks(model).values()
    roots: list[Any] = [
        part for block in blocks for part in ((block.router, block.experts) if models.is_decoder(block) else (block,))
    ]
    kinds = {kind for root in roots for module in root.modules() for kind in type(module).__mro__}
    kinds = {kind for kind in kinds if kind.__module__.startswith("transformers.models.")}
    return {name for kind in kinds for name in re.findall(r"\bconfig\.([a-z]\w*)", inspect.getsource(kind))}


def test_fields_of_blocks_are_read_or_ignored_for_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ModelConfig.with_part

    def with_part(config: ModelConfig, key: str) -> ModelConfig:
        merged = own(config, key)
        return dataclasses.replace(merged, settings=Seen(merged.settings, config.settings.seen))  # type: ignore[attr-defined]

    monkeypatch.setattr(ModelConfig, "with_part", with_part)
    read: dict[str, set[str]] = {}
    block: dict[str, set[str]] = {}
    for family, changes in ROWS.values():
        config = text_model(settings_of(family, changes))
        seen = read.setdefault(config.model_type, set())
        architecture_of(dataclasses.replace(config, settings=Seen(config.settings, seen)))
        model = models.build(family, **changes)
        aliases = model.config.get_text_config().attribute_map
        names = {aliases.get(name, name) for name in read_by_block(model)}
        block.setdefault(config.model_type, set()).update(names)
    unread = {(name, family) for family, names in block.items() for name in names - read[family]}
    listed = {name: families for name, (_, families) in IGNORED.items()}
    assert not [one for one in unread if one[1] not in (listed.get(one[0], set()) or block)]
    assert set(listed) == {name for name, _ in unread}, "IGNORED names fields that are read"
    for name, families in listed.items():
        assert families is None or families == {family for one, family in unread if one == name}
    #: The second model of qwen3_omni_moe has no class of its own that the sweep builds.
    assert set(FAMILIES) - set(block) == {"qwen3_omni_moe_talker_text"}


#: Families that transformers' default config does not describe, and settings of one that they do.
_GIVEN: dict[str, dict[str, Any]] = {
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    "longcat_flash": {"zero_expert_num": 0},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_ocr2_text": {"first_k_dense_replace": 1, "num_experts_per_tok": 2},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 8},
    "diffusion_gemma_text": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_field_has_the_default_of_transformers(family: str) -> None:
    """Or it is required."""
    settings = {**CONFIG_MAPPING[family]().to_dict(), **_GIVEN.get(family, {})}
    seen: set[str] = set()

    def described(settings: Any) -> Any:
        return dataclasses.replace(architecture_of(ModelConfig(family, settings)), moe_layers_rule="")

    whole = described(Seen(settings, seen))
    optional = 0
    for name in sorted(seen & set(settings) - set(_GIVEN.get(family, {}))):
        try:
            found = described({other: value for other, value in settings.items() if other != name})
        except (InvalidInput, Unsupported):
            continue
        optional += 1
        assert found == whole, name
    assert optional < len(seen)


def last_block(row: str) -> tuple[Any, MoE]:
    family, changes = ROWS[row]
    model = models.build(family, **changes)
    block = list(models.moe_blocks(model).values())[-1]
    return block, MoE.from_block(block, model.config)


def require_same(block: Any, layer: MoE, x: Any) -> None:
    with torch.no_grad():
        wanted, ids = block_run(block, x)
        y, aux = layer(x, return_aux=True, **table_ids(layer, x))
    assert ids is None or torch.equal(aux.ids.sort(-1).values, ids.sort(-1).values.int())
    assert float((y - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max())


@pytest.mark.parametrize("row", ROWS)
def test_small_numbers_beside_sums_of_scores(row: str) -> None:
    """Sigmoids of -14 and -35 are like divisors' 1e-6 and 1e-15. Layers leave out 1e-20 (logits below -44)."""
    block, layer = last_block(row)
    if layer.spec.router.scoring == "softmax" or layer.spec.router_norm is not None:
        return
    for logit in (-14, -35):
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            weight = layer.router.weight
            weight.copy_(
                logit / layer.spec.router.logit_scale / models.D + 0.01 * torch.randn(weight.shape, generator=generator)
            )
        x = torch.ones(1, 4, models.D) + 0.001 * torch.randn(1, 4, models.D, generator=generator)
        require_same(block, layer, x)


@pytest.mark.parametrize("row", ["gpt_oss", "openai_privacy_filter", "minimax_m3_vl", "hy_v4", "inkling2", "glm5_next"])
def test_limits_of_activations_of_large_rows(row: str) -> None:
    """At transformers' own defaults."""
    if row in ROWS:
        block, layer = last_block(row)
        assert layer.spec.experts.activation.limit is not None
        require_same(block, layer, 100 * torch.randn(2, 6, models.D, generator=torch.Generator().manual_seed(3)))


def test_a_list_of_layers_counts_behind_the_dense_ones_alone() -> None:
    settings = {"num_hidden_layers": 5, "first_k_dense_replace": 2}
    for frequency, layers in (([1, 1, 1, 0, 1], (2, 4)), ([0, 1], ()), (2, (2, 4)), (None, (2, 3, 4))):
        config = ModelConfig("deepseek_v3", settings | {"moe_layer_freq": frequency})
        assert FAMILIES["deepseek_v3"].layers(config).moe == layers
