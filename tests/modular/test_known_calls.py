"""Calls of a modular kernel that look like one before: what is remembered of them, and what is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_core.errors import InvalidInput, Unsupported
from moe_core.specs import Activation, MoESpec
from moe_torch import modular, ops
from moe_torch.modular import FusedMoEModularKernel, MoEPrepareAndFinalizeNoEP, into
from moe_torch.modular.stages import as_ids, as_weights
from moe_torch.modular.stored import _scale_of
from moe_torch.operators.requests import moe_request
from tests.support.torch import require_equal, running_on

E, K = 5, 16


def kernel_of(**options: Any) -> FusedMoEModularKernel:
    return FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), modular.TritonExperts(**options))


def draw(*shape: int, seed: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 4


X, W1, W2 = draw(6, K, seed=0), draw(E, K, K, seed=1), draw(E, K, K // 2, seed=2)
WEIGHTS, IDS = draw(6, 2, seed=3), (torch.arange(12, dtype=torch.int32) % E).view(6, 2)


def composed(x: Any, w1: Any, w2: Any, name: str = "silu", layout: str = "out_in", **biases: Any) -> Any:
    spec = MoESpec(Activation(name, gated=w1.shape != w2.shape), weight_layout=layout)
    return moe_torch.moe(x, moe_torch.ExpertWeights(w1, w2, **biases), moe_torch.TopK(IDS, WEIGHTS), spec).output


def test_they_read_their_own_tensors() -> None:
    """Whatever was the same tensor before: output and hidden states, or two biases."""
    one, two = draw(E, K, seed=4), draw(E, K, seed=5)
    assert as_ids(IDS) is IDS and as_weights(WEIGHTS, IDS) is WEIGHTS
    kernel = kernel_of()
    with running_on("reference"), torch.no_grad():
        for first, second in ((one, one), (one, two), (two, one), (two, two)):
            kernel.fused_experts.quant_config = modular.FusedMoEQuantConfig(w1_bias=first, w2_bias=second)
            expected = composed(X, W1, W2, gate_up_bias=first, down_bias=second)
            for inplace in (True, False):
                found = kernel(X.clone() if inplace else X, W1, W2, WEIGHTS, IDS, inplace=inplace)
                require_equal(found, expected, f"inplace {inplace}")


def test_a_method_of_the_object_is_called() -> None:
    """The kernel does not call our `prepare` for tokens that stay as they are, but another one's."""
    kernel, seen = kernel_of(), []
    part = kernel.prepare_finalize
    original = part.prepare
    with running_on("reference"), torch.no_grad():
        expected = kernel(X, W1, W2, WEIGHTS, IDS)
        part.prepare = lambda a1, *rest: seen.append(a1) or original(2 * a1, *rest)  # type: ignore[method-assign]
        found = kernel(X, W1, W2, WEIGHTS, IDS)
        require_equal(found, composed(2 * X, W1, W2), "prepare of the object")
        del part.prepare
        require_equal(kernel(X, W1, W2, WEIGHTS, IDS), expected, "without it")
    assert len(seen) == 1 and seen[0] is X


def test_memory_is_blamed_only_where_it_is_misaligned() -> None:
    outside = moe_torch.ExpertWeights(W1[None], W2[None], layer_index=torch.tensor([1], dtype=torch.int32))
    spec = MoESpec(Activation("silu"), weight_layout="out_in")
    operator, arguments = moe_request(X, outside, moe_torch.TopK(IDS, WEIGHTS), spec)
    memory = torch.empty(X.numel() + 1)
    with running_on("reference"), torch.no_grad():
        for place, message in ((memory[:-1], "layer_index must be in"), (memory[1:], "the memory of output must")):
            with pytest.raises(InvalidInput, match=message):
                into.write_into(operator, {"output": place.view(6, K)}, arguments)


def test_plain_calls_write_to_the_memory_that_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a copy of the result."""

    def copied(operator: Any, arguments: Any) -> Any:
        raise AssertionError(f"{operator.name} had a result of its own")

    monkeypatch.setattr(into, "_result", copied)
    with running_on("reference"), torch.no_grad():
        found = kernel_of()(X, W1, W2, WEIGHTS, IDS)
        monkeypatch.undo()
        require_equal(found, composed(X, W1, W2), "written in place")


@pytest.mark.parametrize("field", ["act_scale", "out_dtype", "a_mx_scale", "b_mx_tensor_scale", "lhs_data", "rhs_data"])
def test_precision_objects_that_say_more_than_scales_are_refused(field: str) -> None:
    precision = SimpleNamespace(weight_scale=W1, **{field: 1})
    if field.endswith("data"):
        precision = SimpleNamespace(weight_scale=W1, flex_ctx=SimpleNamespace(**{field: SimpleNamespace(scale=1)}))
    assert _scale_of("w1_precision", SimpleNamespace(weight_scale=W1)) is W1
    assert _scale_of("w1_precision", SimpleNamespace(b_mx_scale=W1)) is W1
    with pytest.raises(Unsupported, match="w1_precision must have a weight_scale or b_mx_scale alone, got flex scales"):
        _scale_of("w1_precision", precision)


def test_classes_that_say_nothing_cannot_be_given_some_of_the_tokens() -> None:
    assert modular.FusedMoEPermuteExpertsUnpermute.supports_chunking(kernel_of().fused_experts) is False


def test_nothing_is_decided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """But where tensors do not lie as they must, or something else is asked for."""
    kernel = kernel_of()
    with running_on("reference"), torch.no_grad():
        kernel(X, W1, W2, WEIGHTS, IDS)
        expected, requests, request = composed(-X, W1, W2), [], ops.moe_request
        monkeypatch.setattr(
            ops, "moe_request", lambda *given, **named: requests.append(given) or request(*given, **named)
        )
        require_equal(kernel(-X, W1, W2, WEIGHTS, IDS), expected, "other tokens")
        assert not requests
        kernel.fused_experts.tuning = moe_torch.Tuning(batch_invariant=True)
        kernel(X, W1, W2, WEIGHTS, IDS)
        assert len(requests) == 1
        misaligned = torch.cat([X.new_zeros(1), X.flatten()])[1:].view(6, K)
        require_equal(kernel(misaligned, W1, W2, WEIGHTS, IDS), kernel(X, W1, W2, WEIGHTS, IDS), "misaligned")
        with pytest.raises(InvalidInput, match="global_num_experts must be 5"):
            kernel(X, W1, W2, WEIGHTS, IDS, global_num_experts=4)


class Doubled(modular.TritonExperts):
    def weights(self, w1: Any, w2: Any) -> Any:
        return super().weights(w1, 2 * w2)


def test_a_class_of_ones_own_has_its_own_calls() -> None:
    with running_on("reference"), torch.no_grad():
        found = kernel_of()(X, W1, W2, WEIGHTS, IDS)
        doubled = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), Doubled())
        for _ in range(2):
            require_equal(doubled(X, W1, W2, WEIGHTS, IDS), 2 * found, "doubled")


def test_the_weights_of_either_layout() -> None:
    """Square ones look alike in both."""
    w2 = draw(E, K, K, seed=6)
    with running_on("reference"), torch.no_grad():
        for layout in ("out_in", "in_out"):
            found = kernel_of(weight_layout=layout)(X, W1, w2, WEIGHTS, IDS, activation="silu_no_mul")
            require_equal(found, composed(X, W1, w2, layout=layout), layout)
