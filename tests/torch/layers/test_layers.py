"""The torch layer computes what ops and reference compute: every spec, storage, shape and mask, and its limits."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend

import moe_torch
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import LayerWeights, MoELayerSpec, OutputSpec, convert_weights
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.ops.routing.reference_backward import router_losses, router_losses_backward
from moe_core.parity.tolerance import Tolerance, assert_close
from moe_core.runtime.prepared import HostPrepared
from moe_core.specs.norm import NormSpec
from moe_core.specs.operands import TopK
from moe_core.specs.routing import RouterSpec
from moe_torch import LoRA, MoE
from moe_torch.layers.losses import router_losses as layer_losses
from tests.support import strategies
from tests.support.layers import (
    EVERYTHING,
    SPECS,
    STORAGES,
    D,
    E,
    F,
    K,
    assert_same_where_ids_agree,
    draw_weights,
    draw_x,
    drop_slots,
    layer_cases,
    tolerances,
)
from tests.support.torch import REAL_KERNELS, on_engines, require_equal, running_on, to_numpy, to_torch
from tests.support.torch_layers import make, stages, tensor

#: Losses are sums of fp32 numbers over tokens and experts, a few hundred terms.
LOSSES = Tolerance(1e-5, 1e-5)


def ops_moe(weights: LayerWeights, x: Any, mask: Any = None) -> Any:
    device = x.device
    shared = None if weights.shared is None else to_torch(weights.shared, device)
    experts, routing = (to_torch(bundle, device) for bundle in (weights.experts, weights.router))
    return moe_torch.moe(x, experts, routing, weights.spec, token_mask=mask, shared=shared)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPECS)
def test_layer_equals_ops_equals_reference(name: str, dtype: str) -> None:
    """Every preset on the real kernels."""
    spec = SPECS[name]
    weights, x = draw_weights(spec, dtype=dtype), draw_x((2, 5), dtype=dtype)
    mask = np.arange(10).reshape(2, 5) != 3
    with running_on(REAL_KERNELS) as device:
        tokens, token_mask = to_torch(x, device), to_torch(mask, device)
        y, aux = make(weights, device)(tokens, token_mask, return_aux=True)
        by_ops = ops_moe(weights, tokens.view(-1, D), token_mask.view(-1))
    require_equal(y.view(-1, D), by_ops.output, "output of the ops")
    require_equal((aux.ids, aux.weights), (by_ops.ids, by_ops.weights), "routing of the ops")
    expected, allowed = stages(weights, x, mask), tolerances(spec, dtype)
    np.testing.assert_array_equal(to_numpy(aux.ids), expected["ids"])
    np.testing.assert_array_equal(to_numpy(aux.tokens_per_expert), expected["tokens_per_expert"])
    assert_close(to_numpy(aux.weights), expected["weights"], allowed["weights"], "weights")
    assert_close(to_numpy(y).reshape(-1, D), expected["output"], allowed["output"], "output")
    assert spec.shared_experts is not None or not y[0, 3].any()


@given(layer_cases())
def test_any_layer_is_the_reference_bit_by_bit(
    case: tuple[MoELayerSpec, tuple[int, ...], np.ndarray | None, int],
) -> None:
    """On the reference engine nothing may differ: any spec, storage, leading axes and mask, statistics included."""
    spec, shape, mask, seed = case
    weights, x = draw_weights(spec, seed), draw_x(shape, seed, d_model=spec.d_model)
    expected = stages(weights, x, mask)
    with running_on("reference"):
        y, aux = make(weights)(tensor(x), tensor(mask), return_aux=True)
    assert y.shape == x.shape and y.is_contiguous()
    np.testing.assert_array_equal(to_numpy(y).reshape(-1, spec.d_model), expected["output"])
    for name in ("ids", "weights", "tokens_per_expert", "invalid_ids"):
        np.testing.assert_array_equal(to_numpy(getattr(aux, name)), expected[name], err_msg=name)
    flat = None if mask is None else mask.reshape(-1)
    losses = router_losses(expected["logits"], expected["tokens_per_expert"], flat, spec=spec.router)
    for name, found, wanted in zip(("balance", "z"), aux, losses, strict=False):
        assert_close(to_numpy(found), np.array(wanted), LOSSES, name)


@given(layer_cases())
def test_any_layer_on_real_kernels(case: tuple[MoELayerSpec, tuple[int, ...], np.ndarray | None, int]) -> None:
    spec, shape, mask, seed = case
    weights, x = draw_weights(spec, seed), draw_x(shape, seed, d_model=spec.d_model)
    expected, allowed = stages(weights, x, mask), tolerances(spec, "float32")
    with running_on(REAL_KERNELS) as device:
        y, aux = make(weights, device)(tensor(x, device), tensor(mask, device), return_aux=True)
    found = to_numpy(aux.ids), to_numpy(y).reshape(-1, spec.d_model)
    assert_same_where_ids_agree(found, (expected["ids"], expected["output"]), allowed["output"])


def test_leading_axes_make_no_difference() -> None:
    weights = draw_weights(EVERYTHING)
    with running_on("reference"):
        layer, rows = make(weights), to_torch(draw_x((12,)))
        y = layer(rows)
        for shape in ((1, 12), (3, 4), (2, 3, 2), (12, 1)):
            require_equal(layer(rows.view(*shape, D)), y.view(*shape, D), str(shape))
        require_equal(layer(rows[7]), layer(rows[7:8])[0], "a single token")
        strided = torch.stack([rows, rows], dim=1).view(12, 2 * D)[:, :D]
        require_equal(layer(strided), y, "rows apart")
        require_equal(layer(rows.view(3, 4, D).transpose(0, 1)), y.view(3, 4, D).transpose(0, 1), "transposed")
        expanded = rows[:1].expand(12, D)
        require_equal(layer(expanded), layer(expanded.contiguous()), "expanded")


@on_engines
def test_slices_of_wider_buffers(engine: str) -> None:
    """A layer takes x and token_mask that start at any address: it copies what kernels would refuse."""
    weights, x = draw_weights(EVERYTHING, dtype="bfloat16"), draw_x((6,), dtype="bfloat16")
    mask = np.array([True, True, False, True, True, True])
    with running_on(engine) as device:
        layer, rows, token_mask = make(weights, device), to_torch(x, device), to_torch(mask, device)
        y = layer(rows, token_mask)
        wide = torch.zeros(6, D + 5, dtype=rows.dtype, device=device)
        wide[:, 3 : 3 + D] = rows
        padded = torch.zeros(6 * D + 1, dtype=rows.dtype, device=device)
        padded[1:] = rows.view(-1)
        longer = torch.cat([token_mask[:1], token_mask])
        columns, flat = wide[:, 3 : 3 + D], padded[1:]
        for name, view in {
            "columns": columns,
            "contiguous rows": flat.view(6, D),
            "more axes": flat.view(2, 3, D),
        }.items():
            assert view.data_ptr() % 16 and longer[1:].data_ptr() % 16
            found = layer(view, longer[1:].view(view.shape[:-1]))
            require_equal(found.view(6, D), y, name)
        require_equal(ops_moe(weights, columns).output, ops_moe(weights, columns.clone()).output, "the op")


@on_engines
def test_gate_and_weight_layouts_agree(engine: str) -> None:
    """The same numbers in every storage. On real kernels the sums have one order: bitwise. NumPy's have not."""
    weights, x = draw_weights(EVERYTHING), draw_x((9,))
    allowed = tolerances(EVERYTHING, "float32")["output"]
    outputs = []
    with running_on(engine) as device:
        for storage in STORAGES:
            if storage.router_weight_layout == "out_in":
                outputs.append(make(convert_weights(weights, storage), device)(to_torch(x, device)))
    for number, output in enumerate(outputs):
        if engine == "interpreter":
            require_equal(output, outputs[0], str(number))
        assert_close(to_numpy(output), to_numpy(outputs[0]), allowed, str(number))


def plain_limited(weights: LayerWeights, x: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """(kept ids, output) with slots dropped one after the other."""
    free = stages(weights, x)
    kept = drop_slots(free["ids"], capacity)
    spec = dataclasses.replace(weights.spec, router=None)
    routing = TopK(kept, free["weights"])
    return kept, moe_stages(x, weights.experts, routing, spec, shared=weights.shared)["output"]


@on_engines
@pytest.mark.parametrize("factor", [0.01, 0.5, 1.0, 1.3, 8.0])
def test_capacity_limit(engine: str, factor: float) -> None:
    weights, x = draw_weights(EVERYTHING), draw_x((20,))
    spec = dataclasses.replace(EVERYTHING, capacity_factor=factor)
    kept, expected = plain_limited(weights, x, spec.capacity(20))
    assert (kept < 0).any() == (factor < 2)
    with running_on(engine) as device:
        rows = to_torch(x, device)
        y, aux = make(weights, device, capacity_factor=factor)(rows, return_aux=True)
        free_y, free = make(weights, device)(rows, return_aux=True)
        layout = moe_torch.make_layout(free.ids, E, max_rows=spec.capacity(20))
    np.testing.assert_array_equal(to_numpy(aux.ids), kept)
    assert_close(to_numpy(y), expected, tolerances(EVERYTHING, "float32")["output"], "output")
    require_equal(aux.tokens_per_expert, free.tokens_per_expert, "counts before the drop")
    require_equal(aux.weights, free.weights, "weights")
    require_equal((aux.ids >= 0).view(-1), layout.row_of_slot >= 0, "the slots make_layout(max_rows) keeps")
    if factor > 2:
        require_equal(y, free_y, "nothing dropped")


def test_update_correction_bias() -> None:
    layer = MoE.from_spec(dataclasses.replace(SPECS["deepseek_v3"], num_experts=4, top_k=1, router=RouterSpec()))
    bias = layer.router.correction_bias
    assert bias is not None
    before = bias
    layer.update_correction_bias(torch.tensor([8, 0, 5, 3], dtype=torch.int32), 0.25)
    assert bias is before and bias.tolist() == [-0.25, 0.25, -0.25, 0.25]
    layer.update_correction_bias(torch.tensor([4, 4, 4, 4]), 0.5)
    assert bias.tolist() == [-0.25, 0.25, -0.25, 0.25], "a balanced step changes nothing"
    # The mean of 1, 1, 2, 2 is no number of tokens.
    layer.update_correction_bias(torch.tensor([1, 1, 2, 2]), 0.125)
    assert bias.tolist() == [-0.125, 0.375, -0.375, 0.125]
    with pytest.raises(InvalidInput, match=r"tokens_per_expert must be \[num_experts\] = \(4,\), got \(3,\)"):
        layer.update_correction_bias(torch.zeros(3, dtype=torch.int32), 0.1)
    with pytest.raises(InvalidInput, match="the layer must have a correction bias, got none"):
        MoE(D, F, E, K).update_correction_bias(torch.zeros(E, dtype=torch.int32), 0.1)


def test_the_update_balances_the_load() -> None:
    spec = MoELayerSpec(D, F, E, 2, RouterSpec(scoring="sigmoid", renormalize=True), correction_bias=True)
    layer, x = make(draw_weights(spec)), to_torch(draw_x((256,)))
    with running_on("reference"):
        first = layer(x, return_aux=True)[1].tokens_per_expert
        for _ in range(60):
            layer.update_correction_bias(layer(x, return_aux=True)[1].tokens_per_expert, 0.01)
        last = layer(x, return_aux=True)[1].tokens_per_expert
    assert last.max() - last.min() < 0.4 * (first.max() - first.min())


class Block(torch.nn.Module):
    """A part of a model around a layer."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.norm, self.moe = torch.nn.LayerNorm(D), layer

    def forward(self, x: Any, token_mask: Any) -> Any:
        y, aux = self.moe(self.norm(x), token_mask, return_aux=True)
        return x + y, aux


def block_inputs(count: int) -> tuple[Any, Any]:
    return to_torch(draw_x((2, count), count)), torch.arange(2 * count).view(2, count) % 5 != 1


def require_same_results(one: Any, other: Any, label: str) -> None:
    """Outputs, ids, weights and counts bitwise; losses as close as another order of their sums leaves them."""
    require_equal((one[0], *one[1][2:]), (other[0], *other[1][2:]), label)
    for first, second in zip(one[1][:2], other[1][:2], strict=True):
        assert_close(to_numpy(first), to_numpy(second), LOSSES, label)


COMPILED = {
    "plain": MoELayerSpec(D, F, E, K),
    "everything": EVERYTHING,
    "limited": dataclasses.replace(EVERYTHING, capacity_factor=1.25),
    "around": dataclasses.replace(
        EVERYTHING, router_norm=NormSpec(), expert_scale=True, output=OutputSpec(NormSpec(), bias=True)
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_blocks_have_one_graph_for_any_number_of_tokens(name: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    block = Block(make(draw_weights(COMPILED[name]), capacity_factor=COMPILED[name].capacity_factor))
    compiled = torch.compile(block.requires_grad_(False), fullgraph=True, backend=counter)
    with running_on("reference"):
        for count in (5, 9, 6, 33):
            x, mask = block_inputs(count)
            torch._dynamo.mark_dynamic(x, 1)
            torch._dynamo.mark_dynamic(mask, 1)
            require_same_results(compiled(x, mask), block(x, mask), f"{count} tokens")
    assert counter.frame_count == 1


def test_compiled_under_no_grad_with_trainable_parameters() -> None:
    """As an evaluation of a model in training; unmarked sizes compile twice at most."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    layer = MoE.from_weights(draw_weights(EVERYTHING))
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    with running_on("reference"), torch.no_grad():
        for count in (5, 9, 6, 33):
            x, mask = block_inputs(count)
            require_equal(compiled(x, mask), layer(x, mask), f"{count} tokens")
    assert counter.frame_count <= 2


@pytest.mark.parametrize(("name", "strict"), [("plain", False), ("everything", False), ("everything", True),
    ("limited", False), ("around", True)])  # fmt: skip
def test_exported_blocks_take_any_number_of_tokens(name: str, strict: bool) -> None:
    block = Block(make(draw_weights(COMPILED[name]), capacity_factor=COMPILED[name].capacity_factor))
    block.requires_grad_(False)
    count = torch.export.Dim("count")
    with running_on("reference"):
        exported = torch.export.export(
            block, block_inputs(5), dynamic_shapes=({1: count}, {1: count}), strict=strict
        ).module()
        for number in (5, 8, 33):
            inputs = block_inputs(number)
            require_same_results(exported(*inputs), block(*inputs), f"{number} tokens")


def python_events(function: Callable[[], Any]) -> int:
    """Calls of Python and C functions in one run, a warm one."""
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    function()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return counted


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_the_layer_adds_no_calls_to_the_op(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed, and without what the plan itself does: the layer's own work is less than that of `moe`, which
    hashes the spec and unpacks bundles."""
    weights = draw_weights(SPECS["mixtral"])
    with running_on("reference"):
        layer, x = make(weights), to_torch(draw_x(shape))
        experts, routing = (to_torch(bundle) for bundle in (weights.experts, weights.router))
        rows = x.view(-1, D)

        def by_op() -> Any:
            return moe_torch.moe(rows, experts, routing, weights.spec)

        layer(x)
        by_op()
        # Known by their keys, then as calls seen before.
        for call in (lambda: layer(x), by_op):
            call()
        monkeypatch.setattr(HostPrepared, "_run", lambda *_: None)
        assert python_events(lambda: layer(x)) <= python_events(by_op)


@pytest.mark.parametrize("low", [-50.0, -100.0, -1e4])
@pytest.mark.parametrize("scoring", ["sigmoid", "sqrt_softplus"])
def test_the_balance_loss_of_very_negative_logits_has_its_gradient(scoring: str, low: float) -> None:
    """Scores underflow there, and their sum with them."""
    logits, counts = strategies.low_logits(low), np.array([2, 0, 1, 1, 0], np.int32)
    spec = RouterSpec(2, scoring=scoring)
    expected = router_losses_backward(1.0, None, logits, counts, spec=spec)
    leaf = torch.from_numpy(logits).requires_grad_()
    layer_losses(leaf, torch.from_numpy(counts), None, spec)[0].backward()
    assert expected[0].any() and leaf.grad is not None
    np.testing.assert_allclose(leaf.grad.numpy(), expected, rtol=1e-4, atol=1e-7)


def test_offloaded_arrays_of_a_stage_name_the_fix() -> None:
    """A wrapper such as accelerate's loads a part's arrays for its own call, and these are read beside it."""
    each = OutputSpec(NormSpec(), of="experts")
    for options, path in (({"expert_scale": True}, "router.expert_scale"), ({"output": each}, "output.norm")):
        layer = MoE.from_spec(MoELayerSpec(D, F, E, K, **options))
        part, name = path.split(".")
        module: Any = layer.get_submodule(part)
        getattr(module, name).device_mesh = "of fully_shard"
        with pytest.raises(
            Unsupported, match=rf"{path} must be whole outside of layer.{part}, got a shard; call fully"
        ):
            layer(torch.randn(3, D))
        setattr(module, name, torch.nn.Parameter(getattr(module, name).to("meta")))
        with pytest.raises(InvalidInput, match=rf"{path} must be on cpu like x, got meta; .*preload_module_classes="):
            layer(torch.randn(3, D))
    layer = MoE(D, F, E, K)
    layer.add_lora(LoRA(4)).to("meta")
    with pytest.raises(InvalidInput, match=r"layer.lora.scale must be on cpu like x, got meta"):
        layer(torch.randn(3, D))
