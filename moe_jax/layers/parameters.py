"""The parameters of one layer or of a stack: names, shapes, first values."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from moe_core.base.checks import require_at_least
from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedSpec, quantized_shapes
from moe_core.layers import MAXTEXT, MoELayerSpec, Parameter, first_table, tiled_specs
from moe_jax.bridge.calls import refuse_main_grad

Parameters = Mapping[str, Any]
#: (key, shape, dtype) -> one matrix [inputs, outputs], as in jax.nn.initializers.
Initializer = Callable[..., jax.Array]
Path = tuple[str, ...]

DEFAULT_KERNEL_INIT: Initializer = jax.nn.initializers.lecun_normal()
TILED = "tiled_"


@dataclass(frozen=True)
class Leaf:
    """path: keys in the nested dict. shape: with a stack's axis. out_in: stored `[outputs, inputs]`."""

    path: Path
    parameter: Parameter
    shape: tuple[int, ...]
    out_in: bool

    @property
    def is_state(self) -> bool:
        """True for a correction bias and a table of ids."""
        return self.parameter.role in ("buffer", "table")

    @property
    def is_quantized(self) -> bool:
        return self.parameter.role == "quantized"

    def initial(self, key: jax.Array | None, dtype: Any, kernel_init: Initializer) -> jax.Array:
        """Biases and state start at zero (state in fp32), factors and quantised scales at one, quantised codes at zero.
        Other matrices are drawn, each with its own key and scale."""
        if self.is_quantized:
            return jnp.full(self.shape, self.parameter.fill, self.parameter.dtype)
        if self.parameter.role == "table":
            return jnp.broadcast_to(jnp.asarray(first_table(self.parameter)), self.shape)
        if self.parameter.role != "weight":
            return jnp.full(self.shape, self.parameter.fill, jnp.float32 if self.is_state else dtype)
        assert key is not None
        lead, matrix = self.shape[:-2], self.shape[-2:]
        if self.out_in:
            matrix = matrix[::-1]
        if lead:
            keys = jax.random.split(key, math.prod(lead))
            drawn = jax.vmap(lambda one: kernel_init(one, matrix, dtype))(keys).reshape(*lead, *matrix)
        else:
            drawn = kernel_init(key, matrix, dtype)
        return drawn.swapaxes(-1, -2) if self.out_in else drawn


@functools.lru_cache(maxsize=1024)
def leaves(spec: MoELayerSpec, num_layers: int | None = None, prepacked: bool = False) -> tuple[Leaf, ...]:
    """Every array of a layer, or of a stack of num_layers. prepacked: with tiled matrices. Refuses spec.main_grad."""
    refuse_main_grad(spec)
    if num_layers is not None:
        require_at_least("num_layers", num_layers, 1)
    storage = spec.storage(MAXTEXT)
    first = "wi_0" if spec.gated and storage.gate_layout == "separate" else "wi"
    result, tiled = [], tiled_specs(spec, storage) if prepacked else {}
    for parameter in spec.parameters(MAXTEXT):
        group, field, *part = parameter.name.split(".")
        path = _path(group, field, first)
        if prepacked and parameter.role == "quantized":
            parameter, part = _tiled(parameter, tiled), [TILED + part[0]]
        shape = parameter.shape if num_layers is None else (num_layers, *parameter.shape)
        layout = storage.router_weight_layout if group == "router" else storage.weight_layout
        result.append(Leaf((*path, *part), parameter, shape, parameter.role == "weight" and layout == "out_in"))
    return tuple(result)


def _path(group: str, field: str, first: str) -> Path:
    """MaxText's names, such as `gate/kernel`, `wo_bias` or `shared_experts/wi_1/kernel`. first: of gate_up."""
    if group in ("experts", "shared_experts"):
        name = field.replace("gate_up", first).replace("down", "wo").replace("up", "wi_1")
        return (name,) if group == "experts" else (group, name, "kernel")
    return "gate" if group == "router" else group, "kernel" if field == "weight" else field


def _tiled(parameter: Parameter, specs: Mapping[str, QuantizedSpec]) -> Parameter:
    matrix, _, part = parameter.name.rpartition(".")
    tiling = specs[matrix].tiling
    assert tiling is not None
    shapes = quantized_shapes(specs[matrix], (parameter.shape[0], tiling.rows, tiling.columns))
    return dataclasses.replace(parameter, shape=getattr(shapes, part), axes=(parameter.axes[0], None, None, None))


def is_prepacked(parameters: Parameters) -> bool:
    matrices = {name: parameters.get(name) for name in ("wi", "wo")} if isinstance(parameters, Mapping) else {}
    held = {name: set(matrix) for name, matrix in matrices.items() if isinstance(matrix, Mapping)}
    for name, parts in held.items():
        if {"values", f"{TILED}values"} <= parts:
            raise InvalidInput(
                f"{name} must hold values or {TILED}values, got both; prepack, or restore, the layer before it takes "
                "the state of another one"
            )
    return f"{TILED}values" in held.get("wo", ())


def nested(arrays: Iterable[tuple[Path, Any]]) -> dict[str, Any]:
    """[(("gate", "kernel"), a), (("wo",), b)] -> {"gate": {"kernel": a}, "wo": b}."""
    tree: dict[str, Any] = {}
    for path, value in arrays:
        *above, name = path
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[name] = value
    return tree


def initialize(
    spec: MoELayerSpec,
    key: jax.Array,
    *,
    param_dtype: Any = jnp.float32,
    kernel_init: Initializer = DEFAULT_KERNEL_INIT,
    num_layers: int | None = None,
) -> dict[str, Any]:
    """New parameters and state of a layer or a stack, see `Leaf.initial`."""
    every = leaves(spec, num_layers)
    keys = jax.random.split(key, len(every))
    return nested(
        (leaf.path, leaf.initial(one, param_dtype, kernel_init)) for leaf, one in zip(every, keys, strict=True)
    )


def is_gate(name: str) -> bool:
    """True for parameters that are not rounded: of the router, and norms and biases of rows."""
    return name.startswith(("router.", "output.")) or name in ("shared_experts.gate", "before.norm")


def is_quantized(name: str) -> bool:
    return name.count(".") == 2


def find(parameters: Parameters, path: Path) -> Any:
    node: Any = parameters
    for depth, key in enumerate(path):
        if not isinstance(node, Mapping) or key not in node:
            got = (", ".join(sorted(node)) or "nothing") if isinstance(node, Mapping) else "one array"
            raise InvalidInput(
                f"parameters must hold {'/'.join(path)}, got {got} in "
                f"{'/'.join(path[:depth]) or 'the top level'}; make them with the layer's own spec"
            )
        node = node[key]
    if isinstance(node, Mapping):
        raise InvalidInput(
            f"parameters must hold one array as {'/'.join(path)}, got {', '.join(sorted(node))}, as a quantised layer "
            "has; make them with the layer's own spec"
        )
    return node
