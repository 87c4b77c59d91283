"""Planning of routing: logits to ids and weights, with or without their layout. See docs/notebook/launches.md."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.base import ArraySpec, Target, keep_plans, require_spec
from moe_core.base.sizes import first_holding, padded
from moe_core.errors import InvalidInput
from moe_core.ops.routing.kernels import route_and_layout as route_and_layout_kernels
from moe_core.ops.routing.kernels import topk as topk_kernels
from moe_core.ops.routing.layout import BLOCK_ELEMENTS, LayoutLauncher, most_blocks, plan_layout, require_experts
from moe_core.plan import PlanBuilder
from moe_core.plan.steps import Argument, LaunchPlan, ReferenceCall, declare_kernel, passed
from moe_core.specs import LayoutSpec, RouterLogits, RouterSpec

ROUTE = declare_kernel(topk_kernels.route, pdl="start", writes_layout=True, counts_slots=True)
ROUTE_AND_LAYOUT = declare_kernel(
    route_and_layout_kernels.route_and_layout, pdl="start", writes_layout=True, counts_slots=True
)

_ROUTED = ("logits", "correction_bias", "token_mask", "expert_map")
FEW_TOKENS = {"gpu": 64, "interpreter": 32}
#: Token capacities of that kernel: few, so that few kernels are compiled.
_FEW_SIZES = {"gpu": (1, 4, 16, 64), "interpreter": (32,)}
#: Its most slots. On an H200 it is 9 us slower than two launches with 512 slots and up to 2 us slower with 256, where
#: it saves a launch.
_FEW_SLOTS = {"gpu": 256, "interpreter": 4096}
_FEW_LOGITS, _STEP_LOGITS, _STEP_SLOTS = 32768, 8192, 256
#: The first number with which all tokens run at once.
_COUNTED_TOKENS = {"gpu": (8, 16, 32), "interpreter": (4,)}
#: CUDA: 32 blocks per SM. More tokens are looped over.
_PROGRAMS_PER_SM = 32
#: Logits per warp (32 per thread), and per load of a row (16 bytes per thread).
_LOGITS_PER_WARP, _LOGITS_PER_LOAD = 1024, 128


@dataclass(frozen=True)
class _Selection:
    spec: RouterSpec
    num_experts: int
    width: int
    bias_by_token: bool = False

    @property
    def groups(self) -> int:
        return padded(self.spec.num_groups, 1)

    @property
    def members(self) -> int:
        return padded(self.num_experts // self.spec.num_groups, 1)

    @property
    def columns(self) -> int:
        return self.groups * self.members

    @property
    def slots(self) -> int:
        return padded(self.width, 1)

    def num_warps(self, block_t: int, least: int) -> int:
        return min(16, max(least, block_t * self.columns // _LOGITS_PER_WARP))

    def constants(self, block_t: int, target: Target) -> dict[str, Argument]:
        spec, span = self.spec, _LOGITS_PER_LOAD * max(1, self.columns // _LOGITS_PER_WARP)
        return {
            **passed(NUM_EXPERTS=self.num_experts, TOP_K=spec.top_k, SCORING=spec.scoring),
            **passed(SOFTMAX_LAST=spec.order == "topk_then_softmax", RENORMALIZE=spec.renormalize, SCALE=spec.scale),
            **passed(NUM_GROUPS=spec.num_groups, TOPK_GROUP=spec.topk_group, BY_EXPERT=spec.slot_order == "expert"),
            **passed(BY_PAIR=None if spec.group_score is None else spec.group_score == "pair"),
            **passed(BIAS_ON_LOGITS=spec.bias_on == "logits"),
            **passed(BIAS_STRIDE=self.num_experts if self.bias_by_token else 0, EPSILON=spec.epsilon),
            **passed(LOGIT_SCALE=spec.logit_scale, SOFTCAP=spec.softcap),
            **passed(GROUPS=self.groups, MEMBERS=self.members, SLOTS=self.slots),
            **passed(SPAN=self.columns if target.interpreted else min(self.columns, span), BLOCK_T=block_t),
        }

    def describe(self, builder: PlanBuilder, has_bias: bool) -> None:
        describe_selection(builder, self.spec, has_bias)
        builder.sums(
            f"softmax over experts: a tree over {self.columns} columns, over slots and renormalisation: a tree over "
            f"{self.slots} in order of selection; neighbours first, whatever the number of tokens; fp32"
        )


def describe_selection(builder: PlanBuilder, spec: RouterSpec, has_bias: bool) -> None:
    if has_bias:
        selected = "logit + bias" if spec.bias_on == "logits" else "score + bias"
    else:
        selected = "the scores" if spec.num_groups > 1 and spec.group_score == "pair" else "the logits"
    builder.note(f"selection on {selected}")


def require_routing(
    logits: ArraySpec, spec: RouterSpec, correction_bias: ArraySpec | None, token_mask: ArraySpec | None
) -> None:
    require_spec("logits", logits, ("num_tokens", "num_experts"), "float32")
    num_tokens, num_experts = logits.shape
    spec.validate_experts(num_experts, correction_bias is not None)
    LayoutSpec(num_tokens, spec.require_top_k(), num_experts)  # Slots are numbered in int32.
    if correction_bias is not None:
        shape = (num_tokens, num_experts) if correction_bias.rank == 2 else (num_experts,)
        require_spec("correction_bias", correction_bias, shape, "float32")
    if token_mask is not None:
        require_spec("token_mask", token_mask, (num_tokens,), "bool")


@keep_plans
def plan_routing(
    logits: ArraySpec,
    spec: RouterSpec,
    target: Target,
    *,
    correction_bias: ArraySpec | None = None,
    token_mask: ArraySpec | None = None,
    given: ArraySpec | None = None,
    with_bitmatrix: bool = False,
) -> LaunchPlan:
    """ids int32 `[T, K]` and weights fp32 `[T, K]` of logits fp32 `[T, E]`.

    correction_bias fp32 `[E]`, or `[T, E]` of each token, affects only the selection. token_mask bool `[T]`: a masked
    token gets ids -1 and weights 0. Without a bias experts are ordered by logits (every scoring is monotone), otherwise
    by fp32 score + bias (topk_then_softmax: logit + bias). -0.0 ties with 0.0, NaN ranks below every number, ties go to
    the lower id. given int32 `[T, K]`: experts already chosen, distinct within a token, in this order. A token with an
    id outside [0, E) is masked. Outputs: ids, weights, [bitmatrix uint32 `[T, ceil(E / 32)]`].
    """
    require_routing(logits, spec, correction_bias, token_mask)
    num_tokens, num_experts = logits.shape
    chosen = (num_tokens, spec.require_top_k())
    if given is not None:
        require_spec("ids", given, chosen, "int32")
        if correction_bias is not None:
            raise InvalidInput(
                "correction_bias must be None with ids, which leave nothing to select, got both; remove one of the two"
            )
    builder = PlanBuilder("routing", target)
    present = builder.inputs(
        {"logits": logits, "correction_bias": correction_bias, "token_mask": token_mask, "given": given}
    )
    kinds = {"ids": "int32", "weights": "float32"}
    outputs = [builder.output(name, ArraySpec(chosen, kind)) for name, kind in kinds.items()]
    if with_bitmatrix:
        outputs.append(builder.output("bitmatrix", ArraySpec((num_tokens, -(-num_experts // 32)), "uint32")))
    if not target.compiled:
        describe_selection(builder, spec, correction_bias is not None)
        builder.sums("softmax and renormalisation: NumPy's pairwise sums, fp32")
        constants = {"spec": spec, "with_bitmatrix": with_bitmatrix}
        from moe_core.ops.routing import reference as twins

        return builder.reference(twins.route, present, constants, outputs)
    return launch_routing(builder, spec, spec.require_top_k())


def launch_routing(builder: PlanBuilder, spec: RouterSpec, width: int) -> LaunchPlan:
    target, (num_tokens, num_experts) = builder.target, builder.spec("logits").shape
    require_experts(num_experts)
    by_token = builder.has("correction_bias") and builder.spec("correction_bias").rank == 2
    selection = _Selection(spec, num_experts, width, by_token)
    selection.describe(builder, builder.has("correction_bias"))
    block_t, most = 1, num_tokens
    if target.interpreted:
        block_t = min(padded(num_tokens, 1), max(1, BLOCK_ELEMENTS["interpreter"] // selection.columns))
    num_warps = selection.num_warps(block_t, 1)
    if target.on_gpu:
        most = max(1, _PROGRAMS_PER_SM // num_warps) * target.num_sms
    block_tokens = block_t * -(-num_tokens // max(1, block_t * most))
    programs = -(-num_tokens // max(1, block_tokens))
    sizes = passed(WORDS=padded(-(-num_experts // 32), 1), NUM_LOCAL=1, EXPERTS=1, WIDTH=width)
    _launch_route(builder, programs, block_tokens, selection.constants(block_t, target) | sizes, num_warps)
    return builder.build()


def _launch_route(
    builder: PlanBuilder, programs: int, block_tokens: int, constants: dict[str, Argument], num_warps: int
) -> None:
    names = ("logits", "correction_bias", "token_mask", "given", "expert_map", "ids", "weights")
    names += ("bitmatrix", "block_counts")
    counts = passed(num_tokens=builder.spec("logits").shape[0], block_tokens=block_tokens)
    builder.launch(ROUTE, (programs,), builder.pointers(*names) | counts | constants | passed(PDL=None), num_warps)


@keep_plans
def plan_route_and_layout(
    routing: RouterLogits,
    spec: RouterSpec,
    layout: LayoutSpec,
    target: Target,
    *,
    token_mask: ArraySpec | None = None,
    expert_map: ArraySpec | None = None,
    block_ms: tuple[int, ...] = (),
    tile_counters: int = 0,
) -> LaunchPlan:
    """`plan_routing` and `plan_layout` of its ids: the same results in one launch for few tokens, two for many.

    expert_map int32 `[E]`: local id of each expert or -1. Without it layout.num_experts is E. Inputs: logits,
    [correction_bias], [token_mask], [expert_map]. Outputs: ids and weights `[T, K]`, then the outputs of `plan_layout`.
    """
    logits, correction_bias = routing.logits, routing.correction_bias
    require_routing(logits, spec, correction_bias, token_mask)
    num_tokens, num_experts = logits.shape
    if (layout.num_tokens, layout.top_k) != (num_tokens, spec.require_top_k()):
        raise InvalidInput(
            f"layout must be of {num_tokens} tokens and top_k = {spec.require_top_k()}, got {layout.num_tokens} and "
            f"{layout.top_k}; build it from the logits' shape and the RouterSpec"
        )
    if expert_map is not None:
        require_spec("expert_map", expert_map, (num_experts,), "int32")
    elif layout.num_experts != num_experts:
        raise InvalidInput(
            f"layout must have the {num_experts} experts of logits, got {layout.num_experts}; "
            "pass expert_map to map global ids to local experts"
        )
    routed = plan_routing(logits, spec, target, correction_bias=correction_bias, token_mask=token_mask)
    placed = plan_layout(
        routed.spec("ids"), layout, target, expert_map=expert_map, block_ms=block_ms, tile_counters=tile_counters
    )
    builder = PlanBuilder("route_and_layout", target)
    builder.inputs(dict(zip(_ROUTED, (logits, correction_bias, token_mask, expert_map), strict=True)))
    for buffer in (*routed.outputs, *placed.outputs):
        builder.output(buffer.name, buffer.spec)
    if not target.compiled:
        for step in (*routed.steps, *placed.steps):
            assert isinstance(step, ReferenceCall)
            builder.add_reference(step)
        for line in routed.summation:
            builder.sums(line)
        return builder.build()
    by_token = correction_bias is not None and correction_bias.rank == 2
    selection = _Selection(spec, num_experts, layout.top_k, by_token)
    selection.describe(builder, correction_bias is not None)
    read = builder.pointers("ids", "expert_map") | passed(token_mask=None)
    launcher = LayoutLauncher(builder, layout, block_ms, num_experts, read, tile_counters)
    tokens = _few_tokens(selection, launcher)
    if isinstance(tokens, int):
        builder.note(f"{num_tokens} tokens: routed and laid out in one launch")
        _add_one(selection, launcher, tokens)
    else:
        builder.note(f"{tokens}: routed and counted, then placed")
        _add_two(selection, launcher)
    launcher.further_schedules()
    return builder.build()


def _few_tokens(selection: _Selection, launcher: LayoutLauncher) -> int | str:
    engine, num_tokens = launcher.target.engine, launcher.layout.num_tokens
    if launcher.layout.rows is not None:
        return "rows are bounded"
    if num_tokens > FEW_TOKENS[engine]:
        return f"{num_tokens} tokens, one launch takes {FEW_TOKENS[engine]}"
    tokens = first_holding((*_FEW_SIZES[engine], FEW_TOKENS[engine]), num_tokens)
    width = max(selection.columns, launcher.experts)
    if tokens * width > _FEW_LOGITS:
        return f"{num_tokens} tokens, as {tokens} of {width} columns, one launch takes {_FEW_LOGITS} logits"
    if tokens * selection.slots > (most := _FEW_SLOTS[engine]):
        return f"{num_tokens} tokens, as {tokens} of {selection.slots} slots, one launch takes {most} slots"
    return tokens


def _add_one(selection: _Selection, launcher: LayoutLauncher, tokens: int) -> None:
    layout, builder = launcher.layout, launcher.builder
    width = max(selection.columns, launcher.experts)
    block_t = min(tokens, max(1, _STEP_LOGITS // width), max(1, _STEP_SLOTS // selection.slots))
    if launcher.target.interpreted:
        block_t = tokens // 2  # Two steps, so that its tests take both.
    num_warps = min(16, max(1, block_t // 2, block_t * width // _LOGITS_PER_WARP, launcher.experts // 256))
    arguments = builder.pointers(*_ROUTED, "ids", "weights")
    arguments |= launcher.outputs(num_tokens=layout.num_tokens, capacity=layout.capacity)
    arguments |= selection.constants(block_t, launcher.target)
    arguments |= passed(STEPS=tokens // block_t, NUM_LOCAL=layout.num_experts) | launcher.tail(num_warps)
    builder.launch(ROUTE_AND_LAYOUT, (1,), arguments, num_warps)


def _add_two(selection: _Selection, launcher: LayoutLauncher) -> None:
    layout, target = launcher.layout, launcher.target
    most = most_blocks(target)
    block_t = first_holding(_COUNTED_TOKENS[target.engine], -(-layout.num_tokens // most))
    block_t = min(block_t, max(1, _STEP_LOGITS // selection.columns))
    num_warps = selection.num_warps(block_t, min(16, block_t))
    block_tokens = block_t * max(1, -(-layout.num_tokens // (block_t * most)))
    blocks = launcher.block_counts(block_tokens * layout.top_k)
    sizes = passed(WORDS=1, NUM_LOCAL=layout.num_experts, EXPERTS=launcher.experts, WIDTH=layout.top_k)
    _launch_route(launcher.builder, blocks, block_tokens, selection.constants(block_t, target) | sizes, num_warps)
    launcher.place_blocks(block_tokens * layout.top_k, None)
