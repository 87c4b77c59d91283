"""Programmatic dependent launch (PDL), sm_90 and newer: launches overlap.

PDL, a constant of every kernel that takes part, says when it waits for the launch ahead:

    None: never. The launch is ordinary.
    "start": before it reads or writes anything
    "layout": after it has read the schedule and the layout, which were written before the launch ahead began

Before it waits, a kernel may read inputs of the plan and results of launches before the one ahead: that one let this
kernel begin after its own wait, when all launches before it had ended.
"""

import triton
import triton.language as tl


@triton.jit
def join():
    """Wait until the launch ahead has ended and its writes can be seen. Then let the next launch begin."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
