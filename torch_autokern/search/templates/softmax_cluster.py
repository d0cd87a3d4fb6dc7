"""Softmax and log-softmax of long rows on Hopper: a cluster of blocks a row, several clusters resident, one exchange a row.

Each block takes its part of a row straight into registers, and leaves when it has written it: nothing is dealt out beforehand,
so a multiprocessor with more of the memory's rate takes more rows, and while one block reduces and exchanges, the loads of the
others on its multiprocessor are under way. The row's maximum and sum come from one exchange (`softmax_ring`): blocks store what
their warps found into each other's shared memory and wait for the bytes, not for each other.
"""

from __future__ import annotations

from torch_autokern.build.candidate import Candidate, Parameter
from torch_autokern.runtime.plan import PLAN_VERSION, KernelStep, LaunchPlan
from torch_autokern.search.templates.cuda_ring import MAX_PIECES, Ring, ring_source
from torch_autokern.search.templates.cuda_rows import AUTHOR, MAX_GRID
from torch_autokern.search.templates.cuda_teams import RowKernel
from torch_autokern.search.templates.softmax_cuda import row_kernel
from torch_autokern.search.templates.softmax_ring import ONE_EXCHANGE
from torch_autokern.store.key import KernelKey, Target

NAME = "softmax_cluster"
_LEAST_BYTES = 16384  # of a row: a block alone holds shorter ones with loads enough in flight
_LEAST_ROWS = 264
_LEAST_PIECES = 4  # 16 bytes each, a thread: fewer are too few loads in flight

_BODY = (
    ONE_EXCHANGE
    + """extern "C" __global__ void __launch_bounds__(THREADS, @RESIDENTS@)
softmax(const T* __restrict__ x, O* __restrict__ y) {
  __shared__ __align__(8) uint64_t bars[2];
  __shared__ __align__(16) float4 slots[2 * C * WARPS];
  const int rank = blockIdx.x % C, mine = int(pieces_of_part(rank));
  const int64_t row = blockIdx.x / C, first = (rank * SHARE + threadIdx.x) * E;
  exchange all(slots, bars);
  if (threadIdx.x == 0) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  cluster_arrive();
  const auto has = [&](int i) { return int64_t(i + 1) * THREADS <= LEAST || i * THREADS + int(threadIdx.x) < mine; };
  const T* from = x + x_offset(row) + first;
  words v[V];
#pragma unroll
  for (int i = 0; i < V; ++i) v[i] = has(i) ? taken(from + i * THREADS * E) : filled(lowest());
  const float2 found = of_warp(v);
  cluster_wait();  // the others' barriers are there
  row_result done;
  done.merge(all(rank, make_float4(found.x, found.y, 0.0f, 0.0f)), found.x);
  O* to = y + y_offset(row) + first;
#pragma unroll
  for (int i = 0; i < V; ++i)
    if (has(i)) store_piece(to + i * THREADS * E, done.finished(v[i]));
  // All that others write here has come, or `all` would still wait: so this block may leave before them.
}
"""
)
# Parts of a row, threads and blocks resident on a multiprocessor, best guess first: about 128 KB in flight a multiprocessor.
# With 16 pieces a thread in 80 registers it would be 192 KB, but those spill.
_CLUSTERS = (
    (8, 256, 4), (8, 160, 4), (4, 512, 2), (4, 256, 2), (8, 128, 4), (2, 512, 1), (2, 256, 2), (1, 512, 1), (1, 256, 2),
)  # fmt: skip


def of_cluster(kernel: RowKernel, parts: int, threads: int, residents: int, streaming: bool) -> Candidate | None:
    """One candidate; None where a thread would hold too little or too much, or a part would be empty."""
    pieces = -(-kernel.shape.pieces // (parts * threads))
    if not _LEAST_PIECES <= pieces <= MAX_PIECES or pieces * parts * threads > 1.3 * kernel.shape.pieces:
        return None
    ring = Ring(parts, threads, pieces, residents, streaming=streaming)
    step = KernelStep(kernel.entry, (parts * kernel.rows, 1, 1), (threads, 1, 1), kernel.args, (parts, 1, 1))
    idea = f"A row in the registers of {parts} blocks of {threads} threads, {residents} resident; one exchange, no barrier."
    used: dict[str, Parameter] = {"parts": parts, "threads": threads, "residents": residents, "streaming": streaming}
    source = ring_source(kernel, ring, _BODY)
    return Candidate("cuda", source, LaunchPlan(PLAN_VERSION, (step,)), idea, AUTHOR, NAME, used)


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for many long aligned rows on sm_90a, best guess first; else []."""
    kernel = row_kernel(key)
    if kernel is None or target.device_type != "cuda" or target.arch != "sm_90a":
        return []
    shape = kernel.shape
    if not shape.aligned or shape.length % shape.elements or kernel.rows < _LEAST_ROWS or 8 * kernel.rows > MAX_GRID:
        return []
    if shape.length * shape.item_bytes < _LEAST_BYTES:
        return []
    made = [of_cluster(kernel, *cluster, kernel.streaming) for cluster in _CLUSTERS]
    if kernel.streaming:
        made += [of_cluster(kernel, *cluster, False) for cluster in _CLUSTERS[:2]]
    return [candidate for candidate in made if candidate is not None]
