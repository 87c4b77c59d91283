"""The shared expert's part of one MoE backward on compiled targets: an expert of every token, weighted by its gate."""

from __future__ import annotations

from moe_core.activation_backward import plan_expert_activation_backward
from moe_core.arrays import ArraySpec
from moe_core.backward_rows import plan_gate_gradient, plan_gate_weight
from moe_core.matmul_ogs import TRANSPOSED, plan_matmul_ogs
from moe_core.moe import KEPT, kept_pre_activation
from moe_core.operands import ExpertActivationOperands, MatmulOperands, MoEOperands, SharedExpert, named_arrays
from moe_core.plan import LaunchPlan, PlanBuilder
from moe_core.routing import plan_router
from moe_core.specs import LogitsSpec, MatmulSpec, MoESpec
from moe_core.weight_gradient import WeightGradientOperands, WeightGradientSpec, plan_weight_gradient


def launch_shared(builder: PlanBuilder, operands: MoEOperands, spec: MoESpec, d_out: str) -> list[str]:
    """Add the launches for what `builder` has as outputs; the parts of d_x fp32 `[T, D]`, where that is wanted.

    d_out: the buffer with the output's gradient in the dtype of x.
    """
    shared: SharedExpert | None = operands.shared
    assert shared is not None
    names = [name for name, _ in named_arrays(shared) if builder.has(f"d_shared.{name}")]
    if not names and not builder.has("d_x"):
        return []
    return _SharedPlanner(builder, operands, shared, spec).plan(d_out)


class _SharedPlanner:
    def __init__(self, builder: PlanBuilder, operands: MoEOperands, shared: SharedExpert, spec: MoESpec) -> None:
        self.builder, self.shared, self.spec, self.target = builder, shared, spec, builder.target
        self.x = operands.x
        stacked = operands.experts.layer is not None and shared.gate_up.rank == 3
        self.layer = operands.experts.layer if stacked else None
        self.num_layers = shared.gate_up.shape[0] if stacked else 1

    def _call(self, plan: LaunchPlan, name: str, **bindings: str) -> str:
        """Inline a plan; the buffer of its first output, made here where `bindings` names none."""
        first, name = plan.outputs[0], f"shared {name}"
        if first.name not in bindings:
            bindings[first.name] = self.builder.scratch(f"{name}.{first.name}", first.spec)
        self.builder.call(plan, name, bindings)
        return bindings[first.name]

    def plan(self, d_out: str) -> list[str]:
        builder, shared = self.builder, self.shared
        pre, gate = self._kept()
        needs_gate = gate is not None and (builder.has("d_shared.gate") or builder.has("d_x"))
        z = self._pull_back(d_out, "down", self.x.dtype)
        names = {"d_hidden": z, "pre": pre}
        if gate is not None:
            names["row_weight"] = self._call(plan_gate_weight(builder.spec(gate), self.target), "gate", gate=gate)
        arrays = {name: builder.spec(buffer) for name, buffer in names.items()}
        if gate is not None:
            arrays["row_weight"] = ArraySpec((self.x.shape[0],), "float32")
        kinds = ["d_pre"] + ["weighted_hidden"] * builder.has("d_shared.down") + ["d_weight"] * needs_gate
        operands = ExpertActivationOperands(**arrays)
        plan = plan_expert_activation_backward(operands, self.spec.activation, self.target, outputs=tuple(kinds))
        made = {name: builder.scratch(f"shared_{name}", plan.spec(name)) for name in kinds}
        builder.call(plan, "shared activation", names | made)

        if builder.has("d_shared.down"):
            self._weight_gradient("down", made["weighted_hidden"], d_out, self.spec.weight_layout)
        for name in ("gate_up", "up"):
            if builder.has(f"d_shared.{name}"):
                self._weight_gradient(name, "x", made["d_pre"], self.spec.weight_layout)
        parts = [self._pull_back(made["d_pre"], "gate_up", "float32")] if builder.has("d_x") else []
        if needs_gate and gate is not None:
            plan = plan_gate_gradient(builder.spec(gate), self.target)
            d_gate = self._call(plan, "gate gradient", d_weight=made["d_weight"], gate=gate)
            if builder.has("d_shared.gate"):
                self._weight_gradient("gate", "x", d_gate, self.spec.weight_layout)
            if builder.has("d_x"):
                options = LogitsSpec(TRANSPOSED[self.spec.weight_layout])
                plan = plan_router(builder.spec(d_gate), shared.gate, None, options, self.target, split=True)
                parts.append(self._call(plan, "gate input", x=d_gate, weight="shared.gate"))
        return parts

    def _kept(self) -> tuple[str, str | None]:
        """(pre-activation, gate logits): the forward's; the first computed again where it was not kept."""
        builder, shared, spec = self.builder, self.shared, self.spec
        pre, gate = f"{KEPT}shared_pre_activation", f"{KEPT}shared_gate" if shared.gate is not None else None
        if builder.has(pre):
            return pre, gate
        options = MatmulSpec(
            spec.weight_layout, activation=spec.activation, allow_tf32=spec.allow_tf32, tuning=spec.matmul_tuning()
        )
        operands = MatmulOperands(self.x, shared.gate_up, shared.up, layer=self.layer)
        plan = plan_matmul_ogs(operands, None, options, self.target, outputs=("pre",))
        array = kept_pre_activation(shared, self.x, spec, self.x.shape[0])
        pre = builder.scratch("shared_pre_activation", array)
        self._call(plan, "matmul 1", x="x", pre=pre, **self._weights("gate_up"))
        return pre, gate

    def _weights(self, name: str) -> dict[str, str]:
        found = {"weight": f"shared.{name}"} | ({"layer": "experts.layer"} if self.layer is not None else {})
        return found | ({"up": "shared.up"} if name == "gate_up" and self.shared.up is not None else {})

    def _pull_back(self, d_y: str, name: str, out_dtype: str) -> str:
        """d_y . weight^T; weight: `down`, or `gate_up` with `up` where there is one."""
        spec, up = self.spec, self.shared.up if name == "gate_up" else None
        operands = MatmulOperands(self.builder.spec(d_y), getattr(self.shared, name), up, layer=self.layer)
        options = MatmulSpec(
            TRANSPOSED[spec.weight_layout],
            out_dtype=out_dtype,
            allow_tf32=spec.allow_tf32,
            tuning=spec.matmul_tuning(),
        )
        plan = plan_matmul_ogs(operands, None, options, self.target, joined=up is not None)
        return self._call(plan, f"input gradient of {name}", x=d_y, **self._weights(name))

    def _weight_gradient(self, name: str, source: str, gradient: str, weight_layout: str) -> None:
        """d_shared.<name>; source: the product's input, gradient: that of its output."""
        builder, columns = self.builder, None
        if self.shared.up is not None and name in ("gate_up", "up"):
            width = builder.spec(gradient).shape[1] // 2
            columns = (0 if name == "gate_up" else width, width)
        sides = [(source, None), (gradient, columns)]
        if weight_layout == "out_in":
            sides = sides[::-1]
        (left, left_columns), (right, right_columns) = sides
        bindings = {"left": left, "right": right}
        # Neither the gate nor, where the layer used alone is asked for, any other result is a stack's.
        stacked = self.layer is not None and builder.spec(f"d_shared.{name}").rank == 3
        bindings |= {"layer": "experts.layer"} if stacked else {}
        into = f"into.shared.{name}"
        bindings |= {"into": into} if builder.has(into) else {}
        operands = WeightGradientOperands(**{key: builder.spec(buffer) for key, buffer in bindings.items()})
        options = WeightGradientSpec(
            builder.spec(f"d_shared.{name}").dtype,
            left_columns=left_columns,
            right_columns=right_columns,
            num_layers=self.num_layers if stacked else 1,
            allow_tf32=self.spec.allow_tf32,
        )
        plan = plan_weight_gradient(operands, None, options, self.target)
        self._call(plan, f"weight gradient of {name}", **bindings, d_weight=f"d_shared.{name}")
