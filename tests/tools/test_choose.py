"""moebius-choose: bytes, times and choices, and the tables of the page that come from records."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import choosing
from benchmarks.shapes import ALL_SHAPES
from moe_core.errors import InvalidInput, Unsupported
from moe_core.tools.choose import estimate
from moe_core.tools.choose.cli import main
from moe_core.tools.choose.estimate import choose_parallelism, measured, time_alone
from moe_core.tools.choose.models import FORMATS, GPUS, MODELS, gpu_named, model_named

QWEN3, H200 = MODELS["qwen3-30b-a3b"], GPUS["h200"]


def test_the_files_are_made_from_the_records() -> None:
    assert json.loads(choosing.MEASURED.read_text()) == choosing.cells(), "run python -m benchmarks.choosing"
    text = choosing.PAGE.read_text()
    assert choosing.with_tables(text) == text, "run python -m benchmarks.choosing"
    with pytest.raises(ValueError, match="one table 'weights', got 0"):
        choosing.with_tables("no markers")


def test_models_have_the_sizes_of_the_benchmarks() -> None:
    for model in MODELS.values():
        if model.shape in ALL_SHAPES:
            shape, layer = ALL_SHAPES[model.shape], model.layer
            assert (layer.d_model, layer.d_ff, layer.num_experts, layer.top_k) == (
                shape.d_model, shape.d_ff, shape.num_experts, shape.top_k,
            )  # fmt: skip
            assert layer.experts.bias == shape.biased
        # Experts are most of a model, and the card's number holds them all.
        assert 0.85 * 2e9 * model.billions < model.expert_bytes("bf16") < 2e9 * model.billions


def test_bytes() -> None:
    values = 48 * 128 * 3 * 2048 * 768
    assert QWEN3.expert_bytes("bf16") == 2 * values
    assert QWEN3.expert_bytes("mxfp4") == values // 2 + values // 32
    assert QWEN3.expert_bytes("int4_g128") == values // 2 + 4 * values // 128
    assert QWEN3.dense_bytes == round(2e9 * 30.53) - 2 * values
    one, two = (choose_parallelism(QWEN3, H200, gpus, 64, format="bf16")[0] for gpus in (1, 2))
    assert one.weights == 2 * values + QWEN3.dense_bytes and two.weights == values + QWEN3.dense_bytes
    trained = choose_parallelism(MODELS["olmoe-7b"], H200, 8, 8 * 16384, training=True)[0]
    # 16 bytes for each of its parameters over 8 GPUs, and what a step saves.
    assert 6.92e9 * 2 < trained.spent < 6.92e9 * 2 + 16 * 16384 * (2 * 2048 + 4 * 64 + 16 * 8) + 2 * 2 * 403e6


def test_times_come_from_records_first() -> None:
    known = measured()["h200", "qwen3", "mxfp4"]
    for tokens, (us, record) in known.items():
        assert time_alone(QWEN3, H200, "mxfp4", tokens) == (us, "measured") and record.endswith(".json")
    low, high = sorted(known)[:2]
    between = time_alone(QWEN3, H200, "mxfp4", low + 1)
    assert between.source == "between records" and known[low][0] <= between.us <= known[high][0]
    assert time_alone(QWEN3, GPUS["a100"], "mxfp4", low).source == "predicted"


def test_predictions_are_near_records_of_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """H100's times, predicted from its data sheet and H200's records; docs/user/choosing.md states the range."""
    known, ratios = measured(), []
    alone = {key: times for key, times in known.items() if key[0] != "h100"}
    monkeypatch.setattr(estimate, "measured", lambda: alone)
    for (gpu, shape, kind), times in known.items():
        model = next((model for model in MODELS.values() if model.shape == shape), None)
        if gpu == "h100" and model is not None:
            ratios += [time_alone(model, GPUS[gpu], kind, tokens).us / us for tokens, (us, _) in times.items()]
    assert len(ratios) == 9 and min(ratios) > 0.81 and max(ratios) < 1.13
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times" in choosing.PAGE.read_text()


def test_the_published_format_comes_first_where_it_fits() -> None:
    options = choose_parallelism(QWEN3, H200, 1, 64)
    assert options[0].format == "bf16" and sorted(one.format for one in options) == sorted(FORMATS)
    rates = [one.tokens_per_second for one in options[1:]]
    assert rates == sorted(rates, reverse=True) and rates[0] > options[0].tokens_per_second
    small = choose_parallelism(MODELS["qwen3-next-80b-a3b"], H200, 1, 64)
    assert small[0].format != "bf16" and small[0].why_not is None
    assert "needs 176 GB, and 127 GB are usable" in [one.why_not for one in small]
    assert all(one.why_not for one in choose_parallelism(MODELS["deepseek-v3"], H200, 1, 64))
    # 2880 is no multiple of 128.
    (option,) = choose_parallelism(MODELS["gpt-oss-20b"], H200, 1, 64, format="int4_g128")
    assert option.time is None and "128" in str(option.why_not)


def test_experts_are_shared_out_where_that_is_faster() -> None:
    shared, pairs, copies = choose_parallelism(QWEN3, H200, 4, 256, format="bf16")
    assert [one.experts for one in (shared, pairs, copies)] == [4, 2, 1]
    assert shared.parallel == "experts over 4 GPUs" and copies.parallel == "4 copies"
    assert pairs.parallel == "experts over 2 GPUs, 2 copies" and shared.assumed == ("uniform routing",)
    assert shared.weights < pairs.weights < copies.weights and copies.spent == copies.weights < 4 * shared.spent
    assert shared.time is not None and shared.time.source == "predicted" and shared.weights < copies.weights
    assert (
        choose_parallelism(MODELS["olmoe-7b"], H200, 2, 32768, training=True)[0].parallel == "experts sharded by FSDP"
    )


def test_experts_and_copies_over_hosts() -> None:
    """All numbers of GPUs that divide 16 may share mixtral's 8 experts, but not 16, and the network is named."""
    options = choose_parallelism(MODELS["mixtral-8x7b"], H200, 16, 1024, format="bf16")
    assert sorted(one.experts for one in options) == [1, 2, 4, 8] and options[0].experts == 8
    assert {one.mode for one in options if one.experts > 1} == {"peer"}, "a group of 8 is one host"
    far = {one.experts: one for one in choose_parallelism(MODELS["deepseek-v3"], H200, 128, 2**19, training=True)}
    assert far[32].mode == "all_to_all" and "unmeasured network" in " ".join(far[32].assumed)
    assert far[32].parallel == "experts over 32 GPUs, sharded over 4 by FSDP" and max(far) == 128
    # FSDP gathers a layer's experts of a group for each of its products; one group gathers nothing.
    assert far[16].time.us > far[64].time.us  # type: ignore[union-attr]
    experts = MODELS["deepseek-v3"].expert_bytes("bf16") // 58
    kept = [far[size].spent - 8 * far[size].weights for size in (32, 64, 128)]
    assert kept[0] - kept[1] == pytest.approx(experts * 2 / 64, rel=0.2) and kept[1] > kept[2]


LAUNCHED = {
    "torchrun": "    torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500 --nproc-per-node 8 SC",
    "slurm": "    srun --nodes 2 --ntasks-per-node 1 --gpus-per-node 8 torchrun --nnodes 2 --rdzv-backend c10d ",
}


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_lines_for_several_hosts(launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["qwen3-30b-a3b", "--gpus", "16", "--tokens", "262144", "--training", "--launcher", launcher]) == 0
    text = capsys.readouterr().out
    assert LAUNCHED[launcher] in text and "assumed: uniform routing" in text
    best = choose_parallelism(QWEN3, H200, 16, 262144, training=True)[0]
    assert f"mesh = init_device_mesh('cuda', ({16 // best.experts}, {best.experts}), " in text and best.experts > 1
    assert "gradients='mean'" in text and "fully_shard(layer.experts, mesh=mesh['efsdp'])" in text


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    path = tmp_path / "options.json"
    assert main(["gpt-oss-120b", "--gpus", "2", "--tokens", "128", "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert (
        text.startswith("gpt-oss-120b on 2 x h200, serving, 128 tokens a step\n") and "run mxfp4, experts over" in text
    )
    assert "moebius-convert" not in text.partition("run ")[2] and "torchrun --nproc-per-node 2 SCRIPT" in text
    assert json.loads(path.read_text())[0]["format"] == "mxfp4"
    assert main(["qwen3-30b-a3b", "--format", "int4_g128"]) == 0
    assert "moebius-convert SOURCE DESTINATION --format int4_g128" in capsys.readouterr().out
    assert main(["olmoe-7b", "--training", "--tokens", "4096"]) == 0
    assert "moe_torch.transformers.use(model, recompute=True)" in capsys.readouterr().out
    assert main(["deepseek-v3"]) == 3 and "nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama"], "model must be one of .*qwen3-30b-a3b"),
        (["olmoe-7b", "--gpu", "v100"], "gpu must be one of h200, h100, a100"),
        (["olmoe-7b", "--gpu", "B200"], "got 'b200'; SonicMoE trains and FlashInfer serves"),
        (["olmoe-7b", "--gpu", "mi300x"], "run on AMD GPUs"),
        (["olmoe-7b", "--gpus", "9"], "gpus must be at most 8, or whole hosts of 8, got 9"),
        (["olmoe-7b", "--tokens", "0"], "tokens must be"),
        (["olmoe-7b", "--gpus", "2", "--tokens", "63"], "tokens must divide by gpus = 2, got 63"),
        (["olmoe-7b", "--format", "int3"], "format must be one of bf16"),
        (["olmoe-7b", "--training", "--format", "mxfp4"], "format must be bf16 in training"),
    ],
)
def test_what_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    import re

    assert main(arguments) == 2
    assert re.search(message, capsys.readouterr().err)


def test_names_in_any_case() -> None:
    assert model_named("Qwen3-30B-A3B") is QWEN3 and gpu_named("H200") is H200
    with pytest.raises(InvalidInput):
        model_named("x")
    with pytest.raises(Unsupported):
        gpu_named("tpu")
