"""Products of the Hopper matmul that store the pre-activation, have tall row blocks or swapped operands, and those of
the shipped table, for the compile gate."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, TileConfig
from moe_core.specs.operands import MatmulOperands
from moe_core.specs.tile_table import shipped_table


def keeping(target: Target) -> Iterator[LaunchPlan]:
    """Pre-activations stored: everything optional, where registers are fewest."""
    layout, d, n, e = LayoutSpec(2048, 4, 16), 1024, 360, 16
    x, layer = ArraySpec((layout.num_tokens, d), "bfloat16"), ArraySpec((1,), "int32")
    for weight_layout, activation in (
        ("out_in", Activation("gelu_tanh")),
        ("in_out", Activation("gelu_tanh", gate_layout="separate")),
        ("out_in", Activation("swiglu_oai", gate_layout="interleaved")),
        ("in_out", Activation("gelu_tanh", gated=False)),
        # The activation that needs most registers of those that are not refused.
        ("out_in", Activation("softcapped_silu")),
    ):
        width = 2 * n if activation.gate_layout in ("halves", "interleaved") else n
        weight = ArraySpec((3, e, *((d, width) if weight_layout == "in_out" else (width, d))), "bfloat16")
        bias, second = ArraySpec((3, e, width), "float32"), activation.gate_layout == "separate"
        up, up_bias = (weight, bias) if second else (None, None)
        operands = MatmulOperands(x, weight, up=up, bias=bias, up_bias=up_bias, layer_index=layer)
        spec = MatmulSpec(weight_layout, "token", "row", activation)
        for outputs in (("y", "pre"),) if activation.gated else (("y", "pre"), ("pre",)):
            yield plan_matmul_ogs(operands, layout, spec, target, stage=0, outputs=outputs)


def tall_config(spec: MatmulSpec, num_stages: int = 3) -> TileConfig:
    """Row blocks of 192 for a product."""
    gated = spec.activation is not None and spec.activation.gated
    return TileConfig(192, 128 if gated else 256, 64, 4, num_stages, 4, "sm90")


def tall(target: Target) -> Iterator[LaunchPlan]:
    """Row blocks of 192: both products of layers, then everything optional, on layouts of our own and on others."""
    for layers in (_tall_layers, _tall_options):
        for operands, layout, spec, stage in layers():
            yield plan_matmul_ogs(operands, layout, spec, target, config=tall_config(spec), stage=stage)


def swapped(target: Target) -> Iterator[LaunchPlan]:
    """Row blocks of 160 with swapped operands: the products of tall blocks, and pre-activations."""
    for layers in (_tall_layers, _tall_options):
        for operands, layout, spec, stage in layers():
            full = spec.gather != "row" and operands.row_weight is not None
            config = dataclasses.replace(tall_config(spec, 3 if full else 4), block_m=160)
            keeps = spec.activation is not None and stage == 0
            outputs = ("y", "pre") if keeps and operands.layer_index is not None else ("y",)
            yield plan_matmul_ogs(operands, layout, spec, target, config=config, stage=stage, outputs=outputs)


def _tall_layers() -> Iterator[tuple[MatmulOperands, LayoutSpec, MatmulSpec, int | None]]:
    oai = Activation("swiglu_oai", gate_layout="interleaved")
    models = ((2880, 2880, oai, "bfloat16"), (2048, 768, Activation("silu"), "bfloat16"))
    models += ((2048, 768, Activation("silu"), "float16"),)
    layout, e = LayoutSpec(4096, 4, 16), 16
    for (d, f, activation, dtype), in_out in itertools.product(models, (True, False)):
        weight_layout, slots = "in_out" if in_out else "out_in", ArraySpec((layout.num_slots,), "float32")
        first = ArraySpec((e, *((d, 2 * f) if in_out else (2 * f, d))), dtype)
        second = ArraySpec((e, *((f, d) if in_out else (d, f))), dtype)
        biases = [ArraySpec((e, width), "float32") if activation is oai else None for width in (2 * f, d)]
        x, hidden = ArraySpec((layout.num_tokens, d), dtype), ArraySpec((layout.capacity, f), dtype)
        spec = MatmulSpec(weight_layout, "token", "row", activation)
        yield MatmulOperands(x, first, bias=biases[0]), layout, spec, 0
        operands = MatmulOperands(hidden, second, bias=biases[1], row_weight=slots)
        yield operands, layout, MatmulSpec(weight_layout, "row", "row"), 1


def _tall_options() -> Iterator[tuple[MatmulOperands, LayoutSpec, MatmulSpec, int | None]]:
    layout, d, n, e = LayoutSpec(2048, 4, 16), 1024, 360, 16
    layer, row_weight = ArraySpec((1,), "int32"), ArraySpec((layout.num_slots,), "float32")
    for activation, in_out, stage in itertools.product(
        (
            Activation("gelu_tanh"),
            Activation("silu", gate_layout="separate"),
            Activation("swiglu_oai", gate_layout="interleaved"),
            Activation("gelu_tanh", gated=False),
            None,
        ),
        (True, False),
        (0, None),
    ):
        split = activation is not None and activation.gate_layout == "separate"
        width = 2 * n if activation is not None and activation.gated and not split else n
        weight = ArraySpec((3, e, *((d, width) if in_out else (width, d))), "bfloat16")
        bias = ArraySpec((3, e, width), "bfloat16")
        # Where nothing is known of the layout, what is written is found by slot. Products 1 have no row weights.
        gather, scatter, rows = ("token", "row", 2048) if stage == 0 else ("slot", "slot", layout.num_slots)
        operands = MatmulOperands(
            ArraySpec((rows, d), "bfloat16"),
            weight,
            up=weight if split else None,
            bias=bias,
            up_bias=bias if split else None,
            row_weight=row_weight if stage is None else None,
            layer_index=layer,
        )
        spec = MatmulSpec("in_out" if in_out else "out_in", gather, scatter, activation)
        yield operands, layout, spec, stage


def shipped(target: Target) -> Iterator[LaunchPlan]:
    """A product for every entry of the shipped table, which is what it is planned with."""
    for problem in (entry.problem for entry in shipped_table(target.arch).entries):
        layout, in_out, d = LayoutSpec(problem.rows, 1, problem.groups), problem.weight_layout == "in_out", problem.d
        x = ArraySpec((layout.num_tokens, d), problem.dtype)
        if problem.buffers == 1:
            activations, gather, scatter = (None,), "row", "slot"
        else:
            activations = tuple(
                Activation("silu", gate_layout=gate_layout) for gate_layout in ("halves", "interleaved")
            )
            gather, scatter = "token", "row"
        for activation in activations:
            width = problem.n * problem.buffers
            weight = ArraySpec((problem.groups, *((d, width) if in_out else (width, d))), problem.dtype)
            spec = MatmulSpec(problem.weight_layout, gather, scatter, activation)
            plan = plan_matmul_ogs(MatmulOperands(x, weight), layout, spec, target)
            assert "measured: the shipped table" in plan.explain()
            yield plan
