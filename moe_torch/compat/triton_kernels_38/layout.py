"""Layouts by name. Our kernels read plain strided memory on every device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_core.base.checks import as_integer
from moe_core.errors import InvalidInput
from moe_torch.compat.triton_kernels.tensor_details.layout import (
    BlackwellMXScaleLayout,
    BlackwellMXValueLayout,
    CDNA4MXScaleLayout,
    HopperMXScaleLayout,
    HopperMXValueLayout,
    Layout,
    SwizzledLayout,
)

__all__ = [
    "BlackwellActMXScaleLayout", "BlackwellMX4ValueShuffledLayout", "BlackwellMXScaleLayout",
    "BlackwellMXValueLayout", "CDNA4MXScaleLayout", "GFX1250MXScaleLayout", "HopperMXScaleLayout",
    "HopperMXValueLayout", "Layout", "StridedLayout", "make_default_matmul_mx_act_scale_layout",
    "make_default_matmul_mxfp4_w_layout", "make_default_matmul_mxfp4_w_scale_layout",
    "make_default_matmul_mxfp8_act_scale_layout",
]  # fmt: skip


@dataclass(frozen=True)
class StridedLayout(Layout):
    """major_dim: the axis of stride 1. The others follow from the last to the first."""

    major_dim: int = -1
    name = "STRIDED"

    def __post_init__(self) -> None:
        as_integer("major_dim", self.major_dim, -(2**31))

    def order(self, rank: int) -> list[int]:
        """Axes of a tensor of a rank, from stride 1 on."""
        if not -rank <= self.major_dim < rank:
            raise InvalidInput(f"major_dim must be an axis of a tensor of rank {rank}, got {self.major_dim}; name one")
        axes = list(range(rank))[::-1]
        index = axes.index(self.major_dim % rank)
        axes[0], axes[index] = axes[index], axes[0]
        return axes


class BlackwellActMXScaleLayout(SwizzledLayout):
    name = "BLACKWELL_ACT_SCALE"


class BlackwellMX4ValueShuffledLayout(SwizzledLayout):
    name = "BLACKWELL_VALUE_SHUFFLED"


class GFX1250MXScaleLayout(SwizzledLayout):
    name = "GFX1250_SCALE"


def make_default_matmul_mxfp4_w_layout(mx_axis: int, *_: Any, **__: Any) -> StridedLayout:
    """The layout of packed mxfp4 weights and their scales: K contiguous. Arguments have no effect."""
    return StridedLayout(-2)


make_default_matmul_mxfp4_w_scale_layout = make_default_matmul_mxfp4_w_layout


def make_default_matmul_mx_act_scale_layout(ragged_metadata: Any) -> StridedLayout:
    """The layout of scales of activations: a row's groups contiguous. The argument has no effect."""
    return StridedLayout(-1)


make_default_matmul_mxfp8_act_scale_layout = make_default_matmul_mx_act_scale_layout
