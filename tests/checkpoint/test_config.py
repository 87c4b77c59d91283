"""Settings of config.json one by one: several names, numbers, layers with experts, and what reports say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_core.checkpoint.config import ModelConfig
from moe_core.checkpoint.convert import ConversionReport, LayerError
from moe_core.checkpoint.families import FAMILIES
from moe_core.checkpoint.families.deepseek import _muse_around
from moe_core.checkpoint.families.mixtral import _ernie_layers
from moe_core.checkpoint.families.record import describe
from moe_core.checkpoint.stacks import written_names
from moe_core.errors import InvalidInput
from moe_core.formats import format_named
from moe_core.layers.spec import LatentSpec, OutputSpec
from moe_core.specs.norm import NormSpec


def config(**settings: Any) -> ModelConfig:
    return ModelConfig("some", settings)


def test_a_setting_with_several_names_has_one_value() -> None:
    assert config(top_k=2).find("num_experts_per_tok", "top_k") == 2
    assert config(num_experts_per_tok=2, top_k=2).find("top_k", "num_experts_per_tok") == 2
    assert config(a=[4, 4], b=4).find("a", "b") == [4, 4], "one number for all layers"
    assert config(a=None, b=3).find("a", "b") is None and config(a=3, b=None).find("a", "b") == 3
    with pytest.raises(InvalidInput, match=r"a and c in config\.json must be equal, .* got 3 and 4"):
        config(a=3, b=3, c=4).find("a", "b", "c")


def test_numbers_are_floats() -> None:
    found = config(epsilon=1).number("epsilon")
    assert found == 1.0 and type(found) is float
    assert type(config().number("epsilon", default=2)) is float


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({}, tuple(range(1, 12))),
        ({"moe_layer_interval": 3}, (2, 5, 8, 11)),
        ({"moe_layer_interval": 3, "moe_layer_start_index": 3, "moe_layer_end_index": 8}, (5, 8)),
        ({"moe_layer_start_index": 0, "moe_layer_end_index": 40}, tuple(range(12))),
        ({"moe_layer_start_index": None, "moe_layer_end_index": None, "moe_layer_interval": None}, tuple(range(12))),
    ],
)
def test_layers_of_ernie(settings: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert _ernie_layers(config(num_hidden_layers=12, **settings)).moe == layers


def test_the_norms_of_muse() -> None:
    found = _muse_around(config(rms_norm_eps=1e-5, post_norm_eps=1e-3, moe_hidden_size=48))
    after = NormSpec(1e-3, centred=True, weight_first=True)
    assert found == {"latent": LatentSpec(48, NormSpec(1e-5, centred=True)), "output": OutputSpec(after, "experts")}


GLM = {
    **{"hidden_size": 8, "moe_intermediate_size": 4, "num_hidden_layers": 3, "first_k_dense_replace": 1},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "routed_scaling_factor": 1.0},
    **{"norm_topk_prob": True, "n_group": 1, "topk_group": 1, "hidden_act": "silu"},
}


def test_models_in_others_and_alone_may_name_their_tensors_differently() -> None:
    family = FAMILIES["glm4v_moe_text"]
    assert family.alone not in (None, family.naming)
    for nested, naming in (((), family.alone), (("text_config",), family.naming)):
        described = describe(family, ModelConfig("glm4v_moe_text", GLM, nested=nested))
        assert described.naming == naming
    plain = FAMILIES["glm4_moe"]
    assert plain.alone is None and describe(plain, ModelConfig("glm4_moe", GLM)).naming == plain.naming


@pytest.mark.parametrize(
    ("family", "nested", "own", "published"),
    [
        ("qwen3_moe", (), "model.", "model."),
        ("inkling2_text", (), "model.", "model.llm."),
        ("inkling2_text", ("text_config",), "model.language_model.", "model.llm."),
        ("step3p5", ("text_config",), "model.language_model.", "model."),
        ("qwen3_omni_moe_text", ("thinker_config", "text_config"), "thinker.model.", "thinker.model."),
    ],
)
def test_what_stands_before_the_layers_in_files(family: str, nested: tuple[str, ...], own: str, published: str) -> None:
    architecture: Any = SimpleNamespace(naming=FAMILIES[family].naming, tables=())
    for storage, prefix in (("fused", own), ("per_expert", published)):
        assert written_names(architecture, 3, storage, nested).router.startswith(f"{prefix}layers.3.")


def test_a_report_of_a_conversion_names_what_is_not_finite() -> None:
    errors = (LayerError(3, 1e-3, 2e-3), LayerError(4, float("nan"), 0.0))
    report = ConversionReport(format_named("mxfp4"), errors, 6 << 20, 2 << 20, ("a.weight", "b.weight"))
    assert str(report).splitlines() == [
        "mxfp4: experts 6.0 MiB -> 2.0 MiB (3.00 times smaller)",
        "  layer     gate_up        down   relative Frobenius error",
        "      3   1.000e-03   2.000e-03",
        "      4         nan   0.000e+00",
        "NaN or infinity in a.weight",
        "NaN or infinity in b.weight",
    ]
    assert report.as_dict()["layers"][1] == {"layer": 4, "gate_up": None, "down": 0.0}
