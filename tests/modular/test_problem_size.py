"""Sizes of a call that its arrays do not agree on."""

from __future__ import annotations

from typing import Any

import pytest

from moe_core.errors import InvalidInput
from moe_core.modular.types import moe_problem_size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a1": (4,)}, r"a1 must have 2 or 3 axes, got \(4,\); reshape it"),
        ({"w1": (3, 8)}, r"w1 must have 3 axes, got \(3, 8\)"),
        ({"w2": (3, 8, 4, 1)}, r"w2 must have 3 axes, got \(3, 8, 4, 1\)"),
        ({"topk_ids": (4,)}, r"topk_ids must have 2 axes, got \(4,\)"),
        ({"w2": (4, 16, 4)}, r"w2 must have the 3 experts of w1, got \(4, 16, 4\)"),
    ],
)
def test_sizes_of_other_ranks_are_refused(changes: dict[str, Any], message: str) -> None:
    shapes = {"a1": (4, 16), "w1": (3, 8, 16), "w2": (3, 16, 4), "topk_ids": (4, 2)} | changes
    with pytest.raises(InvalidInput, match=message):
        moe_problem_size(shapes["a1"], shapes["w1"], shapes["w2"], shapes["topk_ids"], "out_in")
