"""Headers that ranks compare: what differs is named."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from moe_core.errors import InvalidInput
from moe_core.formats import format_named
from moe_core.parallel import ExchangeSpec, PeerFailed, Placement, compare_headers, plan_exchange
from moe_core.parallel.header import _ABOVE, _VERSION, FAILED, LAYERS, Header
from moe_core.parallel.tensor import TensorSplit

LINEAR = Placement.linear(8, 4)


def headers(*changes: dict[str, Any]) -> np.ndarray:
    """The headers of ranks that call with these changes."""
    plain = dict(tokens=5, top_k=2, d_model=16, dtype="float32", placement=LINEAR, spec=ExchangeSpec("padded"))
    digests = [change.get("experts", 0) for change in changes]
    changes = tuple({name: value for name, value in change.items() if name != "experts"} for change in changes)
    plans = [
        plan_exchange(**{**plain, **change}).of_experts(digest) for change, digest in zip(changes, digests, strict=True)
    ]
    found = np.array([plan.header for plan in plans], np.int32)
    assert found.shape == (len(changes), 8)
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 6}, "got another tokens on rank 2: rank 2 has .* 6 tokens, .*; rank 0 has .* 5 tokens, "),
        ({"top_k": 1}, "got another top_k on rank 2: .* top_k 1, .* top_k 2, "),
        ({"d_model": 32}, "got another d_model on rank 2"),
        ({"dtype": "bfloat16"}, "got another options on rank 2: rank 2 has mode padded, bfloat16, .* float32, "),
        ({"training": True}, "got another options on rank 2: .* training, .* inference"),
        ({"spec": ExchangeSpec("padded", "slots")}, "another options on rank 2: .* rows slots, .* rows tokens"),
        ({"spec": ExchangeSpec("padded", on_overflow="drop")}, "on rank 2: .* on_overflow drop, .* on_overflow error"),
        ({"spec": ExchangeSpec("padded", chunks=63)}, "another options on rank 2: .* chunks 63, .* chunks 1"),
        ({"spec": ExchangeSpec("padded", format=format_named("fp8_group"))},
            "another options on rank 2: .* format, hosts, transport and experts 0x"),
        ({"experts": 5}, "another options on rank 2: .* transport and experts 0x5, .* transport and experts 0x0"),
        ({"spec": ExchangeSpec("padded", receive=9)}, "another receive on rank 2: .* receive 9, .* receive the worst"),
        ({"spec": ExchangeSpec()}, "another options and tokens on rank 2: rank 2 has mode all_to_all"),
        ({"placement": dataclasses.replace(LINEAR, version=3)},
            "another version on rank 2: .* version 3, .*; .* version 0"),
        ({"placement": Placement.round_robin(8, 4)}, "another placement on rank 2"),
        ({"tensor": TensorSplit(4, 3, "replicated")},
            "another tensor on rank 2: .* tensor of 4 ranks, tokens replicated, rank 3 of .* tensor of 1 ranks"),
    ],
)  # fmt: skip
def test_ranks_that_disagree_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        compare_headers(headers({}, {}, change, {}))
    with pytest.raises(InvalidInput, match=r"another .* on rank 1: "):
        compare_headers(headers({}, change))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((2, 9), "another layer on rank 1: rank 1 has layer 2, call 1 modulo 8, forward; rank 0 has layer 7, call 1"),
        ((7, 2), "another number of calls on rank 1: .* call 2 modulo 8, forward; .* call 1 modulo 8, forward; make"),
        ((7, 1, True), "another direction on rank 1: rank 1 has .* backward; rank 0 has .* forward; make and call"),
        ((0, 1), "another layer on rank 1: rank 1 has no layer, forward; rank 0 has layer 7"),
        ((LAYERS - 1, 1), f"another layer on rank 1: rank 1 has layer {LAYERS - 1}, "),
    ],
)  # fmt: skip
def test_another_order_of_calls_is_named(call: tuple[Any, ...], message: str) -> None:
    (header,) = headers({})
    one = Header(*header).of_call(7, 1)
    assert compare_headers(np.array([one, one.of_call(0, 8)])) == 10, "calls are counted modulo 8"
    with pytest.raises(InvalidInput, match=message):
        compare_headers(np.array([one, Header(*header).of_call(*call), one]))


def test_headers_that_agree_count_the_tokens() -> None:
    assert compare_headers(headers({}, {}, {})) == 15
    assert headers({})[0, 0] >> _ABOVE == _VERSION
    exact = {"spec": ExchangeSpec()}
    assert compare_headers(headers(exact, {**exact, "tokens": 0}, {**exact, "tokens": 9})) == 14


def test_a_rank_that_failed_is_named_at_once() -> None:
    found = headers({}, {}, {"top_k": 1})
    found[1] = FAILED
    with pytest.raises(
        PeerFailed, match=r"rank 1 failed before layer 3, all_to_all of counts; its own error says why"
    ) as error:
        compare_headers(found, "layer 3, all_to_all of counts")
    assert error.value.ranks == (1,) and isinstance(error.value, RuntimeError)
    assert len(FAILED) == len(Header._fields) == 8


def test_other_bytes_are_no_headers() -> None:
    """An aborted message leaves memory as it was."""
    found = headers({}, {}, {})
    found[1:] = np.random.default_rng(0).integers(0, 1 << 27, (2, 8))
    with pytest.raises(RuntimeError, match=r"no header of version \d came from rank 1, 2 before layer 3"):
        compare_headers(found, "layer 3")
    with pytest.raises(RuntimeError, match="came from rank 0, 1 before the exchange"):
        compare_headers(np.ones((2, 8), np.int32))
