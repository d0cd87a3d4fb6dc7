"""Built-in parametric kernels: each template turns a key into candidates, or into nothing where it does not apply."""

from __future__ import annotations

from torch_autokern.build.candidate import Candidate
from torch_autokern.search.templates import layer_norm_rows, layer_norm_split, softmax_columns, softmax_rows, softmax_split
from torch_autokern.store.key import KernelKey, Target

_TEMPLATES = (
    softmax_rows.propose,
    softmax_columns.propose,
    softmax_split.propose,
    layer_norm_rows.propose,
    layer_norm_split.propose,
)


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates of every template for one key, best guess first."""
    found: list[Candidate] = []
    for template in _TEMPLATES:
        found += template(key, target)
    return found
