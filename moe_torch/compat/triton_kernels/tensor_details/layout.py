"""Layouts by name. Our kernels read plain strided memory on every device: so are the default layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from moe_core.errors import Unsupported


class Layout:
    """How the elements of a tensor of initial_shape lie in memory."""

    name: str | None = None

    def __init__(self, shape: Sequence[int]) -> None:
        self.initial_shape = shape

    def swizzle_data(self, data: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def unswizzle_data(self, data: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class StridedLayout(Layout):
    """As torch has it."""

    def swizzle_data(self, data: torch.Tensor) -> torch.Tensor:
        return data

    def unswizzle_data(self, data: torch.Tensor) -> torch.Tensor:
        return data


class _SwizzledLayout(Layout):
    """A layout for kernels that are not ours: it can be named and compared, not made."""

    def __init__(self, shape: Sequence[int], **options: Any) -> NoReturn:
        raise Unsupported(
            f"{type(self).__name__} is read by no kernel of ours, which read plain memory on every device; take what "
            "make_default_matmul_mxfp4_w_layout and make_default_matmul_mxfp4_w_scale_layout give, or StridedLayout"
        )


class BlackwellMXValueLayout(_SwizzledLayout):
    name = "BLACKWELL_VALUE"


class BlackwellMXScaleLayout(_SwizzledLayout):
    name = "BLACKWELL_SCALE"


class HopperMXValueLayout(_SwizzledLayout):
    name = "HOPPER_VALUE"


class HopperMXScaleLayout(_SwizzledLayout):
    name = "HOPPER_SCALE"


class CDNA4MXScaleLayout(_SwizzledLayout):
    name = "CDNA4_SCALE"


def make_default_matmul_mxfp4_w_layout(mx_axis: int) -> tuple[type[Layout], dict[str, Any]]:
    """(layout, its options) of packed mxfp4 weights on any device; mx_axis, the packed one, makes no difference."""
    return StridedLayout, {}


def make_default_matmul_mxfp4_w_scale_layout(mx_axis: int, num_warps: int = 8) -> tuple[type[Layout], dict[str, Any]]:
    """(layout, its options) of mxfp4 scales on any device; neither argument makes a difference to plain memory."""
    return StridedLayout, {}
