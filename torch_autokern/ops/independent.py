"""Which dimension of a whole function is independent, and the same function on a few of its slices.

A function's truth needs several float64 tensors as large as its widest one. Where every result's slice depends on one slice of
the arguments alone (a batch), the judge computes truth slice by slice instead. That is read from the graph: a dimension is
followed through every call by the rules below, and a call that has none, or that mixes slices, ends it. A graph has sizes
inside (`view`, `expand`), so fewer slices are another graph, with those numbers replaced.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import msgspec
import torch

from torch_autokern.ops.function import GRAPH, FunctionSpec, _without_data, function_spec, op_name
from torch_autokern.ops.graph import Graph, Node, overload_of
from torch_autokern.store.key import KernelKey, TensorKey

_MOST_CHOICES = 256  # ways to say which dimension of each argument is meant

# Where a size stands in a graph: node, argument's number or name, place in its list, and how many of them make a slice.
_Size = tuple[int, int | str, int, int]


class _Row(NamedTuple):
    """Where a value carries the dimension: at `place`, where `block` indices belong to a slice (more than 1 where a view joined
    the dimension with what is inside of it)."""

    place: int
    block: int = 1


@dataclass(frozen=True)
class Independent:
    """A dimension of `size` slices: `inputs[i]` in argument i, `outputs[i]` in result i (None: an argument used whole)."""

    size: int
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    sizes: tuple[_Size, ...]


class Mixed(Exception):
    """A call that has no rule, or that makes one slice of several."""


def independent(key: KernelKey, most: int) -> Independent | str:
    """The best independent dimension of a function's key with at most `most` elements a slice, or why there is none.

    Outer dimensions first: their slices are next to each other in memory. The same key gives the same answer everywhere.
    """
    return _independent(key.op, str(key.scalars[GRAPH]), key.tensors, most)


@functools.lru_cache(maxsize=64)
def _independent(op: str, text: str, layouts: tuple[TensorKey | None, ...], most: int) -> Independent | str:
    spec = function_spec(op, text)
    assert spec.graph is not None
    tensors = _without_data(layouts)
    widest = max(range(len(tensors)), key=lambda i: tensors[i].numel())
    shapes: list[Any] = [tuple(t.shape) for t in tensors]
    largest = max(t.numel() for t in tensors)

    def see(name: str, args: Sequence[Any], result: Any) -> None:
        nonlocal largest
        made = result if isinstance(result, tuple | list) else (result,)
        shapes.append(tuple(result.shape) if isinstance(result, torch.Tensor) else [tuple(t.shape) for t in made])
        largest = max([largest, *(t.numel() for t in made if isinstance(t, torch.Tensor))])

    spec.program.observed(see, *tensors)
    said: dict[int, str] = {}
    wide = tensors[widest]
    for dim in sorted(range(wide.dim()), key=lambda d: (-wide.stride()[d], d)):
        if wide.shape[dim] < 2 or largest // wide.shape[dim] > most:
            continue
        for inputs in itertools.islice(_choices(spec, tensors, widest, dim), _MOST_CHOICES):
            whole = [i for i, place in enumerate(inputs) if place is None and tensors[i].numel() > most]
            if whole:
                said[dim] = f"argument {whole[0]} would be used whole"
                continue
            try:
                return _Walk(spec.graph, shapes, inputs, wide.shape[dim]).done()
            except Mixed as mixed:
                said[dim] = str(mixed)
    if not said:
        return f"no slice of argument {widest} is as small"
    return f"argument {widest}: " + "; ".join(f"dimension {dim}: {why}" for dim, why in said.items())


def on_slices(spec: FunctionSpec, key: KernelKey, found: Independent, length: int) -> tuple[FunctionSpec, KernelKey]:
    """The same function on `length` slices: its spec, and a key with the sizes of the slices."""
    assert spec.graph is not None
    args: list[Any] = [list(node.args) for node in spec.graph.nodes]
    named: list[Any] = [dict(node.kwargs) for node in spec.graph.nodes]
    for number, name, place, block in found.sizes:
        where = args[number] if isinstance(name, int) else named[number]
        where[name] = [length * block if i == place else size for i, size in enumerate(where[name])]
    nodes = zip(spec.graph.nodes, args, named, strict=True)
    graph = msgspec.structs.replace(spec.graph, nodes=tuple(Node(node.op, tuple(a), n) for node, a, n in nodes))
    cut = function_spec(op_name(spec.name.split(":")[1], graph), graph.text)
    tensors = tuple(_cut(t, dim, length) for t, dim in zip(key.tensors, found.inputs, strict=True))
    outputs = tuple(_cut(t, dim, length) for t, dim in zip(key.outputs, found.outputs, strict=True))
    return cut, msgspec.structs.replace(key, op=cut.name, scalars={GRAPH: graph.text}, tensors=tensors, outputs=outputs)


def _cut(layout: TensorKey | None, dim: int | None, length: int) -> TensorKey | None:
    if layout is None or dim is None:
        return layout
    return msgspec.structs.replace(layout, sizes=(*layout.sizes[:dim], length, *layout.sizes[dim + 1 :]))


def _choices(spec: FunctionSpec, tensors: Sequence[torch.Tensor], widest: int, dim: int) -> Iterator[tuple[int | None, ...]]:
    """Which dimension of each argument may be the one: the same place, counted from either end, then others of its size; of a
    module's own tensors none first."""
    wide = tensors[widest]
    each: list[list[int | None]] = []
    for number, tensor in enumerate(tensors):
        if number == widest:
            each.append([dim])
            continue
        places = [d for d, size in enumerate(tensor.shape) if size == wide.shape[dim]]
        places.sort(key=lambda d: (d != dim, d - len(tensor.shape) != dim - wide.dim(), d))
        each.append([None, *places] if number in spec.parameters or not places else [*places, None])
    return itertools.product(*each)


class _Walk:
    """Follow the dimension through a graph. `_rows[i]` is where value i carries it, None, or one of those for each result of a
    call with several."""

    def __init__(self, graph: Graph, shapes: Sequence[Any], inputs: Sequence[int | None], size: int) -> None:
        self._graph, self._shapes, self._inputs, self._size = graph, shapes, tuple(inputs), size
        self._sizes: list[_Size] = []
        self._rows: list[Any] = [None if place is None else _Row(place) for place in inputs]

    def done(self) -> Independent:
        """The whole walk.

        Raises:
            Mixed: there is a call that it cannot pass.
        """
        for number, node in enumerate(self._graph.nodes):
            self._rows.append(self._after(number, node))
        outputs = []
        for value in self._graph.outputs:
            row = self.row(value)
            if row is None or row.block > 1:
                raise Mixed("a result does not have it" if row is None else "a result has it joined with another dimension")
            outputs.append(row.place)
        return Independent(self._size, self._inputs, tuple(outputs), tuple(self._sizes))

    @property
    def size(self) -> int:
        """Slices of the dimension."""
        return self._size

    def row(self, value: dict[str, int]) -> _Row | None:
        """Where a value carries the dimension."""
        found = self._rows[value["n"]]
        return found[value["o"]] if "o" in value and found is not None else found  # type: ignore[no-any-return]

    def shape(self, value: dict[str, int]) -> tuple[int, ...]:
        """A value's shape."""
        found = self._shapes[value["n"]]
        return found[value["o"]] if "o" in value else found  # type: ignore[no-any-return]

    def _after(self, number: int, node: Node) -> Any:
        overload = overload_of(node.op)
        named = dict(zip((a.name for a in overload._schema.arguments), node.args, strict=False)) | node.kwargs
        rows = [row for value in _leaves((node.args, node.kwargs)) if (row := self.row(value)) is not None]
        if not rows:
            return None
        name = overload._opname
        call = _Call(self, number, node, named, overload._schema.arguments[0].name, self._shapes[self._graph.inputs + number])
        rule = _RULES.get(name) or (_elementwise if torch.Tag.pointwise in overload.tags else None)
        if rule is None:
            raise Mixed(f"aten.{name} is a call that the judge cannot follow it through")
        if len({row.block for row in rows}) > 1:
            call.mixed()
        try:
            found = rule(call)
            if isinstance(found, list):
                return [_Row(place, rows[0].block) for place in found]
            return found if isinstance(found, _Row) else _Row(found, rows[0].block)
        except (KeyError, TypeError, IndexError) as error:  # an overload with other arguments than the rule knows
            raise Mixed(f"{node.op} has a form that the judge cannot follow it through") from error


def _leaves(value: Any) -> list[dict[str, int]]:
    if isinstance(value, dict):
        return [value] if "n" in value else [leaf for one in value.values() for leaf in _leaves(one)]
    return [leaf for one in value for leaf in _leaves(one)] if isinstance(value, list | tuple) else []


@dataclass(frozen=True)
class _Call:
    """One call on its way: arguments by name, the first one's name, and the shape (or shapes) of what it gives."""

    walk: _Walk
    number: int
    node: Node
    named: dict[str, Any]
    first: str
    made: Any

    def row(self, name: str) -> int | None:
        """Where an argument carries the dimension."""
        value = self.named.get(name)
        return self.place(value) if isinstance(value, dict) and "n" in value else None

    def place(self, value: dict[str, int]) -> int | None:
        """Where a value carries it."""
        row = self.walk.row(value)
        return None if row is None else row.place

    def shape(self, name: str) -> tuple[int, ...]:
        """An argument's shape."""
        return self.walk.shape(self.named[name])

    @property
    def own(self) -> int:
        """Where the first argument carries it; nothing else may."""
        row = self.row(self.first)
        if row is None or any(self.row(name) is not None for name in self.named if name != self.first and self._is_value(name)):
            self.mixed()
        return row

    def _is_value(self, name: str) -> bool:
        return isinstance(self.named[name], dict) and "n" in self.named[name]

    @property
    def rank(self) -> int:
        """Number of the first argument's dimensions."""
        return len(self.shape(self.first))

    def mixed(self) -> NoReturn:
        """Say that this call is where it ends."""
        raise Mixed(f"{self.node.op} mixes its slices")

    def note(self, name: str, place: int, block: int) -> None:
        """The size at a place of a list is `block` times the dimension's, and follows it."""
        arguments = [a.name for a in overload_of(self.node.op)._schema.arguments]
        where: int | str = arguments.index(name) if arguments.index(name) < len(self.node.args) else name
        self.walk._sizes.append((self.number, where, place, block))


def _elementwise(call: _Call) -> int:
    """Broadcasting: counted from the end all have it at one place, or have size 1 there, or nothing."""
    values = _leaves(list(call.named.values()))
    places = {row - len(call.walk.shape(v)) for v in values if (row := call.place(v)) is not None}
    if len(places) != 1:
        call.mixed()
    (place,) = places
    for value in values:
        shape = call.walk.shape(value)
        if call.place(value) is None and len(shape) >= -place and shape[place] != 1:
            raise Mixed(f"{call.node.op} meets a tensor of its size that is not cut with it")
    if not isinstance(call.made, tuple):
        call.mixed()
    return len(call.made) + place


def _dims(call: _Call, name: str = "dim") -> list[int]:
    found = call.named.get(name)
    if found is None or found == []:
        call.mixed()  # all of them
    return [d % call.rank for d in (found if isinstance(found, list | tuple) else [found])]


def _reduction(call: _Call) -> Any:
    row, dims = call.own, _dims(call)
    if row in dims:
        call.mixed()
    after = row if call.named.get("keepdim", False) else row - sum(d < row for d in dims)
    return after if isinstance(call.made, tuple) else [after] * len(call.made)


def _along(call: _Call) -> Any:
    """Work along other dimensions, which stay where they are."""
    row = call.own
    if row in _dims(call):
        call.mixed()
    return row if isinstance(call.made, tuple) else [row] * len(call.made)


def _softmax_backward(call: _Call) -> int:
    row = _elementwise(call)
    if row in _dims(call):
        call.mixed()
    return row


def _split(call: _Call) -> list[int]:
    row = call.own
    if row == call.named.get("dim", 0) % call.rank:
        call.mixed()
    return [row] * len(call.made)


def _slice(call: _Call) -> int:
    row, dim = call.own, call.named.get("dim", 0) % call.rank
    end = call.named.get("end")
    if row == dim and (call.named.get("start") or (end is not None and end < 1 << 62) or call.named.get("step", 1) != 1):
        call.mixed()
    return row


def _select(call: _Call) -> int:
    row, dim = call.own, int(call.named["dim"]) % call.rank
    if row == dim:
        call.mixed()
    return row - (dim < row)


def _view(call: _Call) -> _Row:
    """The dimension stays the outermost part of the one that has as many elements before it, if that is a multiple of it."""
    row, shape, made = call.own, call.shape(call.first), call.made
    before = math.prod(shape[:row])
    for place, size in enumerate(made):
        if size > 1 and math.prod(made[:place]) == before and size % call.walk.size == 0:
            block = size // call.walk.size
            if call.named["size"][place] != -1:
                call.note("size", place, block)
            return _Row(place, block)
    raise Mixed(f"{call.node.op} joins it with another dimension, or parts it")


def _expand(call: _Call) -> int:
    row = call.own + len(call.made) - call.rank
    if call.named["size"][row] != -1:
        call.note("size", row, call.made[row] // call.walk.size)
    return row


def _permute(call: _Call) -> int:
    return [d % call.rank for d in call.named["dims"]].index(call.own)


def _transpose(call: _Call) -> int:
    one, other = (int(call.named[name]) % call.rank for name in ("dim0", "dim1"))
    return {one: other, other: one}.get(call.own, call.own)


def _unsqueeze(call: _Call) -> int:
    return call.own + (int(call.named["dim"]) % (call.rank + 1) <= call.own)


def _squeeze(call: _Call) -> int:
    gone = {d for d in _dims(call) if call.shape(call.first)[d] == 1}
    return call.own - sum(d < call.own for d in gone)


def _joined(call: _Call) -> int:
    values = call.named["tensors"]
    rows = {call.place(value) for value in values}
    rank = len(call.walk.shape(values[0]))
    if len(rows) != 1 or None in rows:
        call.mixed()
    (row,) = rows
    assert row is not None
    stacks = call.node.op.startswith("aten.stack.")
    dim = call.named.get("dim", 0) % (rank + stacks)
    if not stacks and dim == row:
        call.mixed()
    return row + (stacks and dim <= row)


def _product(call: _Call) -> int:
    """Rows of the left operand, columns of the right one, or the batch of both."""
    left, right = ("mat1", "mat2") if "mat1" in call.named else ("batch1", "batch2")
    if left not in call.named:
        left, right = call.first, "vec" if "vec" in call.named else "mat2"
    one, other = call.row(left), call.row(right)
    rank = len(call.shape(left))
    if one == other == 0 and rank == 3:
        row = 0
    elif other is None and one == rank - 2:
        row = rank - 2
    elif one is None and other == rank - 1 and right != "vec":
        row = rank - 1
    else:
        call.mixed()
    if call.first not in (left, right):  # an addend, broadcast to the result
        added, shape = call.row(call.first), call.shape(call.first)
        place = row - len(call.made)
        if added is None and len(shape) >= -place and shape[place] != 1:
            call.mixed()
        if added is not None and added - len(shape) != place:
            call.mixed()
    return row


def _linear(call: _Call) -> int:
    row = call.own
    if row == call.rank - 1:
        call.mixed()
    return row


def _norm(call: _Call) -> list[int]:
    row = call.own
    if row >= call.rank - len(call.named["normalized_shape"]):
        call.mixed()
    return [row] * len(call.made)


def _same(call: _Call) -> int:
    return call.own


_RULES: dict[str, Callable[[_Call], Any]] = {
    **dict.fromkeys(("sum", "mean", "prod", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean", "logsumexp",
                     "norm", "linalg_vector_norm", "nansum"), _reduction),
    **dict.fromkeys(("_softmax", "_log_softmax", "cumsum", "cumprod", "glu"), _along),
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    **dict.fromkeys(("view", "_unsafe_view"), _view),
    **dict.fromkeys(("unsqueeze",), _unsqueeze),
    **dict.fromkeys(("squeeze",), _squeeze),
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("mm", "bmm", "mv", "addmm", "baddbmm"), _product),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _norm),
    **dict.fromkeys(("detach", "alias", "clone", "_to_copy", "zeros_like", "ones_like", "full_like"), _same),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax_backward),
    "slice": _slice, "select": _select, "expand": _expand, "permute": _permute, "transpose": _transpose, "linear": _linear,
    "t": lambda call: 1 - call.own if call.rank == 2 else call.own,
}  # fmt: skip
