"""fp8 e4m3 with fp32 scales: per tensor, channel, token, 128 x 128 block (weights) and 1 x 128 group (activations).

s = max(amax, 1e-10) / 448, rounded up to a power of two in the `_pow2` variants; q = x / s in fp32, a true division,
clamped to +-448, rounded half to even.
"""

from __future__ import annotations

import dataclasses

from moe_core.formats.format import Format, Scheme, register_format, register_scheme

BLOCK = 128

FP8_TENSOR = register_format(Format("fp8_tensor", "e4m3", None, None))
FP8_CHANNEL = register_format(Format("fp8_channel", "e4m3", 1, None))
FP8_TOKEN = register_format(Format("fp8_token", "e4m3", 1, None))
FP8_BLOCK = register_format(Format("fp8_block", "e4m3", BLOCK, BLOCK))
FP8_GROUP = register_format(Format("fp8_group", "e4m3", 1, BLOCK))


FP8_TENSOR_POW2, FP8_CHANNEL_POW2, FP8_TOKEN_POW2, FP8_BLOCK_POW2, FP8_GROUP_POW2 = (
    register_format(dataclasses.replace(format, name=f"{format.name}_pow2", scale_rule="power_of_two"))
    for format in (FP8_TENSOR, FP8_CHANNEL, FP8_TOKEN, FP8_BLOCK, FP8_GROUP)
)

register_scheme(Scheme("fp8_tensor", FP8_TENSOR, FP8_TENSOR))
register_scheme(Scheme("fp8_channel", FP8_CHANNEL, FP8_TOKEN))
register_scheme(Scheme("fp8_block", FP8_BLOCK, FP8_GROUP))
register_scheme(Scheme("fp8_block_pow2", FP8_BLOCK_POW2, FP8_GROUP_POW2))
