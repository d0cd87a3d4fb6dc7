"""LayerNorm of few very long rows on Hopper: the whole grid shares a row, and no block has to wait for a row's moments.

A block owns the same part of every row and keeps its weight and bias on chip: the bias and most of the weight in shared memory,
the rest of the weight in registers. Threads measure a row group by group while they write the row before, whose elements come
from L2 again (a row and a half of 16.8 MB lies between the two readings). Moments of a row are sent out half a row's work
before they are needed, so the trip through memory is hidden. There is no barrier of a block: the last of its warps merges what
they found, and its first warp fetches what all blocks found.

Moments are two-pass within a group and merged as in Chan, Golub, LeVeque 1983 (eq. 2.1), the mean in two parts: that of the
first group, and the rest.
"""

from __future__ import annotations

from torch_autokern.build.candidate import Candidate
from torch_autokern.runtime.plan import PLAN_VERSION, KernelArg, KernelStep, LaunchPlan, Workspace, WorkspaceArg
from torch_autokern.search.templates.cuda_ring import WORDS
from torch_autokern.search.templates.cuda_rows import AUTHOR, VECTOR_BYTES, Team, prelude
from torch_autokern.search.templates.cuda_teams import PROCESSORS, RowKernel
from torch_autokern.search.templates.layer_norm_cuda import SIGNATURE, row_kernel
from torch_autokern.search.templates.layer_norm_ring import MERGED
from torch_autokern.store.key import KernelKey, Target

NAME = "layer_norm_stream"
_LEAST_PIECES = PROCESSORS * 480  # of a row: of shorter ones threads of the grid would have nothing
_SHARED_BYTES = 232448 - 1024  # a block's on Hopper, less what the kernel declares
_OTHER_REGISTERS = 56

_BODY = (
    WORDS
    + MERGED
    + """constexpr int PARTS = @PARTS@, G = @GROUP@, GROUPS = V / G, KEPT = @KEPT@;  // pieces of the weight in shared memory
constexpr int64_t ALL = D / E, SHARE = (ALL + PARTS - 1) / PARTS, LEAST = ALL - (PARTS - 1) * SHARE;
static_assert(LEAST > 0, "every block has a part");
// What a thread knows of its part of a row: moments of the groups so far.
struct moments {
  float m, rest, var, plain;
  // `each`: one over the group's elements; `f`: their share of what was seen with them.
  INLINE void add(const words (&b)[G], const bool (&has)[G], bool first, float each, float f) {
    float s[4] = {};
#pragma unroll
    for (int p = 0; p < G; ++p)
#pragma unroll
      for (int k = 0; k < E; ++k) s[k % 4] = fmaf(element(b[p], k), each, s[k % 4]);
    const float mean = (s[0] + s[1]) + (s[2] + s[3]);
    float a[4] = {}, q[4] = {};
#pragma unroll
    for (int p = 0; p < G; ++p)
#pragma unroll
      for (int k = 0; k < E; ++k) {
        const float d = has[p] ? element(b[p], k) - mean : 0.0f, scaled = d * each;
        a[k % 4] += scaled;
        q[k % 4] = fmaf(scaled, d, q[k % 4]);
      }
    const float a0 = (a[0] + a[1]) + (a[2] + a[3]), v0 = (q[0] + q[1]) + (q[2] + q[3]) - a0 * a0;
    if (first) {
      m = plain = mean;
      rest = beside(mean, a0);
      var = v0;
      return;
    }
    const float away = (mean - m) + beside(mean, a0) - rest, other = 1.0f - f;
    rest = fmaf(away, f, rest);
    plain = fmaf(mean, f, plain * other);
    var = fmaf(var, other, f * fmaf(away * away, other, v0));
  }
};
// Moments whose mean is not finite say so without care: differences from an infinity are NaN.
INLINE float4 settled(float4 v, float share) {
  const float mean = v.x + v.y;
  if (!(fabsf(mean) < INF)) return make_float4(v.w, 0.0f, v.z, share);
  return make_float4(mean, (v.x - mean) + v.y, v.z, share);
}
INLINE words fetched(const T* p, uint64_t policy) {
  words r;
  asm("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
      : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3])
      : "l"(p), "l"(policy));
  return r;
}
extern "C" __global__ void __launch_bounds__(THREADS, 1)
layer_norm("""
    + SIGNATURE
    + """, float4* parts, uint32_t* arrived) {
  extern __shared__ __align__(16) words kept[];  // of the bias, then of the weight: a thread reads what it has written itself
  __shared__ __align__(16) float4 slots[WARPS];
  __shared__ __align__(16) float4 of_row;
  __shared__ __align__(8) uint64_t known;  // that `of_row` is there
  __shared__ uint32_t warps_done;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = blockIdx.x;
  const int mine = rank == PARTS - 1 ? int(LEAST) : int(SHARE);
  const int64_t first = (rank * SHARE + threadIdx.x) * E;
  const auto has = [&](int i) { return int64_t(i + 1) * THREADS <= LEAST || i * THREADS + int(threadIdx.x) < mine; };
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&known)));
    warps_done = 0;
  }
  __syncthreads();
  uint64_t keep, leave;
  asm("createpolicy.fractional.L2::@READ@.b64 %0, 1.0;" : "=l"(keep));
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(leave));
  const auto fetch = [&](words (&b)[G], const T* from, int g, uint64_t policy) {
#pragma unroll
    for (int p = 0; p < G; ++p) {
      words none = {};
      b[p] = has(g * G + p) ? fetched(from + first + int64_t(g * G + p) * THREADS * E, policy) : none;
    }
  };
@BUFFERS@
@FIRST@
  words rest_of_weight[KEPT < V && HAS_WEIGHT ? V - KEPT : 1];
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if (!has(i)) continue;
    const int64_t at = first + int64_t(i) * THREADS * E;
    if (HAS_BIAS) *reinterpret_cast<uint4*>(kept + i * THREADS + threadIdx.x) = __ldg(reinterpret_cast<const uint4*>(b + at));
    if (!HAS_WEIGHT) continue;
    const uint4 piece = __ldg(reinterpret_cast<const uint4*>(w + at));
    if (i < KEPT) *reinterpret_cast<uint4*>(kept + (HAS_BIAS ? int(SHARE) : 0) + i * THREADS + threadIdx.x) = piece;
    else *reinterpret_cast<uint4*>(rest_of_weight + (i < KEPT ? 0 : i - KEPT)) = piece;
  }
  int count = 0, last = 0;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    count += has(i) ? E : 0;
    if (i >= V - G) last += has(i) ? E : 0;
  }
  const float each_last = last > 0 ? 1.0f / float(last) : 0.0f, f_last = count > 0 ? float(last) / float(count) : 0.0f;
  const float of_warp = float(__reduce_add_sync(~0u, count)), of_block = float(mine) * E;
  const float share = float(count) / fmaxf(of_warp, 1.0f), warp_share = of_warp / of_block;
  moments found = {};
  float high = 0.0f, rest = 0.0f, r = 0.0f;  // of the row before
  const auto measure = [&](const words (&b)[G], int g) {
    bool there[G];
#pragma unroll
    for (int p = 0; p < G; ++p) there[p] = has(g * G + p);
    const bool ends = g == GROUPS - 1;
    found.add(b, there, g == 0, ends ? each_last : 1.0f / (G * E), ends ? f_last : 1.0f / (g + 1));
  };
  const auto write = [&](const words (&b)[G], int g, O* to) {
#pragma unroll
    for (int p = 0; p < G; ++p) {
      const int i = g * G + p;
      if (!has(i)) continue;
      words wp, bp;
      if (HAS_WEIGHT) wp = i < KEPT ? kept[(HAS_BIAS ? int(SHARE) : 0) + i * THREADS + threadIdx.x]
                                    : rest_of_weight[i < KEPT ? 0 : i - KEPT];
      if (HAS_BIAS) bp = kept[i * THREADS + threadIdx.x];
      pieces<O> out;
#pragma unroll
      for (int k = 0; k < E; ++k) {
        float value = fmaf(element(b[p], k) - high, r, rest);
        if (HAS_WEIGHT && HAS_BIAS) value = fmaf(value, element(wp, k), element(bp, k));
        else if (HAS_WEIGHT) value *= element(wp, k);
        else if (HAS_BIAS) value += element(bp, k);
        from_float(value, out.e[k]);
      }
      store_piece(to + first + int64_t(i) * THREADS * E, out);
    }
  };
  // The last warp of the block merges what they found, and says so to all blocks.
  const auto publish = [&](int64_t row) {
    float4 own[1] = {settled(make_float4(found.m, found.rest, found.var, found.plain), share)};
    const float4 merged_warp = merged(own);
    uint32_t before = 0;
    if (lane == 0) {
      slots[warp] = settled(merged_warp, warp_share);
      __threadfence_block();
      before = atomicAdd(&warps_done, 1u);
    }
    before = __shfl_sync(~0u, before, 0);
    if ((before + 1) % WARPS != 0) return;
    __threadfence_block();
    float4 all[1] = {lane < WARPS ? slots[lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
    const float4 part = settled(merged(all), of_block / float(D));
    if (lane == 0) {
      __stcg(parts + row * PARTS + rank, part);
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived + row) : "memory");
    }
  };
  const auto hear = [&](int64_t row) {
    if (warp == 0) {
      uint32_t seen;
      do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrived + row) : "memory");
      while (seen < PARTS);
      float4 e[(PARTS + 31) / 32];
#pragma unroll
      for (int i = 0; i < (PARTS + 31) / 32; ++i)
        e[i] = i * 32 + lane < PARTS ? __ldcg(parts + row * PARTS + i * 32 + lane) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      const float4 whole = merged(e);
      const float top = whole.x + whole.y, rstd_here = rstd_of(whole.z), low = (whole.x - top) + whole.y;
      if (lane == 0) {
        of_row = make_float4(top, low == 0.0f ? 0.0f : -low * rstd_here, rstd_here, 0.0f);
        if (rank == 0) {
          mean[mean_offset(row)] = fabsf(top) < INF ? top : whole.w;
          rstd[rstd_offset(row)] = rstd_here;
        }
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(&known)) : "memory");
      }
    }
    wait(shared(&known), row & 1);
    high = of_row.x;
    rest = of_row.y;
    r = of_row.z;
  };
  for (int64_t row = 0; row <= ROWS; ++row) {
    const bool more = row < ROWS, before = row > 0;
    O* const to = y + y_offset(before ? row - 1 : 0);
@STEPS@
  }
}
"""
)


def _steps(groups: int) -> list[tuple[bool, int]]:
    """(whether it is written, group), in turn: a row is measured half a row ahead of the writing of the row before."""
    lead = (groups + 1) // 2
    order = [(False, group) for group in range(lead)]
    for group in range(groups):
        order.append((True, group))
        if lead + group < groups:
            order.append((False, lead + group))
    return order


def _code(groups: int, buffers: int) -> dict[str, str]:
    """The loop's body, unrolled: each step uses a buffer and fetches into it what comes `buffers` steps later."""
    order = _steps(groups)

    def fetch(place: int) -> str:
        later, (writes, group) = place // len(order), order[place % len(order)]
        row = f"row + {later - writes}"
        policy = "leave" if writes else "keep"
        there = f"{row} >= 0 && {row} < ROWS"
        return f"if ({there}) fetch(b{place % buffers}, x + x_offset({row}), {group}, {policy});"

    lines, heard = [], False
    for place, (writes, group) in enumerate(order):
        if writes and not heard:
            lines.append("if (before) hear(row - 1);")
            heard = True
        done = (
            f"if (before) write(b{place % buffers}, {group}, to);"
            if writes
            else f"if (more) measure(b{place % buffers}, {group});"
        )
        lines.append(done)
        if not writes and group == groups - 1:
            lines.append("if (more) publish(row);")
        lines.append(fetch(place + buffers))
    first = [fetch(place).replace("row + ", "int64_t(0) + ") for place in range(buffers)]
    return {
        "BUFFERS": "\n".join(f"  words b{number}[G] = {{}};" for number in range(buffers)),
        "FIRST": "\n".join(f"  {line}" for line in first),
        "STEPS": "\n".join(f"    {line}" for line in lines),
    }


def of_stream(
    kernel: RowKernel, threads: int, group: int, buffers: int, keeps: bool, tensors: tuple[bool, bool]
) -> Candidate | None:
    """`group` pieces of 16 bytes a thread and step, `buffers` steps under way; None where they do not fit. `keeps`: elements
    that will be read again are marked so. `tensors`: whether there is a weight, and a bias."""
    share = -(-(kernel.shape.length // kernel.shape.elements) // PROCESSORS)
    groups = -(-share // (threads * group))
    vectors = groups * group
    if (2 * groups) % buffers or groups < 2:
        return None
    has_weight, has_bias = tensors
    bias_bytes = share * VECTOR_BYTES if has_bias else 0
    kept = min(vectors, max(0, _SHARED_BYTES - bias_bytes) // (threads * VECTOR_BYTES)) if has_weight else 0
    weight_bytes = min(kept * threads, share) * VECTOR_BYTES
    held = 4 * (buffers * group + (vectors - kept if has_weight else 0))
    if bias_bytes + weight_bytes > _SHARED_BYTES or held + _OTHER_REGISTERS > min(255, 65536 // threads):
        return None
    policy = "evict_last" if keeps else "evict_normal"
    values = {"PARTS": PROCESSORS, "GROUP": group, "KEPT": kept, "READ": policy, **_code(groups, buffers)}
    body = _BODY
    for name, value in values.items():
        body = body.replace(f"@{name}@", str(value))
    source = (
        prelude(kernel.shape, kernel.rows, Team(threads, threads, vectors), kernel.dtypes, streaming=True) + kernel.code + body
    )
    args: tuple[KernelArg, ...] = (*kernel.args, WorkspaceArg("parts"), WorkspaceArg("arrived"))
    shared = bias_bytes + weight_bytes
    step = KernelStep(kernel.entry, (PROCESSORS, 1, 1), (threads, 1, 1), args, shared_bytes=shared, cooperative=True)
    workspaces = (
        Workspace("parts", 16 * PROCESSORS * kernel.rows), Workspace("arrived", 4 * kernel.rows, zeroed=True)
    )  # fmt: skip
    idea = (
        "All multiprocessors measure a row while they write the one before, read again from L2; weight and bias stay on chip."
    )
    words = {"threads": threads, "group": group, "buffers": buffers, "keeps": keeps}
    return Candidate("cuda", source, LaunchPlan(PLAN_VERSION, (step,), workspaces), idea, AUTHOR, NAME, dict(words))


_STREAMS = (
    (512, 4, 4, True), (512, 4, 2, True), (384, 7, 3, True), (512, 4, 4, False), (384, 3, 7, True), (512, 2, 8, True),
    (768, 3, 2, True), (384, 7, 3, False),
)  # fmt: skip


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for very long aligned rows on sm_90a, parameters of the input's type or none, best guess first; else []."""
    kernel = row_kernel(key)
    if kernel is None or target.device_type != "cuda" or target.arch != "sm_90a":
        return []
    shape, (weight, bias) = kernel.shape, key.tensors[1:3]
    if not shape.aligned or shape.length % shape.elements or shape.pieces < _LEAST_PIECES or kernel.rows > 1 << 20:
        return []
    parameters = [t for t in (weight, bias) if t is not None]
    if any(t.alignment_bytes < VECTOR_BYTES or t.dtype != kernel.dtypes[0] for t in parameters):
        return []
    has = (weight is not None, bias is not None)
    found = [of_stream(kernel, *option, has) for option in _STREAMS]
    return [candidate for candidate in found if candidate is not None]
