"""Memory that the processes of a group share: addresses, barriers, and what ranks say that cannot share it."""

from __future__ import annotations

import contextlib
import ctypes
import pathlib
import time
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from moe_torch.parallel.group import ranks_of
from moe_torch.parallel.peer import symmetric
from moe_torch.parallel.peer.symmetric import Part
from tests.support.parallel.pool import Failed, Pool, ranks

__all__ = ["ranks"]

PARTS = (Part((3, 5), torch.int32), Part((0,), torch.float32), Part((2, 4), torch.bfloat16))


def stored(group: Any) -> list[np.ndarray]:
    """What ranks store at each other's addresses: rank r puts 10 * r + w into row r of rank w's."""
    ranks = ranks_of(group, None, "mode peer")
    memory = symmetric.symmetric(ranks, PARTS, torch.device("cpu"))
    first, empty, last = memory.regions
    assert empty.own.shape == (0,) and last.own.dtype == torch.bfloat16
    for region, part in zip((first, empty, last), PARTS, strict=True):
        assert region.own.shape == part.shape
        assert part.shape == (0,) or region.addresses.tolist()[ranks.rank] == region.own.data_ptr()
        assert all(address % 16 == 0 for address in region.addresses.tolist())
    memory.barrier(ranks, "arrival")
    last.own.fill_(ranks.rank + 0.5)
    for peer, address in enumerate(first.addresses.tolist()):
        row = (ctypes.c_int32 * 5).from_address(address + 20 * ranks.rank)
        # A slow rank is waited for.
        time.sleep(0.05 * (ranks.rank == 1))
        row[:] = [10 * ranks.rank + peer] * 5
    memory.barrier(ranks, "rows")
    found = [first.own.numpy().copy()]
    for address in last.addresses.tolist():
        bits = np.ctypeslib.as_array((ctypes.c_uint16 * 8).from_address(address)).astype(np.uint32) << 16
        found.append(bits.view(np.float32).copy())
    memory.barrier(ranks, "results")
    assert symmetric.symmetric(ranks, PARTS, torch.device("cpu")) is memory
    return found


def stored_without_fallocate(group: Any) -> list[np.ndarray]:
    """As where the system has no such call."""
    with mock.patch.object(symmetric.os, "posix_fallocate"):
        del symmetric.os.posix_fallocate
        return stored(group)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_store_at_addresses_of_others(ranks: Pool, size: int) -> None:
    for rank, found in enumerate(ranks.call(stored_without_fallocate if size == 3 else stored, [()] * size)):
        rows = 10 * np.arange(3) + rank
        np.testing.assert_array_equal(found[0][:size], np.repeat(rows[:size, None], 5, axis=1))
        for peer, row in enumerate(found[1:]):
            np.testing.assert_array_equal(row, np.full(8, peer + 0.5))
    for process in ranks.processes:
        assert not list(pathlib.Path("/dev/shm").glob(f"moebius-{process.pid}-*")), "names of shared memory are gone"


def shared(group: Any, size: int, problem: bool) -> None:
    ranks = ranks_of(group, None, "mode peer")
    wrong = mock.patch.object(symmetric.os, "posix_fallocate", side_effect=OSError("No space left on device"))
    with wrong if problem else mock.patch.object(symmetric, "_ALIGNMENT", 256):
        symmetric.symmetric(ranks, (Part((size,), torch.uint8),), torch.device("cpu"))


def test_barriers_wait_for_whole_milliseconds_of_the_timeout() -> None:
    limits = [symmetric._milliseconds(mock.Mock(timeout=one), torch.device("cpu")) for one in (0.25, 1e-4)]
    assert limits == [250, 1]


def test_an_error_between_hosts_is_told_at_once() -> None:
    fails = mock.Mock(side_effect=ValueError("torch says no"))
    late = mock.patch.object(symmetric, "_FABRIC_SECONDS", 0.5)
    with late, pytest.raises(RuntimeError, match=r"^torch says no$"):
        symmetric._in_time(fails, [1])


def test_ranks_with_other_sizes_all_raise(ranks: Pool) -> None:
    with pytest.raises(Failed) as caught:
        ranks.call(shared, [(1000, False), (5000, False)])
    for kind, text in caught.value.errors.values():
        assert kind == "InvalidInput"
        assert text.startswith("all ranks must share as many bytes before mode peer, got [1024, 5120] by rank")
    assert len(caught.value.errors) == 2


def on_gpus(group: Any, fault: str) -> str:
    """What a rank raises that would share a GPU's memory, where the last one lacks something; no GPU takes part."""
    import torch.distributed._symmetric_memory as memory

    ranks = ranks_of(group, None, "mode peer")
    faulty, own = ranks.rank == ranks.size - 1, torch.ones(64, dtype=torch.uint8)
    waited: list[bool] = []

    def given(name: str) -> torch.Tensor:
        if faulty and fault == name:
            raise RuntimeError("torch says no")
        return own

    def synchronize() -> None:
        waited.append(not own.any())

    def told(ranks: Any, value: Any, real: Any = symmetric._told) -> list[Any]:
        # Whoever hears that all ranks have memory may store there.
        assert own.any() or any(waited), "zeros may come after what a peer stores"
        return real(ranks, value)

    def meet() -> Any:
        # Between hosts without a fabric, torch waits for ever.
        time.sleep(3 if fault == "host" else 0)
        return fault == "host" or ranks.all_gather(own, "rendezvous") is own or handle

    handle = mock.Mock(get_buffer=lambda *_: given("mapping"))
    with (
        mock.patch.object(symmetric, "host_id", lambda: f"host {faulty and fault in ('fabric', 'host')}"),
        mock.patch.object(symmetric, "_FABRIC_SECONDS", 0.5),
        mock.patch.object(symmetric, "_told", told),
        mock.patch.object(torch.cuda, "default_stream", lambda _: mock.Mock(synchronize=synchronize)),
        mock.patch.object(torch.cuda, "stream", lambda _: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "can_device_access_peer", lambda *_: not (faulty and fault == "access")),
        mock.patch.object(memory, "empty", lambda *_, **__: given("memory")),
        # It would wait for all ranks.
        mock.patch.object(memory, "rendezvous", lambda *_: meet()),
    ):
        try:
            symmetric._on_gpus(ranks, 64, torch.device("cuda", ranks.rank))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    "fault, text",
    [
        ("", ""),
        ("fabric", ""),
        ("host", "torch shares no memory: it did not map it in 0.5 s, and rank 2 is on another host than rank 0"),
        ("access", "got on rank 2: GPU 2 has no peer access to GPU 1 of rank 1"),
        ("memory", "got on rank 2: torch shares no memory: torch says no"),
        ("mapping", "got on rank 2: torch shares no memory: torch says no"),
    ],
)
def test_gpus_that_cannot_share_memory_are_named_on_all_ranks(ranks: Pool, fault: str, text: str) -> None:
    start = time.monotonic()
    for found in ranks.call(on_gpus, [(fault,)] * 3):
        assert text in found and found.startswith("Unsupported: mode 'peer' needs ranks that" if text else "")
        assert bool(found) == bool(text)
    assert time.monotonic() - start < 5


def test_ranks_without_memory_all_raise(ranks: Pool) -> None:
    with pytest.raises(Failed) as caught:
        ranks.call(shared, [(9000, False), (9000, True)])
    for kind, text in caught.value.errors.values():
        assert kind == "Unsupported" and text.startswith("mode 'peer' needs ranks that reach each other's memory")
        assert "got on rank 1: 9216 bytes of shared memory cannot be had: No space left" in text
    # The group goes on.
    ranks.call(shared, [(9000, False)] * 2)
