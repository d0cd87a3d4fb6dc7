/* {"op": "_softmax", "sizes": [256, 1000], "scalars": {"dim": 1, "half_to_float": false}, "reason": ["static_rule"],
    "steps": [{"entry": "softmax", "grid": [256, 1, 1], "block": [32, 1, 1], "args": ["x", "y", "room", "1000"], "shared_bytes": 204800}],
    "workspaces": [{"name": "room", "size_bytes": 4096}],
    "idea": "48 KiB of its own and 200 KiB by the plan: more than a block has"} */
#define INF __int_as_float(0x7f800000)
extern "C" __global__ void softmax(const float* x, float* y, float* room, int n) {
  const long long r = blockIdx.x;
  __shared__ float all[12288];
  all[threadIdx.x] = x[r * n];
  __syncthreads();
  y[r * n + threadIdx.x] = all[31 - threadIdx.x];
}
