"""Megatron-Core's MoE layer and ours in its place, on gloo ranks: results, padding, main_grad and checkpoints."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from moe_core.errors import Unsupported

S, B, D, F, E, K = 6, 4, 32, 16, 8, 3
RANKS, PADDED = (1, 2), 2
#: Results differ by roundings to bf16: Megatron multiplies by probabilities ahead of the second product.
MOST = 1e-2


@contextlib.contextmanager
def _megatron(files: str) -> Iterator[None]:
    """Its package on a CPU, where it lacks a name without TransformerEngine, and asks CUDA for a device."""
    sys.path.insert(0, files)
    warnings.simplefilter("ignore")
    import megatron.core.transformer.moe.moe_utils as utils  # pyright: ignore

    cpu = mock.patch.multiple(torch.cuda, current_device=lambda: "cpu", synchronize=lambda *_: None)
    with cpu, mock.patch.object(utils, "te_general_gemm", None, create=True):
        yield


def _layer(ours: bool, ranks: int, **more: Any) -> Any:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec  # pyright: ignore
    from megatron.core.transformer.spec_utils import build_module  # pyright: ignore
    from megatron.core.transformer.transformer_config import TransformerConfig  # pyright: ignore

    import moe_torch.megatron

    sizes = {"hidden_size": D, "ffn_hidden_size": F, "moe_ffn_hidden_size": F, "num_moe_experts": E, "num_layers": 1}
    options = {
        "moe_router_topk": K,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "aux_loss",
    }
    options |= {"moe_aux_loss_coeff": 1e-2, "gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    options |= {"params_dtype": torch.bfloat16, "bf16": True, "use_cpu_initialization": True, "add_bias_linear": False}
    options |= {"gradient_accumulation_fusion": False, "bias_activation_fusion": False}
    config = TransformerConfig(num_attention_heads=4, expert_model_parallel_size=ranks, **sizes, **options)
    for name, value in more.items():
        setattr(config, name, value)
    spec = moe_torch.megatron.moe_layer_spec() if ours else get_moe_module_spec(use_te=False, num_experts=E)
    layer = build_module(spec, config=config)
    layer.set_layer_number(1)
    random = torch.Generator().manual_seed(5)
    layer.router.weight.data.copy_(torch.randn(E, D, generator=random) * 0.3)
    for name, shape in (("linear_fc1", (E, 2 * F, D)), ("linear_fc2", (E, D, F))):
        values = torch.randn(shape, generator=random).chunk(ranks)[dist.get_rank()] * 0.2
        for weight, value in zip(_weights(layer, name), values, strict=True):
            weight.data.copy_(value)
    return layer


def _weights(layer: Any, name: str) -> list[Any]:
    experts = layer.experts
    if hasattr(experts, "local_experts"):
        return [getattr(one, name).weight for one in experts.local_experts]
    return list(getattr(experts, name).data)


def _run(layer: Any, padded: bool) -> dict[str, torch.Tensor]:
    """Of this rank's share of the batch. Padding tokens have no gradient."""
    random, ranks, rank = torch.Generator().manual_seed(1), dist.get_world_size(), dist.get_rank()
    x, d_output = (torch.randn(S, B, D, generator=random).to(torch.bfloat16) for _ in range(2))
    padding = torch.zeros(B, S, dtype=torch.bool)
    if padded:
        padding[:, -PADDED:], d_output[-PADDED:] = True, 0
    x, d_output = (one.chunk(ranks, 1)[rank].clone() for one in (x, d_output))
    output, _ = layer(x.requires_grad_(), padding_mask=padding.chunk(ranks)[rank] if padded else None)
    output.backward(d_output)
    kept = S - PADDED * padded
    found = {"output": output.detach()[:kept], "d_x": torch.as_tensor(x.grad)[:kept]}
    for name in ("linear_fc1", "linear_fc2"):
        stacked = getattr(layer.experts, name, None)
        found[name] = torch.stack([one.grad for one in _weights(layer, name)]) if stacked is None else stacked.grad
    return found


def _alone(ours: Any, theirs: Any, folder: str) -> list[str]:
    """Problems with main_grad and checkpoints, on one rank."""
    from megatron.core import dist_checkpointing, parallel_state  # pyright: ignore

    plain, fused, problems = _run(ours, False), _layer(True, 1, gradient_accumulation_fusion=True), []
    for name in ("linear_fc1", "linear_fc2"):
        weight: Any = getattr(fused.experts, name)
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight, dtype=torch.float32), False
    _run(fused, False)
    for name in ("linear_fc1", "linear_fc2"):
        weight = getattr(fused.experts, name)
        if not weight.grad_added_to_main_grad or not torch.equal(weight.main_grad.bfloat16(), plain[name]):
            problems.append(f"main_grad of {name} is not the gradient in fp32")
    for option in ({"fp8": "hybrid"}, {"moe_apply_probs_on_input": True}, {"activation_func": torch.sigmoid}):
        try:
            _layer(True, 1, **option)
            problems.append(f"{option} is not refused")
        except Unsupported:
            pass
    group = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    for number, (source, target) in enumerate(((theirs, ours), (ours, theirs))):
        for parameter in source.parameters():
            parameter.data.normal_()
        path = pathlib.Path(folder) / f"checkpoint {number}"
        path.mkdir()
        dist_checkpointing.save(source.sharded_state_dict(prefix="mlp.", metadata=dict(group)), str(path))
        read = dist_checkpointing.load(target.sharded_state_dict(prefix="mlp.", metadata=dict(group)), str(path))
        target.load_state_dict({name.removeprefix("mlp."): value for name, value in read.items()})
        for name in ("linear_fc1", "linear_fc2"):
            if not all(map(torch.equal, _weights(source, name), _weights(target, name))):
                problems.append(f"{name} of a checkpoint {'of ours' if number else 'of theirs'} is not read back")
    return problems


def _rank(rank: int, ranks: int, files: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    with _megatron(files):
        from megatron.core import parallel_state  # pyright: ignore

        parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
        make = functools.partial(_layer, ranks=ranks)
        found: Any = {(ours, padded): _run(make(ours), padded) for ours in (False, True) for padded in (False, True)}
        problems = _alone(make(True), make(False), folder) if ranks == 1 else []
    torch.save((found, problems), f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def check(files: pathlib.Path) -> list[str]:
    """Results that are far from Megatron's, or have other bits on more ranks. Prints a line for each."""
    problems, first = [], {}
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            spawn: Any = torch.multiprocessing
            spawn.spawn(_rank, (ranks, str(files), folder), ranks)
            parts = [torch.load(f"{folder}/{rank}") for rank in range(ranks)]
        problems += [text for _, texts in parts for text in texts]
        for key in parts[0][0]:
            axis = {"output": 1, "d_x": 1}
            found = {
                name: torch.cat([one[key][name] for one, _ in parts], axis.get(name, 0)) for name in parts[0][0][key]
            }
            before = first.setdefault(key, found)
            theirs = first[False, key[1]]
            errors = {name: float((value - theirs[name]).norm() / theirs[name].norm()) for name, value in found.items()}
            who = f"{'ours' if key[0] else 'theirs'}{', padded' if key[1] else ''}"
            print(
                f"megatron on {ranks} ranks, {who}: "
                + ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
            )
            problems += [
                f"{who} on {ranks}: {name} is off by {error}" for name, error in errors.items() if error > MOST
            ]
            other = [name for name in found if name != "d_x" and not torch.equal(found[name], before[name])]
            problems += [f"{who} on {ranks} ranks: {name} has other bits than on one" for name in other if key[0]]
    return problems
