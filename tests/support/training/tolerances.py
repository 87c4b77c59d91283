"""Tolerances of gradients: kernels against the reference, and the reference against a plain loop in torch."""

from __future__ import annotations

from moe_core.parity.tolerance import Tolerance

#: Two sides that round alike: fp32 sums in another order over about ten stages, amplified by a derivative; worst: by a
#: clamp's neighbourhood, or an element of one small factor in many.
FP32 = Tolerance(2e-6, 1e-4)
#: z in bf16 on one side, in fp32 on the other, then the flips of three casts.
BF16 = Tolerance(1.5e-2, 0.2)
#: The loop has no casts: five on the other side, of 2**-9 each, and what the activation's derivative makes of them.
BF16_LOOP = Tolerance(2e-2, 0.2)
