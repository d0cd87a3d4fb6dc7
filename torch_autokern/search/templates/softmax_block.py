"""Softmax and log-softmax of long rows on Hopper: one block a row, a part of it in registers and the rest in shared memory.

256 KB of a row fit into one multiprocessor so. A cluster of two blocks would hold them in registers alone, but has to find two
multiprocessors free at once and to exchange over both (benchmarks/notes/gpu_kernels.md, round 5). Each thread copies its own
pieces into shared memory (`cp.async`), so nobody waits for others' copies; the one barrier of the block is that of the
reduction (`softmax_ring`: each warp measures from its own maximum).
"""

from __future__ import annotations

from torch_autokern.build.candidate import Candidate, Parameter
from torch_autokern.runtime.plan import PLAN_VERSION, KernelStep, LaunchPlan
from torch_autokern.search.templates.cuda_ring import WORDS
from torch_autokern.search.templates.cuda_rows import AUTHOR, MAX_GRID, VECTOR_BYTES, Team, prelude
from torch_autokern.search.templates.cuda_teams import PROCESSORS, RowKernel
from torch_autokern.search.templates.softmax_cuda import row_kernel
from torch_autokern.search.templates.softmax_ring import ONE_EXCHANGE
from torch_autokern.store.key import KernelKey, Target

NAME = "softmax_block"
_SHARED_BYTES = 232448 - 1024  # a block's on Hopper, less what the kernel declares
_OTHER_REGISTERS = 32
_LEAST_BYTES = 98304  # of a row: registers alone hold shorter ones

_BODY = (
    ONE_EXCHANGE
    + """constexpr int KEPT = @KEPT@;  // pieces a thread in shared memory, after V in registers
constexpr int64_t ALL = D / E;
// Read anew in every pass: the compiler would keep what it has read, in registers that are not there.
INLINE words again(const words* p) {
  words r;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3])
               : "r"(shared(p))
               : "memory");
  return r;
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) softmax(const T* __restrict__ x, O* __restrict__ y) {
  extern __shared__ __align__(16) words kept[];  // a thread's pieces are its own
  __shared__ __align__(16) float4 slots[WARPS];
  const int64_t row = blockIdx.x;
  const auto has = [&](int i) { return int64_t(i + 1) * THREADS <= ALL || i * THREADS + int(threadIdx.x) < ALL; };
  const T* from = x + x_offset(row) + threadIdx.x * E;
#pragma unroll
  for (int i = 0; i < KEPT; ++i) {
    words* to = kept + i * THREADS + threadIdx.x;
    const T* at = from + (V + i) * THREADS * E;
    if (has(V + i)) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared(to)), "l"(at) : "memory");
    else *to = filled(lowest());
  }
  words v[V];
#pragma unroll
  for (int i = 0; i < V; ++i) v[i] = has(i) ? taken(from + i * THREADS * E) : filled(lowest());
  words tops = most_of(v);
  asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
  for (int i = 0; i < KEPT; ++i) {
    const words piece = again(kept + i * THREADS + threadIdx.x);
#pragma unroll
    for (int k = 0; k < 4; ++k) tops.w[k] = larger(tops.w[k], piece.w[k], T());
  }
  const float top = over_warp<maximum>(most_of(tops)), base = top == -INF ? 0.0f : top;
  forget(v);
  float s[4] = {};
#pragma unroll
  for (int i = 0; i < V; ++i) add_powers(v[i], base, s);
  forget(v);
#pragma unroll
  for (int i = 0; i < KEPT; ++i) {
    words piece = again(kept + i * THREADS + threadIdx.x);
    add_powers(piece, base, s);
    if (KEEPS) kept[i * THREADS + threadIdx.x] = piece;
  }
  const float sum = over_warp<total>((s[0] + s[1]) + (s[2] + s[3]));
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = make_float4(top, sum, 0.0f, 0.0f);
  __syncthreads();
  row_result done;
  done.merge(slots, top);
  O* to = y + y_offset(row) + threadIdx.x * E;
#pragma unroll
  for (int i = 0; i < V; ++i)
    if (has(i)) store_piece(to + i * THREADS * E, done.finished(v[i]));
#pragma unroll
  for (int i = 0; i < KEPT; ++i)
    if (has(V + i)) store_piece(to + (V + i) * THREADS * E, done.finished(again(kept + i * THREADS + threadIdx.x)));
}
"""
)
# Threads, and pieces of 16 bytes a thread in registers, best guess first.
_BLOCKS = ((1024, 8), (1024, 6), (1024, 4), (512, 16), (512, 12))


def of_block(kernel: RowKernel, threads: int, registers: int, streaming: bool) -> Candidate | None:
    """`registers` pieces a thread in registers, the others in shared memory; None where either is too small, or has nothing."""
    pieces = -(-(kernel.shape.length // kernel.shape.elements) // threads)
    kept = pieces - registers
    shared = kept * threads * VECTOR_BYTES
    if kept < 1 or shared > _SHARED_BYTES or 4 * registers + _OTHER_REGISTERS > 65536 // threads:
        return None
    if kernel.shape.item_bytes == 2 and registers > 12:  # they spill
        return None
    team = Team(threads, threads, registers)
    source = prelude(kernel.shape, kernel.rows, team, kernel.dtypes, streaming=streaming) + kernel.code + WORDS + _BODY
    step = KernelStep(kernel.entry, (kernel.rows, 1, 1), (threads, 1, 1), kernel.args, shared_bytes=shared)
    idea = f"A row a block of {threads} threads: {registers} pieces of 16 bytes each in registers, {kept} in shared memory."
    used: dict[str, Parameter] = {"threads": threads, "registers": registers, "streaming": streaming}
    return Candidate("cuda", source.replace("@KEPT@", str(kept)), LaunchPlan(PLAN_VERSION, (step,)), idea, AUTHOR, NAME, used)


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for many long aligned rows on sm_90a, best guess first; else []."""
    kernel = row_kernel(key)
    if kernel is None or target.device_type != "cuda" or target.arch != "sm_90a":
        return []
    shape = kernel.shape
    if not shape.aligned or shape.length % shape.elements or not PROCESSORS <= kernel.rows <= MAX_GRID:
        return []
    if shape.length * shape.item_bytes < _LEAST_BYTES:
        return []
    # Without hints first: on an H200 (4096, 65536) float32 is slower where it is marked as not worth keeping.
    made = [of_block(kernel, *block, False) for block in _BLOCKS]
    if kernel.streaming:
        made.append(of_block(kernel, *_BLOCKS[0], True))
    return [candidate for candidate in made if candidate is not None]
