"""Rows on JAX: the step through all that a row puts around the layer, judged by the oracle, and against torch's bits.

Transformations over several batches (`vmap`, `shard_map`) get the tokens in another order in all batches but the first,
whose results and gradients count: what leaks between batches is seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import qwix  # type: ignore[import-not-found]
import torch
from flax import nnx as flax_nnx
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import moe_jax
import moe_torch
from moe_core.specs.operands import LoRAFactors
from moe_jax import layers, linen, nnx, trace
from moe_jax.bridge.ffi import TARGET_NAME
from moe_jax.parallel import ExpertAxis
from tools.combinations.cover import Row
from tools.combinations.features import case_of
from tools.combinations.replayed import Replayed
from tools.fuzz import run, run_jax
from tools.fuzz.case import Case
from tools.fuzz.data import is_parameter
from tools.fuzz.engines import OPS, call_arrays, layer_name, layer_spec, lora_of, routed_ids, running_on, trained
from tools.fuzz.judge import judge

#: Arrays with one row for each token.
_BY_TOKEN = ("x", "token_mask", "gate_inputs", "ids", "input_ids", "adapter_ids", "replayed", "replayed weights")
_DEVICES = 4
#: Gradients of what every device has.
_SUMMED = ("d routing.", "d shared.", "d before.", "d after.", "d output.", "d lora.a_router", "d lora.b_router")
_SUMMED += tuple(f"d lora.{side}{number}_shared" for side in "ab" for number in (1, 2))
Function = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


def examine(row: Row, engine: str = "reference", seed: int = 0) -> list[str]:
    """What is wrong with a row. Raises what the library raises."""
    case = case_of(row, seed)
    replayed = Replayed(row, case)
    arrays = replayed.draw()
    given = call_arrays(arrays)
    tokens = {name: array for name, array in given.items() if name != "ids" or case.given_ids}
    matrices = {name: array for name, array in arrays.plain.items() if is_parameter(name)}
    plain, layer, replays = None, None, replayed.kind.startswith("replay")
    if replays:  # else JAX comes first, so that its refusals are its own
        plain, layer = replayed.plain(arrays, given, engine)
    if layer is not None:
        pairs = zip(("replayed", "replayed weights"), layer.arrays, strict=False)
        tokens |= dict(pairs)
    case = replayed.case
    with running_on(engine), jax.enable_x64(case.dtype == "float64"), jax.default_device(jax.devices("cpu")[0]):
        of_tokens, of_layer = ({n: run_jax.to_jax(one) for n, one in part.items()} for part in (tokens, matrices))
        found = _step(row, case, of_tokens, of_layer)
        found = {name: run_jax.to_torch(array, "cpu") for name, array in found.items() if array is not None}
    found.pop("overflow", None)
    if not replays:
        plain, _ = replayed.plain(arrays, given, engine)
    plain = found if plain is None else plain
    if "routed_ids" in plain:  # before the layer drops some
        with running_on(engine):
            found["routed_ids"] = routed_ids(replayed.base, moe_torch.ops, given, found["logits"])
    wrong = [
        f"oracle: {text}"
        for text in judge(replayed.base, arrays, found, engine).complaints
        if not text.startswith(replayed.own)
    ]
    if row["expert_axis"] != "none":  # BLAS adds up a few rows in another order than many
        if case.dtype in ("float32", "float64"):
            return wrong
        # Sums over devices of rounded parts.
        summed = [name for name in found if name.startswith(_SUMMED)]
        wrong = [text for text in wrong if not text.startswith(tuple(f"oracle: {name}" for name in summed))]
        for name in summed:
            bound = 16 * torch.finfo(found[name].dtype).eps * float(plain[name].abs().max())
            error = float((found[name].double() - plain[name].double()).abs().max())
            wrong += [f"{name}: {error:.3g} apart, bound {bound:.3g}"] if not error <= bound else []
        return wrong
    for name in replayed.own:
        plain.pop(name, None)
        found.pop(name, None)
    if layer is not None:  # one operator rounds these once
        for name in ("d x", "d gate_inputs", "d routing.weight"):
            plain.pop(name, None)
            found.pop(name, None)
    apart: tuple[str, ...] = ()
    if row["vmap"] != "none" and case.dtype in ("float32", "float64"):  # one call has the rows of all batches
        apart = ("d ",) if row["batch_invariant"] != "none" else ("d ", "output:", "logits:", "weights:")
    both = run.differences(replayed.base, arrays, {"torch": plain, "jax": found})
    return wrong + [text for text in both if not text.startswith(apart)]


@contextlib.contextmanager
def _mesh(row: Row) -> Iterator[Any]:
    """The mesh of a row's devices, or None. An Auto mesh alone needs leave to run everything on every device."""
    axis = "ep" if row["expert_axis"] != "none" else "data"
    if row["expert_axis"] == row["shard_map"] == row["mesh"] == "none":
        yield None
        return
    kind = AxisType.Explicit if row["mesh"] == "Explicit" else AxisType.Auto
    mesh = jax.make_mesh((_DEVICES,), (axis,), devices=jax.devices("cpu")[:_DEVICES], axis_types=(kind,))
    alone = row["expert_axis"] == row["shard_map"] == "none"
    with contextlib.ExitStack() as stack:
        if alone and row["mesh"] == "Auto":
            stack.enter_context(moe_jax.replicated())
        else:
            stack.enter_context(jax.set_mesh(mesh))
        yield mesh


def _step(row: Row, case: Case, given: dict[str, Any], unquantised: dict[str, Any]) -> dict[str, Any]:
    """The outputs by name, and the gradients as `d name`. unquantised: what qwix quantises."""
    model = _op(case) if case.kind == "moe" else _layer(row, case, given, unquantised)
    flowing = {name: given.pop(f"d_{name}") for name in ("output", "weights") if f"d_{name}" in given}
    flowing |= {name: factor for name, factor in (("load_balance_loss", case.balance), ("z_loss", case.z)) if factor}
    tokens = {name: given.pop(name) for name in _BY_TOKEN if name in given}
    stacked = row["stack"] != "none"
    with _mesh(row) as mesh:
        if mesh is not None:
            split = row["mesh"] == "Auto" and row["expert_axis"] == row["shard_map"] == "none"
            given = jax.device_put(given, NamedSharding(mesh, P()))
            tokens = jax.device_put(tokens, NamedSharding(mesh, P("data") if split else P()))
            flowing = jax.device_put(flowing, NamedSharding(mesh, P()))
        call = _transformed(row, case, model, mesh)
        names = trained(case, given | tokens) if case.gradient else []
        if case.kind == "layer":
            names = [name for name in names if name in ("x", "gate_inputs") or is_parameter(name)]

        def program(given: Any, tokens: Any) -> Any:
            if not case.gradient:
                return call(given, tokens)

            def objective(own: dict[str, Any]) -> Any:
                held = [{name: own.get(name, array) for name, array in part.items()} for part in (given, tokens)]
                outputs = call(*held)
                return [outputs[name] for name in flowing], outputs

            _, pull, found = jax.vjp(objective, {n: (given | tokens)[n] for n in names}, has_aux=True)
            (gradients,) = pull([_like(found[name], value) for name, value in flowing.items()])
            return found | {f"d {name}": gradient for name, gradient in gradients.items()}

        run: Any = jax.jit(program) if row["jit"] == "on" else program
        held = (_stacked(given) if stacked else given, tokens)
        if row["export"] != "none":
            allowed = [export.DisabledSafetyCheck.custom_call(TARGET_NAME)]
            run = export.deserialize(export.export(run, disabled_checks=allowed)(*held).serialize()).call
        found = run(*held)
        found = jax.block_until_ready(found)
        if stacked:
            found |= {
                name: run_jax.of_layer(array, jnp.asarray(1)) for name, array in found.items()
                if name.startswith("d ") and is_parameter(name.removeprefix("d "))
            }  # fmt: skip
    return jax.device_put(found, jax.devices("cpu")[0])


def _like(output: Any, value: Any) -> Any:
    """A gradient of an output, with the sharding that an Explicit mesh gives its type."""
    value, sharding = jnp.asarray(value, output.dtype), jax.typeof(output).sharding
    return jax.sharding.reshard(value, sharding.spec) if any(sharding.spec) else value


def _stacked(given: dict[str, Any]) -> dict[str, Any]:
    """Layer 0 of a stack is another one, layer 1 that of the row."""
    return {
        name: jnp.stack([jnp.roll(array, 1, 0), array]) if is_parameter(name) else array
        for name, array in given.items()
    }


def _layer(row: Row, case: Case, given: dict[str, Any], unquantised: dict[str, Any]) -> Any:
    """(arrays of parameters, arrays by token, layer_index) -> outputs."""
    spec, dtype = layer_spec(case), jnp.dtype(case.dtype)
    num_layers = None if row["stack"] == "none" else 2
    axis = None if row["expert_axis"] == "none" else "ep"
    options: dict[str, Any] = {"dtype": dtype, "num_layers": num_layers, "expert_axis": axis}
    lora = lora_of(case)
    if row["layer"] == "nnx":
        held: Any = flax_nnx.eval_shape(
            lambda: nnx.MoE.from_spec(spec, rngs=flax_nnx.Rngs(0), param_dtype=dtype, lora=lora, **options)
        )
    elif row["layer"] == "linen":
        held = linen.MoE.from_spec(spec, param_dtype=dtype, lora=lora, **options)
    every = layers.leaves(spec, num_layers)

    def filled(layer: Any, tree: Any, every: Any, factors: Any = types.MappingProxyType({})) -> Any:
        layer = flax_nnx.clone(layer)
        for name, one in factors.items():
            getattr(layer.lora, name).set_value(one)
        for leaf in every:
            functools.reduce(getattr, leaf.path, layer).set_value(layers.find(tree, leaf.path))
        return layer

    def tree_of(given: dict[str, Any], every: Any) -> Any:
        named = {layer_name(name): array for name, array in given.items() if is_parameter(name)}
        if case.router_layout == "out_in":  # Flax stores [D, E]
            named["router.weight"] = named["router.weight"].swapaxes(-1, -2)
        return layers.nested((leaf.path, named[leaf.parameter.name]) for leaf in every)

    if row["qwix"] != "none":
        before = layer_spec(dataclasses.replace(case, weights=""))
        leaves = layers.leaves(before, num_layers)
        empty = nnx.MoE.from_spec(before, rngs=flax_nnx.Rngs(0), param_dtype=dtype, **(options | {"expert_axis": None}))
        whole = filled(empty, tree_of(_stacked(unquantised) if num_layers else unquantised, leaves), leaves)
        rules = qwix.PtqProvider([qwix.QuantizationRule(weight_qtype=jnp.int8)])
        names = {"gate_inputs": "gate_inputs", "expert_ids": "ids", "input_ids": "input_ids"}
        call = {"x": given["x"], "layer_index": 0 if num_layers else None}
        call |= {name: given.get(own) for name, own in names.items()}
        if row["layer"] == "linen":
            qwix.quantize_model(linen.MoE.from_spec(before, dtype=dtype), rules).init(jax.random.key(0), **call)
        held = qwix.quantize_model(whole, rules, **call)
        wanted = tree_of(_stacked(given) if num_layers else given, every)
        for leaf in every:
            array = functools.reduce(getattr, leaf.path, held).get_value()
            assert (array == layers.find(wanted, leaf.path)).all(), f"qwix has other codes of {leaf.path}"
        held.expert_axis = empty.expert_axis if axis is None else ExpertAxis.of(axis)
        if lora is not None:
            held.add_lora(lora, rngs=flax_nnx.Rngs(0))

    def model(given: dict[str, Any], tokens: dict[str, Any], layer_index: Any = None) -> dict[str, Any]:
        tree = tree_of(given, every)
        routed = {"gate_inputs": tokens.get("gate_inputs"), "expert_ids": tokens.get("ids")}
        routed["input_ids"], adapter_ids = tokens.get("input_ids"), {"adapter_ids": tokens.get("adapter_ids")}
        more = {"token_mask": tokens.get("token_mask"), "layer_index": layer_index, "return_aux": True}
        factors = {name[5:]: array for name, array in given.items() if name.startswith("lora.")}
        if row["layer"] == "functional":
            by, options = layers.RoutedBy(**routed), {"dtype": dtype, "expert_axis": axis}
            if factors:
                options["adapters"] = layers.Adapters(LoRAFactors(**factors), tokens.get("adapter_ids"))
            y, aux = layers.forward(tree, tokens["x"], spec, routed_by=by, **options, **more)
        elif row["layer"] == "nnx":
            y, aux = filled(held, tree, every, factors)(tokens["x"], **routed, **more, **adapter_ids)
        else:
            variables = held._variables(tree) | (linen._lora_collections(factors) if factors else {})
            y, aux = held.apply(variables, tokens["x"], **routed, **more, **adapter_ids)
        return {name: array for name, array in ({"output": y} | aux._asdict()).items() if array is not None}

    return model


def _op(case: Case) -> Any:
    def model(given: dict[str, Any], tokens: dict[str, Any], layer_index: Any = None) -> dict[str, Any]:
        if layer_index is not None:
            given = given | {"experts.layer_index": jnp.asarray(layer_index, jnp.int32).reshape(1)}
            given |= {n: a[layer_index] for n, a in given.items() if is_parameter(n) and not n.startswith("experts.")}
        return {n: a for n, a in OPS[case.kind](case, moe_jax.ops, given | tokens).items() if a is not None}

    return model


def _transformed(row: Row, case: Case, model: Any, mesh: Any) -> Function:
    """From the layer outwards: trace, remat, a scan over the layers, vmap, shard_map."""

    def traced(given: Any, tokens: Any, *index: Any) -> dict[str, Any]:
        if row["trace"].startswith("replay"):
            tokens = dict(tokens)
            layer = trace.LayerRouting(tokens.pop("replayed"), tokens.pop("replayed weights", None), case.num_ids)
            return trace.replay(model)((layer,), given, tokens, *index)
        if row["trace"] == "capture":
            found, (layer,) = trace.capture(model)(given, tokens, *index)
            kept = (layer.ids == found["ids"]).all() if "ids" in found else True
            return found | {"output": jnp.where(kept, found["output"], jnp.nan)}
        return model(given, tokens, *index)

    call: Any = traced
    if row["remat"] != "none":
        names = jax.checkpoint_policies.save_only_these_names(*moe_jax.SAVED_NAMES)
        call = jax.checkpoint(traced, policy=names if row["remat"] == "saved names" else None)
    one = call
    if row["stack"] == "layer_index":
        one = lambda given, tokens: call(given, tokens, 1)  # noqa: E731
    elif row["stack"] == "scan":

        def one(given: Any, tokens: Any) -> dict[str, Any]:
            body = lambda carry, index: (carry, call(given, tokens, index))  # noqa: E731
            return jax.tree.map(lambda array: array[1], jax.lax.scan(body, None, jnp.arange(2))[1])

    many = one
    if row["vmap"] != "none":
        inner = many
        many = lambda given, tokens: _first(  # noqa: E731
            jax.vmap(inner, (None, 0))(given, {name: jnp.stack(_turned(array, 2)) for name, array in tokens.items()})
        )
    if row["shard_map"] != "none":
        local = lambda given, tokens: jax.tree.map(lambda array: array[None], many_before(given, tokens))  # noqa: E731
        many_before = many
        whole = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))

        def many(given: Any, tokens: Any) -> dict[str, Any]:
            tokens = {name: jnp.concatenate(_turned(array, _DEVICES)) for name, array in tokens.items()}
            if row["mesh"] == "Explicit":  # whose shard_map moves no array
                tokens = jax.sharding.reshard(tokens, P("data"))
            found = whole(given, tokens)
            return _first(jax.sharding.reshard(found, P()) if row["mesh"] == "Explicit" else found)

    return many


def _turned(array: Any, batches: int) -> list[Any]:
    return [jnp.roll(array, batch, 0) for batch in range(batches)]


def _first(found: dict[str, Any]) -> dict[str, Any]:
    return {name: array[0] for name, array in found.items()}
