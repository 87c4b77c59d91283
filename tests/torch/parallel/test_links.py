"""`moebius-tune --links`: messages between gloo ranks, on one host and as on two, as a command and under torchrun."""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import re
import subprocess
import sys
import types
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput
from moe_core.parallel import MachineRecord
from moe_core.tools import tune
from moe_core.tools.tune import links as command
from moe_torch.parallel import links
from moe_torch.parallel.group import Ranks
from tests.support.parallel.pool import Pool, ranks
from tests.support.paths import ROOT
from tests.support.torch import running_on

__all__ = ["ranks"]

SETTING = links.Setting("gloo", None, (100, 5000), 0.2)


def measured(group: Any, domain: int) -> links.Found | str:
    """What a rank finds where hosts have so many ranks; group: all ranks, which is the default group here."""
    del group
    small = {"cpu": 8}
    links._PRODUCT, links._SUM = small, {"cpu": 1024}
    try:
        return links._Bench(SETTING, torch.device("cpu"), domain).run()
    except InvalidInput as error:
        return str(error)


def test_messages_within_hosts_and_between_them(ranks: Pool) -> None:
    found = ranks.call(measured, [(2,)] * 4)
    for one in found:
        assert [(own.where, own.kind, own.bytes) for own in one.timings] == [
            (where, kind, size)
            for where in ("domain", "network")
            for kind in ("all_gather", "all_to_all")
            for size in (112, 5008)
        ]
        assert all(own.ranks == 2 and own.us > 0 and own.backend == "gloo" for own in one.timings)
        assert one.domain == 2 and one.tflops > 0 and one.memory > 0
    pairs = [[one.timings[:4] for one in found[host : host + 2]] for host in (0, 2)]
    assert all(first == second for first, second in pairs), "ranks that send to each other say the same"
    alone = ranks.call(measured, [(4,)] * 4)[0]
    assert {(own.where, own.ranks) for own in alone.timings} == {("domain", 4)}
    # Three parts of at least 16 bytes.
    assert [own.bytes for own in alone.timings[:2]] == [144, 5040]
    assert ranks.call(measured, [(3,)] * 4)[0].startswith(
        "hosts must have equally many ranks, got 4 of which one has 3"
    )


def test_rates_of_products_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 2 us: two million operations are 1 TFLOP/s, and 4 KB are 2 GB/s."""
    monkeypatch.setattr(links, "_PRODUCT", {"cpu": 100})
    monkeypatch.setattr(links, "_SUM", {"cpu": 4000})
    bench = object.__new__(links._Bench)
    bench.device, added = torch.device(SETTING.device), []

    def timed(call: Any, seconds: float) -> float:
        added.append(call())
        return 2.0

    monkeypatch.setattr(bench, "_us", timed)
    assert bench._products(0.1) == (1.0, 2.0)
    assert added[0].shape == (100, 100) and added[1].shape == ()
    assert links.Setting("nccl", None, (8,), 0.1).device == "cuda"


def stored(group: Any, size: int) -> tuple[list[list[float]], int]:
    """What lies in a rank's memory, by the rank that stored it: the least and the largest number."""
    own = Ranks(group)
    with running_on("reference"):
        call, here, sent = links.peer_call(own, size, torch.device("cpu"))
        here.fill_(torch.nan)
        own.all_gather(torch.zeros(1), "begin")
        call()
        found = [[float(part.min()), float(part.max())] for part in here.float()]
        own.all_gather(torch.zeros(1), "end")
    return found, sent


@pytest.mark.parametrize("size", [100, 50000])
def test_rows_are_stored_at_every_peer(ranks: Pool, size: int) -> None:
    for rank, (found, sent) in enumerate(ranks.call(stored, [(size,)] * 3)):
        for other, ends in enumerate(found):
            assert ends == [other + 1] * 2 if other != rank else all(map(math.isnan, ends))
        assert size <= sent <= size + 2 * 8192


def loaded(group: Any, size: int) -> tuple[list[float], int]:
    """The rows that a rank loads, each of one number: 10 times the rank that has it, and the rank that loads it."""
    own = Ranks(group)
    with running_on("reference"):
        call, here, size = links.pull_call(own, size, torch.device("cpu"))
        here.copy_((10 * own.rank + torch.arange(own.size))[:, None, None].expand(here.shape))
        rows = call()
        own.all_gather(torch.zeros(1), "end")
    assert (rows == rows[:, :1]).all()
    return rows[:, 0].tolist(), size


@pytest.mark.parametrize("size", [100, 50000])
def test_rows_are_loaded_from_every_peer(ranks: Pool, size: int) -> None:
    for rank, (found, sent) in enumerate(ranks.call(loaded, [(size,)] * 3)):
        assert found == [10 * ((rank + 1 + row // (len(found) // 2)) % 3) + rank for row in range(len(found))]
        assert size <= sent <= size + 2 * 8192


def test_a_record_is_written(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.json"
    given = ["--links", "--backend", "gloo", "--bytes", "64,4096", "--link-seconds", "0.2", "--output", str(path)]
    assert tune.main(given) == 0
    out = capsys.readouterr().out
    assert "set MOEBIUS_MACHINE to this path" in out and re.search(r"all_to_all +gloo +domain +2 +4096", out)
    record = MachineRecord.load(path)
    assert [own.bytes for own in record.timings] == [64, 4096] * 2 and record.machine.domain == 2
    assert [kind for kind, _ in record.not_measured] == ["peer", "peer_pull", "ragged_all_to_all"]
    assert record.provenance["command"] == f"moebius-tune {' '.join(given)}" and "CPU" in record.provenance["gpu"]


def test_xla_is_left_out_beside_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with GPUs would time XLA on these, though the record is of CPUs."""
    parser, asked = argparse.ArgumentParser(), []
    command.add_options(parser)

    def measure(sizes: tuple[int, ...]) -> tuple[tuple[()], str]:
        asked.append(sizes)
        return (), "why not"

    monkeypatch.setitem(sys.modules, command._JAX, types.SimpleNamespace(measure=measure))
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: name)

    def missing(*given: str) -> str:
        timings, ((kind, why),) = command._of_jax(parser.parse_args(["--links", *given]), (64,))
        assert timings == () and kind == "ragged_all_to_all"
        return why

    assert missing("--backend", "gloo") == "--backend gloo is of CPUs, where XLA has none" and not asked
    assert missing() == missing("--backend", "nccl") == "why not" and asked == [(64,)] * 2
    assert missing("--no-jax") == "--no-jax" and len(asked) == 2


def test_under_torchrun_the_first_rank_writes(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "machine.json"
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "moe_core.tools.tune"]
    options = ["--links", "--backend=gloo", "--bytes=64", "--link-seconds=0.1", "--no-jax", f"--output={path}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*run, *options], env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("set MOEBIUS_MACHINE to this path") == 1
    record = MachineRecord.load(path)
    assert [own.ranks for own in record.timings] == [3, 3]
    assert record.not_measured[2:] == (("ragged_all_to_all", "--no-jax"),)
    for _, why in record.not_measured[:2]:
        assert why.startswith("stores to peers and loads are timed between GPUs alone")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--output must name the record to write, got none; add --output machine.json"),
        (["--output", "machine.json", "--ranks", "1"], "ranks must be an integer of at least 2, got 1"),
        (["--output", "machine.json", "--link-seconds", "0"], "sizes and seconds must be positive"),
        (["--output", "machine.json", "--backend", "nccl"], "links between GPUs need two on this host"),
    ],
)
def test_wrong_options_are_refused(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links.torch.cuda, "device_count", lambda: 1)
    assert tune.main(["--links", "--backend", "gloo", *given]) == 2
    assert message in capsys.readouterr().err


def test_what_is_not_installed_or_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--links", "--backend", "gloo", "--output", "machine.json"]
    with monkeypatch.context() as patched:
        patched.setattr(command.importlib.util, "find_spec", lambda name: None)
        assert tune.main(given) == 2
        assert "torch is not installed" in capsys.readouterr().err
    spawn: Any = torch.multiprocessing
    for error in (spawn.ProcessRaisedException("died", 1, 2), spawn.ProcessExitedException("died", 1, 2, 3)):
        with monkeypatch.context() as patched:
            patched.setattr(spawn, "start_processes", mock.Mock(side_effect=error))
            assert tune.main(given) == 2
            assert "a rank failed: died" in capsys.readouterr().err

    def fail(setting: Any) -> None:
        raise RuntimeError("a rank died")

    monkeypatch.setattr(links, "measure", fail)
    assert tune.main(given) == 2
    assert "moebius-tune: a measurement failed: a rank died" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tune.main([*given, "--bytes", "0"])
