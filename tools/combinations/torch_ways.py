"""Rows on torch: the plain layer, judged by the oracle, and the same step through all that a row puts around it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import moe_torch
from moe_core.runtime.cuda import cuda_available
from moe_torch import trace
from tools.combinations.cover import Row
from tools.combinations.features import TORCH_WAYS, case_of
from tools.combinations.replayed import Replayed
from tools.fuzz import run_torch
from tools.fuzz.case import Case
from tools.fuzz.data import TORCH
from tools.fuzz.engines import OPS, Results, call_arrays, device_of, running_on, trained
from tools.fuzz.judge import judge, same_bits

#: Stages that run one by one round between them: so many units of the largest number may results differ.
_APART = 16
_UNIT = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def examine(row: Row, engine: str = "reference", seed: int = 0) -> list[str]:
    """What is wrong with a row. Raises what the library raises."""
    row = {name: values[0] for name, values in TORCH_WAYS.items()} | row
    case, cast = case_of(row, seed), row["autocast"]
    own = case.dtype
    if cast != "none" and own != "float64" and case.kind == "layer":  # autocast leaves others alone
        case = dataclasses.replace(case, dtype=cast)
    replayed = Replayed(row, case)
    arrays = replayed.draw(device_of(engine))
    if case.dtype != own:  # values that both dtypes hold
        own_plain = {name: array for name, array in arrays.plain.items() if name not in arrays.quantized}
        arrays.plain |= {name: _exact(array) for name, array in own_plain.items()}
    given = call_arrays(arrays)
    wide = {name: _in_dtype(name, array, own) for name, array in given.items()} if case.dtype != own else dict(given)
    plain, layer = replayed.plain(arrays, given, engine)
    if row["trace"].startswith("replay") and not case.given_ids:
        wide.pop("ids", None)
    with running_on(engine), autocast(row, device_of(engine)):
        found, captured = _through(row, dataclasses.replace(replayed.case, dtype=own), wide, layer)
    if plain is None:
        plain = found
    verdict = judge(replayed.base, arrays, plain, engine)
    wrong = [f"plain: {text}" for text in verdict.complaints]
    if captured is not None and not torch.equal(captured.ids, found["ids"]):
        wrong.append(f"captured {captured.ids} of {found['ids']}")
    for name in replayed.own:
        plain.pop(name, None)
        found.pop(name, None)
    return wrong + _differences(row, plain, found, arrays.plain.get("token_mask"), engine == "cuda")


def _exact(array: torch.Tensor) -> torch.Tensor:
    if array.dtype not in TORCH.values():
        return array
    return array.to(torch.bfloat16).to(torch.float16).to(torch.bfloat16).to(array.dtype)


def _in_dtype(name: str, array: torch.Tensor, dtype: str) -> torch.Tensor:
    """Gradients that flow in keep autocast's."""
    changes = array.dtype in (torch.float16, torch.bfloat16) and not name.startswith("d_")
    return array.to(TORCH[dtype]) if changes else array


def autocast(row: Row, device: str = "cpu") -> Any:
    return contextlib.nullcontext() if row["autocast"] == "none" else torch.autocast(device, TORCH[row["autocast"]])


#: Calls before a capture.
_WARM_UP = 2


def _graphed(step: Callable[[], Results]) -> Results:
    """The results of a replayed CUDA graph of a step, or on a CPU of its third call."""
    with torch.cuda.stream(torch.cuda.Stream() if cuda_available() else None):
        for _ in range(_WARM_UP):
            step()
    if not cuda_available():
        return step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for array in found.values():
        array.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return found


def traced(row: Row, replayed: trace.LayerRouting | None, step: Callable[[], Results]) -> tuple[Results, Any]:
    """(results of a step, the routing that was captured)."""
    if row.get("graphs", "none") != "none":
        step = functools.partial(_graphed, step)
    if row["trace"] == "capture":
        with trace.capture() as recording:
            found = step()
        (layer,) = recording.layers
        return found, layer
    calls = 1 if row.get("graphs", "none") == "none" else _WARM_UP + 1
    with contextlib.nullcontext() if replayed is None else trace.replay([replayed] * calls):
        return step(), None


class _Program(torch.nn.Module):
    """A call as a module, which exports take."""

    def __init__(self, layer: torch.nn.Module, call: Any) -> None:
        super().__init__()
        self.layer, self._call = layer, call

    def forward(self, *args: Any, **options: Any) -> Any:
        return self._call(*args, **options)


def _through(row: Row, case: Case, given: Mapping[str, Any], replayed: Any) -> tuple[Results, Any]:
    """`_traced` of the step with everything around the layer that the row says."""
    if case.kind == "moe":
        return _op(row, case, given, replayed)
    layer = run_torch.layer_of(case, given)
    parameters, more = dict(layer.named_parameters()), {}
    call: Any = layer
    if row["PEFT"] != "none":
        more = _adapt(layer, case)
    if row["hooks"] != "none":
        layer.router.register_forward_hook(lambda *seen: None)
        layer.experts.register_forward_hook(lambda *seen: None)
    if row["functional_call"] != "none":
        copies = {name: one.detach().clone() for name, one in layer.named_parameters()}
        by_id = {id(one): copies[name] for name, one in layer.named_parameters()}
        parameters = {name: by_id[id(one)] for name, one in parameters.items()}
        more = {name: by_id[id(one)].requires_grad_() for name, one in more.items()}
        call = lambda *args, **options: torch.func.functional_call(layer, copies, args, options)  # noqa: E731
    if row["checkpointing"] != "none":
        inner = call
        call = lambda *args, **options: checkpoint(inner, *args, use_reentrant=False, **options)  # noqa: E731
    if row["export"] != "none":
        call = _exported(layer, call, case, given, parameters, more)
    elif row["compile"] != "none":
        torch._dynamo.reset()
        # PEFT puts its sums in the place of parameters in eager code.
        call = torch.compile(call, fullgraph=row["PEFT"] == "none", backend="aot_eager")
    return traced(row, replayed, lambda: run_torch.step(case, given, call, parameters, more))


def _op(row: Row, case: Case, given: Mapping[str, Any], replayed: Any) -> tuple[Results, Any]:
    """The same of an op, a function of a dictionary of tensors."""
    names = trained(case, given) if case.gradient else []
    inputs = dict(given) | {name: given[name].detach().requires_grad_() for name in names}

    def call(inputs: Any) -> Any:
        return OPS[case.kind](case, moe_torch.ops, inputs)

    through: Any = call
    if row["checkpointing"] != "none":
        through = lambda inputs: checkpoint(call, inputs, use_reentrant=False)  # noqa: E731
    if row["export"] != "none":
        through = torch.export.export(_Program(torch.nn.Module(), through), (inputs,)).module()
    elif row["compile"] != "none":
        torch._dynamo.reset()
        through = torch.compile(through, fullgraph=True, backend="aot_eager")

    def step() -> Results:
        run_torch.give_main_grads(inputs, given)
        with torch.set_grad_enabled(case.gradient):
            outputs = through(inputs)
        return run_torch.results_of(case, outputs, given, {name: inputs[name] for name in names})

    return traced(row, replayed, step)


def _exported(
    layer: Any, call: Any, case: Case, given: Mapping[str, Any], parameters: Mapping[str, Any], more: Mapping[str, Any]
) -> Any:
    """The exported program, whose parameters are the layer's. A step makes it, outside of any trace."""
    made: list[Any] = []

    def through(*args: Any, **options: Any) -> Any:
        with torch.set_grad_enabled(case.gradient):
            made.append(torch.export.export(_Program(layer, call), args, options).module())
        return made[-1](*args, **options)

    for one in parameters.values() if case.gradient else ():
        one.requires_grad_()
    run_torch.step(dataclasses.replace(case, gradient=False), given, through, parameters, more)
    return made[0]


def _adapt(layer: Any, case: Case) -> dict[str, Any]:
    """Put new adapters, which change nothing, on the router and the experts, and return B of each."""
    import peft

    targets = [] if case.weights else ["layer.experts.gate_up", "layer.experts.down"]
    holder = torch.nn.Module()
    holder.layer = layer
    holder.forward = layer.forward
    peft.get_peft_model(holder, peft.LoraConfig(r=2, target_modules=["router"], target_parameters=targets))
    return {name: one for name, one in layer.named_parameters() if "lora_B" in name}


def _differences(row: Row, plain: Results, found: Results, active: torch.Tensor | None, on_gpu: bool) -> list[str]:
    """Complaints about results that are not the plain layer's. active: tokens whose logits count."""
    if active is not None:
        plain, found = ({**one, "logits": one["logits"][active]} for one in (plain, found))
    others = {name for name in found.keys() ^ plain.keys() if "lora_" not in name and name != "routed_ids"}
    wrong = [f"only one returns {sorted(others)}"] if others else []
    adapted = {name: array for name, array in found.items() if "lora_" in name}
    if row["PEFT"] != "none":
        wrong += [f"{name}: no gradient" for name, array in adapted.items() if not array.any()]
    first = {name: array.to(found[name].dtype).to(array.dtype) for name, array in plain.items() if name in found}
    second = {name: found[name].to(array.dtype) for name, array in first.items()}
    # A replayed layer is one operator, whose 16-bit gradient of x is rounded once.
    apart = set(first) if not row["PEFT"] == row["hooks"] == "none" else set()
    apart |= {"d x", "d gate_inputs", "d routing.weight"} & first.keys() if row["trace"].startswith("replay") else set()
    if row["autocast"] != "none" and row["dtype"] in ("bfloat16", "float16"):  # rounded to one dtype after the other
        apart |= {name for name in first if name.startswith("d ") and not name.startswith("d experts.")}
    # The router keeps its dtype, and products of other dtypes add up in another order.
    if row["autocast"] != "none" and on_gpu:
        apart |= {name for name, array in first.items() if array.is_floating_point()}
    exact, others = ({name: array for name, array in one.items() if name not in apart} for one in (first, second))
    wrong += same_bits(exact, others, ("the plain layer", "the row"))
    for name in sorted(apart):
        array = first[name]
        unit = _UNIT.get(str(array.dtype).removeprefix("torch."), 0.0)
        bound = _APART * unit * float(array.double().abs().max())
        error = float((array.double() - second[name].double()).abs().max())
        wrong += [f"{name}: {error:.3g} apart, bound {bound:.3g}"] if not error <= bound else []
    return wrong
