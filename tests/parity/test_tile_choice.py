"""Tunings through both front-ends: eager, compiled, exported and jitted calls, and layers, all plan with them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_core import InvalidInput
from moe_core.layers import MoELayerSpec
from moe_core.specs import MatmulSpec, MatmulTuning, MoESpec, TileConfig, Tuning
from moe_core.specs.operands import MatmulOperands
from moe_core.specs.tile_table import TileEntry, TileKey, TileTable
from tests.support.frontends import Frontend, require_equal
from tests.support.frontends.small import REAL_KERNELS, small_layer

FIRST, SECOND = TileConfig(16, 32, 32, 4, 2), TileConfig(64, 16, 16, 8, 1, 4)
TABLE = TileTable.of([TileEntry(90, TileKey(64, 5, 48, 32, "bfloat16"), FIRST)])
TUNINGS = (
    None,
    Tuning(FIRST, SECOND),
    Tuning(matmul_2=FIRST, table=TABLE),
    Tuning(batch_invariant=True),
    Tuning(SECOND, batch_invariant=True),
)


def tuned(spec: MoESpec, tuning: Tuning | None) -> MoESpec:
    return dataclasses.replace(spec, tuning=tuning)


def require_choices(explanation: str, tuning: Tuning | None) -> None:
    """The plan says it uses what was asked for."""
    first, second = None if tuning is None else tuning.matmul_1, None if tuning is None else tuning.matmul_2
    lines = [line for line in explanation.splitlines() if "TileConfig" in line]
    for line, config in zip(lines[:2], (first, second), strict=True):
        asked = tuning is not None and tuning.batch_invariant
        wanted = "given for this call" if config is not None else "batch invariant" if asked else "heuristics"
        assert f"; {wanted}" in line, line
        assert config is None or str(config) in line, line


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
def test_calls(frontend: Frontend, tuning: Tuning | None) -> None:
    layer = small_layer()
    spec = tuned(layer.spec, tuning)
    with frontend.running_on(REAL_KERNELS):
        arrays = frontend.arrays(tuple(layer[:3]))
        require_choices(frontend.ops.explain_moe(*arrays, spec), tuning)
        result = frontend.call(lambda *arrays: frontend.ops.moe(*arrays, spec).output, *arrays)
        if tuning is not None and tuning.matmul_1 is None and tuning.matmul_2 is None and REAL_KERNELS != "cuda":
            plain = frontend.ops.moe(*arrays, layer.spec).output
            require_equal(*map(frontend.numpy, (result, plain)), "the interpreter has one tile")


def test_one_product(frontend: Frontend) -> None:
    layer = small_layer()
    with frontend.running_on(REAL_KERNELS):
        operands = MatmulOperands(*frontend.arrays((layer.x, layer.experts.gate_up[0])))
        results = [
            frontend.numpy(frontend.ops.matmul_ogs(operands, None, MatmulSpec("in_out", tuning=tuning)))
            for tuning in (None, MatmulTuning(TileConfig(64, 32, 64, 4, 1)))
        ]
        if REAL_KERNELS != "cuda":
            require_equal(*results, "one step along k in either tile")
        with pytest.raises(InvalidInput, match=r"tuning\.config must be legal"):
            tuning = MatmulTuning(TileConfig(24, 64, 64))
            frontend.ops.matmul_ogs(operands, None, MatmulSpec("in_out", tuning=tuning))


class TestTorch:
    """Programs and layers of torch."""

    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        pytest.importorskip("torch")

    def test_compiled_programs_are_guarded_by_the_tuning(self) -> None:
        import torch
        from torch._dynamo.testing import CompileCounterWithBackend

        import moe_torch
        from tests.support.torch import require_equal as equal_tensors
        from tests.support.torch import running_on, torch_layer

        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        with running_on("reference") as device:
            layer = torch_layer(device)
            compiled = torch.compile(moe_torch.moe, fullgraph=True, backend=counter)
            for tuning in (*TUNINGS, *TUNINGS):
                spec = tuned(layer.spec, dataclasses.replace(tuning) if tuning is not None else None)
                expected = moe_torch.moe(*layer[:3], spec)
                equal_tensors(tuple(compiled(*layer[:3], spec)), tuple(expected), str(tuning))
        assert counter.frame_count == len(TUNINGS), "equal tunings reuse a program, others do not"

    @pytest.mark.parametrize("tuning", TUNINGS[1:], ids=str)
    def test_exported_programs_carry_the_tuning(self, tuning: Tuning) -> None:
        import torch

        import moe_torch
        from moe_torch.bridge.options import decode
        from tests.support.torch import require_equal as equal_tensors
        from tests.support.torch import running_on, torch_layer

        with running_on("reference") as device:
            x, experts, routing, plain = torch_layer(device)
            spec = tuned(plain, tuning)

            class Program(torch.nn.Module):
                def forward(self, x: Any) -> Any:
                    return moe_torch.moe(x, experts, routing, spec).output

            exported = torch.export.export(Program(), (x,))
            texts = [argument for node in exported.graph.nodes for argument in node.args if isinstance(argument, str)]
            assert [decode(text) for text in texts] == [(spec,)]
            equal_tensors(exported.module()(x), Program()(x), "exported")

    def test_layers(self) -> None:
        import moe_torch
        from tests.support.torch import running_on

        spec = MoELayerSpec(48, 32, 5, 2, tuning=TUNINGS[1])
        with running_on(REAL_KERNELS) as device:
            layer = moe_torch.MoE.from_spec(spec, device=device).requires_grad_(False)
            require_choices(layer.explain(9), TUNINGS[1])
            weights = layer.export_weights()
            assert moe_torch.MoE.from_weights(weights, device=device).spec.tuning == TUNINGS[1]
            moe_torch.MoE(48, 32, 5, 2, device=device).requires_grad_(False).load_weights(weights)


class TestJax:
    """Programs and layers of JAX."""

    @pytest.fixture(autouse=True)
    def _jax(self) -> None:
        pytest.importorskip("jax")
        pytest.importorskip("jax_tvm_ffi")

    def test_specs_are_static_arguments(self) -> None:
        import jax

        import moe_jax
        from tests.support.jax import running_on, to_jax

        layer, traces = small_layer(), []

        def forward(x: Any, spec: MoESpec) -> Any:
            traces.append(spec)
            return moe_jax.moe(x, experts, routing, spec).output

        with running_on("reference"):
            x, experts, routing = to_jax(tuple(layer[:3]))
            jitted = jax.jit(forward, static_argnums=1)
            for tuning in (*TUNINGS, *TUNINGS):
                jitted(x, tuned(layer.spec, dataclasses.replace(tuning) if tuning is not None else None))
        assert len(traces) == len(TUNINGS)

    def test_layers(self) -> None:
        pytest.importorskip("flax")
        from flax import nnx

        from moe_jax import linen
        from moe_jax import nnx as moebius_nnx
        from tests.support.jax import running_on

        with running_on(REAL_KERNELS):
            layer = moebius_nnx.MoE(48, 32, 5, 2, tuning=TUNINGS[1], rngs=nnx.Rngs(0))
            require_choices(layer.explain(9), TUNINGS[1])
            require_choices(linen.MoE(48, 32, 5, 2, tuning=TUNINGS[1]).explain(9), TUNINGS[1])
            assert linen.MoE.from_spec(layer.spec).spec.tuning == TUNINGS[1]
            weights = layer.export_weights()
            moebius_nnx.MoE(48, 32, 5, 2, rngs=nnx.Rngs(0)).load_weights(weights)
