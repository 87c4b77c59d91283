"""Planning of Hopper's warp-specialised grouped matmul of fp8 with fp8 (`kernels.fp8`)."""

from __future__ import annotations

from moe_core.base import INT32_LIMIT, row_stride
from moe_core.formats import Format, QuantizedTensor
from moe_core.ops.matmul import arguments as common
from moe_core.ops.matmul.problem import QUANTISED, MatmulProblem
from moe_core.ops.matmul.sm90 import plan as sm90
from moe_core.ops.matmul.sm90.kernels import fp8 as kernels
from moe_core.ops.matmul.sm90.plan import SM90_BLOCK_M, SM90_STAGES, SM90_WIDTH
from moe_core.plan import Argument, Constant, PlanBuilder, TensorMap, declare_kernel, passed
from moe_core.specs import MatmulSpec, TileConfig

MATMUL_FP8 = declare_kernel(kernels.matmul_fp8)

_BLOCK_K = 128
#: Codes and results in the 16 bytes that TMA and cp.async move.
_CODES, _RESULTS = 16, 8
_CONSUMER_ROWS, _PIECE = 64, 128
#: Columns or weight rows that may share a scale, apart from 1 and all.
_GROUP = 128
#: Per thread of a consumer, which holds 192 sums, and of the producer: 65536 for 384 threads.
_REGISTERS = passed(CONSUMER_REGISTERS=216, PRODUCER_REGISTERS=72)


class _Sm90Fp8(sm90.Sm90Family):
    """Also named sm90, with another kernel."""

    weights, finds_maxima = QUANTISED, True

    def why_not(self, problem: MatmulProblem) -> str | None:
        return sm90.why_not_target(problem.target) or _why_not_operands(problem)

    def tile(self, problem: MatmulProblem) -> TileConfig:
        return sm90_fp8_config(problem.spec)

    def why_illegal(self, config: TileConfig, problem: MatmulProblem) -> str | None:
        only = sm90_fp8_config(problem.spec, config.num_stages, config.group_m)
        if config != only:
            return f"the sm90 family's tiles of fp8 are {only}, got {config}"
        return sm90.why_not_stages(config, SM90_STAGES)

    def why_not_out_format(self, problem: MatmulProblem) -> str | None:
        assert problem.out_format is not None
        return why_not_codes(problem.out_format, problem.n, problem.spec, static=problem.out_scale is not None)

    def launch(self, builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, stage: int | None) -> None:
        arguments = _arguments(builder, problem, config, stage)
        grid = min(problem.tiles(config), problem.most_multiprocessors)
        builder.launch(MATMUL_FP8, (grid,), arguments, config.num_warps, 1)
        weights, fast = problem.operands.weight.format, arguments["FAST"] == Constant(True)
        blocks = "in the tensor cores" if fast else f"in blocks of {config.block_k}, added in order in fp32"
        when = "at_end" if weights.group_columns is None else "per_block"
        width = SM90_WIDTH if fast else _PIECE
        builder.sums(f"k {blocks}, of e4m3 products, wgmma 64 x {width} x 32, scales {when}; no split")


SM90_FP8 = _Sm90Fp8()


def sm90_fp8_config(spec: MatmulSpec, num_stages: int = SM90_STAGES, group_m: int = 8) -> TileConfig:
    buffers = 2 if spec.activation is not None and spec.activation.gated else 1
    return TileConfig(SM90_BLOCK_M, SM90_WIDTH // buffers, _BLOCK_K, 4, num_stages, group_m, SM90_FP8.name)


def _why_not_operands(problem: MatmulProblem) -> str | None:
    x, weight, n = problem.operands.x, problem.operands.weight, problem.n
    if problem.layout is None:
        return "it is dense, and only ragged layouts have the kernel's schedule"
    for name, tensor in (("x", x), ("weight", weight)):
        if not isinstance(tensor, QuantizedTensor):
            return f"it multiplies codes with codes, and {name} is not quantised"
        if tensor.format.element != "e4m3" or tensor.format.has_e8m0_scales:
            return f"it multiplies e4m3 codes whose scales are numbers, got {name} as {tensor.format}"
    if weight.layout != "out_in":
        return f"fp8 tensor cores read weights along the reduction, which is out_in, got {weight.layout}"
    if (reason := _why_not_scales(x.format, weight.format)) is not None:
        return reason
    out_dtype, d = problem.spec.out_dtype, problem.d
    if out_dtype not in ("bfloat16", "float16"):
        return f"it writes bfloat16 and float16, got out_dtype {out_dtype}"
    if d % _CODES:
        return f"rows of codes must be multiples of {_CODES} bytes, got d {d}"
    if n % _RESULTS:
        return f"rows of y must be multiples of 16 bytes, got {n} columns"
    if weight.format.group_rows == 1 and n % _GROUP:
        return f"scales of single weight rows are read {_GROUP} at a time, which must divide n, got {n}"
    if problem.gate_layout == "halves" and weight.format.group_rows == _GROUP and n % _GROUP:
        return f"columns of up must begin with a scale of their own, {_GROUP} must divide n, got {n}"
    if (reason := sm90.why_not_activation(problem)) is not None:
        return reason
    if weight.values.size // d >= INT32_LIMIT or x.scales.size >= INT32_LIMIT:
        return "rows of all weights, and scales of x, must be fewer than 2**31"
    return None


def why_not_codes(format: Format, n: int, spec: MatmulSpec, *, static: bool = False) -> str | None:
    """The reason why the kernel cannot store its result in a row format, or None. static: with a given scale."""
    if spec.activation is None or not spec.activation.gated or spec.scatter != "row":
        return f"its tiles have one group of {_GROUP} columns of a gated activation, by row"
    groups = (None, None) if static else (1, _GROUP)
    if format.element != "e4m3" or format.has_e8m0_scales or (format.group_rows, format.group_columns) != groups:
        wanted = f"a scale for {_GROUP} columns of a row, or one that is given for all"
        return f"it quantises to e4m3 with {wanted}, got {format}{' and a scale' if static else ''}"
    if n % _CODES:
        return f"rows of codes must be multiples of {_CODES} bytes, got {n} columns"
    return None


def _why_not_scales(x: Format, weights: Format) -> str | None:
    if x.group_rows not in (None, 1) or x.group_columns not in (None, _GROUP):
        return f"scales of x must be of one row or all, and of {_GROUP} columns or all, got {x}"
    if weights.group_rows not in (None, 1, _GROUP) or weights.group_columns not in (None, _GROUP):
        return f"weight scales must be of 1, {_GROUP} or all rows, and of {_GROUP} columns or all, got {weights}"
    if weights.group_rows == 1 and weights.group_columns is not None:
        return f"scales of single weight rows must be of all columns, got {weights}"
    if x.group_columns is not None and weights.group_columns is None:
        return f"groups of x must be those of the weights, got {x} and {weights}"
    return None


def _arguments(
    builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, stage: int | None
) -> dict[str, Argument]:
    """A stage trusts its layout: without padding inside groups, whole tiles and codes (`y.values`) may be stored."""
    operands, spec, sizes, layout = problem.operands, problem.spec, problem.sizes, problem.layout
    codes, gate_layout = problem.out_format, problem.gate_layout
    assert layout is not None and (stage is not None or codes is None), "codes are stored by whole tiles"
    x: QuantizedTensor = operands.x
    weight: QuantizedTensor = operands.weight
    d, n = sizes.d, sizes.n
    y, rule = ("y", None) if codes is None else ("y.values", codes.scale_rule)
    if builder.has("static_scale"):
        rule = "given"

    def weight_map(name: str) -> TensorMap:
        columns = SM90_WIDTH // 2 if gate_layout in ("halves", "separate") else SM90_WIDTH
        return TensorMap(name, (builder.spec(name).size // d, d), d, (columns, config.block_k))

    stride = row_stride("x", x.values)
    x_map = TensorMap("x.values", (x.shape[0], d), stride, (_CONSUMER_ROWS, config.block_k))
    up_map = weight_map("up.values") if operands.up is not None else None
    y_map = None if problem.addressed else TensorMap(y, (builder.spec(y).shape[0], n), n, (_CONSUMER_ROWS, _PIECE))
    return {
        **passed(x="x.values", x_map=x_map if spec.gather == "row" else None, x_scales="x.scales"),
        **passed(weight_map=weight_map("weight.values"), up_map=up_map, scales="weight.scales"),
        **passed(up_scales=builder.optional("up.scales")),
        **builder.pointers("bias", "up_bias", "row_weight", "layer_index", *common.SCHEDULED_INPUTS),
        **passed(
            counters="tile_counters", y=common.result(builder, y), y_scales=builder.optional("y.scales"), y_map=y_map
        ),
        **(passed(given=builder.optional("static_scale")) | builder.pointers("maxima")),
        **(common.row_counts(problem, config) | common.size_constants(problem)),
        **passed(X_STRIDE=stride, X_SCALE_STRIDE=x.scales.shape[1] if x.format.group_rows else 0),
        **passed(X_GROUP=x.format.group_columns or 0, SCALE_ROWS=weight.scales.shape[-2]),
        **passed(SCALE_COLUMNS=weight.scales.shape[-1], GROUP_ROWS=weight.format.group_rows or 0),
        **passed(GROUP=weight.format.group_columns or 0),
        **(common.bias_strides(operands) | common.fused_constants(problem)),
        **passed(FAST=spec.fast_accumulate and weight.format.group_columns is None, TRUSTED=stage is not None),
        **passed(COUNTER=stage or 0, STAGES=config.num_stages, GROUP_M=config.group_m, HIDDEN=spec.out_dtype),
        **(passed(RULE=rule) | _REGISTERS),
    }
