"""Plans: building, keys, scratch, the roles of buffers, and explanation."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shapes import SHAPES
from moe_core.base import codec
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.activation import reference
from moe_core.ops.moe.backward import gradient_names, plan_moe_backward
from moe_core.ops.moe.options import BackwardOptions
from moe_core.ops.reduction.rowwise import CAST_ROWS
from moe_core.plan import steps
from moe_core.plan.arena import SCRATCH_ALIGNMENT, aligned, lend_memory, place_buffers
from moe_core.plan.builder import PlanBuilder
from moe_core.plan.roles import Role, role_of
from moe_core.plan.steps import KEY_LENGTH, Constant, KernelLaunch, Pointer, ReferenceCall
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, MoEOperands, OutputGradients, RouterWeights
from tests.support.paths import ROOT
from tests.support.plans import CUDA, small_plan


def test_equal_plans_have_equal_keys_in_every_process() -> None:
    script = "from tests.support.plans import small_plan; print(small_plan().key)"
    keys = {small_plan().key}
    for seed in ("0", "1"):
        printed = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT, capture_output=True,
            text=True, check=True,
        ).stdout  # fmt: skip
        keys.add(printed.strip())
    assert len(keys) == 1
    assert len(keys.pop()) == KEY_LENGTH == 21


def test_a_launch_shows_its_tile() -> None:
    (step,) = small_plan(block=32, warps=8).steps
    assert isinstance(step, KernelLaunch) and step.tile == f"BLOCK=32, 8 warps, {step.num_stages} stages"


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
    monkeypatch.setattr(steps, "sources_version", lambda: "other sources")
    keys.append(small_plan().key)
    assert len(set(keys)) == len(plans) + 1


def test_constants_of_different_types_differ() -> None:
    values = (1, 1.0, True, "1", None, -0.0, 0.0)
    texts = {codec.dumps(Constant(value)) for value in values}
    assert len(texts) == len(values)
    for value in values:
        again = codec.loads(codec.dumps(Constant(value))).value
        assert (type(again), repr(again)) == (type(value), repr(value))


def copy_of_sources(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The core's root in a copy of the sources that decide plans, which keys are made from then."""
    package = pathlib.Path(steps.__file__).parent.parent
    for pattern in steps._SOURCES:
        for path in package.glob(pattern):
            target = folder / path.relative_to(package)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    monkeypatch.setattr(steps, "__file__", str(folder / "plan" / "steps.py"))
    return folder


def test_keys_follow_every_folder_of_sources(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = copy_of_sources(tmp_path, monkeypatch)
    version = steps.sources_version.__wrapped__
    first = version()
    assert first == steps.sources_version()
    folders = {path.parent for path in root.rglob("*.py") if path.name != "__init__.py"}
    assert len([folder for folder in folders if folder.name == "kernels"]) >= 8
    for folder in sorted(folders):
        path = next(path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py")
        text = path.read_text()
        path.write_text(text + "# changed")
        assert version() != first, f"editing {path.relative_to(root)} changes no key"
        path.write_text(text)
    assert version() == first
    (root / "other.py").write_text("decides nothing")
    assert version() == first
    moved = root / "ops" / "activation" / "moved.py"
    (root / "ops" / "activation" / "forward.py").rename(moved)
    assert version() != first, "a moved file changes no key"


def test_sources_that_are_missing_are_no_version(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = copy_of_sources(tmp_path, monkeypatch)
    (root / "plan" / "arena.py").unlink()
    with pytest.raises(RuntimeError, match=r"arena\.py must match the sources of plans, and matches no file"):
        steps.sources_version.__wrapped__()


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


def test_what_is_written_late_lends_its_memory() -> None:
    sizes = [("a", 512), ("b", 512), ("c", 300), ("late", 8), ("unused", 8)]
    steps = [("a",), ("a", "b", "c"), ("out",), ("late", "out")]
    # `a` and `b` are needed together, `c` does not fit beside them, and `late` comes when the output is written.
    found = lend_memory(sizes, steps, [("out", 1100), ("never written", 9999)])
    assert found == {"a": ("out", 0), "b": ("out", 512)}
    assert lend_memory(sizes, steps, [("out", 1324)])["c"] == ("out", 1024), "its last bytes need no room for the next"


@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 9), st.integers(0, 9)), max_size=12),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 9)), max_size=3),
)
def test_lent_memory_is_never_needed_twice(drawn: list[tuple[int, int, int]], outputs: list[tuple[int, int]]) -> None:
    spans = {str(index): tuple(sorted(span)) for index, (_, *span) in enumerate(drawn)}
    sizes = [(str(index), size) for index, (size, _, _) in enumerate(drawn)]
    lenders = [(f"out {index}", room) for index, (room, _) in enumerate(outputs)]
    written = {f"out {index}": first for index, (_, first) in enumerate(outputs)}
    steps = [
        [*(name for name, span in spans.items() if step in span), *(name for name in written if written[name] == step)]
        for step in range(10)
    ]
    found, bytes_of = lend_memory(sizes, steps, lenders), dict(sizes)
    for name, (lender, offset) in found.items():
        assert offset % SCRATCH_ALIGNMENT == 0 and offset + bytes_of[name] <= dict(lenders)[lender]
        assert spans[name][1] < written[lender], "the output is written while the buffer is needed"
    for (one, (first, low)), (other, (second, high)) in itertools.combinations(found.items(), 2):
        together = spans[one][0] <= spans[other][1] and spans[other][0] <= spans[one][1]
        if together and first == second and bytes_of[one] and bytes_of[other]:
            assert low + bytes_of[one] <= high or high + bytes_of[other] <= low


#: By model, MiB for 16384 tokens, with what is overwritten and without.
SCRATCH = {"qwen3": (1, 193), "gptoss120b": (1, 361), "mixtral": (1, 1793)}


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("model", SCRATCH)
def test_scratch_of_a_backward(model: str, recompute: bool, overwrite: bool) -> None:
    """What outputs lend no memory for (docs/user/training.md)."""
    shape = SHAPES[model]
    d, f, e, k = shape.d_model, shape.d_ff, shape.num_experts, shape.top_k
    x = ArraySpec((16384, d), "bfloat16")
    experts = ExpertWeights(ArraySpec((e, 2 * f, d), "bfloat16"), ArraySpec((e, d, f), "bfloat16"))
    operands = MoEOperands(x, experts, RouterWeights(ArraySpec((e, d), "bfloat16")))
    spec = MoESpec(Activation("silu"), RouterSpec(k), "out_in", "out_in", recompute=recompute)
    wanted = gradient_names(operands)
    made = plan_moe_backward(
        OutputGradients(x), operands, spec, CUDA, options=BackwardOptions(wanted=wanted, overwrite=overwrite)
    )
    most = SCRATCH[model][recompute or not overwrite]
    assert made.scratch_bytes < most * 2**20
    assert bool(made.over) == (recompute or overwrite)


def test_builder_collects_buffers_and_steps() -> None:
    made = small_plan()
    assert [buffer.name for buffer in made.inputs] == ["x"]
    assert made.spec("partial") == ArraySpec((10,), "float32")
    assert made.scratch_places == ((2, 0), (2, 256)), "behind one input and one output: in the arena"
    assert made.scratch_bytes == 512
    (step,) = made.steps
    assert isinstance(step, KernelLaunch)
    assert (step.kernel, step.grid) == (CAST_ROWS, (1, 2, 1))
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
        builder.launch(CAST_ROWS, (1,), {"pointer": Pointer("z")})
    with pytest.raises(AssertionError, match="activation is for the reference engine"):
        builder.reference(reference.activation, {"x": "x"}, {}, ["x"])
    builder = PlanBuilder("wrong", Target("reference"))
    with pytest.raises(AssertionError, match=r"the reference engine runs no .*cast_rows"):
        builder.launch(CAST_ROWS, (1,), {})
    with pytest.raises(AssertionError, match="unknown buffer x"):
        builder.reference(reference.activation, {"x": "x"}, {}, ["z"])


def test_call_inlines_a_plan() -> None:
    inner = small_plan()
    builder = PlanBuilder("outer", CUDA)
    builder.input("a", ArraySpec((10, 3), "bfloat16"), Role.ROWS)
    builder.output("b", ArraySpec((10, 3), "float32"), Role.ROWS)
    assert builder.call(inner, "first", {}) == "first.y"
    assert builder.call(inner, "second", {"x": "a", "y": "b"}) == "b"
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
    with pytest.raises(AssertionError, match=r"input x is not bound, and \[\] have the role rows"):
        builder.call(small_plan(), "first", {})
    builder.input("a", ArraySpec((10, 3), "bfloat16"), Role.ROWS)
    with pytest.raises(AssertionError):
        builder.call(small_plan(target=Target("interpreter")), "second", {"x": "a"})
    for bindings, roles in (({"x": "a", "w": "a"}, {}), ({"x": "a"}, {"w": Role.ROWS})):
        with pytest.raises(AssertionError, match=r"\{'w'\} are no buffers of double"):
            builder.call(small_plan(), "third", bindings, roles)
    with pytest.raises(AssertionError, match=r"takes bfloat16\[11, 3\], got a bfloat16\[10, 3\]"):
        builder.call(small_plan(tokens=11), "fourth", {"x": "a"})
    builder.input("b", ArraySpec((10, 3), "bfloat16"), Role.ROWS)
    with pytest.raises(AssertionError, match=r"input x is not bound, and \['a', 'b'\] have the role rows"):
        builder.call(small_plan(), "fifth", {})


def test_call_binds_a_buffer_in_its_role_only() -> None:
    builder = PlanBuilder("outer", CUDA)
    array = ArraySpec((10, 3), "bfloat16")
    builder.input("weight", array)
    builder.input("anything", array)
    with pytest.raises(AssertionError, match="x of double takes the role rows, got weight, whose role is weight"):
        builder.call(small_plan(), "first", {"x": "weight"})
    with pytest.raises(AssertionError, match="x of double takes the role rows, got anything, whose role is None"):
        builder.call(small_plan(), "first", {"x": "anything"})
    builder.call(small_plan(), "first", {"x": "weight"}, {"x": Role.WEIGHT})
    unnamed = dataclasses.replace(small_plan(), inputs=(steps.Buffer("x", array),))
    with pytest.raises(AssertionError, match="x of double takes an array without a role"):
        builder.call(unnamed, "second", {"x": "weight"})


def test_call_reads_what_is_filled_and_writes_what_is_not() -> None:
    builder = PlanBuilder("outer", CUDA)
    builder.input("x", ArraySpec((10, 3), "bfloat16"))
    early = builder.scratch("early", ArraySpec((10, 3), "bfloat16"), Role.ROWS)
    made = builder.scratch("made", ArraySpec((10, 3), "float32"), Role.ROWS)
    with pytest.raises(AssertionError, match="input x of double takes a buffer that is filled, got early"):
        builder.call(small_plan(), "first", {"x": early, "y": made})
    builder.call(small_plan(), "first", {"x": "x", "y": made})
    for filled in (made, "x"):
        with pytest.raises(AssertionError, match=f"output y of double takes a buffer that is not filled, got {filled}"):
            builder.call(small_plan(), "second", {"x": "x", "y": filled})
    builder.launch(CAST_ROWS, (1,), {"pointer": Pointer(early)})
    builder.call(small_plan(), "third", {"x": early})


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("x", "rows"),
        ("tokens_per_expert", "group_sizes"),
        ("saved.slot_of_row", "slot_of_row"),
        ("experts.down", "weight"),
        ("experts.gate_up.scales", "weight.scales"),
        ("experts.up.values", "up.values"),
        ("d_experts.down", "d_weight"),
        ("d_shared.gate", "d_weight"),
        ("shared.gate", "weight"),
        ("gradients.weights", "d_row_weight"),
        ("d_routing.logits", "d_logits"),
        ("into.experts.gate_up", "into"),
        ("schedule_64", "schedule.64"),
        ("values", None),
        ("hidden.maxima", "maxima"),
        ("partials", None),
    ],
)
def test_names_say_roles(name: str, role: str | None) -> None:
    found = role_of(name)
    assert (None if found is None else str(found)) == role


def test_roles_change_neither_text_nor_key() -> None:
    plans = []
    for role in (None, Role.D_ROWS):
        builder = PlanBuilder("same", CUDA)
        builder.input("x", ArraySpec((10, 3), "bfloat16"), role)
        plans.append(builder.build())
    assert plans[0] == plans[1] and plans[0].key == plans[1].key
    assert [str(buffer.role) for made in plans for buffer in made.inputs] == ["rows", "d_rows"]
    assert codec.loads(codec.dumps(plans[1])).inputs[0].role is None


def test_call_renames_reference_steps() -> None:
    target = Target("reference")
    inner = PlanBuilder("inner", target)
    inner.input("x", ArraySpec((2,), "float32"))
    inner.output("y", ArraySpec((2,), "float32"))
    inner.reference(reference.activation, {"x": "x"}, {"activation": Activation("silu", gated=False)}, ["y"])
    outer = PlanBuilder("outer", target)
    outer.input("a", ArraySpec((2,), "float32"), Role.ROWS)
    outer.output("b", ArraySpec((2,), "float32"), Role.ROWS)
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
        "  step 0  reduction.kernels.rowwise:cast_rows grid 1x2x1, 4 warps, 3 stages; BLOCK=64, bias_pointer=None",
        "  sums    y: ascending columns, one tile",
        "  note    split-K rejected: one tile holds the reduction",
    ]


def test_stages_are_those_of_a_kernel_that_pipelines_by_itself() -> None:
    own = KernelLaunch(CAST_ROWS, (1, 1, 1), (("STAGES", Constant(4)),), 4, 1)
    others = (KernelLaunch(CAST_ROWS, (1, 1, 1), given, 4, 2) for given in ((), (("STAGES", Constant(None)),)))
    assert [launch.pipeline_stages for launch in (own, *others)] == [4, 2, 2]


def test_explain_names_the_reference() -> None:
    builder = PlanBuilder("stage", Target("reference"))
    builder.input("x", ArraySpec((2, 4), "float32", (1, 2)))
    builder.output("y", ArraySpec((2, 4), "float32"))
    builder.reference(reference.activation, {"x": "x"}, {}, ["y"])
    text = builder.build().explain()
    assert "  step 0  NumPy reference activation.reference:activation" in text
    assert "  input   x: float32[2, 4] strides (1, 2)" in text
