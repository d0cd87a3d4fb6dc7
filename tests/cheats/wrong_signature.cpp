/* {"op": "_softmax", "sizes": [96, 1000], "scalars": {"dim": 1, "half_to_float": false}, "reason": ["build_failed"],
    "steps": [{"entry": "candidate", "range": 96, "grain": 4, "args": ["x", "y"]}],
    "idea": "an entry with other arguments than the loader passes"} */
#include <cmath>
#include <cstdint>

extern "C" void candidate(const float* x, float* y) {
  y[0] = x[0];
}
