"""Write what a training's routers do: load, dropped tokens, losses, gradient norms, tokens per second.

`moe_core.monitor` says what the values are, docs/user/watch.md how to write them. A function's results are counted
once, however often a checkpoint or a backward runs it again. With gradient accumulation, call `add` for each part of a
step but the last.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_core.base.checks import as_integer, require_flag
from moe_core.errors import InvalidInput
from moe_core.monitor import LayerWindow, model_values, writer_of
from moe_jax.layers.observed import Observed, observe

__all__ = ["Monitor", "Observed", "gradient_norms", "observe"]

_LOSSES = ("load_balance_loss", "z_loss")


@jax.jit
def _sum(total: Any, more: Any) -> Any:
    return jax.tree.map(jnp.add, total, more)


class Monitor:
    """Adds up what `observe` returns, on the device, and writes it every few steps.

    Only a step that writes waits for the device. In a program of several processes, each has the counts of all and one
    of them passes a writer.

    Args:
        writer: a SummaryWriter of TensorBoard or Flax, wandb or a run of it, or a function of (values, step). None:
            writes nothing.
        every: steps between two writings. per_layer: also each layer's values.
        names: of the layers, in the order that they run. None: their numbers. With the paths of gradients, such as
            `blocks.0.moe`, norms and loads of a layer stand together.

    Raises InvalidInput for wrong options.
    """

    def __init__(
        self,
        writer: Any,
        *,
        every: int = 50,
        prefix: str = "moe",
        per_layer: bool = True,
        names: Sequence[str] | None = None,
    ) -> None:
        self._write, self._every = writer_of(writer), as_integer("every", every, 1)
        require_flag("per_layer", per_layer)
        self._prefix, self._per_layer = prefix, per_layer
        self._names = None if names is None else tuple(names)
        self.steps, self._total, self._began = 0, None, time.perf_counter()
        self._losses: list[Any] = []

    @property
    def due(self) -> bool:
        """True if the coming step writes: for `gradient_norms`."""
        return (self.steps + 1) % self._every == 0

    def add(self, observed: Sequence[Observed]) -> None:
        """Count a part of a step. Raises InvalidInput for other layers than before."""
        layers = tuple(observed) if isinstance(observed, (tuple, list)) else ()
        if not layers or not all(isinstance(one, Observed) for one in layers):
            raise InvalidInput(
                f"observed must be the results of observe, got {type(observed).__name__}; pass the second of "
                "observe(function)(...)"
            )
        if self.due:
            self._losses.append([layer.losses for layer in layers])
        # Losses are those of the last step alone.
        layers = tuple(dataclasses.replace(layer, losses=None) for layer in layers)
        if self._total is None:
            self._total = layers
            return
        shapes = [[leaf.shape for leaf in jax.tree.leaves(one)] for one in (self._total, layers)]
        if shapes[0] != shapes[1]:
            raise InvalidInput(f"observed must be of the layers before, got other shapes: {shapes[1]}; keep one model")
        self._total = _sum(self._total, layers)

    def step(
        self, observed: Sequence[Observed], norms: Any = None, *, step: int | None = None
    ) -> dict[str, Any] | None:
        """Count the end of a step (number None: calls so far) with `gradient_norms`. Returns what it wrote, or None."""
        self.add(observed)
        self.steps += 1
        if self.steps % self._every:
            return None
        windows = self._windows(jax.device_get(self._total), jax.device_get(self._losses), jax.device_get(norms))
        now = time.perf_counter()
        values = model_values(windows, now - self._began, prefix=self._prefix, per_layer=self._per_layer)
        self._write(values, self.steps if step is None else step)
        self._total, self._losses, self._began = None, [], time.perf_counter()
        return values

    def _windows(self, total: Any, losses: Any, norms: Any) -> list[LayerWindow]:
        flat: list[tuple[Any, ...]] = []
        for number, layer in enumerate(total):
            counts = np.asarray(layer.counts, np.int64)
            steps = counts.reshape(-1, counts.shape[-1])
            means = np.mean([np.reshape(one[number], (-1, 2)) for one in losses], axis=0)
            kept, overflow = (
                [None] * len(steps) if one is None else np.reshape(one, -1) for one in (layer.kept, layer.overflow)
            )
            # A scan's layers lie in turn.
            flat += [(i, number, layer, steps[i], kept[i], overflow[i], means[i]) for i in range(len(steps))]
        flat.sort(key=lambda one: one[:2])
        names = [str(number) for number in range(len(flat))] if self._names is None else self._names
        if len(names) != len(flat):
            raise InvalidInput(f"names must be of {len(flat)} layers, got {len(names)}; pass one for each that runs")
        of_layers, windows = dict(norms or {}), []
        for name, (_, _, layer, counts, kept, overflow, means) in zip(names, flat, strict=True):
            windows.append(
                LayerWindow(
                    name, layer.top_k, counts, kept=int(kept) if layer.drops else None,
                    overflow=None if overflow is None else int(overflow),
                    losses=dict(zip(_LOSSES, means.tolist(), strict=True)), **_of_layer(of_layers.pop(name, {})),
                )
            )  # fmt: skip
        # Layers that `names` does not name.
        empty = np.zeros(0, np.int64)
        return windows + [LayerWindow(name, 1, empty, **_of_layer(one)) for name, one in of_layers.items()]


def _of_layer(norms: dict[str, Any]) -> dict[str, Any]:
    each = norms.get("each")
    groups = {name: float(norm) for name, norm in norms.items() if name != "each"}
    return {"norms": groups, "expert_norms": None if each is None else np.asarray(each, np.float64)}


_MATRICES = re.compile(r"(wi|wi_0|wi_1|wo)(_bias)?")


def gradient_norms(gradients: Any, due: Any = True) -> dict[str, dict[str, jax.Array]]:
    """Norms of the gradients of each MoE layer's parts, for `Monitor.step`: path -> group -> fp32.

    Groups are `router`, `experts`, `shared_experts`, and `each` `[E]` of experts. A stack of L layers has the paths
    `path.0` to `path.L-1`.

    Args:
        gradients: of a model, a pytree whose paths have the layers' names (`moe_jax.layers`): an nnx.State, or dicts.
        due: bool, static or traced. False: zeros, without reading a gradient.

    Raises InvalidInput for gradients without a MoE layer.
    """
    layers: dict[str, dict[str, list[Any]]] = {}
    leaves = [(_path(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]]
    found = {path[:-1] for path, leaf in leaves if path and path[-1] == "wo" and leaf.ndim >= 3}
    for path, leaf in leaves:
        # The nearest layer around it.
        layer = next((path[:size] for size in range(len(path), -1, -1) if path[:size] in found), None)
        if layer is None:
            continue
        first = path[len(layer)]
        group = "experts" if _MATRICES.fullmatch(first) else {"gate": "router"}.get(first, first)
        layers.setdefault(".".join(layer), {}).setdefault(group, []).append(leaf)
    if not layers:
        raise InvalidInput(
            "gradients must hold those of MoE layers, by their names such as wo, got none; pass the gradients of the "
            "whole model"
        )
    shapes = jax.eval_shape(_norms, layers)

    def zeros(_: Any) -> Any:
        return jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)

    if isinstance(due, bool):
        norms = (_norms if due else zeros)(layers)
    else:
        norms = jax.lax.cond(due, _norms, zeros, layers)
    split: dict[str, dict[str, jax.Array]] = {}
    for path, groups in norms.items():
        if groups["experts"].ndim == 0:
            split[path] = groups
            continue
        for number in range(len(groups["experts"])):
            split[f"{path}.{number}"] = {name: one[number] for name, one in groups.items()}
    return split


def _norms(layers: dict[str, dict[str, list[Any]]]) -> dict[str, dict[str, jax.Array]]:
    def square(leaf: Any, axes: int) -> jax.Array:
        """Over all axes but the first."""
        return jnp.sum(jnp.square(leaf.astype(jnp.float32)), axis=tuple(range(axes, leaf.ndim)))

    norms: dict[str, dict[str, jax.Array]] = {}
    for path, groups in layers.items():
        stacked = max(leaf.ndim for leaf in groups["experts"]) - 3
        each = sum(square(leaf, stacked + 1) for leaf in groups["experts"])
        squares = {group: sum(square(leaf, stacked) for leaf in ones) for group, ones in groups.items()}
        norms[path] = {group: jnp.sqrt(one) for group, one in squares.items()} | {"each": jnp.sqrt(each)}
    return norms


def _path(path: Any) -> tuple[str, ...]:
    """Keys of a leaf, without the `value` of variables and the root of flax's variables."""
    keys = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    return tuple(key for key in keys if key not in ("value", "params"))
