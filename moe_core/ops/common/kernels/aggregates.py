"""Aggregates: values that a kernel builds once from its arguments and passes on.

A field is an array (a pointer), a TMA descriptor, a number, shared memory, or a constant (in capitals). An absent field
is None, a constant, so `if output.pre is not None` is decided at compile time.

    rows = Rows(x, x_map, X_STRIDE, GATHER)
    first = gl.load(rows.values + row * rows.STRIDE)
"""

import triton
from triton.language.core import _aggregate, base_value, constexpr

Constant = constexpr


def aggregate(cls):
    """Return an aggregate of a class's fields, with a constructor and None, which Triton 3.6 lacks."""
    interpreted = triton.knobs.runtime.interpret
    # Constants: Triton's key of a kernel includes constants that its functions use.
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
    # Its key has the constants. Triton 3.6 would repeat them in kernels' keys, in the order of their addresses.
    _ = cls.__init__.cache_key
    cls.__init__.used_global_vals = {}
    # Triton 3.6 compares values with the annotations themselves.
    cls.__annotations__ = {name: kind if kind is Constant else object for name, kind in cls.__annotations__.items()}
    return _aggregate(cls)


def aggregate_of(name, fields, **defaults):
    kinds = {field: Constant if field.isupper() else object for field in fields.split()}
    return aggregate(type(name, (), {"__annotations__": kinds, **defaults}))


#: Rows that a product reads from column START on, STRIDE elements apart. GATHER: indexed by layout `row`, by `slot` or
#: by `token`. map: TMA descriptor, for `row` only.
Rows = aggregate_of("Rows", "values map STRIDE GATHER START", START=0)

#: Matrices of D x WEIGHT_N elements, counted over layers and experts, and their biases. N: output columns. up_map,
#: up_bias: the up matrices if GATE_LAYOUT is `separate`. IN_OUT: D is the first axis of a matrix.
Weights = aggregate_of(
    "Weights",
    """map up_map bias up_bias layer_index D N WEIGHT_N NUM_EXPERTS NUM_LAYERS
    BIAS_LAYER_STRIDE UP_BIAS_LAYER_STRIDE GATE_LAYOUT IN_OUT""",
)

Layout = aggregate_of("Layout", "group_sizes group_start slot_of_row num_rows num_slots TOP_K")

#: Row blocks of a product, and the counter of tiles taken. GROUP_M: row blocks that share a column tile before the
#: next. SPREAD: sections of an expert that take turns.
Schedule = aggregate_of("Schedule", "schedule counters num_blocks COUNTER GROUP_M SPREAD", SPREAD=1)

#: A tile: expert, first row in the layout, number of rows, number of its column tile. expert: -1 is an idle tile for a
#: producer and no tile for a consumer, -2 is no tile for a producer.
Tile = aggregate_of("Tile", "expert start rows column")

#: Shared memory: operands of all stages, biases of all slots of the ring, results to store. row_lists: rows of x of
#: tall row blocks, for all slots of the ring. row_scales: row weights of swapped ones.
Tiles = aggregate_of("Tiles", "left right biases results row_lists row_scales", row_lists=None, row_scales=None)

#: Barriers of a producer and two consumers, and the ring that announces tiles. COPIED: rows come by cp.async instead of
#: TMA.
Pipeline = aggregate_of("Pipeline", "ring full empty ring_full ring_empty STAGES COPIED")

#: Operations on a tile's sums after the bias. scales, RULE: of quantisation to DTYPE, see `quantize_tile`. RULE
#: `given`: one scale for all results. maxima: see `raise_maxima`.
Epilogue = aggregate_of(
    "Epilogue",
    "row_weight GATE_LAYOUT ACTIVATION ALPHA LIMIT scales maxima DTYPE RULE",
    scales=None, maxima=None, DTYPE=None, RULE=None,
)  # fmt: skip

#: y with N columns, the pre-activation by layout row, and their descriptors. SCATTER: y is indexed by layout `row` or
#: by `slot`, or sent to other ranks. TRUSTED: every row of the layout has a slot. gate_map: gate columns of pre only.
Output = aggregate_of(
    "Output", "y y_map pre pre_map gate_map N SCATTER TRUSTED",
    y_map=None, pre=None, pre_map=None, gate_map=None, TRUSTED=False,
)  # fmt: skip

#: An array to store pieces of tiles to. WIDTH: columns of a row. END: the column to stop at, as in map.
Target = aggregate_of("Target", "array map WIDTH END SCATTER TRUSTED")

#: tail: of adapters (`ops.lora.kernels.tail`).
Product = aggregate_of(
    "Product", "x weights layout schedule tiles pipeline epilogue output scales tail", scales=None, tail=None
)
