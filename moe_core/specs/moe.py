"""Options of one whole MoE layer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from moe_core.base import WEIGHT_LAYOUTS, plan_type
from moe_core.base.checks import finite_float, require_choice, require_flags, require_kind, set_matmul_dtype
from moe_core.errors import InvalidInput
from moe_core.formats import Format
from moe_core.specs.matmul import Activation
from moe_core.specs.routing import LogitsSpec, RouterSpec, RowLimit
from moe_core.specs.tuning import MatmulTuning, Tuning


@plan_type
@dataclass(frozen=True)
class MoESpec:
    """Options of one whole MoE forward.

    Args:
        router: how logits become ids and weights. None: ids and weights are given.
        router_weight_layout: of the router matrix, `in_out` `[D, E]` or `out_in` `[E, D]`.
        apply_router_weight_on_input: weight x (in fp32, cast back) before matmul 1 instead of the slots after matmul 2.
            K must be 1.
        out_dtype: None: the dtype of x.
        logits_dtype: rounds the logits, which stay fp32 arrays, as checkpoints do.
        shared_activation: of the shared expert, gated and laid out as `activation`. None: the same.
        activations: the format that x and the hidden rows are quantised to before each product, or None
            (docs/user/quantization.md).
        recompute: the forward keeps no pre-activation, and the backward repeats matmul 1 with the same bits
            (docs/user/training.md).
        main_grad: torch only. The backward adds gradients of the matrices of experts and shared expert, in fp32, to
            their attribute `main_grad` and returns none for them.
        rows_in_order: each token has one expert, given by ascending ids with -1 after them, as `layout_of_runs` gives.
            The output is product 2's rows without a copy, and rows without an expert hold anything.
        lora_dropout: probability in [0, 1) with which adapters' factors A read zero instead of an element of their
            input, and the others are divided by 1 - lora_dropout. For training, with `LoRAFactors.seed`.
        row_limit: bounds the rows of given ids with many -1, as `route_rounded` makes them. See `RowLimit`; slots past
            it contribute zeros.
    """

    activation: Activation
    router: RouterSpec | None = None
    weight_layout: str = "in_out"
    router_weight_layout: str = "in_out"
    apply_router_weight_on_input: bool = False
    logits_dtype: str = "float32"
    out_dtype: str | None = None
    allow_tf32: bool = False
    tuning: Tuning | None = None
    recompute: bool = False
    main_grad: bool = False
    activations: Format | None = None
    fast_accumulate: bool = False
    shared_activation: Activation | None = None
    rows_in_order: bool = False
    row_limit: RowLimit | None = None
    lora_dropout: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "lora_dropout", finite_float("lora_dropout", self.lora_dropout))
        if not 0 <= self.lora_dropout < 1:
            raise InvalidInput(f"lora_dropout must be in [0, 1), got {self.lora_dropout}; pass a probability")
        require_kind("row_limit", self.row_limit, RowLimit, optional=True)
        if self.row_limit is not None and (self.router is not None or self.rows_in_order):
            name = "router" if self.router is not None else "rows_in_order"
            raise InvalidInput(
                f"{name} must be left out with row_limit, which is of given ids, got {getattr(self, name)}; leave one "
                "of the two out"
            )
        require_kind("activations", self.activations, Format, optional=True)
        require_flags(self, "fast_accumulate", "recompute", "main_grad", "apply_router_weight_on_input", "allow_tf32")
        require_flags(self, "rows_in_order")
        if self.rows_in_order and (self.router is not None or self.out_dtype is not None):
            name = "router" if self.router is not None else "out_dtype"
            raise InvalidInput(f"{name} must be None with rows_in_order, got {getattr(self, name)}; leave it out")
        if self.fast_accumulate and (self.activations is None or self.activations.element != "e4m3"):
            raise InvalidInput(
                f"fast_accumulate must be False unless activations are fp8, got True with {self.activations}; it is "
                "about products of fp8 with fp8"
            )
        require_kind("tuning", self.tuning, Tuning, optional=True)
        require_choice("weight_layout", self.weight_layout, WEIGHT_LAYOUTS)
        require_choice("router_weight_layout", self.router_weight_layout, WEIGHT_LAYOUTS)
        require_kind("activation", self.activation, Activation)
        require_kind("shared_activation", self.shared_activation, Activation, optional=True)
        if self.shared_activation is not None:
            layout, other = self.activation.gate_layout, self.shared_activation.gate_layout
            if layout != other:
                raise InvalidInput(
                    f"shared_activation must be gated and laid out as activation is, with gate_layout {layout!r}, got "
                    f"{other!r}; the shared expert's matrices are stored as the experts' are"
                )
            if self.shared_activation == self.activation:  # one spelling of each choice
                object.__setattr__(self, "shared_activation", None)
        require_kind("router", self.router, RouterSpec, optional=True)
        set_matmul_dtype(self, "logits_dtype")
        set_matmul_dtype(self, "out_dtype", optional=True)
        if self.router is not None:
            self.require_slots(self.router.require_top_k())

    def require_slots(self, top_k: int) -> None:
        """Raise InvalidInput for several slots of a token whose input is weighted."""
        if self.apply_router_weight_on_input and top_k != 1:
            raise InvalidInput(
                f"top_k must be 1 with apply_router_weight_on_input, got {top_k}; weight the output instead"
            )

    @property
    def batch_invariant(self) -> bool:
        """True if every sum has one order for any number of tokens."""
        return self.tuning is not None and self.tuning.batch_invariant

    def of_shared(self) -> MoESpec:
        if self.shared_activation is None:
            return self
        return dataclasses.replace(self, activation=self.shared_activation, shared_activation=None)

    def with_gate_layout(self, gate_layout: str) -> MoESpec:
        activation, shared = self.activation, self.shared_activation
        return dataclasses.replace(
            self,
            activation=dataclasses.replace(activation, gate_layout=gate_layout),
            shared_activation=shared and dataclasses.replace(shared, gate_layout=gate_layout),
        )

    def logits_spec(self) -> LogitsSpec:
        tokens = None if self.tuning is None else self.tuning.expected_tokens
        return LogitsSpec(self.router_weight_layout, self.logits_dtype, self.allow_tf32, self.batch_invariant, tokens)

    def shared_gate_spec(self) -> LogitsSpec:
        return dataclasses.replace(self.logits_spec(), weight_layout=self.weight_layout, logits_dtype="float32")

    def matmul_tuning(self, number: int | None = None) -> MatmulTuning | None:
        """Of the experts' product 1 or 2, or (None) the shared expert's."""
        return None if self.tuning is None else self.tuning.of_product(number)
