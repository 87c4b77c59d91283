"""The soak holds calls to the first bits, and says what grew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tools import soak

PIECE = ["--device", "cpu", "--tokens", "3", "--seconds", "1"]


def test_a_piece_and_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A second is too short to tell growth from what threads take at first.
    monkeypatch.setattr(soak, "RESIDENT", 1 << 40)
    monkeypatch.setattr("moe_core.base.target.interprets", lambda: False)  # in every thread: NumPy computes
    state = tmp_path / "soak.json"
    arguments = [*PIECE, "--state", str(state)]
    assert soak.main(arguments) == 0
    piece = json.loads(capsys.readouterr().out)
    assert set(piece["calls"]) == {"first", "torch", "jax"} and not piece["failures"]
    kept = json.loads(state.read_text())
    kept["digests"]["plain/3/step/dx"] ^= 1
    state.write_text(json.dumps(kept))
    assert soak.main(arguments) == 1
    after = json.loads(state.read_text())
    assert len(after["pieces"]) == 2 and "plain/3/step/dx" in after["pieces"][1]["failures"][0]


def test_one_bit_changes_a_digest() -> None:
    values = torch.randn(3, 1 << 19).to(torch.bfloat16)
    before = soak.digest(values)
    assert torch.equal(before, soak.digest(values.clone()))
    assert not torch.equal(before, soak.digest(values.flip(0)))
    for place in (0, 1 << 20, values.numel() - 1):
        other = values.clone()
        other.view(torch.int16).flatten()[place] ^= 1
        assert not torch.equal(before, soak.digest(other))


def test_growth_is_from_the_second_to_the_last_quarter() -> None:
    samples = [(size, 10 * size) for size in (9, 9, 1, 1, 5, 5, 4, 4)]
    assert soak.growth(samples) == (3, 30)
