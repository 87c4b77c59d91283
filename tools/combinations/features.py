"""The features, their values, and the combinations that are refused."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from tools.combinations.cover import Cover, Row
from tools.fuzz.case import TARGETS, Case

Value = tuple[str, str]
#: Sizes of every layer: those of the formats, and one tile of token rounding.
SIZES: dict[str, Any] = {"kind": "layer", "T": 20, "K": 2, "E": 8, "D": 32, "F": 32, "source": "x", "gradient": True}
SIZES |= {"weight_layout": "out_in", "router_layout": "out_in"}
#: Fields of a layer or its call: name -> value -> fields of the case. The first value is the plain one.
FIELDS: dict[str, dict[str, dict[str, Any]]] = {
    "dtype": {name: {"dtype": name} for name in ("float32", "bfloat16", "float16", "float64")},
    "format": {
        "none": {},
        "mxfp4": {"weights": "mxfp4"},
        "int4 zero points": {"weights": "int4_g32_zp"},
        "fp8 blocks": {"weights": "fp8_block"},
    },
    "quantised activations": {
        "none": {},
        "fp8": {"weights": "fp8_channel", "activations": "fp8_token"},
        "int8": {"weights": "int8_channel", "activations": "int8_token"},
        "mxfp8": {"weights": "mxfp4", "activations": "mxfp8"},
    },
    "storage": {
        "halves": {},
        "interleaved": {"gate_layout": "interleaved", "activation": "swiglu_oai"},
        "separate": {"gate_layout": "separate", "weight_layout": "in_out", "router_layout": "in_out"},
        "ungated": {"gated": False, "activation": "relu2"},
    },
    "shared experts": {
        "none": {},
        "plain": {"shared": 32},
        "gated": {"shared": 32, "shared_gate": True, "shared_activation": "gelu"},
    },
    "latent": {"none": {}, "plain": {"latent": 32}, "norm": {"latent": 32, "latent_norm": True}},
    "norms": {
        "none": {},
        "router": {"router_norm": 0.25},
        "output": {"out_norm": "sum", "out_scale": 0.5, "out_bias": True},
        "each expert": {"out_norm": "experts"},
    },
    "biases": {"none": {}, "experts": {"bias": True}, "router": {"router_bias": True}},
    "capacity": {"none": {}, "1.0": {"capacity": 1.0}},
    "rounding": {"none": {}, "nearest": {"tile": 16, "rounding": "nearest", "T": 60}},
    "mask": {"none": {}, "some": {"masked": True}},
    "groups": {"none": {}, "2 of 4": {"num_groups": 4, "topk_group": 2}},
    "bias on scores": {
        "none": {},
        "scores": {"correction_bias": True},
        "logits": {"correction_bias": True, "bias_on": "logits"},
    },
    "scoring": {
        "softmax": {},
        "softmax of the chosen": {"order": "topk_then_softmax"},
        "sigmoid": {"scoring": "sigmoid", "renormalize": True, "scale": 2.5},
    },
    "router's input": {
        "x": {},
        "gate_inputs": {"gate_inputs": True},
        "expert_ids": {"given_ids": True},
        "token table": {"table": 17},
        "sparse_mixer": {"mixer": 0.2},
    },
    "expert_scale": {"none": {}, "on": {"expert_scale": True}},
    "weight on input": {"none": {}, "on": {"on_input": True, "K": 1}},
    "expert_map": {"none": {}, "on": {"kind": "moe", "mapped": 12}},
    "batch_invariant": {"none": {}, "on": {"batch_invariant": True}},
    "losses": {"none": {}, "on": {"balance": 0.5, "z": 0.25}},
    "recompute": {"none": {}, "on": {"recompute": True}},
    "main_grad": {"none": {}, "on": {"main_grad": True}},
    "LoRA": {
        "none": {},
        "three slots": {"adapters": 3},
        "router": {"adapters": 3, "targets": "router"},
        "shared experts": {"adapters": 3, "targets": "shared_gate_up,shared_down"},
        "every target": {"adapters": 3, "targets": ",".join(TARGETS)},
    },
}  # fmt: skip
#: How torch's layers are called, from the inside out.
TORCH_WAYS: dict[str, tuple[str, ...]] = {
    "PEFT": ("none", "LoRA"),
    "hooks": ("none", "on parts"),
    "checkpointing": ("none", "on"),
    "functional_call": ("none", "on"),
    "compile": ("none", "on"),
    "export": ("none", "on"),
    "autocast": ("none", "bfloat16", "float16"),
    "trace": ("none", "capture", "replay", "replay ids"),
}
JAX_FIELDS: dict[str, dict[str, dict[str, Any]]] = {"qwix": {"none": {}, "int8 rows": {"weights": "int8_row"}}}
JAX_WAYS: dict[str, tuple[str, ...]] = {
    "layer": ("functional", "nnx", "linen"),
    "stack": ("none", "layer_index", "scan"),
    "remat": ("none", "on", "saved names"),
    "vmap": ("none", "on"),
    "shard_map": ("none", "data"),
    "mesh": ("none", "Auto", "Explicit"),
    "expert_axis": ("none", "4 devices"),
    "jit": ("on", "none"),
    "export": ("none", "on"),
    **{name: tuple(values) for name, values in JAX_FIELDS.items()},
    "trace": ("none", "capture", "replay", "replay ids"),
}
RANK_WAYS: dict[str, tuple[str, ...]] = {
    "parallel": ("none", "DDP", "FSDP2", "experts", "tensor"),
    **{name: TORCH_WAYS[name] for name in ("hooks", "checkpointing", "compile", "trace")},
    "autocast": ("none", "bfloat16"),
}
#: Blocks of models of transformers, each with the fields that its family has.
MODEL_WAYS: dict[str, tuple[str, ...]] = {
    "family": (
        "mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "llama4", "nemotron_h", "phimoe", "deepseek_v4", "gemma4",
    ),
    "by": ("use", "from_block", "block_router"),
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "option of use": ("none", "recompute", "batch_invariant", "main_grad"),
    "mask": ("none", "some"),
    "router logits": ("none", "recorded"),
    **{name: values for name, values in TORCH_WAYS.items()},
}  # fmt: skip
GRAPH_WAYS: dict[str, tuple[str, ...]] = {
    **{name: TORCH_WAYS[name] for name in ("PEFT", "hooks", "functional_call", "autocast", "trace")},
    "graphs": ("on",),
}
#: What runs in one process on a CPU, what needs two ranks, and what needs a GPU.
MODELS, RANKS, GRAPHS = "models", "ranks", "graphs"
WAYS = {"torch": TORCH_WAYS, "jax": JAX_WAYS, MODELS: MODEL_WAYS}
#: What one process has already shown.
_NOT_ON_RANKS = ("expert_map", "losses")
#: (values, what the error says), each of both frameworks or of one.
Refused = tuple[str, str]
_QUANTISED = "a scheme that quantises activations must be left out"
_CHECKPOINTS = "a compiled program with checkpoints replays a trace with weights"
#: Values of LoRA with adapters of experts, and of shared experts.
_OF_EXPERTS, _OF_SHARED = ("three slots", "every target"), ("shared experts", "every target")
_MIXER = r"router must be RouterSpec\(2\) with a sparse_mixer"
REFUSED: dict[str, list[Refused]] = {
    "": [
        ("dtype=float64, format=*", "float64 is not there beside quantised weights"),
        ("dtype=float64, quantised activations=*", "float64 is not there beside quantised weights"),
        ("quantised activations=*, norms=each expert", f"{_QUANTISED} beside a norm of each expert's result"),
        ("quantised activations=*, rounding=*", f"{_QUANTISED} with token_rounding"),
        ("quantised activations=*, recompute=*", "recompute must be False with the scheme"),
        ("latent=*, rounding=*", "token_rounding is not there for a layer with latent"),
        ("latent=*, weight on input=*", "apply_router_weight_on_input must be left out beside a latent width"),
        ("norms=each expert, rounding=*", "token_rounding is not there for a layer with a norm of each"),
        ("norms=each expert, weight on input=*", "apply_router_weight_on_input must be left out beside a norm of each"),
        ("norms=each expert, recompute=*", "recompute must be left out beside a norm of each expert's result"),
        ("capacity=*, rounding=*", "capacity_factor must be left out with token_rounding"),
        ("capacity=*, batch_invariant=*", "capacity_factor must be None with batch_invariant"),
        ("rounding=*, router's input=expert_ids", "expert_ids must be None for a layer with token_rounding"),
        ("rounding=*, router's input=token table", "token_table must be left out with token_rounding"),
        ("rounding=*, router's input=sparse_mixer", "sparse_mixer must be left out with token_rounding"),
        ("rounding=*, weight on input=*", "apply_router_weight_on_input must be left out with token_rounding"),
        ("rounding=*, batch_invariant=*", "batch_invariant must be left out with token_rounding"),
        ("rounding=*, groups=*, scoring=softmax of the chosen", "token rounding takes .* without groups"),
        ("rounding=*, trace=replay ids", "token_rounding needs a trace with weights"),
        ("groups=*, router's input=sparse_mixer", _MIXER),
        *((f"LoRA={targets}, quantised activations=*", "must be None for experts with quantised|must be None with lora")
          for targets in _OF_EXPERTS),
        *((f"LoRA={targets}, norms=each expert", "take no adapters") for targets in _OF_EXPERTS),
        ("bias on scores=*, router's input=sparse_mixer", _MIXER),
        ("scoring=*, router's input=sparse_mixer", _MIXER),
        ("weight on input=*, router's input=sparse_mixer", _MIXER),
    ],
    "torch": [
        ("dtype=float64, main_grad=*", "main_grad is not there in float64"),
        ("format=*, shared experts=none, main_grad=*", "main_grad must be False with the scheme"),
        ("quantised activations=*, main_grad=*", "main_grad must be False with the scheme"),
        ("latent=*, main_grad=*", "main_grad must be left out beside a latent width"),
        ("norms=each expert, main_grad=*", "main_grad must be left out beside a norm of each expert's result"),
        ("main_grad=*, PEFT=*", "main_grad"),
        ("checkpointing=*, compile=*, trace=replay ids", _CHECKPOINTS),
        ("main_grad=*, compile=*", "main_grad=True adds to buffers in place"),
        ("main_grad=*, export=*", "main_grad=True adds to buffers in place"),
        ("main_grad=*, autocast=*", "main_grad must be False under torch.autocast"),
        ("shared experts=*, hooks=*, main_grad=*", "layer.shared_experts must be without hooks, wrappers and adapters"),
        *((f"LoRA={targets}, main_grad=*", "and adapters where main_grad|main_grad must be False with adapters")
          for targets in _OF_SHARED),
        ("LoRA=router, expert_map=on, main_grad=*", "spec.main_grad must be False with adapters beyond experts"),
        *((f"LoRA={targets}, PEFT=*", "must have no hooks and wrappers") for targets in ("router", *_OF_EXPERTS)),
        *((f"LoRA={targets}, hooks=*", "with adapters must have no hooks and") for targets in ("router", *_OF_EXPERTS)),
        ("PEFT=*, export=*", "down"),  # a KeyError of PEFT's, whose parametrisations cannot be exported
    ],
    "ranks": [
        ("parallel=FSDP2, main_grad=*", "must have the attribute main_grad"),
        ("parallel=experts, dtype=float64", "float64 is not there for experts on several ranks"),
        ("parallel=tensor, dtype=float64", "float64 is not there for experts on several ranks"),
        ("parallel=experts, norms=each expert", "a norm of each expert's result cannot be had across ranks"),
        ("parallel=tensor, norms=each expert", "a norm of each expert's result cannot be had across ranks"),
        ("parallel=experts, rounding=*", "token_rounding is not there for"),
        ("parallel=tensor, rounding=*", "token_rounding is not there for"),
        ("parallel=experts, weight on input=*", "apply_router_weight_on_input cannot be had across ranks"),
        ("parallel=tensor, weight on input=*", "apply_router_weight_on_input cannot be had across ranks"),
        ("parallel=experts, main_grad=*", "main_grad cannot be had across ranks"),
        ("parallel=tensor, main_grad=*", "main_grad cannot be had across ranks"),
        ("parallel=tensor, format=fp8 blocks", "tensor must leave whole groups of 128"),
        ("parallel=DDP, format=fp8 blocks", "Invalid scalar type"),  # of gloo, which broadcasts no fp8
    ],
    "jax": [
        ("main_grad=*", "main_grad must be False in JAX"),
        ("expert_axis=*, weight on input=*", "apply_router_weight_on_input"),
        ("expert_axis=*, norms=each expert", "norm of each expert's result"),
        ("expert_axis=*, trace=*", "a shard_map .an expert_axis or a mesh opens one"),
        # A layer is split over an Explicit mesh, the op is not.
        ("mesh=Explicit, shard_map=none, expert_map=none, trace=*", "a shard_map .an expert_axis or a mesh opens one"),
        ("expert_axis=*, dtype=float64", "float64 is not there for experts on several ranks"),
        ("expert_axis=*, rounding=*", "token_rounding is not there for"),
        ("layer=linen, qwix=*", r"layer\.quantize_experts\(variables"),
        *((f"stack=*, LoRA={targets}", "lora must be None for a stack|experts.layer_index must be None with lora")
          for targets in _OF_EXPERTS),
        *((f"stack=*, expert_map=none, LoRA={targets}", "lora must be None for a stack")
          for targets in ("router", "shared experts")),
        ("dtype=float64, qwix=*", "x's dtype must be one of bfloat16, float16, float32, got 'float64'"),
    ],
    "graphs": [("trace=*", "captured into a CUDA graph")],
    "models": [
        ("family=llama4, by=use", "transformers computes it outside of its experts interface"),
        ("family=llama4, option of use=*", "transformers computes it outside of its experts interface"),
        ("family=llama4, by=block_router", "block_router must be False for Llama4Router"),
        ("family=phimoe, by=block_router", "block_router must be False for a block with a sparse mixer"),
        ("family=deepseek_v4, by=block_router", "block_router must be False for a block with a table of ids"),
        *((f"family={name}, by=use, trace=replay ids", "a trace of ids alone needs the logits of each layer")
          for name in ("phimoe", "deepseek_v4")),
        ("by=use, checkpointing=*, compile=*, trace=replay ids", _CHECKPOINTS),
        ("by=from_block, checkpointing=*, compile=*, trace=replay ids", _CHECKPOINTS),
        ("by=from_block, checkpointing=*, compile=*, autocast=*, trace=replay", _CHECKPOINTS),
        ("dtype=float64, option of use=main_grad", "main_grad is not there in float64"),
        ("option of use=main_grad, PEFT=*", "main_grad"),
        ("option of use=main_grad, export=*", "main_grad=True adds to buffers in place"),
        ("option of use=main_grad, autocast=*", "main_grad must be False where autocast casts the weights"),
    ],
}  # fmt: skip
#: (values, why there is no such layer or call): two values of one choice.
_OF_LAYERS = "the op has no such option: it is of layers, which have no map"
APART: dict[str, list[Refused]] = {
    "": [
        ("format=*, quantised activations=*", "a layer has one scheme"),
        *((f"LoRA={targets}, shared experts=none", "adapters need what they are of") for targets in _OF_SHARED),
        *((f"expert_map=on, {name}", _OF_LAYERS) for name in (
            "latent=*", "norms=*", "capacity=*", "rounding=*", "router's input=*", "expert_scale=*", "losses=*",
        )),
    ],
    "torch": [
        *((f"expert_map=on, {name}=*", _OF_LAYERS) for name in ("PEFT", "hooks", "functional_call")),
        ("functional_call=*, export=*", "an exported program has its own parameters"),
    ],
    "ranks": [
        ("parallel=DDP, main_grad=*", "DDP sees `.grad` alone: add up `main_grad` over ranks yourself"),
        ("parallel=DDP, quantised activations=*", "nothing is trained"),
    ],
    "models": [
        ("by=use, mask=*", "a model gives its experts no mask"),
        ("option of use=*, mask=*", "a model gives its experts no mask"),
        ("by=from_block, option of use=*", "a layer of a block has the options of its config"),
        ("by=block_router, option of use=*", "a layer of a block has the options of its config"),
        ("functional_call=*, export=*", "an exported program has its own parameters"),
    ],
    "jax": [
        *((f"expert_map=on, {name}", _OF_LAYERS) for name in ("layer=*", "expert_axis=*", "qwix=*")),
        *((f"{name}=*, qwix=*", "a layer has one scheme") for name in ("format", "quantised activations")),
        ("layer=functional, qwix=*", "qwix takes modules"),
        ("export=*, jit=none", "a program is exported from jax.jit"),
        ("expert_axis=*, shard_map=*", "an expert axis opens a shard_map of its own"),
        ("expert_axis=*, jit=none", "not tried: JAX runs a shard_map outside of jax.jit operation by operation"),
        ("shard_map=*, jit=none", "not tried: JAX runs a shard_map outside of jax.jit operation by operation"),
    ],
}  # fmt: skip


def factors(framework: str) -> dict[str, tuple[str, ...]]:
    fields = {name: tuple(values) for name, values in FIELDS.items()}
    if framework == RANKS:
        return {name: values for name, values in fields.items() if name not in _NOT_ON_RANKS} | RANK_WAYS
    if framework == GRAPHS:
        return fields | {"dtype": fields["dtype"][:3]} | GRAPH_WAYS
    return MODEL_WAYS if framework == MODELS else fields | WAYS[framework]


def case_of(row: Mapping[str, str], seed: int = 0) -> Case:
    """The layer of a row. Quantised activations have no gradient."""
    fields: dict[str, Any] = dict(SIZES) | {"seed": seed}
    for name, value in row.items():
        fields |= (FIELDS | JAX_FIELDS).get(name, {}).get(value, {})
    fields["gradient"] = not fields.get("activations")
    return Case(**fields)


def expanded(rules: list[Refused], framework: str) -> list[tuple[tuple[Value, ...], str]]:
    """(values, reason) of rules such as "dtype=float64, format=*": `*` is every value but the plain one. A rule of
    features that the framework lacks gives none."""
    every, found = factors(framework), []
    for text, reason in rules:
        choices = []
        for part in text.split(", "):
            name, _, pattern = part.partition("=")
            values = every.get(name, ())[1:] if pattern == "*" else every.get(name, ())
            fitting = [value for value in values if fnmatchcase(value, pattern)]
            choices.append([(name, value) for value in fitting])
        found += [(combination, reason) for combination in itertools.product(*choices)]
    return found


def refused(framework: str) -> list[tuple[tuple[Value, ...], str]]:
    return expanded(rules(REFUSED, framework), framework)


def apart(framework: str) -> list[tuple[tuple[Value, ...], str]]:
    return expanded(rules(APART, framework), framework)


def rules(table: dict[str, list[Refused]], framework: str) -> list[Refused]:
    """The rules of a table that a framework has features for."""
    names = ("", "torch", framework) if framework in (RANKS, GRAPHS) else ("", framework)
    every = [rule for name in names for rule in table.get(name, ())]
    return [rule for rule in every if expanded([rule], framework)]


def cover(framework: str) -> Cover:
    combinations = [values for values, _ in refused(framework) + apart(framework)]
    return Cover(factors(framework), combinations)


#: Seeds of the fewest rows, of the first 40.
SEEDS = {"torch": 3, "jax": 7, RANKS: 19, MODELS: 2, GRAPHS: 34}


def rows(framework: str, more: int = 0) -> list[Row]:
    """A covering array. more: the number of another one."""
    return cover(framework).rows(SEEDS[framework] + more)


def label(row: Row, framework: str) -> str:
    """What a row has beside plain values."""
    plain = {name: values[0] for name, values in factors(framework).items()}
    return ", ".join(f"{name}={value}" for name, value in row.items() if value != plain[name]) or "plain"
