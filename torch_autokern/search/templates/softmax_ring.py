"""Softmax and log-softmax of long rows on Hopper, by the ring of `cuda_ring`: one exchange a row.

Each warp sums exponentials measured from its own maximum; pairs of maximum and sum are merged (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"). float32 keeps the exponentials and scales them once more when it writes: an error
of one unit roundoff beside that of x - max, which is larger. Half types keep the elements.
"""

from __future__ import annotations

from torch_autokern.build.candidate import Candidate
from torch_autokern.runtime.plan import PLAN_VERSION, KernelStep, LaunchPlan
from torch_autokern.search.templates.cuda_ring import MAX_PIECES, Ring, ring_source, words_of
from torch_autokern.search.templates.cuda_rows import AUTHOR
from torch_autokern.search.templates.cuda_teams import RowKernel
from torch_autokern.search.templates.softmax_cuda import row_kernel
from torch_autokern.store.key import KernelKey, Target

NAME = "softmax_ring"
_LEAST_BYTES = 8192  # of a row: shorter ones have enough of them in flight without
_LEAST_ROWS = 264

ONE_EXCHANGE = """constexpr bool KEEPS = EXACT && !LOG;  // v becomes the exponentials
// For half types 2^(d log2 e + up), without the instructions that ex2 spends on results which are denormal: in the sum they
// vanish, and what is written is made 2^64 larger and scaled back.
INLINE float quick_power(float d, float up) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(fmaf(d, 1.4426950408889634f, up)));
  return r;
}
constexpr float UP = 64.0f, DOWN = 1.0f / 18446744073709551616.0f;
INLINE words most_of(const words* v) {
  words tops = v[0];
#pragma unroll
  for (int i = 1; i < V; ++i)
#pragma unroll
    for (int k = 0; k < 4; ++k) tops.w[k] = larger(tops.w[k], v[i].w[k], T());
  return tops;
}
INLINE float most_of(const words& v) {
  float most = -INF;
#pragma unroll
  for (int k = 0; k < E; ++k) most = fmaxf(most, element(v, k));
  return most;
}
// The exponentials of a piece measured from `base`, added to `s`.
INLINE void add_powers(words& v, float base, float (&s)[4]) {
#pragma unroll
  for (int k = 0; k < E; ++k) {
    const float d = element(v, k) - base, w = EXACT ? expf(d) : quick_power(d, 0.0f);
    if (KEEPS) v.w[k % 4] = __float_as_uint(w);
    s[k % 4] += w;
  }
}
// What a warp holds of a row: its maximum, and the sum of its exponentials measured from that.
INLINE float2 of_warp(words* v) {
  const float top = over_warp<maximum>(most_of(most_of(v))), base = top == -INF ? 0.0f : top;
  forget(v);
  float s[4] = {};
#pragma unroll
  for (int i = 0; i < V; ++i) add_powers(v[i], base, s);
  forget(v);
  return make_float2(top, over_warp<total>((s[0] + s[1]) + (s[2] + s[3])));
}
// A row's maximum, what its exponentials are multiplied with, and for the logarithm that of their sum.
struct row_result {
  float m, scale, sum;
  // From what all warps of the row found; `top` is this warp's own.
  INLINE void merge(const float4* found, float top) {
    const int lane = threadIdx.x % 32;
    m = -INF;
    float parts = 0.0f;
#pragma unroll
    for (int i = lane; i < C * WARPS; i += 32) m = fmaxf(m, found[i].x);
    m = over_warp<maximum>(m);
    // A warp of -inf only weighs nothing, unless the whole row is so: then exp(-inf - -inf) makes the row NaN, as it must.
#pragma unroll
    for (int i = lane; i < C * WARPS; i += 32) parts += found[i].y * expf(found[i].x - m);
    parts = over_warp<total>(parts);
    sum = LOG ? logf(parts) : 0.0f;
    scale = (KEEPS ? expf(top - m) : DOWN) / parts;
  }
  INLINE pieces<O> finished(const words& v) const {
    pieces<O> out;
#pragma unroll
    for (int k = 0; k < E; ++k) {
      const float value = element(v, k);
      from_float(LOG ? (value - m) - sum : KEEPS ? value * scale : quick_power(value - m, UP) * scale, out.e[k]);
    }
    return out;
  }
};
"""
_BODY = (
    ONE_EXCHANGE
    + """extern "C" __global__ void __launch_bounds__(THREADS, @RESIDENTS@)
softmax(const T* __restrict__ x, O* __restrict__ y) {
  extern __shared__ __align__(128) char data[];
  __shared__ __align__(8) uint64_t bars[2 * SLOTS + 2];
  __shared__ __align__(16) float4 slots[2 * C * WARPS];
  const int rank = blockIdx.x % C, teams = gridDim.x / C;
  ring in(x, data, bars, rank, blockIdx.x / C, teams);
  exchange all(slots, bars + 2 * SLOTS);
  if (threadIdx.x == 0) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  meet_cluster();
  in.fill();
  words v[V];
  row_result done{0.0f, 0.0f, 0.0f};  // of the row in v
  O* to = nullptr;
  for (int64_t row = blockIdx.x / C;; row += teams) {
    const bool more = row < ROWS;
#pragma unroll
    for (int c = 0; c < NC; ++c) {
      if (to != nullptr) {
#pragma unroll
        for (int p = 0; p < P; ++p) {
          const int i = c * P + p;
          if (in.has(i)) store_piece(to + in.at(i), done.finished(v[i]));
        }
      }
      if (more) {
        in.wait_full();
#pragma unroll
        for (int p = 0; p < P; ++p) {
          const int i = c * P + p;
          v[i] = in.has(i) ? in.piece(p) : filled(lowest());
        }
        in.give_back(c > 0);
      }
    }
    if (!more) break;
    const float2 mine = of_warp(v);
    in.send();
    __syncwarp();
    done.merge(all(rank, make_float4(mine.x, mine.y, 0.0f, 0.0f)), mine.x);
    to = y + y_offset(row);
  }
  meet_cluster();  // nobody leaves while others may still write into its shared memory
}
"""
)


def of_ring(kernel: RowKernel, ring: Ring) -> Candidate | None:
    """One candidate; None where a part does not fit a block's registers or the ring holds less than a part and a half."""
    vectors = ring.vectors(kernel.shape)
    if vectors > MAX_PIECES or 2 * ring.slots * ring.pieces < 3 * vectors:
        return None
    if kernel.shape.item_bytes == 2 and ring.pieces > 4:  # they spill
        return None
    if vectors * ring.threads * ring.parts > 1.3 * kernel.shape.pieces:
        return None
    source = ring_source(kernel, ring, _BODY)
    step = KernelStep(
        kernel.entry, (ring.grid(kernel.rows), 1, 1), (ring.threads, 1, 1), kernel.args, (ring.parts, 1, 1), ring.shared_bytes
    )
    idea = f"Rows stream through {ring.slots} slots of shared memory into registers of {ring.parts} blocks, one exchange each."
    return Candidate("cuda", source, LaunchPlan(PLAN_VERSION, (step,)), idea, AUTHOR, NAME, words_of(ring))


# Best guess first: few parts and large slots, so that exchanges and turns are few; several blocks a multiprocessor where rows
# are short, so that one computes while another waits.
_RINGS = (
    Ring(2, 512, 4, waves=4), Ring(2, 512, 4), Ring(2, 512, 8, waves=4), Ring(4, 256, 4, 2, waves=4), Ring(2, 512, 8),
    Ring(2, 512, 4, waves=4, streaming=False), Ring(4, 512, 4, waves=4), Ring(4, 256, 4, 2), Ring(1, 512, 2),
    Ring(1, 256, 4, 2), Ring(1, 128, 4, 4), Ring(1, 256, 2, 3), Ring(1, 128, 4, 5, waves=2), Ring(8, 512, 2),
)  # fmt: skip
_MOST = 8


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for many long aligned rows on sm_90a, best guess first; else []."""
    kernel = row_kernel(key)
    if kernel is None or target.device_type != "cuda" or target.arch != "sm_90a":
        return []
    shape = kernel.shape
    if not shape.aligned or shape.length % shape.elements or kernel.rows < _LEAST_ROWS:
        return []
    if shape.length * shape.item_bytes < _LEAST_BYTES:
        return []
    made = [of_ring(kernel, ring) for ring in _RINGS]
    return [candidate for candidate in made if candidate is not None][:_MOST]
