"""Token rounding: results and gradients are those of the plans, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moe_core.base.target import Target
from moe_core.errors import InvalidInput
from moe_core.ops.routing.rounding import plan_route_rounded, plan_route_rounded_backward
from moe_core.specs.routing import RouterSpec, TokenRounding
from tests.support.frontends import Frontend, require_equal
from tests.support.frontends.small import on_engines
from tests.support.harness import engine_target, run_plan, spec_of

T, K, E = 48, 2, 6
RULE, ROUNDING = RouterSpec(K, renormalize=True), TokenRounding(16)


@on_engines
def test_results_and_gradient_are_those_of_the_plans(frontend: Frontend, engine: str) -> None:
    """Bit by bit, in programs too."""
    arrays = {"logits": np.random.default_rng(0).standard_normal((T, E), np.float32)}
    arrays |= {"token_mask": np.arange(T) % 5 != 1}
    d_weights = np.random.default_rng(3).standard_normal((T, 2 * K), np.float32)
    target = Target("reference") if engine == "reference" else engine_target()
    specs = {name: spec_of(array) for name, array in arrays.items()}
    plan = plan_route_rounded(specs["logits"], RULE, ROUNDING, target, token_mask=specs["token_mask"])
    expected = run_plan(plan, arrays)
    saved = {"d_weights": d_weights, "logits": arrays["logits"], "ids": expected["ids"]}
    saved |= {"candidates": expected["candidates"]}
    backward = plan_route_rounded_backward(*(spec_of(array) for array in saved.values()), RULE, ROUNDING, target)
    with frontend.running_on(engine):
        logits, mask, factors = frontend.arrays((arrays["logits"], arrays["token_mask"], d_weights))

        def route(logits: Any) -> Any:
            return frontend.ops.route_rounded(logits, RULE, ROUNDING, token_mask=mask)

        found = frontend.call(route, logits)
        for name in found._fields:
            np.testing.assert_array_equal(frontend.numpy(getattr(found, name)), expected[name], err_msg=name)
        layout = frontend.ops.make_layout(found.ids, E)
        assert not (layout.group_sizes % 16).any() and (found.tokens_per_expert % 16).any()
        gradients = frontend.gradients(
            lambda leaves: (route(leaves["logits"]).weights * factors).sum(), {"logits": logits}
        )
        require_equal(frontend.numpy(gradients["logits"]), run_plan(backward, saved)["d_logits"])


def test_no_tokens_and_too_few(frontend: Frontend) -> None:
    with frontend.running_on("reference"):
        none, one = frontend.arrays((np.zeros((0, E), np.float32), np.zeros((1, E), np.float32)))
        found = frontend.ops.route_rounded(none, RULE, TokenRounding())
        assert found.ids.shape == (0, 4) and found.tokens_per_expert.tolist() == [0] * E
        with pytest.raises(InvalidInput, match="tile must be at most num_tokens = 1, got 128: no expert could keep"):
            frontend.ops.route_rounded(one, RULE, TokenRounding())
        with pytest.raises(InvalidInput, match=r"rounding must be (a )?TokenRounding, got (int|128)"):
            frontend.ops.route_rounded(one, RULE, 128)
