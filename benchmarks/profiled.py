"""A training step's plans, and the times of its kernels, for `moebius-view PLANS --profile TIMES`; needs a CUDA GPU.

python -m benchmarks.profiled benchmarks/results/plans/step-h200.json benchmarks/results/plans/step-times-h200.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from moe_torch.layers import MoE

#: Of Qwen3-30B-A3B.
_D_MODEL, _D_FF, _EXPERTS, _TOP_K, _TOKENS = 2048, 768, 128, 8, 4096


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=Path)
    parser.add_argument("times", type=Path)
    options = parser.parse_args(arguments)
    layer = MoE(_D_MODEL, _D_FF, num_experts=_EXPERTS, top_k=_TOP_K, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(_TOKENS, _D_MODEL, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for _ in range(3):
        layer(x).float().square().mean().backward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        layer(x).float().square().mean().backward()
        torch.cuda.synchronize()
    recorded.export_chrome_trace(str(options.times))
    layer.explain(_TOKENS, training=True).save(options.plans)
    options.times.write_text(kernels_of(options.times.read_text()))
    return 0


def kernels_of(trace: str) -> str:
    """The kernels alone of a trace: their names, starts and microseconds."""
    events = [event for event in json.loads(trace)["traceEvents"] if event.get("cat") == "kernel"]
    kept = [{name: event[name] for name in ("ph", "cat", "name", "ts", "dur")} for event in events]
    return json.dumps({"traceEvents": kept}, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(main())
