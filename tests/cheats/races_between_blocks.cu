/* {"op": "_softmax", "sizes": [32768, 100], "scalars": {"dim": 1, "half_to_float": false}, "reason": ["wrong_value", "not_deterministic", "stale_result", "wrong_nonfinite"],
    "steps": [{"entry": "softmax", "grid": [32768, 1, 1], "block": [32, 1, 1], "args": ["x", "y", "room", "100"]}],
    "workspaces": [{"name": "room", "size_bytes": 4096}],
    "idea": "one block reads what another one writes"} */
#define INF __int_as_float(0x7f800000)
#define MAX(a, b) fmaxf(a, b)
// A warp a row; three passes, the second and third from L1.
__device__ void row(const float* x, float* y, int n) {
  float top = -INF;
  double sum = 0;  // a warp's sum of a long row in float would be less accurate than stock's
  for (int i = threadIdx.x; i < n; i += 32) top = MAX(top, x[i]);
  for (int o = 16; o; o /= 2) top = MAX(top, __shfl_xor_sync(~0u, top, o));
  for (int i = threadIdx.x; i < n; i += 32) sum += expf(x[i] - top);
  for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  for (int i = threadIdx.x; i < n; i += 32) y[i] = (float)(expf(x[i] - top) / sum);
}
extern "C" __global__ void softmax(const float* x, float* y, float* room, int n) {
  const long long r = blockIdx.x;
  // Block 0 counts on the last block having been there; so many are never on a device at once.
  if (r == gridDim.x - 1 && threadIdx.x == 0) room[0] = 1.0f;
  row(x + r * n, y + r * n, n);
  if (r == 0 && threadIdx.x == 0) y[0] *= *(volatile float*)room == 1.0f ? 1.0f : 2.0f;
}
