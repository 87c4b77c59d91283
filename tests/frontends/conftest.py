"""Runs every test of this folder with each front-end whose framework is there."""

from __future__ import annotations

import pytest

from tests.support.frontends import FRONTENDS, Frontend


@pytest.fixture(params=sorted(FRONTENDS, reverse=True))
def frontend(request: pytest.FixtureRequest) -> Frontend:
    pytest.importorskip(request.param)
    return FRONTENDS[request.param](request.param)
