"""Layouts by name. Defaults are plain strided memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from moe_core.errors import Unsupported


class Layout:
    """The memory order of a tensor of initial_shape."""

    name: str | None = None

    def __init__(self, shape: Sequence[int]) -> None:
        self.initial_shape = shape

    def swizzle_data(self, data: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def unswizzle_data(self, data: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class StridedLayout(Layout):
    def swizzle_data(self, data: torch.Tensor) -> torch.Tensor:
        return data

    def unswizzle_data(self, data: torch.Tensor) -> torch.Tensor:
        return data


class SwizzledLayout(Layout):
    """It can be named and compared, not made."""

    def __init__(self, *_: Any, **__: Any) -> NoReturn:
        raise Unsupported(
            f"{type(self).__name__} is read by no kernel of ours, which read plain memory on every device; take what "
            "make_default_matmul_mxfp4_w_layout and make_default_matmul_mxfp4_w_scale_layout give, or StridedLayout"
        )


class BlackwellMXValueLayout(SwizzledLayout):
    name = "BLACKWELL_VALUE"


class BlackwellMXScaleLayout(SwizzledLayout):
    name = "BLACKWELL_SCALE"


class HopperMXValueLayout(SwizzledLayout):
    name = "HOPPER_VALUE"


class HopperMXScaleLayout(SwizzledLayout):
    name = "HOPPER_SCALE"


class CDNA4MXScaleLayout(SwizzledLayout):
    name = "CDNA4_SCALE"


def make_default_matmul_mxfp4_w_layout(mx_axis: int) -> tuple[type[Layout], dict[str, Any]]:
    """(layout, options) of packed mxfp4 weights. mx_axis: without effect."""
    return StridedLayout, {}


def make_default_matmul_mxfp4_w_scale_layout(mx_axis: int, num_warps: int = 8) -> tuple[type[Layout], dict[str, Any]]:
    """(layout, options) of mxfp4 scales. Arguments have no effect."""
    return StridedLayout, {}
