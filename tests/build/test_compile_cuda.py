"""CUDA C++ to cubin: what compiles, what is refused and by which rule, and that nothing of the machine gets in or out."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest
from gpu_sources import CUDA_SOURCE, cuda, needs_nvrtc

from torch_autokern.build import cuda_toolkit
from torch_autokern.build.box import Limits
from torch_autokern.build.compile_cuda import compile_cuda, spills_of
from torch_autokern.build.cuda_source import OWN_HEADERS, TOOLKIT_HEADERS
from torch_autokern.build.ptx_globals import without_unused_globals
from torch_autokern.errors import BuildError, StaticRuleError, ToolchainError
from torch_autokern.runtime.cubin import read_cubin
from torch_autokern.runtime.plan import InputArg, KernelStep, LaunchPlan, OutputArg


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    needs_nvrtc()


def refusal(source: str) -> str:
    with pytest.raises(BuildError) as caught:
        compile_cuda(cuda(source))
    return str(caught.value)


def test_candidate_compiles_in_the_box_with_its_resources() -> None:
    artifact = compile_cuda(cuda())
    assert (artifact.kind, artifact.arch, artifact.identity) == ("cuda", "sm_90a", cuda().candidate_id)
    assert "seccomp" in artifact.box_level
    assert artifact.tools["compiler"].startswith("nvrtc ") and "--gpu-architecture=sm_90a" in artifact.tools["flags"]
    resources = artifact.resources["scale"]
    assert (resources.static_shared_bytes, resources.stack_bytes, resources.spilled_bytes) == (1024, 0, 0)
    assert resources.registers == read_cubin(artifact.binary).entries["scale"].registers


def test_two_builds_are_equal_byte_for_byte_and_carry_no_path() -> None:
    source = CUDA_SOURCE.replace("* by;", "* by + __FILE__[n % 9];")
    first, second = (compile_cuda(cuda(CUDA_SOURCE)).binary for _ in range(2))
    assert first == second
    for word in (b"/tmp", b"autokern-build", sys.prefix.encode(), str(Path.home()).encode(), os.uname().nodename.encode()):
        assert word not in first
    assert "global variables" in refusal(source)  # a text constant is one


def test_error_carries_the_compilers_words_and_the_candidates_line() -> None:
    words = refusal(CUDA_SOURCE + "int broken = ;\n")
    assert "kernel.cu(9): error:" in words and "int broken = ;" in words and sys.prefix not in words


def test_error_inside_a_toolkit_header_shows_no_folder() -> None:
    words = refusal("#define __half broken +\n" + CUDA_SOURCE)
    assert "error" in words and sys.prefix not in words and "site-packages" not in words


def test_missing_entry_is_refused_with_what_is_there() -> None:
    assert "has no kernel scale (it has other)" in refusal('extern "C" __global__ void other(float* y) { y[0] = 1; }')
    assert "has no kernel scale" in refusal("__global__ void scale(float* y) { y[0] = 1; }")  # a C++ name


@pytest.mark.parametrize(
    "line",
    [
        '#include "/etc/passwd"',
        "#include </etc/passwd>",
        '#include "../../../../../etc/passwd"',
        "#define P </etc/passwd>\n#include P",
        '# /* */ include "/etc/passwd"',
        '%:include "/etc/passwd"',
        '#inc\\\nlude "/etc/passwd"',
        '#embed "/etc/passwd"',
        '#include_next "/etc/passwd"',
        '#line 1 "/usr/include/trusted.h"',
        "#if __has_include(</etc/passwd>)\n#include </etc/passwd>\n#endif",
        '_Pragma("include \\"/etc/passwd\\"")\n#include "/etc/passwd"',
    ],
)
def test_private_files_are_neither_read_nor_leaked(line: str) -> None:
    assert "root:" not in refusal(f"{line}\n{CUDA_SOURCE}")


def test_private_file_is_out_of_reach_for_the_compiler_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the rules of the text the box still holds."""
    secret = tmp_path / "secret.h"
    secret.write_text("#error the secret was read\n")
    monkeypatch.setattr("torch_autokern.build.compile_cuda.source_problems", lambda source: ())
    assert "cannot open source file" in refusal(f'#include "{secret}"\n{CUDA_SOURCE}')
    assert "root:" not in refusal(f'#include "/etc/passwd"\n{CUDA_SOURCE}')


def test_headers_that_plant_global_variables_are_refused_by_name() -> None:
    assert "#include <cooperative_groups.h> is not allowed" in refusal(f"#include <cooperative_groups.h>\n{CUDA_SOURCE}")


def test_build_time_is_refused() -> None:
    assert "__TIME__ makes no two builds equal" in refusal(CUDA_SOURCE.replace("* by;", "* by + __TIME__[7];"))


@pytest.mark.parametrize("header", sorted(TOOLKIT_HEADERS | set(OWN_HEADERS)))
def test_allowed_headers_compile(header: str) -> None:
    assert compile_cuda(cuda(f"#include <{header}>\n{CUDA_SOURCE}")).binary


def test_fixed_width_types_limits_and_tensor_maps_are_there() -> None:
    source = """#include <cstdint>
#include <cfloat>
#include <cuda.h>
static_assert(sizeof(uint8_t) == 1 && sizeof(int64_t) == 8 && sizeof(CUtensorMap) == 128 && alignof(CUtensorMap) == 64);
extern "C" __global__ void scale(const float* x, float* y, uint32_t n, float by) { y[n] = fminf(x[n], FLT_MAX) + INFINITY; }
"""
    assert compile_cuda(cuda(source)).resources["scale"].stack_bytes == 0


def test_spills_are_reported() -> None:
    values = (
        "".join(f"float a{i} = x[{i}];" for i in range(60)) + "__syncthreads();" + "".join(f"y[{i}] = a{i};" for i in range(60))
    )
    source = (
        'extern "C" __global__ void __launch_bounds__(1024, 2)'
        f" scale(const volatile float* x, volatile float* y, int n, float by) {{ {values} }}"
    )
    resources = compile_cuda(cuda(source)).resources["scale"]
    assert resources.registers <= 32 and resources.spilled_bytes > 0 and resources.stack_bytes > 0


def test_spill_report_is_read_as_the_assembler_prints_it() -> None:
    log = """ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
    112 bytes stack frame, 108 bytes spill stores, 12 bytes spill loads
ptxas info    : Function properties for b
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
    assert spills_of(log) == {"a": 120, "b": 0}


def test_constants_at_namespace_scope_are_no_global_variables() -> None:
    """NVRTC emits them as such, used or not; state that outlives a launch stays refused beside them."""
    constants = (
        "constexpr int N = 4;\nstruct S { static constexpr long long M = 1ll << 40; };\nconstexpr float T[3] = {1, 2, 3};\n"
    )
    source = constants + CUDA_SOURCE.replace("* by;", "* by * N + S::M + T[1];")
    artifact = compile_cuda(cuda(source))
    assert read_cubin(artifact.binary).global_bytes == 0
    assert artifact.resources["scale"].spilled_bytes == 0
    assert compile_cuda(cuda(source)).binary == artifact.binary
    kept = refusal(constants + "__device__ int calls;\n" + CUDA_SOURCE.replace("* by;", "* by * N + calls++;"))
    assert "4 bytes of global variables" in kept


def test_two_shared_arrays_beside_such_constants_are_no_debug_information() -> None:
    needs_nvrtc()
    two = CUDA_SOURCE.replace(
        "  int i =", "  __shared__ float more[32];\n  if (threadIdx.x < N) more[threadIdx.x] = by;\n  int i ="
    )
    two = two.replace("* by", "* more[threadIdx.x % N]").replace('extern "C"', 'constexpr int N = 32;\nextern "C"', 1)
    assert compile_cuda(cuda(two)).resources["scale"].static_shared_bytes == 1024 + 128


def test_without_a_linker_such_constants_are_refused_and_plain_kernels_build(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cuda_toolkit.find_nvrtc()
    bare = dataclasses.replace(found, libraries=found.libraries[:2], links=False)
    monkeypatch.setattr("torch_autokern.build.compile_cuda.find_nvrtc", lambda: bare)
    assert compile_cuda(cuda()).binary
    assert "bytes of global variables" in refusal("constexpr int N = 4;\n" + CUDA_SOURCE)


@pytest.mark.parametrize(
    ("line", "stays"),
    [
        (".global .align 4 .u32 N = 4;", False),
        (".global .align 4 .u32 M;", True),
        (".visible .global .align 8 .b8 A[16] = {1, 0, 0};", False),
        (".global .align 4 .b8 $str[4] = {1};", False),
        (".global .align 1 .b8 _ZN4cuda3std3__45valueE = 1;", False),
    ],
)
def test_only_variables_that_nothing_names_are_dropped(line: str, stays: bool) -> None:
    ptx = f".version 9.0\n{line}\n.visible .entry k()\n{{\n\tld.global.u32 %r2, [M];\n\tret;\n}}\n"
    assert (line in without_unused_globals(ptx)) is stays
    assert "ld.global.u32 %r2, [M];" in without_unused_globals(ptx)


def test_several_entries_share_a_cubin() -> None:
    source = CUDA_SOURCE + 'extern "C" __global__ void copy(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }'
    first = cuda().plan.steps[0]
    second = KernelStep("copy", (1, 1, 1), (32, 1, 1), (InputArg(0), OutputArg(0)))
    both = cuda(source)
    artifact = compile_cuda(type(both)("cuda", source, LaunchPlan(1, (first, second)), "both", "test"))
    assert sorted(artifact.resources) == ["copy", "scale"]


def test_template_bomb_ends_at_a_limit() -> None:
    bomb = "template <long N> struct B { static const long v = B<N - 1>::v + B<N / 2 - 7>::v; };\n"
    words = refusal(CUDA_SOURCE + bomb + "__device__ const long v = B<1000000000>::v;\n")
    assert "stopped" in words or "depth" in words or "recursi" in words or "ended" in words


def test_unrolling_bomb_ends_at_the_processor_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every level multiplies the code by 64 before anything could fold it. The limit is 60 s; 4 s show the same."""
    monkeypatch.setattr("torch_autokern.build.boxed_python.Limits", lambda: Limits(cpu_seconds=4, wall_seconds=20))
    bomb = "template <int D> struct F { static __device__ __forceinline__ float f(float v, float* y) {\n" + "".join(
        f"v = F<D - 1>::f(__sinf(v) + {i}.f, y); y[{i}] = v;\n" for i in range(64)
    )
    bomb += "return v; } };\ntemplate <> struct F<0> { static __device__ float f(float v, float*) { return __cosf(v); } };\n"
    words = refusal(bomb + 'extern "C" __global__ void scale(float* x, float* y, int n, float by) { F<5>::f(by, y); }')
    assert "stopped" in words or "ended" in words


def test_source_that_is_too_large_is_refused() -> None:
    assert "source has" in refusal(CUDA_SOURCE + "//" + "x" * (1 << 20))


@pytest.mark.parametrize("arch", ["sm_9", "90a", "sm_90b", "compute_90"])
def test_architecture_that_is_none_is_one_clear_line(arch: str) -> None:
    with pytest.raises(ToolchainError, match="no CUDA build"):
        compile_cuda(cuda(), arch)


@pytest.mark.parametrize("arch", ["sm_52", "sm_900"])
def test_architecture_that_this_compiler_does_not_know_is_one_clear_line(arch: str) -> None:
    with pytest.raises(ToolchainError, match=f"does not build for {arch}"):
        compile_cuda(cuda(), arch)


def test_missing_toolkit_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_toolkit.find_nvrtc.cache_clear()
    monkeypatch.setattr(cuda_toolkit, "_package", lambda name: None)
    with pytest.raises(ToolchainError, match=r"pip install torch_autokern\[cuda\]"):
        compile_cuda(cuda())
    cuda_toolkit.find_nvrtc.cache_clear()


def test_rule_broken_by_the_cubin_is_a_static_rule() -> None:
    with pytest.raises(StaticRuleError, match="bounded to 256"):
        compile_cuda(cuda(block=(512, 1, 1)))
