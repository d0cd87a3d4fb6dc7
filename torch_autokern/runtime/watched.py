"""What a function's body reads besides its arguments: plain values that make it another function when they change.

A graph is read from a body once, so whatever it was read under must still hold at every call. `read_surroundings` lists those
places (globals, closures, defaults, attributes of modules), and `Surroundings.hold` compares them, by identity where that is
enough. What cannot be compared is refused, never assumed.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn

from torch_autokern.errors import BodyError

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format, types.EllipsisType)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ABSENT = object()
_MAX_PLACES = 500
_LIBRARIES = ("torch", "math", "builtins", "operator", "typing", "functools", "itertools", "numpy", "torch_autokern")


class Surroundings:
    """Places and what was in them. `hold` is asked at every call, so it is one loop over tuples."""

    def __init__(self) -> None:
        self._same: list[tuple[MutableMapping[str, Any] | dict[Any, Any], Any, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._equal: list[tuple[Callable[[], Any], Any]] = []
        self._seen: set[int] = set()

    def hold(self) -> bool:
        """Whether everything is as it was."""
        for mapping, name, value in self._same:
            if mapping.get(name, _ABSENT) is not value:
                return False
        for cell, value in self._cells:
            if cell.cell_contents is not value:
                return False
        return all(now() == then for now, then in self._equal)

    def add_function(self, function: types.FunctionType) -> None:
        """What a Python function reads by itself, and what the Python functions read that it calls."""
        if id(function) in self._seen or _is_library(function.__module__):
            return
        self._seen.add(id(function))
        attributes = ("__code__", "__defaults__", "__kwdefaults__")
        state = tuple(getattr(function, name) for name in attributes)
        self._equal.append((lambda: tuple(getattr(function, name) for name in attributes), state))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._add_value(lambda value=value: value, value, function.__qualname__)  # type: ignore[misc]
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            self._cells.append((cell, value))
            self._add_value(lambda cell=cell: cell.cell_contents, value, function.__qualname__)  # type: ignore[misc]
        names = _names(function.__code__)
        for name in names & function.__globals__.keys():
            self._place(function.__globals__, name, names, function.__qualname__)

    def add_module(self, module: nn.Module) -> None:
        """The attributes of a module and its children, their hooks and their `forward`s."""
        for child in module.modules():
            for name, value in child.__dict__.items():
                if name in _HOOKS and child is not module and value:
                    raise BodyError(f"{type(child).__name__} inside it has hooks, which one op would not run")
                if name.startswith("_") or name == "forward":
                    continue
                self._place(child.__dict__, name, set(), type(child).__name__)
            for name, grandchild in child._modules.items():
                self._same.append((child._modules, name, grandchild))
            if child is not module:
                hooks = [child.__dict__[name] for name in _HOOKS if name in child.__dict__]
                self._equal.append((lambda hooks=hooks: any(hooks), False))  # type: ignore[misc]
                forward = type(child).forward
                self._equal.append((lambda child=child: type(child).forward, forward))  # type: ignore[misc]
                if isinstance(forward, types.FunctionType):
                    self.add_function(forward)

    def _place(self, mapping: dict[str, Any], name: str, names: set[str], reader: str) -> None:
        value = mapping[name]
        self._same.append((mapping, name, value))
        if len(self._same) > _MAX_PLACES:
            raise BodyError(f"it reads more than {_MAX_PLACES} values besides its arguments")
        if isinstance(value, types.ModuleType) and not _is_library(value.__name__) and id(value) not in self._seen:
            self._seen.add(id(value))
            for inner in names & value.__dict__.keys():
                self._place(value.__dict__, inner, names, reader)
            return
        self._add_value(lambda: mapping.get(name, _ABSENT), value, reader)

    def _add_value(self, now: Callable[[], Any], value: Any, reader: str) -> None:
        if isinstance(value, (*_PLAIN, torch.Tensor, type, types.ModuleType, types.BuiltinFunctionType, torch.Size)):
            return  # compared by identity; a tensor that is used shows in the graph, and is refused there
        if isinstance(value, types.FunctionType):
            self.add_function(value)
        elif isinstance(value, list | tuple | dict | set | frozenset) and _is_plain(value):
            self._equal.append((now, copy.deepcopy(value)))
        elif (
            isinstance(value, nn.Module) or _is_library(type(value).__module__) or _is_library(getattr(value, "__module__", ""))
        ):
            return  # a child, whose attributes are listed by `add_module`, or a library's own object
        else:
            raise BodyError(f"{reader} reads a {type(value).__name__}, whose contents could change unseen; pass numbers in")


def read_surroundings(body: Callable[..., Any], module: nn.Module | None = None) -> Surroundings:
    """All that `body`, a Python function, reads besides its arguments; of a method, besides those and `module`'s tensors.

    Raises:
        BodyError: something that cannot be compared from call to call.
    """
    if not isinstance(body, types.FunctionType):
        raise BodyError(f"its body is a {type(body).__name__}, not a Python function that can be read")
    found = Surroundings()
    found.add_function(body)
    if module is not None:
        found.add_module(module)
    return found


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def _is_library(name: str | None) -> bool:
    return (name or "").split(".")[0] in _LIBRARIES


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN)
