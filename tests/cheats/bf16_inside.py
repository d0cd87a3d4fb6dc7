"""{"op": "_softmax", "sizes": [256, 1000], "scalars": {"dim": 1, "half_to_float": false},
"reason": ["wrong_value"],
"steps": [{"entry": "soft", "grid": [256, 1, 1], "block": [1, 1, 1], "args": ["x", "y", "1000"]}],
"idea": "exponentials in bfloat16"}"""

# autokern: {"entry": "soft", "signature": {"x": "*fp32", "y": "*fp32", "n": "i32"}, "constexprs": {"B": 1024}}
import triton
import triton.language as tl


@triton.jit
def soft(x, y, n, B: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, B)
    v = tl.load(x + row * n + at, mask=at < n, other=-float("inf"))
    v = tl.exp(v - tl.max(v, 0)).to(tl.bfloat16).to(tl.float32)
    tl.store(y + row * n + at, v / tl.sum(v, 0), mask=at < n)
