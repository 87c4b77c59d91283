"""Stand-ins for Gluon's operations, and kernels rebound to them."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper

from tests.support.faults.kernel_copies import NO_FAULT, OpFault
from tests.support.hopper.machine import Barrier, Clock, Machine, Warp, join
from tests.support.hopper.values import OPAQUE, Array, Number, Opaque, Shared, known

#: Stages of a tile's tail, and steps of each: sums of what is not known.
TAILS = 2


class Operations:
    """What a kernel calls, on one machine."""

    def __init__(self, machine: Machine, fault: OpFault) -> None:
        self.machine, self._fault, self.planted = machine, fault, fault == NO_FAULT
        self._modules: dict[int, dict[str, Any]] = {}
        barriers, copies = hopper.mbarrier, hopper.async_copy
        tma = hopper.tma
        self.known: dict[int, Any] = {
            id(gl): self.namespace(gl), id(tl): self.namespace(tl), id(triton): OPAQUE,
            id(barriers): types.SimpleNamespace(
                init=self.init, wait=self.wait, arrive=self.arrive, expect=self.expect, MBarrierLayout=lambda: "barrier"
            ),
            id(copies): types.SimpleNamespace(
                mbarrier_arrive=self.copies_arrive, commit_group=self.commit_copies, wait_group=self.wait_for_copies
            ),
            id(ampere.mma_v2): lambda _left, _right, accumulator: accumulator,
            id(tma): types.SimpleNamespace(store_wait=self.store_wait),
            id(hopper.warpgroup_mma): self.product, id(hopper.warpgroup_mma_wait): self.product_wait,
            id(hopper.fence_async_shared): machine.fence,
            id(getattr(gl, "barrier", None) or getattr(gl, "thread_barrier", None)): machine.gather,
        }  # fmt: skip
        for module, names, function in (
            (tma, ("async_load", "async_copy_global_to_shared"), self.tma_load),
            (tma, ("async_store", "async_copy_shared_to_global"), self.tma_store),
            (copies, ("async_load", "async_copy_global_to_shared"), self.row_load),
        ):
            self.known |= {id(getattr(module, name)): function for name in names if hasattr(module, name)}

    def namespace(self, module: Any) -> Any:
        """Triton's or Gluon's language."""
        names = {
            "where": self.where, "load": self.load, "store": lambda *_a, **_o: None, "atomic_add": self.atomic_add,
            "minimum": lambda a, b: Number(min(a, b)) if known(a, b) else OPAQUE,
            "maximum": lambda a, b: Number(max(a, b)) if known(a, b) else OPAQUE,
            "max": lambda value, axis=0: value, "cdiv": lambda a, b: -(-a // b) if known(a, b) else OPAQUE,
            "full": lambda _shape, value, *_a: value,
            "cast": lambda value, *_a: Number(value) if known(value) else value,
            "static_range": lambda *bounds: range(*bounds) if known(*bounds) else range(1),
            "num_warps": lambda: 4, "program_id": lambda _axis: Number(0), "num_programs": lambda _axis: Number(1),
            "split": lambda _value: (OPAQUE, OPAQUE), "allocate_shared_memory": self.allocate,
            "warp_specialize": self.specialize, "static_assert": lambda *_a: None,
            "inline_asm_elementwise": self.assembler, "sum": lambda _value, axis=0: Number(TAILS),
        }  # fmt: skip

        class Language:
            def __getattr__(self, name: str) -> Any:
                assert hasattr(module, name), f"{module.__name__} has no {name}"
                dtype = getattr(module, name)
                return names.get(name, dtype if isinstance(dtype, tl.dtype) else OPAQUE)

        return Language()

    def rebound(self, value: Any) -> Any:
        """What a kernel's global name means here."""
        if id(value) in self.known:
            return self.known[id(value)]
        if isinstance(value, tl.constexpr):
            return self.rebound(value.value)
        if isinstance(value, bool) or value is None or isinstance(value, str | float):
            return value
        if isinstance(value, int):
            return Number(value)
        if isinstance(value, tuple):
            return tuple(self.rebound(one) for one in value)
        if isinstance(value, type) and value.__module__.startswith("moe_core."):
            return functools.partial(self.aggregate, value)
        function = getattr(value, "fn", None) or getattr(value, "__wrapped__", None)
        if isinstance(function, types.FunctionType):
            return self.function(function)
        return OPAQUE

    def aggregate(self, kind: Any, *values: Any, **named: Any) -> Any:
        """An aggregate's fields, which its constructor sets."""
        made = types.SimpleNamespace()
        fill = kind.hash_attrs[0].fn if hasattr(kind, "hash_attrs") else kind.__init__
        fill(made, *values, **named)
        for name, value in vars(made).items():
            plain = value.value if isinstance(value, tl.constexpr) else value
            setattr(made, name, self.rebound(plain) if known(plain) else plain)
        return made

    def function(self, function: types.FunctionType) -> Callable[..., Any]:
        """A kernel's function with names that mean what they mean here."""
        if function.__name__ == "join" and function.__module__.endswith("pdl"):
            return lambda pdl: None
        if function.__module__.endswith("swapped_products") and function.__name__ in (
            "multiply_stage",
            "await_products",
        ):
            return self.swapped_stage if function.__name__ == "multiply_stage" else self.await_products
        defaults = tuple(self.rebound(value) for value in function.__defaults__ or ())
        code = self._planted(function) or function.__code__
        return types.FunctionType(code, self._globals(function), function.__name__, defaults)

    def _planted(self, function: types.FunctionType) -> types.CodeType | None:
        """The function's code with the fault, where it has the line."""
        if self._fault == NO_FAULT or self._fault.old not in (source := inspect.getsource(function)):
            return None
        self.planted, definition = True, source[source.index("def ") :]
        names: dict[str, Any] = dict(function.__globals__)
        exec(definition.replace(self._fault.old, self._fault.new), names)
        return names[function.__name__].__code__

    def _globals(self, function: types.FunctionType) -> dict[str, Any]:
        module = function.__globals__
        if id(module) not in self._modules:
            names: dict[str, Any] = {
                "__builtins__": {"range": self._range, "len": len, "min": min, "max": max, "float": float}
            }
            self._modules[id(module)] = names
            for name, value in list(module.items()):
                if not name.startswith("__"):
                    names[name] = self.rebound(value)
        return self._modules[id(module)]

    @staticmethod
    def _range(*bounds: int) -> Any:
        return (Number(place) for place in range(*bounds))

    # Values

    @staticmethod
    def where(condition: Any, yes: Any, no: Any) -> Any:
        """A choice between numbers."""
        if isinstance(condition, Opaque):
            return OPAQUE
        chosen = yes if condition else no
        return Number(chosen) if known(chosen) else chosen

    @staticmethod
    def load(pointer: Any, *_arguments: Any, **_options: Any) -> Any:
        """A number out of a known array."""
        if not isinstance(pointer, Array):
            return OPAQUE
        return Number(pointer.values[pointer.place])

    @staticmethod
    def assembler(_text: str, _constraints: str, _arguments: Any, dtype: Any, *_options: Any, **_named: Any) -> Any:
        """As many results as types."""
        return (OPAQUE,) * len(dtype) if isinstance(dtype, tuple | list) else OPAQUE

    def atomic_add(self, _counter: Any, _value: Any, **_options: Any) -> Number:
        """The next number of a counter: a warp's own count, the same in all warps of the partition."""
        warp = self.machine.warp
        warp.counts["taken"] += 1
        return Number(warp.counts["taken"] - 1)

    # Memory

    def allocate(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        """Shared memory; barriers are such too. All warps that take a part's memory have the same."""
        warp = self.machine.warp
        warp.counts["allocated"] += 1
        bits = getattr(dtype, "primitive_bitwidth", 16)
        itemsize = bits // 8 if isinstance(bits, int) else 2
        kind = "barriers" if isinstance(layout, str) else "memory"
        name = f"{kind} {warp.counts['allocated']} of {warp.partition}"
        return Shared(self.machine, name, [int(size) for size in shape], itemsize)

    def specialize(self, partitions: list[tuple[Any, tuple[Any, ...]]], warps: list[int], _registers: Any) -> None:
        """Start every partition."""
        for number, ((program, arguments), count) in enumerate(zip(partitions, (4, *warps), strict=True)):
            self.machine.launch(f"partition {number}", int(count), lambda p=program, a=arguments: p(*a))

    # Barriers

    def _barrier(self, place: Shared) -> Barrier:
        return self.machine.barriers[place.name, place.ranges[0][0]]

    def init(self, place: Shared, count: int) -> None:
        """Before the partitions start."""
        number = place.ranges[0][0]
        self.machine.barriers[place.name, number] = Barrier(f"{place.name}[{number}]", int(count))

    def wait(self, place: Shared, parity: int) -> None:
        """Every thread waits until the phase of that parity is over."""
        warp, barrier = self.machine.warp, self._barrier(place)
        warp.until(lambda: barrier.phase % 2 != parity, f"{barrier.name}, parity {parity}")
        join(warp.clock, barrier.released)

    def arrive(self, place: Shared, count: int = 1, pred: Any = True) -> None:
        """One thread of the partition arrives."""
        warp = self.machine.warp
        if warp.leads and pred:
            self._barrier(place).arrive(int(count), warp.tick())
        warp.until(lambda: True, "its turn")

    def expect(self, place: Shared, nbytes: int, pred: Any = True) -> None:
        """One thread arrives and announces bytes."""
        warp = self.machine.warp
        if warp.leads and pred:
            self._barrier(place).arrive(1, warp.tick(), int(nbytes))

    # Asynchronous operations

    def _start(self, warp: Warp, after: Clock) -> tuple[int, Clock]:
        actor = self.machine.new_actor()
        return actor, {**after, actor: 1}

    def tma_load(self, _map: Any, _place: Any, barrier: Shared, target: Shared, pred: Any = True) -> None:
        """One thread starts a load, whose bytes come to the barrier later."""
        warp, ready = self.machine.warp, self._barrier(barrier)
        if not (warp.leads and pred):
            return
        actor, clock = self._start(warp, warp.tick())
        self.machine.access(target, True, "async", actor, clock)
        self.machine.pending.append(lambda: ready.arrive(0, clock, -target.nbytes))
        warp.until(lambda: True, "its turn")

    def row_load(self, target: Shared, _pointers: Any, mask: Any = None) -> None:
        """Every thread starts copies of its own."""
        warp = self.machine.warp
        warp.counts["copies"] += 1
        actor, clock = self._start(warp, warp.tick())
        self.machine.access(target, True, "copy", actor, clock, warp.counts["copies"])
        warp.copies.append(clock)

    def copies_arrive(self, place: Shared, increment_count: bool) -> None:
        """Every thread arrives when its copies so far are done."""
        assert not increment_count, "the model's barriers count these arrivals"
        warp, barrier = self.machine.warp, self._barrier(place)
        clock = warp.tick()
        for copied in warp.copies:
            join(clock, copied)
        warp.copies = []
        self.machine.pending.append(lambda: barrier.arrive(16 * warp.warps, clock))
        warp.until(lambda: True, "its turn")

    def commit_copies(self) -> None:
        """Every thread's copies so far, and not in a group yet, are one."""
        warp = self.machine.warp
        warp.groups.append(warp.copies)
        warp.copies = []

    def wait_for_copies(self, outstanding: int) -> None:
        """Every thread waits for its own groups of copies, but the last few."""
        warp = self.machine.warp
        done = max(len(warp.groups) - int(outstanding), 0)
        for copied in (clock for group in warp.groups[:done] for clock in group):
            join(warp.clock, copied)
        warp.groups = warp.groups[done:]
        warp.until(lambda: True, "its turn")

    def product(self, left: Any, right: Shared, accumulator: Any, **options: Any) -> Any:
        """A wgmma: reads shared memory until it is waited for."""
        warp = self.machine.warp
        actor, clock = self._start(warp, warp.tick())
        for operand in (left, right):
            if isinstance(operand, Shared):
                self.machine.access(operand, False, "async", actor, clock)
        warp.products.append((actor, clock))
        assert options.get("is_async"), "products of these kernels are asynchronous"
        warp.until(lambda: True, "its turn")
        return accumulator

    def product_wait(self, num_outstanding: int, deps: list[Any]) -> Any:
        """All but the last few are done."""
        warp = self.machine.warp
        done = len(warp.products) - int(num_outstanding)
        for _, clock in warp.products[: max(done, 0)]:
            join(warp.clock, clock)
        warp.products = warp.products[max(done, 0) :]
        return deps[0] if len(deps) == 1 else tuple(deps)

    def swapped_stage(
        self, tiles: Any, stage: int, _first: Any, sums: Any, which: int, kind: str, height: int, _in_out: Any
    ) -> Any:
        """What `multiply_stage` writes as PTX: one group of products, of which the one before is waited for."""
        warp, pieces = self.machine.warp, 5
        actor, clock = self._start(warp, warp.tick())
        for piece in range(-(-int(height) // 32)):
            self.machine.access(tiles.left.index(pieces * stage + piece), False, "async", actor, clock)
        blocks = {"apart": (which, 2 + which), "adjacent": (2 * which, 2 * which + 1), "one": (which,)}[kind]
        weights = tiles.right.index(stage)
        for block in blocks:
            axis = int(weights.shape[0] == 64)
            self.machine.access(weights.slice(64 * block, 64, dim=axis), False, "async", actor, clock)
        warp.products.append((actor, clock))
        self.product_wait(1, [sums])
        return sums

    def await_products(self, sums: Any) -> Any:
        return self.product_wait(0, [sums])

    def tma_store(self, _map: Any, _place: Any, source: Shared) -> None:
        """One thread starts a store."""
        warp = self.machine.warp
        if warp.leads:
            actor, clock = self._start(warp, warp.tick())
            self.machine.access(source, False, "async", actor, clock)
            warp.stores.append((actor, clock))

    def store_wait(self, pendings: int) -> None:
        """The thread that started stores waits for all but the last few."""
        warp = self.machine.warp
        done = max(len(warp.stores) - int(pendings), 0)
        for _, clock in warp.stores[:done]:
            join(warp.clock, clock)
        warp.stores = warp.stores[done:]


def run_kernel(kernel: Any, arguments: Mapping[str, Any], seed: int, fault: OpFault = NO_FAULT) -> Machine:
    """Run a Gluon kernel's source; what is not among the arguments is of no consequence.

    A kernel without partitions is one itself, of four warps.
    fault: planted in every function that has the line; one at least must have it.
    Raises Race or Hang; returns the machine, for what was accessed.
    """
    machine = Machine(seed)
    operations = Operations(machine, fault)
    names = inspect.signature(kernel.fn).parameters
    unknown = set(arguments) - set(names)
    assert not unknown, f"{kernel.fn.__name__} has no {unknown}"
    given = {name: operations.rebound(value) if known(value) else value for name, value in arguments.items()}
    machine.local.warp = Warp(machine, machine.new_actor(), "the whole block", 0, 4)
    program = functools.partial(operations.function(kernel.fn), **{name: given.get(name, OPAQUE) for name in names})
    if "warp_specialize" in inspect.getsource(kernel.fn):
        program()
    else:
        machine.launch("the kernel", 4, program)
    assert operations.planted, f"no function of {kernel.fn.__name__} holds {fault.old!r}: plant the fault elsewhere"
    start = machine.local.warp.tick()
    for warp in machine.warps:
        join(warp.clock, start)
    machine.run()
    return machine
