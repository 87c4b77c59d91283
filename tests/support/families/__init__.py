"""The rows that families of models are judged in: the sweep's tiny models, some in several variants."""

from __future__ import annotations

import re
from typing import Any

import pytest
import transformers

from moe_core.checkpoint.families import text_model
from moe_core.errors import Unsupported
from tests.support.paths import ROOT
from tools.sweep import models

#: Rows of the table -> (family, settings beside those of the sweep). Every other family is a row by its own name.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2_moe_sum": ("cohere2_moe", {"shared_expert_combination_strategy": "sum"}),
    "cohere2_moe_none": ("cohere2_moe", {"num_shared_experts": 0}),
    "cohere2_moe_sigmoid": ("cohere2_moe", {"expert_selection_fn": "sigmoid", "first_k_dense_replace": 1}),
    "deepseek_v4": ("deepseek_v4", {"mlp_layer_types": ["hash_moe", "moe"], "swiglu_limit": 0.5}),
    "glm5_next": ("glm5_next", {"swiglu_limit": 0.5}),
    "gpt_oss_clamped": ("gpt_oss", {"swiglu_limit": 0.75, "swiglu_alpha": 1.5}),
    "hy_v4": ("hy_v4", {"swiglu_limit": 0.5}),
    "longcat_flash": ("longcat_flash", {"zero_expert_num": 0}),
    "deepseek_v2_groups": ("deepseek_v2", {"topk_method": "group_limited_greedy"}),
    "deepseek_v3_gelu": ("deepseek_v3", {"hidden_act": "gelu", "norm_topk_prob": False, "routed_scaling_factor": 1.0}),
    "laguna_capped": ("laguna", {"moe_router_logit_softcapping": 1.5}),
    "lfm2_moe_no_bias": ("lfm2_moe", {"use_expert_bias": False}),
    "llama4": ("llama4", {"num_experts_per_tok": 1}),
    "mistral4_groups": ("mistral4", {"n_group": 4, "topk_group": 2}),
    "mistral_large4_groups": ("mistral_large4", {"n_group": 4, "topk_group": 2}),
    "nemotron_h_latent": ("nemotron_h", {"moe_latent_size": 12}),
    "olmoe_renormalised": ("olmoe", {"norm_topk_prob": True}),
    "step3p7_limits": ("step3p7", {"swiglu_limits": [0, 0.3], "swiglu_limits_shared": [0, 0.6]}),
    "step3p7_shared_limit": ("step3p7", {"swiglu_limits": [0, None], "swiglu_limits_shared": [0, 0.4]}),
    "qwen2_moe_every_second": ("qwen2_moe", {"decoder_sparse_step": 2}),
}


def settings_of(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The config of a model, as a dict."""
    made: Any = models.model_class(family)
    return made.config_class(**models.settings(family) | changes).to_dict()


class Seen(dict):  # type: ignore[type-arg]
    """Settings that note who is looked up."""

    def __init__(self, settings: Any, seen: set[str]) -> None:
        super().__init__({name: Seen(one, seen) if isinstance(one, dict) else one for name, one in settings.items()})
        self.seen = seen

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        return super().get(name, default)


def _described(family: str, changes: dict[str, Any]) -> bool:
    try:
        text_model(settings_of(family, changes))
    except Unsupported:
        return False
    return True


#: The release that the records are judged by, and rows that earlier ones compute or save in another way.
JUDGE, CHANGED = (5, 23), ("aria", "glm5_next", "qwen3_omni_moe", "gpt_oss_clamped")
IS_EARLIER = tuple(map(int, transformers.__version__.split(".")[:2])) < JUDGE
#: Those of the table in the documents, which a later release adds to.
_LISTED = re.findall(r"^\| (\w+) \|", (ROOT / "docs" / "user" / "families.md").read_text(), re.MULTILINE)
INSTALLED = [family for family in models.families() if family in _LISTED and not (IS_EARLIER and family in CHANGED)]
_ALL = {family: (family, {}) for family in INSTALLED}
_ALL |= {row: given for row, given in VARIANTS.items() if given[0] in INSTALLED}
ROWS = {row: given for row, given in _ALL.items() if _described(*given) and not (IS_EARLIER and row in CHANGED)}


def tiny(family: str, **changes: Any) -> Any:
    """The sweep's model of a family; a skip where the installed transformers does not have it."""
    if family not in INSTALLED:
        pytest.skip(f"the installed transformers has no {family}, or another one")
    return models.build(family, **changes)


def row_named(name: str) -> tuple[str, dict[str, Any]]:
    """(family, settings) of a row that a test names; a skip where the installed transformers does not have it."""
    if name not in ROWS:
        pytest.skip(f"the installed transformers has no {name}, or another one")
    return ROWS[name]
