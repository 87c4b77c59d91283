"""Benchmarks on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny shapes on the reference engine, no peers from other packages, no compiler."""
    from tests.support.benchmarks import on_a_cpu

    with on_a_cpu(monkeypatch):
        yield
