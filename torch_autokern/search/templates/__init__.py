"""Built-in parametric kernels: each template turns a key into candidates, or into nothing where it does not apply."""

from __future__ import annotations

from torch_autokern.build.candidate import Candidate
from torch_autokern.search.templates import (
    layer_norm_backward,
    layer_norm_backward_cuda,
    layer_norm_cuda,
    layer_norm_ring,
    layer_norm_rows,
    layer_norm_split,
    matmul_cpu,
    matmul_cublaslt,
    matmul_library,
    matmul_shallow_cuda,
    matmul_split,
    matmul_thin_cuda,
    softmax_backward,
    softmax_backward_cuda,
    softmax_block,
    softmax_cluster,
    softmax_columns,
    softmax_columns_cuda,
    softmax_cuda,
    softmax_ring,
    softmax_rows,
    softmax_split,
    softmax_turned,
)
from torch_autokern.store.key import KernelKey, Target

# Each costs a build: a C++ compiler takes seconds, NVRTC one.
MAX_CANDIDATES = {"cpu": 10, "cuda": 60}

# The `split` templates answer only where threads would otherwise idle or rows leave the cache: there they come first.
_TEMPLATES = (
    layer_norm_split.propose,
    layer_norm_rows.propose,
    softmax_split.propose,
    softmax_rows.propose,
    softmax_columns.propose,
    matmul_cpu.propose,
    matmul_library.propose,
    softmax_turned.propose,
    layer_norm_backward.propose,
    softmax_backward.propose,
    layer_norm_ring.propose,
    layer_norm_cuda.propose,
    softmax_block.propose,
    softmax_cluster.propose,
    softmax_ring.propose,
    softmax_cuda.propose,
    softmax_columns_cuda.propose,
    matmul_shallow_cuda.propose,
    matmul_thin_cuda.propose,
    matmul_split.propose,
    matmul_cublaslt.propose,  # where a template applies it is ahead: these are what stock has, chosen better
    softmax_backward_cuda.propose,
    layer_norm_backward_cuda.propose,
)


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates of every template for one key, best guess first; at most `MAX_CANDIDATES` of its device."""
    found = [candidate for template in _TEMPLATES for candidate in template(key, target)]
    unique = {candidate.candidate_id: candidate for candidate in found}
    return list(unique.values())[: MAX_CANDIDATES[key.device_type]]
