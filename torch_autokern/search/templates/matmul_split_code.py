"""CUDA C++ of the split-precision matmul, second half: products on tensor cores, the plain kernel that takes over where the
split would lose bits, and the sum over parts of K. `matmul_split` fills in the constants between @ signs."""

from __future__ import annotations

GEMM = """enum : int { BM = 128, BN = @BN@, HALVES = @HALVES@, HN = BN / HALVES, STAGES = @STAGES@, GROUP = @GROUP@ };
enum : int { A_BYTES = BM * 128, STAGE = A_BYTES + BN * 128, R = HN / 2 };
enum : bool { PAIR = @PAIR@ };  // two accumulators take turns: one is added up in fp32 while the other is filled
struct alignas(64) Map { char bytes[128]; };
struct spot {
  int64_t batch;
  int row, column, begin, end, split;
};
// Neighbouring blocks share rows of A and columns of B: GROUP tiles of rows by as many columns as it takes.
template <int TILE_M, int TILE_N> struct order {
  enum : int { TM = (M + TILE_M - 1) / TILE_M, TN = (N + TILE_N - 1) / TILE_N, TILES = int(BATCH) * TM * TN };
  INLINE static spot at(int unit) {
    const int tile = unit % TILES, inside = tile % (TM * TN), rest = inside % (GROUP * TN);
    const int first = inside / (GROUP * TN) * GROUP;
    const int height = min(TM - first, int(GROUP)), split = unit / TILES, begin = split * SPLIT_STEPS;
    return {tile / (TM * TN), (first + rest % height) * TILE_M, rest / height * TILE_N, begin,
            min(int(STEPS), begin + SPLIT_STEPS), split};
  }
};
INLINE uint32_t shared(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
INLINE void wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\\nL: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\\n@p bra D;\\nbra L;\\nD:}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
INLINE void load(uint32_t to, const Map* map, int k, int row, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(k), "r"(row), "r"(bar)
      : "memory");
}
// Rows of 128 bytes, swizzled over 128; eight of them are 1024 bytes.
INLINE uint64_t descriptor(uint32_t at) {
  return uint64_t((at >> 4) & 0x3FFF) | uint64_t(1) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
}
INLINE void wgmma_first(float (&d)[R], uint64_t a, uint64_t b) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, 0, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n@HN@k16.f32.f16.f16 {@LIST@}, %@DA@, %@DB@, p, 1, 1, 0, 0;}\\n"
    : @BIND@ : "l"(a), "l"(b));
}
INLINE void wgmma(float (&d)[R], uint64_t a, uint64_t b) {
  asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n@HN@k16.f32.f16.f16 {@LIST@}, %@DA@, %@DB@, p, 1, 1, 0, 0;}\\n"
    : @BIND@ : "l"(a), "l"(b));
}
// 32 of K: hi lo, lo hi, then hi hi. A row is 32 hi and 32 lo: a step of 16 in K is 2 units of 16 bytes, lo lies 4 further.
INLINE void multiply(float (&d)[R], uint64_t a, uint64_t b) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  wgmma_first(d, a, b + 4);
  wgmma(d, a + 2, b + 6);
  wgmma(d, a + 4, b);
  wgmma(d, a + 6, b + 2);
  wgmma(d, a, b);
  wgmma(d, a + 2, b + 2);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LEFT> INLINE void promote(float (&sum)[R], float (&d)[R]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#pragma unroll
  for (int i = 0; i < R; ++i) PIN(d[i]);
#pragma unroll
  for (int i = 0; i < R; ++i) sum[i] += d[i];
}
struct ring {
  int stage = 0;
  uint32_t phase = 0;
  INLINE void next() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};
extern "C" __global__ void __launch_bounds__(384, 1)
gemm(const __grid_constant__ Map amap, const __grid_constant__ Map bmap, const int* ea, const int* eb, const float* addend,
     float* c, const uint32_t* flag) {
  extern __shared__ char raw[];
  __shared__ alignas(8) uint64_t bars[2 * STAGES];
  typedef order<BM, BN> tiles;
  const uint32_t base = (shared(raw) + 1023) & ~1023u, full = shared(bars), empty = full + 8 * STAGES;
  const int warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * s));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" ::"r"(empty + 8 * s));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  wait_for_step_before();
  if (__ldcg(flag)) return;
  __syncthreads();
  ring at;
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      for (int unit = blockIdx.x; unit < tiles::TILES * SPLITS; unit += gridDim.x) {
        const spot p = tiles::at(unit);
        for (int s = p.begin; s < p.end; ++s, at.next()) {
          wait(empty + 8 * at.stage, at.phase ^ 1);
          const uint32_t bar = full + 8 * at.stage, to = base + at.stage * STAGE;
          asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(STAGE) : "memory");
          load(to, &amap, s * 64, int(p.batch * M) + p.row, bar);
          load(to + A_BYTES, &bmap, s * 64, int(p.batch * N) + p.column, bar);
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int rows = (warpgroup - 1) * 64, lane = threadIdx.x % 32;
    auto release = [&](int stage) {
      if (threadIdx.x % 128 == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + 8 * stage) : "memory");
    };
    for (int unit = blockIdx.x; unit < tiles::TILES * SPLITS; unit += gridDim.x) {
      const int begin = tiles::at(unit).begin, end = tiles::at(unit).end;
      float sum[HALVES][R];
#pragma unroll
      for (int h = 0; h < HALVES; ++h)
#pragma unroll
        for (int i = 0; i < R; ++i) sum[h][i] = 0.0f;
      if constexpr (PAIR) {
        // Two stages a turn. Nothing is in flight when the turn ends: accumulators that a loop carries while they are being
        // written are copied there, and for that the assembler serialises every product (C7514).
        float part[2][R];
        for (int s = begin; s < end; s += 2) {
          int stages[2];
#pragma unroll
          for (int t = 0; t < 2 * HALVES; ++t) {
            const int u = t / HALVES, h = t % HALVES;
            if (h == 0) {
              wait(full + 8 * at.stage, at.phase);
              stages[u] = at.stage;
              at.next();
            }
            const uint32_t from = base + stages[u] * STAGE;
            multiply(part[t % 2], descriptor(from + rows * 128), descriptor(from + A_BYTES + h * HN * 128));
            if (t > 0) promote<1>(sum[(t - 1) % HALVES], part[(t - 1) % 2]);
            if (t == HALVES) release(stages[0]);
          }
          promote<0>(sum[HALVES - 1], part[1]);
          release(stages[1]);
        }
      } else {
        float part[R];
        for (int s = begin; s < end; ++s, at.next()) {
          wait(full + 8 * at.stage, at.phase);
          const uint32_t from = base + at.stage * STAGE;
#pragma unroll
          for (int h = 0; h < HALVES; ++h) {
            multiply(part, descriptor(from + rows * 128), descriptor(from + A_BYTES + h * HN * 128));
            promote<0>(sum[h], part);
          }
          release(at.stage);
        }
      }
      int same = unit;
      asm volatile("" : "+r"(same));  // where the tile lies is worked out again: registers are short above
      const spot p = tiles::at(same);
      const int row = p.row + rows + threadIdx.x / 32 % 4 * 16 + lane / 4, column = p.column + lane % 4 * 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = row + r * 8;
        if (i >= M) continue;
        const int e = __ldg(ea + p.batch * M + i);
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
#pragma unroll
          for (int q = 0; q < HN / 8; ++q) {
            const int j = column + h * HN + q * 8;
            float v[2];
#pragma unroll
            for (int t = 0; t < 2; ++t)
              if (j + t < N) v[t] = scaled(sum[h][q * 4 + r * 2 + t], max(-252, e + __ldg(eb + p.batch * N + j + t)));
            if (SPLITS == 1 && @PAIRS_ALIGNED@) {
              if (j >= N) continue;
              for (int t = 0; t < 2; ++t) v[t] = with_addend(addend, p.batch, i, j + t, v[t]);
              *reinterpret_cast<float2*>(c + p.batch * @C_B@ + i * @C_I@ + j) = make_float2(v[0], v[1]);
            } else {
              for (int t = 0; t < 2; ++t)
                if (j + t < N) store(addend, c, p.batch, i, j + t, p.split, v[t]);
            }
          }
      }
    }
  }
}
"""

# Where the flag is up: every product in fp32, as the arithmetic units have it; partial sums of 128 keep it no less accurate
# than one long chain. Always right, seldom run.
PLAIN = """extern "C" __global__ void __launch_bounds__(256)
plain(const float* a, const float* b, const float* addend, float* c, const uint32_t* flag) {
  wait_for_step_before();
  if (!__ldcg(flag)) return;
  typedef order<128, 128> tiles;
  __shared__ float as[16][132], bs[16][132];
  const int ti = threadIdx.x / 16 * 8, tj = threadIdx.x % 16 * 8;
  for (int unit = blockIdx.x; unit < tiles::TILES * SPLITS; unit += gridDim.x) {
    const spot p = tiles::at(unit);
    const int64_t end = min(int64_t(K), int64_t(p.end) * 32);
    float sum[8][8] = {}, part[8][8] = {};
    int held = 0;
    for (int64_t k0 = int64_t(p.begin) * 32; k0 < end; k0 += 16) {
      __syncthreads();
#pragma unroll
      for (int u = 0; u < 8; ++u) {
        const int at = threadIdx.x + u * 256;
        const int ka = @A_CONTIGUOUS@ ? at % 16 : at / 128, ia = @A_CONTIGUOUS@ ? at / 16 : at % 128;
        const int kb = @B_CONTIGUOUS@ ? at % 16 : at / 128, jb = @B_CONTIGUOUS@ ? at / 16 : at % 128;
        const int64_t i = p.row + ia, j = p.column + jb;
        as[ka][ia] = i < M && k0 + ka < end ? __ldg(a + p.batch * @A_B@ + i * @A_I@ + (k0 + ka) * @A_K@) : 0.0f;
        bs[kb][jb] = j < N && k0 + kb < end ? __ldg(b + p.batch * @B_B@ + j * @B_J@ + (k0 + kb) * @B_K@) : 0.0f;
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        float x[8], y[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = as[k][ti + i], y[i] = bs[k][tj + i];
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int j = 0; j < 8; ++j) part[i][j] = fmaf(x[i], y[j], part[i][j]);
      }
      if (++held == 8 || k0 + 16 >= end) {
        held = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            sum[i][j] += part[i][j];
            part[i][j] = 0.0f;
          }
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        const int64_t row = p.row + ti + i, j = p.column + tj + t;
        if (row < M && j < N) store(addend, c, p.batch, row, j, p.split, sum[i][t]);
      }
  }
}
"""

# Partial results of the parts of K, added in order.
GATHER = """extern "C" __global__ void __launch_bounds__(256) gather(const float* parts, const float* addend, float* c) {
  wait_for_step_before();
  enum : int64_t { ALL = BATCH * M * N };
  for (int64_t at = int64_t(blockIdx.x) * 256 + threadIdx.x; at < ALL; at += int64_t(gridDim.x) * 256) {
    float v = 0.0f;
#pragma unroll 8
    for (int s = 0; s < SPLITS; ++s) v += __ldcg(parts + s * ALL + at);
    const int64_t batch = at / (M * N), i = at / N % M, j = at % N;
    c[batch * @C_B@ + i * @C_I@ + j] = with_addend(addend, batch, i, j, v);
  }
}
"""


def wgmma_operands(columns: int) -> dict[str, str]:
    """Operand lists of ``wgmma.m64nXk16`` for `columns`: half as many registers a thread."""
    count = columns // 2
    return {
        "HN": str(columns),
        "LIST": ", ".join(f"%{i}" for i in range(count)),
        "DA": str(count),
        "DB": str(count + 1),
        "OUT": ", ".join(f'"=f"(d[{i}])' for i in range(count)),
        "BIND": ", ".join(f'"+f"(d[{i}])' for i in range(count)),
    }
