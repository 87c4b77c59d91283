"""Faults planted in copies of the Hopper kernels, and the process that compiles or runs each copy.

Run as a script: `python -m tests.support.faults.sm90 ACTION FOLDER...`, in a process without TRITON_INTERPRET: Gluon
has no interpreter. Every folder holds kernels and lies in one that is named after one of PRODUCTS; a fork that takes
its kernels from there leaves its exit status in `status` in the folder and its output in `log`. ACTION:

- `lower`, `compile`: for sm_90 as far as TTGIR or PTX, needs no GPU; its text goes to `instructions`. Exits with 0.
- `run`: on the first GPU, against the reference. Exits with 0 where they agree, RESULT_DIFFERS where they do not.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moe_core.base.target import Target
from moe_core.formats import MXFP4, Format, format_named
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.matmul.sm90.plan import SM90_MATMUL_OGS, SM90_SWAPPED_MATMUL_OGS, SM90_TALL_MATMUL_OGS
from moe_core.ops.matmul.sm90.weight_gradient_plan import SM90_WEIGHT_GRADIENT
from moe_core.ops.matmul.sm90_packed.few_rows_plan import MATMUL_FEW_ROWS, few_rows_config
from moe_core.ops.matmul.sm90_packed.plan import MATMUL_MIXED_INPUT, mixed_input_config
from moe_core.ops.matmul.weight_gradient import plan_weight_gradient
from moe_core.parity.tolerance import Tolerance, assert_close, matmul_tolerance, quantized_matmul_tolerance
from moe_core.plan.steps import Kernel, KernelLaunch, LaunchPlan
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, MatmulTuning, TileConfig, WeightGradientSpec
from moe_core.specs.operands import map_arrays
from tests.support.faults.instructions import INSTRUCTIONS, TARGET
from tests.support.faults.kernel_copies import (
    COMPILER,
    OpFault,
    Planted,
    prepare_forks,
    run_on_copy,
    run_on_faulty_copies,
)
from tests.support.faults.low_rank import TAILED, Tailed
from tests.support.harness import engine_target, spec_of
from tests.support.matmul.cases import Case, build, expected_matmul, run_matmul
from tests.support.matmul.composed import expected_composed, filled_rows, plan_composed, run_composed
from tests.support.matmul.sm90_fp8_cases import Fp8Product
from tests.support.matmul.sm90_packed import draw_product, prepacked, run_product
from tests.support.matmul.weight_gradient import Ragged, expected_of, many_rows, run_op
from tests.support.strategies import draw_ids, layout_arrays

#: None changes a wait, or an address beyond what is clamped or masked afterwards: no copy hangs or leaves its arrays.
FAULTS: Planted = {
    "result": {
        "matmul.sm90.kernels.matmul": (
            OpFault("gated(first, last,", "gated(last, first,"),
            OpFault("gl.maximum(slots, 0)", "gl.maximum(slots // 2, 0)"),
            OpFault("tiles.left.index(CHUNKS * stage + WHICH)", "tiles.left.index(CHUNKS * stage)"),
            OpFault("exists = row < tile.rows - FIRST - above", "exists = row < tile.rows - FIRST - above - 1"),
        ),
        "matmul.sm90.kernels.feed": (
            OpFault("weights.NUM_EXPERTS + tile.expert", "weights.NUM_EXPERTS + tile.expert // 2"),
        ),
        "matmul.sm90.kernels.producer": (
            OpFault("gl.arange(0, ROWS, numbers), rows - 1)", "gl.arange(0, ROWS, numbers), rows - 2)"),
            OpFault("within = column * PIECE + columns % PIECE", "within = column * PIECE + (columns + 1) % PIECE"),
            OpFault('second = first + (weights.N if weights.GATE_LAYOUT == "halves" else 0)', "second = first"),
        ),
        "matmul.sm90.kernels.pipeline": (
            OpFault("write_fact(pipeline, place, 3, column)", "write_fact(pipeline, place, 3, column // 2)"),
            OpFault("left = within & (expert >= 0)", "left = within & (expert == 0)"),
        ),
    },
    "halves and their result": {
        "matmul.sm90.kernels.matmul": (
            OpFault("tile.column * PIECE + PART * product.output.N", "tile.column * PIECE + PART * PIECE"),
            OpFault("start.to(gl.int64) + FIRST + above", "start.to(gl.int64) + FIRST + above // 2"),
        )
    },
    "pairs and their result": {
        "matmul.sm90.kernels.matmul": (
            OpFault("store_pre(product, tile, last", "store_pre(product, tile, first"),
            OpFault("store_pre(product, tile, last", "store_pre(product, tile, result"),
            OpFault(
                "gl.split(gl.reshape(half, [ROWS, PIECE // 2, 2]))",
                "gl.split(gl.permute(gl.reshape(half, [ROWS, 2, PIECE // 2]), [0, 2, 1]))",
            ),
        )
    },
    "gradient": {
        "matmul.sm90.kernels.weight_gradient": (
            OpFault("tiles.left.index(2 * stage + WHICH)", "tiles.left.index(2 * stage)"),
            OpFault("exists = first + within < size", "exists = first + within < size - 1"),
            OpFault("piece = first if part == 0 else last", "piece = first"),
            OpFault("[start + first, right.START + n]", "[start, right.START + n]"),
            OpFault("group * gradients.M + m, m, n", "group * gradients.M + m, m, n // 2"),
            OpFault("slot_of_row + start + within, mask", "slot_of_row + start + within // 2, mask"),
            OpFault("[DEPTH, ROWS], 1.0", "[DEPTH, ROWS], 2.0"),
        )
    },
    "fp8": {
        "matmul.sm90.kernels.fp8": (
            OpFault("x_scale * first_scale, x_scale * last_scale", "x_scale * last_scale, x_scale * first_scale"),
            OpFault("gl.minimum(block + 1, BLOCKS - 1)", "gl.minimum(block, BLOCKS - 1)"),
        )
    },
    "codes": {
        "matmul.sm90.kernels.quantize_epilogue": (
            OpFault("((N + WIDTH - 1) // WIDTH) + tile.column", "((N + WIDTH - 1) // WIDTH) + tile.column // 2"),
        )
    },
    "found": {
        "matmul.sm90.kernels.quantize_epilogue": (
            OpFault("(always | (column + WIDTH <= N))", "(always | (column >= 0))"),
            OpFault("bits = gl.max(bits, axis=1)\n    within", "bits = gl.min(bits, axis=1)\n    within"),
        )
    },
    "prepacked": {
        "matmul.sm90_packed.kernels.epilogue": (
            OpFault("row = column + side * N", "row = column"),
            OpFault(
                "gate, up = gl.split(gl.permute(values, [0, 2, 3, 1]))",
                "up, gate = gl.split(gl.permute(values, [0, 2, 3, 1]))",
            ),
        ),
        "matmul.sm90_packed.kernels.matmul": (OpFault("stages.PAIRS + WHICH * (stages.PAIRS // 2)", "stages.PAIRS"),),
        "matmul.sm90_packed.kernels.consumer": (OpFault("columns = block * WIDTH", "columns = block // 2 * WIDTH"),),
        "matmul.sm90_packed.kernels.producer": (
            OpFault("slots // layout.TOP_K if", "slots // (layout.TOP_K + 1) if"),
            OpFault("((block + pair) * STEPS + step) * LINES", "(block * STEPS + step) * LINES"),
        ),
        "matmul.sm90.kernels.pipeline": (OpFault("left = within & (expert >= 0)", "left = within & (expert == 0)"),),
        "matmul.sm90_packed.kernels.decode_e2m1": (
            OpFault("0x3f003f00", "0x3e803e80"),
            OpFault("[1, 0, 2, 3, 8, 7, 6, 4, 5]", "[1, 0, 2, 3, 7, 8, 6, 4, 5]"),
        ),
    },
    "streamed": {
        "matmul.sm90_packed.kernels.few_rows": (
            OpFault("slots // TOP_K if", "slots // (TOP_K + 1) if"),
            OpFault("right_operand(rows, 2 * part + 1, right)", "right_operand(rows, 2 * part, right)"),
            OpFault("step + CHUNK + part, STEPS", "step + CHUNK, STEPS"),
        ),
        "matmul.sm90_packed.kernels.epilogue": (
            OpFault("mask=within < size, other=-1", "mask=within < size - 1, other=-1"),
        ),
        "matmul.sm90_packed.kernels.decode_e2m1": (
            OpFault("1 + (1 << 5) + (1 << 11)", "1 + (1 << 4) + (1 << 11)"),
            OpFault("[1, 0, 2, 3, 5, 8, 7, 4, 6]", "[1, 0, 2, 3, 5, 7, 8, 4, 6]"),
        ),
    },
    "prepacked integers": {
        "matmul.sm90_packed.kernels.producer": (
            OpFault("step // codes.REPEAT * WORDS", "step // (2 * codes.REPEAT) * WORDS"),
        ),
    },
    "streamed integers": {
        "matmul.sm90_packed.kernels.decode_integers": (
            OpFault("fma.rn.bf16x2 {out}, t, s, l;", "mul.rn.bf16x2 {out}, t, s;"),
            OpFault("(2 * line + row) * GROUPS + group", "(2 * line + row) * GROUPS"),
        )
    },
}
#: Those of row blocks of 192, which a GPU alone looks for.
TALL_FAULTS: Planted = {
    "tall": {
        "matmul.sm90.kernels.tall": (
            OpFault("tiles.left.index(CHUNKS * stage + 2)", "tiles.left.index(CHUNKS * stage + WHICH)"),
            OpFault("half = weights.slice(WHICH * PIECE, PIECE, dim=1)", "half = weights.slice(0, PIECE, dim=1)"),
            OpFault("tile.column * PIECE + WHICH * PANEL", "tile.column * PIECE"),
            OpFault("add_bias(up, biases, PIECE + WHICH * PANEL)", "add_bias(up, biases, WHICH * PANEL)"),
            OpFault("third_within = 2 * ROWS +", "third_within = ROWS +"),
        ),
        "matmul.sm90.kernels.tall_producer": (
            OpFault("gl.where(within < rows, numbers, -1)", "gl.where(within < rows - 1, numbers, -1)"),
            OpFault("place % EACH * 16", "place % EACH * 8"),
        ),
        "matmul.sm90.kernels.producer": (OpFault("slice((2 * part + 1) * PANEL", "slice(2 * part * PANEL"),),
        "routing.kernels.schedule": (OpFault("CHUNKS * block - tl.minimum(block, low)", "CHUNKS * block - 0 * low"),),
    }
}
#: The same of swapped operands.
SWAPPED_FAULTS: Planted = {
    "swapped": {
        "matmul.sm90.kernels.swapped": (
            OpFault("            within += weights.N", "            within += 0"),
            OpFault("tile.expert, column, False", "tile.expert, 0, False"),
            OpFault("slice(FIRST, PART)", "slice(0, PART)"),
            OpFault("activate_gated(left, right,", "activate_gated(right, left,"),
        ),
        "matmul.sm90.kernels.swapped_products": (
            OpFault('"apart": (which, 2 + which)', '"apart": (2 + which, which)'),
            OpFault("setp.eq.u32 more, flag, 0;", "setp.eq.u32 more, flag, 1;"),
            OpFault('in (("left", 4 * left_bytes, 0)', 'in (("left", left_bytes, 0)'),
        ),
        "matmul.sm90.kernels.tall_producer": (
            OpFault("gl.where(within < rows, numbers, -1)", "gl.where(within < rows - 1, numbers, -1)"),
        ),
    },
    "swapped pairs": {
        "matmul.sm90.kernels.swapped": (
            OpFault("[[8, 0, 0], [16, 0, 0]], [], [LEFT // 2", "[[16, 0, 0], [8, 0, 0]], [], [LEFT // 2"),
            OpFault("right, column + LEFT, turn", "right, column, turn"),
            OpFault("column // 2, turn, FIRST)", "column // 4, turn, FIRST)"),
        ),
    },
}
#: The same of tiles of 256 rows for prepacked weights.
MIXED_INPUT_TALL_FAULTS: Planted = {
    "prepacked, tall": {
        "matmul.sm90_packed.kernels.wide": (
            OpFault("x_tile.slice(TOKENS, REST, dim=0)", "x_tile.slice(0, REST, dim=0)"),
            OpFault("held, (part + 1) % HALVES,", "held, 0,"),
            OpFault("slots, buffer, TOKENS)", "slots, buffer, 0)"),
        ),
        "matmul.sm90_packed.kernels.consumer": (
            OpFault("half_of(values, WHICH // 2 % 2)", "half_of(values, WHICH % 2)"),
        ),
        "matmul.sm90_packed.kernels.producer": (
            OpFault("row_slots.slice(chunk * CHUNK, CHUNK)", "row_slots.slice(0, CHUNK)"),
        ),
    }
}
RESULT_DIFFERS = 10


_CONFIG, _TALL, _SWAPPED = (
    TileConfig(height, 128, 64, 4, stages, 8, "sm90") for height, stages in ((128, 4), (192, 3), (160, 3))
)


@dataclass(frozen=True)
class Product:
    """What runs on a copy; outputs other than y alone are those of a composed plan."""

    case: Case
    outputs: tuple[str, ...] = ("y",)
    config: TileConfig = _CONFIG
    kernel: Kernel = SM90_MATMUL_OGS

    @property
    def tolerance(self) -> Tolerance:
        case = self.case
        return matmul_tolerance(case.dtype, case.dtype, case.d, activation=case.spec.activation)

    def plan(self, target: Target) -> LaunchPlan:
        operands, layout, _ = build(self.case)
        if self.outputs == ("y",):
            return plan_matmul_ogs(spec_of(operands), layout, self.case.spec, target, config=self.config)
        return plan_composed(spec_of(operands), layout, self.case.spec, self.config, self.outputs, target)

    def results(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """(found, expected) by output, the rows of experts alone where others are left unwritten."""
        (operands, layout, arrays), spec = build(self.case), self.case.spec
        if self.outputs == ("y",):
            found = run_matmul(operands, layout, arrays, spec, config=self.config)
            return {"y": found}, {"y": expected_matmul(operands, layout, arrays, spec)}
        found = run_composed(operands, layout, arrays, spec, self.config, self.outputs)
        expected, filled = expected_composed(operands, layout, arrays, spec, self.outputs), filled_rows(layout, arrays)
        return {name: found[name][filled] for name in found}, {name: expected[name][filled] for name in expected}


class Gradient:
    """A weight gradient with a bias, whose experts have whole stages and rows beside them, and last tiles room."""

    outputs = ("d_weight", "d_bias")
    kernel = SM90_WEIGHT_GRADIENT

    def __init__(self) -> None:
        self.drawn = Ragged.draw(many_rows(4, 400), ("token", "row"), (192, 264), "bfloat16")
        self.operands = replace(self.drawn.operands, row_weight=None)
        self.spec = WeightGradientSpec("bfloat16", ("token", "row"), bias_side="right", family="sm90")
        self.tolerance = matmul_tolerance("bfloat16", "bfloat16", self.drawn.layout.num_slots)

    def plan(self, target: Target) -> LaunchPlan:
        return plan_weight_gradient(map_arrays(self.operands, spec_of), self.drawn.layout, self.spec, target)

    def results(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        request = (self.operands, self.drawn.layout, self.spec, self.drawn.groups)
        return run_op(*request), expected_of(*request)


class Prepared:
    """A product with prepacked weights, gated, by token and with biases; experts with several tiles of rows, or with
    one that is tall."""

    outputs = ("y",)

    def __init__(
        self, streamed: bool, format: Format = MXFP4, d: int = 416, scale_dtype: str = "float32", tall: bool = False
    ) -> None:
        tokens = 300 if tall else 70
        self.layout = LayoutSpec(tokens, 2, 4)
        self.kernel = MATMUL_FEW_ROWS if streamed else MATMUL_MIXED_INPUT
        epilogue = (Activation("silu", gate_layout="halves"), "token", "slot", True, True, False)
        self.operands, spec = draw_product(epilogue, self.layout, d, 96, 0, format, scale_dtype)
        weight = map_arrays(prepacked(self.operands, spec).weight, spec_of)
        # Two of four steps under way: what is loaded ahead is used too.
        config = replace(few_rows_config(weight, spec), block_k=256)
        if not streamed:
            config = mixed_input_config(1, weight, spec, TARGET)
        if tall:
            config = replace(config, block_m=256, block_k=128, num_stages=3)
        self.spec = replace(spec, tuning=MatmulTuning(config))
        self.arrays = layout_arrays(draw_ids("uniform", tokens, 2, 4, 0), self.layout)
        self.tolerance = quantized_matmul_tolerance("bfloat16", d, format, spec)

    def plan(self, target: Target) -> LaunchPlan:
        operands = map_arrays(prepacked(self.operands, self.spec), spec_of)
        return plan_matmul_ogs(operands, self.layout, self.spec, target)

    def results(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        ours, spec = prepacked(self.operands, self.spec), replace(self.spec, tuning=None)
        expected = run_product(self.operands, self.layout, self.arrays, spec, Target("reference"))
        return {"y": run_product(ours, self.layout, self.arrays, self.spec, engine_target())}, {"y": expected}


def _case(scatter: str, activation: Activation, **options: object) -> Case:
    """Groups of two row blocks and more, three column tiles, the last one narrow."""
    spec = MatmulSpec("in_out", "token", scatter, activation)
    given = {"num_tokens": 300, "top_k": 2, "num_experts": 4, "d": 128, "n": 264, "ids": "uniform", "bias": "float32"}
    return Case(dtype="bfloat16", spec=spec, **(given | options))  # pyright: ignore


PRODUCTS = TAILED | {
    "result": Product(_case("slot", Activation("silu"), row_weight=True)),
    "halves and their result": Product(_case("row", Activation("silu")), ("y", "pre")),
    "pairs and their result": Product(_case("row", Activation("silu", gate_layout="interleaved")), ("y", "pre")),
    "gradient": Gradient(),
    "fp8": Fp8Product(None),
    "codes": Fp8Product("groups"),
    "found": Fp8Product("found"),
    "prepacked": Prepared(streamed=False),
    "prepacked, tall": Prepared(streamed=False, tall=True),
    "streamed": Prepared(streamed=True),
    "prepacked integers": Prepared(False, format_named("int8_g128_zp"), 384, "bfloat16"),
    "streamed integers": Prepared(True, format_named("int4_g32_zp"), 416, "float16"),
    # Groups of 2 + 3 chunks.
    "tall": Product(
        _case("slot", Activation("silu"), row_weight=True, num_tokens=600), config=_TALL, kernel=SM90_TALL_MATMUL_OGS
    ),
    "swapped": Product(
        _case("slot", Activation("silu"), row_weight=True), config=_SWAPPED, kernel=SM90_SWAPPED_MATMUL_OGS
    ),
    "swapped pairs": Product(
        _case("row", Activation("silu", gate_layout="interleaved")), ("y", "pre"), _SWAPPED, SM90_SWAPPED_MATMUL_OGS
    ),
}


def launch_of(name: str) -> tuple[LaunchPlan, KernelLaunch]:
    """A product's plan, and the first launch of its kernel."""
    product = PRODUCTS[name]
    plan = product.plan(TARGET)
    launch, *_ = [step for step in plan.steps if isinstance(step, KernelLaunch) and step.kernel == product.kernel]
    return plan, launch


def _run(product: Product | Gradient | Fp8Product | Prepared | Tailed, folder: Path) -> int:
    # Outside of the comparison: a write out of bounds is an error of its own.
    found, expected = product.results()
    try:
        for name in product.outputs:
            assert_close(found[name], expected[name], product.tolerance, label=f"{folder.name}: {name}")
    except AssertionError as error:
        print(error)
        return RESULT_DIFFERS
    return 0


def judge(folder: Path, action: str) -> int:
    status, name = 0, folder.parent.name
    if action == "run":
        status = _run(PRODUCTS[name], folder)
    else:
        (folder / "instructions").write_text(INSTRUCTIONS[action](*launch_of(name)))
    assert importlib.import_module("moe_core.ops.matmul.sm90.kernels.matmul").__file__ == str(
        folder / "matmul" / "sm90" / "kernels" / "matmul.py"
    )
    return status


def assert_faults_show(folder: Path, planted: Planted, action: str = "lower") -> None:
    """Each copy of a product compiles to instructions of its own, the unchanged one too."""
    folders = run_on_faulty_copies("sm90", folder, planted, action)
    for product in planted:
        copies = [copy for copy in folders if copy.parent.name == product]
        for copy in copies:
            assert (copy / "status").read_text() == "0", (copy / "log").read_text()
        assert len(copies) > 1 and len({(copy / "instructions").read_text() for copy in copies}) == len(copies), product


if __name__ == "__main__":
    prepare_forks(COMPILER)
    for place in sys.argv[2:]:
        run_on_copy(Path(place), lambda folder=Path(place): judge(folder, sys.argv[1]))
