"""Plans the routing's backward."""

from __future__ import annotations

import dataclasses

from moe_core.base import ArraySpec, Target, keep_plans, padded, require_spec
from moe_core.errors import InvalidInput
from moe_core.ops.routing.kernels import backward as kernels
from moe_core.ops.routing.layout import BLOCK_ELEMENTS, require_experts
from moe_core.plan import LaunchPlan, PlanBuilder, declare_kernel, passed
from moe_core.specs import LayoutSpec, RouterSpec
from moe_core.specs.operands import RoutingGradients, named_arrays

COUNT_TOKENS = declare_kernel(kernels.count_tokens)
ROUTING_BACKWARD = declare_kernel(kernels.routing_backward)

#: CUDA: 32 blocks per SM. More tokens are looped over.
_PROGRAMS_PER_SM = 32
_COLUMNS_PER_WARP = 256
_COUNTED = {"gpu": 4096, "interpreter": 64}


def gradient_shapes(num_tokens: int, num_experts: int | str, top_k: int | str) -> dict[str, tuple[int | str, ...]]:
    """Shapes of the fp32 gradients, of numbers or names."""
    return {"weights": (num_tokens, top_k), "logits": (num_tokens, num_experts), "load_balance": (1,), "z": (1,)}


def _validate(
    gradients: RoutingGradients, logits: ArraySpec, ids: ArraySpec | None, spec: RouterSpec, mask: ArraySpec | None
) -> None:
    require_spec("logits", logits, ("num_tokens", "num_experts"), "float32")
    num_tokens, num_experts = logits.shape
    # Groups of one are legal without a correction bias, which the gradient does not depend on.
    spec.validate_experts(num_experts, has_bias=False)
    top_k = spec.require_top_k()
    LayoutSpec(num_tokens, top_k, num_experts)  # Slots are numbered in int32.
    shapes = gradient_shapes(num_tokens, num_experts, top_k)
    arrays = dict(named_arrays(gradients))
    if not arrays.keys() & shapes.keys():
        raise InvalidInput(
            "gradients must hold at least one of weights, logits, load_balance and z, got none; pass one"
        )
    for name, shape in shapes.items():
        if name in arrays:
            require_spec(f"gradients.{name}", arrays[name], shape, "float32")
    if ("load_balance" in arrays) != ("tokens_per_expert" in arrays):
        raise InvalidInput(
            "gradients.tokens_per_expert must be given with gradients.load_balance and only then, "
            f"got {gradients.tokens_per_expert}; pass both or neither"
        )
    if "tokens_per_expert" in arrays:
        require_spec("gradients.tokens_per_expert", arrays["tokens_per_expert"], (num_experts,), "int32")
    if "weights" in arrays:
        require_spec("ids", ids, (num_tokens, top_k), "int32")
    elif ids is not None:
        raise InvalidInput(f"ids must be None without gradients.weights, got {ids}; leave it out")
    if mask is not None:
        require_spec("token_mask", mask, (num_tokens,), "bool")


@keep_plans
def plan_routing_backward(
    gradients: RoutingGradients,
    logits: ArraySpec,
    ids: ArraySpec | None,
    spec: RouterSpec,
    target: Target,
    *,
    token_mask: ArraySpec | None = None,
) -> LaunchPlan:
    """d_logits fp32 `[T, E]` of gradients, from logits fp32 `[T, E]` and the chosen ids int32 `[T, K]`.

    ids: None without gradients.weights; distinct within a token, -1 for a masked token. token_mask bool `[T]`: masked
    tokens get exact zeros and count nowhere. Inputs: logits, [ids], `gradients.*`, [token_mask]. Output: d_logits.
    """
    _validate(gradients, logits, ids, spec, token_mask)
    num_tokens, num_experts = logits.shape
    builder = PlanBuilder("routing_backward", target)
    arrays = {"logits": logits, "ids": ids} | dict(named_arrays(gradients, "gradients.")) | {"token_mask": token_mask}
    present = builder.inputs(arrays)
    builder.output("d_logits", ArraySpec((num_tokens, num_experts), "float32"))
    if not target.compiled:
        builder.sums("softmax and sums over experts and slots: NumPy's pairwise sums, fp32")
        constants = {"spec": spec}
        from moe_core.ops.routing import reference_backward as twins

        return builder.reference(twins.routing_backward_plan, present, constants, ("d_logits",))
    require_experts(num_experts)
    top_k = spec.require_top_k()
    columns, slots = padded(num_experts, 1), padded(top_k, 1)
    block_t, num_warps = 1, min(16, max(1, columns // _COLUMNS_PER_WARP))
    if target.interpreted:
        block_t = min(padded(num_tokens, 1), max(1, BLOCK_ELEMENTS["interpreter"] // columns))
    programs = -(-num_tokens // block_t)
    if target.on_gpu:
        programs = min(programs, max(1, _PROGRAMS_PER_SM // num_warps) * target.num_sms)
    counted = token_mask is not None and (gradients.load_balance is not None or gradients.z is not None)
    if counted:
        builder.scratch("token_count", ArraySpec((1,), "int32"))
        arguments = builder.pointers("token_mask", "token_count")
        builder.launch(COUNT_TOKENS, (1,), arguments | passed(num_tokens=num_tokens, BLOCK=_COUNTED[target.engine]))
    builder.sums(
        f"over experts: a tree over {columns} columns, over slots: a tree over {slots}; then weights + load balance + "
        f"z + given; {num_warps} warps whatever the number of tokens; fp32"
    )
    names = ("d_weights", "given_logits", "d_load_balance", "d_z", "tokens_per_expert")
    fields = (field.name for field in dataclasses.fields(gradients))
    pointers = {name: builder.optional(f"gradients.{field}") for name, field in zip(names, fields, strict=True)}
    arguments = {
        **(builder.pointers("logits", "ids") | pointers | builder.pointers("token_mask", "token_count", "d_logits")),
        **passed(num_tokens=num_tokens, NUM_EXPERTS=num_experts, TOP_K=top_k, SCORING=spec.scoring),
        **passed(SOFTMAX_LAST=spec.order == "topk_then_softmax", RENORMALIZE=spec.renormalize),
        **passed(SCALE=spec.scale, EPSILON=spec.epsilon, LOGIT_SCALE=spec.logit_scale, SOFTCAP=spec.softcap),
        **passed(BLOCK_T=block_t, COLUMNS=columns, SLOTS=slots),
    }
    builder.launch(ROUTING_BACKWARD, (programs,), arguments, num_warps)
    return builder.build()
