"""The modular kernel under torch.compile, in CUDA graphs and in training, LoRA at the injection points included."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_torch import modular
from moe_torch.modular import FusedMoEModularKernel, MoEPrepareAndFinalizeNoEP
from tests.support.modular.problems import E, F, K, as_in_out, draw_problem
from tests.support.torch import REAL_KERNELS, require_equal, running_on, to_torch

CLASSES = (modular.TritonExperts, modular.UnfusedOAITritonExperts, modular.BatchedTritonExperts)
SILU = moe_torch.Activation("silu")


def kernel_of(experts: type) -> FusedMoEModularKernel:
    if experts is modular.BatchedTritonExperts:
        return FusedMoEModularKernel(modular.BatchedPrepareAndFinalize(40, E), experts(40))
    return FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), experts())


def tensors(experts: type, device: Any = "cpu", **options: Any) -> tuple[Any, ...]:
    problem = draw_problem(**options)
    return to_torch(tuple(as_in_out(problem) if experts is modular.UnfusedOAITritonExperts else problem), device)


def test_no_graph_break_and_one_program_for_every_number_of_tokens() -> None:
    torch._dynamo.reset()
    with running_on("reference"):
        for experts in CLASSES:
            kernel = kernel_of(experts)
            compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
            for number, tokens in enumerate((9, 13) if experts is not modular.BatchedTritonExperts else (9,)):
                arguments = tensors(experts, tokens=tokens)
                for name in (0, 3, 4):
                    torch._dynamo.mark_dynamic(arguments[name], 0)
                with torch._dynamo.config.patch(error_on_recompile=number > 0):
                    result = compiled(*arguments)
                require_equal(result, kernel(*arguments), f"{experts.__name__}, {tokens} tokens")
    arguments = tensors(modular.TritonExperts, tokens=20)
    kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), modular.TritonExperts(), chunk_size=16)
    with running_on("reference"), torch.no_grad():
        expected = kernel(*arguments)
        torch.compile(kernel, fullgraph=True, backend="aot_eager")(*arguments, inplace=True)
    require_equal(arguments[0], expected, "inplace")


class LoRA(modular.UnfusedOAITritonExperts):
    """Adapters on both products: `x A1 B1` is added to what the activation reads, `hidden A2 B2` to the slots' sum."""

    def __init__(self, rank: int, scale: float, device: Any) -> None:
        super().__init__()
        self.scale = scale

        def adapter(*shape: int, std: float) -> Any:
            return (std * torch.randn(E, *shape, device=device)).requires_grad_()

        self.adapters = (
            adapter(K, rank, std=K**-0.5),
            adapter(rank, 2 * F, std=0.0),
            adapter(F, rank, std=F**-0.5),
            adapter(rank, K, std=0.0),
        )

    def _low_rank(self, rows: Any, first: Any, second: Any, gather: str, row_weight: Any = None) -> Any:
        low = moe_torch.MatmulSpec("in_out", gather, "row")
        layout = self.context.layout
        low_rows = moe_torch.matmul_ogs(moe_torch.MatmulOperands(rows, first), layout, low)
        operands = moe_torch.MatmulOperands(low_rows, second, row_weight=row_weight)
        return self.scale * moe_torch.matmul_ogs(operands, layout, moe_torch.MatmulSpec("in_out", "row", "slot"))

    def activation(self, activation: Any, output: Any, input: Any) -> None:
        assert self.context.activated is None
        change = self._low_rank(self.context.hidden_states, *self.adapters[:2], "token")
        super().activation(activation, output, input + change)

    def moe_sum(self, input: Any, output: Any) -> None:
        change = self._low_rank(self.context.activated, *self.adapters[2:], "slot", self.context.row_weight)
        super().moe_sum(input + change.view_as(input), output)


def test_lora_through_the_injection_points_trains() -> None:
    torch.manual_seed(0)
    with running_on("reference") as device:
        x, w1, w2, weights, ids = tensors(modular.UnfusedOAITritonExperts, device)
        experts = LoRA(4, 2.0, device)
        kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), experts)
        with torch.no_grad():
            plain = kernel_of(modular.UnfusedOAITritonExperts)(x, w1, w2, weights, ids)
            require_equal(kernel(x, w1, w2, weights, ids), plain, "adapters that change nothing")
            teacher = kernel_of(modular.UnfusedOAITritonExperts)(x, w1 + 0.3 * torch.randn_like(w1), w2, weights, ids)
        optimizer, losses = torch.optim.Adam(experts.adapters, 2e-2), []
        for _ in range(12):
            loss = (kernel(x, w1, w2, weights, ids) - teacher).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            require_equal(compiled(x, w1, w2, weights, ids), kernel(x, w1, w2, weights, ids), "compiled")
    assert losses[-1] < 0.6 * losses[0], losses


def test_the_context_ends_with_its_apply() -> None:
    """That of an apply which fails too, and one inside of another gives the outer one's back."""
    arguments = tensors(modular.UnfusedOAITritonExperts)
    inner, experts, seen = kernel_of(modular.UnfusedOAITritonExperts), modular.UnfusedOAITritonExperts(), []

    def fail(input: Any, output: Any) -> None:
        outer = experts.context
        inner(*arguments)
        seen.append(experts.context is outer)
        raise RuntimeError("no sum")

    experts.moe_sum = fail
    with running_on("reference"), pytest.raises(RuntimeError, match="no sum"):
        FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), experts)(*arguments)
    assert seen == [True]
    with pytest.raises(moe_torch.InvalidInput, match="inside of activation or moe_sum"):
        getattr(experts, "context")  # noqa: B009


@pytest.mark.parametrize("experts", CLASSES[:2])
def test_gradients_are_those_of_the_composed_op(experts: type) -> None:
    """Of tokens, weights and router weights; chunks of a training step keep what a backward reads."""
    with running_on(REAL_KERNELS) as device:
        arguments = tensors(experts, device, tokens=20)
        found = []
        for chunk_size in (None, 16):
            kernel = kernel_of(experts)
            kernel.chunk_size = chunk_size
            leaves = [argument.clone().requires_grad_() for argument in arguments[:4]]
            kernel(*leaves, arguments[4]).square().sum().backward()
            found.append([leaf.grad for leaf in leaves])
        leaves = [argument.clone().requires_grad_() for argument in arguments[:4]]
        spec = moe_torch.MoESpec(SILU, weight_layout=kernel.fused_experts.weight_layout)
        routing = moe_torch.TopK(arguments[4], leaves[3])
        moe_torch.moe(leaves[0], moe_torch.ExpertWeights(*leaves[1:3]), routing, spec).output.square().sum().backward()
        for gradients in found:
            for name, one, leaf in zip(("x", "w1", "w2", "weights"), gradients, leaves, strict=True):
                torch.testing.assert_close(
                    one, leaf.grad, rtol=2e-4, atol=2e-4, msg=lambda text, n=name: f"{n}: {text}"
                )


def test_gradient_of_a_weight_on_the_input() -> None:
    with running_on("reference"):
        arguments = tensors(modular.TritonExperts, topk=1)
        leaves = [argument.clone().requires_grad_() for argument in arguments[:4]]
        options = {"apply_router_weight_on_input": True}
        kernel_of(modular.TritonExperts)(*leaves, arguments[4], **options).sum().backward()
        others = [argument.clone().requires_grad_() for argument in arguments[:4]]
        spec = moe_torch.MoESpec(SILU, weight_layout="out_in", apply_router_weight_on_input=True)
        routing = moe_torch.TopK(arguments[4], others[3])
        moe_torch.moe(others[0], moe_torch.ExpertWeights(*others[1:3]), routing, spec).output.sum().backward()
        for one, other in zip(leaves, others, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_inplace_is_seen_by_autograd() -> None:
    """A tensor that a backward keeps, and that the kernel writes over, makes the backward fail instead of wrong."""
    with running_on("reference"):
        x, w1, w2, weights, ids = tensors(modular.TritonExperts)
        scale = torch.ones_like(x, requires_grad=True)
        product = scale * x
        kernel_of(modular.TritonExperts)(x, w1, w2, weights, ids, inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [*CLASSES, modular.OAITritonExperts])
@pytest.mark.parametrize("chunk_size", [None, 16])
def test_cuda_graphs(experts: type, chunk_size: int | None) -> None:
    """A captured forward follows new values of its inputs, and eager calls in between do not disturb it."""
    if chunk_size and experts is modular.BatchedTritonExperts:
        pytest.skip("the batched format is not split")
    with running_on("cuda") as device, torch.no_grad():
        kernel = kernel_of(experts)
        kernel.chunk_size = chunk_size
        in_out = issubclass(experts, modular.BaseOAITritonExperts)
        first, second = (
            to_torch(tuple(as_in_out(problem) if in_out else problem), device)
            for problem in (draw_problem("bfloat16", seed=seed) for seed in (1, 2))
        )
        expected = [kernel(*arguments).clone() for arguments in (first, second)]
        static = [argument.clone() for argument in first]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = kernel(*static)
        for number, arguments in enumerate((second, first)):
            for place, argument in zip(static, arguments, strict=True):
                place.copy_(argument)
            kernel(*second)
            graph.replay()
            torch.cuda.synchronize()
            require_equal(captured, expected[1 - number], f"replay {number}")


def test_what_does_not_train_says_so() -> None:
    """A fused activation on rows that are not the composed op's keeps nothing for a backward."""
    with running_on("reference"):
        x, w1, w2, weights, ids = tensors(modular.BatchedTritonExperts)
        with pytest.raises(moe_torch.Unsupported, match="a matmul with a fused activation has no gradient"):
            kernel_of(modular.BatchedTritonExperts)(x.requires_grad_(), w1, w2, weights, ids)
