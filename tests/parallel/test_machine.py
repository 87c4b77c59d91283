"""Records of machines: a line through timings, files written and read, bad files, and what is chosen by them."""

from __future__ import annotations

import copy
import dataclasses
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.errors import InvalidInput
from moe_core.layers.spec import MoELayerSpec
from moe_core.parallel import (
    ExchangeSpec,
    Link,
    LinkTiming,
    Machine,
    MachineRecord,
    Placement,
    Zipf,
    choose_mode,
    fit_link,
    machine_of,
    predict,
    simulate,
)
from moe_core.parallel.machine import H200, VARIABLE
from tests.support.paths import ROOT

ORIGIN = {"gpu": "none", "driver": "none", "versions": {}, "commit": "abc", "command": "moebius-tune", "date": "today"}


def timings(kind: str, link: Link, where: str = "domain", noise: float = 0.0) -> list[LinkTiming]:
    random = np.random.default_rng(0)
    sizes = [4**power for power in range(5, 14)]
    factors = 1 + noise * random.standard_normal(len(sizes))
    return [LinkTiming(kind, "nccl", where, 4, size, link.us(size) * f) for size, f in zip(sizes, factors, strict=True)]


GATHER, PLAIN, PEER = Link(20.0, 200.0), Link(30.0, 250.0), Link(5.0, 350.0)


def record(*others: LinkTiming) -> MachineRecord:
    found = [*timings("all_gather", GATHER), *timings("all_to_all", PLAIN), *others]
    missing = [("ragged_all_to_all", "no JAX")]
    return MachineRecord.of(found, ORIGIN, domain=4, tflops=600.0, memory=3000.0, not_measured=missing)


@given(latency=st.floats(0, 1e3), bandwidth=st.floats(1e-2, 1e3))
def test_a_line_is_found_again(latency: float, bandwidth: float) -> None:
    link = Link(latency, bandwidth)
    found = fit_link(timings("all_to_all", link))
    for size in (1024, 10**6, 4**13):
        np.testing.assert_allclose(found.us(size), link.us(size), 1e-6)


def test_lines_through_few_and_strange_timings() -> None:
    def timing(size: int, us: float) -> LinkTiming:
        return LinkTiming("peer", "triton", "domain", 2, size, us)

    noisy = fit_link(timings("all_to_all", PLAIN, noise=0.05))
    assert abs(noisy.latency_us / 30 - 1) < 0.1 and abs(noisy.bandwidth / 250 - 1) < 0.1
    worked = fit_link([timing(1000, 11.0), timing(1000000, 20.0)])
    np.testing.assert_allclose([worked.latency_us, worked.bandwidth], [10.991, 111.0], 1e-3)
    alone = fit_link([timing(2000, 4.0), timing(2000, 4.0)])
    assert (alone.latency_us, alone.bandwidth) == (0.0, 0.5)
    # A line through the origin where small messages are faster than any line, and where large ones are.
    steep = fit_link([timing(1000, 1.0), timing(10000, 100.0)])
    assert steep.latency_us == 0.0 and 0.1 < steep.bandwidth < 1.0
    flat = fit_link([timing(1000, 10.0), timing(100000, 5.0)])
    assert flat.bandwidth == 20.0 and flat.latency_us == 7.5
    with pytest.raises(InvalidInput, match="timings must hold at least one message, got none"):
        fit_link([])


def test_a_record_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "machine.json"
    for own in (record(), record(*timings("peer", PEER), *timings("all_to_all", Link(40.0, 20.0), "network"))):
        own.save(path)
        assert MachineRecord.load(path) == own
    machine = MachineRecord.load(path).machine
    assert machine.network is not None and round(machine.network.bandwidth) == 20
    assert [kind for kind, _ in machine.measured] == ["all_gather", "all_to_all", "peer"]
    assert machine.nvlink == machine.link("padded") == machine.link("all_to_all")
    for mode, link in (("all_gather", GATHER), ("peer", PEER)):
        np.testing.assert_allclose(dataclasses.astuple(machine.link(mode)), dataclasses.astuple(link), 1e-6)
    assert round(record().timings[-1].gb_s) == round(record().timings[-1].bytes / record().timings[-1].us / 1e3)


def test_a_record_needs_a_base_and_an_origin(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidInput, match="timings must hold all_to_all within a domain, got none"):
        MachineRecord.of(timings("peer", PEER), ORIGIN, domain=4, tflops=1.0, memory=1.0)
    own = dataclasses.replace(record(), provenance={"gpu": "x"})
    with pytest.raises(InvalidInput, match=r"provenance must say gpu, driver, .* got no driver, versions"):
        own.save(tmp_path / "machine.json")
    assert not list(tmp_path.iterdir())


def change(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def changed(content: dict[str, Any]) -> None:
        for step in path[:-1]:
            content = content[step]
        content[path[-1]] = to

    return changed


def without(*path: Any) -> Callable[[dict[str, Any]], None]:
    def changed(content: dict[str, Any]) -> None:
        for step in path[:-1]:
            content = content[step]
        del content[path[-1]]

    return changed


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change("format", to=2), "format of .* must be 1, got 2"),
        (without("timings"), "the record of .* must have the fields format, provenance"),
        (change("more", to=1), "the record of .* must have the fields"),
        (without("provenance", "date"), "provenance of .* must say gpu, .* got no date"),
        (change("provenance", to=[]), "provenance of .* must say gpu"),
        (change("machine", to=7), "machine of .* must have the fields nvlink, network, domain"),
        (change("machine", "nvlink", "latency_us", to=-1), "latency_us must be at least 0, got -1"),
        (change("machine", "nvlink", "bandwidth", to=0), "bandwidth must be above 0, got 0"),
        (change("machine", "nvlink", "bandwidth", to="fast"), "bandwidth must be finite, got 'fast'"),
        (change("machine", "nvlink", "bandwidth", to=float("nan")), "bandwidth must be finite, got nan"),
        (change("machine", "nvlink", to={"latency_us": 1}), "nvlink of machine of .* must have the fields latency_us"),
        (change("machine", "network", to={}), "network of machine of .* must have the fields latency_us, bandwidth"),
        (change("machine", "domain", to=0), "domain must be an integer of at least 1, got 0"),
        (change("machine", "domain", to=4.5), "domain must be an integer of at least 1, got 4.5"),
        (change("machine", "tflops", to=None), "tflops must be finite, got None"),
        (change("machine", "memory", to=-3), "memory must be above 0, got -3"),
        (change("machine", "measured", to=[]), "measured of machine of .* must map kinds to links"),
        (
            change("machine", "measured", "telepathy", to={"latency_us": 1, "bandwidth": 1}),
            "kind of measured must be one",
        ),
        (change("timings", to={}), "timings of .* must be a list, got dict"),
        (change("timings", 0, to=3), "timing 0 of .* must have the fields kind, backend"),
        (change("timings", 1, "kind", to="telepathy"), "kind must be one of all_gather, all_to_all, peer"),
        (change("timings", 1, "where", to="space"), "where must be one of domain, network"),
        (change("timings", 1, "backend", to=""), "backend must be a name, got ''"),
        (change("timings", 1, "ranks", to=1), "ranks must be an integer of at least 2, got 1"),
        (change("timings", 1, "bytes", to=True), "bytes must be an integer of at least 1, got True"),
        (change("timings", 1, "us", to=0.0), "us must be above 0, got 0.0"),
        (change("not_measured", to={"peer": 3}), "not_measured of .* must map kinds to reasons"),
    ],
)
def test_bad_records_are_refused(spoil: Callable[[dict[str, Any]], None], message: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "machine.json"
    record().save(path)
    content = json.loads(path.read_text())
    spoiled = copy.deepcopy(content)
    spoil(spoiled)
    path.write_text(json.dumps(spoiled))
    with pytest.raises(InvalidInput, match=message):
        MachineRecord.load(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '"text"', "[" * 100])
def test_other_files_are_refused(text: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    for wrong in (path, tmp_path, tmp_path / "nothing"):
        with pytest.raises(InvalidInput, match=re.escape(str(wrong))):
            MachineRecord.load(wrong)


def test_predictions_read_a_record(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.json"
    own = record(*timings("peer", PEER))
    own.save(path)
    layer, placement = MoELayerSpec(2880, 2880, 128, 4), Placement.linear(128, 4)
    monkeypatch.delenv(VARIABLE, raising=False)
    for call in (
        lambda machine: predict(layer, 64, 4, machine, ExchangeSpec()),
        lambda machine: simulate(layer, Zipf(0.5), 64, placement, machine, ExchangeSpec()),
        lambda machine: choose_mode(64, placement, machine),
    ):
        with pytest.raises(InvalidInput, match="machine must be a Machine or the path of a record, or MOEBIUS_MACHINE"):
            call(None)
        expected = call(own.machine)
        assert call(path) == call(str(path)) == expected
        with monkeypatch.context() as variables:
            variables.setenv(VARIABLE, str(path))
            assert call(None) == expected
            variables.setenv(VARIABLE, str(tmp_path / "nothing"))
            with pytest.raises(InvalidInput, match="path must be a record that moebius-tune --links wrote"):
                call(None)
    with pytest.raises(InvalidInput, match="machine must be a Machine, got int"):
        machine_of(3)  # type: ignore[arg-type]


def test_each_mode_has_the_link_of_its_messages() -> None:
    machine, layer = record(*timings("peer", PEER)).machine, MoELayerSpec(1024, 512, 64, 4)

    def dispatch(mode: str) -> float:
        return dict(predict(layer, 4096, 4, machine, ExchangeSpec(mode)).stages)["dispatch"]

    rows = 3 * 4096 * 1024 * 2
    np.testing.assert_allclose(dispatch("all_gather"), GATHER.us(rows), 1e-6)
    np.testing.assert_allclose(dispatch("padded"), PLAIN.us(rows), 1e-6)
    assert dispatch("peer") < dispatch("all_to_all") < dispatch("padded")
    counts = dict(predict(layer, 4096, 4, machine, ExchangeSpec()).stages)["counts"]
    np.testing.assert_allclose(counts, PLAIN.latency_us, 1e-4)


def test_links_of_h200_are_those_of_the_record() -> None:
    found = MachineRecord.load(ROOT / "benchmarks" / "results" / "machine-4-h200.json").machine
    assert [kind for kind, _ in H200.measured] == [kind for kind, _ in found.measured]
    for one, link in ((H200.nvlink, found.nvlink), *((H200.link(kind), link) for kind, link in found.measured)):
        np.testing.assert_allclose(dataclasses.astuple(one), dataclasses.astuple(link), 0.01)


def test_a_mode_is_chosen_by_what_was_measured() -> None:
    placement, slow = Placement.linear(32, 4), Link(50.0, 100.0)
    plain, peer, bad = (record(*more).machine for more in ([], timings("peer", PEER), timings("peer", slow)))
    # 20 us at 200 GB/s are 4 MB: 488 rows of 8192 bytes, and twice as many of half.
    mode, why = choose_mode(122, placement, plain)
    assert mode == "all_gather" and why == (
        "488 tokens of all ranks are at most 488: their rows take less than the measured latency of 20 us"
    )
    assert choose_mode(123, placement, plain)[0] == "all_to_all"
    assert choose_mode(123, placement, plain, row_bytes=4096)[0] == "all_gather"
    assert choose_mode(123, placement, peer, symmetric=True)[0] == "peer"
    assert choose_mode(1, placement, peer, symmetric=True)[0] == "peer", "few tokens, too"
    assert choose_mode(1, placement, bad, symmetric=True)[0] == "all_gather", "peers were measured to be slower"
    assert choose_mode(123, placement, bad, symmetric=True)[0] == "all_to_all", "peers were measured to be slower"
    assert choose_mode(123, placement, bad, symmetric=True, capturable=True)[0] == "padded"
    assert choose_mode(4096, Placement.linear(32, 8), peer, symmetric=True)[0] == "all_to_all", "a domain has 4 ranks"
    assert choose_mode(200, placement, H200)[0] == "all_gather" and choose_mode(201, placement, H200)[0] == "all_to_all"
    with pytest.raises(InvalidInput, match="row_bytes must be an integer of at least 1, got 0"):
        choose_mode(64, placement, H200, row_bytes=0)


def test_wrong_kinds_are_refused() -> None:
    with pytest.raises(InvalidInput, match="link of measured must be a Link, got float"):
        Machine(PLAIN, None, 4, 1.0, 1.0, (("peer", 3.0),))  # type: ignore[arg-type]
