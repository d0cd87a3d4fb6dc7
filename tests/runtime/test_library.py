"""Libraries from sealed memory: each its own, none keeps a descriptor, a thread that opens them reports each one's error."""

from __future__ import annotations

import os
import resource

import pytest
from tiny_kernels import artifact, in_a_fork

from torch_autokern.runtime.extension import extension


def library(number: int) -> tuple[bytes, str]:
    """The tests' library with an identity of its own."""
    identity = f"{number:064x}"
    return artifact().binary.replace(artifact().identity.encode(), identity.encode()), identity


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_hundred_libraries_keep_no_descriptor_and_each_is_its_own() -> None:
    """A descriptor's number is given out again, and the dynamic loader knows libraries by name: each name must be new. Loading
    reads the identity back, so a library that was taken for another raises."""
    before = open_descriptors()
    kept = [extension().Library.load(*library(number)) for number in range(100)]
    assert open_descriptors() == before and len(kept) == 100


def test_a_process_with_few_descriptors_loads_many_libraries() -> None:
    def check() -> None:
        limit = open_descriptors() + 8
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        for number in range(1000, 1050):
            extension().Library.load(*library(number))

    in_a_fork(check)


def test_a_library_that_does_not_load_closes_its_descriptor() -> None:
    before = open_descriptors()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="cannot load a kernel library"):
            extension().Library.load(b"no library", "x")
        with pytest.raises(RuntimeError, match="not the one that was verified"):
            extension().Library.load(library(2000)[0], "another")
    assert open_descriptors() == before


def test_an_opener_gives_each_library_or_its_own_error() -> None:
    opener = extension().LibraryOpener()
    good, wrong, broken, last = library(3000), (library(3001)[0], "another"), (b"\x7fELF", "x"), library(3002)
    numbers = [opener.add(*each) for each in (good, wrong, broken, last)]
    assert numbers == [0, 1, 2, 3]
    assert opener.take(3) is not None
    with pytest.raises(RuntimeError, match="not the one that was verified"):
        opener.take(1)
    with pytest.raises(RuntimeError, match="cannot load"):
        opener.take(2)
    assert opener.take(0) is not None
    with pytest.raises(RuntimeError, match="never added"):
        opener.take(4)


def test_an_opener_that_nobody_waits_for_ends_with_its_thread() -> None:
    threads = len(os.listdir("/proc/self/task"))
    for start in range(4000, 4060, 20):
        opener = extension().LibraryOpener()
        for number in range(start, start + 20):
            opener.add(*library(number))
        del opener
    assert len(os.listdir("/proc/self/task")) <= threads
