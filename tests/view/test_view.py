"""Contents of pages against counts by hand, and the command."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_core.base import Target
from moe_core.errors import InvalidInput
from moe_core.layers import HUGGING_FACE, MoELayerSpec, layer_cost
from moe_core.ops.moe.backward import plan_training
from moe_core.parallel.machine import H200 as H200_HOSTS
from moe_core.plan.registry import Explanation, read_plans
from moe_core.specs import MoESpec, RouterSpec
from moe_core.specs.matmul import Activation
from moe_core.specs.operands import ExpertWeights, MoEOperands, RouterWeights
from moe_core.trace import LayerRouting, RoutingTrace
from moe_core.view import cli
from moe_core.view.page import report_page, trace_page, view_page
from moe_core.view.plan import plan_content
from moe_core.view.reading import measured_times
from moe_core.view.trace import join_steps, trace_change, trace_content
from tests.support.view import H200, REPORT, a_plan, a_trace, changed


def unpacked(packed: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["data"]), packed["dtype"]).reshape(packed["shape"])


def data_of(page: str) -> Any:
    return json.loads(page.split('type="application/json">')[1].split("</script>")[0])


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(0, 4, 2), (1, 1, 1), (37, 5, 5), (64, 384, 6)])
def test_a_trace_is_counted(tokens: int, experts: int, top_k: int) -> None:
    random = np.random.default_rng(1)
    chosen = [random.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :top_k] for _ in range(2)]
    chosen[1][random.random(chosen[1].shape) < 0.2] = -1
    weights = random.random((tokens, top_k), np.float32)
    trace = RoutingTrace(tuple(LayerRouting(ids.astype(np.int32), weights, experts) for ids in chosen))
    content = trace_content(trace, "name")
    counts, over, ids = (unpacked(content[name]) for name in ("counts", "over", "ids"))
    for layer, all_ids in enumerate(chosen):
        expected = [(all_ids == expert).sum() for expert in range(experts)]
        np.testing.assert_array_equal(counts[layer], expected)
        np.testing.assert_array_equal(over[layer].sum(0), expected)
        np.testing.assert_array_equal(ids[layer], all_ids)
        stat = content["layers"][layer]
        assert stat["dropped"] == (all_ids < 0).sum() and stat["unused"] == [i for i, n in enumerate(expected) if not n]
        if sum(expected):
            share = np.array(expected) / sum(expected)
            entropy = -sum(p * np.log(p) for p in share if p) / (np.log(experts) or 1)
            assert stat["entropy"] == pytest.approx(entropy) and 0 <= stat["entropy"] <= 1 + 1e-9
            assert stat["imbalance"] == pytest.approx(max(expected) / np.mean(expected))
            assert stat["hottest"][0] == [int(np.argmax(expected)), max(expected)]
            assert len(stat["hottest"]) == min(3, experts)
        excess = [both - both / lift for *_, both, lift in content["pairs"][layer]]
        assert excess == pytest.approx(sorted(excess, reverse=True), abs=0.1), "the largest excess first"
        for a, b, both, lift in content["pairs"][layer]:
            together = sum(a in row and b in row for row in all_ids.tolist())
            chance = expected[a] * expected[b] * (top_k - 1) / top_k / tokens
            assert (both, lift) == (together, pytest.approx(together / chance, abs=1e-3))
    for kind, row in itertools.groupby(content["placements"], lambda row: row["kind"]):
        assert all(1 <= one["imbalance"] <= one["ranks"] and one["visits"] <= top_k for one in row), kind


def test_the_change_of_two_traces() -> None:
    trace = a_trace(30)
    change = trace_change(trace, changed(trace))
    assert change is not None
    assert change["layers"] == [pytest.approx(1 / 3), 0, 0] and change["changed"] == 10
    assert [token for token, _ in change["tokens"]] == list(range(0, 30, 3))
    assert json.loads(json.dumps(change)) == change
    assert trace_change(trace, a_trace(31)) is None


def test_order_of_slots_is_no_change() -> None:
    trace = a_trace(30)
    turned = RoutingTrace(tuple(LayerRouting(one.ids[:, ::-1], one.weights[:, ::-1], one.num_experts) for one in trace))
    assert trace_change(trace, turned)["changed"] == 0  # type: ignore[index]


def test_steps_join_their_tokens() -> None:
    first, second = a_trace(5), a_trace(9, seed=1)
    joined = join_steps(RoutingTrace((*first.layers, *second.layers)), 3)
    assert len(joined) == 3
    (shown,) = data_of(trace_page([RoutingTrace((*first.layers, *second.layers))], layers_per_step=3))["traces"]
    assert unpacked(shown["ids"]).shape == (3, 14, 2)
    np.testing.assert_array_equal(joined[1].ids, np.concatenate([first[1].ids, second[1].ids]))
    with pytest.raises(InvalidInput, match="layers_per_step = 4"):
        join_steps(RoutingTrace((*first.layers, *second.layers)), 4)
    with pytest.raises(InvalidInput, match="pass layers_per_step"):
        trace_page([RoutingTrace((*first.layers, *second.layers))])


def test_placements_cost_what_the_cost_model_says() -> None:
    rows = trace_content(a_trace(200, top_k=3), "name", sizes=(64, 32), machine=H200_HOSTS)["placements"]
    assert [(row["ranks"], row["kind"]) for row in rows[:2]] == [(2, "in order"), (2, "balanced")]
    for plain, even in zip(rows[::2], rows[1::2], strict=True):
        assert even["imbalance"] <= plain["imbalance"] + 1e-9
        assert plain["bytes"] == pytest.approx(200 * (plain["visits"] + 3) * (1 - 1 / plain["ranks"]) * 64 * 2)
        assert plain["us"] > 0


@pytest.mark.parametrize("tokens", [1, 3, 64, 4096])
@pytest.mark.parametrize("target", [H200, Target("interpreter"), Target("reference")], ids=lambda target: target.kind)
def test_a_plan_is_counted(tokens: int, target: Target) -> None:
    plan = a_plan(tokens, target)
    content = plan_content(plan)
    assert len(content["steps"]) == len(plan.steps)
    if target.kind == "cuda" and tokens > 8:  # a few tokens share launches, with constants of other names
        layer = MoELayerSpec(128, 64, 8, 2)
        assert (
            sum(step["flops"] for step in content["steps"]) == layer_cost(layer, HUGGING_FACE, tokens, "bfloat16").flops
        )
    sizes = {buffer["name"]: buffer for buffer in content["buffers"]}
    for step in content["steps"]:
        assert 0 < step["bytes"] <= sum(sizes[name]["bytes"] for name in step["buffers"])
        assert (step["bound_us"] is not None) == (target.kind == "cuda")
    held = [one for one in content["buffers"] if one["home"] == "" and one["first"] is not None]
    for one, other in itertools.combinations(held, 2):
        alive = one["first"] <= other["last"] and other["first"] <= one["last"]
        apart = one["offset"] + one["bytes"] <= other["offset"] or other["offset"] + other["bytes"] <= one["offset"]
        assert apart or not alive, "the picture draws two living buffers over each other"


def test_a_backward_multiplies_twice_as_much_as_its_forward() -> None:
    """Once for the gradients of inputs and once for those of weights, of experts and of the router."""
    forward = {buffer.name: buffer.spec for buffer in a_plan(64).inputs}
    experts = ExpertWeights(forward["experts.gate_up"], forward["experts.down"])
    operands = MoEOperands(forward["x"], experts, RouterWeights(forward["routing.weight"]))
    spec = MoESpec(Activation("silu"), router=RouterSpec(2))
    flops = [sum(step["flops"] for step in plan_content(plan)["steps"]) for plan in plan_training(operands, spec, H200)]
    assert flops[0] > 0 and {one / flops[0] for one in flops[1:]} == {2}


def test_measured_times_go_to_their_launches(tmp_path: Path) -> None:
    plan, path = a_plan(64), tmp_path / "profile.json"
    launches = [step["function"] for step in plan_content(plan)["steps"]]
    events = [{"cat": "kernel", "name": name, "ts": i, "dur": 10.0 + i} for i, name in enumerate(launches)]
    path.write_text(json.dumps({"traceEvents": [*events[::-1], {"cat": "cpu_op", "name": launches[0], "dur": 1}]}))
    Explanation.of(plan).save(tmp_path / "plans.json")
    (shown,) = data_of(view_page([tmp_path / "plans.json"], profile=path))["groups"][0]["plans"]
    assert [step["measured_us"] for step in shown["steps"]] == [10.0 + i for i in range(len(launches))]
    # The plans of one call take its times in turn, and times of one call are not shown for two files.
    Explanation.of(plan, plan).save(tmp_path / "plans.json")
    first, again = data_of(view_page([tmp_path / "plans.json"], profile=path))["groups"][0]["plans"]
    taken = {step["function"]: step["measured_us"] for step in first["steps"]}
    assert len(taken) == len(launches) and all(step["measured_us"] is None for step in again["steps"])
    with pytest.raises(InvalidInput, match="measured must be of one call"):
        view_page([tmp_path / "plans.json"] * 2, profile=path)
    without_start = {"cat": "kernel", "name": launches[0], "dur": 2}
    path.write_text(json.dumps({"traceEvents": [events[0], without_start]}))
    assert measured_times(path) == {launches[0]: [10, 2]}
    path.write_text("[]")
    with pytest.raises(InvalidInput, match="profile must hold kernels"):
        view_page([tmp_path / "plans.json"], profile=path)


def test_an_explanation_is_its_text_and_saves_its_plans(tmp_path: Path) -> None:
    plan = a_plan(64)
    text = Explanation.of(plan, plan, heading=["first"])
    assert text == "\n\n".join(["first", plan.explain(), plan.explain()]) and text.plans == (plan, plan)
    text.save(tmp_path / "plans.json")
    assert read_plans(tmp_path / "plans.json") == (plan, plan)


@pytest.mark.parametrize("options", [{"profile": "x"}, {"machine": "x"}], ids=lambda options: next(iter(options)))
def test_files_and_options_that_do_not_fit(options: dict[str, Any], tmp_path: Path) -> None:
    trace, report = tmp_path / "trace.safetensors", tmp_path / "report.json"
    a_trace(4).save(trace)
    report.write_text(json.dumps(REPORT, indent=1))
    with pytest.raises(InvalidInput):
        view_page([report], **options)
    with pytest.raises(InvalidInput, match="two of one kind"):
        view_page([trace, report])
    with pytest.raises(InvalidInput, match="one string for each of the 4 tokens, got 1"):
        view_page([trace], text=["one"])
    with pytest.raises(InvalidInput, match="traces must be one or two, each with a name, got 3"):
        trace_page([a_trace(4)] * 3)
    with pytest.raises(InvalidInput, match="must be a report"):
        report_page([REPORT | {"tool": "another"}])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_trace(20).save(tmp_path / "trace.safetensors")
    (tmp_path / "text.json").write_text(json.dumps([f"t{i}" for i in range(20)]))
    arguments = [str(tmp_path / "trace.safetensors"), "--output", str(tmp_path / "page.html")]
    assert cli.main([*arguments, "--text", str(tmp_path / "text.json"), "--sizes", "64,32"]) == 0
    content = data_of((tmp_path / "page.html").read_text())
    assert content["traces"][0]["text"][3] == "t3" and "us" in content["traces"][0]["placements"][0]
    for wrong, message in ((["--sizes", "64"], "d_model,d_ff"), (["--text", arguments[0]], "JSON list of strings")):
        assert cli.main([*arguments, *wrong]) == 2
        assert message in capsys.readouterr().err
    assert cli.main([*arguments, "--profile", arguments[0]]) == 2 and "profile" in capsys.readouterr().err
    assert cli.main([arguments[0], "--output", str(tmp_path / "no" / "page.html")]) == 2
    assert cli.main([str(tmp_path / "missing"), "--output", arguments[2]]) == 2


def test_a_layer_without_weights_and_of_several_widths() -> None:
    alone = RoutingTrace(tuple(dataclasses.replace(layer, weights=None) for layer in a_trace(6)))
    assert data_of(trace_page([alone]))["traces"][0]["weights"] is None
    mixed = RoutingTrace((a_trace(6)[0], a_trace(6, experts=16, top_k=3)[0]))
    content = trace_content(mixed, "name")
    assert content["experts"] == [8, 16] and content["placements"] == []
    assert (unpacked(content["ids"])[0, :, 2] == -1).all()
    assert not trace_content(RoutingTrace((a_trace(6)[0], a_trace(6, top_k=3)[0])), "name")["placements"]
