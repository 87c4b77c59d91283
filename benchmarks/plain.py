"""The forward as users of each framework write it around its grouped product: sort, gather, two products, add up.

torch: `torch.nn.functional.grouped_mm`, eager or compiled. JAX: `jax.lax.ragged_dot`, or any function with its
signature.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from benchmarks.problem import activate
from benchmarks.shapes import Shape
from moe_core.specs.matmul import Activation
from moe_core.specs.operands import ExpertWeights


def in_one_dtype(experts: ExpertWeights) -> ExpertWeights:
    """The experts with their biases in the dtype of their matrices, as models are loaded."""
    dtype = experts.gate_up.dtype
    biases = [None if bias is None else bias.to(dtype) for bias in (experts.gate_up_bias, experts.down_bias)]
    return ExpertWeights(experts.gate_up, experts.down, gate_up_bias=biases[0], down_bias=biases[1])


def torch_forward(
    x: torch.Tensor,
    logits: torch.Tensor,
    experts: ExpertWeights,
    shape: Shape,
    take: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = operator.getitem,
) -> torch.Tensor:
    """x `[T, D]` -> `[T, D]`, everything in the dtype of x but the logits. Waits for nothing, so it can be captured.

    experts: in the shape's weight layout; out_in matrices are multiplied as views. take(array, rows): the rows of an
    array.
    """
    turned = shape.weight_layout == "out_in"
    gate_up, down = (matrix.mT if turned else matrix for matrix in (experts.gate_up, experts.down))
    values, ids = logits.topk(shape.top_k, dim=1)
    weights = values.softmax(dim=1).to(x.dtype)
    expert_of_row, slot_of_row = ids.flatten().sort(stable=True)
    numbers = torch.arange(shape.num_experts, device=x.device)
    ends = torch.searchsorted(expert_of_row, numbers, right=True, out_int32=True)
    token_of_row = slot_of_row // shape.top_k
    wide = torch.nn.functional.grouped_mm(take(x, token_of_row), gate_up, offs=ends)
    if experts.gate_up_bias is not None:
        wide = wide + take(experts.gate_up_bias, expert_of_row)
    out = torch.nn.functional.grouped_mm(activate(wide, shape.activation), down, offs=ends)
    if experts.down_bias is not None:
        out = out + take(experts.down_bias, expert_of_row)
    return torch.zeros_like(x).index_add(0, token_of_row, out * take(weights.flatten(), slot_of_row)[:, None])


@functools.cache
def compiled() -> Callable[..., torch.Tensor]:
    """torch_forward through torch.compile, without graphs of its own: the timer captures it like the others."""
    return torch.compile(torch_forward, fullgraph=True)


def forget_compiled() -> None:
    """Drop compiled programs: another shape would otherwise make their sizes symbolic, and slower."""
    compiled.cache_clear()
    torch._dynamo.reset()


def mark_tokens(*arrays: torch.Tensor) -> None:
    """Let the number of tokens vary, so that one compiled program serves them all."""
    for array in arrays:
        torch._dynamo.maybe_mark_dynamic(array, 0)


def jax_forward(ragged_dot: Callable[..., Any], shape: Shape, x: Any, logits: Any, experts: ExpertWeights) -> Any:
    """x `[T, D]` -> `[T, D]` in the dtype of x. ragged_dot(rows, weights, group_sizes) -> rows.

    experts: in the shape's weight layout; how the transposition of out_in matrices is computed is XLA's choice.
    """
    turned = shape.weight_layout == "out_in"
    gate_up, down = (jnp.swapaxes(matrix, 1, 2) if turned else matrix for matrix in (experts.gate_up, experts.down))
    values, ids = jax.lax.top_k(logits, shape.top_k)
    weights = jax.nn.softmax(values, axis=1).astype(x.dtype)
    flat = ids.ravel()
    slot_of_row = jnp.argsort(flat, stable=True)
    expert_of_row, token_of_row = flat[slot_of_row], slot_of_row // shape.top_k
    group_sizes = jnp.bincount(flat, length=shape.num_experts).astype(jnp.int32)
    wide = ragged_dot(x[token_of_row], gate_up, group_sizes)
    if experts.gate_up_bias is not None:
        wide = wide + experts.gate_up_bias.astype(x.dtype)[expert_of_row]
    out = ragged_dot(jax_activate(wide, shape.activation), down, group_sizes)
    if experts.down_bias is not None:
        out = out + experts.down_bias.astype(x.dtype)[expert_of_row]
    return jnp.zeros_like(x).at[token_of_row].add(out * weights.ravel()[slot_of_row, None])


def jax_activate(wide: Any, activation: Activation) -> Any:
    """`[R, F]` from gate and up `[R, 2F]` by JAX's own operations, in the dtype of `wide`."""
    halves = (wide[:, ::2], wide[:, 1::2]) if activation.gate_layout == "interleaved" else jnp.split(wide, 2, axis=1)
    gate, up = halves
    if activation.name == "silu":
        return jax.nn.silu(gate) * up
    limit = activation.limit
    assert activation.alpha is not None
    gate, up = jnp.clip(gate, max=limit), jnp.clip(up, None if limit is None else -limit, limit)
    return gate * jax.nn.sigmoid(activation.alpha * gate) * (up + 1)
