"""What a new layer's parameters are, and where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_core.base import dtypes
from moe_core.errors import InvalidInput
from moe_core.layers import HUGGING_FACE, MoELayerSpec, first_table
from moe_torch.bridge.options import TORCH_DTYPES

_DTYPES = tuple(TORCH_DTYPES[name] for name in (*dtypes.MATMUL_DTYPES, "float64"))


def require_dtype(dtype: torch.dtype | None) -> None:
    """Raise InvalidInput unless the operators take parameters of this dtype (None: torch's default, always one)."""
    if dtype is not None and dtype not in _DTYPES:
        raise InvalidInput(f"dtype must be {', '.join(map(str, _DTYPES))}, got {dtype}; pass dtype=torch.float32")


def initialize(spec: MoELayerSpec, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the first values of a layer's parameters and buffers, by name."""
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
    """Expert after expert: a rank that has a part of them draws the others too, and keeps none of those."""
    placed = getattr(tensor, "placements", ())
    if tensor.is_meta or len(placed) > 1 or not all(one.is_shard(0) for one in placed):
        _draw(tensor, std)
        return
    own, first = tensor, 0
    if placed:
        own = tensor.to_local()
        first = -(-tensor.shape[0] // tensor.device_mesh.size()) * tensor.device_mesh.get_local_rank()
    others = own.new_empty(tensor.shape[1:]) if len(own) < len(tensor) else None
    for expert in range(len(tensor)):
        at = expert - first
        matrix = own[at] if 0 <= at < len(own) else others
        assert matrix is not None
        _draw(matrix, std)


def share_out(layer: Any, expert_parallel: Any, device: torch.device | str | None) -> None:
    """Give a layer on `meta` memory on the device, for this rank's experts only.

    expert_parallel: an ExpertParallel, or the DeviceMesh of one. Raises InvalidInput for anything else, and for a
    device that is not the mesh's.
    """
    # Only here: a layer of one process does not import torch.distributed.
    from moe_torch.parallel import ExpertParallel, parallelize

    given = expert_parallel
    if not isinstance(given, ExpertParallel):
        if not hasattr(given, "get_group"):
            raise InvalidInput(
                "expert_parallel must be a DeviceMesh of one axis or an ExpertParallel, got "
                f"{type(given).__name__}; pass one, such as mesh['ep']"
            )
        given = ExpertParallel(given)
    place = torch.get_default_device() if device is None else torch.device(device)
    kind = getattr(given.mesh, "device_type", place.type)
    if place.type not in ("meta", kind):
        raise InvalidInput(f"device must be of the mesh of expert_parallel, {kind}, got {place}; pass device={kind!r}")
    parallelize(layer, given)
    if place.type != "meta":
        layer.to_empty(device=place)
