/* {"op": "_softmax", "sizes": [256, 1000], "scalars": {"dim": 1, "half_to_float": false}, "reason": ["build_failed"],
    "steps": [{"entry": "softmax", "grid": [256, 1, 1], "block": [32, 1, 1], "args": ["x", "y", "room", "1000"]}],
    "workspaces": [{"name": "room", "size_bytes": 4096}],
    "idea": "templates without end"} */
#define INF __int_as_float(0x7f800000)
template <long N> struct B {
  static const long v = B<N - 1>::v + B<N / 2 - 7>::v;
};
extern "C" __global__ void softmax(const float* x, float* y, float* room, int n) {
  const long long r = blockIdx.x;
  y[r] = B<1000000000>::v;
}
