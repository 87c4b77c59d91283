"""The twin with both axes: each rank of the tensor axis exchanges its tokens, and homes add parts in rank order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moe_core.errors import InvalidInput
from moe_core.ops.common.rounding import plain_name, round_to
from moe_core.ops.moe.reference.backward import MoEBackward, Request
from moe_core.ops.moe.reference.forward import routing_stages, shared_output
from moe_core.ops.reduction.reference import reduce
from moe_core.parallel.exchange import physical_ids
from moe_core.parallel.placement import Placement
from moe_core.parallel.spec import ExchangeSpec
from moe_core.parallel.tensor import TensorSplit
from moe_core.specs import MoESpec
from moe_core.specs.operands import ExpertWeights, MoEOperands, MoEOutput, OutputGradients, TopK
from tests.support.parallel.twin import ranks as one_axis

Grid = Sequence[Sequence[MoEOperands]]


class GridForward(NamedTuple):
    """Results of every rank, `[W][size]`. groups: exchanges of each rank of a tensor axis, with fp32 parts."""

    outputs: tuple[tuple[MoEOutput, ...], ...]
    groups: tuple[one_axis.GroupForward, ...]
    inner: tuple[tuple[MoEOperands, ...], ...]
    stages: tuple[tuple[dict[str, np.ndarray], ...], ...]
    split: TensorSplit


def moe(
    ranks: Grid, spec: MoESpec, placement: Placement, exchange: ExchangeSpec | None = None, *, tokens: str = "split"
) -> GridForward:
    """Run one MoE forward of all ranks of both axes. ranks: as for `one_axis.moe`, with slices of `split_experts`."""
    split = TensorSplit(len(ranks[0]), 0, tokens)
    for number, row in enumerate(ranks):
        sizes = [len(rank.x) for rank in row]
        if len(row) != split.size or len(set(sizes)) != 1:
            raise InvalidInput(
                f"ranks of a tensor axis must be {split.size} with equally many tokens, got {sizes} of rank {number}; "
                "pad the others"
            )
    stages = [[routing_stages(rank.x, rank.routing, spec, rank.token_mask) for rank in row] for row in ranks]
    inner = [[] for _ in range(split.size)]
    for row, routed in zip(ranks, stages, strict=True):
        x, ids, weights = (
            _of_axis(arrays, split)
            for arrays in (
                [rank.x for rank in row],
                [_known(one["ids"], rank.token_mask) for rank, one in zip(row, routed, strict=True)],
                [one["weights"] for one in routed],
            )
        )
        for index, rank in enumerate(row):
            inner[index].append(MoEOperands(x, bias_once(rank.experts, index), TopK(ids, weights)))
    parts_spec = dataclasses.replace(spec, router=None, out_dtype="float32", shared_activation=None)
    groups = [one_axis.moe(operands, parts_spec, placement, exchange) for operands in inner]
    outputs = []
    for number, row in enumerate(ranks):
        parts = [group.outputs[number].output for group in groups]
        of_row = []
        for index, (rank, routed) in enumerate(zip(row, stages[number], strict=True)):
            output = _added(parts, index, split, spec.out_dtype or plain_name(rank.x), rank, spec)
            places, routed["invalid_ids"] = physical_ids(routed["ids"], placement, token_mask=rank.token_mask)
            of_row.append(one_axis.output_of(output, routed, places, placement))
        outputs.append(tuple(of_row))
    return GridForward(tuple(outputs), tuple(groups), tuple(map(tuple, inner)), tuple(map(tuple, stages)), split)


def bias_once(experts: ExpertWeights, index: int) -> ExpertWeights:
    if experts.down_bias is None or index == 0:
        return experts
    return dataclasses.replace(experts, down_bias=np.zeros_like(experts.down_bias))


def _of_axis(arrays: Sequence[np.ndarray], split: TensorSplit) -> np.ndarray:
    return np.concatenate(arrays) if split.tokens == "split" else arrays[0]


def _known(ids: np.ndarray, token_mask: np.ndarray | None) -> np.ndarray:
    return ids if token_mask is None else np.where(token_mask[:, None], ids, -1).astype(np.int32)


def _own(array: np.ndarray, index: int, split: TensorSplit) -> np.ndarray:
    return np.split(array, split.size)[index] if split.tokens == "split" else array


def _added(
    parts: Sequence[np.ndarray], index: int, split: TensorSplit, out_dtype: str, rank: MoEOperands | None, spec: MoESpec
) -> np.ndarray:
    """Add a rank's parts in the order of ranks, fp32, and its shared expert; one cast."""
    shared = (None, None)
    if rank is not None and rank.shared is not None:
        shared = shared_output(rank.x, rank.shared, spec, rank.experts.layer_index)
    pieces = [_own(part, index, split) for part in parts]
    order = np.arange(len(pieces) * len(pieces[0]), dtype=np.int32).reshape(len(pieces), -1).T
    rows = np.concatenate(pieces)
    return reduce(rows, np.ascontiguousarray(order), *shared, top_k=len(pieces), order="row", out_dtype=out_dtype)


class _Home(MoEBackward):
    def __init__(self, d_x: np.ndarray, d_weights: np.ndarray, *rest) -> None:
        self.from_experts = d_x, d_weights
        super().__init__(*rest)

    def through_experts(self) -> np.ndarray:
        d_x, d_weights = self.from_experts
        self.d_x += d_x
        return d_weights


def moe_backward(
    gradients: Sequence[Sequence[OutputGradients]], ranks: Grid, spec: MoESpec, forward: GridForward
) -> tuple[tuple[dict[str, np.ndarray], ...], ...]:
    """Return the gradients of every rank, `[W][size]`: `d_experts.*` of its slices and the whole `d_experts.down_bias`
    from all ranks' tokens, the rest from its tokens."""
    split = forward.split
    flowing = [
        _of_axis([round_to(one.output, rank.x.dtype) for one, rank in zip(d_row, row, strict=True)], split)
        for d_row, row in zip(gradients, ranks, strict=True)
    ]
    parts_spec = dataclasses.replace(spec, router=None, out_dtype="float32", shared_activation=None)
    d_outputs = [OutputGradients(rows) for rows in flowing]
    by_index = [
        one_axis.moe_backward(d_outputs, inner, parts_spec, group, request=Request(wide=True))
        for inner, group in zip(forward.inner, forward.groups, strict=True)
    ]
    results = []
    for number, row in enumerate(ranks):
        of_row = []
        for index, rank in enumerate(row):
            d_x = _added([one[number]["d_x"] for one in by_index], index, split, "float32", None, spec)
            d_weights = [_own(one[number]["d_routing.weights"], index, split) for one in by_index]
            arguments = gradients[number][index], rank, spec, forward.stages[number][index]
            home = _Home(d_x, functools.reduce(np.add, d_weights), *arguments).run()
            mine = {name: one for name, one in by_index[index][number].items() if name.startswith("d_experts.")}
            of_row.append(home | mine)
        results.append(tuple(of_row))
    return tuple(results)
