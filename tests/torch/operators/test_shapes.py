"""Shapes and dtypes that compilers are told of a call, against those that it gives: no two sizes are equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import moe_torch
from moe_core.specs.exchange import TableSpec
from moe_torch import ops
from moe_torch.bridge.operator import Operator
from moe_torch.operators import exchange, routes, stages
from tests.support.torch import running_on

T, K, E, D, F = 6, 2, 5, 8, 12
SPEC = moe_torch.MoESpec(moe_torch.Activation("silu"))


#: Modes and rows with the rows of blocks, and with what came.
SENT = ("all_to_all", "tokens"), ("all_to_all", "slots"), ("padded", "tokens", 3, 7), ("padded", "slots", 3, 3)
SENT += (("all_gather", "tokens", T, 9),)
RECEIVED = ("all_to_all", "tokens", 9, 4), ("padded", "tokens", 2, 20), ("padded", "slots", 2, 14)


def ones(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.ones(shape, dtype=dtype)


def ids() -> Any:
    return (torch.arange(T * K, dtype=torch.int32) % E).view(T, K)


def layout() -> Any:
    return ops.make_layout(ids(), E)


def peer_places() -> Any:
    """Of 2 ranks of 3 places."""
    placed = ops.make_layout(ids(), 6)
    return tuple(
        exchange.PEER_PLACES.call(
            ids=ids(), group_start=placed.group_start, row_of_slot=placed.row_of_slot,
            counts=ones(2, 6, dtype=torch.int32), rank=0, receive=7,
        )
    )  # fmt: skip


def sum_results() -> Any:
    given = dict.fromkeys(("headers", "agree", "wanted", "shared", "shared_gate", "memory"))
    return exchange.SUM_RESULTS.call(y=ones(13, D), row_of_slot=ids(), **given, out_dtype="float32")


def moe(routing: Any, router: Any = None) -> Any:
    spec = dataclasses.replace(SPEC, router=router)
    return tuple(ops.moe(ones(T, D), moe_torch.ExpertWeights(ones(E, D, 2 * F), ones(E, F, D)), routing, spec))


def send_tables(*sizes: Any) -> Any:
    """mode, rows, and the rows of blocks, with 2 ranks of 3 places each."""
    mode, rows, *blocks = sizes
    spec: Any = TableSpec(mode, rows, 2, 3, E, *blocks)
    places = torch.arange(6, dtype=torch.int32)
    tables = routes.SEND_TABLES.call(
        ids=ids(), weights=ones(T, K, dtype=torch.float32), places_of_experts=places, start=places,
        header=ones(8, dtype=torch.int32), token_mask=None, tokens=None, limits=None, spec=spec, rank=0,
    )  # fmt: skip
    return tuple(tables)


def receive_tables(mode: str, rows: str, *came: int) -> Any:
    spec = TableSpec(mode, rows, 2, 3, E, *(() if mode == "all_to_all" else (3, 7)))
    header, counts, results = ones(8, dtype=torch.int32), None, None
    if mode == "all_to_all":
        # No row has arrived.
        header, counts, results = None, torch.zeros(2, 10, dtype=torch.int32), ones(1, D)
    count = 11 if mode == "all_to_all" else 6 if rows == "slots" else 14
    tables = routes.RECEIVE_TABLES.call(
        came=ones(*came, dtype=torch.int32), header=header, lost=None, counts=counts, results=results, spec=spec,
        rank=0, top_k=K, num_rows=count, num_tokens=T,
    )  # fmt: skip
    return tuple(tables)


CALLS: dict[str, Callable[[], Any]] = {
    "scale_rows": lambda: ops.scale_rows(ones(T, D), ones(T, 1, dtype=torch.float32)),
    "activation": lambda: ops.activation(ones(T, 2 * F), moe_torch.Activation("silu")),
    "activation of two": lambda: ops.activation(
        ones(T, F), moe_torch.Activation("silu", gate_layout="separate"), up=ones(T, F), out_dtype="float32"
    ),
    "rms_norm": lambda: ops.rms_norm(ones(T, D), ones(D)),
    "router": lambda: ops.router(ones(T, D), ones(D, E)),
    "route": lambda: tuple(ops.route(ones(T, E, dtype=torch.float32), moe_torch.RouterSpec(K))),
    "make_layout": lambda: tuple(vars(layout()).values()),
    "make_layout without tokens": lambda: tuple(vars(ops.make_layout(ids()[:0], E, alignment=16)).values()),
    "gather_rows": lambda: ops.gather_rows(ones(T, D), layout()),
    "quantize_rows": lambda: ops.quantize_rows(ones(T, 64), ops.format_named("fp8_token")),
    "take_rows": lambda: routes.TAKE_ROWS.call(x=ones(T, D), slot_of_row=ids().view(-1), table=None, each=K),
    "take_rows and numbers": lambda: routes.TAKE_ROWS.call(
        x=ones(T, D), slot_of_row=ids()[:, 0].contiguous(), table=ids(), each=K
    ),
    **{f"send_tables {sizes}": lambda sizes=sizes: send_tables(*sizes) for sizes in SENT},
    **{f"receive_tables {sizes}": lambda sizes=sizes: receive_tables(*sizes) for sizes in RECEIVED},
    "route_rounded": lambda: tuple(
        ops.route_rounded(ones(17, E, dtype=torch.float32), moe_torch.RouterSpec(K), moe_torch.TokenRounding(16))
    ),
    "make_layout with fewer rows": lambda: tuple(vars(ops.make_layout(ids(), E, rows=7)).values()),
    "pack_bitmatrix": lambda: ops.pack_bitmatrix(ids(), 40),
    "unpack_bitmatrix": lambda: ops.unpack_bitmatrix(ones(T, 2, dtype=torch.int32).view(torch.uint32), 40, K),
    "layout_of_runs": lambda: (*ops.layout_of_runs(ones(2, E, dtype=torch.int32), 13),),
    "reduce": lambda: ops.reduce(ones(T * K, D), layout(), out_dtype="float32"),
    "peer_places": peer_places,
    "peer_take_rows": lambda: exchange.TAKE_ROWS.call(
        x=ones(7, D),
        scales=None,
        rows=ones(11, 1, dtype=torch.int32),
        group_start=ones(E + 1, dtype=torch.int32),
        dtype=None,
        programs=None,
    ),
    "result_addresses": lambda: exchange.RESULT_ADDRESSES.call(
        sources=ones(9, 2, dtype=torch.int32),
        group_start=ones(E + 1, dtype=torch.int32),
        slots_at=ones(2, dtype=torch.int64),
        num_slots=T * K,
        width=D,
        dtype="bfloat16",
    ),
    "sum_results": sum_results,
    "moe of logits": lambda: moe(moe_torch.RouterLogits(ones(T, E, dtype=torch.float32)), moe_torch.RouterSpec(K)),
    "moe of a choice": lambda: moe(moe_torch.TopK(ids(), ones(T, K, dtype=torch.float32))),
}


def described(found: Any) -> list[tuple[tuple[int, ...], Any]]:
    if isinstance(found, torch.Tensor):
        return [(tuple(found.shape), found.dtype)]
    parts = found if isinstance(found, tuple) else vars(found).values()
    return [one for part in parts if isinstance(part, torch.Tensor) for one in described(part)]


class Called(TorchDispatchMode):
    """The names of our operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().removeprefix("moebius::"))
        return func(*args, **(kwargs or {}))


def test_every_operator_with_results_is_among_them() -> None:
    """Products are in opcheck's tests, and calls that read or store at peers' addresses in those of peers."""
    known = [one for module in (exchange, routes, stages) for one in vars(module).values() if type(one) is Operator]
    with running_on("reference"), torch.no_grad(), FakeTensorMode(), Called() as called:
        for call in CALLS.values():
            call()
    missing = {one.name for one in known if one.signature.returns != 0} - called.names
    assert missing == {"matmul_ogs", "matmul_ogs_quantized", "combine_pull_weights", "push_tokens_once"}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_what_compilers_are_told(name: str) -> None:
    assert stages.SCALE_ROWS.name == "scale_rows"
    with running_on("reference"), torch.no_grad():
        wanted = described(CALLS[name]())
        with FakeTensorMode():
            assert described(CALLS[name]()) == wanted != []
