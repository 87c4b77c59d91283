"""The ranks that share the experts, as users name them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from moe_core.base.arrays import row_stride
from moe_core.base.checks import finite_float, require_choice, set_integer
from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel.placement import Placement
from moe_core.parallel.spec import ExchangeSpec
from moe_core.parallel.tensor import TOKENS, WHOLE, TensorSplit
from moe_core.plan.float64 import refuse_float64
from moe_torch.bridge.arrays import array_spec
from moe_torch.bridge.options import require_instance
from moe_torch.bridge.private import flat_mesh
from moe_torch.parallel.deep_ep import require_buffer
from moe_torch.parallel.group import Ranks, levels_of, ranks_of
from moe_torch.parallel.peer.interface import require_peer_format
from moe_torch.parallel.rollcall import register
from moe_torch.parallel.route import tell_failure
from moe_torch.parallel.tensor import TensorRanks, require_apart

_Made = TypeVar("_Made")
#: Texts for errors, which callers may number.
_MOST_KEPT = 1024
_numbers = itertools.count(1)
_by_name: weakref.WeakValueDictionary[str, ExpertParallel] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class ExpertParallel:
    """The ranks that share the experts, and how rows travel between them.

    Args:
        mesh: a DeviceMesh of one axis, such as `mesh["ep"]`, or a process group. A DeviceMesh of two axes, such as
            `mesh["host", "local"]`, is hosts and the ranks of each: a token then crosses to a host once.
        exchange: how rows travel.
        max_tokens: the most tokens of a rank in one call. None: any number. Mode `peer` needs it: the first call
            allocates for them.
        tensor: a second axis, such as `mesh["tp"]`. Its ranks have slices of each expert: columns of gate and up, rows
            of down. Results are sums over it, so the bits are not one device's. None: experts are whole.
        timeout: seconds of a message on a CPU. None: the process group's, which always counts on a GPU.
        tensor_tokens: `split`: ranks of tensor have their own tokens, equally many, as with sequence parallelism.
            `replicated`: they have the same tokens, and all get the results.
        gradients: of experts. `sum`: over all ranks' tokens. `mean`: divided by their number of ranks, for other
            gradients that are averaged over ranks, as FSDP and DistributedDataParallel do.
        buffer: a `deep_ep.ElasticBuffer` or `deep_ep.Buffer` of the ranks, with `ExchangeSpec(transport="deep_ep")`.

    Raises:
        InvalidInput: a mesh of several axes, axes that overlap, wrong numbers, mode `peer` without max_tokens.
        Unsupported: a format and chunks with other modes, a tensor axis with a buffer.
    """

    mesh: Any
    exchange: ExchangeSpec = dataclasses.field(default_factory=ExchangeSpec)
    max_tokens: int | None = None
    tensor: Any = None
    timeout: float | None = None
    tensor_tokens: str = "split"
    gradients: str = "sum"
    buffer: Any = None
    #: In the text of compiled programs.
    name: str = dataclasses.field(default="", init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"parallel {next(_numbers)}")
        _by_name[self.name] = self
        require_instance("exchange", self.exchange, ExchangeSpec)
        levels, hosts = levels_of(self.mesh), self.exchange.hosts
        if levels is not None:
            object.__setattr__(self, "exchange", dataclasses.replace(self.exchange, hosts=levels[0].size()))
            if self.tensor is not None:
                raise Unsupported("tensor must be None with a mesh of hosts and their ranks; pass a mesh of one axis")
        if hosts not in (1, self.exchange.hosts if levels else 1):
            raise InvalidInput(
                f"exchange.hosts must be those of mesh, got {hosts} with {self.mesh}; leave it out, and pass a mesh of "
                "two axes, such as mesh['host', 'local']"
            )
        for axis in (self.mesh, *(levels or ())):
            register(ranks_of(axis, None, "").group)
        if (self.buffer is not None) != self.exchange.other:
            raise InvalidInput(
                f"buffer must be passed with exchange.transport='deep_ep' alone, got {type(self.buffer).__name__} with "
                f"{self.exchange.transport!r}; pass both or none"
            )
        if self.buffer is not None:
            require_buffer(self.buffer, ranks_of(self.mesh, None, ""))
            if self.tensor is not None:
                raise Unsupported("tensor must be None with a buffer of DeepEP; leave out one of the two")
        if self.max_tokens is not None:
            set_integer(self, "max_tokens", 1)
        if self.timeout is not None and finite_float("timeout", self.timeout) <= 0:
            raise InvalidInput(f"timeout must be above 0 seconds, got {self.timeout}; leave it out for the group's")
        require_choice("tensor_tokens", self.tensor_tokens, TOKENS)
        require_choice("gradients", self.gradients, ("sum", "mean"))
        if self.tensor is not None:
            require_apart(ranks_of(self.mesh, None, ""), ranks_of(self.tensor, None, "", "tensor", "tp"))
        elif self.tensor_tokens != "split":
            raise InvalidInput(f"tensor_tokens must be left out without tensor, got {self.tensor_tokens!r}; drop it")
        exchange, peer = self.exchange, self.exchange.mode == "peer"
        if peer and self.max_tokens is None:
            raise InvalidInput(
                "max_tokens must be given with mode 'peer', whose memory is made for it, got None; pass the most that "
                "a rank has in one call"
            )
        if peer:
            require_peer_format(exchange.format)
        for name, instead in (("format", None), ("chunks", 1)):
            if not peer and getattr(exchange, name) != instead:
                raise Unsupported(
                    f"exchange.{name} must not be {getattr(exchange, name)!r} in moe_torch.parallel with mode "
                    f"{exchange.mode!r}; pass {instead!r}, or mode 'peer'"
                )

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self) if field.init)

    @staticmethod
    def named(name: str) -> ExpertParallel | None:
        return _by_name.get(name)

    @functools.cached_property
    def _made(self) -> dict[Any, Any]:
        """Results that each call needs again, by method and arguments."""
        return {}

    def _once(self, make: Callable[..., _Made], *arguments: Any) -> _Made:
        key, made = (make.__name__, *arguments), self._made
        if key not in made:
            if len(made) >= _MOST_KEPT:
                made.clear()
            made[key] = make(*arguments)
        return made[key]

    @property
    def gradient_divisor(self) -> int:
        """The divisor of experts' gradients beside averaged ones: W, times `split` ranks of tensor; for "mean" 1."""
        return self.token_ranks if self.gradients == "sum" else 1

    @property
    def token_ranks(self) -> int:
        """Number of ranks with different tokens."""
        return self.ranks().size * self.split.token_ranks

    @functools.cached_property
    def split(self) -> TensorSplit:
        """This rank on the tensor axis."""
        if self.tensor is None:
            return WHOLE
        ranks = ranks_of(self.tensor, None, "")
        return TensorSplit(ranks.size, ranks.rank, self.tensor_tokens)

    def tensor_ranks(self, where: str = "") -> TensorRanks | None:
        """The ranks that split each expert, or None. where: as in `ranks`."""
        if self.split.size == 1:
            return None
        return TensorRanks(self._once(self._tensor_ranks, where), self.split)

    def _tensor_ranks(self, where: str) -> Ranks:
        return ranks_of(self.tensor, self.timeout, f"the tensor axis of {self._named(where)}")

    def _named(self, where: str) -> str:
        return f"mode {self.exchange.mode}{where and f', {where}'}"

    def ranks(self, where: str = "", overlaps: bool = False) -> Ranks:
        """The group, for messages. where: text for errors. overlaps: see `Ranks`."""
        return self._once(self._ranks, where, overlaps)

    def _ranks(self, where: str, overlaps: bool) -> Ranks:
        return dataclasses.replace(ranks_of(self.mesh, self.timeout, self._named(where)), overlaps=overlaps)

    def levels(self, where: str = "", overlaps: bool = False) -> tuple[Ranks, Ranks] | None:
        """The ranks between hosts, and inside this host. None: one level. Arguments as in `ranks`."""
        return None if self.exchange.hosts == 1 else self._once(self._levels, where, overlaps)

    def _levels(self, where: str, overlaps: bool) -> tuple[Ranks, Ranks]:
        axes, where = levels_of(self.mesh), self._named(where)
        assert axes is not None, "hosts are those of a mesh of two axes"
        between, inside = (
            dataclasses.replace(ranks_of(axis, self.timeout, f"{where}, {of} hosts"), overlaps=overlaps)
            for axis, of in zip(axes, ("between", "inside"), strict=True)
        )
        return between, inside

    @property
    def axis(self) -> Any:
        """The mesh as one axis of all ranks."""
        return self.mesh if levels_of(self.mesh) is None else flat_mesh(self.mesh)


def require_tokens(x: Any, parallel: ExpertParallel) -> None:
    require_instance("x", x, torch.Tensor)
    refuse_float64(x.dtype == torch.float64)
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InvalidInput(
            f"x must be bf16, fp16 or fp32 [T, D], got {x.dtype} {list(x.shape)}; flatten the batch axes first"
        )
    row_stride("x", array_spec("x", x))
    most = parallel.max_tokens
    if most is not None and len(x) > most:
        raise InvalidInput(f"x must have at most max_tokens = {most} tokens, got {len(x)}; raise max_tokens")


def require_ranks(placement: Placement, ranks: Ranks) -> None:
    if placement.num_ranks != ranks.size:
        message = f"placement must be of the {ranks.size} ranks of the mesh, got {placement}; make it for them"
        raise InvalidInput(message)


def tells_peers(parallel: ExpertParallel, device: torch.device) -> bool:
    """Return True if the host waits for a message that reports failed ranks."""
    return parallel.exchange.mode == "all_to_all" or device.type == "cpu"


def tell_peers(
    parallel: ExpertParallel, placement: Placement, device: torch.device, tensor: TensorRanks | None = None
) -> None:
    """Tell waiting ranks that this one raises, if possible. tensor: messages over that axis so far."""
    if tells_peers(parallel, device):
        tensor = parallel.tensor_ranks() if tensor is None else tensor
        with contextlib.suppress(RuntimeError):
            if tensor is not None and not tensor.told:
                tensor.tell_failure(device)
        with contextlib.suppress(RuntimeError):
            tell_failure(parallel.ranks(), parallel.exchange, placement, device)
