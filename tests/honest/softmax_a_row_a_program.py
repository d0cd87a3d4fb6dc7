"""{"op": "_softmax", "sizes": [256, 1000], "scalars": {"dim": 1, "half_to_float": false},
"reason": null,
"steps": [{"entry": "soft", "grid": [256, 1, 1], "block": [1, 1, 1], "args": ["x", "y", "1000"]}],
"idea": "a program a row, the whole row in registers"}"""

# autokern: {"entry": "soft", "signature": {"x": "*fp32", "y": "*fp32", "n": "i32"}, "constexprs": {"B": 1024}}
import triton
import triton.language as tl


@triton.jit
def soft(x, y, n, B: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, B)
    v = tl.load(x + row * n + at, mask=at < n, other=-float("inf"))
    d = v - tl.max(v, 0)
    # `tl.exp` multiplies by log2 e in one rounding: 50 below the maximum that errs by 25 times what stock's expf does. So
    # whole powers of two are taken out first (Cody and Waite); below -150 all of it is 0.
    d = tl.where(d < -150.0, -150.0, d)
    whole = tl.floor(d * 1.4426950408889634 + 0.5)
    rest = d + whole * -0.693359375  # exact: 9 bits times 8
    v = tl.exp(rest + whole * 2.12194440e-4) * tl.exp2(whole + 64.0)  # larger by as much as the sum: nothing is denormal
    tl.store(y + row * n + at, v / tl.sum(v, 0), mask=at < n)
