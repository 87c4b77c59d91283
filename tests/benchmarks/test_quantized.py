"""The benchmark of quantised forwards, on a CPU and with a timer that only calls."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import moe_jax
import moe_torch
from benchmarks import quantized, quantized_peers, quantized_problem
from benchmarks.peers import INSTALL_TRITON_KERNELS
from benchmarks.problem import Problem, expected
from benchmarks.record import STREAMING_BYTES_PER_US
from benchmarks.shapes import Shape
from benchmarks.timing import KernelSpan
from moe_core.specs.matmul import Activation
from tests.support.benchmarks import RisingTimer

TINY = Shape("tiny", 128, 128, 4, 2, Activation("swiglu_oai", gate_layout="interleaved"), True)
#: With weights that are prepared, and in the published layout alone.
RUN = ("mxfp4", "fp8_block", "fp8_tensor", "int4_g32", "int4_g128_zp", "int8_channel")
PREPARED = ("mxfp4", "int4_g32", "int4_g128_zp", "int8_channel")


class Calls(RisingTimer):
    def kernels(self, function: Callable[[], Any], repeats: int = 5) -> list[list[KernelSpan]]:
        function()
        return [[KernelSpan("route", 0, 1), KernelSpan("matmul_a", 1, 5), KernelSpan("matmul_b", 4, 7)]]


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reference; JAX arrays by copy, since it refuses a CPU address that is not aligned to 64 bytes; no peer."""
    monkeypatch.setattr(quantized, "free_memory", lambda: None)
    monkeypatch.setattr(quantized, "why_not_importable", lambda peer: f"{peer.name} cannot be imported")
    monkeypatch.setattr(moe_jax, "from_dlpack", lambda array: jax.dlpack.from_dlpack(array, copy=True))
    with (
        moe_torch.cpu_engine("reference"),
        moe_jax.cpu_engine("reference"),
        jax.default_device(jax.devices("cpu")[0]),
    ):
        yield


def run(names: tuple[str, ...], *arguments: str, timer: Any = None) -> list[dict[str, Any]]:
    """The rows of some schemes of a tiny layer."""
    options = quantized.parse(["--cell-seconds", "200", *arguments])
    options.cells = [quantized.Cell(TINY, name, *quantized.SCHEMES[name]) for name in names]
    return quantized.run(options, timer or Calls(), "cpu")["rows"]


def a_peer(monkeypatch: pytest.MonkeyPatch, forward: Callable[[Problem], Callable[[], Any]] | None = None) -> None:
    """A peer in the place of upstream: fp32 arithmetic with its activation unless `forward` is given."""

    def arithmetic(problem: Problem) -> Callable[[], Any]:
        return lambda: expected(problem, slice(None), quantized_peers.UPSTREAM_ACTIVATION)

    forwards = dict.fromkeys(("mxfp4_w4a16", "fp8_tensor"), lambda experts: forward or arithmetic)
    monkeypatch.setattr(quantized_peers, "_FORWARDS", forwards)
    monkeypatch.setattr(quantized, "why_not_importable", lambda peer: None)


def wrong_static_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales by which hidden rows saturate."""
    real = quantized.with_static_scales

    def wrong(cell: quantized.Cell, experts: Any) -> Any:
        found = real(cell, experts)
        assert found is not None
        return dataclasses.replace(found, down_input_scale=found.down_input_scale / 256)

    monkeypatch.setattr(quantized, "with_static_scales", wrong)


def undescribed(rows: list[dict[str, Any]]) -> list[str]:
    text = (pathlib.Path(quantized.__file__).parent / "README.md").read_text()
    return [name for name in {name for row in rows for name in row} if f"`{name}`" not in text]


def test_a_run(tmp_path: pathlib.Path) -> None:
    output = tmp_path / "made" / "record.json"
    rows = run(RUN, "--tokens", "1,9", "--output", str(output))
    record = json.loads(output.read_text())
    assert record["rows"] == rows and [found["scheme"] for found in record["warmup"]] == list(RUN)
    assert not undescribed(rows)
    assert [row["scheme"] for row in rows] == [name for name in RUN for _ in range(2)]
    assert all(row["bitwise_torch_jax"] and row["prepared"] == (row["scheme"] in PREPARED) for row in rows)
    assert all(row["error_dequantized"] < 1e-2 for row in rows if row["scheme"] in PREPARED)
    assert all(row["dense_us"] == 1.0 and "triton_kernels_us" not in row for row in rows)
    shown = quantized.show(rows)
    assert (
        "bf16" in shown and "triton_kernels: triton_kernels cannot be imported (tiny mxfp4 1, tiny mxfp4 9, " in shown
    )
    assert "upstream (tag v3.5.1) has no products of fp8_block weights, only of mxfp4 and fp8_tensor" in shown
    found = {row["scheme"]: row for row in rows if row["tokens"] == 9}
    # Codes, and scales of 8 bits for 32 columns, or of 16 and zero points of 4 for 128.
    for name, bits, scale_dtype in (("mxfp4", 4.25, "uint8"), ("int4_g128_zp", 4 + 20 / 128, "bfloat16")):
        row = found[name]
        size = row["active_experts"] * 3 * 128 * 128 * bits / 8
        assert row["bound_streaming_us"] == pytest.approx(size / STREAMING_BYTES_PER_US)
        # The second product begins where the first one ends.
        assert (row["matmul1_us"], row["matmul2_us"], row["scale_dtype"]) == (4, 2, scale_dtype)
        assert row["matmul1_of_bound"] == pytest.approx(size * 2 / 3 / STREAMING_BYTES_PER_US / 4)


def test_red_parity_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quantized.TOLERANCES, True, 0.0)
    with pytest.raises(SystemExit, match="parity is red for tiny fp8_block 3"):
        run(("fp8_block",), "--tokens", "3")


def test_products_that_are_not_launches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one = [KernelSpan("chain_matmul_both", 0, 7)]
    reason = "each must be a launch of its own: a replay has 1 or 2 kernels of products, not 2"
    two = [KernelSpan("matmul_a", 0, 3), KernelSpan("matmul_b", 3, 7)]
    assert quantized.why_not_apart([one, two]) == reason and quantized.why_not_apart([two, two]) is None
    assert "a replay has 0 kernels" in (quantized.why_not_apart([[KernelSpan("route", 0, 1)]]) or "")
    monkeypatch.setattr(Calls, "kernels", lambda timer, function: [one])
    (row,) = run(("mxfp4",), "--tokens", "3", "--peers", "none")
    assert row["not_timed"] == {"products": reason.replace("1 or 2", "1")} and "matmul1_us" not in row
    assert row["torch_us"] == 1.0


def test_red_static_scales_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_static_scales(monkeypatch)
    (row,) = run(("fp8_tensor",), "--tokens", "3", "--peers", "none")
    assert row["not_timed"]["static_scales"].startswith("parity is red: error ") and "static_scales_us" not in row
    assert row["red_peers"] == ["static_scales"] and row["torch_us"] == 1.0


# The peer.


def test_a_peer_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    a_peer(monkeypatch)
    rows = run(("mxfp4", "fp8_tensor"), "--tokens", "1,9", "--peer-tokens", "9")
    assert not undescribed(rows)
    for small, row in (rows[:2], rows[2:]):
        assert small["not_timed"] == {"triton_kernels": "timed at 9 tokens only"}
        assert row["triton_kernels_us"] == 1.0 and not row["not_timed"]
        assert row["ratio_triton_kernels"] == 1 / len(row["by_turns_us"])
        # Its own activation is the shape's here, its arithmetic that of the check.
        assert row["peer_errors"] == {"triton_kernels": 0.0} and set(row["breakdown"]) == {"ours", "triton_kernels"}
    assert "static_scales_us" not in rows[1] and rows[3]["static_ratio_triton_kernels"] == 2 / 3
    printed = capsys.readouterr().err
    assert " s  tiny mxfp4 9: 1.0 us, triton_kernels 1.0 us, ratio 0.500\n" in printed
    assert " s  tiny mxfp4 1: 1.0 us, triton_kernels: timed at 9 tokens only\n" in printed


def test_a_peer_that_fails_loses_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem: Problem) -> Callable[[], Any]:
        raise AssertionError("a layout that this release lacks\nand a long story")

    a_peer(monkeypatch, broken)
    (row,) = run(("mxfp4",), "--tokens", "3")
    assert row["not_timed"] == {"triton_kernels": "AssertionError: a layout that this release lacks"}
    assert row["torch_us"] == 1.0 and not row["red_peers"]
    (row,) = run(("mxfp4",), "--tokens", "3", "--cell-seconds", "1e-6")
    assert row["not_timed"] == {"triton_kernels": "the time of the cell was spent"}


def test_a_peer_whose_replays_by_turns_fail_keeps_its_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounds(timer: Calls, functions: dict[str, Callable[[], Any]], seconds: float = 1.0) -> dict[str, list[float]]:
        raise TimeoutError("took longer than 1 s")

    a_peer(monkeypatch)
    monkeypatch.setattr(Calls, "rounds", rounds)
    (row,) = run(("mxfp4",), "--tokens", "3")
    assert row["triton_kernels_us"] == 1.0 and "ratio_triton_kernels" not in row
    assert row["not_timed"] == {"triton_kernels": "TimeoutError: took longer than 1 s"}


def test_red_static_scales_are_not_timed_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    a_peer(monkeypatch)
    wrong_static_scales(monkeypatch)
    (row,) = run(("fp8_tensor",), "--tokens", "3")
    assert set(row["by_turns_us"]) == {"torch", "triton_kernels"} and "static_ratio_triton_kernels" not in row


def test_a_red_peer_is_not_timed_and_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(problem: Problem) -> Callable[[], Any]:
        return lambda: 1.1 * expected(problem, slice(None), quantized_peers.UPSTREAM_ACTIVATION)

    a_peer(monkeypatch, wrong)
    rows = run(("mxfp4", "fp8_tensor"), "--tokens", "3")
    # Of rows in bf16, and of rows quantised to e4m3.
    for row, tolerance in zip(rows, ("0.02", "0.08"), strict=True):
        assert row["not_timed"]["triton_kernels"].endswith(f"is red: error 0.1, at most {tolerance} is allowed")
        assert row["red_peers"] == ["triton_kernels"] and "triton_kernels_us" not in row
    monkeypatch.setattr(quantized, "GraphTimer", Calls)
    monkeypatch.setattr(quantized, "run", lambda options, timer, device: {"rows": rows})
    assert quantized.main([]) == 1
    rows[0]["red_peers"], rows[1]["red_peers"] = [], []
    assert quantized.main([]) == 0


def upstream(name: str) -> Any:
    pytest.importorskip("triton_kernels.matmul_ogs", reason=INSTALL_TRITON_KERNELS)
    return importlib.import_module(f"triton_kernels.{name}")


def drawn(name: str) -> Any:
    """Experts whose columns and rows upstream's layouts have to fill up."""
    cell = quantized.Cell(dataclasses.replace(TINY, d_model=192), name, *quantized.SCHEMES[name])
    return quantized.draw_experts(cell, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("warps", [4, 8])
def test_upstream_decodes_our_mxfp4_codes_to_the_same_numbers(warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts, mxfp = upstream("tensor_details.layout"), upstream("numerics_details.mxfp")
    monkeypatch.setattr(layouts, "cuda_capability_geq", lambda major, minor=0: (major, minor) <= (9, 0))
    for matrix in (drawn("mxfp4").gate_up, drawn("mxfp4").down):
        values = quantized_peers.mxfp4_values(matrix)
        scales = quantized_peers.mxfp4_scales(matrix, warps)
        experts, width, columns = matrix.shape
        assert list(values.shape) == [experts, columns, width] and values.stride(-2) == scales.stride(-2) == 1
        assert (values.storage.layout.name, scales.storage.layout.name) == ("HOPPER_VALUE", "HOPPER_SCALE")
        assert scales.storage.layout.num_warps == warps
        codes = values.storage.layout.unswizzle_data(values.data)
        given = scales.storage.layout.unswizzle_data(scales.data)
        # Upstream rounds the columns of scales up; the expert more is zeros.
        assert not given[experts:].any()
        found = mxfp.upcast_from_mxfp_torch(codes, given[:experts, :, :width], torch.bfloat16, 1)
        assert torch.equal(found, moe_torch.dequantize(matrix, torch.bfloat16).mT)


def test_upstream_gets_our_fp8_codes_and_scales() -> None:
    upstream("numerics")
    experts = drawn("fp8_tensor")
    operands = quantized_peers.fp8_operands(experts, torch.bfloat16)
    first, second = operands.gate_up_precision, operands.down_precision
    pairs = ((operands.gate_up, first, experts.gate_up), (operands.down, second, experts.down))
    for weight, precision, matrix in pairs:
        scales = precision.flex_ctx.rhs_data
        # Column-major, as upstream wants e4m3 on Hopper, and a scale for each expert.
        assert weight.stride(-2) == 1 and weight.data_ptr() == matrix.values.data_ptr() and scales.is_per_batch
        found = (weight.float() * scales.scale[:, None, None]).bfloat16()
        assert torch.equal(found, moe_torch.dequantize(matrix, torch.bfloat16).mT)
    assert (first.out_dtype, second.out_dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    assert first.flex_ctx.out_data.expected_scale.item() == second.flex_ctx.lhs_data.scale.item() == 1.0
    assert operands.rows(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.float8_e4m3fn


# The command line, and the draws.


def test_the_command_line() -> None:
    options = quantized.parse(["--cells", "qwen3:mxfp4", "--tokens", "1,64"])
    assert options.tokens == (1, 64) and options.cells[0].shape.name == "qwen3" and not options.cells[0].fast_accumulate
    assert quantized.parse(["--scales", "float32"]).cells[-1].scale_dtype == "float32"
    assert options.peers == ("triton_kernels",) and options.peer_tokens is None and options.cell_seconds == 20
    first = quantized.parse(["--peers", "none", "--peer-tokens", "64"])
    assert not first.peers and first.peer_tokens == (64,)
    # What the peer has comes first, and the numbers of tokens at which the ratio decides.
    schemes = [cell.scheme for cell in first.cells]
    assert [quantized_peers.why_not_upstream(scheme) is None for scheme in schemes] == [True] * 4 + [False] * 8
    assert min(first.tokens[:3]) == 1024 and sorted(first.tokens) == [1, 16, 64, 256, 1024, 4096, 16384]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cells", "qwen3:int4"], "--cells must be of gptoss120b"),
        (["--tokens", "1,x"], "--tokens must be positive numbers with commas between them, got '1,x'"),
        (["--peer-tokens", "0"], "--peer-tokens must be positive"),
        (["--peers", "tokamax"], "--peers must be of triton_kernels, got tokamax"),
        (["--cell-seconds", "0"], "--cell-seconds must be positive, got 0.0"),
    ],
)
def test_refused_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quantized.parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", quantized_problem.INTEGERS)
def test_drawn_integers_have_the_rms_of_weights(name: str) -> None:
    cell = quantized.Cell(TINY, name, *quantized.SCHEMES[name])
    weight = quantized_problem.draw_matrix(cell, (2, 128, 256), torch.Generator().manual_seed(0))
    assert weight.format == cell.scheme.weights
    assert moe_torch.dequantize(weight).square().mean().sqrt().item() == pytest.approx(1 / 16, rel=0.1)
