"""`@autokern.kernel` on a function, a module or a class of modules: what stands in their place."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_autokern.errors import InvalidInputError
from torch_autokern.ops.graph import Graph, Program
from torch_autokern.runtime.function import Function


class KernelForward:
    """What stands in a decorated module's `forward`: copies and saved modules carry it along, bound to the copy."""

    def __init__(self, module: nn.Module, recompute: bool = False) -> None:
        self._owner = weakref.ref(module)
        self._recompute = recompute
        kind = type(module)
        self._function = Function(kind.forward, f"{kind.__module__}.{kind.__qualname__}", module, recompute=recompute)
        self._plain: Callable[..., Any] = functools.partial(_forward_of, self._owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._function.traced(self._plain, args, kwargs)
        caller = sys._getframe(1).f_locals.get("self")  # the module whose `forward` this is, as `nn.Module._call_impl` knows it
        if isinstance(caller, nn.Module) and caller is not self._owner() and caller.__dict__.get("forward") is self:
            return type(caller).forward(caller, *args, **kwargs)  # its `__dict__` was copied whole, as DataParallel does
        return self._function(self._plain, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> KernelForward:
        module = self._owner()
        return KernelForward(memo.get(id(module), module) if module is not None else nn.Identity(), self._recompute)

    def __reduce__(self) -> tuple[type[KernelForward], tuple[nn.Module | None, bool]]:
        return KernelForward, (self._owner(), self._recompute)


def _forward_of(owner: weakref.ref[nn.Module], *args: Any, **kwargs: Any) -> Any:
    module = owner()
    assert module is not None
    return type(module).forward(module, *args, **kwargs)


def decorate(target: Any, *, recompute: bool = False) -> Any:
    """`api.kernel`, after its overloads."""
    if isinstance(target, nn.Module):
        target.forward = KernelForward(target, recompute)
        return target
    if isinstance(target, type) and issubclass(target, nn.Module):
        return _decorated_class(target, recompute)
    if not callable(target):
        raise InvalidInputError(f"kernel() takes a function, a module or a module's class, got {type(target).__name__}")
    return _decorated_function(target, recompute)


def _decorated_function(body: Callable[..., Any], recompute: bool) -> Callable[..., Any]:
    name = f"{getattr(body, '__module__', '')}.{getattr(body, '__qualname__', type(body).__name__)}"
    function = Function(body, name, recompute=recompute)

    @functools.wraps(body)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function.traced(body, args, kwargs)
        return function(body, args, kwargs)

    call.autokern_function = function  # type: ignore[attr-defined]
    return call


def _decorated_class(kind: type[nn.Module], recompute: bool) -> type[nn.Module]:
    body = kind.forward
    functions: weakref.WeakKeyDictionary[nn.Module, Function] = weakref.WeakKeyDictionary()
    name = f"{kind.__module__}.{kind.__qualname__}"

    @functools.wraps(body)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        function = functions.get(self)
        if function is None:
            function = functions.setdefault(self, Function(body, name, self, recompute=recompute))
        if torch.compiler.is_compiling():
            return function.traced(functools.partial(body, self), args, kwargs)
        return function(functools.partial(body, self), args, kwargs)

    kind.forward = forward
    return kind


def fixed_function(graph: Graph, name: str) -> Callable[..., Any]:
    """A decorated function that computes a graph, at the layouts that the graph is for: what the judge serves and times."""
    program = Program(graph)

    def body(*tensors: torch.Tensor) -> Any:
        made = program(*tensors)
        return made[0] if graph.single else made

    call = _decorated_function(body, recompute=False)
    function = function_of(call)
    function.name, function.fixed = name, graph
    return call


def function_of(target: Any) -> Function:
    """The function behind something that `kernel` decorated.

    Raises:
        InvalidInputError: it is not decorated.
    """
    forward = target.__dict__.get("forward") if isinstance(target, nn.Module) else target
    found = getattr(forward, "autokern_function", None) or getattr(forward, "_function", None)
    if not isinstance(found, Function):
        raise InvalidInputError(f"{target!r} is not decorated; call kernel() on it first")
    return found
