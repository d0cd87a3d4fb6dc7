/* {"op": "_softmax", "sizes": [256, 1000], "scalars": {"dim": 1, "half_to_float": false}, "reason": ["wrong_value", "wrong_nonfinite", "not_deterministic", "stale_result"],
    "steps": [{"entry": "softmax", "grid": [256, 1, 1], "block": [64, 1, 1], "args": ["x", "y", "room", "1000"]}],
    "workspaces": [{"name": "room", "size_bytes": 4096}],
    "idea": "two warps meet in shared memory without a barrier"} */
#define INF __int_as_float(0x7f800000)
extern "C" __global__ void softmax(const float* x, float* y, float* room, int n) {
  const long long r = blockIdx.x;
  __shared__ float part[64];
  float top = -INF, sum = 0;
  for (int i = threadIdx.x; i < n; i += 64) top = fmaxf(top, x[r * n + i]);
  part[threadIdx.x] = top;
  for (int i = 0; i < 64; ++i) top = fmaxf(top, part[i]);  // without a barrier: the other warp may not have written yet
  for (int i = threadIdx.x; i < n; i += 64) sum += expf(x[r * n + i] - top);
  part[threadIdx.x] = sum;
  sum = 0;
  for (int i = 0; i < 64; ++i) sum += part[i];
  for (int i = threadIdx.x; i < n; i += 64) y[r * n + i] = expf(x[r * n + i] - top) / sum;
}
