"""The stages of a MoE backward on compiled targets. Equations: docs/user/training.md."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from moe_core.base import ArraySpec
from moe_core.ops.activation.backward import plan_expert_activation_backward
from moe_core.ops.lora.tail import Tail
from moe_core.ops.matmul.backward import Composed, Side, add_input_gradient, add_weight_gradient, stage_inputs
from moe_core.ops.matmul.forward import plan_product
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.tile_choice import choose_tile
from moe_core.ops.moe.checks import shared_is_stacked
from moe_core.ops.moe.forward import SAVED
from moe_core.ops.moe.lora import LoRAStages
from moe_core.ops.moe.names import saved_pre_activation
from moe_core.ops.reduction import rowwise
from moe_core.ops.reduction.reduce import plan_reduce, plan_scale_rows
from moe_core.ops.router.backward import add_router_input_gradient
from moe_core.ops.routing.backward import plan_routing_backward
from moe_core.ops.routing.layout import plan_layout
from moe_core.plan import PlanBuilder, Role
from moe_core.specs import LayoutSpec, MatmulSpec, MoESpec
from moe_core.specs import operands as bundles
from moe_core.specs.operands import MatmulOperands, RouterWeights, SharedExpert, TopK, named_arrays


@dataclass
class _Chain:
    """Two products and the activation between them, of the experts, or (layout None) the shared expert. lora: the
    experts' adapters. weighted_input: x is multiplied with the router's weight before matmul 1. overwrites: see
    `BackwardOptions`."""

    builder: PlanBuilder
    x: ArraySpec
    bundle: bundles.ExpertWeights | SharedExpert
    layer_index: ArraySpec | None
    layout: LayoutSpec | None
    spec: MoESpec
    weighted_input: bool = False
    overwrites: bool = False
    lora: LoRAStages | None = None

    def __post_init__(self) -> None:
        self.target = self.builder.target
        # Prefixes of weights, steps and scratch, and the gather.
        names = ("shared.", "shared ", "shared_", "row") if self.layout is None else ("experts.", "", "", "token")
        self.prefix, self.label, self.scratch, self.gather = names
        self.pre = f"{SAVED}{self.scratch}pre_activation"

    def wants(self, *names: str) -> bool:
        return any(self.builder.has(f"d_{self.prefix}{name}") for name in names)

    def source(self) -> str:
        """Rows of matmul 1: x, or x times the weight."""
        if not self.weighted_input:
            return "x"
        if not self.builder.has("weighted_x"):
            plan = plan_scale_rows(self.x, ArraySpec((self.x.shape[0], 1), "float32"), self.target)
            made = self.builder.scratch("weighted_x", plan.spec("y"), Role.ROWS)
            self.builder.call(plan, "scale_rows", {"x": "x", "y": made})
        return "weighted_x"

    def recompute(self) -> None:
        """Run matmul 1 again if nothing was saved, with the forward's tiles, or lower ones with equal bits."""
        builder, bundle, spec, layout = self.builder, self.bundle, self.spec, self.layout
        if builder.has(self.pre):
            return
        self.overwrites = True
        rows, number = (self.x.shape[0], None) if layout is None else (layout.capacity, 1)
        self.pre = builder.scratch(f"{self.scratch}pre_activation", saved_pre_activation(bundle, self.x, spec, rows))
        source = self.source()
        names = {"weight": "gate_up", "up": "up", "bias": "gate_up_bias", "up_bias": "up_bias"}
        weights = {name: getattr(bundle, field, None) for name, field in names.items()}
        operands = MatmulOperands(builder.spec(source), **weights, layer_index=self.layer_index)
        matmul = MatmulSpec(
            spec.weight_layout, self.gather, "row", spec.activation, None, spec.allow_tf32, spec.matmul_tuning(number)
        )
        tail, bindings_of_tail = self.tail(1)
        problem = MatmulProblem(operands, layout, matmul, self.target, ("pre",), tail=tail)
        tile = choose_tile(problem, "tuning.matmul_1")
        assert tile is not None, "backwards of the reference are one call"
        plan = plan_product(problem, tile, 0)
        label = f"{self.label}matmul 1"
        # Later products with this number count in `tile_counters`.
        counters = f"{label}.tile_counters"
        bindings = stage_inputs(builder, plan, layout, tile.config.block_m, counters=counters)
        bindings |= bindings_of_tail | {name: self.prefix + field for name, field in names.items()}
        builder.call(plan, label, bindings | {"x": source, "pre": self.pre})

    def tail(self, number: int, low: str | None = None) -> tuple[Tail | None, dict[str, str]]:
        """The tail of product `number`, or with low of the gradient of its input, and its bindings."""
        if self.lora is None or not self.lora.has(number):
            return None, {}
        return self.lora.tail(number, low), self.lora.tail_bindings(number, low)

    def pull_back(self, stage: int, d_y: str, *, addressed: bool = False) -> str:
        """d_y . weight^T by row: of down for stage 0, of gate_up (and up) for stage 1."""
        name, spec = ("down", "gate_up")[stage], self.spec
        up = self.bundle.up if stage else None
        operands = MatmulOperands(self.builder.spec(d_y), getattr(self.bundle, name), up, layer_index=self.layer_index)
        # fp32 for the shared expert, like the sum it joins.
        out_dtype = "float32" if stage and self.layout is None else None
        gather = "row" if stage else self.gather
        options = MatmulSpec(spec.weight_layout, gather, "row", None, out_dtype, spec.allow_tf32, spec.matmul_tuning())
        bindings = {"x": d_y, "weight": self.prefix + name} | ({} if up is None else {"up": f"{self.prefix}up"})
        label, where = f"{self.label}input gradient of {name}", self.layout
        tail = None
        if self.lora is not None and self.lora.has(number := 1 if stage else 2):
            tail, more = self.tail(number, self.lora.pull_back(number, d_y, gather))
            bindings |= more
        composed = Composed(stage, addressed, tail)
        return add_input_gradient(self.builder, label, operands, where, options, bindings, composed=composed)

    def factor_gradients(self, d_out: str, made: dict[str, str], row_weight: str | None) -> None:
        """made: by `activation`."""
        lora = self.lora
        if lora is None:
            return
        low = {number: lora.low(number) for number in (1, 2)}
        if lora.has(2):
            roles = {"left": Role.LOW, "right": Role.D_ROWS}
            lora.gradient("b2", (low[2], "row"), (d_out, "token"), roles=roles, row_weight=row_weight)
            if "weighted_hidden" in made:
                lora.gradient("a2", (made["weighted_hidden"], "row"), ("d_low2", "row"), roles={"right": Role.D_LOW})
        if lora.has(1) and "d_pre" in made:
            if self.builder.has("d_lora.a1"):
                if not self.builder.has("d_low1"):
                    lora.pull_back(1, made["d_pre"], "row")
                lora.gradient("a1", (self.source(), "token"), ("d_low1", "row"), roles={"right": Role.D_LOW})
            roles = {"left": Role.LOW, "right": Role.D_ROWS}
            lora.gradient("b1", (low[1], "row"), (made["d_pre"], "row"), roles=roles)

    def activation(self, z: str, weighting: dict[str, str], d_weight: Callable[[], str] | None) -> dict[str, str]:
        """d_pre, weighted_hidden if needed, and d_weight if not None (it gives its buffer). z: the output's gradient
        pulled back through `down`. weighting: operands of `plan_expert_activation_backward`."""
        builder = self.builder
        names = {"d_hidden": z, "pre": self.pre} | weighting
        operands = bundles.ExpertActivationOperands(**{name: builder.spec(buffer) for name, buffer in names.items()})
        kinds = ["d_pre"] + ["weighted_hidden"] * (self.wants("down") or builder.has("d_lora.a2"))
        outputs = (*kinds, *(() if d_weight is None else ("d_weight",)))
        if self.layout is not None:
            names |= {"slot_of_row": f"{SAVED}slot_of_row"}
        plan = plan_expert_activation_backward(
            operands,
            self.spec.activation,
            self.target,
            outputs=outputs,
            slot_of_row=builder.spec_of(names.get("slot_of_row")),
        )
        roles = {"d_pre": Role.D_ROWS, "weighted_hidden": Role.ROWS}
        made = {name: builder.scratch(self.scratch + name, plan.spec(name), roles[name]) for name in kinds[1:]}
        if self.overwrites:
            made["d_pre"] = builder.scratch_over(f"{self.scratch}d_pre", self.pre, Role.D_ROWS)
        else:
            made["d_pre"] = builder.scratch(f"{self.scratch}d_pre", plan.spec("d_pre"), Role.D_ROWS)
        made |= {} if d_weight is None else {"d_weight": d_weight()}
        builder.call(plan, f"{self.label}activation", names | made)
        return made

    def down_gradients(self, d_out: str, made: dict[str, str], row_weight: str | None = None) -> None:
        """made: by `activation`."""
        hidden = made.get("weighted_hidden")
        self.weight_gradient("down", Side(hidden) if hidden else None, Side(d_out, self.gather), row_weight=row_weight)

    def gate_up_gradients(self, made: dict[str, str]) -> None:
        for name in ("gate_up", "up"):
            if self.wants(name, f"{name}_bias"):
                d_pre, columns = made["d_pre"], None
                if self.bundle.up is not None:
                    width = self.builder.spec(d_pre).shape[1] // 2
                    columns = (0 if name == "gate_up" else width, width)
                self.weight_gradient(name, Side(self.source(), self.gather), Side(d_pre, columns=columns))

    def weight_gradient(self, name: str, x: Side | None, d_y: Side, *, row_weight: str | None = None) -> None:
        """Add a matrix's and its bias's gradients, if wanted."""
        full, spec = self.prefix + name, self.spec
        bindings = {"d_weight": f"d_{full}", "d_bias": f"d_{full}_bias", "into": f"into.{full}"}
        bindings |= {"layer_index": "experts.layer_index"}
        bindings |= {} if row_weight is None else {"row_weight": row_weight}
        options = MatmulSpec(spec.weight_layout, allow_tf32=spec.allow_tf32, tuning=spec.matmul_tuning())
        label = f"{self.label}weight gradient of {name}"
        add_weight_gradient(self.builder, label, x, d_y, self.layout, options, bindings)


class BackwardPlanner:
    """One method per stage. builder: has every input and wanted output."""

    def __init__(
        self,
        builder: PlanBuilder,
        operands: bundles.MoEOperands,
        gradients: bundles.OutputGradients,
        spec: MoESpec,
        overwrites: bool,
    ) -> None:
        self.builder, self.operands, self.gradients, self.spec = builder, operands, gradients, spec
        self.target, self.routing, self.x = builder.target, operands.routing, operands.x
        ids_given, experts = isinstance(self.routing, TopK), operands.experts
        self.ids, self.weights = ("routing.ids", "routing.weights") if ids_given else ("ids", "weights")
        sizes = self.x.shape[0], builder.spec(self.ids).shape[1], experts.down.shape[-3]
        self.layout = LayoutSpec(*sizes, limit=spec.row_limit)
        self.by_slot = ArraySpec((self.layout.num_tokens, self.layout.top_k), "float32")
        self.on_input = spec.apply_router_weight_on_input
        self.row_weight = None if self.on_input else self.weights
        rows = self.x, experts, experts.layer_index, self.layout
        lora = None if operands.lora is None else LoRAStages(builder, operands.lora, self.layout, spec, SAVED)
        self.experts = _Chain(builder, *rows, spec, self.on_input, overwrites, lora)
        wanted = {name for name in ("weight", "bias", "logits", "weights") if builder.has(f"d_routing.{name}")}
        self.needs_weights = bool(wanted) or (builder.has("d_x") and isinstance(self.routing, RouterWeights))
        self.needs_rows = builder.has("d_x") or (self.on_input and self.needs_weights)

    def plan(self) -> None:
        self.d_out = rowwise.cast_gradient(self.builder, "output gradient", "gradients.output", self.x.dtype)
        if self.experts.lora is not None and self.target.compiled:
            self.experts.lora.add_virtual_schedule()
        self.experts.recompute()
        extras = [] if self.operands.shared is None else self._shared(self.operands.shared)
        made, chain = self._activation(), self.experts
        # An unwritten gradient lends its memory: gate and up's comes late, because most buffers are short-lived,
        # `down`'s after it if d_pre fits there.
        down_last = self._down_holds_d_pre(made)
        if not down_last:
            chain.down_gradients(self.d_out, made, self.row_weight)
        if self.needs_rows:
            self.d_rows = chain.pull_back(1, made["d_pre"], addressed=self.builder.has("results_at"))
        if self.needs_weights:
            d_weights = self._weighted_input("d_weight") if self.on_input else made["d_weight"]
            extras += self._router(d_weights)
        if self.builder.has("d_x") and not self.builder.has("results_at"):
            self._d_x(extras)
        chain.gate_up_gradients(made)
        chain.factor_gradients(self.d_out, made, self.row_weight)
        if down_last:
            chain.down_gradients(self.d_out, made, self.row_weight)

    def _down_holds_d_pre(self, made: dict[str, str]) -> bool:
        """True if the unwritten gradient of `down` has room for d_pre."""
        lent, chain = {"d_experts.gate_up", "d_experts.down"} <= set(self.builder.lent), self.experts
        if not lent or (chain.overwrites and chain.pre.startswith(SAVED)):
            return False
        return self.builder.spec(made["d_pre"]).nbytes <= self.builder.spec("d_experts.down").nbytes

    def _shared(self, shared: SharedExpert) -> list[str]:
        """Returns the parts of d_x fp32 `[T, D]`, if wanted."""
        builder, target, experts = self.builder, self.target, self.operands.experts
        layer_index = experts.layer_index if shared_is_stacked(experts, shared) else None
        chain = _Chain(builder, self.x, shared, layer_index, None, self.spec.of_shared())
        if not chain.wants("gate_up", "up", "down", "gate") and not builder.has("d_x"):
            return []
        chain.recompute()
        z, gate, weighting, d_weight = chain.pull_back(0, self.d_out), f"{SAVED}shared_gate", {}, None
        if shared.gate is not None:
            plan = rowwise.plan_gate_weight(builder.spec(gate), target)
            roles = {"weight": Role.ROW_WEIGHT}
            weighting["row_weight"] = builder.call(plan, "shared gate", {"gate": gate}, roles)
            if chain.wants("gate") or builder.has("d_x"):
                array = ArraySpec((self.layout.num_tokens,), "float32")
                d_weight = functools.partial(builder.scratch, "shared_d_weight", array, Role.D_ROW_WEIGHT)
        made = chain.activation(z, weighting, d_weight)
        chain.down_gradients(self.d_out, made)
        chain.gate_up_gradients(made)
        parts = [chain.pull_back(1, made["d_pre"])] if builder.has("d_x") else []
        if "d_weight" in made:
            plan = rowwise.plan_gate_gradient(builder.spec(gate), target)
            bindings, roles = {"d_weight": made["d_weight"], "gate": gate}, {"d_weight": Role.D_ROW_WEIGHT}
            d_gate = builder.call(plan, "shared gate gradient", bindings, roles)
            chain.weight_gradient("gate", Side("x"), Side(d_gate, role=Role.D_LOGITS))
            if builder.has("d_x"):
                options = self.spec.shared_gate_spec()
                parts.append(add_router_input_gradient(builder, "shared gate input", d_gate, "shared.gate", options))
        return parts

    def _activation(self) -> dict[str, str]:
        chain, made = self.experts, {}
        first = chain.wants("gate_up", "gate_up_bias", "up", "up_bias")
        first |= any(self.builder.has(f"d_lora.{name}") for name in ("a1", "b1", "a2"))
        if first or self.needs_rows or self.needs_weights or chain.wants("down"):
            z, with_weights = chain.pull_back(0, self.d_out), self.needs_weights and not self.on_input
            weighting = {"row_of_slot": f"{SAVED}row_of_slot"}
            weighting |= {} if self.row_weight is None else {"row_weight": self.row_weight}
            weighting |= self._bias_product() if with_weights else {}
            made = chain.activation(z, weighting, self._weights_gradient if with_weights else None)
        return made

    def _bias_product(self) -> dict[str, str]:
        """The share of the weights' gradient from the bias of `down`."""
        bias, layer_index = self.operands.experts.down_bias, self.operands.experts.layer_index
        if bias is None:
            return {}
        plan = rowwise.plan_bias_product(
            self.builder.spec(self.d_out), bias, self.layout, self.target, layer_index=layer_index
        )
        bindings = {"d_y": self.d_out, "bias": "experts.down_bias"}
        return {"bias_product": self.builder.call(plan, "bias product", bindings)}

    def _weighted_input(self, output: str, extra: str | None = None) -> str:
        """The backward of x times the weight: `d_weight` or `d_x`."""
        rows = self.builder.spec(self.d_rows)
        plan = rowwise.plan_weighted_input(rows, self.x, self.target, outputs=(output,), with_extra=extra is not None)
        bindings = {"d_rows": self.d_rows, "x": "x"}
        bindings |= {} if extra is None else {"extra": extra}
        bindings[output] = "d_x" if output == "d_x" else self._weights_gradient()
        return self.builder.call(plan, f"weighted input, {output}", bindings)

    def _weights_gradient(self) -> str:
        if self.builder.has("d_routing.weights"):
            return "d_routing.weights"
        return self.builder.scratch("d_weights", self.by_slot)

    def _router(self, d_weights: str) -> list[str]:
        """Returns the part of d_x, if x was routed."""
        builder, gradients, spec, routing = self.builder, self.gradients, self.spec, self.routing
        if isinstance(routing, TopK):
            return []
        from_x = isinstance(routing, RouterWeights)
        names = {"weights": d_weights}
        if gradients.weights is not None:
            bindings = {"first": d_weights, "second": "gradients.weights"}
            roles = {name: Role.D_ROW_WEIGHT for name in ("first", "second", "total")}
            names["weights"] = builder.call(
                rowwise.plan_add(gradients.weights, self.target), "weights", bindings, roles
            )
        others = [name for name, _ in named_arrays(gradients) if name not in ("output", "weights")]
        names |= {name: f"gradients.{name}" for name in others}
        logits = "logits" if from_x else "routing.logits"
        if gradients.load_balance is not None:
            names["tokens_per_expert"] = self._counts(builder.spec(logits).shape[1])
        arrays = {name: builder.spec(buffer) for name, buffer in names.items()} | {"weights": self.by_slot}
        assert spec.router is not None
        given_arrays = bundles.RoutingGradients(**arrays), builder.spec(logits), builder.spec(self.ids)
        plan = plan_routing_backward(*given_arrays, spec.router, self.target, token_mask=self.operands.token_mask)
        bindings = {f"gradients.{name}": buffer for name, buffer in names.items()} | {"logits": logits}
        if not from_x:
            bindings["d_logits"] = "d_routing.logits"
        d_logits = builder.call(plan, "routing", bindings)
        if not from_x:
            return []
        layout, results = spec.router_weight_layout, {"d_weight": "d_routing.weight", "d_bias": "d_routing.bias"}
        bindings = results | {"into": "into.routing.weight", "row_mask": "token_mask"}
        sides = Side("x"), Side(d_logits, role=Role.D_LOGITS)
        add_weight_gradient(builder, "router weight", *sides, None, MatmulSpec(layout), bindings)
        if not builder.has("d_x"):
            return []
        return [add_router_input_gradient(builder, "router input", d_logits, "routing.weight", spec.logits_spec())]

    def _counts(self, num_global: int) -> str:
        """Slots of every expert, as the forward counted local ones."""
        if self.operands.expert_map is None:
            return "tokens_per_expert"
        layout = LayoutSpec(self.layout.num_tokens, self.layout.top_k, num_global)
        plan = plan_layout(self.builder.spec(self.ids), layout, self.target, token_mask=self.operands.token_mask)
        return self.builder.call(plan, "all experts", {})

    def _d_x(self, extras: list[str]) -> None:
        builder = self.builder
        while len(extras) > 1:
            plan = rowwise.plan_add(builder.spec(extras[0]), self.target)
            added = builder.call(plan, f"sum {len(extras)}", {"first": extras[0], "second": extras[1]})
            extras = [added, *extras[2:]]
        extra = extras[0] if extras else None
        if self.on_input:
            self._weighted_input("d_x", extra)
            return
        rows, row_of_slot = builder.spec(self.d_rows), builder.spec(f"{SAVED}row_of_slot")
        plan = plan_reduce(
            rows,
            row_of_slot,
            self.layout,
            self.target,
            order="row",
            shared=builder.spec_of(extra),
            out_dtype=builder.spec("d_x").dtype,
        )
        bindings = {"y": self.d_rows, "out": "d_x"} | ({"shared": extra} if extra else {})
        builder.call(plan, "reduce", bindings, {"y": Role.D_ROWS, "out": Role.D_ROWS})
