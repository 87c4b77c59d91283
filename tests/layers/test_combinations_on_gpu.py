"""Features times CUDA graphs: a replayed step has the bits of the layer called plainly, and the oracle's values."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft", reason="adapters are PEFT's (pip install 'moebius[recipes]')")

from moe_core.errors import InvalidInput, Unsupported
from tools.combinations.features import GRAPHS, cover, label, refused, rows
from tools.combinations.torch_ways import examine

ARRAY = cover(GRAPHS)
ROWS = rows(GRAPHS)
RULES = [(ARRAY.plainest(values), text) for values, text in refused(GRAPHS) if ("trace", "capture") in values]
RULES += [(ARRAY.plainest(values), text) for values, text in refused(GRAPHS) if ("trace", "replay") in values]
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


@pytest.mark.parametrize("row", ROWS, ids=[str(number) for number in range(len(ROWS))])
def test_a_graph_replays_right(row: dict[str, str]) -> None:
    assert not examine(row, "cuda"), label(row, GRAPHS)


@pytest.mark.parametrize(("row", "text"), RULES)
def test_a_graph_is_refused_by_name(row: dict[str, str], text: str) -> None:
    with pytest.raises((InvalidInput, Unsupported), match=text):
        examine(row, "cuda")
