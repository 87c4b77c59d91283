"""Gradients of stage ops. Each saves its arguments and runs one custom call, `reduce` JAX operations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from moe_core.base.arrays import TRANSPOSED, ArraySpec
from moe_core.errors import Unsupported
from moe_core.ops.activation.backward import plan_activation_backward
from moe_core.ops.matmul.backward import DIFFERENTIABLE, plan_matmul_ogs_backward, why_no_gradient
from moe_core.ops.matmul.grouped import plan_grouped_contraction, plan_grouped_mm
from moe_core.ops.norm.backward import plan_rms_norm_backward
from moe_core.ops.reduction.reduce import plan_reduce
from moe_core.ops.router.backward import plan_router_backward
from moe_core.ops.routing.backward import plan_routing_backward
from moe_core.ops.routing.groups import Groups
from moe_core.ops.routing.rounding import plan_route_rounded_backward
from moe_core.plan.steps import LaunchPlan
from moe_core.specs.matmul import MatmulSpec
from moe_core.specs.operands import MatmulOperands, RoutingGradients
from moe_jax.autodiff import formulas
from moe_jax.autodiff.function import Arrays, Names, Rule, differentiated, more_rows, varying_alike
from moe_jax.bridge.calls import Array, OpCall, Request, undifferentiable


@dataclass(frozen=True)
class _Stage(Rule):
    """request: the forward. asking: the differentiable arrays."""

    request: Request
    asking: Names

    def differentiable(self) -> Names:
        return self.asking

    def by_row(self) -> frozenset[str]:
        return frozenset(_BY_ROW.get(self.request.op, ())) & {*self.names}

    def folded(self, size: int) -> _Stage | None:
        request = self.request
        keywords, first = dict(request.keywords), request.arguments[0]
        bias = keywords.get("correction_bias")
        if request.op not in _BY_ROW or (bias is not None and bias.rank == 2):
            return None
        keywords |= {name: more_rows(one, size) for name, one in keywords.items() if name in self.by_row()}
        if request.op != "matmul_ogs":
            first = more_rows(first, size)
        elif request.arguments[1] is None and {"x", "weight", "bias", "layer_index"}.issuperset(self.names):
            first = dataclasses.replace(first, x=more_rows(first.x, size))
        else:
            return None
        arguments = (first, *request.arguments[1:])
        return dataclasses.replace(
            self, request=dataclasses.replace(request, arguments=arguments, keywords=tuple(keywords.items()))
        )

    def forward(self, arrays: Mapping[str, Any], save: bool) -> Arrays:
        return dict(zip(self.results, undifferentiable(self.request, *arrays.values()), strict=True))

    def _backward(
        self, planner: Callable[..., LaunchPlan], arrays: Arrays, *arguments: Any, **keywords: Any
    ) -> tuple[jax.Array, ...]:
        op, targets = f"{self.request.op}_backward", self.request.targets
        request = Request(op, planner, arguments, tuple(keywords.items()), tuple(arrays), targets)
        return undifferentiable(request, *arrays.values())


def _spec(array: Any) -> ArraySpec:
    return ArraySpec(array.shape, array.dtype.name)


class _Asked(_Stage):
    """A backward that takes the gradient of the result, the arrays it reads, and the names of the wanted gradients."""

    planner: ClassVar[Callable[..., LaunchPlan]]
    gradient: ClassVar[str] = "d_y"
    unread: ClassVar[Names] = ()

    def gradients(self, arrays: Arrays, saved: Arrays, upstream: Arrays, asked: Names) -> Arrays:
        (d_result,) = upstream.values()
        inputs = {self.gradient: d_result} | {name: one for name, one in arrays.items() if name not in self.unread}
        arguments, wanted = (_spec(d_result), *self.request.arguments), tuple(f"d_{name}" for name in asked)
        return dict(zip(asked, self._backward(type(self).planner, inputs, *arguments, wanted=wanted), strict=True))


class _Router(_Asked):
    planner, gradient, unread = plan_router_backward, "d_logits", ("bias", "wide")

    def composed(self, arrays: Arrays, saved: Arrays) -> Arrays:
        x, spec = arrays.get("wide", arrays["x"]), self.request.arguments[-1]
        return {"logits": formulas.logits_of(x, arrays["weight"], arrays.get("bias"), spec)}


class _Norm(_Asked):
    planner = plan_rms_norm_backward

    def composed(self, arrays: Arrays, saved: Arrays) -> Arrays:
        return {"y": formulas.norm_of(arrays["x"], arrays["weight"], self.request.arguments[-1])}


class _Route(_Stage):
    def saved(self, outputs: Arrays) -> Arrays:
        return {"ids": outputs["ids"]}

    def composed(self, arrays: Arrays, saved: Arrays) -> Arrays:
        return {"weights": formulas.weights_of(arrays["logits"], saved["ids"], self.request.arguments[1])}

    def gradients(self, arrays: Arrays, saved: Arrays, upstream: Arrays, asked: Names) -> Arrays:
        logits, spec = self.request.arguments
        mask = dict(self.request.keywords)["token_mask"]
        inputs = {"gradients.weights": upstream["weights"], "logits": arrays["logits"], "ids": saved["ids"]}
        inputs |= {} if mask is None else {"token_mask": arrays["token_mask"]}
        arguments = (RoutingGradients(_spec(upstream["weights"])), logits, _spec(saved["ids"]), spec)
        return {"logits": self._backward(plan_routing_backward, inputs, *arguments, token_mask=mask)[0]}


class _RouteRounded(_Stage):
    def saved(self, outputs: Arrays) -> Arrays:
        return {name: outputs[name] for name in ("ids", "candidates")}

    def composed(self, arrays: Arrays, saved: Arrays) -> Arrays:
        _, spec, rounding = self.request.arguments
        logits, ids, width = arrays["logits"], saved["candidates"], spec.require_top_k()
        rest = rounding.wide(spec, logits.shape[1], "correction_bias" in arrays)
        parts = [formulas.weights_of(logits, ids[:, :width], spec), formulas.weights_of(logits, ids[:, width:], rest)]
        return {"weights": jnp.where(saved["ids"] >= 0, jnp.concatenate(parts, axis=1), 0)}

    def gradients(self, arrays: Arrays, saved: Arrays, upstream: Arrays, asked: Names) -> Arrays:
        logits, spec, rounding = self.request.arguments
        inputs = {"d_weights": upstream["weights"], "logits": arrays["logits"], **saved}
        table = _spec(saved["ids"])
        arguments = (_spec(upstream["weights"]), logits, table, table, spec, rounding)
        return {"logits": self._backward(plan_route_rounded_backward, inputs, *arguments)[0]}


class _Product(_Asked):
    planner = plan_matmul_ogs_backward

    def refuse(self, asked: list[str]) -> None:
        operands, layout, spec = self.request.arguments
        reason = why_no_gradient(operands, layout, spec, set(asked))
        if reason is not None:
            raise Unsupported(reason)

    def composed(self, arrays: Arrays, saved: Arrays) -> Arrays:
        _, layout, spec = self.request.arguments
        if "weight" not in arrays:
            raise Unsupported(formulas.QUANTIZED.format("matmul_ogs"))
        x, weight, bias = arrays["x"], arrays["weight"], arrays.get("bias")
        if "layer_index" in arrays:
            index = arrays["layer_index"][0]
            weight, bias = weight[index], None if bias is None else bias[index]
        dtype = spec.out_dtype or x.dtype
        if layout is None:
            y = formulas.dot(x, weight, spec.weight_layout)
            return {"y": (y if bias is None else y + formulas.wide(bias)).astype(dtype)}
        slots = arrays["slot_of_row"]
        if spec.gather != "row":
            x = formulas.take(x, slots // (layout.top_k if spec.gather == "token" else 1))
        y = product_of_rows(x, weight, bias, arrays["group_start"], spec)
        if "row_weight" in arrays:
            y *= formulas.take(arrays["row_weight"].reshape(-1, 1), slots)
        y = y if spec.scatter == "row" else formulas.take(y, arrays["row_of_slot"])
        return {"y": y.astype(dtype)}


def product_of_rows(x: Any, weight: Any, bias: Any, group_start: Any, spec: MatmulSpec) -> jax.Array:
    """fp32 `[R, N]` of rows grouped by expert."""
    wide = None if x.dtype == jnp.float64 else "float32"
    plain = MatmulSpec(spec.weight_layout, out_dtype=wide, allow_tf32=spec.allow_tf32)
    y = run_grouped_mm(x, weight, (jnp.diff(group_start), None), plain)
    if bias is None:
        return y
    expert = jnp.searchsorted(group_start, jnp.arange(len(x)), side="right") - 1
    # Rows past the last group have none.
    return y + formulas.take(formulas.wide(bias), jnp.where(expert < len(bias), expert, -1))


class _Gather(_Stage):
    def composed(self, arrays: Arrays, saved: Arrays) -> Arrays:
        x, slots = arrays.get("wide", arrays["x"]), arrays["slot_of_row"]
        return {"y": formulas.take(x, slots // self.request.arguments[-1].top_k).astype(arrays["x"].dtype)}

    def gradients(self, arrays: Arrays, saved: Arrays, upstream: Arrays, asked: Names) -> Arrays:
        x, _, row_of_slot, layout = self.request.arguments
        inputs = {"y": upstream["y"], "row_of_slot": arrays["row_of_slot"]}

        def total(dtype: str) -> jax.Array:
            options = {"order": "row", "out_dtype": dtype}
            return self._backward(plan_reduce, inputs, _spec(upstream["y"]), row_of_slot, layout, **options)[0]

        return {name: total("float32" if name == "wide" else x.dtype) for name in asked}


class _Activation(_Stage):
    def composed(self, arrays: Arrays, saved: Arrays) -> Arrays:
        dtype = dict(self.request.keywords)["out_dtype"] or arrays["x"].dtype
        return {"y": formulas.activation_of(arrays["x"], arrays.get("up"), self.request.arguments[1]).astype(dtype)}

    def gradients(self, arrays: Arrays, saved: Arrays, upstream: Arrays, asked: Names) -> Arrays:
        inputs, arguments = {"d_y": upstream["y"]} | arrays, (_spec(upstream["y"]), *self.request.arguments)
        up = dict(self.request.keywords)["up"]
        return dict(zip(("x", "up"), self._backward(plan_activation_backward, inputs, *arguments, up=up), strict=False))


class _Reduce(_Stage):
    def refuse(self, asked: list[str]) -> None:
        if "shared_gate" in self.names and {"shared", "shared_gate"} & set(asked):
            raise Unsupported(
                "reduce with a shared_gate has no derivative by shared or shared_gate; add sigmoid(shared_gate) * "
                "shared in JAX, or apply jax.lax.stop_gradient to them"
            )

    def composed(self, arrays: Arrays, saved: Arrays) -> Arrays:
        y, row_of_slot, keywords = arrays["y"], arrays["row_of_slot"], dict(self.request.keywords)
        slots = jnp.where(row_of_slot >= 0, jnp.arange(len(row_of_slot)), -1)
        rows = formulas.wide(formulas.take(y, slots if keywords["order"] == "slot" else row_of_slot))
        total = rows.reshape(-1, self.request.arguments[2].top_k, y.shape[1]).sum(axis=1)
        if "shared" in arrays:
            shared = formulas.wide(arrays["shared"])
            total += shared * jax.nn.sigmoid(arrays["shared_gate"]) if "shared_gate" in arrays else shared
        return {"out": total.astype(keywords["out_dtype"] or y.dtype)}

    def gradients(self, arrays: Arrays, saved: Arrays, upstream: Arrays, asked: Names) -> Arrays:
        """Slots and rows without each other get zeros."""
        gradient, gradients = upstream["out"], {}
        if "shared" in asked:
            gradients["shared"] = gradient.astype(arrays["shared"].dtype)
        if "y" in asked:
            top_k, order = self.request.arguments[2].top_k, dict(self.request.keywords)["order"]
            y, row_of_slot = arrays["y"], arrays["row_of_slot"]
            rows = jnp.repeat(gradient.astype(y.dtype), top_k, axis=0)
            if order == "slot":
                gradients["y"] = jnp.where(row_of_slot[:, None] >= 0, rows, 0)
            else:
                # Slots without a row write past the end, where writes are dropped.
                places = jnp.where(row_of_slot >= 0, row_of_slot, y.shape[0])
                zeros, places, rows = varying_alike((jnp.zeros_like(y), places, rows))
                gradients["y"] = zeros.at[places].set(rows, mode="drop")
        return gradients


class _Bilinear(_Stage):
    """Tangents and gradients are calls of its kind."""

    def tangents(self, arrays: Arrays, saved: Arrays, moving: Arrays) -> Arrays:
        terms = [self.of(arrays | {name: tangent}) for name, tangent in moving.items()]
        return {"y": functools.reduce(jnp.add, terms)}

    def of(self, arrays: Arrays) -> jax.Array:
        raise NotImplementedError

    def repeated(self, arrays: Arrays, saved: Arrays, upstream: Arrays, asked: Names) -> Arrays:
        return self.gradients(arrays, saved, upstream, asked)


class _GroupedMM(_Bilinear):
    def of(self, arrays: Arrays) -> jax.Array:
        groups = (arrays["sizes"], arrays.get("first_group"))
        return run_grouped_mm(arrays["x"], arrays["weight"], groups, self.request.arguments[-1])

    def gradients(self, arrays: Arrays, saved: Arrays, upstream: Arrays, asked: Names) -> Arrays:
        (_, _, spec), made = self.request.arguments, {}
        x, weight, d_y = arrays["x"], arrays["weight"], upstream["y"].astype(arrays["x"].dtype)
        groups = (arrays["sizes"], arrays.get("first_group"))
        if "x" in asked:
            back = MatmulSpec(TRANSPOSED[spec.weight_layout], allow_tf32=spec.allow_tf32)
            made["x"] = run_grouped_mm(d_y, weight, groups, back)
        if "weight" in asked:
            left, right = (x, d_y) if spec.weight_layout == "in_out" else (d_y, x)
            made["weight"] = run_contraction(left, right, groups, weight.shape[0], allow_tf32=spec.allow_tf32)
        return made


class _GroupedContraction(_Bilinear):
    def of(self, arrays: Arrays) -> jax.Array:
        groups, keywords = (arrays["sizes"], arrays.get("first_group")), dict(self.request.keywords)
        return run_contraction(arrays["left"], arrays["right"], groups, self.request.arguments[-1].count, **keywords)

    def gradients(self, arrays: Arrays, saved: Arrays, upstream: Arrays, asked: Names) -> Arrays:
        weight, tf32 = upstream["y"].astype(arrays["left"].dtype), dict(self.request.keywords)["allow_tf32"]
        groups, sides = (arrays["sizes"], arrays.get("first_group")), (("left", "right"), ("right", "left"))
        return {
            name: run_grouped_mm(arrays[other], weight, groups, MatmulSpec(layout, allow_tf32=tf32))
            for (name, other), layout in zip(sides, ("out_in", "in_out"), strict=True)
            if name in asked
        }


#: op -> arrays whose rows are independent: its first argument, and keywords.
_BY_ROW: dict[str, Names] = {
    "router": ("x", "wide"),
    "rms_norm": ("x",),
    "route": ("logits", "token_mask", "given"),
    "activation": ("x", "up"),
    "matmul_ogs": ("x",),
}
#: op -> (rule, results, results through which gradients flow back, differentiable arrays).
_RULES: dict[str, tuple[type[_Stage], Names, Names, Names]] = {
    "router": (_Router, ("logits",), ("logits",), ("x", "weight", "bias", "wide")),
    "rms_norm": (_Norm, ("y",), ("y",), ("x", "weight")),
    "route": (_Route, ("ids", "weights"), ("weights",), ("logits",)),
    "route_rounded": (_RouteRounded, ("ids", "weights", "tokens_per_expert", "candidates"), ("weights",), ("logits",)),
    "matmul_ogs": (_Product, ("y",), ("y",), DIFFERENTIABLE),
    "gather_rows": (_Gather, ("y",), ("y",), ("x", "wide")),
    "activation": (_Activation, ("y",), ("y",), ("x", "up")),
    "reduce": (_Reduce, ("out",), ("out",), ("y", "shared")),
    "grouped_mm": (_GroupedMM, ("y",), ("y",), ("x", "weight")),
    "grouped_contraction": (_GroupedContraction, ("y",), ("y",), ("left", "right")),
}


def run_stage(call: OpCall, planner: Callable[..., LaunchPlan], *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
    request = call.request(planner, *arguments, **keywords)
    rule, results, flowing, asking = _RULES[request.op]
    stage = rule(request.names, results, flowing, request, asking)
    return tuple(differentiated(stage, call.placed().values()).values())


def _groups(call: OpCall, groups: tuple[Array, Array | None], count: int | None = None) -> Groups:
    first = None if groups[1] is None else call.array("first_group", groups[1], "group_offset")
    return Groups(call.array("sizes", groups[0], "group_sizes"), False, first, count)


def run_grouped_mm(x: Array, weight: Array, groups: tuple[Array, Array | None], spec: MatmulSpec) -> jax.Array:
    """`plan_grouped_mm`. groups: their sizes, and the first one that has a weight."""
    call = OpCall("grouped_mm")
    operands = MatmulOperands(call.array("x", x, "lhs"), call.array("weight", weight, "rhs"))
    return run_stage(call, plan_grouped_mm, operands, _groups(call, groups), spec)[0]


def run_contraction(
    left: Array, right: Array, groups: tuple[Array, Array | None], count: int | None = None, **options: Any
) -> jax.Array:
    """Run `plan_grouped_contraction` of groups as in `run_grouped_mm`. `count` groups are in the result."""
    call = OpCall("grouped_contraction")
    sides = call.array("left", left, "lhs"), call.array("right", right, "rhs")
    return run_stage(call, plan_grouped_contraction, *sides, _groups(call, groups, count), **options)[0]
