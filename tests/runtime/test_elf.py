"""The static rules for CPU libraries: each is broken once, and no bytes make the reader raise."""

from __future__ import annotations

import platform
import random
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_autokern.build.compile_cpp import find_compiler
from torch_autokern.runtime.elf import check_cpu_library

GOOD = """
extern "C" __attribute__((visibility("default"))) const char autokern_identity[] = "x";
extern "C" float expf(float);
extern "C" __attribute__((visibility("default"))) void entry(long b, long e, void* const* p) {
  for (long i = b; i < e; ++i) static_cast<float*>(p[1])[i] = expf(static_cast<float*>(p[0])[i]);
}
"""
HARDENED = ("-nostartfiles", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack", "-fno-plt", "-fno-threadsafe-statics")


def library(folder: Path, source: str = GOOD, *flags: str, base: tuple[str, ...] = HARDENED) -> bytes:
    (folder / "k.cpp").write_text(source)
    command = [str(find_compiler().path), "-O1", "-fPIC", "-shared", *base, *flags, "k.cpp", "-o", "k.so", "-lm"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return (folder / "k.so").read_bytes()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[bytes]:
    yield library(tmp_path_factory.mktemp("good"), GOOD, "-nodefaultlibs")


def test_library_that_only_computes_breaks_no_rule(good: bytes) -> None:
    assert check_cpu_library(good, ["entry"]) == ()


@pytest.mark.parametrize("style", ["sysv", "gnu", "both"])
def test_every_hash_style_is_read(style: str, tmp_path: Path) -> None:
    assert check_cpu_library(library(tmp_path, GOOD, f"-Wl,--hash-style={style}", "-nodefaultlibs"), ["entry"]) == ()


@pytest.mark.parametrize(
    ("extra", "flags", "rule"),
    [
        ("int counter = 3;", (), "writable global state"),
        ("int zeros[9000];", (), "writable global state"),
        ("__attribute__((constructor)) static void start() { volatile int x = 1; (void)x; }", (), "DT_INIT_ARRAY"),
        ("__attribute__((destructor)) static void stop() { volatile int x = 1; (void)x; }", (), "DT_FINI_ARRAY"),
        ('extern "C" void begin() {}', ("-Wl,-init,begin",), "DT_INIT is not allowed"),
        ("__thread int mine; int* where() { return &mine; }", (), "thread-local storage"),
        ('extern "C" int system(const char*); int run() { return system("x"); }', (), "undefined symbol system"),
        ('static int one() { return 1; } extern "C" void* pick() { return (void*)one; }\n'
         'extern "C" int which() __attribute__((ifunc("pick")));', (), "indirect function"),
        ("", ("-Wl,-z,execstack",), "executable stack"),
        ("", ("-Wl,-rpath,/tmp",), "DT_RUNPATH"),
        ("", ("-Wl,--no-as-needed", "-lpthread", "-ldl", "-lstdc++"), "needs the library libstdc++.so.6"),
        ("", ("-Wl,-z,norelro", "-Wl,-z,lazy"), "writable global state"),
    ],
)  # fmt: skip
def test_each_rule_is_named_when_broken(extra: str, flags: tuple[str, ...], rule: str, tmp_path: Path) -> None:
    problems = check_cpu_library(library(tmp_path, GOOD + extra, *flags), ["entry"])
    assert any(part in problem for problem in problems for part in rule.split("|")), problems


def test_segment_that_is_writable_and_executable_is_named(good: bytes) -> None:
    changed = bytearray(good)
    for at in range(64, 64 + 56 * changed[56], 56):
        kind, flags = struct.unpack_from("<II", changed, at)
        if kind == 1 and flags & 2:
            struct.pack_into("<I", changed, at + 4, 7)
    assert "a segment is writable and executable" in check_cpu_library(bytes(changed), ["entry"])


def test_missing_entry_and_missing_identity_are_named(good: bytes, tmp_path: Path) -> None:
    assert check_cpu_library(good, ["other"]) == ("does not export other",)
    anonymous = library(tmp_path, GOOD.replace("autokern_identity", "somebody"), "-nodefaultlibs")
    assert check_cpu_library(anonymous, ["entry"]) == ("does not export autokern_identity",)


def test_entry_that_is_data_is_refused(good: bytes) -> None:
    assert check_cpu_library(good, ["autokern_identity"]) == ("autokern_identity is not a function",)


def test_library_of_another_machine_is_refused(good: bytes) -> None:
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    assert any("machine" in problem for problem in check_cpu_library(good, ["entry"], machine=other))


def test_executable_file_of_the_system_is_refused() -> None:
    assert check_cpu_library(Path("/bin/sh").resolve().read_bytes(), ["entry"])


def test_mutated_libraries_never_raise(good: bytes) -> None:
    source = random.Random(20)
    for round_number in range(600):
        mutated = bytearray(good)
        kind = round_number % 3
        if kind == 0:
            del mutated[source.randrange(len(mutated)) :]
        else:
            # The first kilobyte holds headers and tables; there a change means something.
            span = 1024 if kind == 1 else len(mutated)
            for _ in range(source.randint(1, 8)):
                mutated[source.randrange(span)] = source.randrange(256)
        problems = check_cpu_library(bytes(mutated), ["entry"])
        assert isinstance(problems, tuple) and all(isinstance(problem, str) for problem in problems)


@pytest.mark.parametrize("size", [0, 1, 16, 63, 64, 65])
def test_short_files_are_malformed(size: int, good: bytes) -> None:
    assert check_cpu_library(good[:size], ["entry"])[0].startswith("malformed")
