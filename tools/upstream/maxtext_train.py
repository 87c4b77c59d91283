"""MaxText's own trainer from three of its configs, on its RoutedMoE and on ours: AdamW, bias updates, checkpoints.

Sizes are small, and MaxText's files unmodified. One model also goes on from the other layer's checkpoint.
"""

from __future__ import annotations

import contextlib
import importlib
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from flax import nnx

from tools.upstream import imports

#: Steps from scratch, and after a checkpoint.
STEPS, ALL_STEPS = 4, 6
#: Of the norm of an array, after AdamW, whose first steps enlarge roundings of small gradients.
BOUND = 2.0**-10
#: The model's config without its sizes, and what a small one needs.
SIZES: dict[str, Any] = {
    **{"base_emb_dim": 32, "base_num_query_heads": 4, "base_num_kv_heads": 4, "head_dim": 8, "base_mlp_dim": 48},
    **{"base_moe_mlp_dim": 48, "base_num_decoder_layers": 2, "vocab_size": 64, "max_target_length": 16},
    **{"per_device_batch_size": 2, "num_experts": 8, "num_experts_per_tok": 2, "load_balance_loss_weight": 0.01},
    **{"dtype": "float32", "weight_dtype": "float32", "matmul_precision": "highest", "float32_gate_logits": True},
}
#: What runs on host devices without MaxText's input pipeline and kernels.
RUN: dict[str, Any] = {
    **{
        "dataset_type": "synthetic",
        "attention": "dot_product",
        "megablox": False,
        "hardware": "cpu",
        "run_name": "run",
    },
    **{"override_model_config": True, "skip_jax_distributed_system": True, "enable_goodput_recording": False},
    **{"enable_checkpointing": True, "async_checkpointing": False, "log_config": False, "enable_tensorboard": False},
    "jax_cache_dir": "",
}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {},
    "gpt-oss-20b": {},
    "deepseek3-671b": {
        **{"base_num_decoder_layers": 3, "first_num_dense_layers": 1, "num_experts": 16, "num_experts_per_tok": 4},
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
        **{"n_routing_groups": 4, "topk_routing_group": 2, "routed_bias_update_rate": 0.001, "mtp_num_layers": 0},
    },
}


RESUMED = "mixtral-8x7b"
#: The mesh of ours. Theirs has fsdp alone, since XLA's CPU has no ragged all-to-all.
OUR_MESH = {"ici_expert_parallelism": 2}


class _Yaml:
    """The calls of `omegaconf.OmegaConf` that MaxText's configs make, on dictionaries."""

    load = staticmethod(lambda path: yaml.safe_load(pathlib.Path(path).read_text()))
    create = staticmethod(dict)
    to_container = staticmethod(lambda config, resolve: config)
    from_cli = staticmethod(lambda words: {name: yaml.safe_load(one) for name, one in (w.split("=", 1) for w in words)})

    @staticmethod
    def merge(*parts: dict[str, Any]) -> dict[str, Any]:
        return {name: value for part in parts for name, value in part.items()}


class Annotation:
    def __class_getitem__(cls, item: Any) -> type:
        return cls


_ABSENT = ("aqt", "clu", "datasets", "drjax", "grain", "metrax", "ml_collections", "ml_goodput_measurement")
_ABSENT += ("sentencepiece", "tensorboardX", "tensorflow", "tensorflow_datasets", "tiktoken", "cloud_tpu_diagnostics")
STAND_INS: dict[str, imports.Names] = {
    **{name: {} for name in _ABSENT},
    "jaxtyping": dict.fromkeys(("Array", "Int32", "Key", "PyTree", "UInt32"), Annotation),
    "omegaconf": {"OmegaConf": _Yaml, "DictConfig": dict},
    "pathwaysutils": {"is_pathways_backend_used": lambda: False},
    "tokamax": {"RaggedDotGroupSizes": lambda sizes, rows: None},
    # Newer Python or JAX than ours.
    "maxtext.kernels.attention.jax_flash_attention": {},
    "maxtext.trainers.diloco.diloco": {"DiLoCoTrainState": Annotation},
}


@contextlib.contextmanager
def maxtext(package: pathlib.Path) -> Iterator[None]:
    """Inside, `maxtext` is the whole of its wheel, on stand-ins for libraries that are not installed."""
    names = (".".join(file.relative_to(package.parent).with_suffix("").parts) for file in package.rglob("*.py"))
    modules = {name.removesuffix(".__init__") for name in names}
    served = sorted(name for name in modules - {*STAND_INS} if not name.startswith("maxtext.kernels.mhc"))
    with imports.world(package.parent, STAND_INS, {}, served):
        yield


def _train(package: pathlib.Path, name: str, kind: Any, steps: int, folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Parameters, optimizer and biases after MaxText's `train_loop` to this step. folder: of checkpoints."""
    moe, train, pyconfig = (
        importlib.import_module(f"maxtext.{module}")
        for module in ("layers.moe", "trainers.pre_train.train", "configs.pyconfig")
    )
    mesh = OUR_MESH if kind is _ours() and jax.device_count() > 1 else {}
    options = RUN | SIZES | MODELS[name] | mesh | {"base_output_directory": str(folder), "steps": steps}
    with mock.patch.object(moe, "RoutedMoE", kind):
        config = pyconfig.initialize(["", str(package / "configs/base.yml")], model_name=name, **options)
        state = train.train_loop(config, None)
    flat = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state))
    numbers = [(path, leaf) for path, leaf in flat if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in numbers if "rng" not in str(path)}


def differences(what: str, wanted: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> list[str]:
    if set(wanted) != set(got):
        return [f"{what}: only one of the two has {path}" for path in sorted(set(wanted) ^ set(got))]
    norms = {path: max(float(np.linalg.norm(np.float64(one))), 1e-30) for path, one in wanted.items()}
    errors = {path: float(np.linalg.norm(np.float64(got[path] - one))) / norms[path] for path, one in wanted.items()}
    print(f"{what}: {len(errors)} arrays differ by at most {max(errors.values()):.1e} of their norm")
    return [
        f"{what}: {path} differs by {error:.1e} of its norm" for path, error in errors.items() if not error <= BOUND
    ]


def check_training(package: pathlib.Path) -> list[str]:
    """Differences between training on MaxText's layer and on ours, on all devices of the process."""
    problems = []
    with maxtext(package):
        theirs, ours = importlib.import_module("maxtext.layers.moe").RoutedMoE, _ours()
        for name in MODELS:
            with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
                folders = pathlib.Path(one), pathlib.Path(other)
                first = [
                    _train(package, name, kind, STEPS, at) for kind, at in zip((theirs, ours), folders, strict=True)
                ]
                problems += differences(f"train_loop of {name}", *first)
                if name != RESUMED:
                    continue
                rest = [
                    _train(package, name, kind, ALL_STEPS, at) for kind, at in zip((ours, theirs), folders, strict=True)
                ]
                problems += differences(f"train_loop of {name} from the other's checkpoint", *rest)
                if all(np.array_equal(first[0][path], rest[0][path]) for path in first[0]):
                    problems.append(f"{name}: no step was trained after the checkpoint")
    return problems


def _ours() -> type:
    return importlib.import_module("moe_jax.maxtext").RoutedMoE
