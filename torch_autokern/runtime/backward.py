"""The backward of a decorated function as a function of its own: recorded, searched, judged and served like any other.

Its arguments are the forward's and the gradients of its results; its graph is what the vector-Jacobian product of the forward's
graph calls. It has no Python of its own, so nothing about it can change unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_autokern.errors import BodyError
from torch_autokern.ops.graph import Graph, Program

MAX_LAYOUTS = 32
Tensors = Sequence[torch.Tensor]


class Backward:
    """Gradients of one function, for each layout of its arguments and gradients. `read` gives a body's graph at tensors'
    layouts, `forward` that of the function itself; `refuse` is told why a backward cannot be one op."""

    def __init__(
        self, name: str, forward: Callable[[Tensors], Graph],
        read: Callable[[Callable[..., Any], Tensors, Sequence[int]], Graph], refuse: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        self._name, self._forward, self._read, self._refuse = f"{name}.backward", forward, read, refuse
        self._made: dict[Any, Callable[..., Any] | None] = {}

    def __call__(self, tensors: Tensors, gradients: Tensors) -> tuple[torch.Tensor | None, ...] | None:
        """A gradient for every floating argument, None for others; nothing where the backward cannot be one op."""
        given = (*tensors, *gradients)
        if not all(type(t) in (torch.Tensor, torch.nn.Parameter) and t.is_floating_point() for t in gradients):
            return None  # a compiler's, which traces what stands below
        layout = tuple((t.shape, t.stride(), t.dtype, t.device) for t in given)
        if layout not in self._made:
            if len(self._made) >= MAX_LAYOUTS:
                return None
            self._made[layout] = self._new(tensors, given)
        call = self._made[layout]
        if call is None:
            return None
        found = iter(call(*(t.detach() for t in given)))
        return tuple(next(found) if t.is_floating_point() else None for t in tensors)

    def _new(self, tensors: Tensors, given: Tensors) -> Callable[..., Any] | None:
        from torch_autokern.runtime.decorated import fixed_function

        try:
            forward, count = self._forward(tensors), len(tensors)
            program = Program(forward)
            graph = self._read(lambda *all_of: pulled_back(program, all_of[:count], all_of[count:]), given, forward.parameters)
        except BodyError as error:
            self._refuse(error)
            return None
        return fixed_function(graph, self._name)


def pulled_back(
    body: Callable[..., tuple[torch.Tensor, ...]], tensors: Tensors, gradients: Tensors
) -> tuple[torch.Tensor, ...]:
    """Vector-Jacobian product of a body, computed again from its arguments: a gradient for each floating one, in order."""
    places = [i for i, t in enumerate(tensors) if t.is_floating_point() or t.is_complex()]

    def of_floating(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        every = list(tensors)
        for place, tensor in zip(places, given, strict=True):
            every[place] = tensor
        return body(*every)

    with torch.enable_grad():
        _, pull_back = torch.func.vjp(  # type: ignore[misc]  # three values only with has_aux
            of_floating, *[tensors[i] for i in places]
        )
        return tuple(pull_back(tuple(gradients)))
