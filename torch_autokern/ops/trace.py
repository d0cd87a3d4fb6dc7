"""Read a body: run it once on tensors without data and write down every ATen call.

All of it happens in this thread's own dispatch modes. PyTorch's tracers (`torch.fx`, `make_fx`) raise a flag and patch
`torch.nn.Module` for the whole process while they work, so that compiled functions and models that other threads call meanwhile
fail or are traced along.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_autokern.errors import BodyError
from torch_autokern.ops.graph import Graph, Node, overload_of

_TRACING = threading.RLock()
_DECIDE = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def trace(body: Callable[..., Any], tensors: Sequence[torch.Tensor], parameters: tuple[int, ...]) -> Graph:
    """The graph of what `body` computes of `tensors`, without calls that no result needs.

    Raises:
        BodyError: see `graph.capture`.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    given = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
    mode = FakeTensorMode() if given is None else given
    single = True

    def flat(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal single
        result = body(*inputs)
        single = isinstance(result, torch.Tensor)
        results = (result,) if single else result
        if not isinstance(results, tuple | list) or not all(isinstance(r, torch.Tensor) for r in results):
            raise BodyError(f"it returns {type(result).__name__}; an op returns a tensor or a tuple of tensors")
        return tuple(results)

    try:
        fakes = [t if isinstance(t, FakeTensor) else mode.from_tensor(t.detach(), static_shapes=True) for t in tensors]
        recorder = _Recorder(fakes)
        # PyTorch keeps whether a mode is on in a variable of the process; two at once could leave it up.
        with _TRACING, torch.no_grad(), mode, recorder:
            results = torch.func.functionalize(flat)(*fakes)
        return recorder.graph(results, parameters, single)
    except BodyError:
        raise
    except Exception as error:  # the body is somebody's code, and what tracing raises has no common class
        words = str(error).strip().splitlines()
        raise BodyError(f"it cannot be traced: {type(error).__name__}: {words[0] if words else ''}"[:500]) from error


class _Recorder(TorchDispatchMode):
    """Every call as a node; tensors are known by identity, and kept so that no identity is used twice."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._kept: list[torch.Tensor] = list(inputs)
        self._places: dict[int, dict[str, int]] = {id(t): {"n": number} for number, t in enumerate(inputs)}
        self._inputs = len(inputs)
        self._device = inputs[0].device
        self._nodes: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Other modes raise a flag for all threads, at which `torch.compile` gives up what it meets for the first time."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks for a device
            return func(*args, **kwargs)
        # Above autograd composites end before they come here; below it (inference mode) they come whole.
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        # Calls that no result needs are left out, but not what they do to an argument or to the generator.
        if func._schema.is_mutable or any(tag in func.tags for tag in _DECIDE):
            overload_of(str(func))
        encoded = tuple(self._encoded(value) for value in args)
        named = {
            name: self._encoded(value) for name, value in kwargs.items()
            if value is not None and name != "layout"
        }  # fmt: skip
        result = func(*args, **kwargs)
        number = self._inputs + len(self._nodes)
        self._nodes.append((func, encoded, named))
        if isinstance(result, torch.Tensor):
            self._note(result, {"n": number})
        else:
            for place, one in enumerate(result if isinstance(result, tuple | list) else ()):
                if isinstance(one, torch.Tensor):
                    self._note(one, {"n": number, "o": place})
        return result

    def graph(self, results: Sequence[torch.Tensor], parameters: tuple[int, ...], single: bool) -> Graph:
        """What was written down, as far as `results` need it."""
        outputs = [self._encoded(result) for result in results]
        needed: set[int] = set()
        waiting = [value["n"] for value in outputs]
        while waiting:
            number = waiting.pop()
            if number not in needed:
                needed.add(number)
                if number >= self._inputs:
                    _, args, named = self._nodes[number - self._inputs]
                    waiting += _references((args, named))
        numbers = {number: number for number in range(self._inputs)}
        nodes: list[Node] = []
        for number, (func, args, named) in enumerate(self._nodes, self._inputs):
            if number in needed:
                overload_of(str(func))
                numbers[number] = self._inputs + len(nodes)
                nodes.append(Node(str(func), _renumbered(args, numbers), _renumbered(named, numbers)))
        if not outputs:
            raise BodyError("it returns nothing that depends on its arguments")
        return Graph(self._inputs, parameters, tuple(nodes), tuple(_renumbered(outputs, numbers)), single)

    def _note(self, tensor: torch.Tensor, place: dict[str, int]) -> None:
        if id(tensor) not in self._places:
            self._kept.append(tensor)
            self._places[id(tensor)] = place

    def _encoded(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._places:
                raise BodyError("it uses a tensor that is no argument of it; pass that one in")
            return self._places[id(value)]
        if isinstance(value, list | tuple):
            return [self._encoded(item) for item in value]
        if isinstance(value, float):
            return {"f": value.hex()}
        if isinstance(value, torch.dtype):
            return {"t": str(value).removeprefix("torch.")}
        if isinstance(value, torch.memory_format):
            return {"m": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            if value.type != self._device.type:
                raise BodyError(f"it works on {value} too; an op stays on the device of its arguments")
            return {"d": "*"}
        if value is None or isinstance(value, bool | int | str):
            return value
        raise BodyError(f"it passes {type(value).__name__} to an op")


def _references(value: Any) -> list[int]:
    return [leaf for leaf in tree_leaves(_only_references(value)) if leaf is not None]


def _only_references(value: Any) -> Any:
    if isinstance(value, dict) and "n" in value:
        return value["n"]
    if isinstance(value, dict):
        return [_only_references(one) for one in value.values()]
    return [_only_references(one) for one in value] if isinstance(value, list | tuple) else None


def _renumbered(value: Any, numbers: dict[int, int]) -> Any:
    if isinstance(value, dict):
        if "n" in value:
            return {**value, "n": numbers[value["n"]]}
        return {name: _renumbered(one, numbers) for name, one in value.items()}
    if isinstance(value, list):
        return [_renumbered(one, numbers) for one in value]
    return tuple(_renumbered(one, numbers) for one in value) if isinstance(value, tuple) else value
