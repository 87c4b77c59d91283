"""Plans of the parts around the composed op."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from moe_core.base import ArraySpec, Target
from moe_core.layers.spec import MoELayerSpec
from moe_core.ops.activation.backward import plan_activation_backward
from moe_core.ops.activation.forward import plan_activation
from moe_core.ops.matmul.backward import plan_matmul_ogs_backward
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.norm.backward import NORM_GRADIENTS, plan_rms_norm_backward
from moe_core.ops.norm.forward import plan_rms_norm
from moe_core.ops.reduction.reduce import plan_reduce
from moe_core.ops.router.backward import plan_router_backward
from moe_core.ops.router.forward import plan_router
from moe_core.ops.routing.layout import plan_layout
from moe_core.plan import LaunchPlan
from moe_core.specs import Activation, LayoutSpec, LogitsSpec, MatmulSpec, MoESpec, NormSpec
from moe_core.specs.operands import ExpertWeights, LoRAFactors, MatmulOperands, SharedExpert


@dataclass
class StagePlans:
    """Collect the plans of a forward and its backward. Norms and biases have the dtype of the rows."""

    target: Target
    forward: list[LaunchPlan] = field(default_factory=list)
    backward: list[LaunchPlan] = field(default_factory=list)

    def norm(self, x: ArraySpec, spec: NormSpec, dtype: str | None = None) -> ArraySpec:
        arguments = (x, ArraySpec((x.shape[1],), dtype or x.dtype), spec, self.target)
        self.forward.append(plan_rms_norm(*arguments))
        self.backward.append(plan_rms_norm_backward(x, *arguments, wanted=NORM_GRADIENTS))
        return x

    def product(self, operands: MatmulOperands, layout: LayoutSpec | None, spec: MatmulSpec) -> ArraySpec:
        arguments = (operands, layout, spec, self.target)
        plan = plan_matmul_ogs(*arguments)
        y = plan.spec("y")
        self.forward.append(plan)
        wanted = ("d_x", *(() if not isinstance(operands.weight, ArraySpec) else ("d_weight",)))
        wanted += ("d_bias",) if operands.bias is not None else ()
        self.backward.append(plan_matmul_ogs_backward(y, *arguments, wanted=wanted))
        return y

    def activation(self, x: ArraySpec, activation: Activation, up: ArraySpec | None) -> ArraySpec:
        plan = plan_activation(x, activation, self.target, up=up)
        self.forward.append(plan)
        self.backward.append(plan_activation_backward(plan.spec("y"), x, activation, self.target, up=up))
        return plan.spec("y")

    def rows_of_bias(self, tokens: int, width: int) -> None:
        """A bias as rows, by a product with zeros."""
        shapes = (tokens, 1), (1, width), (width,)
        rows = (*(ArraySpec(shape, "float32") for shape in shapes), LogitsSpec(), self.target)
        self.forward.append(plan_router(*rows))
        d_logits = ArraySpec((tokens, width), "float32")
        self.backward.append(plan_router_backward(d_logits, *rows, wanted=("d_bias",)))

    def projection(self, x: ArraySpec, width: int, spec: MoESpec) -> ArraySpec:
        shape = (x.shape[1], width) if spec.weight_layout == "in_out" else (width, x.shape[1])
        return self.product(MatmulOperands(x, ArraySpec(shape, x.dtype)), None, _dense(spec))

    def change(self, rows: ArraySpec, a: ArraySpec, b: ArraySpec, spec: MoESpec) -> None:
        """Adapters of rows, as `moe_core.ops.lora.beyond` adds them. a and b: `[S, 1, ...]`."""
        layout = LayoutSpec(rows.shape[0], 1, a.shape[0])
        product = dataclasses.replace(_dense(spec), weight_layout="in_out", gather="token", scatter="slot")
        product = dataclasses.replace(product, out_dtype="float32")
        by_adapter = plan_layout(ArraySpec((rows.shape[0], 1), "int32"), layout, self.target)
        self.forward += [by_adapter] if by_adapter not in self.forward else []
        for factor in (a, b):
            weight = ArraySpec((a.shape[0], *factor.shape[2:]), rows.dtype)
            rows = self.product(MatmulOperands(rows, weight), layout, product)

    def shared(self, x: ArraySpec, shared: SharedExpert, spec: MoESpec, lora: LoRAFactors | None = None) -> None:
        def multiply(rows: ArraySpec, weight: ArraySpec, number: int) -> ArraySpec:
            a, b = (getattr(lora, f"{side}{number}_shared", None) for side in "ab")
            product = _dense(spec) if a is None else dataclasses.replace(_dense(spec), out_dtype="float32")
            y = self.product(MatmulOperands(rows, ArraySpec(weight.shape[-2:], weight.dtype)), None, product)
            if a is not None and b is not None:
                self.change(rows, a, dataclasses.replace(b, shape=(*b.shape[:3], y.shape[1]), strides=None), spec)
            return dataclasses.replace(y, dtype=rows.dtype)

        up = None if shared.up is None else multiply(x, shared.up, 1)
        pre = multiply(x, shared.gate_up, 1)
        multiply(self.activation(pre, spec.shared_activation or spec.activation, up), shared.down, 2)
        if shared.gate is not None:
            arguments = (x, shared.gate, None, spec.shared_gate_spec(), self.target)
            plan = plan_router(*arguments)
            self.forward.append(plan)
            self.backward.append(plan_router_backward(plan.spec("logits"), *arguments, wanted=("d_x", "d_weight")))

    def normalised_experts(self, x: ArraySpec, experts: ExpertWeights, spec: MoESpec, layer: MoELayerSpec) -> None:
        """A norm between the second product and the router's weights."""
        assert layer.norm_of_experts is not None
        layout = LayoutSpec(x.shape[0], layer.top_k, layer.num_experts)
        self.forward.append(plan_layout(ArraySpec((x.shape[0], layer.top_k), "int32"), layout, self.target))
        into = MatmulSpec(spec.weight_layout, "token", allow_tf32=spec.allow_tf32, tuning=spec.matmul_tuning(1))
        tuning = spec.matmul_tuning(2)
        out = MatmulSpec(spec.weight_layout, scatter="slot", allow_tf32=spec.allow_tf32, tuning=tuning)

        def multiply(rows: ArraySpec, matrix: str, product: MatmulSpec) -> ArraySpec:
            weight, bias = getattr(experts, matrix), getattr(experts, f"{matrix}_bias")
            operands = MatmulOperands(rows, weight, bias=bias, layer_index=experts.layer_index)
            return self.product(operands, layout, product)

        pre = multiply(x, "gate_up", into)
        hidden = self.activation(pre, spec.activation, None if experts.up is None else multiply(x, "up", into))
        slots = self.norm(multiply(hidden, "down", out), layer.norm_of_experts)
        weighted = dataclasses.replace(slots, dtype="float32", strides=None)
        row_of_slot = ArraySpec((layout.num_slots,), "int32")
        self.forward.append(plan_reduce(weighted, row_of_slot, layout, self.target, out_dtype=x.dtype))


def _dense(spec: MoESpec) -> MatmulSpec:
    return MatmulSpec(spec.weight_layout, allow_tf32=spec.allow_tf32, tuning=spec.matmul_tuning())
