/* {"op": "_softmax", "sizes": [256, 1000], "scalars": {"dim": 1, "half_to_float": false}, "reason": ["not_written"],
    "steps": [{"entry": "softmax", "grid": [256, 1, 1], "block": [32, 1, 1], "args": ["x", "y", "room", "1000"]}],
    "workspaces": [{"name": "room", "size_bytes": 4096}],
    "idea": "writes nothing"} */
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
  
}
