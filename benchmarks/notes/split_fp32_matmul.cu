// Prototype behind split_fp32_matmul.md, last row (0.867 ms): not built, not served, kept so that the next attempt starts here.
// Compile for sm_90a with -D MULTI=0 -D NSTAGES=6. Plan: column_tops and split_rows, then split_columns, then gemm on 132 blocks of
// 384 threads with 6 * 32768 + 1024 bytes of shared memory; tensor maps of fp16 (2 K, rows), box (64, 128), 128-byte swizzle.

#include <cuda_fp16.h>
typedef unsigned int u32; typedef unsigned long long u64;
struct alignas(64) Map { char bytes[128]; };
constexpr int BM = 128, BN = 128, BK = 32, STAGES = NSTAGES;
constexpr int TILE = BM * 128, STAGE = 2 * TILE;

__device__ __forceinline__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void wait(u32 bar, u32 parity) {
  asm volatile("{.reg .pred p;\nL: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra L;\nD:}" :: "r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void arrive_at(u32 bar, u32 cta) {
  asm volatile("{.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [r];}" :: "r"(bar), "r"(cta) : "memory");
}
__device__ __forceinline__ void load(u32 to, const Map* map, int k, int row, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" :: "r"(to), "l"(map), "r"(k), "r"(row), "r"(bar) : "memory");
}
__device__ __forceinline__ void load_both(u32 to, const Map* map, int k, int row, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" :: "r"(to), "l"(map), "r"(k), "r"(row), "r"(bar), "h"((unsigned short)3) : "memory");
}
__device__ __forceinline__ u64 descriptor(u32 at) { return (u64)((at >> 4) & 0x3FFF) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62; }

__device__ __forceinline__ void wgmma(float (&d)[64], u64 a, u64 b, int keep) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;}\n"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]) : "l"(a), "l"(b), "r"(keep));
}
#if MULTI
#define RELEASE(x) if (speaks) { arrive_at(empty + 8 * (x), 0); arrive_at(empty + 8 * (x), 1); }
#else
#define RELEASE(x) if (speaks) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(empty + 8 * (x)) : "memory")
#endif
#define FENCE() asm volatile("wgmma.fence.sync.aligned;" ::: "memory")
#define COMMIT() asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory")
#define WAIT(n) asm volatile("wgmma.wait_group.sync.aligned " #n ";" ::: "memory")

__device__ __forceinline__ float power(int e) { return __int_as_float((e + 127) << 23); }
__device__ __forceinline__ float scaled(float x, int e) { int h = e / 2; return x * power(h) * power(e - h); }

extern "C" __global__ void __launch_bounds__(384, 1)
gemm(const __grid_constant__ Map amap, const __grid_constant__ Map bmap,
     float* c, const int* ea, const int* eb, int m, int n, int k) {
  extern __shared__ char raw[];
  const u32 base = (shared(raw) + 1023) & ~1023u;
  __shared__ alignas(8) u64 bars[2 * STAGES];
  const u32 full = shared(bars), empty = full + 8 * STAGES;
  u32 rank; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full + 8 * s));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(empty + 8 * s), "r"(MULTI ? 4 : 2));
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  const int tiles_m = m / BM, tiles = tiles_m * (n / BN), steps = k / BK;
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      int stage = 0, phase = 1;
      for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const int row = (t % tiles_m) * BM, column = (t / tiles_m) * BN + (MULTI ? rank * 64 : 0);
        for (int s = 0; s < steps; ++s) {
          wait(empty + 8 * stage, phase);
          const u32 bar = full + 8 * stage, to = base + stage * STAGE;
          expect(bar, STAGE);
          load(to, &amap, s * 64, row, bar);
#if MULTI
          load_both(to + TILE + rank * TILE / 2, &bmap, s * 64, column, bar);
#else
          load(to + TILE, &bmap, s * 64, column, bar);
#endif
          if (++stage == STAGES) { stage = 0; phase ^= 1; }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int half_rows = (warpgroup - 1) * 64;
    const bool speaks = threadIdx.x % 128 == 0;
    int stage = 0, phase = 0;
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      float sum[64], part[2][64];
      for (int i = 0; i < 64; ++i) sum[i] = 0;
      int before = -1;
      for (int s = 0; s < steps; s += 2) {
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
          wait(full + 8 * stage, phase);
          const u32 at = base + stage * STAGE;
          const u64 a = descriptor(at + half_rows * 128), b = descriptor(at + TILE);
          FENCE();
          wgmma(part[h], a, b + 4, 0);
          wgmma(part[h], a + 2, b + 6, 1);
          wgmma(part[h], a + 4, b, 1);
          wgmma(part[h], a + 6, b + 2, 1);
          wgmma(part[h], a, b, 1);
          wgmma(part[h], a + 2, b + 2, 1);
          COMMIT();
          if (s + h > 0) {
            WAIT(1);
            RELEASE(before);
            for (int i = 0; i < 64; ++i) sum[i] += part[1 - h][i];
          }
          before = stage;
          if (++stage == STAGES) { stage = 0; phase ^= 1; }
        }
      }
      WAIT(0);
      RELEASE(before);
      for (int i = 0; i < 64; ++i) sum[i] += part[1][i];
      const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
      const int row = (t % tiles_m) * BM + half_rows + warp * 16 + lane / 4, column = (t / tiles_m) * BN + lane % 4 * 2;
      for (int h = 0; h < 2; ++h) {
        const int r = row + h * 8, e = ea[r];
        float* out = c + (long long)r * n + column;
        for (int j = 0; j < 16; ++j) {
          const int2 f = *(const int2*)(eb + column + j * 8);
          float2 v;
          v.x = scaled(sum[j * 4 + h * 2], e + f.x);
          v.y = scaled(sum[j * 4 + h * 2 + 1], e + f.y);
          *(float2*)(out + j * 8) = v;
        }
      }
    }
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ int exponent_of(u32 top) { return top < 0x00800000u ? -126 : (int)(top >> 23) - 127; }
__device__ __forceinline__ void split(float x, int e, __half& hi, __half& lo) {
  const float y = scaled(x, 13 - e);
  hi = __float2half_rn(y);
  lo = __float2half_rn(y - __half2float(hi));
}

// One block a row of A: largest exponent, then both halves.
extern "C" __global__ void __launch_bounds__(256) split_rows(const float* a, __half* ap, int* ea, int k) {
  const float4* row = (const float4*)(a + (long long)blockIdx.x * k);
  float4 held[8];
  u32 top = 0;
  #pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = threadIdx.x + i * 256;
    if (at * 4 < k) {
      held[i] = row[at];
      top = max(top, max(max(__float_as_uint(held[i].x) & 0x7FFFFFFF, __float_as_uint(held[i].y) & 0x7FFFFFFF), max(__float_as_uint(held[i].z) & 0x7FFFFFFF, __float_as_uint(held[i].w) & 0x7FFFFFFF)));
    }
  }
  top = __reduce_max_sync(~0u, top);
  __shared__ u32 tops[8];
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
  __syncthreads();
  for (int i = 0; i < 8; ++i) top = max(top, tops[i]);
  const int e = exponent_of(top);
  if (threadIdx.x == 0) ea[blockIdx.x] = e - 13;
  #pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = threadIdx.x + i * 256;
    if (at * 4 < k) {
      __half h[4], l[4];
      split(held[i].x, e, h[0], l[0]); split(held[i].y, e, h[1], l[1]); split(held[i].z, e, h[2], l[2]); split(held[i].w, e, h[3], l[3]);
      uint2* out = (uint2*)(ap + (long long)blockIdx.x * k * 2) + at / 8 * 16 + at % 8;
      out[0] = *(uint2*)h;
      out[8] = *(uint2*)l;
    }
  }
}

extern "C" __global__ void __launch_bounds__(256) column_tops(const float* b, u32* tops, int n, int rows) {
  const int column = (blockIdx.x * 256 + threadIdx.x) * 4;
  if (column >= n) return;
  u32 t[4] = {0, 0, 0, 0};
  for (int r = 0; r < rows; ++r) {
    const float4 v = *(const float4*)(b + (long long)(blockIdx.y * rows + r) * n + column);
    t[0] = max(t[0], __float_as_uint(v.x) & 0x7FFFFFFF); t[1] = max(t[1], __float_as_uint(v.y) & 0x7FFFFFFF);
    t[2] = max(t[2], __float_as_uint(v.z) & 0x7FFFFFFF); t[3] = max(t[3], __float_as_uint(v.w) & 0x7FFFFFFF);
  }
  for (int i = 0; i < 4; ++i) atomicMax(tops + column + i, t[i]);
}

// 64 x 64 tile of B, split and transposed.
extern "C" __global__ void __launch_bounds__(256) split_columns(const float* b, const u32* tops, __half* bp, int* eb, int n, int k) {
  __shared__ u32 tile[64][65];
  const int n0 = blockIdx.x * 64, k0 = blockIdx.y * 64;
  for (int i = threadIdx.x; i < 64 * 16; i += 256) {
    const int r = i / 16, q = i % 16 * 4;
    const float4 v = *(const float4*)(b + (long long)(k0 + r) * n + n0 + q);
    const float x[4] = {v.x, v.y, v.z, v.w};
    for (int j = 0; j < 4; ++j) {
      const int e = exponent_of(tops[n0 + q + j]);
      __half2 p;
      split(x[j], e, p.x, p.y);
      tile[q + j][r] = *(u32*)&p;
      if (blockIdx.y == 0 && r == 0) eb[n0 + q + j] = e - 13;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 64 * 8; i += 256) {
    const int r = i / 8, q = i % 8 * 8;
    u32 h[4], l[4];
    for (int j = 0; j < 4; ++j) {
      const u32 x = tile[r][q + 2 * j], y = tile[r][q + 2 * j + 1];
      h[j] = __byte_perm(x, y, 0x5410); l[j] = __byte_perm(x, y, 0x7632);
    }
    __half* out = bp + (long long)(n0 + r) * k * 2 + (k0 + q) / 32 * 64 + q % 32;
    *(uint4*)out = *(uint4*)h;
    *(uint4*)(out + 32) = *(uint4*)l;
  }
}
