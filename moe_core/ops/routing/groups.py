"""The layout of rows that are already in the order of their groups, as a step of composed plans."""

from __future__ import annotations

from typing import NamedTuple

from moe_core.base import ArraySpec, padded, require_spec
from moe_core.base.dtypes import ID_DTYPES
from moe_core.errors import InvalidInput
from moe_core.ops.routing.kernels import groups as kernels
from moe_core.ops.routing.layout import require_experts
from moe_core.plan import PlanBuilder, declare_kernel, passed
from moe_core.specs import LAYOUT_INPUTS, LayoutArrays, LayoutSpec

ROW_GROUPS = declare_kernel(kernels.row_groups, writes_layout=True)

_BLOCK = {"gpu": 1024, "interpreter": 4096}
#: Elements of y and rows worth one program.
_SHARE = 1 << 15


class Groups(NamedTuple):
    """Consecutive groups of rows: `groups`, integers `[G]`, are sizes, or if `ends` the row after each group (`offs`).

    first: int32 `[1]`, the group that the first of `count` matrices belongs to. None: each of G groups has one.
    """

    groups: ArraySpec
    ends: bool
    first: ArraySpec | None = None
    count: int | None = None

    def checked(self, count: int | None) -> Groups:
        """The groups of `count` matrices (None: of as many as there are groups). Raises InvalidInput."""
        total = require_spec(self.name, self.groups, ("num_groups",), ID_DTYPES).shape[0]
        count = total if count is None else count
        if self.first is not None:
            require_spec("first_group", self.first, (1,), "int32")
        if total < 1 or not (1 <= count <= total if self.first is not None else count == total):
            wanted = (
                f"as many groups as matrices, {count}" if self.first is None else f"at least {max(count, 1)} groups"
            )
            raise InvalidInput(f"{self.name} must have {wanted}, got {total}; pass the group of every matrix")
        return self._replace(count=count)

    @property
    def name(self) -> str:
        return "offs" if self.ends else "sizes"

    def arrays(self) -> dict[str, ArraySpec | None]:
        return {self.name: self.groups, "first_group": self.first}


def add_row_groups(
    builder: PlanBuilder, groups: Groups, num_rows: int, *, block_m: int | None = None, counts_tiles: bool = False
) -> LayoutSpec:
    """Declare the layout's arrays as scratch and write them. With block_m: also `schedule`, `tile_counters` if
    counts_tiles, and zeros in rows of y outside of groups."""
    assert groups.count is not None, "groups are checked"
    layout, total = LayoutSpec(num_rows, 1, groups.count), groups.groups.shape[0]
    require_experts(total)
    for name in LAYOUT_INPUTS:
        builder.scratch(name, getattr(LayoutArrays.specs(layout), name))
    width = 0
    if block_m is not None:
        width = builder.spec("y").shape[1]
        builder.scratch("schedule", ArraySpec((layout.max_blocks(block_m), 2), "int32"))
        if counts_tiles:
            builder.scratch("tile_counters", ArraySpec((2,), "int32"))
    programs = max(1, min(builder.target.num_sms, num_rows * max(width, 32) // _SHARE))
    arguments = passed(groups=groups.name)
    arguments |= builder.pointers("first_group", *LAYOUT_INPUTS, "schedule", "tile_counters")
    arguments |= passed(y=None if block_m is None else "y", num_rows=num_rows)
    arguments |= passed(max_blocks=0 if block_m is None else layout.max_blocks(block_m), TOTAL=total)
    arguments |= passed(NUM_GROUPS=groups.count, ENDS=groups.ends, WIDTH=width, BLOCK_M=block_m or 1)
    padding = padded(total, 32)
    arguments |= passed(GROUPS=padding, BLOCK=_BLOCK[builder.target.engine])
    builder.launch(ROW_GROUPS, (programs,), arguments, max(4, min(16, padding // 128)))
    return layout
