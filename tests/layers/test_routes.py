"""Every field of a layer's description on every route: it arrives, with equal results, or the route names it.

`tests.support.frontends.routes` makes the layers out of the dataclasses. MOEBIUS_ROUTES=all takes every value of every
field, every family of files, and every route for all of them.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import json
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
flax_nnx = pytest.importorskip("flax.nnx")

import jax.numpy as jnp
from jax import export as jax_export

import moe_torch
from moe_core.base import codec
from moe_core.checkpoint import from_maxtext, save_checkpoint, to_maxtext
from moe_core.checkpoint.write import _SAME_RESULTS
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import FP8_TOKEN
from moe_core.layers import HUGGING_FACE, MAXTEXT, LayerWeights, MoELayerSpec, convert_weights
from moe_core.layers.plans import layer_plans
from moe_core.parallel import ExchangeSpec
from moe_core.parallel.spec import MODES, why_not_exact
from moe_core.plan import registry
from moe_core.runtime.cuda import cuda_available
from moe_jax import layers, linen, nnx
from moe_jax.bridge.ffi import TARGET_NAME
from moe_jax.layers.functional import _planned_for
from moe_jax.parallel import ExpertAxis
from moe_torch import MoE
from moe_torch.bridge.arrays import target_of_device
from tests.support.frontends.routes import BASES, UNREACHED, T, changed, each_value, fields_of, inputs_of, weights_of
from tests.support.layers import CONFIGS, SPECS
from tests.support.parallel.jax import ep_mesh

EVERY = os.environ.get("MOEBIUS_ROUTES") == "all"
PATHS = [path for path in changed() if path not in UNREACHED]
CASES = [(path, spec) for path in PATHS for spec in changed()[path][: None if EVERY else 1]]
pytestmark = pytest.mark.usefixtures("on_the_reference")
every_field = pytest.mark.parametrize(("path", "spec"), CASES, ids=[path for path, _ in CASES])
#: Slower routes take fields of the layer alone, or every value on one base.
OWN = [(path, spec) for path, spec in CASES if "." not in path]
if EVERY:
    OWN = [(path, spec) for path in PATHS for spec in each_value(path)]
#: Bits of the reference, which JAX has where no GPU is.
on_cpus = pytest.mark.skipif(cuda_available(), reason="JAX would take the GPU; run it with CUDA_VISIBLE_DEVICES=")
own_fields = pytest.mark.parametrize(("path", "spec"), OWN, ids=[path for path, _ in OWN])
Results = dict[str, np.ndarray]


@pytest.fixture
def on_the_reference() -> Iterator[None]:
    with moe_torch.cpu_engine("reference"):
        yield


def stored(spec: MoELayerSpec) -> MoELayerSpec:
    return spec.stored_as(spec.storage(HUGGING_FACE))


def has_gradients(spec: MoELayerSpec) -> bool:
    return spec.experts.scheme is None or spec.experts.scheme.activations is None


def in_torch(layer: MoE) -> Results:
    """The output of a training step, and the gradients of x and all that is trained."""
    x, ids = inputs_of(layer.spec)
    rows = torch.from_numpy(x).requires_grad_(has_gradients(layer.spec))
    more = {} if ids is None else {"input_ids": torch.from_numpy(ids)}
    trained: dict[str, Any] = {name: one for name, one in layer.named_parameters() if one.requires_grad}
    for one in trained.values():
        one.main_grad = torch.zeros_like(one)
    y, aux = layer(rows, **more, return_aux=True)
    results = {"output": y.detach().numpy(), "ids": aux.ids.numpy()}
    if not rows.requires_grad:
        return results
    loss = y.square().sum() + aux.load_balance_loss + aux.z_loss
    gradients = torch.autograd.grad(loss, [rows, *trained.values()], allow_unused=True)
    for name, one, gradient in zip(("x", *trained), (rows, *trained.values()), gradients, strict=True):
        results[f"grad {name}"] = (one.main_grad if gradient is None else gradient).numpy()
    return results


def in_jax(parameters: Any, spec: MoELayerSpec) -> Results:
    """The same of a JAX layer's parameters, by the names and layouts of torch."""
    x, ids = inputs_of(spec)
    by, every = layers.RoutedBy(input_ids=ids), layers.leaves(spec)
    held = {leaf.parameter.name: layers.find(parameters, leaf.path) for leaf in every}

    def loss_of(trained: dict[str, Any], x: Any) -> Any:
        arrays = layers.nested((leaf.path, (held | trained)[leaf.parameter.name]) for leaf in every)
        y, aux = layers.forward(arrays, x, spec, routed_by=by, return_aux=True)
        return jnp.square(y).sum() + aux.load_balance_loss + aux.z_loss, (y, aux.ids)

    if not has_gradients(spec):
        _, (y, chosen) = loss_of({}, x)
        return {"output": np.asarray(y), "ids": np.asarray(chosen)}
    names = [leaf.parameter.name for leaf in every if not leaf.is_state and not leaf.is_quantized]
    gradients, (y, chosen) = jax.grad(loss_of, (0, 1), has_aux=True)({name: held[name] for name in names}, x)
    results = {"output": np.asarray(y), "ids": np.asarray(chosen), "grad x": np.asarray(gradients[1])}
    for name, gradient in gradients[0].items():
        results[f"grad {name}"] = np.asarray(gradient.T if name == "router.weight" else gradient)
    return results


def require_same(found: Results, expected: Results, route: str, *, rounded: tuple[str, ...] = ()) -> None:
    """Bits, and a few roundings in the results that begin with a name of `rounded`."""
    assert found.keys() == expected.keys(), route
    for name, array in expected.items():
        error = 1e-4 if name.startswith(rounded or "none") else 0
        np.testing.assert_allclose(found[name], array, rtol=error, atol=error, err_msg=f"{route}: {name}")


def test_the_walk_reaches_every_field() -> None:
    reached = {path for path, specs in changed().items() if specs}
    assert {path for path, _ in fields_of(MoELayerSpec)} - reached == UNREACHED.keys()
    assert all(spec not in BASES for _, spec in CASES)


def through_maxtext(weights: LayerWeights, spec: MoELayerSpec) -> LayerWeights:
    return convert_weights(from_maxtext(to_maxtext(weights), spec, storage=MAXTEXT), weights.storage)


def described(weights: LayerWeights, spec: MoELayerSpec, tmp_path: Path) -> dict[str, MoELayerSpec]:
    other = dataclasses.replace(HUGGING_FACE, weight_layout="in_out", router_weight_layout="in_out")
    other = dataclasses.replace(other, gate_layout=weights.storage.gate_layout)
    again = convert_weights(convert_weights(weights, other), weights.storage)
    return {
        "spec by codec": stored(codec.loads(codec.dumps(spec))),
        "spec by pickle": stored(pickle.loads(pickle.dumps(spec))),
        "weights": weights.layer_spec(),
        "weights by pickle": pickle.loads(pickle.dumps(weights)).layer_spec(),
        "weights by deepcopy": copy.deepcopy(weights).layer_spec(),
        "converted": again.layer_spec(),
    }


def torch_layers(weights: LayerWeights, spec: MoELayerSpec, tmp_path: Path) -> dict[str, MoE]:
    """Layers at the ends of all routes of torch. The first is the one that others must equal."""
    layer = MoE.from_weights(weights)
    loaded, state = MoE.from_spec(spec), MoE.from_spec(spec)
    loaded.load_weights(weights)
    files = pytest.importorskip("safetensors.torch")
    files.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    state.load_state_dict(files.load_file(tmp_path / "layer.safetensors"))
    saved = io.BytesIO()
    torch.save(layer, saved)
    return {
        "from_weights": layer,
        "shared": MoE.from_weights(weights, copy=False),
        "torch to torch": MoE.from_weights(layer.export_weights()),
        "load_weights": loaded,
        "safetensors": state,
        "deepcopy": copy.deepcopy(layer),
        "torch.save": torch.load(io.BytesIO(saved.getvalue()), weights_only=False),
    }


@every_field
def test_torch(path: str, spec: MoELayerSpec, tmp_path: Path) -> None:
    weights = weights_of(spec)
    for route, arrived in described(weights, spec, tmp_path).items():
        assert arrived == stored(spec), (route, path)
    ends = torch_layers(weights, spec, tmp_path)
    expected = in_torch(ends["from_weights"])
    for route, layer in ends.items():
        assert stored(layer.spec) == stored(spec), (route, path)
        require_same(in_torch(layer), expected, route)
    target = target_of_device(torch.device("cpu"))
    for plan in (
        one for some in layer_plans(layer._operands_for(9), spec, HUGGING_FACE, target, False) for one in some
    ):
        assert registry.decode_plan(json.loads(codec.dumps(plan))) == plan, path


@on_cpus
@every_field
def test_jax(path: str, spec: MoELayerSpec) -> None:
    weights = weights_of(spec)
    if spec.main_grad:
        with pytest.warns(UserWarning, match="main_grad=True is left out"):
            layer = nnx.MoE.from_weights(weights)
        for make in (linen.MoE.from_spec, lambda spec: nnx.MoE.from_spec(spec, rngs=flax_nnx.Rngs(0))):
            with pytest.raises(Unsupported, match="main_grad must be False in JAX"):
                make(spec)
        wanted = dataclasses.replace(stored(spec), main_grad=False)
    else:
        layer, wanted = nnx.MoE.from_weights(weights), stored(spec)
    exported: Any = layer.export_weights()
    module: Any = linen.MoE.from_spec(exported.layer_spec())
    variables = module.load_weights(exported)
    stack: Any = linen.MoE.from_spec(wanted, num_layers=2, param_dtype=weights.dtype)
    arrived = {
        "nnx": layer.spec,
        "nnx, exported": exported.layer_spec(),
        "nnx, split and merged": flax_nnx.merge(*flax_nnx.split(layer)).spec,
        "nnx, cloned": flax_nnx.clone(layer).spec,
        "linen": module.spec,
        "linen, cloned": module.clone().spec,
        "linen, exported": module.export_weights(variables).layer_spec(),
        "stack": stack.export_weights(stack.load_weights([exported, exported]))[1].layer_spec(),
        "nnx to torch": stored(MoE.from_weights(exported).spec),
    }
    for route, one in arrived.items():
        assert one == wanted, (route, path)
    # A framework has its own order of sums in gradients, and the sigmoid of a gate behind projections.
    gated = spec.shared_experts is not None and spec.shared_experts.gate and spec.latent is not None
    rounded = ("grad", "output") if gated else ("grad",)
    expected = in_torch(MoE.from_weights(weights))
    require_same(in_torch(MoE.from_weights(exported)), expected, "torch to nnx to torch", rounded=("grad",))
    before = {*registry.registered_keys()}
    found = in_jax(layer.parameters(), layer.spec)
    shape, dtypes = (T, layer.spec.d_model), (None, jnp.float32)
    operands, target = _planned_for(layer.spec, shape, dtypes, None, layer.parameters(), None)
    told = itertools.chain(*layer_plans(operands, layer.spec, MAXTEXT, target, has_gradients(spec)))
    ran = {*registry.registered_keys()} - before - {plan.key for plan in told}
    assert not ran, "\n".join(registry.lookup(key).explain() for key in ran)
    require_same(found, expected, "torch to nnx", rounded=rounded)
    if EVERY:
        require_same(in_jax(module._parameters(variables), module.spec), found, "nnx to linen")


@every_field
def test_maxtext(path: str, spec: MoELayerSpec) -> None:
    """A tree has arrays alone: options come from the caller's spec, and arrays without a name there are refused."""
    weights = weights_of(spec)
    try:
        arrived = through_maxtext(weights, spec)
    except (Unsupported, InvalidInput) as refusal:
        known = ("MaxText has no name for", "MaxText, which has one name", "gate_layout must stay")
        assert any(word in str(refusal) for word in known), refusal
        return
    assert arrived.layer_spec() == stored(spec), path
    for name, array in weights.named().items():
        np.testing.assert_array_equal(arrived.named()[name], array, err_msg=name)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Of the only rank."""
    distributed = pytest.importorskip("torch.distributed")
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@own_fields
def test_shared_out(path: str, spec: MoELayerSpec, mesh: Any) -> None:
    weights, (x, ids) = weights_of(spec), inputs_of(spec)
    try:
        layer = MoE.from_weights(weights, expert_parallel=mesh)
    except Unsupported as refusal:
        named = ["token_rounding", "apply_router_weight_on_input", "main_grad", "a norm of each expert's result"]
        assert any(name in str(refusal) for name in named), refusal
        return
    assert stored(layer.spec) == layer.export_weights().layer_spec() == stored(spec), path
    more = {} if ids is None else {"input_ids": torch.from_numpy(ids)}
    scheme = spec.experts.scheme
    if scheme is not None and scheme.activations is not None and scheme.activations.group_rows is None:
        with pytest.raises(Unsupported, match="activations must have a scale for each row across ranks"):
            layer(torch.from_numpy(x))
        return
    with torch.no_grad():
        found, expected = (one.eval()(torch.from_numpy(x), **more) for one in (layer, MoE.from_weights(weights)))
    np.testing.assert_array_equal(found, expected)


#: Values of `expert_axis`: every field of it and of its exchange, changed.
AXES = (
    "ep",
    ExpertAxis(tokens=("ep",)),
    *(ExpertAxis(exchange=ExchangeSpec(mode=mode)) for mode in MODES),
    ExpertAxis(exchange=ExchangeSpec(rows="slots")),
    ExpertAxis(exchange=ExchangeSpec(receive=4 * T)),
    ExpertAxis(exchange=ExchangeSpec(receive=T, on_overflow="drop")),
    ExpertAxis(exchange=ExchangeSpec(format=FP8_TOKEN)),
    ExpertAxis(exchange=ExchangeSpec(chunks=2)),
)
_REFUSED_ACROSS = ("exchange.mode", "exchange.format", "exchange.chunks", "num_experts", "token_rounding", "norm of")
_REFUSED_ACROSS += ("apply_router_weight_on_input", "activations must have a scale for each row")
_SOME = OWN if EVERY else [OWN[number * len(OWN) // len(AXES)] for number in range(len(AXES))]
_ACROSS = [(*case, AXES[number % len(AXES)]) for number, case in enumerate(_SOME)]


@on_cpus
@pytest.mark.parametrize(
    ("path", "spec", "axis"), _ACROSS, ids=[f"{path} {AXES.index(axis)}" for path, _, axis in _ACROSS]
)
def test_over_a_mesh_axis(path: str, spec: MoELayerSpec, axis: Any) -> None:
    weights, (x, ids) = weights_of(dataclasses.replace(spec, main_grad=False)), inputs_of(spec)
    layer = nnx.MoE.from_weights(weights)
    layer.eval()
    expected = layer(x, input_ids=ids)
    layer.expert_axis = ExpertAxis.of(axis)
    module: Any = linen.MoE.from_spec(layer.spec, expert_axis=axis)
    copies = flax_nnx.clone(layer), flax_nnx.merge(*flax_nnx.split(layer))
    assert {one.expert_axis for one in copies} == {ExpertAxis.of(axis)}, path
    assert ExpertAxis.of(module.clone().expert_axis) == ExpertAxis.of(axis), path
    with jax.set_mesh(ep_mesh(4)):
        try:
            found = flax_nnx.jit(lambda layer, x, ids: layer(x, input_ids=ids), graph_updates=False)(copies[0], x, ids)
        except (InvalidInput, Unsupported) as refusal:
            assert any(name in str(refusal) for name in _REFUSED_ACROSS), refusal
            return
    held = ExpertAxis.of(axis)
    exact = held is not None and not why_not_exact(held.exchange, 1)
    allowed = 0 if exact else float(np.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=0, atol=allowed, err_msg=path)


@own_fields
def test_exported_programs(path: str, spec: MoELayerSpec, tmp_path: Path) -> None:
    x, ids = inputs_of(spec)
    layer = MoE.from_weights(weights_of(spec)).eval().requires_grad_(False)
    more = {} if ids is None else {"input_ids": torch.from_numpy(ids)}
    with torch.no_grad():
        expected = layer(torch.from_numpy(x), **more)
        program = torch.export.export(layer, (torch.from_numpy(x),), more)
        torch.export.save(program, tmp_path / "layer.pt2")
        found = torch.export.load(tmp_path / "layer.pt2").module()(torch.from_numpy(x), **more)
        np.testing.assert_array_equal(found, expected)
    held = nnx.MoE.from_weights(weights_of(dataclasses.replace(spec, main_grad=False)))
    held.eval()
    call = jax.jit(lambda x, ids: held(x, input_ids=ids))
    allowed = jax_export.DisabledSafetyCheck.custom_call(TARGET_NAME)
    exported = jax_export.export(call, disabled_checks=[allowed])(x, ids)
    found = jax_export.deserialize(exported.serialize()).call(x, ids)
    np.testing.assert_array_equal(found, call(x, ids))


@own_fields
def test_orbax(path: str, spec: MoELayerSpec, tmp_path: Path) -> None:
    """Options come from the abstract layer, arrays from the files."""
    ocp = pytest.importorskip("orbax.checkpoint")
    spec = dataclasses.replace(spec, main_grad=False)
    layer: Any = nnx.MoE.from_weights(weights_of(spec))
    graph, state = flax_nnx.split(flax_nnx.eval_shape(lambda: nnx.MoE.from_spec(layer.spec, rngs=flax_nnx.Rngs(0))))
    with ocp.StandardCheckpointer() as files:
        files.save(tmp_path / "layer", flax_nnx.split(layer)[1])
        files.wait_until_finished()
        arrived = flax_nnx.merge(graph, files.restore(tmp_path / "layer", state))
    assert arrived.spec == layer.spec, path
    found, expected = (one.export_weights().named() for one in (arrived, layer))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def file_cases() -> list[tuple[str, str, MoELayerSpec]]:
    of_family = [(name, changed((SPECS[name],))) for name in (SPECS if EVERY else ("mixtral", "deepseek_v3"))]
    return [
        (family, path, spec)
        for family, specs in of_family
        for path in specs
        for spec in specs[path][: None if EVERY else 1]
    ]


FILES = file_cases()


@pytest.mark.parametrize(("family", "path", "spec"), FILES, ids=[f"{family} {path}" for family, path, _ in FILES])
def test_hugging_face_files(family: str, path: str, spec: MoELayerSpec, tmp_path: Path) -> None:
    """config.json is the description: another one is refused by name, options that it cannot have are named."""
    pytest.importorskip("safetensors")
    config, weights = CONFIGS[family], weights_of(spec)
    number = 1 if "first_k_dense_replace" in config else 0
    every = [(layer, weights) for layer in range(number, config["num_hidden_layers"])]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            read = LayerWeights.from_checkpoint(save_checkpoint(tmp_path / "files", config, every).layer(number))
        except (InvalidInput, Unsupported) as refusal:
            assert all(name in str(refusal) for name in (path.split(".")[0], path.split(".")[-1])), refusal
            return
    told = " ".join(str(one.message) for one in caught)
    arrived, wanted = read.layer_spec().stored_as(HUGGING_FACE), spec.stored_as(HUGGING_FACE)
    for field in dataclasses.fields(wanted):
        if getattr(arrived, field.name) != getattr(wanted, field.name):
            assert f"{field.name}=" in told or field.name in _SAME_RESULTS, (path, told)
    if not told:
        kept = convert_weights(weights, read.storage)
        require_same(in_torch(MoE.from_weights(read)), in_torch(MoE.from_weights(kept)), path)
