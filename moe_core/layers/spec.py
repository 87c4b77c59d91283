"""The spec of a MoE layer: E experts, K top-k, D d_model, F d_ff after gating, S of all shared experts together."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction

from moe_core.base import WEIGHT_LAYOUTS, checks, dtypes, plan_type
from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedSpec, Scheme
from moe_core.layers.around import LatentSpec, OutputSpec
from moe_core.layers.parameter import Parameter, matrix, quantized_parts, table
from moe_core.layers.rounding import check_token_rounding
from moe_core.layers.storage import HUGGING_FACE as HUGGING_FACE
from moe_core.layers.storage import MAXTEXT as MAXTEXT
from moe_core.layers.storage import Storage as Storage
from moe_core.layers.storage import storage_of as storage_of
from moe_core.specs import MoESpec, NormSpec, RouterSpec, TokenRounding, Tuning
from moe_core.specs.matmul import GATE_LAYOUTS, Activation

_SILU, _ANY_ROUTER = Activation("silu"), RouterSpec()
_UNSTATED_GATE_LAYOUT = "halves"
_FACTOR_DENOMINATOR = 1000


@plan_type
@dataclass(frozen=True)
class ExpertsSpec:
    """The experts of a layer.

    bias: each expert has biases after both products. weight_layout, gate_layout: of the parameters. None: the
    framework's default (`HUGGING_FACE` in torch, `MAXTEXT` in Flax). The activation may state a gate_layout other than
    `halves` instead. scheme: formats of quantised matrices and activations (docs/user/quantization.md).
    """

    activation: Activation = _SILU
    bias: bool = False
    weight_layout: str | None = None
    gate_layout: str | None = None
    scheme: Scheme | None = None

    def __post_init__(self) -> None:
        checks.require_kind("activation", self.activation, Activation)
        checks.require_kind("scheme", self.scheme, Scheme, optional=True)
        checks.require_flag("bias", self.bias)
        if self.weight_layout is not None:
            checks.require_choice("weight_layout", self.weight_layout, WEIGHT_LAYOUTS)
        if not self.activation.gated:
            if self.gate_layout is not None:
                raise InvalidInput(
                    f"gate_layout must be None for an ungated activation, got {self.gate_layout!r}; leave it out"
                )
            return
        stated = self.activation.gate_layout
        if stated != _UNSTATED_GATE_LAYOUT:
            if self.gate_layout not in (None, stated):
                raise InvalidInput(
                    f"gate_layout must be the activation's {stated!r}, got {self.gate_layout!r}; state it once"
                )
            object.__setattr__(self, "gate_layout", stated)
        if self.gate_layout is not None:
            checks.require_choice("gate_layout", self.gate_layout, GATE_LAYOUTS)
        # Equal choices must be equal specs.
        plain = dataclasses.replace(self.activation, gate_layout=self.gate_layout or _UNSTATED_GATE_LAYOUT)
        object.__setattr__(self, "activation", plain)


_SILU_EXPERTS = ExpertsSpec()


@plan_type
@dataclass(frozen=True)
class SharedExpertsSpec:
    """Experts every token visits, stored as one of width d_ff (n shared experts of width f: d_ff = n * f).

    gate: scale the output per token by the sigmoid of x · a gate vector `[D]`. activation: None: the experts'.
    """

    d_ff: int
    gate: bool = False
    activation: Activation | None = None

    def __post_init__(self) -> None:
        checks.require_at_least("shared_experts.d_ff", self.d_ff, 1)
        checks.require_flag("shared_experts.gate", self.gate)
        checks.require_kind("shared_experts.activation", self.activation, Activation, optional=True)
        if self.activation is not None and self.activation.gate_layout not in (_UNSTATED_GATE_LAYOUT, None):
            raise InvalidInput(
                f"shared_experts.activation must state no gate_layout, got {self.activation.gate_layout!r}; the layout "
                "is that of the experts: leave it out"
            )


_OF_OPS = ("logits_dtype", "allow_tf32", "tuning", "recompute", "main_grad", "fast_accumulate")
#: Fields that MoELayerSpec and MoESpec share.
MOE_SPEC_FIELDS = ("apply_router_weight_on_input", *_OF_OPS)
#: Fields that are neither MoESpec's nor told by the arrays.
LAYER_FIELDS = ("capacity_factor", "token_rounding")
#: Fields of MoELayerSpec about computing, not about weights.
FREE_FIELDS = (*LAYER_FIELDS, *_OF_OPS)


@plan_type
@dataclass(frozen=True)
class MoELayerSpec:
    """A whole layer: everything a framework's layer needs except device, dtype and initialiser.

    A layer with router_norm, expert_scale, output.of `experts`, latent, token_table or sparse_mixer runs its stages one
    by one. For apply_router_weight_on_input, logits_dtype, allow_tf32, tuning, recompute, main_grad and fast_accumulate
    see MoESpec.

    Args:
        router: its top_k may be left out, and is else top_k.
        router_bias: logits have a bias `[E]`.
        correction_bias: an fp32 buffer `[E]` is added to the scores for the selection only, and updated from counts of
            tokens.
        capacity_factor: None: dropless. Else an expert keeps the first `capacity(T)` slots routed to it, in slot order,
            and later ones contribute nothing.
        router_norm: the router scores rows normalised in this way, with a factor for each column.
        expert_scale: an expert's weights are multiplied by its parameter last.
        token_table: rows of a table, token id -> top_k experts, that gives the ids (0 = the router chooses).
        sparse_mixer: SparseMixer's epsilon, for a router that chooses two experts one after the other. Each weight is
            the softmax, at the chosen one, over the remaining logits within 2 * epsilon of the largest, as in
            evaluation, without the noise of its training (source: arXiv 2409.12136, and transformers' phimoe).
        token_rounding: in training, round each expert's number of tokens to a multiple of a tile, which changes the
            model (docs/user/routing.md).
    """

    d_model: int
    d_ff: int
    num_experts: int
    top_k: int
    router: RouterSpec = _ANY_ROUTER
    experts: ExpertsSpec = _SILU_EXPERTS
    shared_experts: SharedExpertsSpec | None = None
    router_bias: bool = False
    correction_bias: bool = False
    apply_router_weight_on_input: bool = False
    logits_dtype: str = "float32"
    capacity_factor: float | None = None
    allow_tf32: bool = False
    tuning: Tuning | None = None
    recompute: bool = False
    main_grad: bool = False
    fast_accumulate: bool = False
    router_norm: NormSpec | None = None
    expert_scale: bool = False
    output: OutputSpec | None = None
    latent: LatentSpec | None = None
    token_table: int = 0
    sparse_mixer: float | None = None
    token_rounding: TokenRounding | None = None

    def __post_init__(self) -> None:
        for name in ("d_model", "d_ff", "num_experts", "top_k"):
            checks.require_at_least(name, getattr(self, name), 1)
        checks.require_kind("router", self.router, RouterSpec)
        checks.require_kind("experts", self.experts, ExpertsSpec)
        checks.require_kind("shared_experts", self.shared_experts, SharedExpertsSpec, optional=True)
        checks.require_kind("tuning", self.tuning, Tuning, optional=True)
        checks.require_kind("router_norm", self.router_norm, NormSpec, optional=True)
        checks.require_kind("output", self.output, OutputSpec, optional=True)
        checks.require_kind("latent", self.latent, LatentSpec, optional=True)
        checks.require_at_least("token_table", self.token_table, 0)
        flags = ("router_bias", "correction_bias", "apply_router_weight_on_input", "allow_tf32", "expert_scale")
        checks.require_flags(self, *flags)
        if self.router.top_k not in (None, self.top_k):
            raise InvalidInput(
                f"router.top_k must be the layer's top_k = {self.top_k}, got {self.router.top_k}; leave it out"
            )
        object.__setattr__(self, "router", dataclasses.replace(self.router, top_k=self.top_k))
        self.router.validate_experts(self.num_experts, self.correction_bias)
        factor = self.capacity_factor
        if factor is not None:
            number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
            if not number or not 1 / _FACTOR_DENOMINATOR <= factor < math.inf:
                raise InvalidInput(
                    f"capacity_factor must be a finite number of at least {1 / _FACTOR_DENOMINATOR:g} or None, "
                    f"got {factor!r}; None drops no token"
                )
            object.__setattr__(self, "capacity_factor", float(factor))
            if self.tuning is not None and self.tuning.batch_invariant:
                raise InvalidInput(
                    f"capacity_factor must be None with batch_invariant, got {factor}: whether an expert is full "
                    "depends on the other tokens; leave one of the two out"
                )
        object.__setattr__(self, "logits_dtype", dtypes.canonical(self.logits_dtype))
        spec = self.moe_spec(HUGGING_FACE)
        if self.shared_experts is not None and spec.shared_activation is None:
            object.__setattr__(self, "shared_experts", dataclasses.replace(self.shared_experts, activation=None))
        self._check_around()
        if self.sparse_mixer is not None:
            self._check_sparse_mixer()
        checks.require_kind("token_rounding", self.token_rounding, TokenRounding, optional=True)
        if self.token_rounding is not None:
            check_token_rounding(self)
        if self.experts.scheme is not None:
            self._check_training(self.experts.scheme)
            # Refuses sizes that the format does not take.
            self.parameters(HUGGING_FACE)

    def _check_training(self, scheme: Scheme) -> None:
        useless = ()
        if scheme.activations is not None:
            useless, reason = ("recompute", "main_grad"), "what quantises activations has no gradient"
        elif self.shared_experts is None:
            useless, reason = ("main_grad",), "quantised matrices have no gradient, and there are no shared experts"
        for name in useless:
            if getattr(self, name):
                raise InvalidInput(
                    f"{name} must be False with the scheme {scheme}, got True: {reason}; leave one of the two out"
                )

    def _check_around(self) -> None:
        scheme = self.experts.scheme
        requested = {"main_grad": self.main_grad, "apply_router_weight_on_input": self.apply_router_weight_on_input}
        if self.norm_of_experts is not None:
            requested |= {"recompute": self.recompute, "fast_accumulate": self.fast_accumulate}
            requested["a scheme that quantises activations"] = scheme is not None and scheme.activations is not None
        elif self.latent is None:
            return
        for name in [name for name, value in requested.items() if value]:
            kind = "a latent width" if self.norm_of_experts is None else "a norm of each expert's result"
            raise InvalidInput(f"{name} must be left out beside {kind}, got True; leave one of the two out")

    def _check_sparse_mixer(self) -> None:
        object.__setattr__(self, "sparse_mixer", checks.finite_float("sparse_mixer", self.sparse_mixer))
        if self.sparse_mixer is not None and self.sparse_mixer < 0:
            raise InvalidInput(f"sparse_mixer must be at least 0, got {self.sparse_mixer}; pass the jitter's epsilon")
        if self.router != RouterSpec(2) or self.correction_bias or self.token_table:
            raise InvalidInput(
                f"router must be RouterSpec(2) with a sparse_mixer, and neither correction_bias nor token_table given, "
                f"got {self.router}; leave the options out"
            )

    @property
    def norm_of_experts(self) -> NormSpec | None:
        return self.output.norm if self.output is not None and self.output.of_experts else None

    @property
    def expert_width(self) -> int:
        """The columns of the experts' rows: d_model, or the latent width."""
        return self.d_model if self.latent is None else self.latent.width

    @property
    def gated(self) -> bool:
        return self.experts.activation.gated

    @property
    def in_stages(self) -> bool:
        """True if the stages run one by one (in training also with token rounding)."""
        between = self.capacity_factor, self.router_norm, self.latent, self.norm_of_experts, self.sparse_mixer
        return self.expert_scale or self.token_table > 0 or any(one is not None for one in between)

    def storage(self, default: Storage) -> Storage:
        """The layouts stated by `experts`, the others and the router's from `default`."""
        weight_layout = self.experts.weight_layout or default.weight_layout
        return Storage(weight_layout, self.experts.gate_layout or default.gate_layout, default.router_weight_layout)

    def stored_as(self, storage: Storage) -> MoELayerSpec:
        """The same layer with its experts' layouts stated."""
        activation, gate_layout = self.experts.activation, None
        if activation.gated:
            gate_layout = storage.gate_layout
            activation = dataclasses.replace(activation, gate_layout=_UNSTATED_GATE_LAYOUT)
        layouts = {"weight_layout": storage.weight_layout, "gate_layout": gate_layout}
        return dataclasses.replace(self, experts=dataclasses.replace(self.experts, activation=activation, **layouts))

    def moe_spec(self, default: Storage) -> MoESpec:
        """The composed op's spec for parameters in `storage(default)`."""
        storage, activation = self.storage(default), self.experts.activation
        shared = None if self.shared_experts is None else self.shared_experts.activation
        if activation.gated:
            activation = dataclasses.replace(activation, gate_layout=storage.gate_layout)
            shared = shared and dataclasses.replace(shared, gate_layout=storage.gate_layout)
        return MoESpec(
            activation,
            self.router,
            weight_layout=storage.weight_layout,
            router_weight_layout=storage.router_weight_layout,
            activations=None if self.experts.scheme is None else self.experts.scheme.activations,
            shared_activation=shared,
            **{name: getattr(self, name) for name in MOE_SPEC_FIELDS},
        )

    def capacity_ratio(self) -> tuple[int, int] | None:
        """(n, d): of T tokens an expert keeps ceil(capacity_factor * T * K / E) = ceil(T * n / d) slots. None: all.

        The factor counts as its written fraction (1.1 = 11 / 10), so that the bound is exact.
        """
        if self.capacity_factor is None:
            return None
        factor = Fraction(self.capacity_factor).limit_denominator(_FACTOR_DENOMINATOR)
        return (factor * self.top_k / self.num_experts).as_integer_ratio()

    def capacity(self, num_tokens: int) -> int:
        """Slots an expert keeps of num_tokens tokens."""
        ratio = self.capacity_ratio()
        return num_tokens * self.top_k if ratio is None else -(-num_tokens * ratio[0] // ratio[1])

    def parameters(self, default: Storage) -> tuple[Parameter, ...]:
        """Every array of the layer in `storage(default)`, in a fixed order.

        Names: `router.weight`, `.bias`, `.correction_bias`, `.norm`, `.table`, `.expert_scale`, `experts.gate_up`,
        `experts.up` (gate_layout `separate`), `experts.down`, `experts.gate_up_bias`, `experts.up_bias`,
        `experts.down_bias`, `shared_experts.gate_up`, `.up`, `.down`, `.gate`, `before.weight`, `before.norm`,
        `after.weight`, `output.norm`, `output.bias`. A quantised matrix is two or three arrays: see `Parameter`.
        """
        storage, (D, E) = self.storage(default), (self.d_model, self.num_experts)
        router = [matrix("router.weight", storage.router_weight_layout, ("d_model", D), ("experts", E))]
        if self.router_bias:
            router.append(Parameter("router.bias", (E,), "bias", 0, ("experts",)))
        if self.correction_bias:
            router.append(Parameter("router.correction_bias", (E,), "buffer", 0, ("experts",)))
        if self.router_norm is not None:
            router.append(Parameter("router.norm", (D,), "factor", 0, ("d_model",), fill=1))
        if self.token_table:
            router.append(table("router.table", self.token_table, self.top_k, E))
        if self.expert_scale:
            router.append(Parameter("router.expert_scale", (E,), "factor", 0, ("experts",), fill=1))
        experts = self._mlp("experts", storage, self.d_ff, (E,))
        if self.experts.scheme is not None:
            quantized = QuantizedSpec(self.experts.scheme.weights, storage.weight_layout)
            experts = [part for one in experts for part in quantized_parts(one, quantized)]
        if self.experts.bias:
            up = [("up_bias", "d_ff", self.d_ff)] if self._separate(storage) else []
            gate_up = ("gate_up_bias", "d_ff", self._gate_up_width(storage, self.d_ff))
            for name, axis, size in (gate_up, *up, ("down_bias", *self._expert_columns)):
                experts.append(Parameter(f"experts.{name}", (E, size), "bias", 0, ("experts", axis)))
        shared = []
        if self.shared_experts is not None:
            shared = self._mlp("shared_experts", storage, self.shared_experts.d_ff, ())
            if self.shared_experts.gate:
                shared.append(matrix("shared_experts.gate", storage.weight_layout, ("d_model", D), (None, 1)))
        return (*router, *experts, *shared, *self._around(storage))

    @property
    def _expert_columns(self) -> tuple[str | None, int]:
        return ("d_model" if self.latent is None else None, self.expert_width)

    def _around(self, storage: Storage) -> list[Parameter]:
        parameters, model, latent, output = [], ("d_model", self.d_model), self._expert_columns, self.output
        norms = {"before.norm": None if self.latent is None else (self.latent.norm, latent)}
        if self.latent is not None:
            parameters.append(matrix("before.weight", storage.weight_layout, model, latent))
            parameters.append(matrix("after.weight", storage.weight_layout, latent, model))
        if output is not None:
            norms["output.norm"] = (output.norm, latent if output.of_experts else model)
        for name, (norm, (axis, size)) in [(name, norm) for name, norm in norms.items() if norm is not None]:
            if norm is not None:
                parameters.append(Parameter(name, (size,), "factor", 0, (axis,), fill=0 if norm.centred else 1))
        if output is not None and output.bias:
            parameters.append(Parameter("output.bias", (self.d_model,), "bias", 0, ("d_model",)))
        return parameters

    def _separate(self, storage: Storage) -> bool:
        return self.gated and storage.gate_layout == "separate"

    def _gate_up_width(self, storage: Storage, d_ff: int) -> int:
        return 2 * d_ff if self.gated and not self._separate(storage) else d_ff

    def _mlp(self, prefix: str, storage: Storage, d_ff: int, lead: tuple[int, ...]) -> list[Parameter]:
        """Experts of width d_ff; lead: (E,) or ()."""
        layout = storage.weight_layout
        model = self._expert_columns if lead else ("d_model", self.d_model)
        names = ("gate_up", "up") if self._separate(storage) else ("gate_up",)
        width = self._gate_up_width(storage, d_ff)
        matrices = [matrix(f"{prefix}.{name}", layout, model, ("d_ff", width), lead) for name in names]
        return [*matrices, matrix(f"{prefix}.down", layout, ("d_ff", d_ff), model, lead)]
