"""What is fuzzed: good files of every kind that the package reads, and the function of the package that reads each."""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from moe_core.checkpoint import convert_checkpoint, load_hidden_states, open_checkpoint, other_tensors
from moe_core.checkpoint.families import FAMILIES
from moe_core.checkpoint.presets import layer_spec_from_config
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import format_named
from moe_core.specs import tile_table
from moe_core.trace import LayerRouting, RoutingTrace
from tools.parser_fuzz.changes import changed_array, changed_document, changed_tensors

D, F, E, K, LAYERS = 32, 32, 4, 2, 2
#: Settings that let most families describe themselves; each family gets a file with them.
SETTINGS = {
    "hidden_size": D, "intermediate_size": F, "moe_intermediate_size": F, "num_hidden_layers": LAYERS,
    "num_experts_per_tok": K, "num_experts": E, "num_local_experts": E, "n_routed_experts": E, "hidden_act": "silu",
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 0, "moe_layer_freq": 1, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "shared_expert_intermediate_size": F, "swiglu_limit": 7.0, "mlp_layer_types": ["sparse", "sparse"],
    "swiglu_limits": [0, 0.5], "swiglu_limits_shared": [0, None], "moe_layers_enum": "0,1", "moe_top_k": K,
    "num_layers": LAYERS, "expert_ffn_hidden_size": F, "n_layers": LAYERS, "d_model": D, "num_hash_layers": 0,
    "ffn_config": {"ffn_hidden_size": F, "moe_num_experts": E, "moe_top_k": K, "ffn_act_fn": {"name": "silu"}},
    "expert_layer_period": 1, "expert_layer_offset": 0, "moe_layers": [0, 1], "interleave_moe_layer_step": 1,
    "layers_block_type": ["moe", "moe"], "rms_norm_eps": 1e-6, "num_experts_per_token": K, "moe_topk": K,
    "quantization_config": None, "hidden_activation": "gelu_pytorch_tanh", "top_k_experts": K, "model_type": "",
    "moe_num_experts": E, "moe_k": K, "moe_num_shared_experts": 1, "moe_layer_interval": 1, "use_expert_bias": True,
    "moe_layer_start_index": 0, "moe_layer_end_index": -1, "route_scale": 2.5, "expert_selection_fn": "softmax",
    "scoring_func": "sigmoid", "shared_experts_intermediate_size": F, "num_shared_experts": 1,
    "shared_intermediate_size": F, "router_scaling_factor": 1.0, "mlp_gate_softcap": 2.0, "mlp_up_softcap": 2.0,
    "moe_routed_scaling_factor": 1.0, "mlp_hidden_act": "relu2", "moe_router_scaling_factor": 1.0,
    "moe_shared_expert_intermediate_size": F, "share_expert_dim": F, "share_expert_dims": F,
    "activation_function": "silu", "output_multiplier": 0.5, "vocab_size": 64, "post_norm_eps": 1e-6,
    "moe_hidden_size": F,
}  # fmt: skip
_TABLES = Path(tile_table.__file__).parent / "tables"
#: What some families need otherwise.
_OWN = {
    **{
        family: {"norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy"}
        for family in ("deepseek_v2", "deepseek_ocr2_text", "unlimited_ocr_text")
    },
    "axk2": {"n_group": 1, "topk_group": 1},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"], "num_hash_layers": 1},
    "llama4_text": dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"), 1),
}
#: Format -> the family that is written in it.
_QUANTISED = {"mxfp4": "gpt_oss"} | dict.fromkeys(
    ("fp8_block", "int4_g32_zp", "int8_channel", "mxfp8", "fp8_tensor", "nvfp4"), "qwen3_moe"
)


@dataclass(frozen=True)
class Subject:
    """A file to change, in its directory, and what reads it. weight: how often it is drawn."""

    name: str
    directory: Path
    file: str
    content: bytes
    change: Callable[[bytes, random.Random], bytes]
    read: Callable[[Path], object]
    weight: int = 2

    def run(self, draw: random.Random) -> bytes:
        """Write a changed file, to be read; returns its content."""
        content = self.change(self.content, draw)
        (self.directory / self.file).write_bytes(content)
        return content

    def restore(self) -> None:
        (self.directory / self.file).write_bytes(self.content)


def _read_checkpoint(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    str(checkpoint)
    # Damage of one layer does not hide what another would raise.
    refused: list[Exception] = []
    for layer in checkpoint.moe_layers[:LAYERS]:
        try:
            with warnings.catch_warnings():
                # Notes of what no kernel takes.
                warnings.filterwarnings("ignore", ".*experts(: | are )")
                checkpoint.layer(layer)
        except (InvalidInput, Unsupported) as error:
            refused.append(error)
    for _ in other_tensors(checkpoint):
        pass
    if refused:
        raise refused[0]


def _convert(directory: Path) -> None:
    target = directory.with_name(f"{directory.name}-converted")
    try:
        convert_checkpoint(directory, target, format_named("mxfp8"))
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _write(directory: Path, family: str, fused: bool) -> Path:
    """A checkpoint of two layers in two shards, or in one file."""
    draw = np.random.default_rng(0)
    config = {key: SETTINGS[key] for key in list(SETTINGS)[:17]} | {"model_type": family, "decoder_sparse_step": 1}
    shards: list[dict[str, np.ndarray]] = []
    for layer in range(LAYERS):
        block = f"model.layers.{layer}.mlp."
        router, shapes = ("router" if family == "gpt_oss" else "gate"), {}
        shapes[f"{router}.weight"] = (E, D)
        if family == "gpt_oss":
            shapes |= {f"{router}.bias": (E,), "experts.gate_up_proj": (E, D, 2 * F), "experts.down_proj": (E, F, D)}
            shapes |= {"experts.gate_up_proj_bias": (E, 2 * F), "experts.down_proj_bias": (E, D)}
        elif fused:
            shapes |= {"experts.gate_up_proj": (E, 2 * F, D), "experts.down_proj": (E, D, F)}
        else:
            for expert in range(E):
                for name, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
                    shapes[f"experts.{expert}.{name}_proj.weight"] = shape
        if family == "deepseek_v3":
            shapes["gate.e_score_correction_bias"] = (E,)
            shapes |= {f"shared_experts.{name}_proj.weight": (F, D) for name in ("gate", "up")}
            shapes["shared_experts.down_proj.weight"] = (D, F)
        own = {block + name: draw.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
        own[f"model.layers.{layer}.input_layernorm.weight"] = np.ones(D)
        shards.append(own)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    if fused:
        save_file(shards[0] | shards[1], directory / "model.safetensors", {"format": "pt"})
        return directory
    weight_map = {}
    for number, tensors in enumerate(shards):
        save_file(tensors, directory / f"model-{number}.safetensors", {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def _of(directory: Path, name: str, read: Callable[[Path], object], weight: int) -> Iterator[Subject]:
    """A subject for every file of a checkpoint."""
    for path in sorted(directory.iterdir()):
        if path.name in ("tokenizer.json", "model-1.safetensors"):
            continue
        change = changed_tensors if path.suffix == ".safetensors" else changed_document
        yield Subject(f"{name} {path.name}", directory, path.name, path.read_bytes(), change, read, weight)


def subjects(root: Path) -> list[Subject]:
    """Everything that is fuzzed, written below a directory. Each good file is read once, and must be accepted."""
    found: list[Subject] = []
    for family in sorted(FAMILIES):
        directory = root / f"config-{family}"
        directory.mkdir()
        required = {setting: value for setting, value, _ in FAMILIES[family].requires}
        settings = SETTINGS | {"model_type": family} | required | _OWN.get(family, {})
        content = json.dumps(settings).encode()
        found.append(Subject(f"config {family}", directory, "config.json", content, changed_document, _read_config))
    for family, fused in (("qwen3_moe", False), ("qwen3_moe", True), ("deepseek_v3", False), ("gpt_oss", True)):
        name = f"{family} {'fused' if fused else 'per expert'}"
        found += _of(_write(root / name.replace(" ", "-"), family, fused), name, _read_checkpoint, 6)
    found += _of(_write(root / "source", "qwen3_moe", False), "conversion of", _convert, 3)
    for format, family in _QUANTISED.items():
        source = root / ("gpt_oss-fused" if family == "gpt_oss" else "qwen3_moe-per-expert")
        named = format if format == "nvfp4" else format_named(format)
        convert_checkpoint(source, root / format, named, loader="moebius")
        found += _of(root / format, format, _read_checkpoint, 5)
    found += _others(root)
    for subject in found:
        subject.restore()
    return found


def _read_config(directory: Path) -> None:
    layer_spec_from_config(directory, 1)


def _others(root: Path) -> Iterator[Subject]:
    states = np.ones((5, 4), np.float32)
    np.save(root / "states.npy", states)
    save_file({"x": states}, root / "states.safetensors")
    layers = (LayerRouting(np.zeros((3, 2), np.int32), np.ones((3, 2), np.float32), 4) for _ in range(2))
    RoutingTrace(tuple(layers)).save(root / "trace.safetensors")
    table = json.loads(next(_TABLES.glob("*.json")).read_text())
    (root / "table.json").write_text(json.dumps(table | {"entries": table["entries"][:3]}))
    readers = (
        ("states.npy", changed_array, load_hidden_states, 30),
        ("states.safetensors", changed_tensors, load_hidden_states, 10),
        ("trace.safetensors", changed_tensors, RoutingTrace.load, 30),
        ("table.json", changed_document, tile_table.TileTable.load, 30),
    )
    for name, change, read, weight in readers:
        file = root / name
        yield Subject(name, root, name, file.read_bytes(), change, lambda _, own=file, read=read: read(own), weight)


def scratch_folder() -> str | None:
    """Where to write: memory where there is some, for tens of thousands of files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
