"""Memory and first values of a new layer's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_core.base import dtypes
from moe_core.errors import InvalidInput
from moe_core.layers import HUGGING_FACE, MoELayerSpec, first_table
from moe_torch.bridge.options import TORCH_DTYPES
from moe_torch.layers.shards import is_shared_out, own_of
from moe_torch.layers.weights import hold

_DTYPES = tuple(TORCH_DTYPES[name] for name in (*dtypes.MATMUL_DTYPES, "float64"))


def require_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in _DTYPES:
        raise InvalidInput(f"dtype must be {', '.join(map(str, _DTYPES))}, got {dtype}; pass dtype=torch.float32")


def initialize(spec: MoELayerSpec, tensors: Mapping[str, torch.Tensor]) -> None:
    for parameter in spec.parameters(HUGGING_FACE):
        tensor = tensors[parameter.name]
        if parameter.role == "weight":
            (_draw_experts if parameter.name.startswith("experts.") else _draw)(tensor, parameter.fan_in**-0.5)
        elif parameter.role == "table":
            tensor.copy_(torch.from_numpy(first_table(parameter)))
        else:
            tensor.fill_(parameter.fill)


def _draw(tensor: torch.Tensor, std: float) -> None:
    tensor.normal_(std=std)


def _draw_experts(tensor: Any, std: float) -> None:
    """A rank draws other ranks' experts, too, and drops them."""
    if tensor.is_meta or not is_shared_out(tensor):
        _draw(tensor, std)
        return
    owned, every = own_of(tensor), range(len(tensor))
    local, held = owned.local, owned.experts
    experts = every if held is None else every[held] if isinstance(held, slice) else held
    row_of = {expert: at for at, expert in enumerate(experts)}
    spare = local.new_empty(tensor.shape[1:]) if len(row_of) < len(tensor) or owned.cut is not None else None
    for expert in every:
        at = row_of.get(expert)
        matrix = local[at] if at is not None and owned.cut is None else spare
        assert matrix is not None
        _draw(matrix, std)
        if at is not None and owned.cut is not None:
            local[at].copy_(owned.taken(matrix))


def share_out(layer: Any, expert_parallel: Any, device: torch.device | str | None) -> None:
    """Give a layer on `meta` memory for this rank's experts. expert_parallel: an ExpertParallel, or its DeviceMesh of
    one axis.
    """
    # A layer of one process does not import torch.distributed.
    from moe_torch.layers.parallel import parallelize
    from moe_torch.parallel.forward import ExpertParallel

    parallel = expert_parallel
    if not isinstance(parallel, ExpertParallel):
        if not hasattr(parallel, "get_group"):
            raise InvalidInput(
                "expert_parallel must be a DeviceMesh of one axis or an ExpertParallel, got "
                f"{type(parallel).__name__}; pass one, such as mesh['ep']"
            )
        if parallel.ndim != 1:
            raise InvalidInput(
                f"mesh must have one axis, got {parallel.ndim} axes {parallel.mesh_dim_names}; pass one, such as "
                "mesh['ep'], or ExpertParallel(mesh) where they are hosts and the ranks of each"
            )
        parallel = ExpertParallel(parallel)
    target = torch.get_default_device() if device is None else torch.device(device)
    kind = getattr(parallel.mesh, "device_type", target.type)
    if target.type not in ("meta", kind):
        raise InvalidInput(f"device must be of the mesh of expert_parallel, {kind}, got {target}; pass device={kind!r}")
    parallelize(layer, parallel)
    if target.type != "meta":
        layer.to_empty(device=target)


def load_own(layer: Any, weights: Any, expert_parallel: Any, device: Any, copy: bool) -> Any:
    """Share out and load a layer on `meta`. Raises InvalidInput for copy=False."""
    if not copy:
        raise InvalidInput(
            "copy must be True with expert_parallel, got False: a rank copies its own part; leave it out"
        )
    dtypes_of = {name: TORCH_DTYPES[dtypes.canonical(array.dtype)] for name, array in weights.named().items()}
    tensors = layer._tensors().items()
    hold(layer, [(name, torch.empty(one.shape, dtype=dtypes_of[name], device="meta")) for name, one in tensors])
    share_out(layer, expert_parallel, device)
    layer.load_weights(weights)
    return layer
