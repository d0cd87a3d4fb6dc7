"""LayerNorm of long rows on Hopper, by the ring of `cuda_ring`. A row belongs to a cluster, or, where it is too long for one,
to the whole grid: then blocks exchange moments through memory (one counter a row; the launch is cooperative, so every block is
there) while the ring fills with the next row.

A block owns the same part of every row, so it keeps its part of weight and bias: in registers, in shared memory, or, where both
are longer than that, the weight in shared memory and the bias in L2, read some pieces ahead of its use.

Each warp finds the mean of its elements and the sum of squared distances from it in two passes over registers; moments are
merged as in Chan, Golub, LeVeque 1983 (eq. 2.1), the mean in two parts: that of the first warp, and the rest.
"""

from __future__ import annotations

from torch_autokern.build.candidate import Candidate
from torch_autokern.runtime.plan import PLAN_VERSION, KernelArg, KernelStep, LaunchPlan, Workspace, WorkspaceArg
from torch_autokern.search.templates.cuda_ring import MAX_PIECES, Ring, ring_source
from torch_autokern.search.templates.cuda_rows import AUTHOR, VECTOR_BYTES
from torch_autokern.search.templates.cuda_teams import PROCESSORS, RowKernel
from torch_autokern.search.templates.layer_norm_cuda import SIGNATURE, row_kernel
from torch_autokern.store.key import KernelKey, Target

NAME, GRID_NAME = "layer_norm_ring", "layer_norm_grid"
_LEAST_BYTES = 4096  # of a row
_LEAST_ROWS = 264
_LEAST_GRID_PIECES = PROCESSORS * 480  # shorter rows leave threads of the grid without work
_REGISTERS, _SHARED, _AHEAD = 1, 2, 3  # where parameters are kept
_OTHER_REGISTERS = 44

_BODY = (
    """constexpr int REGISTERS = 1, SHARED = 2, AHEAD = 3, W_AT = HAS_WEIGHT ? @W_AT@ : 0, B_AT = HAS_BIAS ? @B_AT@ : 0;
constexpr bool GRID = PARTS > C;
constexpr int DEPTH = @DEPTH@, FIRST_AHEAD = @FIRST_AHEAD@, ROUND = V - FIRST_AHEAD;  // of the bias: pieces before are held
constexpr int KEPT_BIAS = B_AT == REGISTERS ? V : B_AT == AHEAD && FIRST_AHEAD > 0 ? FIRST_AHEAD : 1;
static_assert(B_AT != AHEAD || ROUND % DEPTH == 0, "turns of the pieces read ahead");
constexpr int PARAMETER_BYTES = int(SHARE) * 16;
INLINE words parameter(const W* from, const ring& in, int i) {
  words r = {};
  if (!in.has(i)) return r;
  if (B_AT != AHEAD) {
    *reinterpret_cast<uint4*>(&r) = __ldg(reinterpret_cast<const uint4*>(from + in.at(i)));
    return r;
  }
  // Read again for every row: it should stay in L2, which rows only pass through.
  uint64_t often;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(often));
  asm("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
      : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3])
      : "l"(from + in.at(i)), "l"(often));
  return r;
}
// Of moments {mean, what is missing of it, variance, share of the elements}, K in each lane: {mean of the first, what is
// missing of the mean of all, variance, the mean of all without care}. The last is right where the mean is not finite.
template <int K> INLINE float4 merged(const float4 (&e)[K]) {
  const float m0 = __shfl_sync(~0u, e[0].x, 0);
  float rest = 0.0f, plain = 0.0f, var = 0.0f;
#pragma unroll
  for (int i = 0; i < K; ++i)
    if (e[i].w > 0.0f) {
      rest = fmaf(e[i].w, (e[i].x - m0) + beside(e[i].x, e[i].y), rest);
      plain = fmaf(e[i].w, e[i].x, plain);
    }
  rest = over_warp<total>(rest);
  plain = over_warp<total>(plain);
#pragma unroll
  for (int i = 0; i < K; ++i)
    if (e[i].w > 0.0f) {
      const float away = ((e[i].x - m0) + beside(e[i].x, e[i].y)) - rest;
      var = fmaf(e[i].w, fmaf(away, away, e[i].z), var);
    }
  return make_float4(m0, rest, over_warp<total>(var), plain);
}
extern "C" __global__ void __launch_bounds__(THREADS, @RESIDENTS@)
layer_norm("""
    + SIGNATURE
    + """@GRID_PARAMETERS@) {
  extern __shared__ __align__(128) char data[];
  __shared__ __align__(8) uint64_t bars[2 * SLOTS + 3];
  __shared__ __align__(16) float4 slots[2 * C * WARPS];
  const int rank = GRID ? blockIdx.x : blockIdx.x % C, teams = GRID ? 1 : gridDim.x / C;
  const int64_t start = GRID ? 0 : blockIdx.x / C;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t parameters_full = shared(bars + 2 * SLOTS + 2);
  ring in(x, data + @FIXED@, bars, rank, start, teams);
  exchange all(slots, bars + 2 * SLOTS);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(parameters_full));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  meet_cluster();
  in.fill();
  if (threadIdx.x == 0) {
    uint64_t often;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(often));
    const int bytes = in.mine * 16;
    expect(parameters_full, ((W_AT == SHARED) + (B_AT == SHARED)) * bytes);
    if (W_AT == SHARED && bytes > 0) copy(shared(data), w + in.first * E, bytes, parameters_full, often);
    if (B_AT == SHARED && bytes > 0)
      copy(shared(data) + PARAMETER_BYTES * (W_AT == SHARED), b + in.first * E, bytes, parameters_full, often);
  }
  __syncwarp();
  const words* const kept = reinterpret_cast<const words*>(data) + threadIdx.x;
  const words* const kept_bias = kept + (W_AT == SHARED ? int(SHARE) : 0);
  words v[V], ws[W_AT == REGISTERS ? V : 1], bs[KEPT_BIAS], ahead[DEPTH];
  int count = 0;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    count += in.has(i) ? E : 0;
    if (W_AT == REGISTERS) ws[i] = parameter(w, in, i);
    if (B_AT == REGISTERS || (B_AT == AHEAD && i < FIRST_AHEAD)) bs[i] = parameter(b, in, i);
    if (B_AT == AHEAD && i >= FIRST_AHEAD && i < FIRST_AHEAD + DEPTH) ahead[i - FIRST_AHEAD] = parameter(b, in, i);
  }
  count = __reduce_add_sync(~0u, count);
  const float each = 1.0f / fmaxf(float(count), 1.0f);
  const float whole = GRID ? float(in.mine) * E : float(D), share = float(count) / fmaxf(whole, 1.0f);
  if (W_AT == SHARED || B_AT == SHARED) wait(parameters_full, 0);
  float high = 0.0f, rest = 0.0f, r = 0.0f;  // of the row in v
  O* to = nullptr;
  for (int64_t row = start;; row += teams) {
    const bool more = row < ROWS;
    float s[4] = {};
#pragma unroll
    for (int c = 0; c < NC; ++c) {
      if (to != nullptr) {
#pragma unroll
        for (int p = 0; p < P; ++p) {
          const int i = c * P + p;
          if (!in.has(i)) continue;
          words wp, bp;
          if (W_AT == REGISTERS) wp = ws[W_AT == REGISTERS ? i : 0];
          if (W_AT == SHARED) wp = kept[i * THREADS];
          if (B_AT == SHARED) bp = kept_bias[i * THREADS];
          if (B_AT == REGISTERS || (B_AT == AHEAD && i < FIRST_AHEAD)) bp = bs[i < KEPT_BIAS ? i : 0];
          if (B_AT == AHEAD && i >= FIRST_AHEAD) bp = ahead[(i - FIRST_AHEAD + DEPTH) % DEPTH];
          pieces<O> out;
#pragma unroll
          for (int k = 0; k < E; ++k) {
            float value = fmaf(element(v[i], k) - high, r, rest);
            if (HAS_WEIGHT && HAS_BIAS) value = fmaf(value, element(wp, k), element(bp, k));
            else if (HAS_WEIGHT) value *= element(wp, k);
            else if (HAS_BIAS) value += element(bp, k);
            from_float(value, out.e[k]);
          }
          store_piece(to + in.at(i), out);
        }
        if (B_AT == AHEAD) {
#pragma unroll
          for (int p = 0; p < P; ++p) {
            const int i = c * P + p - FIRST_AHEAD;
            if (i >= 0) ahead[i % DEPTH] = parameter(b, in, FIRST_AHEAD + (i + DEPTH) % ROUND);
          }
        }
      }
      if (more) {
        in.wait_full();
#pragma unroll
        for (int p = 0; p < P; ++p) v[c * P + p] = in.has(c * P + p) ? in.piece(p) : filled(nothing());
        in.give_back(c > 0);
#pragma unroll
        for (int p = 0; p < P; ++p)
#pragma unroll
          for (int k = 0; k < E; ++k) s[k % 4] = fmaf(element(v[c * P + p], k), each, s[k % 4]);
      }
    }
    if (!more) break;
    const float m0 = over_warp<total>((s[0] + s[1]) + (s[2] + s[3]));
    forget(v);
    float a[4] = {}, q[4] = {};
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (!in.has(i)) continue;
#pragma unroll
      for (int k = 0; k < E; ++k) {
        const float d = element(v[i], k) - m0, scaled = d * each;
        a[k % 4] += scaled;
        q[k % 4] = fmaf(scaled, d, q[k % 4]);
      }
    }
    forget(v);
    const float a0 = over_warp<total>((a[0] + a[1]) + (a[2] + a[3])), q0 = over_warp<total>((q[0] + q[1]) + (q[2] + q[3]));
    const float4 mine = make_float4(m0, a0, q0 - a0 * a0, share);
    in.send();
    __syncwarp();
    float4 found;
    @EXCHANGE@
    high = found.x + found.y;
    const bool finite = fabsf(high) < INF;
    r = rstd_of(found.z);
    rest = ((found.x - high) + found.y) == 0.0f ? 0.0f : -((found.x - high) + found.y) * r;
    if (threadIdx.x == 0 && rank == 0) {
      mean[mean_offset(row)] = finite ? high : found.w;
      rstd[rstd_offset(row)] = r;
    }
    to = y + y_offset(row);
  }
  meet_cluster();  // nobody leaves while others may still write into its shared memory
}
"""
)
_OF_CLUSTER = """{
      const float4* from = all(rank, mine);
      float4 e[(C * WARPS + 31) / 32];
#pragma unroll
      for (int i = 0; i < (C * WARPS + 31) / 32; ++i)
        e[i] = i * 32 + lane < C * WARPS ? from[i * 32 + lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      found = merged(e);
    }"""
_OF_GRID = """{
      if (lane == 0) slots[warp] = mine;
      __syncthreads();
      if (warp == 0) {
        float4 own[1] = {lane < WARPS ? slots[lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
        float4 part = merged(own);
        if (lane == 0) {
          // Where the mean is not finite, it is found without care again.
          if (!(fabsf(part.x + part.y) < INF)) part.x = part.w, part.y = 0.0f;
          part.w = float(in.mine) * E / float(D);
          __stcg(parts + row * PARTS + rank, part);
          asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived + row) : "memory");
        }
        __syncwarp();
        uint32_t seen;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrived + row) : "memory");
        while (seen < PARTS);
        float4 e[(PARTS + 31) / 32];
#pragma unroll
        for (int i = 0; i < (PARTS + 31) / 32; ++i)
          e[i] = i * 32 + lane < PARTS ? __ldcg(parts + row * PARTS + i * 32 + lane) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        found = merged(e);
        if (lane == 0) slots[WARPS] = found;
      }
      __syncthreads();
      found = slots[WARPS];
    }"""


def _filled(ring: Ring, weight_at: int, bias_at: int, first_ahead: int = 0, depth: int = 1) -> str:
    grid = ring.parts > ring.cluster
    values = {
        "W_AT": str(weight_at), "B_AT": str(bias_at), "DEPTH": str(depth), "FIRST_AHEAD": str(first_ahead),
        "GRID_PARAMETERS": ", float4* parts, uint32_t* arrived" if grid else "", "EXCHANGE": _OF_GRID if grid else _OF_CLUSTER,
    }  # fmt: skip
    body = _BODY
    for name, value in values.items():
        body = body.replace(f"@{name}@", value)
    return body


def of_cluster(kernel: RowKernel, ring: Ring, parameters: int, kept: int) -> Candidate | None:
    """A cluster a row, `parameters` of weight and bias `kept` in registers or shared memory; None where they do not fit."""
    vectors = ring.vectors(kernel.shape)
    if vectors > MAX_PIECES or vectors * ring.threads * ring.parts > 1.3 * kernel.shape.pieces:
        return None
    if kept == _SHARED:
        fixed = parameters * ring.share(kernel.shape) * VECTOR_BYTES
        ring = Ring(ring.parts, ring.threads, ring.pieces, ring.residents, -(-fixed // 128) * 128)
    held = 4 * vectors * (1 + (parameters if kept == _REGISTERS else 0))
    if held + _OTHER_REGISTERS > min(255, 65536 // (ring.threads * ring.residents)):
        return None
    if ring.slots < 3 or ring.slots * ring.pieces < vectors:
        return None
    source = ring_source(kernel, ring, _filled(ring, kept, kept))
    grid, block = (ring.grid(kernel.rows), 1, 1), (ring.threads, 1, 1)
    step = KernelStep(kernel.entry, grid, block, kernel.args, (ring.parts, 1, 1), ring.shared_bytes)
    idea = f"Rows stream through {ring.slots} slots of shared memory into registers; each block keeps its weight and bias."
    words = {"parts": ring.parts, "threads": ring.threads, "pieces": ring.pieces, "residents": ring.residents}
    words["shared"] = kept == _SHARED
    return Candidate("cuda", source, LaunchPlan(PLAN_VERSION, (step,)), idea, AUTHOR, NAME, dict(words))


def of_grid(kernel: RowKernel, threads: int, pieces: int, held: int, depth: int, parameters: int) -> Candidate | None:
    """The grid a row: the weight in shared memory, `held` pieces of the bias a thread in registers and `depth` on the way from
    L2 (more are held where the others could not take turns)."""
    share = -(-(kernel.shape.length // kernel.shape.elements) // PROCESSORS)
    ring = Ring(PROCESSORS, threads, pieces, 1, -(-share * VECTOR_BYTES // 128) * 128 if parameters else 0)
    vectors = ring.vectors(kernel.shape)
    if vectors * threads > MAX_PIECES * 512 or ring.slots < 3:
        return None
    held += (vectors - held) % depth
    if held + depth > vectors:
        held, depth = 0, vectors
    source = ring_source(kernel, ring, _filled(ring, _SHARED, _AHEAD, held, depth))
    args: tuple[KernelArg, ...] = (*kernel.args, WorkspaceArg("parts"), WorkspaceArg("arrived"))
    step = KernelStep(
        kernel.entry, (PROCESSORS, 1, 1), (ring.threads, 1, 1), args, shared_bytes=ring.shared_bytes, cooperative=True
    )
    workspaces = (
        Workspace("parts", 16 * PROCESSORS * kernel.rows), Workspace("arrived", 4 * kernel.rows, zeroed=True)
    )  # fmt: skip
    idea = f"A row in the registers of all multiprocessors, the next in {ring.slots} slots of their shared memory."
    words = {"threads": threads, "pieces": pieces, "held": held, "depth": depth}
    return Candidate("cuda", source, LaunchPlan(PLAN_VERSION, (step,), workspaces), idea, AUTHOR, GRID_NAME, dict(words))


# Several blocks a multiprocessor where rows are short, so that one computes while another waits.
_RINGS = (
    Ring(1, 256, 4, 2), Ring(1, 256, 2, 2), Ring(1, 512, 1, 2), Ring(1, 512, 2), Ring(2, 256, 2, 2), Ring(1, 128, 4, 4),
    Ring(1, 256, 2, 3), Ring(1, 128, 2, 4), Ring(2, 512, 2),
)  # fmt: skip
# 384 threads have 168 registers each, of which less goes into addresses than of the 128 that 512 have.
_GRIDS = ((384, 3, 1, 5), (384, 1, 0, 3), (384, 1, 1, 5), (384, 1, 0, 7), (384, 3, 0, 7), (512, 1, 0, 4))


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for long aligned rows on sm_90a with parameters of the input's type or none, best guess first; else []."""
    kernel = row_kernel(key)
    if kernel is None or target.device_type != "cuda" or target.arch != "sm_90a":
        return []
    shape = kernel.shape
    parameters = [t for t in key.tensors[1:] if t is not None]
    if not shape.aligned or shape.length % shape.elements or shape.length * shape.item_bytes < _LEAST_BYTES:
        return []
    if any(t.alignment_bytes < VECTOR_BYTES or t.dtype != kernel.dtypes[0] for t in parameters):
        return []
    found = []
    if shape.pieces >= _LEAST_GRID_PIECES and kernel.rows <= 1 << 20:
        found += [of_grid(kernel, *option, len(parameters)) for option in _GRIDS]
    if kernel.rows >= _LEAST_ROWS:
        kinds = (_REGISTERS, _SHARED) if parameters else (_REGISTERS,)
        found += [of_cluster(kernel, ring, len(parameters), kept) for ring in _RINGS for kept in kinds]
    return [candidate for candidate in found if candidate is not None][:10]
