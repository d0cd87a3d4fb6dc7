"""What is computed: one `OpSpec` per op family, and the table of all of them."""

from collections.abc import Sequence

from torch_autokern.ops import layer_norm, matmul, softmax
from torch_autokern.ops.function import GRAPH, INDEX, function_spec, is_function, spec_of_words
from torch_autokern.ops.spec import OpSpec, op_index
from torch_autokern.store.key import KernelKey

SPECS: dict[str, OpSpec] = {
    spec.name: spec for spec in sorted((*matmul.SPECS, *softmax.SPECS, *layer_norm.SPECS), key=lambda s: s.index)
}


def spec_of(key: KernelKey) -> OpSpec:
    """The op family of a key: one of `SPECS`, or a whole function's, which the key describes itself.

    Raises:
        KeyError: no such op.
        BodyError: a function's key whose graph is none, or not the one that its name promises.
    """
    return function_spec(key.op, str(key.scalars.get(GRAPH))) if is_function(key.op) else SPECS[key.op]


def spec_for_words(words: Sequence[int]) -> OpSpec:
    """The op family of a key's words, as the router writes them.

    Raises:
        BodyError: a function that this process never met.
    """
    index = op_index(words)
    return spec_of_words(words) if index == INDEX else next(spec for spec in SPECS.values() if spec.index == index)


__all__ = ["SPECS", "OpSpec", "spec_for_words", "spec_of"]
