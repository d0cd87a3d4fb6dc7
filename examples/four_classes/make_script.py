"""Put the story of this example together: `script.json`, what the scripted server answers, from the kernels beside it.

python examples/four_classes/make_script.py
"""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
ROWS = 16384
PLAN = {"version": 1, "steps": [{"kind": "cpu", "entry": "run", "range": ROWS, "grain": 2048, "args": [
    {"kind": "input", "index": 0}, {"kind": "output", "index": 0}]}]}  # fmt: skip

TWO_ROWS = """INLINE vf two_rows(vf x) {
  vf m = larger(SWAP1(x), x);
  m = larger(SWAP2(m), m);
  vf e = exp_of(x - m);
  vf s = e + SWAP1(e);
  s = s + SWAP2(s);
  return e / s;
}
"""
NO_MAXIMUM = """INLINE vf two_rows(vf x) {
  vf e = exp_of(x);
  vf s = e + SWAP1(e);
  s = s + SWAP2(s);
  return e / s;
}
"""
DIVIDE = "INLINE vf RECIPROCAL(vf s) { return 1.0f / s; }\n"
NEWTON = """INLINE vf RECIPROCAL(vf s) {
  vf q = (vf)_mm256_rcp_ps((__m256)s);
  return q * (2.0f - s * q);
}
"""


def part(name: str) -> str:
    """One file of `kernels/`."""
    return (HERE / "kernels" / name).read_text()


def two_rows(exp: str, body: str, unroll: int) -> str:
    """A kernel that holds two rows in a vector."""
    parts = (
        part("_vectors8.h"),
        part(exp),
        part("_two_rows.h"),
        body,
        f"enum {{ UNROLL = {unroll} }};\n",
        part("_two_rows_loop.h"),
    )
    return "".join(parts)


def eight_rows(exp: str, reciprocal: str) -> str:
    """A kernel that holds a column of eight rows in a vector."""
    return "".join((part("_vectors8.h"), part(exp), reciprocal, part("_eight_rows.h")))


# Ideas of five rounds: (idea, source, source of the mended kernel or "").
ROUNDS = [
    [
        ("Write the row out by hand, four exponentials and one sum a row: no loop over a dimension of four, and the compiler may "
         "keep everything in registers.", part("one_row.cpp"), ""),
        ("A row of four floats fills a 128-bit vector exactly: one load and one store a row, maximum and sum by two shuffles each, "
         "no lane is empty.", part("row_of_four_lanes.cpp"), ""),
    ],
    [
        ("Two rows in one 256-bit vector: the shuffles stay inside 128-bit halves, so they cost the same, and each exponential now "
         "serves eight elements instead of four.", two_rows("_exp_two_factors.h", TWO_ROWS, 1), ""),
        ("Leave out the maximum: softmax does not change when a constant is subtracted, and that saves four of about thirty "
         "instructions a vector.", two_rows("_exp_two_factors.h", NO_MAXIMUM, 1), two_rows("_exp_two_factors.h", TWO_ROWS, 2)),
    ],
    [
        ("Four independent vectors in flight: the polynomial is a chain of dependent multiply-adds, four chains fill the pipeline.",
         two_rows("_exp_two_factors.h", TWO_ROWS, 4), ""),
        ("One factor 2^n instead of two: results below the smallest normal number may be 0, so a compare and a mask replace a shift, "
         "a subtraction and a multiplication.", two_rows("_exp_one_factor.h", TWO_ROWS, 4), ""),
    ],
    [
        ("Eight rows at a time, transposed in registers so that a lane is a row: maximum and sum need no shuffles, and one division "
         "serves eight rows instead of two.", eight_rows("_exp_one_factor.h", DIVIDE), ""),
        ("A polynomial of degree four for the exponential: two multiply-adds less for each element.",
         eight_rows("_exp_short.h", DIVIDE), eight_rows("_exp_two_factors.h", DIVIDE)),
    ],
    [
        ("Eight rows transposed, and the reciprocal of the sum by the processor's estimate and one Newton step in place of the division.",
         eight_rows("_exp_one_factor.h", NEWTON), ""),
        ("Two rows a vector, eight vectors in flight, one factor 2^n: more chains than before, as long as sixteen registers hold them.",
         two_rows("_exp_one_factor.h", TWO_ROWS, 8), ""),
    ],
]  # fmt: skip
LESSONS = [
    ["Whole rows in exact vectors beat one row at a time: lanes must not be empty."],
    ["Two rows a vector pay; leaving out the maximum overflows on large inputs and is never right."],
    [
        "Work for each exponential decides here; one exact factor is enough, because results below the smallest normal number are free."
    ],
    ["A lane for each row saves shuffles and divisions; an exponential of degree four is too coarse for the stock class."],
    ["What is left is the exponential itself: the reciprocal and more vectors in flight matter little."],
]


def reply(idea: str, source: str) -> dict[str, object]:
    """A kernel as a model would send it."""
    return {"language": "cpp", "source": source, "plan": PLAN, "idea": idea}


def main() -> None:
    """Write `script.json`."""
    rules: list[dict[str, object]] = []
    for number, lessons in enumerate(LESSONS):
        for idea, source, mended in ROUNDS[number]:
            rules.append({"match": f"## The idea\n{idea[:40]}", "reply": reply(idea, source)})
            if mended:
                rules.append({"match": f"Idea: {idea[:40]}", "reply": reply(f"Mended: {idea}", mended)})
        rules.append({"match": "## This round", "times": 1, "reply": {"lessons": lessons}})
        rules.append(
            {"match": "Give 2 new ideas", "times": 1, "reply": {"ideas": [{"idea": one[0]} for one in ROUNDS[number]]}}
        )
    for rule in rules:
        rule["match"] = str(rule["match"]).replace("^", "\\^").replace(".", "\\.")
    (HERE / "script.json").write_text(json.dumps({"rules": rules}, indent=1) + "\n")


if __name__ == "__main__":
    main()
