"""Families: settings that describe MoE layers and names of their tensors. A new family is one `Family`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from moe_core.checkpoint.config import ModelConfig, named_settings
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers.around import LatentSpec, OutputSpec
from moe_core.layers.parameter import Parameter
from moe_core.layers.spec import ExpertsSpec, MoELayerSpec, SharedExpertsSpec, storage_of
from moe_core.specs import Activation, MoESpec, NormSpec, RouterSpec

_HIDDEN_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
_HIDDEN_ACTIVATIONS |= {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}

NO_BIAS = ("mlp_bias", False, "a bias of the shared experts")

Names = tuple[str, ...]


def mlp_names(module: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Names:
    return (f"{module}.{gate}.weight", f"{module}.{up}.weight", f"{module}.{down}.weight")


@dataclass(frozen=True)
class Naming:
    """Tensor names of one MoE layer.

    Each field holds alternatives: transformers' own name (as in `state_dict`) first, the published one last. Names are
    below `layers.<n>.<block>.`, or below `layers.<n>.` if they start with `/`.

    Args:
        blocks: the first name is empty if router and experts are children of the decoder layer.
        fused: (gate_up, down) or (gate, up, down) of all experts. Ungated experts have up instead of gate_up. Biases
            add `_bias`.
        per_expert: (gate, up, down) module names below `experts.<e>.`, without gate for ungated experts. None: only
            fused storage.
        shared: (gate, up, down), or (gate_up, down).
        prefixes: before `layers.` in files of a text model.
        nested_prefixes: likewise for a nested text model.
        turned: files may hold the transposes of `fused`, recognised by their shapes.
        interleaved: the published `fused` alternates rows of gate and up.
        bias_row: files hold the correction bias as `[1, E]`.
        flat: `fused` holds all experts' F rows as `[E * F, D]`, down too.
        norm, table, expert_scale: of the router.
        around: arrays around the experts, by the layer's names.
    """

    blocks: Names = ("mlp",)
    router: Names = ("gate.weight",)
    correction_bias: Names = ("gate.e_score_correction_bias",)
    fused: tuple[Names, ...] = (("experts.gate_up_proj", "experts.down_proj"),)
    per_expert: Names | None = ("gate_proj", "up_proj", "down_proj")
    shared: tuple[Names, ...] = (mlp_names("shared_experts"),)
    shared_gate: str = "shared_expert_gate.weight"
    prefixes: Names = ("model.",)
    nested_prefixes: Names = ("model.language_model.",)
    turned: bool = False
    interleaved: bool = False
    bias_row: bool = False
    flat: bool = False
    layers: str = "layers"
    norm: str = "router.scale"
    table: str = "gate.tid2eid"
    expert_scale: str = "router.per_expert_scale"
    around: Mapping[str, Names] = field(default_factory=dict)


@dataclass(frozen=True)
class Shared:
    """`copies` of `width`. A missing name means one copy of the experts' width."""

    copies: Names = ()
    width: Names = ()
    gate: bool = False

    def d_ff(self, config: ModelConfig, d_ff: int) -> int:
        """The width of all together; 0 = none."""
        width = config.integer(*self.width, least=0, null=0) if self.width else d_ff
        return width * (config.integer(*self.copies, least=0, null=0) if self.copies else 1)


class Layers(NamedTuple):
    """Layers with experts (ascending), and the deciding settings."""

    count: int
    moe: tuple[int, ...]
    rule: str


class Activations(NamedTuple):
    """Activations of experts and shared experts, without gate_layout."""

    experts: Activation
    shared: Activation


@dataclass(frozen=True)
class Family:
    """The MoE layers of a model_type.

    Args:
        alone: the names in files of a text model saved without the rest of its multimodal model. None: the same.
        hidden, width, experts: settings of d_model, d_ff and E.
        shared: None: no shared experts.
        correction_bias: True if there is one, or the setting that decides.
        shared_activation: None: the experts'.
        layer_activations: of layers that differ from the others.
        router_norm: of the rows that the router scores.
        expert_scale: the router's weights are multiplied by a parameter of each expert.
        tables: the layers with ids from a table of vocab_size rows, and without a correction bias.
        around: parts around the experts, fields of MoELayerSpec.
        weight_layout: of fused storage in files.
        requires: (setting, the supported value, the operation that another value needs). Absent and null settings are
            fine, except for `given`, where transformers' default is unsupported.
        part: the setting that holds the experts' settings.
        input_noise: the setting of `Architecture.input_noise`.
    """

    router: Callable[[ModelConfig], RouterSpec]
    layers: Callable[[ModelConfig], Layers]
    naming: Naming = Naming()
    alone: Naming | None = None
    hidden: Names = ("hidden_size",)
    width: Names = ("moe_intermediate_size",)
    experts: Names = ("num_experts", "num_local_experts", "n_routed_experts")
    activation: Callable[[ModelConfig], Activation] | None = None
    shared_activation: Callable[[ModelConfig], Activation] | None = None
    layer_activations: Callable[[ModelConfig], Mapping[int, Activations]] | None = None
    shared: Shared | None = None
    correction_bias: bool | str = False
    router_bias: bool = False
    router_norm: Callable[[ModelConfig], NormSpec] | None = None
    expert_scale: bool = False
    tables: Callable[[ModelConfig], tuple[int, ...]] | None = None
    around: Callable[[ModelConfig], Mapping[str, Any]] | None = None
    expert_bias: bool = False
    weight_layout: str = "out_in"
    router_weight_on_input: bool = False
    requires: tuple[tuple[str, object, str], ...] = ()
    given: Names = ()
    part: str | None = None
    input_noise: str | None = None


@dataclass(frozen=True)
class Architecture:
    """The MoE layers of one model.

    moe_layers: ascending; moe_layers_rule: the settings that decided it. d_ff: width of one expert after gating;
    shared_d_ff: of the shared experts together, 0 = none. spec: weights in the family's fused storage, which per-expert
    storage is stacked into. layer_activations: of layers that differ from `spec`. tables: see `Family`. input_noise: in
    training, the block multiplies what it takes by uniform numbers from 1 - input_noise to 1 + input_noise.
    lacks_shared: the files hold no shared expert although the settings have one.
    """

    num_layers: int
    moe_layers: tuple[int, ...]
    moe_layers_rule: str
    d_model: int
    d_ff: int
    num_experts: int
    shared_d_ff: int
    spec: MoESpec
    family: Family
    correction_bias: bool
    naming: Naming
    layer_activations: Mapping[int, Activations] = field(default_factory=dict)
    router_norm: NormSpec | None = None
    output: OutputSpec | None = None
    latent: LatentSpec | None = None
    tables: tuple[int, ...] = ()
    vocab_size: int = 0
    sparse_mixer: float | None = None
    input_noise: float = 0.0
    lacks_shared: bool = False

    def require_layer(self, layer: int) -> None:
        if layer not in self.moe_layers:
            raise InvalidInput(
                f"layer must be one with experts ({self.moe_layers_rule}), got {layer!r}; the model's are "
                f"{list(self.moe_layers)}"
            )

    @property
    def expert_width(self) -> int:
        """The columns of rows that experts take and give."""
        return self.d_model if self.latent is None else self.latent.width

    def around(self) -> tuple[Parameter, ...]:
        parameters = self.layer_spec(next(iter(self.moe_layers), 0)).parameters(storage_of(self.spec))
        return tuple(one for one in parameters if one.name.startswith(("before.", "after.", "output.")))

    def spec_of(self, layer: int) -> MoESpec:
        if layer not in self.layer_activations:
            return self.spec
        spec, (experts, shared) = self.spec, self.layer_activations[layer]
        layer_spec = replace(spec.with_gate_layout("halves"), activation=experts, shared_activation=None)
        layer_spec = replace(layer_spec, shared_activation=shared) if self.shared_d_ff else layer_spec
        return layer_spec.with_gate_layout(spec.activation.gate_layout or "halves")

    def layer_spec(self, layer: int | None = None) -> MoELayerSpec:
        """The layer in the framework's default storage.

        layer: None: any layer of a model with equal layers, tables of ids aside. Raises InvalidInput if they differ.
        """
        if layer is None:
            different = [n for n in self.moe_layers if self.spec_of(n) != self.spec_of(self.moe_layers[0])]
            if different:
                raise InvalidInput(
                    f"layer must be given for a model whose layers differ, got None; layers {different} have other "
                    f"activations than layer {self.moe_layers[0]}: pass the number of one"
                )
            layer = next(iter([n for n in self.moe_layers if n not in self.tables] or self.moe_layers), 0)
        spec, family = self.spec_of(layer), self.family
        activation, shared_activation, router = spec.activation, spec.shared_activation, spec.router
        assert router is not None
        if activation.gated:
            activation = replace(activation, gate_layout="halves")
            shared_activation = shared_activation and replace(shared_activation, gate_layout="halves")
        gate = family.shared is not None and family.shared.gate
        return MoELayerSpec(
            self.d_model,
            self.d_ff,
            self.num_experts,
            router.require_top_k(),
            router,
            ExpertsSpec(activation, bias=family.expert_bias),
            SharedExpertsSpec(self.shared_d_ff, gate, shared_activation) if self.shared_d_ff else None,
            family.router_bias,
            self.correction_bias and layer not in self.tables,
            family.router_weight_on_input,
            router_norm=self.router_norm,
            expert_scale=family.expert_scale,
            output=self.output,
            latent=self.latent,
            sparse_mixer=self.sparse_mixer,
            token_table=self.vocab_size if layer in self.tables else 0,
        )


def describe(family: Family, config: ModelConfig) -> Architecture:
    """The MoE layers of `config`.

    Raises InvalidInput for settings that are missing or disagree, Unsupported for variants that no layer computes.
    """
    layers = family.layers(config)
    if family.part is not None:
        config = config.with_part(family.part)
    for setting, supported, operation in family.requires:
        config.require(setting, supported, operation, given=setting in family.given)
    activation = (family.activation or hidden_activation())(config)
    d_model, d_ff = config.integer(*family.hidden), config.integer(*family.width)
    correction_bias = family.correction_bias
    if isinstance(correction_bias, str):
        correction_bias = config.boolean(correction_bias, default=True)
    naming = family.naming if config.nested else family.alone or family.naming
    shared_d_ff = 0 if family.shared is None else family.shared.d_ff(config, d_ff)
    with named_settings(config) as noted:
        router, num_experts = family.router(noted), noted.num_experts(*family.experts)
        router.validate_experts(num_experts, has_bias=correction_bias)
        spec = MoESpec(
            activation,
            router,
            family.weight_layout,
            router_weight_layout="out_in",
            apply_router_weight_on_input=family.router_weight_on_input,
            shared_activation=family.shared_activation(config) if family.shared_activation and shared_d_ff else None,
        )
    by_layer = {} if family.layer_activations is None else family.layer_activations(config)
    norm = None if family.router_norm is None else family.router_norm(config)
    around: dict[str, Any] = {} if family.around is None else dict(family.around(config))
    if family.input_noise is not None and config.settings.get(family.input_noise) is not None:
        around["input_noise"] = config.number(family.input_noise)
    if family.tables is not None and (tables := family.tables(config)):
        around |= {"tables": tables, "vocab_size": config.integer("vocab_size")}
    sizes = (d_model, d_ff, num_experts, shared_d_ff)
    return Architecture(*layers, *sizes, spec, family, correction_bias, naming, by_layer, norm, **around)


def hidden_activation(*settings: str, gated: bool = True) -> Callable[[ModelConfig], Activation]:
    def activation(config: ModelConfig) -> Activation:
        names = settings or ("hidden_act",)
        name = config.find(*names)
        if not isinstance(name, str) or name not in _HIDDEN_ACTIVATIONS:
            raise Unsupported(
                f"{names[0]} in config.json must be one of {', '.join(_HIDDEN_ACTIVATIONS)}, got {name!r}; "
                "this activation cannot be computed"
            )
        return Activation(_HIDDEN_ACTIVATIONS[name], gated=gated)

    return activation


def silu(config: ModelConfig) -> Activation:
    """Gated silu, whatever the settings say."""
    return Activation("silu")


def limited(config: ModelConfig) -> Activation:
    """The activation of hidden_act with both factors bounded by swiglu_limit."""
    return replace(hidden_activation()(config), limit=config.number("swiglu_limit"))


def limited_silu(config: ModelConfig) -> Activation:
    """Silu with both factors bounded by swiglu_limit, whatever hidden_act says."""
    return Activation("silu", limit=config.number("swiglu_limit"))


def swiglu_oai(gate_layout: str) -> Callable[[ModelConfig], Activation]:
    """gpt-oss's clamped SwiGLU, whatever hidden_act says."""

    def activation(config: ModelConfig) -> Activation:
        limit = config.settings.get("swiglu_limit", 7.0)
        limit = None if limit is None else config.number("swiglu_limit", default=7.0)
        alpha = config.number("swiglu_alpha", default=1.702)
        return Activation("swiglu_oai", gate_layout=gate_layout, alpha=alpha, limit=limit)

    return activation


def routing(
    scoring: str = "softmax",
    *,
    order: str | None = None,
    renormalize: bool | Names = True,
    scale: float | Names = 1.0,
    groups: tuple[Names, Names] | None = None,
    top_k: Names = ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"),
    **others: Any,
) -> Callable[[ModelConfig], RouterSpec]:
    """A router from constants or settings. groups: of num_groups and topk_group. others: of `RouterSpec`."""

    def router(config: ModelConfig) -> RouterSpec:
        num_groups, topk_group = (1, 1) if groups is None else (config.integer(*names, null=1) for names in groups)
        return RouterSpec(
            config.integer(*top_k),
            scoring,
            order,
            renormalize if isinstance(renormalize, bool) else config.boolean(*renormalize),
            config.number(*scale) if isinstance(scale, tuple) else scale,
            num_groups,
            topk_group,
            **others,
        )

    return router


def every_layer(config: ModelConfig, *settings: str) -> Layers:
    count = config.num_layers(*settings)
    return Layers(count, tuple(range(count)), "every layer")


def dense_first(dense: int | None = None, setting: str = "first_k_dense_replace") -> Callable[[ModelConfig], Layers]:
    """mlp_layer_types if given, else layers from `setting` (default: dense) on, at multiples of moe_layer_freq."""

    def layers(config: ModelConfig) -> Layers:
        count = config.num_layers()
        kinds = config.strings("mlp_layer_types")
        if kinds:
            moe = tuple(layer for layer in range(count) if kinds[layer : layer + 1] in (("sparse",), ("moe",)))
            return Layers(count, moe, "mlp_layer_types")
        first = config.integer(setting, least=0, null=0, default=dense)
        frequency = config.settings.get("moe_layer_freq")
        rule = f"{setting} = {first}, moe_layer_freq = {1 if frequency is None else frequency}"
        if isinstance(frequency, list):
            chosen = config.integers("moe_layer_freq")
            return Layers(count, tuple(layer for layer in range(first, count) if any(chosen[layer : layer + 1])), rule)
        step = config.integer("moe_layer_freq", null=1, default=1)
        return Layers(count, tuple(layer for layer in range(first, count) if layer % step == 0), rule)

    return layers


def sparse_step(config: ModelConfig) -> Layers:
    """Layer n has experts if (n + 1) is a multiple of decoder_sparse_step and n is not in mlp_only_layers."""
    count, dense = config.num_layers(), set(config.integers("mlp_only_layers"))
    step = config.integer("decoder_sparse_step", default=1)
    moe = tuple(layer for layer in range(count) if (layer + 1) % step == 0 and layer not in dense)
    return Layers(count, moe, f"decoder_sparse_step = {step}, mlp_only_layers = {sorted(dense)}")
