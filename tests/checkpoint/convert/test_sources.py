"""Conversions of quantised checkpoints: exact numbers, equal storage kept bit by bit, and little memory."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from moe_core.checkpoint import convert_checkpoint, open_checkpoint
from moe_core.checkpoint.convert import source as source_module
from moe_core.checkpoint.convert import stream
from moe_core.checkpoint.convert.target import Target
from moe_core.checkpoint.convert.verify import verify_conversion
from moe_core.errors import InvalidInput
from moe_core.formats import MXFP4, QuantizedTensor, format_named
from moe_core.specs.operands import named_arrays
from tests.support.checkpoint_files import E, config_of, write
from tests.support.quantized.files import FP8, compressed, fp8_matrix, per_expert_layer, quantized_config, words_matrix
from tests.support.quantized.plain import D, F, source
from tests.support.quantized.published import GPTQ, gptq, hqq

DENSE = "model.layers.0.self_attn.q_proj"


def words(bits: int, zero_points: bool) -> Any:
    return lambda rng, rows, columns: words_matrix(rng, rows, columns, bits, 32, zero_points, ml_dtypes.bfloat16)


SOURCES = {
    "fp8_block": (FP8, fp8_matrix),
    "int4_g32": (compressed("pack-quantized"), words(4, False)),
    "int4_g32_zp": (compressed("pack-quantized", symmetric=False), words(4, True)),
    "int8_g32": (compressed("pack-quantized", num_bits=8), words(8, False)),
}


def published(path: Path, name: str) -> tuple[Path, dict[str, np.ndarray]]:
    """(a checkpoint with a dense quantised matrix beside its layer, the numbers of all)."""
    settings, matrix = SOURCES[name]
    generator = np.random.default_rng(5)
    tensors, numbers = per_expert_layer("qwen3_moe", D, F, lambda *shape: matrix(generator, *shape))
    dense = matrix(generator, 2 * F, D)
    numbers["dense"] = dense.pop("")
    tensors |= {DENSE + suffix: array for suffix, array in dense.items()}
    layers = {"num_hidden_layers": 2, "mlp_only_layers": [0]}
    config = quantized_config("qwen3_moe", settings, D, F, dtype="float32", **layers)
    return write(path, config, {1: {key: np.ascontiguousarray(array) for key, array in tensors.items()}}), numbers


@pytest.mark.parametrize("name", SOURCES)
def test_numbers_of_quantised_sources(tmp_path: Path, name: str) -> None:
    path, numbers = published(tmp_path / "source", name)
    report = convert_checkpoint(path, tmp_path / "plain", "float32")
    layer, tensors = open_checkpoint(tmp_path / "plain").layer(1), load_file(tmp_path / "plain" / "model.safetensors")
    both = np.concatenate([numbers["gate"], numbers["up"]], axis=1)
    pairs = [(layer.experts.gate_up, both), (layer.experts.down, numbers["down"])]
    for found, wanted in (*pairs, (tensors[f"{DENSE}.weight"], numbers["dense"])):
        np.testing.assert_array_equal(found, wanted)
    assert all(key.endswith(".weight") for key in tensors) and report.layers[0][1:] == (0, 0)
    for format in map(format_named, SOURCES):
        made = tmp_path / format.name
        report = convert_checkpoint(path, made, format, loader="moebius")
        assert (report.layers[0].gate_up == report.layers[0].down == 0) == (format.name == name), format
        verified = verify_conversion(path, made, max(report.layers[0][1:]), transformers=False)
        assert verified.layers[0].weights <= max(report.layers[0][1:]) + 1e-6
    one, other = (dict(named_arrays(open_checkpoint(each).layer(1).experts)) for each in (path, tmp_path / name))
    assert {key: array.tobytes() for key, array in one.items()} == {
        key: array.tobytes() for key, array in other.items()
    }


def test_mxfp4_of_gpt_oss_there_and_back(tmp_path: Path) -> None:
    """Interleaved rows of all experts, modules of one expert each, and plain bfloat16: the bits return."""
    convert_checkpoint(source(tmp_path / "source", "gpt_oss", "fused"), tmp_path / "fused", MXFP4)
    for step, (format, loader) in enumerate(((format_named("mxfp8"), "moebius"), ("bfloat16", "transformers"))):
        report = convert_checkpoint(tmp_path / "fused", tmp_path / f"{step}", format, loader=loader)
        assert all(error[1:] == (0, 0) for error in report.layers)
        convert_checkpoint(tmp_path / f"{step}", tmp_path / f"{step}back", MXFP4)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("fused", "0back", "1back")]
    plain = [{name: array.tobytes() for name, array in file.items() if name[-7:] not in ("_blocks", "_scales")}
             for file in files]  # fmt: skip
    assert plain[0] == plain[1] == plain[2]
    layers = [open_checkpoint(tmp_path / name).layer(1).dequantized().experts for name in ("fused", "0back", "1back")]
    for one in layers[1:]:
        np.testing.assert_array_equal(one.gate_up, layers[0].gate_up)
        np.testing.assert_array_equal(one.down, layers[0].down)


def test_memory_stays_below_the_largest_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_THREADS", 16)
    experts, width, inner = 32, 512, 256
    config = config_of(
        "qwen3_moe", hidden_size=width, moe_intermediate_size=inner, num_experts=experts, num_hidden_layers=1
    )
    shapes = {"experts.gate_up_proj": (experts, 2 * inner, width), "experts.down_proj": (experts, width, inner)}
    tensors = {f"model.layers.0.mlp.{name}": np.ones(shape, ml_dtypes.bfloat16) for name, shape in shapes.items()}
    tensors |= {"model.layers.0.mlp.gate.weight": np.ones((experts, width), ml_dtypes.bfloat16)}
    tensors |= {"model.embed_tokens.weight": np.ones((2**16, width), ml_dtypes.bfloat16)}
    path, largest = write(tmp_path / "source", config, {0: tensors}), tensors["model.embed_tokens.weight"].nbytes
    del tensors
    # Threads work ahead where a shard has room.
    int4, small = format_named("int4_g32"), largest // 8
    for format, shard in ((int4, small), ("nvfp4", small), ("nvfp4", 2 * largest), ("float32", 2 * largest)):
        tracemalloc.start()
        made = tmp_path / f"{format} {shard}"
        convert_checkpoint(path, made, format, loader="moebius", shard_bytes=shard)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        written = max(file.stat().st_size for file in made.glob("*.safetensors"))
        assert largest / 8 < peak <= 1.2 * written, (format, peak, written)


def test_a_job_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 bytes each, with room for 3 and for 4."""
    events: list[str] = []

    def submit(_: Any, run: Any, job: Any) -> Any:
        events.append("begin")
        done: Future[Any] = Future()
        done.set_result(job())
        return done

    monkeypatch.setattr(stream.ThreadPoolExecutor, "submit", submit)
    units = [stream.Unit((), lambda: [lambda: stream.Made(())], 2) for _ in range(3)]
    for room, order in ((3, "begin end begin end begin end"), (4, "begin begin end begin end end")):
        events.clear()
        for _ in stream._made_ahead(units, room):
            events.append("end")
        assert " ".join(events) == order


@pytest.mark.parametrize(
    ("settings", "matrix", "kind"),
    [
        (GPTQ, gptq, 0),
        (GPTQ | {"desc_act": True}, lambda *sizes: gptq(*sizes, act_order=True), 1),
        ({"quant_method": "hqq", "quant_config": {}}, hqq, 1),
    ],
)
def test_memory_of_one_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, matrix: Any, kind: int):
    """Jobs take no more than threads count on."""
    rng, (rows, columns), right, peaks = np.random.default_rng(0), (256, 512), stream._run, []
    tensors, _ = per_expert_layer("qwen3_moe", columns, rows, lambda *shape: matrix(rng, *shape))
    config = quantized_config("qwen3_moe", settings, columns, rows, num_hidden_layers=2, mlp_only_layers=[0])
    path = write(tmp_path / "source", config, {1: {key: np.ascontiguousarray(one) for key, one in tensors.items()}})

    def run(job: Any) -> Any:
        tracemalloc.reset_peak()
        before, made = tracemalloc.get_traced_memory()[0], right(job)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
        return made

    monkeypatch.setattr(stream, "_THREADS", 1)
    monkeypatch.setattr(stream, "_run", run)
    for name in ("_PIECE_ELEMENTS", "_AT_ONCE"):  # else most of a small matrix
        monkeypatch.setattr(f"moe_core.ops.quantize.reference.{name}", 2**12)
    tracemalloc.start()
    for format in ("float32", format_named("int4_g32")):
        # One job after the other, because a shard of a unit each has no room for more.
        convert_checkpoint(path, tmp_path / f"{format}", format, loader="moebius", shard_bytes=1)
    tracemalloc.stop()
    work = source_module._WORK[kind]
    assert work / 2 < max(peaks) / (rows * columns) <= work


def test_threads_and_small_pieces_write_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, width, inner, layers = np.random.default_rng(0), 64, 32, (0, 1)
    config = config_of("qwen3_moe", hidden_size=width, moe_intermediate_size=inner, num_experts=16, num_hidden_layers=2)
    shapes = {"experts.gate_up_proj": (16, 2 * inner, width), "experts.down_proj": (16, width, inner)}
    shapes["gate.weight"] = (16, width)

    def numbers(shape: tuple[int, ...]) -> np.ndarray:
        return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)

    tensors = {
        layer: {f"model.layers.{layer}.mlp.{name}": numbers(shape) for name, shape in shapes.items()}
        for layer in layers
    }
    path, written = write(tmp_path / "source", config, tensors), []
    for format in (format_named("int4_g32"), "nvfp4", "float32"):
        for threads, work, piece in ((1, 10**9, 2**24), (4, 0, 64)):
            monkeypatch.setattr("moe_core.checkpoint.convert.source._PIECE_BYTES", piece)
            monkeypatch.setattr("moe_core.checkpoint.convert.source._WORK", (work, work))
            monkeypatch.setattr(stream, "_THREADS", threads)
            made = tmp_path / f"{format}{threads}"
            report = convert_checkpoint(path, made, format, loader="moebius")
            written.append((report, {file.name: file.read_bytes() for file in made.iterdir()}))
        assert written.pop() == written.pop()
    tensors[1]["model.layers.1.mlp.experts.down_proj"][5] = np.nan
    tensors[0]["model.layers.0.mlp.experts.down_proj"][9] = np.inf
    path = write(tmp_path / "bad", config, tensors)
    with pytest.raises(InvalidInput, match=r"layers\.0\.mlp\.experts\.9\.down_proj\.weight must hold finite"):
        convert_checkpoint(path, tmp_path / "none", format_named("int4_g32"), loader="moebius")


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    config = config_of("qwen3_moe", num_experts=E, mlp_only_layers=[0, 1, 2])
    path = write(tmp_path / "source", config, {0: {"model.norm.weight": np.ones(4, np.float32)}})
    with pytest.raises(InvalidInput, match="source must have layers with experts"):
        convert_checkpoint(path, tmp_path / "small", "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32"])
def test_every_number_that_is_not_finite_is_counted(dtype: str) -> None:
    """Of all bits that numbers of 8 or 16 bits can have."""
    words = np.arange(2**16, dtype=np.uint16).reshape(2**8, 2**8)
    bits = words.astype(np.uint8) if "float8" in dtype else words
    with np.errstate(invalid="ignore"):
        array = words.view(np.float16).astype(dtype) if dtype == "float32" else bits.view(dtype)
        assert source_module.count_not_finite(array) == np.count_nonzero(~np.isfinite(array)) > 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales_of_tiny_weights_do_not_vanish(tmp_path: Path, dtype: str) -> None:
    checkpoint = open_checkpoint(source(tmp_path / "plain", "qwen3_moe", "per_expert", 1))
    target = Target.of(checkpoint, format_named("int4_g32"), dtype, "moebius")
    made = target.quantized(np.full((32, 64), 1e-9, np.float32))
    assert isinstance(made, QuantizedTensor)
    np.testing.assert_allclose(made.scales, 1e-7 if dtype == "float16" else 1e-9 / 7, rtol=0.5)
