"""A Mixture-of-Experts layer as a torch module."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedSpec
from moe_core.layers import LayerWeights, MoEAux, convert_weights
from moe_core.layers.spec import HUGGING_FACE, ExpertsSpec, MoELayerSpec, SharedExpertsSpec
from moe_core.layers.weights import warn_left_out
from moe_core.specs.operands import RouterWeights
from moe_core.specs.routing import RouterSpec
from moe_torch.bridge.operator import Operator, call
from moe_torch.bridge.options import encode, require_instance
from moe_torch.bridge.private import any_autocast
from moe_torch.layers.around import OutputParameters, ProjectionParameters
from moe_torch.layers.block_names import BlockArray
from moe_torch.layers.block_router import choose_as_block
from moe_torch.layers.blocks import act_as_block, block_weights
from moe_torch.layers.calls import held_arrays, output_of, rows_of, seen_output, tensors_of
from moe_torch.layers.casts import autocast, autocast_device, autocast_dtype
from moe_torch.layers.initial import initialize, load_own, require_dtype, share_out
from moe_torch.layers.lora.slots import adapters_of, run_with_adapters
from moe_torch.layers.losses import router_losses
from moe_torch.layers.parameters import (
    ExpertParameters,
    RouterParameters,
    SharedParameters,
    has_own_call,
    is_gathered,
    own_part,
)
from moe_torch.layers.plans import PlannedLayer
from moe_torch.layers.routing import given_ids, like_x, mask_of_tokens, run_stages
from moe_torch.layers.weights import copy_weights, gathered, hold, placed_tensors, require_same_layer, unmerged
from moe_torch.operators import table as operators
from moe_torch.operators.table import MOE_QUANTIZED

_ANY_ROUTER, _SILU_EXPERTS = RouterSpec(), ExpertsSpec()
_OPERATOR, _QUANTIZED_OPERATOR = operators.MOE[RouterWeights], MOE_QUANTIZED[RouterWeights]
_PARTS = {"router": RouterParameters, "experts": ExpertParameters, "shared_experts": SharedParameters}
_PARTS |= {"before": ProjectionParameters, "after": ProjectionParameters, "output": OutputParameters}
#: Roles that the operator does not take.
_BESIDE = ("factor", "table")
#: The operator's names for parts; it takes arrays by position.
_PREFIXES = {"router": "routing", "experts": "experts", "shared_experts": "shared"}


def _place(operator: Operator, part: str, *path: str) -> tuple[Any, ...]:
    name = ".".join((_PREFIXES[part], *path)).removesuffix(".values")
    return operator.names.index(name), part, *path


class MoE(PlannedLayer):
    """A router, E experts of which each token visits K, and shared experts if asked for: `y = layer(x)`.

    `MoE.from_spec(MoELayerSpec(...))` makes layers with other options. Differentiable by x and every parameter, with
    auxiliary losses.

    Parameters, by name in the state_dict, S being the width of the shared experts: `router.weight` `[E, D]`,
    `router.bias` `[E]`, buffer `router.correction_bias` fp32 `[E]`; `experts.gate_up` `[E, 2F, D]` gate rows first,
    `experts.down` `[E, D, F]`, `experts.gate_up_bias` `[E, 2F]`, `experts.down_bias` `[E, D]` (gate_layout `separate`:
    `experts.gate_up` and `experts.up` `[E, F, D]`, biases alike); `shared_experts.gate_up` `[2S, D]`,
    `shared_experts.down` `[D, S]`, `shared_experts.gate` `[1, D]`. `fully_shard` shards the layer, its parts, or a
    module around it.

    A layer is one operator. Its parts are called if hooks, adapters or fully_shard need it: `layer.router(x)`,
    `layer.experts(x, ids, weights)` and `layer.shared_experts(x)`.

    A quantised matrix (`ExpertsSpec(scheme=...)`) is two or three buffers, `experts.gate_up.values`, `.scales` and
    `.zero_points`, which keep their dtypes and start as zeros. It is frozen; x and other parameters are trained. If the
    scheme also quantises activations, gradients raise Unsupported.

    Args:
        d_model, d_ff, num_experts, top_k: D, F per expert after gating, E and K.
        router: makes ids and weights from logits. Its top_k may be left out.
        device: of the parameters; `meta` needs `to_empty`, and then weights or `reset_parameters`.
        dtype: bfloat16, float16 or float32, and on a CPU float64, to check gradients.
        expert_parallel: a DeviceMesh of one axis, or a `moe_torch.parallel.ExpertParallel`.

    Raises InvalidInput for options that contradict each other.
    """

    router: RouterParameters
    experts: ExpertParameters
    shared_experts: SharedParameters | None
    before: ProjectionParameters | None
    after: ProjectionParameters | None
    output: OutputParameters | None
    #: Parameters that `from_block` had to copy, and its block's names for a state_dict; () leaves the layer's.
    copied: tuple[str, ...] = ()
    block_arrays: tuple[BlockArray, ...] = ()
    #: In training, x is multiplied by uniform numbers from 1 - input_noise to 1 + input_noise.
    input_noise: float = 0.0
    #: Counts forwards in train mode: `moe_torch.monitor`.
    watch: Any = None

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        top_k: int,
        *,
        router: RouterSpec = _ANY_ROUTER,
        experts: ExpertsSpec = _SILU_EXPERTS,
        shared_experts: SharedExpertsSpec | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        expert_parallel: Any = None,
    ) -> None:
        super().__init__()
        spec = MoELayerSpec(d_model, d_ff, num_experts, top_k, router, experts, shared_experts)
        self._build(spec, device, dtype, expert_parallel)

    @classmethod
    def from_spec(
        cls,
        spec: MoELayerSpec,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        expert_parallel: Any = None,
    ) -> MoE:
        """Return the layer of `spec`, with initialised parameters."""
        require_instance("spec", spec, MoELayerSpec)
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        layer._build(spec, device, dtype, expert_parallel)
        return layer

    @classmethod
    def from_weights(
        cls, weights: LayerWeights, *, device: Any = None, copy: bool = True, expert_parallel: Any = None
    ) -> MoE:
        """Return a layer with copies of weights, in their dtypes and storage (the router's weight becomes `[E, D]`).

        copy=False: on a CPU the layer shares the memory of writable arrays. expert_parallel: see `MoE`; a rank copies
        only its own part.
        """
        require_instance("weights", weights, LayerWeights)
        layer = cls.from_spec(weights.layer_spec(), device="meta", dtype=torch.float32)
        if expert_parallel is not None:
            return load_own(layer, weights, expert_parallel, device, copy)
        hold(layer, placed_tensors(convert_weights(weights, layer.storage), device, copy))
        return layer

    @classmethod
    def from_block(cls, block: torch.nn.Module, config: Any = None, *, block_router: bool = False) -> MoE:
        """Return a layer on the weights of a live MoE block of a Hugging Face model, such as
        `model.model.layers[0].mlp`.

        Its parameters are the block's tensors and train with it, except those named in `copied`, stored in another way:
        gate and up of shared experts, all matrices of shared experts with `in_out` experts, DBRX's experts, a table of
        ids, and a correction bias that is not float32. The layer returns y, and its logits to transformers'
        `output_router_logits`. A model's state_dict has the block's names and shapes, which the layer loads, too, so
        that files of the model load without us. `layer.state_dict()` alone has the layer's names. In training, x gets
        the block's noise (`router_jitter_noise`), and a block with SparseMixer, which draws experts, raises
        Unsupported.

        block: of a family with a preset (`layer_spec_from_config`). config: the model's, for a block that does not keep
        it. block_router: the block's router chooses the experts, with its own rounding and ties of half-precision
        logits, and the layer weights them, at the cost of a second product. Raises InvalidInput for no block of that
        config, and Unsupported for a family without a preset, an unknown part, or a router that returns no ids.
        """
        weights = block_weights(block, config)
        layer = cls.from_spec(weights.spec, device="meta", dtype=torch.float32)
        hold(layer, weights.tensors.items())
        act_as_block(layer, weights)
        if block_router:
            choose_as_block(layer, block, weights.arrays)
        return layer.train(block.training)

    def _build(self, spec: MoELayerSpec, device: Any, dtype: torch.dtype | None, expert_parallel: Any = None) -> None:
        require_dtype(dtype)
        # Experts on several ranks get no memory before each rank knows its own.
        at_first = device if expert_parallel is None else "meta"
        self.spec, self.storage = spec, spec.storage(HUGGING_FACE)
        parameters, scheme = spec.parameters(HUGGING_FACE), spec.experts.scheme
        quantized = None if scheme is None else QuantizedSpec(scheme.weights, self.storage.weight_layout)
        trained = scheme is None or scheme.activations is None  # quantised rows have no gradient
        for part, group in _PARTS.items():
            of_part = [parameter for parameter in parameters if parameter.name.startswith(f"{part}.")]
            present = of_part or getattr(spec, part, None) is not None
            setattr(self, part, group(of_part, at_first, dtype, quantized, trained=trained) if present else None)
        self.lora: Any = None  # no module, so that a state_dict with adapters is not one of this layer
        self._part_names = tuple(part for part in _PARTS if getattr(self, part) is not None)
        self._is_quantized = quantized is not None
        # Factors are applied between the stages, and other parts around the operator.
        names = [parameter.name.split(".") for parameter in parameters if parameter.role not in _BESIDE]
        places = [_place(self._operator, *name) for name in names if name[0] in _PREFIXES]
        self._places = tuple(entry for entry in places if len(entry) == 3)
        self._deep_places = tuple(entry for entry in places if len(entry) == 4)
        self._held, self._held_places = held_arrays(self._modules, places)
        # The token mask's argument, and the array with the dtype that x must have.
        like = "experts.gate_up"
        if quantized is not None:
            like = "routing.weight" if self.shared_experts is None else "shared.gate_up"
        names = self._operator.names
        self._count = len(names)
        self._mask_place, self._like_place = names.index("token_mask"), names.index(like)
        self._set_options()
        if expert_parallel is not None:
            share_out(self, expert_parallel, device)
        self.reset_parameters()

    def _set_options(self) -> None:
        """Encode the options once, so that a forward hashes no spec."""
        self.moe_spec, formats = self.spec.moe_spec(HUGGING_FACE), ()
        parts = self._parts()
        for part in parts.values():
            part.spec, part.layer_spec = self.moe_spec, self.spec
        if self._is_quantized:
            experts = parts["experts"]
            matrices = experts.gate_up, experts.down, experts.up
            formats = (tuple(None if matrix is None else matrix.spec for matrix in matrices),)
        self._options = encode(self.moe_spec, *formats)
        key = f"{self._options} {self._held}"
        # Autocast may cast the same tensors.
        self._key, self._cast_key = key, f"autocast {key}"
        beyond = self.lora is not None and self.lora.options.beyond_experts
        self._in_stages, self._rounds = self.spec.in_stages or beyond, self.spec.token_rounding is not None

    @property
    def _operator(self) -> Operator:
        return _QUANTIZED_OPERATOR if self._is_quantized else _OPERATOR

    def reset_parameters(self) -> None:
        """Draw weights from a normal distribution with standard deviation fan_in ** -0.5.

        Norms and scales are one. Biases, the correction bias and quantised matrices are zero. A table of ids has all
        experts in turn. Ranks that share experts get the values of one process with the same seed. Adapters start anew.
        """
        with torch.no_grad(), self.published() as tensors:
            initialize(self.spec, tensors)
        if self.lora is not None:
            self.lora.reset_parameters()

    def forward(
        self,
        x: torch.Tensor,
        token_mask: torch.Tensor | None = None,
        *,
        gate_inputs: torch.Tensor | None = None,
        expert_ids: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
        adapter_ids: torch.Tensor | None = None,
        return_aux: bool = False,
    ) -> Any:
        """Return y, of the shape and dtype of x `[..., D]`; with return_aux `(y, MoEAux)`.

        One operator runs, unless the layer is `in_stages` or gets gate_inputs, expert_ids or input_ids. Under
        `torch.autocast`, x, y, experts and shared experts have its dtype; router and quantised matrices keep theirs.

        Args:
            x: in the dtype of the experts' weights, or for quantised ones of the shared experts' or else the router's.
            token_mask: bool `[...]`. False tokens visit no routed expert and count in no statistic.
            gate_inputs: like x; the router scores it instead of x.
            expert_ids: integers `[..., K]`, distinct experts of each token, weighted by the router without correction
                bias. A token with an id outside [0, E) counts as masked.
            input_ids: integers `[...]`, token ids for a layer with a table of ids.
            adapter_ids: int32 `[...]` after `add_lora`, the slot of each token's adapter, -1 = none. None: slot 0 of 1.

        Raises InvalidInput for wrong shapes, dtypes and devices, and Unsupported for main_grad under autocast.
        """
        routed_by = gate_inputs is not None or expert_ids is not None or input_ids is not None
        key, tensors, watch = self._key, None, self.watch if self.training else None
        adapted = adapter_ids is not None or self._modules.get("lora") is not None
        if token_mask is None and not (routed_by or return_aux or watch or adapted) and self.output is None:
            tensors = tensors_of(self, x)
            if tensors is not None and not any_autocast():
                output = seen_output(key, tensors)
                if output is not None:
                    return output
        shared_out = self._modules["experts"].__dict__.get("exchange") is not None
        staged = shared_out or routed_by or self._runs_stages()
        arrays = self._arrays(self._parts() if staged else self._modules)
        dtype, d_model = arrays[self._like_place].dtype, self.spec.d_model
        if staged and is_gathered(self._modules["experts"]):
            # Its call compares x with experts.
            dtype = x.dtype
        if torch.is_autocast_enabled(autocast_device(arrays[self._like_place])):
            key, x, dtype = self._cast_key, self._autocast(x, arrays, staged), autocast_dtype(arrays[self._like_place])
            gate_inputs = gate_inputs if gate_inputs is None else gate_inputs.to(x.dtype)
            if tensors is not None:
                tensors = [x, *[arrays[position] for position in self._held_places[1:]]]
                if (output := seen_output(key, tensors)) is not None:
                    return output
        arrays[0] = rows_of(x, d_model, dtype)
        if token_mask is not None:
            arrays[self._mask_place] = mask_of_tokens(x, token_mask)
        if not (staged or return_aux or watch or adapted):
            return output_of(self, x, arrays, key, tensors)
        if adapted and not (routed_by or self._runs_stages()):
            results = run_with_adapters(self, arrays, x, adapter_ids)
            output, counts, invalid, ids, chosen, logits, overflow = results
        elif staged:
            scored = arrays[0] if gate_inputs is None else rows_of(like_x(gate_inputs, x), d_model, dtype)
            preset_ids = given_ids(self, x, expert_ids, input_ids)
            lora = adapters_of(self, x, adapter_ids) if adapted else None
            stage_results = run_stages(self, arrays[0], arrays[self._mask_place], scored, preset_ids, lora)
            output, ids, chosen, logits, counts, invalid, *_ = stage_results
            overflow = getattr(stage_results, "overflow", None)
        else:
            results, overflow = call(self._operator, (*arrays, self._options)), None
            output, counts, invalid, ids, chosen, logits = results
        output = output if self.output is None else self.output(output)
        y = output if x.dim() == 2 else output.view_as(x)
        if watch:
            watch(ids, counts, logits, arrays[self._mask_place], overflow)
        if not return_aux:
            return y
        balance, z = router_losses(logits, counts, arrays[self._mask_place], self.spec.router)
        return y, MoEAux(balance, z, counts, ids, chosen, invalid, logits, overflow)

    def _autocast(self, x: torch.Tensor, arrays: list[Any], staged: bool) -> torch.Tensor:
        if self.spec.main_grad:
            raise Unsupported(
                "main_grad must be False under torch.autocast, which multiplies copies of the matrices, got True; "
                "leave one of the two out, or convert the layer with .to(torch.bfloat16)"
            )
        for position, part, name in () if staged else self._places:  # parts cast their own
            if part != "router":
                arrays[position] = autocast(arrays[position], name)
        return autocast(x)

    def _runs_stages(self) -> bool:
        modules: Any = self._modules
        if any([has_own_call(modules[name]) for name in self._part_names]):
            return True
        return self._in_stages or (self._rounds and self.training)

    def _arrays(self, parts: Mapping[str, Any]) -> list[Any]:
        """The operator's arrays. A lookup in the module's dictionary takes a fifth of an attribute's time."""
        arrays = [None] * self._count
        for position, part, name in self._places:
            group: Any = parts[part]
            parameters = group._parameters
            arrays[position] = parameters[name] if name in parameters else getattr(group, name)
        for position, part, matrix, name in self._deep_places:
            arrays[position] = getattr(getattr(parts[part], matrix), name)
        return arrays

    def _parts(self) -> dict[str, Any]:
        """The layer's parts, without wrappers."""
        return {name: own_part(self._modules[name], name) for name in self._part_names}

    def _tensors(self) -> dict[str, torch.Tensor]:
        """In the order of `MoELayerSpec.parameters`."""
        parts = SimpleNamespace(**self._parts())
        return {parameter.name: attrgetter(parameter.name)(parts) for parameter in self.spec.parameters(HUGGING_FACE)}

    @torch.no_grad()
    def update_correction_bias(self, tokens_per_expert: torch.Tensor, rate: float) -> None:
        """Balance experts without a loss: b_i += rate * sign(mean(c) - c_i), in place, without gradients.

        tokens_per_expert int `[E]`: counts c of one or more steps, summed over data-parallel ranks by the caller. rate:
        DeepSeek-V3 trains with 0.001. Source: DeepSeek-V3 Technical Report, section 2.1.2.
        """
        bias = self._parts()["router"].correction_bias
        if bias is None:
            raise InvalidInput(
                "the layer must have a correction bias, got none; make it with MoELayerSpec(correction_bias=True)"
            )
        require_instance("tokens_per_expert", tokens_per_expert, torch.Tensor)
        if tokens_per_expert.shape != bias.shape:
            raise InvalidInput(
                f"tokens_per_expert must be [num_experts] = {tuple(bias.shape)}, got {tuple(tokens_per_expert.shape)}; "
                "pass MoEAux.tokens_per_expert"
            )
        counts = tokens_per_expert.to(torch.int64)  # an expert at the mean gets exactly no step
        bias.add_(torch.sign(counts.sum() - counts * counts.shape[0]).to(bias.dtype), alpha=rate)

    def load_weights(self, weights: LayerWeights) -> None:
        """Copy canonical weights in, from any storage; dtypes must be equal, or widen to float32.

        Raises InvalidInput if the weights are of another layer or would be rounded, or the layer is on `meta`, and
        Unsupported for sharded parameters, or another gate_layout of quantised ones.
        """
        require_instance("weights", weights, LayerWeights)
        require_same_layer(self.spec, weights)
        with self.published() as tensors:
            copy_weights(weights, tensors, self.storage)

    def export_weights(self) -> LayerWeights:
        """Return canonical weights in the layer's storage, with shared memory on a CPU. A collective if sharded."""
        peft = {f"PEFT's adapters of {name}": unmerged(part) for name, part in self.named_children()}
        own = {"lora": bool(self.lora), "block_router": "block_router" in vars(self)}
        warn_left_out(**own, input_noise=self.input_noise, **peft)
        arrays = {name: gathered(name, one) for name, one in (self._tensors() | self.restored_tensors()).items()}
        return LayerWeights.from_named(arrays, self.spec, HUGGING_FACE)
