"""`recompute` in torch and JAX: the gradients' bits, and no pre-activation kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from moe_core.specs.moe import MoESpec
from tests.support.layers import EVERYTHING, draw_weights, draw_x


def recomputing(spec: Any) -> Any:
    return dataclasses.replace(spec, recompute=True)


@pytest.mark.parametrize("engine", ["reference", "real kernels"])
@pytest.mark.parametrize("routed_from", ["x", "logits", "ids"])
def test_torch(engine: str, routed_from: str) -> None:
    pytest.importorskip("torch")
    from tests.support.strategies import hard_routing
    from tests.support.torch import REAL_KERNELS, require_equal, running_on
    from tests.support.training.loop import draw_problem
    from tests.support.training.torch import SILU, Seen, Step, routed_problem

    if routed_from == "ids":
        problem = draw_problem(hard_routing("missing_ids"), MoESpec(SILU), poison=False)
    else:
        problem = routed_problem(from_logits=routed_from == "logits")
    with running_on(REAL_KERNELS if engine != "reference" else engine) as device:
        wanted = Step(problem, device).gradients()
        with Seen() as seen:
            found = Step(problem.replace(spec=recomputing(problem.spec)), device).gradients()
    for name, gradient in wanted.items():
        require_equal(found[name], gradient, name)
    arguments, _ = seen.backward()
    assert arguments["saved_pre_activation"] is None and arguments["saved_shared_pre_activation"] is None


def test_torch_layers_checkpoints_and_replay() -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint

    from moe_torch import MoE, trace
    from tests.support.torch import running_on, to_torch
    from tests.support.training.torch_layers import gradients, other_routing, require_all_equal, trainable

    x = to_torch(draw_x((6,)))
    with running_on("reference"):
        layer = trainable(EVERYTHING)
        again = MoE.from_spec(recomputing(EVERYTHING))
        again.load_weights(draw_weights(EVERYTHING))
        require_all_equal(gradients(again, x), gradients(layer, x), "recompute")

        def checkpointed(x: Any, mask: Any, *, return_aux: bool) -> Any:
            return checkpoint(again, x, mask, return_aux=return_aux, use_reentrant=False)

        checkpointed.named_parameters = again.named_parameters  # type: ignore[attr-defined]
        require_all_equal(gradients(checkpointed, x), gradients(layer, x), "recompute in a checkpoint")
        replayed = []
        for one in (layer, again):
            with trace.replay([other_routing(6, EVERYTHING.top_k)]):
                replayed.append(gradients(one, x))
        require_all_equal(*replayed, "recompute under a replayed routing")
        compiled = torch.compile(again, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), layer(x))
        compiled(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in again.parameters())


@pytest.mark.parametrize("engine", ["reference", "real kernels"])
@pytest.mark.parametrize("case", [0, 2, 5, 6])
def test_jax(engine: str, case: int) -> None:
    jax = pytest.importorskip("jax")
    pytest.importorskip("jax_tvm_ffi")
    from tests.support.jax import REAL_KERNELS, running_on, to_jax
    from tests.support.training.jax import CASES, make, op_loss, plans_in, require_equal, split

    _, spec, kind, options = CASES[case]
    again = recomputing(spec)
    with running_on(REAL_KERNELS if engine != "reference" else engine):
        arrays, put = split(to_jax(make(spec, kind, **options)))
        wanted = jax.jit(jax.grad(lambda arrays: op_loss(put(arrays), spec)))(arrays)
        step = jax.jit(jax.grad(lambda arrays: op_loss(put(arrays), again)))
        require_equal(step(arrays), wanted)
        rerun = jax.grad(jax.checkpoint(lambda arrays: op_loss(put(arrays), again)))
        require_equal(jax.jit(rerun)(arrays), wanted)
        kept = [buffer.name for plan in plans_in(step.lower(arrays)) for buffer in plan.outputs]
    assert "saved.row_of_slot" in kept and not [name for name in kept if name.endswith("pre_activation")]


def test_flax_layers() -> None:
    """Both layers, and a stack in a scan."""
    jax = pytest.importorskip("jax")
    pytest.importorskip("flax")
    import jax.numpy as jnp
    from flax import nnx as flax_nnx

    from tests.support.flax import draw_tokens, draw_weights, linen_layer, nnx_layer, preset
    from tests.support.jax import running_on

    spec = preset("deepseek_v3")
    again = recomputing(spec)
    with running_on("reference"):
        x = jnp.asarray(draw_tokens(spec, "float32", 6))
        weights = draw_weights(spec)

        def of_nnx(spec: Any) -> Any:
            gradient = jax.jit(jax.grad(lambda layer: jnp.square(layer(x)).sum()))(nnx_layer(weights, spec))
            return flax_nnx.to_pure_dict(flax_nnx.state(gradient, flax_nnx.Param))

        def of_linen(spec: Any) -> Any:
            layer, variables = linen_layer(weights, spec)
            rest = {name: value for name, value in variables.items() if name != "params"}
            loss = jax.grad(lambda params: jnp.square(layer.apply({**rest, "params": params}, x)).sum())
            return jax.jit(loss)(variables["params"])

        def of_stack(spec: Any) -> Any:
            stack = nnx_layer([weights, weights], spec, num_layers=2)

            def loss(stack: Any) -> Any:
                def step(x: Any, index: Any) -> Any:
                    return x + stack(x, layer_index=index), None

                return jnp.square(jax.lax.scan(step, x, jnp.arange(2))[0]).sum()

            return flax_nnx.to_pure_dict(flax_nnx.state(jax.jit(jax.grad(loss))(stack), flax_nnx.Param))

        for gradients in (of_nnx, of_linen, of_stack):
            one, other = (jax.tree.leaves(gradients(one)) for one in (spec, again))
            assert one
            for wanted, found in zip(one, other, strict=True):
                np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted), gradients.__name__)


def test_main_grad_is_refused_in_jax() -> None:
    pytest.importorskip("jax_tvm_ffi")
    from moe_jax import Unsupported
    from tests.support.jax import running_on, to_jax
    from tests.support.training.jax import SOFTMAX, make, run

    with running_on("reference"), pytest.raises(Unsupported, match=r"spec\.main_grad must be False in JAX"):
        run(to_jax(make(SOFTMAX)), dataclasses.replace(SOFTMAX, main_grad=True))
