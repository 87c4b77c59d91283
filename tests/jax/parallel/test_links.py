"""What XLA's ragged all-to-all costs: refused on CPUs, and the program that is timed."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax")

from moe_jax.parallel import links


def test_cpus_have_none() -> None:
    if jax.devices()[0].platform != "cpu":
        pytest.skip("there are GPUs")
    assert links.measure([1024]) == ((), "XLA has no ragged all-to-all on CPUs")


def test_the_program_sends_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-to-all of equal parts is what it asks for: every peer's rows, in the order of peers."""
    asked: list[Any] = []

    def exchanged(rows: Any, into: Any, *offsets: Any, axis_name: str) -> Any:
        asked.append([array.shape for array in (rows, into, *offsets)])
        return jax.lax.all_to_all(rows, axis_name, 0, 0, tiled=True)

    monkeypatch.setattr(links.jax.lax, "ragged_all_to_all", exchanged)
    count = len(jax.local_devices())
    if count < 2:
        pytest.skip("needs two devices")
    timing = links._timing(count, 1000)
    each = -(-1000 // (count - 1) // 256)
    assert (timing.kind, timing.backend, timing.ranks) == ("ragged_all_to_all", "xla", count)
    assert timing.bytes == each * 256 * (count - 1) and timing.us > 0
    assert asked == [[(count * each, 256)] * 2 + [(count,)] * 4] * 8
