"""Nothing of the newest interface is ignored: a marker in every member, argument and result is used or refused.

NEWEST lists the members of vLLM 0.33.0's classes. A member that is added there is tested as the others are.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput, Unsupported
from moe_torch import modular
from moe_torch.modular import FusedMoEModularKernel as Kernel
from tests.support.torch import REAL_KERNELS, running_on
from tools.generations import GENERATIONS, TOPK, E, F, K, M, experts_class, kernel_of, method, part_class, problem

_PREPARE, _FINALIZE = f"{GENERATIONS[-1].prepare}", GENERATIONS[-1].finalize
OF_QUANT_CONFIG = (
    *("quant_dtype", "weight_quant_dtype", "block_shape", "per_act_token_quant", "per_out_ch_quant", "a1_scale"),
    *("a2_scale", "a1_gscale", "a2_gscale", "w1_scale", "w2_scale", "w1_zp", "w2_zp", "w1_bias", "w2_bias"),
    *("g1_alphas", "g2_alphas"),
)
NEWEST = {
    "part": {
        "post_init_setup": "fused_experts",
        "allocate_fused_expert_output": "shape, dtype, device, weight_and_reduce_impl",
        "activation_format": None,
        "topk_indices_dtype": "",
        "max_num_tokens_per_rank": "",
        "num_dispatchers": "",
        "output_is_reduced": "",
        "supports_async": "",
        "supports_dbo": "",
        "supports_deferred_moe_finalize": "",
        "prepare": _PREPARE,
        "prepare_async": _PREPARE,
        "finalize": _FINALIZE,
        "finalize_async": _FINALIZE,
    },
    "experts": {
        "consumes_expert_mask": None,
        "post_gemm2_hook": None,
        "process_weights_after_loading": "layer",
        "_uses_post_gemm2_hook": "num_tokens",
        "_run_post_gemm2_hook": "unfinalized, output=None",
        "is_monolithic": "",
        "expects_unquantized_inputs": None,
        "activation_format": "",
        "_supports_current_device": "",
        "_supports_no_act_and_mul": "",
        "_supports_quant_scheme": "weight_key, activation_key",
        "_supports_activation": "activation",
        "_supports_parallel_config": "moe_parallel_config",
        "_supports_routing_method": "routing_method, weight_key, activation_key",
        "_supports_hash_routing": "",
        "_supports_router_logits_dtype": "router_logits_dtype, routing_method",
        "_supports_shape": "hidden_dim",
        "_supports_batch_invariance": "",
        **dict.fromkeys(OF_QUANT_CONFIG),
        "supports_lora": "",
        "supports_packed_ue8m0_act_scales": "",
        "moe_problem_size": "a1, w1, w2, topk_ids",
        "workspace_dtype": "act_dtype",
        "output_hidden_dim": "hidden_dim",
        "workspace_shapes": GENERATIONS[-1].workspace_shapes,
        "adjust_N_for_activation": "N, activation",
        "activation": "activation, output, input, *, topk_ids=None, expert_map=None, valid_token_counts=None",
        "finalize_weight_and_reduce_impl": "",
        "apply": GENERATIONS[-1].apply,
    },
}
MEMBERS = [(kind, name) for kind, members in NEWEST.items() for name in members]
#: Members that others than a kernel read: authors' own `apply` and `post_init_setup`, and owners of layers.
OF_AUTHORS = {
    *("_uses_post_gemm2_hook", "_run_post_gemm2_hook", "post_gemm2_hook", "adjust_N_for_activation", "activation"),
    *OF_QUANT_CONFIG,
    *("supports_packed_ue8m0_act_scales", "process_weights_after_loading", "supports_dbo"),
    # An option of this library's `tuning`, and of vLLM's environment.
    "_supports_batch_invariance",
} - {"a2_scale"}


class Asked(Exception):
    pass


class Marker:
    """Says whether anything was done with it."""

    touched = False

    def _touch(self, *arguments: Any) -> Any:
        Marker.touched = True
        raise Asked

    __bool__ = __len__ = __iter__ = __eq__ = __hash__ = __call__ = __index__ = __getattr__ = _touch  # type: ignore[assignment]


def unfinalized(output: Any, weights: Any) -> Any:
    """Rows by slot, in the reverse order."""
    places = torch.arange(weights.numel(), dtype=torch.int32, device=weights.device).flip(0).view_as(weights)
    return modular.UnfinalizedMoEOutput(output.view(-1, K).flip(0), weights, places)


def _unfinalized(self: Any, call: dict[str, Any]) -> Any:
    experts_class(GENERATIONS[-1]).apply(self, **{name: call[name] for name in GENERATIONS[-1].apply.split(", ")})
    result = unfinalized(call["output"].clone(), call["topk_weights"])
    call["output"].fill_(torch.nan)
    return result


#: Arguments of `prepare` and `finalize`.
PASSED: list[dict[str, Any]] = []


def noted(name: str, parameters: str, part: type) -> Any:
    def body(self: Any, call: dict[str, Any]) -> Any:
        PASSED.append(call)
        return getattr(part, name)(*call.values())

    return method(name, parameters, body)


def classes(asynchronous: bool = False, late: bool = False) -> dict[str, type]:
    """An author's classes. asynchronous: prepare and finalize in halves. late: experts leave their last sum."""
    part, experts = part_class(GENERATIONS[-1]), experts_class(GENERATIONS[-1])
    halves = (("prepare", _PREPARE), ("finalize", _FINALIZE))
    part = type("Part", (part,), {name: noted(name, parameters, part) for name, parameters in halves})
    if asynchronous:
        halves = {
            "supports_async": lambda self: True,
            "prepare_async": method("prepare_async", _PREPARE, lambda self, call: lambda: (call["a1"], None, None)),
            "finalize_async": method("finalize_async", _FINALIZE, lambda self, call: lambda: call["output"].fill_(0)),
        }
        part = type("Halves", (part,), halves)
    if late:
        part = type("Passing", (part,), {"supports_deferred_moe_finalize": lambda self: True})
        experts = type("Late", (experts,), {"apply": method("apply", GENERATIONS[-1].apply, _unfinalized)})
    return {"part": part, "experts": experts}


MOE_CONFIG = types.SimpleNamespace(
    is_act_and_mul=False, activation="silu", moe_parallel_config=None, routing_method=0, router_logits_dtype=None,
    hidden_dim=K, is_lora_enabled=True, has_hash_routing=True,
)  # fmt: skip


def scenarios(kind: str, members: dict[str, Any]) -> list[Callable[[], Any]]:
    """Everything that a kernel and an owner do with classes that have these members of their own."""
    arguments = problem(False)[0]

    def run(**options: bool) -> Any:
        made = {
            name: type(base.__name__, (base,), members if name == kind else {})
            for name, base in classes(**options).items()
        }
        part, experts = made["part"](), made["experts"]()
        experts.num_dispatchers = 1
        result = Kernel(part, experts)(*arguments)
        return (result, *(value for call in (*PASSED, *experts.calls_of_apply) for value in call.values()))

    def asked() -> Any:
        made = {name: type(base.__name__, (base,), members if name == kind else {}) for name, base in classes().items()}
        kernel = modular.FusedMoEKernel(made["part"](), made["experts"]())
        return kernel.output_is_reduced(), kernel.supports_lora(), kernel.supports_deferred_moe_finalize()

    def supported(**more: Any) -> Any:
        experts = type("Experts", (experts_class(GENERATIONS[-1]),), (members if kind == "experts" else {}) | more)
        return experts.is_supported_config(experts, MOE_CONFIG, None, None, modular.FusedMoEActivationFormat.Standard)

    monolithic = {"is_monolithic": staticmethod(lambda: True)}
    return [
        run, lambda: run(asynchronous=True), lambda: run(late=True), asked, supported, lambda: supported(**monolithic),
    ]  # fmt: skip


def member_that(name: str, parameters: str | None, act: Callable[[], Any]) -> Any:
    if parameters is None:
        return property(lambda self: act())
    function = method(name, parameters, lambda self, call: act()) if parameters else (lambda *self: act())
    static = name.startswith("_supports") or name in ("is_monolithic", "activation_format", "supports_lora")
    return staticmethod(lambda *arguments: act()) if static else function


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_every_member_is_asked_or_is_an_authors(kind: str, name: str) -> None:
    def act() -> Any:
        raise Asked

    asked = False
    for run in scenarios(kind, {name: member_that(name, NEWEST[kind][name], act)}):
        try:
            run()
        except Asked:
            asked = True
        except AttributeError as error:  # of a property
            asked |= isinstance(error.__context__, Asked)
    assert asked != (name in OF_AUTHORS), "asked" if asked else "nobody asks it"
    base = getattr(modular, {"part": "FusedMoEPrepareAndFinalize", "experts": "FusedMoEExpertsModular"}[kind])
    assert hasattr(base, name), f"{base.__name__} lacks it"


@pytest.mark.parametrize(("kind", "name"), [case for case in MEMBERS if case[1] not in OF_AUTHORS])
def test_every_result_is_used_or_refused(kind: str, name: str) -> None:
    Marker.touched, marker, outcomes = False, Marker(), []
    PASSED.clear()
    for run in scenarios(kind, {name: member_that(name, NEWEST[kind][name], lambda: marker)}):
        try:
            outcomes.append(run())
        except Exception:
            Marker.touched = True
    flat = [one for outcome in outcomes for one in (outcome if isinstance(outcome, tuple) else (outcome,))]
    assert Marker.touched or any(one is marker for one in flat), "the result is ignored"


@pytest.mark.parametrize("name", NEWEST["experts"])
def test_members_of_our_experts_are_asked_or_refused(name: str) -> None:
    """Overridden in a class that keeps our `apply`."""
    parameters = NEWEST["experts"][name]

    def act() -> Any:
        raise Asked

    x, w1, w2, *routing = problem(False)[0]
    try:
        mine = type("Mine", (modular.TritonExperts,), {name: member_that(name, parameters, act)})
        kernel_of(mine())(x, w1, w2, *routing)
        mine.is_supported_config(mine, MOE_CONFIG, None, None, modular.FusedMoEActivationFormat.Standard)
        monolithic = type("Alone", (mine,), {"is_monolithic": staticmethod(lambda: True)})
        mine.is_supported_config(monolithic, MOE_CONFIG, None, None, modular.FusedMoEActivationFormat.Standard)
    except (Asked, Unsupported, InvalidInput):
        return
    assert name in OF_AUTHORS - {"activation", "post_gemm2_hook", *OF_QUANT_CONFIG}, "ignored"


def test_a_layer_is_supported_or_the_answer_says_why() -> None:
    standard, batched = modular.FusedMoEActivationFormat.Standard, modular.FusedMoEActivationFormat.BatchedExperts
    found = [modular.TritonExperts.is_supported_config(modular.TritonExperts, MOE_CONFIG, None, None, one)
             for one in (standard, batched)]  # fmt: skip
    assert found == [(True, None), (False, f"kernel does not support {batched.value} activation format")]


def test_every_argument_is_the_calls() -> None:
    """Each by name; one that NEWEST gains needs its value here."""
    x, w1, w2, weights, ids = problem(False)[0]
    seen: dict[str, dict[str, Any]] = {}
    scale, counts = torch.rand(M, 1), torch.ones(E, dtype=torch.int32)
    meta = modular.ExpertTokensMetadata(counts, counts)
    impl, config = modular.TopKWeightAndReduceContiguous(), modular.FusedMoEQuantConfig.make(use_fp8_w8a8=True)
    arrived = [x.flip(0), scale, meta, ids.flip(0), weights.flip(0)]
    results = {
        "prepare": lambda call: arrived,
        "workspace_shapes": lambda call: ((3, 5), (7,), (M, TOPK, K)),
        "finalize_weight_and_reduce_impl": lambda call: impl,
        "workspace_dtype": lambda call: torch.float64,
        "moe_problem_size": lambda call: (E, M, 2 * F, K, TOPK),
        "output_hidden_dim": lambda call: K - 1,
        "allocate_fused_expert_output": lambda call: memory,
    }
    memory = torch.zeros(M, TOPK, K, dtype=torch.float64)

    def recording(kind: str, base: type) -> Any:
        members = {}
        for name, parameters in NEWEST[kind].items():
            if name in (*results, "apply", "finalize", "post_init_setup"):

                def body(self: Any, call: dict[str, Any], name: str = name) -> Any:
                    seen[name] = {key: value for key, value in call.items() if key != "self"}
                    return results.get(name, lambda call: None)(call)

                members[name] = method(name, parameters or "*none", body)
        return type(base.__name__, (base,), members)

    part, experts = (recording(kind, base) for kind, base in classes().items())
    experts, expert_map = experts(config), torch.tensor([0, 1, 2, 3, -1], dtype=torch.int32)
    kernel = Kernel(part(), experts)
    activation, given = object(), torch.rand(1)
    output = kernel(
        x, w1, w2, weights, ids, activation=activation, global_num_experts=5, expert_map=expert_map, a2_scale=given
    )
    values = {
        "a1": x, "num_experts": 5, "expert_map": expert_map, "apply_router_weight_on_input": False,
        "defer_input_quant": False, "output": output, "fused_expert_output": memory, "topk_weights": weights,
        "topk_ids": ids, "weight_and_reduce_impl": impl, "fused_experts": experts, "w1": w1, "w2": w2, "M": M,
        "N": 2 * F,
        "K": K, "topk": TOPK, "hidden_states": x, "global_num_experts": 5, "local_num_experts": E,
        "expert_tokens_meta": meta,
        "activation": activation, "shape": (M, TOPK, K), "dtype": torch.float64, "device": x.device,
        "act_dtype": torch.float32, "hidden_dim": K, "a1q_scale": scale, "a2_scale": given, "none": (),
    }  # fmt: skip
    of_apply = {"output": memory, "hidden_states": arrived[0], "topk_ids": arrived[3], "topk_weights": arrived[4]}
    own = {"apply": of_apply, "moe_problem_size": {"a1": arrived[0], "topk_ids": arrived[3]}}
    assert set(seen) >= {*results, "apply", "finalize", "post_init_setup"} and output.shape == (M, K - 1)
    for name, call in seen.items():
        for key, value in call.items():
            if key == "quant_config":
                assert value.scheme == "fp8_w8a8" and value.a2_scale is given
            elif key.startswith("workspace"):
                assert (tuple(value.shape), value.dtype) == {"workspace13": ((3, 5), torch.float64)}.get(
                    key, ((7,), torch.float64)
                )
            else:
                wanted = own.get(name, {}).get(key, values[key])
                assert value is wanted or (not isinstance(value, torch.Tensor) and value == wanted), (name, key)


def test_unfinalised_outputs_are_finalised_or_passed_on() -> None:
    """Whole and in chunks, into new memory and over hidden_states; only where nothing is lost."""
    arguments = problem(False)[0]
    with running_on("reference"):
        expected = kernel_of(modular.TritonExperts())(*arguments)
    made, part = classes(late=True)["experts"], modular.MoEPrepareAndFinalizeNoEP
    for prepare in (part(), classes()["part"]()):
        noop = {"finalize": lambda self, output, rows, w, i, on, impl: output.copy_(rows)}
        prepare = prepare if isinstance(prepare, part) else type("P", (type(prepare),), noop)()
        kernel = Kernel(prepare, made())
        torch.testing.assert_close(kernel(*arguments), expected)
        hidden_states = arguments[0].clone()
        torch.testing.assert_close(kernel(hidden_states, *arguments[1:], inplace=True), expected)
        torch.testing.assert_close(hidden_states, expected)
    chunked = type("Chunked", (made,), {"supports_chunking": lambda self: True})()
    more = [torch.cat([one, one]) if index in (0, 3, 4) else one for index, one in enumerate(arguments)]
    with running_on(REAL_KERNELS) as device:
        found = Kernel(part(), chunked, chunk_size=16)(*(one.to(device) for one in more))
        torch.testing.assert_close(found.cpu(), torch.cat([expected, expected]))
        assert len(chunked.calls_of_apply) == 2
        odd = type("Odd", (type(chunked),), {"apply": lambda self, *a: "rows"})()
        with pytest.raises(InvalidInput, match=r"apply of Odd must return an UnfinalizedMoEOutput with .*, got str"):
            Kernel(part(), odd, chunk_size=16)(*(one.to(device) for one in more))
    result = Kernel(classes(late=True)["part"](), made(), shared_experts=lambda x: x)(*arguments)
    assert isinstance(result[1], modular.UnfinalizedMoEOutput) and result[0] is arguments[0]
    five = {"finalize": method("finalize", GENERATIONS[0].finalize, lambda self, call: None)}
    with pytest.raises(Unsupported, match="where finalize of Five takes no weight_and_reduce_impl"):
        Kernel(type("Five", (classes()["part"],), five)(), made())(*arguments)
    with pytest.raises(Unsupported, match="where the router's weights are on the input"):
        x, w1, w2, weights, ids = arguments
        late = {
            "apply": lambda self, *a: modular.UnfinalizedMoEOutput(torch.ones(M, K), weights[:, :1], ids[:, :1] * 0)
        }
        experts = type("One", (classes()["experts"],), late)()
        one = (weights[:, :1], ids[:, :1], True)  # inplace
        hidden_states = x.clone()
        Kernel(part(), experts)(hidden_states, w1, w2, *one, apply_router_weight_on_input=True)
    assert torch.equal(hidden_states, x)


def test_a_hook_after_the_second_product_reduces() -> None:
    experts = classes()["experts"]()
    rows, weights, taken = torch.randn(M * TOPK, K), torch.rand(M, TOPK), []
    one = unfinalized(rows, weights)
    assert not experts._uses_post_gemm2_hook(3)
    experts.post_gemm2_hook = lambda result, output: taken.append(result) or output.zero_()
    assert experts._uses_post_gemm2_hook(3) and not experts._run_post_gemm2_hook(one).any() and taken == [one]
    with pytest.raises(InvalidInput, match="post_gemm2_hook must write its result and return None, got str"):
        experts.post_gemm2_hook = lambda result, output: "lost"
        experts._run_post_gemm2_hook(one)
    experts.process_weights_after_loading(torch.nn.Identity())


BAD = {
    "pair": ("prepare", (1, 2), "must return PreparedTokens or a tuple of 3 or 5, got tuple of 2"),
    "counts": ("prepare", (torch.zeros(M, K), None, [1, 2]), "must return counts as a tensor or ExpertTokensMetadata"),
    "tensor": ("apply", torch.zeros(M, K), "apply of Bad must write its result and return None, got Tensor"),
    "finalize": ("finalize", torch.zeros(M, K), "finalize of Bad must write its result and return None, got Tensor"),
    "two": ("workspace_shapes", ((1,), (2,)), "must return the shapes of two workspaces and of the output"),
    "no output": ("workspace_shapes", (1, 2, torch.float32), "must return the shapes of two workspaces"),
    "memory": (
        "allocate_fused_expert_output",
        torch.zeros(1),
        "must return torch.float32 .* allocate what it is asked",
    ),
    "strides": ("allocate_fused_expert_output", torch.zeros(TOPK * M, 2 * K)[:, ::2], "must return dense memory"),
    "setup": ("post_init_setup", 1, "post_init_setup of Bad must write its result and return None, got int"),
    "limit": ("max_num_tokens_per_rank", 3, "hidden_states must have at most 3 tokens"),
    "mask": ("consumes_expert_mask", True, "consumes_expert_mask of Bad must be False"),
    "alone": ("is_monolithic", True, "fused_experts must take topk_ids and topk_weights"),
    "silent": ("finalize_weight_and_reduce_impl", "base", "Bad must say what apply leaves to finalize"),
    "format": ("activation_format", None, "Bad must say what tokens it gives"),
}


@pytest.mark.parametrize("case", BAD)
def test_unfit_results_are_named(case: str) -> None:
    name, value, message = BAD[case]
    kind = next(kind for kind in ("part", "experts") if name in NEWEST[kind])
    member: Any = member_that(name, NEWEST[kind][name], lambda: value)
    if value == "base":
        member = modular.FusedMoEExpertsModular.finalize_weight_and_reduce_impl
    made = {key: type("Bad", (base,), {name: member} if key == kind else {}) for key, base in classes().items()}
    with pytest.raises((InvalidInput, Unsupported), match=message):
        Kernel(made["part"](), made["experts"]())(*problem(False)[0])
