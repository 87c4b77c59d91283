"""Classes of every published generation run in our kernel as their authors write them."""

from __future__ import annotations

import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput, Unsupported
from moe_torch import modular
from moe_torch.modular import FusedMoEModularKernel
from moe_torch.modular import FusedMoEModularKernel as Kernel
from moe_torch.modular import MoEPrepareAndFinalizeNoEP as NoEP
from tests.support.torch import ENGINES, running_on
from tools.generations import (
    GENERATIONS,
    TOPK,
    E,
    F,
    K,
    M,
    experts_class,
    local,
    part_class,
    problem,
    published,
    render,
    slots,
    table,
)

NAMES = [generation.name for generation in GENERATIONS]
BY_NAME = dict(zip(NAMES, GENERATIONS, strict=True))
engines = pytest.mark.parametrize("engine", ENGINES)
generations = pytest.mark.parametrize("name", NAMES)


def drawn(device: Any = "cpu", tokens: int = M, topk: int = TOPK) -> list[Any]:
    x, w1, w2, weights, ids = problem(False)[0]
    return [one.to(device) for one in (x[:tokens], w1, w2, weights[:tokens, :topk], ids[:tokens, :topk])]


def expected(x: Any, w1: Any, w2: Any, weights: Any, ids: Any, expert_map: Any = None) -> Any:
    return (slots(x, w1, w2, local(ids, expert_map)) * weights[..., None]).sum(1)


@engines
@pytest.mark.parametrize("part", NAMES)
@generations
def test_generations_run_beside_each_other(name: str, part: str, engine: str) -> None:
    """Whole, in chunks, with an expert map, with no and one token, and with the weight on the input."""
    with running_on(engine) as device, torch.no_grad():
        arguments, expert_map = drawn(device), torch.tensor([1, 0, -1, 2], dtype=torch.int32, device=device)
        few, ids = arguments[:3], arguments[4]
        kernel = Kernel(part_class(BY_NAME[part])(), experts_class(BY_NAME[name])())
        close = torch.testing.assert_close
        close(kernel(*arguments), expected(*arguments))
        close(kernel(*arguments, expert_map=expert_map), expected(*arguments, expert_map))
        for tokens in (0, 1):
            part_of = [few[0][:tokens], *few[1:], arguments[3][:tokens], ids[:tokens]]
            calls = len(kernel.fused_experts.calls_of_apply)
            close(kernel(*part_of), expected(*part_of))
            assert len(kernel.fused_experts.calls_of_apply) == calls + tokens, (
                "no published kernel calls without tokens"
            )
        one = drawn(device, topk=1)
        weighted = [one[0] * one[3], *one[1:3], torch.ones_like(one[3]), one[4]]
        close(kernel(*one, apply_router_weight_on_input=True), expected(*weighted))


@engines
@generations
def test_chunks_of_generations(name: str, engine: str) -> None:
    """Rows, scales and counts of a chunk are its own; results of the first generation are joined."""

    class Part(part_class(GENERATIONS[-1])):
        def prepare(self, a1: Any, topk_weights: Any, topk_ids: Any, *others: Any) -> Any:
            counts = torch.bincount(topk_ids[topk_ids >= 0], minlength=E).int()
            scale = torch.arange(a1.shape[0], device=a1.device)[:, None].float()
            return a1, scale, modular.ExpertTokensMetadata(counts, counts.cpu()), None, None

    experts = experts_class(BY_NAME[name])()
    experts.supports_chunking = lambda: True
    with running_on(engine) as device, torch.no_grad():
        arguments = [torch.cat([one, one, one])[:40] if i in (0, 3, 4) else one for i, one in enumerate(drawn(device))]
        found = Kernel(Part(), experts, chunk_size=16)(*arguments, a2_scale=None)
        torch.testing.assert_close(found, expected(*arguments))
        calls, ids = experts.calls_of_apply, arguments[4]
        if engine == "reference":
            assert len(calls) == 1
            return
        assert [call["hidden_states"].shape[0] for call in calls] == [16, 16, 8]
        for number, call in enumerate(calls):
            part, meta = ids[16 * number : 16 * number + 16], call.get("expert_tokens_meta")
            counts = call["expert_num_tokens"] if meta is None else meta.expert_num_tokens
            assert counts.tolist() == torch.bincount(part[part >= 0], minlength=E).tolist()
            assert meta is None or meta.expert_num_tokens_cpu.tolist() == counts.tolist()
            assert call["a1q_scale"].flatten().tolist() == list(range(16 * number, 16 * number + len(part)))
        experts.quant_config = modular.FusedMoEQuantConfig.make(use_fp8_w8a8=True, a2_scale=torch.ones(3))
        with pytest.raises(InvalidInput, match="a2_scale must have rows for each of the 40 tokens"):
            Kernel(Part(), experts, chunk_size=16)(*arguments)


@generations
def test_scales_of_a_call_reach_their_parameters(name: str) -> None:
    """By name in older generations, in the configuration of newer ones. Two values are refused."""
    arguments, part = drawn(), part_class(BY_NAME[name])()
    scales = {key: torch.rand(1) for key in ("w1_scale", "w2_scale", "w1_zp", "w2_zp", "a2_scale")}
    by_name = "w1_scale" in BY_NAME[name].apply
    config = modular.FusedMoEQuantConfig.make(use_int8_w8a8=True)
    experts = experts_class(BY_NAME[name])(*([] if by_name else [config]))
    Kernel(part, experts)(*arguments, **scales)
    (call,) = experts.calls_of_apply
    held = call if by_name else vars(call["quant_config"])
    assert all(held[key] is scale for key, scale in scales.items()) and call["a2_scale"] is scales["a2_scale"]
    if by_name:
        experts.w1_scale = torch.rand(1)
    else:
        experts.quant_config = call["quant_config"]
    with pytest.raises(InvalidInput, match="w1_scale must not be given twice"):
        Kernel(part, experts)(*arguments, w1_scale=torch.rand(1))


#: How authors write one method otherwise: parameters, and the error of a kernel that is made with it.
WRITTEN = {
    "renamed": (
        "prepare",
        "a, rank_weights, rank_ids, num_experts, expert_map, apply_router_weight_on_input, q, d",
        None,
    ),
    "renamed in 0.9.2": (
        "prepare",
        "a, scale, scale_2, rank_weights, rank_ids, num_experts, expert_map, apply_router_weight_on_input, q",
        None,
    ),
    "some": ("prepare", "topk_ids, a1, *, topk_weights, apply_router_weight_on_input=False", None),
    "rest": ("prepare", "a1, topk_weights, *rest", None),
    "named": ("prepare", "a1, **named", None),
    "defaults": ("finalize", "output, fused_expert_output, mine=1, topk_weights=None, *, topk_ids", None),
    "by place": ("workspace_shapes", "m, n, k, topk, every, here, expert_tokens_meta, activation", None),
    "unknown": ("prepare", "a1, tokens", "prepare must take some of a1, .* got a parameter 'tokens'; rename it"),
    "keyword": ("finalize", "output, *, mine", "finalize must take some of output, .* got a parameter 'mine'"),
    "no weights": ("apply", "output, hidden_states, topk_ids, activation", "apply of Written must take w1"),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_arguments_go_by_name_or_place(case: str) -> None:
    name, parameters, message = WRITTEN[case]
    seen: dict[str, Any] = {}
    arguments, newest = drawn(), GENERATIONS[-1]
    scope: dict[str, Any] = {"seen": seen, "shapes": lambda: ((1,), (1,), (M, TOPK, K))}
    result = {"prepare": "(seen.get('a1', seen.get('a')), None, None)", "workspace_shapes": "shapes()"}.get(name)
    exec(f"def {name}(self, {parameters}):\n    seen.update(locals())\n    return {result}", scope)
    bases = part_class(newest), experts_class(newest)
    classes = [type("Written", (base,), {name: scope[name]} if hasattr(base, name) else {}) for base in bases]
    if message is not None:
        with pytest.raises(InvalidInput, match=message):
            Kernel(classes[0](), classes[1]())
        return
    kernel = Kernel(classes[0](), classes[1]())
    kernel(*arguments)
    known = dict(
        zip(("a1", "a", "rank_weights", "topk_weights", "rank_ids", "topk_ids"), [0, 0, 3, 3, 4, 4], strict=True)
    )
    for key, value in seen.items():
        assert key not in known or value is arguments[known[key]], key
    if case == "rest":
        assert [type(value) for value in seen["rest"][:2]] == [torch.Tensor, int] and len(seen["rest"]) == 6
    if case == "by place":
        assert [seen[key] for key in "mnk"] == [M, 2 * K, K] and seen["activation"] == "silu"


def test_memory_of_older_generations_starts_as_theirs() -> None:
    """Flat workspaces up to 0.10, and zeros for experts that return and for sums that add."""

    class Adding(part_class(BY_NAME["middle"])):
        def finalize(self, output: Any, fused_expert_output: Any, topk_weights: Any, topk_ids: Any, *rest: Any) -> None:
            output += (fused_expert_output.view(*topk_ids.shape, -1) * topk_weights[..., None]).sum(1)

    arguments = drawn()
    for generation in GENERATIONS[:4]:
        kernel = Kernel(Adding(), experts_class(generation)())
        for name in ("workspace13", "workspace2"):
            kernel.workspaces.take(name, (1 << 16,), torch.float32, torch.device("cpu")).fill_(torch.nan)
        for _ in range(2):
            torch.testing.assert_close(kernel(*arguments), expected(*arguments))
        call = kernel.fused_experts.calls_of_apply[-1]
        assert call["workspace13"].dim() == (1 if generation.name in NAMES[:3] else 3)
        if generation.name == "oldest":
            assert not call["workspace13"].any() and not call["workspace2"].any()


FP8 = {"use_fp8_w8a8": True}
SCHEMES = {
    "tensor": ({}, (1,)),
    "token": ({"per_act_token_quant": True}, (M, 1)),
    "block": ({"block_shape": [128, 128]}, (M, K // 128)),
}


@engines
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_that_expect_quantised_tokens_get_them(scheme: str, engine: str) -> None:
    """From our NoEP, with scales as vLLM's; other parts of ours refuse such experts when the kernel is made."""
    flags, shape = SCHEMES[scheme]
    config = modular.FusedMoEQuantConfig.make(**FP8, **flags)
    with running_on(engine) as device, torch.no_grad():
        x, *others = drawn(device)
        experts = experts_class(GENERATIONS[-1])(config)
        Kernel(NoEP(), experts)(x, *others)
        (call,) = experts.calls_of_apply
        values, scale = call["hidden_states"], call["a1q_scale"]
        assert values.dtype == torch.float8_e4m3fn and scale.shape == shape
        grouped = values.float().view(M, -1, 128) * scale.view(-1, 1, 1)
        torch.testing.assert_close(grouped.view_as(x), x, rtol=0.07, atol=0.02)
        ours = modular.TritonExperts(config)
        assert ours.expects_unquantized_inputs and not experts.expects_unquantized_inputs
    batched = {"activation_formats": property(lambda self: (modular.FusedMoEActivationFormat.BatchedExperts,) * 2)}
    with pytest.raises(Unsupported, match="fused_experts must quantise tokens for BatchedPrepareAndFinalize"):
        Kernel(modular.BatchedPrepareAndFinalize(M, E), type("Batched", (type(experts),), batched)(config))
    with pytest.raises(Unsupported, match="must have fp32 scales where prepare quantises, got mxfp4_w4a4"):
        mxfp4 = modular.FusedMoEQuantConfig.make(use_mxfp4_w4a4=True)
        Kernel(NoEP(), experts_class(GENERATIONS[-1])(mxfp4))(*drawn())


def test_the_page_has_the_table() -> None:
    """Every class of ours by every constructor and call, on the reference."""
    with running_on("reference"):
        rows = table()
    assert published() == render(rows), "run python -m tools.generations --write"
    assert all("differs" not in cell for row in rows for cell in row)


def test_constructors_of_other_generations_are_checked() -> None:
    config, flags = modular.FusedMoEQuantConfig(), {"use_fp8_w8a8": True, "block_shape": [128, 128]}
    with pytest.raises(InvalidInput, match="use_fp8_w8a8 and block_shape must be left out beside a quant_config"):
        modular.TritonExperts(config, **flags)
    with pytest.raises(InvalidInput, match="use_fp8_w8a8 must be left out beside a quant_config"):
        modular.TritonOrDeepGemmExperts(True, quant_config=config)
    with pytest.raises(InvalidInput, match="block_m must be None"):
        modular.TritonExperts(block_m=16)
    assert modular.TritonExperts(use_int8_w8a8=True, per_channel_quant=True).per_act_token_quant
    assert modular.TritonOrDeepGemmExperts(modular.DeepGemmExperts().quant_config, True).allow_deep_gemm
    meta = modular.ExpertTokensMetadata.make_from_list([1, 2], "cpu")
    assert meta.expert_num_tokens.tolist() == meta.expert_num_tokens_cpu.tolist() == [1, 2]
    assert modular._moe_problem_size(*problem(False)[0][:3], problem(False)[0][4]) == (E, M, 2 * F, K, TOPK)
    with pytest.raises(InvalidInput, match="make takes no is_wrapped; its arrays are a1_scale"):
        modular.FusedMoEQuantConfig.make(is_wrapped=True)
    kernel = Kernel(modular.BatchedPrepareAndFinalize(M, E), modular.BatchedTritonExperts(M))
    x, w1, w2, weights, ids = problem(False)[0]
    own = kernel.prepare_finalize.prepare

    def prepare(a1, a1_scale, a2_scale, topk_weights, topk_ids, num_experts, expert_map, *rest) -> Any:
        prepared = own(a1, a1_scale, a2_scale, topk_weights, topk_ids, num_experts, expert_map, *rest)
        counts = modular.ExpertTokensMetadata(prepared.expert_num_tokens, None, rank_expert_offset=1)
        return modular.PreparedTokens(prepared.a1q, None, counts, handle=prepared.handle)

    kernel.prepare_finalize.prepare = prepare
    with running_on("reference"), torch.no_grad(), pytest.raises(Unsupported, match="must have no rank_expert_offset"):
        kernel(x, w1, w2, weights, ids)
    with pytest.raises(
        InvalidInput, match=f"max_num_tokens of BatchedTritonExperts must be {M}, that of Batched.*, got 3"
    ):
        Kernel(modular.BatchedPrepareAndFinalize(M, E), modular.BatchedTritonExperts(3))


def test_adapters_of_a_call_see_the_hidden_states() -> None:
    """As vLLM's kernel shows them, for the time of `apply`."""
    seen = []

    class Adapted(experts_class(GENERATIONS[-1])):
        _lora_context = None

        def apply(self, *arguments: Any) -> None:
            seen.append(getattr(self._lora_context, "original_hidden_states", None))
            arguments[0].zero_()

    experts, arguments = Adapted(), problem(False)[0]
    for context in (None, types.SimpleNamespace(original_hidden_states=None)):
        experts._lora_context = context
        Kernel(modular.MoEPrepareAndFinalizeNoEP(), experts)(*arguments)
    assert seen[0] is None and seen[1] is arguments[0] and context.original_hidden_states is None
    with pytest.raises(Unsupported, match="must not override _lora_context alone"):
        modular.DeepGemmExperts()._lora_context = context


#: Generations whose calls hold scales. Those of newer ones lie in the configuration.
HOLDS_SCALES = [generation for generation in GENERATIONS if generation.name not in ("gpt-oss", "newest")]


@pytest.mark.parametrize("rows", [TOPK * M, M])
def test_a_returned_output_has_the_shape_of_workspace_shapes(rows: int) -> None:
    class Returning(experts_class(GENERATIONS[-1])):
        def apply(
            self, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, a1q_scale,
            a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
        ):  # fmt: skip
            return torch.zeros(rows, K)

    with running_on("reference"), torch.no_grad():
        kernel: Any = FusedMoEModularKernel(part_class(GENERATIONS[-1])(), Returning())
        if rows == TOPK * M:
            assert not kernel(*drawn()).any()
            return
        with pytest.raises(
            InvalidInput, match=rf"must return its output, \[{TOPK * M}, {K}\] of workspace_shapes, got"
        ):
            kernel(*drawn())


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "reference"])
@pytest.mark.parametrize("generation", HOLDS_SCALES, ids=lambda generation: generation.name)
def test_a_chunk_has_its_rows_of_scales(generation: Any, engine: str) -> None:
    experts: Any = experts_class(generation)()
    experts.supports_chunking = lambda: True
    with running_on(engine) as device, torch.no_grad():
        x, w1, w2, weights, ids = drawn(device)
        x, weights, ids = (torch.cat([one] * 3)[:40] for one in (x, weights, ids))
        kernel: Any = FusedMoEModularKernel(part_class(generation)(), experts, chunk_size=16)
        kernel(x, w1, w2, weights, ids, a2_scale=torch.arange(40.0, device=device)[:, None])
    found = [call["a2_scale"].flatten().tolist() for call in experts.calls_of_apply]
    assert found == [list(range(begin, min(begin + 16, 40))) for begin in (0, 16, 32)]
