"""One interface to the torch and the JAX front-end, for tests of behaviour that both share."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from moe_core.specs.operands import map_arrays


class Frontend:
    """A front-end with its arrays and its transformations.

    Attributes:
        ops: The package, `moe_torch` or `moe_jax`.
        names: Its framework's module of dtypes.
        losses: The module of losses of a router.
        support: `tests.support.torch` or `tests.support.jax`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.ops: Any = importlib.import_module(f"moe_{name}")
        self.names: Any = importlib.import_module({"torch": "torch", "jax": "jax.numpy"}[name])
        self.losses: Any = importlib.import_module({"torch": "moe_torch", "jax": "moe_jax.layers"}[name])
        self.support: Any = importlib.import_module(f"tests.support.{name}")

    @contextlib.contextmanager
    def running_on(self, engine: str) -> Iterator[None]:
        """Arrays that are made inside use this engine."""
        with self.support.running_on(engine):
            yield

    def x64(self, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Keep 64-bit arrays, where the framework may be told to."""
        return contextlib.nullcontext()

    def dtype(self, name: str) -> Any:
        return getattr(self.names, name)

    def arrays(self, tree: Any) -> Any:
        """NumPy arrays in dictionaries, tuples and bundles, as arrays of the front-end."""
        raise NotImplementedError

    def numpy(self, tree: Any) -> Any:
        """Arrays of the front-end in dictionaries, tuples and bundles, as NumPy arrays."""
        raise NotImplementedError

    def cast(self, array: Any, dtype: str) -> Any:
        raise NotImplementedError

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a call."""
        return function(*arguments)

    def gradients(self, function: Callable[[dict[str, Any]], Any], leaves: dict[str, Any]) -> dict[str, Any]:
        """The gradients of a scalar function of named arrays."""
        raise NotImplementedError

    def pull(self, function: Callable[[dict[str, Any]], Any], leaves: dict[str, Any]) -> dict[str, np.ndarray]:
        """`y` of a function of named arrays and the gradients `d_*` of drawn factors times it."""
        raise NotImplementedError

    def check_gradients(self, function: Callable[..., Any], arrays: dict[str, np.ndarray]) -> None:
        """Compare the gradients of a function of named float64 arrays with differences of its results."""
        raise NotImplementedError

    def programs(self, loss: Callable[[dict[str, Any]], Any]) -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
        """Compiled and transformed functions of named arrays that give the gradients of a scalar function."""
        raise NotImplementedError

    def traced(self, function: Callable[[Any], Any], argument: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
        """The result of a call, the layers of its trace, and the function with that trace replayed."""
        raise NotImplementedError


class Torch(Frontend):
    @contextlib.contextmanager
    def running_on(self, engine: str) -> Iterator[None]:
        with self.support.running_on(engine) as self.device:
            yield

    def arrays(self, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: self.arrays(value) for name, value in tree.items()}
        if isinstance(tree, tuple):
            return tuple(self.arrays(value) for value in tree)
        return self.support.to_torch(tree, self.device)

    def numpy(self, tree: Any) -> Any:
        if tree is None or isinstance(tree, np.ndarray):
            return tree
        if isinstance(tree, dict):
            return {name: self.numpy(value) for name, value in tree.items()}
        if isinstance(tree, tuple):
            values = [self.numpy(value) for value in tree]
            return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
        to_numpy = importlib.import_module("moe_torch.layers.weights").to_numpy
        return to_numpy(tree) if isinstance(tree, self.names.Tensor) else map_arrays(tree, to_numpy)

    def cast(self, array: Any, dtype: str) -> Any:
        return array.to(self.dtype(dtype))

    def gradients(self, function: Callable[[dict[str, Any]], Any], leaves: dict[str, Any]) -> dict[str, Any]:
        trained = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
        found = self.names.autograd.grad(function(trained), list(trained.values()))
        return dict(zip(leaves, found, strict=True))

    def pull(self, function: Callable[[dict[str, Any]], Any], leaves: dict[str, Any]) -> dict[str, np.ndarray]:
        trained = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
        y = function(trained)
        factors = self.arrays(np.random.default_rng(0).standard_normal(tuple(y.shape), np.float32)).to(y)
        found = self.names.autograd.grad(y, list(trained.values()), factors)
        return self.numpy({"y": y} | {f"d_{name}": one for name, one in zip(leaves, found, strict=True)})

    def check_gradients(self, function: Callable[..., Any], arrays: dict[str, np.ndarray]) -> None:
        tensors = [tensor.requires_grad_() for tensor in self.arrays(arrays).values()]

        def of(*values: Any) -> tuple[Any, ...]:
            results = function(**dict(zip(arrays, values, strict=True)))
            return results if isinstance(results, tuple) else (results,)

        assert self.names.autograd.gradcheck(of, tensors, fast_mode=True)
        # Gradients that are not there, and two that differ, are torch's part: its tolerance lets small errors pass.
        random, results = np.random.default_rng(0), of(*tensors)
        factors, steps = (
            [self.arrays(random.standard_normal(tuple(one.shape))) for one in every] for every in (results, tensors)
        )
        found = self.names.autograd.grad(results, tensors, factors)
        slope = sum((gradient * step).sum() for gradient, step in zip(found, steps, strict=True))
        near = [
            of(*[one.detach() + sign * 1e-6 * step for one, step in zip(tensors, steps, strict=True)])
            for sign in (1, -1)
        ]
        wanted = sum((factor * (one - other)).sum() for factor, one, other in zip(factors, *near, strict=True)) / 2e-6
        np.testing.assert_allclose(slope.item(), wanted.item(), rtol=1e-6, atol=1e-8)

    def programs(self, loss: Callable[[dict[str, Any]], Any]) -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
        self.names._dynamo.reset()
        compiled = self.names.compile(loss, fullgraph=True, backend="aot_eager")
        functional = self.names.func.grad(loss)
        return {"compiled": lambda leaves: self.gradients(compiled, leaves), "torch.func.grad": functional}

    def traced(self, function: Callable[[Any], Any], argument: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
        trace = importlib.import_module("moe_torch.trace")
        with trace.capture() as recording:
            result = function(argument)

        def replayed(argument: Any) -> Any:
            with trace.replay(recording.trace()):
                return function(argument)

        return result, recording.trace(), replayed


class Jax(Frontend):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.jax: Any = importlib.import_module("jax")

    def arrays(self, tree: Any) -> Any:
        return self.support.to_jax(tree)

    def numpy(self, tree: Any) -> Any:
        return self.support.to_numpy(tree)

    def cast(self, array: Any, dtype: str) -> Any:
        return array.astype(dtype)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of an eager call, whose bits a jitted one has."""
        eager, jitted = function(*arguments), self.jax.jit(function)(*arguments)
        require_equal(self.numpy(eager), self.numpy(jitted), "eager and jitted")
        return eager

    def gradients(self, function: Callable[[dict[str, Any]], Any], leaves: dict[str, Any]) -> dict[str, Any]:
        return self.jax.jit(self.jax.grad(function))(leaves)

    def pull(self, function: Callable[[dict[str, Any]], Any], leaves: dict[str, Any]) -> dict[str, np.ndarray]:
        y, back = self.jax.vjp(self.jax.jit(function), leaves)
        factors = np.random.default_rng(0).standard_normal(y.shape, np.float32).astype(y.dtype)
        (found,) = back(self.arrays(factors))
        return self.numpy({"y": y} | {f"d_{name}": one for name, one in found.items()})

    def check_gradients(self, function: Callable[..., Any], arrays: dict[str, np.ndarray]) -> None:
        check = importlib.import_module("jax.test_util").check_grads
        given = (self.arrays(arrays),)
        check(lambda arrays: function(**arrays), given, order=1, modes=["rev"], eps=1e-6, atol=1e-8, rtol=1e-6)

    def programs(self, loss: Callable[[dict[str, Any]], Any]) -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
        gradients = self.jax.grad(loss)
        return {"eager": gradients, "checkpoint": self.jax.grad(self.jax.checkpoint(loss))}

    def x64(self, enabled: bool) -> contextlib.AbstractContextManager[None]:
        return self.jax.enable_x64(enabled)

    def traced(self, function: Callable[[Any], Any], argument: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
        trace = importlib.import_module("moe_jax.trace")
        result, layers = trace.capture(function)(argument)
        return result, layers, functools.partial(trace.replay(function), trace.RoutingTrace(layers))


FRONTENDS = {"torch": Torch, "jax": Jax}


def leaves_of(tree: Any) -> Iterator[tuple[str, Any]]:
    """(name, array) of NumPy arrays in dictionaries, tuples and bundles; None counts."""
    if tree is None or isinstance(tree, np.ndarray):
        yield "", tree
    elif isinstance(tree, dict):
        yield from ((f".{name}{rest}", one) for name, value in sorted(tree.items()) for rest, one in leaves_of(value))
    elif isinstance(tree, (tuple, list)):
        names = getattr(tree, "_fields", range(len(tree)))
        pairs = zip(names, tree, strict=True)
        yield from ((f".{name}{rest}", one) for name, value in pairs for rest, one in leaves_of(value))
    else:
        found: list[tuple[str, Any]] = []
        map_arrays(tree, lambda array: found.append((f"[{len(found)}]", array)) or array)
        yield from found


def require_equal(first: Any, second: Any, label: str = "") -> None:
    """Raise AssertionError unless NumPy arrays in two trees have equal shapes, dtypes and bits."""
    for (name, one), (other_name, other) in zip(leaves_of(first), leaves_of(second), strict=True):
        assert name == other_name and (one is None) == (other is None), f"{label}{name}"
        if one is not None:
            assert (one.dtype, one.shape) == (other.dtype, other.shape), f"{label}{name}: {one.dtype} {other.dtype}"
            assert one.tobytes() == other.tobytes(), f"{label}{name} differs:\n{one}\n{other}"
