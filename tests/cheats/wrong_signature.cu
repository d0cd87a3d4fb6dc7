/* {"op": "_softmax", "sizes": [256, 1000], "scalars": {"dim": 1, "half_to_float": false}, "reason": ["static_rule"],
    "steps": [{"entry": "softmax", "grid": [256, 1, 1], "block": [32, 1, 1], "args": ["x", "y", "room", "1000"]}],
    "workspaces": [{"name": "room", "size_bytes": 4096}],
    "idea": "takes three arguments, the plan passes four"} */
#define INF __int_as_float(0x7f800000)
extern "C" __global__ void softmax(const float* x, float* y, int n) {
  
}
