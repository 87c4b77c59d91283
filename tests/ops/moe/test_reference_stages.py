"""The stages of the backward reference by themselves, against torch's autograd in float64."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from moe_core.ops.activation import reference as backward_activation
from moe_core.ops.matmul.reference import backward as backward_matmul
from moe_core.ops.matmul.reference.forward import matmul_ogs
from moe_core.ops.matmul.reference.rows import rows_of
from moe_core.ops.router.reference import router_backward
from moe_core.ops.routing import reference_backward as backward_routing
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.ops.routing.reference import route
from moe_core.parity.tolerance import Tolerance, assert_close
from moe_core.specs import Activation, LogitsSpec, MatmulSpec, RouterSpec
from moe_core.specs.matmul import ACTIVATIONS, ALWAYS_GATED
from moe_core.specs.operands import ExpertActivationOperands, MatmulOperands
from tests.support import strategies
from tests.support.exact import packed
from tests.support.strategies import RoutingCase, draw_array, draw_logits, hard_routing
from tests.support.training.loop import activate, losses, weights_of

F32, F64 = np.float32, torch.float64
#: A few roundings of fp32 each; worst: what an exponential of an argument of 20 loses.
CLOSE = Tolerance(1e-6, 2e-5)
NAMES = [name for name in ACTIVATIONS if name not in ALWAYS_GATED]


def wide(array: np.ndarray) -> torch.Tensor:
    """A float64 leaf."""
    return torch.tensor(array.astype(np.float64)).requires_grad_()


@pytest.mark.parametrize("name", NAMES)
def test_derivatives(name: str) -> None:
    x = np.concatenate([np.linspace(-12, 12, 4001), [0.0, -0.0, 50, -50, 200, -200, 1e4, -1e4]]).astype(F32)
    leaf = wide(x)
    (wanted,) = torch.autograd.grad(activate(leaf, None, Activation(name, False)).sum(), leaf)
    found = backward_activation.activation_derivative(x, name)
    assert found.dtype == F32
    # Every element by its own size where the derivative has no zero nearby: both tails keep relative accuracy, down to
    # where torch's own formulas cancel.
    floor = np.where((x < -2) | (x > 0.5), 1e-9, 1.0)
    assert_close(found, wanted.numpy(), Tolerance(2e-6, 2e-5), name, scale=floor)


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_at_the_ends(name: str) -> None:
    x = np.array([np.inf, -np.inf, 3e38, -3e38, np.nan], F32)
    found = backward_activation.activation_derivative(x, name)
    upper = [np.inf, np.inf] if name.startswith("relu") else [1.0, 1.0]
    np.testing.assert_array_equal(found, [upper[0], 0.0, upper[1], 0.0, np.nan])


@pytest.mark.parametrize("spec", strategies.all_activations(), ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_activation_backward(spec: Activation, dtype: str) -> None:
    rng = np.random.default_rng(1)
    gate = draw_array(rng, (9, 20), dtype, rms=3)
    up = draw_array(rng, (9, 20), dtype, rms=3) if spec.gated else None
    d_y = draw_array(rng, (9, 20), "float32")
    leaves = [wide(array) for array in (gate, up) if array is not None]
    value = (activate(leaves[0], leaves[1] if up is not None else None, spec) * torch.tensor(d_y)).sum()
    wanted = [gradient.numpy() for gradient in torch.autograd.grad(value, leaves)]
    x, second = packed(gate, up, spec)
    found = backward_activation.activation_backward(d_y, x, second, activation=spec)
    if second is None:
        assert isinstance(found, np.ndarray)
        assert found.dtype == x.dtype
        wanted = [packed(wanted[0], wanted[1] if up is not None else None, spec)[0]]
        found = (found,)
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    for actual, expected in zip(found, wanted, strict=True):
        assert_close(actual, expected, Tolerance(1e-6 + unit, 2e-5 + unit), str(spec))


@pytest.mark.parametrize("spec", strategies.all_activations(), ids=str)
def test_nan_and_clamps(spec: Activation) -> None:
    one, nan = np.ones((1, 2), F32), np.full((1, 2), np.nan, F32)
    x, up = packed(nan, one if spec.gated else None, spec)
    found = backward_activation.activation_backward(one, x, up, activation=spec)
    assert np.isnan(np.concatenate([np.ravel(part) for part in np.atleast_2d(*[found])])[:1]).all()
    if spec.limit is not None and spec.name not in ("clamped_silu", "softcapped_silu"):
        limit = F32(spec.limit)
        above = np.nextafter(limit, F32(np.inf))
        x, up = packed(np.array([[limit, above]]), np.array([[-limit, -above]]), spec)
        found = backward_activation.activation_backward(np.array([[1, np.nan]], F32), x, up, activation=spec)
        d_gate, d_up = (found[0], found[1]) if up is not None else _parts(np.asarray(found), spec)
        assert d_gate[0, 0] != 0 and d_up[0, 0] != 0, "a clamp passes the gradient at its limit"
        assert d_gate[0, 1] == 0 and d_up[0, 1] == 0, "and nothing beyond, whatever comes in"


def _parts(columns: np.ndarray, spec: Activation) -> tuple[np.ndarray, np.ndarray]:
    if spec.gate_layout == "interleaved":
        return columns[:, 0::2], columns[:, 1::2]
    return columns[:, : columns.shape[1] // 2], columns[:, columns.shape[1] // 2 :]


@given(st.data())
def test_expert_activation_backward_of_rows_and_of_slots(data: st.DataObject) -> None:
    case = data.draw(strategies.routings(max_tokens=16))
    layout = data.draw(strategies.layouts(case))
    activation = data.draw(strategies.activations())
    dtype = data.draw(strategies.matmul_dtypes())
    rng = np.random.default_rng(data.draw(strategies.seeds()))
    _, _, slot_of_row, row_of_slot, _ = make_layout(case.ids, case.expert_map, case.token_mask, layout=layout)
    kept = row_of_slot >= 0
    z, pre = (np.full((layout.capacity, width), np.nan, F32) for width in (8, activation.input_width(8)))
    z[slot_of_row >= 0] = draw_array(rng, (kept.sum(), 8))
    pre[slot_of_row >= 0] = draw_array(rng, (kept.sum(), pre.shape[1]))
    pre = pre.astype(strategies.numpy_dtype(dtype))
    weight = np.where(kept, case.weights.ravel(), np.nan).astype(F32)
    product = np.where(kept, 0.5, np.nan).astype(F32)
    operands = ExpertActivationOperands(z, pre, row_of_slot, weight, product)
    by_row = backward_activation.expert_activation_backward(operands, activation=activation)
    places = row_of_slot[kept]
    operands = ExpertActivationOperands(z[places], pre[places], None, weight[kept], product[kept])
    by_slot = backward_activation.expert_activation_backward(operands, activation=activation)
    np.testing.assert_array_equal(by_row[2][kept], by_slot[2])
    for rows, others in zip(by_row[:2], by_slot[:2], strict=True):
        assert rows.dtype == pre.dtype and not rows[slot_of_row < 0].any()
        np.testing.assert_array_equal(rows[places], others)
    assert not by_row[2][~kept].any()


@given(st.data())
def test_matmul_gradients(data: st.DataObject) -> None:
    """input_gradient, weight_gradient and bias_gradient are the gradients of the matmul's twin."""
    case = data.draw(strategies.routings(max_tokens=16))
    layout = data.draw(strategies.layouts(case))
    rng = np.random.default_rng(data.draw(strategies.seeds()))
    weight_layout = data.draw(strategies.weight_layouts())
    groups = make_layout(case.ids, case.expert_map, case.token_mask, layout=layout)[:3]
    sizes, _, slot_of_row = groups
    rows_by_expert = rows_of(layout, *groups)
    shape = (case.num_experts, 5, 7) if weight_layout == "in_out" else (case.num_experts, 7, 5)
    weight = draw_array(rng, shape)
    weight[sizes == 0] = np.nan
    x = draw_array(rng, (case.num_tokens, 5))
    used = np.unique(slot_of_row[slot_of_row >= 0] // case.top_k)
    x[np.setdiff1d(np.arange(case.num_tokens), used)] = np.inf
    bias, d_y = draw_array(rng, (case.num_experts, 7)), draw_array(rng, (layout.capacity, 7))
    d_y[slot_of_row < 0] = np.nan
    spec = MatmulSpec(weight_layout, gather="token", scatter="row")
    y = matmul_ogs(MatmulOperands(x, weight, bias=bias), spec, rows_by_expert)
    assert y.shape == d_y.shape

    leaves = [wide(array) for array in (x, weight, bias)]
    value = torch.zeros((), dtype=F64)
    for expert in np.flatnonzero(sizes):
        rows = groups[1][expert] + np.arange(sizes[expert])
        matrix = leaves[1][expert] if weight_layout == "in_out" else leaves[1][expert].T
        product = leaves[0][slot_of_row[rows] // case.top_k] @ matrix + leaves[2][expert]
        value = value + (product * torch.tensor(d_y[rows])).sum()
    if not value.requires_grad:
        return
    d_x, d_weight, d_bias = (gradient.numpy() for gradient in torch.autograd.grad(value, leaves))

    back = MatmulSpec(weight_layout, gather="row", scatter="slot")
    slots = backward_matmul.input_gradient(MatmulOperands(d_y, weight), back, rows_by_expert)
    assert_close(slots.reshape(*case.ids.shape, 5).sum(axis=1), d_x, CLOSE, "d_x", scale=_rms(d_x))
    sides, gather = ((x, d_y), ("token", "row")) if weight_layout == "in_out" else ((d_y, x), ("row", "token"))
    into = draw_array(rng, shape)
    for base in (None, into):
        options = {"gather": gather, "out_dtype": "float32", "into": base}
        found = backward_matmul.weight_gradient(*sides, rows_by_expert, **options)
        wanted = d_weight if base is None else d_weight + base
        assert_close(found, wanted, CLOSE, "d_weight", scale=_rms(wanted))
        np.testing.assert_array_equal(
            found[sizes == 0], np.zeros(shape)[sizes == 0] if base is None else base[sizes == 0]
        )
    found = backward_matmul.bias_gradient(d_y, rows_by_expert, out_dtype="float32")
    assert_close(found, d_bias, CLOSE, "d_bias", scale=_rms(d_bias))


def _rms(array: np.ndarray) -> np.ndarray:
    return np.sqrt(np.square(array).sum() / max(array.size, 1))


def softmaxes_underflow(spec: RouterSpec, kind: str, has_bias: bool) -> bool:
    """Whether the weights are shares of a sum that fp32 may lose: chosen by the bias, far below the largest logit."""
    return kind == "spread" and has_bias and spec.scoring == "softmax" and spec.renormalize


@given(strategies.router_cases(kinds=("normal", "ties", "all_equal", "signed_zeros", "spread"), max_tokens=8))
def test_route_backward(case: strategies.RouterCase) -> None:
    logits, bias, mask = case.arrays()
    if softmaxes_underflow(case.spec, case.logit_kind, case.has_bias):
        logits /= 8
    ids, weights = route(logits, bias, mask, spec=case.spec)
    d_weights = draw_array(np.random.default_rng(case.seed), weights.shape)
    if mask is not None:
        logits[~mask] = d_weights[~mask] = np.nan
    found = backward_routing.route_backward(d_weights, logits, ids, spec=case.spec)
    assert found.dtype == F32
    for token in range(case.num_tokens):
        if mask is not None and not mask[token]:
            assert not found[token].any()
            continue
        leaf = wide(logits[token])
        value = (weights_of(leaf, ids[token], case.spec) * torch.tensor(d_weights[token].astype(np.float64))).sum()
        (wanted,) = torch.autograd.grad(value, leaf)
        # What cancels is of the size of the weights.
        scale = np.abs(weights[token]).max()
        assert_close(found[token], wanted.numpy(), Tolerance(5e-6, 2e-5), str(case.spec), scale=scale)


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrt_softplus"])
def test_small_scores_keep_their_relative_accuracy(scoring: str) -> None:
    logits, ids = np.array([[-40.0, -41.0, -80.0, 0.0]], F32), np.array([[0, 1]], np.int32)
    d_weights = np.array([[1.0, -2.0]], F32)
    for renormalize in (False, True):
        spec = RouterSpec(2, scoring, renormalize=renormalize)
        found = backward_routing.route_backward(d_weights, logits, ids, spec=spec)
        leaf = wide(logits)
        (wanted,) = torch.autograd.grad((weights_of(leaf[0], ids[0], spec) * torch.tensor(d_weights[0])).sum(), leaf)
        np.testing.assert_allclose(found, wanted.numpy(), rtol=2e-5, atol=0)


def test_large_scores_keep_their_relative_accuracy() -> None:
    x = np.array([[30.0, 60.0]], F32)
    found = backward_routing.route_backward(
        np.ones_like(x), x, np.array([[1, 0]], np.int32), spec=RouterSpec(2, "sigmoid")
    )
    np.testing.assert_allclose(found, np.exp(-x.astype(np.float64)), rtol=1e-6)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
def test_a_zero_sum_has_no_gradient(scoring: str) -> None:
    logits = np.array([[-1000.0, -2000.0, 0.0]], F32) - (0 if scoring == "softmax" else 500)
    ids, d_weights = np.array([[0, 1]], np.int32), np.ones((1, 2), F32)
    found = backward_routing.route_backward(d_weights, logits, ids, spec=RouterSpec(2, scoring, renormalize=True))
    assert not found.any()


@pytest.mark.parametrize("router", [RouterSpec(2), RouterSpec(2, "sigmoid", renormalize=True)], ids=str)
@pytest.mark.parametrize("kind", ["some_nan", "infinite"])
def test_nan_stays_with_its_token(router: RouterSpec, kind: str) -> None:
    rng = np.random.default_rng(3)
    clean = draw_logits(rng, "normal", 12, 6)
    dirty = draw_logits(rng, kind, 12, 6)
    dirty[6:] = clean[6:]
    for logits in (clean, dirty):
        ids, _ = route(logits, spec=router)
        counts = np.bincount(ids.ravel(), minlength=6)
        found = backward_routing.route_backward(np.ones((12, 2), F32), logits, ids, spec=router)
        found += backward_routing.router_losses_backward(0.5, 0.25, logits, counts, spec=router)
        assert np.isfinite(found[6:]).all()


@given(strategies.router_cases(kinds=("normal", "ties", "all_equal", "spread"), max_tokens=8))
def test_losses(case: strategies.RouterCase) -> None:
    logits, bias, mask = case.arrays()
    ids, _ = route(logits, bias, mask, spec=case.spec)
    counts = np.bincount(ids[ids >= 0], minlength=case.num_experts)
    kept = np.ones(len(ids), bool) if mask is None else mask
    leaf = wide(logits)
    logits[~kept] = np.nan
    found = backward_routing.router_losses_backward(0.8, -0.3, logits, counts, mask, spec=case.spec)
    assert found.dtype == F32 and not found[~kept].any()
    balance, z = losses(leaf[kept], ids[kept], case.spec)
    (wanted,) = torch.autograd.grad(0.8 * balance - 0.3 * z, leaf)
    assert_close(found, wanted.numpy(), Tolerance(5e-6, 2e-5), "d_logits", scale=_rms(wanted.numpy()))


@pytest.mark.parametrize("weight_layout", ["in_out", "out_in"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_router_backward(weight_layout: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    mask = rng.random(11) < 0.6
    x, d_logits = draw_array(rng, (11, 20), dtype), draw_array(rng, (11, 6))
    weight, bias = draw_array(rng, (20, 6) if weight_layout == "in_out" else (6, 20), dtype), draw_array(rng, (6,))
    matrix = weight.astype(np.float64) if weight_layout == "in_out" else weight.astype(np.float64).T
    wanted_weight = x[mask].astype(np.float64).T @ d_logits[mask]
    wanted_weight = wanted_weight if weight_layout == "in_out" else wanted_weight.T
    x[~mask], d_logits[~mask] = np.nan, np.inf
    found = router_backward(d_logits, x, weight, bias, mask, spec=LogitsSpec(weight_layout))
    unit = 2.0**-24 if dtype == "float32" else 2.0**-8
    assert found.x.dtype == F32 and not found.x[~mask].any()
    assert_close(found.x[mask], d_logits[mask].astype(np.float64) @ matrix.T, CLOSE, "d_x")
    assert found.weight.dtype == weight.dtype
    assert_close(found.weight, wanted_weight, Tolerance(1e-6 + unit, 1e-5 + unit), "d_weight")
    assert found.bias is not None
    assert_close(found.bias, d_logits[mask].sum(axis=0, dtype=np.float64), CLOSE, "d_bias")


def test_an_expert_without_rows_has_zeros_whatever_the_weights_hold() -> None:
    case: RoutingCase = hard_routing("no_expert")
    layout = case.layout(alignment=4)
    rows = rows_of(layout, *make_layout(case.ids, layout=layout)[:3])
    x = np.full((case.num_tokens, 3), np.nan, F32)
    d_y = np.full((layout.capacity, 2), np.nan, F32)
    d_weight = backward_matmul.weight_gradient(x, d_y, rows, gather=("token", "row"), out_dtype="float32")
    assert not d_weight.any() and not backward_matmul.bias_gradient(d_y, rows, out_dtype="float32").any()
    product = backward_matmul.bias_product(d_y, d_y[:4], rows)
    assert product.shape == (layout.num_slots,) and not product.any()
