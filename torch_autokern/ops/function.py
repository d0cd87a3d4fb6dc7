"""Whole functions as op families: what `@autokern.kernel` decorates, known by the graph of what it computes.

A key of a function is ``op = "function:<qualified name>:<16 hex digits of the graph's hash>"`` with the graph's text as its one
scalar. So a body that changes is another op, and whoever holds a key can run its stock (the graph's ATen calls, which are
those of the body) and its truth (the same calls in float64).

Natural scale of a function that nobody knows: for every element the larger of its own size and of what rounding the arguments
would move it by, per unit of roundoff; but of the latter no more than the root mean square of its row (the last dimension, or
the whole result where that has size 1; of a slice, where truth is computed in slices). The second part is measured, not
derived: three times all floating arguments are moved by a relative 2^-26 with random signs, in float64. For a sum of products
it comes to the root of the sum of their squares, and so between the result and `sum |a||b|`; for an elementwise function to its
size times its condition number. (Forward error of a backward stable algorithm: Higham, Accuracy and Stability of Numerical
Algorithms, 2002, section 1.6.) The cap keeps inputs with a large common offset from making everything allowed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_autokern.errors import BodyError, InvalidInputError
from torch_autokern.ops.graph import Graph, Program, graph_words, read_graph
from torch_autokern.ops.spec import (
    DTYPE_CODES,
    Arg,
    OpSpec,
    Scalars,
    Tensors,
    itemsize,
    key_from_words,
    key_header,
    matmul_precision,
    tensor_key,
    tensor_words,
)
from torch_autokern.store.key import KernelKey, TensorKey

INDEX = 10  # kFunctionFamily in csrc/ops.h
PREFIX = "function:"
GRAPH = "graph"
_NAME = re.compile(r"function:[A-Za-z_][A-Za-z0-9_.]{0,199}:[0-9a-f]{16}")
_MOVES, _MOVE = 3, 2.0**-26


@dataclass(frozen=True)
class FunctionSpec(OpSpec):
    """The op family of one graph. Made by `function_spec`."""

    graph: Graph | None = None

    @functools.cached_property
    def program(self) -> Program:
        """The graph ready to run, in its own dtypes."""
        assert self.graph is not None
        return Program(self.graph)

    @functools.cached_property
    def words(self) -> tuple[int, int]:
        """What the router knows the graph by."""
        assert self.graph is not None
        return graph_words(self.graph.digest)

    @property
    def has_products(self) -> bool:
        """Whether one of the graph's calls multiplies matrices."""
        return self.graph is not None and any(node.op.split(".")[1] in _PRODUCTS for node in self.graph.nodes)

    def overload(self) -> Callable[..., Any]:
        """The graph's calls, one after the other."""
        return self.program

    def call_args(self, tensors: Tensors, scalars: Scalars) -> tuple[list[object], dict[str, object]]:
        """The tensors; a graph has everything else inside."""
        return list(tensors), {}

    def stock(self, tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
        """The body's own ATen calls."""
        with torch.no_grad():
            return self.program(*(t for t in tensors if t is not None))

    def key(
        self, tensors: Tensors, scalars: Scalars, outputs: Sequence[torch.Tensor | None] | None = None, *,
        flush_denormal: bool = False,
    ) -> KernelKey:  # fmt: skip
        """Key of a call, as `OpSpec.key`."""
        assert self.graph is not None
        first = tensors[0]
        if first is None or len(tensors) != self.graph.inputs:
            raise InvalidInputError(f"{self.name} takes {self.graph.inputs} tensors, got {len(tensors)}")
        results = self.stock(tensors, scalars) if outputs is None else outputs
        return KernelKey(
            op=self.name,
            device_type="cuda" if first.is_cuda else "cpu",
            tensors=tuple(None if t is None else tensor_key(t) for t in tensors),
            scalars={GRAPH: self.graph.text},
            outputs=tuple(None if t is None else tensor_key(t) for t in results),
            flush_denormal=flush_denormal,
            mkldnn=torch._C._get_mkldnn_enabled(),
            matmul_precision=matmul_precision("cuda" if first.is_cuda else "cpu"),
        )

    def stock_outputs(self, key: KernelKey) -> tuple[TensorKey | None, ...]:
        """Layouts of the results, from the graph run on tensors without data."""
        try:
            results = self.program(*_without_data(key.tensors))
        except Exception as error:  # a graph from a file may pass an op anything
            raise BodyError(f"{self.name} does not take these tensors: {type(error).__name__}: {error}"[:500]) from error
        if len(results) != len(key.outputs):
            raise BodyError(f"{self.name} returns {len(results)} tensors, the key says {len(key.outputs)}")
        layouts = []
        for result in results:
            dtype = str(result.dtype).removeprefix("torch.")
            if dtype not in DTYPE_CODES:
                raise BodyError(f"{self.name} returns {dtype}, which keys do not express")
            alignment = 16 if key.device_type == "cuda" else itemsize(dtype)
            layouts.append(TensorKey(dtype, tuple(result.shape), tuple(result.stride()), alignment))
        return tuple(layouts)

    def encode(self, key: KernelKey, place: int) -> tuple[int, ...]:
        """Words of a key: header, tensors, and two words of the graph's hash."""
        words = [key_header(self.index, key, place, has_precision=True)]
        for tensor in key.tensors:
            words += tensor_words(tensor)
        return tuple(word & (1 << 64) - 1 for word in (*words, *self.words))

    def decode(self, words: Sequence[int], output_words: Sequence[int]) -> KernelKey:
        """Inverse of `encode`."""
        assert self.graph is not None
        return key_from_words(
            self.name, words[:-2], output_words, self.graph.inputs, {GRAPH: self.graph.text}, has_precision=True
        )


def is_function(op: str) -> bool:
    """Whether an op's name is that of a whole function."""
    return op.startswith(PREFIX)


def is_same_op(one: str, other: str) -> bool:
    """Whether two op names mean one computation: equal, or functions of one graph under two names."""
    return one == other or (is_function(one) and is_function(other) and one.rpartition(":")[2] == other.rpartition(":")[2])


def function_name(qualified_name: str) -> str:
    """A function's name as keys have it: letters, digits, `_` and `.`."""
    return re.sub(r"[^A-Za-z0-9_.]", "", qualified_name.replace("<locals>.", ""))[-150:].lstrip(".0123456789") or "function"


def op_name(name: str, graph: Graph) -> str:
    """The op of a function with this graph."""
    return f"{PREFIX}{name}:{graph.digest[:16]}"


@functools.lru_cache(maxsize=256)
def function_spec(op: str, text: str) -> FunctionSpec:
    """The op family that a key names.

    Raises:
        BodyError: the text is no graph, or not the one that the name promises.
    """
    graph = read_graph(text)
    if not _NAME.fullmatch(op) or op.rpartition(":")[2] != graph.digest[:16]:
        raise BodyError(f"{op!r} is not the name of the graph beside it")
    spec = FunctionSpec(
        name=op,
        index=INDEX,
        args=tuple(Arg(f"argument{i}", "tensor") for i in range(graph.inputs)),
        reference=_reference,
        scale=_scale,
        flops=_flops,
        reduced_dims=_no_dims,
        parameters=graph.parameters,
        graph=graph,
    )
    _by_words[spec.words] = spec
    return spec


_by_words: dict[tuple[int, int], FunctionSpec] = {}  # every graph that this process has met, for keys that the router saw


def spec_of_words(words: Sequence[int]) -> FunctionSpec:
    """The op family of a key's words; its graph was met here, because only then does the router know it.

    Raises:
        BodyError: it was not.
    """
    low, high = (word & (1 << 64) - 1 for word in words[-2:])
    if (low, high) not in _by_words:
        raise BodyError(f"no function of this process computes {low:016x}{high:016x}")
    return _by_words[low, high]


@functools.lru_cache(maxsize=64)
def _wide_program(text: str) -> Program:
    return Program(read_graph(text), wide=True)


def _wide(tensors: Tensors) -> list[torch.Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors if t is not None]


def _reference(tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        results = _wide_program(str(scalars[GRAPH]))(*_wide(tensors))
    return tuple(r.double() for r in results)


def _scale(truth: Sequence[torch.Tensor], tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
    program, wide = _wide_program(str(scalars[GRAPH])), _wide(tensors)
    generator = torch.Generator(device=wide[0].device).manual_seed(0)  # the same scale at every look at the same values
    squares = [torch.zeros_like(t) for t in truth]
    with torch.no_grad():
        for _ in range(_MOVES):
            moved = [_moved(t, generator) if t.is_floating_point() else t for t in wide]
            for square, result, right in zip(squares, program(*moved), truth, strict=True):
                square.add_(result.double().sub_(right).div_(_MOVE).square_())
    return tuple(_element_scale(right, square) for right, square in zip(truth, squares, strict=True))


def _moved(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    # Stride-0 dimensions are one number each, and moving them apart would be another call.
    cut = tensor.as_strided([1 if s == 0 else n for n, s in zip(tensor.shape, tensor.stride(), strict=True)], tensor.stride())
    signs = torch.randint(0, 2, cut.shape, generator=generator, device=tensor.device, dtype=torch.int8)
    return (cut * (1 + _MOVE * (2 * signs.double() - 1))).expand(tensor.shape)


def _element_scale(truth: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    finite = torch.nan_to_num(truth, 0.0, 0.0, 0.0)
    condition = torch.nan_to_num(squares.div_(_MOVES).sqrt_(), 0.0, 0.0, 0.0)
    row = finite.square().mean(-1, keepdim=True) if truth.dim() and truth.shape[-1] > 1 else finite.square().mean()
    return torch.maximum(finite.abs(), torch.minimum(condition, row.sqrt()))


def _without_data(layouts: Sequence[TensorKey | None]) -> list[torch.Tensor]:
    return [
        torch.empty_strided(t.sizes, t.strides, dtype=getattr(torch, t.dtype), device="meta") for t in layouts if t is not None
    ]


_PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}  # and their left operand's place


@functools.lru_cache(maxsize=64)
def _flops_of(op: str, text: str, layouts: tuple[TensorKey | None, ...]) -> float:
    total = 0.0

    def see(name: str, args: Sequence[Any], result: Any) -> None:
        nonlocal total
        made = result if isinstance(result, tuple | list) else (result,)
        elements = sum(t.numel() for t in made if isinstance(t, torch.Tensor))
        place = _PRODUCTS.get(name.split(".")[1])
        read = max((a.numel() for a in args if isinstance(a, torch.Tensor)), default=0)
        total += max(elements, read) if place is None else 2.0 * elements * args[place].shape[-1]

    function_spec(op, text).program.observed(see, *_without_data(layouts))
    return total


def _flops(key: KernelKey) -> float:
    """Two for every term of a product, and one for every element that another call of the graph reads or makes."""
    return _flops_of(key.op, str(key.scalars[GRAPH]), key.tensors)


def _no_dims(key: KernelKey) -> tuple[int, ...]:
    """Nobody knows what an unknown function reduces; the judge tries every dimension."""
    raise NotImplementedError(f"{key.op}: a whole function has no known reduced dimensions")
