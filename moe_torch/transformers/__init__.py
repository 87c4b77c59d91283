"""Run the experts of Hugging Face models on Moebius.

The experts' two products, activation and weighted sum run as one operator on the model's own weights. The rest, such as
router and attention, stays transformers'. Works in `generate`, under `torch.compile` and in training, with gradients of
the router.

transformers' own argument works too: `register()`, then `from_pretrained(name, experts_implementation="moebius")`. But
transformers ignores any registered name, without an error, if a model's experts bypass its experts interface.

Rounding: products, biases, activation and router weights are computed in float32, and cast to the weights' dtype after
each product. Eager experts round more often. Under `torch.autocast`, x and the experts' weights are cast to autocast's
dtype, as in `torch.nn.Linear`.
"""

from typing import TYPE_CHECKING, Any

from moe_torch.transformers.experts import NAME, ExpertsOptions, align_weights, experts_forward, register
from moe_torch.transformers.use import Report, use

if TYPE_CHECKING:
    from moe_torch.transformers.callback import MonitorCallback

__all__ = ["NAME", "ExpertsOptions", "MonitorCallback", "Report"]
__all__ += ["align_weights", "experts_forward", "register", "use"]


def __getattr__(name: str) -> Any:
    # transformers' Trainer imports much that models do without.
    if name == "MonitorCallback":
        from moe_torch.transformers.callback import MonitorCallback

        return MonitorCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
