"""Rows on blocks of transformers' models: `use(model)` and `from_block`, judged by the eager block in float64.

A family stands for the fields of its blocks. Tokens lie far from ties, so that 16 bits choose the same experts.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers.utils.output_capturing
from torch.utils.checkpoint import checkpoint

import moe_torch.transformers
from moe_torch import MoE, cpu_engine, trace
from tools.combinations.cover import Row
from tools.combinations.torch_ways import autocast, traced
from tools.fuzz.data import TORCH
from tools.sweep import models
from tools.sweep.judge import Tensors, as_block, require_close
from tools.sweep.measure import block_run, table_ids

_TOKENS, _CANDIDATES = 12, 96


@functools.cache
def _model(family: str) -> Any:
    models.quiet()
    return models.build(family)


class Held(torch.nn.Module):
    """A block of a family's model, alone: one with a table of ids, or the last. Of a decoder layer router and experts,
    both on x."""

    def __init__(self, family: str, dtype: str) -> None:
        super().__init__()
        model = copy.deepcopy(_model(family)).to(TORCH[dtype])
        blocks = models.moe_blocks(model).values()
        self.block: Any = next((one for one in blocks if getattr(one, "is_hash", False)), [*blocks][-1])
        self.config, self.by_parts = model.config, models.is_decoder(self.block)
        for name in [name for name, _ in self.block.named_children() if name not in ("router", "experts")]:
            if self.by_parts:
                delattr(self.block, name)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(self.block, MoE):
            return self.block(x, mask, **table_ids(self.block, x))
        if self.by_parts:
            rows = x.view(-1, x.shape[-1])
            _, weights, ids = self.block.router(rows)
            return self.block.experts(rows, ids, weights).view_as(x)
        y = self.block(x, **table_ids(self.block, x))
        return (y[0] if isinstance(y, tuple) else y).view_as(x)


@functools.cache
def tokens(family: str) -> torch.Tensor:
    """x `[1, T, D]` of values that all dtypes hold."""
    generator = torch.Generator().manual_seed(3)
    width = _model(family).config.get_text_config().hidden_size
    x = torch.randn(1, _CANDIDATES, width, generator=generator).to(torch.bfloat16).to(torch.float16).float()
    rows = [x, *(x * (1 + 2**-6 * torch.randn(x.shape, generator=generator)) for _ in range(6))]
    wanted, far = Held(family, "float64")(x.double()).detach(), torch.ones(x.shape[:2], dtype=torch.bool)
    for dtype in ("float64", "bfloat16", "float16"):
        held = Held(family, dtype)
        for some in rows:
            error = held(some.to(TORCH[dtype])).detach().double() - wanted
            far &= error.norm(dim=-1) < 2**-3 * wanted.norm(dim=-1)
    table = table_ids(Held(family, "float32").block, x)  # of places
    far |= bool(table)
    assert int(far.sum()) >= _TOKENS, f"{family}: only {int(far.sum())} tokens are far from ties"
    return x[far][None, :_TOKENS].contiguous()


def _step(held: Held, call: Any, row: Row, wanted: Tensors) -> Tensors:
    """The output, and gradients of x and of `wanted`, or of what adds them up."""
    x = tokens(row["family"]).to(TORCH[row["dtype"]], copy=True).requires_grad_()
    more = {"mask": _mask()} if row["mask"] == "some" else {}
    y = call(x, **more)
    if more:  # experts that are shared still see the others
        y = torch.where(_mask()[..., None], y, 0)
    flowing = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16).to(y.dtype)
    torch.autograd.backward([y], [flowing])
    found = {name: getattr(one, "main_grad", one.grad) for name, one in wanted.items()}
    assert all(one.grad is None for one in wanted.values() if hasattr(one, "main_grad")), "main_grad and grad"
    found = {name: torch.zeros_like(wanted[name]) if one is None else one for name, one in found.items()}
    assert x.grad is not None
    return {"output": y.detach(), "d x": x.grad, **found}


def _mask() -> torch.Tensor:
    return torch.arange(_TOKENS).view(1, -1) % 3 > 0


@functools.cache
def _judged(family: str, dtype: str, mask: str, cast: str) -> Tensors:
    """Of the eager block."""
    row = {"family": family, "dtype": dtype, "mask": mask, "autocast": cast}
    held = Held(family, dtype)
    with autocast(row):
        return _step(held, held, row, dict(held.named_parameters()))


def examine(row: Row, engine: str = "reference", seed: int = 0) -> list[str]:
    """What is wrong with a row. Raises what the library raises."""
    assert engine == "reference", engine
    torch.manual_seed(seed)
    family, dtype, cast = row["family"], row["dtype"], row["autocast"]
    exact, eager = _judged(family, "float64", row["mask"], "none"), _judged(family, dtype, row["mask"], cast)
    with cpu_engine(engine), autocast(row):
        found, adapters = _through(row)
    wrong = [f"{name}: no gradient" for name, one in adapters.items() if not one.any()]
    judged = "float32" if dtype in ("float32", "float64") and cast == "none" else "bfloat16"
    try:
        require_close("row", judged, found, eager, exact)
    except AssertionError as error:
        wrong.append(str(error))
    return wrong


def _through(row: Row) -> tuple[Tensors, Tensors]:
    """(results by the names of the block, gradients of adapters) of the step with all that the row says."""
    held = Held(row["family"], row["dtype"])
    way, option = row["by"], row["option of use"]
    if way == "use":
        options: dict[str, Any] = {} if option == "none" else {option: True}
        moe_torch.transformers.use(held, **options)
    else:
        held.block = MoE.from_block(held.block, held.config, block_router=way == "block_router")
    wanted: dict[str, Any] = dict(held.named_parameters())
    adapters = adapted(held) if row["PEFT"] != "none" else {}
    if row["hooks"] != "none":
        held.block.experts.register_forward_hook(lambda *seen: None)
    if option == "main_grad":
        for name, one in wanted.items():
            if ".experts." in name and one.ndim == 3:
                one.main_grad = torch.zeros_like(one, dtype=torch.float32)
    call: Any = held
    if row["functional_call"] != "none":
        by_id: dict[int, Any] = {id(one): one.detach().clone() for one in held.parameters()}
        copies = {name: by_id[id(one)] for name, one in held.named_parameters()}
        for one in wanted.values():
            if hasattr(one, "main_grad"):
                by_id[id(one)].main_grad = one.main_grad
        wanted, adapters = ({name: by_id[id(one)] for name, one in some.items()} for some in (wanted, adapters))
        call = lambda x, **more: torch.func.functional_call(held, copies, (x,), more)  # noqa: E731
    for one in (*wanted.values(), *adapters.values()):
        one.requires_grad_()
    if row["checkpointing"] != "none":
        inner = call
        call = lambda x, **more: checkpoint(inner, x, use_reentrant=False, **more)  # noqa: E731
    x = tokens(row["family"]).to(TORCH[row["dtype"]])
    if row["export"] != "none":
        call = _exported(row, held, call)
    elif row["compile"] != "none":
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager")
    if row["router logits"] != "none":
        call = functools.partial(_recorded, call)
    replayed = None
    if row["trace"].startswith("replay"):
        with torch.no_grad(), trace.capture() as recording:
            held(x)
        (layer,) = recording.layers
        replayed = layer if row["trace"] == "replay" else trace.LayerRouting(layer.ids, None, layer.num_experts)
    found, captured = traced(row, replayed, lambda: _step(held, call, row, wanted | adapters))
    if captured is not None:
        exact = Held(row["family"], "float64")
        ids = exact.block.router(x[0].double())[2] if exact.by_parts else block_run(exact.block, x.double())[1]
        seen = _mask()[0] if row["mask"] == "some" else slice(None)
        same = ids is None or torch.equal(captured.ids[seen].sort(-1).values, ids[seen].sort(-1).values.int())
        assert same, "captured ids"
    results = {name.replace(".base_layer", ""): one for name, one in found.items() if name not in adapters}
    return as_block(held, results), {name: found[name] for name in adapters}


def _recorded(call: Callable[..., Any], x: Any, **more: Any) -> Any:
    """A forward, whose router's logits transformers collects, and not the backward."""
    collector: Any = transformers.utils.output_capturing._active_collector
    token = collector.set({"router_logits": []})
    try:
        return call(x, **more)
    finally:
        collector.reset(token)


def _exported(row: Row, held: Held, call: Callable[..., Any]) -> Any:
    x, more = tokens(row["family"]).to(TORCH[row["dtype"]]), {"mask": _mask()} if row["mask"] == "some" else {}
    if row["checkpointing"] != "none":
        program = torch.nn.Module()
        program.held, program.forward = held, call
        return torch.export.export(program, (x,), more).module()
    return torch.export.export(held, (x,), more).module()


def adapted(held: Held) -> dict[str, Any]:
    """New adapters of the experts' matrices, which change nothing: B of each."""
    import peft

    names = [name for name, one in held.named_parameters() if ".experts." in name and one.ndim == 3]
    peft.get_peft_model(held, peft.LoraConfig(r=2, target_modules=[], target_parameters=names))
    return {name: one for name, one in held.named_parameters() if "lora_B" in name}
