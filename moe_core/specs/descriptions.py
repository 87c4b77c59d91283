"""What the functions of both front-ends take, return and raise; each has a summary of its own in front."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: What stands in the braces of a text, by front-end.
_WORDS = {
    "moe_torch": {
        "waits": "This waits for the device.",
        "dtype": "a torch dtype or its name",
        "rows": " Rows may be strided.",
        "shapes": "",
        "where": "It runs on the weights' device, a matrix at a time.",
    },
    "moe_jax": {
        "waits": "This waits for the result, so it works eagerly only.",
        "dtype": "a dtype",
        "rows": "",
        "shapes": " Arrays may be\n`jax.ShapeDtypeStruct`s: then the default device counts. Inside "
        "`moe_jax.export_target(...)` it explains that target's plan.",
        "where": "It works eagerly and in any program.",
    },
}


def described(function: _Function) -> _Function:
    """Decorates a function of a front-end: its docstring goes on with the text of its name."""
    if function.__doc__ is not None:  # python -OO has no docstrings
        text = inspect.cleandoc(_TEXTS[function.__name__]).format_map(_WORDS[function.__module__.partition(".")[0]])
        function.__doc__ = f"{inspect.cleandoc(function.__doc__)}\n\n{text}"
    return function


_TEXTS = {
    "router": """
        Args:
            x: bf16, fp16 or fp32 `[T, D]`.
            weight: bf16, fp16 or fp32 `[D, E]`, or `[E, D]` if `spec.weight_layout` is `out_in`.
            bias: bf16, fp16 or fp32 `[E]`.
            spec: weight layout and precision. Products of fp32 are IEEE unless `spec.allow_tf32`.

        Returns:
            logits fp32 `[T, E]`.
    """,
    "route": """
        Args:
            logits: fp32 `[T, E]`.
            spec: the rules of the choice.
            correction_bias: fp32 `[E]`. It is added to the scores for the selection only.
            token_mask: bool `[T]`. A token that is False gets ids -1 and weights 0.

        Returns:
            ids int32 `[T, K]` and weights fp32 `[T, K]`.

        Raises:
            InvalidInput: K > E, or groups that do not fit E.
    """,
    "make_layout": """
        Args:
            ids: int32 `[T, K]`. -1 means no expert, and such a slot has no row.
            num_experts: E, the local experts.
            expert_map: int32 `[E_global]`. Maps global ids to local experts, or to -1.
            token_mask: bool `[T]`. Tokens that are False have no rows.
            alignment: each expert's rows start at a multiple of it.
            max_rows: each expert owns that many rows, and later ones are dropped. None = as many as it needs.
            checked: raise InvalidInput if `invalid_ids` is not 0. {waits}

        Returns:
            the layout. An id outside [-1, E), or [-1, E_global) with an expert_map, acts as -1 and counts in
            `invalid_ids`.

        Raises:
            Unsupported: `checked` in a traced or captured program.
    """,
    "pack_bitmatrix": """
        Bit `e % 32` of word `e // 32` says that expert e was chosen. -1 and ids outside [0, E) set nothing. A repeated
        id sets its bit once.

        Args:
            ids: int32 `[T, K]`.
            num_experts: E.
            checked: raise InvalidInput for a repeated id, or one outside [-1, E). {waits}

        Returns:
            bitmatrix uint32 `[T, ceil(E / 32)]`.

        Raises:
            Unsupported: `checked` in a traced or captured program.
    """,
    "unpack_bitmatrix": """
        Args:
            bitmatrix: uint32 `[T, ceil(E / 32)]`.
            num_experts: E.
            top_k: K. A token with more bits keeps its K lowest ids.

        Returns:
            ids int32 `[T, K]`, ascending, then -1.
    """,
    "matmul_ogs": """
        `y[row] = cast(act(x[source of row] @ weight[expert of row] + bias) * row_weight)`, in fp32 up to the cast.
        Gradients go through quantised weights, which are frozen. With a quantised x nothing has a gradient.

        Args:
            operands: see MatmulOperands. x is bf16, fp16 or fp32.{rows} weight with up, and x with them, may be
                `QuantizedTensor`s (docs/user/quantization.md).
            layout: the rows' experts. None = one dense product of x `[T, D]` and weight `[D, N]` or `[N, D]`.
            spec: gather, scatter, fused activation, weight layout, dtypes.

        Returns:
            y `[capacity, N]` (scatter `row`), `[T * K, N]` (`slot`) or `[T, N]` (dense), in `spec.out_dtype`. N is the
            width after gating. Rows without an expert are exact zeros.
    """,
    "activation": """
        Args:
            x: `[R, 2F]` (gated, one buffer), or `[R, F]` (ungated, or the gate beside `up`).{rows}
            activation: its name, gating and gate layout.
            up: `[R, F]`, the second buffer of gate_layout `separate`.
            out_dtype: {dtype}. None = the dtype of x.

        Returns:
            y `[R, F]`.
    """,
    "reduce": """
        Args:
            y: `[T * K, D]` (order `slot`) or `[capacity, D]` (order `row`). Slots without a row add nothing.
            layout: which row each slot has.
            order: `slot` or `row`: how the rows of y lie.
            shared: `[T, D]`, added last.
            shared_gate: fp32 `[T, 1]`. Its sigmoid scales shared.
            out_dtype: {dtype}. None = the dtype of y.

        Returns:
            out `[T, D]`.
    """,
    "scale_rows": """
        Args:
            x: `[T, D]`.
            weights: fp32 `[T, 1]`.

        Returns:
            y `[T, D]` in the dtype of x.
    """,
    "moe": """
        Rounding: logits and weights are fp32. Both products accumulate in fp32 and are cast once to the dtype of x,
        after bias, activation and router weight. The sum over k is fp32 in the order k = 0..K-1, plus shared, cast
        once.

        Gradients, in reverse mode and once: x, every weight and bias of experts, router and shared, and given logits or
        weights. They flow in through output, and through weights and logits where these are computed here. Ids, masks,
        counts, correction_bias and layer_index have none. Only the gradients asked for are computed, and only what
        these need is saved (docs/user/training.md). Quantised matrices are frozen, and gradients go through them. With
        `spec.activations` nothing has a gradient.

        Args:
            x: bf16, fp16 or fp32 `[T, D]`.
            experts: weights and biases of the local experts. Matrices may be `QuantizedTensor`s
                (docs/user/quantization.md).
            routing: RouterWeights (routes from x), RouterLogits (routes from logits) or TopK (ids and weights are
                given).
            spec: options of the whole forward. `spec.activations` is the format that x and the hidden rows are
                quantised to.
            token_mask: bool `[T]`. A token that is False has no expert: its row is zero (plus shared), and it counts in
                no statistic.
            expert_map: int32 `[E_global]`. Maps global ids to local experts, or to -1.
            shared: a dense expert that every token visits.
            checked: raise InvalidInput for an id outside [-1, E_global). {waits}

        Returns:
            output `[T, D]`, ids, weights and logits (None for TopK), tokens per expert and the count of invalid ids;
            see MoEOutput. Given ids and weights are returned as they are.

        Raises:
            InvalidInput: as the module says.
            Unsupported: `checked` in a traced or captured program, second derivatives, and a gradient that does not
                exist.
    """,
    "explain_moe": """
        Every buffer, kernel, decision and summation order. Runs nothing. The arguments are those of `moe`.{shapes}

        Args:
            training: explain the forward of a training step, then its backward with every gradient.

        Returns:
            the plan as text.
    """,
    "prepack_weights": """
        Do this once, when weights are loaded. {where} No number changes, and `restore_weights` is the inverse.
        Prepacked weights come back as they are. They go wherever the published ones go, except into gradients
        (docs/user/quantization.md).

        Args:
            weights: a `QuantizedTensor` `[..., N, D]`, or an `ExpertWeights` of such (one layer or a stack). The format
                is mxfp4, mxfp4_ceil, or integers of 4 or 8 bits with a scale for each row or for 32, 64, 128, ...
                columns of it. `in_out` tensors are transposed, exactly.
            spec: with ExpertWeights, the MoESpec that they are used with. Its activation says how gate and up lie.
            gate_layout: with a tensor, `interleaved` or `halves` where its rows are gate and up, else None.

        Returns:
            the weights, `out_in`, as `MoESpec.weight_layout` then must be. Biases, plain matrices and the logical shape
            stay what they are.

        Raises:
            InvalidInput: other formats and types, gate_layout `separate`, sizes that do not divide into blocks
                (`moe_core.formats.Tiling`), and weights prepacked for another gate_layout.
    """,
    "quantize_rows": """
        Args:
            x: bf16, fp16 or fp32 `[R, D]`.{rows}
            format: of activations: e4m3, e2m1 or int8, with one scale for each row, for groups of columns in a row, or
                for all of x (`FP8_TOKEN`, `FP8_GROUP`, `INT8_TOKEN`, `MXFP8`, `MXFP4`, `FP8_TENSOR`, ...).
            scales: fp32 `[1]`, a static scale, of formats with one per tensor. None = found from x.
            used_by: int32 `[R * n]`, where one scale is found from x: rows all of whose n entries are negative are not
                read, and become zeros (a layout's row_of_slot for tokens, slot_of_row for its rows).

        Returns:
            the rows, `out_in`, with the bits of `moe_core.ops.quantize.reference.quantize_rows`. They have no gradient.

        Raises:
            InvalidInput, Unsupported.
    """,
}
