"""Faults planted in copies of kernels whose launches overlap, and the process that compiles each copy and judges it.

Run as a script: `python -m tests.support.faults.pdl FOLDER...`, in a process without TRITON_INTERPRET. Every folder
holds kernels and lies in one that is named after a plan and its step; a fork that takes its kernels from there leaves
its exit status in `status` in the folder: 0 where the order holds, ORDER_BROKEN where it does not. Needs no GPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from moe_core.base.target import Target
from moe_core.ops.moe import forward as moe
from moe_core.plan.steps import KernelLaunch, LaunchPlan
from tests.support.compile_gate.pdl_order import adapted_plan, layer_plan, order_violation, quantized_plan
from tests.support.faults.instructions import TARGET, ptx_of
from tests.support.faults.kernel_copies import (
    COMPILER,
    NO_FAULT,
    OpFault,
    Planted,
    prepare_forks,
    run_on_copy,
    run_on_faulty_copies,
)

_JOIN, _CALL = "    join(PDL)\n", "        tl.extra.cuda.gdc_{}()\n"
_WAIT, _ALLOW = _CALL.format("wait"), _CALL.format("launch_dependents")
PLANS: dict[str, Callable[[Target, int], LaunchPlan]] = {
    "plain": layer_plan,
    "quantized": quantized_plan,
    "one_scale": functools.partial(quantized_plan, scheme="fp8_tensor"),
    "adapters": adapted_plan,
    "decoded": functools.partial(quantized_plan, scheme="int4_w4a16_zp"),
}
#: By plan, by its step (of plans that quantise nothing: 0 routing, 1 and 2 the products, 3 the reduction; of
#: `quantized`: 1 and 3 quantise rows, 2 and 4 multiply; of `one_scale`: 1 finds the largest magnitude, 2 quantises; of
#: `adapters`: 3 is product 1) and by kernel file.
FAULTS: Planted = {
    "plain 0": {"routing.kernels.route_and_layout": (OpFault(_JOIN, ""),)},
    "plain 1": {
        "common.kernels.pdl": (OpFault(_WAIT, ""), OpFault(_ALLOW, ""), OpFault(_WAIT + _ALLOW, _ALLOW + _WAIT)),
        "matmul.portable.kernel": (OpFault('if PDL == "start":', 'if PDL == "never":'), ),
    },
    "plain 2": {"matmul.portable.kernel": (
        OpFault('    if JOIN == "layout":\n        join(JOIN)\n\n', ""),
        OpFault("        if expert < 0:\n            join(JOIN)\n", "        if expert < 0:\n"),
        OpFault('    CACHE: tl.constexpr = ".cg" if JOIN is not None else ""\n    block, tile',
                '    CACHE: tl.constexpr = ""\n    block, tile'),
        OpFault('    CACHE: tl.constexpr = ".cg" if JOIN is not None else ""\n    first, second',
                '    CACHE: tl.constexpr = ""\n    first, second'),
    )},
    "adapters 3": {"matmul.portable.kernel": (
        OpFault('        if JOIN == "tail":\n            join(JOIN)\n', ""),
        OpFault("        if expert < 0:\n            join(JOIN)\n", "        if expert < 0:\n"),
    )},
    "plain 3": {"reduction.kernels.reduce": (OpFault('UNROLL, PDL == "layout"', 'UNROLL, PDL == "never"'),)},
    "quantized 1": {"quantize.kernels.rows": (OpFault(_JOIN, ""),)},
    "one_scale 1": {"quantize.kernels.rows": (OpFault(_JOIN, ""),)},
    "one_scale 2": {"quantize.kernels.rows": (OpFault(_JOIN, ""),)},
    "decoded 1": {"matmul.quantized.kernel": (OpFault('if PDL == "start":', 'if PDL == "never":'),)},
    "quantized 2": {"matmul.quantized.kernel": (
        OpFault('    if JOIN == "layout":\n        join(JOIN)\n    x_rows', "    x_rows"),
        OpFault("        if expert < 0:\n            join(JOIN)\n", "        if expert < 0:\n"),
        OpFault('".cg" if JOIN is not None else ""', '""'),
    )},
}  # fmt: skip
ORDER_BROKEN = 10


def launch_of(name: str) -> tuple[LaunchPlan, KernelLaunch]:
    """A plan whose stages are not fused, since each is judged alone, and its step."""
    plan_name, _, step = name.partition(" ")
    with mock.patch.object(moe, "why_not_fused", lambda *_, **__: "every stage is judged alone"):
        moe.plan_moe.cache_clear()
        plan = PLANS[plan_name](TARGET, 4)
    moe.plan_moe.cache_clear()
    launch = plan.steps[int(step)]
    assert isinstance(launch, KernelLaunch)
    return plan, launch


def judge(folder: Path) -> int:
    plan, launch = launch_of(folder.parent.name)
    violation = order_violation(launch, ptx_of(plan, launch))
    print(violation)
    return ORDER_BROKEN if violation else 0


def assert_faults_show(folder: Path, planted: Planted) -> None:
    """Each copy breaks the order of its launch, but for the unchanged one."""
    for copy, fault in run_on_faulty_copies("pdl", folder, planted).items():
        wanted = 0 if fault is NO_FAULT else ORDER_BROKEN
        assert (copy / "status").read_text() == str(wanted), f"{copy.name}: {(copy / 'log').read_text()}"


if __name__ == "__main__":
    prepare_forks(COMPILER)
    for place in sys.argv[1:]:
        run_on_copy(Path(place), lambda folder=Path(place): judge(folder))
