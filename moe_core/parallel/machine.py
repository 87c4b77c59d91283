"""What connects ranks, and which mode of an exchange suits them."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.base.checks import finite_float, require_flag, require_kind, set_integer
from moe_core.base.sizes import INT32_LIMIT
from moe_core.errors import InvalidInput
from moe_core.parallel.placement import Placement

#: Tokens of all ranks up to which every rank may as well see all of them.
FEW_TOKENS = 256


@dataclass(frozen=True)
class Link:
    """A way between two ranks: microseconds until a message's first byte arrives, GB/s of a rank in one direction."""

    latency_us: float
    bandwidth: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "latency_us", finite_float("latency_us", self.latency_us))
        if self.latency_us < 0:
            raise InvalidInput(f"latency_us must be at least 0, got {self.latency_us}; measure it")
        _set_positive(self, "bandwidth")

    def us(self, size: float) -> float:
        """Microseconds for so many bytes of one rank."""
        return self.latency_us + size / self.bandwidth / 1e3 if size else 0.0


@dataclass(frozen=True)
class Machine:
    """What a cost model knows of GPUs. domain: ranks that nvlink connects, one after another; network: what connects
    others, None = there are none. tflops: 10^12 operations per second of a layer's products. memory: its bandwidth in
    GB/s. All are given: nothing here is measured."""

    nvlink: Link
    network: Link | None
    domain: int
    tflops: float
    memory: float

    def __post_init__(self) -> None:
        require_kind("nvlink", self.nvlink, Link)
        require_kind("network", self.network, Link, optional=True)
        set_integer(self, "domain", 1, INT32_LIMIT)
        _set_positive(self, "tflops")
        _set_positive(self, "memory")


def _set_positive(options: object, name: str) -> None:
    value = finite_float(name, getattr(options, name))
    if value <= 0:
        raise InvalidInput(f"{name} must be above 0, got {value}; measure it, or take it from a data sheet")
    object.__setattr__(options, name, value)


#: Hosts of eight H200: 340 of nominally 450 GB/s over NVLink, 45 of 50 GB/s a GPU between hosts, and what products of
#: bf16 layers reach in docs/user/performance.md. Latencies are assumed.
H200 = Machine(Link(10.0, 340.0), Link(20.0, 45.0), 8, 620.0, 4500.0)


def choose_mode(
    tokens: int, placement: Placement, machine: Machine, *, capturable: bool = False, symmetric: bool = False
) -> tuple[str, str]:
    """The mode of an exchange, and why. tokens: of a rank. capturable: the host may read nothing, as under a CUDA
    graph. symmetric: ranks of a domain can store to each other's memory. Raises InvalidInput."""
    require_kind("placement", placement, Placement)
    require_kind("machine", machine, Machine)
    require_flag("capturable", capturable)
    require_flag("symmetric", symmetric)
    ranks = placement.num_ranks
    if ranks == 1:
        return "all_gather", "one rank has all experts"
    if ranks * tokens <= FEW_TOKENS:
        return "all_gather", f"{ranks * tokens} tokens of all ranks are at most {FEW_TOKENS}: latency counts, not bytes"
    if symmetric and ranks <= machine.domain:
        return "peer", f"{ranks} ranks of one domain of {machine.domain} store to each other's memory"
    if capturable:
        return "padded", "the host may read nothing, and blocks have one size"
    return "all_to_all", "exact counts move fewest rows, and the host may read them"
