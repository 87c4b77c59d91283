"""Programmatic dependent launch (PDL), sm_90 and newer: launches overlap.

The constant PDL says when a kernel waits for the launch ahead:

    None: never. The launch is ordinary.
    "start": before it reads or writes anything
    "layout": after it has read the schedule and the layout, written before the launch ahead began
    "tail": after its product, before the rows of low rank that the launch ahead writes

Before waiting, a kernel may read inputs of the plan and results of launches before the one ahead. They had ended when
the launch ahead let this kernel begin.
"""

import triton
import triton.language as tl


@triton.jit
def join(PDL: tl.constexpr):
    """Wait until the launch ahead has ended and its writes are visible. Then let the next launch begin."""
    if PDL is not None:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
