"""`@autokern.kernel`: a whole function, or a module's `forward`, as one op of its own.

A call that somebody wants served (`optimize`, `enabled`, `enable`) or recorded goes to the router with its tensors
(`csrc/function.cpp`); a hit returns its results, and on a miss the body runs as if it were not decorated, in the caller's own
modes. Compiled programs see an opaque operator `autokern::<name>_<hash>` wherever the table holds a kernel of the function,
and the body itself everywhere else, so that nothing is lost to a function that is not served.
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from torch_autokern.errors import BodyError
from torch_autokern.ops.function import GRAPH, function_name, function_spec, is_function, op_name
from torch_autokern.ops.graph import MAX_TENSORS, Graph, capture, graph_words, read_graph
from torch_autokern.ops.spec import matmul_precision
from torch_autokern.runtime.backward import Backward, pulled_back
from torch_autokern.runtime.extension import extension_state
from torch_autokern.runtime.session import session
from torch_autokern.runtime.watched import Surroundings, read_surroundings
from torch_autokern.store.key import DeviceType, KernelKey, TensorKey

MAX_VARIANTS = 32
_TENSOR = "tensor"
_reading = threading.local()  # set while a body is read: decorated functions inside it are part of it
_operator_numbers = itertools.count()
Structure = tuple[Any, ...]


class Variant:
    """A function with one structure of arguments (which are tensors, and the values of all others) under one set of modes."""

    def __init__(
        self, function: Function, structure: Structure, modes: _Modes, samples: Sequence[torch.Tensor],
        graph: Graph | None = None,
    ) -> None:  # fmt: skip
        """`graph`: what it is at every layout, instead of what the body says; for a function that is made from a graph."""
        self.function, self.structure, self.modes = function, structure, modes
        self._fixed = graph
        self.graph = self._read(samples)
        native = extension_state().module
        assert native is not None
        self.native = native.Function(function.name, self.graph.inputs, len(self.graph.outputs), self.body, self._resolve)
        self.attempt: Callable[..., tuple[torch.Tensor, ...] | None] = self.native.attempt

    def body(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The body on these tensors, a module's own last, in this variant's modes."""
        result = self._plain(*tensors)
        return (result,) if isinstance(result, torch.Tensor) else tuple(result)

    def results(self, made: tuple[torch.Tensor, ...]) -> Any:
        """What the body would return."""
        return made[0] if self.graph.single else made

    @functools.cached_property
    def operator(self) -> Callable[..., Any]:
        """The `torch.library` operator that compiled programs call."""
        name = f"{self.function.name.replace('.', '_')}_{self.graph.digest[:16]}"
        if hasattr(torch.ops.autokern, name):
            name += f"_{next(_operator_numbers)}"
        arguments = ", ".join(f"Tensor argument{i}" for i in range(self.graph.inputs))
        count = len(self.graph.outputs)
        _operators().define(f"{name}({arguments}) -> {'Tensor' if count == 1 else '(' + ', '.join(['Tensor'] * count) + ')'}")
        self.native.implement(name)

        def fake(*tensors: torch.Tensor) -> Any:
            made = self.body(*tensors)
            return made[0] if count == 1 else made

        def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            return self.gradients(context.saved_tensors, gradients)

        def save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
            ctx.save_for_backward(*inputs)

        torch.library.register_fake(f"autokern::{name}", fake, lib=_operators())
        torch.library.register_autograd(f"autokern::{name}", backward, setup_context=save, lib=_operators())
        return getattr(torch.ops.autokern, name)  # type: ignore[no-any-return]

    def gradients(self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """Vector-Jacobian product of the body: the function's backward as an op of its own where somebody wants it served or
        recorded, else, and where it is to be differentiated again, computed from the body."""
        if not torch.is_grad_enabled() and not torch.compiler.is_compiling() and self.function.is_asked():
            found = self._backward(tensors, gradients)
            if found is not None:
                return found
        made = iter(pulled_back(self.body, tensors, gradients))
        return tuple(next(made) if t.is_floating_point() or t.is_complex() else None for t in tensors)

    @functools.cached_property
    def _backward(self) -> Backward:
        return Backward(self.function.name, self._read, _read_apart, self.function.refuse)

    def _plain(self, *tensors: torch.Tensor) -> Any:
        own = len(self.function.own_tensors())
        arguments, state = (tensors, ()) if not own else (tensors[:-own], tensors[-own:])
        args, kwargs = _rebuilt(self.structure, iter(arguments))
        depth = getattr(_reading, "depth", False)
        _reading.depth = depth + 1
        try:
            with torch.set_grad_enabled(self.modes[0]), self.modes.entered():
                return self.function.bound(state)(*args, **kwargs)
        finally:
            _reading.depth = depth

    def _read(self, tensors: Sequence[torch.Tensor]) -> Graph:
        """The graph at these tensors' layouts."""
        if self._fixed is not None:
            return self._fixed
        parameters = range(len(tensors) - len(self.function.own_tensors()), len(tensors))
        return _read_apart(self._plain, tensors, parameters)

    def _resolve(self, tensors: list[torch.Tensor]) -> tuple[int, int] | None:
        """Asked by the router once for each layout: the words of the graph there, None where the body cannot be one op."""
        try:
            graph = self._read(tensors)
            function_spec(op_name(self.function.name, graph), graph.text)
        except BodyError as error:
            self.function.refusals.append(str(error))
            return None
        if graph.single != self.graph.single or len(graph.outputs) != len(self.graph.outputs):
            return None
        return graph_words(graph.digest)


class _Modes(tuple[Any, ...]):
    """What of the caller's state changes the ops that a body calls: gradients on, default dtype, autocast and its dtype."""

    @staticmethod
    def now(device_type: str) -> _Modes:
        """Those of this thread."""
        cast = torch.is_autocast_enabled(device_type)
        cast_to = cast and torch.get_autocast_dtype(device_type)
        return _Modes((torch.is_grad_enabled(), torch.get_default_dtype(), cast_to, device_type))

    def entered(self) -> torch.autocast:
        """Autocast as it was, of the device that the call runs on: what the body is read with has no data, and is on none."""
        dtype = self[2] or torch.get_autocast_dtype(self[3])
        return torch.autocast(self[3], dtype=dtype, enabled=bool(self[2]), cache_enabled=False)


class Function:
    """One decorated function, or one module with a decorated `forward`."""

    def __init__(
        self, body: Callable[..., Any], name: str, module: nn.Module | None = None, *, recompute: bool = False
    ) -> None:
        self.body = body
        self.name = function_name(name)
        self.recompute = recompute
        self.fixed: Graph | None = None
        self.refusals: list[str] = []  # why calls could not be one op
        self._module = None if module is None else weakref.ref(module)
        self._variants: dict[Any, Variant | None] = {}
        self._surroundings: Surroundings | None = None
        self._is_refused = False  # what it reads cannot be watched: its body runs, now and later
        self._lock = threading.RLock()
        native = extension_state().module
        self._asked: Callable[[], int] = native.functions_asked if native else lambda: 0

        def traced_variant(arguments: int) -> tuple[str, bool] | None:
            return self._for_tracing(arguments)

        # What `torch.compiler.assume_constant_result` sets, which would import Dynamo (seconds) where nothing is compiled: the
        # answer is a constant of the traced program, which does not ask again.
        traced_variant._dynamo_marked_constant = True  # type: ignore[attr-defined]
        self._traced_variant = traced_variant if native else None

    def __call__(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function; `plain` is the body bound as the caller knows it."""
        asked = self._asked()
        if not asked or self._is_refused or getattr(_reading, "depth", False) or torch._C._is_torch_function_mode_enabled():
            return plain(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        variant = self._variant(args, kwargs, tensors)
        if variant is None:
            return plain(*args, **kwargs)
        if asked & 2:
            return self._recorded(variant, tensors, plain, args, kwargs)
        return self._served(variant, tensors, plain, args, kwargs)

    def traced(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as `torch.compile` sees it: the operator where the table has a kernel of this function, else the body."""
        if kwargs or self._traced_variant is None or not all(isinstance(a, torch.Tensor) for a in args):
            return plain(*args, **kwargs)
        found = self._traced_variant(len(args))
        if found is None:
            return plain(*args, **kwargs)
        tensors = (*args, *self.own_tensors())
        if not self.recompute and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return plain(*args, **kwargs)
        name, single = found
        made = getattr(torch.ops.autokern, name)(*tensors)  # Dynamo knows an operator by its name only
        return made if single or isinstance(made, tuple) else (made,)

    def own_tensors(self) -> list[torch.Tensor]:
        """A module's parameters and buffers, each once, in the order of their names' appearance; none of a function."""
        module = self._module() if self._module is not None else None
        if module is None:
            return []
        return list(itertools.chain(module.parameters(), module.buffers()))

    def bound(self, state: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """The body; of a module on a shadow of it that has `state` for its tensors, so that nobody else sees them."""
        module = self._module() if self._module is not None else None
        if module is None:
            return self.body
        swap = {id(mine): given for mine, given in zip(self.own_tensors(), state, strict=True)}
        return functools.partial(self.body, _shadow(module, swap))

    def key(self, *args: Any, **kwargs: Any) -> KernelKey:
        """The key of a call, its tensors aligned as the allocator does: nothing is computed, so tensors may have no data.

        Raises:
            BodyError: the call cannot be one op.
        """
        tensors: list[torch.Tensor] = []
        structure = self._structure(args, kwargs, tensors)
        device_type: DeviceType = "cuda" if tensors[0].is_cuda else "cpu"
        graph = Variant(self, structure, _Modes.now(device_type), tensors).graph
        spec = function_spec(op_name(self.name, graph), graph.text)
        layouts = []
        for tensor in tensors:
            dtype = str(tensor.dtype).removeprefix("torch.")
            alignment = 16 if device_type == "cuda" else tensor.element_size()
            layouts.append(TensorKey(dtype, tuple(tensor.shape), tuple(tensor.stride()), alignment))
        without_results = KernelKey(
            op=spec.name,
            device_type=device_type,
            tensors=tuple(layouts),
            scalars={GRAPH: graph.text},
            outputs=(None,) * len(graph.outputs),
            mkldnn=torch._C._get_mkldnn_enabled(),
            matmul_precision=matmul_precision(device_type),
        )
        return msgspec.structs.replace(without_results, outputs=spec.stock_outputs(without_results))

    def _served(self, variant: Variant, tensors: list[torch.Tensor], plain: Any, args: Any, kwargs: Any) -> Any:
        if self.recompute and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return variant.results(_Recompute.apply(variant, *tensors))
        made = variant.attempt(*tensors)
        return plain(*args, **kwargs) if made is None else variant.results(made)

    def _recorded(self, variant: Variant, tensors: list[torch.Tensor], plain: Any, args: Any, kwargs: Any) -> Any:
        begin = time.perf_counter()

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal begin
            begin = time.perf_counter()  # a miss may have read the body at a new layout, which is no part of the call
            return plain(*args, **kwargs)

        result = self._served(variant, tensors, timed, args, kwargs)
        spent = time.perf_counter() - begin
        made = [result] if isinstance(result, torch.Tensor) else list(result)
        if all(type(t) in (torch.Tensor, nn.Parameter) for t in (*tensors, *made)):
            variant.native.record(tensors, [t.detach() for t in made], spent)
        return result

    def _variant(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Variant | None:
        """The variant of a call, and its tensors; None where the call cannot be one op."""
        try:
            structure = self._structure(args, kwargs, tensors)
        except BodyError as error:
            self.refuse(error)
            return None
        if self._surroundings is None or not self._surroundings.hold():
            self._renew()
        choice = (structure, _Modes.now(tensors[0].device.type), tensors[0].device.type)
        if choice in self._variants:
            return self._variants[choice]
        with self._lock:
            if choice not in self._variants and len(self._variants) < MAX_VARIANTS:
                try:
                    self._variants[choice] = None if self._surroundings is None else self._new(choice, tensors)
                except (BodyError, ValueError) as error:
                    self.refuse(error)
                    self._variants[choice] = None
            return self._variants.get(choice)

    def _new(self, choice: Any, tensors: list[torch.Tensor]) -> Variant:
        return Variant(self, choice[0], choice[1], tensors, self.fixed)

    def _structure(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Structure:
        structure = (tuple(_described(a, tensors) for a in args), tuple((k, _described(v, tensors)) for k, v in kwargs.items()))
        tensors += self.own_tensors()
        if not 1 <= len(tensors) <= MAX_TENSORS:
            raise BodyError(f"it has {len(tensors)} tensors, its module's included; an op takes 1 to {MAX_TENSORS}")
        return structure

    def _renew(self) -> None:
        """Read again what the body depends on: it is, or may be, another function now."""
        module = self._module() if self._module is not None else None
        with self._lock:
            self._variants = {}
            try:
                self._surroundings = read_surroundings(self.body, module)
            except BodyError as error:
                self._surroundings, self._is_refused = None, True
                self.refuse(error)

    def is_asked(self) -> int:
        """Whether anybody wants calls on this thread: bit 0 served, bit 1 recorded."""
        return self._asked()

    def refuse(self, error: Exception) -> None:
        """Keep why a call could not be one op."""
        if str(error) not in self.refusals[-8:]:
            self.refusals.append(str(error))

    def _for_tracing(self, arguments: int) -> tuple[str, bool] | None:
        """The operator's name for a call with this many tensors and nothing else, from the first kernel that is loaded here."""
        if not self._asked() or getattr(_reading, "depth", False):
            return None
        own = len(self.own_tensors())
        for servable in list(session().loaded.values()):
            key = servable.record.key
            if not is_function(key.op) or key.op.split(":")[1] != self.name or len(key.tensors) != arguments + own:
                continue
            layouts = [t for t in key.tensors if t is not None]
            samples = [torch.empty_strided(t.sizes, t.strides, dtype=getattr(torch, t.dtype), device="meta") for t in layouts]
            if self._surroundings is None or not self._surroundings.hold():
                self._renew()
            choice = ("traced", arguments, torch.is_grad_enabled(), read_graph(str(key.scalars[GRAPH])).single)
            if choice not in self._variants and self._surroundings is not None:
                structure = ((_TENSOR,) * arguments, ())
                try:
                    self._variants[choice] = Variant(self, structure, _Modes.now(key.device_type), samples)
                except (BodyError, ValueError) as error:
                    self.refuse(error)
                    self._variants[choice] = None
            variant = self._variants.get(choice)
            if variant is not None:
                return variant.operator.__name__, variant.graph.single
        return None


def _read_apart(body: Callable[..., Any], tensors: Sequence[torch.Tensor], parameters: Sequence[int] = ()) -> Graph:
    """A body's graph at these tensors' layouts. A thread of its own has none of the modes that the caller is in."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    found: list[Graph | BaseException] = []

    def read() -> None:
        try:
            with FakeTensorMode():
                fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]
            found.append(capture(body, fakes, parameters))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            found.append(error)

    thread = threading.Thread(target=read, name="torch_autokern reads a function")
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


@functools.cache
def _operators() -> torch.library.Library:
    return torch.library.Library("autokern", "FRAGMENT")  # kept: what it defined goes with it


class _Recompute(torch.autograd.Function):
    """Serves the forward and computes the body again for the backward."""

    @staticmethod
    def forward(ctx: Any, variant: Variant, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.variant = variant
        ctx.save_for_backward(*tensors)
        made = variant.attempt(*tensors)
        return variant.body(*tensors) if made is None else made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.variant.gradients(ctx.saved_tensors, gradients))


def _shadow(module: nn.Module, swap: dict[int, torch.Tensor]) -> nn.Module:
    """A module that shares everything but its tensors, which are those of `swap` by the identity of the originals."""
    twin: nn.Module = copy.copy(module)  # a new `__dict__`; the dictionaries inside are shared, so they are replaced below
    twin.__dict__.pop("forward", None)
    for kind in ("_parameters", "_buffers"):
        own = module.__dict__[kind]
        twin.__dict__[kind] = {name: None if t is None else swap[id(t)] for name, t in own.items()}
    twin.__dict__["_modules"] = {name: None if m is None else _shadow(m, swap) for name, m in module._modules.items()}
    return twin


def _described(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A hashable description of an argument; its tensors are added to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _TENSOR
    if isinstance(value, float):
        return (float, value.hex())  # tells -0.0 from 0.0
    if value is None or isinstance(value, bool | int | str | torch.dtype):
        return (type(value), value)
    if type(value) in (tuple, list):
        return (type(value), tuple(_described(item, tensors) for item in value))
    raise BodyError(f"an argument is a {type(value).__name__}; an op takes tensors, numbers, words, dtypes and lists of them")


def _rebuilt(structure: Structure, tensors: Any) -> tuple[list[Any], dict[str, Any]]:
    """Arguments from their descriptions and the tensors, in order."""
    positional, named = structure
    args = [_value(described, tensors) for described in positional]
    return args, {name: _value(described, tensors) for name, described in named}


def _value(described: Any, tensors: Any) -> Any:
    if described == _TENSOR:
        return next(tensors)
    kind, value = described
    if kind is float:
        return float.fromhex(value)
    return kind(_value(item, tensors) for item in value) if kind in (tuple, list) else value
