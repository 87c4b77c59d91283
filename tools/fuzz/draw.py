"""Draws cases from a seed: choices in proportion to how often they fail, sizes around the edges of tiles."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from tools.fuzz import case as cases
from tools.fuzz.case import Case
from tools.fuzz.legal import is_prepackable, unit_of, why_illegal

#: How many times values are drawn for one set of shapes and options, which compile once.
REDRAWS = {"reference": 16, "interpreter": 16, "cuda": 64}
#: Sets of shapes and options of packed cases, without and with gradients, and the most problems in one call.
PACKED_SETS, MOST_PACKS = (36, 18), 512
#: Products of one slot that the oracle holds at a time.
_PACKED_ELEMENTS = 2**24
_WIDTHS = (1, 3, 8, 16, 17, 32, 33, 64)
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", *cases.ALWAYS_GATED)


class Drawn(NamedTuple):
    """One choice of shapes and options, whose kernels compile once, and how many times values are drawn for it."""

    static: Case
    name: str
    repeats: int

    def cases(self) -> Iterator[Case]:
        for repeat in range(self.repeats):
            yield draw_values(self.static, random.Random(f"{self.name} {repeat}"))


def sets_of(seed: int, engine: str, count: int | None = None) -> Iterator[Drawn]:
    """Sets of `count` cases in all, or without end; those of one seed are the same on every machine."""
    left = count
    for number in itertools.count():
        if left is not None and left <= 0:
            break
        name = f"{seed} {number}"
        repeats = REDRAWS[engine] if left is None else min(left, REDRAWS[engine])
        yield Drawn(draw_static(random.Random(f"{name} {engine}"), engine), name, repeats)
        left = None if left is None else left - repeats


def packed_sets(seed: int, engine: str, forward: int, gradient: int) -> list[Drawn]:
    """So many independent problems without and with gradients, packed into calls of few different shapes."""
    found = []
    for wanted, sets, has_gradient in zip((forward, gradient), PACKED_SETS, (False, True), strict=True):
        for number in range(sets):
            name = f"{seed} packed {number} {has_gradient}"
            static = _packed(random.Random(name), has_gradient, engine)
            found.append(Drawn(static, name, -(-wanted // (sets * static.packs))))
    return sorted(found, key=lambda drawn: (not drawn.static.gradient, -drawn.repeats))  # what takes longest first


def _packed(rng: random.Random, gradient: bool, engine: str) -> Case:
    """Problems with their own tokens, routing and experts: the experts of one are a range of those of the call."""
    while True:
        E, T = rng.choice((2, 4, 8)), rng.choice((1, 2, 3, 5))
        K = min(E, rng.choice((1, 2, 2, 4, 8)))
        choice: dict[str, Any] = {"T": T, "K": K, "E": E, "D": rng.choice((16, 32, 33)), "F": rng.choice((16, 17, 32))}
        choice |= _arithmetic(rng, "moe", engine)
        choice |= {"shared": 0, "shared_gate": False, "shared_activation": "", "router_layout": "in_out"}
        choice |= {"masked": rng.random() < 0.3, "on_input": K == 1 and rng.random() < 0.4, "gradient": gradient}
        choice["source"] = rng.choice(("ids", "logits", "logits"))
        if choice["source"] == "ids":
            choice |= _given(rng, choice)
        else:
            choice |= _rules(rng, E) | {"correction_bias": False, "router_bias": False, "bias_on": "scores"}
        if choice.get("weights", "") and not choice["weights"].startswith("fp8"):
            choice |= {"D": 32, "F": 32}
        case = Case(**choice)
        packs = max(2, min(MOST_PACKS, _PACKED_ELEMENTS // (T * K * case.D * case.width)))
        case = dataclasses.replace(case, packs=packs if engine != "interpreter" else 4)
        if case.dtype != "float64" and why_illegal(case) is None:
            return case


def draw_values(static: Case, rng: random.Random) -> Case:
    """The same shapes with another seed and other kinds of values."""
    x_kind = rng.choices(cases.X_KINDS, (10, 1, 1, 1, 1, 1, 1))[0]
    if static.dtype == "float16" and x_kind == "large":
        x_kind = "normal"
    values = {"x_kind": "normal" if static.kind in ("route", "layout") else x_kind}
    if static.kind == "exchange" and static.mode not in ("peer", "direct"):
        values["x_kind"] = "normal"
    if static.source == "logits" or static.kind == "route":
        values["logit_kind"] = rng.choices(cases.LOGIT_KINDS, (6, 2, 1, 1, 2, 2, 2))[0]
    if static.source == "ids" or static.given_ids:
        values["id_kind"] = rng.choice(cases.ID_KINDS)
    return dataclasses.replace(static, seed=rng.randrange(2**31), **values)


def draw_static(rng: random.Random, engine: str) -> Case:
    """Shapes and options of a legal case that the engine runs."""
    while True:
        found = _attempt(rng, engine)
        if why_illegal(found) is None:
            return found


def _attempt(rng: random.Random, engine: str) -> Case:
    kind = rng.choices(cases.KINDS, (8, 5, 4, 1, 3, 1, 2))[0]
    if kind == "norm":
        return _norm(rng, engine)
    if kind == "exchange":
        return _exchange(rng, engine)
    small = engine == "interpreter"
    E = rng.choice((1, 2, 3, 4, 6, 8, 9, 12, 16))
    T = rng.choice((0, 1, 2, 3, 5, 9) if small else (0, 1, 2, 3, 7, 16, 33))
    if kind == "route" and rng.random() < 0.2:
        E = rng.choice((64, 384))
    if kind in ("moe", "stages") and not small and rng.random() < 0.05:
        E = 384
    K = min(E, rng.choice((1, 1, 2, 2, 3, 4, 6, 8, E if E <= 16 else 6)))
    choice: dict[str, Any] = {"kind": kind, "T": T, "K": K, "E": E, "masked": rng.random() < 0.3}
    if kind in ("moe", "layer", "stages"):
        wide = 384 if E == 384 else 0
        widths = _WIDTHS[:4] if wide else _WIDTHS
        choice |= {"D": rng.choice(widths), "F": rng.choice(widths)}
        choice |= _arithmetic(rng, kind, engine)
        if choice.get("weights", "") and not choice["weights"].startswith("fp8"):
            widths = [width for width in (32, 64, 128) if width % unit_of(choice["weights"]) == 0]
            choice |= {"D": rng.choice(widths), "F": rng.choice(widths)}
    if kind == "moe" and engine != "interpreter" and rng.random() < 0.3 and choice.get("weights"):
        # No kernel of the interpreter takes prepacked weights.
        prepacked = {"prepacked": True, "dtype": "bfloat16", "weight_layout": "out_in", "activations": ""}
        if is_prepackable(Case(**choice | prepacked)):
            choice |= prepacked
    if kind == "moe":
        choice["source"] = rng.choice(("ids", "logits", "x"))
        choice["mapped"] = E + rng.choice((0, 1, 5)) if rng.random() < 0.3 else 0
        choice["stack"] = 2 if rng.random() < 0.2 else 0
        choice["out_dtype"] = rng.choice(("", "", "float32"))
        choice |= _given(rng, choice) if choice["source"] == "ids" else {}
    elif kind == "route":
        choice["source"] = rng.choice(("logits", "logits", "ids"))
    elif kind == "layout":
        choice["ids_dtype"] = rng.choice(cases.ID_DTYPES)
        choice["mapped"] = E + rng.choice((0, 3)) if rng.random() < 0.3 else 0
    if kind in ("layout", "stages"):
        choice["alignment"] = rng.choice((1, 1, 4, 128))
        choice["max_rows"] = rng.choice((0, 1, 3, 8)) if choice["alignment"] == 1 else 0
    if kind == "stages":
        choice["row_order"] = rng.random() < 0.3
    if kind in ("layer", "stages"):
        choice["source"] = "x"
    if choice.get("source", "ids") != "ids" or kind in ("layer", "route"):
        choice |= _rules(rng, choice.get("mapped", 0) or E)
    if kind in ("moe", "layer", "stages") and K == 1 and rng.random() < 0.4:
        choice["on_input"] = True
    if kind == "layer":
        choice |= _norm_options(rng) if rng.random() < 0.4 else {}
        choice |= {"gate_inputs": rng.random() < 0.2, "given_ids": rng.random() < 0.2}
        choice["expert_scale"] = rng.random() < 0.2
        choice["capacity"] = rng.choice((0.0, 0.0, 1.0, 1.25, 0.5))
        choice |= _around(rng, choice)
    if kind == "route" and rng.random() < 0.35:
        choice |= _rounding(rng, choice)
    case = Case(**choice)
    if case.source == "x" and kind != "stages" and rng.random() < 0.2:
        case = dataclasses.replace(case, logits_dtype="bfloat16")
    if case.is_differentiable and rng.random() < 0.35:
        case = dataclasses.replace(case, gradient=True, recompute=kind in ("moe", "layer") and rng.random() < 0.2)
        if kind in ("moe", "layer") and rng.random() < 0.2:
            case = dataclasses.replace(case, main_grad=True)
        if kind == "layer":
            case = dataclasses.replace(case, balance=rng.choice((0.0, 0.5)), z=rng.choice((0.0, 0.25)))
    if kind in ("moe", "layer") and rng.random() < 0.2:
        return _adapted(rng, case)
    if kind == "layer" and rng.random() < 0.1:
        rounded = dataclasses.replace(
            case, tile=16, rounding=rng.choice(("nearest", "up", "down")), T=rng.choice((0, 16, 37))
        )
        return rounded if why_illegal(rounded) is None else case
    return case


def _adapted(rng: random.Random, case: Case) -> Case:
    """With adapters of any targets that the case has, else as it is."""
    off: dict[str, Any] = {"main_grad": False, "prepacked": case.prepacked and rng.random() < 0.5}
    off |= {"adapters": rng.choice((1, 2, 5)), "shared_factors": rng.random() < 0.2}
    has = {"router": case.source == "x", "shared_gate_up": case.shared > 0, "shared_down": case.shared > 0}
    for among in (cases.TARGETS, cases.TARGETS[2:]):
        targets = [name for name in among if has.get(name, True) and rng.random() < 0.7]
        adapted = dataclasses.replace(case, targets=",".join(targets) or Case.targets, **off)
        if why_illegal(adapted) is None:
            return adapted
        off["shared_factors"] = False
    return case


def _given(rng: random.Random, choice: dict[str, Any]) -> dict[str, Any]:
    """The dtypes of given ids and weights."""
    weights = "float32" if choice["dtype"] == "float64" else rng.choice(cases.ROUTER_WEIGHT_DTYPES)
    return {"ids_dtype": rng.choice(cases.ID_DTYPES), "router_weight_dtype": weights}


def _rounding(rng: random.Random, choice: dict[str, Any]) -> dict[str, Any]:
    """Token rounding, in a route that can have it."""
    tile, mode = rng.choice((16, 16, 32, 48)), rng.choice(("nearest", "nearest", "up", "down"))
    E = min(choice["E"], 16)
    found = {"tile": tile, "rounding": mode, "T": rng.choice((0, tile, tile + 1, 2 * tile + 5, 70)), "E": E}
    found |= {"K": min(choice["K"], E), "source": "logits", "slot_order": "score", "num_groups": 1, "topk_group": 1}
    found |= {"correction_bias": False, "bias_on": "scores", "group_score": ""}
    found["candidates"] = rng.choice((0, 0, E, rng.randint(found["K"], E))) if mode != "down" else 0
    return found


def _around(rng: random.Random, choice: dict[str, Any]) -> dict[str, Any]:
    """What a layer has before its experts, behind them, and in its router's place."""
    found: dict[str, Any] = {"stack": 2 if rng.random() < 0.15 else 0}
    if rng.random() < 0.3:
        widths = (32, 64) if choice.get("weights", "") else _WIDTHS
        found |= {"latent": rng.choice(widths), "latent_norm": rng.random() < 0.5}
    if rng.random() < 0.35:
        found |= {"out_norm": rng.choice(("", "sum", "experts", "experts")), "out_scale": rng.choice((1.0, 0.3, 2.0))}
        found["out_bias"] = rng.random() < 0.5
    if found.get("latent_norm") or found.get("out_norm"):
        found |= {name: value for name, value in _norm_options(rng).items() if name != "router_norm"}
    if rng.random() < 0.12:
        found |= {"table": rng.choice((1, 2, 17)), "given_ids": False}
    elif rng.random() < 0.12 and choice["E"] > 1:
        found |= {name: getattr(Case, name) for name in cases.ROUTER_FIELDS}
        found |= {"mixer": rng.choice((0.01, 0.2)), "K": 2, "capacity": 0.0, "given_ids": False}
        found |= {"correction_bias": False, "on_input": False}
    return found


def _norm_options(rng: random.Random) -> dict[str, Any]:
    options = {"router_norm": rng.choice((1.0, 0.25)), "norm_epsilon": rng.choice((1e-6, 0.125))}
    return options | {"centred": rng.random() < 0.3, "weight_first": rng.random() < 0.3}


def _norm(rng: random.Random, engine: str) -> Case:
    sizes = {"T": rng.choice((0, 1, 5, 33)), "D": rng.choice((*_WIDTHS, 640))}
    return Case("norm", **sizes, dtype=rng.choice(_dtypes(engine)), gradient=rng.random() < 0.5, **_norm_options(rng))


def _exchange(rng: random.Random, engine: str) -> Case:
    """Ranks of one process: each number from one up to eight, and bounds around what comes."""
    small = engine == "interpreter"
    E, ranks = rng.choice((1, 2, 3, 5, 8, 16)), rng.choice((1, 2, 2, 3, 4) if small else (1, 2, 3, 4, 5, 8))
    choice: dict[str, Any] = {"E": E, "ranks": ranks, "T": rng.choice((0, 1, 2, 5, 9) if small else (0, 1, 3, 9, 33))}
    choice |= {"K": min(E, rng.choice((1, 2, 3, 4, 8, 9))), "spare": rng.choice((0, 0, 1, 2))}
    choice |= {"mode": rng.choice(("peer", *cases.MODES)), "by_token": rng.random() < 0.5}
    peer, direct = choice["mode"] == "peer", choice["mode"] == "direct"
    choice["bound"] = rng.choice(("", *cases.BOUNDS))
    if not peer:
        choice["by_token"] |= choice["mode"] == "all_gather"
        choice |= {"replicas": rng.random() < 0.4, "masked": rng.random() < 0.3}
    if not (peer or direct):
        return Case("exchange", **choice)
    choice |= {"dtype": rng.choice(_dtypes("")), "programs": rng.choice((0, 0, 1, 3))}
    if peer:
        choice["rows_format"] = rng.choice(("", "", "fp8_group", "fp8_group_pow2"))
    choice["D"] = rng.choice((1, 3, 9, 17, 33) if small else (1, 3, 17, 129, 257))
    if direct:
        choice |= {"shared": int(rng.random() < 0.4), "out_dtype": rng.choice(("", "", "float32"))}
        choice["shared_gate"] = choice["shared"] > 0 and rng.random() < 0.5
    return Case("exchange", **choice)


def _dtypes(engine: str) -> tuple[str, ...]:
    return ("float32", "bfloat16", "float16") + (("float64",) if engine == "reference" else ())


def _arithmetic(rng: random.Random, kind: str, engine: str) -> dict[str, Any]:
    activation = rng.choice(_ACTIVATIONS)
    gated = activation in cases.ALWAYS_GATED or rng.random() < 0.8
    choice: dict[str, Any] = {"dtype": rng.choice(_dtypes(engine)), "activation": activation, "gated": gated}
    if gated:
        choice["gate_layout"] = rng.choice(("halves", "interleaved", "separate"))
        choice["limit"] = rng.choice((0.0, 0.75, 2.0))
        if activation in ("swiglu_oai", "softcapped_silu"):
            choice["alpha"] = rng.choice((0.0, 1.5))
    choice["weight_layout"] = rng.choice(("in_out", "out_in"))
    choice["router_layout"] = rng.choice(("in_out", "out_in"))
    choice["bias"] = rng.random() < 0.4
    if kind in ("moe", "layer"):
        if rng.random() < 0.3:
            choice |= {"shared": rng.choice((1, 8, 16)), "shared_gate": rng.random() < 0.5}
            choice["shared_activation"] = rng.choice(("", "gelu"))
        choice["batch_invariant"] = rng.random() < 0.15
        if choice["dtype"] != "float64" and rng.random() < 0.3:
            choice["weights"] = rng.choice(cases.WEIGHT_FORMATS)
            choice["activations"] = rng.choice(("", *cases.ACTIVATION_FORMATS.get(choice["weights"], ())))
    if choice["dtype"] == "float32" and not choice.get("weights"):
        choice["tf32"] = rng.random() < 0.3
    if kind == "moe" and choice.get("activations", "").startswith("fp8_tensor"):
        choice["static_scales"] = rng.random() < 0.5
    return choice


def _rules(rng: random.Random, experts: int) -> dict[str, Any]:
    scoring = rng.choice(("softmax", "sigmoid", "sqrt_softplus"))
    choice: dict[str, Any] = {"scoring": scoring, "renormalize": rng.random() < 0.5}
    if scoring == "softmax":
        choice["order"] = rng.choice(("", "topk_then_softmax"))
    elif choice["renormalize"]:
        choice["epsilon"] = rng.choice((0.0, 0.0, 1e-6, 0.125))
    choice["scale"] = rng.choice((1.0, 2.5))
    groups = [count for count in (1, 2, 3, 4, 8) if experts % count == 0]
    choice["num_groups"] = rng.choice((1, *groups))
    choice["topk_group"] = rng.randint(1, choice["num_groups"])
    choice["slot_order"] = rng.choice(("score", "score", "expert"))
    choice["correction_bias"] = rng.random() < 0.4
    choice["router_bias"] = rng.random() < 0.3
    if rng.random() < 0.25:
        choice["logit_scale"] = rng.choice((0.5, 1.7))
        choice["softcap"] = rng.choice((0.0, 2.0))
    if choice["correction_bias"]:
        choice["bias_on"] = rng.choice(("scores", "scores", "logits"))
    if choice["num_groups"] > 1:
        choice["group_score"] = rng.choice(("", "", "best", "pair"))
    return choice
