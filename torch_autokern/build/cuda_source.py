"""What a CUDA C++ candidate may say, and the small headers that NVRTC lacks.

NVRTC compiles device code only, so nothing here can run on the host; the box holds what the text rules miss. The toolkit's
C++ library (``cooperative_groups.h``, ``cuda/...``) is left out because it plants kilobytes of global variables in every
cubin, 1.0 to 2.0 s of compile time with it (NVRTC 13.0); clusters and grids synchronise with two lines of PTX instead.
"""

from __future__ import annotations

import re

TOOLKIT_HEADERS = frozenset({
    "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "mma.h", "math_constants.h", "cuda_pipeline.h", "cuda_pipeline_primitives.h",
    "cuda_runtime.h", "device_launch_parameters.h", "vector_types.h", "vector_functions.h",
})  # fmt: skip
_TYPES = """#pragma once
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long long uint64_t; typedef unsigned long long uintptr_t; typedef long long intptr_t;
"""
_LIMITS = """#pragma once
#ifndef FLT_MAX
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define DBL_MAX 1.7976931348623158e+308
#define DBL_MIN 2.2250738585072014e-308
#define DBL_EPSILON 2.2204460492503131e-16
#endif
#ifndef INT_MAX
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LLONG_MAX 9223372036854775807ll
#endif
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#endif
"""
_TENSOR_MAP = "#pragma once\nstruct alignas(64) CUtensorMap { unsigned long long opaque[16]; };\n"
OWN_HEADERS = {
    **dict.fromkeys(("stdint.h", "cstdint", "stddef.h", "cstddef"), _TYPES),
    **dict.fromkeys(("float.h", "cfloat", "limits.h", "climits", "math.h", "cmath"), _LIMITS),
    "cuda.h": _TENSOR_MAP,
}

_SPLICE = re.compile(r"\\[ \t]*\r?\n")
_DIRECTIVE = re.compile(r"^(?:\s|/\*.*?\*/)*(?:#|%:|\?\?=)(?:\s|/\*.*?\*/)*(\w+)", re.MULTILINE | re.DOTALL)
_INCLUDE = re.compile(r"^(?:\s|/\*.*?\*/)*(?:#|%:|\?\?=)(?:\s|/\*.*?\*/)*include(.*)$", re.MULTILINE)
_HEADER = re.compile(r"\s*[<\"]([^>\"\n]*)[>\"]")
_CLOCK = re.compile(r"__(?:TIME|DATE|TIMESTAMP)__")


def source_problems(source: str) -> tuple[str, ...]:
    """What is refused in the text: headers that are not in the lists above, directives that reach elsewhere, the time."""
    if "\0" in source:
        return ("a zero byte in the source",)
    text = _SPLICE.sub("", source)
    allowed = TOOLKIT_HEADERS | set(OWN_HEADERS)
    problems = [
        f"directive #{word} is not allowed"
        for word in _DIRECTIVE.findall(text)
        if word in ("line", "embed", "include_next", "import", "ident", "assert") or word.isdigit()
    ]
    for rest in _INCLUDE.findall(text):
        header = _HEADER.match(rest)
        if header is None or header[1].strip() not in allowed:
            problems.append(f"#include{rest[:80]} is not allowed (allowed: {', '.join(sorted(allowed))})")
    problems += [f"{word} makes no two builds equal" for word in set(_CLOCK.findall(text))]
    return tuple(dict.fromkeys(problems))
