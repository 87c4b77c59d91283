"""Adapters: every engine against weights materialised in float64, and the rules that make adapters independent."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moe_core import InvalidInput, Unsupported
from moe_core.base.target import Target
from moe_core.formats import QuantizedTensor
from moe_core.ops.lora.adapters import Dropout
from moe_core.ops.lora.reference import kept
from moe_core.ops.matmul.reference.forward import Product
from moe_core.ops.matmul.reference.rows import Rows
from moe_core.ops.moe.backward import gradient_names, plan_moe_backward
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import BackwardOptions, ForwardOptions
from moe_core.specs import Activation, MoESpec, TileConfig, Tuning
from moe_core.specs.operands import OutputGradients, TopK
from tests.support.harness import H200, engine_target
from tests.support.matmul.sm90 import needs_sm_90
from tests.support.training.lora import OAI, PAIRS, REFERENCE, TOLERANCE, Problem, draw, effective, error, oracle

SEPARATE = Activation("silu", gate_layout="separate")
PLAIN = Activation("relu2", gated=False)
#: Options of `draw`: hard cases of adapters.
CASES = {
    "one adapter": {"ranks": (16,)},
    "eight ranks": {"ranks": (1, 2, 0, 16, 5, 32, 8, 31), "padded": 32, "tokens": 40},
    "rank 1": {"ranks": (1, 1)},
    "rank = experts, in = out": {"ranks": (4, 4), "sizes": (32, 32, 4, 2)},
    "several steps": {"ranks": (80, 20), "padded": 80},
    "shared": {"shared": True},
    "first pair": {"pairs": ("a1", "b1")},
    "second pair": {"pairs": ("a2", "b2")},
    "no token": {"tokens": 0},
    "one token": {"tokens": 1},
}


def engines(kernels: bool = True) -> tuple[Target, ...]:
    """The twins, and the kernels (slow in the interpreter) if asked."""
    return (REFERENCE, engine_target()) if kernels else (REFERENCE,)


def check(problem: Problem, target: Target, *, gradients: bool = True) -> dict[str, np.ndarray]:
    wanted, tolerance = oracle(problem), TOLERANCE[str(problem.x.dtype)]
    made = problem.forward(target)
    assert error(made["output"], wanted["output"]) < tolerance
    if gradients:
        frozen = isinstance(problem.experts.gate_up, QuantizedTensor)
        names = ["d_x", "d_routing.weights", *(f"d_lora.{n}" for n in PAIRS if getattr(problem.lora, n) is not None)]
        names += (
            []
            if frozen or not len(problem.x) or problem.experts.up is not None
            else ["d_experts.gate_up", "d_experts.down"]
        )
        made |= problem.backward(target, tuple(names))
        for name in names:
            assert error(made[name], wanted[name]) < 2 * tolerance, name
    return made


@pytest.mark.parametrize("case", CASES, ids=str)
def test_hard_cases(case: str) -> None:
    for target in engines(case in ("eight ranks", "rank = experts, in = out", "shared", "no token", "first pair")):
        check(draw(MoESpec(OAI), **CASES[case]), target)


@pytest.mark.parametrize("weight_layout", ["in_out", "out_in"])
@pytest.mark.parametrize("activation", [OAI, SEPARATE, PLAIN, Activation("silu")], ids=str)
def test_activations(activation: Activation, weight_layout: str) -> None:
    kernels = (activation, weight_layout) in ((OAI, "out_in"), (SEPARATE, "in_out"), (PLAIN, "in_out"))
    for target in engines(kernels):
        check(draw(MoESpec(activation, weight_layout=weight_layout), ranks=(3, 0, 16)), target)


@pytest.mark.parametrize(("dtype", "factor_dtype"), [("bfloat16", "float32"), ("float16", None), ("bfloat16", None)])
def test_dtypes(dtype: str, factor_dtype: str | None) -> None:
    for target in engines(factor_dtype is not None):
        made = check(draw(MoESpec(OAI), dtype=dtype, factor_dtype=factor_dtype), target)
        assert str(made["d_lora.a1"].dtype) == (factor_dtype or dtype)


SCHEMES = [
    ("mxfp4_w4a16", OAI, "out_in"),
    ("mxfp4_w4a16", SEPARATE, "in_out"),
    ("int8_w8a16", OAI, "out_in"),
    ("int4_w4a16_zp", Activation("silu"), "out_in"),
]


@pytest.mark.parametrize(("scheme", "activation", "weight_layout"), SCHEMES, ids=str)
def test_frozen_codes(scheme: str, activation: Activation, weight_layout: str) -> None:
    side = 128 if "int" in scheme else 64
    spec = MoESpec(activation, weight_layout=weight_layout)
    problem = draw(spec, sizes=(side, side, 3, 2), scheme=scheme, dtype="bfloat16")
    for target in engines(activation != OAI):
        check(problem, target)


OPTIONS = {
    "recompute": {"recompute": True},
    "weight on input": {"apply_router_weight_on_input": True},
    "batch invariant": {"tuning": Tuning(batch_invariant=True)},
}


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_options(option: str) -> None:
    sizes = (32, 24, 3, 1 if option == "weight on input" else 2)
    for target in (REFERENCE, engine_target()):
        if option == "weight on input":
            problem = draw(MoESpec(OAI, **OPTIONS[option]), sizes=sizes)
            ones = dataclasses.replace(problem.routing, weights=np.ones_like(problem.routing.weights))
            plain = dataclasses.replace(problem, routing=ones, spec=MoESpec(OAI), x=problem.x * problem.routing.weights)
            assert error(problem.forward(target)["output"], oracle(plain)["output"]) < 1e-5
        else:
            check(draw(MoESpec(OAI, **OPTIONS[option]), sizes=sizes), target)


def test_masks_maps_and_absent_ids() -> None:
    problem = draw(MoESpec(OAI), tokens=12, sizes=(32, 24, 4, 2))
    ids = problem.routing.ids.copy()
    ids[0], ids[1, 0] = -1, -1
    mapped = np.array([1, -1, 3, 0, 2, -1], np.int32)
    mask = np.arange(12) % 4 > 0
    for change in ({"token_mask": mask, "expert_map": mapped}, {}):
        hard = dataclasses.replace(problem, routing=TopK(ids, problem.routing.weights), **change)
        for target in (REFERENCE, engine_target()):
            check(hard, target)


@pytest.mark.parametrize("tokens", [1, 150])
def test_engines_have_equal_bits_where_sums_are_exact(tokens: int) -> None:
    problem = draw(MoESpec(PLAIN), tokens=tokens, ranks=(3, 0, 16, 7), exact=True, biased=False)
    problem = dataclasses.replace(problem, lora=dataclasses.replace(problem.lora, scale=np.ones((4, 3), np.float32)))
    assert not problem.lora.beyond_experts
    assert dataclasses.replace(problem.lora, a1_shared=problem.lora.a1).beyond_experts
    names = ("d_x", *(f"d_lora.{name}" for name in PAIRS), "d_routing.weights")
    one, other = (problem.forward(t, save=True) | problem.backward(t, names) for t in (REFERENCE, engine_target()))
    assert set(one) == set(other)
    for name in one:
        if name != "saved.pre_activation":
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_without_an_adapter_have_the_bits_of_the_base(dtype: str) -> None:
    problem = draw(MoESpec(OAI), tokens=40, ranks=(3, 0, 16), dtype=dtype)
    without = effective(problem) < 0
    for target in (REFERENCE, engine_target()):
        # On a GPU few rows of fp32 without adapters take another plan.
        nobody = dataclasses.replace(problem, adapter_ids=np.full_like(problem.adapter_ids, -1))
        base = nobody.forward(target, lora=target.kind == "cuda" and dtype == "float32")["output"]
        made = problem.forward(target)["output"]
        assert without.any() and (base[without].view(np.uint8) == made[without].view(np.uint8)).all()
        assert (base[~without] != made[~without]).any(axis=1).all()


def test_the_twin_multiplies_rows_in_the_order_of_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without adapters: on most processors a row's bits depend on its place in BLAS's blocks."""
    seen: list[Rows] = []

    class Seen(Product):
        def __init__(self, operands: object, spec: object, rows: Rows, *rest: object) -> None:
            seen.append(rows)
            super().__init__(operands, spec, rows, *rest)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr("moe_core.ops.matmul.reference.forward.Product", Seen)
    draw(MoESpec(OAI), tokens=40).forward(REFERENCE)
    ordered = [(np.diff(rows.index["slot"][part]) > 0).all() for rows in seen for _, part in rows.parts]
    assert len(seen) == 2 and all(ordered)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_one_adapter_reaches_no_rows_of_others(value: float) -> None:
    problem = draw(MoESpec(OAI), tokens=30, ranks=(3, 16))
    broken = {name: getattr(problem.lora, name).copy() for name in PAIRS}
    for one in broken.values():
        one[0] = value
    hurt = dataclasses.replace(problem, lora=dataclasses.replace(problem.lora, **broken))
    last = dataclasses.replace(problem, lora=dataclasses.replace(problem.lora, b2=broken["b2"]))
    for target in (REFERENCE, engine_target()):
        assert not np.isfinite(last.forward(target)["output"][problem.adapter_ids == 0]).any()
        clean, made = problem.forward(target)["output"], hurt.forward(target)["output"]
        others = problem.adapter_ids != 0
        np.testing.assert_array_equal(clean[others], made[others])
        assert np.isnan(made[~others]).any()


def test_padding_of_factors_does_not_count() -> None:
    problem = draw(MoESpec(OAI), ranks=(3, 7))
    garbage = {}
    for name in PAIRS:
        garbage[name] = getattr(problem.lora, name).copy()
        for slot, rank in enumerate((3, 7)):
            behind = (..., slice(rank, None)) if name[0] == "a" else (slice(None), slice(rank, None))
            garbage[name][slot][behind] = np.nan
    hurt = dataclasses.replace(problem, lora=dataclasses.replace(problem.lora, **garbage))
    names = ("d_x", *(f"d_lora.{name}" for name in PAIRS))
    for target in (REFERENCE, engine_target()):
        np.testing.assert_array_equal(problem.forward(target)["output"], hurt.forward(target)["output"])
        clean, made = problem.backward(target, names), hurt.backward(target, names)
        for name in names:
            np.testing.assert_array_equal(clean[name], made[name], err_msg=name)


def test_adapters_that_do_not_exist_count_as_invalid() -> None:
    problem = draw(MoESpec(OAI), tokens=6, ranks=(3, 0))
    ids, mask = np.array([-1, 0, 1, 2, -2, 7], np.int32), np.array([1, 1, 1, 1, 1, 0], bool)
    problem = dataclasses.replace(problem, adapter_ids=ids, token_mask=mask)
    bad = problem.routing.ids.copy()
    bad[1, 0] = 99
    problem = dataclasses.replace(problem, routing=TopK(bad, problem.routing.weights))
    for target in (REFERENCE, engine_target()):
        assert problem.forward(target)["invalid_ids"].tolist() == [4]  # tokens 2, 3 and 4, and one expert


def test_dropout_masks_the_input_of_a_alone() -> None:
    probability = 0.3
    problem = draw(MoESpec(Activation("relu2", gated=False), lora_dropout=probability), ranks=(16,), biased=False)
    problem = dataclasses.replace(problem, adapter_ids=np.zeros(9, np.int32))
    x, lora, experts = problem.x.astype(np.float64), problem.lora, problem.experts
    masks = [Dropout(probability, by) for by in ("token", "slot")]
    assert lora.seed is not None
    output, top_k = np.zeros(x.shape), problem.routing.ids.shape[1]
    for (token, k), expert in np.ndenumerate(problem.routing.ids):
        first, second = (kept(lora.seed, np.array([index]), size, mask)[0] / (1 - probability) for index, size, mask in
                         ((token, 32, masks[0]), (token * top_k + k, 24, masks[1])))  # fmt: skip
        scale = float(lora.scale[0, expert])
        pre = x[token] @ experts.gate_up[expert] + scale * (x[token] * first) @ lora.a1[0, expert] @ lora.b1[0, expert]
        hidden = np.maximum(pre, 0) ** 2
        row = hidden @ experts.down[expert] + scale * (hidden * second) @ lora.a2[0, expert] @ lora.b2[0, expert]
        output[token] += problem.routing.weights[token, k] * row
    names = ("d_x", "d_routing.weights", *(f"d_lora.{name}" for name in PAIRS))
    gradients = [problem.backward(target, names) for target in (REFERENCE, engine_target())]
    for target in (REFERENCE, engine_target()):
        assert error(problem.forward(target)["output"], output) < 3e-6
    for name in names:
        assert error(gradients[1][name], gradients[0][name]) < 1e-5, name
    # A step along the gradients changes the loss by their squared norm.
    made, step = gradients[0], 1e-4
    wide = {name: getattr(lora, name).astype(np.float64) for name in PAIRS}
    moved = [
        dataclasses.replace(
            problem,
            x=(x + sign * step * made["d_x"]).astype(np.float32),
            lora=dataclasses.replace(
                lora, **{n: (wide[n] + sign * step * made[f"d_lora.{n}"]).astype(np.float32) for n in PAIRS}
            ),
        ).forward(REFERENCE)["output"].astype(np.float64)
        for sign in (1, -1)
    ]  # fmt: skip
    change = ((moved[0] - moved[1]) * problem.d_output).sum() / (2 * step)
    expected = sum((made[name].astype(np.float64) ** 2).sum() for name in ("d_x", *(f"d_lora.{n}" for n in PAIRS)))
    assert abs(change - expected) < 0.02 * expected
    share = kept(lora.seed, np.arange(500), 200, masks[0]).mean()
    assert abs(share - 0.7) < 0.005
    assert (kept(lora.seed, np.arange(9), 24, masks[0]) != kept(lora.seed, np.arange(9), 24, masks[1])).any()


def test_gradients_of_the_base_are_computed_only_if_wanted() -> None:
    problem = draw(MoESpec(OAI), biased=False)
    names = gradient_names(problem.specs)
    assert {f"d_lora.{name}" for name in PAIRS} < set(names) and not {"d_lora.scale", "d_adapter_ids"} & set(names)


@pytest.mark.parametrize(
    ("tokens", "dropout", "slots", "kernels", "reason"),
    [
        (512, 0.0, 3, {"sm90": 4}, "not the sm90"),
        (16, 0.0, 3, {"portable": 4}, "it wins from 48 rows per expert"),
        (512, 0.5, 3, {"sm90": 2, "portable": 2}, "dropout masks what its tail of adapters adds"),
        (512, 0.0, 129, {"portable": 4}, "its tail has at most 128 slots of adapters, got 129"),
    ],
    ids=str,
)
def test_explain_says_which_kernels_add_tails(
    tokens: int, dropout: float, slots: int, kernels: dict[str, int], reason: str
) -> None:
    spec, sizes, ranks = MoESpec(OAI, lora_dropout=dropout), (128, 128, 4, 2), (16,) * slots
    problem = draw(spec, sizes=sizes, tokens=tokens, ranks=ranks, dtype="bfloat16")
    specs = problem.specs
    options = ForwardOptions(save=True, lora=specs.lora, adapter_ids=specs.adapter_ids)
    gradients = OutputGradients(specs.x)
    plans = (
        plan_moe(specs.x, specs.experts, specs.routing, problem.spec, H200, options=options),
        plan_moe_backward(gradients, specs, problem.spec, H200, options=BackwardOptions(("d_x",))),
    )
    names = [step.kernel.name for plan in plans for step in plan.steps if "matmul_ogs" in step.kernel.name]
    assert {name: sum(f".{name}." in one for one in names) for name in kernels} == kernels
    text = "".join(plan.explain() for plan in plans)
    assert (reason in text) == ("sm90" not in kernels or dropout > 0) and "then ranks of each row's adapter" in text


#: A tile of the Hopper kernel has several adapters, or its experts few rows. One adapter has inf and NaN.
ON_HOPPER = {
    "pairs": (OAI, {"tokens": 301, "ranks": (3, 16, 1), "factor_dtype": "float32"}),
    "halves, many ranks": (Activation("silu"), {"tokens": 641, "ranks": (8, 64, 33, 0), "padded": 64}),
    "separate, shared": (SEPARATE, {"tokens": 90, "ranks": (5, 16), "shared": True}),
    "one token": (OAI, {"tokens": 1}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_HOPPER)
def test_hopper_kernels_have_the_bits_of_portable_ones(name: str) -> None:
    needs_sm_90()
    activation, options = ON_HOPPER[name]
    small, target = TileConfig(64, 64, 64, 4, 3), engine_target()
    spec = MoESpec(activation, tuning=Tuning(expected_tokens=65536))
    problem = draw(spec, sizes=(320, 192, 8, 2), dtype="bfloat16", **options)
    tuning = Tuning(matmul_1=small, matmul_2=small, expected_tokens=32)
    portable = dataclasses.replace(problem, spec=MoESpec(activation, tuning=tuning))
    made, wanted = check(problem, target), check(portable, target)
    assert all(made[name].tobytes() == wanted[name].tobytes() for name in made)
    base = problem.forward(target, lora=False)["output"]
    none = effective(problem) < 0
    assert made["output"][none].tobytes() == base[none].tobytes()
    problem.lora.b1[1, :, 0, 5], problem.lora.b2[1, :, 0, 7] = np.nan, np.inf
    spoiled, mine = problem.forward(target)["output"], problem.adapter_ids == 1
    assert spoiled[~mine].tobytes() == made["output"][~mine].tobytes()
    assert np.isnan(spoiled[mine].astype(np.float32)).all()


BAD = {
    "a rank of 8": (lambda p: dataclasses.replace(p, lora=_cut(p, 8)), "multiple of 16"),
    "one of a pair": (lambda p: _lora(p, b1=None), "lora.b1 must both"),
    "no factors": (lambda p: _lora(p, a1=None, b1=None, a2=None, b2=None), "got neither"),
    "no scale": (lambda p: _lora(p, scale=None), "lora.scale must be"),
    "seed without dropout": (lambda p: _lora(p, seed=np.zeros(1, np.int32)), "lora.seed"),
    "dropout without seed": (lambda p: _spec(p, lora_dropout=0.5), "lora.seed"),
    "other experts": (lambda p: _lora(p, ranks=p.lora.ranks[:, :2]), "lora.ranks"),
    "wide ids": (lambda p: dataclasses.replace(p, adapter_ids=p.adapter_ids.astype(np.int64)), "adapter_ids"),
    "rows in order": (lambda p: _spec(p, rows_in_order=True), "spec.rows_in_order"),
}


def _lora(problem: Problem, **fields: object) -> Problem:
    return dataclasses.replace(problem, lora=dataclasses.replace(problem.lora, **fields))


def _spec(problem: Problem, **fields: object) -> Problem:
    return dataclasses.replace(problem, spec=dataclasses.replace(problem.spec, **fields))  # pyright: ignore[reportArgumentType]


def _cut(problem: Problem, rank: int):
    pairs = {name: getattr(problem.lora, name) for name in PAIRS}
    cut = {n: one[..., :rank] if n[0] == "a" else one[..., :rank, :] for n, one in pairs.items()}
    return dataclasses.replace(problem.lora, **{n: np.ascontiguousarray(one) for n, one in cut.items()})


@pytest.mark.parametrize("name", BAD, ids=str)
def test_bad_arguments(name: str) -> None:
    change, message = BAD[name]
    with pytest.raises((InvalidInput, Unsupported), match=message):
        change(draw(MoESpec(OAI))).forward(REFERENCE)


def test_batch_invariance() -> None:
    spec = MoESpec(OAI, tuning=Tuning(batch_invariant=True))
    problem = draw(spec, tokens=33, ranks=(3, 16))
    alone = dataclasses.replace(
        problem,
        x=problem.x[5:6],
        routing=TopK(problem.routing.ids[5:6], problem.routing.weights[5:6]),
        adapter_ids=problem.adapter_ids[5:6],
        d_output=problem.d_output[5:6],
    )
    np.testing.assert_array_equal(alone.forward(REFERENCE)["output"][0], problem.forward(REFERENCE)["output"][5])
