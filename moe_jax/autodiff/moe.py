"""The gradient of the composed op `moe`: a custom call each way. Refusals: `moe_core.ops.moe.checks`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moe_core.base.arrays import ArraySpec
from moe_core.base.dtypes import numpy_dtype
from moe_core.base.target import Target
from moe_core.errors import Unsupported
from moe_core.ops.moe.backward import gradient_names, plan_moe_backward
from moe_core.ops.moe.checks import why_no_moe_gradient
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.names import BY_TOKEN, FLOWING, result_names, saved_names
from moe_core.ops.moe.options import BackwardOptions, ForwardOptions
from moe_core.ops.router.forward import plan_router
from moe_core.ops.routing.checks import require_known_ids
from moe_core.ops.routing.layout import plan_layout
from moe_core.ops.routing.topk import plan_routing
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import operands as bundles
from moe_core.specs.matmul import MatmulSpec
from moe_core.specs.moe import MoESpec
from moe_core.specs.routing import LayoutSpec
from moe_jax.autodiff import formulas
from moe_jax.autodiff.function import Rule, differentiated, more_rows, varying_alike
from moe_jax.autodiff.stages import product_of_rows, run_stage
from moe_jax.bridge import platforms
from moe_jax.bridge.calls import OpCall, Request, int32_ids, moe_request, on_host, undifferentiable

#: Checkpoint names for `jax.checkpoint` policies: the experts' pre-activations (large), and the routing with its layout
#: (small). With both saved, a backward runs no forward.
SAVED_NAMES = ("moebius_pre_activation", "moebius_routing")
#: MaxText's names of both products before the activation. A policy that keeps any of them keeps everything that a
#: backward reads, because without the small routing it would run the whole forward again.
_MAXTEXT_NAMES = ("mlpwi_0", "mlpwi_1", "moe_mlpwi_0", "moe_mlpwi_1")

_REPLAYED = {"routing.ids": "replayed.ids", "routing.weights": "replayed.weights"}


@dataclass(frozen=True)
class MoERule(Rule):
    """operands: of specs. replayed: specs of a trace's ids and weights, or None; gradients still flow into the routing.
    wide: the arrays include `wide`, x in fp32, which gets its unrounded gradient."""

    operands: bundles.MoEOperands
    spec: MoESpec
    targets: tuple[tuple[str, Target], ...]
    replayed: bundles.TopK | None
    wide: bool = False

    def differentiable(self) -> tuple[str, ...]:
        names = tuple(name.removeprefix("d_") for name in gradient_names(self.operands))
        return (*names, "wide") if self.wide else names

    def refuse(self, asked: list[str]) -> None:
        reason = why_no_moe_gradient(self.operands.experts, self.spec, asked)
        if asked and reason is not None:
            raise Unsupported(reason)
        if "lora.scale" in asked:
            raise Unsupported(
                "moe has no gradient of lora.scale; apply jax.lax.stop_gradient to it, and differentiate by the factors"
            )

    def by_row(self) -> frozenset[str]:
        bias = getattr(self.operands.routing, "correction_bias", None)
        of_tokens = () if bias is None or bias.rank == 1 else ("routing.correction_bias",)
        return frozenset({*BY_TOKEN, *of_tokens, *_REPLAYED.values(), "wide"} & {*self.names})

    def folded(self, size: int) -> MoERule | None:
        if self.spec.row_limit is not None or self.spec.rows_in_order or self.spec.lora_dropout:
            return None  # A dropout's mask follows from the number of the token.
        operands, more = self.operands, functools.partial(more_rows, size=size)
        routing = {
            name: more(getattr(operands.routing, name))
            for name, _ in bundles.array_fields(type(operands.routing))
            if f"routing.{name}" in self.by_row()
        }
        operands = dataclasses.replace(
            operands,
            x=more(operands.x),
            token_mask=more(operands.token_mask),
            adapter_ids=more(operands.adapter_ids),
            routing=dataclasses.replace(operands.routing, **routing),
        )
        replayed = self.replayed and bundles.TopK(more(self.replayed.ids), more(self.replayed.weights))
        return dataclasses.replace(self, operands=operands, replayed=replayed)

    def unfolded(self, size: int, arrays: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
        counts, ids = results["tokens_per_expert"], results.get("ids")
        if ids is None:
            ids = arrays[_REPLAYED["routing.ids"] if self.replayed else "routing.ids"]
        of_rows = {name: one for name, one in results.items() if name not in ("tokens_per_expert", "invalid_ids")}
        elements = super().unfolded(size, arrays, of_rows)
        if "token_mask" in arrays:
            ids = jnp.where(arrays["token_mask"][:, None], ids, -1)
        ids = ids.reshape(size, ids.size // size)
        expert_map, num_ids = arrays.get("expert_map"), counts.shape[0]
        num_ids = num_ids if expert_map is None else expert_map.shape[0]
        invalid = (ids < -1) | (ids >= num_ids)
        valid = (ids >= 0) & ~invalid
        local = ids if expert_map is None else expert_map[jnp.where(valid, ids, 0)]
        # Slots without an expert here write past the end, where writes are dropped.
        local = jnp.where(valid & (local >= 0), local, counts.shape[0])
        zeros, local, of_element = varying_alike(
            (jnp.zeros((size, counts.shape[0]), counts.dtype), local, jnp.arange(size)[:, None])
        )
        elements["tokens_per_expert"] = zeros.at[of_element, local].add(1, mode="drop")
        elements["invalid_ids"] = invalid.sum(axis=1, dtype=jnp.int32)[:, None]
        if "adapter_ids" in arrays:
            ids, mask = arrays["adapter_ids"], arrays.get("token_mask", True)
            absent = (self._adapters(arrays) != ids) & mask
            elements["invalid_ids"] += absent.reshape(size, -1).sum(axis=1, dtype=jnp.int32)[:, None]
        return elements

    def _adapters(self, arrays: Mapping[str, Any]) -> jax.Array:
        """Adapters of tokens, -1 for those that do not exist."""
        ids, present = arrays["adapter_ids"], (arrays["lora.ranks"] > 0).any(axis=1)
        named = (ids >= 0) & (ids < present.shape[0])
        return jnp.where(named & present[jnp.where(named, ids, 0)], ids, -1)

    def stacked(self, size: int, arrays: dict[str, Any], split: frozenset[str]) -> dict[str, Any] | None:
        """Elements with experts of their own: one call of all experts, behind a router for each element."""
        experts = self.operands.experts
        own = [name for name in self.names if name.startswith("experts.")]
        routed = [name for name in self.names if name.startswith("routing.")]
        if (
            {*self.names} - {*own, *routed, "x", "token_mask"}
            or not split.issuperset(own)
            or experts.layer_index is not None
            or self.replayed is not None
        ):
            return None
        is_plain = isinstance(experts.down, ArraySpec)
        if self.spec.row_limit is not None or self.spec.rows_in_order or not is_plain:
            return None
        routing, count = type(self.operands.routing), experts.down.shape[0]
        given = {name: one for name, one in arrays.items() if name not in own}
        axes = {name: 0 if name in split else None for name in given}
        chosen = jax.vmap(self._chosen, (axes,), axis_size=size)(given)
        ids, weights, mask = chosen["ids"], chosen["weights"], arrays.get("token_mask")
        first = count * jnp.arange(size, dtype=ids.dtype)[:, None, None]
        valid, nobody = (ids >= 0) & (ids < count), jnp.where(ids == -1, -1, size * count)
        x = arrays["x"] if "x" in split else jnp.broadcast_to(arrays["x"], (size, *arrays["x"].shape))
        if mask is not None:
            mask = (mask if "token_mask" in split else jnp.broadcast_to(mask, x.shape[:2])).reshape(-1)
        results = run_moe(
            x.reshape(-1, x.shape[-1]),
            bundles.ExpertWeights(
                **{name.removeprefix("experts."): arrays[name].reshape(-1, *arrays[name].shape[2:]) for name in own}
            ),
            bundles.TopK(*(one.reshape(-1, ids.shape[-1]) for one in (jnp.where(valid, ids + first, nobody), weights))),
            dataclasses.replace(self.spec, router=None),
            token_mask=mask,
        )
        used = jnp.ones(x.shape[:2], bool) if mask is None else mask.reshape(x.shape[:2])
        wrong_ids = ~valid & (ids != -1) & used[..., None]
        made = chosen | {
            "output": results.output.reshape(size, -1, results.output.shape[-1]),
            "tokens_per_expert": results.tokens_per_expert.reshape(size, count),
            "invalid_ids": wrong_ids.sum(axis=(1, 2), dtype=jnp.int32)[:, None],
        }
        return {name: made[name] for name in result_names(routing)}

    def _chosen(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """logits (with a router), ids and weights of one element."""
        routing, fields, spec = self.operands.routing, _fields(arrays, "routing."), self.spec
        if isinstance(routing, bundles.TopK):
            return dict(zip(("ids", "weights"), plain_top_k(fields["ids"], fields["weights"]), strict=True))
        logits, made = fields.get("logits"), {}
        if logits is None:
            call = OpCall("router")
            parts = (call.array("x", arrays["x"]), call.array("weight", fields["weight"]))
            logits = run_stage(
                call, plan_router, *parts, call.optional("bias", fields.get("bias")), spec.logits_spec()
            )[0]
            made["logits"] = logits
        call = OpCall("route")
        array, optional = call.array("logits", logits), {}
        for name, one in (("correction_bias", fields.get("correction_bias")), ("token_mask", arrays.get("token_mask"))):
            optional[name] = call.optional(name, one)
        ids, weights = run_stage(call, plan_routing, array, spec.router, **optional, given=None)
        return made | {"ids": ids, "weights": weights}

    def forward(self, arrays: Mapping[str, Any], save: bool) -> dict[str, Any]:
        operands, routing, spec = self.operands, self.operands.routing, self.spec
        arrays = self._as_used(arrays)
        if self.replayed is not None:
            routing, spec = self.replayed, dataclasses.replace(spec, router=None)
        adapters = {"lora": operands.lora, "adapter_ids": operands.adapter_ids}
        options = ForwardOptions(operands.token_mask, operands.expert_map, operands.shared, save, **adapters)
        outputs = self.execute(arrays, plan_moe, operands.x, operands.experts, routing, spec, options=options)
        if self.replayed is None or isinstance(operands.routing, bundles.TopK):
            return outputs
        outputs |= {"ids": arrays["routing.ids"], "weights": arrays["routing.weights"]}
        if isinstance(operands.routing, bundles.RouterWeights):
            used = {name.removeprefix("routing."): array for name, array in arrays.items()}
            router = (operands.x, operands.routing.weight, operands.routing.bias, spec.logits_spec())
            outputs |= self.execute(used, plan_router, *router)
        return outputs

    def kept(self) -> tuple[str, ...]:
        return saved_names(self.spec, self.operands.shared, self.operands.lora)

    def saved(self, outputs: dict[str, Any]) -> dict[str, Any]:
        values = {name: one for name, one in outputs.items() if name not in ("output", "invalid_ids")}
        pre_activation, routing = SAVED_NAMES
        for alias in _MAXTEXT_NAMES:
            values = {name: checkpoint_name(value, alias) for name, value in values.items()}
        return {
            name: checkpoint_name(value, pre_activation if name.endswith("pre_activation") else routing)
            for name, value in values.items()
        }

    def gradients(
        self, arrays: dict[str, Any], saved: dict[str, Any], upstream: dict[str, Any], asked: tuple[str, ...]
    ) -> dict[str, Any]:
        if "output" not in upstream:
            x = self.operands.x
            upstream = upstream | {"output": jnp.zeros(x.shape, numpy_dtype(self.spec.out_dtype or x.dtype))}
        bundle = OpCall("moe").bundle("gradients", bundles.OutputGradients(**upstream), "gradients.")
        inputs = self._as_used(arrays | saved) | {f"gradients.{name}": array for name, array in upstream.items()}
        if isinstance(self.operands.routing, bundles.TopK):
            names = ("routing.ids", "routing.weights")
            inputs |= dict(zip(names, plain_top_k(*[inputs[name] for name in names]), strict=True))
        options = BackwardOptions(
            tuple("d_x" if name == "wide" else f"d_{name}" for name in asked),
            one_layer=self.operands.experts.layer_index is not None,
            wide="wide" in asked,
        )
        arguments, keywords = (bundle, self.operands, self.spec), (("options", options),)
        request = Request("moe_backward", plan_moe_backward, arguments, keywords, tuple(inputs), self.targets)
        pairs = zip(asked, undifferentiable(request, *inputs.values()), strict=True)
        return {
            name: gradient if name == "wide" else self._in_stack(name, gradient, arrays) for name, gradient in pairs
        }

    def composed(self, arrays: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        routing, spec = self.operands.routing, self.spec
        fields = {prefix: _fields(arrays, prefix) for prefix in ("experts.", "shared.", "routing.")}
        experts, results = fields["experts."], {}
        if "down" not in experts:
            raise Unsupported(formulas.QUANTIZED.format("moe"))
        if self.operands.lora is not None:
            raise Unsupported(
                "moe with lora has gradients alone, neither forward mode nor second derivatives; use jax.grad or "
                "jax.vjp, once"
            )
        x, mask = arrays.get("wide", arrays["x"]).astype(self.operands.x.dtype), arrays.get("token_mask")
        whole, x = x, x if mask is None else jnp.where(mask[:, None], x, 0)
        if isinstance(routing, bundles.TopK):
            given = self._as_used(arrays)
            ids, used = plain_top_k(given["routing.ids"], given["routing.weights"])
            weights = formulas.wide(arrays["routing.weights"])
        else:
            assert spec.router is not None
            of_router, ids, used = fields["routing."], saved["ids"], saved["weights"]
            logits = of_router.get("logits")
            if logits is None:
                bias = of_router.get("bias")
                logits = formulas.logits_of(x, of_router["weight"], bias, spec.logits_spec())
                # Those of masked tokens are constants.
                logits = logits if mask is None else jnp.where(mask[:, None], logits, saved["logits"])
                results["logits"] = logits
            weights = formulas.weights_of(logits, ids, spec.router)
            results["weights"] = weights
        weights = formulas.in_value_of(used, weights)
        output = self._experts(x, experts, ids, weights, arrays)
        if fields["shared."]:
            output += self._shared(whole, fields["shared."], experts.get("layer_index"))
        results["output"] = output.astype(spec.out_dtype or x.dtype)
        return {name: results[name] for name in self.flowing_results}

    def _experts(self, x: Any, experts: dict[str, Any], ids: Any, weights: Any, arrays: dict[str, Any]) -> jax.Array:
        spec, (tokens, top_k) = self.spec, ids.shape
        index = experts.pop("layer_index", None)
        experts = {name: one if index is None else one[index[0]] for name, one in experts.items()}
        layout = LayoutSpec(tokens, top_k, len(experts["down"]), limit=spec.row_limit)
        call = OpCall("make_layout")
        options = {name: call.optional(name, arrays.get(name)) for name in ("expert_map", "token_mask")}
        tables = call.run(plan_layout, call.array("ids", ids), layout, **options)
        _, start, slots, row_of_slot, *_ = map(jax.lax.stop_gradient, tables)
        matmul = MatmulSpec(spec.weight_layout, allow_tf32=spec.allow_tf32)

        def multiply(rows: Any, name: str) -> jax.Array:
            return product_of_rows(rows, experts[name], experts.get(f"{name}_bias"), start, matmul)

        factors = formulas.take(weights.reshape(-1, 1), slots)
        rows = formulas.take(x, slots // top_k)
        if spec.apply_router_weight_on_input:
            rows, factors = (formulas.wide(rows) * factors).astype(x.dtype), 1
        up = multiply(rows, "up") if "up" in experts else None
        hidden = formulas.activation_of(multiply(rows, "gate_up"), up, spec.activation).astype(x.dtype)
        results = formulas.take(multiply(hidden, "down") * factors, row_of_slot)
        return results.reshape(tokens, top_k, results.shape[1]).sum(axis=1)

    def _shared(self, x: Any, shared: dict[str, Any], index: Any) -> jax.Array:
        spec, gate = self.spec.of_shared(), shared.pop("gate", None)
        stacked = shared["gate_up"].ndim == 3
        shared = {name: one[index[0]] if stacked else one for name, one in shared.items()}
        up = formulas.dot(x, shared["up"], spec.weight_layout) if "up" in shared else None
        hidden = formulas.activation_of(formulas.dot(x, shared["gate_up"], spec.weight_layout), up, spec.activation)
        y = formulas.dot(hidden.astype(x.dtype), shared["down"], spec.weight_layout)
        return y if gate is None else y * jax.nn.sigmoid(formulas.dot(x, gate, spec.weight_layout))

    def execute(
        self, arrays: Mapping[str, Any], planner: Callable[..., LaunchPlan], *arguments: Any, **options: Any
    ) -> dict[str, Any]:
        request = Request("moe", planner, arguments, tuple(options.items()), tuple(arrays), self.targets)
        outputs = request.plan(dict(self.targets).get(platforms.default_platform(), self.targets[0][1])).outputs
        values = undifferentiable(request, *arrays.values())
        return {buffer.name: value for buffer, value in zip(outputs, values, strict=True)}

    def _as_used(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        used = {name: array for name, array in arrays.items() if name not in _REPLAYED.values()}
        return used | {name: arrays[alias] for name, alias in _REPLAYED.items() if alias in arrays}

    def _in_stack(self, name: str, gradient: jax.Array, arrays: Mapping[str, Any]) -> jax.Array:
        """The gradient in its array's dtype, for a stack with zeros for other layers. XLA adds this form to other
        layers' gradients in place, without creating the zeros."""
        shape = attrgetter(name)(self.operands).shape
        if gradient.shape == shape:
            return gradient.astype(arrays[name].dtype)
        zeros = jnp.zeros(shape, gradient.dtype)
        return jax.lax.dynamic_update_index_in_dim(zeros, gradient, arrays["experts.layer_index"][0], 0)


def _fields(arrays: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def plain_top_k(ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """ids as int32, see `int32_ids`. bf16 and fp16 weights as fp32."""
    ids = jnp.asarray(int32_ids(ids))
    return ids, weights.astype(jnp.float32) if weights.dtype in (jnp.bfloat16, jnp.float16) else weights


def run_moe(
    x: Any,
    experts: Any,
    routing: Any,
    spec: Any,
    *,
    checked: bool = False,
    replayed: bundles.Routing | None = None,
    **optional: Any,
) -> bundles.MoEOutput:
    """Run `moe`, or replay a trace's ids and weights. The routing is still trained."""
    call, (x_spec, *parts, _), options = moe_request(x, experts, routing, spec, **optional)
    chosen = None
    if replayed is not None:
        chosen = bundles.TopK(
            *(call.array(name, array) for name, array in zip(_REPLAYED.values(), replayed, strict=True))
        )
    arrays, operands = call.placed(), bundles.MoEOperands(x_spec, *parts, **options)
    names = (tuple(arrays), result_names(type(routing)), FLOWING)
    results = differentiated(MoERule(*names, operands, spec, platforms.targets(), chosen), arrays.values())
    if isinstance(routing, bundles.TopK):
        results["ids"], results["weights"] = (routing.ids, routing.weights) if replayed is None else replayed
    if checked:
        num_experts, expert_map = results["tokens_per_expert"].shape[0], options["expert_map"]
        num_ids = num_experts if expert_map is None else expert_map.shape[0]
        require_known_ids(on_host("moe", results["invalid_ids"]), num_ids)
    logits = routing.logits if isinstance(routing, bundles.RouterLogits) else results.get("logits")
    return bundles.MoEOutput(**(results | {"logits": logits}))
