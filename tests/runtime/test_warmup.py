"""Compiling ahead: few kernels whatever the tokens, compiled once, reported; nothing left for the first call."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_core import InvalidInput
from moe_core.base.target import Target
from moe_core.plan.steps import KernelLaunch, LaunchPlan
from moe_core.runtime import warmup as warmup_module
from moe_core.runtime.warmup import KernelReport, WarmupReport, compile_kernels, distinct_kernels, token_counts, warmup
from moe_core.specs.operands import RouterLogits, TopK
from moe_core.specs.tuning import Tuning
from moe_core.tools.tune.products import PRESETS
from tests.support.compile_gate.prepacked_plans import prepared
from tests.support.frontends import Frontend
from tests.support.frontends.small import NUM_EXPERTS, REAL_KERNELS, small_layer
from tests.support.harness import H200
from tests.support.moe import layer_plan
from tests.support.paths import ROOT

#: Every regime of the heuristics, and sizes that are no power of two.
TOKENS = (0, 1, 2, 3, 7, 16, 33, 64, 100, 128, 200, 256, 500, 1000, 1024, 3000, 4096, 10000, 16384, 65536)
#: What a first call may compile, and what all numbers of tokens together may. A compilation takes about a second on one
#: core, so the first bounds the first call and the second a warm-up for every batch there is.
MOST_PER_CALL, MOST_EVER = 12, 46

COMPILE = """
import json, sys
from moe_core.runtime.warmup import warmup
from tests.support.harness import H200
from tests.support.moe import layer_plan
plans = [layer_plan(None, tokens, H200) for tokens in (1, 2)]
reports = [warmup(plans, ()), warmup(plans, ())]
print(json.dumps([[(k.kernel, k.tile, k.seconds, k.cached) for k in report.kernels] for report in reports]))
print(reports[0], file=sys.stderr)
"""


def compile_in_a_process(cache: Path) -> tuple[list[list[Any]], str]:
    """The kernels of two warm-ups of one process that compiles (Triton has one mode per process), and the report."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_kernels_are_compiled_once_and_reported(tmp_path: Path) -> None:
    (first, second), text = compile_in_a_process(tmp_path)
    plans = [layer_plan(None, tokens, H200) for tokens in (1, 2)]
    assert [kernel for kernel, *_ in first] == [launch.kernel.name for _, launch in distinct_kernels(plans)]
    assert all(seconds > 0 and not cached for *_, seconds, cached in first)
    assert all(cached for *_, cached in second), "the same process"
    assert f"{len(first)} kernels, {len(first)} compiled" in text
    (third, _), text = compile_in_a_process(tmp_path)
    assert all(cached for *_, cached in third), "Triton's cache on disk"
    assert f"0 compiled (0.00 s of work), {len(first)} existed" in text


@pytest.mark.parametrize("tuning", [None, Tuning(batch_invariant=True)], ids=["heuristics", "batch_invariant"])
def test_few_kernels_serve_every_number_of_tokens(tuning: Tuning | None) -> None:
    plans = [layer_plan(tuning, tokens, H200) for tokens in TOKENS]
    assert max(len(distinct_kernels([plan])) for plan in plans) <= MOST_PER_CALL
    assert len(distinct_kernels(plans)) <= MOST_EVER


def test_the_number_of_tokens_is_compiled_into_nothing() -> None:
    """Counts that get the same tiles share every kernel."""
    plans = [layer_plan(Tuning(batch_invariant=True), tokens, H200) for tokens in range(300, 400)]
    assert len(distinct_kernels(plans)) == len(distinct_kernels(plans[:1]))


def test_kernels_of_prepacked_weights_are_found() -> None:
    plans = list(prepared(H200))
    launches = [step for plan in plans for step in plan.steps if isinstance(step, KernelLaunch)]
    assert any(launch.kernel.prepacked_weight for launch in launches)
    assert {launch.kernel.name for _, launch in distinct_kernels(plans)} == {launch.kernel.name for launch in launches}


def test_kernels_are_imported_before_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one thread: in a process that has not imported Triton, several at once found it half imported."""
    kernels, seen = distinct_kernels([layer_plan(None, 4096, H200)]), []

    def compiled(plan: LaunchPlan, launch: KernelLaunch) -> KernelReport:
        seen.append(("compiled", launch.kernel.name))
        return KernelReport(launch.kernel.name, "", 0.0, True)

    monkeypatch.setattr(warmup_module, "_compile", compiled)
    monkeypatch.setattr(warmup_module, "load_kernel", lambda name: seen.append((threading.current_thread().name, name)))
    assert len(compile_kernels(kernels, workers=3)) == len(kernels)
    names = list(dict.fromkeys(launch.kernel.name for _, launch in kernels))
    assert seen[: len(names)] == [(threading.current_thread().name, name) for name in names]
    assert {kind for kind, _ in seen[len(names) :]} == {"compiled"}


def test_plans_for_a_cpu_are_made_ready() -> None:
    target = Target("reference")
    report = warmup([layer_plan(None, tokens, target, "float32") for tokens in (1, 5)])
    assert report.kernels == () and report.plans == 2 and report.seconds >= 0
    assert "2 plans ready" in str(report) and "0 kernels" in str(report)


def test_nothing_to_do() -> None:
    assert warmup([]).plans == 0


def test_one_target_at_a_time() -> None:
    plans = [layer_plan(None, 3, Target(kind), "float32") for kind in ("reference", "interpreter")]
    with pytest.raises(InvalidInput, match="plans must be for one target, got interpreter, reference"):
        warmup(plans)


@pytest.mark.parametrize("tokens", [(), 5, "16", [1, -1], [1.5], [True], None])
def test_wrong_token_counts(tokens: Any) -> None:
    with pytest.raises(InvalidInput, match="tokens must be"):
        token_counts(tokens)
    assert token_counts([4, 1, 4]) == (4, 1)


def test_a_report_tells_new_kernels_from_others() -> None:
    old, new = KernelReport("a", "", 0.25, True), KernelReport("b", "", 1.5, False)
    report = WarmupReport((old, new), 2.0, 3)
    assert report.compiled == (new,)
    assert str(report).startswith("3 plans ready after 2.00 s: 2 kernels, 1 compiled (1.50 s of work), 1 existed\n")


@pytest.mark.parametrize("routed_from", ["x", "logits", "ids"])
def test_front_ends(frontend: Frontend, routed_from: str) -> None:
    """The kernels of given arrays for other numbers of tokens; a call afterwards compiles none."""
    layer = small_layer()
    tokens, spec, routing = len(layer.x), layer.spec, layer.routing
    if routed_from == "logits":
        routing = RouterLogits(np.ones((tokens, NUM_EXPERTS), np.float32))
    if routed_from == "ids":
        routing = TopK(np.zeros((tokens, 2), np.int32), np.ones((tokens, 2), np.float32))
        spec = dataclasses.replace(spec, router=None)
    with frontend.running_on(REAL_KERNELS):
        *arrays, mask = frontend.arrays((layer.x, layer.experts, routing, np.ones(tokens, bool)))
        counts = [1, 4, tokens]
        report = frontend.ops.warmup(*arrays, spec, tokens=counts, token_mask=mask)
        assert report.plans == 3 and bool(report.kernels) == (REAL_KERNELS == "cuda"), report
        assert not frontend.ops.warmup(*arrays, spec, tokens=counts, token_mask=mask).compiled
        assert frontend.ops.moe(*arrays, spec, token_mask=mask).output.shape == layer.x.shape


#: Plans of a training step by capacity factor: the forward that keeps, its backward for the output's gradient alone and
#: with the losses', or the backwards of operator, routing and router.
STEPS = {None: 3, 1.0: 4}


def _explains_a_step(forward: str, step: str, factor: float | None) -> None:
    assert "moe_backward on " not in forward and "saved." not in forward
    assert "moe_backward on " in step and "saved.pre_activation" in step and "d_experts.down" in step
    assert ("router_backward on " in step) == (factor is not None)


def test_training_of_given_arrays(frontend: Frontend) -> None:
    """Plans of a training step beside those of a forward; with recompute the backward runs matmul 1."""
    layer, ops = small_layer(), frontend.ops
    with frontend.running_on(REAL_KERNELS):
        arrays, spec = frontend.arrays(tuple(layer[:3])), layer.spec
        assert ops.warmup(*arrays, spec, tokens=[1, 4], training=True).plans == 8
        text = ops.explain_moe(*arrays, spec, training=True)
        again = ops.explain_moe(*arrays, dataclasses.replace(spec, recompute=True), training=True)
        _explains_a_step(ops.explain_moe(*arrays, spec), text, None)
    assert "gradients.logits" in text and "scratch pre_activation" not in text
    assert "saved.pre_activation" not in again and "scratch pre_activation" in again


def test_torch_layers() -> None:
    pytest.importorskip("torch")
    import moe_torch
    from tests.support.torch import running_on

    with running_on(REAL_KERNELS) as device:
        for factor, plans in ((None, 2), (1.0, 8)):
            spec = moe_torch.MoELayerSpec(16, 8, 4, 2, capacity_factor=factor)
            layer = moe_torch.MoE.from_spec(spec, device=device)
            report = layer.warmup([1, 64])
            assert report.plans == plans
            assert bool(report.kernels) == (REAL_KERNELS == "cuda")
            assert layer.warmup([1, 64], training=True).plans == plans + 2 * STEPS[factor]
            _explains_a_step(layer.explain(5), layer.explain(5, training=True), factor)
        with pytest.raises(InvalidInput, match="tokens must be"):
            moe_torch.MoE.from_spec(spec, device=device).warmup([])


def test_flax_layers() -> None:
    pytest.importorskip("flax")
    from flax import nnx

    from moe_jax import linen
    from moe_jax import nnx as moebius_nnx
    from tests.support.jax import running_on

    with running_on(REAL_KERNELS):
        for factor, plans in ((None, 2), (1.0, 8)):
            options: dict[str, Any] = {"capacity_factor": factor}
            layer = moebius_nnx.MoE(16, 8, 4, 2, rngs=nnx.Rngs(0), **options)
            other = linen.MoE(16, 8, 4, 2, **options)
            for one in (layer, other):
                assert one.warmup([1, 64]).plans == plans
                assert one.warmup([1, 64], training=True).plans == plans + 2 * STEPS[factor]
                _explains_a_step(one.explain(5), one.explain(5, training=True), factor)


def test_jax_shapes_in_the_place_of_arrays() -> None:
    jax = pytest.importorskip("jax")
    pytest.importorskip("jax_tvm_ffi")
    import jax.numpy as jnp

    import moe_jax
    from tests.support.jax import running_on

    layer = small_layer()
    x, experts, routing = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, jnp.float32), tuple(layer[:3]))
    with running_on("reference"):
        assert moe_jax.warmup(x, experts, routing, layer.spec, tokens=[3]).plans == 1
        with pytest.raises(InvalidInput, match=r"must be a jax\.Array"):
            moe_jax.warmup([1.0], experts, routing, layer.spec, tokens=[3])  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_first_call_after_a_warm_up_compiles_nothing() -> None:
    """And a CUDA graph can be captured without a call before it."""
    torch = pytest.importorskip("torch")
    import moe_torch
    from moe_core.runtime import compiler

    layer = moe_torch.MoE.from_spec(PRESETS["qwen3-30b-a3b"], device="cuda", dtype=torch.bfloat16)
    layer.requires_grad_(False)
    report = layer.warmup([1, 64, 4096])
    assert report.kernels
    before = compiler._compile.cache_info().misses
    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, layer(x))
    assert compiler._compile.cache_info().misses == before
