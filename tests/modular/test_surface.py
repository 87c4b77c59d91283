"""The published surface of the fused-MoE family: every name and keyword that exists, and the page that lists them."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_torch import modular
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "user" / "modular.md").read_text()

APPLY = (
    "output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, a1q_scale, "
    "a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input"
)
SHAPES = "M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation"
REDUCE = "output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input"
PREPARE = "a1, a1_scale, a2_scale, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input"
NEWEST_PREPARE = (
    "a1, topk_weights, topk_ids, num_experts, expert_map=None, apply_router_weight_on_input=False, "
    "quant_config=modular.FUSED_MOE_UNQUANTIZED_CONFIG, defer_input_quant=True"
)
KERNEL = (
    "hidden_states, w1, w2, {}, activation, global_num_experts, expert_map, apply_router_weight_on_input, "
    "shared_experts=None, shared_experts_input=None"
)
MONOLITHIC_CALL = "hidden_states, w1, w2, router_logits, activation, global_num_experts, expert_map"
GROUPED = "num_expert_group=None, e_score_correction_bias=None, routed_scaling_factor=None, topk_group=None"
EXPERTS = "FusedMoEPermuteExpertsUnpermute"
#: Name -> its published parameters. More parameters, all with defaults, may follow.
SIGNATURES = {
    "FusedMoEModularKernel": "prepare_finalize, fused_experts",
    "FusedMoEModularKernel.forward": (
        "hidden_states, w1, w2, topk_weights, topk_ids, inplace=False, activation='silu', global_num_experts=-1, "
        "expert_map=None, w1_scale=None, w2_scale=None, w1_zp=None, w2_zp=None, a1_scale=None, a2_scale=None, "
        "apply_router_weight_on_input=False"
    ),
    "FusedMoEKernel": "prepare_finalize, fused_experts",
    "FusedMoEKernel.apply": KERNEL.format("topk_weights, topk_ids"),
    "FusedMoEKernelModularImpl.apply": (
        "hidden_states, w1, w2, topk_ids, topk_weights, activation='silu', global_num_experts=-1, expert_map=None, "
        "apply_router_weight_on_input=False, shared_experts=None, shared_experts_input=None"
    ),
    "FusedMoEKernelMonolithicImpl.apply": f"{MONOLITHIC_CALL}, apply_router_weight_on_input, {GROUPED}",
    "FusedMoEExpertsMonolithic.apply": (
        f"{MONOLITHIC_CALL}, a1q_scale, apply_router_weight_on_input, {GROUPED}, routing_replay_out=None"
    ),
    "FusedMoEPrepareAndFinalizeMonolithic.prepare": "a1, router_logits, quant_config, defer_input_quant=False",
    "FusedMoEPrepareAndFinalizeMonolithic.finalize": "fused_expert_output",
    "FusedMoEConfig": (
        "num_experts, experts_per_token, hidden_dim, intermediate_size, num_local_experts, num_logical_experts, "
        "activation, device, routing_method, moe_parallel_config, in_dtype, router_logits_dtype=None"
    ),
    "get_routing_method_type": "scoring_func, top_k, renormalize, num_expert_group, has_e_score_bias",
    "apply_moe_activation": "activation, output, input",
    "FusedMoEPrepareAndFinalize.prepare": PREPARE,
    "FusedMoEPrepareAndFinalize.finalize": REDUCE,
    "MoEPrepareAndFinalizeNoEP.prepare": PREPARE,
    "MoEPrepareAndFinalizeNoEP.finalize": REDUCE,
    "MoEPrepareAndFinalizeNaiveEP.prepare_async": NEWEST_PREPARE,
    "MoEPrepareAndFinalizeNaiveEP.finalize_async": REDUCE,
    "DeepEPHTPrepareAndFinalize": "buffer, num_dispatchers, dp_size=1, rank_expert_offset=None",
    "DeepEPHTPrepareAndFinalize.prepare_async": NEWEST_PREPARE,
    "DeepEPHTPrepareAndFinalize.finalize_async": REDUCE,
    "DeepEPLLPrepareAndFinalize": "buffer, max_tokens_per_rank, num_dispatchers, use_fp8_dispatch=False",
    "DeepEPLLPrepareAndFinalize.prepare_async": NEWEST_PREPARE,
    "DeepEPLLPrepareAndFinalize.finalize_async": REDUCE,
    "BatchedPrepareAndFinalize": "max_num_tokens, num_local_experts",
    "BatchedPrepareAndFinalize.prepare": PREPARE,
    "BatchedPrepareAndFinalize.finalize": REDUCE,
    "TopKWeightAndReduceNaiveBatched": "rank=0",
    "TopKWeightAndReduce.apply": REDUCE,
    f"{EXPERTS}.workspace_shapes": SHAPES,
    f"{EXPERTS}.workspace_dtype": "activation_dtype",
    f"{EXPERTS}.apply": APPLY,
    f"{EXPERTS}.activation": "activation, output, input",
    f"{EXPERTS}.activation_format": "",
    f"{EXPERTS}.supports_chunking": "",
    f"{EXPERTS}.supports_expert_map": "",
    f"{EXPERTS}.finalize_weight_and_reduce_impl": "",
    f"{EXPERTS}.moe_problem_size": "a1, w1, w2, topk_ids",
    f"{EXPERTS}.adjust_N_for_activation": "N, activation",
    f"{EXPERTS}.supports": "config, device",
    f"{EXPERTS}._supports_current_device": "",
    f"{EXPERTS}._supports_no_act_and_mul": "",
    f"{EXPERTS}._supports_quant_scheme": "weight_key, activation_key",
    f"{EXPERTS}._supports_activation": "activation",
    f"{EXPERTS}._supports_parallel_config": "parallel_config",
    "ExpertTokensMetadata": "expert_num_tokens, expert_num_tokens_cpu=None",
    "FusedMoEQuantConfig.make": (
        "use_fp8_w8a8=False, use_int8_w8a8=False, use_int8_w8a16=False, use_int4_w4a16=False, use_mxfp4_w4a4=False, "
        "per_act_token_quant=False, block_shape=None"
    ),
    "make_routing_data": "topk_ids, topk_weights, num_local_experts",
    "RoutingData": "gate_scal, expt_hist, n_expts_tot, n_expts_act, expt_data=None",
    "GatherIndx": "src_indx, dst_indx",
    "ScatterIndx": "src_indx, dst_indx",
    "BaseOAITritonExperts._make_routing_data": "topk_ids, topk_weights, num_local_experts",
    "UnfusedOAITritonExperts.moe_sum": "input, output",
    "LoRAExpertsMixin.set_lora_context": "ctx",
    "MoELoRAContext": (
        "w13_lora_a_stacked, w13_lora_b_stacked, w2_lora_a_stacked, w2_lora_b_stacked, adapter_enabled, max_loras, "
        "top_k, w13_num_slices, fully_sharded, tp_rank, tp_size, local_num_experts"
    ),
    "triton_kernel_fused_experts": (
        "output_tensor, hidden_states, w1, w2, routing_data, gather_indx, scatter_indx, topk, activation='swiglu_oai', "
        "quant_config=None, swiglu_alpha=1.702, swiglu_limit=7.0, apply_router_weight_on_input=False, "
        "global_num_experts=-1, expert_map=None, intermediate_cache=None, a1q_scale=None"
    ),
    "triton_kernel_moe_forward": (
        "hidden_states, w1, w2, gating_output, topk, renormalize, activation='swiglu_oai', quant_config=None, "
        "apply_router_weight_on_input=False, global_num_experts=-1, expert_map=None"
    ),
    "BatchedDeepGemmExperts": "max_num_tokens, num_dispatchers=1",
    "TritonOrDeepGemmExperts": (
        "use_fp8_w8a8=False, use_int8_w8a8=False, use_int8_w8a16=False, use_int4_w4a16=False, use_mxfp4_w4a4=False, "
        "per_act_token_quant=False, block_shape=None, allow_deep_gemm=False"
    ),
    "TritonOrDeepGemmExperts.explain": "hidden_states, w1, w2",
    "m_grouped_fp8_gemm_nt_contiguous": (
        "a, b, d, m_indices, recipe=None, compiled_dims='nk', disable_ue8m0_cast=False"
    ),
    "m_grouped_fp8_gemm_nt_masked": (
        "a, b, d, masked_m, expected_m, recipe=None, compiled_dims='nk', disable_ue8m0_cast=False"
    ),
    "deep_gemm_block_shape": "",
    "is_blackwell_deep_gemm_e8m0_used": "",
    "pack_bitmatrix": ("bitmatrix, topk_ids, n_rows, bm_cols, n_expts_act, BLOCK_SIZE_M=512, BLOCK_SIZE_K=32"),
}
for _name in (
    *("OAITritonExperts", "UnfusedOAITritonExperts", "TritonExperts", "BatchedTritonExperts", "DeepGemmExperts"),
    *("BatchedDeepGemmExperts", "TritonOrDeepGemmExperts"),
):
    SIGNATURES |= {f"{_name}.apply": APPLY, f"{_name}.workspace_shapes": SHAPES}
#: Published names without parameters of their own.
PLAIN = (
    *("FusedMoEActivationFormat.Standard", "FusedMoEActivationFormat.BatchedExperts"),
    *("FUSED_MOE_UNQUANTIZED_CONFIG", "FusedMoEPermuteExpertsUnpermute.activation_formats"),
    *("FusedMoEParallelConfig", "QuantKey", "TopKWeightAndReduceNoOP", "TopKWeightAndReduceContiguous"),
    *("TopKWeightAndReduceDelegate", "BaseOAITritonExperts", "DeepGemmExperts", "RoutingMethodType"),
    *("PrepareResultType", "PrepareMonolithicResultType", "ReceiverType", "FusedMoEExperts"),
)


def found(dotted: str, start: Any = modular) -> Any:
    for part in dotted.split("."):
        start = getattr(start, part)
    return start


def published(text: str) -> Callable[..., None]:
    """A function with these parameters."""
    scope: dict[str, Any] = {"modular": modular}
    exec(f"def f({text}): pass", scope)
    return scope["f"]


@pytest.mark.parametrize("name", SIGNATURES)
def test_published_signatures_bind(name: str) -> None:
    wanted = list(inspect.signature(published(SIGNATURES[name])).parameters.values())
    own = [parameter for parameter in inspect.signature(found(name)).parameters.values() if parameter.name != "self"]
    usual = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    ours = [(parameter.name, parameter.default) for parameter in own if parameter.kind in usual]
    assert ours[: len(wanted)] == [(parameter.name, parameter.default) for parameter in wanted]
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    extra = [p for p in own if p.name not in {w.name for w in wanted} and p.kind not in variadic]
    assert all(parameter.default is not parameter.empty for parameter in extra), extra


def test_every_public_name_is_published_or_listed() -> None:
    for name in PLAIN:
        assert found(name) is not None
    listed = {name.partition(".")[0] for names, _ in table_rows() for name in names}
    assert set(modular.__all__) <= listed, set(modular.__all__) - listed
    undocumented = {name for name in (*SIGNATURES, *PLAIN) if not re.search(rf"\b{name.rpartition('.')[2]}\b", PAGE)}
    assert not undocumented, undocumented


def table_rows() -> list[tuple[list[str], list[str]]]:
    """(names, their names in JAX) of each row of the page's table of names."""
    rows = []
    for line in PAGE.partition("\n## Names\n")[2].splitlines():
        if line.startswith("| `"):
            names, in_jax, _ = (re.findall(r"`([\w.]+)`", cell) for cell in line.strip("|").split("|"))
            rows.append((names, in_jax + names * ("the same" in line.split("|")[2])))
    assert rows
    return rows


FOLDERS = [ROOT / "tests" / name for name in ("modular", "support", "examples")]
TESTS = "".join(path.read_text() for folder in FOLDERS for path in folder.rglob("*.py"))
#: Tests read their fields and need not name them.
RESULTS = ("SentTokens", "SlotContext")


@pytest.mark.parametrize("row", table_rows(), ids=lambda row: row[0][0])
def test_rows_of_the_page_exist(row: tuple[list[str], list[str]]) -> None:
    """A name and its names in JAX exist, and tests use them."""
    names, in_jax = row
    modules = [(name, modular) for name in names if name not in in_jax or hasattr(modular, name)]
    modules += [(name, importlib.import_module("moe_jax.modular")) for name in in_jax]
    for name, module in modules:
        assert found(name, module) is not None
        assert name in RESULTS or re.search(rf"\b{name.rpartition('.')[2]}\b", TESTS), f"no test uses {name}"
