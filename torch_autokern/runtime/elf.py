"""What a CPU library may contain, read from its ELF bytes before anything loads it.

Everything is derived from what the dynamic loader itself uses (program headers, dynamic table, relocations), never from section
headers, which may lie. Unknown means refused. Numbers are from the ELF gABI and ``elf.h``.
"""

from __future__ import annotations

import hashlib
import platform
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

MAX_LIBRARY_BYTES = 64 << 20
MAX_SYMBOLS = 1 << 12
IDENTITY_SYMBOL = "autokern_identity"
_PAGE = 4096
_MAX_DYNAMIC = 258
_SEGMENT, _PAIR, _SYMBOL, _RELOCATION = (struct.Struct(layout) for layout in ("<IIQQQQQQ", "<QQ", "<IBBHQQ", "<QQQ"))

_MACHINES = {"x86_64": 62, "aarch64": 183}
_PT_LOAD, _PT_DYNAMIC, _PT_TLS, _PT_STACK, _PT_RELRO = 1, 2, 7, 0x6474E551, 0x6474E552
_SEGMENTS = {1: "LOAD", 2: "DYNAMIC", 4: "NOTE", 6: "PHDR", 0x6474E550: "EH_FRAME", _PT_STACK: "STACK", _PT_RELRO: "RELRO",
             0x6474E553: "PROPERTY"}  # fmt: skip
_X, _W = 1, 2
_NEEDED, _PLTRELSZ, _HASH, _STRTAB, _SYMTAB, _RELA, _RELASZ, _STRSZ, _JMPREL = 1, 2, 4, 5, 6, 7, 8, 10, 23
_FLAGS, _RELRSZ, _RELR, _GNU_HASH = 30, 35, 36, 0x6FFFFEF5
_FORBIDDEN_TAGS = {
    12: "DT_INIT", 13: "DT_FINI", 25: "DT_INIT_ARRAY", 26: "DT_FINI_ARRAY", 32: "DT_PREINIT_ARRAY", 15: "DT_RPATH",
    29: "DT_RUNPATH", 22: "DT_TEXTREL",
}  # fmt: skip
_ALLOWED_TAGS = frozenset({
    0, _NEEDED, _PLTRELSZ, 3, _HASH, _STRTAB, _SYMTAB, _RELA, _RELASZ, 9, _STRSZ, 11, 14, 16, 20, 21, _JMPREL, 24, _FLAGS,
    _RELRSZ, _RELR, 37, _GNU_HASH, 0x6FFFFFF0, 0x6FFFFFF9, 0x6FFFFFFB, 0x6FFFFFFE, 0x6FFFFFFF, 0x70000001, 0x70000003,
    0x70000005,
})  # fmt: skip
_DF_TEXTREL = 4
# 64-bit address, GOT entry, PLT entry, load-relative: no IFUNC, no thread-local storage, no copies.
_RELOCATIONS = {62: frozenset({1, 6, 7, 8}), 183: frozenset({257, 1025, 1026, 1027})}
_FUNCTION, _OBJECT = 2, 1
_LIBRARIES = frozenset({
    "libm.so.6", "libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libc.musl-x86_64.so.1",
    "libc.musl-aarch64.so.1",
})  # fmt: skip
_LIBM = (
    "acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh erf erfc exp exp2 exp10 expm1 fabs fdim floor fma fmax"
    " fmin fmod frexp hypot ilogb ldexp llrint llround log log10 log1p log2 logb lrint lround modf nearbyint nextafter pow"
    " remainder rint round roundeven scalbn sin sincos sinh sqrt tan tanh tgamma trunc"
)
ALLOWED_UNDEFINED = frozenset(
    [name + suffix for name in _LIBM.split() for suffix in ("", "f")] + ["memcpy", "memmove", "memset", "memcmp"]
)


class _Malformed(Exception):
    """The bytes contradict themselves; private, always turned into a broken rule."""


class _Segment(NamedTuple):
    kind: int
    flags: int
    offset: int
    address: int
    file_size: int
    memory_size: int
    end: int


class _Symbol(NamedTuple):
    name: str
    kind: int
    binding: int
    visibility: int
    section: int
    value: int


class _Image:
    """The loaded view of an ELF file: addresses are looked up through its segments, every read is bounds-checked."""

    def __init__(self, binary: bytes) -> None:
        self.binary = binary
        if len(binary) > MAX_LIBRARY_BYTES:
            raise _Malformed(f"{len(binary)} bytes, at most {MAX_LIBRARY_BYTES} are allowed")
        if len(binary) < 64 or binary[:7] != b"\x7fELF\x02\x01\x01":
            raise _Malformed("not a little-endian 64-bit ELF file")
        self.type, self.machine = struct.unpack_from("<HH", binary, 16)
        start, entry_size, count = struct.unpack_from("<Q14xHH", binary, 32)
        if entry_size != 56 or not 1 <= count <= 64:
            raise _Malformed(f"{count} program headers of {entry_size} bytes")
        self.segments = tuple(self._segments(start, count))
        self.loads = [s for s in self.segments if s.kind == _PT_LOAD]
        if any(a.end > b.address for a, b in zip(self.loads, self.loads[1:], strict=False)):
            raise _Malformed("segments overlap or are out of order")
        self.dynamic = self._dynamic()
        self.strings = self._strings()
        self.symbol_count = self._symbol_count()
        self.symbols = self._symbols()

    def _unpack(self, layout: str, offset: int) -> tuple[int, ...]:
        if not 0 <= offset <= len(self.binary) - struct.calcsize(layout):
            raise _Malformed(f"file offset {offset:#x} is outside of the file")
        return struct.unpack_from(layout, self.binary, offset)

    def _table(self, layout: struct.Struct, offset: int, size: int) -> Iterator[tuple[int, ...]]:
        """Entries of `size` bytes of the file. One bounds check for all of them: a library is read in a tenth of a millisecond,
        and a pack has a thousand."""
        if not 0 <= offset <= len(self.binary) - size:
            raise _Malformed(f"file offset {offset:#x} is outside of the file")
        return layout.iter_unpack(memoryview(self.binary)[offset : offset + size])

    def _segments(self, offset: int, count: int) -> Iterator[_Segment]:
        for kind, flags, start, address, _, file_size, memory_size, _ in self._table(_SEGMENT, offset, 56 * count):
            if kind == _PT_LOAD and (start + file_size > len(self.binary) or file_size > memory_size or memory_size > 1 << 32):
                raise _Malformed("a segment reaches past the end of the file")
            if kind == _PT_LOAD and (start - address) % _PAGE:
                raise _Malformed("a segment is not aligned to its page")
            yield _Segment(kind, flags, start, address, file_size, memory_size, address + memory_size)

    def bytes_at(self, address: int, size: int) -> int:
        """File offset of `size` bytes that the file provides at `address`."""
        for load in self.loads:
            if load.address <= address and address + size <= load.address + load.file_size:
                return load.offset + address - load.address
        raise _Malformed(f"address {address:#x} is in no segment")

    def read(self, layout: str, address: int) -> tuple[int, ...]:
        return self._unpack(layout, self.bytes_at(address, struct.calcsize(layout)))

    def flags_at(self, address: int) -> int:
        return next((s.flags for s in self.loads if s.address <= address < s.end), -1)

    def _dynamic(self) -> dict[int, list[int]]:
        tables = [s for s in self.segments if s.kind == _PT_DYNAMIC]
        if len(tables) != 1:
            raise _Malformed(f"{len(tables)} dynamic tables")
        found: dict[int, list[int]] = {}
        size = min(tables[0].memory_size // 16, _MAX_DYNAMIC) * 16
        for tag, value in self._table(_PAIR, self.bytes_at(tables[0].address, size), size):
            if tag == 0:
                return found
            found.setdefault(tag, []).append(value)
        raise _Malformed("the dynamic table has no end")

    def one(self, tag: int, default: int | None = None) -> int:
        values = self.dynamic.get(tag, [])
        if len(values) == 1:
            return values[0]
        if not values and default is not None:
            return default
        raise _Malformed(f"dynamic tag {tag:#x} is there {len(values)} times")

    def _strings(self) -> tuple[int, int]:
        """(file offset, size) of the string table."""
        table, size = self.one(_STRTAB), self.one(_STRSZ)
        if size > MAX_LIBRARY_BYTES:
            raise _Malformed(f"string table of {size} bytes")
        return self.bytes_at(table, size), size

    def text(self, index: int) -> str:
        start, size = self.strings
        if not 0 <= index < size:
            raise _Malformed(f"string {index} is outside of the string table")
        end = self.binary.find(b"\0", start + index, start + size)
        if end < 0:
            raise _Malformed("a string has no end")
        return self.binary[start + index : end].decode("ascii", "backslashreplace")

    def _symbols(self) -> list[_Symbol]:
        table, count = self.one(_SYMTAB), self.symbol_count
        found: list[_Symbol] = []
        if count < 2:
            return found
        size = 24 * (count - 1)
        for name, info, other, section, value, _ in self._table(_SYMBOL, self.bytes_at(table + 24, size), size):
            found.append(_Symbol(self.text(name), info & 15, info >> 4, other & 3, section, value))
        return found

    def _symbol_count(self) -> int:
        """Number of symbols, as the hash tables have it."""
        counts = []
        if _HASH in self.dynamic:
            counts.append(self.read("<II", self.one(_HASH))[1])
        if _GNU_HASH in self.dynamic:
            counts.append(self._gnu_symbol_count(self.one(_GNU_HASH)))
        if not counts:
            raise _Malformed("no symbol hash table")
        if len(set(counts)) > 1 or counts[0] > MAX_SYMBOLS:
            raise _Malformed(f"symbol counts {counts}")
        return counts[0]

    def _gnu_symbol_count(self, address: int) -> int:
        buckets, first, bloom, _ = self.read("<IIII", address)
        if max(buckets, first, bloom) > MAX_SYMBOLS:
            raise _Malformed("the symbol hash table is too large")
        at = address + 16 + 8 * bloom
        last = max(self.read(f"<{buckets}I", at), default=0)
        if last < first:
            return first
        chains = at + 4 * buckets
        while not self.read("<I", chains + 4 * (last - first))[0] & 1:
            last += 1
        return last + 1

    def relocations(self) -> Iterable[tuple[int, int, int]]:
        """(address, type, symbol index) of every relocation with an addend."""
        for start, size in ((self.one(_RELA, 0), self.one(_RELASZ, 0)), (self.one(_JMPREL, 0), self.one(_PLTRELSZ, 0))):
            if size % 24 or size > MAX_LIBRARY_BYTES:
                raise _Malformed(f"relocation table of {size} bytes")
            if size:
                for address, info, _ in self._table(_RELOCATION, self.bytes_at(start, size), size):
                    yield address, info & 0xFFFFFFFF, info >> 32


def check_cpu_library(binary: bytes, entries: Iterable[str], *, machine: str | None = None) -> tuple[str, ...]:
    """Check a CPU library against the rules of `judge.md` ("The box").

    It may only compute: entries and identity exported; nothing imported but libm functions and the memcpy family; no code that
    runs at load or unload; no thread-local and no writable memory that outlives relocation; no segment both writable and
    executable; no search paths; nothing the loader would resolve by calling into it.

    Args:
        binary: the file's bytes.
        entries: names of the functions that the launch plan calls.
        machine: "x86_64" or "aarch64"; this machine's by default.

    Returns:
        The rules that it breaks, in words; empty when it may be loaded. Malformed bytes break a rule, they never raise.
    """
    return read_cpu_library(binary, entries, machine=machine).problems


@dataclass(frozen=True)
class LibraryInfo:
    """A CPU library: the rules that it breaks, and, where it breaks none, the symbols that it wants from outside and the
    libraries that it names as needed, sorted."""

    problems: tuple[str, ...]
    imports: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()


def read_cpu_library(
    binary: bytes, entries: Iterable[str], *, machine: str | None = None, digest: str | None = None
) -> LibraryInfo:
    """`check_cpu_library`, and what else its bytes say. Equal bytes are read once: a pack's kernel is asked about when its
    claims are checked and again when it is loaded. `digest` is the SHA-256 of these very bytes, for who has checked it."""
    key = (digest or hashlib.sha256(binary).hexdigest(), tuple(entries), machine or platform.machine())
    if key not in _read_before:
        if len(_read_before) >= _REMEMBERED:
            _read_before.clear()
        _read_before[key] = _read_library(binary, key[1], key[2])
    return _read_before[key]


_REMEMBERED = 8192
_read_before: dict[tuple[str, tuple[str, ...], str], LibraryInfo] = {}


def _read_library(binary: bytes, entries: tuple[str, ...], machine: str) -> LibraryInfo:
    try:
        image = _Image(binary)
        problems = [*_check_header(image, machine), *_check_segments(image), *_check_dynamic(image)]
        problems += _check_symbols(image, entries)
        problems += _check_relocations(image)
        undefined = {symbol.name for symbol in image.symbols if symbol.section == 0}
        needed = {image.text(index) for index in image.dynamic.get(_NEEDED, [])}
    except _Malformed as error:
        return LibraryInfo((f"malformed: {error}",))
    if problems:
        return LibraryInfo(tuple(dict.fromkeys(problems)))
    return LibraryInfo((), tuple(sorted(undefined)), tuple(sorted(needed)))


def _check_header(image: _Image, machine: str) -> Iterable[str]:
    if image.type != 3:
        yield f"ELF type {image.type}, expected a shared object"
    if image.machine != _MACHINES.get(machine, -1):
        yield f"ELF machine {image.machine}, expected {machine}"


def _check_segments(image: _Image) -> Iterable[str]:
    relro = [s for s in image.segments if s.kind == _PT_RELRO]
    stacks = [s for s in image.segments if s.kind == _PT_STACK]
    if len(stacks) != 1 or stacks[0].flags & _X:
        yield "executable stack"
    for segment in image.segments:
        if segment.kind == _PT_TLS:
            yield "thread-local storage"
        elif segment.kind not in _SEGMENTS:
            yield f"unknown segment type {segment.kind:#x}"
        if segment.kind != _PT_LOAD or not segment.flags & _W:
            continue
        if segment.flags & _X:
            yield "a segment is writable and executable"
        # The loader protects whole pages only: from the page of the start up to the last full page.
        if not any(r.address // _PAGE * _PAGE <= segment.address and segment.end <= _last_page(r.end) for r in relro):
            yield "writable global state"


def _last_page(address: int) -> int:
    return address // _PAGE * _PAGE


def _check_dynamic(image: _Image) -> Iterable[str]:
    for tag in image.dynamic:
        if tag in _FORBIDDEN_TAGS:
            yield f"{_FORBIDDEN_TAGS[tag]} is not allowed"
        elif tag not in _ALLOWED_TAGS:
            yield f"unknown dynamic tag {tag:#x}"
    if image.one(_FLAGS, 0) & _DF_TEXTREL:
        yield "DT_TEXTREL is not allowed"
    for index in image.dynamic.get(_NEEDED, []):
        if image.text(index) not in _LIBRARIES:
            yield f"needs the library {image.text(index)}"


def _check_symbols(image: _Image, entries: tuple[str, ...]) -> Iterable[str]:
    symbols = image.symbols
    # Global or weak, default visibility, defined here.
    exported = {s.name: s for s in symbols if s.section != 0 and s.binding in (1, 2) and s.visibility == 0}
    for symbol in symbols:
        if symbol.section == 0 and symbol.name not in ALLOWED_UNDEFINED:
            yield f"undefined symbol {symbol.name} (allowed: libm functions, memcpy, memmove, memset, memcmp)"
        if symbol.kind in (6, 10):
            yield f"symbol {symbol.name} is {'thread-local' if symbol.kind == 6 else 'an indirect function'}"
    for name, kind, executable in (*((entry, _FUNCTION, True) for entry in entries), (IDENTITY_SYMBOL, _OBJECT, False)):
        symbol_found = exported.get(name)
        if symbol_found is None:
            yield f"does not export {name}"
            continue
        flags = image.flags_at(symbol_found.value)
        if symbol_found.kind != kind or flags < 0 or bool(flags & _X) != executable or symbol_found.section >= 0xFF00:
            yield f"{name} is not a {'function' if executable else 'constant'}"


def _check_relocations(image: _Image) -> Iterable[str]:
    allowed = _RELOCATIONS.get(image.machine, frozenset())
    count = image.symbol_count
    for address, kind, symbol in image.relocations():
        if kind not in allowed:
            yield f"relocation type {kind} is not allowed"
        if symbol >= count:
            yield "a relocation names a symbol outside of the table"
        flags = image.flags_at(address)
        if flags < 0 or not flags & _W:
            yield "a relocation writes outside of writable memory"
    size = image.one(_RELRSZ, 0)
    if size % 8 or size > MAX_LIBRARY_BYTES:
        raise _Malformed(f"relative relocation table of {size} bytes")
    if size:
        image.bytes_at(image.one(_RELR), size)
