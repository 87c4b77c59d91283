"""Strides, addresses, memory and engines of torch ops; tests/frontends has what JAX shares."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import moe_torch
from tests.support.torch import (
    D_MODEL,
    ENGINES,
    NUM_EXPERTS,
    full_layer,
    on_engines,
    require_equal,
    running_on,
    to_torch,
    torch_layer,
)


@on_engines
def test_moe_on_stacked_layers(engine: str) -> None:
    """Stacked weights with a device-side layer index equal that layer's own weights, bitwise."""
    with running_on(engine) as device:
        layers = [torch_layer(device, seed=seed) for seed in range(3)]
        experts = moe_torch.ExpertWeights(
            torch.stack([layer.experts.gate_up for layer in layers]),
            torch.stack([layer.experts.down for layer in layers]),
            layer_index=torch.tensor([1], dtype=torch.int32, device=device),
        )
        x, own, routing, spec = layers[1]
        stacked = moe_torch.moe(x, experts, routing, spec)
        require_equal(tuple(stacked), tuple(moe_torch.moe(x, own, routing, spec)), "stacked")


@on_engines
def test_views_are_read_where_they_lie(engine: str) -> None:
    """Row-strided x and tensors with a storage offset give the bits of their contiguous copies."""
    with running_on(engine) as device:
        layer = torch_layer(device)
        wide = torch.zeros(layer.x.shape[0] + 2, D_MODEL + 16, device=device)
        view = wide[2:, 4 : 4 + D_MODEL]
        view.copy_(layer.x)
        assert not view.is_contiguous() and view.storage_offset() > 0
        stack = torch.stack([layer.experts.down, layer.experts.down])
        experts = dataclasses.replace(layer.experts, down=stack[1])
        plain = moe_torch.moe(*layer)
        require_equal(tuple(moe_torch.moe(view, experts, *layer[2:])), tuple(plain), "views")


@on_engines
def test_outputs_are_fresh_and_inputs_unchanged(engine: str) -> None:
    with running_on(engine) as device:
        layer = torch_layer(device)
        before = [tensor.clone() for tensor in (layer.x, layer.experts.gate_up, layer.routing.weight)]
        first, second = moe_torch.moe(*layer), moe_torch.moe(*layer)
        require_equal(tuple(first), tuple(second), "two runs")
        storages = {tensor.untyped_storage().data_ptr() for tensor in (*first, *second)}
        assert len(storages) == 2 * len(first)
        after = (layer.x, layer.experts.gate_up, layer.routing.weight)
        require_equal(tuple(before), after, "inputs")


@on_engines
def test_every_element_of_every_output_is_written(engine: str) -> None:
    """In deterministic mode torch fills new memory with NaN and the largest integers: outputs and scratch alike."""
    with running_on(engine) as device:
        layer, options = full_layer()
        tensors = to_torch(tuple(layer[:3]), device)
        options = {name: to_torch(value, device) for name, value in options.items()}
        plain = moe_torch.moe(*tensors, layer.spec, **options)
        torch.use_deterministic_algorithms(True)
        try:
            assert torch.empty(3, device=device).isnan().all()
            poisoned = moe_torch.moe(*tensors, layer.spec, **options)
        finally:
            torch.use_deterministic_algorithms(False)
        require_equal(tuple(poisoned), tuple(plain), "poisoned")


def test_the_engine_can_change_between_calls() -> None:
    results = []
    for engine in (*ENGINES, *ENGINES):
        with running_on(engine) as device:
            layer = torch_layer(device)
            assert f"moe on {engine}" in moe_torch.explain_moe(*layer)
            results.append(moe_torch.scale_rows(layer.x, torch.ones(9, 1, device=device)).cpu())
    for result in results[1:]:
        require_equal(result, results[0], "scale_rows on every engine")


def test_inference_mode() -> None:
    with running_on("reference"), torch.inference_mode():
        layer = torch_layer()
        assert moe_torch.moe(*layer).output.is_inference()


def shifted(tensor: Any) -> Any:
    """The same values and strides one element behind the start of an allocation."""
    storage = torch.cat([tensor.new_zeros(1), tensor.flatten()])
    found = storage[1:].view(tensor.shape)
    assert found.data_ptr() % 16
    return found


@on_engines
def test_arrays_of_tokens_start_anywhere(engine: str) -> None:
    """As slices of tokens do: the op copies them, gaps between rows included, and gradients go to the slice."""
    with running_on(engine) as device:
        x, experts, routing, spec = torch_layer(device, num_tokens=6)
        stages = moe_torch.moe(x, experts, routing, spec)
        ids, weights = shifted(stages.ids), shifted(stages.weights)
        given = dataclasses.replace(spec, router=None)
        wide = torch.zeros(6, D_MODEL + 7, dtype=x.dtype, device=device)
        wide[:, 3 : 3 + D_MODEL] = x
        columns = wide[:, 3 : 3 + D_MODEL]
        assert columns.data_ptr() % 16
        for name, rows in {"rows": shifted(x), "columns": columns}.items():
            require_equal(moe_torch.moe(rows, experts, routing, spec), stages, name)
        result = moe_torch.moe(shifted(x), experts, moe_torch.TopK(ids, weights), given)
        require_equal(result.output, stages.output, "given ids and weights")
        mask = torch.ones(6, dtype=torch.bool, device=device)
        layout = moe_torch.make_layout(ids, NUM_EXPERTS, token_mask=shifted(mask))
        require_equal(layout.row_of_slot, moe_torch.make_layout(stages.ids, NUM_EXPERTS).row_of_slot, "layout")
        activation = moe_torch.Activation("silu", gate_layout="separate")
        require_equal(
            moe_torch.activation(shifted(x), activation, up=shifted(x)),
            moe_torch.activation(x, activation, up=x),
            "rows named up",
        )
        found = []
        for rows in (x.clone(), shifted(x)):
            rows.requires_grad_()
            moe_torch.moe(rows, experts, routing, spec).output.square().sum().backward()
            found.append(rows.grad)
        require_equal(found[1], found[0], "d_x")
