"""MaxText's own configs on our Flax layers: its axis names are ours, and its rules shard our parameters as its own."""

from __future__ import annotations

import ast
import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import yaml
from flax import nnx as flax_nnx
from flax import traverse_util
from flax.linen.spmd import logical_to_mesh_axes, logical_to_mesh_sharding
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moe_jax import linen, nnx
from moe_jax.layers import ExpertsSpec, LogicalAxes, MoELayerSpec, SharedExpertsSpec, leaves

SPEC = MoELayerSpec(
    32, 24, 4, 2, experts=ExpertsSpec(bias=True), shared_experts=SharedExpertsSpec(16), correction_bias=True
)
#: path -> (the file of MaxText's package, its axes there)
AXES: dict[str, tuple[str, tuple[str | None, ...]]] = {
    "gate/kernel": ("layers/moe.py", ("embed_router", None)),
    "wi_0": ("layers/moe.py", ("exp", "embed_moe", "mlp_moe")),
    "wi_1": ("layers/moe.py", ("exp", "embed_moe", "mlp_moe")),
    "wo": ("layers/moe.py", ("exp", "mlp_moe", "embed_moe")),
    "wi_0_bias": ("layers/moe.py", ("exp", "activation_mlp")),
    "wi_1_bias": ("layers/moe.py", ("exp", "activation_mlp")),
    "wo_bias": ("layers/moe.py", ("exp", "activation_embed")),
    "shared_experts/wi_0/kernel": ("layers/linears.py", ("embed", "mlp")),
    "shared_experts/wi_1/kernel": ("layers/linears.py", ("embed", "mlp")),
    "shared_experts/wo/kernel": ("layers/linears.py", ("mlp", "embed")),
}
#: The mesh axes that have several devices, where a config has them.
_SPLIT = ("fsdp", "expert", "tensor")


def check(package: pathlib.Path) -> list[str]:
    """What is wrong with our layers under the configs of an unpacked package `maxtext`; one line per finding."""
    problems = _names(package)
    base = _config(package / "configs" / "base.yml")
    configs = [package / "configs" / "base.yml", *sorted((package / "configs" / "custom_mesh_and_rule").glob("*.yml"))]
    for path in configs:
        config = base | _config(path)
        rules = tuple((name, tuple(on) if isinstance(on, list) else on) for name, on in config["logical_axis_rules"])
        found = sharded(tuple(config["mesh_axes"]), rules)
        wanted = {path: logical_to_mesh_axes(axes, rules) for path, (_, axes) in AXES.items()}
        for flavour, specs in found.items():
            problems += [
                f"{path.name}, {flavour}: {name} is {specs[name]}, MaxText's own is {spec}"
                for name, spec in wanted.items()
                if specs[name] != spec
            ]
        print(f"{path.name}: {len(wanted)} parameters in {len(found)} layers, wi_0 is {wanted['wi_0']}")
    return problems


def _names(package: pathlib.Path) -> list[str]:
    """Parameters whose axes MaxText's source does not write so, or our layers name otherwise."""
    problems, ours = [], {"/".join(leaf.path): LogicalAxes().of(leaf) for leaf in leaves(SPEC)}
    for path, (file, axes) in AXES.items():
        tuples = {ast.dump(node) for node in ast.walk(ast.parse((package / file).read_text()))}
        if ast.dump(ast.parse(repr(axes), mode="eval").body) not in tuples:
            problems.append(f"{file} has no {axes}, the axes of {path}")
        if ours[path] != axes:
            problems.append(f"{path} has the axes {ours[path]}, MaxText's are {axes}")
    return problems


def _config(path: pathlib.Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def sharded(mesh_axes: tuple[str, ...], rules: Any) -> dict[str, dict[str, P]]:
    """flavour -> path -> where the parameters of a fresh layer lie under a mesh with these axes and rules."""
    split = [axis for axis in mesh_axes if axis in _SPLIT]
    sizes = tuple(2 if axis in split else 1 for axis in mesh_axes)
    devices, types = jax.devices("cpu")[: 2 ** len(split)], (AxisType.Auto,) * len(mesh_axes)
    mesh = jax.make_mesh(sizes, mesh_axes, axis_types=types, devices=devices)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        layer = nnx.MoE.from_spec(SPEC, rngs=flax_nnx.Rngs(0))
        module = linen.MoE.from_spec(SPEC)
        variables = jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct((8, SPEC.d_model), jnp.float32))
        places = logical_to_mesh_sharding(nn.get_partition_spec(variables), mesh, rules)
    in_nnx: dict[str, Any] = dict(traverse_util.flatten_dict(layer.parameters(), sep="/"))
    in_linen: dict[str, Any] = dict(traverse_util.flatten_dict(places["params"], sep="/"))
    return {
        "nnx": {path: array.sharding.spec for path, array in in_nnx.items()},
        "linen": {path: sharding.spec for path, sharding in in_linen.items()},
    }
