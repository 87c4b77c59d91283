"""The fuzzer: its oracle stands alone, its cases print and parse, and planted faults are found and made small."""

from __future__ import annotations

import ast
import dataclasses
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

import moe_torch
from moe_core.formats import format_names
from tests.support.paths import ROOT
from tools.fuzz import __main__ as command
from tools.fuzz import run, run_jax, run_torch
from tools.fuzz.case import KINDS, WEIGHT_FORMATS, Case
from tools.fuzz.data import draw
from tools.fuzz.draw import Drawn, draw_static, packed_sets, sets_of
from tools.fuzz.legal import parse, why_illegal
from tools.fuzz.oracle import formats, routing
from tools.fuzz.oracle.around import backward_around, run_around
from tools.fuzz.oracle.backward import Backward
from tools.fuzz.oracle.layer import Machine, choice_of, expert_scales, forward, router_logits, slots_of, table_ids
from tools.fuzz.oracle.mixer import mixed_gradient, mixed_weights
from tools.fuzz.oracle.real import Real, rounded

ORACLE = ROOT / "tools" / "fuzz" / "oracle"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    run_jax.program.cache_clear()


def test_the_oracle_imports_nothing_of_ours() -> None:
    allowed = {"torch", *sys.stdlib_module_names}
    for path in ORACLE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            foreign = [name for name in names if not name.startswith("tools.fuzz.oracle.")]
            assert {name.split(".")[0] for name in foreign} <= allowed, (path.name, foreign)


def test_cases_print_and_parse() -> None:
    drawn = [case for drawn in sets_of(3, "reference", 600) for case in drawn.cases()]
    assert all(parse(str(case)) == case and why_illegal(case) is None for case in drawn)
    assert drawn == [case for drawn in sets_of(3, "reference", 600) for case in drawn.cases()] and len(drawn) == 600
    for text in ("kind=moe tokens=3", "K=3 E=2", "weights=mxfp4 D=16 F=32"):
        with pytest.raises(ValueError):
            parse(text)


def test_every_choice_is_drawn() -> None:
    """No option of a case is forgotten by the generator."""
    drawn = [draw_static(random.Random(number), "reference") for number in range(3000)]
    for field in dataclasses.fields(Case):
        values = {getattr(case, field.name) for case in drawn}
        if field.name not in ("packs", "x_kind", "logit_kind", "id_kind", "seed"):
            assert len(values) > 1, field.name
    assert {case.kind for case in drawn} == set(KINDS)
    assert {case.weights for case in drawn} == {"", *WEIGHT_FORMATS}
    of_rows = {name for name in format_names() if "_token" in name or "_group" in name}
    assert set(WEIGHT_FORMATS) == set(format_names()) - of_rows


def test_numbers_are_rounded_as_torch_rounds_them() -> None:
    random_numbers = torch.randn(4000, dtype=torch.float64) * torch.exp2(torch.randint(-30, 17, (4000,)).double())
    edges = torch.tensor([0.0, -0.0, 65504.0, 65519.0, 65520.0, 2.0**-24, 2.0**-25, 3 * 2.0**-26, float("inf")])
    for dtype in ("float16", "bfloat16", "float32"):
        # Numbers of fp32, so that torch's way over it does not round twice.
        given = torch.cat((random_numbers, edges)).float()
        assert torch.equal(rounded(given.double(), dtype), given.to(getattr(torch, dtype)).double()), dtype


def test_a_cast_is_certain_unless_a_boundary_is_near() -> None:
    errors = torch.tensor([1e-4, 1e-4, 1e-9], dtype=torch.float64)
    exact = Real(torch.tensor([1.0, 1.00390625, 1.0039062], dtype=torch.float64), errors)
    cast = exact.cast("bfloat16")
    assert cast.error.tolist() == [0.0, 2.0**-7, 0.0]


FLOAT64 = (
    "kind=layer T=5 K=2 E=6 D=5 F=4 source=x bias=True shared=3 shared_gate=True balance=0.5 z=0.25 masked=True",
    "kind=layer T=5 K=2 E=6 D=5 F=4 source=x scoring=sigmoid renormalize=True scale=2.5 balance=0.5 softcap=2.0",
    "kind=layer T=4 K=3 E=6 D=5 F=4 source=x scoring=sqrt_softplus renormalize=True epsilon=0.125 weight_layout=out_in",
    "kind=layer T=4 E=4 D=5 F=4 source=x on_input=True gate_layout=interleaved activation=swiglu_oai router_bias=True",
    "T=4 K=2 E=4 D=5 F=4 source=logits order=topk_then_softmax activation=gelu gated=False stack=2",
    "T=4 K=2 E=4 D=5 F=4 gate_layout=separate activation=softcapped_silu bias=True id_kind=duplicates",
    "T=4 K=2 E=4 D=5 F=4 source=logits scoring=sigmoid activation=clamped_silu limit=0.75 logit_scale=0.5",
    "kind=layer T=4 K=2 E=4 D=5 F=4 source=x latent=3 latent_norm=True out_norm=experts out_scale=0.3 out_bias=True "
    "norm_epsilon=0.125 weight_first=True centred=True shared=3 bias=True expert_scale=True",
    "kind=layer T=4 K=2 E=4 D=5 F=4 source=x latent=3 out_norm=sum out_bias=True norm_epsilon=0.125 shared=3 "
    "gate_layout=separate weight_layout=out_in bias=True router_norm=0.25",
    "kind=layer T=4 K=2 E=4 D=5 F=4 source=x out_norm=experts gate_layout=separate norm_epsilon=0.125 centred=True",
    "kind=layer T=4 K=2 E=4 D=5 F=4 source=x mixer=0.2 out_norm=sum out_scale=2.0 shared=2 shared_gate=True z=0.25",
    "kind=layer T=6 K=2 E=4 D=5 F=4 source=x shared=3 shared_gate=True adapters=2 router_norm=0.25 masked=True "
    "targets=gate_up,router,shared_gate_up,shared_down",
    "kind=layer T=5 K=2 E=4 D=5 F=4 source=x shared=3 gate_layout=separate adapters=1 "
    "targets=shared_gate_up,shared_down",
    "kind=layer T=5 K=2 E=4 D=5 F=4 source=x shared=2 gate_layout=interleaved adapters=2 targets=down,shared_gate_up",
    "kind=layer T=5 K=2 E=4 D=5 F=4 source=x table=3 router_norm=1.0 weight_first=True norm_epsilon=0.125 balance=0.5",
)


@pytest.mark.parametrize("text", FLOAT64)
def test_the_gradients_of_the_oracle_are_those_of_its_forward(text: str) -> None:
    case = parse(text + " dtype=float64 gradient=True seed=3")
    machine, choice = Machine("float64"), choice_of(case)
    given = {name: array for name, array in draw(case).plain.items()}
    mask = given.get("token_mask")

    def logits_of(arrays: dict[str, Any]) -> Real | None:
        if case.source == "x":
            return router_logits(case, arrays, machine)
        return machine.exact(arrays["logits"]) if case.source == "logits" else None

    logits = logits_of(given)
    ids = given["ids"] if logits is None else logits.value.topk(case.K).indices
    if case.table:
        ids = table_ids(case, given)
        ids = torch.where(ids < case.E, ids, -1)
    ids = ids if mask is None else torch.where(mask[:, None], ids, -1)
    plain = {name: array for name, array in given.items() if name != "token_mask"}
    slots = slots_of(case, ids, plain)

    def weights_of(logits: Real | None, arrays: dict[str, Any]) -> Real:
        """Before the scales of experts."""
        if logits is None:
            return machine.exact(arrays["weights"])
        return mixed_weights(logits, ids, case.mixer) if case.mixer else routing.weights(logits, ids.long(), choice)

    def objective(arrays: dict[str, Any]) -> float:
        logits = logits_of(arrays)
        weights = weights_of(logits, arrays)
        if case.expert_scale:
            weights = weights * expert_scales(arrays, ids, machine)
        if case.kind == "layer":
            output = run_around(case, arrays, slots, weights, machine).y
        else:
            output = forward(case, arrays, slots, weights, machine)
        total = (output.value * given["d_output"]).sum()
        if logits is not None:
            total = total + (weights.value * given["d_weights"]).sum()
            balance, z = routing.losses(routing.LossInputs(logits, slots.counts.double(), mask), choice)
            total = total + case.balance * balance.value + case.z * z.value
        return float(total)

    unscaled = weights_of(logits, given)
    weights = unscaled * expert_scales(given, ids, machine) if case.expert_scale else unscaled
    backward = (backward_around if case.kind == "layer" else Backward)(case, given, slots, weights, machine)
    if logits is not None:
        d_weights = backward.found.pop("weights") + machine.exact(given["d_weights"])
        d_weights = backward.add_expert_scale(d_weights, ids, unscaled)
        if case.mixer:
            d_logits = mixed_gradient(logits, ids, case.mixer, d_weights)
        else:
            d_logits = routing.logits_gradient(logits, ids.long(), choice, d_weights)
        inputs = routing.LossInputs(logits, slots.counts.double(), mask)
        d_logits = d_logits + routing.losses_gradient(inputs, choice, case.balance, case.z)
        if case.source == "x":
            backward.add_router(d_logits)
        else:
            backward.found["logits"] = d_logits
    for name, gradient in backward.finish().items():
        flat = gradient.value.reshape(-1)
        for place in {0, flat.numel() // 2, flat.numel() - 1, int(flat.abs().argmax())}:
            ends = []
            for step in (1e-6, -1e-6):
                moved = given[name].clone()
                moved.view(-1)[place] += step
                ends.append(objective(given | {name: moved}))
            assert float(flat[place]) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=2e-6, abs=2e-7), (name, place)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_formats_have_the_codes_of_the_quantiser(name: str, layout: str) -> None:
    weight = torch.randn(2, 128, 128) * torch.exp2(torch.randint(-6, 6, (2, 128, 1)).float())
    weight[0, :, :32] = 0.0
    weight[1, 3, 5] = torch.nan
    stored, meaning = formats.quantize(weight, name, layout)
    found = moe_torch.quantize(weight, moe_torch.format_named(name), layout=layout)
    for part in ("values", "scales", "zero_points"):
        ours, theirs = getattr(found, part), getattr(stored, part)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            same = torch.equal(run_torch_bytes(ours), run_torch_bytes(theirs))
            assert same, (part, ours, theirs)
    torch.testing.assert_close(moe_torch.dequantize(found), meaning.float(), rtol=0, atol=0, equal_nan=True)


def run_torch_bytes(tensor: Any) -> Any:
    if tensor.dtype == torch.float32:
        tensor = torch.where(torch.isnan(tensor), torch.full_like(tensor, torch.nan), tensor)
    return tensor.contiguous().view(torch.uint8)


def test_two_right_choices_and_a_wrong_one() -> None:
    """Scores that rounding may order either way; equal logits, which it may not."""
    logits = torch.tensor([[1.0, 1.0 + 2.0**-20, 0.0, 1.0]], dtype=torch.float64)
    choice = routing.Choice(2)

    def wrong(ids: list[int], error: float) -> bool:
        known = Real(logits, torch.full_like(logits, error))
        return bool(routing.complaints(torch.tensor([ids]), known, choice, None, None))

    assert not wrong([1, 0], 0.0) and wrong([0, 1], 0.0) and wrong([1, 3], 0.0) and wrong([1, 2], 0.0)
    assert not wrong([0, 1], 1e-6) and not wrong([1, 3], 1e-6) and wrong([2, 1], 1e-6)
    assert wrong([1, 1], 0.0) and wrong([1, -1], 0.0) and wrong([1, 4], 0.0)


def test_nothing_is_found_where_nothing_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--cases", "48", "--seed", "11", "--engines", "reference"]) == 0
    assert " 0 failures" in capsys.readouterr().out


def test_packed_problems(capsys: pytest.CaptureFixture[str]) -> None:
    """Many problems in one call, each counted: right ones pass, and one wrong number among them is found."""
    sets = packed_sets(0, "reference", 36_000, 18_000)
    assert len(sets) == 54 and {drawn.static.source for drawn in sets} == {"ids", "logits"}
    assert sum(drawn.repeats * drawn.static.packs for drawn in sets) >= 54_000
    small = [Drawn(dataclasses.replace(drawn.static, packs=7), "", 1) for drawn in sets[:2] + sets[-2:]]
    report = run.fuzz(small, "reference")
    assert (report.count(False, True), report.count(True, True), report.failures) == (14, 14, []), report


def test_front_ends_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_bit_off(case: Case, arrays: Any, engine: str) -> Any:
        found = run_torch.run(case, arrays, engine)
        return found | {"output": torch.nextafter(found["output"], torch.full_like(found["output"], torch.inf))}

    monkeypatch.setattr(run, "FRONT_ENDS", {"torch": run_torch.run, "jax": one_bit_off})
    complaints = run.examine(parse("T=2 K=1 E=2 D=8 F=8"), "reference").complaints
    assert any("torch and jax differ" in text for text in complaints)
