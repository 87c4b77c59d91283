"""Planning of one whole MoE forward, composed of the stage plans."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from moe_core import dtypes
from moe_core.arrays import ArraySpec, require_spec
from moe_core.errors import InvalidInput
from moe_core.matmul_ogs import matmul_problem, plan_matmul_ogs
from moe_core.operands import (
    ExpertWeights,
    MatmulOperands,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
    named_arrays,
)
from moe_core.plan import LaunchPlan, PlanBuilder
from moe_core.reduction import plan_reduce, plan_scale_rows
from moe_core.routing import plan_layout, plan_router, plan_routing
from moe_core.specs import LayoutSpec, LogitsSpec, MatmulSpec, MoESpec
from moe_core.target import Target
from moe_core.tuning import TileConfig, choose_config

Routing = RouterWeights | RouterLogits | TopK


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
) -> LaunchPlan:
    """One plan for the whole layer: [router] -> [routing] -> layout -> matmul 1 -> matmul 2 -> reduce.

    Bundles hold ArraySpecs. Inputs: x, `experts.*`, `routing.*`, [token_mask bool `[T]`], [expert_map int32
    `[E_global]`], `shared.*`. Outputs: output `[T, D]`, tokens_per_expert `[E]`, invalid_ids `[1]`, then ids and
    weights `[T, K]` unless given, then logits `[T, E]` when routing from x. Raises InvalidInput, Unsupported.
    """
    return _MoEPlanner(x, experts, routing, spec, target, token_mask, expert_map, shared).plan()


class _MoEPlanner:
    """Wires the stage plans; one method per stage."""

    def __init__(self, *request: Any) -> None:
        self.x, self.experts, self.routing, self.spec, self.target = request[:5]
        self.token_mask, self.expert_map, self.shared = request[5:]
        require_spec("x", self.x, ("num_tokens", "d_model"), dtypes.MATMUL_DTYPES, contiguous=False)
        self.tokens, self.d_model = self.x.shape
        self.out_dtype = self.spec.out_dtype or self.x.dtype
        self.builder = PlanBuilder("moe", target=self.target)

    def plan(self) -> LaunchPlan:
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
        num_local = self._check_weights()
        builder.output("output", ArraySpec((self.tokens, self.d_model), self.out_dtype))
        builder.output("tokens_per_expert", ArraySpec((num_local,), "int32"))
        builder.output("invalid_ids", ArraySpec((1,), "int32"))
        ids, weights = self._route(num_local)
        layout = LayoutSpec(self.tokens, builder.spec(ids).shape[1], num_local)
        slots = self._experts(ids, weights, layout)
        self._reduce(slots, layout)
        return builder.build()

    def _matrix(self, inside: int | str, outside: int | str) -> tuple[int | str, int | str]:
        """The last two axes of a weight from `inside` to `outside` features."""
        return (inside, outside) if self.spec.weight_layout == "in_out" else (outside, inside)

    def _check_weights(self) -> int:
        """Check experts and shared against x under the names the caller knows; the number of local experts."""
        experts, dtype = self.experts, self.x.dtype
        stacked = experts.layer is not None
        free = ("num_layers", "num_experts") if stacked else ("num_experts",)
        gate_up = require_spec("experts.gate_up", experts.gate_up, (*free, *self._matrix(self.d_model, "width")), dtype)
        lead = gate_up.shape[:-2]
        num_local = lead[-1]
        if 0 in gate_up.shape:
            raise InvalidInput(f"experts.gate_up must have no empty axis, got {gate_up.shape}; pass the full array")
        width = self._check_pair("experts", experts, lead)
        columns = gate_up.shape[-1 if self.spec.weight_layout == "in_out" else -2]
        biases = (("gate_up_bias", columns), ("up_bias", width), ("down_bias", self.d_model))
        for name, size in biases:
            bias = getattr(experts, name)
            if bias is not None:
                require_spec(f"experts.{name}", bias, (*lead, size), ("float32", dtype))
        if experts.up_bias is not None and experts.up is None:
            raise InvalidInput("experts.up_bias must be None without experts.up; put both halves into gate_up_bias")
        if stacked:
            require_spec("experts.layer", experts.layer, (1,), "int32")
        shared = self.shared
        if shared is not None:
            lead = lead[:1] if self._shared_is_stacked() else ()
            require_spec("shared.gate_up", shared.gate_up, (*lead, *self._matrix(self.d_model, "width")), dtype)
            self._check_pair("shared", shared, lead)
            if shared.gate is not None:
                require_spec("shared.gate", shared.gate, self._matrix(self.d_model, 1), dtypes.MATMUL_DTYPES)
        return num_local

    def _shared_is_stacked(self) -> bool:
        """Whether experts.layer picks the shared expert too: its matrices then have a layer axis."""
        return self.experts.layer is not None and self.shared.gate_up.rank == 3

    def _check_pair(self, name: str, bundle: ExpertWeights | SharedExpert, lead: tuple[int, ...]) -> int:
        """Check up and down against gate_up; F."""
        activation, dtype = self.spec.activation, self.x.dtype
        width = bundle.gate_up.shape[-1 if self.spec.weight_layout == "in_out" else -2]
        if activation.gate_layout in ("halves", "interleaved"):
            if width % 2:
                raise InvalidInput(f"{name}.gate_up must have an even width (gate and up), got {width}; pass both")
            width //= 2
        if activation.gate_layout == "separate":
            require_spec(f"{name}.up", bundle.up, (*lead, *self._matrix(self.d_model, width)), dtype)
        elif bundle.up is not None:
            raise InvalidInput(
                f"{name}.up must be None for gate_layout={activation.gate_layout!r}, got {bundle.up}; "
                "set gate_layout='separate' or leave it out"
            )
        require_spec(f"{name}.down", bundle.down, (*lead, *self._matrix(width, self.d_model)), dtype)
        return width

    def _mask(self) -> dict[str, str]:
        return {"token_mask": "token_mask"} if self.token_mask is not None else {}

    def _route(self, num_local: int) -> tuple[str, str]:
        """Names of the buffers with ids and weights."""
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
            logits_spec = LogitsSpec(spec.router_weight_layout, spec.logits_dtype, spec.allow_tf32)
            plan = plan_router(self.x, routing.weight, routing.bias, logits_spec, self.target)
            logits = builder.output("logits", plan.spec("logits"))
            bindings = {"x": "x", "weight": "routing.weight", "logits": logits}
            if routing.bias is not None:
                bindings["bias"] = "routing.bias"
            builder.call(plan, "router", bindings)
            logits_array = plan.spec("logits")
        else:
            logits, logits_array = "routing.logits", routing.logits
            require_spec("routing.logits", logits_array, (self.tokens, "num_experts"), "float32")
        num_global = logits_array.shape[1]
        if self.expert_map is None and num_global != num_local:
            raise InvalidInput(
                f"routing must score the {num_local} experts of experts.gate_up, got {num_global}; "
                "pass expert_map to map global ids to local experts"
            )
        if self.expert_map is not None:
            require_spec("expert_map", self.expert_map, (num_global,), "int32")
        bias = routing.correction_bias
        plan = plan_routing(logits_array, spec.router, self.target, correction_bias=bias, token_mask=self.token_mask)
        bindings = {"logits": logits, "ids": ids, "weights": weights} | self._mask()
        if bias is not None:
            bindings["correction_bias"] = "routing.correction_bias"
        builder.call(plan, "routing", bindings)
        return ids, weights

    def _check_input_weighting(self, top_k: int) -> None:
        if self.spec.apply_router_weight_on_input and top_k != 1:
            raise InvalidInput(
                f"top_k must be 1 with apply_router_weight_on_input, got {top_k}; weight the output instead"
            )

    def _experts(self, ids: str, weights: str, layout: LayoutSpec) -> str:
        """Layout and both matmuls; the name of the buffer with the weighted slots."""
        builder, spec, target, experts = self.builder, self.spec, self.target, self.experts
        width = experts.down.shape[-2 if spec.weight_layout == "in_out" else -1]
        hidden_spec = ArraySpec((layout.capacity, width), self.x.dtype)
        on_input = spec.apply_router_weight_on_input
        first = MatmulOperands(
            self.x, experts.gate_up, experts.up, experts.gate_up_bias, experts.up_bias, layer=experts.layer
        )
        row_weight = None if on_input else builder.spec(weights)
        second = MatmulOperands(
            hidden_spec, experts.down, bias=experts.down_bias, row_weight=row_weight, layer=experts.layer
        )
        matmul_1 = MatmulSpec(spec.weight_layout, "token", "row", spec.activation, None, spec.allow_tf32)
        matmul_2 = MatmulSpec(spec.weight_layout, "row", "slot", None, None, spec.allow_tf32)
        configs: list[TileConfig | None] = [None, None]
        if target.compiled:
            configs = [
                choose_config(matmul_problem(self.x, width, layout, matmul_1), target),
                choose_config(matmul_problem(hidden_spec, self.d_model, layout, matmul_2), target),
            ]
        block_ms = tuple(dict.fromkeys(config.block_m for config in configs if config is not None))
        self._layout(ids, layout, block_ms)

        x = "x"
        if on_input:
            x = builder.scratch("weighted_x", ArraySpec((self.tokens, self.d_model), self.x.dtype))
            plan = plan_scale_rows(self.x, ArraySpec((self.tokens, 1), "float32"), target)
            builder.call(plan, "scale_rows", {"x": "x", "weights": weights, "y": x})
            first = dataclasses.replace(first, x=builder.spec(x))
        hidden = builder.scratch("hidden", hidden_spec)
        names = {"x": x, "weight": "experts.gate_up", "up": "experts.up", "bias": "experts.gate_up_bias"}
        names |= {"up_bias": "experts.up_bias", "layer": "experts.layer", "y": hidden}
        self._matmul("matmul 1", first, layout, matmul_1, configs[0], names)
        slots = builder.scratch("slots", ArraySpec((layout.num_slots, self.d_model), self.x.dtype))
        names = {"x": hidden, "weight": "experts.down", "bias": "experts.down_bias", "row_weight": weights}
        self._matmul("matmul 2", second, layout, matmul_2, configs[1], names | {"layer": "experts.layer", "y": slots})
        return slots

    def _layout(self, ids: str, layout: LayoutSpec, block_ms: tuple[int, ...]) -> None:
        builder = self.builder
        plan = plan_layout(
            builder.spec(ids),
            layout,
            self.target,
            expert_map=self.expert_map,
            token_mask=self.token_mask if isinstance(self.routing, TopK) else None,
            block_ms=block_ms,
        )
        bindings = {"ids": ids, "group_sizes": "tokens_per_expert", "invalid_ids": "invalid_ids"}
        for name in ("group_start", "slot_of_row", "row_of_slot", *(f"schedule_{block_m}" for block_m in block_ms)):
            bindings[name] = builder.scratch(name, plan.spec(name))
        if self.expert_map is not None:
            bindings["expert_map"] = "expert_map"
        if isinstance(self.routing, TopK):
            bindings |= self._mask()
        builder.call(plan, "layout", bindings)

    def _matmul(
        self,
        prefix: str,
        operands: MatmulOperands,
        layout: LayoutSpec,
        spec: MatmulSpec,
        config: TileConfig | None,
        names: dict[str, str],
    ) -> None:
        """Inline one matmul; `names` may bind more than the operands present."""
        plan = plan_matmul_ogs(
            operands, layout, spec, self.target, config=config, with_schedule=config is not None, fill_absent=False
        )
        present = {name for name, _ in named_arrays(operands)} | {"y"}
        bindings = {name: buffer for name, buffer in names.items() if name in present}
        bindings |= {"group_sizes": "tokens_per_expert", "group_start": "group_start", "slot_of_row": "slot_of_row"}
        if config is not None:
            bindings["schedule"] = f"schedule_{config.block_m}"
        self.builder.call(plan, prefix, bindings)

    def _reduce(self, slots: str, layout: LayoutSpec) -> None:
        builder = self.builder
        shared_output, shared_gate = self._shared()
        plan = plan_reduce(
            builder.spec(slots),
            builder.spec("row_of_slot"),
            layout.top_k,
            self.target,
            shared=builder.spec(shared_output) if shared_output else None,
            shared_gate=builder.spec(shared_gate) if shared_gate else None,
            out_dtype=self.out_dtype,
        )
        bindings = {"y": slots, "row_of_slot": "row_of_slot", "out": "output"}
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
        layer = self.experts.layer if self._shared_is_stacked() else None
        first = MatmulOperands(self.x, shared.gate_up, shared.up, layer=layer)
        dense = MatmulSpec(spec.weight_layout, activation=spec.activation, allow_tf32=spec.allow_tf32)
        plan = plan_matmul_ogs(first, None, dense, self.target)
        hidden = builder.scratch("shared_hidden", plan.spec("y"))
        names = {"x": "x", "weight": "shared.gate_up", "up": "shared.up", "layer": "experts.layer", "y": hidden}
        present = {name for name, _ in named_arrays(first)} | {"y"}
        builder.call(plan, "shared matmul 1", {name: names[name] for name in names if name in present})
        dense = MatmulSpec(spec.weight_layout, out_dtype="float32", allow_tf32=spec.allow_tf32)
        second = MatmulOperands(builder.spec(hidden), shared.down, layer=layer)
        plan = plan_matmul_ogs(second, None, dense, self.target)
        output = builder.scratch("shared_output", plan.spec("y"))
        names = {"x": hidden, "weight": "shared.down", "layer": "experts.layer", "y": output}
        present = {name for name, _ in named_arrays(second)} | {"y"}
        builder.call(plan, "shared matmul 2", {name: names[name] for name in names if name in present})
        if shared.gate is None:
            return output, None
        logits_spec = LogitsSpec(spec.weight_layout, "float32", spec.allow_tf32)
        plan = plan_router(self.x, shared.gate, None, logits_spec, self.target)
        gate = builder.scratch("shared_gate", plan.spec("logits"))
        builder.call(plan, "shared gate", {"x": "x", "weight": "shared.gate", "logits": gate})
        return output, gate
