"""A correction bias of each token: images with another bias than text, for example."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.modular.problems import E, as_in_out, draw_problem

#: Such that tokens of both kinds choose other experts.
BIASES = np.array([[1, 0, 0, 0.5, -1], [-1, 0.5, 1, 0, 0]], np.float32)


def results(frontend: Any, arrays: Any, bias: Any, spec: Any) -> list[np.ndarray]:
    x, w1, w2, logits = arrays
    experts = frontend.ExpertWeights(w1, w2)
    output = frontend.moe(x, experts, frontend.RouterLogits(logits, bias), spec)
    arrays = (output.output, output.ids, output.weights)
    return [np.asarray(one.cpu() if hasattr(one, "cpu") else one) for one in arrays]


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_moe_routes_each_token_by_its_bias(tokens: int) -> None:
    """In every launch that can route: alone, with the layout, and with the first product of one token."""
    torch = pytest.importorskip("torch")
    import moe_torch
    from tests.support import torch as torch_support

    problem = as_in_out(draw_problem(tokens=tokens))
    logits = np.random.default_rng(6).standard_normal((tokens, E)).astype(np.float32)
    table, found = np.arange(tokens) % 2, {}
    drawn = (problem.hidden_states, problem.w1, problem.w2, logits)
    router = moe_torch.RouterSpec(2, "sigmoid", renormalize=True)
    spec = moe_torch.MoESpec(moe_torch.Activation("silu"), router)
    for engine in ("reference", torch_support.REAL_KERNELS):
        with torch_support.running_on(engine) as device, torch.no_grad():
            arrays = torch_support.to_torch(drawn, device)
            found[engine] = results(moe_torch, arrays, torch_support.to_torch(BIASES[table], device), spec)
            for index in (0, 1):
                alone = results(moe_torch, arrays, torch_support.to_torch(BIASES[index], device), spec)
                for together, one in zip(found[engine][1:], alone[1:], strict=True):
                    np.testing.assert_array_equal(together[table == index], one[table == index])
    np.testing.assert_array_equal(found["reference"][1], found[torch_support.REAL_KERNELS][1])
    pytest.importorskip("jax")
    import moe_jax
    from tests.support import jax as jax_support

    with jax_support.running_on(jax_support.REAL_KERNELS):
        ours = results(moe_jax, jax_support.to_jax(drawn), jax_support.to_jax(BIASES[table]), spec)
    for array, expected in zip(ours, found[torch_support.REAL_KERNELS], strict=True):
        np.testing.assert_array_equal(array, expected)
