"""The same exchanges between processes that share memory, each with addresses of its own."""

from __future__ import annotations

import numpy as np
import pytest

from moe_core.parallel import Placement
from tests.support.parallel.peers import ON_HOST
from tests.support.parallel.shared import forward_on_processes
from tests.support.parallel.twins import PLAIN, draw_problem


@pytest.mark.parametrize("kind", [target.kind for target in ON_HOST])
def test_processes_give_the_bits_of_one_device(kind: str) -> None:
    problem = draw_problem(8, Placement.linear(5, 3), (5, 0, 7), 3, "random", "bfloat16", PLAIN, sizes=(24, 8))
    expected, first = problem.alone()["output"], 0
    for tokens, turns in zip(problem.tokens, forward_on_processes(problem, 30, kind), strict=True):
        for found in turns:
            np.testing.assert_array_equal(found.view(np.uint16), expected[first : first + tokens].view(np.uint16))
        first += tokens
