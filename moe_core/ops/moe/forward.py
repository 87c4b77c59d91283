"""Plans of a whole MoE forward."""

from __future__ import annotations

import dataclasses

from moe_core.base import ArraySpec, Target, dtypes, keep_plans, require_spec
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedTensor
from moe_core.ops.exchange.checks import require_width
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.tile_choice import choose_tile
from moe_core.ops.moe import checks
from moe_core.ops.moe.fuse import fuse_launches, fusion_counters, join_twins, why_not_fused
from moe_core.ops.moe.lora import LoRAStages, check_lora, lora_arrays
from moe_core.ops.moe.names import saved_pre_activation
from moe_core.ops.moe.options import PLAIN, ForwardOptions
from moe_core.ops.moe.pdl import use_pdl
from moe_core.ops.moe.rows import Product, RowStages, in_order, with_scales
from moe_core.ops.reduction.reduce import plan_reduce, plan_scale_rows
from moe_core.ops.router.forward import plan_router
from moe_core.ops.routing.layout import plan_layout
from moe_core.ops.routing.topk import plan_route_and_layout, plan_routing
from moe_core.plan import LaunchPlan, PlanBuilder, Role
from moe_core.specs import LayoutSpec, MatmulOperands, MatmulSpec, MoESpec, RouterWeights, TopK, named_arrays
from moe_core.specs import operands as bundles

Routing = RouterWeights | bundles.RouterLogits | TopK
#: Outputs that only a backward reads.
SAVED = "saved."


@keep_plans
def plan_moe(
    x: ArraySpec,
    experts: bundles.ExpertWeights,
    routing: Routing,
    spec: MoESpec,
    target: Target,
    *,
    options: ForwardOptions = PLAIN,
) -> LaunchPlan:
    """One plan for the whole layer: [router] -> [routing] -> layout -> matmul 1 -> matmul 2 -> reduce.

    Bundles hold ArraySpecs. Inputs: x, `experts.*`, `routing.*`, [token_mask bool `[T]`], [expert_map int32
    `[E_global]`], `shared.*`, `lora.*`, [adapter_ids]. Outputs: output `[T, D]`, tokens_per_expert `[E]`, invalid_ids
    `[1]`, then ids and weights `[T, K]` unless given, then logits `[T, E]` when routing from x. Raises InvalidInput,
    Unsupported. Experts may be quantised, and with spec.activations x and the hidden rows, too
    (docs/user/quantization.md). This rules out save: its rounding has no gradient.
    """
    reason = checks.why_no_moe_gradient(experts, spec, ()) if options.save else None
    if reason is not None:
        raise Unsupported(reason)
    if options.multiprocessors is not None and (options.save or options.shared is not None):
        setting = "save must be False" if options.save else "shared must be None"
        raise InvalidInput(f"{setting} with multiprocessors, got {options.multiprocessors}; leave them out")
    planner = _MoEPlanner(x, experts, routing, spec, target, options)
    apart = 0 if options.multiprocessors is None else launches_behind_hidden(options.results_at)
    return use_pdl(planner.plan(), planner.tokens, batch_invariant=spec.batch_invariant, apart=apart)


def launches_behind_hidden(results_at: object) -> int:
    """Launches after product 1 and the quantisation of its rows."""
    return 2 if results_at is None else 1


class _MoEPlanner:
    def __init__(
        self,
        x: ArraySpec,
        experts: bundles.ExpertWeights,
        routing: Routing,
        spec: MoESpec,
        target: Target,
        options: ForwardOptions,
    ) -> None:
        self.x, self.experts, self.routing, self.shared = x, experts, routing, options.shared
        self.token_mask, self.expert_map = options.token_mask, options.expert_map
        self.spec, self.target, self.save, self.results_at = spec, target, options.save, options.results_at
        require_spec("x", self.x, ("num_tokens", "d_model"), dtypes.MATMUL_DTYPES, contiguous=False)
        self.tokens, self.d_model = self.x.shape
        self.out_dtype = self.spec.out_dtype or self.x.dtype
        self.multiprocessors, self.builder = options.multiprocessors, PlanBuilder("moe", target=target)
        self.lora, self.adapter_ids = options.lora, options.adapter_ids
        self.stages: LoRAStages | None = None

    @property
    def _outputs(self) -> tuple[str, ...]:
        return ("y", "pre") if self.save and not self.spec.recompute else ("y",)

    def plan(self) -> LaunchPlan:
        builder = self.builder
        arrays = (*named_arrays(self.experts, "experts."), *named_arrays(self.routing, "routing."))
        shared = () if self.shared is None else named_arrays(self.shared, "shared.")
        builder.inputs({"x": self.x, **dict(arrays), "token_mask": self.token_mask, "expert_map": self.expert_map})
        builder.inputs(dict(shared) | {"results_at": self.results_at})
        builder.inputs(lora_arrays(self.lora, self.adapter_ids))
        num_local = checks.check_weights(self.x, self.experts, self.shared, self.spec)
        rows = self.tokens if self.results_at is None else 0
        builder.output("output", ArraySpec((rows, self.d_model), self.out_dtype))
        builder.output("tokens_per_expert", ArraySpec((num_local,), "int32"))
        builder.output("invalid_ids", ArraySpec((1,), "int32"))
        ids, weights = self._route(num_local)
        layout = LayoutSpec(self.tokens, builder.spec(ids).shape[1], num_local, limit=self.spec.row_limit)
        if self.lora is not None:
            check_lora(self.lora, self.adapter_ids, self.x, self.experts, self.spec)
            self.stages = LoRAStages(builder, self.lora, layout, self.spec, SAVED if self.save else "")
        self._check_order(layout)
        self._declare_saved(layout)
        slots, order = self._experts(ids, weights, layout)
        if slots != "output":
            self._reduce(slots, order, layout)
        plan = builder.build()
        if not self.target.compiled:
            return join_twins(plan)
        return fuse_launches(plan, self.tokens) if self.fused else plan

    def _check_order(self, layout: LayoutSpec) -> None:
        others = {"shared": self.shared, "expert_map": self.expert_map, "token_mask": self.token_mask}
        wrong = [name for name, value in others.items() if value is not None]
        if self.spec.rows_in_order and (wrong or layout.top_k != 1):
            reason = f"{wrong[0]} must be None" if wrong else f"top_k must be 1, got {layout.top_k}"
            raise InvalidInput(f"with spec.rows_in_order, {reason}: rows are the output as they lie; leave one out")
        if self.results_at is None:
            return
        if self.lora is not None:
            raise Unsupported("results_at must be None with lora, got addresses of other ranks; leave one out")
        require_spec("results_at", self.results_at, (layout.num_slots,), "int64")
        require_width("the output", self.d_model, self.x.dtype)
        if self.shared is not None or self.spec.out_dtype is not None:
            reason = "shared" if self.shared is not None else "out_dtype"
            raise InvalidInput(f"{reason} must be None with results_at, where nothing is summed; leave it out")

    def _declare_saved(self, layout: LayoutSpec) -> None:
        """Inputs of a backward: outputs with save, else scratch."""
        builder = self.builder
        declare, prefix = (builder.output, SAVED) if self.save else (builder.scratch, "")
        if "pre" in self._outputs:
            declare(f"{SAVED}pre_activation", saved_pre_activation(self.experts, self.x, self.spec, layout.capacity))
        others = named_arrays(dataclasses.replace(bundles.LayoutArrays.specs(layout), group_sizes=None))
        self.arrays = bundles.LayoutArrays(
            "tokens_per_expert", *(declare(prefix + name, spec) for name, spec in others)
        )
        if self.stages is not None:
            self.stages.declare(declare)
        shared = self.shared
        if "pre" in self._outputs and shared is not None:
            declare(f"{SAVED}shared_pre_activation", saved_pre_activation(shared, self.x, self.spec, self.tokens))
        if shared is not None and shared.gate is not None:
            declare(f"{prefix}shared_gate", ArraySpec((self.tokens, 1), "float32"))

    def _route(self, num_local: int) -> tuple[str, str]:
        """Buffers of ids and fp32 weights, which `_layout` may fill."""
        builder, routing, spec = self.builder, self.routing, self.spec
        if isinstance(routing, TopK):
            if spec.router is not None:
                raise InvalidInput("spec.router must be None when ids and weights are given; remove one of the two")
            require_spec("routing.ids", routing.ids, (self.tokens, "top_k"), dtypes.ID_DTYPES)
            require_spec("routing.weights", routing.weights, routing.ids.shape, dtypes.ROUTER_WEIGHT_DTYPES)
            spec.require_slots(routing.ids.shape[1])
            if routing.weights.dtype == "float32":
                return "routing.ids", "routing.weights"
            return "routing.ids", builder.scratch("row_weight", ArraySpec(routing.weights.shape, "float32"))
        if spec.router is None:
            raise InvalidInput("spec.router must be a RouterSpec when routing from x or logits, got None; pass one")
        top_k = spec.router.require_top_k()
        ids = builder.output("ids", ArraySpec((self.tokens, top_k), "int32"))
        weights = builder.output("weights", ArraySpec((self.tokens, top_k), "float32"))
        checks.require_op_router(routing)
        if isinstance(routing, RouterWeights):
            plan = plan_router(self.x, routing.weight, routing.bias, spec.logits_spec(), self.target)
            logits = plan.spec("logits")
            bindings = {"x": "x", "weight": "routing.weight", "bias": "routing.bias"}
            builder.call(plan, "router", bindings | {"logits": builder.output("logits", logits)})
        else:
            logits = require_spec("routing.logits", routing.logits, (self.tokens, "num_experts"), "float32")
        num_global = logits.shape[1]
        if self.expert_map is None and num_global != num_local:
            raise InvalidInput(
                f"routing must score the {num_local} experts of experts.gate_up, got {num_global}; "
                "pass expert_map to map global ids to local experts"
            )
        if self.expert_map is not None:
            require_spec("expert_map", self.expert_map, (num_global,), "int32")
        return ids, weights

    def _experts(self, ids: str, weights: str, layout: LayoutSpec) -> tuple[str, str]:
        """Returns the buffer of the weighted slots and its order, `slot` or `row`."""
        builder, spec, target, experts = self.builder, self.spec, self.target, self.experts
        width = experts.down.shape[-2 if spec.weight_layout == "in_out" else -1]
        hidden_spec = ArraySpec((layout.capacity, width), self.x.dtype)
        on_input = spec.apply_router_weight_on_input
        # Rows of matmul 1: x, or x times the weight, or either quantised.
        source = ArraySpec((self.tokens, self.d_model), self.x.dtype) if on_input else self.x
        rows_1: ArraySpec | QuantizedTensor = source
        rows_2: ArraySpec | QuantizedTensor = hidden_spec
        out_dtype = None
        if spec.activations is not None:
            rows_1, rows_2 = (checks.quantized_rows(array, spec.activations) for array in (source, hidden_spec))
            out_dtype = self.x.dtype
        first = MatmulOperands(
            rows_1, experts.gate_up, experts.up, experts.gate_up_bias, experts.up_bias, layer_index=experts.layer_index
        )
        row_weight = None if on_input else builder.spec(weights)
        second = MatmulOperands(
            rows_2, experts.down, bias=experts.down_bias, row_weight=row_weight, layer_index=experts.layer_index
        )
        plain = MatmulSpec(
            spec.weight_layout, out_dtype=out_dtype, allow_tf32=spec.allow_tf32, fast_accumulate=spec.fast_accumulate
        )
        matmul_1 = dataclasses.replace(plain, gather="token", activation=spec.activation, tuning=spec.matmul_tuning(1))
        matmul_2 = dataclasses.replace(plain, scatter="slot", tuning=spec.matmul_tuning(2))
        tails = [
            None if self.stages is None or not self.stages.has(number) else self.stages.tail(number)
            for number in (1, 2)
        ]
        problem_1 = MatmulProblem(first, layout, matmul_1, target, self._outputs, tail=tails[0])
        problems = problem_1, MatmulProblem(second, layout, matmul_2, target, tail=tails[1])
        tiles = tuple(choose_tile(problem, f"tuning.matmul_{i}") for i, problem in enumerate(problems, 1))
        # Tiles, and so bits, do not depend on the limit.
        limits = self.multiprocessors or (None, None)
        problems = tuple(dataclasses.replace(one, multiprocessors=n) for one, n in zip(problems, limits, strict=True))
        products = [Product(problem, tile) for problem, tile in zip(problems, tiles, strict=True)]
        addressed = self.results_at is not None and target.compiled
        if addressed:
            products[1] = Product(dataclasses.replace(problems[1], addressed=True), tiles[1])
        elif spec.rows_in_order or (tiles[1] is not None and tiles[1].family.stores_rows):
            # Whole tiles go by TMA to neighbouring rows. The reduction finds a slot's row.
            by_row = dataclasses.replace(matmul_2, scatter="row")
            products[1] = Product(dataclasses.replace(problems[1], spec=by_row), tiles[1])
        counters = 2 if any(tile is not None and tile.family.counts_tiles for tile in tiles) else 0
        block_ms = tuple(dict.fromkeys(tile.config.block_m for tile in tiles if tile is not None))
        whole = not spec.rows_in_order and spec.row_limit is None and self.multiprocessors is None
        alone = self.shared is None and not self.save and whole and self.results_at is None
        why_not = why_not_fused(tiles, self.tokens, layout.top_k, alone=alone, batch_invariant=spec.batch_invariant)
        why_not = "adapters have stages of their own" if self.stages is not None else why_not
        self.fused = why_not is None
        if why_not is not None and all(tiles):
            builder.note(f"stages share no launch: {why_not}")
        if tiles[1] is not None and self.fused:
            config = tiles[1].config
            max_blocks, column_tiles = layout.max_blocks(config.block_m), -(-self.d_model // config.block_n)
            counters = fusion_counters(self.tokens, max_blocks, column_tiles)
        self._layout(ids, layout, block_ms, counters)

        x = "x"
        if on_input:
            x = builder.scratch("weighted_x", source, Role.ROWS)
            plan = plan_scale_rows(self.x, ArraySpec((self.tokens, 1), "float32"), target)
            builder.call(plan, "scale_rows", {"x": "x", "weights": weights, "y": x})
        # Rows in order lie where the slots will, if there are any.
        beside_slots = not self.fused and self.results_at is None and not spec.rows_in_order
        if beside_slots and tiles[0] is not None and tiles[0].family.orders_rows(problems[0], tiles[0].config):
            products[0], x = in_order(builder, products[0], self.arrays.row_of_slot, x)
        stages = RowStages(builder, self.arrays, with_scales(builder, products[0], rows_2))
        x = stages.quantized_x(x, rows_1)
        names = {"x": x, "weight": "experts.gate_up", "up": "experts.up", "bias": "experts.gate_up_bias"}
        names |= {"up_bias": "experts.up_bias", "pre": f"{SAVED}pre_activation"}
        if self.stages is not None and self.stages.has(1):
            self.stages.shrink(1, x, "token")
            names |= self.stages.tail_bindings(1)
        hidden = stages.hidden_rows(names, hidden_spec, rows_2)
        slots, pushes = "output", self.results_at is not None
        if not addressed and (pushes or not spec.rows_in_order):
            rows = layout.capacity if products[1].problem.spec.scatter == "row" else layout.num_slots
            slots = builder.scratch("slots", ArraySpec((rows, self.d_model), self.x.dtype), Role.ROWS)
        names = {"x": hidden, "weight": "experts.down", "bias": "experts.down_bias"}
        names |= {} if on_input else {"row_weight": weights}
        if self.stages is not None and self.stages.has(2):
            self.stages.shrink(2, hidden, "row")
            names |= self.stages.tail_bindings(2)
        products[1].add(builder, 1, names | ({} if addressed else {"y": slots}))
        if pushes and not addressed:
            names = {"y": slots, "row_of_slot": self.arrays.row_of_slot, "results_at": "results_at"}
            from moe_core.ops.exchange import reference as twins

            builder.reference(twins.push_to_addresses, names, {}, ())
            slots = "output"
        return slots, products[1].problem.spec.scatter

    def _layout(self, ids: str, layout: LayoutSpec, block_ms: tuple[int, ...], counters: int) -> None:
        """Add the layout and any routing, in fewer launches than two plans."""
        builder, routing = self.builder, self.routing
        if self.stages is not None:
            self._adapter_layout(self.stages, ids, block_ms, counters)
            return
        bindings = {"ids": ids, "invalid_ids": "invalid_ids"} | dict(named_arrays(self.arrays))
        if isinstance(routing, TopK):
            widened = builder.has("row_weight")
            bindings |= {"given_weights": "routing.weights", "row_weight": "row_weight"} if widened else {}
            plan = plan_layout(
                builder.spec(ids),
                layout,
                self.target,
                expert_map=self.expert_map,
                token_mask=self.token_mask,
                given_weights=routing.weights if widened else None,
                block_ms=block_ms,
                tile_counters=counters,
            )
        else:
            logits = builder.spec("logits" if isinstance(routing, RouterWeights) else "routing.logits")
            scores = bundles.RouterLogits(logits, routing.correction_bias)
            plan = plan_route_and_layout(
                scores,
                self.spec.router,
                layout,
                self.target,
                token_mask=self.token_mask,
                expert_map=self.expert_map,
                block_ms=block_ms,
                tile_counters=counters,
            )
            bindings["weights"] = "weights"
        made = tuple(f"schedule_{block_m}" for block_m in block_ms)
        for name in (*made, *(("tile_counters",) if counters else ())):
            bindings[name] = builder.scratch(name, plan.spec(name))
        builder.call(plan, "layout" if isinstance(routing, TopK) else "routing", bindings)

    def _adapter_layout(self, stages: LoRAStages, ids: str, block_ms: tuple[int, ...], counters: int) -> None:
        builder, routing, spec = self.builder, self.routing, self.spec
        given = "routing.weights" if isinstance(routing, TopK) and builder.has("row_weight") else None
        if not isinstance(routing, TopK):
            assert spec.router is not None
            logits = "logits" if isinstance(routing, RouterWeights) else "routing.logits"
            bias = routing.correction_bias
            arrays = {"correction_bias": bias, "token_mask": self.token_mask}
            plan = plan_routing(builder.spec(logits), spec.router, self.target, **arrays)
            builder.call(plan, "routing", {"logits": logits, "ids": "ids", "weights": "weights"})
        bindings = {"invalid_ids": "invalid_ids"} | dict(named_arrays(self.arrays))
        bindings |= {} if given is None else {"row_weight": "row_weight"}
        options = {"expert_map": self.expert_map, "token_mask": self.token_mask, "tile_counters": counters}
        stages.add_layout(ids, given, bindings, options, block_ms)

    def _reduce(self, slots: str, order: str, layout: LayoutSpec) -> None:
        builder = self.builder
        shared_output, shared_gate = self._shared()
        plan = plan_reduce(
            builder.spec(slots),
            builder.spec(self.arrays.row_of_slot),
            layout,
            self.target,
            order=order,
            shared=builder.spec_of(shared_output),
            shared_gate=builder.spec_of(shared_gate),
            out_dtype=self.out_dtype,
        )
        bindings = {"y": slots, "out": "output"} | ({"shared_gate": shared_gate} if shared_gate else {})
        builder.call(plan, "reduce", bindings)

    def _shared(self) -> tuple[str | None, str | None]:
        """Returns the output (fp32 `[T, D]`) and gate logits (fp32 `[T, 1]`)."""
        shared, spec, builder = self.shared, self.spec.of_shared(), self.builder
        if shared is None:
            return None, None
        layer_index = self.experts.layer_index if checks.shared_is_stacked(self.experts, shared) else None
        first = MatmulOperands(self.x, shared.gate_up, shared.up, layer_index=layer_index)
        plain = MatmulSpec(spec.weight_layout, allow_tf32=spec.allow_tf32, tuning=spec.matmul_tuning())
        dense = dataclasses.replace(plain, activation=spec.activation)
        plan = plan_matmul_ogs(first, None, dense, self.target, outputs=self._outputs)
        hidden = builder.scratch("shared_hidden", plan.spec("y"), Role.ROWS)
        bindings = {"x": "x", "weight": "shared.gate_up", "up": "shared.up", "y": hidden}
        builder.call(plan, "shared matmul 1", bindings | {"pre": f"{SAVED}shared_pre_activation"})
        dense = dataclasses.replace(plain, out_dtype="float32")
        second = MatmulOperands(builder.spec(hidden), shared.down, layer_index=layer_index)
        plan = plan_matmul_ogs(second, None, dense, self.target)
        output = builder.scratch("shared_output", plan.spec("y"), Role.ADDEND)
        bindings = {"x": hidden, "weight": "shared.down", "y": output}
        builder.call(plan, "shared matmul 2", bindings, {"y": Role.ADDEND})
        if shared.gate is None:
            return output, None
        plan = plan_router(self.x, shared.gate, None, spec.shared_gate_spec(), self.target)
        gate = f"{SAVED if self.save else ''}shared_gate"
        builder.call(plan, "shared gate", {"x": "x", "weight": "shared.gate", "logits": gate})
        return output, gate
