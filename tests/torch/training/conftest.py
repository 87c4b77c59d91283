"""Every test of training begins with a compiler that has seen nothing."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
