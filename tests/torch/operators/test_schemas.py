"""The schemas of the operators, which exported programs know by name, order and kind of every argument."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_torch.bridge.operator import Operator
from moe_torch.operators import exchange, routes, stages, table, watched
from moe_torch.parallel.calls import compiled

# What many operators have in common, as it stands in their schemas.
PARTS = {
    "EXPERTS": (
        "Tensor experts_gate_up, Tensor experts_down, Tensor? experts_up, Tensor? experts_gate_up_bias, Tensor? "
        "experts_up_bias, Tensor? experts_down_bias, Tensor? experts_layer_index"
    ),
    "QUANTIZED_EXPERTS": (
        "Tensor experts_gate_up, Tensor? experts_gate_up_scales, Tensor? experts_gate_up_zero_points, Tensor "
        "experts_down, Tensor? experts_down_scales, Tensor? experts_down_zero_points, Tensor? experts_up, Tensor? "
        "experts_up_scales, Tensor? experts_up_zero_points, Tensor? experts_gate_up_bias, Tensor? experts_up_bias, "
        "Tensor? experts_down_bias, Tensor? experts_layer_index"
    ),
    "REST": (
        "Tensor? token_mask, Tensor? expert_map, Tensor? shared_gate_up, Tensor? shared_down, Tensor? shared_up, "
        "Tensor? shared_gate"
    ),
    "SAVED": (
        "Tensor? saved_pre_activation, Tensor saved_group_start, Tensor saved_slot_of_row, Tensor "
        "saved_row_of_slot, Tensor? saved_shared_pre_activation, Tensor? saved_shared_gate"
    ),
    "OVERWRITTEN": (
        "Tensor(a!)? saved_pre_activation, Tensor saved_group_start, Tensor saved_slot_of_row, Tensor "
        "saved_row_of_slot, Tensor? saved_shared_pre_activation, Tensor? saved_shared_gate"
    ),
    "INTO": (
        "Tensor(b!)? into_experts_gate_up, Tensor(c!)? into_experts_down, Tensor(d!)? into_experts_up, Tensor(e!)? "
        "into_shared_gate_up, Tensor(f!)? into_shared_down, Tensor(g!)? into_shared_up"
    ),
    "INTO_LATER": (
        "Tensor(c!)? into_experts_gate_up, Tensor(d!)? into_experts_down, Tensor(e!)? into_experts_up, Tensor(f!)? "
        "into_shared_gate_up, Tensor(g!)? into_shared_down, Tensor(h!)? into_shared_up"
    ),
    "INPUT_SCALES": ("Tensor? experts_gate_up_input_scale, Tensor? experts_down_input_scale"),
    "LORA": (
        "Tensor? lora_a1, Tensor? lora_b1, Tensor? lora_a2, Tensor? lora_b2, Tensor? lora_scale, Tensor? lora_ranks, "
        "Tensor? lora_seed, Tensor adapter_ids"
    ),
    "LOWS": ("Tensor saved_virtual_sizes, Tensor saved_virtual_start, Tensor? saved_low1, Tensor? saved_low2"),
    "LAYOUT": ("Tensor? group_sizes, Tensor? group_start, Tensor? slot_of_row, Tensor? row_of_slot"),
}
SCHEMAS = """
across_ranks(Tensor[] arrays, str options) -> Tensor[]
across_ranks_backward(Tensor token, Tensor[] gradients, Tensor[] given) -> Tensor[]
across_ranks_training(Tensor[] arrays, int[] asked, str options) -> Tensor[]
activation(Tensor x, Tensor? up, str options) -> Tensor
activation_backward(Tensor d_y, Tensor x, Tensor? up, str options) -> Tensor[]
combine_pull_weights(Tensor owners, Tensor rows, Tensor weights_at, Tensor(a!)? memory, str options) -> Tensor
combine_push(Tensor y, Tensor sources, Tensor group_start, Tensor slots_at, Tensor(a!)? memory, str options) -> ()
dispatch_push(Tensor x, Tensor owners, Tensor rows, Tensor rows_at, Tensor? scales_at, Tensor(a!)? memory, str
    options) -> ()
experts_in_parts(Tensor x, {EXPERTS}, Tensor routing_ids, Tensor routing_weights, {REST}, Tensor? results_at,
    Tensor(a!)? memory, str options) -> (Tensor, Tensor, Tensor)
experts_in_parts_quantized(Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_ids, Tensor routing_weights, {REST},
    {INPUT_SCALES}, Tensor? results_at, Tensor(a!)? memory, str options) -> (Tensor, Tensor, Tensor)
experts_push(Tensor x, {EXPERTS}, Tensor routing_ids, Tensor routing_weights, {REST}, Tensor results_at, Tensor?
    gradients_at, Tensor(a!)? memory, str options) -> (Tensor, Tensor, Tensor)
experts_push_quantized(Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_ids, Tensor routing_weights, {REST},
    {INPUT_SCALES}, Tensor results_at, Tensor? gradients_at, Tensor(a!)? memory, str options) -> (Tensor, Tensor,
    Tensor)
experts_push_quantized_training(Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_ids, Tensor routing_weights, {REST},
    {INPUT_SCALES}, Tensor results_at, Tensor? gradients_at, Tensor(a!)? memory, str options) -> Tensor[]
experts_push_training(Tensor x, {EXPERTS}, Tensor routing_ids, Tensor routing_weights, {REST}, Tensor results_at,
    Tensor? gradients_at, Tensor(a!)? memory, str options) -> Tensor[]
experts_push_backward(Tensor gradients_output, Tensor x, {EXPERTS}, Tensor routing_ids, Tensor routing_weights, {REST},
    Tensor tokens_per_expert, {SAVED}, Tensor results_at, Tensor(a!)? memory, str options) -> Tensor[]
experts_push_backward_into(Tensor gradients_output, Tensor x, {EXPERTS}, Tensor routing_ids, Tensor routing_weights,
    {REST}, Tensor tokens_per_expert, {OVERWRITTEN}, Tensor results_at, Tensor(b!)? memory, {INTO_LATER}, str
    options) -> Tensor[]
experts_push_quantized_backward(Tensor gradients_output, Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_ids, Tensor
    routing_weights, {REST}, Tensor tokens_per_expert, {SAVED}, Tensor results_at, Tensor(a!)? memory, str options)
    -> Tensor[]
experts_push_quantized_backward_into(Tensor gradients_output, Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_ids,
    Tensor routing_weights, {REST}, Tensor tokens_per_expert, {OVERWRITTEN}, Tensor results_at, Tensor(b!)? memory,
    {INTO_LATER}, str options) -> Tensor[]
gather_rows(Tensor x, Tensor slot_of_row, Tensor row_of_slot, Tensor? wide, str options) -> Tensor
grouped_contraction(Tensor left, Tensor right, Tensor offs, str options) -> Tensor
grouped_mm(Tensor x, Tensor weight, Tensor? bias, Tensor offs, str options) -> Tensor
grouped_mm_quantized(Tensor x, Tensor? x_scales, Tensor? x_zero_points, Tensor weight, Tensor? weight_scales, Tensor?
    weight_zero_points, Tensor? bias, Tensor offs, str options) -> Tensor
layout_of_runs(Tensor counts, str options) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)
make_bounded_layout(Tensor ids, Tensor? expert_map, Tensor? token_mask, str options) -> (Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor)
make_layout(Tensor ids, Tensor? expert_map, Tensor? token_mask, str options) -> (Tensor, Tensor, Tensor, Tensor,
    Tensor)
matmul_ogs(Tensor x, Tensor weight, Tensor? up, Tensor? bias, Tensor? up_bias, Tensor? row_weight, Tensor?
    layer_index, {LAYOUT}, str options) -> Tensor
matmul_ogs_backward(Tensor d_y, Tensor x, Tensor weight, Tensor? up, Tensor? bias, Tensor? up_bias, Tensor?
    row_weight, Tensor? layer_index, {LAYOUT}, str options) -> Tensor[]
matmul_ogs_quantized(Tensor x, Tensor? x_scales, Tensor? x_zero_points, Tensor weight, Tensor? weight_scales,
    Tensor? weight_zero_points, Tensor? up, Tensor? up_scales, Tensor? up_zero_points, Tensor? bias, Tensor?
    up_bias, Tensor? row_weight, Tensor? layer_index, {LAYOUT}, str options) -> Tensor
matmul_ogs_quantized_backward(Tensor d_y, Tensor x, Tensor? x_scales, Tensor? x_zero_points, Tensor weight,
    Tensor? weight_scales, Tensor? weight_zero_points, Tensor? up, Tensor? up_scales, Tensor? up_zero_points,
    Tensor? bias, Tensor? up_bias, Tensor? row_weight, Tensor? layer_index, {LAYOUT}, str options) -> Tensor[]
moe.router_logits(Tensor x, {EXPERTS}, Tensor routing_logits, Tensor? routing_correction_bias, {REST}, str
    options) -> (Tensor, Tensor, Tensor, Tensor, Tensor)
moe.router_weights(Tensor x, {EXPERTS}, Tensor routing_weight, Tensor? routing_bias, Tensor?
    routing_correction_bias, {REST}, str options) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)
moe.top_k(Tensor x, {EXPERTS}, Tensor routing_ids, Tensor routing_weights, {REST}, str options) -> (Tensor,
    Tensor, Tensor)
moe_backward.router_logits(Tensor gradients_output, Tensor? gradients_weights, Tensor x, {EXPERTS}, Tensor
    routing_logits, Tensor? routing_correction_bias, {REST}, Tensor tokens_per_expert, Tensor ids, Tensor
    weights, {SAVED}, str options) -> Tensor[]
moe_backward.router_weights(Tensor gradients_output, Tensor? gradients_weights, Tensor? gradients_logits, Tensor
    x, {EXPERTS}, Tensor routing_weight, Tensor? routing_bias, Tensor? routing_correction_bias, {REST}, Tensor
    tokens_per_expert, Tensor ids, Tensor weights, Tensor logits, {SAVED}, str options) -> Tensor[]
moe_backward.top_k(Tensor gradients_output, Tensor x, {EXPERTS}, Tensor routing_ids, Tensor routing_weights,
    {REST}, Tensor tokens_per_expert, {SAVED}, str options) -> Tensor[]
moe_backward_into.router_logits(Tensor gradients_output, Tensor? gradients_weights, Tensor x, {EXPERTS}, Tensor
    routing_logits, Tensor? routing_correction_bias, {REST}, Tensor tokens_per_expert, Tensor ids, Tensor
    weights, {OVERWRITTEN}, {INTO}, str options) -> Tensor[]
moe_backward_into.router_weights(Tensor gradients_output, Tensor? gradients_weights, Tensor? gradients_logits,
    Tensor x, {EXPERTS}, Tensor routing_weight, Tensor? routing_bias, Tensor? routing_correction_bias, {REST},
    Tensor tokens_per_expert, Tensor ids, Tensor weights, Tensor logits, {OVERWRITTEN}, {INTO}, str options) ->
    Tensor[]
moe_backward_into.top_k(Tensor gradients_output, Tensor x, {EXPERTS}, Tensor routing_ids, Tensor
    routing_weights, {REST}, Tensor tokens_per_expert, {OVERWRITTEN}, {INTO}, str options) -> Tensor[]
moe_lora.router_logits(Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_logits, Tensor? routing_correction_bias, {REST},
    {INPUT_SCALES}, {LORA}, str options) -> (Tensor, Tensor, Tensor, Tensor, Tensor)
moe_lora.router_weights(Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_weight, Tensor? routing_bias, Tensor?
    routing_correction_bias, {REST}, {INPUT_SCALES}, {LORA}, str options) -> (Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor)
moe_lora.top_k(Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_ids, Tensor routing_weights, {REST}, {INPUT_SCALES},
    {LORA}, str options) -> (Tensor, Tensor, Tensor)
moe_lora_backward.router_logits(Tensor gradients_output, Tensor? gradients_weights, Tensor x, {QUANTIZED_EXPERTS},
    Tensor routing_logits, Tensor? routing_correction_bias, {REST}, {LORA}, Tensor tokens_per_expert, Tensor ids,
    Tensor weights, {SAVED}, {LOWS}, str options) -> Tensor[]
moe_lora_backward.router_weights(Tensor gradients_output, Tensor? gradients_weights, Tensor? gradients_logits, Tensor
    x, {QUANTIZED_EXPERTS}, Tensor routing_weight, Tensor? routing_bias, Tensor? routing_correction_bias, {REST},
    {LORA}, Tensor tokens_per_expert, Tensor ids, Tensor weights, Tensor logits, {SAVED}, {LOWS}, str options) ->
    Tensor[]
moe_lora_backward.top_k(Tensor gradients_output, Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_ids, Tensor
    routing_weights, {REST}, {LORA}, Tensor tokens_per_expert, {SAVED}, {LOWS}, str options) -> Tensor[]
moe_lora_backward_into.router_logits(Tensor gradients_output, Tensor? gradients_weights, Tensor x,
    {QUANTIZED_EXPERTS}, Tensor routing_logits, Tensor? routing_correction_bias, {REST}, {LORA}, Tensor
    tokens_per_expert, Tensor ids, Tensor weights, {OVERWRITTEN}, {LOWS}, {INTO}, str options) -> Tensor[]
moe_lora_backward_into.router_weights(Tensor gradients_output, Tensor? gradients_weights, Tensor? gradients_logits,
    Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_weight, Tensor? routing_bias, Tensor? routing_correction_bias,
    {REST}, {LORA}, Tensor tokens_per_expert, Tensor ids, Tensor weights, Tensor logits, {OVERWRITTEN}, {LOWS},
    {INTO}, str options) -> Tensor[]
moe_lora_backward_into.top_k(Tensor gradients_output, Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_ids, Tensor
    routing_weights, {REST}, {LORA}, Tensor tokens_per_expert, {OVERWRITTEN}, {LOWS}, {INTO}, str options) -> Tensor[]
moe_lora_training.router_logits(Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_logits, Tensor? routing_correction_bias,
    {REST}, {INPUT_SCALES}, {LORA}, str options) -> Tensor[]
moe_lora_training.router_weights(Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_weight, Tensor? routing_bias, Tensor?
    routing_correction_bias, {REST}, {INPUT_SCALES}, {LORA}, str options) -> Tensor[]
moe_lora_training.top_k(Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_ids, Tensor routing_weights, {REST},
    {INPUT_SCALES}, {LORA}, str options) -> Tensor[]
moe_quantized.router_logits(Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_logits, Tensor?
    routing_correction_bias, {REST}, {INPUT_SCALES}, str options) -> (Tensor, Tensor, Tensor, Tensor, Tensor)
moe_quantized.router_weights(Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_weight, Tensor? routing_bias, Tensor?
    routing_correction_bias, {REST}, {INPUT_SCALES}, str options) -> (Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor)
moe_quantized.top_k(Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_ids, Tensor routing_weights, {REST},
    {INPUT_SCALES}, str options) -> (Tensor, Tensor, Tensor)
moe_quantized_backward.router_logits(Tensor gradients_output, Tensor? gradients_weights, Tensor x,
    {QUANTIZED_EXPERTS}, Tensor routing_logits, Tensor? routing_correction_bias, {REST}, Tensor
    tokens_per_expert, Tensor ids, Tensor weights, {SAVED}, str options) -> Tensor[]
moe_quantized_backward.router_weights(Tensor gradients_output, Tensor? gradients_weights, Tensor?
    gradients_logits, Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_weight, Tensor? routing_bias, Tensor?
    routing_correction_bias, {REST}, Tensor tokens_per_expert, Tensor ids, Tensor weights, Tensor logits,
    {SAVED}, str options) -> Tensor[]
moe_quantized_backward.top_k(Tensor gradients_output, Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_ids, Tensor
    routing_weights, {REST}, Tensor tokens_per_expert, {SAVED}, str options) -> Tensor[]
moe_quantized_backward_into.router_logits(Tensor gradients_output, Tensor? gradients_weights, Tensor x,
    {QUANTIZED_EXPERTS}, Tensor routing_logits, Tensor? routing_correction_bias, {REST}, Tensor
    tokens_per_expert, Tensor ids, Tensor weights, {OVERWRITTEN}, {INTO}, str options) -> Tensor[]
moe_quantized_backward_into.router_weights(Tensor gradients_output, Tensor? gradients_weights, Tensor?
    gradients_logits, Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_weight, Tensor? routing_bias, Tensor?
    routing_correction_bias, {REST}, Tensor tokens_per_expert, Tensor ids, Tensor weights, Tensor logits,
    {OVERWRITTEN}, {INTO}, str options) -> Tensor[]
moe_quantized_backward_into.top_k(Tensor gradients_output, Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_ids,
    Tensor routing_weights, {REST}, Tensor tokens_per_expert, {OVERWRITTEN}, {INTO}, str options) -> Tensor[]
moe_quantized_training.router_logits(Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_logits, Tensor?
    routing_correction_bias, {REST}, {INPUT_SCALES}, str options) -> Tensor[]
moe_quantized_training.router_weights(Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_weight, Tensor?
    routing_bias, Tensor? routing_correction_bias, {REST}, {INPUT_SCALES}, str options) -> Tensor[]
moe_quantized_training.top_k(Tensor x, {QUANTIZED_EXPERTS}, Tensor routing_ids, Tensor routing_weights, {REST},
    {INPUT_SCALES}, str options) -> Tensor[]
moe_training.router_logits(Tensor x, {EXPERTS}, Tensor routing_logits, Tensor? routing_correction_bias, {REST},
    str options) -> Tensor[]
moe_training.router_weights(Tensor x, {EXPERTS}, Tensor routing_weight, Tensor? routing_bias, Tensor?
    routing_correction_bias, {REST}, str options) -> Tensor[]
moe_training.top_k(Tensor x, {EXPERTS}, Tensor routing_ids, Tensor routing_weights, {REST}, str options) ->
    Tensor[]
pack_bitmatrix(Tensor ids, str options) -> (Tensor, Tensor, Tensor)
peer_take_rows(Tensor x, Tensor? scales, Tensor rows, Tensor group_start, str options) -> Tensor
peer_places(Tensor ids, Tensor group_start, Tensor row_of_slot, Tensor counts, str options) -> (Tensor, Tensor,
    Tensor, Tensor)
push_counts(Tensor counts, Tensor counts_at, Tensor(a!)? memory, str options) -> ()
push_slots(Tensor weights, Tensor owners, Tensor rows, Tensor? weights_at, Tensor? sources_at, Tensor(a!)? memory,
    str options) -> ()
push_tokens_once(Tensor? x, Tensor ids, Tensor weights, Tensor header, Tensor? places_of_experts, Tensor? given,
    Tensor? token_mask, Tensor? rows_at, Tensor ids_at, Tensor weights_at, Tensor headers_at,
    Tensor(a!)? memory, str options) -> Tensor[]
result_addresses(Tensor sources, Tensor group_start, Tensor slots_at, str options) -> Tensor
quantize_rows(Tensor x, Tensor? static_scale, Tensor? used_by, str options) -> (Tensor, Tensor)
receive_tables(Tensor came, Tensor? header, Tensor? lost, Tensor? counts, Tensor? results, str options) -> Tensor[]
reduce(Tensor y, Tensor row_of_slot, Tensor? shared, Tensor? shared_gate, str options) -> Tensor
route(Tensor logits, Tensor? correction_bias, Tensor? token_mask, Tensor? given, str options) -> (Tensor, Tensor)
route_backward(Tensor gradients_weights, Tensor logits, Tensor ids, Tensor? token_mask, str options) -> Tensor
route_rounded(Tensor logits, Tensor? correction_bias, Tensor? token_mask, str options) -> (Tensor, Tensor, Tensor,
    Tensor)
route_rounded_backward(Tensor d_weights, Tensor logits, Tensor ids, Tensor candidates, str options) -> Tensor
routed(Tensor ids, Tensor weights, int num_experts) -> (Tensor, Tensor)
router(Tensor x, Tensor weight, Tensor? bias, Tensor? wide, str options) -> Tensor
rms_norm(Tensor x, Tensor weight, str options) -> Tensor
rms_norm_backward(Tensor d_y, Tensor x, Tensor weight, str options) -> Tensor[]
router_backward(Tensor d_logits, Tensor x, Tensor weight, Tensor? bias, str options) -> Tensor[]
scale_rows(Tensor x, Tensor weights, str options) -> Tensor
send_tables(Tensor ids, Tensor weights, Tensor places_of_experts, Tensor start, Tensor header, Tensor? token_mask,
    Tensor? tokens, Tensor? limits, str options) -> Tensor[]
sum_results(Tensor y, Tensor row_of_slot, Tensor? headers, Tensor? agree, Tensor? wanted, Tensor? shared, Tensor?
    shared_gate, Tensor(a!)? memory, str options) -> Tensor
sum_results_into(Tensor y, Tensor row_of_slot, Tensor? headers, Tensor? agree, Tensor? wanted, Tensor? shared,
    Tensor? shared_gate, Tensor(a!)? out, Tensor(b!)? memory, str options) -> ()
take_rows(Tensor slot_of_row, Tensor x, Tensor? table, str options) -> Tensor
unpack_bitmatrix(Tensor bitmatrix, str options) -> Tensor
watched(Tensor(a!) counts, Tensor(b!) sums, Tensor? ids, Tensor? tokens_per_expert, Tensor? logits, Tensor? token_mask,
    Tensor? overflow, int number) -> ()
"""


def test_schemas_are_those_that_programs_were_exported_with() -> None:
    """A change here breaks programs that users have stored: it belongs into CHANGELOG.md."""
    # Those of a monitor and of ranks come with their modules.
    assert moe_torch is not None and watched is not None and compiled is not None
    namespace = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("moebius::")]
    known = SCHEMAS.strip().replace("\n    ", " ").format(**PARTS).splitlines()
    assert sorted(str(schema).removeprefix("moebius::") for schema in namespace) == sorted(known)
    names = {schema.partition("(")[0] for schema in known}
    for schema in namespace:
        keys = ("CPU", "CUDA", "Meta")
        name = f"{schema.name}.{schema.overload_name}".rstrip(".")
        assert all(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys), name
    known_here = (*vars(table).values(), *vars(stages).values(), *vars(routes).values(), *vars(exchange).values())
    assert {one.name for one in known_here if isinstance(one, Operator)} <= names
