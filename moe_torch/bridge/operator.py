"""One class for every operator: from a dispatcher operator to a prepared plan.

A call: public function -> operator (tensors and one option string) -> plan, cached by the tensors' metadata -> outputs
and scratch from torch's allocator -> launch on the current stream. Plain eager calls (`moe_torch.bridge.eager`) skip
the dispatcher.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from moe_core.base.arrays import ALIGNMENT, ArraySpec
from moe_core.base.recent import Recent
from moe_core.base.target import Target, cpu_target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.plan.float64 import any_precision, require_one_precision
from moe_core.plan.roles import Role, role_of
from moe_core.plan.steps import LaunchPlan
from moe_core.runtime.prepare import prepare
from moe_torch.bridge import eager, private
from moe_torch.bridge.arrays import NoHintError, array_spec, require_plain, require_same_device, target_of_device
from moe_torch.bridge.options import TORCH_DTYPES, decode, encode
from moe_torch.bridge.ready import Begun, Ready, dense
from moe_torch.bridge.seen import SeenCalls
from moe_torch.bridge.signature import Signature

#: The namespace of every operator, kept for the life of the process.
LIBRARY = torch.library.Library("moebius", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
#: Last in the keys of plans for the first output only.
_FIRST = "first"

DIFFERENTIABLE: list[str] = []

#: By the number of tensors; None: a list.
_PACKS: dict[int | None, Callable[[Sequence[torch.Tensor]], Any]] = {None: list, 0: lambda _: None, 1: itemgetter(0)}

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

Outputs = list[tuple[tuple[Any, ...], torch.dtype]]


class Operator(Generic[_Parameters, _Result]):
    """An operator of the namespace `moebius`, by the function or Signature that declares its name and arguments.

    planner: makes the plan from ArraySpecs and options by name, and the target. shapes: of every output, with dtypes,
    from an object with tensors and options as attributes. Sizes may be symbolic.
    """

    _runs_plan_alone = True

    def __init__(
        self,
        declaration: Callable[_Parameters, _Result] | Signature,
        planner: Callable[..., LaunchPlan],
        shapes: Callable[[Any], Outputs],
    ) -> None:
        signature = declaration if isinstance(declaration, Signature) else Signature.of(declaration)
        LIBRARY.define(signature.name + signature.schema, tags=_TAGS)
        self.name, self.signature, self.names = signature.name, signature, signature.names
        if signature.is_called:
            self.arguments: Callable[_Parameters, tuple[Any, ...]] = signature.typed(lambda arguments: arguments)
            self.call: Callable[_Parameters, _Result] = signature.typed(functools.partial(call, self))
        self._packet, _, overload = self.name.partition(".")
        self.overload = getattr(getattr(torch.ops.moebius, self._packet), overload or "default")
        self.pack: Callable[[Sequence[torch.Tensor]], Any] = _PACKS.get(signature.returns, tuple)
        self._planner, self._shapes = planner, shapes
        roles = {name: held.role for name in self.names if (held := role_of(name)) is not None}
        # An activation's up is rows.
        kept = {Role.WEIGHT, Role.INTO, *((Role.UP,) if Role.WEIGHT in roles.values() else ())}
        self._kept = frozenset(name for name, role in roles.items() if role in kept)
        self._memory = self.names.index("memory") if "memory" in self.names else None
        self._differentiable: Collection[str] = ()
        self._gradient: Callable[..., Any] | None = None
        #: By metadata and, unless all outputs get new memory, by the wanted outputs.
        self.plans: Recent[Ready] = Recent()
        #: For all outputs, and for the first only.
        self._seen = SeenCalls(), SeenCalls()
        LIBRARY.impl(self.name, lambda *arguments: self._run_below(arguments, cpu_target()), "CPU")
        LIBRARY.impl(self.name, lambda *arguments: self._run_below(arguments, None), "CUDA")
        LIBRARY.impl(self.name, self._run_autograd, "Autograd", with_keyset=private.BelowAutograd is None)
        LIBRARY.impl(self.name, self._refuse_backend, "CompositeExplicitAutograd")
        torch.library.register_fake(f"moebius::{self.name}", self._infer, lib=LIBRARY)

    def by_name(self, tensors: Mapping[str, Any], *options: Any) -> tuple[Any, ...]:
        return (*[tensors.get(name) for name in self.names], encode(*options))

    def run(self, arguments: tuple[Any, ...]) -> Any:
        outputs = self._run_plain(arguments, first=False)
        return self._dispatch(arguments) if outputs is None else self.pack(outputs)

    def first(self, arguments: tuple[Any, ...]) -> torch.Tensor:
        """In a plain call the other outputs are scratch memory."""
        outputs = self._run_plain(arguments, first=True)
        return (self._dispatch(arguments) if outputs is None else outputs)[0]

    def _run_plain(self, arguments: tuple[Any, ...], first: bool) -> list[torch.Tensor] | None:
        """None: the call is not plain and nothing has run."""
        seen, tensors, options = self._seen[first], arguments[:-1], arguments[-1]
        outputs = seen.run(options, tensors)
        if outputs is not None:
            return outputs
        key = eager.plain_key(arguments)
        if key is None:
            return None
        key = (key, _FIRST) if first else key
        ready = self.plans.get(key)
        outputs = self._run(key, arguments)
        if ready is not None and self._runs_plan_alone:
            seen.remember(options, tensors, ready)
        return outputs

    def known(self, arguments: tuple[Any, ...]) -> Ready | None:
        """The plan of an earlier plain call of `first`, if any."""
        key = eager.plain_key(arguments)
        return None if key is None else self.plans.get((key, _FIRST))

    def _dispatch(self, arguments: tuple[Any, ...]) -> Any:
        # Functional transforms see gradients defined in Python only above the dispatcher.
        if self._gradient is not None and private.transforming() is not False and self._asks_for_gradient(arguments):
            return self._gradient(*arguments)
        if self._memory is not None and private.clones_saved_tensors() and arguments[self._memory] is None:
            # This mode looks at written arguments, and takes no absent ones.
            for tensor in [one for one in arguments if isinstance(one, torch.Tensor)][:1]:
                no_bytes = tensor.new_empty(0, dtype=torch.uint8)
                arguments = (*arguments[: self._memory], no_bytes, *arguments[self._memory + 1 :])
        try:
            return self.overload(*arguments)
        except (AttributeError, RuntimeError) as error:
            # The dispatcher's error about a foreign array names neither our argument nor the fix. An allocator's error
            # has a note, and is no matter of the arrays.
            for name, tensor in zip(self.names, arguments, strict=False):
                if tensor is not None and not hasattr(error, "__notes__"):
                    array_spec(name, tensor)
                    require_plain(name, tensor)
            raise

    def specs(self, tensors: Sequence[Any]) -> list[ArraySpec | None]:
        return [None if one is None else array_spec(name, one) for name, one in zip(self.names, tensors, strict=True)]

    def device_of(self, tensors: Sequence[Any]) -> torch.device:
        """Return the device of all tensors. Raises InvalidInput for several."""
        present = self.present(tensors)
        for name, tensor in present:
            if not isinstance(tensor, torch.Tensor):
                array_spec(name, tensor)
        (first, one), *others = present
        for name, tensor in others:
            require_same_device(name, tensor, first, one)
        return one.device

    def plan(self, arguments: Sequence[Any], target: Target) -> LaunchPlan:
        """Make a call's plan, and compare each input's spec with the plan's."""
        *tensors, options = arguments
        specs = self.specs(tensors)
        named = dict(zip(self.names, specs, strict=True))
        require_one_precision((name, spec.dtype) for name, spec in named.items() if spec is not None)
        plan = any_precision(self._planner)(**self.signature.keywords(specs, decode(options)), target=target)
        # The planner has not seen a layout's actual arrays.
        for buffer in plan.inputs:
            spec = named[_argument(buffer.name)]
            if spec != buffer.spec:
                raise InvalidInput(f"{buffer.name} must be {buffer.spec}, got {spec}; pass the layout's own array")
        return plan

    def _run_below(self, arguments: tuple[Any, ...], target: Target | None) -> Any:
        return self.pack(self._run(eager.key_of(arguments, target), arguments))

    def _run(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[torch.Tensor]:
        return self.run_ready(self.plans.get(key) or self._remember(key, arguments), arguments)

    def run_ready(
        self, ready: Ready, arguments: Sequence[Any], destinations: Sequence[torch.Tensor | None] = ()
    ) -> list[torch.Tensor]:
        """Call `Ready.run`, with copies of arguments at misaligned addresses."""
        try:
            return ready.run([arguments[index].data_ptr() for index in ready.selection], destinations)
        except InvalidInput:
            copied = self._aligned(arguments)
            if copied is None:
                raise
        return ready.run([copied[index].data_ptr() for index in ready.selection], destinations)

    def begin(self, arguments: tuple[Any, ...], behind: int) -> Begun:
        target = target_of_device(self.device_of(arguments[:-1]))
        key = eager.key_of(arguments, None if target.on_gpu else target)
        ready = self.plans.get(key) or self._remember(key, arguments)
        aligned = self._aligned(arguments) or arguments
        # The memory of inputs may be freed when this returns.
        begun = ready.begin([aligned[index].data_ptr() for index in ready.selection], aligned)
        begun.run(slice(-behind))
        return begun

    def _remember(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> Ready:
        ready = self.plans.find(key)
        if ready is None:
            ready = self.ready(arguments, first=key[-1] is _FIRST)
            self.plans.put(key, ready)
        return ready

    def ready(self, arguments: tuple[Any, ...], names: tuple[str, ...] = (), *, first: bool = False) -> Ready:
        """Make, compile and load a call's plan. names: buffers that become the outputs, in this order, by default the
        plan's outputs. All others are scratch. first: keep only the first output."""
        device = self.device_of(arguments[:-1])
        plan = self.plan(arguments, target_of_device(device))
        if first or names:
            buffers = {buffer.name: buffer for buffer in (*plan.scratch, *plan.outputs)}
            outputs = tuple(buffers.pop(name) for name in names or (plan.outputs[0].name,))
            plan = dataclasses.replace(plan, outputs=outputs, scratch=tuple(buffers.values()))
        index = {name: position for position, name in enumerate(self.names)}
        return Ready(
            prepare(plan, device.index or 0),
            tuple(index[_argument(buffer.name)] for buffer in plan.inputs),
            tuple(dense(buffer.spec.shape, TORCH_DTYPES[buffer.spec.dtype]) for buffer in plan.outputs),
            dense((plan.scratch_bytes,), torch.uint8) if plan.scratch_bytes else None,
            device,
        )

    def present(self, tensors: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor) for name, tensor in zip(self.names, tensors, strict=True) if tensor is not None]

    def _aligned(self, arguments: Sequence[Any]) -> list[Any] | None:
        """Return the arguments with copies of misaligned ones, None if there are none. Raises InvalidInput for weights
        and written arguments, because a copy in every call would go unnoticed."""
        misaligned = [name for name, tensor in self.present(arguments[:-1]) if tensor.data_ptr() % ALIGNMENT]
        if not misaligned:
            return None
        self.require_alignment(arguments, self._kept)
        pairs = zip(self.names, arguments, strict=False)
        return [*(_copy(tensor) if name in misaligned else tensor for name, tensor in pairs), arguments[-1]]

    def require_alignment(self, arguments: Sequence[Any], names: Collection[str]) -> None:
        """Raise InvalidInput for the first of these arguments at a misaligned address."""
        for name, tensor in self.present(arguments[:-1]):
            if name in names and tensor.data_ptr() % ALIGNMENT:
                raise InvalidInput(
                    f"{name} must start at a multiple of {ALIGNMENT} bytes, got address {tensor.data_ptr():#x} "
                    f"(storage offset {tensor.storage_offset()}); clone() it"
                )

    def _infer(self, *arguments: Any) -> Any:
        """Shapes for fake and meta tensors. Raises as the planner, but unbacked sizes are checked in the run."""
        *tensors, options = arguments
        device = self.device_of(tensors)
        with contextlib.suppress(NoHintError):
            self.plan(arguments, Target("reference"))
        shapes = self._shapes(SimpleNamespace(**self.signature.shapes(tensors, decode(options))))
        if any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors):
            shapes = [(shape, torch.float64 if dtype == torch.float32 else dtype) for shape, dtype in shapes]
        return self.pack([torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes])

    def define_gradient(self, names: Collection[str], gradient: Callable[..., Any]) -> None:
        """Let `gradient(*arguments)` run calls where one of these tensors requires a gradient. Others are constants."""
        self._differentiable, self._gradient = names, gradient

    def _run_autograd(self, *arguments: Any) -> Any:
        """Calls the gradient if a tensor requires one, else the layer below, which dispatch keys may name."""
        keys, arguments = (None, arguments) if private.BelowAutograd else (arguments[0], arguments[1:])
        if self._asks_for_gradient(arguments):
            if private.transforming():
                raise Unsupported(
                    f"{self._packet} has no gradient inside of torch.func.vmap or of a compiled transform; take the "
                    "gradient of the whole batch, and compile without the transform"
                )
            assert self._gradient is not None
            return self._gradient(*arguments)
        if keys is not None:
            return private.redispatch_below_autograd(self.overload, keys, arguments)
        with private.BelowAutograd():
            return self.overload(*arguments)

    def _asks_for_gradient(self, arguments: Sequence[Any]) -> bool:
        """Return True if a tensor with a gradient requires it. Raises Unsupported for others."""
        asked = False
        for name, tensor in self.present(arguments[:-1]):
            if not isinstance(tensor, torch.Tensor):
                continue
            if private.in_forward_mode() and forward_ad.unpack_dual(tensor).tangent is not None:
                raise Unsupported(
                    f"{name} has a tangent, and moe_torch defines no forward-mode derivatives; use reverse mode "
                    f"(backward, torch.func.grad or torch.func.vjp) or pass {name}.detach()"
                )
            if torch.is_grad_enabled() and tensor.requires_grad:
                if self._gradient is None:
                    raise Unsupported(
                        f"{name} requires a gradient, and {self._packet} defines none: of the operators of moe_torch "
                        f"{', '.join(DIFFERENTIABLE[:-1])} and {DIFFERENTIABLE[-1]} do; call one of them, or call "
                        f"{self._packet} under torch.no_grad() or pass {name}.detach()"
                    )
                asked = asked or name in self._differentiable
        return asked

    def _refuse_backend(self, *arguments: Any) -> NoReturn:
        """Refuse other devices, sparse and quantised tensors, and calls without a tensor."""
        for name, tensor in self.present(arguments[:-1]):
            array_spec(name, tensor)
            target_of_device(tensor.device)
        if arguments[0] is None:
            raise InvalidInput(f"{self.names[0]} must be a torch.Tensor, got None; pass the tensor")
        raise Unsupported(
            f"{self.name} takes ordinary CPU and CUDA tensors, got {type(arguments[0]).__name__}; convert it"
        )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy with the same strides, because plans depend on them."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def _argument(buffer: str) -> str:
    """The argument of a plan's input. Values have the quantised tensor's name."""
    return buffer.removesuffix(".values")


def call(operator: Operator[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call an operator: in traced code its overload, so that the graph shows it."""
    if torch.compiler.is_compiling():
        return operator.overload(*arguments)
    return operator.run(arguments)


def call_first(operator: Operator[..., Any], arguments: tuple[Any, ...]) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return operator.overload(*arguments)[0]
    return operator.first(arguments)
