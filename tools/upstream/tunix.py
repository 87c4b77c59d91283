"""Tunix's trainer on its Qwen3 model, with its MoELayer and with ours: AdamW and checkpoints, on unmodified files."""

from __future__ import annotations

import importlib
import itertools
import pathlib
import tempfile
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tools.upstream import imports
from tools.upstream.maxtext_train import ALL_STEPS, STEPS, Annotation, differences

#: Libraries that the trainer imports and does not call here.
STAND_INS: dict[str, imports.Names] = {
    **{name: {} for name in ("metrax", "grain", "datasets", "sentencepiece", "tiktoken", "kagglehub", "omegaconf")},
    "jaxtyping": dict.fromkeys(("Array", "ArrayLike", "PyTree"), Annotation),
    # Its own imports everything.
    "tunix": {},
}
SIZES: dict[str, Any] = {
    **{"num_layers": 2, "vocab_size": 48, "embed_dim": 32, "hidden_dim": 24, "num_heads": 4, "head_dim": 8},
    **{"num_kv_heads": 2, "rope_theta": 10000, "norm_eps": 1e-6, "num_experts": 8, "num_experts_per_tok": 2},
}


class _Logger:
    """Of metrics, for nobody."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 0.0


def _train(kind: Any, steps: int, folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Parameters and moments after the trainer's step. folder: of its checkpoints."""
    model, trainer = (importlib.import_module(f"tunix.{name}") for name in ("models.qwen3.model", "sft.peft_trainer"))
    with mock.patch.object(model, "MoELayer", kind):
        network = model.Qwen3(model.ModelConfig(**SIZES), rngs=nnx.Rngs(3))
    config = trainer.TrainingConfig(
        eval_every_n_steps=1000, max_steps=steps, checkpoint_root_directory=str(folder), pbar_description=None
    )
    training = trainer.PeftTrainer(network, optax.adamw(1e-2), config, metrics_logger=_Logger())
    length, random = 12, np.random.default_rng(0)
    places, mask = jnp.arange(length)[None].repeat(4, 0), jnp.tri(length, dtype=bool)[None].repeat(4, 0)
    batches = (jnp.asarray(random.integers(0, SIZES["vocab_size"], (4, length))) for _ in itertools.count())
    training.train(
        {"input_tokens": one, "input_mask": jnp.ones_like(one), "positions": places, "attention_mask": mask}
        for one in itertools.islice(batches, steps)
    )
    training.close()
    state = nnx.to_pure_dict(nnx.state((network, training.optimizer)))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def check_tunix(package: pathlib.Path) -> list[str]:
    """Differences between training on Tunix's layer and on ours. package: its folder."""
    modules = (".".join(file.relative_to(package.parent).with_suffix("").parts) for file in package.rglob("*.py"))
    served = sorted({name.removesuffix(".__init__") for name in modules} - {*STAND_INS})
    ours = importlib.import_module("moe_jax.tunix").MoELayer
    with imports.world(package.parent, STAND_INS, {}, served), tempfile.TemporaryDirectory() as folder:
        theirs = importlib.import_module("tunix.models.qwen3.model").MoELayer
        folders = [pathlib.Path(folder, name) for name in ("theirs", "ours")]
        first = [_train(kind, STEPS, at) for kind, at in zip((theirs, ours), folders, strict=True)]
        rest = [_train(kind, ALL_STEPS, at) for kind, at in zip((ours, theirs), folders, strict=True)]
        problems = differences("Tunix's Qwen3", *first)
        problems += differences("Tunix's Qwen3 from the other's checkpoint", *rest)
        if all(np.array_equal(one, rest[0][path]) for path, one in first[0].items()):
            problems.append("Tunix: no step was trained after the checkpoint")
    return problems
