"""Whole forwards whose stages are one launch of a Gluon kernel, and faults for copies of these kernels."""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_core.formats import Scheme, format_named
from moe_core.moe import plan_moe
from moe_core.operands import TopK, map_arrays, named_arrays
from moe_core.parity.tolerance import stage_tolerances
from moe_core.plan import LaunchPlan
from moe_core.reference.tiling import tile
from moe_core.specs import Activation, MoESpec
from moe_core.target import Target
from tests.faulty_kernels import OpFault
from tests.harness import engine_target, run_plan
from tests.quantized_support import draw_experts
from tests.quantized_support import spec_of as described
from tests.routing_cases import draw_ids
from tests.strategies import draw_array

#: By forward and kernel file; no fault changes what is waited for, how often, or an address beyond its array.
FAULTS: dict[str, dict[str, tuple[OpFault, ...]]] = {
    "chained streams": {
        "chained_stream": (
            OpFault('"slot",', '"row",'),
            OpFault("total += rows[k].to(gl.float32)", "total += rows[0].to(gl.float32)"),
        ),
        "progress": (OpFault('sem="acquire") < count', 'sem="acquire") < 0 * count'),),
    },
    "chained fp8": {
        "chained_stream_fp8": (OpFault('"slot",', '"row",'),),
        "stream_fp8": (
            OpFault("gl.join(w0, w2), gl.join(w1, w3)", "gl.join(w0, w1), gl.join(w2, w3)"),
            OpFault("scale_rows + step,", "scale_rows + 0 * step,"),
            OpFault("row_scales.index(side * CHUNK + part).load", "row_scales.index(side * CHUNK).load"),
            OpFault("gl.where(usable[:, None], quotients, 0.0)", "quotients * 0.5"),
        ),
    },
}


class Forward:
    """A forward of few tokens from given ids: experts that get none, and some with several row blocks."""

    outputs = ("output",)

    def __init__(self, kernel: str, scheme: Scheme) -> None:
        self.kernel, self.scheme = kernel, scheme
        random = np.random.default_rng(0)
        self.spec = MoESpec(Activation("silu", gate_layout="halves"), weight_layout="out_in")
        self.spec = dataclasses.replace(self.spec, activations=scheme.activations)
        self.experts = draw_experts(random, (8,), 416, 96, scheme, self.spec)
        ids = draw_ids("uniform", 13, 2, 8, 0)
        self.routing = TopK(ids, random.random(ids.shape, np.float32))
        self.x = draw_array(random, (13, 416), "bfloat16")
        sizes = {"d_model": 416, "d_ff": 96, "top_k": 2, "num_experts": 8}
        found = stage_tolerances(self.spec, "bfloat16", **sizes, routed_from="ids", weights_format=scheme.weights)
        self.tolerance = found["output"]

    @property
    def _prepared(self):
        """Experts as the kernel takes them."""
        if self.scheme.activations is not None:
            return self.experts
        down = tile(self.experts.down, "rows")
        return dataclasses.replace(self.experts, gate_up=tile(self.experts.gate_up, "halves"), down=down)

    def plan(self, target: Target, experts: object | None = None) -> LaunchPlan:
        bundles = (map_arrays(bundle, described) for bundle in (experts or self._prepared, self.routing))
        return plan_moe(described(self.x), *bundles, self.spec, target)

    def results(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        def run(experts: object, target: Target) -> dict[str, np.ndarray]:
            bundles = (("experts.", experts), ("routing.", self.routing))
            arrays = {"x": self.x} | {
                name: array for prefix, bundle in bundles for name, array in named_arrays(bundle, prefix)
            }
            return {"output": run_plan(self.plan(target, experts), arrays)["output"].astype(np.float32)}

        return run(self._prepared, engine_target()), run(self.experts, Target("reference"))


FORWARDS = {
    "chained streams": Forward("chained_stream:chained_stream", Scheme("mxfp4", format_named("mxfp4"))),
    "chained fp8": Forward(
        "chained_stream_fp8:chained_stream_fp8", Scheme("fp8", format_named("fp8_block"), format_named("fp8_group"))
    ),
}
