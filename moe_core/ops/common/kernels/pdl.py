"""What kernels do whose launches overlap: programmatic dependent launch, sm_90 and newer.

PDL, a constant of every kernel that takes part, says when it waits for the launch ahead of it:

    None: never; the launch is an ordinary one, and nothing of this is compiled
    "start": before it reads or writes anything
    "layout": once it has read the schedule and the layout, which were written before the launch ahead began

Everything that a kernel reads before waiting, beside inputs of the plan, may only come from launches before the one
ahead: that one let this kernel begin after its own wait, when all before it had ended.
"""

import triton
import triton.language as tl


@triton.jit
def join():
    """Wait until the launch ahead has ended and its writes can be seen; then the next launch may begin."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
