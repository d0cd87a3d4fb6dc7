"""CUDA C++ for long rows on Hopper: persistent blocks copy rows into a ring of slots in shared memory and work in registers.

A row belongs to a team of `parts` blocks. Thread 0 of each block sends bulk copies (completing on mbarriers) of its part into
the ring, as far into the next rows as the ring reaches; all threads take each slot into registers, give it back at once, and
write the row before in the same turn. So copies are under way while a row is reduced, exchanged and stored: in kernels that
load, reduce and store in turn the memory idles at every barrier. A producer warp of its own would cost each thread 32
registers: 17 warps may have 96 each, 16 have 128. Blocks of a team exchange what their warps found once a row, by stores to
each other's shared memory that complete on an mbarrier there (the idea of QuACK, `quack/reduction_base.py`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch_autokern.build.candidate import Parameter
from torch_autokern.search.templates.cuda_rows import VECTOR_BYTES, RowShape, Team, prelude
from torch_autokern.search.templates.cuda_teams import PROCESSORS, RowKernel

_SM_BYTES = 233472  # 228 KiB of a multiprocessor; each block takes 1 KiB of them for the system
_MAX_SLOTS = 32
MAX_PIECES = 16  # of a row a thread: 64 registers


@dataclass(frozen=True)
class Ring:
    """`parts` blocks of `threads` share a row; `pieces` of 16 bytes a thread and slot; `residents` blocks share a
    multiprocessor; `fixed_bytes` of shared memory are for something else.

    `waves` teams follow each other in one place: those of a multiprocessor that is slower take fewer of them. `streaming`: rows
    are marked as not worth keeping in the L2.
    """

    parts: int
    threads: int
    pieces: int
    residents: int = 1
    fixed_bytes: int = 0
    waves: int = 1
    streaming: bool = True

    @property
    def slot_bytes(self) -> int:
        """Size of a slot."""
        return self.threads * self.pieces * VECTOR_BYTES

    @property
    def slots(self) -> int:
        """As many as fit beside the barriers and two exchanges of 16 bytes a warp."""
        static_bytes = 16 * _MAX_SLOTS + self.cluster * self.threads + 512
        return min(_MAX_SLOTS, (_SM_BYTES // self.residents - 1024 - static_bytes - self.fixed_bytes) // self.slot_bytes)

    @property
    def cluster(self) -> int:
        """Blocks of a launched cluster: a part each, or 1 where the whole grid is one team."""
        return self.parts if self.parts <= 8 else 1

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; what is fixed comes first."""
        return self.fixed_bytes + self.slots * self.slot_bytes

    def share(self, shape: RowShape) -> int:
        """Pieces of a row in one part, at most."""
        return -(-(shape.length // shape.elements) // self.parts)

    def vectors(self, shape: RowShape) -> int:
        """Pieces of a row a thread."""
        return -(-self.share(shape) // (self.threads * self.pieces)) * self.pieces

    def grid(self, rows: int) -> int:
        """Blocks that are all resident at once, `waves` times; teams of 4 and 8 do not fill every group of multiprocessors. In
        one wave no more than share the rows evenly in as many turns; of several the last ones are the shorter."""
        teams = {1: PROCESSORS, 2: PROCESSORS // 2, 4: 30, 8: 14}[self.parts] * self.residents
        if self.waves > 1:
            return self.parts * min(rows, teams * self.waves)
        return self.parts * -(-rows // -(-rows // teams))


def ring_source(kernel: RowKernel, ring: Ring, body: str) -> str:
    """Rows, the op's device functions, the ring, and `body`: the kernel."""
    team = Team(ring.threads, ring.threads, ring.vectors(kernel.shape), ring.cluster)
    values = {
        "P": ring.pieces, "SLOTS": ring.slots, "PARTS": ring.parts, "RESIDENTS": ring.residents, "FIXED": ring.fixed_bytes,
        "READ": "evict_first" if ring.streaming else "evict_normal",
    }  # fmt: skip
    text = kernel.code + RING + body
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    return prelude(kernel.shape, kernel.rows, team, kernel.dtypes, streaming=kernel.streaming and ring.streaming) + text


def words_of(ring: Ring) -> dict[str, Parameter]:
    """A ring as the parameters of a candidate."""
    return {name: value for name, value in asdict(ring).items() if name != "fixed_bytes"}


# Barriers in shared memory, pieces as registers and what is done to them in place, and sums over a warp.
WORDS = """INLINE uint32_t shared(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
INLINE void wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\\n@p bra DONE;\\nbra AGAIN;\\nDONE:}"
      ::"r"(bar), "r"(parity)
      : "memory");
}
// A piece as the four registers that it fills: an array of half types would take a register for each element.
struct alignas(16) words { uint32_t w[4]; };
INLINE words taken(const T* p) {
  pieces<T> r = load_piece_once(p);
  return *reinterpret_cast<words*>(&r);
}
INLINE float part_of(uint32_t w, bool high, float) { return __uint_as_float(w); }
INLINE float part_of(uint32_t w, bool high, __nv_bfloat16) { return __uint_as_float(high ? w & 0xFFFF0000u : w << 16); }
INLINE float part_of(uint32_t w, bool high, __half) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(high ? w >> 16 : w & 0xFFFFu)));
}
INLINE float element(const words& v, int k) { return part_of(v.w[k * 4 / E], k * 4 % E != 0, T()); }
// Elementwise, in place: converting every element would leave floats that the compiler keeps.
INLINE uint32_t larger(uint32_t a, uint32_t b, float) {
  return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
}
template <class U, class U2> INLINE uint32_t larger_pair(uint32_t a, uint32_t b) {
  const U2 r = __hmax2(*reinterpret_cast<U2*>(&a), *reinterpret_cast<U2*>(&b));
  return *reinterpret_cast<const uint32_t*>(&r);
}
INLINE uint32_t larger(uint32_t a, uint32_t b, __half) { return larger_pair<__half, __half2>(a, b); }
INLINE uint32_t larger(uint32_t a, uint32_t b, __nv_bfloat16) { return larger_pair<__nv_bfloat16, __nv_bfloat162>(a, b); }
INLINE words filled(T value) {
  pieces<T> v;
#pragma unroll
  for (int k = 0; k < E; ++k) v.e[k] = value;
  return *reinterpret_cast<words*>(&v);
}
// The compiler may not keep what it made of these pieces: converted elements would need twice the registers.
INLINE void forget(words* v) {
#pragma unroll
  for (int i = 0; i < V; ++i)
#pragma unroll
    for (int k = 0; k < 4; ++k) asm volatile("" : "+r"(v[i].w[k]));
}
template <class Op> INLINE float over_warp(float v) {
#pragma unroll
  for (int o = 16; o > 0; o /= 2) v = Op::join(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
"""
RING = (
    WORDS
    + """constexpr int P = @P@, SLOTS = @SLOTS@, PARTS = @PARTS@, PIECES = THREADS * P, SLOT_BYTES = PIECES * 16;
constexpr int64_t ALL = D / E, SHARE = (ALL + PARTS - 1) / PARTS;
constexpr int NC = int((SHARE + PIECES - 1) / PIECES);
constexpr int64_t LEAST = ALL - (PARTS - 1) * SHARE;  // pieces of the last part, which may be none
static_assert(V == NC * P, "pieces of a row a thread");
INLINE void expect(uint32_t bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
INLINE void copy(uint32_t to, const void* from, int bytes, uint32_t bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      ::"r"(to), "l"(from), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}
INLINE uint64_t read_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::@READ@.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// All threads of the blocks of a cluster.
INLINE void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
INLINE int64_t pieces_of_part(int64_t part) {
  const int64_t left = ALL - part * SHARE;
  return left < SHARE ? (left > 0 ? left : 0) : SHARE;
}
struct ring {
  const T* x;
  const char* data;
  uint32_t full, empty;
  int mine;       // pieces of this block's part
  int64_t first;  // its first piece in the row
  int64_t step;   // between rows of this team
  int s = 0;
  uint32_t phase = 0;
  // What thread 0 will copy next.
  int64_t row;
  int c = 0, to = 0;
  uint32_t parity = 1;
  uint64_t policy;
  INLINE ring(const T* from, const char* slots, const uint64_t* bars, int part, int64_t start, int64_t every)
      : x(from), data(slots), full(shared(bars)), empty(full + 8 * SLOTS), mine(int(pieces_of_part(part))),
        first(part * SHARE), step(every), row(start), policy(read_policy()) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < SLOTS; ++i) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * i));
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * i), "r"(WARPS));
      }
    }
  }
  // Thread 0: the next chunk, into the slot that all warps have given back or are about to.
  INLINE void send() {
    if (threadIdx.x != 0 || row >= ROWS) return;
    const int left = mine - c * PIECES, bytes = 16 * (left < PIECES ? (left > 0 ? left : 0) : PIECES);
    wait(empty + 8 * to, parity);
    expect(full + 8 * to, bytes);
    if (bytes > 0) {
      const T* from = x + x_offset(row) + (first + int64_t(c) * PIECES) * E;
      copy(shared(data) + to * SLOT_BYTES, from, bytes, full + 8 * to, policy);
    }
    if (++to == SLOTS) {
      to = 0;
      parity ^= 1;
    }
    if (++c == NC) {
      c = 0;
      row += step;
    }
  }
  INLINE void fill() {
    for (int i = 0; i < SLOTS; ++i) send();
  }
  INLINE void wait_full() { wait(full + 8 * s, phase); }
  INLINE words piece(int p) const {
    return (reinterpret_cast<const words*>(data + s * SLOT_BYTES) + threadIdx.x)[p * THREADS];
  }
  // Of a warp that has taken its pieces. `again`: a slot was given back before this one, in this row: it is filled now, when
  // the other warps should have given it back too. The row's last slot is filled by a `send` of its own, before the exchange.
  INLINE void give_back(bool again) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + 8 * s) : "memory");
    if (again) send();
    __syncwarp();
    if (++s == SLOTS) {
      s = 0;
      phase ^= 1;
    }
  }
  INLINE bool has(int i) const { return int64_t(i + 1) * THREADS <= LEAST || i * THREADS + int(threadIdx.x) < mine; }
  // 64 bits before the sum: then the pieces' addresses differ by constants that loads and stores carry.
  INLINE int64_t at(int i) const { return (first + int64_t(threadIdx.x)) * E + int64_t(i) * THREADS * E; }
};
// What the warps of a cluster or of one block found, one float4 each, to all of its blocks. Two buffers suffice: who sends
// for the next row but one has heard of the next row from every warp, and each of them had read this row's by then.
struct exchange {
  float4* slots;  // 2 * C * WARPS
  uint32_t bars;
  uint32_t count = 0;
  INLINE exchange(float4* to, const uint64_t* bar) : slots(to), bars(shared(bar)) {
    if (threadIdx.x == 0)
      for (int i = 0; i < 2; ++i) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bars + 8 * i));
  }
  INLINE const float4* operator()(int rank, float4 v) {
    const uint32_t buffer = count & 1, parity = count >> 1 & 1, bar = bars + 8 * buffer;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float4* to = slots + buffer * C * WARPS;
    if (C == 1) {
      if (lane == 0) to[warp] = v;
      __syncthreads();
      ++count;
      return to;
    }
    if (threadIdx.x == 0) expect(bar, C * WARPS * 16);
    if (lane < C) {
      uint32_t there, bar_there;
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared(to + rank * WARPS + warp)), "r"(lane));
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(bar_there) : "r"(bar), "r"(lane));
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                   ::"r"(there), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar_there)
                   : "memory");
    }
    wait(bar, parity);
    ++count;
    return to;
  }
};
"""
)
