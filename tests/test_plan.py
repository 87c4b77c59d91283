"""Plans: building, keys, the registry, export and explanation."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shapes import SHAPES
from moe_core import codec, plan
from moe_core.arena import SCRATCH_ALIGNMENT, aligned, place_buffers
from moe_core.arrays import ArraySpec
from moe_core.errors import InvalidInput
from moe_core.moe_backward import gradient_names, plan_moe_backward
from moe_core.operands import ExpertWeights, MoEOperands, OutputGradients, RouterWeights
from moe_core.plan import Constant, KernelLaunch, LaunchPlan, PlanBuilder, Pointer, ReferenceCall, Scalar
from moe_core.specs import Activation, LayoutSpec, MoESpec, RouterSpec
from moe_core.target import Target

CUDA = Target("cuda", 90, 132)


def small_plan(block: int = 64, tokens: int = 10, target: Target = CUDA, warps: int = 4) -> LaunchPlan:
    builder = PlanBuilder("double", target)
    builder.input("x", ArraySpec((tokens, 3), "bfloat16"))
    builder.output("y", ArraySpec((tokens, 3), "float32"))
    builder.scratch("partial", ArraySpec((tokens,), "float32"))
    builder.scratch("counts", ArraySpec((7,), "int32"))
    arguments = {
        "x_pointer": Pointer("x"),
        "y_pointer": Pointer("y"),
        "partial_pointer": Pointer("partial"),
        "num_tokens": Scalar(tokens),
        "scale": Scalar(0.1, "float32"),
        "BLOCK": Constant(block),
        "bias_pointer": Constant(None),
    }
    builder.launch("example:double", (-(-tokens // block), 2), arguments, num_warps=warps)
    builder.sums("y: ascending columns, one tile")
    builder.note("split-K rejected: one tile holds the reduction")
    return builder.build()


def test_equal_plans_have_equal_keys_in_every_process() -> None:
    script = "from tests.test_plan import small_plan; print(small_plan().key)"
    keys = {small_plan().key}
    for seed in ("0", "1"):
        printed = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=pathlib.Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        keys.add(printed.strip())
    assert len(keys) == 1
    assert len(keys.pop()) <= plan.KEY_LENGTH == 7


def test_whatever_changes_a_plan_changes_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    first = small_plan()
    plans = [
        first,
        small_plan(block=32),
        small_plan(tokens=11),
        small_plan(warps=8),
        small_plan(target=Target("cuda", 90, 114)),
        small_plan(target=Target("interpreter")),
        dataclasses.replace(first, name="triple"),
        dataclasses.replace(first, summation=("y: descending columns",)),
        dataclasses.replace(first, notes=()),
        dataclasses.replace(first, scratch=()),
    ]
    keys = [changed.key for changed in plans]
    monkeypatch.setattr(plan, "sources_version", lambda: "other sources")
    keys.append(small_plan().key)
    assert len(set(keys)) == len(plans) + 1


def test_constants_of_different_types_differ() -> None:
    values = (1, 1.0, True, "1", None, -0.0, 0.0)
    texts = {codec.dumps(Constant(value)) for value in values}
    assert len(texts) == len(values)
    for value in values:
        again = codec.loads(codec.dumps(Constant(value))).value
        assert (type(again), repr(again)) == (type(value), repr(value))


def test_sources_version_follows_kernels_and_reference(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "__file__", str(tmp_path / "plan.py"))
    versions = []
    for path, text in (("kernels/a.py", "1"), ("reference/a.py", "1"), ("kernels/a.py", "2"), ("kernels/b.py", "")):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
        versions.append(plan.sources_version.__wrapped__())
    (tmp_path / "other.py").write_text("decides nothing")
    assert plan.sources_version.__wrapped__() == versions[-1]
    assert len(set(versions)) == len(versions)


def test_equality_and_hash_follow_the_content() -> None:
    assert small_plan() == small_plan() and small_plan() is not small_plan()
    assert len({small_plan(), small_plan(), small_plan(block=32)}) == 2
    assert small_plan() != "a plan"


def test_scratch_is_shared_by_buffers_of_different_times() -> None:
    assert place_buffers([("a", 512), ("b", 256), ("c", 256)], [("a", "b"), ("b", "c")]) == (0, 512, 0)
    # One that no step names counts as the first step's.
    sizes = [("a", 100), ("b", 600), ("c", 300), ("d", 5), ("unused", 700)]
    assert place_buffers(sizes, [("b",), ("b", "c"), ("a", "c"), ("a", "d")]) == (0, 0, 768, 256, 768)
    assert place_buffers([], []) == ()


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_buffers_needed_at_one_time_never_overlap(drawn: list[tuple[int, int, int]]) -> None:
    sizes = [(str(index), size) for index, (size, _, _) in enumerate(drawn)]
    spans = [tuple(sorted(span)) for _, *span in drawn]
    steps = [[str(i) for i, (first, last) in enumerate(spans) if step in (first, last)] for step in range(10)]
    offsets = place_buffers(sizes, steps)
    assert all(offset % SCRATCH_ALIGNMENT == 0 for offset in offsets)
    for i, j in itertools.combinations(range(len(drawn)), 2):
        together = spans[i][0] <= spans[j][1] and spans[j][0] <= spans[i][1]
        if together and sizes[i][1] and sizes[j][1]:
            assert offsets[i] + sizes[i][1] <= offsets[j] or offsets[j] + sizes[j][1] <= offsets[i]
    most = sum(aligned(size) for _, size in sizes)
    assert all(offset + size <= most for offset, (_, size) in zip(offsets, sizes, strict=True))


@pytest.mark.parametrize(
    ("model", "recompute", "most"),
    [("qwen3", False, 897), ("qwen3", True, 1153), ("gptoss120b", False, 1441), ("mixtral", False, 3585)],
)
def test_scratch_of_a_backward(model: str, recompute: bool, most: int) -> None:
    """MiB for 16384 tokens: no more than the step that needs most (docs/training.md)."""
    shape = SHAPES[model]
    d, f, e, k = shape.d_model, shape.d_ff, shape.num_experts, shape.top_k
    x = ArraySpec((16384, d), "bfloat16")
    experts = ExpertWeights(ArraySpec((e, 2 * f, d), "bfloat16"), ArraySpec((e, d, f), "bfloat16"))
    operands = MoEOperands(x, experts, RouterWeights(ArraySpec((e, d), "bfloat16")))
    layouts = {"weight_layout": "out_in", "router_weight_layout": "out_in"}
    spec = MoESpec(Activation("silu"), RouterSpec(k), **layouts, recompute=recompute)
    wanted = gradient_names(operands)
    made = plan_moe_backward(OutputGradients(x), operands, spec, CUDA, wanted=wanted)
    assert made.scratch_bytes < most * 2**20


def test_builder_collects_buffers_and_steps() -> None:
    made = small_plan()
    assert [buffer.name for buffer in made.inputs] == ["x"]
    assert made.spec("partial") == ArraySpec((10,), "float32")
    assert made.scratch_offsets == (0, 256)
    assert made.scratch_bytes == 512
    (step,) = made.steps
    assert isinstance(step, KernelLaunch)
    assert (step.kernel, step.grid) == ("example:double", (1, 2, 1))
    with pytest.raises(KeyError, match="absent"):
        made.spec("absent")


def test_empty_grids_are_dropped() -> None:
    assert small_plan(tokens=0).steps == ()


def test_builder_refuses_what_it_was_not_told() -> None:
    builder = PlanBuilder("wrong", CUDA)
    builder.input("x", ArraySpec((1,), "int32"))
    with pytest.raises(AssertionError, match="x is declared twice"):
        builder.scratch("x", ArraySpec((1,), "int32"))
    with pytest.raises(AssertionError, match="unknown buffer"):
        builder.launch("example:double", (1,), {"pointer": Pointer("z")})
    with pytest.raises(AssertionError, match="unknown buffer z"):
        builder.reference("example:double", {"x": "x"}, {}, ["z"])


def test_call_inlines_a_plan() -> None:
    inner = small_plan()
    builder = PlanBuilder("outer", CUDA)
    builder.input("a", ArraySpec((10, 3), "bfloat16"))
    builder.output("b", ArraySpec((10, 3), "float32"))
    builder.call(inner, "first", {"x": "a"})
    builder.call(inner, "second", {"x": "a", "y": "b"})
    made = builder.build()
    names = [buffer.name for buffer in made.scratch]
    assert names == ["first.y", "first.partial", "first.counts", "second.partial", "second.counts"]
    first, second = (dict(step.arguments) for step in made.steps if isinstance(step, KernelLaunch))
    assert (first["x_pointer"], first["y_pointer"]) == (Pointer("a"), Pointer("first.y"))
    assert (second["y_pointer"], second["partial_pointer"]) == (Pointer("b"), Pointer("second.partial"))
    assert second["BLOCK"] == Constant(64)
    assert made.summation == ("first: y: ascending columns, one tile", "second: y: ascending columns, one tile")


def test_call_refuses_other_targets_missing_inputs_and_unknown_names() -> None:
    builder = PlanBuilder("outer", CUDA)
    builder.input("a", ArraySpec((10, 3), "bfloat16"))
    with pytest.raises(AssertionError):
        builder.call(small_plan(target=Target("reference")), "first", {"x": "a"})
    with pytest.raises(AssertionError, match="input x is not bound"):
        builder.call(small_plan(), "second", {})
    with pytest.raises(AssertionError, match="no buffers of double"):
        builder.call(small_plan(), "third", {"x": "a", "w": "a"})
    with pytest.raises(AssertionError):
        builder.call(small_plan(tokens=11), "fourth", {"x": "a"})


def test_call_renames_reference_steps() -> None:
    target = Target("reference")
    inner = PlanBuilder("inner", target)
    inner.input("x", ArraySpec((2,), "float32"))
    inner.output("y", ArraySpec((2,), "float32"))
    inner.reference("activation:activation", {"x": "x"}, {"activation": Activation("silu", gated=False)}, ["y"])
    outer = PlanBuilder("outer", target)
    outer.input("a", ArraySpec((2,), "float32"))
    outer.output("b", ArraySpec((2,), "float32"))
    outer.call(inner.build(), "stage", {"x": "a", "y": "b"})
    (step,) = outer.build().steps
    assert isinstance(step, ReferenceCall)
    assert (step.inputs, step.outputs) == ((("x", "a"),), ("b",))
    assert dict(step.constants)["activation"].name == "silu"


def test_explain_names_everything() -> None:
    made = small_plan()
    assert made.explain().splitlines() == [
        f"double on cuda sm_90 (132 SMs), key {made.key}, scratch 512 bytes",
        "  input   x: bfloat16[10, 3]",
        "  output  y: float32[10, 3]",
        "  scratch partial: float32[10]",
        "  scratch counts: int32[7]",
        "  step 0  example:double grid 1x2x1, 4 warps, 3 stages; BLOCK=64, bias_pointer=None",
        "  sums    y: ascending columns, one tile",
        "  note    split-K rejected: one tile holds the reduction",
    ]


def test_stages_are_those_of_a_kernel_that_pipelines_by_itself() -> None:
    own = KernelLaunch("example:double", (1, 1, 1), (("STAGES", Constant(4)),), 4, 1)
    others = (KernelLaunch("example:double", (1, 1, 1), given, 4, 2) for given in ((), (("STAGES", Constant(None)),)))
    assert [launch.pipeline_stages for launch in (own, *others)] == [4, 2, 2]


def test_explain_names_the_reference() -> None:
    builder = PlanBuilder("stage", Target("reference"))
    builder.input("x", ArraySpec((2, 4), "float32", (1, 2)))
    builder.output("y", ArraySpec((2, 4), "float32"))
    builder.reference("activation:activation", {"x": "x"}, {}, ["y"])
    text = builder.build().explain()
    assert "  step 0  NumPy reference activation:activation" in text
    assert "  input   x: float32[2, 4] strides (1, 2)" in text


def test_register_and_lookup() -> None:
    made = small_plan(block=16)
    assert plan.register(made) == made.key
    assert plan.register(small_plan(block=16)) == made.key
    assert plan.lookup(made.key) is made


def test_an_unknown_key_names_the_fix() -> None:
    with pytest.raises(InvalidInput) as caught:
        plan.lookup("absent!")
    assert str(caught.value) == (
        "plan key must be registered in this process, got 'absent!'; call moe_core.plan.load_plans(path) on a file "
        "written by export_plans in the process that made the program"
    )


def test_a_taken_key_raises() -> None:
    first, second = small_plan(block=8), small_plan(block=4)
    plan.register(first)
    # Two plans with one truncated hash: too rare to find, so the second is told its key.
    second.__dict__["key"] = first.key
    with pytest.raises(RuntimeError, match=f"plan key {first.key} is taken by 'double'"):
        plan.register(second)
    assert plan.lookup(first.key) is first


def test_export_and_load_in_another_process(tmp_path: pathlib.Path) -> None:
    made = small_plan(tokens=23)
    path = tmp_path / "plans.json"
    assert plan.export_plans(path, [plan.register(made)]) == (made.key,)
    script = (
        "from moe_core import plan, specs; "
        f"(key,) = plan.load_plans({str(path)!r}); assert key == {made.key!r}; print(plan.lookup(key).explain())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script],
        cwd=pathlib.Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.strip() == made.explain()


def test_export_takes_everything_by_default_and_refuses_unknown_keys(tmp_path: pathlib.Path) -> None:
    made = small_plan(tokens=29)
    plan.register(made)
    assert made.key in plan.export_plans(tmp_path / "all.json")
    assert made.key in plan.load_plans(tmp_path / "all.json")
    with pytest.raises(InvalidInput, match="got 'nothing'"):
        plan.export_plans(tmp_path / "none.json", ["nothing"])


def test_plans_of_other_kernels_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plans.json"
    plan.export_plans(path, [plan.register(small_plan())])
    version, _, plans = json.loads(path.read_text())
    path.write_text(json.dumps([version, "0123456789abcdef", plans]))
    with pytest.raises(InvalidInput, match=r"path must hold plans of this version .* got 0123456789ab; export the"):
        plan.load_plans(path)
    path.write_text(json.dumps([version + 1, plan.sources_version(), plans]))
    with pytest.raises(InvalidInput, match="path must hold plans of this version"):
        plan.load_plans(path)
    # What another version wrote need not be known here, neither its types nor their fields.
    for others in ([{"type": "Unheard"}], [plans[0] | {"unheard": 1}], [{**plans[0], "target": {"kind": "cuda"}}]):
        path.write_text(json.dumps([version, "0123456789abcdef", others]))
        with pytest.raises(InvalidInput, match="path must hold plans of this version"):
            plan.load_plans(path)


def test_plans_with_other_fields_are_refused(tmp_path: pathlib.Path) -> None:
    """Same kernels, but the classes that carry the plan have changed: no field is dropped and none gets a default."""
    path = tmp_path / "plans.json"
    plan.export_plans(path, [plan.register(small_plan())])
    version, sources, (made,) = json.loads(path.read_text())
    more, fewer = made | {"unheard": 1}, {name: value for name, value in made.items() if name != "notes"}
    for changed, got in ((more, "target, unheard"), (fewer, "inputs, name, outputs")):
        path.write_text(json.dumps([version, sources, [changed]]))
        with pytest.raises(InvalidInput, match=rf"must give LaunchPlan the fields inputs, .*, got .*{got}.*; load it"):
            plan.load_plans(path)


@pytest.mark.parametrize("content", [b"", b"{", b"7", b"null", b"[1, 2]", b'"text"', b"\xff\xfe\x00"])
def test_files_that_hold_no_plans_are_refused(content: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plans.json"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"path must be a file written by export_plans, got .*plans\.json.*; export"):
        plan.load_plans(path)
    with pytest.raises(FileNotFoundError):
        plan.load_plans(tmp_path / "absent.json")


def test_codec_keeps_dataclasses_and_floats() -> None:
    value = (LayoutSpec(3, 2, 5), Activation("swiglu_oai", limit=None), (0.1, float("inf"), -1, True, None, "text"))
    assert codec.loads(codec.dumps(value)) == value
    assert codec.dumps(value) == codec.dumps(codec.loads(codec.dumps(value)))
    assert codec.loads(codec.dumps(float("nan"))) != codec.loads(codec.dumps(float("nan")))


def test_codec_refuses_unknown_types() -> None:
    with pytest.raises(InvalidInput, match="plan data must use known types, got 'Unheard'; load it with the version"):
        codec.loads('{"type":"Unheard"}')
    with pytest.raises(InvalidInput, match="plan data must use known types, got None; load it with the version"):
        codec.loads('{"value":1}')
    with pytest.raises(InvalidInput, match="plan data must give Scalar the fields dtype, value, got value; load it"):
        codec.loads('{"type":"Scalar","value":1}')
    with pytest.raises(AssertionError, match="cannot be part of a plan"):
        codec.dumps(object())

    @dataclasses.dataclass(frozen=True)
    class Local:
        value: int

    with pytest.raises(AssertionError, match="Local is not a plan_type"):
        codec.dumps(Local(1))
