"""The outside judge: layers of models that transformers built and saved, against transformers' own MoE blocks.

In float32 the whole layer is compared, router included. In bfloat16 transformers rounds logits and weights to the
model's dtype, which moves tokens to other experts: there its ids and weights are forced.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_core.checkpoint import Checkpoint, MoELayer, open_checkpoint
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.parity.tolerance import Tolerance, against_exact, assert_close, stage_tolerances
from moe_core.specs.operands import ExpertWeights, TopK, map_arrays
from tests.support.harness import engine_target

# Asked for by name: an import that fails because a dependency is missing must not look like an absent judge.
for _judge in ("torch", "transformers"):
    if find_spec(_judge) is None:
        pytest.skip(f"the judge needs {_judge}", allow_module_level=True)

import torch
import transformers

from tests.support import torch as torch_support
from tests.support.torch import to_numpy

T, D, F, E, K = 12, 32, 24, 8, 3
_COMMON = {
    "vocab_size": 16,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "num_experts_per_tok": K,
    "experts_implementation": "eager",
}
_DEEPSEEK = {
    "intermediate_size": 40,
    "moe_intermediate_size": F,
    "n_routed_experts": E,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
}


@dataclasses.dataclass(frozen=True)
class Judged:
    """A model of transformers: the names of its classes start with `classes`; settings beside the common ones."""

    classes: str
    settings: dict[str, Any]


MODELS = {
    "mixtral": Judged("Mixtral", {"intermediate_size": F, "num_local_experts": E}),
    "qwen3_moe": Judged(
        "Qwen3Moe", {"moe_intermediate_size": F, "num_experts": E, "norm_topk_prob": True, "head_dim": 16}
    ),
    "qwen3_moe_not_renormalised": Judged(
        "Qwen3Moe", {"moe_intermediate_size": F, "num_experts": E, "decoder_sparse_step": 2, "head_dim": 16}
    ),
    # A low limit, so that every clamp is met, and no default among the options.
    "gpt_oss": Judged(
        "GptOss",
        {"intermediate_size": F, "num_local_experts": E, "head_dim": 16, "swiglu_limit": 0.75, "swiglu_alpha": 1.5},
    ),
    "deepseek_v3": Judged("DeepseekV3", _DEEPSEEK | {"n_group": 4, "topk_group": 2}),
    "deepseek_v3_one_group": Judged(
        "DeepseekV3", _DEEPSEEK | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "hidden_act": "gelu"}
    ),
}
LAYER = 1
ENGINES = (engine_target().kind, "reference")


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """No advice about rope settings and no progress bars in the test log."""
    log = transformers.utils.logging
    verbosity = log.get_verbosity()
    log.set_verbosity_error()
    log.disable_progress_bar()
    yield
    log.set_verbosity(verbosity)
    log.enable_progress_bar()


def build(name: str, dtype: str) -> Any:
    """A model with random weights of a size that makes every part count, biases and correction bias included."""
    judged = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{judged.classes}Config")(**_COMMON | judged.settings)
    model = getattr(transformers, f"{judged.classes}ForCausalLM")(config).eval()
    block = model.model.layers[LAYER].mlp
    if judged.classes == "GptOss" and not hasattr(transformers.GptOssConfig(), "swiglu_limit"):
        # This transformers writes both settings into config.json, but holds the published models' values in its block.
        block.experts.alpha, block.experts.limit = config.swiglu_alpha, config.swiglu_limit
    with torch.no_grad():
        for parameter_name, parameter in block.named_parameters():
            # [E, D] and [E, in, out] or [E, out, in] alike end in axes of about the same length.
            size = 0.5 if parameter_name.endswith("bias") else 1.5 * parameter.shape[-1] ** -0.5
            parameter.normal_(std=size)
        for buffer in block.buffers():
            buffer.normal_(std=0.2)
    return model.to(getattr(torch, dtype))


def save(model: Any, path: Path, storage: str = "per_expert", shard_size: str = "1GB") -> Checkpoint:
    """Let transformers write the model; `per_expert` is the layout it was published in, `fused` transformers' own."""
    model.save_pretrained(path, save_original_format=storage == "per_expert", max_shard_size=shard_size)
    return open_checkpoint(path)


def hidden_states(dtype: str) -> Any:
    return torch.randn((T, D), generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What transformers' block gives: logits `[T, E]`, ids and weights `[T, K]` (any slot order), output `[T, D]`."""

    logits: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    output: np.ndarray


def judge(model: Any, x: Any) -> Verdict:
    """Run transformers' MoE block."""
    block = model.model.layers[LAYER].mlp
    with torch.no_grad():
        logits, weights, ids = (block.router if hasattr(block, "router") else block.gate)(x)
        output = block(x[None])
    output = output[0] if isinstance(output, tuple) else output
    return Verdict(to_numpy(logits), to_numpy(ids).astype(np.int32), to_numpy(weights), to_numpy(output)[0])


def tolerances(layer: MoELayer, routed_from: str) -> dict[str, Tolerance]:
    sizes = {"d_model": D, "d_ff": F, "top_k": K, "num_experts": E}
    return stage_tolerances(layer.spec, layer.dtype, **sizes, routed_from=routed_from)


def by_expert(ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slots ordered by expert: transformers does not order a token's slots in every family."""
    order = np.argsort(ids, axis=1)
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(weights, order, axis=1)


def assert_agrees(layer: MoELayer, verdict: Verdict, stages: dict[str, np.ndarray]) -> None:
    """A float32 forward from x agrees with transformers' in logits, ids, weights and output."""
    allowed = tolerances(layer, "x")
    assert_close(stages["logits"], verdict.logits, allowed["logits"], "logits")
    ids, weights = by_expert(stages["ids"], stages["weights"])
    expected_ids, expected_weights = by_expert(verdict.ids, verdict.weights)
    np.testing.assert_array_equal(ids, expected_ids)
    assert_close(weights, expected_weights, allowed["weights"], "weights")
    assert_close(stages["output"], verdict.output, allowed["output"], "output")


def reference(layer: MoELayer, x: Any) -> dict[str, np.ndarray]:
    return moe_stages(to_numpy(x), layer.experts, layer.router, layer.spec, shared=layer.shared)


@pytest.mark.parametrize("shard_size", ["1GB", "10KB"], ids=["one_file", "shards"])
@pytest.mark.parametrize("storage", ["per_expert", "fused"])
@pytest.mark.parametrize("name", MODELS)
def test_float32_layer_agrees(tmp_path, name, storage, shard_size):
    model = build(name, "float32")
    checkpoint = save(model, tmp_path, storage, shard_size)
    assert (len(set(checkpoint.index.files.values())) > 1) == (shard_size == "10KB")
    decoder_layers = model.model.layers
    assert checkpoint.moe_layers == tuple(n for n, one in enumerate(decoder_layers) if hasattr(one.mlp, "experts"))
    layer, x = checkpoint.layer(LAYER), hidden_states("float32")
    assert layer.dtype == "float32"
    assert_agrees(layer, judge(model, x), reference(layer, x))


@pytest.mark.parametrize("name", MODELS)
def test_both_storages_give_the_same_layer(tmp_path, name):
    model = build(name, "bfloat16")
    per_expert, fused = (save(model, tmp_path / storage, storage).layer(LAYER) for storage in ("per_expert", "fused"))
    assert per_expert.spec == fused.spec and per_expert.dtype == "bfloat16"
    for field in dataclasses.fields(ExpertWeights):
        one, other = getattr(per_expert.experts, field.name), getattr(fused.experts, field.name)
        assert (one is None) == (other is None)
        assert one is None or one.tobytes() == other.tobytes()


def forced(layer: MoELayer, verdict: Verdict) -> tuple[TopK, Tolerance]:
    """transformers' routing, and how far outputs may lie apart behind it.

    Only transformers rounds gate and up, the activation, its product with up, the weighted slot, each of the K sums
    and the sum with the shared experts: 5 + K roundings of one side, which add up like their square root.
    """
    roundings = math.ceil(math.sqrt(5 + K))
    allowed = against_exact(tolerances(layer, "ids")["output"], layer.dtype, roundings)
    return TopK(verdict.ids, verdict.weights.astype(np.float32)), allowed


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_layer_agrees_with_ids_and_weights_forced(tmp_path, name):
    model = build(name, "bfloat16")
    layer, x = save(model, tmp_path).layer(LAYER), hidden_states("bfloat16")
    verdict = judge(model, x)
    routing, allowed = forced(layer, verdict)
    stages = moe_stages(to_numpy(x), layer.experts, routing, layer.spec, shared=layer.shared)
    assert_close(stages["output"], verdict.output, allowed, "output")


def _in_torch(engine: str, call: Callable[..., Any]) -> dict[str, np.ndarray]:
    from moe_torch import ops

    with torch_support.running_on(engine) as device:
        return call(ops, lambda array: torch_support.to_torch(array, device), to_numpy)


def _in_jax(engine: str, call: Callable[..., Any]) -> dict[str, np.ndarray]:
    pytest.importorskip("jax", reason="the JAX front-end needs jax")
    from moe_jax import ops
    from tests.support import jax as jax_support

    with jax_support.running_on(engine):
        return call(ops, jax_support.to_jax, jax_support.to_numpy)


FRONT_ENDS = {"torch": _in_torch, "jax": _in_jax}


def forward(front_end: str, engine: str, layer: MoELayer, x: Any, routing: Any) -> dict[str, np.ndarray]:
    """One composed forward through a front-end on an engine of this machine; its outputs as named stages."""
    # Ids and weights that are given leave nothing for a router to decide.
    spec = dataclasses.replace(layer.spec, router=None) if isinstance(routing, TopK) else layer.spec

    def call(ops: Any, enter: Callable[..., Any], leave: Callable[..., np.ndarray]) -> dict[str, np.ndarray]:
        experts, routed = map_arrays(layer.experts, enter), map_arrays(routing, enter)
        shared = None if layer.shared is None else map_arrays(layer.shared, enter)
        result = ops.moe(enter(to_numpy(x)), experts, routed, spec, shared=shared)
        return {name: leave(value) for name, value in result._asdict().items() if value is not None}

    return FRONT_ENDS[front_end](engine, call)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", MODELS)
def test_front_ends_agree(tmp_path, name, front_end, engine):
    model = build(name, "float32")
    layer, x = save(model, tmp_path).layer(LAYER), hidden_states("float32")
    assert_agrees(layer, judge(model, x), forward(front_end, engine, layer, x, layer.router))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_front_ends_agree_in_bfloat16_with_ids_and_weights_forced(tmp_path, name, front_end, engine):
    model = build(name, "bfloat16")
    layer, x = save(model, tmp_path).layer(LAYER), hidden_states("bfloat16")
    verdict = judge(model, x)
    routing, allowed = forced(layer, verdict)
    assert_close(forward(front_end, engine, layer, x, routing)["output"], verdict.output, allowed, "output")


def _swap_halves(layer: MoELayer) -> MoELayer:
    swapped = np.roll(layer.experts.gate_up, F, axis=1)
    return dataclasses.replace(layer, experts=dataclasses.replace(layer.experts, gate_up=swapped))


def _move_experts(layer: MoELayer) -> MoELayer:
    moved = dataclasses.replace(layer.experts, down=np.roll(layer.experts.down, 1, axis=0))
    return dataclasses.replace(layer, experts=moved)


def _halves_for_interleaved(layer: MoELayer) -> MoELayer:
    activation = dataclasses.replace(layer.spec.activation, gate_layout="halves")
    return dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, activation=activation))


def _without_limit(layer: MoELayer) -> MoELayer:
    activation = dataclasses.replace(layer.spec.activation, limit=None)
    return dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, activation=activation))


def _without(bundle: str, field: str) -> Callable[[MoELayer], MoELayer]:
    def change(layer: MoELayer) -> MoELayer:
        changed = dataclasses.replace(getattr(layer, bundle), **{field: None})
        return dataclasses.replace(layer, **{bundle: changed})

    return change


def _router(**changes: Any) -> Callable[[MoELayer], MoELayer]:
    def change(layer: MoELayer) -> MoELayer:
        assert layer.spec.router is not None
        router = dataclasses.replace(layer.spec.router, **changes)
        return dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, router=router))

    return change


FAULTS: list[tuple[str, str, Callable[[MoELayer], MoELayer]]] = [
    ("mixtral", "gate and up swapped", _swap_halves),
    ("mixtral", "experts moved", _move_experts),
    ("mixtral", "not renormalised", _router(renormalize=False)),
    ("qwen3_moe_not_renormalised", "renormalised", _router(renormalize=True)),
    ("gpt_oss", "halves", _halves_for_interleaved),
    ("gpt_oss", "no limit", _without_limit),
    ("gpt_oss", "router bias lost", _without("router", "bias")),
    ("gpt_oss", "first bias lost", _without("experts", "gate_up_bias")),
    ("gpt_oss", "second bias lost", _without("experts", "down_bias")),
    ("gpt_oss", "softmax over all", _router(order="softmax_then_topk")),
    ("deepseek_v3", "correction bias lost", _without("router", "correction_bias")),
    ("deepseek_v3", "groups ignored", _router(num_groups=1, topk_group=1)),
    ("deepseek_v3", "scale lost", _router(scale=1.0)),
    ("deepseek_v3", "shared experts lost", lambda layer: dataclasses.replace(layer, shared=None)),
]


@pytest.mark.parametrize(("name", "fault", "change"), FAULTS, ids=[f"{name}-{fault}" for name, fault, _ in FAULTS])
def test_the_judge_sees_every_fault(tmp_path, name, fault, change):
    model = build(name, "float32")
    layer, x = save(model, tmp_path).layer(LAYER), hidden_states("float32")
    verdict = judge(model, x)
    with pytest.raises(AssertionError):
        assert_agrees(layer, verdict, reference(change(layer), x))


@pytest.mark.parametrize(
    ("name", "change"),
    [(name, change) for name, _, change in FAULTS if change in (_swap_halves, _halves_for_interleaved, _without_limit)],
)
def test_the_judge_sees_faults_in_bfloat16(tmp_path, name, change):
    model = build(name, "bfloat16")
    layer, x = save(model, tmp_path).layer(LAYER), hidden_states("bfloat16")
    verdict = judge(model, x)
    routing, allowed = forced(layer, verdict)
    wrong = change(layer)
    stages = moe_stages(to_numpy(x), wrong.experts, routing, wrong.spec, shared=wrong.shared)
    with pytest.raises(AssertionError, match="output: worst element"):
        assert_close(stages["output"], verdict.output, allowed, "output")
