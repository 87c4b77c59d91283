"""What config.json says of a family: every family has a row or a refusal, and wrong settings are named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_core.checkpoint.config import ModelConfig
from moe_core.checkpoint.families import FAMILIES, REFUSED, architecture_of, text_model
from moe_core.checkpoint.presets import layer_spec_from_config
from moe_core.errors import InvalidInput, Unsupported
from tests.support.paths import ROOT

pytest.importorskip("torch", reason="the judge needs torch")
pytest.importorskip("transformers", reason="the judge needs transformers")

from tests.support.families import INSTALLED, IS_EARLIER, JUDGE, ROWS, settings_of
from tools.sweep import models


@pytest.mark.skipif(IS_EARLIER, reason=f"families of transformers {JUDGE} are not all in the installed one")
def test_every_family_of_the_table_is_judged() -> None:
    judged = {text_model(settings_of(*row)).model_type for row in ROWS.values()}
    #: The second model of qwen3_omni_moe has no class of its own that the sweep builds.
    assert set(FAMILIES) - judged <= {"qwen3_omni_moe_talker_text"}


def test_the_documents_name_every_family() -> None:
    page = (ROOT / "docs" / "user" / "layers.md").read_text()
    listed = page.partition("Supported model types: ")[2].partition(".")[0]
    assert listed.replace("`", "").split() == [f"{name}," for name in sorted(FAMILIES)[:-1]] + [sorted(FAMILIES)[-1]]


@pytest.mark.parametrize("family", [family for family in INSTALLED if family not in ROWS])
def test_other_families_are_refused_by_name(family: str) -> None:
    settings = settings_of(family, {})
    with pytest.raises(Unsupported, match=f"model_type .*{settings['model_type']}") as error:
        layer_spec_from_config(settings)
    assert REFUSED[settings["model_type"]] in str(error.value)


def test_every_second_layer_of_llama4_and_the_listed_ones() -> None:
    settings = {**text_model(settings_of(*ROWS["llama4"])).settings, "moe_layers": None, "num_hidden_layers": 7}
    for step, layers in ((1, (0, 1, 2, 3, 4, 5, 6)), (2, (1, 3, 5)), (3, (2, 5))):
        config = ModelConfig("llama4_text", {**settings, "interleave_moe_layer_step": step})
        assert FAMILIES["llama4_text"].layers(config).moe == layers
    for chosen in ([], [2], [0, 6]):
        config = ModelConfig("llama4_text", {**settings, "moe_layers": chosen})
        assert FAMILIES["llama4_text"].layers(config).moe == tuple(chosen)


def test_the_first_layers_of_minimax_m3_may_be_dense() -> None:
    settings = {**text_model(settings_of(*ROWS["minimax_m3_vl"])).settings, "num_hidden_layers": 3}
    for changes, layers in (
        ({"mlp_layer_types": None}, (0, 1, 2)),
        ({"mlp_layer_types": ["dense", "sparse", "sparse"]}, (1, 2)),
    ):
        assert FAMILIES["minimax_m3_vl_text"].layers(ModelConfig("x", settings | changes)).moe == layers


@pytest.mark.skipif(IS_EARLIER, reason=f"layers of transformers before {JUDGE} may follow other settings")
def test_layers_of_a_config_without_their_types_are_those_of_transformers() -> None:
    families, compared = {family for family, _ in ROWS.values()}, 0
    # Where the types of attention are given too, there must be one for each layer.
    for family in sorted(family for family in families if "layer_types" not in models.settings(family)):
        config = text_model(settings_of(family, {"num_hidden_layers": 6, "mlp_layer_types": None}))
        settings = dict(config.settings)
        types = settings.pop("mlp_layer_types", None)
        if types is not None:
            found = FAMILIES[config.model_type].layers(ModelConfig(config.model_type, settings))
            assert found.moe == tuple(layer for layer, kind in enumerate(types) if kind != "dense"), family
            compared += 1
    assert compared > 10


def test_layers_of_step3p5() -> None:
    settings = {
        **text_model(settings_of(*ROWS["step3p7_shared_limit"])).settings,
        "num_hidden_layers": 5,
        "mlp_layer_types": None,
    }
    settings.pop("first_k_dense_replace", None)
    for enumerated, layers in ((None, (3, 4)), ("1, 3", (1, 3))):
        config = ModelConfig("step3p5", settings | {"moe_layers_enum": enumerated})
        assert FAMILIES["step3p5"].layers(config).moe == layers


def test_a_scale_beside_groups_of_deepseek_v2() -> None:
    settings = text_model(settings_of(*ROWS["deepseek_v2"])).settings
    for method in ("greedy", "group_limited_greedy"):
        changes = {"topk_method": method, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 16.0}
        router = FAMILIES["deepseek_v2"].router(ModelConfig("deepseek_v2", {**settings, **changes}))
        assert (router.scale, router.num_groups) == (16.0, 1 if method == "greedy" else 2)


def test_the_largest_numbers_of_settings() -> None:
    settings = text_model(settings_of(*ROWS["ernie4_5_moe"])).settings
    spec = layer_spec_from_config(settings)
    assert spec.correction_bias and layer_spec_from_config({**settings, "moe_norm_min": 1e-6}) == spec
    assert ModelConfig("x", {"num_hidden_layers": 10_000}).num_layers() == 10_000
    with pytest.raises(InvalidInput, match="an integer of at most 10000, got 10001"):
        ModelConfig("x", {"num_hidden_layers": 10_001}).num_layers()


#: Setting that may be null -> what a null means, and the least number.
NULLS = {
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "moe_layer_freq", "moe_layer_interval"), (1, 1)),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), (0, 0)),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim"), (0, 0)),
    **dict.fromkeys(("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), (0, 0)),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), (0, 0)),
    **{"num_hash_layers": (3, 0), "moe_layer_end_index": (-1, -1)},
}


@pytest.mark.skipif(IS_EARLIER, reason=f"families of transformers {JUDGE} are not all in the installed one")
def test_nulls_and_least_numbers() -> None:
    refused = set()
    for row in ROWS.values():
        config = text_model(settings_of(*row))
        # Types of layers would decide instead, and several groups need both settings.
        single = {name: 1 for name in ("n_group", "topk_group", "num_expert_group") if name in config.settings}
        settings = {"first_k_dense_replace": 1, "moe_layer_freq": 1, "num_hash_layers": 1, **config.settings, **single}
        settings.pop("mlp_layer_types", None)

        def described(name: str, value: int | None, config: ModelConfig = config, settings: Any = settings) -> Any:
            return architecture_of(dataclasses.replace(config, settings={**settings, name: value}))

        for name in settings.keys() & NULLS:
            null, least = NULLS[name]
            assert described(name, None) == described(name, null), (row, name)
            assert described(name, least)
            try:
                described(name, least - 1)
            except Unsupported:
                assert (row[0], name) == ("axk2", "n_group")
            except InvalidInput as error:
                assert f"at least {least}, got {least - 1};" in str(error), (row, name)
                refused.add(name)
    assert refused == set(NULLS)


def test_settings_that_one_family_has() -> None:
    settings = text_model(settings_of(*ROWS["cohere2_moe"])).settings
    with pytest.raises(Unsupported, match=r"expert_selection_fn in config\.json must be"):
        layer_spec_from_config({**settings, "expert_selection_fn": "relu"})
    config = text_model(settings_of(*ROWS["deepseek_v4"]))
    settings = {**config.settings, "mlp_layer_types": None, "num_hash_layers": 1, "num_hidden_layers": 2}
    for settings["num_hash_layers"], tables in ((0, ()), (1, (0,)), (9, (0, 1))):
        assert architecture_of(dataclasses.replace(config, settings=settings)).tables == tables
    settings = settings_of(*ROWS["dbrx"])
    settings["ffn_config"] = {**settings["ffn_config"], "ffn_act_fn": "gelu"}
    with pytest.raises(InvalidInput, match=r"ffn_act_fn in config\.json must be an object or null, got 'gelu'"):
        layer_spec_from_config(settings)


@pytest.mark.parametrize(
    ("row", "alpha", "limit"),
    [("inkling2", "mlp_gate_softcap", "mlp_up_softcap"), ("minimax_m3_vl", "swiglu_alpha", "swiglu_limit")],
)
def test_constants_of_activations_are_those_of_the_config(row: str, alpha: str, limit: str) -> None:
    model = text_model(settings_of(*ROWS[row]))
    config = ModelConfig(model.model_type, {**model.settings, alpha: 1.25, limit: 2.5})
    activation = FAMILIES[model.model_type].activation(config)
    assert (activation.alpha, activation.limit) == (1.25, 2.5)


@pytest.mark.parametrize("row", ROWS)
def test_untrusted_settings_name_what_is_wrong(row: str) -> None:
    """Whatever a setting holds, there is a spec or an error of ours that names a setting."""
    settings = text_model(settings_of(*ROWS[row])).settings
    assert layer_spec_from_config(dict(settings))
    for name in [name for name in settings if name != "model_type"]:
        for value in (None, "x", -1, 0, 10**9, 1.5, float("nan"), True, [], [-1, "x"], {}):
            try:
                layer_spec_from_config({**settings, name: value})
            except (InvalidInput, Unsupported) as error:
                assert len(str(error)) > 20
        try:
            layer_spec_from_config({key: value for key, value in settings.items() if key != name})
        except (InvalidInput, Unsupported) as error:
            assert name in str(error) or "config.json must give" in str(error), (name, str(error))
