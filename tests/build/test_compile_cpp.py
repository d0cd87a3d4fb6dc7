"""Source to library: what compiles, what is refused and by which rule, and that nothing of the machine gets in or out."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from torch_autokern.build.candidate import Candidate
from torch_autokern.build.compile_cpp import compile_cpp, find_compiler
from torch_autokern.errors import BuildError, ToolchainError
from torch_autokern.runtime.elf import check_cpu_library
from torch_autokern.runtime.plan import CpuStep, InputArg, LaunchPlan, OutputArg
from torch_autokern.store.key import Target

ARCH = "x86-64-v2" if platform.machine() == "x86_64" else "aarch64"
TARGET = Target("cpu", "any", ARCH, 2)
DOUBLE = """#include <cstdint>
#include <cmath>
extern "C" void twice(int64_t begin, int64_t end, void* const* pointers) {
  const float* x = static_cast<const float*>(pointers[0]);
  float* y = static_cast<float*>(pointers[1]);
  for (int64_t i = begin; i < end; ++i) y[i] = 2.0f * std::exp(x[i]);
}
"""


def candidate(source: str, entry: str = "twice") -> Candidate:
    plan = LaunchPlan(1, (CpuStep(entry, 64, 1, (InputArg(0), OutputArg(0))),))
    return Candidate("cpp", source, plan, "double it", "test")


def refusal(source: str) -> str:
    with pytest.raises(BuildError) as caught:
        compile_cpp(candidate(source), TARGET)
    return str(caught.value)


def test_candidate_compiles_in_the_box_and_names_itself() -> None:
    artifact = compile_cpp(candidate(DOUBLE), TARGET)
    assert artifact.identity == candidate(DOUBLE).candidate_id
    assert artifact.identity.encode() in artifact.binary
    assert "seccomp" in artifact.box_level
    assert find_compiler().version == artifact.tools["compiler"]


def test_two_builds_are_equal_byte_for_byte_and_carry_no_path() -> None:
    first, second = (compile_cpp(candidate(DOUBLE + "\nconst char* where() { return __FILE__; }"), TARGET) for _ in range(2))
    assert first.binary == second.binary
    assert b"/tmp" not in first.binary and b"autokern-build" not in first.binary


def test_error_carries_the_compilers_words_and_the_candidates_line() -> None:
    words = refusal(DOUBLE + "int broken = ;\n")
    assert "candidate.cpp:8:14: error:" in words and "/" not in words.replace("candidate.cpp", "")


def test_entry_with_another_signature_does_not_compile() -> None:
    assert "twice" in refusal('extern "C" void twice(int begin, int end, void* const* pointers) {}')


def test_missing_entry_is_refused() -> None:
    assert "does not export twice" in refusal("constexpr int nothing = 0;")


@pytest.mark.parametrize(
    "trick",
    [
        'void g() { asm("nop"); }',
        'void g() { __asm__ volatile("nop"); }',
        'void g() { __as\\\nm__("nop"); }',
        '#define JOIN(a, b) a##b\nvoid g() { JOIN(as, m)("nop"); }',
        'void g() { JOINED("nop"); }\n#define JOINED __asm',
        '#define WORD asm\nvoid g() { WORD("nop"); }',
        'extern int g __asm__("g\\n.incbin \\"/etc/passwd\\"");',
        '__attribute__((section(".text,\\"ax\\",@progbits\\n#"))) const int g = 1;',
        'void g() { %:define A asm\n A("nop"); }',
        '/* */ asm(".incbin \\"/etc/passwd\\"");',
        'R"(raw)"; asm("nop");',
    ],
)  # fmt: skip
def test_inline_assembly_is_refused_however_it_is_written(trick: str) -> None:
    words = refusal(DOUBLE + trick + "\n")
    assert "root:" not in words


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 builtins")
@pytest.mark.parametrize("builtin", ["__builtin_ia32_rdtsc()", "__builtin_thread_pointer() != nullptr"])
def test_builtins_that_read_clock_or_thread_are_refused(builtin: str) -> None:
    code = f'#include <cstdint>\nextern "C" void twice(int64_t, int64_t, void* const* p) {{ *(long*)p[0] = {builtin}; }}'
    assert refusal(code)


@pytest.mark.parametrize(
    "line",
    [
        '#include "/etc/passwd"',
        "#include </etc/passwd>",
        "#define P </etc/passwd>\n#include P",
        '# /* */ include "/etc/passwd"',
        '%:include "/etc/passwd"',
        '#inc\\\nlude "/etc/passwd"',
        '#embed "/etc/passwd"',
        '#line 1 "/usr/include/trusted.h"',
    ],
)
def test_private_files_are_neither_read_nor_leaked(line: str) -> None:
    secret = Path("/etc/passwd").read_text().splitlines()[0]
    words = refusal(DOUBLE + line + "\n")
    assert secret not in words and "root" not in words


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        (
            'static int calls; extern "C" __attribute__((visibility("default"))) int g() { return ++calls; }',
            "writable global state",
        ),
        (
            'extern "C" int open(const char*, int, ...); int __attribute__((used)) g() { return open("x", 0); }',
            "undefined symbol open",
        ),
        ("struct A { A(); int x; }; A::A() : x(__builtin_rand()) {} A a;", "does not compile|undefined|DT_INIT_ARRAY|writable"),
    ],
)
def test_library_that_breaks_a_rule_is_refused(code: str, rule: str) -> None:
    words = refusal(DOUBLE + code)
    assert any(part in words for part in rule.split("|"))


def test_endless_include_and_template_bomb_end_at_the_limits() -> None:
    bomb = "template <long N> struct B { static const long v = B<N - 1>::v + B<N / 2 - 7>::v; };\n"
    words = refusal(DOUBLE + bomb + "const long v = B<1000000000>::v;\n")
    assert "template instantiation depth" in words or "stopped" in words


def test_huge_object_is_stopped_before_it_fills_the_disk() -> None:
    words = refusal(DOUBLE + 'extern "C" __attribute__((used)) const char big[1ull << 31] = {1};')
    assert "stopped" in words and "File too large" in words


def test_no_compiler_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("AUTOKERN_CXX", raising=False)
    with pytest.raises(ToolchainError) as caught:
        compile_cpp(candidate(DOUBLE), TARGET)
    assert str(caught.value) == (
        "no C++ compiler found (looked for c++, g++, clang++): install one, for example: apt install g++; calls stay stock"
    )


def test_compiler_that_was_asked_for_but_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOKERN_CXX", "/nowhere/c++")
    with pytest.raises(ToolchainError, match="AUTOKERN_CXX=/nowhere/c\\+\\+"):
        find_compiler()


def test_target_of_another_machine_is_refused() -> None:
    with pytest.raises(ToolchainError, match="sm_90a"):
        compile_cpp(candidate(DOUBLE), Target("cuda", "x", "sm_90a", 0))


def test_sanitized_build_is_for_the_judge_only() -> None:
    artifact = compile_cpp(candidate(DOUBLE), TARGET, sanitizers=("undefined",))
    assert "-fsanitize=undefined" in artifact.tools["flags"]
    assert isinstance(check_cpu_library(artifact.binary, ["twice"]), tuple)
