"""What a function computes, as data: a straight line of ATen calls, read from its body once for each layout of its tensors.

A graph holds no code. It travels inside a key (`ops/function.py`), so a workload, a record or a pack says by itself what its
kernel must compute, and nobody's Python has to run to judge it. Graphs come from files too: every op is looked up in a closed
list, every argument has a closed kind.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from torch_autokern.errors import BodyError
from torch_autokern.store.key import canonical_json

MAX_NODES = 1000
MAX_GRAPH_BYTES = 1 << 16
MAX_TENSORS = 16  # kMaxTensors in csrc/call.h
_OP = re.compile(r"aten\.([a-z_][a-z0-9_]*)\.([A-Za-z_][A-Za-z0-9_]*)")
_WORDS = ("none", "tanh", "trunc", "floor")  # GELU's approximation and division's rounding are all that is said in words
# ATen ops beside those that PyTorch tags `core`: what a body's calls become and what their gradients need.
_FURTHER = frozenset({
    "_unsafe_view", "t", "transpose", "detach", "alias", "silu", "mish", "softplus", "hardswish", "hardsigmoid", "elu",
    "celu", "selu", "sum", "mean", "prod", "amax", "amin", "max", "min", "var", "addcmul", "addcdiv", "lerp", "norm",
    "linalg_vector_norm", "std", "var_mean", "std_mean", "stack", "split", "split_with_sizes", "unbind", "tril", "triu",
    "diagonal", "diag_embed", "frac", "xlogy", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "linear", "mv", "addmv", "dot", "outer", "zeros", "ones", "zeros_like", "ones_like", "full_like", "eye", "threshold",
    "narrow", "roll", "rsub", "logsumexp", "log_sigmoid_forward", "logaddexp", "square", "_fused_rms_norm",
    "linalg_cross", "masked_fill", "clamp_min", "clamp_max", "cumprod", "aminmax", "nansum", "new_zeros",
    "new_ones", "new_full", "_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm_backward",
    "_fused_rms_norm_backward", "gelu_backward", "silu_backward", "mish_backward", "elu_backward", "softplus_backward",
    "sigmoid_backward", "tanh_backward", "threshold_backward", "hardswish_backward", "hardsigmoid_backward",
    "mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward", "log_sigmoid_backward",
})  # fmt: skip
_NEVER = frozenset({"from_file", "empty", "empty_like", "empty_strided", "new_empty", "resize", "item", "_local_scalar_dense"})
_WIDE = {torch.float16, torch.bfloat16, torch.float32}
_HALF_TO_FLOAT = {"_softmax": 2, "_log_softmax": 2}


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call. Arguments are JSON: numbers, words and lists as they are; ``{"n": i}`` is value `i` (inputs first, then nodes),
    ``{"n": i, "o": j}`` its result `j`; ``{"f": hex}`` a float, ``{"t": dtype}``, ``{"m": memory format}``, ``{"d": "*"}`` the
    device of the call."""

    op: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}


class Graph(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`parameters` are the inputs that a module owns. `single`: the body returns a tensor, not a tuple of tensors."""

    inputs: int
    parameters: tuple[int, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Any, ...]
    single: bool

    @property
    def text(self) -> str:
        """Canonical JSON: equal graphs give equal text."""
        return canonical_json(self).decode()

    @property
    def digest(self) -> str:
        """SHA-256 of the text, hex."""
        return hashlib.sha256(canonical_json(self)).hexdigest()


def listing(graph: Graph, arguments: Sequence[str]) -> str:
    """A graph as lines that a person can read: one call each, and what is returned. `arguments` are the inputs' names."""
    names = [*arguments, *(f"v{number}" for number in range(len(graph.nodes)))]

    def words(value: Any) -> str:
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(words, value))}]"
        if not isinstance(value, dict):
            return repr(value)
        if "n" in value:
            return names[value["n"]] + (f"[{value['o']}]" if "o" in value else "")
        ((kind, word),) = value.items()
        return {"f": lambda: repr(float.fromhex(word)), "d": lambda: "the arguments' device"}.get(
            kind, lambda: f"torch.{word}"
        )()

    lines = []
    for number, node in enumerate(graph.nodes):
        given = [*map(words, node.args), *(f"{name}={words(value)}" for name, value in node.kwargs.items())]
        lines.append(f"v{number} = {node.op}({', '.join(given)})")
    outputs = ", ".join(map(words, graph.outputs))
    return "\n".join([*lines, f"return {outputs}"])


def graph_words(digest: str) -> tuple[int, int]:
    """The part of a graph's digest that a key's words carry: two 64-bit numbers."""
    low, high = (int.from_bytes(bytes.fromhex(digest[at : at + 16]), "little") for at in (0, 16))
    return low, high


@functools.lru_cache(maxsize=256)
def read_graph(text: str) -> Graph:
    """A graph from its text.

    Raises:
        BodyError: it is too large, no graph, or names an op or a value that graphs do not have.
    """
    if len(text) > MAX_GRAPH_BYTES:
        raise BodyError(f"a graph of {len(text)} bytes; at most {MAX_GRAPH_BYTES} are read")
    try:
        graph = msgspec.json.decode(text, type=Graph)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BodyError(f"this is no graph: {error}") from error
    if not 1 <= graph.inputs <= MAX_TENSORS or not 1 <= len(graph.outputs) <= MAX_TENSORS or len(graph.nodes) > MAX_NODES:
        raise BodyError(f"a graph takes and returns 1 to {MAX_TENSORS} tensors and has at most {MAX_NODES} calls")
    if graph.single and len(graph.outputs) != 1:
        raise BodyError("a graph that returns one tensor has several outputs")
    if any(not 0 <= index < graph.inputs for index in graph.parameters):
        raise BodyError("a graph's parameter is none of its inputs")
    Program(graph)
    return graph


@functools.cache
def _is_core(name: str) -> bool:
    """Whether PyTorch tags one of an op's overloads as core; the tag is missing on overloads that say the same."""
    packet = getattr(torch.ops.aten, name)
    return any(torch.Tag.core in getattr(packet, overload).tags for overload in packet.overloads())


def overload_of(name: str) -> torch._ops.OpOverload:
    """The ATen overload of a node.

    Raises:
        BodyError: it is none, or not one that a graph may call.
    """
    match = _OP.fullmatch(name)
    found = getattr(getattr(torch.ops.aten, match[1], None), match[2], None) if match else None
    if match is None or not isinstance(found, torch._ops.OpOverload):
        raise BodyError(f"{name} is no op of ATen's")
    tags = found.tags
    if torch.Tag.nondeterministic_seeded in tags:
        raise BodyError(f"{name} draws random numbers: a function that does has no one right result")
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        raise BodyError(f"{name} depends on the values of tensors: the function is not the same at every call")
    if found._schema.is_mutable:
        raise BodyError(f"{name} writes one of its arguments: a function that does cannot be one op")
    if match[1] in _NEVER or not (match[1] in _FURTHER or _is_core(match[1])):
        raise BodyError(f"{name} is not among the ops that graphs may call")
    return found


# What to call, the values it uses, constant arguments, the places and makers of the others, and those that have names.
_Call = tuple[Callable[..., Any], set[int], list[Any], list[tuple[int, Any]], list[tuple[str, Any]]]


class Program:
    """A graph made ready to run: overloads found, argument places known. Run it on tensors of any device."""

    def __init__(self, graph: Graph, *, wide: bool = False) -> None:
        """`wide`: in float64, whatever dtypes the body names; pass float64 tensors.

        Raises:
            BodyError: a node calls what graphs may not call, or refers to a later value.
        """
        self.graph = graph
        self._wide = wide
        self._calls = [self._call(number, node) for number, node in enumerate(graph.nodes)]
        last = {ref: number for number, (_, refs, *_) in enumerate(self._calls) for ref in refs}
        kept = {self._ref(value, len(graph.nodes)) for value in graph.outputs}
        self._drop: list[list[int]] = [[] for _ in self._calls]
        for ref, number in last.items():
            if ref not in kept:
                self._drop[number].append(ref)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The results, always as a tuple."""
        return self.observed(None, *tensors)

    def observed(
        self, see: Callable[[str, Sequence[Any], Any], None] | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The results; `see` is told every op's name, arguments and result."""
        values: list[Any] = list(tensors)
        device = tensors[0].device
        for number, (run, _, template, places, kwargs) in enumerate(self._calls):
            args = template.copy()
            for place, make in places:
                args[place] = values[make] if make.__class__ is int else make(values, device)
            result = run(*args, **{name: make(values, device) for name, make in kwargs}) if kwargs else run(*args)
            values.append(result)
            if see is not None:
                see(self.graph.nodes[number].op, args, result)
            for ref in self._drop[number]:
                values[ref] = None
        return tuple(_pick(values, value) for value in self.graph.outputs)

    def _call(self, number: int, node: Node) -> _Call:
        overload = overload_of(node.op)
        refs: set[int] = set()
        args = list(node.args)
        half = _HALF_TO_FLOAT.get(overload._opname)
        if self._wide and half is not None and len(args) > half:
            args[half] = False
        template: list[Any] = []
        places: list[tuple[int, Any]] = []
        for place, value in enumerate(args):
            make = self._value(value, number, refs)
            is_constant = not isinstance(value, list | tuple | dict) or (
                isinstance(value, dict) and not value.keys() & {"n", "d"}
            )
            template.append(self._constant(value) if is_constant else None)
            if not is_constant:
                places.append((place, value["n"] if isinstance(value, dict) and value.keys() == {"n"} else make))
        named = [(name, self._value(value, number, refs)) for name, value in node.kwargs.items()]
        return overload._op, refs, template, places, named

    def _ref(self, value: Any, number: int) -> int:
        index = value.get("n") if isinstance(value, dict) else None
        if not isinstance(index, int) or not 0 <= index < self.graph.inputs + number or not value.keys() <= {"n", "o"}:
            raise BodyError(f"{value!r} is no value that exists there")
        return index

    def _value(self, value: Any, number: int, refs: set[int]) -> Callable[[list[Any], torch.device], Any]:
        """A maker of the argument from the values so far and the device."""
        if isinstance(value, list | tuple):
            makers = [self._value(item, number, refs) for item in value]
            return lambda values, device: [make(values, device) for make in makers]
        if isinstance(value, dict) and "n" in value:
            refs.add(self._ref(value, number))
            return lambda values, device: _pick(values, value)
        if isinstance(value, dict) and value == {"d": "*"}:
            return lambda values, device: device
        constant = self._constant(value)
        return lambda values, device: constant

    def _constant(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int) or (isinstance(value, str) and value in _WORDS):
            return value
        if isinstance(value, dict) and len(value) == 1:
            (kind, word), *_ = value.items()
            if kind == "f" and isinstance(word, str):
                try:
                    return float.fromhex(word)
                except (ValueError, OverflowError):
                    pass
            found = getattr(torch, word, None) if kind in ("t", "m") and isinstance(word, str) else None
            if kind == "t" and isinstance(found, torch.dtype):
                return torch.float64 if self._wide and found in _WIDE else found
            if kind == "m" and isinstance(found, torch.memory_format):
                return found
        raise BodyError(f"{value!r} is no argument that a graph may have")


def _pick(values: Sequence[Any], value: dict[str, int]) -> Any:
    found = values[value["n"]]
    return found[value["o"]] if "o" in value else found


def capture(body: Callable[..., Any], tensors: Sequence[torch.Tensor], parameters: Sequence[int] = ()) -> Graph:
    """Read a body by running it once on tensors without data. `body` takes the tensors and returns one or a tuple of them.

    Raises:
        BodyError: it cannot be written down: random numbers, values of tensors that decide, writes to arguments, tensors that
            are no arguments, results that share memory with an argument or with each other, or an op that graphs do not have.
    """
    from torch_autokern.ops.trace import trace

    graph = trace(body, tensors, tuple(parameters))
    if len(graph.text) > MAX_GRAPH_BYTES:
        raise BodyError(f"its graph has {len(graph.text)} bytes; at most {MAX_GRAPH_BYTES} fit a key")
    _check_fresh(graph, tensors)
    return read_graph(graph.text)


def _check_fresh(graph: Graph, tensors: Sequence[torch.Tensor]) -> None:
    """Results of an op are new tensors: neither views of its arguments nor of each other."""
    given = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
    seen = {t.untyped_storage()._cdata for t in given}
    for result in Program(graph)(*given):
        storage = result.untyped_storage()._cdata
        if storage in seen:
            raise BodyError("it returns an argument, a view of one, or one tensor twice; the results of an op are new tensors")
        seen.add(storage)
