"""Every benchmark script: a tiny case on a CPU with timers that only call, its help, and options that it refuses."""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

import moe_torch
from benchmarks import (
    adapters,
    compile_time,
    convert,
    draws,
    energy,
    forward,
    grouped,
    large,
    loading,
    modular,
    options,
    parallel,
    parallel_host,
    parallel_killed,
    quantized,
    rounding,
    sustained,
    tiles,
    torch_host_time,
    training,
)
from benchmarks.models import maxtext
from benchmarks.shapes import SHAPES, Shape
from benchmarks.training_problem import draw_parameters, draw_training_problem
from benchmarks.weights import draw_weights
from moe_core.base.target import Target
from moe_core.runtime.warmup import KernelReport, distinct_kernels
from moe_core.specs import Activation, TokenRounding, Tuning
from tests.support.benchmarks import TINY, CallingTimer, TracingTimer, problem_of, tiny_host_time, tiny_models

FOLDER = pathlib.Path(forward.__file__).parent
README = (FOLDER / "README.md").read_text()
COMMANDS = sorted(
    ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
    for path in FOLDER.rglob("*.py")
    if "\ndef main(" in path.read_text()
)
QUANTIZED = Shape("tiny", 128, 128, 4, 2, Activation("swiglu_oai", gate_layout="interleaved"), True)


pytestmark = pytest.mark.usefixtures("cpu")


class EagerTimer(CallingTimer):
    def capture(self, function: Any) -> Any:
        return function()


# Tiny runs: each gives rows of its record and the text that the script prints.


def run_forward(patch: pytest.MonkeyPatch, output: pathlib.Path) -> tuple[list[Any], str]:
    arguments = ["--partial", "--cell-seconds", "200", "--shapes", "all", "--tokens", "64", "--breakdown"]
    arguments += ["--routing", "balanced,single_hot", "--batch-invariant", "--output", str(output)]
    record = forward.run(options.parse(arguments, ""), CallingTimer(), "cpu")
    for row in record["rows"]:
        assert row["bitwise_torch_jax"] and row["error_fp32_loop"] < forward.TOLERANCE and not row["red_peers"]
        assert set(row["peer_errors"]) == {"grouped_mm", "grouped_mm_compiled", "ragged_dot"}
        assert row["torch_us"] == row["batch_invariant_us"] == 100.0
    assert record["rows"][1]["over_balanced"] == 1 and record["rows"][1]["busiest_expert_tokens"] == 64
    return record["rows"], forward.show(record)


def run_training(patch: pytest.MonkeyPatch, output: pathlib.Path) -> tuple[list[Any], str]:
    arguments = ["--cell-seconds", "200", "--tokens", "16", "--breakdown", "--output", str(output)]
    record = training.run(training.parse(arguments), TracingTimer(), "cpu")
    for row in record["rows"]:
        assert row["bitwise_torch_jax"] and max(row["errors_fp32"].values()) < training.TOLERANCE
        assert row["over_dense"] == row["over_grouped_mm"] == 1 and set(row["not_timed"]) <= {"sonicmoe", "ragged_dot"}
    return record["rows"], training.show(record)


def run_quantized(patch: pytest.MonkeyPatch, output: pathlib.Path) -> tuple[list[Any], str]:
    chosen = quantized.parse(["--tokens", "9", "--output", str(output)])
    names = ("mxfp4", "fp8_block", "fp8_tensor", "int4_g128_zp", "int8_channel")
    chosen.cells = [quantized.Cell(QUANTIZED, name, *quantized.SCHEMES[name]) for name in names]
    rows = quantized.run(chosen, CallingTimer(), "cpu")["rows"]
    assert [row["scheme"] for row in rows] == list(names) and all(row["bitwise_torch_jax"] for row in rows)
    assert all(row["error_dequantized"] < 1e-2 for row in rows if row["prepared"])
    return rows, quantized.show(rows)


def run_rounding(patch: pytest.MonkeyPatch, output: pathlib.Path) -> tuple[list[Any], str]:
    shape, row = Shape("small", 16, 24, 6, 2, Activation("silu"), True), dict[str, Any]()
    problem = draw_training_problem(shape, 96, draw_parameters(shape, torch.device("cpu")))
    assert rounding.check(problem, TokenRounding(16), row)
    assert row["padded"]["with"]["64"] > 0 and row["changed_pairs"] > 0 and row["differing_bits"] == []
    assert row["rows"]["with"] % 16 == 0 and row["rows"]["without"] == 192
    return [], ""


def run_inference(patch: pytest.MonkeyPatch, output: pathlib.Path) -> tuple[list[Any], str]:
    pytest.importorskip("transformers")
    from benchmarks.models import inference

    tiny_models(patch)
    given = ["--models", "qwen3-30b-a3b", "--tokens", "1", "--layers", "2", "--output", str(output)]
    rows = inference.run(inference.parse(given), (CallingTimer(), EagerTimer()), "cpu")["rows"]
    timed = {(row["mode"], row["implementation"]) for row in rows if "us_per_layer" in row}
    assert timed >= {("eager", "moebius"), ("eager", "eager"), ("graph", "moebius"), ("graph", "grouped_mm")}
    assert rows[0]["us_per_layer"] == 50 and rows[0]["tokens_per_s"] == pytest.approx(1e6 / 50 / 48)
    return rows, inference.show(rows)


def run_model_training(patch: pytest.MonkeyPatch, output: pathlib.Path) -> tuple[list[Any], str]:
    pytest.importorskip("transformers")
    from benchmarks.models import training as model_training

    tiny_models(patch)
    given = ["--layers", "2", "--tokens", "32", "--length", "16", "--output", str(output)]
    record = model_training.run(model_training.parse(given), CallingTimer(), "cpu")
    # Attention, router and two of eight experts of each layer, the head, and no embedding.
    attention, router, expert, head = 32 * 8 * (4 + 2 + 2 + 4), 32 * 8, 3 * 32 * 16, 64 * 32
    active = 2 * (attention + router + 2 * expert) + head
    assert record["flops_per_token"] == 6 * active + 6 * 2 * 16 * 32
    assert [row["step_us"] for row in record["rows"]] == [100, 100]
    return record["rows"], model_training.show(record)


def run_energy(patch: pytest.MonkeyPatch, output: pathlib.Path) -> tuple[list[Any], str]:
    used, rows = [0.0], []
    meter = type("Meter", (), {"joules": lambda self: used[0]})()

    def capture(call: Any) -> Any:
        call()
        return lambda: used.__setitem__(0, used[0] + 3)

    patch.setattr(sustained, "_REPLAYS", 1)
    for kind in ("forward", "step"):
        rows += energy.run_cell(energy.Cell(TINY["qwen3"], kind, 6), capture, meter, 0.0, ("cpu", 0))
    timed = [row for row in rows if "us" in row]
    assert {row["mj_per_token"] for row in timed} == {500} and {row["over"] for row in timed} == {1}
    return rows, energy.show(rows)


def run_modular(patch: pytest.MonkeyPatch, output: pathlib.Path) -> tuple[list[Any], str]:
    shape = TINY["qwen3"]
    weights = draw_weights(shape, torch.Generator("cpu").manual_seed(0))
    row = modular.measure(shape, weights, 5, CallingTimer())
    assert row["composed_us"] == row["modular_us"] == 10.0 and row["ratio"] == 1
    return [], modular.table([row], modular.COLUMNS)


def run_adapters(patch: pytest.MonkeyPatch, output: pathlib.Path) -> tuple[list[Any], str]:
    patch.setattr(adapters, "SHAPES", {"qwen3": TINY["qwen3"], "gptoss20b": QUANTIZED})
    patch.setattr(adapters, "free_memory", lambda: None)
    patch.setattr(
        adapters,
        "Compiled",
        lambda _: SimpleNamespace(start=lambda plans: distinct_kernels(plans)[:0], stop=lambda: None),
    )
    patch.setattr(adapters, "peak_mb", lambda function: 1.0)
    given = ["--cells", "qwen3:bf16,gptoss20b:mxfp4", "--tokens", "1,9", "--steps", "9", "--layers", "3", "--breakdown"]
    chosen = adapters.parse([*given, "--ranks", "8,32", "--adapters", "1,2", "--output", str(output)])
    rows = adapters.run(chosen, CallingTimer(), "cpu", Target("cuda", 90, 132))["rows"]
    assert all(row["over"] == 1 for row in rows) and {row["goal"] for row in rows if row["tokens"] == 1} == {1.03}
    assert max(row["error"] for row in rows if row["mode"] == "forward") < 1e-2
    return rows, adapters.table(rows, adapters._COLUMNS)


def run_tiles(patch: pytest.MonkeyPatch, output: pathlib.Path) -> tuple[list[Any], str]:
    target = Target("cuda", 90, 132)
    built_in, choices = tiles.choices(SHAPES["qwen3"], 4096, target)
    heights = [f"{first}, {second}" for first in (128, 160, 192) for second in (128, 160, 192)]
    assert list(choices) == heights and Tuning(*built_in) in choices.values()
    patch.setattr(tiles, "choices", lambda *_: (built_in, dict.fromkeys(choices, Tuning())))
    row = tiles.measure(problem_of(TINY["qwen3"], 5), Target("reference"), CallingTimer(), 1.0)
    assert row["over_built_in"]["128, 192"] == 1 and row["rows_per_expert"] == 2.5
    return [row], tiles.show([row])


def run_torch_host_time(patch: pytest.MonkeyPatch, output: pathlib.Path) -> tuple[list[Any], str]:
    tiny_host_time(patch)
    layer, x = moe_torch.MoE(16, 8, 4, 2).requires_grad_(False), torch.randn(4, 16)
    expected = layer(x)
    patch.setattr(sys, "argv", ["torch_host_time.py", "--turns", "2", "--driver", "none", "--output", str(output)])
    torch_host_time.main()
    assert torch.equal(layer(x), expected), "the idle driver is gone"
    assert all(0 < one["best_us"] <= one["median_us"] for one in json.loads(output.read_text())["per_call"].values())
    torch_host_time.run(1, "cpu", lambda: None)
    return [], ""


def run_compile_time(patch: pytest.MonkeyPatch, output: pathlib.Path) -> tuple[list[Any], str]:
    def two_seconds_each(kernels: Any) -> list[KernelReport]:
        return [KernelReport(launch.kernel.name, "16 x 128", 2.0, False) for _, launch in kernels]

    record = compile_time.measure([SHAPES["qwen3"]], (9, 16), Target("cuda", 90, 132), two_seconds_each)
    one, two = record["cells"]
    assert one["first_call_seconds"] == two["first_call_seconds"] == 4.0 and one["kernels"] == 2
    return [], compile_time.show(record, 2)


def run_loading(patch: pytest.MonkeyPatch, output: pathlib.Path) -> tuple[list[Any], str]:
    """A layer from a checkpoint is in memory once."""
    pytest.importorskip("flax")
    if sys.platform != "linux":
        pytest.skip("peak memory is read as Linux tells it")
    # Where there is a GPU, Flax's arrays would be in its memory.
    patch.setenv("JAX_PLATFORMS", "cpu")
    output.parent.mkdir()
    sizes = ["--experts", "16", "--width", "1024"]
    assert loading.main(["--storages", "bf16", *sizes, "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    assert [row["front_end"] for row in record["rows"]] == ["torch", "flax"]
    for row in record["rows"]:
        assert row["weights_gib"] > 0.09 and 0.9 < row["peak_over_weights"] < loading.ALLOWED, row
    (output.parent / "codes").mkdir()
    loading.write_layer(output.parent / "codes", "mxfp4", 4, 64)
    assert all(loading.measure(one, str(output.parent / "codes"))["weights_gib"] > 0 for one in ("torch", "flax"))
    return [], ""


def run_convert(patch: pytest.MonkeyPatch, output: pathlib.Path) -> tuple[list[Any], str]:
    output.parent.mkdir()
    assert convert.main(["--experts", "4", "--widths", "256,96,96", "--rounds", "1", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(row["source"], row["target"]) for row in rows] == [
        *(("qwen3_moe", target) for target in convert.TARGETS), ("gpt_oss", "bf16"), ("gpt_oss", "mxfp4")
    ]  # fmt: skip
    assert all(row[name] > 0 for row in rows for name in ("mb_s", "copy_mb_s", "cpu_ms", "copy_cpu_ms")), rows
    assert rows[0]["megabytes"] < rows[2]["megabytes"]
    return [], ""


def run_parallel(patch: pytest.MonkeyPatch, output: pathlib.Path) -> tuple[list[Any], str]:
    given = ["--device", "cpu", "--shapes", "tiny_biased", "--tokens", "3", "--cell-seconds", "0.01"]
    assert parallel.main([*given, "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    assert [row["mode"] for row in record["rows"]] == list(parallel.MODES) and record["ranks"] == 2
    assert all(row["scaling"] == row["alone_us"] / row["us"] and row["link_bytes"] > 0 for row in record["rows"])
    assert not [name for name in parallel.COLUMNS if f"`{name}`" not in README]
    return [], ""


def run_parallel_killed(patch: pytest.MonkeyPatch, output: pathlib.Path) -> tuple[list[Any], str]:
    row = parallel_killed.measure("all_to_all", "cpu")
    assert row["wrong"] == 0 and row["ranks_left"] == 1 and "Connection" in row["error"], row
    assert 0 < row["noticed_s"] < row["reformed_s"] < row["next_s"]
    assert not [name for name in row if f"`{name}`" not in README]
    return [], ""


def run_parallel_host(patch: pytest.MonkeyPatch, output: pathlib.Path) -> tuple[list[Any], str]:
    given = ["--device", "cpu", "--tokens", "3", "--modes", "peer", "--turns", "2", "--output", str(output)]
    assert parallel_host.main(given) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["mode"] for row in rows] == ["none", "peer"] and all(len(row["host_us"]) == 3 for row in rows)
    # The device waits 2 for the first kernel, the second begins early, and 3 pass before a copy.
    spans = [(0, 5, "spin"), (7, 4, "a"), (9, 3, "b"), (15, 1, "copy")]
    found = parallel_host.idle_of([(start + 100 * call, *rest) for call in range(4) for start, *rest in spans])
    assert found == {"idle_us": 5, "busy_us": 6, "launches": 3}
    assert not [name for name in {*rows[0], *found} if f"`{name}`" not in README]
    return [], ""


def run_large(patch: pytest.MonkeyPatch, output: pathlib.Path) -> tuple[list[Any], str]:
    assert min(large.elements(large.LARGE_SHAPE, large.LARGE_TOKENS).values()) > 2**31
    patch.setattr(large, "_CHUNK", 40)
    with torch.no_grad():
        row = large.run_large("cpu", TINY["qwen3"], 100)
        patch.setattr(large, "TOLERANCE", 1e-9)
        with pytest.raises(SystemExit, match="parity is red for"):
            large.run_large("cpu", TINY["qwen3"], 100)
    assert row["bitwise_torch_jax"] and row["elements"] == {"x": 1600, "activations": 4800, "slots": 3200}
    return [], ""


def run_grouped(patch: pytest.MonkeyPatch, output: pathlib.Path) -> tuple[list[Any], str]:
    given = grouped.parse(["--rows", "9,40", "--experts", "3", "--shape", "16,24", "--device", "cpu"])
    rows = grouped.run(given, "cpu", {"eager": CallingTimer(), "graph": CallingTimer()})
    assert len(rows) == 2 * (2 * 2 + 2 + 1) and not [row for row in rows if "reason" in row]
    assert {row["ratio"] for row in rows} == {1.0} and min(row.get("equal_bits", 1) for row in rows) > 0.99
    patch.setattr(grouped, "TOLERANCE", 1e-9)
    one, other = ((torch.full((2,), value),) for value in (1.0, 1.001))
    with pytest.raises(SystemExit, match="parity is red: ours and the peer differ by"):
        grouped.compared({"ours": lambda: one, "peer": lambda: other})
    return rows, grouped.show(rows)


RUNS = {name.removeprefix("run_"): function for name, function in list(globals().items()) if name.startswith("run_")}


@pytest.mark.parametrize("name", RUNS)
def test_a_tiny_run(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "records" / "record.json"
    rows, shown = RUNS[name](monkeypatch, output)
    if output.exists() and rows:
        assert json.loads(output.read_text())["rows"] == json.loads(json.dumps(rows))
        assert re.search(rf"\| {re.escape(rows[0].get('shape', rows[0].get('model', 'moebius')))} \|", shown)
    fields = {field for row in rows for field in row}
    undescribed = [field for field in fields if f"`{field}`" not in README]
    assert not undescribed, "fields that benchmarks/README.md does not describe"


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(command)
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0 and "usage:" in capsys.readouterr().out
    assert f"python -m {command}" in README


def test_the_page_publishes_the_loads_of_its_seed() -> None:
    published = re.findall(r"^\| \w+ \| \d+ (?:\| \d+ / \d+ ){3}\|$", README, re.MULTILINE)
    assert published and set(published) <= set(draws.load_table().splitlines())


REFUSED: list[tuple[str, list[str], str]] = [
    ("forward", ["--shapes", "llama"], "--shapes must be of qwen3, gptoss20b, got llama"),
    ("forward", ["--routing", "even"], "--routing must be of balanced, zipf, single_hot, got even"),
    ("forward", ["--routing", "trace:no"], "no"),
    ("forward", ["--tokens", "1,x"], "--tokens must be positive numbers with commas between them, got '1,x'"),
    ("forward", ["--cell-seconds", "0"], "--cell-seconds must be positive, got 0.0"),
    ("forward", ["--shapes", "none"], "there is nothing to run"),
    ("forward", ["--output", "x.json"], "every required peer: triton_kernels cannot be imported; put python/trit"),
    ("forward", ["--output", "x.json", "--peers", "none"], "add grouped_mm_compiled to --peers; add ragged_dot to"),
    ("quantized", ["--cells", "qwen3:int4"], "--cells must be of gptoss120b"),
    ("quantized", ["--peers", "tokamax"], "--peers must be of triton_kernels, got tokamax"),
    ("training", ["--peers", "vllm"], "--peers must be of grouped_mm, ragged_dot, sonicmoe, got vllm"),
    ("training", ["--shapes", "none"], "there is nothing to run; name --shapes"),
    ("energy", ["--cells", "qwen3:backward:4"], "got 'qwen3:backward:4'"),
    ("models.inference", ["--implementations", "grouped_mm"], "--implementations must have moebius, which the others"),
    ("models.inference", ["--layers", "0"], "--layers and --seconds must be positive, got 0 and 1.0"),
    ("models.training", ["--tokens", "10", "--length", "4"], "--tokens must be a multiple of --length, got 10 and 4"),
    ("parallel", ["--device", "cpu", "--ranks", "1"], "--ranks must be 2 or more, and as many GPUs, got 1 of 0"),
    ("parallel", ["--device", "cpu", "--modes", "all_gather", "--rows", "slots"], "there is nothing to run"),
    ("adapters", ["--cells", "qwen3:fp8"], "--cells must be of gptoss20b:prepacked"),
    ("compile_time", ["--shapes", "x"], "--shapes must be of gptoss120b"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), REFUSED)
def test_refused_options(name: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    main: Callable[[list[str]], Any] = importlib.import_module(f"benchmarks.{name}").main
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2 and message in capsys.readouterr().err


def test_the_page_has_the_figures_of_maxtext() -> None:
    rows = json.loads((FOLDER / "results/maxtext-h200.json").read_text())["rows"]
    page = (FOLDER.parent / "docs/user/migration.md").read_text()
    for way in {row["way"]: None for row in rows}:
        of_way = [row for row in rows if row["way"] == way]
        cells = [f"{row[f'{kind}_tokens'] / 1e6:.3g}" for row in of_way for kind in ("forward", "step")]
        assert f"| {' | '.join(cells)} |" in page, way
        assert all(row["error"] <= maxtext.TOLERANCE for row in of_way)
