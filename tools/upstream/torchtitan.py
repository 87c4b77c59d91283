"""torchtitan's own experts on our grouped matmul: one method of its file is replaced, and results are compared with
float64 beside those of torch's own kernel."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch

import moe_torch
from tools.upstream import imports
from tools.upstream.running import on_engine

COMMON = "torchtitan.models.common"
#: Modules that are the wheel's own files, unmodified.
SERVED = (
    *(f"{COMMON}.{name}" for name in ("moe", "linear", "feed_forward", "token_dispatcher")),
    *("torchtitan.models.gpt_oss.moe", "torchtitan.ops.scatter_add"),
)
#: The most error: a factor of the error of torch's own kernel, which adds in another order, plus bf16 roundings of sums
#: between two numbers.
MOST_OF_ITS_ERROR, ROUNDED = 1.25, 2.0**-10
B, L, D, F, E, K = 2, 24, 32, 48, 8, 2


class _Configurable:
    """The base of torchtitan's classes: a configuration that builds its class."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[Any] = None

        def build(self) -> Any:
            return type(self)._owner(self)

    def __init_subclass__(cls) -> None:
        if "Config" in vars(cls):
            cls.Config._owner = cls


class _Module(torch.nn.Module, _Configurable):
    pass


STAND_INS: dict[str, imports.Names] = {
    "spmd_types": {"register_autograd_function": lambda function: function},
    "torchtitan.config": {
        "Configurable": _Configurable,
        "override": lambda **_: lambda factory: factory,
        "derive": lambda source, kind, **more: kind(num_experts=source.num_experts, top_k=source.top_k, **more),
    },
    "torchtitan.protocols.module": {"Module": _Module},
    "torchtitan.distributed.utils": {"get_spmd_backend": lambda: "default"},
    "torchtitan.distributed.spmd_types": {"maybe_set_sparse_mesh": contextlib.nullcontext},
    "torchtitan.tools.utils": {"device_type": "cpu"},
}


def ours(self: Any, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return moe_torch.grouped_mm(A, B_t, offs)


def exact(self: Any, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """One group at a time in float64, with one cast."""
    starts = [0, *offs.tolist()]
    parts = enumerate(itertools.pairwise(starts))
    rows = [A[first:last].double() @ B_t[group].double() for group, (first, last) in parts]
    return torch.cat([*rows, A.new_zeros(len(A) - starts[-1], B_t.shape[-1], dtype=torch.float64)]).to(A.dtype)


def _layers() -> Iterator[tuple[str, Any, tuple[torch.Tensor, ...]]]:
    """(name, module, arguments): experts with rows behind the last group, and whole layers."""
    modules = [f"{COMMON}.{name}" for name in ("moe", "linear", "token_dispatcher")]
    modules.append("torchtitan.models.gpt_oss.moe")
    moe, linear, dispatcher, gpt_oss = (importlib.import_module(name) for name in modules)
    experts = {"dim": D, "hidden_dim": F, "num_experts": E}
    tokens = torch.tensor([9, 0, 30, 1, 4, 0, 17, 11])
    for name, kind in (("experts", moe.GroupedExperts), ("experts of gpt-oss", gpt_oss.GptOssGroupedExperts)):
        yield name, kind.Config(**experts).build(), (torch.randn(80, D), tokens)
    gate = linear.Linear.Config(in_features=D, out_features=E)
    dispatch = dispatcher.LocalTokenDispatcher.Config(num_experts=E, top_k=K)
    inner = moe.GroupedExperts.Config(**experts)
    routed = moe.RoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatch)
    for score in ("softmax", "sigmoid"):
        router = moe.TokenChoiceTopKRouter.Config(num_experts=E, gate=gate, top_k=K, score_func=score, route_norm=True)
        config = moe.MoE.Config(num_experts=E, routed_experts=routed, router=router)
        yield f"layer with {score}", config.build(), (torch.randn(B, L, D),)


def _run(module: Any, arguments: tuple[torch.Tensor, ...], compiled: bool) -> dict[str, torch.Tensor]:
    x, *others = arguments
    x = x.detach().requires_grad_()
    y = (torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module)(x, *others)
    known = len(x) if not others else int(others[0].sum())
    y = y[:known]  # torch's own kernel leaves the other rows as they come
    weights = dict(module.named_parameters())
    factors = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    gradients = torch.autograd.grad(y, (x, *weights.values()), factors, allow_unused=True)
    found = {"output": y, "d_x": gradients[0][:known], **dict(zip(weights, gradients[1:], strict=True))}
    return {name: value.detach() for name, value in found.items() if value is not None}


def check(files: pathlib.Path, engine: str) -> list[str]:
    """Results that are further from float64 than torch's own. Prints a line for each module."""
    problems = []
    torch.manual_seed(0)
    with imports.world(files, STAND_INS, {}, SERVED), on_engine(engine) as device:
        owner = importlib.import_module(f"{COMMON}.moe").GroupedExperts
        for name, module, arguments in _layers():
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.normal_(std=0.2)
            module, arguments = module.to(device), tuple(one.to(device) for one in arguments)

            def run(method: Callable[..., Any] | None, compiled: bool = False) -> dict[str, torch.Tensor]:
                changed = (
                    contextlib.nullcontext() if method is None else mock.patch.object(owner, "_grouped_mm", method)
                )
                with changed:
                    return _run(module, arguments, compiled)  # noqa: B023

            wanted, theirs, found = run(exact), run(None), run(ours)
            programs = run(ours, compiled=True) if "layer" not in name else found
            equal = 0
            for part, value in wanted.items():
                scale = value.double().norm().clamp_min(1e-30)
                errors = [float((one[part].double() - value.double()).norm() / scale) for one in (found, theirs)]
                equal += torch.equal(found[part], theirs[part])
                if not errors[0] <= MOST_OF_ITS_ERROR * errors[1] + ROUNDED:
                    problems.append(
                        f"{engine}, {name}: {part} is off by {errors[0]:.2e}, torch's own by {errors[1]:.2e}"
                    )
                if not torch.equal(programs[part], found[part]):
                    problems.append(f"{engine}, {name}: {part} of the compiled module has other bits")
            print(f"{engine:<11} {name:<32} {len(wanted)} results, {equal} bitwise equal to torch's own kernel")
    return problems
