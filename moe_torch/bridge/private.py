"""The private names of torch that the package uses. No other file has any.

Without a name the package still computes the same, through torch's dispatcher or public functions. Two features raise
Unsupported without theirs: `main_grad` (`_will_engine_execute_node`), and `capture` and `replay` (`TorchDispatchMode`).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import operator
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.autograd import forward_ad

from moe_core.errors import Unsupported

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)

NAMES: list[str] = []  # Paths that `_named` looked up, which the tests take away.


def _named(path: str, absent: Any = None) -> Any:
    """Return the object at a dotted path under torch, or `absent`."""
    NAMES.append(path)
    value: Any = torch
    for name in path.split("."):
        value = getattr(value, name, None)
    return absent if value is None else value


keys_of = _named("_C._dispatch_keys")
_active_keys = _named("_C._dispatch_tls_local_include_set")
_function_modes, _profiling = _named("_C._len_torch_function_stack"), _named("_C._autograd._profiler_enabled")
_level = _named("autograd.forward_ad._current_level")
_KeySet, _Key = _named("_C.DispatchKeySet"), _named("_C.DispatchKey")


def _key_sets(*choices: str) -> frozenset[int]:
    """Numbers of sets of dispatch keys, such as "CPU AutocastCPU". Empty if torch lacks a key."""
    numbers = []
    try:
        for names in choices:
            first, *rest = [_KeySet(getattr(_Key, name)) for name in names.split()]
            for key in rest:
                first = first | key
            numbers.append(first.raw_repr())
    except (AttributeError, TypeError):
        return frozenset()
    return frozenset(numbers)


#: Keys that are active outside and inside of `torch.inference_mode()`. Modes and transforms add theirs.
_PLAIN_THREADS = _key_sets("BackendSelect ADInplaceOrView", "BackendSelect")
#: Keys of an ordinary tensor, and of one made in inference mode.
PLAIN_TENSORS = _key_sets(
    *(f"{kind} ADInplaceOrView Autograd{kind} Autocast{kind}" for kind in ("CPU", "CUDA")),
    *(f"{kind} Autocast{kind}" for kind in ("CPU", "CUDA")),
)
PLAIN_CLASSES = frozenset((torch.Tensor, torch.nn.Parameter))


def plain_thread() -> bool:
    """Return True if nothing on this thread watches or transforms calls of operators."""
    return (
        _active_keys().raw_repr() in _PLAIN_THREADS
        and not _function_modes()
        and not _profiling()
        and forward_ad._current_level < 0
    )


def plain_tensor(tensor: Any) -> bool:
    """Return True for an ordinary strided CPU or CUDA tensor. It may ask for a gradient."""
    return type(tensor) in PLAIN_CLASSES and keys_of(tensor).raw_repr() in PLAIN_TENSORS


def _looks_plain(tensor: Any) -> bool:
    if type(tensor) not in PLAIN_CLASSES or tensor.is_nested or tensor.layout != torch.strided:
        return False
    if tensor.device.type not in ("cpu", "cuda") or tensor.is_quantized or tensor.is_neg() or tensor.is_conj():
        return False
    try:
        return tensor.data_ptr() >= 0
    except RuntimeError:  # A wrapper of a transformation.
        return False


if not PLAIN_TENSORS or keys_of is None:
    plain_tensor = _looks_plain
if plain_tensor is _looks_plain or None in (_active_keys, _function_modes, _profiling, _level):
    plain_thread = bool  # never


def in_forward_mode() -> bool:
    return _level is None or forward_ad._current_level >= 0


#: True for a batch of gradients, as of `is_grads_batched=True`.
is_batched: Callable[[torch.Tensor], bool] = _named("_C._functorch.is_legacy_batchedtensor", lambda tensor: False)
_transforming = _named("_C._are_functorch_transforms_active")
#: Objects of transforms that have ended become plain tensors.
_unwrapped = _named("_functorch.utils.unwrap_dead_wrappers")
BelowAutograd = _named("_C._AutoDispatchBelowAutograd")
#: True if torch does not tell: the caller then asks for its device.
any_autocast: Callable[[], bool] = _named("_C._is_any_autocast_enabled", lambda: True)
_executes = _named("_C._will_engine_execute_node")
compiles: Callable[[], Any] = _named("_guards.TracingContext.try_get", lambda: None)  # not None in Dynamo
transforming: Callable[[], bool | None] = _transforming or (lambda: None)
#: Returns True if the current backward may run again, or torch does not tell. `transforming`: None if it does not.
keeps_graph: Callable[[], bool] = _named("_C._autograd._get_current_graph_task_keep_graph", lambda: True)
_named("autograd.graph._allow_mutation_on_saved_tensors_enabled")
#: Returns True inside of `allow_mutation_on_saved_tensors`, or if torch does not tell.
clones_saved_tensors: Callable[[], bool] = functools.partial(
    getattr, torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled", True
)
is_wrapped: Callable[[torch.Tensor], bool] = _named(
    "_C._functorch.is_functorch_wrapped_tensor", lambda tensor: bool(transforming())
)


def require_destinations() -> None:
    if _executes is None:
        raise Unsupported(
            f"main_grad=True needs torch._C._will_engine_execute_node, which torch {torch.__version__} has not; leave "
            "main_grad out"
        )


def executes(node: Any) -> bool:
    """Return True if the current backward executes a node. Raises RuntimeError for a leaf that the caller captures."""
    return _executes(node)


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply`, or without transforms the `apply` below it, which looks at no signature."""
    below: Any = getattr(super(torch.autograd.Function, function), "apply")  # noqa: B009
    if (transforming := _transforming) is not None and (unwrapped := _unwrapped) is not None:
        return lambda *given: function.apply(*given) if transforming() else below(*unwrapped(given))
    name = "_are_functorch_transforms_active"
    needs = name in torch.autograd.Function.apply.__code__.co_names and not hasattr(torch._C, name)
    return below if needs else function.apply


def redispatch_below_autograd(overload: Any, keys: Any, arguments: tuple[Any, ...]) -> Any:
    while "Autograd" not in str(highest := keys.highestPriorityTypeId()):
        keys = keys.remove(highest)
    keys = keys.remove(highest)
    return overload.redispatch(keys, *arguments)


_empty_cpu = _named("_C._dynamo.guards._empty_strided_cpu")
_empty_cuda = _named("_C._dynamo.guards._empty_strided_cuda")
_deterministic = _named("_C._get_deterministic_algorithms")
_current_device = _named("_C._cuda_getDevice", torch.cuda.current_device)
#: `current_stream(device index)` is the address of the current stream.
current_stream: Callable[[int], int] = _named(
    "_C._cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
TensorGuards = _named("_C._dynamo.guards.TensorGuards")

#: Makes an output of a shape, strides and dtype. Its memory is not initialised.
Allocator = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


def allocator(device: torch.device) -> Allocator:
    """Inductor's allocation on the current device, elsewhere and in deterministic mode `torch.empty_strided`."""
    if not _deterministic():
        index = device.index
        if index is None:
            return _empty_cpu
        if index == _current_device():
            return _empty_cuda
    return _public_allocator(device)


def _public_allocator(device: torch.device) -> Allocator:
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


if None in (_empty_cpu, _empty_cuda, _deterministic):
    allocator = _public_allocator


def constant_result(function: _Function) -> _Function:
    """As `torch.compiler.assume_constant_result`, without importing Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def graph_break(function: _Function) -> _Function:
    """As `torch.compiler.disable`, without importing Dynamo."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


@functools.cache
def _disabled(function: Any) -> Any:
    return torch.compiler.disable(function)


def uncompiled(function: _Function) -> _Function:
    """The function, wrapped once where Dynamo may be at work."""
    return _disabled(function) if "torch._dynamo" in sys.modules else function


def is_fake(tensor: Any) -> bool:
    return isinstance(tensor, getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ()))


class _NoMode:
    def __init__(self) -> None:
        raise Unsupported(
            f"capture() and replay() need torch.utils._python_dispatch, which torch {torch.__version__} has not"
            "; install a tested torch, as in docs/user/start.md"
        )


TorchDispatchMode: Any = _named("utils._python_dispatch.TorchDispatchMode", _NoMode)

_top_hooks = _named("_C._autograd._top_saved_tensors_default_hooks")
_pop_hooks = _named("_C._autograd._pop_saved_tensors_default_hooks")
_push_hooks = _named("_C._autograd._push_saved_tensors_default_hooks")
_graph_task = _named("_C._current_graph_task_id", lambda: -1)


def in_backward() -> bool:
    """Return True inside of a backward of this thread, where checkpoints run forwards again."""
    return _graph_task() != -1


def recomputations() -> list[tuple[Any, str]]:
    """(object, attribute) of every function around this call that a backward runs, and that may run this call again."""
    # `torch.utils.checkpoint` has it in a frame that its hooks hold. C++ calls `ctx.apply` or `apply_boxed` of others.
    if None in (_top_hooks, _pop_hooks, _push_hooks):
        raise Unsupported(
            f"replay() needs torch._C._autograd's saved tensor hooks, which torch {torch.__version__} has not"
            "; install a tested torch, as in docs/user/start.md"
        )
    kept, hooks = [], []
    while (pair := _top_hooks(False)) is not None:
        hooks.append(pair)
        _pop_hooks()
    for pair in reversed(hooks):
        _push_hooks(*pair)
    for pack, _ in hooks:
        for cell in getattr(pack, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # an empty cell
                if hasattr(cell.cell_contents, "recompute_fn"):
                    kept.append((cell.cell_contents, "recompute_fn"))
    frame: Any = sys._getframe()
    while frame is not None:
        ctx = frame.f_locals.get("ctx") if frame.f_code.co_name == "forward" else None
        function = getattr(ctx, "_forward_cls", None)
        if function is not None and not function.__module__.startswith("moe_torch."):
            kept.append((ctx, "apply_boxed" if getattr(function, "boxed_grads_call", False) else "apply"))
        frame = frame.f_back
    return kept


def is_compiled(ctx: Any) -> bool:
    """Return True for a compiled program, whose backward runs some operators of its forward again, in any order."""
    return type(ctx).__name__.startswith("CompiledFunction")


def calling_modules() -> list[torch.nn.Module]:
    """The modules that run, innermost first."""
    frame, modules = cast(Any, sys._getframe()), []
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "_call_impl" else None
        if isinstance(module, torch.nn.Module):
            modules.append(module)
        frame = frame.f_back
    return modules


def is_mutable(overload: Any) -> bool:
    schema = getattr(overload, "_schema", None)
    return "_." in str(overload) if schema is None else schema.is_mutable


def symmetric_memory() -> Any:
    """Raises Unsupported where torch has none."""
    try:
        return importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        raise Unsupported(
            f"GPUs share no memory: torch {torch.__version__} has no symmetric memory; choose another mode than peer"
        ) from error


def group_timeout(group: Any, device: torch.device) -> datetime.timedelta | None:
    """The timeout of a process group's collectives, if torch tells."""
    backend = getattr(group, "_get_backend", lambda _: None)(device)
    return getattr(getattr(backend, "options", None), "_timeout", None)


_store_of = _named("distributed.distributed_c10d._get_process_group_store")


def group_store(group: Any) -> Any:
    """The store of a process group, None if torch does not tell or did not make the group."""
    with contextlib.suppress(KeyError):
        return None if _store_of is None else _store_of(group)
    return None


#: `(group, into, values, options)` starts an all-gather. The first name is of torch 2.13. None: torch has neither.
_gather = _named("distributed.ProcessGroup._allgather_base")
gather_all: Any = _named("distributed.ProcessGroup.all_gather_single", _gather)
#: The DeviceMesh that a mesh is an axis of. Raises AttributeError if torch does not tell.
root_mesh: Callable[[Any], Any] = operator.methodcaller("_get_root_mesh")


def flat_mesh(mesh: Any) -> Any:
    """A DeviceMesh of several axes as one axis, major first; the same for all calls."""
    return mesh._flatten("_".join(mesh.mesh_dim_names))


_c10d = ("_new_process_group_helper", "_world", "_get_default_store")
_make_group, _world, _store = (_named(f"distributed.distributed_c10d.{name}") for name in _c10d)


def group_of(name: str, ranks: list[int], backend: str, timeout: Any) -> Any:
    """A process group of these ranks of all, which alone call it. torch's name depends on the groups that each has."""
    if None in (_make_group, _world, _store):
        return torch.distributed.new_group(ranks, timeout, backend, use_local_synchronization=True)
    number = ranks.index(torch.distributed.get_rank())
    group, _ = _make_group(len(ranks), number, ranks, backend, _store(), name, timeout=timeout)
    _world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group


#: Makes tensors of a subclass that holds other tensors.
wrapper_subclass = _named("Tensor._make_wrapper_subclass")
to_copy = _named("ops.aten._to_copy.default")
FOREACH_NORM = _named("ops.aten._foreach_norm.Scalar")
UNSCALE = _named("ops.aten._amp_foreach_non_finite_check_and_unscale_.default")
_listed_classes = (
    _named("utils._foreach_utils._foreach_supported_types"),
    _named("optim.optimizer._foreach_supported_types"),
)


def takes_lists(kind: _Class) -> _Class:
    """Let torch call operators on lists with tensors of a class."""
    for classes in _listed_classes:
        if classes is not None and kind not in classes:
            classes.append(kind)
    return kind


local_tensor: Callable[[Any], torch.Tensor] = operator.attrgetter("_local_tensor")
#: Until torch 2.12, operators on every subclass of DTensor run in torch's own code.
SUBCLASSES_OF_DTENSOR = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def dtensor_like(kind: type[torch.Tensor], tensor: Any, local: torch.Tensor | None = None) -> Any:
    """A DTensor of a class, sharded as `tensor`. local: its part, None: that of `tensor`."""
    like, part = tensor, tensor._local_tensor if local is None else local
    kinds = {(one.shape, one.dtype, one.stride()) for one in (part, tensor._local_tensor)}
    if len(kinds) > 1:
        sizes: Any = {"shape": tensor.shape, "stride": torch.empty(tensor.shape, device="meta").stride()}
        base: Any = importlib.import_module("torch.distributed.tensor").DTensor
        like = base.from_local(part, tensor.device_mesh, tensor.placements, run_check=False, **sizes)
    return cast(Any, kind)(part, like._spec, requires_grad=False)


_pytree = _named("utils._pytree")


def register_pytree(kind: type, flatten: Any, unflatten: Any, **options: Any) -> None:
    """Without it, exported programs take no arguments of that class."""
    if _pytree is not None:
        _pytree.register_pytree_node(kind, flatten, unflatten, **options)


def attribute_key(name: str) -> Any:
    return _pytree.GetAttrKey(name)


def _tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _tree_map(function, value) for key, value in tree.items()}
    return type(tree)([_tree_map(function, one) for one in tree]) if type(tree) in (list, tuple) else function(tree)


tree_map: Callable[..., Any] = _tree_map if _pytree is None else _pytree.tree_map


def tree_leaves(tree: Any) -> list[Any]:
    tree_map((leaves := list[Any]()).append, tree)
    return leaves
