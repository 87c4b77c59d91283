"""`moebius-tune`: what it measures, how it chooses, what it writes, and what it says without a GPU."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from moe_core import InvalidInput
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.layers import HUGGING_FACE, MAXTEXT, MoELayerSpec, SharedExpertsSpec
from moe_core.ops.matmul.tile_choice import heuristic_tile
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import ForwardOptions
from moe_core.runtime.cuda import cuda_available
from moe_core.specs import LayoutSpec, MatmulTuning, TileConfig, Tuning
from moe_core.specs.operands import ExpertWeights, RouterLogits, SharedExpert
from moe_core.specs.tile_table import TileEntry, TileTable, read_measurements
from moe_core.tools import tune
from moe_core.tools.tune import bench as bench_module
from moe_core.tools.tune import cli, device
from moe_core.tools.tune.bench import GpuBench, Timing, plan_of, random_ids
from moe_core.tools.tune.device import Device
from moe_core.tools.tune.products import PRESETS, Product, distinct_products, products_of
from moe_core.tools.tune.provenance import joined
from moe_core.tools.tune.search import LEAST_GAIN, Limits, measure_product, search
from tests.support.harness import H200
from tests.support.moe import tiles
from tests.support.runtime.fake_cuda import TICK, FakeDriver

LAYER = MoELayerSpec(64, 32, 4, 2, shared_experts=SharedExpertsSpec(48))
LIMITS = Limits(candidates=8, seconds=60.0)


def products(num_tokens: int = 24, dtype: str = "float32", storage: Any = HUGGING_FACE) -> tuple[Product, ...]:
    return products_of(LAYER, storage, dtype, num_tokens)


@pytest.mark.parametrize("storage", [HUGGING_FACE, MAXTEXT], ids=["hugging_face", "maxtext"])
@pytest.mark.parametrize("num_tokens", [1, 24, 1000])
def test_products_are_those_that_a_forward_plans(storage: Any, num_tokens: int) -> None:
    """A table with an unusual tile for each of them changes every grouped matmul of the whole plan."""
    unusual = [TileConfig(16, 16, 16 * 2**number, 4, 2, 3) for number in range(4)]
    measured = products(num_tokens, "bfloat16", storage)
    assert len(measured) == 4
    entries = [TileEntry(90, one.bucket, config) for one, config in zip(measured, unusual, strict=True)]
    (D, F, E, S), in_out = (64, 32, 4, 48), storage.weight_layout == "in_out"

    def matrix(*shape: int) -> ArraySpec:
        *lead, inputs, outputs = shape
        return ArraySpec((*lead, inputs, outputs) if in_out else (*lead, outputs, inputs), "bfloat16")

    one_buffer = storage.gate_layout != "separate"
    factor = 2 if one_buffer else 1
    experts = ExpertWeights(matrix(E, D, factor * F), matrix(E, F, D), up=None if one_buffer else matrix(E, D, F))
    shared = SharedExpert(matrix(D, factor * S), matrix(S, D), up=None if one_buffer else matrix(D, S))
    spec = dataclasses.replace(LAYER.moe_spec(storage), tuning=Tuning(table=TileTable.of(entries)))
    logits = RouterLogits(ArraySpec((num_tokens, E), "float32"))
    plan = plan_moe(
        ArraySpec((num_tokens, D), "bfloat16"), experts, logits, spec, H200, options=ForwardOptions(shared=shared)
    )
    assert tiles(plan) == unusual


def test_products_of_one_entry_are_measured_once() -> None:
    every = [
        product
        for tokens in (3, 5, 6, 7, 8)
        for product in products_of(PRESETS["mixtral-8x7b"], HUGGING_FACE, "bfloat16", tokens)
    ]
    kept = distinct_products(every)
    assert [product.num_tokens for product in kept] == [3, 3, 8, 8], "the most rows of a bucket"
    assert len({product.bucket for product in kept}) == 4


class FakeBench:
    """Says how long a configuration takes; the longer the further block_n is from `best`."""

    def __init__(self, best: int, step: float = 10.0, wrong: int = 0) -> None:
        self.best, self.step, self.wrong = best, step, wrong
        self.asked: list[tuple[Product, Sequence[TileConfig]]] = []

    def measure(self, product: Product, configs: Sequence[TileConfig]) -> list[Timing]:
        self.asked.append((product, configs))
        found = []
        for number, config in enumerate(configs):
            if number and config.block_n == self.wrong:
                found.append(Timing(config, None, "wrong result: y"))
            else:
                found.append(Timing(config, 100 + self.step * abs(config.block_n - self.best) / 32))
        return found


BIG = products_of(PRESETS["qwen3-30b-a3b"], HUGGING_FACE, "bfloat16", 64)


def test_the_fastest_wins() -> None:
    bench = FakeBench(best=32)
    result = measure_product(BIG[0], H200, bench, 20)
    assert result.heuristic[0] == heuristic_tile(BIG[0].problem(H200)).config
    assert result.best[0].block_n == 32 and result.best[1] == 100
    assert result.gain == pytest.approx(1 - 100 / result.heuristic[1])
    assert result.measurement.entry == TileEntry(90, BIG[0].bucket, result.best[0])
    pinned = dataclasses.replace(BIG[0].spec, tuning=MatmulTuning(batch_invariant=True))
    pinned = dataclasses.replace(BIG[0], spec=pinned).problem(H200)
    config = heuristic_tile(pinned).config
    assert config in bench.asked[0][1]
    assert result.invariant == 100 + 10 * abs(config.block_n - 32) / 32


def test_noise_changes_nothing() -> None:
    result = measure_product(BIG[0], H200, FakeBench(best=32, step=100 * LEAST_GAIN / 4), 20)
    assert result.best == result.heuristic and result.gain == 0


def test_wrong_results_do_not_win() -> None:
    result = measure_product(BIG[0], H200, FakeBench(best=32, wrong=32), 20)
    assert result.best[0].block_n != 32
    assert {timing.config.block_n for timing in result.refused} == {32}


def test_the_time_is_bounded() -> None:
    times = iter([0.0, 10.0, 50.0, 70.0])
    results, left = search(BIG * 2, H200, FakeBench(32), LIMITS, clock=lambda: next(times))
    assert [result.product for result in results] == [BIG[0], BIG[1]]
    assert left == [BIG[0], BIG[1]]


def test_ids_for_timing() -> None:
    ids = random_ids(LayoutSpec(50, 3, 8), 0)
    assert ids.shape == (50, 3) and ids.dtype == np.int32 and ids.min() >= 0 and ids.max() < 8
    assert all(len(set(row)) == 3 for row in ids.tolist())
    assert len(set(random_ids(LayoutSpec(4, 8, 8), 0)[0].tolist())) == 8


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(device, "driver", lambda: driver)
    monkeypatch.setattr(device, "_FLUSH_BYTES", 1024)
    return driver


def test_device_memory_and_time(fake: FakeDriver) -> None:
    with Device(0) as gpu:
        spec = ArraySpec((7, 3), "float32")
        array = np.arange(21, dtype=np.float32).reshape(7, 3)
        address = gpu.upload(array)
        assert np.array_equal(gpu.download(address, spec), array)
        gpu.fill(address, spec.nbytes, 0xFF)
        assert np.isnan(gpu.download(address, spec)).all()
        mark = gpu.mark()
        large = ArraySpec((3, 3 * 2**20), "bfloat16")
        numbers = gpu.download(gpu.random(large, 0.5, 1), large).astype(np.float32)
        assert numbers.std() == pytest.approx(0.5, rel=0.01)
        assert not np.array_equal(numbers[0], numbers[1])
        assert gpu.upload(np.empty(0, np.int32)) % 256 == 0
        gpu.free(mark)
        assert np.isnan(gpu.download(address, spec)).all(), "older memory stays"
        calls: list[str] = []
        medians = gpu.time([lambda: calls.append("a"), lambda: calls.append("b")], 3)
        assert calls == ["a", "b"] * 3 and medians == [1000 * TICK] * 2
    assert not fake.lib.memory and not fake.lib.live_events and not fake.active


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bench_checks_before_it_times(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """The real kernels in the interpreter, on the fake device's memory."""
    if cuda_available():
        pytest.skip("the interpreter does not run in a process with a GPU")
    faulty, broken = TileConfig(16, 32, 32, 4, 1), TileConfig(16, 16, 32, 4, 1)

    def compiled(plan: Any, step: Any, target: Target) -> None:
        if tiles(plan) == [broken]:
            raise ValueError("out of registers")

    def planned(product: Product, config: TileConfig, target: Target) -> Any:
        if config == faulty:  # A launch that leaves out the row weights, and writes by row instead of by slot.
            operands = dataclasses.replace(product.operands, row_weight=None)
            product = dataclasses.replace(
                product, operands=operands, spec=dataclasses.replace(product.spec, scatter="row")
            )
        return plan_of(product, config, target)

    monkeypatch.setattr(bench_module, "compile_launch", compiled)
    monkeypatch.setattr(bench_module, "plan_of", planned)
    target = Target("interpreter")
    with Device(0) as gpu:
        before = gpu.mark()
        for product in products(24, dtype):
            start = heuristic_tile(product.problem(target)).config
            configs = [start, TileConfig(64, 32, 32, 4, 1), broken, faulty]
            timings = GpuBench(gpu, target, 2).measure(product, configs)
            assert [timing.config for timing in timings] == configs
            assert [timing.microseconds is not None for timing in timings[:3]] == [True, True, False]
            assert timings[2].reason == "does not compile: ValueError: out of registers"
            if product.name == "down":
                assert timings[3].microseconds is None and "wrong result" in timings[3].reason
            assert gpu.mark() == before, "what a product needed is freed"
        with pytest.raises(RuntimeError, match="of the heuristics does not compile"):
            GpuBench(gpu, target, 2).measure(products()[0], [broken])


def run(*arguments: str) -> int:
    return tune.main(list(arguments))


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "cuda_available", lambda: False)
    assert run("--preset", "mixtral-8x7b", "--output", "table.json") == 2
    captured = capsys.readouterr()
    assert "there is none" in captured.err and "--dry-run" in captured.err and captured.out == ""
    assert not pathlib.Path("table.json").exists()


def test_a_dry_run_lists_candidates(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "cuda_available", lambda: False)
    assert run("--preset", "deepseek-v3", "--tokens", "1,64", "--candidates", "3", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "cuda sm_90 (132 SMs)" in out
    assert out.count("3 candidates") == 8 and out.count("\n  TileConfig") == 24
    for name in ("gate_up, 1 tokens", "down, 64 tokens", "shared gate_up, 64 tokens", "shared down, 1 tokens"):
        assert name in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a layer must be named"),
        (["--d-model", "64", "--experts", "4"], "--d-ff, --top-k must be given"),
        (["--d-model", "64", "--d-ff", "8", "--experts", "4", "--top-k", "5"], "top_k must be at most num_experts"),
        (["--preset", "mixtral-8x7b", "--candidates", "0"], "--candidates must be at least 1"),
        (["--preset", "mixtral-8x7b", "--seconds", "nan"], "--seconds must be at least 0, got nan"),
        (["--config", "nowhere.json"], "config must be a config.json"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments, "--dry-run") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--tokens", "0"], ["--tokens", "many"], ["--preset", "gpt-7"], ["--dtype", "int8"]]
)
def test_arguments_the_parser_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    assert stop.value.code == 2


@pytest.fixture
def measuring(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeBench:
    """The command on a machine whose GPU is fake."""
    bench = FakeBench(best=64)
    monkeypatch.setattr(cli, "cuda_available", lambda: True)
    monkeypatch.setattr(cli, "cuda_target", lambda index: H200)
    monkeypatch.setattr(cli, "GpuBench", lambda *arguments: bench)
    origin = {
        "gpu": "Fake GPU", "driver": "CUDA 13.0", "versions": {"triton": "3.6.0"}, "commit": "abc", "date": "today",
    }  # fmt: skip
    monkeypatch.setattr(cli, "provenance", lambda index, given: {**origin, "command": " ".join(given)})
    return bench


def test_a_table_is_written_and_extended(
    measuring: FakeBench, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    layer = ["--preset", "qwen3-30b-a3b", "--candidates", "12", "--output", str(path)]
    assert run(*layer, "--tokens", "64") == 0
    out = capsys.readouterr().out
    assert "2 products to measure, 0 in the table" in out and "2 entries measured now" in out and "gate_up" in out
    provenance, measurements = read_measurements(path)
    assert provenance["gpu"] == "Fake GPU" and provenance["command"].endswith("--tokens 64")
    assert [measurement.entry.problem for measurement in measurements] == sorted(
        (product.bucket for product in BIG), key=lambda problem: problem.d
    )
    assert run(*layer, "--tokens", "64,4096", "--extend") == 0
    assert "2 products to measure, 2 in the table" in capsys.readouterr().out
    assert len(measuring.asked) == 4, "what is in the table is not measured again"
    provenance, extended = read_measurements(path)
    assert set(measurements) < set(extended) and len(extended) == 4
    assert "; " in provenance["command"]
    table = TileTable.load(path)
    assert all(entry.config.block_n == 64 for entry in table.entries)
    assert run(*layer, "--tokens", "1") == 0
    assert len(TileTable.load(path).entries) == 2, "without --extend a table is written anew"


def test_tables_of_other_machines_are_not_extended(
    measuring: FakeBench, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    layer = ["--preset", "qwen3-30b-a3b", "--candidates", "4", "--output", str(path), "--tokens", "64"]
    assert run(*layer) == 0
    content = json.loads(path.read_text())
    content["provenance"]["gpu"] = "another"
    path.write_text(json.dumps(content))
    assert run(*layer, "--extend") == 2
    assert "gpu of the table to extend must be 'Fake GPU', got 'another'" in capsys.readouterr().err


def test_commands_are_joined_once() -> None:
    own = {"gpu": "a", "versions": {}, "commit": "c", "command": "moebius-tune x"}
    assert joined(own, own)["command"] == "moebius-tune x"
    both = {**own, "command": "moebius-tune x; moebius-tune y"}
    assert joined(both, own)["command"] == both["command"]
    with pytest.raises(InvalidInput, match="commit of the table"):
        joined({**own, "commit": "d"}, own)


def test_an_output_is_needed(measuring: FakeBench, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--preset", "mixtral-8x7b") == 2
    assert "--output must name the table" in capsys.readouterr().err


def test_a_failed_measurement(
    measuring: FakeBench, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(product: Product, configs: Sequence[TileConfig]) -> list[Timing]:
        raise RuntimeError("illegal address")

    monkeypatch.setattr(measuring, "measure", fail)
    path = tmp_path / "table.json"
    assert run("--preset", "mixtral-8x7b", "--output", str(path)) == 2
    assert "a measurement failed: illegal address" in capsys.readouterr().err and not path.exists()


def test_what_the_time_did_not_suffice_for_is_named(
    measuring: FakeBench, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    assert run("--preset", "mixtral-8x7b", "--tokens", "1", "--seconds", "0", "--output", str(path)) == 0
    assert "not measured, 0 seconds are over: gate_up at 1 tokens, down at 1 tokens" in capsys.readouterr().out
    assert TileTable.load(path) == TileTable.of([])


@pytest.mark.gpu
def test_a_real_measurement(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "table.json"
    sizes = ["--d-model", "512", "--d-ff", "256", "--experts", "8", "--top-k", "2"]
    assert run(*sizes, "--tokens", "4,512", "--candidates", "6", "--output", str(path)) == 0
    provenance, measurements = read_measurements(path)
    assert provenance["gpu"] and provenance["versions"]["triton"]
    assert len(measurements) == 4
    for measurement in measurements:
        assert 0 < measurement.microseconds <= measurement.heuristic_microseconds
