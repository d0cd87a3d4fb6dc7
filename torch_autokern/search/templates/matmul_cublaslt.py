"""Products on a GPU by cuBLASLt itself, with each of the algorithms that its heuristic names: `mm`, `addmm`, `bmm`, `baddbmm`.

Stock asks the same heuristic for one algorithm and never looks at the second. Here the search times them all, and the judge
proves the one that a record names. Algorithms whose partial sums are rounded to the result's dtype are not asked for, because
whether stock may round so is a flag of the process that no key carries. Matrices are column after column to cuBLASLt, so a
row-major result is computed as ``out' = b' a'``. A row of addends (a linear layer's bias) is its bias epilogue, a whole matrix
is its C.
"""

from __future__ import annotations

import logging

import msgspec
import torch

from torch_autokern.build.candidate import Candidate, Parameter
from torch_autokern.runtime import cublaslt
from torch_autokern.runtime.plan import (
    PLAN_VERSION,
    WORKSPACE_ALIGNMENT,
    CublasLtAlgorithm,
    CublasLtMatrix,
    CublasLtStep,
    InputArg,
    LaunchPlan,
    OutputArg,
    Workspace,
    WorkspaceArg,
)
from torch_autokern.runtime.target import local_target
from torch_autokern.search.templates.cuda_rows import AUTHOR
from torch_autokern.search.templates.matmul_cpu_layout import Matrix, Product, product_in
from torch_autokern.store.key import KernelKey, Target

NAME = "matmul_cublaslt"
MAX_CANDIDATES = 16
# A record's artifact is a cubin, and a plan without kernels needs none of its own.
SOURCE = 'extern "C" __global__ void unused() {}\n'
_DTYPES = ("float32", "float16", "bfloat16")
_NOT_CHOSEN = CublasLtAlgorithm(0, 0, 0, 0, 0, 0, 0, 0, 0)
_LOG = logging.getLogger("torch_autokern")


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """What this machine's cuBLASLt names for a product, best guess first; [] for other calls, and where `target` is not the
    current GPU, which alone can be asked."""
    if key.device_type != "cuda" or not _is_here(target):
        return []
    try:
        step = product_step(key, cublaslt.version())
        found = [] if step is None else cublaslt.offers(step, key, torch.cuda.current_device(), MAX_CANDIDATES)
    except RuntimeError as error:
        _LOG.info("no cuBLASLt algorithms for a key of %s: %s", key.op, error)
        return []
    return [] if step is None else [_candidate(step, offer, rank) for rank, offer in enumerate(found)]


def product_step(key: KernelKey, version: int) -> CublasLtStep | None:
    """The step of a key's product before an algorithm is chosen; None where cuBLASLt has no word for it: no dimension of stride
    1, columns that overlap, an addend that is neither a row nor a matrix, another precision than IEEE or TF32."""
    product = product_in(key, _DTYPES)
    if product is None or key.matmul_precision not in ("ieee", "tf32"):
        return None
    left = _column_major(product.b.transposed(), product.n, product.k)
    right = _column_major(product.a.transposed(), product.k, product.m)
    result = _column_major(product.out.transposed(), product.n, product.m, output=True)
    if left is None or right is None or result is None or result.transposed:
        return None
    step = CublasLtStep(
        version, product.dtype, left, right, result, _NOT_CHOSEN, product.batches, alpha=product.alpha,  # type: ignore[arg-type]
        compute="tf32" if product.dtype == "float32" and key.matmul_precision == "tf32" else "float32",
    )  # fmt: skip
    return step if product.addend is None else _with_addend(step, product, product.addend)


def _is_here(target: Target) -> bool:
    if target.device_type != "cuda" or not torch.cuda.is_available() or torch.cuda._is_in_bad_fork():
        return False
    return local_target("cuda", device_index=torch.cuda.current_device()) == target


def _column_major(matrix: Matrix, rows: int, columns: int, *, output: bool = False) -> CublasLtMatrix | None:
    """A matrix of rows x columns, as it lies or as the transpose of what lies there; None where neither has runs."""
    base = OutputArg(matrix.index) if output else InputArg(matrix.index)
    ways = [(rows, columns, matrix.row, matrix.column, False)]
    if not output:
        ways.append((columns, rows, matrix.column, matrix.row, True))
    ways.sort(key=lambda way: way[0] == 1)  # where both fit, runs of more than one element
    for inner, outer, inner_step, outer_step, transposed in ways:
        leading = outer_step if outer > 1 else inner
        if (inner_step == 1 or inner == 1) and leading >= inner:
            return CublasLtMatrix(base, inner, outer, leading, matrix.batch, transposed)
    return None


def _with_addend(step: CublasLtStep, product: Product, addend: Matrix) -> CublasLtStep | None:
    is_bias = addend.row == 0 and addend.batch == 0 and (addend.column == 1 or product.n == 1)
    if is_bias and product.beta == 1.0:
        return msgspec.structs.replace(step, bias=InputArg(addend.index))
    leading = addend.row if product.m > 1 else product.n
    if (addend.column != 1 and product.n > 1) or leading < product.n:
        return None
    matrix = CublasLtMatrix(InputArg(addend.index), product.n, product.m, leading, addend.batch)
    return msgspec.structs.replace(step, addend=matrix, beta=product.beta)


def _candidate(step: CublasLtStep, offer: cublaslt.Offer, rank: int) -> Candidate:
    chosen = msgspec.structs.replace(step, algorithm=offer.algorithm)
    workspaces: tuple[Workspace, ...] = ()
    if offer.workspace_bytes:
        workspaces = (Workspace("room", offer.workspace_bytes + WORKSPACE_ALIGNMENT),)
        chosen = msgspec.structs.replace(chosen, workspace=WorkspaceArg("room"), workspace_bytes=offer.workspace_bytes)
    numbers: dict[str, int] = msgspec.structs.asdict(offer.algorithm)
    parameters: dict[str, Parameter] = {"rank": rank, "same": offer.same, "workspace_bytes": offer.workspace_bytes, **numbers}
    parts = max(1, offer.algorithm.split_k)
    idea = f"cuBLASLt's algorithm {offer.algorithm.id}, tile {offer.algorithm.tile}, K in {parts}: its guess number {rank + 1}."
    return Candidate("cuda", SOURCE, LaunchPlan(PLAN_VERSION, (chosen,), workspaces), idea, AUTHOR, NAME, parameters)
