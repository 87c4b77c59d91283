"""Experts that route by themselves, and the newest generation's kernel around both kinds."""

from __future__ import annotations

import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput, Unsupported
from moe_torch import modular
from tests.support.modular.problems import E, F, K, as_in_out, draw_problem
from tests.support.torch import REAL_KERNELS, require_equal, running_on, to_torch

RoutingMethodType = modular.RoutingMethodType
Standard = modular.FusedMoEActivationFormat.Standard


class Prepare(modular.FusedMoEPrepareAndFinalizeMonolithic):
    activation_format = property(lambda self: Standard)
    deferred = False

    def post_init_setup(self, fused_experts: Any) -> None:
        self.experts = fused_experts

    def supports_deferred_moe_finalize(self) -> bool:
        return self.deferred

    def prepare(self, a1: Any, router_logits: Any, quant_config: Any, defer_input_quant: bool = False) -> Any:
        assert quant_config is self.experts.quant_config
        return a1, None, router_logits

    def finalize(self, fused_expert_output: Any) -> Any:
        return fused_expert_output * 2


class Experts(modular.FusedMoEExpertsMonolithic):
    """As published ones are written: the layer's description, then two configurations."""

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        self.topk = moe_config.experts_per_token
        self.renormalize = moe_config.routing_method is RoutingMethodType.Renormalize

    @staticmethod
    def activation_format() -> Any:
        return Standard

    def supports_routing_replay_capture(self) -> bool:
        return True

    def apply(
        self, hidden_states, w1, w2, router_logits, activation, global_num_experts, expert_map, a1q_scale,
        apply_router_weight_on_input, num_expert_group=None, e_score_correction_bias=None, routed_scaling_factor=None,
        topk_group=None, routing_replay_out=None,
    ) -> Any:  # fmt: skip
        assert a1q_scale is num_expert_group is e_score_correction_bias is topk_group is None
        if routing_replay_out is not None:
            routing_replay_out.copy_(router_logits.topk(self.topk).indices)
        options = (activation, self.quant_config, apply_router_weight_on_input, global_num_experts, expert_map)
        result = modular.triton_kernel_moe_forward(
            hidden_states, w1, w2, router_logits, self.topk, self.renormalize, *options
        )
        return result if routed_scaling_factor is None else types.SimpleNamespace(rows=result)


def moe_config(topk: int = 2) -> Any:
    parallel = modular.FusedMoEParallelConfig(tp_size=2)
    config = modular.FusedMoEConfig(
        E, topk, K, 2 * F, E, E, "silu", "cpu", RoutingMethodType.Renormalize, parallel, torch.float32
    )
    assert (config.intermediate_size_per_partition, config.is_act_and_mul, config.tp_size) == (F, True, 2)
    return config


def test_batched_experts_take_the_newest_order_of_arguments() -> None:
    config, plain = moe_config(), modular.FUSED_MOE_UNQUANTIZED_CONFIG
    experts = modular.BatchedTritonExperts(config, plain, 5, 3)
    assert experts.moe_config is config and (experts.max_num_tokens, experts.num_dispatchers) == (5, 3)
    assert modular.BatchedTritonExperts(config, plain, 5).num_dispatchers == 1
    for unused in ((config, plain, 5, 3, 7), (5, 3, config, plain, 7)):
        with pytest.raises(InvalidInput, match="each once"):
            modular.BatchedTritonExperts(*unused)


def kernel_of(experts: Any = None, part: Any = None) -> Any:
    experts = Experts(moe_config(), modular.FUSED_MOE_UNQUANTIZED_CONFIG) if experts is None else experts
    return modular.FusedMoEKernel(Prepare() if part is None else part, experts)


@pytest.mark.parametrize("engine", ["reference", REAL_KERNELS])
@pytest.mark.parametrize("tokens", [0, 1, 19])
def test_logits_are_routed_and_captured(engine: str, tokens: int) -> None:
    with running_on(engine) as device:
        x, w1, w2, *_ = to_torch(tuple(as_in_out(draw_problem())), device)
        x = x[:tokens]
        logits = torch.randn(tokens, E, generator=torch.Generator().manual_seed(0)).to(device)
        captured, kernel = [], kernel_of()
        sink = types.SimpleNamespace(buffer=torch.full((tokens + 3, 2), -7, device=device), capture_fn=captured.append)
        with torch.no_grad():
            output = kernel.apply_monolithic(x, w1, w2, logits, "silu", -1, None, False, routing_sink=sink)
            expected = modular.triton_kernel_moe_forward(x, w1, w2, logits, 2, True, "silu")
        require_equal(output, expected * 2, "output")
        require_equal(captured[0], logits.topk(2).indices, "output")
        assert (sink.buffer[tokens:] == -7).all() and kernel.is_monolithic and kernel.moe_config.experts_per_token == 2
        assert not (kernel.can_overlap_shared_experts or kernel.supports_lora() or kernel.output_is_reduced())


def test_routed_tokens_have_the_bits_of_our_kernel() -> None:
    x, w1, w2, weights, ids, *_ = to_torch(tuple(draw_problem()), "cpu")
    parts = modular.MoEPrepareAndFinalizeNoEP(), modular.TritonExperts()
    kernel = modular.FusedMoEKernel(*parts)
    with torch.no_grad():
        expected = modular.FusedMoEModularKernel(*parts)(x, w1, w2, weights, ids)
        require_equal(kernel.apply(x, w1, w2, weights, ids, "silu", -1, None, False), expected, "output")
        require_equal(modular.FusedMoEKernelModularImpl(*parts).apply(x, w1, w2, ids, weights), expected, "output")
    assert not kernel.is_monolithic and kernel.fused_experts is parts[1] and kernel.prepare_finalize is parts[0]
    with pytest.raises(Unsupported, match=r"shared_experts must be None.*FusedMoEModularKernel\(shared_experts"):
        kernel.apply(x, w1, w2, weights, ids, "silu", -1, None, False, shared_experts=print)
    with pytest.raises(InvalidInput, match="apply_monolithic must not be called for TritonExperts; call apply with"):
        kernel.apply_monolithic()


def test_refusals_name_what_is_wrong() -> None:
    x, w1, w2, *_ = to_torch(tuple(as_in_out(draw_problem())), "cpu")
    logits, kernel = torch.randn(x.shape[0], E), kernel_of()
    call = (x, w1, w2, logits, "silu", -1, None, False)

    class Narrow(Experts):
        def apply(self, hidden_states, w1, w2, router_logits, activation, **others):  # type: ignore[override]
            return hidden_states

    class Fixed(Experts):
        supports_routing_replay_capture = modular.FusedMoEExpertsMonolithic.supports_routing_replay_capture

        def apply(  # type: ignore[override]
            self, hidden_states, w1, w2, router_logits, activation, global_num_experts, expert_map,
            apply_router_weight_on_input,
        ):  # fmt: skip
            return hidden_states

    class Loose(Prepare):
        def prepare(self, a1, router_logits, quant_config, defer_input_quant=False):
            return a1

    class Batched(Prepare):
        activation_format = property(lambda self: modular.FusedMoEActivationFormat.BatchedExperts)

    configs = (moe_config(), modular.FUSED_MOE_UNQUANTIZED_CONFIG)
    require_equal(kernel_of(Fixed(*configs)).apply_monolithic(*call), x * 2, "output")
    require_equal(
        kernel_of(Narrow(*configs)).apply_monolithic(*call, topk_group=1, hash_indices_table=x), x * 2, "output"
    )
    refusals: dict[str, Any] = {
        "both be monolithic, or both not, got Prepare and TritonExperts": lambda: kernel_of(modular.TritonExperts()),
        "got MoEPrepareAndFinalizeNoEP and Experts": lambda: kernel_of(part=modular.MoEPrepareAndFinalizeNoEP()),
        "one activation format, got BatchedExperts and Standard": lambda: kernel_of(part=Batched()),
        "fused_experts must be": lambda: modular.FusedMoEModularKernel(
            modular.MoEPrepareAndFinalizeNoEP(), kernel.fused_experts
        ),
        "apply must not be called for Experts; call apply_monolithic": lambda: kernel.apply(
            *call[:5], "silu", -1, None, 0
        ),
        r"prepare of Loose must return tokens, .* got Tensor": lambda: kernel_of(part=Loose()).apply_monolithic(*call),
        "topk_group must be None for Fixed": lambda: kernel_of(Fixed(*configs)).apply_monolithic(*call, topk_group=2),
        "hash_indices_table must be None": lambda: kernel.apply_monolithic(*call, hash_indices_table=logits),
        "routing_sink must be None for Fixed": lambda: kernel_of(Fixed(*configs)).apply_monolithic(
            *call, routing_sink=types.SimpleNamespace()
        ),
        "Prepare must finalise SimpleNamespace": lambda: kernel.apply_monolithic(*call, routed_scaling_factor=2.0),
    }
    for message, refused in refusals.items():
        with torch.no_grad(), pytest.raises((InvalidInput, Unsupported), match=message):
            refused()
    kernel.prepare_finalize.deferred = True
    assert kernel.supports_deferred_moe_finalize()
    with torch.no_grad():
        assert hasattr(kernel.apply_monolithic(*call, routed_scaling_factor=2.0), "rows")
