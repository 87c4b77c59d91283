"""The words of the kernels: aggregates that a kernel builds once from its arguments and passes on as one value.

A field is an array (a pointer), a TMA descriptor, a number, a piece of shared memory, or a constant. Constants have
names in capitals. An absent field is None, which is a constant too: `if output.pre is not None` is decided when the
kernel is compiled. Aggregates cannot be changed; make a new one.

    rows = Rows(x, x_map, X_STRIDE, GATHER)
    first = gl.load(rows.values + row * rows.STRIDE)
"""

import triton
from triton.language.core import _aggregate, base_value, constexpr

Array = Descriptor = Number = Memory = object
Constant = constexpr


def aggregate(cls):
    """Return an aggregate of a class's annotated fields, in order; fields with a default come last.

    Triton 3.6 makes no constructor, and an aggregate cannot hold None. The interpreter gets a plain class.
    """
    interpreted = triton.knobs.runtime.interpret
    # Constants, because Triton's key of a compiled kernel includes the constants that its functions refer to.
    fields = constexpr(tuple(cls.__annotations__))
    defaults = constexpr(tuple((name, vars(cls)[name]) for name in fields.value if name in vars(cls)))

    def fill(self, *values, **named):
        values = {**dict(defaults.value), **dict(zip(fields.value[: len(values)], values, strict=True)), **named}
        assert set(values) == set(fields.value), f"fields must be {fields.value}, got {tuple(values)}"
        for name, value in values.items():
            setattr(self, name, value if interpreted or isinstance(value, base_value) else constexpr(value))

    if interpreted:
        cls.__init__ = fill
        return cls
    cls.__init__ = triton.constexpr_function(fill)
    # Triton 3.6 compares values with the annotations themselves.
    cls.__annotations__ = {name: kind if kind is Constant else object for name, kind in cls.__annotations__.items()}
    return _aggregate(cls)


def aggregate_of(name, fields, **defaults):
    """Return an aggregate of the fields that a text lists, for the parameters of one kernel, which documents them."""
    kinds = {field: Constant if field.isupper() else object for field in fields.split()}
    return aggregate(type(name, (), {"__annotations__": kinds, **defaults}))


@aggregate
class Pipeline:
    """Barriers of a producer and two consumers, and the ring in which the producer announces tiles.

    COPIED: rows come by cp.async from the producer's threads, not by TMA.
    """

    ring: Memory
    full: Memory
    empty: Memory
    ring_full: Memory
    ring_empty: Memory
    STAGES: Constant
    COPIED: Constant


@aggregate
class Tiles:
    """Shared memory: left and right operands of all stages, biases of all places of the ring, results to store.

    row_lists: of tall row blocks, the rows of x of all places of the ring.
    """

    left: Memory
    right: Memory
    biases: Memory
    results: Memory
    row_lists: Memory = None


@aggregate
class Tile:
    """A tile: its expert, its first row in the layout, its number of rows, its number among the column tiles.

    expert -1: the tile has no rows for the producer, and no tile is left for consumers; -2: no tile is left.
    """

    expert: Number
    start: Number
    rows: Number
    column: Number


@aggregate
class Rows:
    """Rows that a product reads, STRIDE elements apart, from column START on.

    map: their TMA descriptor, for GATHER `row` only. GATHER: they are indexed by layout `row`, by `slot` or by `token`.
    """

    values: Array
    map: Descriptor
    STRIDE: Constant
    GATHER: Constant
    START: Constant = 0


@aggregate
class Layout:
    """A layout: which rows an expert has, and the slot of each row; TOP_K slots share a token."""

    group_sizes: Array
    group_start: Array
    slot_of_row: Array
    num_rows: Number
    num_slots: Number
    TOP_K: Constant


@aggregate
class Schedule:
    """Row blocks of a product, and the counter of the tiles that are taken.

    GROUP_M: row blocks that share a column tile before the next. SPREAD: sections of an expert that take turns.
    """

    schedule: Array
    counters: Array
    num_blocks: Number
    COUNTER: Constant
    GROUP_M: Constant
    SPREAD: Constant = 1


@aggregate
class Weights:
    """Matrices of D x WEIGHT_N elements, counted over layers and experts, and their biases; N: output columns.

    up_map, up_bias: of the up matrices where GATE_LAYOUT is `separate`. IN_OUT: D is the first axis of a matrix.
    """

    map: Descriptor
    up_map: Descriptor
    bias: Array
    up_bias: Array
    layer_index: Array
    D: Constant
    N: Constant
    WEIGHT_N: Constant
    NUM_EXPERTS: Constant
    NUM_LAYERS: Constant
    BIAS_LAYER_STRIDE: Constant
    UP_BIAS_LAYER_STRIDE: Constant
    GATE_LAYOUT: Constant
    IN_OUT: Constant


@aggregate
class Epilogue:
    """Operations on the sums of a tile, after the bias: activation, row weight, and quantisation of 16-bit results.

    DTYPE: of results before they are quantised. scales, RULE: see `quantize_tile`; RULE `given`: scales is the scale of
    all results. maxima: see `raise_maxima`.
    """

    row_weight: Array
    GATE_LAYOUT: Constant
    ACTIVATION: Constant
    ALPHA: Constant
    LIMIT: Constant
    scales: Array = None
    maxima: Array = None
    DTYPE: Constant = None
    RULE: Constant = None


@aggregate
class Output:
    """Results: y with N columns, and the pre-activation by layout row; TMA descriptors of both.

    SCATTER: y is indexed by layout `row`, by `slot`, or is sent to other ranks. TRUSTED: every row of the layout has a
    slot. gate_map: of the gate columns of pre, which end where those of up begin.
    """

    y: Array
    y_map: Descriptor
    pre: Array
    pre_map: Descriptor
    gate_map: Descriptor
    N: Constant
    SCATTER: Constant
    TRUSTED: Constant


@aggregate
class Target:
    """An array to store pieces of tiles to. WIDTH: columns of a row. END: the column to stop at, as map does."""

    array: Array
    map: Descriptor
    WIDTH: Constant
    END: Constant
    SCATTER: Constant
    TRUSTED: Constant


@aggregate
class Product:
    """Everything that the producer and the consumers of a product share. scales: of quantised rows and weights."""

    x: Rows
    weights: Weights
    layout: Layout
    schedule: Schedule
    tiles: Tiles
    pipeline: Pipeline
    epilogue: Epilogue
    output: Output
    scales: object = None
