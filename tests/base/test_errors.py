"""Messages of any length: the beginning and the fix at the end stay."""

from __future__ import annotations

import pytest

from moe_core.errors import InvalidInput, Unsupported


@pytest.mark.parametrize("kind", [InvalidInput, Unsupported])
def test_long_messages_are_shortened(kind: type[Exception]) -> None:
    assert str(kind("x" * 4000)) == "x" * 4000
    assert str(kind("a" * 3000 + "b" * 201 + "c" * 800)) == f"{'a' * 3000}{'b' * 195} ... {'c' * 800}"
