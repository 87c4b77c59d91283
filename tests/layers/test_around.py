"""What layers have around their experts: torch and JAX, bit for bit, against the reference and float64 derivatives."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import moe_jax.ops
import moe_torch.ops
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import HUGGING_FACE, MAXTEXT, ExpertsSpec, LayerWeights, convert_weights
from moe_core.parity.tolerance import assert_close
from moe_core.specs import NormSpec, RouterSpec
from moe_core.specs.tuning import TileConfig, Tuning
from moe_torch import LatentSpec, MoE, MoELayerSpec, OutputSpec, SharedExpertsSpec
from tests.support.jax import on_a_cpu as on_a_cpu
from tests.support.layer_reference import layer_stages
from tests.support.layers import draw_weights, masked_rows, tolerances
from tests.support.torch import REAL_KERNELS, running_on

D, E, K, L = 24, 6, 3, 16
#: A gate of shared experts beside stages rounds as the framework's sigmoid does, so there is none.
PLAIN = MoELayerSpec(D, 16, E, K, RouterSpec(renormalize=True), shared_experts=SharedExpertsSpec(8))
FIRST = NormSpec(1e-5, centred=True, weight_first=True)
LATENT = LatentSpec(L, NormSpec(1e-5, centred=True))
SPECS = {
    "sum": {"output": OutputSpec(NormSpec(1e-5), scale=0.5, bias=True)},
    "scale": {"output": OutputSpec(scale=0.5)},
    "experts": {
        "output": OutputSpec(NormSpec(1e-5), "experts", bias=True),
        "experts": ExpertsSpec(bias=True, gate_layout="separate"),
    },
    "latent": {"latent": LatentSpec(L), "capacity_factor": 1.0},
    "both": {"output": OutputSpec(FIRST, "experts"), "latent": LATENT},
}
SPECS["mixer"] = {"top_k": 2, "router": RouterSpec(2), "sparse_mixer": 0.2}
SPECS = {name: dataclasses.replace(PLAIN, **fields) for name, fields in SPECS.items()}
rows_of = pytest.mark.parametrize("name", SPECS)


@pytest.mark.parametrize(
    ("name", "engine"),
    [*((name, "reference") for name in SPECS), ("sum", REAL_KERNELS), ("both", REAL_KERNELS), ("mixer", REAL_KERNELS)],
)
def test_both_frameworks_agree_with_the_reference(engine: str, name: str) -> None:
    """Outputs are the same bits in both, and so are gradients, but for those of the router where each expert's result
    is normalised: there the framework sums over columns."""
    pytest.importorskip("flax")
    from tests.support.training.both import train_both

    spec, (x, mask) = SPECS[name], masked_rows(D)
    weights = draw_weights(spec, 3)
    ours, theirs = train_both(spec, weights, engine)
    assert all(gradient.any() for gradient in ours.gradients.values())
    if spec.capacity_factor is None:
        expected = layer_stages(weights, x.reshape(-1, D), mask.reshape(-1))["output"]
        assert_close(ours.y.reshape(-1, D), expected, tolerances(spec, "float32")["output"], label="output")
    np.testing.assert_array_equal(theirs.y, ours.y)
    for parameter, gradient in ours.gradients.items():
        if parameter.startswith("router.") and spec.norm_of_experts is not None:
            np.testing.assert_allclose(theirs.gradients[parameter], gradient, rtol=1e-4, atol=1e-5, err_msg=parameter)
        else:
            np.testing.assert_array_equal(theirs.gradients[parameter], gradient, err_msg=parameter)
    np.testing.assert_allclose(theirs.d_x, ours.d_x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sum", "both"])
def test_gradients_are_derivatives(name: str) -> None:
    """In float64, by torch's own check."""
    layer = MoE.from_spec(SPECS[name], dtype=torch.float64)
    with torch.no_grad():
        for one in layer.parameters():
            if one.dim() == 1:
                one.normal_()
    x = torch.randn(3, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    held = {key: one for key, one in layer.named_parameters() if key.split(".")[0] in ("before", "after", "output")}
    held["experts.down"] = layer.experts.down

    def run(x: Any, *values: Any) -> Any:
        return torch.func.functional_call(layer, dict(zip(held, values, strict=True)), (x,))

    with running_on("reference"):
        assert torch.autograd.gradcheck(run, (x, *held.values()), eps=1e-6, atol=1e-6, fast_mode=True)


@rows_of
def test_what_layers_do_with_them(name: str) -> None:
    spec, (x, _) = SPECS[name], masked_rows(D)
    storage, layer = spec.storage(HUGGING_FACE), MoE.from_spec(spec, dtype=torch.float32)
    norms = {"before.norm": spec.latent and spec.latent.norm, "output.norm": spec.output and spec.output.norm}
    for key, norm in norms.items():
        assert norm is None or layer.get_parameter(key).eq(0.0 if norm.centred else 1.0).all(), key
    again = LayerWeights.from_named(layer.export_weights().named(), spec, storage)
    assert again.layer_spec() == spec.stored_as(storage)
    back = convert_weights(convert_weights(again, MAXTEXT), storage).named()
    for key, array in again.named().items():
        np.testing.assert_array_equal(back[key], array)
    assert layer.to(torch.bfloat16)(torch.from_numpy(x).bfloat16()).dtype == torch.bfloat16
    text = layer.explain(5, training=True)
    wanted = {
        "mixer": "routing_backward", "sum": "rms_norm_backward", "scale": "moe_backward", "experts": "reduce",
        "latent": "matmul_ogs_backward",
    }  # fmt: skip
    assert f"{wanted.get(name, 'rms_norm')} on " in text
    calls = []
    if spec.output is not None:
        layer.output.register_forward_hook(lambda *call: calls.append(call))  # pyright: ignore
        layer(torch.from_numpy(x).bfloat16())
        assert len(calls) == 1


def test_tf32_is_of_every_product_between_the_stages() -> None:
    for allowed, precision in ((False, "ieee"), (True, "tf32")):
        spec = dataclasses.replace(SPECS["both"], allow_tf32=allowed)
        with running_on("interpreter") as device:
            text = MoE.from_spec(spec, device=device).explain(5, training=True)
        assert set(re.findall(r"INPUT_PRECISION=(\w+)", text)) == {precision}


def test_rows_of_tokens_without_an_expert_are_not_projected() -> None:
    """Their NaN stays out of the gradients in both frameworks."""
    nnx = pytest.importorskip("moe_jax.nnx")
    spec = dataclasses.replace(SPECS["both"], shared_experts=None)
    x, _ = masked_rows(D)
    x[1, 3] = np.nan
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(E, dtype=np.int32), (2, 7, 1)), axis=-1)[..., :K]
    ids[1, 3] = -1
    rows = np.nan_to_num(x)
    layer = MoE.from_spec(spec)
    weights = draw_weights(spec, 3)
    layer.load_weights(weights)
    layer(torch.from_numpy(x), gate_inputs=torch.from_numpy(rows), expert_ids=torch.from_numpy(ids)).sum().backward()
    other = nnx.MoE.from_spec(spec.stored_as(HUGGING_FACE), rngs=nnx.nnx.Rngs(0))
    other.load_weights(weights)
    by_jax = nnx.nnx.grad(lambda layer: layer(x, gate_inputs=rows, expert_ids=ids).sum())(other)
    found = (layer.before.weight.grad.numpy(), layer.before.norm.grad.numpy())  # type: ignore[union-attr]
    flat = {leaf.shape: leaf for leaf in jax.tree.leaves(by_jax)}
    assert all(np.isfinite(one).all() and one.any() for one in (*found, flat[L, D], flat[L,]))


def test_tokens_that_a_limit_drops_leave_the_norm_of_experts_alone() -> None:
    """The last token goes to no expert, as all have three. Its weights are NaN, and no gradient of the norm is."""
    nnx = pytest.importorskip("moe_jax.nnx")
    spec = MoELayerSpec(D, 16, 2, 2, capacity_factor=0.75, output=OutputSpec(NormSpec(1e-5), "experts"))
    x = np.random.default_rng(0).standard_normal((4, D)).astype(np.float32)
    x[3] = np.nan
    layer = MoE.from_spec(spec)
    layer.load_weights(draw_weights(spec, 3))
    y, aux = layer(torch.from_numpy(x), return_aux=True)
    assert (aux.ids[3] == -1).all() and aux.weights[3].isnan().all() and y.isfinite().all()
    y.sum().backward()
    other = nnx.MoE.from_spec(spec.stored_as(HUGGING_FACE), rngs=nnx.nnx.Rngs(0))
    other.load_weights(draw_weights(spec, 3))
    by_jax = nnx.nnx.grad(lambda layer: layer(x).sum())(other)
    flat = {leaf.shape: leaf for leaf in jax.tree.leaves(by_jax)}
    found = layer.output.norm.grad.numpy()  # type: ignore[union-attr]
    assert found.any() and np.isfinite(found).all()
    np.testing.assert_array_equal(flat[D,], found)


def test_options_reach_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    nnx = pytest.importorskip("moe_jax.nnx")
    seen: dict[Any, list[Any]] = {moe_torch.ops: [], moe_jax.ops: []}

    def spy(ops: Any, multiply: Any) -> None:
        monkeypatch.setattr(ops, "matmul_ogs", lambda *call: seen[ops].append(call[2]) or multiply(*call))

    for ops in seen:
        spy(ops, ops.matmul_ogs)
    tuning = Tuning(TileConfig(16, 16, 16), TileConfig(32, 16, 16))
    spec, x = dataclasses.replace(SPECS["both"], tuning=tuning, allow_tf32=True), masked_rows(D)[0]
    with running_on("reference"):
        MoE.from_spec(spec)(torch.from_numpy(x))
        nnx.MoE.from_spec(spec.stored_as(HUGGING_FACE), rngs=nnx.nnx.Rngs(0))(x)
    for specs in seen.values():
        assert len(specs) > 4 and all(one.allow_tf32 for one in specs)
        of_experts = [one.tuning for one in specs if one.tuning != tuning.of_product()]
        assert of_experts == [tuning.of_product(1), tuning.of_product(2)]


def test_a_mixer_takes_no_ids() -> None:
    layer = MoE.from_spec(SPECS["mixer"])
    with pytest.raises(InvalidInput, match=r"expert_ids must be None for a layer with a sparse_mixer"):
        layer(torch.randn(3, D), expert_ids=torch.zeros(3, 2, dtype=torch.int32))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output": NormSpec()}, "output must be an OutputSpec or None"),
        ({"sparse_mixer": 0.1}, r"router must be RouterSpec\(2\) with a sparse_mixer"),
        ({"sparse_mixer": -1.0}, r"sparse_mixer must be at least 0, got -1\.0"),
        ({"latent": 16}, "latent must be a LatentSpec or None"),
    ],
)  # fmt: skip
def test_wrong_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        dataclasses.replace(PLAIN, **fields)


def test_wrong_specs() -> None:
    with pytest.raises(InvalidInput, match=r"output must have a norm, a scale or a bias"):
        OutputSpec()
    with pytest.raises(InvalidInput, match=r"output\.of must be 'sum' without a norm, got 'experts'"):
        OutputSpec(of="experts", bias=True)
    with pytest.raises(InvalidInput, match=r"latent\.width must be"):
        LatentSpec(0)
    with pytest.raises(InvalidInput, match=r"centred must be"):
        NormSpec(centred=1)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match=r"MaxText has no name for before\.weight"):
        from moe_core.checkpoint import to_maxtext

        to_maxtext(draw_weights(SPECS["latent"]))
