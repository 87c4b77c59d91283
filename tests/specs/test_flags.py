"""Flags of specs are True or False."""

from __future__ import annotations

from typing import Any

import pytest

from moe_core.errors import InvalidInput
from moe_core.specs import Activation, MatmulSpec, MoESpec

FLAGS = {
    MoESpec: ("fast_accumulate", "recompute", "main_grad", "apply_router_weight_on_input", "allow_tf32"),
    MatmulSpec: ("fast_accumulate", "allow_tf32"),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FLAGS.items() for name in names])
@pytest.mark.parametrize("value", [1, "no", None])
def test_other_values_are_refused(kind: Any, name: str, value: object) -> None:
    first: Any = Activation("silu") if kind is MoESpec else "in_out"
    options: dict[str, Any] = {name: value}
    with pytest.raises(InvalidInput, match=f"{name} must be True or False, got {value!r}"):
        kind(first, **options)
