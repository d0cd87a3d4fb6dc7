"""What a C++ candidate may not say, held by the compiler itself wherever that is possible.

Text is a poor place to look for a keyword (line splices, pasted tokens, raw strings), so the words are *poisoned* for the
preprocessor after the candidate's headers were read, the compiler's own assembly output is searched for what still came
through, and the finished library is checked by `runtime/elf.py`.
"""

from __future__ import annotations

import re

from torch_autokern.build.candidate import Candidate
from torch_autokern.runtime.plan import entries

# Freestanding headers and those that only declare; they are read before the poison, so their own use of it stands.
HEADERS = frozenset({
    "algorithm", "array", "bit", "cfenv", "cfloat", "climits", "cmath", "cstddef", "cstdint", "cstdlib", "cstring",
    "functional", "initializer_list", "iterator", "limits", "numeric", "tuple", "type_traits", "utility", "float.h",
    "limits.h", "math.h", "stddef.h", "stdint.h", "stdlib.h", "string.h", "immintrin.h", "x86intrin.h", "xmmintrin.h",
    "emmintrin.h", "arm_neon.h", "arm_sve.h",
})  # fmt: skip
# `section` could smuggle assembler text in a name; the builtins read the caller's frame or thread.
_POISON = (
    "asm __asm __asm__ section __section__ ifunc __ifunc__ constructor __constructor__ destructor __destructor__ init_priority"
    " thread_local __thread __builtin_return_address __builtin_frame_address __builtin_thread_pointer __builtin_eh_return"
    " __builtin_apply __builtin_apply_args __builtin_unwind_init __builtin_dwarf_cfa __builtin_extract_return_addr"
    " __builtin_setjmp __builtin_longjmp"
)
_SPLICE = re.compile(r"\\[ \t]*\r?\n")
_DIRECTIVE = re.compile(r"^(?:\s|/\*.*?\*/)*(?:#|%:|\?\?=)(?:\s|/\*.*?\*/)*(\w+)", re.MULTILINE | re.DOTALL)
_OTHER_INCLUDE = re.compile(r"^\s*(?:#|%:)\s*include\s*(?![<\"\s])", re.MULTILINE)
_INCLUDE = re.compile(r"^\s*(?:#|%:)\s*include\s*([<\"][^>\"\n]*[>\"])", re.MULTILINE)

_INLINE_ASSEMBLY = re.compile(r"^\s*(?:#|//|@|;)\s*APP\b", re.MULTILINE)
_ASSEMBLER_DIRECTIVE = re.compile(
    r"^\s*\.(incbin|include|macro|rept|irp|irpc|init_array|fini_array|preinit_array|ctors|dtors|symver|reloc)\b", re.MULTILINE
)
_SPECIAL_SECTION = re.compile(r"^\s*\.section\s+\.(init|fini|ctors|dtors|preinit|tdata|tbss)", re.MULTILINE)
# Calls into the kernel, clocks, the thread pointer: nothing that computes.
_INSTRUCTION = re.compile(
    r"^\s+(syscall|sysenter|sysexit|int|int3|iretq?|rdtscp?|rdpmc|rdpid|rdpkru|wrpkru|cpuid|xgetbv|xsetbv|rdfsbase[lq]?|rdgsbase[lq]?"
    r"|wrfsbase[lq]?|wrgsbase[lq]?|svc|hvc|smc|mrs|msr)\b",
    re.MULTILINE,
)
_THREAD_POINTER = re.compile(r"^\s+[a-z]\w*\s[^\"#\n]*%[fg]s:", re.MULTILINE)


def source_problems(source: str) -> tuple[str, ...]:
    """What is refused in the text itself: bytes that are no C++ text, `#line`, `#embed`, `#include_next`, headers elsewhere."""
    if "\0" in source:
        return ("a zero byte in the source",)
    text = _SPLICE.sub("", source)
    problems = []
    for match in _DIRECTIVE.finditer(text):
        word = match[1]
        if word in ("line", "embed", "include_next", "import", "ident", "sccs", "assert") or word.isdigit():
            problems.append(f"directive #{word} is not allowed")
    if _OTHER_INCLUDE.search(text):
        problems.append("#include of a macro is not allowed")
    for name in _INCLUDE.findall(text):
        if name[1:-1].strip() not in HEADERS:
            problems.append(f"#include {name[:80]} is not allowed (allowed: {', '.join(sorted(HEADERS))})")
    return tuple(dict.fromkeys(problems))


def build_unit(candidate: Candidate) -> bytes:
    """The translation unit: the candidate's headers, the poison, identity and entries, then the source as it is.

    The identity stands first, so no unfinished comment or macro of the source can take it away.
    """
    names = {name[1:-1].strip() for name in _INCLUDE.findall(_SPLICE.sub("", candidate.source))}
    headers = "".join(f"#if __has_include(<{name}>)\n#include <{name}>\n#endif\n" for name in sorted(names & HEADERS))
    visible = '__attribute__((visibility("default")))'
    exported = "".join(
        f'extern "C" {visible} void {entry}(__INT64_TYPE__, __INT64_TYPE__, void* const*);\n'
        for entry in entries(candidate.plan)
    )
    identity = f'extern "C" {visible} const char autokern_identity[] = "{candidate.candidate_id}";\n'
    prelude = f"{headers}{identity}{exported}#pragma GCC poison {_POISON}\n"
    return f'{prelude}#line 1 "candidate.cpp"\n{candidate.source}\n'.encode()


def assembly_problems(assembly: str) -> tuple[str, ...]:
    """What is refused in the compiler's assembly output."""
    problems = []
    if _INLINE_ASSEMBLY.search(assembly):
        problems.append("inline assembly is not allowed")
    problems += [f"assembler directive .{name} is not allowed" for name in set(_ASSEMBLER_DIRECTIVE.findall(assembly))]
    problems += [f"section .{name} is not allowed" for name in set(_SPECIAL_SECTION.findall(assembly))]
    problems += [f"instruction {name} is not allowed" for name in set(_INSTRUCTION.findall(assembly))]
    if _THREAD_POINTER.search(assembly):
        problems.append("access to the thread's control block is not allowed")
    return tuple(problems)
