"""Rows on two gloo ranks: layers that data, parameters or experts are split for, against the plain layer.

With DDP and FSDP2 each rank's outputs are those of the plain layer on its tokens, and gradients are means over ranks.
With experts or their columns on both ranks, outputs and gradients are the plain layer's on all tokens.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import moe_torch
from moe_torch import MoE, trace
from moe_torch.parallel import ExpertParallel, parallelize
from tools.combinations.cover import Row
from tools.combinations.features import case_of
from tools.combinations.replayed import Replayed
from tools.combinations.torch_ways import autocast, traced
from tools.fuzz import run_torch
from tools.fuzz.case import Case
from tools.fuzz.data import TORCH, is_parameter
from tools.fuzz.engines import Results, call_arrays, layer_name, routed_ids, running_on, trained

#: Units of the largest number that sums in another order, or rounded parts of them, may be apart.
_APART = {"float32": 512, "float64": 512, "bfloat16": 16, "float16": 16}
_BY_TOKEN = ("x", "token_mask", "gate_inputs", "ids", "input_ids", "adapter_ids", "d_output", "d_weights")


def examine_all(group: Any, rows: list[Row], seed: int = 0) -> list[str | list[str]]:
    """What is wrong with each row on this rank, or what the library raised. Rows of a family are its blocks."""
    found: list[str | list[str]] = []
    for row in rows:
        try:
            found.append(examine_block(group, row, seed) if "family" in row else examine(group, row, seed))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        dist.barrier(group)
    return found


def examine(group: Any, row: Row, seed: int = 0) -> list[str]:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    case = dataclasses.replace(case_of(row, seed), F=64)  # whole groups of a format on both ranks
    replayed = Replayed(row, case)
    arrays = replayed.draw()
    given = call_arrays(arrays)
    count = case.T // ranks
    here = slice(rank * count, (rank + 1) * count)
    own = {name: array[here] if name in _BY_TOKEN else array for name, array in given.items()}
    shared_out = row["parallel"] in ("experts", "tensor")
    half = dataclasses.replace(case, T=count)
    with running_on("reference"), autocast(row):
        plain = run_torch.layer_of(case, given)
        base = dataclasses.replace(replayed.base, T=case.T if shared_out else count)
        inputs = given if shared_out else own
        if replayed.base is not case:  # ids from the caller, not from a table
            inputs = {name: array for name, array in inputs.items() if name not in ("routing.table", "input_ids")}
            plain = run_torch.layer_of(base, inputs)
        wanted = _step(base, inputs, plain, plain)
        routing = None
        if row["trace"].startswith("replay"):
            weights = None if row["trace"] == "replay ids" else wanted["weights"]
            # Ids before a capacity drops some.
            ids = inputs["ids"] if weights is None and base.given_ids else wanted["ids"]
            if weights is None and base.capacity and not (base.given_ids or base.table):
                ids = routed_ids(base, moe_torch.ops, inputs, wanted["logits"])
            ids, weights = (one if one is None or not shared_out else one[here] for one in (ids, weights))
            routing = trace.LayerRouting(ids, weights, case.E)
            own = {name: array for name, array in own.items() if name != "ids" or case.given_ids}
        with torch.autocast("cpu", enabled=False):  # DDP joins no float16
            layer, call = _through(row, run_torch.layer_of(case, given), group)
        found, captured = traced(row, routing, lambda: _step(half, own, layer, call))
    wrong = []
    if captured is not None and not torch.equal(captured.ids, found["ids"]):
        wrong.append("captured ids are not the layer's")
    if shared_out:
        held = ("d experts.", "d lora.a1", "d lora.b1", "d lora.a2", "d lora.b2")
        for name in [n for n in found if is_parameter(n[2:]) and (not n.startswith(held) or n.endswith("_shared"))]:
            found[name] = _summed(found[name].double(), group).to(found[name].dtype)
        for name, array in wanted.items():
            if name in ("output", "ids", "weights", "logits", "d x", "d gate_inputs"):
                wanted[name] = array[here]
    elif row["parallel"] != "none":  # means over ranks
        for name in [name for name in wanted if name.startswith("d ") and is_parameter(name[2:])]:
            wanted[name] = _summed(wanted[name].double(), group).div(ranks).to(wanted[name].dtype)
    mask = own.get("token_mask")
    if mask is not None:
        wanted, found = ({**one, "logits": one["logits"][mask]} for one in (wanted, found))
    dtype = row["dtype"] if row["autocast"] == "none" or row["dtype"] == "float64" else row["autocast"]
    # Each slice of a hidden row has its own scale.
    share = 0.1 if row["parallel"] == "tensor" and case.activations else _APART[dtype] * torch.finfo(TORCH[dtype]).eps
    return wrong + [text for name in wanted for text in _apart(name, wanted[name], found.get(name), share)]


def examine_block(group: Any, row: Row, seed: int = 0) -> list[str]:
    """A block of a model under `use`, or as a layer, with or without adapters of PEFT, on this rank's tokens."""
    from moe_torch.peft import native
    from moe_torch.transformers import use
    from tools.combinations import models_ways

    torch.manual_seed(seed)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    held = models_ways.Held(row["family"], "float32")
    if row["by"] == "use":
        use(held)
    else:
        held.block = MoE.from_block(held.block, held.config)
    trained = dict(held.named_parameters())
    if row["PEFT"] != "none":
        for one in models_ways.adapted(held).values():
            torch.nn.init.normal_(one)
        native(held)
        trained = {name: one for name, one in held.named_parameters() if "lora_" in name}
    plain, x = copy.deepcopy(held), models_ways.tokens(row["family"])
    flowing = torch.randn(x.shape)
    here = slice(rank * x.shape[1] // ranks, (rank + 1) * x.shape[1] // ranks)

    def step(held: Any, call: Any, here: slice) -> Results:
        rows = x[:, here].clone().requires_grad_()
        y = call(rows)
        y.backward(flowing[:, here])
        parameters: dict[str, Any] = dict(held.named_parameters())
        gradients = {name: parameters[name].grad for name in trained if parameters[name].grad is not None}
        whole = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in gradients.items()}
        assert rows.grad is not None
        return {"output": y.detach(), "d x": rows.grad, **{f"d {name}": one for name, one in whole.items()}}

    with running_on("reference"):
        wanted = step(plain, plain, slice(None))
        found = step(held, _shared_out(row, held, group), here)
    assert rank or wanted.keys() == found.keys()
    of_rank = {name: one[:, here] if name in ("output", "d x") else one / ranks for name, one in wanted.items()}
    share = _APART["float32"] * torch.finfo(torch.float32).eps
    return [text for name in wanted for text in _apart(name, of_rank[name], found.get(name), share)]


def _summed(array: torch.Tensor, group: Any) -> torch.Tensor:
    array = array.clone().contiguous()
    dist.all_reduce(array, group=group)
    return array


def _through(row: Row, layer: Any, group: Any) -> tuple[Any, Any]:
    """(the layer, a call of it) as the row says."""
    for name, one in layer.named_parameters():  # before any wrapper looks
        one.requires_grad_(row["LoRA"] == "none" or name.startswith("lora."))
    if row["hooks"] != "none":
        layer.router.register_forward_hook(lambda *seen: None)
        layer.experts.register_forward_hook(lambda *seen: None)
    return layer, _shared_out(row, layer, group)


def _shared_out(row: Row, layer: Any, group: Any) -> Any:
    """A call of a layer, or of a block, over the ranks."""
    kind, call = row["parallel"], layer
    if kind == "DDP":
        call = DistributedDataParallel(layer, process_group=group)
    elif kind == "FSDP2":
        call = fully_shard(layer, mesh=DeviceMesh.from_group(group, "cpu", mesh_dim_names=("data",)))
    elif kind == "experts":
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))
        call = parallelize(getattr(layer, "block", layer), ExpertParallel(mesh))
    elif kind == "tensor":
        mesh = init_device_mesh("cpu", (1, dist.get_world_size(group)), mesh_dim_names=("ep", "tp"))
        call = parallelize(getattr(layer, "block", layer), ExpertParallel(mesh["ep"], tensor=mesh["tp"]))
    if row["checkpointing"] != "none":
        inner = call
        call = lambda *args, **options: checkpoint(inner, *args, use_reentrant=False, **options)  # noqa: E731
    if row["compile"] != "none":
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager")
    return call


def _step(case: Case, given: Mapping[str, Any], layer: Any, call: Any) -> Results:
    """The outputs of one step by `backward`, and whole gradients."""
    leaves = {name: given[name].clone().requires_grad_(case.gradient) for name in ("x", "gate_inputs") if name in given}
    others = {"gate_inputs": leaves.get("gate_inputs"), "expert_ids": given.get("ids")}
    others |= {name: given.get(name) for name in ("input_ids", "adapter_ids")}
    names = [name for name in trained(case, given) if is_parameter(name)] if case.gradient else []
    parameters = dict(layer.named_parameters())
    layer.requires_grad_(False)
    for name in names:
        parameters[layer_name(name)].requires_grad_(True)
    if case.main_grad:
        for name in names:
            if f"main_grad.{name}" in given:
                parameters[layer_name(name)].main_grad = torch.zeros_like(given[name], dtype=torch.float32)
    with torch.set_grad_enabled(case.gradient):
        y, aux = call(leaves["x"], given.get("token_mask"), **others, return_aux=True)
    found = {"output": y.detach(), "ids": aux.ids, "weights": aux.weights.detach(), "logits": aux.logits.detach()}
    if not case.gradient:
        return found
    pairs = [(y, given["d_output"].to(y.dtype)), (aux.weights, given["d_weights"].to(aux.weights.dtype))]
    pairs = [pair for pair in pairs if pair[0].requires_grad]
    torch.autograd.backward([output for output, _ in pairs], [flowing for _, flowing in pairs])
    found |= {f"d {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    for name in names:
        one: Any = parameters[layer_name(name)]
        gradient = getattr(one, "main_grad", one.grad) if case.main_grad else one.grad
        if gradient is not None:
            with torch.autocast("cpu", enabled=False):  # which gathers no float16
                found[f"d {name}"] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def _apart(name: str, wanted: torch.Tensor, found: torch.Tensor | None, share: float) -> list[str]:
    """share: of the largest number that others may be apart."""
    if found is None or found.shape != wanted.shape:
        return [f"{name}: {None if found is None else tuple(found.shape)}, not {tuple(wanted.shape)}"]
    bound = share * float(wanted.abs().max()) if wanted.is_floating_point() and wanted.numel() else 0.0
    error = float((wanted.double() - found.double()).abs().max()) if wanted.numel() else 0.0
    return [] if error <= bound else [f"{name}: {error:.3g} apart, bound {bound:.3g}"]
