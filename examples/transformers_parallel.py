"""A model of transformers with its experts on four ranks, and the text and logits of one process beside.

    torchrun --nproc-per-node 4 examples/transformers_parallel.py    # NCCL on GPUs, gloo on a CPU
    python examples/transformers_parallel.py                         # starts four ranks on this CPU

The model is small and random; --model takes any checkpoint of a family that transformers can share out.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import transformers

import moe_torch.transformers
from moe_torch.transformers.parallel import expert_parallel

# torch does not export all of what it documents.
distributed: Any = dist
multiprocessing: Any = torch.multiprocessing
models: Any = transformers.AutoModelForCausalLM
configs: Any = transformers.Qwen3MoeConfig

RANKS = 4
PROMPT = [[3, 1, 4, 1, 5, 9, 2, 6]]


def random_model(folder: str) -> str:
    """The path of a small Qwen3-MoE with random weights, which the first rank writes."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16, "vocab_size": 128}
        counts = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
        experts = {"num_experts": 16, "num_experts_per_tok": 4}
        config = configs(**sizes, **counts, **experts)
        models.from_config(config).save_pretrained(folder)
    dist.barrier()
    return folder


def run(name: str | None) -> None:
    """Generate on all ranks, and on the first one alone; compare there."""
    began = time.perf_counter()
    moe_torch.transformers.register()
    transformers.utils.logging.disable_progress_bar()
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    path = random_model(folders[0]) if name is None else name
    config = expert_parallel(transformers.AutoConfig.from_pretrained(path), dist.get_world_size())
    options = {"dtype": torch.bfloat16, "experts_implementation": "moebius"}
    model = models.from_pretrained(path, distributed_config=config, **options).eval()
    prompt = torch.tensor(PROMPT, device=model.device)
    with torch.no_grad():
        logits = model(prompt).logits
        text = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {time.perf_counter() - began:.1f} s: {text[0].tolist()}")
        alone = models.from_pretrained(path, **options).eval().to(prompt.device)
        with torch.no_grad():
            assert torch.equal(alone(prompt).logits, logits), "the logits are not those of one process"
            assert torch.equal(alone.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0), text)
        print("logits and text of one process are the same, bit by bit")
    dist.barrier()
    dist.destroy_process_group()


def run_rank(rank: int, name: str | None, store: str) -> None:
    """One of the processes that `main` starts."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    run(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a checkpoint's directory or name; default: a small random model")
    name = parser.parse_args().model
    if dist.is_torchelastic_launched():
        if torch.cuda.is_available():
            torch.cuda.set_device(distributed.get_node_local_rank())
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        run(name)
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these ranks are the CPU's, whatever else the machine has
    with tempfile.TemporaryDirectory() as folder:
        store = str(pathlib.Path(folder) / "store")
        # Forks, which import nothing again.
        multiprocessing.start_processes(run_rank, (name, store), RANKS, start_method="fork")


if __name__ == "__main__":
    main()
