/* {"op": "_softmax", "sizes": [256, 1000], "scalars": {"dim": 1, "half_to_float": false}, "reason": ["wrong_value", "wrong_nonfinite"],
    "steps": [{"entry": "softmax", "grid": [256, 1, 1], "block": [32, 1, 1], "args": ["x", "y", "room", "1000"]}],
    "workspaces": [{"name": "room", "size_bytes": 4096}],
    "idea": "exponentials without the row's maximum"} */
#define INF __int_as_float(0x7f800000)
extern "C" __global__ void softmax(const float* x, float* y, float* room, int n) {
  const long long r = blockIdx.x;
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += 32) sum += expf(x[r * n + i]);
  for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  for (int i = threadIdx.x; i < n; i += 32) y[r * n + i] = expf(x[r * n + i]) / sum;
}
