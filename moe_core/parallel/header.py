"""Eight numbers that ranks of an exchange compare; they travel with the counts."""

from __future__ import annotations

import zlib
from collections import Counter
from typing import NamedTuple

import numpy as np

from moe_core.base import codec
from moe_core.base.dtypes import MATMUL_DTYPES
from moe_core.errors import InvalidInput
from moe_core.parallel.placement import Placement
from moe_core.parallel.spec import MODES, ExchangeSpec
from moe_core.parallel.tensor import TOKENS, TensorSplit

#: The version of headers, 1 to 15, above the bits of `TensorSplit.digest`. A failed rank's header is all zeros.
_VERSION, _ABOVE = 5, 27
_DIGEST = 0x1FFFF
#: Bits of `Header.call`: top_k, a layer's number from 1 on (0: no layer), its calls modulo 8, the direction.
_TOP_K, _LAYER, _NUMBER, _BACKWARD = 0, 13, 25, 28
MOST_TOP_K, LAYERS, CALLS = 1 << 13, 1 << 12, 8
#: Modes with equal messages or buffers on all ranks, by the number of tokens (`peer`: the most).
STATIC_MODES = ("all_gather", "padded", "peer")


class Header(NamedTuple):
    """int32 `[8]` as names. options: mode, dtype, the rest of the spec, and a digest of what experts compute. call:
    top_k, layer, number of its call, direction. placement: a digest of the owners. tensor: `TensorSplit.digest` with a
    common index, and the version of headers."""

    tensor: int
    options: int
    receive: int
    tokens: int
    call: int
    d_model: int
    version: int
    placement: int

    @property
    def mode(self) -> str:
        return MODES[self.options & 3]

    def named(self) -> dict[str, int]:
        """The numbers by the names that errors use."""
        numbers = self._asdict()
        call = numbers.pop("call")
        numbers |= {"top_k": call % MOST_TOP_K, "layer": (call >> _LAYER) % LAYERS}
        return numbers | {"number of calls": (call >> _NUMBER) % CALLS, "direction": call >> _BACKWARD & 1}

    def of_call(self, layer: int, number: int, backward: bool = False) -> Header:
        """layer: from 1 on, 0: none. number: of its call. backward: the direction."""
        return self._replace(call=self.call | layer << _LAYER | number % CALLS << _NUMBER | backward << _BACKWARD)

    def describe_call(self) -> str:
        named = self.named()
        layer, direction = named["layer"], ("forward", "backward")[named["direction"]]
        numbered = f"layer {layer}, call {named['number of calls']} modulo {CALLS}" if layer else "no layer"
        return f"{numbered}, {direction}"

    def describe(self) -> str:
        bits = self.options >> 2
        dtype = MATMUL_DTYPES[bits & 3]
        rows = "slots" if bits & 4 else "tokens"
        overflow = "drop" if bits & 8 else "nan" if bits & 32 else "error"
        pass_ = "training" if bits & 16 else "inference"
        top_k, tokens = self.named()["top_k"], TOKENS[self.tensor & 1]
        receive = "the worst case" if self.receive < 0 else self.receive
        size, index = self.tensor >> 1 & 0x1FFF, self.tensor >> 14 & 0x1FFF
        return (
            f"mode {self.mode}, {dtype}, rows {rows}, on_overflow {overflow}, {pass_}, chunks "
            f"{bits >> 6 & 63}, format, hosts, transport and experts {bits >> 12:#x}, receive {receive}, "
            f"{self.tokens} tokens, top_k {top_k}, d_model {self.d_model}, tensor of {size} ranks, tokens {tokens}, "
            f"rank {index} of the other axis, placement {self.placement:#x} version {self.version}, "
            f"{self.describe_call()}"
        )

    def of_experts(self, digest: int) -> Header:
        return self._replace(options=self.options ^ (digest & _DIGEST) << 14)


_OF_ORDER = {"layer", "number of calls", "direction"}
FAILED = (0,) * len(Header._fields)


class PeerFailed(RuntimeError):
    """Other ranks of a collective failed and said so. ranks: their numbers."""

    def __init__(self, ranks: tuple[int, ...], where: str) -> None:
        names = ", ".join(map(str, ranks))
        super().__init__(f"rank {names} failed before {where}; its own error says why")
        self.ranks = ranks


def header_of(
    tokens: int,
    top_k: int,
    d_model: int,
    dtype: str,
    placement: Placement,
    spec: ExchangeSpec,
    training: bool,
    tensor: TensorSplit,
) -> Header:
    """Return the header of a call; arguments as for `plan_exchange`."""
    # A spec with hosts or another transport has no format.
    rest = f"{spec.hosts} hosts, {spec.transport}" if spec.format is None else codec.dumps(spec.format)
    format_digest = 0 if rest == "1 hosts, framework" else zlib.crc32(rest.encode()) & _DIGEST
    flags = spec.rows == "slots", spec.on_overflow == "drop", training, spec.on_overflow == "nan"
    options = MODES.index(spec.mode) | MATMUL_DTYPES.index(dtype) << 2
    options |= sum(flag << 4 + bit for bit, flag in enumerate(flags))
    options |= spec.chunks << 8 | format_digest << 14
    receive = -1 if spec.receive is None else spec.receive
    numbers = receive, tokens, top_k, d_model, placement.version, placement.digest
    return Header(_VERSION << _ABOVE | tensor.digest, options, *numbers)


def compare_headers(headers: np.ndarray, where: str = "the exchange", *, equal_tokens: bool = False) -> int:
    """Return the tokens of all ranks together, from their headers int32 `[W, 8]`.

    where: mode, layer and collective, for messages. equal_tokens: tokens must be equal, also with exact counts. Raises
    PeerFailed if a rank failed, RuntimeError for other bytes than headers, as of an aborted message, and InvalidInput
    with both headers if one differs from most, or from rank 0.
    """
    rows = np.asarray(headers).tolist()
    if rows[0][0] >> _ABOVE == _VERSION and all(row == rows[0] for row in rows):
        return len(rows) * Header(*rows[0]).tokens
    parsed = [Header(*row) for row in rows]
    failed = tuple(rank for rank, header in enumerate(parsed) if header == FAILED)
    if failed:
        raise PeerFailed(failed, where)
    if lost := [str(rank) for rank, header in enumerate(parsed) if header.tensor >> _ABOVE != _VERSION]:
        raise RuntimeError(f"no header of version {_VERSION} came from rank {', '.join(lost)} before {where}")
    # With exact counts, tokens may differ.
    known = [header if equal_tokens or header.mode in STATIC_MODES else header._replace(tokens=0) for header in parsed]
    votes = Counter(known)
    most = max(votes, key=lambda header: (votes[header], -known.index(header)))
    other = [rank for rank, header in enumerate(known) if header != most]
    if other:
        rank, usual = other[0], known.index(most)
        both = known[rank].named(), most.named()
        names = [name for name in both[0] if both[0][name] != both[1][name]]
        if "layer" in names and "number of calls" in names:
            names.remove("number of calls")
        ranks = ", ".join(map(str, other))
        describe, fix = Header.describe, "call with the same on all"
        if set(names) <= _OF_ORDER:
            describe, fix = Header.describe_call, "make and call layers in one order, equally often on all ranks"
        raise InvalidInput(
            f"all ranks must agree before {where}, got another {' and '.join(names)} on rank {ranks}: rank {rank} has "
            f"{describe(parsed[rank])}; rank {usual} has {describe(parsed[usual])}; {fix}"
        )
    return sum(header.tokens for header in parsed)
