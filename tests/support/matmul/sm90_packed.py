"""Cases and configurations of the sm90_packed family."""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_core.base.dtypes import numpy_dtype
from moe_core.base.target import Target
from moe_core.formats import MXFP4, Format, QuantizedTensor
from moe_core.formats.tiling import block_of
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.matmul.sm90_packed.few_rows_plan import few_rows_config
from moe_core.ops.matmul.sm90_packed.plan import mixed_input_config
from moe_core.ops.prepack.prepack import tile
from moe_core.ops.quantize.reference import quantize
from moe_core.specs import LayoutSpec, MatmulSpec, TileConfig
from moe_core.specs.operands import MatmulOperands, map_arrays, named_arrays
from tests.support.harness import run_plan, spec_of
from tests.support.matmul.sm90 import SM_90
from tests.support.strategies import draw_array

#: Every height of the mixed-input family's tiles, with the most mean rows of an expert it is taken for.
HEIGHTS = {16: 10, 32: 24, 64: 48, 128: 60}


def draw_product(
    epilogue: tuple, layout: LayoutSpec, d: int, n: int, seed: int, format: Format = MXFP4, scale_dtype: str = "float32"
) -> tuple[MatmulOperands, MatmulSpec]:
    """Operands whose weight is not prepacked yet: codes of every kind, of mxfp4 scales small, great and denormal.
    scale_dtype: of other formats' scales."""
    activation, gather, scatter, weighted, biased, stacked = epilogue
    random = np.random.default_rng(seed)
    width = 2 * n if activation is not None and activation.gated else n
    lead = (2, layout.num_experts) if stacked else (layout.num_experts,)
    weight = quantize(draw_array(random, (*lead, width, d), rms=1.5 * d**-0.5), format)
    if format.has_e8m0_scales:
        # In a few groups scales of 2^-127 and of 2, whose codes are small so that they do not outweigh all others.
        random_groups = random.random(weight.scales.shape)
        great = random_groups > 0.999
        weight.scales[random_groups < 0.02] = 0
        weight.scales[great] = 128
        codes = weight.values.reshape(*weight.scales.shape, 16)
        codes[great] = codes[great] & 0x88 | 0x11
    else:
        weight = dataclasses.replace(weight, scales=weight.scales.astype(numpy_dtype(scale_dtype)))
    rows = {"row": layout.capacity, "token": layout.num_tokens, "slot": layout.num_slots}[gather]
    operands = MatmulOperands(
        draw_array(random, (rows, d), "bfloat16"),
        weight,
        bias=draw_array(random, (*lead, width)) if biased else None,
        row_weight=random.random(layout.num_slots, np.float32) if weighted else None,
        layer_index=np.array([1], np.int32) if stacked else None,
    )
    return operands, MatmulSpec("out_in", gather, scatter, activation)


def prepacked(operands: MatmulOperands, spec: MatmulSpec) -> MatmulOperands:
    activation = spec.activation
    gate_layout = activation.gate_layout if activation is not None and activation.gated else None
    return dataclasses.replace(operands, weight=tile(operands.weight, gate_layout or "rows"))


def run_product(
    operands: MatmulOperands, layout: LayoutSpec, arrays: dict, spec: MatmulSpec, target: Target
) -> np.ndarray:
    plan = plan_matmul_ogs(map_arrays(operands, spec_of), layout, spec, target)
    given = dict(named_arrays(operands)) | arrays
    return run_plan(plan, {buffer.name: given[buffer.name] for buffer in plan.inputs})["y"]


def configurations(weight: QuantizedTensor, spec: MatmulSpec) -> list[TileConfig]:
    """Of both families, for a prepacked weight, the stream's with every number of steps under way."""
    weight = map_arrays(weight, spec_of)
    columns, config = block_of(weight.format).columns, few_rows_config(weight, spec)
    streams = [dataclasses.replace(config, block_k=chunk * columns) for chunk in (2, 3, 4, 6, 8)]
    return [*streams, *(mixed_input_config(rows, weight, spec, SM_90) for rows in HEIGHTS.values())]
