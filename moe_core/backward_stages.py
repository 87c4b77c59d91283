"""The stages of one MoE backward on compiled targets, wired into one plan; equations: docs/training.md."""

from __future__ import annotations

from moe_core.activation_backward import plan_expert_activation_backward
from moe_core.arrays import ArraySpec
from moe_core.backward_rows import plan_add, plan_bias_product, plan_cast_rows, plan_weighted_input
from moe_core.formats import QuantizedTensor
from moe_core.layout import plan_layout, plan_schedule
from moe_core.matmul_hopper import zero_counters
from moe_core.matmul_ogs import TRANSPOSED, matmul_problem, plan_matmul_ogs, product_tile
from moe_core.matmul_quantized_transposed import choose_transposed_tile, plan_matmul_quantized_transposed
from moe_core.moe import KEPT, LAYOUT_ARRAYS, kept_pre_activation
from moe_core.operands import (
    ExpertActivationOperands,
    MatmulOperands,
    MoEOperands,
    OutputGradients,
    RouterLogits,
    RouterWeights,
    RoutingGradients,
    TopK,
    named_arrays,
    named_fields,
)
from moe_core.plan import LaunchPlan, PlanBuilder
from moe_core.reduction import plan_reduce, plan_scale_rows
from moe_core.routing import plan_router
from moe_core.routing_backward import plan_routing_backward
from moe_core.shared_backward import launch_shared
from moe_core.specs import LayoutSpec, LogitsSpec, MatmulSpec, MoESpec
from moe_core.tile_choice import choose_tile
from moe_core.weight_gradient import WeightGradientOperands, WeightGradientSpec, plan_weight_gradient

#: The bias beside a matrix of experts.
BIASES = {"gate_up": "gate_up_bias", "up": "up_bias", "down": "down_bias"}


def bound_arrays(operands: MatmulOperands, name: str, buffer: str) -> dict[str, str]:
    """Bindings of the operand of that name, if there is one, to a buffer; of a quantised one those of its arrays."""
    value = getattr(operands, name)
    if isinstance(value, QuantizedTensor):
        return {f"{name}.{part}": f"{buffer}.{part}" for part, _ in named_fields(value)}
    return {} if value is None else {name: buffer}


class BackwardPlanner:
    """One method per stage. builder: holds every input and wanted output; what a stage makes else is scratch."""

    def __init__(self, builder: PlanBuilder, operands: MoEOperands, gradients: OutputGradients, spec: MoESpec) -> None:
        self.builder, self.operands, self.gradients, self.spec = builder, operands, gradients, spec
        self.target, self.experts, self.routing = builder.target, operands.experts, operands.routing
        self.x, (self.tokens, self.d_model) = operands.x, operands.x.shape
        given = isinstance(self.routing, TopK)
        self.ids, self.weights = ("routing.ids", "routing.weights") if given else ("ids", "weights")
        self.layout = LayoutSpec(self.tokens, builder.spec(self.ids).shape[1], self.experts.down.shape[-3])
        self.on_input = spec.apply_router_weight_on_input
        self.layer = {"layer": "experts.layer"} if self.experts.layer is not None else {}
        self.groups = {name: KEPT + name for name in LAYOUT_ARRAYS} | {"group_sizes": "tokens_per_expert"}
        self.pre = f"{KEPT}pre_activation"
        wanted = {name for name in ("weight", "bias", "logits", "weights") if builder.has(f"d_routing.{name}")}
        self.needs_weights = bool(wanted) or (builder.has("d_x") and isinstance(self.routing, RouterWeights))
        self.needs_rows = builder.has("d_x") or (self.on_input and self.needs_weights)

    def plan(self) -> None:
        self._round_output_gradient()
        if not self.builder.has(self.pre):
            self._recompute()
        extras: list[str] = []
        if self.operands.shared is not None:
            extras = launch_shared(self.builder, self.operands, self.spec, self.d_out)
        d_weights = self._experts()
        if self.needs_weights:
            if self.on_input:
                d_weights = self._weighted_input("d_weight")
            extras += self._router(d_weights)
        if self.builder.has("d_x"):
            self._d_x(extras)

    def _call(self, plan: LaunchPlan, name: str, **bindings: str) -> str:
        """Inline a plan; the buffer of its first output, made here where `bindings` names none."""
        first = plan.outputs[0]
        if first.name not in bindings:
            bindings[first.name] = self.builder.scratch(f"{name}.{first.name}", first.spec)
        self.builder.call(plan, name, bindings)
        return bindings[first.name]

    def _round_output_gradient(self) -> None:
        self.d_out = "gradients.output"
        if self.gradients.output.dtype != self.x.dtype:
            plan = plan_cast_rows(self.gradients.output, self.x.dtype, self.target)
            self.d_out = self._call(plan, "output gradient", x=self.d_out)

    def _recompute(self) -> None:
        """Matmul 1 again, to the forward's bits: with its tiles, or lower ones that give the same."""
        builder, experts, spec, target = self.builder, self.experts, self.spec, self.target
        width = experts.down.shape[-2 if spec.weight_layout == "in_out" else -1]
        tuning = spec.matmul_tuning(1)
        matmul = MatmulSpec(spec.weight_layout, "token", "row", spec.activation, None, spec.allow_tf32, tuning)
        pre = kept_pre_activation(experts, self.x, spec, self.layout.capacity)
        self.pre = builder.scratch("pre_activation", pre)
        name = self._source()
        source = builder.spec(name)
        first = MatmulOperands(
            source, experts.gate_up, experts.up, experts.gate_up_bias, experts.up_bias, layer=experts.layer
        )
        plan = plan_matmul_ogs(first, self.layout, matmul, target, stage=0, outputs=("pre",))
        names = {"weight": "gate_up", "up": "up", "bias": "gate_up_bias", "up_bias": "up_bias", "layer": "layer"}
        bindings = {}
        for operand, buffer in names.items():
            bindings |= bound_arrays(first, operand, f"experts.{buffer}")
        choice = product_tile(first, width, self.layout, matmul, target, name="tuning.matmul_1", outputs=("pre",))
        assert choice is not None, "backwards of the reference are one call"
        config = choice.config
        bindings |= {"schedule": self._schedule(config.block_m)} | self._groups()
        if config.family == "hopper":
            # Of its own: the products with this number behind it count in `tile_counters`.
            bindings["tile_counters"] = zero_counters(builder, "matmul 1.tile_counters")
        self._call(plan, "matmul 1", x=name, pre=self.pre, **bindings)

    def _source(self) -> str:
        """What matmul 1 read: x, or x times the weight."""
        if not self.on_input:
            return "x"
        if not self.builder.has("weighted_x"):
            plan = plan_scale_rows(self.x, ArraySpec((self.tokens, 1), "float32"), self.target)
            self.builder.scratch("weighted_x", plan.spec("y"))
            self._call(plan, "scale_rows", x="x", weights=self.weights, y="weighted_x")
        return "weighted_x"

    def _groups(self) -> dict[str, str]:
        return {name: self.groups[name] for name in ("group_sizes", "group_start", "slot_of_row")}

    def _schedule(self, block_m: int) -> str:
        """The schedule of a block height, made by the first product that asks for it."""
        name = f"schedule_{block_m}"
        if not self.builder.has(name):
            plan = plan_schedule(self.layout, block_m, self.target)
            self.builder.scratch(name, plan.spec("schedule"))
            self._call(plan, name, group_sizes=self.groups["group_sizes"], schedule=name)
        return name

    def _pull_back(self, stage: int, d_y: str, gather: str, weight: str) -> str:
        """d_y . weight^T by layout row; weight: `down`, or `gate_up`, with `up` where there is one."""
        builder, experts, spec = self.builder, self.experts, self.spec
        up = experts.up if weight == "gate_up" else None
        operands = MatmulOperands(builder.spec(d_y), getattr(experts, weight), up, layer=experts.layer)
        tuning, joined = spec.matmul_tuning(), up is not None
        if isinstance(operands.weight, QuantizedTensor):
            return self._pull_back_quantized(operands, d_y, gather, weight)
        matmul = MatmulSpec(TRANSPOSED[spec.weight_layout], gather, "row", None, None, spec.allow_tf32, tuning)
        plan = plan_matmul_ogs(operands, self.layout, matmul, self.target, stage=stage, joined=joined)
        problem = matmul_problem(operands.x, plan.spec("y").shape[1], self.layout, matmul, joined=joined)
        config = choose_tile(problem, self.target, tuning).config
        bindings = {"x": d_y, "weight": f"experts.{weight}", "schedule": self._schedule(config.block_m)}
        bindings |= self.layer | self._groups() | ({"up": "experts.up"} if joined else {})
        if config.family == "hopper":
            if not builder.has("tile_counters"):
                zero_counters(builder)
            bindings["tile_counters"] = "tile_counters"
        return self._call(plan, f"input gradient of {weight}", **bindings)

    def _pull_back_quantized(self, operands: MatmulOperands, d_y: str, gather: str, weight: str) -> str:
        """`_pull_back` through a weight that is decoded on the way."""
        spec, layout, target = self.spec, self.layout, self.target
        tuning = spec.matmul_tuning()
        matmul = MatmulSpec(spec.weight_layout, gather, "row", None, None, spec.allow_tf32, tuning)
        choice = choose_transposed_tile(operands, layout, matmul, target)
        assert choice is not None, "backwards of the reference are one call"
        plan = plan_matmul_quantized_transposed(operands, layout, matmul, target, composed=True)
        bindings = {"x": d_y, "schedule": self._schedule(choice.config.block_m)} | self.layer | self._groups()
        bindings |= bound_arrays(operands, "weight", f"experts.{weight}") | bound_arrays(operands, "up", "experts.up")
        return self._call(plan, f"input gradient of {weight}", **bindings)

    def _experts(self) -> str | None:
        """The experts' gradients, and rows of d_x where needed; the weights' gradient where rows do not give it."""
        wanted = [name for name, _ in named_arrays(self.experts) if self.builder.has(f"d_experts.{name}")]
        first = [name for name in wanted if name.startswith(("gate_up", "up"))]
        d_weights, hidden, d_pre = None, None, None
        if first or self.needs_rows or self.needs_weights or "down" in wanted:
            d_pre, hidden, d_weights = self._activation(self.needs_weights and not self.on_input, "down" in wanted)
        if "down" in wanted or "down_bias" in wanted:
            weight = None if self.on_input else self.weights
            self._weight_gradient("down", hidden, (self.d_out, "token"), "row", row_weight=weight)
        for name in ("gate_up", "up"):
            if name in wanted or f"{name}_bias" in wanted:
                assert d_pre is not None
                self._weight_gradient(name, self._source(), (d_pre, "row"), "token")
        if self.needs_rows:
            assert d_pre is not None
            self.d_rows = self._pull_back(1, d_pre, "row", "gate_up")
        return d_weights

    def _activation(self, with_weights: bool, with_hidden: bool) -> tuple[str, str | None, str | None]:
        """(d_pre, weighted_hidden, d_weight), the first two by layout row."""
        builder, experts = self.builder, self.experts
        z = self._pull_back(0, self.d_out, "token", "down")
        product = None
        if with_weights and experts.down_bias is not None:
            array, bias = builder.spec(self.d_out), experts.down_bias
            plan = plan_bias_product(array, bias, self.layout, self.target, layer=experts.layer)
            groups = {name: self.groups[name] for name in ("group_start", "slot_of_row")}
            product = self._call(plan, "bias product", d_y=self.d_out, bias="experts.down_bias", **self.layer, **groups)
        names = {"d_hidden": z, "pre": self.pre, "row_of_slot": self.groups["row_of_slot"]}
        names |= {} if self.on_input else {"row_weight": self.weights}
        names |= {} if product is None else {"bias_product": product}
        operands = ExpertActivationOperands(**{name: builder.spec(buffer) for name, buffer in names.items()})
        kinds = ("d_pre", *(("weighted_hidden",) if with_hidden else ()), *(("d_weight",) if with_weights else ()))
        plan = plan_expert_activation_backward(operands, self.spec.activation, self.target, outputs=kinds)
        made = {name: builder.scratch(name, plan.spec(name)) for name in kinds if name != "d_weight"}
        if with_weights:
            made["d_weight"] = self._weights_gradient()
        builder.call(plan, "activation", names | made)
        return made["d_pre"], made.get("weighted_hidden"), made.get("d_weight")

    def _weight_gradient(
        self,
        name: str,
        source: str | None,
        gradient: tuple[str, str],
        gather: str,
        *,
        row_weight: str | None = None,
    ) -> None:
        """d_experts.<name> and the gradient of its bias, those wanted. source, gathered by gather: the product's input,
        None where the bias alone is wanted; gradient: that of its output, and how it is gathered."""
        builder, experts, spec = self.builder, self.experts, self.spec
        d_weight, d_bias = f"d_experts.{name}", f"d_experts.{BIASES[name]}"
        columns = None
        if experts.up is not None and name in ("gate_up", "up"):
            width = builder.spec(gradient[0]).shape[1] // 2
            columns = (0 if name == "gate_up" else width, width)
        # The bias alone: the other side is not read, whatever stands there.
        sides = [(source or gradient[0], gather if source else gradient[1], None), (*gradient, columns)]
        bias_side = "right"
        if spec.weight_layout == "out_in":
            sides, bias_side = sides[::-1], "left"
        (left, left_gather, left_columns), (right, right_gather, right_columns) = sides
        into = f"into.experts.{name}"
        # The result says whether it is of the whole stack, if there is one, or of the layer used.
        made, array = (d_weight, name) if builder.has(d_weight) else (d_bias, BIASES[name])
        whole = bool(self.layer) and builder.spec(made).rank == getattr(experts, array).rank
        bindings = {"left": left, "right": right} | (self.layer if whole else {})
        bindings |= {"into": into} if builder.has(into) else {}
        with_bias = builder.has(d_bias)
        bindings |= {"row_weight": row_weight} if row_weight is not None and with_bias else {}
        operands = WeightGradientOperands(**{key: builder.spec(buffer) for key, buffer in bindings.items()})
        options = WeightGradientSpec(
            builder.spec(d_weight).dtype if builder.has(d_weight) else None,
            (left_gather, right_gather),
            left_columns,
            right_columns,
            bias_side if with_bias else None,
            builder.spec(d_bias).dtype if with_bias else "float32",
            getattr(experts, name).shape[0] if whole else 1,
            spec.allow_tf32,
        )
        plan = plan_weight_gradient(operands, self.layout, options, self.target)
        results = {"d_weight": d_weight, "d_bias": d_bias}
        bindings |= {output.name: results[output.name] for output in plan.outputs}
        self._call(plan, f"weight gradient of {name}", **bindings, **self._groups())

    def _weighted_input(self, output: str, extra: str | None = None) -> str:
        """Behind x times the weight: `d_weight` or `d_x`."""
        rows = self.builder.spec(self.d_rows)
        plan = plan_weighted_input(rows, self.x, self.target, outputs=(output,), with_extra=extra is not None)
        bindings = {"d_rows": self.d_rows, "x": "x", "row_of_slot": self.groups["row_of_slot"], "weights": self.weights}
        bindings |= {} if extra is None else {"extra": extra}
        bindings |= {"d_x": "d_x"} if output == "d_x" else {"d_weight": self._weights_gradient()}
        return self._call(plan, f"weighted input, {output}", **bindings)

    def _weights_gradient(self) -> str:
        """Where the gradient of the routing's weights goes."""
        if self.builder.has("d_routing.weights"):
            return "d_routing.weights"
        return self.builder.scratch("d_weights", ArraySpec((self.tokens, self.layout.top_k), "float32"))

    def _router(self, d_weights: str | None) -> list[str]:
        """From the weights, by slot, to what comes before them; the part of d_x, where x was routed."""
        builder, given, operands, spec = self.builder, self.gradients, self.operands, self.spec
        assert d_weights is not None
        if isinstance(self.routing, TopK):
            return []
        names = {"weights": d_weights}
        if given.weights is not None:
            plan = plan_add(given.weights, self.target)
            names["weights"] = self._call(plan, "weights", first=d_weights, second="gradients.weights")
        others = [name for name, _ in named_arrays(given) if name not in ("output", "weights")]
        names |= {name: f"gradients.{name}" for name in others}
        logits = "logits" if isinstance(self.routing, RouterWeights) else "routing.logits"
        if given.load_balance is not None:
            names["tokens_per_expert"] = self._counts(builder.spec(logits).shape[1])
        arrays = {name: builder.spec(buffer) for name, buffer in names.items()}
        arrays["weights"] = ArraySpec((self.tokens, self.layout.top_k), "float32")
        assert spec.router is not None
        plan = plan_routing_backward(
            RoutingGradients(**arrays),
            builder.spec(logits),
            builder.spec(self.ids),
            spec.router,
            self.target,
            token_mask=operands.token_mask,
        )
        bindings = {f"gradients.{name}": buffer for name, buffer in names.items()} | {"logits": logits, "ids": self.ids}
        bindings |= self._mask()
        if isinstance(self.routing, RouterLogits):
            bindings["d_logits"] = "d_routing.logits"
        d_logits = self._call(plan, "routing", **bindings)
        return self._router_product(d_logits) if isinstance(self.routing, RouterWeights) else []

    def _mask(self) -> dict[str, str]:
        return {"token_mask": "token_mask"} if self.operands.token_mask is not None else {}

    def _counts(self, num_global: int) -> str:
        """Slots that every expert got, wherever it is: the forward counted the local ones."""
        mask = self.operands.token_mask
        if self.operands.expert_map is None:
            return "tokens_per_expert"
        layout = LayoutSpec(self.tokens, self.layout.top_k, num_global)
        plan = plan_layout(self.builder.spec(self.ids), layout, self.target, token_mask=mask)
        return self._call(plan, "all experts", ids=self.ids, **self._mask())

    def _router_product(self, d_logits: str) -> list[str]:
        """Gradients of the router's matrix and bias, those wanted; the part of d_x, where that is wanted."""
        builder, routing, spec = self.builder, self.routing, self.spec
        results = {"d_weight": "d_routing.weight", "d_bias": "d_routing.bias"}
        results = {name: buffer for name, buffer in results.items() if builder.has(buffer)}
        if results:
            side, left, right = "right", "x", d_logits
            if spec.router_weight_layout == "out_in":
                side, left, right = "left", d_logits, "x"
            bindings = {"left": left, "right": right} | ({"row_mask": "token_mask"} if self._mask() else {})
            bindings |= {"into": "into.routing.weight"} if builder.has("into.routing.weight") else {}
            operands = WeightGradientOperands(**{name: builder.spec(buffer) for name, buffer in bindings.items()})
            dtypes = {name: builder.spec(buffer).dtype for name, buffer in results.items()}
            options = WeightGradientSpec(
                dtypes.get("d_weight"),
                bias_side=side if "d_bias" in results else None,
                bias_dtype=dtypes.get("d_bias", "float32"),
            )
            plan = plan_weight_gradient(operands, None, options, self.target)
            self._call(plan, "router weight", **bindings, **results)
        if not builder.has("d_x"):
            return []
        options = LogitsSpec(TRANSPOSED[spec.router_weight_layout])
        plan = plan_router(builder.spec(d_logits), routing.weight, None, options, self.target, split=True)
        return [self._call(plan, "router input", x=d_logits, weight="routing.weight")]

    def _d_x(self, extras: list[str]) -> None:
        """d_x: the sum over a token's slots, and what else flows into x."""
        builder = self.builder
        while len(extras) > 1:
            plan = plan_add(builder.spec(extras[0]), self.target)
            extras = [self._call(plan, f"sum {len(extras)}", first=extras[0], second=extras[1]), *extras[2:]]
        extra = extras[0] if extras else None
        if self.on_input:
            self._weighted_input("d_x", extra)
            return
        plan = plan_reduce(
            builder.spec(self.d_rows),
            builder.spec(self.groups["row_of_slot"]),
            self.layout.top_k,
            self.target,
            order="row",
            shared=builder.spec(extra) if extra else None,
        )
        bindings = {"y": self.d_rows, "row_of_slot": self.groups["row_of_slot"], "out": "d_x"}
        self._call(plan, "reduce", **bindings, **({"shared": extra} if extra else {}))
