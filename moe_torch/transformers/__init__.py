"""The experts of Hugging Face models on Moebius.

    import moe_torch.transformers
    model = AutoModelForCausalLM.from_pretrained(name)
    print(moe_torch.transformers.use(model))

Router, attention and everything else stay as transformers has them; the experts' two products, activation and weighted
sum run as one operator, on the model's own weights, where they lie and as they lie: nothing is converted. `use` raises
for a model whose experts cannot run. Works in `generate` and under `torch.compile`.

transformers' own argument works too: `register()`, then `from_pretrained(name, experts_implementation="moebius")`. But
transformers accepts any registered name for every model, and ignores it where the experts do not go through its experts
interface; `use` says so.

Rounding: products, biases, activation and router weights are computed in float32, and cast to the weights' dtype after
each product; eager experts round in more places. Float32 models agree closely, others within their dtype. Under
`torch.autocast`, x and the experts' weights are cast to autocast's dtype, as those of `torch.nn.Linear` are.

Differentiable: training works, of the model's router too, which gets the gradient of the weights it gave.
"""

from moe_torch.transformers.experts import NAME, ExpertsOptions, align_weights, experts_forward, register
from moe_torch.transformers.use import Report, use

__all__ = ["NAME", "ExpertsOptions", "Report", "align_weights", "experts_forward", "register", "use"]
