"""Planning of one whole MoE forward, composed of the stage plans."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from moe_core import dtypes
from moe_core.arrays import ArraySpec, require_spec
from moe_core.errors import InvalidInput, Unsupported
from moe_core.expert_checks import check_weights, quantized_rows, shared_is_stacked, why_no_moe_gradient
from moe_core.formats import Format, QuantizedTensor
from moe_core.fusion import fuse_launches, fusion_counters, why_not_fused
from moe_core.matmul_codes import plan_matmul_codes, why_two_launches
from moe_core.matmul_ogs import plan_matmul_ogs, product_tile
from moe_core.operands import (
    ExpertWeights,
    MatmulOperands,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
    named_arrays,
)
from moe_core.overlap import overlap_launches
from moe_core.plan import LaunchPlan, PlanBuilder
from moe_core.quantize_rows import chooses_one_scale, plan_quantize_rows
from moe_core.reduction import plan_reduce, plan_scale_rows
from moe_core.routing import plan_layout, plan_route_and_layout, plan_router
from moe_core.specs import LayoutSpec, LogitsSpec, MatmulSpec, MoESpec
from moe_core.target import Target
from moe_core.tuning import TileConfig

Routing = RouterWeights | RouterLogits | TopK
#: Before the names of outputs that only a backward reads.
KEPT = "kept."


@functools.lru_cache(maxsize=4096)
def plan_moe(
    x: ArraySpec,
    experts: ExpertWeights,
    routing: Routing,
    spec: MoESpec,
    target: Target,
    *,
    token_mask: ArraySpec | None = None,
    expert_map: ArraySpec | None = None,
    shared: SharedExpert | None = None,
    keep: bool = False,
) -> LaunchPlan:
    """One plan for the whole layer: [router] -> [routing] -> layout -> matmul 1 -> matmul 2 -> reduce.

    Bundles hold ArraySpecs. Inputs: x, `experts.*`, `routing.*`, [token_mask bool `[T]`], [expert_map int32
    `[E_global]`], `shared.*`. Outputs: output `[T, D]`, tokens_per_expert `[E]`, invalid_ids `[1]`, then ids and
    weights `[T, K]` unless given, then logits `[T, E]` when routing from x. Raises InvalidInput, Unsupported.

    keep: also what `moe_core.moe_backward.plan_moe_backward` reads: kept.pre_activation `[T * K, 2F]` (ungated F), in
    layout order and the dtype of x, gate_layout `separate` as gate columns, then up; rows of no slot hold anything;
    kept.group_start `[E + 1]`, kept.slot_of_row and kept.row_of_slot `[T * K]`; of a shared expert
    kept.shared_pre_activation `[T, 2S]` and kept.shared_gate fp32 `[T, 1]`. The output is still computed from the fp32
    accumulator of matmul 1, to the bits of a forward that keeps nothing. With spec.recompute no pre-activation is kept.

    Experts may be quantised, and x and the hidden rows are then too if spec.activations says so: what is computed is in
    docs/quantization.md. Nothing can be kept with spec.activations, whose rounding has no gradient.
    """
    reason = why_no_moe_gradient(experts, spec, ()) if keep else None
    if reason is not None:
        raise Unsupported(reason)
    planner = _MoEPlanner(x, experts, routing, spec, target, token_mask, expert_map, shared, keep)
    return overlap_launches(planner.plan(), planner.tokens, batch_invariant=spec.batch_invariant)


#: The layout's arrays that reductions and products read, beside group_sizes.
LAYOUT_ARRAYS = ("group_start", "slot_of_row", "row_of_slot")


def layout_specs(layout: LayoutSpec) -> dict[str, ArraySpec]:
    """LAYOUT_ARRAYS."""
    sizes = (layout.num_experts + 1, layout.capacity, layout.num_slots)
    return {name: ArraySpec((size,), "int32") for name, size in zip(LAYOUT_ARRAYS, sizes, strict=True)}


def kept_pre_activation(bundle: ExpertWeights | SharedExpert, x: ArraySpec, spec: MoESpec, rows: int) -> ArraySpec:
    """What a product with gate_up (and up) gives for `rows` rows, in the dtype of x."""
    width = bundle.down.shape[-2 if spec.weight_layout == "in_out" else -1]
    return ArraySpec((rows, spec.activation.input_width(width)), x.dtype)


@dataclass(frozen=True)
class _Product:
    """One of the experts' products. config: None where there are no tiles."""

    operands: MatmulOperands
    spec: MatmulSpec
    config: TileConfig | None


class _MoEPlanner:
    """Wires the stage plans; one method per stage."""

    def __init__(self, *request: Any) -> None:
        self.x, self.experts, self.routing, self.spec, self.target = request[:5]
        self.token_mask, self.expert_map, self.shared, self.keep = request[5:]
        require_spec("x", self.x, ("num_tokens", "d_model"), dtypes.MATMUL_DTYPES, contiguous=False)
        self.tokens, self.d_model = self.x.shape
        self.out_dtype = self.spec.out_dtype or self.x.dtype
        self.builder = PlanBuilder("moe", target=self.target)

    @property
    def _outputs(self) -> tuple[str, ...]:
        """Those of matmul 1."""
        return ("y", "pre") if self.keep and not self.spec.recompute else ("y",)

    def plan(self) -> LaunchPlan:
        """The plan, its launches one after another."""
        builder = self.builder
        builder.input("x", self.x)
        bundles = (("experts.", self.experts), ("routing.", self.routing))
        for prefix, bundle in bundles:
            for name, array in named_arrays(bundle, prefix):
                builder.input(name, array)
        for name, array in (("token_mask", self.token_mask), ("expert_map", self.expert_map)):
            if array is not None:
                builder.input(name, array)
        if self.shared is not None:
            for name, array in named_arrays(self.shared, "shared."):
                builder.input(name, array)
        num_local = check_weights(self.x, self.experts, self.shared, self.spec)
        builder.output("output", ArraySpec((self.tokens, self.d_model), self.out_dtype))
        builder.output("tokens_per_expert", ArraySpec((num_local,), "int32"))
        builder.output("invalid_ids", ArraySpec((1,), "int32"))
        ids, weights = self._route(num_local)
        layout = LayoutSpec(self.tokens, builder.spec(ids).shape[1], num_local)
        self._declare_kept(layout)
        slots, order = self._experts(ids, weights, layout)
        self._reduce(slots, order, layout)
        plan = builder.build()
        return fuse_launches(plan, self.tokens) if self.fused else plan

    def _declare_kept(self, layout: LayoutSpec) -> None:
        """The layout's arrays and what else a backward reads: outputs with keep, else scratch."""
        declare, prefix = (self.builder.output, KEPT) if self.keep else (self.builder.scratch, "")
        if "pre" in self._outputs:
            declare(f"{KEPT}pre_activation", kept_pre_activation(self.experts, self.x, self.spec, layout.capacity))
        self.names = {name: declare(prefix + name, spec) for name, spec in layout_specs(layout).items()}
        shared = self.shared
        if "pre" in self._outputs and shared is not None:
            declare(f"{KEPT}shared_pre_activation", kept_pre_activation(shared, self.x, self.spec, self.tokens))
        if shared is not None and shared.gate is not None:
            self.names["shared_gate"] = declare(f"{prefix}shared_gate", ArraySpec((self.tokens, 1), "float32"))

    def _mask(self) -> dict[str, str]:
        return {"token_mask": "token_mask"} if self.token_mask is not None else {}

    def _route(self, num_local: int) -> tuple[str, str]:
        """Names of the buffers with ids and weights, which `_layout` fills in where they are not given."""
        builder, routing, spec = self.builder, self.routing, self.spec
        if isinstance(routing, TopK):
            if spec.router is not None:
                raise InvalidInput("spec.router must be None when ids and weights are given; remove one of the two")
            require_spec("routing.ids", routing.ids, (self.tokens, "top_k"), "int32")
            require_spec("routing.weights", routing.weights, routing.ids.shape, "float32")
            self._check_input_weighting(routing.ids.shape[1])
            return "routing.ids", "routing.weights"
        if spec.router is None:
            raise InvalidInput("spec.router must be a RouterSpec when routing from x or logits, got None; pass one")
        top_k = spec.router.require_top_k()
        self._check_input_weighting(top_k)
        ids = builder.output("ids", ArraySpec((self.tokens, top_k), "int32"))
        weights = builder.output("weights", ArraySpec((self.tokens, top_k), "float32"))
        if isinstance(routing, RouterWeights):
            plan = plan_router(self.x, routing.weight, routing.bias, spec.logits_spec(), self.target)
            logits = builder.output("logits", plan.spec("logits"))
            bindings = {"x": "x", "weight": "routing.weight", "logits": logits}
            if routing.bias is not None:
                bindings["bias"] = "routing.bias"
            builder.call(plan, "router", bindings)
            logits_array = plan.spec("logits")
        else:
            logits_array = require_spec("routing.logits", routing.logits, (self.tokens, "num_experts"), "float32")
        num_global = logits_array.shape[1]
        if self.expert_map is None and num_global != num_local:
            raise InvalidInput(
                f"routing must score the {num_local} experts of experts.gate_up, got {num_global}; "
                "pass expert_map to map global ids to local experts"
            )
        if self.expert_map is not None:
            require_spec("expert_map", self.expert_map, (num_global,), "int32")
        return ids, weights

    def _check_input_weighting(self, top_k: int) -> None:
        if self.spec.apply_router_weight_on_input and top_k != 1:
            raise InvalidInput(
                f"top_k must be 1 with apply_router_weight_on_input, got {top_k}; weight the output instead"
            )

    def _experts(self, ids: str, weights: str, layout: LayoutSpec) -> tuple[str, str]:
        """Layout and both matmuls; the name of the buffer with the weighted slots, and its order: `slot` or `row`."""
        builder, spec, target, experts = self.builder, self.spec, self.target, self.experts
        width = experts.down.shape[-2 if spec.weight_layout == "in_out" else -1]
        hidden_spec = ArraySpec((layout.capacity, width), self.x.dtype)
        on_input = spec.apply_router_weight_on_input
        # What matmul 1 reads: x as it lies, or x times the weight, which is contiguous; or either, quantised.
        source = ArraySpec((self.tokens, self.d_model), self.x.dtype) if on_input else self.x
        rows_1: ArraySpec | QuantizedTensor = source
        rows_2: ArraySpec | QuantizedTensor = hidden_spec
        out_dtype = None
        if spec.activations is not None:
            rows_1, rows_2 = (quantized_rows(array, spec.activations) for array in (source, hidden_spec))
            out_dtype = self.x.dtype
        first = MatmulOperands(
            rows_1, experts.gate_up, experts.up, experts.gate_up_bias, experts.up_bias, layer=experts.layer
        )
        row_weight = None if on_input else builder.spec(weights)
        second = MatmulOperands(
            rows_2, experts.down, bias=experts.down_bias, row_weight=row_weight, layer=experts.layer
        )
        plain = MatmulSpec(
            spec.weight_layout, out_dtype=out_dtype, allow_tf32=spec.allow_tf32, fast_accumulate=spec.fast_accumulate
        )
        matmul_1 = dataclasses.replace(plain, gather="token", activation=spec.activation, tuning=spec.matmul_tuning(1))
        matmul_2 = dataclasses.replace(plain, scatter="slot", tuning=spec.matmul_tuning(2))
        products = []
        for number, operands, columns, matmul in ((1, first, width, matmul_1), (2, second, self.d_model, matmul_2)):
            outputs = self._outputs if number == 1 else ("y",)
            choice = product_tile(
                operands, columns, layout, matmul, target, name=f"tuning.matmul_{number}", outputs=outputs
            )
            products.append(_Product(operands, matmul, None if choice is None else choice.config))
        configs = tuple(product.config for product in products)
        if configs[1] is not None and configs[1].family == "hopper":
            # Its whole tiles go out by TMA, to neighbouring rows; the reduction then finds a slot's row.
            products[1] = dataclasses.replace(products[1], spec=dataclasses.replace(matmul_2, scatter="row"))
        counters = 2 if any(config is not None and config.counts_tiles for config in configs) else 0
        block_ms = tuple(dict.fromkeys(config.block_m for config in configs if config is not None))
        alone = self.shared is None and not self.keep
        why_not = why_not_fused(configs, self.tokens, layout.top_k, alone=alone, batch_invariant=spec.batch_invariant)
        self.fused = not why_not
        if why_not and all(configs):
            builder.note(f"stages share no launch: {why_not}")
        if configs[1] is not None and self.fused:
            column_tiles = -(-self.d_model // configs[1].block_n)
            counters = fusion_counters(self.tokens, layout.max_blocks(configs[1].block_m), column_tiles)
        self._layout(ids, layout, block_ms, counters)

        x = "x"
        if on_input:
            x = builder.scratch("weighted_x", source)
            plan = plan_scale_rows(self.x, ArraySpec((self.tokens, 1), "float32"), target)
            builder.call(plan, "scale_rows", {"x": "x", "weights": weights, "y": x})
        if isinstance(rows_1, QuantizedTensor):
            x = self._quantize("x", x, rows_1, "experts.gate_up_input_scale", "row_of_slot")
        names = {"x": x, "weight": "experts.gate_up", "up": "experts.up", "bias": "experts.gate_up_bias"}
        names |= {"up_bias": "experts.up_bias", "layer": "experts.layer", "pre": f"{KEPT}pre_activation"}
        if isinstance(rows_2, QuantizedTensor) and not why_two_launches(
            first, width, matmul_1, configs[0], rows_2.format, static=bool(self._static_scale())
        ):
            hidden = "quantized_hidden"
            for part, array in named_arrays(rows_2, f"{hidden}."):
                builder.scratch(part, array)
            self._matmul(0, products[0], layout, names | {"y": hidden}, rows_2.format)
        else:
            hidden = builder.scratch("hidden", hidden_spec)
            self._matmul(0, products[0], layout, names | {"y": hidden})
            if isinstance(rows_2, QuantizedTensor):
                hidden = self._quantize("hidden", hidden, rows_2, "experts.down_input_scale", "slot_of_row")
        slots = builder.scratch("slots", ArraySpec((layout.num_slots, self.d_model), self.x.dtype))
        names = {"x": hidden, "weight": "experts.down", "bias": "experts.down_bias", "row_weight": weights}
        self._matmul(1, products[1], layout, names | {"layer": "experts.layer", "y": slots})
        return slots, products[1].spec.scatter

    def _quantize(self, name: str, source: str, rows: QuantizedTensor, scale: str, users: str) -> str:
        """Quantise the rows of the buffer `source`; the name that the arrays' buffers begin with. scale: the input with
        the static scale, if it was given. users: the layout's array that tells which rows a slot reads."""
        builder, quantized = self.builder, f"quantized_{name}"
        given = {"static_scale": scale} if builder.has(scale) else {}
        if chooses_one_scale(rows.format, bool(given)):
            # It is found from rows that something reads: those of masked tokens, and of no slot, may hold anything.
            given = {"used_by": self.names[users]}
        scales, used_by = (builder.spec(given[key]) if key in given else None for key in ("static_scale", "used_by"))
        plan = plan_quantize_rows(builder.spec(source), rows.format, self.target, scales=scales, used_by=used_by)
        made = [builder.scratch(f"{quantized}.{part}", array) for part, array in named_arrays(rows)]
        outputs = dict(zip((buffer.name for buffer in plan.outputs), made, strict=True))
        builder.call(plan, f"quantize {name}", {"x": source} | given | outputs)
        return quantized

    def _static_scale(self) -> dict[str, str]:
        """The static scale of product 2's rows, if it was given, by the name under which product 1 quantises by it."""
        name = "experts.down_input_scale"
        return {"static_scale": name} if self.builder.has(name) else {}

    def _layout(self, ids: str, layout: LayoutSpec, block_ms: tuple[int, ...], counters: int) -> None:
        """The layout and, where ids are not given, the routing before it: one plan has fewer launches than two."""
        builder, routing = self.builder, self.routing
        options = {"token_mask": self.token_mask, "expert_map": self.expert_map, "block_ms": block_ms}
        options["tile_counters"] = counters
        bindings = {"ids": ids, "group_sizes": "tokens_per_expert", "invalid_ids": "invalid_ids"} | self._mask()
        if isinstance(routing, TopK):
            plan = plan_layout(builder.spec(ids), layout, self.target, **options)
        else:
            logits, bias = "logits" if isinstance(routing, RouterWeights) else "routing.logits", routing.correction_bias
            array, router = builder.spec(logits), self.spec.router
            plan = plan_route_and_layout(array, router, layout, self.target, correction_bias=bias, **options)
            bindings |= {"logits": logits, "weights": "weights"}
            if bias is not None:
                bindings["correction_bias"] = "routing.correction_bias"
        bindings |= {name: self.names[name] for name in LAYOUT_ARRAYS}
        made = tuple(f"schedule_{block_m}" for block_m in block_ms)
        for name in (*made, *(("tile_counters",) if counters else ())):
            bindings[name] = builder.scratch(name, plan.spec(name))
        if self.expert_map is not None:
            bindings["expert_map"] = "expert_map"
        builder.call(plan, "layout" if isinstance(routing, TopK) else "routing", bindings)

    def _matmul(
        self, stage: int, product: _Product, layout: LayoutSpec, names: dict[str, str], codes: Format | None = None
    ) -> None:
        """Inline one product, whose schedule exists already; `names` may bind more than the operands present.

        codes: the format its result is stored in."""
        operands, config = product.operands, product.config
        bindings: dict[str, str] = {}
        if codes is None:
            outputs = self._outputs if stage == 0 else ("y",)
            plan = plan_matmul_ogs(operands, layout, product.spec, self.target, stage=stage, outputs=outputs)
        else:
            given = self._static_scale()
            scale = self.builder.spec(given["static_scale"]) if given else None
            plan = plan_matmul_codes(operands, layout, product.spec, codes, self.target, scale=scale)
            outputs, bindings = tuple(buffer.name for buffer in plan.outputs), dict(given)
        for name in (*outputs, *(name for name, _ in named_arrays(operands))):
            # Of a quantised operand: x.values, of the buffer that is bound to x.
            operand, dot, part = name.partition(".")
            bindings[name] = names[operand] + dot + part
        bindings |= {name: self.names[name] for name in ("group_start", "slot_of_row")}
        bindings["group_sizes"] = "tokens_per_expert"
        if config is not None:
            bindings["schedule"] = f"schedule_{config.block_m}"
            if config.counts_tiles:
                bindings["tile_counters"] = "tile_counters"
        self.builder.call(plan, f"matmul {stage + 1}", bindings)

    def _reduce(self, slots: str, order: str, layout: LayoutSpec) -> None:
        builder = self.builder
        shared_output, shared_gate = self._shared()
        plan = plan_reduce(
            builder.spec(slots),
            builder.spec(self.names["row_of_slot"]),
            layout.top_k,
            self.target,
            order=order,
            shared=builder.spec(shared_output) if shared_output else None,
            shared_gate=builder.spec(shared_gate) if shared_gate else None,
            out_dtype=self.out_dtype,
        )
        bindings = {"y": slots, "row_of_slot": self.names["row_of_slot"], "out": "output"}
        if shared_output:
            bindings["shared"] = shared_output
        if shared_gate:
            bindings["shared_gate"] = shared_gate
        builder.call(plan, "reduce", bindings)

    def _shared(self) -> tuple[str | None, str | None]:
        """The shared expert's output (fp32 `[T, D]`) and its gate logits (fp32 `[T, 1]`)."""
        shared, spec, builder = self.shared, self.spec, self.builder
        if shared is None:
            return None, None
        layer = self.experts.layer if shared_is_stacked(self.experts, shared) else None
        first = MatmulOperands(self.x, shared.gate_up, shared.up, layer=layer)
        options: dict[str, Any] = {"allow_tf32": spec.allow_tf32, "tuning": spec.matmul_tuning()}
        dense = MatmulSpec(spec.weight_layout, activation=spec.activation, **options)
        plan = plan_matmul_ogs(first, None, dense, self.target, outputs=self._outputs)
        hidden = builder.scratch("shared_hidden", plan.spec("y"))
        names = {"x": "x", "weight": "shared.gate_up", "up": "shared.up", "layer": "experts.layer", "y": hidden}
        names["pre"] = f"{KEPT}shared_pre_activation"
        present = {name for name, _ in named_arrays(first)} | set(self._outputs)
        builder.call(plan, "shared matmul 1", {name: names[name] for name in names if name in present})
        dense = MatmulSpec(spec.weight_layout, out_dtype="float32", **options)
        second = MatmulOperands(builder.spec(hidden), shared.down, layer=layer)
        plan = plan_matmul_ogs(second, None, dense, self.target)
        output = builder.scratch("shared_output", plan.spec("y"))
        names = {"x": hidden, "weight": "shared.down", "layer": "experts.layer", "y": output}
        present = {name for name, _ in named_arrays(second)} | {"y"}
        builder.call(plan, "shared matmul 2", {name: names[name] for name in names if name in present})
        if shared.gate is None:
            return output, None
        logits_spec = LogitsSpec(spec.weight_layout, "float32", spec.allow_tf32, spec.batch_invariant)
        plan = plan_router(self.x, shared.gate, None, logits_spec, self.target)
        gate = self.names["shared_gate"]
        builder.call(plan, "shared gate", {"x": "x", "weight": "shared.gate", "logits": gate})
        return output, gate
