"""Roles of buffers: composed plans bind a buffer only to one of its role."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Role(enum.Enum):
    """Contents of an array. Values: names of buffers, without their bundle's."""

    ROWS = "x y out output left right"
    PRE = "pre pre_activation shared_pre_activation"
    WEIGHT = "weight gate_up down shared.gate"
    UP = "up"
    BIAS = "bias gate_up_bias down_bias"
    UP_BIAS = "up_bias"
    ROW_WEIGHT = "row_weight weights"
    LAYER_INDEX = "layer_index"
    STATIC_SCALE = "static_scale gate_up_input_scale down_input_scale"
    LOGITS = "logits gate shared_gate"
    CORRECTION_BIAS = "correction_bias"
    TOKEN_MASK = "token_mask row_mask"
    EXPERT_MAP = "expert_map"
    IDS = "ids given"
    GROUP_SIZES = "group_sizes tokens_per_expert d_tokens_per_expert"
    GROUP_START = "group_start"
    SLOT_OF_ROW = "slot_of_row"
    ROW_OF_SLOT = "row_of_slot"
    INVALID_IDS = "invalid_ids"
    OVERFLOW = "overflow"
    RESULTS_AT = "results_at"
    SCHEDULE = "schedule"
    TILE_COUNTERS = "tile_counters"
    MAXIMA = "maxima"
    ADDEND = "shared extra first second total"
    BIAS_PRODUCT = "bias_product products"
    INTO = "into"
    ADAPTER_IDS = "adapter_ids"
    FACTOR = "factor a1 b1 a2 b2"
    FACTOR_SCALE = "scale"
    RANKS = "ranks"
    SEED = "seed"
    VIRTUAL_SIZES = "virtual_sizes"
    VIRTUAL_START = "virtual_start"
    VIRTUAL_SCHEDULE = "virtual_schedule"
    LOW = "low low1 low2"
    D_LOW = "d_low"
    D_FACTOR = "d_factor d_a1 d_b1 d_a2 d_b2"
    D_ROWS = "d_x d_wide d_y d_rows d_hidden d_pre d_output"
    D_WEIGHT = "d_weight d_gate_up d_up d_down d_shared.gate"
    D_BIAS = "d_bias d_gate_up_bias d_up_bias d_down_bias"
    D_ROW_WEIGHT = "d_row_weight d_weights"
    D_LOGITS = "d_logits d_gate"
    D_LOAD_BALANCE = "d_load_balance"
    D_Z = "d_z"


_ROLES = {name: role for role in Role for name in role.value.split()}


class Held(NamedTuple):
    """A role. part: of a quantised array (`values`, `scales`, `zero_points`), or a schedule's block height."""

    role: Role
    part: str = ""

    def __str__(self) -> str:
        return self.role.name.lower() + (self.part and f".{self.part}")


def role_of(name: str) -> Held | None:
    """The role of a buffer with this name, or None.

    `group_sizes`, `tokens_per_expert`: GROUP_SIZES. `saved.slot_of_row`: SLOT_OF_ROW. `d_experts.down`: D_WEIGHT.
    `gradients.weights`: D_ROW_WEIGHT. `experts.down.scales`: WEIGHT, part `scales`. `schedule_64`: SCHEDULE, part `64`.
    """
    array, _, part = name.rpartition(".")
    if part not in ("values", "scales", "zero_points"):
        array, part = name, ""
    if array.startswith("schedule_"):
        array, _, part = array.partition("_")
    bundle, _, word = array.rpartition(".")
    if bundle.startswith("into"):
        word = "into"
    elif bundle == "gradients" or bundle.startswith("d_"):
        word = f"d_{word}"
    role = _ROLES.get(array) or _ROLES.get(word)
    return None if role is None else Held(role, part)
