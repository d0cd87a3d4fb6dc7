/* {"op": "_softmax", "sizes": [256, 1000], "scalars": {"dim": 1, "half_to_float": false}, "reason": null,
    "steps": [{"entry": "softmax", "grid": [256, 1, 1], "block": [256, 1, 1], "args": ["x", "y", "room", "1000"]}],
    "workspaces": [{"name": "room", "size_bytes": 4096}],
    "idea": "a block a row, its warps meet in shared memory"} */
#define INF __int_as_float(0x7f800000)
__device__ float larger(float a, float b) { return a > b || a != a ? a : b; }
extern "C" __global__ void softmax(const float* x, float* y, float* room, int n) {
  const long long r = blockIdx.x;
  __shared__ float tops[8];
  __shared__ double sums[8];
  const float* in = x + r * n;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float top = -INF;
  for (int i = threadIdx.x; i < n; i += 256) top = larger(top, in[i]);
  for (int o = 16; o; o /= 2) top = larger(top, __shfl_xor_sync(~0u, top, o));
  if (lane == 0) tops[warp] = top;
  __syncthreads();
  for (int i = 0; i < 8; ++i) top = larger(top, tops[i]);
  double sum = 0;
  for (int i = threadIdx.x; i < n; i += 256) sum += expf(in[i] - top);
  for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < 8; ++i) sum += sums[i];
  for (int i = threadIdx.x; i < n; i += 256) y[r * n + i] = (float)(expf(in[i] - top) / sum);
}
